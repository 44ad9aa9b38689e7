/* kernels.inc.h - the f32 kernel set in vector-neutral C. kernels_<isa>.c includes it once per ISA
 * after defining the vector operations (simd_<isa>.h) and the tile: MR broadcast rows x NV vectors.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The tile is an outer product as in BLAS: MR x NV accumulators stay in registers, and each
 * step loads NV vectors of the right operand and broadcasts MR values of the left one.
 * Attention puts queries along the vectors and broadcasts keys and values, which therefore need
 * no packing: the product walks a row of K along D, and takes a row of V per step. Selectors
 * put keys along the vectors. Fewer than MR rows use smaller tiles (ROWS_A < ROWS_B < MR), so
 * 128 rows waste nothing. */

#include <math.h>
#include "cpu/tables.h"

#define NR     (NV * VL)
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* ---------------------------------------------------------------- packing */

/* dst [D][W] from up to W rows (n exist): VL x VL transposes, then the columns past D
 * one by one. */
INLINE void pack_panel(float *dst, const char *const *row, int64_t n, int64_t D, int32_t dtype,
                       vf factor, const int W)
{
    const int64_t size = esa_dtype_size(dtype);
    int64_t d = 0;
    for (; d + VL <= D; d += VL)
        for (int base = 0; base < W; base += VL) {
            vf r[VL];
            UNROLL
            for (int i = 0; i < VL; i++)
                r[i] = base + i < n ? v_mul(v_load_as(row[base + i] + d * size, dtype), factor)
                                    : v_zero();
            v_transpose(r);
            UNROLL
            for (int i = 0; i < VL; i++) {
                if (base + VL <= W)
                    v_store(dst + (d + i) * W + base, r[i]);
                else
                    v_store_first(dst + (d + i) * W + base, r[i], W - base);
            }
        }
    float f[VL];
    v_store(f, factor);
    for (; d < D; d++)
        for (int w = 0; w < W; w++)
            dst[d * W + w] = w < n ? esa_load_f32(row[w], d, dtype) * f[0] : 0.0f;
}

INLINE void pack_panels(float *dst, const void *src, const int32_t dtype, int64_t stride,
                        const int32_t *gather, int64_t rows, int64_t D, float factor, const int W)
{
    const int64_t size = esa_dtype_size(dtype);
    for (int64_t base = 0; base < rows; base += W, dst += D * W) {
        const char *row[NR]; /* NR >= W: MR < NR in every set */
        const int64_t n = rows - base < W ? rows - base : W;
        for (int64_t i = 0; i < n; i++)
            row[i] = (const char *)src + (gather ? gather[base + i] : base + i) * stride * size;
        for (int64_t i = n; i < W; i++) row[i] = NULL;
        pack_panel(dst, row, n, D, dtype, v_set1(factor), W);
    }
}

/* One specialised body per dtype, so that the loops do not choose the conversion. */
#define BY_DTYPE(dtype, call)                                                                      \
    switch (dtype) {                                                                               \
    case ESA_DTYPE_F32: {                                                                          \
        const int32_t DT = ESA_DTYPE_F32;                                                          \
        call;                                                                                      \
        break;                                                                                     \
    }                                                                                              \
    case ESA_DTYPE_F16: {                                                                          \
        const int32_t DT = ESA_DTYPE_F16;                                                          \
        call;                                                                                      \
        break;                                                                                     \
    }                                                                                              \
    default: {                                                                                     \
        const int32_t DT = ESA_DTYPE_BF16;                                                         \
        call;                                                                                      \
        break;                                                                                     \
    }                                                                                              \
    }

static void pack_q(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D, float factor)
{
    BY_DTYPE(dtype, pack_panels(dst, src, DT, stride, gather, rows, D, factor, MR))
}

static void pack_k(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D)
{
    BY_DTYPE(dtype, pack_panels(dst, src, DT, stride, gather, rows, D, 1.0f, NR))
}

static void panel_q(void *dst, const void *src, int32_t dtype, int64_t stride,
                    const int32_t *gather, int64_t rows, int64_t D, float factor){
    BY_DTYPE(dtype, pack_panels(dst, src, DT, stride, gather, rows, D, factor, NR))
}

