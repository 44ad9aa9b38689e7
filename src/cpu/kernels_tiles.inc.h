/* kernels_tiles.inc.h - the bf16 set over AMX tiles. kernels_amx.c includes it after
 * kernels.inc.h, amx_tiles.h and the few vector operations that are its own (tiles_avx512.h);
 * tests include it with other ones.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Both products put queries along the columns, two tiles of 16, as the f32 sets put them along
 * vectors:
 *
 *     S[keys][32] = K Q^T     A: keys as they lie, rows of D' bf16; B: the packed queries, in pairs
 *                             along D
 *     O[D][32]   += V^T P     A: the transposed values; B: P, in pairs of keys
 *
 * Four tiles of results stand in two rows and two columns, so four loads feed four products. D' is
 * D rounded up to 32, the depth of a product. Values lie as [groups of 32 keys][D''][32], D''
 * being D rounded up to 16. Inside a group, position 2i holds key i and position 2i + 1 key i +
 * 16, and P has the same pairs: so a pair of vectors of scores becomes a vector of pairs without a
 * shuffle, and values are transposed as 32-bit words.
 *
 * The sum of pv starts from the rescaled o. Each product adds up its 32 keys from 0, so the sum
 * over a row still consists of short ones. Scores leave kq without the factor, which softmax
 * applies. */

#include "cpu/amx_tiles.h"

enum { TILE = ESA_AMX_ROWS, GROUP = 32 };
_Static_assert(NR == 2 * TILE, "a panel of queries is two tiles");

static void panel_q_tiles(void *dst, const void *src, int32_t dtype, int64_t stride,
                          const int32_t *gather, int64_t rows, int64_t D, float factor)
{
    (void)factor; /* left to softmax: rounding scaled queries to bf16 would lose precision */
    tiles_pack_q(dst, src, dtype, stride, gather, rows, D, esa_ceil_div(D, GROUP) * GROUP);
}

static void rows_k_tiles(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D)
{
    tiles_copy_k(dst, src, dtype, stride, gather, rows, D, esa_ceil_div(D, GROUP) * GROUP);
}

static void rows_v_tiles(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D)
{
    tiles_transpose_v(dst, src, dtype, stride, gather, rows, D, esa_ceil_div(D, TILE) * TILE);
}

/* ---------------------------------------------------------------- products */

/* Tiles 0 .. 3 += two tiles of A (the second one `down` bytes below the first) times two of B. A
 * advances by a_step bytes, B by 16 rows of pairs. two 0: only the first tile of A, into
 * 0 and 1. */
INLINE void multiply_tiles(const char *a, int64_t a_pitch, int64_t down, int64_t a_step,
                           const char *b, int64_t steps, const int two)
{
    enum { PITCH = NR * 4 };
    for (int64_t t = 0; t < steps; t++, a += a_step, b += TILE * PITCH) {
        TILE_LOAD(6, b, PITCH);
        TILE_LOAD(4, a, a_pitch);
        TILE_BF16(0, 4, 6);
        TILE_LOAD(7, b + 64, PITCH);
        TILE_BF16(1, 4, 7);
        if (two) {
            TILE_LOAD(5, a + down, a_pitch);
            TILE_BF16(2, 5, 6);
            TILE_BF16(3, 5, 7);
        }
    }
}

INLINE void store_tiles(float *at, const int two)
{
    TILE_STORE(0, at, NR * 4);
    TILE_STORE(1, at + TILE, NR * 4);
    if (two) {
        TILE_STORE(2, at + TILE * NR, NR * 4);
        TILE_STORE(3, at + TILE * NR + TILE, NR * 4);
    }
}

/* s of 32 keys, or of 16 if two is 0. k: rows of `row` bytes. */
INLINE void kq_tiles_block(float *s, const void *q, const char *k, int64_t row, int64_t depth,
                           const int two)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (two) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    multiply_tiles(k, row, TILE * row, 64, q, depth / GROUP, two);
    store_tiles(s, two);
}

static void kq_tiles(float *s, const void *q, const void *keys_at, int64_t k_stride, int64_t keys,
                     int64_t depth, float factor)
{
    const char *k = keys_at;
    const int64_t row = k_stride * 2;
    int64_t i = 0;
    (void)factor; /* softmax applies it */
    TILES_FENCE();
    for (; i + GROUP <= keys; i += GROUP) kq_tiles_block(s + i * NR, q, k + i * row, row, depth, 1);
    if (keys - i >= TILE) {
        kq_tiles_block(s + i * NR, q, k + i * row, row, depth, 0);
        i += TILE;
    }
    if (i < keys) { /* rows past the last must not be read */
        uint16_t rest[TILE * ESA_MAX_HEAD_DIM] __attribute__((aligned(64)));
        memset(rest, 0, (size_t)(TILE * depth * 2));
        for (int64_t r = 0; r < keys - i; r++)
            memcpy(rest + r * depth, k + (i + r) * row, (size_t)depth * 2);
        TILES_FENCE();
        kq_tiles_block(s + i * NR, q, (const char *)rest, depth * 2, depth, 0);
    }
    TILES_FENCE();
}

