/* test_order.c - orders: golden checksums of the tile rule, inverses, segments, the Hilbert walk,
 * refused layouts.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/kit.h"
#include "mask/mask.h"

/* (t,h,w), S, sum((p+1)*src[p]) mod 2^32, FNV-1a-like hash, and src at p = 0, 1, 8, 63, 64, S/2,
 * S-1. */
static const struct {
    int32_t g[3];
    int64_t S;
    uint32_t sum;
    uint64_t hash;
    int32_t at[7];
} golden[] = {
    { { 3, 40, 80 }, 9600, 2599398272u, 0xa42e53b092646983u, { 0, 1, 80, 567, 8, 4520, 9599 } },
    { { 3, 30, 52 }, 4680, 3992364008u, 0x05eef3012eccc503u, { 0, 1, 8, 63, 64, 2448, 4367 } },
    { { 2, 21, 32 }, 1344, 807460416u, 0x731ac9a0c7955c83u, { 0, 1, 8, 63, 64, 672, 1343 } },
    { { 4, 16, 16 }, 1024, 357340160u, 0xeb60fd7963490383u, { 0, 1, 16, 119, 8, 512, 1023 } },
    { { 3, 20, 20 }, 1200, 572073584u, 0x1ac49e2bdca9a383u, { 0, 1, 8, 63, 64, 588, 1119 } },
    { { 21, 30, 52 }, 32760, 1759323992u, 0x2c9c005f46fcefe3u, { 0, 1, 8, 63, 64, 16488, 32447 } },
};

static void tile_checksums(void **state)
{
    esa_ctx *ctx = kit_ctx(1);
    (void)state;
    for (size_t c = 0; c < sizeof golden / sizeof *golden; c++) {
        const int64_t S = golden[c].S, at[7] = { 0, 1, 8, 63, 64, S / 2, S - 1 };
        int32_t *perm = malloc((size_t)S * 4);
        esa_layout layout = esa_layout_default();
        layout.order = ESA_ORDER_TILE;
        memcpy(layout.grid_q, golden[c].g, sizeof golden[c].g);
        assert_int_equal(esa_order(ctx, perm, S, &layout, 0, ESA_MODE_COMPAT), ESA_OK);
        uint32_t sum = 0;
        uint64_t hash = 1469598103934665603u;
        for (int64_t p = 0; p < S; p++) {
            sum += (uint32_t)(p + 1) * (uint32_t)perm[p];
            hash = (hash ^ (uint64_t)perm[p]) * 1099511628211u;
        }
        assert_int_equal(sum, golden[c].sum);
        assert_true(hash == golden[c].hash);
        for (int i = 0; i < 7; i++) assert_int_equal(perm[at[i]], golden[c].at[i]);
        free(perm);
    }
    esa_ctx_free(ctx);
}

/* Every token once, text in place (or moved as compat does), frame 0 first when protected. */
static void check_order(esa_ctx *ctx, const esa_layout *layout, int64_t N, int32_t mode)
{
    const int64_t front = layout->text_front_q, back = layout->text_back_q,
                  frame = (int64_t)layout->grid_q[1] * layout->grid_q[2];
    const int32_t moved = layout->order == ESA_ORDER_TILE && mode != ESA_MODE_FIXED;
    int32_t *perm = malloc((size_t)N * 4), *inverse = malloc((size_t)N * 4);
    memset(inverse, 0xff, (size_t)N * 4);
    const esa_status status = esa_order(ctx, perm, N, layout, 0, mode);
    if (status) fail_msg("esa_order: %s", esa_ctx_error(ctx));
    for (int64_t p = 0; p < N; p++) {
        assert_in_range(perm[p], 0, N - 1);
        assert_int_equal(inverse[perm[p]], -1);
        inverse[perm[p]] = (int32_t)p;
    }
    for (int64_t i = 0; i < N; i++) assert_int_equal(perm[inverse[i]], i);
    for (int64_t i = 0; i < front; i++)
        assert_int_equal(inverse[i], moved ? N - back - front + i : i);
    for (int64_t i = N - back; i < N; i++) assert_int_equal(inverse[i], i);
    if (layout->protect_first_frame == 1 && layout->grid_q[0] > 1)
        for (int64_t i = front; i < front + frame; i++)
            assert_in_range(inverse[i] - (moved ? 0 : front), 0, frame - 1);
    free(perm);
    free(inverse);
}

