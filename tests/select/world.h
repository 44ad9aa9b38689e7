/* world.h - a random selection problem and what can be said about it by brute force: the ordered
 * sequence, which blocks a row sees, which are forced. Everything in double, token by token, with
 * none of the library's block arithmetic.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_SELECT_WORLD_H
#define ESA_TESTS_SELECT_WORLD_H

#include "select/kit.h"

typedef struct world {
    int64_t B, Hq, Hkv, Nq, Nk, D, nq, nk;
    kit_tensor q, k;
    esa_select_params p; /* layout resolved by hand: protect 0 or 1, both grids given */
    int32_t kv_len[4];
    int32_t *order_q, *order_k; /* always valid permutations */
    uint8_t *seen;              /* [B][nq][nk] some query of the row sees some key of the block */
    uint8_t *forced;            /* [B][nq][nk] fixed mode: must be kept */
    uint8_t *dense;             /* [nq] the row keeps all it sees */
    char name[256];
} world;

static inline double world_q(const world *w, int64_t b, int64_t h, int64_t pos, int64_t d)
{
    return (double)kit_at(&w->q.view, b, h, w->order_q[pos], d);
}
static inline double world_k(const world *w, int64_t b, int64_t h, int64_t pos, int64_t d)
{
    return (double)kit_at(&w->k.view, b, h / (w->Hq / w->Hkv), w->order_k[pos], d);
}
static inline int32_t world_sees(const world *w, int64_t b, int64_t i, int64_t j)
{
    return j < w->kv_len[b] && (!w->p.causal || j <= i + w->Nk - w->Nq);
}
static inline double world_dot(const world *w, int64_t b, int64_t h, int64_t i, int64_t j)
{
    double s = 0.0;
    for (int64_t d = 0; d < w->D; d++) s += world_q(w, b, h, i, d) * world_k(w, b, h, j, d);
    return s;
}

/* Text or protected first frame; token numbers as given. */
static inline int32_t world_special(const world *w, int32_t side, int64_t token)
{
    const esa_layout *l = &w->p.layout;
    const int32_t *g = side ? l->grid_k : l->grid_q;
    const int64_t front = side ? l->text_front_k : l->text_front_q,
                  back = side ? l->text_back_k : l->text_back_q, N = side ? w->Nk : w->Nq;
    if (token < front || token >= N - back) return 1;
    return l->protect_first_frame == 1 && g[0] > 1 && token - front < (int64_t)g[1] * g[2];
}

static inline void world_map(world *w)
{
    const int64_t Bq = w->p.block_q, Bk = w->p.block_k;
    w->seen = calloc((size_t)(w->B * w->nq * w->nk), 1);
    w->forced = calloc((size_t)(w->B * w->nq * w->nk), 1);
    w->dense = calloc((size_t)w->nq, 1);
    for (int64_t i = 0; i < w->Nq; i++)
        w->dense[i / Bq] |= (uint8_t)world_special(w, 0, w->order_q[i]);
    for (int64_t b = 0; b < w->B; b++)
        for (int64_t i = 0; i < w->Nq; i++)
            for (int64_t j = 0; j < w->Nk; j++) {
                if (!world_sees(w, b, i, j)) continue;
                const int64_t at = (b * w->nq + i / Bq) * w->nk + j / Bk;
                w->seen[at] = 1;
                if (w->p.causal && j == i + w->Nk - w->Nq) w->forced[at] = 1;
            }
    for (int64_t b = 0; b < w->B; b++)
        for (int64_t j = 0; j < w->kv_len[b]; j++)
            for (int64_t I = 0; I < w->nq; I++) {
                const int64_t at = (b * w->nq + I) * w->nk + j / Bk;
                if (w->seen[at] && (w->dense[I] || world_special(w, 1, w->order_k[j])))
                    w->forced[at] = 1;
            }
}

static inline int32_t world_pick(esa_rng *r, const int32_t *from, int32_t n)
{
    return from[esa_rng_below(r, (uint32_t)n)];
}

/* Fills order_q and order_k from the params; to be called again when they were changed. */
static inline void world_order(world *w, esa_ctx *ctx)
{
    const esa_layout *l = &w->p.layout;
    if (l->order_applied) { /* the tensors stand in order: positions are rows */
        for (int64_t i = 0; i < w->Nq; i++) w->order_q[i] = (int32_t)i;
        for (int64_t i = 0; i < w->Nk; i++) w->order_k[i] = (int32_t)i;
    } else {
        assert_int_equal(esa_order(ctx, w->order_q, w->Nq, l, 0, w->p.mode), ESA_OK);
        esa_layout side = *l; /* the key side alone, whatever the q side says */
        memcpy(side.grid_q, l->grid_k, sizeof side.grid_q);
        side.text_front_q = l->text_front_k;
        side.text_back_q = l->text_back_k;
        assert_int_equal(esa_order(ctx, w->order_k, w->Nk, &side, 0, w->p.mode), ESA_OK);
    }
}

