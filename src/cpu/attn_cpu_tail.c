/* attn_cpu_tail.c - means that stand in for skipped key blocks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The copying phase makes one mean key and value per block, and with tail LEVELS also those of its
 * parts. A query block then attends them like keys, with a bias log2(number of tokens) per column.
 * Pooled means are attended in place, all of a kv head, with -inf for those that do not count. Fine
 * means are gathered from the row's list, TAIL_BLOCK at a time. */
#include "cpu/attn_cpu_run.h"

#include <math.h>
#include <string.h>

/* ---------------------------------------------------------------- copying */

/* Means of the parts of a block: part p has the keys p*size .. (p+1)*size-1 that exist. */
static void fine_means(const attn_run *run, float *mean, rows_ref rows, int64_t stride, int64_t n)
{
    const esa_attn_args *a = run->a;
    const int64_t size = a->block_k / a->fine;
    for (int64_t p = 0; p * size < n; p++) {
        const rows_ref part = rows_after(rows, p * size, stride, a->dtype);
        a->kern->mean(mean + p * a->D, part.data, a->dtype, stride, part.gather,
                      esa_min64(size, n - p * size), a->D);
    }
}

void esa_attn_means(const attn_run *run, int64_t item, rows_ref k, rows_ref v, int64_t n)
{
    const esa_attn_args *a = run->a;
    float *k_mean = run->k_mean + item * a->D, *v_mean = run->v_mean + item * a->D;
    a->kern->mean(k_mean, k.data, a->dtype, a->k_stride[2], k.gather, n, a->D);
    a->kern->mean(v_mean, v.data, a->dtype, a->v_stride[2], v.gather, n, a->D);
    run->odd[item] = 0;
    for (int64_t d = 0; d < a->D; d++) run->odd[item] |= !isfinite(v_mean[d]);
    if (!a->fine_count) return;
    fine_means(run, run->k_fine + item * a->fine * a->D, k, a->k_stride[2], n);
    fine_means(run, run->v_fine + item * a->fine * a->D, v, a->v_stride[2], n);
}

void esa_attn_tail_copy(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const attn_run *run = arg;
    const esa_attn_args *a = run->a;
    const attn_sizes *z = &run->z;
    const int64_t slot = item / z->tail_blocks, t = item % z->tail_blocks,
                  b = (run->first + slot) / a->Hkv;
    const int64_t blocks = esa_ceil_div(kv_len_of(a, b), a->block_k),
                  n = esa_min64(TAIL_BLOCK, blocks - t * TAIL_BLOCK);
    if (n <= 0) return;
    const int64_t from = slot * a->nk + t * TAIL_BLOCK;
    a->kern->rows_k(run->tail_k + item * z->tail_k, run->k_mean + from * a->D, ESA_DTYPE_F32, a->D,
                    NULL, n, a->D);
    a->kern->rows_v(run->tail_v + item * z->tail_v, run->v_mean + from * a->D, ESA_DTYPE_F32, a->D,
                    NULL, n, a->D);
}

/* ---------------------------------------------------------------- attending */

/* Fills bias[nk]: log2 of the block length where one mean replaces a block; -inf where the list
 * computes the block, where fine means replace it, or where a row of the query block does not see
 * all of it. */
int32_t esa_attn_tail_bias(const attn_run *run, attn_worker *w, int64_t mask_row, int64_t kv_len,
                           int64_t visible)
{
    const esa_attn_args *a = run->a;
    const uint16_t *list = a->index + mask_row * a->cap;
    const int64_t count = a->count[mask_row], blocks = esa_ceil_div(kv_len, a->block_k);
    float *bias = w->bias;
    int64_t stand = 0, c = 0;
    for (int64_t j = 0; j < blocks; j++) {
        const int64_t n = esa_min64(a->block_k, kv_len - j * a->block_k);
        const int32_t listed = c < count && list[c] == j;
        c += listed;
        const int32_t stands = !listed && j * a->block_k + n <= visible;
        bias[j] = stands ? log2f((float)n) : -INFINITY;
        stand += stands;
    }
    for (int64_t j = blocks; j < esa_ceil_div(blocks, TAIL_BLOCK) * TAIL_BLOCK; j++)
        bias[j] = -INFINITY;
    if (!a->fine_count) return stand > 0;
    const uint16_t *fine = a->fine_index + mask_row * a->cap;
    for (int64_t f = 0; f < a->fine_count[mask_row] && fine[f] < blocks; f++) {
        stand -= bias[fine[f]] != -INFINITY;
        bias[fine[f]] = -INFINITY;
    }
    return stand > 0;
}

/* Columns with bias -inf have probability 0, but 0 times NaN is NaN. If the mean value of such a
 * column is not finite, the values are copied again with zeros in its place. */