INLINE void copy_rows_as(float *dst, const void *src, const int32_t dtype, int64_t stride,
                         const int32_t *gather, int64_t rows, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype);
    for (int64_t i = 0; i < rows; i++, dst += D) {
        const char *row = (const char *)src + (gather ? gather[i] : i) * stride * size;
        int64_t d = 0;
        for (; d + VL <= D; d += VL) v_store(dst + d, v_load_as(row + d * size, dtype));
        for (; d < D; d++) dst[d] = esa_load_f32(row, d, dtype);
    }
}

static void copy_rows(void *dst, const void *src, int32_t dtype, int64_t stride,
                      const int32_t *gather, int64_t rows, int64_t D){
    BY_DTYPE(dtype, copy_rows_as(dst, src, DT, stride, gather, rows, D))
}

/* ---------------------------------------------------------------- the products */

/* c[R][NV] += sum_k a[k*a_step + r*a_row] (broadcast) * b[k*NR ..]. fetch > 0: prefetches a that
 * many steps ahead, for an a whose steps are in different cache lines (values in place). Without it
 * the second product is a fifth slower. */
INLINE void tile_product(vf c[][NV], const float *a, int64_t a_step, int64_t a_row, const float *b,
                         int64_t depth, const int fetch, const int R)
{
    for (int64_t k = 0; k < depth; k++, a += a_step, b += NR) {
        if (fetch) {
            __builtin_prefetch(a + fetch * a_step);
            __builtin_prefetch(a + fetch * a_step + (R - 1) * a_row);
        }
        vf x[NV];
        UNROLL
        for (int j = 0; j < NV; j++) x[j] = v_load(b + j * VL);
        UNROLL
        for (int r = 0; r < R; r++) {
            const vf y = v_set1(a[r * a_row]);
            UNROLL
            for (int j = 0; j < NV; j++) c[r][j] = v_fma(y, x[j], c[r][j]);
        }
    }
}

INLINE void qk_rows(float *s, int64_t ld, const float *q, const float *k, int64_t keys,
                    int64_t depth, int32_t accumulate, const int R)
{
    for (int64_t base = 0; base < keys; base += NR, k += depth * NR) {
        vf c[MR][NV];
        UNROLL
        for (int r = 0; r < R; r++) UNROLL
        for (int j = 0; j < NV; j++)
            c[r][j] = accumulate ? v_load(s + r * ld + base + j * VL) : v_zero();
        tile_product(c, q, MR, 1, k, depth, 0, R);
        UNROLL
        for (int r = 0; r < R; r++) UNROLL
        for (int j = 0; j < NV; j++) v_store(s + r * ld + base + j * VL, c[r][j]);
    }
}

static void qk(float *s, int64_t ld, const void *q, const void *k, int64_t rows, int64_t keys,
               int64_t depth, float factor, int32_t accumulate)
{
    (void)factor; /* pack_q folded it into q */
    if (rows > ROWS_B)
        qk_rows(s, ld, q, k, keys, depth, accumulate, MR);
    else if (rows > ROWS_A)
        qk_rows(s, ld, q, k, keys, depth, accumulate, ROWS_B);
    else
        qk_rows(s, ld, q, k, keys, depth, accumulate, ROWS_A);
}

/* s[R][NR] = rows of k (in place) times a panel of queries. */
INLINE void kq_tile(float *s, const float *q, const float *k, int64_t k_stride, int64_t depth,
                    const int R)
{
    vf c[MR][NV];
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int j = 0; j < NV; j++) c[r][j] = v_zero();
    tile_product(c, k, 1, k_stride, q, depth, 0, R);
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int j = 0; j < NV; j++) v_store(s + r * NR + j * VL, c[r][j]);
}

static void kq(float *s, const void *q, const void *keys_at, int64_t k_stride, int64_t keys,
               int64_t depth, float factor)
{
    const float *k = keys_at;
    int64_t i = 0;
    (void)factor; /* panel_q folded it into q */
    for (; i + MR <= keys; i += MR) kq_tile(s + i * NR, q, k + i * k_stride, k_stride, depth, MR);
    for (; i + ROWS_B <= keys; i += ROWS_B)
        kq_tile(s + i * NR, q, k + i * k_stride, k_stride, depth, ROWS_B);
    for (; i + ROWS_A <= keys; i += ROWS_A)
        kq_tile(s + i * NR, q, k + i * k_stride, k_stride, depth, ROWS_A);
    for (; i < keys; i++) kq_tile(s + i * NR, q, k + i * k_stride, k_stride, depth, 1);
}

/* o[R][NR] = o alpha + c (alpha NULL: 1; accumulate 0: only c). c has the products of one block,
 * added up from 0: each addition rounds at the size of the sum so far, and a block has fewer terms
 * than a row. The branches are outside the loops, because inside they make pv 2 % slower. */
