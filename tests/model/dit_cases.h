/* dit_cases.h - the transformers that are compared with diffusers; the same table as in
 * tools/golden/wan_dit.py.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_DIT_CASES_H
#define ESA_TESTS_MODEL_DIT_CASES_H

#include "model/dit_bench.h"

typedef struct dit_case {
    const char *name;
    esa_wan_config config;
    int32_t latent[3];
    int64_t text_rows, text_valid;
    double t;
} dit_case;

#define DIT_CONFIG(H, D, L, F, IN, OUT, TEXT, FREQ, MAX, NORM, P0, P1, P2)                         \
    { .heads = H,                                                                                  \
      .head_dim = D,                                                                               \
      .layers = L,                                                                                 \
      .ffn = F,                                                                                    \
      .in_channels = IN,                                                                           \
      .out_channels = OUT,                                                                         \
      .patch = { P0, P1, P2 },                                                                     \
      .text_dim = TEXT,                                                                            \
      .freq_dim = FREQ,                                                                            \
      .rope_max = MAX,                                                                             \
      .cross_norm = NORM,                                                                          \
      .eps = 1e-6 }

static const dit_case dit_cases[] = {
    { "tiny", DIT_CONFIG(2, 12, 2, 32, 4, 4, 16, 256, 32, 1, 1, 2, 2), { 2, 16, 16 }, 12, 12, 417 },
    { "mini1280",
      DIT_CONFIG(2, 128, 2, 512, 16, 16, 64, 256, 1024, 1, 1, 2, 2),
      { 5, 32, 32 },
      40,
      17,
      999 },
    { "mini1650",
      DIT_CONFIG(2, 128, 2, 512, 16, 16, 64, 256, 1024, 1, 1, 2, 2),
      { 5, 30, 44 },
      40,
      39,
      57 },
    { "wan-tiny",
      DIT_CONFIG(4, 64, 8, 512, 16, 16, 192, 256, 1024, 1, 1, 2, 2),
      { 5, 16, 24 },
      512,
      23,
      750 },
    { "nonorm", DIT_CONFIG(3, 20, 1, 48, 3, 5, 10, 32, 1024, 0, 2, 1, 2), { 4, 6, 10 }, 7, 7, 1 },
};

static inline dit_inputs inputs_of(const dit_case *c)
{
    return (dit_inputs){ .name = c->name,
                         .latent = c->latent,
                         .rows = c->text_rows,
                         .valid = c->text_valid,
                         .text_dim = c->config.text_dim,
                         .t = c->t };
}

/* device: ESA_DEVICE_*, or ON_HOST_BF16. */
static inline void dit_open_on(dit_bench *b, const dit_case *c, int32_t hold, int32_t threads,
                               int32_t device)
{
    esa_wan_config config;
    const dit_inputs in = inputs_of(c);
    dit_start(b, threads, device);
    b->env.hold = hold;
    b->folder = wan_folder_make();
    wan_folder_fill(&b->folder, b->ctx, &c->config);
    dit_ok(b, esa_config_wan(b->ctx, &config, scratch_path(&b->folder.part, "config.json")));
    dit_open_with(b, &in, &esa_wan_dit_kind, &config);
    memset(b->text + c->text_valid * config.text_dim, 0,
           (size_t)((c->text_rows - c->text_valid) * config.text_dim) * 4);
}

static inline void dit_open(dit_bench *b, const dit_case *c, int32_t hold, int32_t threads)
{
    dit_open_on(b, c, hold, threads, ESA_DEVICE_CPU);
}

#endif
