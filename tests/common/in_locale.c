/* in_locale.c - gives a test program the locale of $ESA_TEST_LOCALE before its main, as a host
 * program does that calls setlocale. Without that variable nothing changes.
 * SPDX-License-Identifier: Apache-2.0 */
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __attribute__((constructor)) void enter(void)
{
    const char *name = getenv("ESA_TEST_LOCALE");
    if (!name || !*name) return;
    char text[16] = "";
    if (setlocale(LC_ALL, name)) snprintf(text, sizeof text, "%.1f", 0.5);
    setlocale(LC_MESSAGES, "C"); /* tests look for the system's words in English */
    /* The point of these runs is a comma: a test must not pass without it. */
    if (strcmp(text, "0,5") != 0) {
        fprintf(stderr, "there is no locale %s with a decimal comma\n", name);
        exit(1);
    }
}
