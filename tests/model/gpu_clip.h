/* gpu_clip.h - what the tests of whole videos on a GPU share: a ctx, wan-tiny on a device, a clip.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_GPU_CLIP_H
#define ESA_TESTS_MODEL_GPU_CLIP_H

#include "io/scratch.h"

#include "backend/backend.h"
#include "esa/esa_video.h"

static inline esa_ctx *context(void)
{
    esa_ctx *ctx;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 2;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

/* The stand-in fails on demand, and only this test uses its memory. */
static inline int32_t on_stand_in(void)
{
    const char *library = getenv("ESA_CUDA_LIB");
    return library && strstr(library, "stand_in");
}

static inline esa_status open_on(esa_ctx *ctx, esa_model **model, int32_t device, int64_t limit)
{
    char path[600];
    const char *root = getenv("ESA_TEST_MODELS");
    esa_model_params p = esa_model_params_default();
    snprintf(path, sizeof path, "%s/wan-tiny", root && *root ? root : "models");
    p.device = device;
    p.max_memory = limit;
    return esa_model_open(ctx, model, path, &p);
}

static inline esa_model *opened(esa_ctx *ctx, int32_t device, int64_t limit)
{
    esa_model *model;
    if (open_on(ctx, &model, device, limit)) fail_msg("%s", esa_ctx_error(ctx));
    return model;
}

/* 24 MB, too little for all weights of wan-tiny. Where products need more workspace than the
 * stand-in's 64 KB, so much more, with the driver's share of a sixteenth. */
static inline int64_t tight_limit(void)
{
    esa_ctx *ctx = context();
    const esa_backend *be = esa_backend_of(ESA_DEVICE_CUDA);
    assert_int_equal(be->open(ctx), ESA_OK);
    const int64_t workspace = be->products->workspace(ctx);
    esa_ctx_free(ctx);
    return (INT64_C(24) << 20) + (workspace - (64 << 10)) / 15 * 16;
}

static inline esa_generate_params video(int32_t side, int32_t steps)
{
    esa_generate_params p = esa_generate_params_default();
    p.prompt = "a red ball rolls to the right over a blue floor";
    p.frames = 5;
    p.height = p.width = side;
    p.steps = steps;
    return p;
}

static inline esa_frames *made(esa_ctx *ctx, esa_model *model, const esa_generate_params *p,
                               esa_generate_stats *stats)
{
    esa_frames *frames;
    *stats = (esa_generate_stats){ .struct_size = sizeof *stats };
    if (esa_generate(model, &frames, p, stats)) fail_msg("%s", esa_ctx_error(ctx));
    return frames;
}

static inline double psnr(esa_ctx *ctx, const esa_frames *a, const esa_frames *b)
{
    esa_metrics m = { .struct_size = sizeof m };
    assert_int_equal(esa_frames_compare(ctx, &m, a, b), ESA_OK);
    return m.psnr;
}

static inline int64_t free_bytes(void)
{
    esa_ctx *ctx = context();
    esa_device_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_device_get_info(ctx, &info), ESA_OK);
    esa_ctx_free(ctx);
    return info.free_memory;
}

#endif
