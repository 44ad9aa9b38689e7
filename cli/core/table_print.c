/* table_print.c - aligned tables on a stream, words for a shell, and a progress line on stderr.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CELL 48

struct cli_table {
    int columns, left;
    int64_t cells, room;
    char (*text)[CELL]; /* [cells] */
};

cli_table *cli_table_new(int columns, int left)
{
    cli_table *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->columns = columns;
    t->left = left;
    return t;
}

static void add(cli_table *t, const char *text)
{
    if (t->cells == t->room) {
        const int64_t room = t->room ? 2 * t->room : 64;
        char(*grown)[CELL] = realloc(t->text, (size_t)room * CELL);
        if (!grown) return; /* out of memory: the table ends here */
        t->text = grown;
        t->room = room;
    }
    if (strncmp(text, "nan", 3) == 0 || strncmp(text, "-nan", 4) == 0) text = "-";
    if (strncmp(text, "inf", 3) == 0) text = "equal";
    snprintf(t->text[t->cells++], CELL, "%.*s", CELL - 1, text);
}

void cli_cell(cli_table *t, const char *format, ...)
{
    char text[CELL];
    if (!t) return;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    add(t, text);
}

void cli_row(cli_table *t, const char *format, ...)
{
    enum { BAR = 0x1f }; /* stands for | in the text, which may hold one */
    char split[512], text[2048];
    if (!t) return;
    snprintf(split, sizeof split, "%s", format);
    for (char *c = split; (c = strchr(c, '|')) != NULL;) *c = BAR;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, split, args);
    va_end(args);
    for (char *cell = text, *end = text; end; cell = end + 1) {
        end = strchr(cell, BAR);
        if (end) *end = 0;
        add(t, cell);
    }
}

void cli_table_print(cli_table *t, FILE *out)
{
    if (!t) return;
    int width[32] = { 0 };
    for (int64_t i = 0; i < t->cells; i++) {
        const int n = (int)strlen(t->text[i]), c = (int)(i % t->columns);
        if (c < 32 && n > width[c]) width[c] = n;
    }
    for (int64_t i = 0; i < t->cells; i++) {
        const int c = (int)(i % t->columns), last = c + 1 == t->columns || i + 1 == t->cells;
        if (c < t->left)
            fprintf(out, "%-*s", last ? 0 : width[c], t->text[i]);
        else
            fprintf(out, "%*s", width[c], t->text[i]);
        fputs(last ? "\n" : "  ", out);
    }
    free(t->text);
    free(t);
}

void cli_progress(const char *what, int64_t done, int64_t total)
{
    if (isatty(2)) {
        char bar[31];
        const int filled = total > 0 ? (int)(30 * done / total) : 0;
        for (int i = 0; i < 30; i++) bar[i] = i < filled ? '#' : '.';
        bar[30] = 0;
        fprintf(stderr, "\r\033[K%s [%s] %lld/%lld", what, bar, (long long)done, (long long)total);
        fflush(stderr);
    } else if (total > 0 && (done == total || 4 * done / total != 4 * (done - 1) / total)) {
        fprintf(stderr, "%s %lld/%lld\n", what, (long long)done,
                (long long)total); /* every quarter: logs stay short */
    }
}

void cli_progress_end(void)
{
    if (isatty(2)) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
}

/* ---------------------------------------------------------------- words of a shell */

void cli_put_word(FILE *out, const char *word)
{
    static const char plain[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./,:=+-@%";
    if (*word && strspn(word, plain) == strlen(word)) {
        fputs(word, out);
        return;
    }
    fputc('\'', out);
    for (const char *c = word; *c; c++) {
        if (*c == '\'')
            fputs("'\\''", out);
        else
            fputc(*c, out);
    }
    fputc('\'', out);
}
