/* test_mask_levels.c - masks with a fine level and with orders per head: conversions, copies,
 * facts, bad input.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/kit.h"
#include "common/on_gpu.h"
#include "mask/mask.h"

static esa_mask_info geometry(int64_t B, int64_t H, int64_t Nq, int64_t Nk, int32_t fine)
{
    esa_mask_info f;
    memset(&f, 0, sizeof f);
    f.struct_size = sizeof f;
    f.B = B;
    f.H = H;
    f.Nq = Nq;
    f.Nk = Nk;
    f.block_q = 32;
    f.block_k = 16;
    f.fine = fine;
    f.layout = esa_layout_default();
    return f;
}

/* A copy where the calls of this run go, which must be as good as the mask itself. */
static esa_mask *moved(esa_ctx *ctx, const esa_mask *mask)
{
    esa_mask *there = NULL;
    assert_int_equal(
        esa_mask_to_device(ctx, &there, mask, on_gpu() ? ESA_DEVICE_CUDA : ESA_DEVICE_CPU), ESA_OK);
    return there;
}

static void round_trips(void **state)
{
    (void)state;
    esa_rng r = { kit_seed("levels round trips") };
    esa_ctx *ctx = kit_ctx(1);
    for (int round = 0; round < 60; round++) {
        const int64_t B = 1 + esa_rng_below(&r, 3), H = 1 + esa_rng_below(&r, 3),
                      Nq = 1 + esa_rng_below(&r, 500), Nk = 1 + esa_rng_below(&r, 900),
                      nq = (Nq + 31) / 32, nk = (Nk + 15) / 16, cells = B * H * nq * nk,
                      bytes = B * H * nq * ((nk + 7) / 8);
        const int32_t fine = round % 4 ? 2 << round % 4 : 0;
        const esa_mask_info info = geometry(B, H, Nq, Nk, fine);
        uint8_t *level = malloc((size_t)cells), *back = malloc((size_t)cells),
                *bits = calloc(1, (size_t)bytes), *got = malloc((size_t)bytes);
        int64_t kept = 0, refined = 0;
        for (int64_t i = 0; i < cells; i++) {
            level[i] = (uint8_t)esa_rng_below(&r, 3);
            if (!fine && level[i] == 1) level[i] = 2;
            kept += level[i] == 0;
            refined += level[i] == 1;
            if (level[i] == 0)
                bits[i / nk * ((nk + 7) / 8) + i % nk / 8] |= (uint8_t)(1 << i % nk % 8);
        }
        esa_mask *m = NULL;
        assert_int_equal(esa_mask_from_levels(ctx, &m, &info, level), ESA_OK);
        for (int copy = 0; copy < 2; copy++) {
            const esa_mask_info f = kit_info(m);
            assert_int_equal(f.fine, fine);
            assert_int_equal(f.fine_blocks, refined);
            assert_int_equal(f.kept, kept);
            memset(back, 77, (size_t)cells);
            assert_int_equal(esa_mask_to_levels(m, back), ESA_OK);
            assert_memory_equal(level, back, (size_t)cells);
            assert_int_equal(esa_mask_to_bits(m, got), ESA_OK); /* exact blocks only */
            assert_memory_equal(bits, got, (size_t)bytes);
            esa_mask *next = moved(ctx, m);
            esa_mask_free(m);
            m = next;
        }
        esa_mask_free(m);
        free(level);
        free(back);
        free(bits);
        free(got);
    }
    esa_ctx_free(ctx);
}