/* A problem for a selector; small, awkward, every feature sometimes. */
static inline void world_make(world *w, esa_rng *r, esa_ctx *ctx, int32_t selector, int32_t mode)
{
    static const int32_t blocks[] = { 16, 32, 48, 64, 128, 256 }, dims[] = { 1, 7, 16, 24, 64 },
                         lengths[] = { 1, 3, 17, 113, 203, 256, 300, 500 };
    static const double budgets[] = { 0.0, 0.08, 0.25, 0.5, 0.77, 0.95, 1.0 };
    memset(w, 0, sizeof *w);
    w->B = 1 + esa_rng_below(r, 2);
    w->Hkv = 1 + esa_rng_below(r, 2);
    w->Hq = w->Hkv * (1 + esa_rng_below(r, 3));
    w->D = world_pick(r, dims, 5);
    w->p = esa_select_params_default(selector);
    w->p.mode = mode;
    w->p.block_q = world_pick(r, blocks, 6);
    w->p.block_k = world_pick(r, blocks, 6);
    w->p.budget = budgets[esa_rng_below(r, 7)];
    w->p.samples = 1 + (int32_t)esa_rng_below(r, 6);
    w->p.seed = esa_rng_next(r);
    w->p.causal = esa_rng_below(r, 3) == 0;
    w->p.keep_sink = (int32_t)esa_rng_below(r, 2);
    w->p.keep_recent = (int32_t)esa_rng_below(r, 2);
    esa_layout *l = &w->p.layout;
    l->protect_first_frame = (int32_t)esa_rng_below(r, 2);
    l->order_applied = (int32_t)esa_rng_below(r, 2);
    l->order = ESA_ORDER_RASTER;
    if (esa_rng_below(r, 2)) {
        for (int i = 0; i < 3; i++) l->grid_q[i] = 1 + (int32_t)esa_rng_below(r, i ? 12 : 4);
        l->text_front_q = (int32_t)esa_rng_below(r, 2) * (int32_t)esa_rng_below(r, 60);
        l->text_back_q = (int32_t)esa_rng_below(r, 2) * (int32_t)esa_rng_below(r, 60);
        w->Nq = (int64_t)l->grid_q[0] * l->grid_q[1] * l->grid_q[2] + l->text_front_q +
                l->text_back_q;
        memcpy(l->grid_k, l->grid_q, sizeof l->grid_k);
        l->text_front_k = l->text_front_q;
        l->text_back_k = l->text_back_q;
        if (esa_rng_below(r, 2)) { /* a longer past on the key side */
            l->grid_k[0] += (int32_t)esa_rng_below(r, 3);
            l->text_front_k += (int32_t)esa_rng_below(r, 20);
        }
        w->Nk = (int64_t)l->grid_k[0] * l->grid_k[1] * l->grid_k[2] + l->text_front_k +
                l->text_back_k;
        if (!w->p.causal || l->order_applied) l->order = (int32_t)esa_rng_below(r, 4);
        for (int i = 0; i < 3; i++) l->window[i] = 1 + (int32_t)esa_rng_below(r, 5);
    } else {
        w->Nq = world_pick(r, lengths, 8);
        w->Nk = esa_rng_below(r, 2) ? w->Nq : world_pick(r, lengths, 8);
        if (w->Nk != w->Nq && esa_rng_below(r, 2))
            l->text_back_k = (int32_t)esa_rng_below(r, (uint32_t)w->Nk + 1);
    }
    w->nq = (w->Nq + w->p.block_q - 1) / w->p.block_q;
    w->nk = (w->Nk + w->p.block_k - 1) / w->p.block_k;
    const int32_t dtype = (int32_t)esa_rng_below(r, 3);
    const float spread = esa_rng_below(r, 2) ? 1.0f : 2.5f;
    w->q = kit_random(r, dtype, w->B, w->Hq, w->Nq, w->D, (int32_t)esa_rng_below(r, 2), spread);
    w->k = kit_random(r, dtype, w->B, w->Hkv, w->Nk, w->D, (int32_t)esa_rng_below(r, 2), spread);
    const int32_t cut = esa_rng_below(r, 2) == 0;
    /* A length may not cut into tokens that the order moves (the library refuses it). */
    const int32_t moves = !l->order_applied &&
                          (l->order != ESA_ORDER_RASTER ||
                           (selector == ESA_SELECT_RF_V2 && mode != ESA_MODE_FIXED));
    const int32_t least = !moves ? 0
                          : mode != ESA_MODE_FIXED && l->text_front_k
                              ? (int32_t)w->Nk
                              : (int32_t)w->Nk - l->text_back_k;
    for (int64_t b = 0; b < w->B; b++)
        w->kv_len[b] = cut ? least + (int32_t)esa_rng_below(r, (uint32_t)(w->Nk - least) + 1)
                           : (int32_t)w->Nk;
    if (cut) w->p.kv_len = w->kv_len;
    w->order_q = malloc((size_t)w->Nq * 4);
    w->order_k = malloc((size_t)w->Nk * 4);
    world_order(w, ctx);
    world_map(w);
    snprintf(w->name, sizeof w->name,
             "selector %d mode %d B %d H %d/%d N %d/%d D %d block %dx%d budget %g causal %d order "
             "%d applied %d protect %d "
             "grid %d,%d,%d text %d,%d kv_len %d sink %d recent %d cdf %g",
             (int)selector, (int)mode, (int)w->B, (int)w->Hq, (int)w->Hkv, (int)w->Nq, (int)w->Nk,
             (int)w->D, (int)w->p.block_q, (int)w->p.block_k, w->p.budget, (int)w->p.causal,
             (int)l->order, (int)l->order_applied, (int)l->protect_first_frame, (int)l->grid_q[0],
             (int)l->grid_q[1], (int)l->grid_q[2], (int)l->text_front_q, (int)l->text_back_q,
             (int)w->kv_len[0], (int)w->p.keep_sink, (int)w->p.keep_recent, w->p.cdf_threshold);
}

static inline void world_free(world *w)
{
    free(w->q.data);
    free(w->k.data);
    free(w->order_q);
    free(w->order_k);
    free(w->seen);
    free(w->forced);
    free(w->dense);
}

#endif
