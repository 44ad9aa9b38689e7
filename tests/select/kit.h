/* kit.h - what the selector tests share: contexts, random tensors, masks as bytes.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_SELECT_KIT_H
#define ESA_TESTS_SELECT_KIT_H

#define ESA_EXPERIMENTAL
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/tests.h"
#include "base/half.h"
#include "ctx/ctx.h"
#include "base/rng.h"
#include "esa/esa.h"

static inline esa_ctx *kit_ctx(int32_t threads)
{
    esa_ctx_params p = esa_ctx_params_default();
    esa_ctx *ctx = NULL;
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

/* The seed of a random test: $ESA_TEST_SEED, or a fixed one, so that a run can be repeated (`make
 * test-all` takes the clock). */
static inline uint64_t kit_seed(const char *test)
{
    const char *given = getenv("ESA_TEST_SEED");
    const uint64_t seed = given ? strtoull(given, NULL, 0) : 20261115u;
    printf("[   SEED   ] %s: ESA_TEST_SEED=%llu\n", test, (unsigned long long)seed);
    return seed;
}

/* The plain rule where every row sees the same nk blocks: dense rows take nk each, the others share
 * the rest of total as evenly as integers allow, each at least max(1, forced). What
 * esa_budget_spread must give in that case. */
static inline void kit_rows(int32_t *quota, int64_t nq, int64_t nk, const uint8_t *dense,
                            int64_t forced, int64_t total)
{
    const int64_t least = esa_min64(nk, esa_max64(1, forced));
    int64_t others = 0;
    for (int64_t i = 0; i < nq; i++) others += !(dense && dense[i]);
    const int64_t rest = total - (nq - others) * nk;
    int64_t base = others ? esa_max64(0, rest) / others : 0,
            extra = others ? esa_max64(0, rest) % others : 0;
    if (base < least) {
        base = least;
        extra = 0;
    }
    if (base >= nk) {
        base = nk;
        extra = 0;
    }
    for (int64_t i = 0; i < nq; i++) {
        if (dense && dense[i]) {
            quota[i] = (int32_t)nk;
            continue;
        }
        quota[i] = (int32_t)(base + (extra > 0));
        extra -= extra > 0;
    }
}

/* Approximately normal, from four uniforms. */
static inline float kit_normal(esa_rng *r)
{
    float s = 0.0f;
    for (int i = 0; i < 4; i++) s += esa_rng_unit(r);
    return (s - 2.0f) * 1.7320508f;
}

/* A tensor with memory of its own, random values; bsnd: memory order b,n,h,d. */
typedef struct kit_tensor {
    esa_tensor view;
    void *data;
} kit_tensor;

static inline kit_tensor kit_random(esa_rng *r, int32_t dtype, int64_t B, int64_t H, int64_t N,
                                    int64_t D, int32_t bsnd, float spread)
{
    kit_tensor t;
    const int64_t n = B * H * N * D;
    t.data = malloc((size_t)(n * esa_dtype_size(dtype)));
    assert_non_null(t.data);
    t.view = bsnd ? esa_tensor_bsnd(t.data, dtype, B, H, N, D)
                  : esa_tensor_bnsd(t.data, dtype, B, H, N, D);
    for (int64_t b = 0; b < B; b++) /* same values whatever the memory order */
        for (int64_t h = 0; h < H; h++)
            for (int64_t i = 0; i < N; i++)
                for (int64_t d = 0; d < D; d++)
                    esa_store_f32(t.data,
                                  b * t.view.stride[0] + h * t.view.stride[1] +
                                      i * t.view.stride[2] + d,
                                  dtype, spread * kit_normal(r));
    return t;
}

/* The generator of the golden vectors: values ((s >> 24) - 128) / 64, exact in every dtype. */
static inline kit_tensor kit_golden(uint32_t seed, int32_t dtype, int64_t N, int64_t D)
{
    kit_tensor t;
    uint32_t s = seed;
    t.data = malloc((size_t)(N * D * 4));
    assert_non_null(t.data);
    t.view = esa_tensor_bnsd(t.data, dtype, 1, 1, N, D);
    for (int64_t i = 0; i < N * D; i++) {
        s = s * 1664525u + 1013904223u;
        esa_store_f32(t.data, i, dtype, ((float)(s >> 24) - 128.0f) / 64.0f);
    }
    return t;
}

static inline float kit_at(const esa_tensor *t, int64_t b, int64_t h, int64_t n, int64_t d)
{
    return esa_load_f32(t->data, b * t->stride[0] + h * t->stride[1] + n * t->stride[2] + d,
                        t->dtype);
}

/* Runs a selector that must succeed. */
static inline esa_mask *kit_select(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                                   const esa_select_params *p)
{
    esa_mask *mask = NULL;
    const esa_status status = esa_select(ctx, &mask, q, k, p);
    if (status) fail_msg("esa_select: %s: %s", esa_status_name(status), esa_ctx_error(ctx));
    return mask;
}

static inline esa_mask_info kit_info(const esa_mask *mask)
{
    esa_mask_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_mask_get_info(mask, &info), ESA_OK);
    return info;
}

/* One byte per block, [B][H][nq][nk]; the caller frees. */
static inline uint8_t *kit_bytes(const esa_mask *mask)
{
    const esa_mask_info f = kit_info(mask);
    const int64_t rows = f.B * f.H * f.nq;
    int32_t *count = malloc((size_t)(rows * 4)), *index = malloc((size_t)(rows * f.nk * 4));
    uint8_t *bytes = calloc((size_t)(rows * f.nk), 1);
    assert_true(count && index && bytes);
    assert_int_equal(esa_mask_to_lists(mask, count, index, f.nk), ESA_OK);
    for (int64_t r = 0; r < rows; r++)
        for (int32_t c = 0; c < count[r]; c++) {
            assert_true(c == 0 || index[r * f.nk + c] > index[r * f.nk + c - 1]);
            bytes[r * f.nk + index[r * f.nk + c]] = 1;
        }
    free(count);
    free(index);
    return bytes;
}

/* Selects and gives the bytes alone. */
static inline uint8_t *kit_select_bytes(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                                        const esa_select_params *p)
{
    esa_mask *mask = kit_select(ctx, q, k, p);
    uint8_t *bytes = kit_bytes(mask);
    esa_mask_free(mask);
    return bytes;
}

/* Row i of a one-head mask of at most 64 columns as a hex number, bit j = column j. */
static inline uint64_t kit_row_hex(const uint8_t *bytes, int64_t i, int64_t nk)
{
    uint64_t x = 0;
    for (int64_t j = 0; j < nk && j < 64; j++) x |= (uint64_t)bytes[i * nk + j] << j;
    return x;
}

#endif
