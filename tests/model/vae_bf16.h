/* vae_bf16.h - the VAE decoder in bf16 against f32.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The bound is what diffusers loses: the file wan_vae_bf16 holds the error of its bf16 for the same
 * weights and latents, and ours may be 1.2 times as large. Errors are the root mean square of the
 * difference.
 */
#ifndef ESA_TESTS_MODEL_VAE_BF16_H
#define ESA_TESTS_MODEL_VAE_BF16_H

#include "model/vae_cases.h"

#define SHARE      1.2
/* diffusers' tiny configuration normalises over three channels, where a pixel near zero magnifies
 * rounding: both lose a tenth of the range, and which of the two loses more is a matter of luck. */
#define SHARE_TINY 4.0

static inline double bf16_error(esa_ctx *ctx, const char *name)
{
    int64_t n;
    esa_tensors *golden = golden_open(ctx, "wan_vae_bf16.safetensors");
    const double off = golden_find(golden, name, &n)[0];
    assert_int_equal(n, 1);
    esa_tensors_free(golden);
    return off;
}

/* The clip of a case on a device in bf16 and on the CPU in f32. */
static inline void compare(const vae_case *c, const char *folder, int32_t device)
{
    bench cpu, gpu;
    bench_open_on(&cpu, c->config, folder, 2, ESA_DEVICE_CPU);
    bench_open_on(&gpu, c->config, folder, 2, device);
    ok(&cpu, decode(&cpu, c->name, c->latent, c->tile));
    ok(&gpu, decode(&gpu, c->name, c->latent, c->tile));
    assert_int_equal(gpu.ticks, gpu.total);
    const double off = apart(gpu.clip, cpu.clip, cpu.count), theirs = bf16_error(cpu.ctx, c->name);
    print_message("%s: %.5f, %.2f of what diffusers loses\n", c->name, off, off / theirs);
    assert_true(off <= (cpu.config.base_dim == 3 ? SHARE_TINY : SHARE) * theirs);
    bench_close(&cpu);
    bench_close(&gpu);
}

/* wan-tiny's decoder with its own weights. */
static inline void compare_tiny(int32_t device)
{
    const char *models = getenv("ESA_TEST_MODELS");
    char folder[512];
    assert_non_null(models);
    snprintf(folder, sizeof folder, "%s/wan-tiny", models);
    const vae_case c = { "model", NULL, { 5, 8, 8 }, 0 };
    compare(&c, folder, device);
}

#endif
