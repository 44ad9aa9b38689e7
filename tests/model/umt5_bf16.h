/* umt5_bf16.h - the text encoder in bf16 against f32.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The bound is what transformers loses: the file umt5_bf16 holds the error of its bf16 against its
 * own f32 for the same weights and tokens, and ours may be 1.2 times as large. Errors are the root
 * mean square of the difference over that of f32.
 */
#ifndef ESA_TESTS_MODEL_UMT5_BF16_H
#define ESA_TESTS_MODEL_UMT5_BF16_H

#include "model/umt5_cases.h"

#define SHARE 1.2

static inline double distance(const float *a, const float *b, int64_t count)
{
    double sum = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        const double e = (double)a[i] - (double)b[i];
        sum += e * e;
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(sum / size);
}

/* A device in bf16 against the CPU in f32. */
static inline void compare(const char *name, const char *folder, int64_t tokens, int32_t device)
{
    float *out[2];
    int64_t d = 0, n;
    esa_ctx *ctx = make_ctx(2);
    for (int32_t i = 0; i < 2; i++) {
        bench b;
        bench_open_on(&b, ctx, folder, ESA_HOLD_AUTO, i ? device : ESA_DEVICE_CPU);
        out[i] = encode(&b, name, tokens);
        d = b.config.d_model;
        bench_close(&b);
    }
    esa_tensors *golden = golden_open(ctx, "umt5_bf16.safetensors");
    const double theirs = golden_find(golden, name, &n)[0],
                 off = distance(out[1], out[0], tokens * d);
    print_message("%s: %.5f, %.2f of what transformers loses\n", name, off, off / theirs);
    assert_true(off <= SHARE * theirs);
    esa_tensors_free(golden);
    esa_ctx_free(ctx);
    free(out[0]);
    free(out[1]);
}

static inline void compare_cases(int32_t device)
{
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        esa_ctx *ctx = make_ctx(1);
        wan_folder f = make_folder(ctx, &cases[i].config, ESA_FILE_F32);
        compare(cases[i].name, f.top.dir, cases[i].tokens, device);
        wan_folder_remove(&f);
        esa_ctx_free(ctx);
    }
}

/* wan-tiny's encoder with its own weights. */
static inline void compare_tiny(int32_t device)
{
    char folder[512];
    model_folder(folder, sizeof folder);
    compare("model", folder, 40, device);
}

#endif
