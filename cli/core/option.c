/* option.c - command tables, options with suggestions for typing errors, and the messages of
 * failures.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"
#include "core/folders.h"

#include <errno.h>
#include <esa/esa_work.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local cli_hearing hearer;

cli_hearing cli_hear(char *text, size_t size)
{
    const cli_hearing before = hearer;
    hearer = (cli_hearing){ text, size };
    return before;
}

static void message(const char *format, va_list args)
{
    if (hearer.text) {
        if (!hearer.text[0]) vsnprintf(hearer.text, hearer.size, format, args);
        return;
    }
    cli_progress_end();
    fflush(stdout);
    fputs("esa: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

int cli_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    message(format, args);
    va_end(args);
    return CLI_FAILED;
}

int cli_usage(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    message(format, args);
    va_end(args);
    return CLI_USAGE;
}

int cli_fail_esa(const esa_ctx *ctx, esa_status status, const char *what)
{
    const char *text = ctx ? esa_ctx_error(ctx) : "";
    return cli_fail("%s: %s", what, text[0] ? text : esa_status_name(status));
}

int cli_status(const esa_ctx *ctx, esa_status status, const char *what)
{
    return status ? cli_fail_esa(ctx, status, what) : CLI_OK;
}

/* Edit distance with swaps of neighbours, cut off above 2: enough for typing errors, too small for
 * wild guesses. */
