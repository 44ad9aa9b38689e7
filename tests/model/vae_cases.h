/* vae_cases.h - the VAE decoders that tests make up, and what they decode, on any device.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_VAE_CASES_H
#define ESA_TESTS_MODEL_VAE_CASES_H

#include "model/vae_bench.h"

#define WAN_MEAN                                                                                   \
    { -0.7571, -0.7089, -0.9113, 0.1075,  -0.1745, 0.9653,  -0.1517, 1.5508,                       \
      0.4134,  -0.0715, 0.5517,  -0.3632, -0.1922, -0.9497, 0.2503,  -0.2921 }
#define WAN_STD                                                                                    \
    { 2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,                              \
      3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160 }

/* The tables of tools/golden/wan_vae.py. */
static const esa_wan_vae_config tiny = { .base_dim = 3,
                                         .decoder_base_dim = 3,
                                         .z_dim = 16,
                                         .levels = 4,
                                         .res_blocks = 1,
                                         .dim_mult = { 1, 1, 1, 1 },
                                         .temporal = { 0, 1, 1 },
                                         .in_channels = 3,
                                         .out_channels = 3,
                                         .factor_t = 4,
                                         .factor_s = 8,
                                         .mean = WAN_MEAN,
                                         .std = WAN_STD };
static const esa_wan_vae_config small = { .base_dim = 24,
                                          .decoder_base_dim = 24,
                                          .z_dim = 16,
                                          .levels = 3,
                                          .res_blocks = 1,
                                          .dim_mult = { 1, 2, 4 },
                                          .temporal = { 0, 1 },
                                          .in_channels = 3,
                                          .out_channels = 3,
                                          .factor_t = 2,
                                          .factor_s = 4,
                                          .mean = WAN_MEAN,
                                          .std = WAN_STD };
static const esa_wan_vae_config odd = { .base_dim = 8,
                                        .decoder_base_dim = 10,
                                        .z_dim = 5,
                                        .levels = 3,
                                        .res_blocks = 2,
                                        .dim_mult = { 1, 3, 2 },
                                        .temporal = { 1, 0 },
                                        .in_channels = 3,
                                        .out_channels = 3,
                                        .factor_t = 2,
                                        .factor_s = 4,
                                        .mean = { 0.5, -1.0, 0.0, 2.0, 0.25 },
                                        .std = { 1.0, 2.0, 0.5, 1.5, 3.0 } };

typedef struct vae_case {
    const char *name;
    const esa_wan_vae_config *config;
    int32_t latent[3], tile;
} vae_case;
static const vae_case cases[] = {
    { "tiny1", &tiny, { 1, 4, 3 }, 0 },         { "tiny5", &tiny, { 2, 4, 3 }, 0 },
    { "tiny9", &tiny, { 3, 4, 3 }, 0 },         { "tiny33", &tiny, { 9, 4, 3 }, 0 },
    { "small1", &small, { 1, 6, 8 }, 0 },       { "small5", &small, { 3, 6, 8 }, 0 },
    { "small9", &small, { 5, 6, 8 }, 0 },       { "small33", &small, { 17, 6, 8 }, 0 },
    { "odd7", &odd, { 4, 5, 7 }, 0 },           { "tiled9", &tiny, { 3, 20, 13 }, 64 },
    { "tiled_wide", &small, { 2, 5, 21 }, 32 },
};

/* made: its folder is made up; NULL: folder is a model's. open 0: the VAE stays closed. */
static inline void bench_begin(bench *b, const esa_wan_vae_config *made, const char *folder,
                               int32_t threads, int32_t device, int32_t open)
{
    char path[640];
    bench_start(b, threads, device);
    if (made) b->folder = vae_folder_make(b->ctx, made);
    b->made = made != NULL;
    b->env.folder = made ? b->folder.top.dir : folder;
    snprintf(path, sizeof path, "%s/vae/config.json", b->env.folder);
    ok(b, esa_config_wan_vae(b->ctx, &b->config, path));
    if (open) ok(b, open_vae(&b->env, &b->vae, &esa_wan_vae_kind, &b->config));
}

static inline void bench_open_on(bench *b, const esa_wan_vae_config *made, const char *folder,
                                 int32_t threads, int32_t device)
{
    bench_begin(b, made, folder, threads, device, 1);
}

static inline void bench_open(bench *b, const esa_wan_vae_config *made, const char *folder,
                              int32_t threads)
{
    bench_open_on(b, made, folder, threads, ESA_DEVICE_CPU);
}

#endif