static void inverses(void **state)
{
    static const int32_t grids[][3] = { { 1, 1, 1 },  { 1, 7, 9 },   { 2, 8, 8 },   { 3, 5, 16 },
                                        { 5, 17, 4 }, { 4, 16, 24 }, { 3, 20, 20 }, { 7, 9, 11 } };
    static const int32_t texts[][2] = { { 0, 0 }, { 5, 0 }, { 0, 77 }, { 130, 3 } };
    static const int32_t windows[][3] = {
        { 1, 8, 8 }, { 2, 8, 8 }, { 4, 3, 5 }, { 100, 100, 100 }
    };
    esa_ctx *ctx = kit_ctx(1);
    (void)state;
    for (size_t g = 0; g < sizeof grids / sizeof *grids; g++)
        for (size_t t = 0; t < sizeof texts / sizeof *texts; t++)
            for (int32_t order = ESA_ORDER_RASTER; order <= ESA_ORDER_HILBERT; order++)
                for (size_t w = 0;
                     w < (order == ESA_ORDER_TILE3D ? sizeof windows / sizeof *windows : 1); w++)
                    for (int32_t protect = 0; protect < 2; protect++)
                        for (int32_t mode = ESA_MODE_FIXED; mode <= ESA_MODE_COMPAT; mode++) {
                            esa_layout layout = esa_layout_default();
                            layout.order = order;
                            layout.protect_first_frame = protect;
                            memcpy(layout.window, windows[w], sizeof layout.window);
                            memcpy(layout.grid_q, grids[g], sizeof layout.grid_q);
                            layout.text_front_q = texts[t][0];
                            layout.text_back_q = texts[t][1];
                            const int64_t video = (int64_t)grids[g][0] * grids[g][1] * grids[g][2];
                            check_order(ctx, &layout, video + texts[t][0] + texts[t][1], mode);
                        }
    esa_ctx_free(ctx);
}

/* Fixed mode tiles frame 0 like every other frame. */
static void tile_fixed_frame0(void **state)
{
    enum { H = 20, W = 20, F = H * W };
    int32_t perm[2 * F + 3];
    esa_ctx *ctx = kit_ctx(1);
    esa_layout layout = esa_layout_default();
    (void)state;
    layout.order = ESA_ORDER_TILE;
    layout.grid_q[0] = 2;
    layout.grid_q[1] = H;
    layout.grid_q[2] = W;
    layout.text_front_q = 3;
    assert_int_equal(esa_order(ctx, perm, 2 * F + 3, &layout, 0, ESA_MODE_FIXED), ESA_OK);
    for (int32_t p = 0; p < F; p++) assert_int_equal(perm[3 + p] + F, perm[3 + F + p]);
    assert_int_equal(perm[3 + 8], 3 + W);            /* second row of the first tile */
    assert_int_equal(perm[3 + 256], 3 + 16 * W);     /* after four tiles: the bottom rows */
    assert_int_equal(perm[3 + 256 + 4 * W], 3 + 16); /* then the right columns */
    /* The key side has its own grid. */
    layout.grid_k[0] = 1;
    layout.grid_k[1] = 8;
    layout.grid_k[2] = 16;
    assert_int_equal(esa_order(ctx, perm, 128, &layout, 1, ESA_MODE_FIXED), ESA_OK);
    assert_int_equal(perm[64], 8);
    esa_ctx_free(ctx);
}

static void tile3d_boxes(void **state)
{
    static const int32_t want[] = { 0, 1, 3, 4,  12, 13, 15, 16, 2, 5,  14, 17,
                                    6, 7, 9, 10, 18, 19, 21, 22, 8, 11, 20, 23 };
    int32_t perm[24];
    esa_ctx *ctx = kit_ctx(1);
    esa_layout layout = esa_layout_default();
    (void)state;
    layout.order = ESA_ORDER_TILE3D;
    layout.window[0] = layout.window[1] = layout.window[2] = 2;
    layout.grid_q[0] = 2;
    layout.grid_q[1] = 4;
    layout.grid_q[2] = 3;
    assert_int_equal(esa_order(ctx, perm, 24, &layout, 0, ESA_MODE_FIXED), ESA_OK);
    assert_memory_equal(perm, want, sizeof want);
    layout.protect_first_frame = 1; /* both frames stand alone now */
    assert_int_equal(esa_order(ctx, perm, 24, &layout, 0, ESA_MODE_FIXED), ESA_OK);
    for (int32_t p = 0; p < 12; p++) assert_int_equal(perm[p] + 12, perm[12 + p]);
    esa_ctx_free(ctx);
}

