/* wan_dit.c - the forward pass of Wan's transformer in f32: patches, timestep, blocks, head.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block, with e = table + projection of the timestep
 *                 = (shift1, scale1, gate1, shift2, scale2, gate2):
 *   a = LN(x) (1 + scale1) + shift1
 *   q, k, v from a; RMS norm of q and k over the whole width; rotation
 *   x += gate1 out(attention)
 *   c = LN(x) * w + b
 *   q from c, k and v from the text; norms, no rotation
 *   x += out(attention)
 *   f = LN(x) (1 + scale2) + shift2
 *   x += gate2 down(gelu(up(f)))
 * The head: (shift, scale) = table + timestep embedding; LN(x) (1 + scale) + shift; linear to
 * patches of (pt, ph, pw, channel). */
#include "model/dit/wan_dit_internal.h"
#include "session/session.h"

#include <math.h>
#include <string.h>

/* ---------------------------------------------------------------- latents and patches */

typedef struct patch_job {
    const esa_wan_dit *dit;
    float *latent; /* [C][T][H][W] */
    int32_t channels;
    int32_t gather; /* 1: latents to rows (c, pt, ph, pw); 0: rows (pt, ph, pw, c) to latents */
} patch_job;

static void move_patches(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const patch_job *j = arg;
    const esa_wan_dit *dit = j->dit;
    const int32_t *p = dit->config.patch, *g = dit->grid;
    const int64_t W = dit->latent[2], HW = dit->latent[1] * W, THW = dit->latent[0] * HW;
    const int64_t volume = (int64_t)p[0] * p[1] * p[2], width = volume * j->channels;
    for (int64_t i = first; i < first + count; i++) {
        const int64_t n = dit->perm ? dit->perm[i] : i;
        const int64_t t = n / ((int64_t)g[1] * g[2]) * p[0], y = n / g[2] % g[1] * p[1],
                      x = n % g[2] * p[2];
        float *row = dit->patches + i * width, *base = j->latent + t * HW + y * W + x;
        for (int64_t c = 0; c < j->channels; c++)
            for (int64_t m = 0; m < volume; m++) {
                float *at = base + c * THW + m / ((int64_t)p[1] * p[2]) * HW + m / p[2] % p[1] * W +
                            m % p[2];
                if (j->gather)
                    row[c * volume + m] = *at;
                else
                    *at = row[m * j->channels + c];
            }
    }
}

/* With gather 1 latent is only read. */
static void run_patches(esa_wan_dit *dit, float *latent, int32_t channels, int32_t gather)
{
    patch_job j = { dit, latent, channels, gather };
    const double start = esa_nn_now();
    esa_nn_parallel(dit->nn, move_patches, &j, dit->tokens, 64);
    dit->nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
}

/* ---------------------------------------------------------------- the parts of a block */

static esa_status linear(esa_wan_dit *dit, float *y, int64_t ldy, const float *x, int64_t ldx,
                         int64_t rows, const wan_linear *l, const esa_epilogue *e)
{
    return esa_nn_linear(dit->nn, y, ldy, x, ldx, rows, &l->weight, &l->bias, e);
}

/* Norms x[N][d] into dit->a; the vectors may be NULL. */
static void norm_into_a(esa_wan_dit *dit, const float *weight, const float *bias,
                        const float *scale, const float *shift)
{
    const int64_t d = dit->d;
    esa_nn_layer_norm(dit->nn, dit->a, d, dit->x, d, dit->tokens, d, (float)dit->config.eps, weight,
                      bias, scale, shift);
}

static esa_status self_attention(esa_wan_dit *dit, esa_session *session, int32_t layer,
                                 const float *e)
{
    const wan_attn *w = &dit->block[layer].self;
    const int64_t d = dit->d, N = dit->tokens, H = dit->config.heads, D = dit->config.head_dim;
    const float eps = (float)dit->config.eps;
    norm_into_a(dit, NULL, NULL, e + d, e);
    ESA_TRY(linear(dit, dit->q, d, dit->a, d, N, &w->q, NULL));
    ESA_TRY(linear(dit, dit->k, d, dit->a, d, N, &w->k, NULL));
    ESA_TRY(linear(dit, dit->v, d, dit->a, d, N, &w->v, NULL));
    esa_nn_rms_norm(dit->nn, dit->q, d, dit->q, d, N, d, eps, w->norm_q.data);
    esa_nn_rms_norm(dit->nn, dit->k, d, dit->k, d, N, d, eps, w->norm_k.data);
    esa_nn_rope(dit->nn, dit->q, d, N, H, D, dit->cos, dit->sin);
    esa_nn_rope(dit->nn, dit->k, d, N, H, D, dit->cos, dit->sin);
    const esa_tensor q = esa_tensor_bsnd(dit->q, ESA_DTYPE_F32, 1, H, N, D),
                     k = esa_tensor_bsnd(dit->k, ESA_DTYPE_F32, 1, H, N, D);
    const esa_tensor v = esa_tensor_bsnd(dit->v, ESA_DTYPE_F32, 1, H, N, D),
                     o = esa_tensor_bsnd(dit->a, ESA_DTYPE_F32, 1, H, N, D);
    const double start = esa_nn_now();
    const esa_qkvo views = { &q, &k, &v, &o, NULL };
    ESA_TRY(esa_session_attend(session, layer, ESA_CALL_SELF, &views));
    dit->nn->seconds[ESA_NN_SELF] += esa_nn_now() - start;
    const esa_epilogue add = { .gate = e + 2 * d, .residual = dit->x, .residual_ld = d };
    return linear(dit, dit->x, d, dit->a, d, N, &w->out, &add);
}

