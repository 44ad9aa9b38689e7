/* kernels.inc.h - the f32 kernel set in vector-neutral C; included once per ISA by kernels_<isa>.c, which has defined the
 * vector words (simd_<isa>.h) and the tile: MR rows x NV vectors of keys (or of head-dim columns).
 * SPDX-License-Identifier: Apache-2.0
 *
 * The tile is a BLAS-like outer product: MR x NV accumulators stay in registers, each step loads NV vectors of the right
 * operand and broadcasts MR values of the left one. Full tiles only; shorter row groups use the next smaller of three row
 * counts (ROWS_A < ROWS_B < MR), so that 128 rows waste nothing. */

#include <math.h>
#include "cpu/tables.h"

#define NR (NV * VL)
#define DR (NV * VL)
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* ---------------------------------------------------------------- packing */

/* dst [D][W] from up to W rows (n real ones): VL x VL transposes, the columns past D one by one. */
INLINE void pack_panel(float *dst, const char *const *row, int64_t n, int64_t D, int32_t dtype, vf factor, const int W)
{
    const int64_t size = esa_dtype_size(dtype);
    int64_t d = 0;
    for (; d + VL <= D; d += VL)
        for (int base = 0; base < W; base += VL) {
            vf r[VL];
            UNROLL
            for (int i = 0; i < VL; i++)
                r[i] = base + i < n ? v_mul(v_load_as(row[base + i] + d * size, dtype), factor) : v_zero();
            v_transpose(r);
            UNROLL
            for (int i = 0; i < VL; i++) {
                if (base + VL <= W) v_store(dst + (d + i) * W + base, r[i]);
                else v_store_first(dst + (d + i) * W + base, r[i], W - base);
            }
        }
    float f[VL];
    v_store(f, factor);
    for (; d < D; d++)
        for (int w = 0; w < W; w++) dst[d * W + w] = w < n ? esa_load_f32(row[w], d, dtype) * f[0] : 0.0f;
}

INLINE void pack_panels(float *dst, const void *src, const int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows,
                        int64_t D, float factor, const int W)
{
    const int64_t size = esa_dtype_size(dtype);
    for (int64_t base = 0; base < rows; base += W, dst += D * W) {
        const char *row[NR];                    /* NR >= W: MR < NR in every set */
        const int64_t n = rows - base < W ? rows - base : W;
        for (int64_t i = 0; i < n; i++) row[i] = (const char *)src + (gather ? gather[base + i] : base + i) * stride * size;
        for (int64_t i = n; i < W; i++) row[i] = NULL;
        pack_panel(dst, row, n, D, dtype, v_set1(factor), W);
    }
}

/* One specialised body per dtype, so that the conversion is chosen outside the loops. */
#define BY_DTYPE(dtype, call)                                            \
    switch (dtype) {                                                     \
    case ESA_DTYPE_F32: { const int32_t DT = ESA_DTYPE_F32; call; break; }   \
    case ESA_DTYPE_F16: { const int32_t DT = ESA_DTYPE_F16; call; break; }   \
    default: { const int32_t DT = ESA_DTYPE_BF16; call; break; }             \
    }

static void pack_q(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D,
                   float factor)
{
    BY_DTYPE(dtype, pack_panels(dst, src, DT, stride, gather, rows, D, factor, MR))
}

static void pack_k(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D)
{
    BY_DTYPE(dtype, pack_panels(dst, src, DT, stride, gather, rows, D, 1.0f, NR))
}

INLINE void pack_v_as(float *dst, const void *src, const int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows,
                      int64_t v_rows, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype), whole = D / DR * DR;
    for (int64_t i = 0; i < rows; i++) {
        const char *row = (const char *)src + (gather ? gather[i] : i) * stride * size;
        float *out = dst + i * DR;
        for (int64_t d = 0; d < whole; d += DR, out += v_rows * DR)
            UNROLL
            for (int j = 0; j < NV; j++) v_store(out + j * VL, v_load_as(row + (d + j * VL) * size, dtype));
        for (int64_t d = whole; d < D; d++) out[d - whole] = esa_load_f32(row, d, dtype);
        if (whole < D) for (int64_t c = D - whole; c < DR; c++) out[c] = 0.0f;
    }
    for (int64_t d = 0; d < D; d += DR)
        for (int64_t i = rows; i < v_rows; i++)
            for (int64_t c = 0; c < DR; c++) dst[(d / DR * v_rows + i) * DR + c] = 0.0f;
}

