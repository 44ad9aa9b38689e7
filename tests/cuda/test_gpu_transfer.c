/* test_gpu_transfer.c - copies to the GPU beside its work (backend/engine.h): what arrives, in
 * which order, when sources may change, failures, and conversions of weights.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_TIMES=1 also prints the rate of the copies. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/tests.h"
#include "backend/backend.h"
#include "base/half.h"
#include "base/rng.h"
#include "common/naive.h"
#include "gpu_engine.h"

static const esa_engine_transfer *tr;

static int begin(void **state)
{
    const int status = engine_begin(state);
    tr = be->transfer;
    return status;
}

static uint8_t *pinned(int64_t bytes)
{
    void *ptr = NULL;
    must(ctx, tr->pin(ctx, &ptr, bytes));
    assert_non_null(ptr);
    for (int64_t i = 0; i < bytes; i++) ((uint8_t *)ptr)[i] = (uint8_t)esa_rng_below(&rng, 256);
    return ptr;
}

static void *device(int64_t bytes)
{
    void *ptr = NULL;
    must(ctx, be->alloc(ctx, &ptr, bytes));
    return ptr;
}

/* Compares device memory with what is expected there. */
static void expect(const void *at, const uint8_t *want, int64_t bytes, const char *what)
{
    uint8_t *got = malloc((size_t)bytes);
    must(ctx, be->download(ctx, got, at, bytes));
    if (memcmp(got, want, (size_t)bytes)) fail_msg("%s: other bytes", what);
    free(got);
}

/* Any size, in one copy and in three. */
static void sizes(void **state)
{
    static const int64_t bytes[] = { 1, 255, 4097, 1 << 20, (5 << 20) + 3 };
    (void)state;
    for (int i = 0; i < 5; i++)
        for (int32_t lane = 0; lane < ESA_TRANSFER_LANES; lane++) {
            const int64_t n = bytes[i], third = n / 3;
            uint8_t *src = pinned(n), *dst = device(n), *copy = device(n);
            for (int part = 0; part < 3; part++) {
                const int64_t from = part * third, size = part == 2 ? n - 2 * third : third;
                if (size) must(ctx, tr->fetch(ctx, lane, dst + from, src + from, size));
            }
            must(ctx, tr->arrive(ctx, lane));
            must(ctx, be->copy(ctx, copy, dst, n)); /* the work */
            must(ctx, tr->used(ctx, lane));
            expect(copy, src, n, "one lane");
            must(ctx, tr->landed(ctx, lane));
            tr->unpin(ctx, src);
            be->release(ctx, dst, n);
            be->release(ctx, copy, n);
        }
}

/* Blocks of weights run through two lanes: every block must see its own, whatever the copies do
 * meanwhile. The blocks are large enough that a missing wait shows on a real GPU. */
static void blocks(void **state)
{
    enum { BLOCKS = 24, LANES = 2 };
    (void)state;
    const int64_t n = on_stand_in() || getenv("ESA_TEST_SMALL") ? 10000 : 48 << 20;
    uint8_t *src[BLOCKS], *lane[LANES], *out[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        out[i] = device(n);
        src[i] = i < 5 ? pinned(n) : NULL;
        if (i < 5) continue;
        src[i] = src[i % 5]; /* few sources, in an order without a pattern of the lanes */
    }
    for (int l = 0; l < LANES; l++) {
        lane[l] = device(n);
        must(ctx, tr->fetch(ctx, l, lane[l], src[l], n));
    }
    for (int i = 0; i < BLOCKS; i++) {
        const int l = i % LANES;
        must(ctx, tr->arrive(ctx, l));
        for (int repeat = 0; repeat < 3; repeat++) must(ctx, be->copy(ctx, out[i], lane[l], n));
        must(ctx, tr->used(ctx, l));
        if (i + LANES < BLOCKS) must(ctx, tr->fetch(ctx, l, lane[l], src[i + LANES], n));
    }
    for (int i = 0; i < BLOCKS; i++) expect(out[i], src[i], n, "blocks through two lanes");
    for (int l = 0; l < LANES; l++) must(ctx, tr->landed(ctx, l));
    for (int i = 0; i < BLOCKS; i++) {
        if (i < 5) tr->unpin(ctx, src[i]);
        be->release(ctx, out[i], n);
    }
    for (int l = 0; l < LANES; l++) be->release(ctx, lane[l], n);
}