static esa_status cross_attention(esa_wan_dit *dit, int32_t layer, const wan_text *text)
{
    const wan_block *b = &dit->block[layer];
    const int64_t d = dit->d, N = dit->tokens, H = dit->config.heads, D = dit->config.head_dim;
    const float *input = dit->x;
    if (dit->config.cross_norm) {
        norm_into_a(dit, b->norm2_weight.data, b->norm2_bias.data, NULL, NULL);
        input = dit->a;
    }
    ESA_TRY(linear(dit, dit->q, d, input, d, N, &b->cross.q, NULL));
    esa_nn_rms_norm(dit->nn, dit->q, d, dit->q, d, N, d, (float)dit->config.eps,
                    b->cross.norm_q.data);
    const float *k = text->kv + 2 * layer * text->rows * d, *v = k + text->rows * d;
    const esa_nn_bias bias = { .key = text->bias };
    ESA_TRY(esa_nn_attention(dit->nn, dit->a, d, dit->q, d, k, d, v, d, N, text->rows, H, D,
                             (float)(1 / sqrt((double)D)), &bias));
    const esa_epilogue add = { .residual = dit->x, .residual_ld = d };
    return linear(dit, dit->x, d, dit->a, d, N, &b->cross.out, &add);
}

static esa_status feed_forward(esa_wan_dit *dit, int32_t layer, const float *e)
{
    const wan_block *b = &dit->block[layer];
    const int64_t d = dit->d, ffn = dit->config.ffn;
    const esa_epilogue gelu = { .act = ESA_ACT_GELU_TANH };
    norm_into_a(dit, NULL, NULL, e + 4 * d, e + 3 * d);
    for (int64_t r = 0; r < dit->tokens; r += dit->ff_rows) {
        const int64_t n = esa_min64(dit->ff_rows, dit->tokens - r);
        const esa_epilogue add = { .gate = e + 5 * d,
                                   .residual = dit->x + r * d,
                                   .residual_ld = d };
        ESA_TRY(linear(dit, dit->hidden, ffn, dit->a + r * d, d, n, &b->up, &gelu));
        ESA_TRY(linear(dit, dit->x + r * d, d, dit->hidden, ffn, n, &b->down, &add));
    }
    return ESA_OK;
}

/* Computes temb[d], silu[d] and proj[6d], which lie one after the other, from the timestep. */
static esa_status embed_time(esa_wan_dit *dit, double t)
{
    const int64_t d = dit->d;
    float *temb = dit->temb, *silu = temb + d, *proj = silu + d, *wave = temb + 14 * d;
    const esa_epilogue act = { .act = ESA_ACT_SILU };
    esa_timestep_sinusoid(wave, dit->config.freq_dim, t);
    ESA_TRY(linear(dit, silu, d, wave, dit->config.freq_dim, 1, &dit->time1, &act));
    ESA_TRY(linear(dit, temb, d, silu, d, 1, &dit->time2, NULL));
    for (int64_t i = 0; i < d; i++) silu[i] = esa_silu(temb[i]);
    return linear(dit, proj, 6 * d, silu, d, 1, &dit->time_proj, NULL);
}

static void show(esa_wan_dit *dit, int32_t block)
{
    if (!dit->watch) return;
    const int64_t d = dit->d;
    for (int64_t i = 0; i < dit->tokens; i++) /* k is free between blocks */
        memcpy(dit->k + (dit->perm ? dit->perm[i] : i) * d, dit->x + i * d, (size_t)d * 4);
    dit->watch(dit->watch_user, block, dit->k, dit->tokens, d);
}

static esa_status forward(esa_wan_dit *dit, esa_session *session, const wan_text *text, float *v,
                          const float *x, double t)
{
    const esa_wan_config *c = &dit->config;
    const int64_t d = dit->d, N = dit->tokens,
                  volume = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    float *temb = dit->temb, *proj = temb + 2 * d, *e = temb + 8 * d;
    run_patches(dit, (float *)(uintptr_t)x, c->in_channels, 1);
    ESA_TRY(linear(dit, dit->x, d, dit->patches, volume * c->in_channels, N, &dit->patch, NULL));
    ESA_TRY(embed_time(dit, t));
    show(dit, -1);
    for (int32_t i = 0; i < c->layers; i++) {
        const float *table = dit->block[i].table.data;
        for (int64_t n = 0; n < 6 * d; n++) e[n] = table[n] + proj[n];
        ESA_TRY(self_attention(dit, session, i, e));
        ESA_TRY(cross_attention(dit, i, text));
        ESA_TRY(feed_forward(dit, i, e));
        show(dit, i);
        if (dit->tick && dit->tick(dit->tick_user, i + 1, c->layers))
            return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    const float *table = dit->table.data;
    for (int64_t n = 0; n < d; n++) {
        e[n] = table[n] + temb[n];
        e[d + n] = table[d + n] + temb[n];
    }
    norm_into_a(dit, NULL, NULL, e + d, e);
    ESA_TRY(
        linear(dit, dit->patches, volume * c->out_channels, dit->a, d, N, &dit->proj_out, NULL));
    run_patches(dit, v, c->out_channels, 0);
    return ESA_OK;
}

esa_status esa_wan_dit_forward(esa_wan_dit *dit, esa_session *session, int32_t branch, float *v,
                               const float *x, double t)
{
    if (branch < 0 || branch >= dit->branches || !dit->text[branch].kv)
        return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "the transformer has no text for branch %d",
                        branch);
    esa_nn_enter(dit->nn);
    const esa_status status = forward(dit, session, &dit->text[branch], v, x, t);
    esa_nn_leave(dit->nn);
    return status;
}
