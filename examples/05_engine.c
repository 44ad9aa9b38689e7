/* 05_engine.c - esa in place of the dense attention of an engine in plain C, whose tensors are
 * float arrays [tokens][heads][dim].
 * SPDX-License-Identifier: Apache-2.0
 *
 * Before: 04_work.c. Next: 06_ggml.c does the same in a ggml graph. docs/hosts.md explains both.
 * The engine here has two layers and four steps; its other parts are left out. The program checks
 * esa's output with the engine's own dense attention. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <esa/esa_session.h>

enum { LAYERS = 2, STEPS = 4, H = 2, T = 4, Y = 16, X = 16, N = T * Y * X, D = 32, BLOCK = 32 };
enum { BLOCKS = (N + BLOCK - 1) / BLOCK, WIDTH = (BLOCKS + 7) / 8 };

/* ---- what the engine had. bits, which only the checks use, hides blocks of keys: [heads][query
 * blocks][WIDTH] as esa_mask_to_bits writes them; NULL: all keys. */
static void dense_attention(float *out, const float *q, const float *k, const float *v, int seq,
                            int heads, int dim, const uint8_t *bits)
{
    static double score[N];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < seq; i++) {
            const uint8_t *row = bits ? bits + ((size_t)h * BLOCKS + i / BLOCK) * WIDTH : NULL;
            double top = -INFINITY, sum = 0;
            for (int j = 0; j < seq; j++) {
                score[j] = -INFINITY;
                if (row && !(row[j / BLOCK / 8] >> (j / BLOCK % 8) & 1)) continue;
                double dot = 0;
                for (int d = 0; d < dim; d++)
                    dot += (double)q[(i * heads + h) * dim + d] * k[(j * heads + h) * dim + d];
                score[j] = dot / sqrt(dim);
                top = fmax(top, score[j]);
            }
            for (int j = 0; j < seq; j++) sum += score[j] = exp(score[j] - top);
            for (int d = 0; d < dim; d++) {
                double mean = 0;
                for (int j = 0; j < seq; j++) mean += score[j] * v[(j * heads + h) * dim + d];
                out[(i * heads + h) * dim + d] = (float)(mean / sum);
            }
        }
}

/* ---- what takes its place: one ctx and one session for the model */
typedef struct sparse {
    esa_ctx *ctx;
    esa_session *session;
} sparse;

/* Once per model. 0, or -1 after a message. The caller closes s in both cases. */
static int sparse_open(sparse *s, const esa_session_params *params)
{
    s->ctx = NULL;
    s->session = NULL;
    if (esa_ctx_create(&s->ctx, NULL)) return -1;
    if (!esa_session_create(s->ctx, &s->session, params) && !esa_session_begin(s->session))
        return 0;
    fprintf(stderr, "esa: %s\n", esa_ctx_error(s->ctx));
    return -1;
}

static void sparse_close(sparse *s)
{
    esa_session_free(s->session);
    esa_ctx_free(s->ctx);
}

/* In place of dense_attention. 0, or -1 after a message. */
static int sparse_attention(sparse *s, int layer, float *out, const float *q, const float *k,
                            const float *v, int seq, int heads, int dim)
{
    /* [tokens][heads][dim] is BSND. For [heads][tokens][dim] call esa_tensor_bnsd. */
    const esa_tensor tq = esa_tensor_bsnd((void *)q, ESA_DTYPE_F32, 1, heads, seq, dim),
                     tk = esa_tensor_bsnd((void *)k, ESA_DTYPE_F32, 1, heads, seq, dim),
                     tv = esa_tensor_bsnd((void *)v, ESA_DTYPE_F32, 1, heads, seq, dim),
                     to = esa_tensor_bsnd(out, ESA_DTYPE_F32, 1, heads, seq, dim);
    if (!esa_session_attention(s->session, layer, ESA_CALL_SELF, &tq, &tk, &tv, &to, NULL))
        return 0;
    fprintf(stderr, "esa, layer %d: %s\n", layer, esa_ctx_error(s->ctx));
    return -1;
}

/* ---- the engine: q, k and v of a layer at a step, here of tokens that resemble their neighbours
 */
static float q[N * H * D], k[N * H * D], v[N * H * D], o[N * H * D], dense[N * H * D];