static void hilbert_walk(void **state)
{
    int64_t steps = 0, diagonal = 0;
    (void)state;
    for (int64_t t = 1; t <= 7; t++)
        for (int64_t h = 1; h <= 9; h++)
            for (int64_t w = 1; w <= 11; w++) {
                const int64_t n = t * h * w;
                int32_t out[7 * 9 * 11];
                uint8_t seen[7 * 9 * 11] = { 0 };
                esa_hilbert(out, 100, t, h, w);
                for (int64_t p = 0; p < n; p++) {
                    const int64_t a = out[p] - 100;
                    assert_in_range(a, 0, n - 1);
                    assert_int_equal(seen[a]++, 0);
                    if (p == 0) continue;
                    const int64_t b = out[p - 1] - 100;
                    const int64_t dt = llabs(a / (h * w) - b / (h * w)),
                                  dy = llabs(a / w % h - b / w % h), dx = llabs(a % w - b % w);
                    /* never a jump: at worst a diagonal */
                    assert_true(dt <= 1 && dy <= 1 && dx <= 1);
                    steps++;
                    diagonal += dt + dy + dx > 1;
                }
            }
    assert_true(diagonal * 50 < steps); /* at least 98 % are neighbours */
    /* powers of two: the classic curve, all neighbours */
    for (int64_t side = 2; side <= 16; side *= 2) {
        int32_t out[16 * 16 * 16];
        esa_hilbert(out, 0, side, side, side);
        for (int64_t p = 1; p < side * side * side; p++) {
            const int64_t a = out[p], b = out[p - 1];
            assert_int_equal(llabs(a / (side * side) - b / (side * side)) +
                                 llabs(a / side % side - b / side % side) +
                                 llabs(a % side - b % side),
                             1);
        }
    }
}

static void expect_refused(esa_ctx *ctx, esa_layout layout, int64_t N, const char *word)
{
    int32_t perm[64];
    const esa_status status = esa_order(ctx, perm, N, &layout, 0, ESA_MODE_FIXED);
    assert_true(status < 0);
    if (!strstr(esa_ctx_error(ctx), word))
        fail_msg("expected \"%s\" in: %s", word, esa_ctx_error(ctx));
}

static void refused(void **state)
{
    esa_ctx *ctx = kit_ctx(1);
    int32_t perm[64];
    esa_layout good = esa_layout_default(), l;
    (void)state;
    good.grid_q[0] = 2;
    good.grid_q[1] = 4;
    good.grid_q[2] = 8;
    l = good;
    l.order = 5;
    expect_refused(ctx, l, 64, "order is 5");
    l.order = ESA_ORDER_ADAPTIVE;
    expect_refused(ctx, l, 64, "made from q and k");
    l.order_applied = 1;
    expect_refused(ctx, l, 64, "made from q and k");
    l = good;
    l.grid_q[1] = 0;
    expect_refused(ctx, l, 64, "grid_q is 2,0,8");
    l = good;
    l.grid_q[1] = -4;
    expect_refused(ctx, l, 64, "grid_q");
    l = good;
    l.text_front_q = 1;
    expect_refused(ctx, l, 64, "does not make");
    l = good;
    l.text_back_q = -1;
    expect_refused(ctx, l, 64, "text");
    l = good;
    l.struct_size = 8;
    expect_refused(ctx, l, 64, "struct_size 8");
    l = good;
    l.reserved[3] = 7;
    expect_refused(ctx, l, 64, "reserved[3]");
    l = good;
    l.protect_first_frame = 2;
    expect_refused(ctx, l, 64, "protect_first_frame is 2");
    l = good;
    l.order_applied = 5;
    expect_refused(ctx, l, 64, "order_applied is 5");
    l = good;
    l.order = ESA_ORDER_TILE3D;
    l.window[1] = 0;
    expect_refused(ctx, l, 64, "window");
    l = good;
    l.grid_q[0] = l.grid_q[1] = l.grid_q[2] = INT32_MAX;
    expect_refused(ctx, l, 64, "does not make");
    l = esa_layout_default();
    l.order = ESA_ORDER_TILE;
    expect_refused(ctx, l, 64, "needs a grid");
    l = esa_layout_default();
    l.text_front_q = 65;
    expect_refused(ctx, l, 64, "text");
    expect_refused(ctx, good, 0, "N is 0");
    assert_int_equal(esa_order(ctx, NULL, 64, &good, 0, 0), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_order(ctx, perm, 64, NULL, 0, 0), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_order(ctx, perm, 64, &good, 2, 0), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_order(ctx, perm, 64, &good, 0, 3), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_order(NULL, perm, 64, &good, 0, 0), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_order(ctx, perm, 64, &good, 0, 0), ESA_OK); /* the ctx is still usable */
    assert_string_equal(esa_ctx_error(ctx), "");
    esa_ctx_free(ctx);
}