/* o[32 or 16 rows][NR] += transposed values times p. */
INLINE void pv_tiles_block(float *o, const void *p, const char *v, int64_t groups, int64_t dims,
                           int32_t accumulate, const int two)
{
    if (accumulate) {
        TILE_LOAD(0, o, NR * 4);
        TILE_LOAD(1, o + TILE, NR * 4);
        if (two) {
            TILE_LOAD(2, o + TILE * NR, NR * 4);
            TILE_LOAD(3, o + TILE * NR + TILE, NR * 4);
        }
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (two) {
            TILE_ZERO(2);
            TILE_ZERO(3);
        }
    }
    multiply_tiles(v, GROUP * 2, TILE * GROUP * 2, dims * GROUP * 2, p, groups, two);
    store_tiles(o, two);
}

static void pv_tiles(float *o, const void *p, const void *values, int64_t v_stride, int64_t keys,
                     int64_t D, const float *alpha, int32_t accumulate)
{
    const char *v = values;
    const int64_t groups = esa_ceil_div(keys, GROUP), dims = esa_ceil_div(D, TILE) * TILE;
    int64_t d = 0;
    (void)v_stride; /* values are a copy of known shape */
    if (accumulate && alpha)
        for (int64_t i = 0; i < D; i++) UNROLL
    for (int j = 0; j < NV; j++)
        v_store(o + i * NR + j * VL, v_mul(v_load(o + i * NR + j * VL), v_load(alpha + j * VL)));
    TILES_FENCE();
    for (; d + 2 * TILE <= D; d += 2 * TILE)
        pv_tiles_block(o + d * NR, p, v + d * GROUP * 2, groups, dims, accumulate, 1);
    if (d + TILE <= D) {
        pv_tiles_block(o + d * NR, p, v + d * GROUP * 2, groups, dims, accumulate, 0);
        d += TILE;
    }
    if (d < D) { /* rows of o past the last do not exist */
        float rest[TILE * NR] __attribute__((aligned(64)));
        const size_t bytes = (size_t)((D - d) * NR) * sizeof *o;
        memset(rest, 0, sizeof rest);
        if (accumulate) memcpy(rest, o + d * NR, bytes);
        TILES_FENCE();
        pv_tiles_block(rest, p, v + d * GROUP * 2, groups, dims, accumulate, 0);
        TILES_FENCE();
        memcpy(o + d * NR, rest, bytes);
    }
    TILES_FENCE();
}

/* ---------------------------------------------------------------- softmax */

/* Multiplies the scores by factor and applies bias and limits. */
INLINE void scale_scores(float *s, int64_t keys, float factor, const float *limit,
                         const float *bias)
{
    const vf f = v_set1(factor);
    for (int64_t i = 0; i < keys * NR; i += VL) v_store(s + i, v_mul(v_load(s + i), f));
    if (limit || bias) prepare_scores(s, keys, limit, bias);
}

/* The largest of s[keys][NR], into top. Four rows at a time hide the latency of the maximum. */
INLINE void largest_scores(vf top[NV], const float *s, int64_t keys)
{
    vf high[4][NV];
    int64_t i = 0;
    UNROLL
    for (int r = 0; r < 4; r++) UNROLL
    for (int j = 0; j < NV; j++) high[r][j] = v_set1(-INFINITY);
    for (; i + 4 <= keys; i += 4) UNROLL
    for (int r = 0; r < 4; r++) UNROLL
    for (int j = 0; j < NV; j++) high[r][j] = v_max(v_load(s + (i + r) * NR + j * VL), high[r][j]);
    for (; i < keys; i++) UNROLL
    for (int j = 0; j < NV; j++) high[0][j] = v_max(v_load(s + i * NR + j * VL), high[0][j]);
    UNROLL
    for (int j = 0; j < NV; j++)
        top[j] = v_max(v_max(high[3][j], high[2][j]), v_max(high[1][j], high[0][j]));
}

/* p of one key, which is added to sum; 0 for a key past the last. */
INLINE vf weigh_score(const float *s, vf factor, vf ref, vf *sum)
{
    const vf x = tiles_exp2(v_fma(v_load(s), factor, v_sub(v_zero(), ref)));
    *sum = v_add(*sum, x);
    return x;
}

/* p of one group of keys. n: those that exist; with n = GROUP known to the compiler nothing is
 * asked. */
