/* mini_model.h - a model made of random numbers: enough layers, steps and branches to drive a
 * session.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_SESSION_MINI_MODEL_H
#define ESA_TESTS_SESSION_MINI_MODEL_H

#include "io/scratch.h"
#include "base/rng.h"
#include "esa/esa_session.h"

typedef struct mini {
    int32_t layers, steps, branches;
    int32_t grid[3], text; /* text tokens in front */
    int64_t B, H, N, D;
    float *q, *k, *v, *o; /* [B][H][N][D] */
    uint64_t prompt;      /* what the numbers depend on beside layer, step and branch */
} mini;

static inline mini mini_make(int32_t layers, int32_t steps, int32_t branches, int64_t B)
{
    mini m = { .layers = layers,
               .steps = steps,
               .branches = branches,
               .grid = { 3, 8, 10 },
               .B = B,
               .H = 3,
               .D = 16 };
    m.N = (int64_t)m.grid[0] * m.grid[1] * m.grid[2];
    const size_t n = (size_t)(B * m.H * m.N * m.D + 64) * sizeof(float);
    m.q = malloc(n);
    m.k = malloc(n);
    m.v = malloc(n);
    m.o = malloc(n);
    assert_true(m.q && m.k && m.v && m.o);
    return m;
}

static inline void mini_free(mini *m)
{
    free(m->q);
    free(m->k);
    free(m->v);
    free(m->o);
}

static inline int64_t mini_size(const mini *m) { return m->B * m->H * m->N * m->D; }

/* Sharp, head-dependent scores: heads differ in entropy. */
static inline void mini_fill(const mini *m, int32_t layer, int32_t step, int32_t branch)
{
    esa_rng r = { m->prompt * 1000003u + (uint64_t)layer * 7919u + (uint64_t)step * 104729u +
                  (uint64_t)branch * 15485863u };
    for (int64_t i = 0; i < mini_size(m); i++) {
        const int64_t h = i / (m->N * m->D) % m->H;
        m->q[i] = (esa_rng_unit(&r) - 0.5f) * (float)(2 + 4 * h);
        m->k[i] = (esa_rng_unit(&r) - 0.5f) * 4.0f;
        m->v[i] = esa_rng_unit(&r) - 0.5f;
    }
}

typedef struct mini_views {
    esa_tensor q, k, v, o;
} mini_views;

static inline mini_views mini_view(const mini *m)
{
    mini_views t;
    t.q = esa_tensor_bnsd(m->q, ESA_DTYPE_F32, m->B, m->H, m->N, m->D);
    t.k = esa_tensor_bnsd(m->k, ESA_DTYPE_F32, m->B, m->H, m->N, m->D);
    t.v = esa_tensor_bnsd(m->v, ESA_DTYPE_F32, m->B, m->H, m->N, m->D);
    t.o = esa_tensor_bnsd(m->o, ESA_DTYPE_F32, m->B, m->H, m->N, m->D);
    return t;
}

/* Params that fit the mini model: blocks of 32x16, a grid, budget 0.4. */
static inline esa_session_params mini_params(const mini *m, int32_t mode)
{
    esa_session_params p = esa_session_params_default();
    p.mode = mode;
    p.layers = m->layers;
    p.steps = m->steps;
    p.branches = m->branches;
    p.select.block_q = 32;
    p.select.block_k = 16;
    p.select.budget = 0.4;
    for (int i = 0; i < 3; i++) p.select.layout.grid_q[i] = m->grid[i];
    p.select.layout.text_front_q = m->text;
    p.model = "mini";
    p.config_hash = "00ff";
    return p;
}

/* Online; every cell may run sparse. */
static inline esa_session_params mini_sparse_params(const mini *m)
{
    esa_session_params p = mini_params(m, ESA_SESSION_ONLINE);
    p.warmup_frac = 0;
    p.dense_first_layer = 0;
    return p;
}

static inline esa_session_stats mini_stats(const esa_session *s, int32_t layer, int32_t step)
{
    esa_session_stats t = { .struct_size = sizeof t };
    assert_int_equal(esa_session_get_stats(s, &t, layer, step), ESA_OK);
    return t;
}

static inline uint64_t mini_hash(uint64_t h, const void *data, int64_t bytes)
{
    const uint8_t *b = data;
    for (int64_t i = 0; i < bytes; i++) h = (h ^ b[i]) * UINT64_C(0x100000001b3);
    return h;
}

/* One video: every step, branch and layer. Returns the first failure; *hash covers all outputs. */
static inline esa_status mini_run(const mini *m, esa_session *s, uint64_t *hash)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    const mini_views t = mini_view(m);
    esa_status status = esa_session_begin(s);
    for (int32_t step = 0; step < m->steps; step++)
        for (int32_t branch = 0; branch < m->branches; branch++) {
            if (status == ESA_OK) status = esa_session_step(s, step, branch);
            for (int32_t layer = 0; status == ESA_OK && layer < m->layers; layer++) {
                mini_fill(m, layer, step, branch);
                status = esa_session_attention(s, layer, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o,
                                               NULL);
                h = mini_hash(h, m->o, mini_size(m) * 4);
            }
        }
    if (hash) *hash = h;
    return status;
}

static inline void ok(const esa_ctx *ctx, esa_status status)
{
    if (status != ESA_OK) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(ctx));
}

/* Records `count` prompts starting with `first` into a file. */
static inline void mini_record(esa_ctx *ctx, mini *m, const esa_session_params *p, uint64_t first,
                               int count, const char *path)
{
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, p));
    for (int i = 0; i < count; i++) {
        m->prompt = first + (uint64_t)i;
        ok(ctx, mini_run(m, s, NULL));
    }
    ok(ctx, esa_session_save_recording(s, path));
    esa_session_free(s);
}

#endif
