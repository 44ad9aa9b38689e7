/* prompts.c - prompts from the command line, from a file, or the built-in ones.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/clip.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST_FILE (1 << 24)

/* python/esa/programs/prompts_*.txt, put into the command by the build, each with a zero behind:
 * the package and the command have the same prompts. */
extern const unsigned char esa_asset_prompts_tiny_txt[], esa_asset_prompts_large_txt[];

void cli_prompts_free(cli_prompts *p)
{
    for (int64_t i = 0; i < p->count; i++) free(p->line[i]);
    free(p->line);
    p->line = NULL;
    p->count = 0;
}

static int add(cli_prompts *p, const char *text, size_t length)
{
    /* room doubles: a file may have a million lines */
    if ((p->count & (p->count - 1)) == 0) {
        char **more = realloc(p->line, (size_t)(p->count ? 2 * p->count : 1) * sizeof *more);
        if (!more) return 0;
        p->line = more;
    }
    char *copy = malloc(length + 1);
    if (!copy) return 0;
    memcpy(copy, text, length);
    copy[length] = 0;
    p->line[p->count++] = copy;
    return 1;
}

/* Adds up to `most` lines that are neither empty nor comments, trimmed; 0 when out of memory. */
static int add_lines(cli_prompts *p, const char *text, size_t bytes, int64_t most)
{
    for (size_t at = 0; at < bytes && p->count < most;) {
        size_t end = at;
        while (end < bytes && text[end] != '\n') end++;
        size_t from = at, to = end;
        while (from < to && strchr(" \t\r", text[from])) from++;
        while (to > from && strchr(" \t\r", text[to - 1])) to--;
        if (to > from && text[from] != '#' && !add(p, text + from, to - from)) return 0;
        at = end + 1;
    }
    return 1;
}

static int from_file(cli_prompts *p, const char *path, const char *what)
{
    size_t bytes = 0;
    char *text = cli_read_stream(path, &bytes, LONGEST_FILE);
    if (!text && errno == EFBIG)
        return cli_fail("%s: '%s' is longer than %d MB and is not a file of prompts", what, path,
                        LONGEST_FILE >> 20);
    if (!text && errno == EINTR && clip_interrupted()) {
        cli_fail("%s: interrupted while it waited for '%s'", what, path);
        return CLIP_INTERRUPTED;
    }
    if (!text) return cli_fail("%s: cannot read '%s': %s", what, path, cli_error_text(errno));
    int status = CLI_OK;
    if (memchr(text, 0, bytes))
        status = cli_fail("%s: '%s' holds zero bytes and is not a file of prompts", what, path);
    else if (!add_lines(p, text, bytes, INT64_MAX))
        status = cli_fail("%s: out of memory for '%s'", what, path);
    else if (p->count == 0)
        status = cli_fail("%s: '%s' holds no prompt", what, path);
    free(text);
    return status;
}

int cli_prompts_get(cli_prompts *p, const char *text, const char *file, int64_t number, int tiny,
                    const char *what)
{
    *p = (cli_prompts){ NULL, 0 };
    int status = CLI_OK;
    if (file)
        status = from_file(p, file, what);
    else if (text)
        status = add(p, text, strlen(text)) ? CLI_OK : cli_fail("%s: out of memory", what);
    else {
        const char *lines = (const char *)(tiny ? esa_asset_prompts_tiny_txt
                                                : esa_asset_prompts_large_txt);
        if (!add_lines(p, lines, strlen(lines), number > 0 ? number : 1))
            status = cli_fail("%s: out of memory", what);
    }
    if (status) cli_prompts_free(p);
    return status;
}
