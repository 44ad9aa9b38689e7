/* test_decode.c - esa_decode: decodes latents from a file with the VAE alone.
 * tests/cli/check_export.py shows that it gives the frames of esa_generate.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700 /* nftw */
#include "common/fake_tree.h"

#include <math.h>
#include "esa/esa_tensors.h"
#include "esa/esa_video.h"
#include "model/fill.h"
#include "model/run/model.h"

enum { T = 2, H = 3, W = 4 };

static const char *wan_tiny(void)
{
    static char path[600];
    const char *root = getenv("ESA_TEST_MODELS");
    snprintf(path, sizeof path, "%s/wan-tiny", root && *root ? root : "models");
    return path;
}

static void write_latents(esa_ctx *ctx, const char *path, const char *name, int64_t channels,
                          int64_t t, int64_t h, int64_t w)
{
    const int64_t dim[4] = { channels, t, h, w }, count = channels * t * h * w;
    float *x = malloc((size_t)count * sizeof *x);
    esa_tensors_writer *writer;
    assert_non_null(x);
    fill_tensor(x, count, "latents", 1, 0);
    assert_int_equal(esa_tensors_writer_create(ctx, &writer, path), ESA_OK);
    assert_int_equal(esa_tensors_writer_declare(writer, name, ESA_FILE_F32, 4, dim), ESA_OK);
    assert_int_equal(esa_tensors_writer_data(writer, x, count * 4), ESA_OK);
    assert_int_equal(esa_tensors_writer_finish(writer), ESA_OK);
    esa_tensors_writer_free(writer);
    free(x);
}

static int32_t told(void *user, const esa_progress *p)
{
    int32_t *left = user;
    assert_int_equal(p->stage, ESA_STAGE_DECODE);
    assert_int_equal(p->total, T);
    return --*left < 0;
}

