/* cpu.h - the CPU kernel table: every leaf operation as a pointer, filled from src/ref and overlaid by ISA.
 * SPDX-License-Identifier: Apache-2.0
 *
 * docs/kernels.md is the contract of each slot. Common to all: no allocation, no errors, pointers valid and checked by the
 * caller, dst never overlaps src. "rows" of a source are addressed as src + index*stride elements, index = gather[i] or i.
 *
 * Packed shapes (E = packed_bytes per element: 4 for f32 sets, 2 for the bf16 set):
 *   Q pack  [ceil(rows/mr)][D'][mr]          D' = D rounded up to even for the bf16 set, which interleaves pairs along D
 *   K pack  [ceil(rows/nr)][D'][nr]          (and along keys for V)
 *   V pack  [ceil(D/dr)][rows'][dr]          rows' = v_rows given by the caller (even), missing rows zero
 * Missing rows and columns are packed as zeros, so kernels always run full panels. */
#ifndef ESA_CPU_CPU_H
#define ESA_CPU_CPU_H

#include "base/ctx.h"
#include "base/pool.h"

#define ESA_CPU_MAX_MR 16           /* largest mr of any table */
#define ESA_CPU_MAX_LANES 16        /* largest lanes of any table */

typedef struct esa_cpu_kernels {
    const char *name;               /* "ref", "avx2", ... */
    int32_t level;                  /* ESA_CPU_* */
    int32_t mr;                     /* rows of a score tile */
    int32_t nr;                     /* keys per K panel */
    int32_t dr;                     /* head-dim columns per V panel */
    int32_t lanes;                  /* width of the row-sum vectors l[r][lanes] */
    int32_t packed_bytes;           /* 4, or 2 for the bf16 set */

    /* Packs rows x D (any dtype) for Q, K, V; see above. factor multiplies the values of pack_q (f32 sets), or is left to qk. */
    void (*pack_q)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D, float factor);
    void (*pack_k)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D);
    void (*pack_v)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t v_rows, int64_t D);

    /* s[r][c] (row pitch ld >= keys rounded up to nr; all panels written) = factor-scaled dot over depth, r < rows <= mr.
     * q: one group of Q pack [depth][mr]; k: K pack of ceil(keys/nr) panels with panel pitch depth*nr.
     * accumulate 1: adds to s instead (depth split into chunks). Rows rows..mr-1 of s are undefined but writable. */
    void (*qk)(float *s, int64_t ld, const void *q, const void *k, int64_t rows, int64_t keys, int64_t depth,
               float factor, int32_t accumulate);

    /* One online-softmax step on a tile of log2-scores. In: s (as qk wrote it), keys valid columns, per-row limits (visible
     * columns, NULL: keys), per-column bias (log2, NULL: 0; -inf removes the column; readable up to keys rounded up to 16). Running state per row: m (reference
     * maximum, -inf at first), l[r][lanes]. Out: p = exp2(s - m) in place of s (f32 sets: p == s) or as packed bf16 rows of
     * pitch ld at p; columns keys .. roundup(keys, 2) are 0. alpha[r] = factor by which the old l and o count; l is already
     * rescaled. Returns 1 if any alpha differs from 1. m moves only when a score exceeds it by more than 8 (log2 units), so
     * p may reach 2^8 and rescaling is rare. */
    int32_t (*softmax)(void *p, float *s, int64_t ld, int64_t rows, int64_t keys, const int32_t *limit, const float *bias,
                       float *m, float *l, float *alpha);

    /* o[r][ld_o] (f32, D rounded up to dr columns) = o * alpha[r] (alpha NULL: 1) + p v over the first keys keys.
     * v: V pack with v_rows rows per panel. */
    void (*pv)(float *o, int64_t ld_o, const void *p, int64_t ld_p, const void *v, int64_t v_rows, int64_t rows,
               int64_t keys, int64_t D, const float *alpha);

    /* dst[d] (dtype) = src[d] * factor for one row of D values. */
    void (*store)(void *dst, int32_t dtype, const float *src, float factor, int64_t D);

    /* Per row r and per group g of `group` columns (the last one shorter): top[r*ld_out + g] = max, sum[r*ld_out + g] =
     * sum exp2(s - max); an all -inf group gives -inf and 0, a NaN in the group makes its sum NaN. group is a multiple of 16. */
    void (*stats)(float *top, float *sum, int64_t ld_out, const float *s, int64_t ld, int64_t rows, int64_t keys,
                  int64_t group);

    /* dst[d] = mean over rows, rows >= 1, summed in f32 in row order per column. */
    void (*mean)(float *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather, int64_t rows, int64_t D);

    const struct esa_cpu_kernels *bf16; /* set used for bf16 tensors in attention; NULL: this one */
} esa_cpu_kernels;

/* Best table at or below level (ESA_CPU_BEST: detection and $ESA_CPU). NULL if level is not available on this machine. */
const esa_cpu_kernels *esa_cpu_kernels_get(int32_t level);
/* What the CPU and the operating system allow: bit (1 << ESA_CPU_*) for each usable level. */
uint32_t esa_cpu_detect(void);
/* 1 where the bf16 instructions are faster than f32 ones; elsewhere their level is used only if asked for by name. */
int32_t esa_cpu_bf16_pays(void);
/* ESA_CPU_* of a name as in $ESA_CPU, or -1. */
int32_t esa_cpu_level_from_name(const char *name);

/* Bytes of packed buffers. */
static inline int64_t esa_pad_depth(const esa_cpu_kernels *kern, int64_t D) { return kern->packed_bytes == 2 ? (D + 1) / 2 * 2 : D; }
static inline int64_t esa_q_pack_bytes(const esa_cpu_kernels *kern, int64_t rows, int64_t D)
{ return esa_ceil_div(rows, kern->mr) * kern->mr * esa_pad_depth(kern, D) * kern->packed_bytes; }
static inline int64_t esa_k_pack_bytes(const esa_cpu_kernels *kern, int64_t rows, int64_t D)
{ return esa_ceil_div(rows, kern->nr) * kern->nr * esa_pad_depth(kern, D) * kern->packed_bytes; }
static inline int64_t esa_v_pack_bytes(const esa_cpu_kernels *kern, int64_t v_rows, int64_t D)
{ return esa_ceil_div(D, kern->dr) * kern->dr * v_rows * kern->packed_bytes; }

#endif