/* Any size to the host, in one piece and in two, and back through another lane. */
static void stores(void **state)
{
    static const int64_t bytes[] = { 1, 255, 4097, (5 << 20) + 3 };
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int32_t c = 0; c < ESA_CARRY_LANES; c++) {
            const int32_t lane = ESA_CARRY_LANE + c,
                          other = ESA_CARRY_LANE + (c + 1) % ESA_CARRY_LANES;
            const int64_t n = bytes[i], half = n / 2;
            uint8_t *want = pinned(n), *host = pinned(n), *from = device(n), *to = device(n),
                    *copy = device(n);
            must(ctx, tr->arrive(ctx, lane));          /* nothing was copied: nothing to wait for */
            must(ctx, be->upload(ctx, from, want, n)); /* the work */
            if (half) must(ctx, tr->store(ctx, lane, host, from, half));
            must(ctx, tr->store(ctx, lane, host + half, from + half, n - half));
            must(ctx, tr->fetch(ctx, other, to, host, n));
            must(ctx, tr->arrive(ctx, other));
            must(ctx, be->copy(ctx, copy, to, n));
            must(ctx, tr->used(ctx, other));
            expect(copy, want, n, "stored and fetched");
            must(ctx, tr->landed(ctx, lane));
            if (memcmp(host, want, (size_t)n)) fail_msg("stored: other bytes");
            must(ctx, tr->landed(ctx, other));
            tr->unpin(ctx, want);
            tr->unpin(ctx, host);
            be->release(ctx, from, n);
            be->release(ctx, to, n);
            be->release(ctx, copy, n);
        }
}

/* What an anchor and the steps after it do: layers make their d in a few lanes and store it, the
 * other branch reads it there, and the next steps fetch it one layer ahead. A second anchor writes
 * the same host memory. The memory is large enough that a missing wait shows on a real GPU. */
static void carried(void **state)
{
    enum { LAYERS = 10, STEPS = 4 };
    (void)state;
    const int64_t n = on_stand_in() || getenv("ESA_TEST_SMALL") ? 10000 : 24 << 20;
    uint8_t *host[LAYERS], *want[LAYERS], *source[LAYERS], *out[LAYERS], *lane[ESA_CARRY_LANES],
        *noise = device(n);
    for (int l = 0; l < LAYERS; l++) {
        host[l] = pinned(n);
        want[l] = pinned(n);
        source[l] = device(n);
        out[l] = device(n);
    }
    for (int c = 0; c < ESA_CARRY_LANES; c++) lane[c] = device(n);
    for (int step = 0; step < STEPS; step++) {
        const int anchor = step % 2 == 0;
        for (int l = 0; l < LAYERS && anchor; l++) {
            want[l][0] ^= 1;
            must(ctx, be->upload(ctx, source[l], want[l], n));
        }
        if (!anchor) must(ctx, tr->fetch(ctx, ESA_CARRY_LANE, lane[0], host[0], n));
        for (int l = 0; l < LAYERS; l++) {
            const int c = l % ESA_CARRY_LANES, next = (l + 1) % ESA_CARRY_LANES;
            if (!anchor && l + 1 < LAYERS)
                must(ctx, tr->fetch(ctx, ESA_CARRY_LANE + next, lane[next], host[l + 1], n));
            must(ctx, tr->arrive(ctx, ESA_CARRY_LANE + c));
            if (anchor) {
                must(ctx, be->copy(ctx, lane[c], noise, n)); /* the kernel, which takes time */
                must(ctx, be->copy(ctx, lane[c], source[l], n));
                must(ctx, tr->store(ctx, ESA_CARRY_LANE + c, host[l], lane[c], n));
            }
            must(ctx, be->copy(ctx, out[l], lane[c], n));
            must(ctx, tr->used(ctx, ESA_CARRY_LANE + c));
        }
        for (int l = 0; l < LAYERS; l++)
            expect(out[l], want[l], n, anchor ? "made" : "fetched one layer ahead");
    }
    for (int c = 0; c < ESA_CARRY_LANES; c++) {
        must(ctx, tr->landed(ctx, ESA_CARRY_LANE + c));
        be->release(ctx, lane[c], n);
    }
    for (int l = 0; l < LAYERS; l++) {
        if (memcmp(host[l], want[l], (size_t)n)) fail_msg("layer %d is not on the host", l);
        tr->unpin(ctx, host[l]);
        tr->unpin(ctx, want[l]);
        be->release(ctx, source[l], n);
        be->release(ctx, out[l], n);
    }
    be->release(ctx, noise, n);
}

