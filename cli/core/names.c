/* names.c - names of shapes and small words of the command line.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Shapes are those of one self-attention call of the models at their default resolution and at
 * 720p: the grid is latent frames x height x width in patches, text tokens are part of the sequence
 * where the model attends jointly. */
#include "core/cli.h"

#include <stdlib.h>
#include <string.h>

static const cli_shape shapes[] = {
    /* name                 B   H       N    D    t   h   w  front back */
    { "wan-1.3b-480p", 1, 12, 32760, 128, { 21, 30, 52 }, 0, 0 }, /* 81 frames 480x832 */
    { "wan-1.3b-720p", 1, 12, 75600, 128, { 21, 45, 80 }, 0, 0 }, /* 81 frames 720x1280 */
    { "wan-14b-480p", 1, 40, 32760, 128, { 21, 30, 52 }, 0, 0 },
    { "wan-14b-720p", 1, 40, 75600, 128, { 21, 45, 80 }, 0, 0 },
    { "cogvideox-5b", 1, 48, 17776, 64, { 13, 30, 45 }, 226, 0 },      /* 49 frames 480x720, text in
                                                                          front */
    { "cogvideox-5b-720p", 1, 48, 47026, 64, { 13, 45, 80 }, 226, 0 }, /* 49 frames 720x1280 */
    { "hunyuan-544p", 1, 24, 67576, 128, { 33, 34, 60 }, 0, 256 },     /* 129 frames 544x960, text
                                                                          behind */
    { "hunyuan-720p", 1, 24, 119056, 128, { 33, 45, 80 }, 0, 256 },    /* 129 frames 720x1280 */
};
#define SHAPES ((int)(sizeof shapes / sizeof shapes[0]))

const char *cli_name(char buffer[32], const char *names, int i)
{
    const char *p = names;
    for (; i > 0 && *p; i--) {
        p += strcspn(p, "|");
        if (*p == '|') p++;
    }
    if (i < 0 || !*p)
        snprintf(buffer, 32, "?");
    else
        snprintf(buffer, 32, "%.*s", (int)strcspn(p, "|") < 31 ? (int)strcspn(p, "|") : 31, p);
    return buffer;
}

int cli_shape_parse(cli_shape *shape, const char *text)
{
    const char *names[SHAPES];
    for (int i = 0; i < SHAPES; i++) {
        if (strcmp(text, shapes[i].name) == 0) {
            *shape = shapes[i];
            return 0;
        }
        names[i] = shapes[i].name;
    }
    long long dim[4];
    const char *p = text;
    int count = 0;
    for (; count < 4; count++) {
        char *end;
        dim[count] = strtoll(p, &end, 10);
        if (end == p || dim[count] < 1 || dim[count] > 1 << 30 || *end != (count < 3 ? ',' : 0))
            break;
        p = end + 1;
    }
    if (count == 4) {
        memset(shape, 0, sizeof *shape);
        snprintf(shape->name, sizeof shape->name, "%lld,%lld,%lld,%lld", dim[0], dim[1], dim[2],
                 dim[3]);
        shape->B = dim[0];
        shape->H = dim[1];
        shape->N = dim[2];
        shape->D = dim[3];
        return 0;
    }
    char list[512];
    cli_shape_list(list, sizeof list);
    const char *near = cli_nearest(text, names, SHAPES);
    if (near)
        cli_fail("unknown shape '%s', did you mean %s?", text, near);
    else
        cli_fail("unknown shape '%s', expected B,H,N,D (whole numbers from 1) or one of %s", text,
                 list);
    return CLI_USAGE;
}

void cli_shape_list(char *buffer, size_t size)
{
    size_t used = 0;
    buffer[0] = 0;
    for (int i = 0; i < SHAPES && used < size; i++)
        used += (size_t)snprintf(buffer + used, size - used, "%s%s", i ? ", " : "", shapes[i].name);
}

int cli_block_parse(const char *text, int32_t *block_q, int32_t *block_k)
{
    char *end, *last;
    const long q = strtol(text, &end, 10);
    if (end != text && *end == 'x') {
        const long k = strtol(end + 1, &last, 10);
        if (last != end + 1 && *last == 0 && q > 0 && k > 0 && q <= 65536 && k <= 65536) {
            *block_q = (int32_t)q;
            *block_k = (int32_t)k;
            return 0;
        }
    }
    cli_fail("--block was given '%s', expected query x key tokens such as 128x128", text);
    return CLI_USAGE;
}
