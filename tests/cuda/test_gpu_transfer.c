/* test_gpu_transfer.c - copies to the GPU beside its work (backend/engine.h): what arrives, in
 * which order, when sources may change, and failures. SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_TIMES=1 also prints the rate of the copies. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "base/rng.h"
#include "common/naive.h"
#include "gpu_kit.h"

static esa_ctx *ctx;
static const esa_backend *be;
static const esa_engine_transfer *tr;
static esa_rng rng;

static int begin(void **state)
{
    (void)state;
    ctx = kit_ctx(1);
    be = esa_backend_of(ESA_DEVICE_CUDA);
    tr = be->transfer;
    rng = (esa_rng){ test_seed() };
    printf("seed %llu\n", (unsigned long long)test_seed());
    return be->open(ctx) ? -1 : 0;
}

static int end(void **state)
{
    (void)state;
    esa_ctx_free(ctx);
    return 0;
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
        for (int32_t lane = 0; lane < ESA_ENGINE_LANES; lane++) {
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
    const int64_t n = on_stand_in() ? 10000 : 48 << 20;
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

/* After `landed` the source may change. */
static void sources(void **state)
{
    (void)state;
    const int64_t n = on_stand_in() ? 5000 : 64 << 20;
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
    refused(ctx, tr->arrive(ctx, ESA_ENGINE_LANES), ESA_ERR_INTERNAL, "lane");
    refused(ctx, tr->used(ctx, -1), ESA_ERR_INTERNAL, "lane");
}

/* That the stand-in catches what a real GPU only sometimes shows: reading before `arrive`, a source
 * that changes too early, memory that is not pinned. */
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
    refused(ctx, tr->arrive(ctx, 1), ESA_ERR_DEVICE, "told to fail");
    setenv("ESA_STAND_IN_FAIL", "0", 1);
    refused(ctx, tr->used(ctx, 1), ESA_ERR_DEVICE, "told to fail");
    setenv("ESA_STAND_IN_FAIL", "0", 1);
    refused(ctx, tr->landed(ctx, 1), ESA_ERR_DEVICE, "told to fail");
    tr->unpin(ctx, src);
    be->release(ctx, dst, 64);
    assert_int_equal(gpu_free_bytes(), before);
}

/* ---------------------------------------------------------------- times */

/* Copies of one block of Wan 14B, alone and beside copies on the GPU that take its bandwidth. */
static void times(void **state)
{
    (void)state;
    if (!getenv("ESA_TEST_TIMES")) return;
    const int64_t n = INT64_C(700) << 20;
    void *src = NULL, *dst = device(n), *a = device(n), *b = device(n);
    must(ctx, tr->pin(ctx, &src, n));
    memset(src, 1, (size_t)n);
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
    tr->unpin(ctx, src);
    be->release(ctx, dst, n);
    be->release(ctx, a, n);
    be->release(ctx, b, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes),  cmocka_unit_test(blocks),   cmocka_unit_test(sources),
        cmocka_unit_test(caught), cmocka_unit_test(bad_luck), cmocka_unit_test(failures),
        cmocka_unit_test(times),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