/* After `landed` the source may change. */
static void sources(void **state)
{
    (void)state;
    const int64_t n = on_stand_in() || getenv("ESA_TEST_SMALL") ? 5000 : 64 << 20;
    uint8_t *src = pinned(n), *want = malloc((size_t)n), *dst = device(n);
    memcpy(want, src, (size_t)n);
    must(ctx, tr->landed(ctx, 3)); /* nothing was fetched: nothing to wait for */
    must(ctx, tr->arrive(ctx, 3));
    must(ctx, tr->fetch(ctx, 3, dst, src, n));
    must(ctx, tr->landed(ctx, 3));
    memset(src, 0x55, (size_t)n);
    must(ctx, tr->arrive(ctx, 3));
    expect(dst, want, n, "a source that changed after it was read");
    free(want);
    tr->unpin(ctx, src);
    be->release(ctx, dst, n);
}

static void failures(void **state)
{
    (void)state;
    void *ptr = &ctx;
    refused(ctx, tr->pin(ctx, &ptr, INT64_C(1) << 60), ESA_ERR_MEMORY, "memory");
    assert_null(ptr);
    refused(ctx, tr->pin(ctx, &ptr, -1), ESA_ERR_MEMORY, "memory");
    assert_null(ptr);
    must(ctx, tr->pin(ctx, &ptr, 0));
    tr->unpin(ctx, ptr);
    tr->unpin(ctx, NULL);
    refused(ctx, tr->arrive(ctx, ESA_TRANSFER_LANES), ESA_ERR_INTERNAL, "lane");
    refused(ctx, tr->used(ctx, -1), ESA_ERR_INTERNAL, "lane");
    refused(ctx, tr->store(ctx, ESA_CARRY_LANE - 1, &ptr, &ptr, 1), ESA_ERR_INTERNAL, "lane");
    refused(ctx, tr->store(ctx, ESA_TRANSFER_LANES, &ptr, &ptr, 1), ESA_ERR_INTERNAL, "lane");
}

/* That the stand-in catches what a real GPU only sometimes shows: reading before `arrive` or
 * `landed`, a source that changes too early, memory that is not pinned. */
