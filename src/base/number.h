/* number.h - text with numbers in it, written and read with a point whatever the locale of the
 * program is.
 * SPDX-License-Identifier: Apache-2.0
 *
 * snprintf and strtod follow setlocale, which belongs to the host: under de_DE they write 23,976
 * and read 23.976 as 23. Code that formats or reads a floating-point number calls these instead. */
#ifndef ESA_BASE_NUMBER_H
#define ESA_BASE_NUMBER_H

#include <locale.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

/* Gives this thread the C locale; returns the one it had. libc keeps the C locale in static memory,
 * so newlocale cannot fail. */
static inline locale_t esa_locale_enter(void)
{
    return uselocale(newlocale(LC_ALL_MASK, "C", (locale_t)0));
}
static inline void esa_locale_leave(locale_t before) { freelocale(uselocale(before)); }

/* vsnprintf and snprintf. */
__attribute__((format(printf, 3, 0))) static inline int esa_text_vformat(char *out, size_t size,
                                                                         const char *format,
                                                                         va_list args)
{
    const locale_t before = esa_locale_enter();
    const int length = vsnprintf(out, size, format, args);
    esa_locale_leave(before);
    return length;
}

__attribute__((format(printf, 3, 4))) static inline int esa_text_format(char *out, size_t size,
                                                                        const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int length = esa_text_vformat(out, size, format, args);
    va_end(args);
    return length;
}

/* strtod. */
static inline double esa_number_read(const char *text, char **end)
{
    const locale_t before = esa_locale_enter();
    const double number = strtod(text, end);
    esa_locale_leave(before);
    return number;
}

#endif