static void frames_and_refusals(void **state)
{
    (void)state;
    scratch s = scratch_make();
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 2);
    esa_model_params p = esa_model_params_default();
    esa_model *model;
    esa_model_info m = { .struct_size = sizeof m };
    esa_frames *frames, *again;
    esa_frames_info x = { .struct_size = sizeof x }, y = x;
    p.parts = ESA_PART_VAE;
    if (esa_model_open(ctx, &model, wan_tiny(), &p) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    assert_int_equal(esa_model_get_info(model, &m), ESA_OK);
    assert_true(m.parameters[0] == 0 && m.parameters[1] > 0); /* the transformer was not loaded */
    write_latents(ctx, scratch_path(&s, "a"), "latents", m.latent_channels, T, H, W);
    char path[700];
    snprintf(path, sizeof path, "%s", scratch_path(&s, "a"));
    esa_decode_params d = esa_decode_params_default();
    int32_t left = 1000;
    d.latents = path;
    d.progress = told;
    d.progress_user = &left;
    if (esa_decode(model, &frames, &d) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    assert_int_equal(esa_frames_get_info(frames, &x), ESA_OK);
    assert_true(x.frames == 1 + (T - 1) * m.factor[0] && x.height == H * m.factor[1] &&
                x.width == W * m.factor[2] && x.fps == m.fps);
    assert_true(left < 1000);
    int lowest = 255, highest = 0;
    const size_t bytes = (size_t)x.frames * (size_t)x.height * (size_t)x.width * 3;
    for (size_t i = 0; i < bytes; i++) {
        lowest = x.rgb[i] < lowest ? x.rgb[i] : lowest;
        highest = x.rgb[i] > highest ? x.rgb[i] : highest;
    }
    assert_true(highest - lowest > 20); /* it is a picture */
    d.progress = NULL;
    assert_int_equal(esa_decode(model, &again, &d), ESA_OK);
    assert_int_equal(esa_frames_get_info(again, &y), ESA_OK);
    assert_memory_equal(x.rgb, y.rgb, bytes);
    esa_frames_free(again);
    d.progress = told;
    left = 0;
    assert_refused(ctx, esa_decode(model, &again, &d), ESA_ERR_STATE, "cancelled", NULL);
    assert_null(again);
    d.progress = NULL;
    d.vae_tile = 3;
    assert_refused(ctx, esa_decode(model, &again, &d), ESA_ERR_ARGUMENT, "tile", NULL);
    d.vae_tile = 0;
    d.struct_size = 3;
    assert_refused(ctx, esa_decode(model, &again, &d), ESA_ERR_VERSION,
                   "esa_decode_params has struct_size 3", NULL);
    d.struct_size = sizeof d;
    d.latents = NULL;
    assert_refused(ctx, esa_decode(model, &again, &d), ESA_ERR_ARGUMENT, "latents", NULL);
    assert_refused(ctx, esa_decode(model, NULL, &d), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_int_equal(esa_decode(NULL, &again, &d), ESA_ERR_ARGUMENT);
    d.latents = path;
    write_latents(ctx, path, "latents", m.latent_channels + 1, T, H, W);
    assert_refused(ctx, esa_decode(model, &again, &d), ESA_ERR_MISMATCH, "latents", NULL);
    write_latents(ctx, path, "latents", m.latent_channels, 1, 1, 20000);
    assert_refused(ctx, esa_decode(model, &again, &d), ESA_ERR_MISMATCH, "20000", NULL);
    write_latents(ctx, path, "latents", m.latent_channels, 1, 1, 16384 / m.factor[2] + 1);
    assert_refused(ctx, esa_decode(model, &again, &d), ESA_ERR_ARGUMENT, "16384", NULL);
    write_latents(ctx, path, "other", m.latent_channels, T, H, W);
    assert_refused(ctx, esa_decode(model, &again, &d), ESA_ERR_MISMATCH, "latents", NULL);
    esa_frames_free(frames);
    esa_model_free(model);
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
    scratch_remove(&s);
}

/* Decodes 256 x 256 pixels on a machine that has so many bytes left in the process's memory group.
 * NULL: refused. */
static esa_frames *within(esa_model *model, const esa_decode_params *p, scratch *root,
                          int64_t bytes)
{
    char text[32];
    esa_frames *frames;
    snprintf(text, sizeof text, "%lld", (long long)bytes);
    fake_put(root, "/sys/fs/cgroup/job", "memory.max", text);
    esa_decode(model, &frames, p);
    return frames;
}

static void keep_info(void *user, int32_t level, const char *text)
{
    if (level == ESA_LOG_INFO) snprintf(user, 200, "%s", text);
}

/* The limit of a control group counts: malloc would grant whole frames. */
static void memory_group(void **state)
{
    (void)state;
    scratch s = scratch_make(), root = scratch_make();
    char said[200] = "";
    esa_ctx_params c = esa_ctx_params_default();
    c.threads = 2;
    c.log = keep_info;
    c.log_user = said;
    esa_ctx *ctx;
    esa_model *model;
    esa_model_params p = esa_model_params_default();
    p.parts = ESA_PART_VAE;
    assert_int_equal(esa_ctx_create(&ctx, &c), ESA_OK);
    if (esa_model_open(ctx, &model, wan_tiny(), &p) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    model->host_root = root.dir;
    fake_put(&root, "/proc", "meminfo", "MemAvailable: 64000000 kB\n");
    fake_put(&root, "/proc/self", "cgroup", "0::/job\n");
    fake_put(&root, "/sys/fs/cgroup/job", "memory.current", "0\n");
    esa_model_info m = { .struct_size = sizeof m };
    assert_int_equal(esa_model_get_info(model, &m), ESA_OK);
    write_latents(ctx, scratch_path(&s, "a"), "latents", m.latent_channels, 1, 256 / m.factor[1],
                  256 / m.factor[2]);
    esa_decode_params d = esa_decode_params_default();
    d.latents = s.path;
    const int32_t latent[3] = { 1, 256 / m.factor[1], 256 / m.factor[2] };
    const int64_t whole = esa_vae_bytes(model->vae, latent, 0),
                  tiles = esa_vae_bytes(model->vae, latent, 128);
    assert_true(tiles < whole);
    esa_frames *frames = within(model, &d, &root, 2 * whole);
    assert_non_null(frames);
    assert_null(strstr(said, "tiles"));
    esa_frames_free(frames);
    frames = within(model, &d, &root, whole); /* less the margin, too little for whole frames */
    assert_non_null(frames);
    assert_non_null(strstr(said, "decoding in tiles of 128 pixels"));
    esa_frames_free(frames);
    frames = within(model, &d, &root, 1000);
    assert_null(frames);
    assert_non_null(strstr(esa_ctx_error(ctx), "even in tiles"));
    assert_non_null(strstr(esa_ctx_error(ctx), "0.00 GB are left"));
    esa_model_free(model);
    esa_ctx_free(ctx);
    fake_remove(&root);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(frames_and_refusals),
                                        cmocka_unit_test(memory_group) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
