/* test_mask.c - the mask object and its conversions: round trips, every kind of bad input,
 * allocation failing at every point.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/kit.h"
#include "mask/mask.h"

static esa_mask_info geometry(int64_t B, int64_t H, int64_t Nq, int64_t Nk, int32_t block_q,
                              int32_t block_k)
{
    esa_mask_info f;
    memset(&f, 0, sizeof f);
    f.struct_size = sizeof f;
    f.B = B;
    f.H = H;
    f.Nq = Nq;
    f.Nk = Nk;
    f.block_q = block_q;
    f.block_k = block_k;
    return f;
}

static void round_trips(void **state)
{
    esa_rng r = { kit_seed("round_trips") };
    esa_ctx *ctx = kit_ctx(1);
    (void)state;
    for (int round = 0; round < 100; round++) {
        const int64_t B = 1 + esa_rng_below(&r, 3), H = 1 + esa_rng_below(&r, 3),
                      Nq = 1 + esa_rng_below(&r, 500), Nk = 1 + esa_rng_below(&r, 900);
        const int64_t nq = (Nq + 31) / 32, nk = (Nk + 15) / 16, rows = B * H * nq,
                      pitch = (nk + 7) / 8;
        const esa_mask_info info = geometry(B, H, Nq, Nk, 32, 16);
        uint8_t *bits = calloc((size_t)(rows * pitch), 1), *bits2 = malloc((size_t)(rows * pitch));
        int32_t *count = malloc((size_t)rows * 4), *index = malloc((size_t)(rows * nk) * 4);
        int64_t kept = 0;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t j = 0; j < nk; j++)
                if (esa_rng_below(&r, 3) == 0) {
                    bits[row * pitch + j / 8] |= (uint8_t)(1 << j % 8);
                    kept++;
                }
        esa_mask *m = NULL, *m2 = NULL, *m3 = NULL;
        assert_int_equal(esa_mask_from_bits(ctx, &m, &info, bits), ESA_OK);
        const esa_mask_info f = kit_info(m);
        assert_int_equal(f.nq, nq);
        assert_int_equal(f.nk, nk);
        assert_int_equal(f.kept, kept);
        assert_int_equal(f.selector, -1);
        assert_int_equal(f.runnable, 1);
        assert_true(isnan(f.density_asked));
        assert_true(fabs(f.density - (double)kept / (double)(rows * nk)) < 1e-12);
        assert_int_equal(esa_mask_to_fa4(m, count, index), ESA_OK);
        assert_int_equal(esa_mask_from_fa4(ctx, &m2, &info, count, index), ESA_OK);
        int64_t most = 0;
        for (int64_t row = 0; row < rows; row++) {
            if (count[row] > most) most = count[row];
            for (int64_t c = count[row]; c < nk; c++) assert_int_equal(index[row * nk + c], 0);
        }
        if (most > 0) { /* a pitch just large enough, and one too small */
            count[0] = -77;
            assert_int_equal(esa_mask_to_lists(m2, count, index, most - 1), ESA_ERR_ARGUMENT);
            assert_int_equal(count[0], -77);
        }
        assert_int_equal(esa_mask_to_lists(m2, count, index, most), ESA_OK);
        assert_int_equal(esa_mask_from_lists(ctx, &m3, &info, count, index, most), ESA_OK);
        assert_int_equal(esa_mask_to_bits(m3, bits2), ESA_OK);
        assert_memory_equal(bits, bits2, (size_t)(rows * pitch));
        esa_mask_free(m);
        esa_mask_free(m2);
        esa_mask_free(m3);
        free(bits);
        free(bits2);
        free(count);
        free(index);
    }
    esa_ctx_free(ctx);
}

static void expect_lists(esa_ctx *ctx, const esa_mask_info *info, const int32_t *count,
                         const int32_t *index, int64_t cap, esa_status want, const char *word)
{
    esa_mask *m = (esa_mask *)(void *)&want; /* anything: a failure must clear it */
    assert_int_equal(esa_mask_from_lists(ctx, &m, info, count, index, cap), want);
    assert_null(m);
    if (!strstr(esa_ctx_error(ctx), word))
        fail_msg("expected \"%s\" in: %s", word, esa_ctx_error(ctx));
}

