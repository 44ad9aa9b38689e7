/* names.c - reads shapes, block sizes and lists of names.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/cli.h"

#include <stdlib.h>
#include <string.h>

static const cli_shape shapes[] = {
#define SHAPE(name, H, D, t, h, w, front, back)                                                    \
    { name, 1, H, (int64_t)(t) * (h) * (w) + (front) + (back), D, { t, h, w }, front, back },
#include "shapes.def"
#undef SHAPE
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

const char *cli_selectors(void)
{
    static char names[512];
    size_t used = 0;
    for (int i = 0; esa_selector_name(i) && used < sizeof names; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? "|" : "",
                                 esa_selector_name(i));
    return names;
}

int cli_selector_has(int64_t selector, int trait)
{
    return (esa_selector_traits((int32_t)selector) & trait) != 0;
}

int cli_selector_takes(int selector, int order, int tail, const char *what)
{
    if (order == ESA_ORDER_ADAPTIVE && !cli_selector_has(selector, ESA_TRAIT_ADAPTIVE))
        return cli_usage("%s: --order adaptive needs --selector error, not %s", what,
                         esa_selector_name(selector));
    if (tail == ESA_TAIL_CENTROID && !cli_selector_has(selector, ESA_TRAIT_CENTROID))
        return cli_usage("%s: --selector %s takes --tail none, pooled or levels, not centroid",
                         what, esa_selector_name(selector));
    return CLI_OK;
}

cli_list cli_preset_works(int32_t steps, int32_t carry)
{
    cli_list works = { 0 };
    for (int preset = ESA_PRESET_FAITHFUL; preset <= ESA_PRESET_FAST; preset++)
        works.real[works.count++] = esa_preset_work_for(preset, steps, carry);
    return works;
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
    return near ? cli_usage("unknown shape '%s', did you mean %s?", text, near)
                : cli_usage("unknown shape '%s', expected B,H,N,D (whole numbers from 1) or one "
                            "of %s",
                            text, list);
}

void cli_shape_list(char *buffer, size_t size)
{
    size_t used = 0;
    buffer[0] = 0;
    for (int i = 0; i < SHAPES && used < size; i++)
        used += (size_t)snprintf(buffer + used, size - used, "%s%s", i ? ", " : "", shapes[i].name);
}

/* Reads "128x64", numbers from 1 to 65536. 1: it is that. */
static int pair_parse(const char *text, int32_t *first, int32_t *second)
{
    char *end, *last;
    const long q = strtol(text, &end, 10);
    if (end == text || *end != 'x') return 0;
    const long k = strtol(end + 1, &last, 10);
    if (last == end + 1 || *last != 0 || q < 1 || k < 1 || q > 65536 || k > 65536) return 0;
    *first = (int32_t)q;
    *second = (int32_t)k;
    return 1;
}

int cli_block_parse(const char *text, int32_t *block_q, int32_t *block_k)
{
    if (pair_parse(text, block_q, block_k)) return CLI_OK;
    return cli_usage("--block was given '%s', expected query x key tokens such as 128x128", text);
}

int cli_groups_parse(const char *text, int32_t *group_q, int32_t *group_k)
{
    int32_t q, k;
    if (pair_parse(text, &q, &k) && q <= 16 && k <= 16 && !(q & (q - 1)) && !(k & (k - 1))) {
        *group_q = q;
        *group_k = k;
        return CLI_OK;
    }
    return cli_usage(CLI_SCORE_GROUPS
                     " was given '%s', expected query x key tokens of a mean, each "
                     "1, 2, 4, 8 or 16, such as 8x4",
                     text);
}
