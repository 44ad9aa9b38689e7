/* vae_bench.h - an opened VAE of any family on any device, and the clip that it decodes.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_VAE_BENCH_H
#define ESA_TESTS_MODEL_VAE_BENCH_H

#include "model/golden.h"
#include "model/host_bf16.h"
#include "model/open_part.h"
#include "model/vae/vae_kind.h"
#include "model/vae_folder.h"

typedef struct bench {
    esa_ctx *ctx;
    esa_nn nn;
    esa_part_env env;
    wan_folder folder; /* made, if made is 1 */
    int32_t made;
    esa_wan_vae_config config; /* of a VAE of Wan */
    esa_vae *vae;
    float *clip;
    int64_t frame_floats, count, frames;
    int32_t stop_at, ticks; /* stop_at: the tick that cancels; 0: none */
    int64_t total;
    int32_t broken; /* 1: a latent is NaN */
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

/* A ctx and operations. device: ESA_DEVICE_*, or ON_HOST_BF16. */
static inline void bench_start(bench *b, int32_t threads, int32_t device)
{
    memset(b, 0, sizeof *b);
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&b->ctx, &p), ESA_OK);
    esa_nn_init(&b->nn, b->ctx);
    ok(b, use_device(&b->nn, device));
    b->env = (esa_part_env){ .nn = &b->nn, .tick = tick, .tick_user = b };
}

/* Opens the VAE of a folder that was made for it. */
static inline void bench_made(bench *b, wan_folder folder, const esa_vae_kind *kind,
                              const void *config)
{
    b->folder = folder;
    b->made = 1;
    b->env.folder = b->folder.top.dir;
    ok(b, open_vae(&b->env, &b->vae, kind, config));
}

static inline void bench_close(bench *b)
{
    esa_vae_free(b->vae);
    assert_int_equal(b->nn.held, b->nn.scratch_bytes); /* the part freed everything */
    esa_nn_close(&b->nn);
    esa_ctx_free(b->ctx);
    if (b->made) wan_folder_remove(&b->folder);
    free(b->clip);
}

/* Keeps a frame, clamped as bytes are. */
static inline esa_status keep(void *user, int64_t frame, const float *rgb)
{
    bench *b = user;
    assert_int_equal(frame, b->frames);
    for (int64_t i = 0; i < b->frame_floats; i++)
        b->clip[frame * b->frame_floats + i] = rgb[i] < -1 ? -1 : rgb[i] > 1 ? 1 : rgb[i];
    b->frames++;
    return ESA_OK;
}

/* Decodes made-up latents into the clip; if bytes is not NULL, into bytes [frames][pixels]. */
static inline esa_status decode_to(bench *b, const char *name, const int32_t latent[3],
                                   int32_t tile, uint8_t *bytes)
{
    int32_t size[3];
    esa_vae_size(b->vae->kind, b->vae->config, latent, size);
    b->frame_floats = (int64_t)size[1] * size[2] * 3;
    b->count = size[0] * b->frame_floats;
    b->frames = b->ticks = 0;
    if (!bytes) {
        free(b->clip);
        b->clip = malloc((size_t)(4 * b->count));
    }
    const int64_t n = (int64_t)b->vae->z_dim * latent[0] * latent[1] * latent[2];
    float *z = malloc((size_t)(4 * n));
    char full[64];
    snprintf(full, sizeof full, "%s.latents", name);
    fill_tensor(z, n, full, 2.0f, 0);
    if (b->broken) z[5] = NAN;
    void *x = NULL;
    esa_status status = b->nn.be->alloc(b->ctx, &x, 4 * n);
    if (!status) status = b->nn.be->upload(b->ctx, x, z, 4 * n);
    if (!status && bytes) status = esa_vae_frames(b->vae, x, latent, tile, bytes);
    if (!status && !bytes) status = esa_vae_decode(b->vae, x, latent, tile, keep, b);
    b->nn.be->release(b->ctx, x, 4 * n);
    free(z);
    if (status == ESA_OK && !bytes) assert_int_equal(b->frames, size[0]);
    return status;
}

static inline esa_status decode(bench *b, const char *name, const int32_t latent[3], int32_t tile)
{
    return decode_to(b, name, latent, tile, NULL);
}

/* The bytes are those of the clip that was decoded before. */
static inline void check_bytes(const bench *b, const uint8_t *bytes)
{
    for (int64_t i = 0; i < b->count; i++)
        assert_int_equal(bytes[i], lrintf((b->clip[i] * 0.5f + 0.5f) * 255.0f));
}

/* The root mean square of the difference of two clips. */
static inline double apart(const float *a, const float *b, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        const double e = (double)a[i] - (double)b[i];
        sum += e * e;
    }
    return sqrt(sum / (double)count);
}

#endif
