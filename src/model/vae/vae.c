/* vae.c - makes, loads and frees VAEs: states their layers, compares, loads and packs them.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/vae_kind.h"

#include <stdarg.h>
#include <stdio.h>

enum { CHUNK = 64 };

struct esa_vae_layers {
    esa_vae_layers *next;
    int32_t count;
    esa_vae_layer layer[CHUNK];
};

static int64_t bytes_in_use(const esa_nn *nn) { return nn->held - nn->scratch_bytes; }

/* Calls fn for each layer until it fails. */
static esa_status each_layer(esa_vae *vae, esa_status (*fn)(esa_vae *vae, esa_vae_layer *layer))
{
    for (esa_vae_layers *c = vae->layers; c; c = c->next)
        for (int32_t i = 0; i < c->count; i++) ESA_TRY(fn(vae, &c->layer[i]));
    return ESA_OK;
}

/* ---------------------------------------------------------------- layers */

/* Views of weights point into the layers, so these never move. */
static esa_vae_layer *new_layer(esa_vae *vae)
{
    esa_vae_layers **last = &vae->layers;
    while (*last && (*last)->count == CHUNK) last = &(*last)->next;
    if (!*last) *last = esa_mem_zalloc(&vae->nn->ctx->mem, (int64_t)sizeof **last);
    if (*last) return &(*last)->layer[(*last)->count++];
    vae->status = esa_fail(vae->nn->ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
    return NULL;
}

void esa_vae_rows(esa_vae *vae, const esa_row *rows, int32_t count, void *base,
                  const esa_sizes *sizes, const char *prefix_format, ...)
{
    char prefix[128];
    va_list args;
    va_start(args, prefix_format);
    vsnprintf(prefix, sizeof prefix, prefix_format, args);
    va_end(args);
    for (int32_t i = 0; i < count && !vae->status; i++) {
        const esa_row *row = &rows[i];
        int64_t dim[5];
        esa_vae_layer *l = row->need & ~sizes->have ? NULL : new_layer(vae);
        if (!l) continue;
        l->kind = row->kind;
        l->at = (char *)base + row->at;
        const int32_t rank = esa_row_shape(dim, row->shape, sizes),
                      flags = row->kind >= ESA_VAE_NORM ? ESA_WANT_F32 : 0;
        esa_weights_want(vae->part.weights, &l->weight, flags, rank, dim, "%s%s.%s", prefix,
                         row->name, row->kind == ESA_VAE_GAMMA ? "gamma" : "weight");
        if (row->kind != ESA_VAE_GAMMA)
            esa_weights_want(vae->part.weights, &l->bias, flags, 1, dim, "%s%s.bias", prefix,
                             row->name);
    }
}

static esa_status open_file(esa_vae *vae, const void *config)
{
    ESA_TRY(esa_part_open(&vae->part, "vae", "diffusion_pytorch_model", "vae"));
    ESA_TRY(vae->kind->make(vae, config));
    ESA_TRY(vae->status);
    if (!vae->encoder) {
        esa_weights_ignore(vae->part.weights, "encoder.");
        esa_weights_ignore(vae->part.weights, "quant_conv.");
    }
    return esa_part_compare(&vae->part);
}

esa_status esa_vae_make(const esa_part_env *env, esa_vae **out, const esa_vae_kind *kind,
                        const void *config)
{
    *out = NULL;
    esa_vae *vae = esa_part_new(env, kind->bytes, "the VAE");
    if (!vae) return ESA_ERR_MEMORY;
    vae->kind = kind;
    vae->nn = env->nn;
    const esa_status status = open_file(vae, config);
    if (status)
        esa_vae_free(vae);
    else
        *out = vae;
    return status;
}

static esa_status free_layer(esa_vae *vae, esa_vae_layer *l)
{
    esa_conv *conv = l->at;
    if (l->kind < ESA_VAE_NORM) esa_nn_conv_free(vae->nn, conv);
    if (l->kind == ESA_VAE_HALVES) esa_nn_conv_free(vae->nn, conv + 1);
    return ESA_OK;
}

void esa_vae_free(esa_vae *vae)
{
    if (!vae) return;
    each_layer(vae, free_layer);
    esa_nn_free(vae->nn, vae->vectors, vae->vector_bytes);
    for (esa_vae_layers *c = vae->layers, *next; c; c = next) {
        next = c->next;
        esa_mem_free(&vae->nn->ctx->mem, c, (int64_t)sizeof *c);
    }
    esa_part_free(&vae->part);
}

void esa_vae_memory(const esa_vae *vae, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = vae->parameters;
    *held = vae->bytes;
    *mapped = 0;
}

/* ---------------------------------------------------------------- loading */

static esa_status count_vectors(esa_vae *vae, esa_vae_layer *l)
{
    const int32_t vectors = l->kind == ESA_VAE_NORM ? 2 : l->kind == ESA_VAE_GAMMA;
    vae->vector_bytes += vectors * l->weight.dim[0] * (int64_t)sizeof(float);
    return ESA_OK;
}

/* The norms, then the statistics of the latents, from host to the device. */
static esa_status place_vectors(esa_vae *vae, float *host)
{
    const int32_t z = vae->z_dim;
    int64_t at = 0;
    for (esa_vae_layers *c = vae->layers; c; c = c->next)
        for (int32_t i = 0; i < c->count; i++) {
            const esa_vae_layer *l = &c->layer[i];
            const esa_weight *const from[2] = { &l->weight, &l->bias };
            float **to = l->at;
            const int32_t vectors = l->kind == ESA_VAE_NORM ? 2 : l->kind == ESA_VAE_GAMMA;
            for (int32_t n = 0; n < vectors; n++) {
                esa_weight_to_f32(host + at, from[n], 0, l->weight.dim[0]);
                to[n] = vae->vectors + at;
                at += l->weight.dim[0];
            }
        }
    vae->scale = vae->vectors + at;
    vae->shift = vae->scale + z;
    for (int32_t c = 0; c < z; c++) {
        host[at + c] = (float)(vae->std ? vae->std[c] : vae->factor);
        host[at + z + c] = (float)(vae->std ? vae->mean[c] : 0);
    }
    return esa_nn_upload(vae->nn, vae->vectors, host, vae->vector_bytes);
}

static esa_status load_vectors(esa_vae *vae)
{
    esa_nn *nn = vae->nn;
    vae->vector_bytes = 2 * vae->z_dim * (int64_t)sizeof(float);
    each_layer(vae, count_vectors);
    ESA_TRY(esa_nn_alloc(nn, (void **)&vae->vectors, vae->vector_bytes, "the norms of the VAE"));
    float *host = esa_mem_alloc(&nn->ctx->mem, vae->vector_bytes);
    if (!host) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the norms of the VAE");
    const esa_status status = place_vectors(vae, host);
    esa_mem_free(&nn->ctx->mem, host, vae->vector_bytes);
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
    return nn->ops->planes->conv_pack(nn, conv, &w, &b, l->kind == ESA_VAE_UP2);
}

static esa_status load_conv(esa_vae *vae, esa_vae_layer *l)
{
    if (l->kind >= ESA_VAE_NORM) return ESA_OK;
    esa_conv *conv = l->at;
    const int32_t halves = l->kind == ESA_VAE_HALVES;
    const int64_t all = l->weight.dim[0], n = halves || l->kind == ESA_VAE_HALF ? all / 2 : all;
    ESA_TRY(pack_conv(vae->nn, conv, l, 0, n));
    return halves ? pack_conv(vae->nn, conv + 1, l, n, n) : ESA_OK;
}

esa_status esa_vae_load(esa_vae *vae)
{
    const int64_t before = bytes_in_use(vae->nn);
    /* Packing copies every weight, so the file is only mapped and not copied a second time. */
    ESA_TRY(esa_weights_load(vae->part.weights, ESA_HOLD_FILE, 0));
    ESA_TRY(load_vectors(vae));
    ESA_TRY(each_layer(vae, load_conv));
    vae->parameters = esa_weights_parameters(vae->part.weights);
    vae->bytes = bytes_in_use(vae->nn) - before;
    esa_weights_free(vae->part.weights);
    vae->part.weights = NULL;
    return ESA_OK;
}
