/* cpu.h - the CPU kernel table: every leaf operation as a pointer, filled from src/ref and overlaid
 * by ISA.
 * SPDX-License-Identifier: Apache-2.0
 *
 * docs/kernels.md is the contract of each slot. Common to all: no allocation, no errors, pointers
 * valid and checked by the caller, dst never overlaps src. "rows" of a source are addressed as src
 * + index*stride elements, index = gather[i] or i.
 *
 * Two families. Attention: queries lie along the vectors (nr at a time), keys and values are
 * broadcast from their rows, in place where they are f32 and in order. Selectors: keys lie along
 * the vectors. Shapes (elements of packed_bytes: 4 for f32 sets, 2 for bf16): panel_q
 * [ceil(rows/nr)][D'][nr]    D' = D rounded up to even for the bf16 set, which interleaves pairs
 * along D rows_k  [rows][D'] rows_v  [rows][D]                  bf16 set: rows rounded up to even,
 * [rows/2][D][2] pack_q  [ceil(rows/mr)][D][mr], pack_k [ceil(rows/nr)][D][nr] Missing rows of
 * panels are zeros. */
#ifndef ESA_CPU_CPU_H
#define ESA_CPU_CPU_H

#include "base/memory.h"
#include "base/pool.h"

#define ESA_CPU_MAX_MR 16 /* largest mr of any table */
#define ESA_CPU_MAX_NR 32 /* largest nr of any table */

typedef struct esa_cpu_kernels {
    const char *name; /* "ref", "avx2", ... */
    int32_t level;    /* ESA_CPU_* */
    int32_t mr; /* rows of a tile: keys or head-dim columns in attention, queries in selectors */
    int32_t nr; /* columns of a tile: queries in attention, keys in selectors */
    int32_t packed_bytes; /* 4, or 2 for the bf16 set */

    /* Attention. Queries side by side, times factor (f32 sets; the bf16 set leaves it to kq). */
    void (*panel_q)(void *dst, const void *src, int32_t dtype, int64_t stride,
                    const int32_t *gather, int64_t rows, int64_t D, float factor);
    /* Keys and values as kq and pv read them. f32 sets: plain copies, not needed where the rows are
     * f32 already. */
    void (*rows_k)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D);
    void (*rows_v)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D);

    /* s[key][nr] = factor-scaled dot over depth with one panel of queries; k: rows of k_stride
     * elements. */
    void (*kq)(float *s, const void *q, const void *k, int64_t k_stride, int64_t keys,
               int64_t depth, float factor);

    /* One online-softmax step on log2-scores s[keys][nr]. limit: keys seen per query (NULL: all),
     * bias per key (log2, NULL: 0; -inf removes the key). Running state per query: m[nr] (reference
     * maximum, -inf at first), l[nr] (sum). Out: p = exp2(s - m) in place of s (f32 sets: p == s)
     * or, bf16 set, at p as [keys/2][nr][2], a missing last key being 0. alpha[nr] = factor by
     * which the old l and o count; l is already rescaled. Returns 1 if some alpha may differ
     * from 1. m moves only when a score exceeds it by more than 8 (log2 units), so p may reach 2^8
     * and rescaling is rare. */
    int32_t (*softmax)(void *p, float *s, int64_t keys, const float *limit, const float *bias,
                       float *m, float *l, float *alpha);

    /* o[D][nr] = o * alpha[nr] (alpha NULL: 1) + sum over keys of v p; accumulate 0: o is not read.
     * v: rows of v_stride elements. */
    void (*pv)(float *o, const void *p, const void *v, int64_t v_stride, int64_t keys, int64_t D,
               const float *alpha, int32_t accumulate);

    /* Rows out of o[D][nr]: dst row scatter[r] or r (dtype, stride elements apart) = column r times
     * factor[r], r < rows <= nr; factor is readable up to nr. */
    void (*store)(void *dst, int32_t dtype, int64_t stride, const int32_t *scatter, const float *o,
                  const float *factor, int64_t rows, int64_t D);
    /* The same bytes written past the cache, for outputs too large to stay there. NULL: this set
     * has no such stores. */
    void (*stream)(void *dst, int32_t dtype, int64_t stride, const int32_t *scatter, const float *o,
                   const float *factor, int64_t rows, int64_t D);

    /* Selectors; NULL in the bf16 set, which serves attention only. Packs rows x D (any dtype);
     * factor multiplies. */
    void (*pack_q)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D, float factor);
    void (*pack_k)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D);

    /* s[r][c] (row pitch ld >= keys rounded up to nr; all panels written) = dot over depth, r <
     * rows <= mr. q: one group of pack_q [depth][mr]; k: pack_k of ceil(keys/nr) panels with panel
     * pitch depth*nr. factor: folded into q. accumulate 1: adds to s instead (depth split into
     * chunks). Rows rows..mr-1 of s are undefined but writable. */
    void (*qk)(float *s, int64_t ld, const void *q, const void *k, int64_t rows, int64_t keys,
               int64_t depth, float factor, int32_t accumulate);

    /* Per row r and per group g of `group` columns (the last one shorter): top[r*ld_out + g] = max,
     * sum[r*ld_out + g] = sum exp2(s - max); an all -inf group gives -inf and 0, a NaN in the group
     * makes its sum NaN. group is a multiple of 16. */
    void (*stats)(float *top, float *sum, int64_t ld_out, const float *s, int64_t ld, int64_t rows,
                  int64_t keys, int64_t group);

    /* dst[d] = mean over rows, rows >= 1, summed in f32 in row order per column. */
    void (*mean)(float *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                 int64_t rows, int64_t D);

    const struct esa_cpu_kernels *bf16; /* set used for bf16 tensors in attention; NULL: this one */
} esa_cpu_kernels;

/* Best table at or below level (ESA_CPU_BEST: detection and $ESA_CPU). NULL if level is not
 * available on this machine. */
const esa_cpu_kernels *esa_cpu_kernels_get(int32_t level);
/* What the CPU and the operating system allow: bit (1 << ESA_CPU_*) for each usable level. */
uint32_t esa_cpu_detect(void);
/* 1 where the bf16 instructions are faster than f32 ones; elsewhere their level is used only if
 * asked for by name. */
int32_t esa_cpu_bf16_pays(void);
/* ESA_CPU_* of a name as in $ESA_CPU, or -1. */
int32_t esa_cpu_level_from_name(const char *name);

/* Bytes of packed buffers. */
static inline int64_t esa_pad_depth(const esa_cpu_kernels *kern, int64_t D)
{
    return kern->packed_bytes == 2 ? (D + 1) / 2 * 2 : D;
}
static inline int64_t esa_q_pack_bytes(const esa_cpu_kernels *kern, int64_t rows, int64_t D)
{
    return esa_ceil_div(rows, kern->mr) * kern->mr * esa_pad_depth(kern, D) * kern->packed_bytes;
}
static inline int64_t esa_k_pack_bytes(const esa_cpu_kernels *kern, int64_t rows, int64_t D)
{
    return esa_ceil_div(rows, kern->nr) * kern->nr * esa_pad_depth(kern, D) * kern->packed_bytes;
}
static inline int64_t esa_rows_k_bytes(const esa_cpu_kernels *kern, int64_t rows, int64_t D)
{
    return rows * esa_pad_depth(kern, D) * kern->packed_bytes;
}
static inline int64_t esa_rows_v_bytes(const esa_cpu_kernels *kern, int64_t rows, int64_t D)
{
    return (rows + 1) / 2 * 2 * D * kern->packed_bytes;
}

#endif
