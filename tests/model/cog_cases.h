/* cog_cases.h - the CogVideoX transformers and decoders that are compared with diffusers, on any
 * device; the tables of tools/golden/cog.py.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_COG_CASES_H
#define ESA_TESTS_MODEL_COG_CASES_H

#include "model/cog_folder.h"
#include "model/dit_bench.h"
#include "model/vae_bench.h"
#include "nn/ops.h"

typedef struct cog_case {
    const char *name;
    esa_cog_config config;
    int32_t latent[3];
    double t;
} cog_case;

#define COG_CONFIG(H, D, L, IN, OUT, P, TEXT, TIME, ROWS, SH, SW, BIAS, ROTARY, EPS)               \
    { .heads = H,                                                                                  \
      .head_dim = D,                                                                               \
      .layers = L,                                                                                 \
      .in_channels = IN,                                                                           \
      .out_channels = OUT,                                                                         \
      .patch = P,                                                                                  \
      .text_dim = TEXT,                                                                            \
      .time_dim = TIME,                                                                            \
      .max_text = ROWS,                                                                            \
      .sample_h = SH,                                                                              \
      .sample_w = SW,                                                                              \
      .attention_bias = BIAS,                                                                      \
      .patch_bias = BIAS,                                                                          \
      .rotary = ROTARY,                                                                            \
      .eps = EPS }

static const cog_case cog_cases[] = {
    { "two", COG_CONFIG(2, 16, 2, 4, 4, 2, 12, 8, 10, 12, 18, 1, 0, 1e-5), { 3, 12, 10 }, 417 },
    { "five", COG_CONFIG(2, 64, 3, 16, 16, 2, 24, 32, 26, 12, 18, 1, 1, 1e-5), { 5, 24, 28 }, 999 },
    { "bare", COG_CONFIG(3, 32, 1, 3, 5, 1, 10, 6, 7, 15, 9, 0, 1, 1e-3), { 4, 5, 6 }, 1 },
};
#define COG_CASES ((int32_t)(sizeof cog_cases / sizeof cog_cases[0]))

static const esa_cog_vae_config cog_four = { .levels = 4,
                                             .width = { 8, 16, 16, 24 },
                                             .z_dim = 6,
                                             .layers = 1,
                                             .groups = 4,
                                             .factor_t = 4,
                                             .scaling = 0.7 };
static const esa_cog_vae_config cog_three = { .levels = 3,
                                              .width = { 12, 8, 16 },
                                              .z_dim = 4,
                                              .layers = 2,
                                              .groups = 2,
                                              .factor_t = 2,
                                              .scaling = 1.15258426 };
typedef struct cog_clip {
    const char *name;
    const esa_cog_vae_config *config;
    int32_t latent[3], tile;
} cog_clip;
static const cog_clip cog_clips[] = {
    { "one", &cog_four, { 1, 3, 4 }, 0 },        { "even", &cog_four, { 4, 3, 4 }, 0 },
    { "odd", &cog_four, { 5, 4, 3 }, 0 },        { "three", &cog_three, { 3, 5, 4 }, 0 },
    { "tiled", &cog_three, { 1, 32, 33 }, 120 },
};
#define COG_CLIPS ((int32_t)(sizeof cog_clips / sizeof cog_clips[0]))

/* linear: 0 or ESA_DTYPE_F8. */
static inline void cog_open_dit(dit_bench *b, const cog_case *c, int32_t threads, int32_t device,
                                int32_t linear)
{
    esa_cog_config config;
    const dit_inputs in = { .name = c->name,
                            .latent = c->latent,
                            .rows = c->config.max_text,
                            .valid = c->config.max_text,
                            .text_dim = c->config.text_dim,
                            .t = c->t };
    dit_start(b, threads, device);
    b->env.linear = linear;
    b->folder = cog_folder_make(b->ctx, "transformer", cog_transformer_shapes(&c->config));
    cog_write_config(scratch_path(&b->folder.part, "config.json"), &c->config);
    dit_ok(b, esa_config_cog(b->ctx, &config, scratch_path(&b->folder.part, "config.json")));
    dit_open_with(b, &in, &esa_cog_dit_kind, &config);
}

static inline void cog_open_vae(bench *b, const cog_clip *c, int32_t threads, int32_t device)
{
    esa_cog_vae_config config;
    bench_start(b, threads, device);
    wan_folder folder = cog_folder_make(b->ctx, "vae", cog_decoder_shapes(c->config));
    cog_write_vae_config(scratch_path(&folder.part, "config.json"), c->config);
    ok(b, esa_config_cog_vae(b->ctx, &config, scratch_path(&folder.part, "config.json")));
    bench_made(b, folder, &esa_cog_vae_kind, &config);
}

#endif