static void caught(void **state)
{
    (void)state;
    if (!on_stand_in()) return;
    uint8_t want[512], got[512];
    uint8_t *src = pinned(512), *dst = device(512);
    memcpy(want, src, 512);
    must(ctx, be->upload(ctx, dst, want, 512));
    must(ctx, tr->fetch(ctx, 0, dst, src, 512));
    must(ctx, be->download(ctx, got, dst, 512));
    assert_memory_not_equal(got, want, 512);
    memset(src, 1, 512);
    must(ctx, tr->arrive(ctx, 0));
    must(ctx, be->download(ctx, got, dst, 512));
    assert_memory_not_equal(got, want, 512);
    refused(ctx, tr->fetch(ctx, 0, dst, want, 512), ESA_ERR_DEVICE, "not pinned");
    refused(ctx, tr->store(ctx, ESA_CARRY_LANE, want, dst, 512), ESA_ERR_DEVICE, "not pinned");
    must(ctx, be->upload(ctx, dst, want, 512)); /* reading before landed, writing before arrive */
    must(ctx, tr->store(ctx, ESA_CARRY_LANE, src, dst, 512));
    assert_memory_not_equal(src, want, 512);
    must(ctx, be->upload(ctx, dst, got, 512));
    must(ctx, tr->landed(ctx, ESA_CARRY_LANE));
    assert_memory_not_equal(src, want, 512);
    tr->unpin(ctx, src);
    be->release(ctx, dst, 512);
}

/* A call that fails leaves one message, and everything can be given back. */
static void bad_luck(void **state)
{
    (void)state;
    if (!on_stand_in()) return;
    const int64_t before = gpu_free_bytes();
    void *src = NULL, *dst = device(64);
    setenv("ESA_STAND_IN_FAIL", "0", 1);
    refused(ctx, tr->pin(ctx, &src, 64), ESA_ERR_MEMORY, "pin");
    assert_null(src);
    must(ctx, tr->pin(ctx, &src, 64));
    setenv("ESA_STAND_IN_FAIL", "0", 1);
    refused(ctx, tr->fetch(ctx, 1, dst, src, 64), ESA_ERR_DEVICE, "told to fail");
    setenv("ESA_STAND_IN_FAIL", "0", 1);
    refused(ctx, tr->store(ctx, ESA_CARRY_LANE, src, dst, 64), ESA_ERR_DEVICE, "told to fail");
    setenv("ESA_STAND_IN_FAIL", "0", 1);
    refused(ctx, tr->arrive(ctx, 1), ESA_ERR_DEVICE, "told to fail");
    setenv("ESA_STAND_IN_FAIL", "0", 1);
    refused(ctx, tr->used(ctx, 1), ESA_ERR_DEVICE, "told to fail");
    setenv("ESA_STAND_IN_FAIL", "0", 1);
    refused(ctx, tr->landed(ctx, 1), ESA_ERR_DEVICE, "told to fail");
    tr->unpin(ctx, src);
    be->release(ctx, dst, 64);
    assert_int_equal(gpu_free_bytes(), before);
}

/* ---------------------------------------------------------------- conversions */

enum { F32 = ESA_DTYPE_F32, F16 = ESA_DTYPE_F16, BF16 = ESA_DTYPE_BF16, F8 = ESA_DTYPE_F8 };

typedef struct convert_case {
    int32_t from, to; /* from -1: random numbers */
    int64_t rows, cols;
    int32_t scales;
} convert_case;

/* The numbers that the conversion sees, and the bytes behind them. */
static uint8_t *source(const convert_case *c, float *value, const float *scale)
{
    const int64_t n = c->rows * c->cols;
    uint8_t *bytes = calloc((size_t)n, 4);
    for (int64_t i = 0; i < n; i++) {
        const float x = i / c->cols == 1 ? 0 : 3 * esa_rng_unit(&rng) - 1.5f; /* a row of zeros */
        const float s = !c->scales ? 1 : scale[c->scales > 1 ? i / c->cols : 0];
        if (c->from < 0) {
            const volatile float product = 0.25f * esa_rng_bell(77, (uint64_t)(9 + i));
            value[i] = 0.5f + product;
        } else if (c->from == F8) {
            bytes[i] = esa_f32_to_f8(200 * x);
            value[i] = esa_f8_to_f32(bytes[i]) * s;
        } else {
            esa_store_f32(bytes, i, c->from, x);
            value[i] = esa_load_f32(bytes, i, c->from);
        }
    }
    return bytes;
}

