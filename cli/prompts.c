/* prompts.c - prompts from the command line, from a file, or the built-in ones.
 * SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST_FILE (1 << 24)

/* What wan-tiny has learned to draw. */
static const char *const tiny_prompts[CLI_PROMPTS] = {
    "a red ball rolls to the right over a blue floor",
    "a large yellow star spins in place over a purple background",
    "a white square moves to the left over a green striped background",
    "a small orange triangle moves up over a black background",
    "a large green ring grows over a white checkered background",
    "a large blue cross moves to the right over a yellow floor",
    "a purple ball moves in a circle over an orange gradient background",
    "a large black square shrinks over a red dotted background",
    "a small white ball rolls to the left behind a large red triangle over a blue background",
    "a red star falls down and a small blue ring spins over a white background",
    "a yellow triangle swings from side to side over a black striped background",
    "a green cross moves to the right in front of a large orange ball over a purple floor",
};
static const char *const large_prompts[CLI_PROMPTS] = {
    "A fishing boat leaves a small harbour at dawn, gulls circling above its wake, camera rising slowly",
    "A street musician plays the cello under an arcade while passers-by blur past in the rain",
    "Close-up of a hummingbird hovering at a red flower, wings a blur, morning light behind it",
    "An old steam train crosses a stone viaduct in autumn, smoke drifting over coloured trees",
    "A potter shapes a bowl on a turning wheel, wet clay glistening between her hands",
    "Waves break against black cliffs at sunset, spray lit from behind, slow motion",
    "A child runs through a field of tall grass with a paper kite, seen from a low angle",
    "A night market with lanterns and steaming food stalls, the camera walking through the crowd",
    "A snow leopard crosses a ridge in falling snow and looks into the camera",
    "Time lapse of clouds rolling over a desert canyon, shadows sliding across red rock",
    "A glass of water falls from a table and shatters on a wooden floor, slow motion",
    "A small robot waters plants on a balcony above a busy city, cartoon style",
};

void cli_prompts_free(cli_prompts *p)
{
    for (int64_t i = 0; i < p->count; i++) free(p->line[i]);
    free(p->line);
    p->line = NULL;
    p->count = 0;
}

static int add(cli_prompts *p, const char *text, size_t length)
{
    if ((p->count & (p->count - 1)) == 0) {             /* full: room doubles, for a file may have a million lines */
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

static int from_file(cli_prompts *p, const char *path, const char *what)
{
    FILE *file = fopen(path, "rb");
    if (!file) return cli_fail("%s: cannot read '%s': %s", what, path, strerror(errno));
    char *text = malloc(LONGEST_FILE);
    const size_t bytes = text ? fread(text, 1, LONGEST_FILE, file) : 0;
    const int failed = ferror(file), why = errno, more = !feof(file);
    fclose(file);
    int status = CLI_OK;
    if (!text) status = cli_fail("%s: out of memory for '%s'", what, path);
    else if (failed) status = cli_fail("%s: cannot read '%s': %s", what, path, strerror(why));
    else if (more) status = cli_fail("%s: '%s' is longer than %d MB, that is no file of prompts", what, path, LONGEST_FILE >> 20);
    else if (memchr(text, 0, bytes)) status = cli_fail("%s: '%s' holds zero bytes, that is no file of prompts", what, path);
    for (size_t at = 0; status == CLI_OK && at < bytes;) {
        size_t end = at;
        while (end < bytes && text[end] != '\n') end++;
        size_t from = at, to = end;
        while (from < to && strchr(" \t\r", text[from])) from++;
        while (to > from && strchr(" \t\r", text[to - 1])) to--;
        if (to > from && text[from] != '#' && !add(p, text + from, to - from)) status = cli_fail("%s: out of memory for '%s'", what, path);
        at = end + 1;
    }
    free(text);
    if (status == CLI_OK && p->count == 0) status = cli_fail("%s: '%s' holds no prompt", what, path);
    return status;
}

int cli_prompts_get(cli_prompts *p, const char *text, const char *file, int64_t number, int tiny, const char *what)
{
    *p = (cli_prompts){ NULL, 0 };
    int status = CLI_OK;
    if (file) status = from_file(p, file, what);
    else if (text) status = add(p, text, strlen(text)) ? CLI_OK : cli_fail("%s: out of memory", what);
    else
        for (int64_t i = 0; i < (number > 0 ? number : 1) && i < CLI_PROMPTS && status == CLI_OK; i++) {
            const char *line = (tiny ? tiny_prompts : large_prompts)[i];
            if (!add(p, line, strlen(line))) status = cli_fail("%s: out of memory", what);
        }
    if (status != CLI_OK) cli_prompts_free(p);
    return status;
}