static void pack_v(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows,
                   int64_t v_rows, int64_t D)
{
    BY_DTYPE(dtype, pack_v_as(dst, src, DT, stride, gather, rows, v_rows, D))
}

/* ---------------------------------------------------------------- the two products */

/* c[R][NV] += sum_k a[k*a_step + r*a_row] (broadcast) * b[k*NR ..]. */
INLINE void tile_product(vf c[][NV], const float *a, int64_t a_step, int64_t a_row, const float *b, int64_t depth, const int R)
{
    for (int64_t k = 0; k < depth; k++, a += a_step, b += NR) {
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

INLINE void qk_rows(float *s, int64_t ld, const float *q, const float *k, int64_t keys, int64_t depth, int32_t accumulate,
                    const int R)
{
    for (int64_t base = 0; base < keys; base += NR, k += depth * NR) {
        vf c[MR][NV];
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int j = 0; j < NV; j++) c[r][j] = accumulate ? v_load(s + r * ld + base + j * VL) : v_zero();
        tile_product(c, q, MR, 1, k, depth, R);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int j = 0; j < NV; j++) v_store(s + r * ld + base + j * VL, c[r][j]);
    }
}

static void qk(float *s, int64_t ld, const void *q, const void *k, int64_t rows, int64_t keys, int64_t depth, float factor,
               int32_t accumulate)
{
    (void)factor;                               /* folded into q by pack_q */
    if (rows > ROWS_B) qk_rows(s, ld, q, k, keys, depth, accumulate, MR);
    else if (rows > ROWS_A) qk_rows(s, ld, q, k, keys, depth, accumulate, ROWS_B);
    else qk_rows(s, ld, q, k, keys, depth, accumulate, ROWS_A);
}

INLINE void pv_rows(float *o, int64_t ld_o, const float *p, int64_t ld_p, const float *v, int64_t v_rows, int64_t keys,
                    int64_t D, const float *alpha, const int R)
{
    for (int64_t base = 0; base < D; base += DR, v += v_rows * DR) {
        vf c[MR][NV];
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int j = 0; j < NV; j++) {
                c[r][j] = v_load(o + r * ld_o + base + j * VL);
                if (alpha) c[r][j] = v_mul(c[r][j], v_set1(alpha[r]));
            }
        tile_product(c, p, 1, ld_p, v, keys, R);
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int j = 0; j < NV; j++) v_store(o + r * ld_o + base + j * VL, c[r][j]);
    }
}

static void pv(float *o, int64_t ld_o, const void *p, int64_t ld_p, const void *v, int64_t v_rows, int64_t rows, int64_t keys,
               int64_t D, const float *alpha)
{
    if (rows > ROWS_B) pv_rows(o, ld_o, p, ld_p, v, v_rows, keys, D, alpha, MR);
    else if (rows > ROWS_A) pv_rows(o, ld_o, p, ld_p, v, v_rows, keys, D, alpha, ROWS_B);
    else pv_rows(o, ld_o, p, ld_p, v, v_rows, keys, D, alpha, ROWS_A);
}

/* ---------------------------------------------------------------- softmax */

/* Applies bias and limits and puts -inf behind the last key up to a whole vector. */
INLINE void prepare_row(float *row, int64_t visible, int64_t keys, const float *bias)
{
    const vf none = v_set1(-INFINITY);
    for (int64_t c = 0; c < keys; c += VL) {
        vf x = v_load(row + c);
        if (bias) x = v_drop(v_add(x, v_load(bias + c)), v_load(bias + c));
        if (c + VL > visible) x = v_first(x, visible > c ? visible - c : 0, none);
        v_store(row + c, x);
    }
}