/* F8: the scale is exact; rounding may differ where the quotient by the scale and the product with
 * its inverse lie on two sides of a middle. */
static void check_f8(const convert_case *c, const float *value, const uint8_t *bytes,
                     const float *given, const uint8_t *got, const float *scale)
{
    for (int64_t r = 0; r < c->rows; r++) {
        float top = 0;
        for (int64_t i = r * c->cols; i < (r + 1) * c->cols; i++) top = fmaxf(top, fabsf(value[i]));
        const float own = top > ESA_F8_ZERO ? top / ESA_F8_MAX : 1,
                    kept = c->scales ? given[c->scales > 1 ? r : 0] : 1;
        assert_true(scale[r] == (c->from == F8 ? kept : own));
        for (int64_t i = r * c->cols; i < (r + 1) * c->cols; i++) {
            const float x = esa_f8_to_f32(got[i]) * scale[r];
            if (c->from == F8)
                assert_int_equal(got[i], bytes[i]);
            else
                assert_true(fabsf(x - value[i]) <=
                            1.001f * (0x1p-4f * fabsf(value[i]) + 0x1p-10f * scale[r]));
        }
    }
}

static void check_convert(const convert_case *c)
{
    const int64_t n = c->rows * c->cols;
    float *value = malloc((size_t)n * 4), *given = malloc((size_t)c->rows * 4),
          *scale = malloc((size_t)c->rows * 4);
    for (int64_t i = 0; i < c->rows; i++) given[i] = 0.01f + esa_rng_unit(&rng);
    uint8_t *bytes = source(c, value, given), *got = malloc((size_t)n * 4), *x = device(4 * n),
            *y = device(4 * n);
    float *x_scale = device(4 * c->rows), *y_scale = device(4 * c->rows);
    must(ctx, be->upload(ctx, x, bytes, 4 * n));
    must(ctx, be->upload(ctx, x_scale, given, 4 * c->rows));
    esa_convert_args args = { .y = esa_view_of(y, c->to, ESA_DEVICE_CUDA, c->rows, c->cols),
                              .x = c->from < 0 ? NULL : x,
                              .x_dtype = c->from,
                              .x_scales = c->scales,
                              .x_scale = c->scales ? x_scale : NULL,
                              .seed = 77,
                              .first = 9,
                              .mean = 0.5f,
                              .deviation = 0.25f };
    args.y.scale = c->to == F8 ? y_scale : NULL;
    must(ctx, tr->convert(ctx, &args));
    must(ctx, be->download(ctx, got, y, 4 * n));
    must(ctx, be->download(ctx, scale, y_scale, 4 * c->rows));
    if (c->to == F8)
        check_f8(c, value, bytes, given, got, scale);
    else
        for (int64_t i = 0; i < n; i++)
            if (esa_load_f32(got, i, c->to) != esa_round_to(value[i], c->to))
                fail_msg("from %d to %d, element %lld is %.9g, expected %.9g", c->from, c->to,
                         (long long)i, (double)esa_load_f32(got, i, c->to),
                         (double)esa_round_to(value[i], c->to));
    be->release(ctx, x, 4 * n);
    be->release(ctx, y, 4 * n);
    be->release(ctx, x_scale, 4 * c->rows);
    be->release(ctx, y_scale, 4 * c->rows);
    free(value);
    free(given);
    free(scale);
    free(bytes);
    free(got);
}

/* Every type of files to every type of products, with the bits of the CPU. */
static void conversions(void **state)
{
    static const int32_t from[] = { F32, F16, BF16, F8, -1 }, to[] = { F32, BF16, F8 };
    static const int64_t size[][2] = { { 1, 1 }, { 3, 7 }, { 5, 256 }, { 33, 1000 }, { 2, 20000 } };
    (void)state;
    for (int f = 0; f < 5; f++)
        for (int t = 0; t < 3; t++)
            for (int s = 0; s < 5; s++)
                for (int scales = 0; scales < (from[f] == F8 ? 3 : 1); scales++) {
                    const convert_case c = { from[f], to[t], size[s][0], size[s][1],
                                             scales < 2 ? scales : (int32_t)size[s][0] };
                    check_convert(&c);
                }
    int64_t room = 0;
    must(ctx, tr->room(ctx, &room));
    assert_true(room > 0);
}