static void bad_levels(void **state)
{
    (void)state;
    esa_ctx *ctx = kit_ctx(1);
    uint8_t level[2 * 2 * 3]; /* B 1, H 2, 2 x 3 blocks */
    memset(level, 2, sizeof level);
    esa_mask *m;
#define EXPECT(change, status, word)                                                               \
    do {                                                                                           \
        esa_mask_info info = geometry(1, 2, 50, 40, 4);                                            \
        uint8_t *given = level;                                                                    \
        change;                                                                                    \
        m = (esa_mask *)&info;                                                                     \
        assert_int_equal(esa_mask_from_levels(ctx, &m, &info, given), status);                     \
        assert_null(m);                                                                            \
        if (!strstr(esa_ctx_error(ctx), word))                                                     \
            fail_msg("\"%s\" does not mention \"%s\"", esa_ctx_error(ctx), word);                  \
    } while (0)
    EXPECT(given = NULL, ESA_ERR_ARGUMENT, "level is NULL");
    EXPECT(info.struct_size = 8, ESA_ERR_VERSION, "struct_size 8");
    EXPECT(info.fine = 3, ESA_ERR_ARGUMENT, "info.fine is 3");
    EXPECT(info.fine = 32, ESA_ERR_ARGUMENT, "info.fine is 32");
    EXPECT(info.block_k = 18, ESA_ERR_ARGUMENT, "fine must divide");
    level[7] = 3;
    EXPECT((void)0, ESA_ERR_ARGUMENT, "b=0 h=1 i=0, block 1 is 3");
    level[7] = 1;
    EXPECT(info.fine = 0, ESA_ERR_ARGUMENT, "info.fine is 0");
#undef EXPECT
    const esa_mask_info info = geometry(1, 2, 50, 40, 4);
    assert_int_equal(esa_mask_from_levels(ctx, NULL, &info, level), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_mask_from_levels(NULL, &m, &info, level), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_mask_from_levels(ctx, &m, &info, level), ESA_OK);
    assert_int_equal(esa_mask_to_levels(m, NULL), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_mask_to_levels(NULL, level), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_mask_get_orders(m, NULL, NULL, NULL), ESA_ERR_STATE);
    esa_mask_free(m);
    esa_ctx_free(ctx);
}

/* Orders: 4 text tokens, a protected frame of 6, two other frames, 3 text tokens. */
enum { HEADS = 4, FRAME = 6, N = 4 + 3 * FRAME + 3 };

static void rotate(int32_t *perm, int64_t first, int64_t n, int64_t by)
{
    for (int64_t i = 0; i < n; i++) perm[first + i] = (int32_t)(first + (i + by) % n);
}

