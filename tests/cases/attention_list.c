/* attention_list.c - see attention.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "cases/attention.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <esa/esa.h>
#include <esa/esa_carry.h>

#define HEADS(b, q, kv)    .B = b, .Hq = q, .Hkv = kv
#define SIZE(nq, nk, d)    .Nq = nq, .Nk = nk, .D = d
#define BLOCKS(q, k)       .block_q = q, .block_k = k
#define FINE(means, share) .fine = means, .refined = share
#define LENGTHS(...)                                                                               \
    .kv_len = (const int32_t[]) { __VA_ARGS__ }
#define TEXT(front, back) .text_front = front, .text_back = back
#define GRID(t, h, w, front, back)                                                                 \
    .grid = { t, h, w }, TEXT(front, back), .Nq = t * h * w + front + back,                        \
    .Nk = t * h * w + front + back

static const struct {
    const char *name;
    uint32_t flags;
    attention_case c;
} rows[] = {
#define CASE(name, flags, ...) { name, flags, { __VA_ARGS__ } },
#include "attention.def"
};
enum { ROWS = sizeof rows / sizeof rows[0] };

static const int64_t sizes[][2] = { { 1, 1 },     { 113, 203 }, { 799, 3 },   { 3, 799 },
                                    { 127, 128 }, { 129, 257 }, { 255, 127 }, { 1, 300 } };
static const int64_t edges[][2] = { { 1, 1 },     { 1, 129 },  { 127, 127 }, { 128, 128 },
                                    { 129, 255 }, { 257, 64 }, { 383, 385 }, { 513, 130 } };
static const int32_t tiles[][2] = { { 64, 64 },  { 64, 128 },  { 128, 64 },
                                    { 256, 64 }, { 128, 128 }, { 256, 128 } };
static const double densities[] = { 0.0, 0.15, 0.6, 1.0 };
static const int64_t odd_dims[] = { 1, 3, 8, 17, 33, 40, 72, 80, 96, 100, 160, 192, 255, 256 };
static const int64_t turn_dims[] = { 40, 64, 72, 128 };
static const int32_t turn_rows[] = { 1, 2, 3, 4, 5, 7, 8, 12, 16 };
static const char *const types[] = { "f32", "f16", "bf16" };
static const char *const tails[] = { "none", "pooled", "centroid", "levels" };

/* How many values each axis has, in the order of its bit. */
static const int32_t counts[AXES] = { 8, 8, 6, 4, 4, 14, 2, 3, 2, 2, 3, 4, 3, 2, 4, 2, 2, 3, 2, 2 };

static void name_part(case_walk *w, const char *format, ...)
{
    const size_t used = strlen(w->name);
    va_list args;
    va_start(args, format);
    vsnprintf(w->name + used, sizeof w->name - used, format, args);
    va_end(args);
}

static void other_type(attention_case *c, int i)
{
    if (c->dtype != ESA_DTYPE_F32 && i % 2) c->dtype = ESA_DTYPE_F16 + ESA_DTYPE_BF16 - c->dtype;
}

static void set_size(case_walk *w, const int64_t size[2])
{
    w->c.Nq = size[0];
    w->c.Nk = size[1];
    name_part(w, "/%lldx%lld", (long long)size[0], (long long)size[1]);
}

static void set_blocks(case_walk *w, const int32_t block[2])
{
    w->c.block_q = block[0];
    w->c.block_k = block[1];
    name_part(w, "/%dx%d", block[0], block[1]);
}

static void set_type(case_walk *w, int32_t dtype)
{
    w->c.dtype = dtype;
    name_part(w, "/%s", types[dtype]);
}

static void set_tail(case_walk *w, int32_t tail)
{
    w->c.tail = tail;
    name_part(w, "/%s", tails[tail]);
}

