/* cpu.h - the CPU kernel table: every leaf operation is a pointer.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The table starts with the plain C kernels (kernels_ref.c); each ISA level replaces them with
 * faster ones. docs/kernels.md is the contract of each slot. For all of them: no allocation, no
 * errors, the caller has checked the pointers, dst never overlaps src. Row i of a source is at
 * src + index*stride elements, with index = gather[i], or i without gather.
 *
 * There are two families. Attention puts queries along the vectors (nr at a time) and broadcasts
 * keys and values from their rows, in place if they are f32 and in order. Selectors put keys along
 * the vectors. Shapes, in elements of packed_bytes (4 for f32 sets, 2 for bf16), with D' = D
 * rounded up to depth_unit, U = keys_unit and D'' = D rounded up to dims_unit:
 *
 *     panel_q  [ceil(rows/nr)][D'][nr]   bf16: pairs along D interleaved, [D'/2][nr][2]
 *     rows_k   [rows][D']
 *     rows_v   [ceil(rows/U)][D''][U]    U = 1: rows; 2: pairs of keys; 32: transposed groups for
 *                                        tiles, with keys i and i + 16 at places 2i and 2i + 1
 *     p        [ceil(keys/U)][U][nr]     U = 2 and 32: [U/2][nr][2], the same pairs
 *     pack_q   [ceil(rows/mr)][D][mr]    tile set: [ceil(rows/mr)][mr][D']
 *     pack_k   [ceil(rows/nr)][D][nr]    tile set: as panel_q
 *
 * Missing rows of a panel are zeros. */
#ifndef ESA_CPU_CPU_H
#define ESA_CPU_CPU_H

#include "base/memory.h"
#include "base/pool.h"

#define ESA_CPU_LEVELS (ESA_CPU_NEONBF16 + 1) /* number of ESA_CPU_* */
#define ESA_CPU_MAX_MR 16                     /* largest mr of any table */
#define ESA_CPU_MAX_NR 32                     /* largest nr of any table */

