/* vae_file.c - see vae_file.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/vae_file.h"

static int64_t bytes_in_use(const esa_nn *nn) { return nn->held - nn->scratch_bytes; }

static void close_file(esa_vae_walk *k)
{
    esa_weights_free(k->w);
    esa_mem_free(&k->env->nn->ctx->mem, k->layer, k->most * (int64_t)sizeof *k->layer);
}

esa_status esa_vae_walk_begin(esa_vae_walk *k, const esa_part_env *env, int64_t most)
{
    esa_ctx *ctx = env->nn->ctx;
    *k = (esa_vae_walk){ .env = env, .most = most, .held = bytes_in_use(env->nn) };
    k->layer = esa_mem_zalloc(&ctx->mem, most * (int64_t)sizeof *k->layer);
    if (!k->layer) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
    const esa_status status = esa_part_open(env, &k->w, "vae", "diffusion_pytorch_model", "vae");
    if (status) close_file(k);
    return status;
}

/* ---------------------------------------------------------------- layers */

void esa_vae_want_conv(esa_vae_walk *k, esa_vae_layer layer, int32_t rank, const int64_t *dim,
                       const char *name)
{
    esa_vae_layer *l = &k->layer[k->count++];
    *l = layer;
    esa_weights_want(k->w, &l->weight, 0, rank, dim, "%s.weight", name);
    esa_weights_want(k->w, &l->bias, 0, 1, dim, "%s.bias", name);
}

void esa_vae_want_norm(esa_vae_walk *k, float **weight, float **bias, int64_t channels,
                       const char *name)
{
    esa_vae_layer *l = &k->layer[k->count++];
    *l = (esa_vae_layer){ .vector = { weight, bias }, .channels = channels };
    esa_weights_want(k->w, &l->weight, ESA_WANT_F32, 1, &channels, "%s.weight", name);
    esa_weights_want(k->w, &l->bias, ESA_WANT_F32, 1, &channels, "%s.bias", name);
}

void esa_vae_want_gamma(esa_vae_walk *k, float **gamma, int64_t channels, int32_t rank,
                        const char *name)
{
    esa_vae_layer *l = &k->layer[k->count++];
    *l = (esa_vae_layer){ .vector = { gamma, NULL }, .channels = channels };
    esa_weights_want(k->w, &l->weight, ESA_WANT_F32, rank, (const int64_t[]){ channels, 1, 1, 1 },
                     "%s.gamma", name);
}

/* ---------------------------------------------------------------- loading */

/* The norms, then the statistics of the latents, from host to the device. */
static esa_status place_vectors(const esa_vae_walk *k, esa_vae_held *held,
                                const esa_vae_stats *stats, float *host)
{
    const int32_t z = stats->z_dim;
    int64_t at = 0;
    for (int64_t i = 0; i < k->count; i++) {
        const esa_vae_layer *l = &k->layer[i];
        const esa_weight *const from[2] = { &l->weight, &l->bias };
        for (int32_t n = 0; n < 2; n++) {
            if (!l->vector[n]) continue;
            esa_weight_to_f32(host + at, from[n], 0, l->channels);
            *l->vector[n] = held->vectors + at;
            at += l->channels;
        }
    }
    held->scale = held->vectors + at;
    held->shift = held->scale + z;
    for (int32_t c = 0; c < z; c++) {
        host[at + c] = (float)(stats->std ? stats->std[c] : stats->factor);
        host[at + z + c] = (float)(stats->std ? stats->mean[c] : 0);
    }
    return esa_nn_upload(k->env->nn, held->vectors, host, held->vector_bytes);
}

static esa_status load_vectors(const esa_vae_walk *k, esa_vae_held *held,
                               const esa_vae_stats *stats)
{
    esa_nn *nn = k->env->nn;
    int64_t floats = (int64_t)2 * stats->z_dim;
    for (int64_t i = 0; i < k->count; i++)
        floats += k->layer[i].channels * (k->layer[i].vector[1] ? 2 : 1);
    held->vector_bytes = floats * (int64_t)sizeof(float);
    ESA_TRY(esa_nn_alloc(nn, (void **)&held->vectors, held->vector_bytes, "the norms of the VAE"));
    float *host = esa_mem_alloc(&nn->ctx->mem, held->vector_bytes);
    if (!host) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the norms of the VAE");
    const esa_status status = place_vectors(k, held, stats, host);
    esa_mem_free(&nn->ctx->mem, host, held->vector_bytes);
    return status;
}

/* The part of a tensor for output channels first .. first + count - 1. */
static esa_weight part_of(const esa_weight *w, int64_t first, int64_t count)
{
    esa_weight out = *w;
    if (!w->data) return out;
    out.data = (const char *)w->data +
               first * (esa_weight_count(w) / w->dim[0]) * esa_dtype_size(w->dtype);
    out.dim[0] = count;
    return out;
}

static esa_status pack_conv(esa_nn *nn, esa_conv *conv, const esa_vae_layer *l, int64_t first,
                            int64_t count)
{
    esa_weight w = part_of(&l->weight, first, count), b = part_of(&l->bias, first, count);
    if (w.rank == 2) { /* a layer over the channels of a pixel */
        w.rank = 4;
        w.dim[2] = w.dim[3] = 1;
    }
    return nn->ops->planes->conv_pack(nn, conv, &w, &b, l->up2);
}

static esa_status load_convs(const esa_vae_walk *k)
{
    esa_nn *nn = k->env->nn;
    for (int64_t i = 0; i < k->count; i++) {
        const esa_vae_layer *l = &k->layer[i];
        if (!l->conv) continue;
        const int64_t all = l->weight.dim[0], n = l->second || l->half ? all / 2 : all;
        ESA_TRY(pack_conv(nn, l->conv, l, 0, n));
        if (l->second) ESA_TRY(pack_conv(nn, l->second, l, n, n));
    }
    return ESA_OK;
}

static esa_status load(esa_vae_walk *k, esa_vae_held *held, const esa_vae_stats *stats)
{
    /* Packing copies every weight, so the file is only mapped and not copied a second time. */
    ESA_TRY(esa_weights_load(k->w, ESA_HOLD_FILE, 0));
    ESA_TRY(load_vectors(k, held, stats));
    ESA_TRY(load_convs(k));
    held->parameters = esa_weights_parameters(k->w);
    held->bytes = bytes_in_use(k->env->nn) - k->held;
    return ESA_OK;
}

esa_status esa_vae_walk_end(esa_vae_walk *k, esa_vae_held *held, const esa_vae_stats *stats)
{
    if (!k->encoder) {
        esa_weights_ignore(k->w, "encoder.");
        esa_weights_ignore(k->w, "quant_conv.");
    }
    esa_status status = esa_weights_check(k->w, k->env->report, k->env->report_user);
    if (!status && held) status = load(k, held, stats);
    close_file(k);
    return status;
}

void esa_vae_held_free(esa_nn *nn, esa_vae_held *held)
{
    esa_nn_free(nn, held->vectors, held->vector_bytes);
}