static int32_t softmax(void *p, float *s, int64_t ld, int64_t rows, int64_t keys, const int32_t *limit, const float *bias,
                       float *m, float *l, float *alpha)
{
    const int plain = !limit && !bias && keys % VL == 0;
    int32_t moved = 0;
    (void)p;                                    /* f32 sets work in place */
    for (int64_t r = 0; r < rows; r++) {
        float *row = s + r * ld;
        if (!plain) prepare_row(row, limit ? limit[r] : keys, keys, bias);
        vf top = v_load(row), top2 = top;       /* two chains hide the latency of max */
        int64_t c = VL;
        for (; c + VL < keys; c += 2 * VL) {
            top = v_max(v_load(row + c), top);
            top2 = v_max(v_load(row + c + VL), top2);
        }
        for (; c < keys; c += VL) top = v_max(v_load(row + c), top);
        top = v_max(top2, top);
        alpha[r] = 1.0f;
        vf sum = v_load(l + r * VL);
        /* The reference maximum moves only when it must; the test costs one compare, the horizontal maximum is rare. */
        if (v_any_gt(top, v_set1(m[r] + 8.0f))) {
            const float now = v_reduce_max(top);
            alpha[r] = exp2f(m[r] - now);       /* m = -inf: 0 */
            m[r] = now;
            moved |= alpha[r] != 1.0f;
            sum = v_mul(sum, v_set1(alpha[r]));
        }
        const vf ref = v_set1(m[r] == -INFINITY ? 0.0f : m[r]);     /* -inf - -inf would be NaN */
        vf sum2 = v_zero();
        for (c = 0; c + VL < keys; c += 2 * VL) {
            const vf a = v_exp2(v_sub(v_load(row + c), ref)), b = v_exp2(v_sub(v_load(row + c + VL), ref));
            v_store(row + c, a);
            v_store(row + c + VL, b);
            sum = v_add(sum, a);
            sum2 = v_add(sum2, b);
        }
        if (c < keys) {
            const vf a = v_exp2(v_sub(v_load(row + c), ref));
            v_store(row + c, a);
            sum = v_add(sum, a);
        }
        v_store(l + r * VL, v_add(sum, sum2));
    }
    return moved;
}

/* ---------------------------------------------------------------- the small ones */

static void stats(float *top, float *sum, int64_t ld_out, const float *s, int64_t ld, int64_t rows, int64_t keys, int64_t group)
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
            for (int64_t c = 0; c < n; c += VL) e = v_add(e, v_exp2(v_sub(v_first(v_load(row + c), n - c, none), ref)));
            top[r * ld_out + g] = high;
            sum[r * ld_out + g] = v_reduce_add(e);
        }
}

INLINE void store_as(void *dst, const int32_t dtype, const float *src, vf factor, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype);
    float f[VL];
    v_store(f, factor);
    int64_t d = 0;
    for (; d + VL <= D; d += VL) v_store_as((char *)dst + d * size, v_mul(v_load(src + d), factor), dtype);
    for (; d < D; d++) esa_store_f32(dst, d, dtype, src[d] * f[0]);
}

static void store(void *dst, int32_t dtype, const float *src, float factor, int64_t D)
{
    BY_DTYPE(dtype, store_as(dst, DT, src, v_set1(factor), D))
}

INLINE void mean_as(float *dst, const void *src, const int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D)
{
    const int64_t size = esa_dtype_size(dtype);
    int64_t d = 0;
    for (; d + 4 * VL <= D; d += 4 * VL) {      /* four columns of vectors: every row is read in whole cache lines */
        vf sum[4] = { v_zero(), v_zero(), v_zero(), v_zero() };
        for (int64_t i = 0; i < rows; i++) {
            const char *row = (const char *)src + ((gather ? gather[i] : i) * stride + d) * size;
            UNROLL
            for (int j = 0; j < 4; j++) sum[j] = v_add(sum[j], v_load_as(row + j * VL * size, dtype));
        }
        UNROLL
        for (int j = 0; j < 4; j++) v_store(dst + d + j * VL, v_div(sum[j], v_set1((float)rows)));
    }
    for (; d < D; d++) {
        float sum = 0.0f;
        for (int64_t i = 0; i < rows; i++) sum += esa_load_f32(src, (gather ? gather[i] : i) * stride + d, dtype);
        dst[d] = sum / (float)rows;
    }
}

static void mean(float *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D)
{
    BY_DTYPE(dtype, mean_as(dst, src, DT, stride, gather, rows, D))
}

#define KERNEL_SLOTS                                                                                              \
    .mr = MR, .nr = NR, .dr = DR, .lanes = VL, .packed_bytes = 4, .pack_q = pack_q, .pack_k = pack_k, .pack_v = pack_v, \
    .qk = qk, .softmax = softmax, .pv = pv, .store = store, .stats = stats, .mean = mean