/* ---------------------------------------------------------------- times */

/* Copies of one block of Wan 14B, alone and beside copies on the GPU that take its bandwidth. */
static void times(void **state)
{
    (void)state;
    if (!getenv("ESA_TEST_TIMES")) return;
    const int64_t n = INT64_C(700) << 20;
    void *src = NULL, *host = NULL, *dst = device(n), *a = device(n), *b = device(n);
    must(ctx, tr->pin(ctx, &src, n));
    must(ctx, tr->pin(ctx, &host, n));
    memset(src, 1, (size_t)n);
    memset(host, 1, (size_t)n);
    for (int busy = 0; busy < 2; busy++) {
        double best = 1e9, seconds;
        esa_mark from = { 0 }, to = { 0 };
        for (int i = 0; i < 5; i++) {
            must(ctx, esa_device_sync(ctx));
            must(ctx, be->mark_record(ctx, &from));
            must(ctx, tr->used(ctx, 0));
            must(ctx, tr->fetch(ctx, 0, dst, src, n));
            for (int k = 0; k < 20 * busy; k++) must(ctx, be->copy(ctx, a, b, n));
            must(ctx, tr->arrive(ctx, 0));
            must(ctx, be->mark_record(ctx, &to));
            must(ctx, be->mark_elapsed(ctx, &seconds, &from, &to));
            best = seconds < best ? seconds : best;
        }
        printf("700 MiB from pinned memory%s: %.2f ms, %.1f GB/s\n",
               busy ? " beside 20 copies on the GPU" : "", 1e3 * best, 1e-9 * (double)n / best);
        be->mark_release(ctx, &from);
        be->mark_release(ctx, &to);
    }
    for (int back = 0; back < 2; back++) { /* to the host; beside a copy the other way */
        double best = 1e9, seconds;
        esa_mark from = { 0 }, to = { 0 };
        for (int i = 0; i < 5; i++) {
            must(ctx, esa_device_sync(ctx));
            must(ctx, be->mark_record(ctx, &from));
            must(ctx, tr->used(ctx, 0));
            if (back) must(ctx, tr->fetch(ctx, 0, a, src, n));
            must(ctx, tr->store(ctx, ESA_CARRY_LANE, host, dst, n));
            must(ctx, tr->arrive(ctx, ESA_CARRY_LANE));
            if (back) must(ctx, tr->arrive(ctx, 0));
            must(ctx, be->mark_record(ctx, &to));
            must(ctx, be->mark_elapsed(ctx, &seconds, &from, &to));
            best = seconds < best ? seconds : best;
        }
        printf("700 MiB to pinned memory%s: %.2f ms, %.1f GB/s\n",
               back ? " beside 700 MiB from it" : "", 1e3 * best, 1e-9 * (double)n / best);
        be->mark_release(ctx, &from);
        be->mark_release(ctx, &to);
    }
    tr->unpin(ctx, src);
    tr->unpin(ctx, host);
    be->release(ctx, dst, n);
    be->release(ctx, a, n);
    be->release(ctx, b, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes),    cmocka_unit_test(blocks),   cmocka_unit_test(stores),
        cmocka_unit_test(carried),  cmocka_unit_test(sources),  cmocka_unit_test(caught),
        cmocka_unit_test(bad_luck), cmocka_unit_test(failures), cmocka_unit_test(conversions),
        cmocka_unit_test(times),
    };
    return cmocka_run_group_tests(tests, begin, engine_end);
}