INLINE void add_tile(float *o, vf c[][NV], const float *alpha, int32_t accumulate, const int R)
{
    if (accumulate && alpha) {
        UNROLL
        for (int r = 0; r < R; r++) UNROLL
        for (int j = 0; j < NV; j++)
            c[r][j] = v_fma(v_load(o + r * NR + j * VL), v_load(alpha + j * VL), c[r][j]);
    } else if (accumulate) {
        UNROLL
        for (int r = 0; r < R; r++) UNROLL
        for (int j = 0; j < NV; j++) c[r][j] = v_add(v_load(o + r * NR + j * VL), c[r][j]);
    }
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int j = 0; j < NV; j++) v_store(o + r * NR + j * VL, c[r][j]);
}

/* o[R][NR] = o alpha + R columns of v (in place) times p. */
INLINE void pv_tile(float *o, const float *p, const float *v, int64_t v_stride, int64_t keys,
                    const float *alpha, int32_t accumulate, const int R)
{
    vf c[MR][NV];
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int j = 0; j < NV; j++) c[r][j] = v_zero();
    tile_product(c, v, v_stride, 1, p, keys, 4, R);
    add_tile(o, c, alpha, accumulate, R);
}

static void pv(float *o, const void *p, const void *values, int64_t v_stride, int64_t keys,
               int64_t D, const float *alpha, int32_t accumulate)
{
    const float *v = values;
    int64_t d = 0;
    for (; d + MR <= D; d += MR)
        pv_tile(o + d * NR, p, v + d, v_stride, keys, alpha, accumulate, MR);
    for (; d + ROWS_B <= D; d += ROWS_B)
        pv_tile(o + d * NR, p, v + d, v_stride, keys, alpha, accumulate, ROWS_B);
    for (; d + ROWS_A <= D; d += ROWS_A)
        pv_tile(o + d * NR, p, v + d, v_stride, keys, alpha, accumulate, ROWS_A);
    for (; d < D; d++) pv_tile(o + d * NR, p, v + d, v_stride, keys, alpha, accumulate, 1);
}

/* ---------------------------------------------------------------- softmax */

/* Applies bias and limits to the scores. */
INLINE void prepare_scores(float *s, int64_t keys, const float *limit, const float *bias)
{
    const vf none = v_set1(-INFINITY);
    for (int64_t i = 0; i < keys; i++) {
        const vf number = v_set1((float)i), b = v_set1(bias ? bias[i] : 0.0f);
        UNROLL
        for (int j = 0; j < NV; j++) {
            vf x = v_load(s + i * NR + j * VL);
            if (bias) x = v_drop(v_add(x, b), b);
            if (limit) x = v_if_gt(v_load(limit + j * VL), number, x, none);
            v_store(s + i * NR + j * VL, x);
        }
    }
}

/* Replaces n <= 2 rows of scores by probabilities and adds them to sum[row]. */
INLINE void exp2_rows(float *s, vf ref[NV], vf sum[2][NV], const int n)
{
    UNROLL
    for (int i = 0; i < n; i++) UNROLL
    for (int j = 0; j < NV; j++) {
        const vf x = v_exp2(v_sub(v_load(s + i * NR + j * VL), ref[j]));
        v_store(s + i * NR + j * VL, x);
        sum[i][j] = v_add(sum[i][j], x);
    }
}

