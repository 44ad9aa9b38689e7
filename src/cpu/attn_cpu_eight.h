/* attn_cpu_eight.h - one call of 8-bit attention on the CPU as its parts see it. Private to
 * attn_cpu_eight*.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Codes are kept as floats. A product of two int8 codes and a sum of up to 256 of them are below
 * 2^24, so the f32 kernels of the table compute them exactly, in any order. */
#ifndef ESA_CPU_ATTN_CPU_EIGHT_H
#define ESA_CPU_ATTN_CPU_EIGHT_H

#include "cpu/attn_cpu_run.h"
#include "rules/eight_bit.h"

typedef struct eight_worker { /* scratch of one thread */
    float *q;                 /* panels of one query block [rows_pad/nr][D][nr] */
    float *rows;              /* [nr][D] codes of one panel before it is packed; one finished row */
    float *factor;            /* [rows_pad] scale * log2(e) * scale of the row */
    float *o, *t;             /* [rows_pad/nr][D][nr]; [D][nr] product of one stage */
    float *s;                 /* [keys][nr] */
    float *m, *l;             /* [rows_pad] */
    float *alpha, *top, *sum; /* [nr] */
    float *scale, *bias;      /* [keys] */
    float *fine_k, *fine_v;   /* [ESA_EIGHT_ROWS][D] gathered fine means */
    uint8_t *stands;          /* [nk] 1: one mean replaces the block */
} eight_worker;

typedef struct eight_run {
    const esa_attn_args *a;
    int64_t window; /* kv heads at a time */
    int64_t rows_pad, keys;
    int64_t means;              /* means of a stage */
    float factor;               /* scale * log2(e) */
    float *k_centre, *v_centre; /* [window][D] */
    float *v_scale, *v_inverse; /* [window][D] */
    float *v_added;             /* [window][D] v_centre, and the mean error of the codes */
    float *k_scale;             /* [window][nk] */
    float *k, *v;               /* [window][nk*block_k][D] codes */
    float *k_mean, *v_mean;     /* [window][nk][D] codes of block means; NULL: no tail */
    float *k_fine, *v_fine;     /* [window][nk*fine][D] codes of the means of parts */
    eight_worker *worker;
    int64_t first, heads; /* kv heads (b*Hkv + h) of the window */
} eight_run;

/* ---------------------------------------------------------------- attn_cpu_eight_codes.c */

/* Codes of the row of q at a position of head (b, h). Returns its scale. */
float esa_eight_query(float *code, const esa_attn_args *a, int64_t b, int64_t h, int64_t position);

/* The others are run by the pool.
 * Centres of keys (even items) or of values with their scales (odd items) of one kv head. */
void esa_eight_centres(void *arg, int64_t item, int32_t worker);
/* Codes of one key block and of its means. item: slot * nk + block. */
void esa_eight_block(void *arg, int64_t item, int32_t worker);
/* v_added of one kv head, whose codes are known. item: slot. */
void esa_eight_added(void *arg, int64_t item, int32_t worker);

#endif