static void bad_input(void **state)
{
    esa_ctx *ctx = kit_ctx(1);
    esa_mask *m;
    const esa_mask_info good = geometry(1, 2, 32, 64, 16, 16); /* nq 2, nk 4 */
    int32_t count[4] = { 2, 1, 0, 4 },
            index[16] = { 0, 3, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3 }, bad[16];
    (void)state;
    assert_int_equal(esa_mask_from_lists(ctx, &m, &good, count, index, 4), ESA_OK);
    esa_mask_free(m);
    count[2] = -1;
    expect_lists(ctx, &good, count, index, 4, ESA_ERR_ARGUMENT, "count at b=0 h=1 i=0 is -1");
    count[2] = 5;
    expect_lists(ctx, &good, count, index, 4, ESA_ERR_ARGUMENT, "is 5, expected 0..4");
    count[2] = 4;
    expect_lists(ctx, &good, count, index, 3, ESA_ERR_ARGUMENT, "expected 0..3");
    count[2] = 0;
    memcpy(bad, index, sizeof bad);
    bad[15] = 4;
    expect_lists(ctx, &good, count, bad, 4, ESA_ERR_ARGUMENT,
                 "entry 3 is 4, expected a key block 0..3");
    bad[15] = -3;
    expect_lists(ctx, &good, count, bad, 4, ESA_ERR_ARGUMENT, "entry 3 is -3");
    bad[15] = 2;
    expect_lists(ctx, &good, count, bad, 4, ESA_ERR_ARGUMENT, "must ascend");
    bad[15] = 1;
    expect_lists(ctx, &good, count, bad, 4, ESA_ERR_ARGUMENT, "must ascend");
    expect_lists(ctx, &good, count, index, -1, ESA_ERR_ARGUMENT, "cap is -1");
    expect_lists(ctx, &good, NULL, index, 4, ESA_ERR_ARGUMENT, "count is NULL");
    expect_lists(ctx, &good, count, NULL, 4, ESA_ERR_ARGUMENT, "index is NULL");
    expect_lists(ctx, NULL, count, index, 4, ESA_ERR_ARGUMENT, "info is NULL");
    esa_mask_info f = good;
    f.struct_size = 4;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_VERSION, "struct_size 4");
    f = good;
    f.B = 0;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_SHAPE, "B=0");
    f = good;
    f.H = -2;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_SHAPE, "H=-2");
    f = good;
    f.Nq = 0;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_SHAPE, "Nq=0");
    f = good;
    f.Nk = 0;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_SHAPE, "Nk=0");
    f = good;
    f.block_k = 0;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_ARGUMENT, "16x0 blocks");
    f = good;
    f.block_q = -16;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_ARGUMENT, "blocks");
    f = good;
    f.Nk = 65536 * 16;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_SHAPE, "at most 65535");
    f = good;
    f.Nq = INT64_MAX;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_SHAPE, "tokens");
    f = good;
    f.B = INT64_MAX / 2;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_MEMORY, "out of memory");
    f = good;
    f.layout = esa_layout_default();
    f.layout.order = 9;
    expect_lists(ctx, &f, count, index, 4, ESA_ERR_ARGUMENT, "order is 9");
    assert_int_equal(esa_mask_from_lists(NULL, &m, &good, count, index, 4), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_mask_from_lists(ctx, NULL, &good, count, index, 4), ESA_ERR_ARGUMENT);

    uint8_t bits[4] = { 0x0f, 0x01, 0x10, 0x00 }; /* bit 4 of a row of 4 blocks */
    assert_int_equal(esa_mask_from_bits(ctx, &m, &good, bits), ESA_ERR_ARGUMENT);
    assert_null(m);
    assert_non_null(strstr(esa_ctx_error(ctx), "b=0 h=1 i=0"));
    assert_int_equal(esa_mask_from_bits(ctx, &m, &good, NULL), ESA_ERR_ARGUMENT);
    bits[2] = 0;
    assert_int_equal(esa_mask_from_bits(ctx, &m, &good, bits), ESA_OK);
    assert_int_equal(esa_mask_to_lists(m, NULL, index, 4), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_mask_to_lists(NULL, count, index, 4), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_mask_to_bits(m, NULL), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_mask_to_fa4(NULL, count, index), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_mask_get_info(m, NULL), ESA_ERR_ARGUMENT);
    f.struct_size = 3;
    assert_int_equal(esa_mask_get_info(m, &f), ESA_ERR_VERSION);
    esa_mask_free(m);
    esa_mask_free(NULL);
    int32_t cnt[4] = { 5, 0, 0, 0 };
    assert_int_equal(esa_mask_from_fa4(ctx, &m, &good, cnt, index), ESA_ERR_ARGUMENT);
    assert_non_null(strstr(esa_ctx_error(ctx), "full_block_cnt"));
    esa_ctx_free(ctx);
}