static const void *tail_values(const attn_run *run, attn_worker *w, int64_t slot, int64_t t,
                               int64_t keys, const float *bias)
{
    const esa_attn_args *a = run->a;
    const int64_t first = slot * a->nk + t * TAIL_BLOCK;
    int32_t poisoned = 0;
    for (int64_t c = 0; c < keys; c++) poisoned |= run->odd[first + c] && bias[c] == -INFINITY;
    if (!poisoned) return run->tail_v + (slot * run->z.tail_blocks + t) * run->z.tail_v;
    for (int64_t c = 0; c < keys; c++) {
        if (bias[c] == -INFINITY)
            memset(w->clean + c * a->D, 0, (size_t)a->D * 4);
        else
            memcpy(w->clean + c * a->D, run->v_mean + (first + c) * a->D, (size_t)a->D * 4);
    }
    a->kern->rows_v(w->clean_v, w->clean, ESA_DTYPE_F32, a->D, NULL, keys, a->D);
    return w->clean_v;
}

void esa_attn_tail(const attn_run *run, attn_worker *w, attn_pass *pass, int64_t blocks)
{
    const attn_sizes *z = &run->z;
    const int64_t slot = pass->slot, D = run->a->D;
    for (int64_t t = 0; t * TAIL_BLOCK < blocks; t++) {
        const float *bias = w->bias + t * TAIL_BLOCK;
        const int64_t keys = esa_min64(TAIL_BLOCK, blocks - t * TAIL_BLOCK);
        int32_t any = 0;
        for (int64_t c = 0; c < keys && !any; c++) any = bias[c] != -INFINITY;
        if (!any) continue;
        const key_block kb = { run->tail_k + (slot * z->tail_blocks + t) * z->tail_k,
                               tail_values(run, w, slot, t, keys, bias),
                               z->depth,
                               D,
                               keys,
                               bias };
        esa_attn_attend(run, w, pass, &kb, keys);
    }
}

void esa_attn_tail_centroid(const attn_run *run, attn_worker *w, attn_pass *pass, rows_ref q,
                            int64_t blocks)
{
    const esa_attn_args *a = run->a;
    const int64_t nr = a->kern->nr;
    attn_pass one = { .slot = pass->slot, .rows = 1, .fresh = 1 };
    a->kern->mean(w->mean_q, q.data, a->dtype, a->q_stride[2], q.gather, pass->rows, a->D);
    a->kern->panel_q(w->q, w->mean_q, ESA_DTYPE_F32, a->D, NULL, 1, a->D, run->factor);
    esa_attn_tail(run, w, &one, blocks);
    for (int64_t d = 0; d < a->D; d++) w->mean_q[d] = w->o[d * nr];
    for (int64_t r = 0; r < run->z.rows_pad; r += nr)
        for (int64_t d = 0; d < a->D; d++)
            for (int64_t i = 0; i < nr; i++) w->o[r * a->D + d * nr + i] = w->mean_q[d];
    for (int64_t r = 1; r < run->z.rows_pad; r++) {
        w->m[r] = w->m[0];
        w->l[r] = w->l[0];
    }
    pass->fresh = 0;
}

/* Attends the first n columns that the worker has gathered. */
static void attend_fine(const attn_run *run, attn_worker *w, attn_pass *pass, int64_t n)
{
    const esa_attn_args *a = run->a;
    const int64_t first = pass->slot * a->nk * a->fine * a->D;
    a->kern->rows_k(w->fine_k, run->k_fine + first, ESA_DTYPE_F32, a->D, w->fine_row, n, a->D);
    a->kern->rows_v(w->fine_v, run->v_fine + first, ESA_DTYPE_F32, a->D, w->fine_row, n, a->D);
    const key_block kb = { w->fine_k, w->fine_v, run->z.depth, a->D, n, w->fine_bias };
    esa_attn_attend(run, w, pass, &kb, n);
}

void esa_attn_tail_fine(const attn_run *run, attn_worker *w, attn_pass *pass, int64_t mask_row,
                        int64_t kv_len, int64_t visible)
{
    const esa_attn_args *a = run->a;
    const uint16_t *list = a->fine_index + mask_row * a->cap;
    const int64_t size = a->block_k / a->fine;
    int64_t n = 0;
    for (int32_t c = 0; c < a->fine_count[mask_row]; c++) {
        const int64_t j = list[c], keys = esa_min64(a->block_k, kv_len - j * a->block_k);
        if (keys <= 0 || j * a->block_k + keys > visible)
            break; /* later blocks lie further right */
        for (int64_t p = 0; p * size < keys; p++) {
            w->fine_row[n] = (int32_t)(j * a->fine + p);
            w->fine_bias[n++] = log2f((float)esa_min64(size, keys - p * size));
            if (n < TAIL_BLOCK) continue;
            attend_fine(run, w, pass, n);
            n = 0;
        }
    }
    if (n) attend_fine(run, w, pass, n);
}