static int distance(const char *a, const char *b)
{
    const int n = (int)strlen(a), m = (int)strlen(b);
    int row[3][64];
    if (n > 62 || m > 62 || n - m > 2 || m - n > 2) return 3;
    for (int j = 0; j <= m; j++) row[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *now = row[i % 3], *last = row[(i + 2) % 3], *before = row[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = last[j - 1] + (a[i - 1] != b[j - 1]);
            if (last[j] + 1 < best) best = last[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            now[j] = best;
        }
    }
    return row[n % 3][m];
}

/* Takes name for *best if it is nearer to word. *least begins at 3: the nearest name is at most two
 * typing errors away. */
static void consider(const char **best, int *least, const char *word, const char *name)
{
    const int d = distance(word, name);
    if (d >= *least) return;
    *least = d;
    *best = name;
}

const char *cli_nearest(const char *word, const char *const *names, int count)
{
    const char *best = NULL;
    int least = 3;
    for (int i = 0; i < count; i++) consider(&best, &least, word, names[i]);
    return best;
}

static int is_help(const char *word)
{
    return strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

int cli_dispatch(const char *path, const char *about, const cli_command *table, int argc,
                 char **argv)
{
    const char *near = NULL;
    int least = 3;
    const int help = argc > 0 && (is_help(argv[0]) || strcmp(argv[0], "help") == 0);
    if (argc == 0 || help) {
        FILE *out = help ? stdout : stderr;
        fprintf(out, "%s\n\nusage: %s <command> [options]\n\n", about, path);
        for (const cli_command *c = table; c->name; c++)
            fprintf(out, "  %-10s %s\n", c->name, c->help);
        fprintf(out, "\n%s <command> --help describes one command.\n", path);
        return help ? CLI_OK : CLI_USAGE;
    }
    for (const cli_command *c = table; c->name; c++) {
        if (strcmp(argv[0], c->name) == 0) return c->run(argc - 1, argv + 1);
        consider(&near, &least, argv[0], c->name);
    }
    return near ? cli_usage("unknown command '%s', did you mean '%s %s'?", argv[0], path, near)
                : cli_usage("unknown command '%s'; '%s --help' lists them", argv[0], path);
}

int cli_choice(const char *names, const char *name, int length)
{
    int index = 0;
    for (const char *p = names; *p; index++) {
        const int n = (int)strcspn(p, "|");
        if (n == length && strncmp(p, name, (size_t)n) == 0) return index;
        p += n;
        if (*p == '|') p++;
    }
    return -1;
}

static int is_whole(const cli_option *o)
{
    return o->type == CLI_INT || o->type == CLI_INT32 || o->type == CLI_SCHEDULE ||
           o->type == CLI_INTS;
}

static int has_range(const cli_option *o) { return o->lo < o->hi; }

/* The first length characters of text as a number in the range of the option. */
static int number(const cli_option *o, const char *text, int length, double *value)
{
    char copy[64], *end;
    if (length < 1 || length > 63) return 0;
    memcpy(copy, text, (size_t)length);
    copy[length] = 0;
    errno = 0;
    *value = is_whole(o) ? (double)strtoll(copy, &end, 10) : strtod(copy, &end);
    return end == copy + length && errno == 0 && isfinite(*value) &&
           (!has_range(o) || (*value >= o->lo && *value <= o->hi));
}

/* "esa masks select" -> "masks select": messages begin with the program's name already. */
static const char *spoken(const char *path)
{
    return strncmp(path, "esa ", 4) == 0 ? path + 4 : path;
}

static int bad_value(const char *path, const cli_option *o, const char *given, const char *expected)
{
    return cli_usage("%s: %s was given '%s', expected %s", spoken(path), o->name, given, expected);
}

/* "1 .. 100" or "at least 1" or "". */
static void range_text(char out[64], const cli_option *o)
{
    out[0] = 0;
    if (has_range(o) && o->hi < 1e16)
        snprintf(out, 64, "%.10g .. %.10g", o->lo, o->hi);
    else if (has_range(o))
        snprintf(out, 64, "at least %.10g", o->lo);
}

static int range_error(const char *path, const cli_option *o, const char *given)
{
    char range[64], text[128];
    range_text(range, o);
    const char *join = !has_range(o) ? "" : o->hi < 1e16 ? " in " : " of ";
    snprintf(text, sizeof text, "%sa %s%s%s", o->type == CLI_SCHEDULE ? "early or " : "",
             is_whole(o) ? "whole number" : "number", join, range);
    return bad_value(path, o, given, text);
}

static int choice_error(const char *path, const cli_option *o, const char *given, const char *word)
{
    char names[256], text[400];
    const char *list[16];
    char *rest = NULL;
    int count = 0;
    snprintf(names, sizeof names, "%s", o->argument);
    for (char *p = strtok_r(names, "|", &rest); p && count < 16; p = strtok_r(NULL, "|", &rest))
        list[count++] = p;
    const char *near = cli_nearest(word, list, count);
    snprintf(text, sizeof text, "one of %s%s%s%s", o->argument, near ? ", did you mean " : "",
             near ? near : "", near ? "?" : "");
    return bad_value(path, o, given, text);
}

/* Entries with commas between them. */
static int parse_list(const char *path, const cli_option *o, const char *text)
{
    double x = 0;
    cli_list *list = o->value;
    list->count = 0;
    for (const char *p = text;; p++) {
        const int n = (int)strcspn(p, ",");
        char word[64], expected[64];
        if (list->count == CLI_MAX_LIST) {
            snprintf(expected, sizeof expected, "at most %d entries", CLI_MAX_LIST);
            return bad_value(path, o, text, expected);
        }
        if (o->type == CLI_CHOICES) {
            snprintf(word, sizeof word, "%.*s", n < 63 ? n : 63, p);
            const int i = cli_choice(o->argument, p, n);
            if (i < 0) return choice_error(path, o, text, word);
            x = i;
        } else if (!number(o, p, n, &x))
            return range_error(path, o, text);
        list->real[list->count] = x;
        list->whole[list->count++] = (int64_t)x;
        p += n;
        if (*p == 0) break;
    }
    if (o->length && list->count != o->length) {
        char expected[64];
        snprintf(expected, sizeof expected, "%d numbers with commas between", o->length);
        return bad_value(path, o, text, expected);
    }
    return 0;
}

int cli_option_read(const char *path, const cli_option *o, const char *text)
{
    double x = 0;
    switch (o->type) {
    case CLI_TEXT:
    case CLI_OUTPUT:
        /* No command reads or writes a file through its standard streams: "-" is not one, and
         * tables go to stdout already. */
        if (strcmp(o->argument, "FILE") == 0 && strcmp(text, "-") == 0)
            return bad_value(path, o, text, "a file name (./- for a file of that name)");
        *(const char **)o->value = text;
        return 0;
    case CLI_TEXTS: {
        cli_texts *list = o->value;
        if (list->count == CLI_MAX_LIST) return bad_value(path, o, text, "at most 16 of them");
        list->text[list->count++] = text;
        return 0;
    }
    case CLI_CHOICE: {
        const int i = cli_choice(o->argument, text, (int)strlen(text));
        if (i < 0) return choice_error(path, o, text, text);
        *(int *)o->value = i;
        return 0;
    }
    case CLI_INT:
    case CLI_INT32:
    case CLI_SCHEDULE:
    case CLI_REAL:
        if (o->type == CLI_SCHEDULE && strcmp(text, "early") == 0)
            x = ESA_REFRESH_EARLY;
        else if (!number(o, text, (int)strlen(text), &x))
            return range_error(path, o, text);
        if (o->type == CLI_INT)
            *(int64_t *)o->value = (int64_t)x;
        else if (o->type == CLI_INT32 || o->type == CLI_SCHEDULE)
            *(int32_t *)o->value = (int32_t)x;
        else
            *(double *)o->value = x;
        return 0;
    default: return parse_list(path, o, text);
    }
}

/* The range of a number is appended to its help. */
static void print_help(const char *path, const char *usage, const char *about,
                       const cli_option *table)
{
    printf("%s\n\nusage: %s %s\n\n", about, path, usage);
    for (const cli_option *o = table; o->name; o++) {
        char left[160], range[64] = "";
        const int flag = o->type == CLI_FLAG;
        snprintf(left, sizeof left, "%s%s%s", o->name, flag ? "" : " ", flag ? "" : o->argument);
        if (!flag && strcmp(o->argument, "0|1") != 0) range_text(range, o);
        if (strlen(left) > 30)
            printf("  %s\n  %-30s ", left, "");
        else
            printf("  %-30s ", left);
        printf(range[0] ? "%s [%s]\n" : "%s%s\n", o->help, range);
    }
}

int cli_given(int argc, char **argv, const char *name)
{
    const size_t n = strlen(name);
    for (int i = 0; i < argc; i++)
        if (strncmp(argv[i], name, n) == 0 && (argv[i][n] == 0 || argv[i][n] == '=')) return 1;
    return 0;
}

static int unknown_option(const char *path, const cli_option *table, const char *arg, int length)
{
    const char *near = NULL;
    char word[64];
    int least = 3;
    snprintf(word, sizeof word, "%.*s", length < 63 ? length : 63, arg);
    for (const cli_option *o = table; o->name; o++) consider(&near, &least, word, o->name);
    return near ? cli_usage("%s: unknown option %s, did you mean %s?", spoken(path), word, near)
                : cli_usage("%s: unknown option %s; '%s --help' lists them", spoken(path), word,
                            path);
}

int cli_options(const char *path, const char *usage, const char *about, const cli_option *table,
                int argc, char **argv, int *words, int *done)
{
    int kept = 0, bad = 0;
    *done = 0;
    for (int i = 0; i < argc; i++)
        if (is_help(argv[i])) {
            print_help(path, usage, about, table);
            *done = 1;
            return 0;
        }
    for (int i = 0; i < argc && !bad; i++) {
        char *arg = argv[i];
        if (strncmp(arg, "--", 2) != 0) {
            if (!words)
                return cli_usage("%s: unexpected word '%s'; '%s --help' lists the options",
                                 spoken(path), arg, path);
            argv[kept++] = arg;
            continue;
        }
        const int n = (int)strcspn(arg, "=");
        const cli_option *o = table;
        while (o->name && !((int)strlen(o->name) == n && strncmp(o->name, arg, (size_t)n) == 0))
            o++;
        if (!o->name) return unknown_option(path, table, arg, n);
        if (o->type == CLI_FLAG) {
            if (arg[n] == '=') return bad_value(path, o, arg + n + 1, "no value");
            *(int *)o->value = 1;
            continue;
        }
        const char *value = arg[n] == '=' ? arg + n + 1 : i + 1 < argc ? argv[++i] : NULL;
        if (!value)
            return cli_usage("%s: %s needs a value: %s", spoken(path), o->name, o->argument);
        bad = cli_option_read(path, o, value);
    }
    if (words) *words = kept;
    for (const cli_option *o = table; o->name && !bad; o++)
        if (o->type == CLI_OUTPUT) bad = cli_file_ready(*(const char **)o->value, spoken(path));
    return bad;
}

void cli_list_copy(int32_t *out, const cli_list *list)
{
    for (int i = 0; i < list->count; i++) out[i] = (int32_t)list->whole[i];
}

int cli_shard(const char *text, int *index, int *count, const char *what)
{
    char *end = NULL;
    const long i = strtol(text, &end, 10), n = *end == '/' ? strtol(end + 1, &end, 10) : 0;
    if (*end == 0 && end != text && n >= 1 && n <= 10000 && i >= 0 && i < n) {
        *index = (int)i;
        *count = (int)n;
        return CLI_OK;
    }
    return cli_usage("%s: --shard was given '%s', expected i/n with i from 0 to n - 1", what, text);
}
