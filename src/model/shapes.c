/* shapes.c - models of true shapes with random weights, for measurements without a checkpoint.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "model/random.h"

typedef struct shape {
    const char *name;
    int32_t layers, heads, ffn, height, width;
    double shift; /* of the noise schedule */
} shape;

/* Wan 2.1 T2V. 81 frames each. */
static const shape shapes[] = {
    { "wan-1.3b-480p", 30, 12, 8960, 480, 832, 3 },
    { "wan-1.3b-720p", 30, 12, 8960, 720, 1280, 5 },
    { "wan-14b-480p", 40, 40, 13824, 480, 832, 3 },
    { "wan-14b-720p", 40, 40, 13824, 720, 1280, 5 },
};

static const shape *find(const char *name)
{
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (strcmp(shapes[i].name, name) == 0) return &shapes[i];
    return NULL;
}

esa_status esa_model_shape(esa_model *m)
{
    const shape *s = find(m->folder);
    if (!s)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "there are no random weights for %.100s, expected wan-1.3b-480p, "
                        "wan-1.3b-720p, wan-14b-480p or wan-14b-720p",
                        m->folder);
    m->wan = (esa_wan_config){ .heads = s->heads,
                               .head_dim = 128,
                               .layers = s->layers,
                               .ffn = s->ffn,
                               .in_channels = 16,
                               .out_channels = 16,
                               .patch = { 1, 2, 2 },
                               .text_dim = 4096,
                               .freq_dim = 256,
                               .rope_max = 1024,
                               .cross_norm = 1,
                               .eps = 1e-6 };
    snprintf(m->wan.hash, sizeof m->wan.hash, "random");
    m->vae_config = (esa_wan_vae_config){ .base_dim = 96,
                                          .decoder_base_dim = 96,
                                          .z_dim = m->wan.in_channels,
                                          .levels = 4,
                                          .res_blocks = 2,
                                          .dim_mult = { 1, 2, 4, 4 },
                                          .temporal = { 0, 1, 1 },
                                          .in_channels = 3,
                                          .out_channels = 3,
                                          .factor_t = 4,
                                          .factor_s = 8 };
    for (int32_t i = 0; i < m->wan.in_channels; i++) m->vae_config.std[i] = 1;
    m->sched = (esa_sched_config){
        .kind = ESA_SCHED_UNIPC, .train_steps = 1000, .order = 2, .shift = s->shift
    };
    return ESA_OK;
}

void esa_model_shape_describe(esa_model *m)
{
    const shape *s = find(m->folder);
    snprintf(m->info.name, sizeof m->info.name, "%s", s->name);
    m->info.height = s->height;
    m->info.width = s->width;
}

/* A prompt of ROWS tokens and padding, as the text encoder gives it: rows of zeros. */
#define ROWS 20
#define SIZE 0.1f

esa_status esa_embeds_random(esa_model *m, esa_embeds *e, int32_t branches)
{
    const int64_t rows = m->info.text_tokens, width = m->wan.text_dim;
    for (int32_t b = 0; b < branches; b++) {
        e->rows[b] = rows;
        e->bytes[b] = rows * width * 4;
        e->data[b] = esa_mem_zalloc(&m->ctx->mem, e->bytes[b]);
        if (!e->data[b])
            return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for random embeddings");
        esa_torch_rng rng;
        esa_torch_seed(&rng, (uint64_t)b);
        esa_torch_randn(&rng, e->data[b], ROWS * width);
        for (int64_t i = 0; i < ROWS * width; i++) e->data[b][i] *= SIZE;
    }
    return ESA_OK;
}
