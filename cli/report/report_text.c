/* report_text.c - a growing text, escaped for HTML where needed, and base64.
 * SPDX-License-Identifier: Apache-2.0 */
#include "report/report.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* Room for n more bytes and a zero; 0: out of memory. */
static int reserve(report_text *t, size_t n)
{
    if (t->failed) return 0;
    if (t->used + n + 1 <= t->room) return 1;
    const size_t room = t->room + t->room / 2 + n + 4096;
    char *grown = realloc(t->text, room);
    if (!grown) {
        t->failed = 1;
        return 0;
    }
    t->text = grown;
    t->room = room;
    return 1;
}

void report_put(report_text *t, const char *text, size_t bytes)
{
    if (!reserve(t, bytes)) return;
    memcpy(t->text + t->used, text, bytes);
    t->used += bytes;
    t->text[t->used] = 0;
}

void report_puts(report_text *t, const char *text) { report_put(t, text, strlen(text)); }

void report_printf(report_text *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    for (const char *p = format;;) {
        char number[40] = "";
        const size_t n = strcspn(p, "%");
        report_put(t, p, n);
        if (!p[n]) break;
        p += n + 1;
        switch (*p) {
        case 's': report_html(t, va_arg(args, const char *)); break;
        case 'd': snprintf(number, sizeof number, "%d", va_arg(args, int)); break;
        case 'u': snprintf(number, sizeof number, "%u", va_arg(args, unsigned)); break;
        case 'g': snprintf(number, sizeof number, "%g", va_arg(args, double)); break;
        default: snprintf(number, sizeof number, "%ld", va_arg(args, long)); p++;
        }
        report_puts(t, number);
        p++;
    }
    va_end(args);
}

void report_html(report_text *t, const char *text)
{
    static const char special[] = "&<>\"";
    static const char *const escaped[] = { "&amp;", "&lt;", "&gt;", "&quot;" };
    char *clean = cli_utf8(text);
    if (!clean) t->failed = 1;
    for (const char *p = clean; p && *p;) {
        const size_t n = strcspn(p, special);
        report_put(t, p, n);
        p += n;
        if (*p) report_puts(t, escaped[strchr(special, *p++) - special]);
    }
    free(clean);
}

void report_base64(report_text *t, const void *data, size_t bytes)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *p = data;
    if (!reserve(t, (bytes + 2) / 3 * 4)) return;
    char *out = t->text + t->used;
    for (size_t i = 0; i < bytes; i += 3) {
        const unsigned a = p[i], b = i + 1 < bytes ? p[i + 1] : 0, c = i + 2 < bytes ? p[i + 2] : 0;
        *out++ = digit[a >> 2];
        *out++ = digit[(a & 3) << 4 | b >> 4];
        *out++ = i + 1 < bytes ? digit[(b & 15) << 2 | c >> 6] : '=';
        *out++ = i + 2 < bytes ? digit[c & 63] : '=';
    }
    *out = 0;
    t->used = (size_t)(out - t->text);
}

void report_text_free(report_text *t)
{
    free(t->text);
    memset(t, 0, sizeof *t);
}
