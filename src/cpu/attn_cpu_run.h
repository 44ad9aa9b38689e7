/* attn_cpu_run.h - one attention call on the CPU as its parts see it. Private to attn_cpu*.c.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_ATTN_CPU_RUN_H
#define ESA_CPU_ATTN_CPU_RUN_H

#include "base/half.h"
#include "cpu/attn_cpu.h"

#define TAIL_BLOCK 128 /* pooled columns per step */

typedef struct attn_sizes {
    int64_t window;           /* kv heads copied at once */
    int64_t k_block, v_block; /* bytes of a copied K or V block */
    /* Virtual blocks; bytes of a copied block of pooled K and of pooled V. */
    int64_t tail_blocks, tail_k, tail_v;
    int64_t depth, rows_pad; /* D of queries and keys; rows of a block rounded up to nr */
} attn_sizes;

typedef struct attn_worker { /* scratch of one thread */
    void *q;                 /* query panels of one block [rows_pad/nr][depth][nr] */
    float *o;                /* [rows_pad/nr][D][nr] */
    float *s;                /* [keys][nr] */
    float *m, *l, *alpha;    /* [rows_pad], [rows_pad], [nr] */
    void *p;                 /* bf16 sets: [keys rounded up][nr]; f32 sets: = s */
    float *limit;            /* [nr] causal */
    float *bias;             /* [nk rounded up] tail */
    float *mean_q;           /* [D] centroid */
    float *clean;            /* [TAIL_BLOCK][D] and ... */
    void *clean_v;           /* ... its copy for pv; see tail_values */
    void *fine_k, *fine_v;   /* levels: copies of TAIL_BLOCK fine means ... */
    int32_t *fine_row;       /* ... [TAIL_BLOCK] which ones ... */
    float *fine_bias;        /* ... [TAIL_BLOCK] and log2 of their tokens */
    float *rows;             /* [nr][D] carry: finished rows */
} attn_worker;

typedef struct attn_item {
    int64_t head_work, work;
    int32_t head, row;
} attn_item;

typedef struct attn_run {
    const esa_attn_args *a;
    attn_sizes z;
    float factor;                   /* scale * log2(e) */
    int32_t k_in_place, v_in_place; /* 1: read where they are */
    char *k_copy, *v_copy;          /* [window][nk] blocks */
    float *k_mean, *v_mean;         /* [window][nk][D] */
    uint8_t *odd;                   /* [window][nk] 1: the mean value is not finite */
    float *k_fine, *v_fine;         /* [window][nk][fine][D] levels: means of parts of a block */
    char *tail_k, *tail_v;          /* [window][tail_blocks] */
    attn_worker *worker;
    attn_item *item;      /* items of the window */
    int64_t first, heads; /* kv heads (b*Hkv + h) of the window */
} attn_run;

static inline int64_t kv_len_of(const esa_attn_args *a, int64_t b)
{
    return a->kv_len ? esa_min64(esa_max64(a->kv_len[b], 0), a->Nk) : a->Nk;
}

static inline const void *at(const void *base, int64_t offset, int32_t dtype)
{
    return (const char *)base + offset * esa_dtype_size(dtype);
}

/* Start of the rows of a block. With an order the gather list advances, else the pointer. */
typedef struct rows_ref {
    const void *data;
    const int32_t *gather;
} rows_ref;

/* The order of one head; NULL: none. */
static inline const int32_t *order_at(const int32_t *perm, const int64_t stride[2], int64_t b,
                                      int64_t h)
{
    return perm ? perm + b * stride[0] + h * stride[1] : NULL;
}

/* perm: the order of this head. */
static inline rows_ref rows_at(const void *base, const int64_t *stride, const int32_t *perm,
                               int64_t b, int64_t h, int64_t n, int32_t dtype)
{
    rows_ref r;
    r.gather = perm ? perm + n : NULL;
    r.data = at(base, b * stride[0] + h * stride[1] + (perm ? 0 : n * stride[2]), dtype);
    return r;
}

/* The rows n further on. */
static inline rows_ref rows_after(rows_ref r, int64_t n, int64_t stride, int32_t dtype)
{
    if (r.gather)
        r.gather += n;
    else
        r.data = at(r.data, n * stride, dtype);
    return r;
}

/* A block of keys ready for the products: rows of K and V with their strides. */
typedef struct key_block {
    const void *k, *v;
    int64_t k_stride, v_stride, keys;
    const float *bias;
} key_block;

/* State of one query block while it goes through its list. */
typedef struct attn_pass {
    /* Query head, slot of its kv head in the window, first row, number of rows. */
    int64_t b, h, slot, row0, rows;
    int32_t fresh; /* 1: no block attended yet; w->o is not valid */
} attn_pass;

/* Attends one key block with the rows of the query block. Row r sees the first `seen + r` keys;
 * with causal attention this may be negative. */
void esa_attn_attend(const attn_run *run, attn_worker *w, attn_pass *pass, const key_block *kb,
                     int64_t seen);

/* (attn_cpu_carry.c) Finishes one row of a call with a carry: x[D] is its sparse output, not
 * rounded, and is lost. ADD writes the row of o, MAKE that of d. */
void esa_attn_carry_row(const esa_attn_args *a, int64_t b, int64_t h, int64_t token, float *x);

/* ---------------------------------------------------------------- attn_cpu_tail.c */

/* Copying phase, run by the pool. Means of key block `item` of the window, which has n keys; then
 * copies of the pooled means in the form of the products. */
void esa_attn_means(const attn_run *run, int64_t item, rows_ref k, rows_ref v, int64_t n);
void esa_attn_tail_copy(void *arg, int64_t item, int32_t worker);
/* Finds out what the tail adds to row i of the mask, in the worker's bias. Returns 1 if there is
 * anything that one mean replaces. visible: keys that all queries of the block see. */
int32_t esa_attn_tail_bias(const attn_run *run, attn_worker *w, int64_t mask_row, int64_t kv_len,
                           int64_t visible);
/* Adds the pooled means whose bias says so. */
void esa_attn_tail(const attn_run *run, attn_worker *w, attn_pass *pass, int64_t blocks);
/* Centroid: computes the tail once with the mean query, then gives it to every row. */
void esa_attn_tail_centroid(const attn_run *run, attn_worker *w, attn_pass *pass, rows_ref q,
                            int64_t blocks);
/* Levels: adds the fine means of the blocks on the fine list of the row. */
void esa_attn_tail_fine(const attn_run *run, attn_worker *w, attn_pass *pass, int64_t mask_row,
                        int64_t kv_len, int64_t visible);

#endif