static int32_t softmax(void *p, float *s, int64_t keys, float factor, const float *limit,
                       const float *bias, float *m, float *l, float *alpha)
{
    const vf none = v_set1(-INFINITY), one = v_set1(1.0f);
    vf top[2][NV], ref[NV], sum[2][NV]; /* two chains hide the latency of max and add */
    int32_t moved = 0;
    int64_t i = 0;
    (void)p;      /* f32 sets work in place */
    (void)factor; /* kq or panel_q applied it */
    if (limit || bias) prepare_scores(s, keys, limit, bias);
    UNROLL
    for (int j = 0; j < NV; j++) top[0][j] = top[1][j] = none;
    for (; i + 2 <= keys; i += 2) UNROLL
    for (int j = 0; j < NV; j++) {
        top[0][j] = v_max(v_load(s + i * NR + j * VL), top[0][j]);
        top[1][j] = v_max(v_load(s + (i + 1) * NR + j * VL), top[1][j]);
    }
    if (i < keys) UNROLL
    for (int j = 0; j < NV; j++) top[0][j] = v_max(v_load(s + i * NR + j * VL), top[0][j]);
    UNROLL
    for (int j = 0; j < NV; j++) {
        const vf high = v_max(top[1][j], top[0][j]), old = v_load(m + j * VL),
                 edge = v_add(old, v_set1(8.0f));
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
    for (i = 0; i + 2 <= keys; i += 2) exp2_rows(s + i * NR, ref, sum, 2);
    if (i < keys) exp2_rows(s + i * NR, ref, sum, 1);
    UNROLL
    for (int j = 0; j < NV; j++)
        v_store(l + j * VL,
                v_fma(v_load(l + j * VL), v_load(alpha + j * VL), v_add(sum[0][j], sum[1][j])));
    return moved;
}

/* ---------------------------------------------------------------- the small ones */

static void stats(float *top, float *sum, int64_t ld_out, const float *s, int64_t ld, int64_t rows,
                  int64_t keys, int64_t group)
{
    const vf none = v_set1(-INFINITY);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t base = 0, g = 0; base < keys; base += group, g++) {
            const int64_t n = keys - base < group ? keys - base : group;
            const float *row = s + r * ld + base;
            vf t = none, e = v_zero();
            for (int64_t c = 0; c < n; c += VL) t = v_max(v_first(v_load(row + c), n - c, none), t);
            const float high = v_reduce_max(t);
            const vf ref = v_set1(high == -INFINITY ? 0.0f : high);
            for (int64_t c = 0; c < n; c += VL)
                e = v_add(e, v_exp2(v_sub(v_first(v_load(row + c), n - c, none), ref)));
            top[r * ld_out + g] = high;
            sum[r * ld_out + g] = v_reduce_add(e);
        }
}

/* Writes rows of o [D][NR]: VL x VL transposes, then the columns past D one by one. */
INLINE void store_as(void *dst, const int32_t dtype, int64_t stride, const int32_t *scatter,
                     const float *o, const float *factor, int64_t rows, int64_t D,
                     const int past_cache)
{
    const int64_t size = esa_dtype_size(dtype);
    (void)past_cache; /* for sets without such stores */
    for (int64_t base = 0; base < rows; base += VL) {
        char *row[VL];
        const int64_t n = rows - base < VL ? rows - base : VL;
        const vf f = v_load(factor + base);
        for (int64_t i = 0; i < n; i++)
            row[i] = (char *)dst + (scatter ? scatter[base + i] : base + i) * stride * size;
        int64_t d = 0;
        for (; d + VL <= D; d += VL) {
            vf r[VL];
            UNROLL
            for (int i = 0; i < VL; i++) r[i] = v_mul(v_load(o + (d + i) * NR + base), f);
            v_transpose(r);
            UNROLL
            for (int i = 0; i < VL; i++)
                if (i < n) {
#ifdef V_STREAMS
                    if (past_cache && (uintptr_t)row[i] % sizeof(vf) == 0) {
                        v_stream(row[i] + d * size, r[i]);
                        continue;
                    }
#endif
                    v_store_as(row[i] + d * size, r[i], dtype);
                }
        }
        for (; d < D; d++)
            for (int64_t i = 0; i < n; i++)
                esa_store_f32(row[i], d, dtype, o[d * NR + base + i] * factor[base + i]);
    }
}

static void store(void *dst, int32_t dtype, int64_t stride, const int32_t *scatter, const float *o,
                  const float *factor, int64_t rows, int64_t D)
{
    BY_DTYPE(dtype, store_as(dst, DT, stride, scatter, o, factor, rows, D, 0))
}

#ifdef V_STREAMS
static void stream(void *dst, int32_t dtype, int64_t stride, const int32_t *scatter, const float *o,
                   const float *factor, int64_t rows, int64_t D)
{
    /* Half a cache line at a time: no gain. */
    if (dtype != ESA_DTYPE_F32) {
        store(dst, dtype, stride, scatter, o, factor, rows, D);
        return;
    }
    store_as(dst, ESA_DTYPE_F32, stride, scatter, o, factor, rows, D, 1);
    v_stream_end(); /* other threads may read the rows after the run */
}
#define STREAM_SLOT stream
#else
#define STREAM_SLOT NULL
#endif