/* An allocator that fails at the n-th call and counts what is still held. */
typedef struct counting {
    int64_t left, held, calls;
} counting;

static void *counting_alloc(void *user, uint64_t bytes)
{
    counting *c = user;
    c->calls++;
    if (c->left-- <= 0) return NULL;
    void *p = aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
    if (p) c->held++;
    return p;
}

static void counting_free(void *user, void *p, uint64_t bytes)
{
    counting *c = user;
    (void)bytes;
    c->held--;
    free(p);
}

static void failing_allocator(void **state)
{
    const esa_mask_info info = geometry(2, 3, 100, 100, 16, 16);
    static int32_t count[2 * 3 * 7], index[2 * 3 * 7 * 7];
    static uint8_t bits[2 * 3 * 7];
    (void)state;
    for (int kind = 0; kind < 3; kind++)
        for (int64_t point = 0;; point++) {
            counting c = { 1000, 0, 0 };
            esa_ctx_params p = esa_ctx_params_default();
            esa_ctx *ctx = NULL;
            esa_mask *m = NULL;
            p.threads = 1;
            p.alloc = counting_alloc;
            p.dealloc = counting_free;
            p.alloc_user = &c;
            assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
            const int64_t before = c.held;
            c.left = point;
            const esa_status status = kind == 0
                                          ? esa_mask_from_lists(ctx, &m, &info, count, index, 7)
                                      : kind == 1 ? esa_mask_from_bits(ctx, &m, &info, bits)
                                                  : esa_mask_from_fa4(ctx, &m, &info, count, index);
            c.left = 1000;
            if (status) {
                assert_int_equal(status, ESA_ERR_MEMORY);
                assert_null(m);
                assert_int_equal(c.held, before);
                assert_non_null(strstr(esa_ctx_error(ctx), "out of memory"));
            }
            esa_ctx_free(ctx); /* a mask may outlive its ctx */
            esa_mask_free(m);
            assert_int_equal(c.held, 0);
            if (!status) break;
            assert_true(point < 20);
        }
    /* The object itself. */
    for (int64_t point = 0; point < 3; point++) {
        counting c = { point, 0, 0 };
        const esa_allocator mem = { counting_alloc, counting_free, &c };
        assert_null(esa_mask_new(&mem, 1, 1, 16, 16, 1, 1, 16, 16));
        assert_int_equal(c.held, 0);
    }
}

static void rows_and_bits(void **state)
{
    esa_ctx *ctx = kit_ctx(1);
    (void)state;
    esa_mask *m = esa_mask_new(&ctx->mem, 1, 2, 48, 208, 3, 13, 16, 16);
    assert_non_null(m);
    int32_t count[6], index[6 * 13];
    assert_int_equal(esa_mask_to_lists(m, count, index, 13), ESA_ERR_STATE); /* nothing in it yet */
    uint8_t bits[12], keep[13] = { 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 7 };
    memset(bits, 0xff, sizeof bits); /* bits beyond nk are ignored here */
    esa_mask_set_bits(m, bits, NULL);
    assert_int_equal(esa_mask_kept(m), 6 * 13);
    assert_int_equal(esa_mask_row(m, 5, 1, 2), 5); /* B = 1 broadcasts */
    esa_mask_set_row(m, 5, keep);
    assert_int_equal(m->count[5], 3);
    assert_int_equal(m->index[5 * 13 + 2], 12);
    esa_mask_free(m);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trips),
        cmocka_unit_test(bad_input),
        cmocka_unit_test(failing_allocator),
        cmocka_unit_test(rows_and_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