static void resolve_defaults(void **state)
{
    esa_layout in = esa_layout_default(), out;
    (void)state;
    assert_int_equal(
        esa_layout_resolve(NULL, &out, &in, 100, 200, ESA_SELECT_RF_V2, ESA_MODE_FIXED, 0), ESA_OK);
    assert_int_equal(out.order, ESA_ORDER_RASTER);
    assert_int_equal(out.protect_first_frame, 0);
    in.grid_q[0] = 4;
    in.grid_q[1] = 5;
    in.grid_q[2] = 5;
    assert_int_equal(
        esa_layout_resolve(NULL, &out, &in, 100, 100, ESA_SELECT_RF_V2, ESA_MODE_FIXED, 0), ESA_OK);
    assert_int_equal(out.order, ESA_ORDER_TILE);
    assert_int_equal(out.protect_first_frame, 1);
    assert_memory_equal(out.grid_k, in.grid_q, sizeof in.grid_q);
    assert_int_equal(
        esa_layout_resolve(NULL, &out, &in, 100, 100, ESA_SELECT_ENTROPY, ESA_MODE_FIXED, 0),
        ESA_OK);
    assert_int_equal(out.order, ESA_ORDER_RASTER);
    assert_int_equal(out.protect_first_frame, 0);
    assert_int_equal(
        esa_layout_resolve(NULL, &out, &in, 100, 100, ESA_SELECT_RF_V2, ESA_MODE_FIXED, 1), ESA_OK);
    /* causal: the default steps back, a wish is refused */
    assert_int_equal(out.order, ESA_ORDER_RASTER);
    in.order = ESA_ORDER_HILBERT;
    assert_int_equal(
        esa_layout_resolve(NULL, &out, &in, 100, 100, ESA_SELECT_RF_V2, ESA_MODE_FIXED, 1),
        ESA_ERR_ARGUMENT);
    in.order_applied = 1;
    assert_int_equal(
        esa_layout_resolve(NULL, &out, &in, 100, 100, ESA_SELECT_RF_V2, ESA_MODE_FIXED, 1), ESA_OK);
    in.order_applied = 0;
    assert_int_equal(
        esa_layout_resolve(NULL, &out, &in, 100, 100, ESA_SELECT_RF_V2, ESA_MODE_COMPAT, 0),
        ESA_OK);
    assert_int_equal(out.order, ESA_ORDER_TILE); /* compat rf_v2 knows one order */
    in = esa_layout_default();
    in.grid_q[0] = 1;
    in.grid_q[1] = in.grid_q[2] = 10;
    assert_int_equal(
        esa_layout_resolve(NULL, &out, &in, 100, 100, ESA_SELECT_RF_V2, ESA_MODE_FIXED, 0), ESA_OK);
    assert_int_equal(out.protect_first_frame, 0); /* a still image */
    assert_int_equal(
        esa_layout_resolve(NULL, &out, &in, 100, 100, ESA_SELECT_RF_V2, ESA_MODE_COMPAT, 0),
        ESA_OK);
    assert_int_equal(out.protect_first_frame, 1);
    esa_layout a = out, b = out;
    assert_true(esa_layout_same(&a, &b));
    b.order_applied = 1;
    assert_true(esa_layout_same(&a, &b));
    b.text_back_k = 3;
    assert_false(esa_layout_same(&a, &b));
    b = a;
    a.order = b.order = ESA_ORDER_HILBERT;
    b.protect_first_frame ^= 1;
    assert_false(esa_layout_same(&a, &b));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tile_checksums),    cmocka_unit_test(inverses),
        cmocka_unit_test(tile_fixed_frame0), cmocka_unit_test(tile3d_boxes),
        cmocka_unit_test(hilbert_walk),      cmocka_unit_test(refused),
        cmocka_unit_test(resolve_defaults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