INLINE void weigh_group(uint16_t *p, const float *s, int64_t n, vf factor, const vf ref[NV],
                        vf sum[2][NV])
{
    for (int64_t i = 0; i < TILE; i++) UNROLL
    for (int j = 0; j < NV; j++) {
        const float *at = s + i * NR + j * VL;
        const vf low = i < n ? weigh_score(at, factor, ref[j], &sum[0][j]) : v_zero(),
                 high = i + TILE < n ? weigh_score(at + TILE * NR, factor, ref[j], &sum[1][j])
                                     : v_zero();
        tiles_store_pairs(p + 2 * (i * NR + j * VL), low, high);
    }
}

static int32_t softmax_tiles(void *p, float *s, int64_t keys, float factor, const float *limit,
                             const float *bias, float *m, float *l, float *alpha)
{
    const vf none = v_set1(-INFINITY), one = v_set1(1.0f);
    vf top[NV], ref[NV], sum[2][NV];
    int32_t moved = 0;
    int64_t i = 0;
    /* The largest score is the one of the largest dot product if the factor is positive. */
    if (limit || bias || !(factor > 0.0f)) {
        scale_scores(s, keys, factor, limit, bias);
        factor = 1.0f;
    }
    const vf f = v_set1(factor);
    largest_scores(top, s, keys);
    UNROLL
    for (int j = 0; j < NV; j++) {
        const vf high = v_mul(top[j], f), old = v_load(m + j * VL), edge = v_add(old, v_set1(8.0f));
        vf now = old, scale = one;
        /* The reference maximum changes only if it must. */
        if (v_any_gt(high, edge)) {
            now = v_if_gt(high, edge, high, old);
            scale = v_if_gt(high, edge, v_exp2(v_sub(old, high)), one); /* m = -inf: 0 */
            v_store(m + j * VL, now);
            moved = 1;
        }
        v_store(alpha + j * VL, scale);
        sum[0][j] = sum[1][j] = v_zero();
        ref[j] = v_if_gt(now, none, now, v_zero()); /* -inf - -inf would be NaN */
    }
    for (; i + GROUP <= keys; i += GROUP)
        weigh_group((uint16_t *)p + i * NR, s + i * NR, GROUP, f, ref, sum);
    if (i < keys) weigh_group((uint16_t *)p + i * NR, s + i * NR, keys - i, f, ref, sum);
    UNROLL
    for (int j = 0; j < NV; j++)
        v_store(l + j * VL,
                v_fma(v_load(l + j * VL), v_load(alpha + j * VL), v_add(sum[0][j], sum[1][j])));
    return moved;
}

/* ---------------------------------------------------------------- selectors */

/* Groups of TILE rows of D' values; missing rows are zero. */
static void pack_q_tiles(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D, float factor)
{
    const int64_t depth = esa_ceil_div(D, GROUP) * GROUP,
                  missing = esa_ceil_div(rows, TILE) * TILE - rows;
    (void)factor; /* left to qk */
    tiles_copy_k(dst, src, dtype, stride, gather, rows, D, depth);
    memset((uint16_t *)dst + rows * depth, 0, (size_t)(missing * depth * 2));
}

static void pack_k_tiles(void *dst, const void *src, int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D)
{
    panel_q_tiles(dst, src, dtype, stride, gather, rows, D, 1.0f);
}

static void qk_tiles(float *s, int64_t ld, const void *q, const void *k, int64_t rows, int64_t keys,
                     int64_t depth, float factor, int32_t accumulate)
{
    const int64_t padded = esa_ceil_div(depth, GROUP) * GROUP;
    const vf f = v_set1(factor);
    const char *panel = k;
    float sums[TILE * NR] __attribute__((aligned(64)));
    TILES_FENCE();
    for (int64_t base = 0; base < keys; base += NR, panel += padded * NR * 2) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        multiply_tiles(q, padded * 2, 0, GROUP * 2, panel, padded / GROUP, 0);
        store_tiles(sums, 0);
        TILES_FENCE();
        for (int64_t r = 0; r < rows; r++) UNROLL
        for (int j = 0; j < NV; j++) {
            float *at = s + r * ld + base + j * VL;
            const vf x = v_mul(v_load(sums + r * NR + j * VL), f);
            v_store(at, accumulate ? v_add(v_load(at), x) : x);
        }
    }
}

static void begin_tiles(void) { TILES_BEGIN(); }
static void end_tiles(void) { TILES_END(); }

#define TILE_SLOTS                                                                                 \
    .mr = TILE, .nr = NR, .packed_bytes = 2, .depth_unit = GROUP, .keys_unit = GROUP,              \
    .dims_unit = TILE, .begin = begin_tiles, .end = end_tiles, .panel_q = panel_q_tiles,           \
    .rows_k = rows_k_tiles, .rows_v = rows_v_tiles, .kq = kq_tiles, .softmax = softmax_tiles,      \
    .pv = pv_tiles, .store = store, .mean = mean, .pack_q = pack_q_tiles, .pack_k = pack_k_tiles,  \
    .qk = qk_tiles, .stats = stats
