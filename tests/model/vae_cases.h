/* vae_cases.h - the VAE decoders that tests make up, and what they decode, on any device.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_VAE_CASES_H
#define ESA_TESTS_MODEL_VAE_CASES_H

#include "model/golden.h"
#include "model/host_bf16.h"
#include "model/vae/wan_vae.h"
#include "model/vae_folder.h"

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

/* An opened VAE of a made-up folder (or of a real one), and the clip it decodes. */
typedef struct bench {
    esa_ctx *ctx;
    esa_nn nn;
    wan_folder folder;
    int32_t made, stop_at, ticks;
    int64_t total;
    esa_wan_vae_config config;
    esa_part_env env;
    esa_wan_vae *vae;
    float *clip;
    int64_t frame_floats, count, frames;
} bench;

static inline void ok(bench *b, esa_status status)
{
    if (status != ESA_OK) print_error("%s: %s\n", esa_status_name(status), esa_ctx_error(b->ctx));
    assert_int_equal(status, ESA_OK);
}

static inline int32_t tick(void *user, int64_t done, int64_t total)
{
    bench *b = user;
    assert_true(done >= 1 && done <= total);
    b->total = total;
    return ++b->ticks == b->stop_at;
}

static inline void bench_begin(bench *b, const esa_wan_vae_config *made, const char *folder,
                               int32_t threads, int32_t device, int32_t open)
{
    memset(b, 0, sizeof *b);
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&b->ctx, &p), ESA_OK);
    esa_nn_init(&b->nn, b->ctx);
    ok(b, use_device(&b->nn, device));
    if (made) b->folder = vae_folder_make(b->ctx, made);
    b->made = made != NULL;
    char path[640];
    snprintf(path, sizeof path, "%s/vae/config.json", made ? b->folder.top.dir : folder);
    ok(b, esa_config_wan_vae(b->ctx, &b->config, path));
    b->env = (esa_part_env){
        .nn = &b->nn, .folder = made ? b->folder.top.dir : folder, .tick = tick, .tick_user = b
    };
    if (open) ok(b, esa_wan_vae_open(&b->env, &b->vae, &b->config));
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

static inline void bench_close(bench *b)
{
    esa_wan_vae_free(b->vae);
    assert_int_equal(b->nn.held, b->nn.scratch_bytes);
    esa_nn_close(&b->nn);
    esa_ctx_free(b->ctx);
    if (b->made) wan_folder_remove(&b->folder);
    free(b->clip);
}

static inline esa_status keep(void *user, int64_t frame, const float *rgb)
{
    bench *b = user;
    assert_int_equal(frame, b->frames);
    memcpy(b->clip + frame * b->frame_floats, rgb, (size_t)(4 * b->frame_floats));
    b->frames++;
    return ESA_OK;
}

/* Decodes made-up latents into the clip; if bytes is not NULL, into bytes [frames][pixels]. */
static inline esa_status decode_to(bench *b, const char *name, const int32_t latent[3],
                                   int32_t tile, uint8_t *bytes)
{
    int32_t size[3];
    esa_wan_vae_size(&b->config, latent, size);
    b->frame_floats = (int64_t)size[1] * size[2] * 3;
    b->count = size[0] * b->frame_floats;
    b->frames = 0;
    b->ticks = 0;
    free(b->clip);
    b->clip = malloc((size_t)(4 * b->count));
    const int64_t n = (int64_t)b->config.z_dim * latent[0] * latent[1] * latent[2];
    float *z = malloc((size_t)(4 * n));
    char full[64];
    snprintf(full, sizeof full, "%s.latents", name);
    fill_tensor(z, n, full, 2.0f, 0);
    void *x = NULL;
    esa_status status = b->nn.be->alloc(b->ctx, &x, 4 * n);
    if (!status) status = b->nn.be->upload(b->ctx, x, z, 4 * n);
    if (!status && bytes) status = esa_wan_vae_frames(b->vae, x, latent, tile, bytes);
    if (!status && !bytes) status = esa_wan_vae_decode(b->vae, x, latent, tile, keep, b);
    b->nn.be->release(b->ctx, x, 4 * n);
    free(z);
    if (status == ESA_OK && !bytes) assert_int_equal(b->frames, size[0]);
    return status;
}

static inline esa_status decode(bench *b, const char *name, const int32_t latent[3], int32_t tile)
{
    return decode_to(b, name, latent, tile, NULL);
}

#endif