static void orders(void **state)
{
    (void)state;
    esa_ctx *ctx = kit_ctx(1);
    esa_mask_info info = geometry(2, HEADS, N, N, 0);
    info.layout.order = ESA_ORDER_ADAPTIVE;
    info.layout.grid_q[0] = 3;
    info.layout.grid_q[1] = 2;
    info.layout.grid_q[2] = 3;
    info.layout.text_front_q = 4;
    info.layout.text_back_q = 3;
    info.layout.protect_first_frame = 1;
    uint8_t level[2 * HEADS * 1 * 2];
    memset(level, 0, sizeof level);
    int32_t q[2 * HEADS * N], k[2 * HEADS * N], got_q[2 * HEADS * N], got_k[2 * HEADS * N];
    for (int64_t h = 0; h < 2 * HEADS; h++)
        for (int side = 0; side < 2; side++) {
            int32_t *perm = (side ? k : q) + h * N;
            rotate(perm, 0, 4, h + side);
            rotate(perm, 4, FRAME, h);
            rotate(perm, 4 + FRAME, 2 * FRAME, 5 * h + side);
            rotate(perm, 4 + 3 * FRAME, 3, h);
        }
    esa_mask *m = NULL;
    int64_t Hkv = 0;
    assert_int_equal(esa_mask_from_levels(ctx, &m, &info, level), ESA_OK);
    assert_int_equal(esa_mask_get_orders(m, got_q, got_k, &Hkv), ESA_ERR_STATE);
#define EXPECT(got, status, word)                                                                  \
    do {                                                                                           \
        assert_int_equal(got, status);                                                             \
        if (!strstr(esa_ctx_error(ctx), word))                                                     \
            fail_msg("\"%s\" does not mention \"%s\"", esa_ctx_error(ctx), word);                  \
        assert_int_equal(esa_mask_get_orders(m, NULL, NULL, NULL), ESA_ERR_STATE);                 \
    } while (0)
    EXPECT(esa_mask_set_orders(ctx, NULL, q, k, 2), ESA_ERR_ARGUMENT, "mask is NULL");
    EXPECT(esa_mask_set_orders(ctx, m, NULL, k, 2), ESA_ERR_ARGUMENT, "perm_q is NULL");
    EXPECT(esa_mask_set_orders(ctx, m, q, NULL, 2), ESA_ERR_ARGUMENT, "perm_k is NULL");
    EXPECT(esa_mask_set_orders(ctx, m, q, k, 3), ESA_ERR_SHAPE, "Hkv is 3");
    EXPECT(esa_mask_set_orders(ctx, m, q, k, 0), ESA_ERR_SHAPE, "Hkv is 0");
    k[N + 7]++; /* twice the same token */
    EXPECT(esa_mask_set_orders(ctx, m, q, k, 2), ESA_ERR_ARGUMENT, "perm_k at b=0 h=1");
    k[N + 7]--;
    q[5 * N + 9] = N;
    EXPECT(esa_mask_set_orders(ctx, m, q, k, 2), ESA_ERR_ARGUMENT, "perm_q at b=1 h=1, position 9");
    q[5 * N + 9] = -1;
    EXPECT(esa_mask_set_orders(ctx, m, q, k, 2), ESA_ERR_ARGUMENT, "is -1");
    rotate(q + 5 * N, 4, FRAME, 5);
    const int32_t inside = q[4], outside = q[4 + FRAME];
    q[4] = outside; /* out of the protected frame */
    q[4 + FRAME] = inside;
    EXPECT(esa_mask_set_orders(ctx, m, q, k, 2), ESA_ERR_ARGUMENT, "leave its segment");
    q[4] = inside;
    q[4 + FRAME] = outside;
#undef EXPECT
    for (int64_t heads = 1; heads <= HEADS; heads *= 2) { /* the last call counts */
        assert_int_equal(esa_mask_set_orders(ctx, m, q, k, heads), ESA_OK);
        esa_mask *there = moved(ctx, m);
        assert_int_equal(esa_mask_get_orders(there, got_q, got_k, &Hkv), ESA_OK);
        assert_int_equal(Hkv, heads);
        assert_memory_equal(q, got_q, sizeof q);
        assert_memory_equal(k, got_k, (size_t)(2 * heads * N) * 4);
        if (on_gpu()) assert_int_equal(esa_mask_set_orders(ctx, there, q, k, 2), ESA_ERR_DEVICE);
        esa_mask_free(there);
    }
    esa_mask_free(m);
    info.layout.order = ESA_ORDER_HILBERT;
    assert_int_equal(esa_mask_from_levels(ctx, &m, &info, level), ESA_OK);
    assert_int_equal(esa_mask_set_orders(ctx, m, q, k, 2), ESA_ERR_ARGUMENT);
    assert_non_null(strstr(esa_ctx_error(ctx), "ESA_ORDER_ADAPTIVE"));
    esa_mask_free(m);
    esa_ctx_free(ctx);
}

/* Bits of both levels in and out, and the facts that go with them. */
static void bits_of_both_levels(void **state)
{
    (void)state;
    esa_ctx *ctx = kit_ctx(1);
    const esa_mask_info info = geometry(1, 2, 64, 16 * 11, 8);
    uint8_t level[2 * 2 * 11], bits[2 * 2 * 2], fine[2 * 2 * 2], again[2 * 2 * 11];
    for (size_t i = 0; i < sizeof level; i++) level[i] = (uint8_t)(i * 5 % 3);
    esa_mask *m = NULL;
    assert_int_equal(esa_mask_from_levels(ctx, &m, &info, level), ESA_OK);
    esa_mask_write_bits(bits, m, m->count, m->index);
    esa_mask_write_bits(fine, m, m->fine_count, m->fine_index);
    const int64_t refined = esa_mask_fine(m);
    assert_int_equal(refined, kit_info(m).fine_blocks);
    memset(m->fine_index, 0xff, sizeof(uint16_t) * 2 * 2 * 11);
    esa_mask_set_bits(m, fine, bits); /* the other way round, and back */
    assert_int_equal(esa_mask_kept(m), refined);
    esa_mask_set_bits(m, bits, fine);
    assert_int_equal(esa_mask_to_levels(m, again), ESA_OK);
    assert_memory_equal(level, again, sizeof level);
    esa_mask_set_bits(m, bits, NULL);
    assert_int_equal(esa_mask_fine(m), 0);
    esa_mask_free(m);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trips),
        cmocka_unit_test(bad_levels),
        cmocka_unit_test(orders),
        cmocka_unit_test(bits_of_both_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