/* Gives the case value i of an axis; 0: the combination does not exist. */
static int set_axis(case_walk *w, uint32_t axis, int32_t i)
{
    attention_case *c = &w->c;
    switch (axis) {
    case SIZES:
        set_size(w, sizes[i]);
        if (!c->D) c->D = i % 2 ? 64 : 40;
        break;
    case EDGES:
        set_size(w, edges[i]);
        other_type(c, i);
        break;
    case TILES:
    case SMALL_TILES:
        set_blocks(w, tiles[i]);
        other_type(c, i);
        break;
    case DENSITIES:
        c->density = densities[i];
        other_type(c, i);
        name_part(w, "/%g", c->density);
        break;
    case ODD_DIMS:
    case BOTH_DIMS:
        c->D = axis == BOTH_DIMS ? 64 + 64 * i : odd_dims[i];
        if (axis == ODD_DIMS && (w->flags & TURNS)) c->tail = i % 3;
        name_part(w, "/d%lld", (long long)c->D);
        break;
    case ALL_TYPES: set_type(w, i); break;
    case SHORT_TYPES: set_type(w, ESA_DTYPE_F16 + i); break;
    case TWO_TAILS:
    case THREE_TAILS:
    case FOUR_TAILS: set_tail(w, i); break;
    case EIGHT_TAILS: set_tail(w, i == 2 ? ESA_TAIL_LEVELS : i); break;
    case AND_DENSE:
        if (i == 0) break;
        if (c->tail != ESA_TAIL_NONE) return 0;
        c->density = -1.0;
        name_part(w, "/dense");
        break;
    case FINES:
        c->fine = 2 << i;
        name_part(w, "/fine%d", c->fine);
        return c->block_k % c->fine == 0;
    case CAUSAL_TOO:
        c->causal = i;
        if (i) name_part(w, "/causal");
        break;
    case SHARED_TOO:
        c->broadcast = i;
        if (i) name_part(w, "/shared");
        break;
    case LAYOUTS:
        c->bsnd = i;
        name_part(w, "/layout%d", i);
        break;
    case FORMATS:
        c->carry_format = i;
        name_part(w, i == ESA_CARRY_E4M3 ? "/e4m3" : "/bf16");
        break;
    case USES:
        c->carry = CASE_ADD + i;
        name_part(w, i ? "/make" : "/add");
        break;
    }
    return 1;
}

/* Case number `at` of the row; carries do not count. */
static void take_turns(case_walk *w, int32_t at)
{
    attention_case *c = &w->c;
    const int32_t has_tiles = (w->flags & TILES) != 0;
    if (w->flags & ODD_DIMS) return; /* set_axis */
    /* 6: D and dtypes, so that every tail meets all of them */
    if (has_tiles && c->exact_rows) c->tail = (at / 6 + at) % 4;
    if (c->exact_rows) c->exact_rows = turn_rows[at % 9];
    if (!has_tiles) {
        c->D = turn_dims[at % 4];
        c->block_q = at % 2 ? 64 : 48;
        c->block_k = at % 3 ? 64 : 48;
    }
    if (!(w->flags & CARRIES)) return;
    if (has_tiles)
        c->density = densities[(at / 8 + at) % 4]; /* 8: D and tails */
    else if (at / 4 % 3)
        c->density = at / 4 % 3 - 1; /* 4: tails */
}

int case_next(case_walk *w)
{
    while (w->row < ROWS) {
        int32_t left = w->at, all = 1, turn = 0, exists = 1;
        w->flags = rows[w->row].flags;
        w->c = rows[w->row].c;
        snprintf(w->name, sizeof w->name, "%s", rows[w->row].name);
        for (int bit = 0; bit < AXES; bit++) {
            if (!(w->flags & 1u << bit)) continue;
            all *= counts[bit];
        }
        int32_t below = all;
        for (int bit = 0; bit < AXES; bit++) {
            if (!(w->flags & 1u << bit)) continue;
            below /= counts[bit];
            exists &= set_axis(w, 1u << bit, left / below);
            if (!(CARRIES & 1u << bit)) turn = turn * counts[bit] + left / below;
            left %= below;
        }
        if (w->flags & TURNS) take_turns(w, turn);
        if (++w->at >= all) {
            w->row++;
            w->at = 0;
        }
        if (exists) return 1;
    }
    return 0;
}
