/* attn_cpu_exact.c - exact rows on the CPU: takes the sampled queries, and mends the output with
 * their errors.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The threads take query blocks. One thread mends one block, in the order of its rows, so the bits
 * do not depend on the number of threads. rules/exact_rows.h has the rule. */
#include "cpu/attn_cpu_run.h"
#include "rules/exact_rows.h"

#include <string.h>

typedef struct exact_run {
    const esa_attn_args *a;
    void *rows;        /* take: [B][Hq][nq*R][D] */
    const void *exact; /* mend: [B][Hq][nq*R][D] */
    const float *lse;  /* mend: [B][Hq][nq*R], or NULL */
} exact_run;

/* One query block. */
typedef struct exact_block {
    int64_t b, h, i;
    int64_t row0, rows; /* its positions */
    int64_t first;      /* its first row of the compact tensors */
    const int32_t *perm;
} exact_block;

static exact_block block_of(const esa_attn_args *a, int64_t item)
{
    const int64_t head = item / a->nq, b = head / a->Hq, h = head % a->Hq, i = item % a->nq,
                  row0 = i * a->block_q;
    return (exact_block){ b,
                          h,
                          i,
                          row0,
                          esa_min64(a->block_q, a->Nq - row0),
                          item * a->exact_rows,
                          order_at(a->perm_q, a->perm_q_stride, b, h) };
}

/* Row r of the block in a view. */
static char *row_at(const void *base, const int64_t *stride, const esa_attn_args *a,
                    const exact_block *block, int64_t r)
{
    const int64_t n = block->row0 + r, token = block->perm ? block->perm[n] : n;
    return (char *)at(base, block->b * stride[0] + block->h * stride[1] + token * stride[2],
                      a->dtype);
}

static void take_item(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const exact_run *run = arg;
    const esa_attn_args *a = run->a;
    const exact_block block = block_of(a, item);
    const int64_t bytes = a->D * esa_dtype_size(a->dtype);
    for (int64_t i = 0; i < a->exact_rows; i++)
        memcpy((char *)run->rows + (block.first + i) * bytes,
               row_at(a->q, a->q_stride, a, &block, esa_exact_row_at(block.rows, a->exact_rows, i)),
               (size_t)bytes);
}

/* error[d] = exact row i - its sparse output. */
static void row_error(float *error, const exact_run *run, const exact_block *block, int64_t i)
{
    const esa_attn_args *a = run->a;
    const char *sparse = row_at(a->o, a->o_stride, a, block,
                                esa_exact_row_at(block->rows, a->exact_rows, i)),
               *exact = at(run->exact, (block->first + i) * a->D, a->dtype);
    for (int64_t d = 0; d < a->D; d++)
        error[d] = esa_load_f32(exact, d, a->dtype) - esa_load_f32(sparse, d, a->dtype);
}

/* mend[D] = what the other rows of the block get. Returns 0 if it is nothing. */
static int32_t block_mend(float *mend, const exact_run *run, const exact_block *block)
{
    const esa_attn_args *a = run->a;
    const int32_t R = a->exact_rows;
    float error[ESA_MAX_EXACT_ROWS][ESA_MAX_HEAD_DIM], size = 0.0f, spread = 0.0f;
    for (int32_t i = 0; i < R; i++) row_error(error[i], run, block, i);
    for (int64_t d = 0; d < a->D; d++) {
        float sum = 0.0f;
        for (int32_t i = 0; i < R; i++) sum += error[i][d];
        const float mean = sum / (float)R;
        for (int32_t i = 0; i < R; i++) spread += (error[i][d] - mean) * (error[i][d] - mean);
        size += mean * mean;
        mend[d] = mean;
    }
    const float share = esa_exact_share(spread, size, R);
    for (int64_t d = 0; d < a->D; d++) mend[d] *= share;
    return share > 0.0f;
}

/* Inlined with a constant dtype, so that the conversions vectorise. */
ESA_INLINE void add_row(char *o, const float *mend, int64_t D, int32_t dtype)
{
    for (int64_t d = 0; d < D; d++) esa_store_f32(o, d, dtype, esa_load_f32(o, d, dtype) + mend[d]);
}

static void add_mend(char *o, const float *mend, int64_t D, int32_t dtype)
{
    if (dtype == ESA_DTYPE_F32)
        add_row(o, mend, D, ESA_DTYPE_F32);
    else if (dtype == ESA_DTYPE_F16)
        add_row(o, mend, D, ESA_DTYPE_F16);
    else
        add_row(o, mend, D, ESA_DTYPE_BF16);
}

static void mend_item(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const exact_run *run = arg;
    const esa_attn_args *a = run->a;
    const exact_block block = block_of(a, item);
    const int64_t mask_row = (block.b * a->mask_batch + block.h) * a->nq + block.i,
                  blocks = esa_ceil_div(kv_len_of(a, block.b), a->block_k);
    if (esa_exact_already(blocks, a->count[mask_row], a->index + mask_row * a->cap)) return;
    float mend[ESA_MAX_HEAD_DIM];
    const int32_t some = block.rows > a->exact_rows && block_mend(mend, run, &block);
    for (int64_t r = 0; r < block.rows; r++) {
        const int32_t i = esa_exact_row_number(block.rows, a->exact_rows, r);
        char *o = row_at(a->o, a->o_stride, a, &block, r);
        if (i < 0) {
            if (some) add_mend(o, mend, a->D, a->dtype);
            continue;
        }
        const int64_t from = block.first + i, n = block.row0 + r;
        memcpy(o, at(run->exact, from * a->D, a->dtype), (size_t)(a->D * esa_dtype_size(a->dtype)));
        if (a->lse)
            a->lse[block.b * a->lse_stride[0] + block.h * a->lse_stride[1] +
                   (block.perm ? block.perm[n] : n) * a->lse_stride[2]] = run->lse[from];
    }
}

void esa_attn_cpu_take(const esa_attn_args *args, void *rows)
{
    exact_run run = { args, rows, NULL, NULL };
    esa_pool_run(args->pool, take_item, &run, args->B * args->Hq * args->nq);
}

void esa_attn_cpu_mend(const esa_attn_args *args, const void *exact, const float *lse)
{
    exact_run run = { args, NULL, exact, lse };
    esa_pool_run(args->pool, mend_item, &run, args->B * args->Hq * args->nq);
}