INLINE void mean_as(float *dst, const void *src, const int32_t dtype, int64_t stride,
                    const int32_t *gather, int64_t rows, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype);
    int64_t d = 0;
    /* Four vectors of columns: every row is read in whole cache lines. */
    for (; d + 4 * VL <= D; d += 4 * VL) {
        vf sum[4] = { v_zero(), v_zero(), v_zero(), v_zero() };
        for (int64_t i = 0; i < rows; i++) {
            const char *row = (const char *)src + ((gather ? gather[i] : i) * stride + d) * size;
            UNROLL
            for (int j = 0; j < 4; j++)
                sum[j] = v_add(sum[j], v_load_as(row + j * VL * size, dtype));
        }
        UNROLL
        for (int j = 0; j < 4; j++) v_store(dst + d + j * VL, v_div(sum[j], v_set1((float)rows)));
    }
    for (; d < D; d++) {
        float sum = 0.0f;
        for (int64_t i = 0; i < rows; i++)
            sum += esa_load_f32(src, (gather ? gather[i] : i) * stride + d, dtype);
        dst[d] = sum / (float)rows;
    }
}

static void mean(float *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                 int64_t rows, int64_t D)
{
    BY_DTYPE(dtype, mean_as(dst, src, DT, stride, gather, rows, D))
}

/* ---------------------------------------------------------------- the error selector */

static void fold(float *dst, const float *src, int64_t rows, int64_t n, int32_t accumulate)
{
    for (int64_t base = 0; base < n; base += NR) {
        vf sum[NV];
        UNROLL
        for (int j = 0; j < NV; j++) sum[j] = accumulate ? v_load(dst + base + j * VL) : v_zero();
        for (int64_t r = 0; r < rows; r++) UNROLL
        for (int j = 0; j < NV; j++) sum[j] = v_add(sum[j], v_load(src + r * n + base + j * VL));
        UNROLL
        for (int j = 0; j < NV; j++) v_store(dst + base + j * VL, sum[j]);
    }
}

/* sum[NV] += the squares of R columns. rest: -(w - sum of t). */
INLINE void residue_tile(vf sum[NV], const vf rest[NV], const float *a, const float *o,
                         const float *t, const float *v, int64_t v_stride, int64_t means,
                         const int R)
{
    vf x[4][NV];
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int j = 0; j < NV; j++)
        x[r][j] = v_fma(rest[j], v_load(o + r * NR + j * VL), v_load(a + r * NR + j * VL));
    for (int64_t i = 0; i < means; i++) {
        vf minus[NV];
        UNROLL
        for (int j = 0; j < NV; j++) minus[j] = v_sub(v_zero(), v_load(t + i * NR + j * VL));
        UNROLL
        for (int r = 0; r < R; r++) {
            const vf y = v_set1(v[i * v_stride + r]);
            UNROLL
            for (int j = 0; j < NV; j++) x[r][j] = v_fma(minus[j], y, x[r][j]);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int j = 0; j < NV; j++) sum[j] = v_fma(x[r][j], x[r][j], sum[j]);
}

static void residue(float *e, const float *a, const float *o, const float *w, const float *t,
                    const float *v, int64_t v_stride, int64_t means, int64_t D)
{
    vf sum[NV], rest[NV];
    int64_t d = 0;
    UNROLL
    for (int j = 0; j < NV; j++) {
        sum[j] = v_load(e + j * VL);
        rest[j] = v_sub(v_zero(), v_load(w + j * VL));
    }
    for (int64_t i = 0; i < means; i++) UNROLL
    for (int j = 0; j < NV; j++) rest[j] = v_add(rest[j], v_load(t + i * NR + j * VL));
    for (; d + 4 <= D; d += 4)
        residue_tile(sum, rest, a + d * NR, o + d * NR, t, v + d, v_stride, means, 4);
    for (; d < D; d++)
        residue_tile(sum, rest, a + d * NR, o + d * NR, t, v + d, v_stride, means, 1);
    UNROLL
    for (int j = 0; j < NV; j++) v_store(e + j * VL, sum[j]);
}

#define KERNEL_SLOTS                                                                               \
    .mr = MR, .nr = NR, .packed_bytes = 4, .depth_unit = 1, .keys_unit = 1, .dims_unit = 1,        \
    .panel_q = panel_q, .rows_k = copy_rows, .rows_v = copy_rows, .kq = kq, .softmax = softmax,    \
    .pv = pv, .store = store, .stream = STREAM_SLOT, .pack_q = pack_q, .pack_k = pack_k, .qk = qk, \
    .stats = stats, .mean = mean, .fold = fold, .residue = residue
