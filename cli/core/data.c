/* data.c - random numbers and tensors of the benchmarks.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/data.h"

#include <stdlib.h>
#include <string.h>

uint64_t data_next(data_rng *rng)
{
    uint64_t z = (rng->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double data_unit(data_rng *rng) { return (double)(data_next(rng) >> 11) * 0x1p-53; }

double data_normal(data_rng *rng)
{
    /* Eight bytes of one draw: mean 8 * 127.5, variance 8 * (256^2 - 1) / 12; the reciprocal
     * deviation is the factor. */
    uint64_t z = data_next(rng);
    int sum = 0;
    for (int i = 0; i < 8; i++, z >>= 8) sum += (int)(z & 255);
    return ((double)sum - 1020.0) * 0.0047842;
}

esa_tensor data_tensor_new(int32_t dtype, int64_t B, int64_t H, int64_t N, int64_t D)
{
    const double bytes = (double)B * (double)H * (double)N * (double)D *
                         (dtype == ESA_DTYPE_F32 ? 4.0 : 2.0);
    void *data = NULL;
    if (bytes > 0x1p50 || posix_memalign(&data, 64, ((size_t)bytes + 63) / 64 * 64) != 0) {
        cli_fail("out of memory: a tensor of %lld,%lld,%lld,%lld needs %.1f GiB", (long long)B,
                 (long long)H, (long long)N, (long long)D, bytes / 1073741824.0);
        data = NULL;
    }
    return esa_tensor_bnsd(data, dtype, B, H, N, D);
}

void data_tensor_free(esa_tensor *tensor)
{
    free(tensor->data);
    tensor->data = NULL;
}

esa_tensor data_tensor_to_gpu(esa_ctx *ctx, const esa_tensor *tensor)
{
    esa_tensor t = *tensor;
    const int64_t bytes = data_tensor_count(tensor) * (tensor->dtype == ESA_DTYPE_F32 ? 4 : 2);
    t.device = ESA_DEVICE_CUDA;
    t.data = NULL;
    esa_status status = esa_device_alloc(ctx, &t.data, bytes);
    if (!status) status = esa_device_upload(ctx, t.data, tensor->data, bytes);
    if (!status) return t;
    cli_fail_esa(ctx, status, "copying a tensor to the GPU");
    data_tensor_free_gpu(ctx, &t);
    return t;
}

void data_tensor_free_gpu(esa_ctx *ctx, esa_tensor *tensor)
{
    if (ctx) esa_device_free(ctx, tensor->data);
    tensor->data = NULL;
}

int64_t data_tensor_count(const esa_tensor *t)
{
    return t->dim[0] * t->dim[1] * t->dim[2] * t->dim[3];
}

static uint16_t to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* Takes finite values below 65504 only, as data_tensor_random and synth_fill make them. */
static uint16_t to_f16(float f)
{
    uint32_t u, bits;
    memcpy(&u, &f, 4);
    const uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    /* below 2^-14: adding 0.5 leaves the subnormal in the last mantissa bits */
    if (a < 0x38800000u) {
        float m;
        memcpy(&m, &a, 4);
        m += 0.5f;
        memcpy(&bits, &m, 4);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    return (uint16_t)(sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13));
}

static void store(esa_tensor *t, int64_t i, float f)
{
    if (t->dtype == ESA_DTYPE_F32)
        ((float *)t->data)[i] = f;
    else
        ((uint16_t *)t->data)[i] = t->dtype == ESA_DTYPE_F16 ? to_f16(f) : to_bf16(f);
}

void data_tensor_random(esa_tensor *t, uint64_t seed, double gain)
{
    data_rng rng = { seed * 0x2545f4914f6cdd1du + 1 };
    const int64_t n = data_tensor_count(t);
    for (int64_t i = 0; i < n; i++) store(t, i, (float)(gain * data_normal(&rng)));
}

void data_tensor_convert(esa_tensor *out, const esa_tensor *in)
{
    const int64_t n = data_tensor_count(in);
    for (int64_t i = 0; i < n; i++) store(out, i, ((const float *)in->data)[i]);
}