static void layer_input(int layer, int step)
{
    unsigned s = (unsigned)(1 + layer * STEPS + step);
    for (int i = 0; i < N * H * D; i++) {
        const int n = i / (H * D), t = n / (Y * X), y = n / X % Y, x = n % X, d = i % D;
        const int axis = d % 3 == 0 ? 3 * t : d % 3 == 1 ? y : x;
        s = s * 1664525u + 1013904223u;
        const float noise = 0.3f * (float)((int)(s >> 24) - 128) / 128.0f,
                    place = 1.5f * cosf((float)(axis * (1 + d / 6)) * 0.1f);
        q[i] = place + noise;
        k[i] = place - noise;
        v[i] = place + 0.5f * noise;
    }
}

static double relative_error(const float *got, const float *wanted)
{
    double top = 0, bottom = 0;
    for (int i = 0; i < N * H * D; i++) {
        top += (double)(got[i] - wanted[i]) * (got[i] - wanted[i]);
        bottom += (double)wanted[i] * wanted[i];
    }
    return sqrt(top / bottom);
}

/* The blocks that the session keeps for the present q and k. Only selectors that look at nothing
 * else, and whose session makes a mask in every step, can be asked like this. */
static int read_mask(esa_ctx *ctx, const esa_select_params *select, uint8_t *bits)
{
    const esa_tensor tq = esa_tensor_bsnd(q, ESA_DTYPE_F32, 1, H, N, D),
                     tk = esa_tensor_bsnd(k, ESA_DTYPE_F32, 1, H, N, D);
    esa_mask *mask;
    if (esa_select(ctx, &mask, &tq, &tk, select)) return -1;
    const esa_status status = esa_mask_to_bits(mask, bits);
    esa_mask_free(mask);
    return status ? -1 : 0;
}

/* Runs the model with esa. Returns the largest error of a layer in the last step against dense
 * attention (masked 0) or against dense attention behind esa's mask (masked 1); -1: a call failed.
 */
static double run(const esa_session_params *params, int masked, const char *name)
{
    static uint8_t bits[H * BLOCKS * WIDTH];
    sparse s;
    double worst = sparse_open(&s, params) ? -1 : 0;
    for (int step = 0; step < STEPS; step++) {
        if (worst < 0 || esa_session_step(s.session, step, 0)) break;
        for (int layer = 0; worst >= 0 && layer < LAYERS; layer++) {
            layer_input(layer, step);
            if (sparse_attention(&s, layer, o, q, k, v, N, H, D)) worst = -1;
            if (worst < 0 || step + 1 < STEPS) continue;
            if (masked && read_mask(s.ctx, &params->select, bits)) worst = -1;
            dense_attention(dense, q, k, v, N, H, D, masked ? bits : NULL);
            if (worst >= 0) worst = fmax(worst, relative_error(o, dense));
        }
    }
    esa_session_stats stats = { .struct_size = sizeof stats };
    if (worst >= 0 && esa_session_get_stats(s.session, &stats, -1, -1)) worst = -1;
    if (worst >= 0 && stats.calls != LAYERS * STEPS) worst = -1;
    if (worst >= 0)
        printf("%-28s %lld calls, %lld sparse, work %.3f; relative error %.2g\n", name,
               (long long)stats.calls, (long long)stats.sparse_calls, stats.work, worst);
    sparse_close(&s);
    return worst;
}

int main(void)
{
    /* What an engine should use: the recommended settings and a preset of work. The grid says which
     * tokens are neighbours. */
    esa_session_params params = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ERROR,
                                                               N);
    params.layers = LAYERS;
    params.steps = STEPS;
    params.work = esa_preset_work_for(ESA_PRESET_BALANCED, params.steps, params.carry,
                                      params.branches);
    params.work_or_least = 1;
    params.select.layout.grid_q[0] = T;
    params.select.layout.grid_q[1] = Y;
    params.select.layout.grid_q[2] = X;
    const double recommended = run(&params, 0, "recommended, against dense");

    /* Every block kept: the engine's dense attention. */
    esa_session_params plain = esa_session_params_default();
    plain.layers = LAYERS;
    plain.steps = STEPS;
    plain.warmup_frac = 0;
    plain.dense_first_layer = 0;
    plain.select = esa_select_params_default(ESA_SELECT_ADA_BSA);
    plain.select.block_q = plain.select.block_k = BLOCK;
    plain.select.budget = 1;
    const double full = run(&plain, 0, "every block, against dense");

    /* Half of the blocks and nothing in place of the others: dense attention behind the mask. */
    plain.select.budget = 0.5;
    const double half = run(&plain, 1, "half, against its mask");

    /* The sums are f32, so a few units of 2^-24 are all that may differ. */
    return recommended >= 0 && recommended < 0.1 && full >= 0 && full < 2e-6 && half >= 0 &&
                   half < 2e-6
               ? 0
               : 1;
}