typedef struct esa_cpu_kernels {
    const char *name; /* "ref", "avx2", ... */
    int32_t level;    /* ESA_CPU_* */
    int32_t mr; /* rows of a tile: keys or head-dim columns in attention, queries in selectors */
    int32_t nr; /* columns of a tile: queries in attention, keys in selectors */
    int32_t packed_bytes; /* 4, or 2 for the bf16 sets */
    /* Rows of queries and keys have D rounded up to depth_unit. rows_v keeps keys_unit keys
     * together, for each of D rounded up to dims_unit. */
    int32_t depth_unit, keys_unit, dims_unit;

    /* See esa_kernels_begin; NULL: nothing. */
    void (*begin)(void);
    void (*end)(void);

    /* Attention: nr queries side by side, multiplied by factor (f32 sets; the bf16 set leaves
     * factor to kq). */
    void (*panel_q)(void *dst, const void *src, int32_t dtype, int64_t stride,
                    const int32_t *gather, int64_t rows, int64_t D, float factor);
    /* Keys and values in the form kq and pv read. f32 sets copy them; rows that are f32 already
     * need no copy. */
    void (*rows_k)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D);
    void (*rows_v)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D);

    /* s[key][nr] = factor * dot over depth with one panel of queries. k: rows of k_stride elements.
     * The tile set leaves factor to softmax, and may write the rows up to a multiple of
     * keys_unit. */
    void (*kq)(float *s, const void *q, const void *k, int64_t k_stride, int64_t keys,
               int64_t depth, float factor);

    /* One online-softmax step on log2 scores s[keys][nr] (tile set: on scores times factor).
     * limit: keys each query sees (NULL: all). bias: per key, log2 (NULL: 0; -inf removes the
     * key). Running state per query: m[nr] (reference maximum, -inf at first) and l[nr] (sum).
     * Writes p = exp2(s - m) over s (f32 sets: p == s), or to p in the pairs of rows_v, with 0 for
     * missing keys (16-bit sets). alpha[nr] receives the factor for the old o; l is already
     * rescaled. Returns 1 if some alpha may differ from 1. m changes only if a score exceeds it by
     * more than 8 (log2 units), so p may reach 2^8 and rescaling is rare. */
    int32_t (*softmax)(void *p, float *s, int64_t keys, float factor, const float *limit,
                       const float *bias, float *m, float *l, float *alpha);

    /* o[D][nr] = o * alpha[nr] (alpha NULL: 1) + sum over keys of v p. The sum starts from 0 and is
     * added to o at the end. accumulate 0: neither o nor alpha is read. v: rows of v_stride
     * elements. */
    void (*pv)(float *o, const void *p, const void *v, int64_t v_stride, int64_t keys, int64_t D,
               const float *alpha, int32_t accumulate);

    /* Writes rows of o[D][nr]: row scatter[r] (or r) of dst, stride elements apart, receives column
     * r times factor[r], for r < rows <= nr. factor is readable up to nr. */
    void (*store)(void *dst, int32_t dtype, int64_t stride, const int32_t *scatter, const float *o,
                  const float *factor, int64_t rows, int64_t D);
    /* The same with stores that bypass the cache, for outputs too large for it. NULL: this
     * set has none. */
    void (*stream)(void *dst, int32_t dtype, int64_t stride, const int32_t *scatter, const float *o,
                   const float *factor, int64_t rows, int64_t D);

    /* Selectors; NULL in the bf16 sets that serve attention only. Packs rows x D of any dtype,
     * multiplied by factor (tile set: qk applies it). */
    void (*pack_q)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D, float factor);
    void (*pack_k)(void *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                   int64_t rows, int64_t D);

    /* s[r][c] = dot over depth, r < rows <= mr. The row pitch ld is at least keys rounded up to
     * nr; all panels are written. q: one group of pack_q [depth][mr]. k: ceil(keys/nr) panels of
     * pack_k with pitch depth*nr. f32 sets have factor in q and do not read it. accumulate 1: adds
     * to s (depth split into chunks). Rows rows .. mr-1 of s are undefined but writable. */
    void (*qk)(float *s, int64_t ld, const void *q, const void *k, int64_t rows, int64_t keys,
               int64_t depth, float factor, int32_t accumulate);

    /* For each row r and each group g of `group` columns (the last may be shorter): top[r*ld_out +
     * g] = max, sum[r*ld_out + g] = sum of exp2(s - max). A group of only -inf gives -inf and 0;
     * NaN in a group makes its sum NaN. group is a multiple of 16. */
    void (*stats)(float *top, float *sum, int64_t ld_out, const float *s, int64_t ld, int64_t rows,
                  int64_t keys, int64_t group);

    /* dst[d] = mean over rows (at least 1), summed in f32 in row order. */
    void (*mean)(float *dst, const void *src, int32_t dtype, int64_t stride, const int32_t *gather,
                 int64_t rows, int64_t D);

    /* Error selector, in the shapes of attention. fold: dst[n] = (accumulate ? dst[n] : 0) + sum
     * over rows of src[rows][n]; n is a multiple of nr. */
    void (*fold)(float *dst, const float *src, int64_t rows, int64_t n, int32_t accumulate);
    /* Squared distance that is left when `means` values v with weights t[means][nr] stand in for a
     * sum a[D][nr] of weight w[nr], seen from o[D][nr]: adds sum_d (a - sum_i t_i v_i - (w - sum_i
     * t_i) o)^2 to e[nr]. v: rows of v_stride elements. means may be 0. */
    void (*residue)(float *e, const float *a, const float *o, const float *w, const float *t,
                    const float *v, int64_t v_stride, int64_t means, int64_t D);

    const struct esa_cpu_kernels *bf16; /* set for bf16 tensors in attention; NULL: this one */
    /* 1: 8-bit attention rounds P and v to f16 instead of E4M3, as the sm80 kernel of GPUs does
     * (docs/precision.md). No table of a CPU sets it; tests do. */
    int32_t eight_f16;
    /* 1: its stages have 64 keys or means, in the order of the sm80 and sm89 kernels. Likewise. */
    int32_t eight_steps;
} esa_cpu_kernels;

/* The best table at or below level. ESA_CPU_BEST: the detected level or $ESA_CPU. NULL if this
 * machine lacks the level. */
const esa_cpu_kernels *esa_cpu_kernels_get(int32_t level);
/* Levels that the CPU and the operating system allow: bit (1 << ESA_CPU_*) for each. */
uint32_t esa_cpu_detect(void);
/* The level of the plain vectors that a level has: AVX512 for AVX512BF16 and AMX, NEON for
 * NEONBF16, else the level itself. */
ESA_ENGINE int32_t esa_cpu_vectors(int32_t level);
/* 1 if the bf16 instructions of AVX-512 are faster than f32 ones. Otherwise their level is used
 * only if asked for by name. */
ESA_ENGINE int32_t esa_cpu_bf16_pays(void);
/* ESA_CPU_* of a name in $ESA_CPU, or -1. */
int32_t esa_cpu_level_from_name(const char *name);

/* What a task does before the first kq, pv or qk and after the last. */
static inline void esa_kernels_begin(const esa_cpu_kernels *kern)
{
    if (kern->begin) kern->begin();
}
static inline void esa_kernels_end(const esa_cpu_kernels *kern)
{
    if (kern->end) kern->end();
}

/* Sizes of packed buffers in bytes. */
static inline int64_t esa_pad_depth(const esa_cpu_kernels *kern, int64_t D)
{
    return esa_ceil_div(D, kern->depth_unit) * kern->depth_unit;
}
/* Rows of s and p that must be writable. */
static inline int64_t esa_pad_keys(const esa_cpu_kernels *kern, int64_t keys)
{
    return esa_ceil_div(keys, kern->keys_unit) * kern->keys_unit;
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
    return esa_pad_keys(kern, rows) * (esa_ceil_div(D, kern->dims_unit) * kern->dims_unit) *
           kern->packed_bytes;
}

#endif
