/* attn_cpu.c - flash attention over block lists on the CPU.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Keys and values are read in place if they are in order, without gaps and in the form of the
 * kernel set (f32; keys also bf16). Others are copied first. kv heads are copied in windows: as
 * few heads as keep all threads busy, so that the copies reuse memory that is still in cache, and
 * never more than fit into WINDOW_BYTES.
 *
 * Each window has two phases:
 *   1. All threads copy key blocks, and compute their means if there is a tail.
 *   2. All threads take items (query head, query block). Heads with the most work come first, and
 *      the heaviest rows of a head first. So the keys and values of a head stay in cache, and no
 *      thread starts a long item last.
 *
 * One worker computes one query block in list order, so the bits do not depend on the number of
 * threads. For each listed key block and each panel of nr queries:
 *
 *     S = K Q^T (log2 units),  P = exp2(S - m),  O = O alpha + V^T P
 *
 * Queries are the columns of all three. The tail is added as extra blocks of mean keys, before the
 * listed blocks (attn_cpu_tail.c). */
#include "cpu/attn_cpu_run.h"

#include <math.h>
#include <string.h>

#define WINDOW_BYTES     (INT64_C(200) << 20)
/* At the end of a window threads wait for the last item: at most 1/8 of their share. */
#define ITEMS_PER_THREAD 8
/* The second-level cache of a core. Larger outputs leave it before they are read again. */
#define STREAM_BYTES     (INT64_C(2) << 20)
#define LOG2_E           1.4426950408889634
#define LN_2             0.6931471805599453

static attn_sizes sizes_of(const esa_attn_args *a)
{
    const esa_cpu_kernels *kern = a->kern;
    attn_sizes z;
    z.depth = esa_pad_depth(kern, a->D);
    z.k_block = esa_rows_k_bytes(kern, a->block_k, a->D);
    z.v_block = esa_rows_v_bytes(kern, a->block_k, a->D);
    z.rows_pad = esa_ceil_div(a->block_q, kern->nr) * kern->nr;
    z.tail_blocks = a->tail ? esa_ceil_div(a->nk, TAIL_BLOCK) : 0;
    z.tail_k = esa_rows_k_bytes(kern, TAIL_BLOCK, a->D);
    z.tail_v = esa_rows_v_bytes(kern, TAIL_BLOCK, a->D);
    int64_t per_head = a->nk * (z.k_block + z.v_block);
    if (a->tail)
        per_head += a->nk * (1 + a->fine) * 2 * a->D * 4 + z.tail_blocks * (z.tail_k + z.tail_v);
    const int64_t items_per_head = a->nq * (a->Hq / a->Hkv),
                  fit = esa_max64(1, WINDOW_BYTES / esa_max64(1, per_head));
    const int64_t wanted = esa_ceil_div((int64_t)ITEMS_PER_THREAD * esa_pool_threads(a->pool),
                                        items_per_head);
    z.window = esa_min64(a->B * a->Hkv, esa_min64(fit, wanted));
    return z;
}

static void carve_run(attn_run *run, esa_carve *carve)
{
    const esa_attn_args *a = run->a;
    const attn_sizes *z = &run->z;
    const esa_cpu_kernels *kern = a->kern;
    const int64_t threads = esa_pool_threads(a->pool),
                  keys = esa_pad_keys(kern, esa_max64(a->block_k, TAIL_BLOCK));
    run->k_copy = esa_carve_take(carve, z->window * a->nk * z->k_block);
    run->v_copy = esa_carve_take(carve, z->window * a->nk * z->v_block);
    run->item = esa_carve_take(carve, a->B * a->Hq * a->nq * (int64_t)sizeof(attn_item));
    run->k_mean = run->v_mean = NULL;
    if (a->tail) {
        run->k_mean = esa_carve_take(carve, z->window * a->nk * a->D * 4);
        run->v_mean = esa_carve_take(carve, z->window * a->nk * a->D * 4);
        run->odd = esa_carve_take(carve, z->window * a->nk);
        run->tail_k = esa_carve_take(carve, z->window * z->tail_blocks * z->tail_k);
        run->tail_v = esa_carve_take(carve, z->window * z->tail_blocks * z->tail_v);
        run->k_fine = esa_carve_take(carve, z->window * a->nk * a->fine * a->D * 4);
        run->v_fine = esa_carve_take(carve, z->window * a->nk * a->fine * a->D * 4);
    }
    run->worker = esa_carve_take(carve, threads * (int64_t)sizeof(attn_worker));
    for (int64_t t = 0; t < threads; t++) {
        attn_worker w;
        w.q = esa_carve_take(carve, z->rows_pad * z->depth * kern->packed_bytes);
        w.o = esa_carve_take(carve, z->rows_pad * a->D * 4);
        w.s = esa_carve_take(carve, keys * kern->nr * 4);
        w.p = kern->packed_bytes == 2 ? esa_carve_take(carve, keys * kern->nr * 2) : w.s;
        w.m = esa_carve_take(carve, z->rows_pad * 4);
        w.l = esa_carve_take(carve, z->rows_pad * 4);
        w.alpha = esa_carve_take(carve, kern->nr * 4);
        w.limit = esa_carve_take(carve, kern->nr * 4);
        w.bias = esa_carve_take(carve, z->tail_blocks * TAIL_BLOCK * 4);
        w.mean_q = esa_carve_take(carve, a->D * 4);
        w.clean = esa_carve_take(carve, a->tail ? TAIL_BLOCK * a->D * 4 : 0);
        w.clean_v = esa_carve_take(carve, a->tail ? z->tail_v : 0);
        w.fine_k = esa_carve_take(carve, a->fine ? z->tail_k : 0);
        w.fine_v = esa_carve_take(carve, a->fine ? z->tail_v : 0);
        w.fine_row = esa_carve_take(carve, a->fine ? TAIL_BLOCK * 4 : 0);
        w.fine_bias = esa_carve_take(carve, a->fine ? TAIL_BLOCK * 4 : 0);
        w.rows = esa_carve_take(carve, kern->nr * a->D * 4);
        if (carve->base) run->worker[t] = w;
    }
}

const esa_cpu_kernels *esa_attn_cpu_kernels(const esa_cpu_kernels *best, const esa_attn_args *args)
{
    const int32_t bf16 = args->dtype == ESA_DTYPE_BF16 && !esa_attn_cpu_eight_takes(args);
    return bf16 && best->bf16 ? best->bf16 : best;
}

esa_attn_kernel esa_attn_cpu_kernel(const esa_cpu_kernels *best, const esa_attn_args *args)
{
    if (esa_attn_cpu_eight_takes(args)) return (esa_attn_kernel){ "cpu-8bit", 8 };
    return (esa_attn_kernel){ esa_attn_cpu_kernels(best, args)->name, 16 };
}

int64_t esa_attn_cpu_workspace(const esa_attn_args *args)
{
    if (esa_attn_cpu_eight_takes(args)) return esa_attn_cpu_eight_workspace(args);
    attn_run run = { .a = args, .z = sizes_of(args) };
    esa_carve carve = { NULL, 0 };
    carve_run(&run, &carve);
    return carve.used;
}

/* ---------------------------------------------------------------- phase 1: copying */

static void copy_item(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const attn_run *run = arg;
    const esa_attn_args *a = run->a;
    const attn_sizes *z = &run->z;
    const int64_t slot = item / a->nk, j = item % a->nk, head = run->first + slot,
                  b = head / a->Hkv, h = head % a->Hkv;
    const int64_t n = esa_min64(a->block_k, kv_len_of(a, b) - j * a->block_k);
    if (n <= 0) return;
    const int32_t *perm = order_at(a->perm_k, a->perm_k_stride, b, h);
    const rows_ref k = rows_at(a->k, a->k_stride, perm, b, h, j * a->block_k, a->dtype);
    const rows_ref v = rows_at(a->v, a->v_stride, perm, b, h, j * a->block_k, a->dtype);
    if (!run->k_in_place)
        a->kern->rows_k(run->k_copy + item * z->k_block, k.data, a->dtype, a->k_stride[2], k.gather,
                        n, a->D);
    if (!run->v_in_place)
        a->kern->rows_v(run->v_copy + item * z->v_block, v.data, a->dtype, a->v_stride[2], v.gather,
                        n, a->D);
    if (a->tail) esa_attn_means(run, item, k, v, n);
}

/* ---------------------------------------------------------------- phase 2: one query block */

void esa_attn_attend(const attn_run *run, attn_worker *w, attn_pass *pass, const key_block *kb,
                     int64_t seen)
{
    const esa_attn_args *a = run->a;
    const esa_cpu_kernels *kern = a->kern;
    const attn_sizes *z = &run->z;
    for (int64_t r = 0; r < pass->rows; r += kern->nr) {
        const float *limit = NULL;
        if (seen + r < kb->keys) {
            for (int64_t i = 0; i < kern->nr; i++)
                w->limit[i] = (float)esa_min64(esa_max64(seen + r + i, 0), kb->keys);
            limit = w->limit;
        }
        kern->kq(w->s, (char *)w->q + r * z->depth * kern->packed_bytes, kb->k, kb->k_stride,
                 kb->keys, z->depth, run->factor);
        const int32_t moved = kern->softmax(w->p, w->s, kb->keys, run->factor, limit, kb->bias,
                                            w->m + r, w->l + r, w->alpha);
        kern->pv(w->o + r * a->D, w->p, kb->v, kb->v_stride, kb->keys, a->D,
                 moved && !pass->fresh ? w->alpha : NULL, !pass->fresh);
    }
    pass->fresh = 0;
}

/* The rows of one panel of a call with a carry. */
static void finish_carried(const attn_run *run, attn_worker *w, const attn_pass *pass, int64_t r)
{
    const esa_attn_args *a = run->a;
    const int32_t *perm = order_at(a->perm_q, a->perm_q_stride, pass->b, pass->h);
    const int64_t rows = esa_min64(a->kern->nr, pass->rows - r);
    a->kern->store(w->rows, ESA_DTYPE_F32, a->D, NULL, w->o + r * a->D, w->l + r, rows, a->D);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t n = pass->row0 + r + i;
        esa_attn_carry_row(a, pass->b, pass->h, perm ? perm[n] : n, w->rows + i * a->D);
    }
}

static void finish_rows(const attn_run *run, attn_worker *w, const attn_pass *pass)
{
    const esa_attn_args *a = run->a;
    const int64_t nr = a->kern->nr, row0 = pass->row0;
    const int32_t *perm = order_at(a->perm_q, a->perm_q_stride, pass->b, pass->h);
    if (pass->fresh) memset(w->o, 0, (size_t)(run->z.rows_pad * a->D * 4));
    if (a->lse)
        for (int64_t r = 0; r < pass->rows; r++) {
            const int64_t n = perm ? perm[row0 + r] : row0 + r;
            const float lse = w->l[r] == 0.0f
                                  ? -INFINITY
                                  : (float)(LN_2 * ((double)w->m[r] + log2((double)w->l[r])));
            a->lse[pass->b * a->lse_stride[0] + pass->h * a->lse_stride[1] + n * a->lse_stride[2]] =
                lse;
        }
    /* If nothing is visible, the sum is 0 and o is 0, and 0 * 0 stays 0. NaN differs from
     * 0 and passes. */
    for (int64_t r = 0; r < run->z.rows_pad; r++) w->l[r] = w->l[r] == 0.0f ? 0.0f : 1.0f / w->l[r];
    const int32_t large = a->B * a->Hq * a->Nq * a->D * esa_dtype_size(a->dtype) > STREAM_BYTES;
    const esa_cpu_kernels *kern = a->kern;
    for (int64_t r = 0; r < pass->rows; r += nr) {
        if (a->carry.value) {
            finish_carried(run, w, pass, r);
            continue;
        }
        const rows_ref o = rows_at(a->o, a->o_stride, perm, pass->b, pass->h, row0 + r, a->dtype);
        (large && kern->stream ? kern->stream : kern->store)(
            (void *)o.data, a->dtype, a->o_stride[2], o.gather, w->o + r * a->D, w->l + r,
            esa_min64(nr, pass->rows - r), a->D);
    }
}

static key_block key_block_of(const attn_run *run, int64_t slot, int64_t j, int64_t keys)
{
    const esa_attn_args *a = run->a;
    const attn_sizes *z = &run->z;
    const int64_t head = run->first + slot, b = head / a->Hkv, h = head % a->Hkv,
                  n = j * a->block_k, at = slot * a->nk + j;
    key_block kb = {
        run->k_copy + at * z->k_block, run->v_copy + at * z->v_block, z->depth, a->D, keys, NULL
    };
    if (run->k_in_place) kb.k = rows_at(a->k, a->k_stride, NULL, b, h, n, a->dtype).data;
    if (run->v_in_place) kb.v = rows_at(a->v, a->v_stride, NULL, b, h, n, a->dtype).data;
    return kb;
}

static void attn_item_run(void *arg, int64_t number, int32_t worker)
{
    const attn_run *run = arg;
    const esa_attn_args *a = run->a;
    const attn_sizes *z = &run->z;
    attn_worker *w = &run->worker[worker];
    const attn_item *it = &run->item[number];
    const int64_t b = it->head / a->Hq, h = it->head % a->Hq, i = it->row,
                  slot = b * a->Hkv + h / (a->Hq / a->Hkv) - run->first;
    const int64_t row0 = i * a->block_q, rows = esa_min64(a->block_q, a->Nq - row0),
                  kv_len = kv_len_of(a, b);
    /* Causal: query i sees key j if j <= i + shift. */
    const int64_t shift = a->Nk - a->Nq;
    const int64_t blocks = esa_ceil_div(kv_len, a->block_k);
    const int64_t mask_row = (b * a->mask_batch + h) * a->nq + i;
    const uint16_t *list = a->count ? a->index + mask_row * a->cap : NULL;
    const int64_t listed = a->count ? a->count[mask_row] : blocks;

    attn_pass pass = { b, h, slot, row0, rows, 1 };
    esa_kernels_begin(a->kern);
    for (int64_t r = 0; r < z->rows_pad; r++) {
        w->m[r] = -INFINITY;
        w->l[r] = 0.0f;
    }

    const rows_ref q = rows_at(a->q, a->q_stride, order_at(a->perm_q, a->perm_q_stride, b, h), b, h,
                               row0, a->dtype);
    const int64_t visible = a->causal ? row0 + shift + 1 : a->Nk;
    const int32_t tail = a->tail && a->count &&
                         esa_attn_tail_bias(run, w, mask_row, kv_len, visible);
    if (tail && a->tail == ESA_TAIL_CENTROID) esa_attn_tail_centroid(run, w, &pass, q, blocks);
    a->kern->panel_q(w->q, q.data, a->dtype, a->q_stride[2], q.gather, rows, a->D, run->factor);
    if (tail && a->tail != ESA_TAIL_CENTROID) esa_attn_tail(run, w, &pass, blocks);
    if (a->fine_count) esa_attn_tail_fine(run, w, &pass, mask_row, kv_len, visible);

    for (int64_t c = 0; c < listed; c++) {
        const int64_t j = list ? list[c] : c;
        const int64_t keys = esa_min64(a->block_k, kv_len - j * a->block_k);
        if (keys <= 0) break;
        /* Columns the first row sees. */
        const int64_t seen = a->causal ? row0 + shift + 1 - j * a->block_k : keys;
        /* The last row sees neither this block nor a later one. */
        if (seen + rows - 1 <= 0) break;
        const key_block kb = key_block_of(run, slot, j, keys);
        esa_attn_attend(run, w, &pass, &kb, seen);
    }
    esa_kernels_end(a->kern);
    finish_rows(run, w, &pass);
}

/* ---------------------------------------------------------------- schedule */

static int32_t item_before(const attn_item *a, const attn_item *b)
{
    if (a->head_work != b->head_work) return a->head_work > b->head_work;
    if (a->head != b->head) return a->head < b->head;
    if (a->work != b->work) return a->work > b->work;
    return a->row < b->row;
}

/* Heap sort in place. The C library's qsort may allocate. */
static void sort_items(attn_item *item, int64_t n)
{
    for (int64_t end = n, start = n / 2; end > 1;) {
        attn_item x;
        if (start > 0)
            x = item[--start];
        else {
            x = item[--end];
            item[end] = item[0];
        }
        int64_t hole = start;
        for (int64_t child; (child = 2 * hole + 1) < end; hole = child) {
            if (child + 1 < end && item_before(&item[child], &item[child + 1])) child++;
            if (!item_before(&x, &item[child])) break;
            item[hole] = item[child];
        }
        item[hole] = x;
    }
}

/* Work of a row in key blocks, without those that causality hides. */
static int64_t row_work(const esa_attn_args *a, int64_t b, int64_t h, int64_t i)
{
    if (a->count) {
        const int64_t row = (b * a->mask_batch + h) * a->nq + i;
        const int64_t fine = a->fine_count ? (int64_t)a->fine * a->fine_count[row] : 0;
        return a->count[row] + fine / a->block_k;
    }
    int64_t keys = kv_len_of(a, b);
    if (a->causal) keys = esa_min64(keys, esa_max64(0, (i + 1) * a->block_q + a->Nk - a->Nq));
    return esa_ceil_div(keys, a->block_k);
}

static int64_t list_items(attn_run *run)
{
    const esa_attn_args *a = run->a;
    const int64_t group = a->Hq / a->Hkv;
    int64_t n = 0;
    for (int64_t slot = 0; slot < run->heads; slot++)
        for (int64_t g = 0; g < group; g++) {
            const int64_t b = (run->first + slot) / a->Hkv,
                          h = (run->first + slot) % a->Hkv * group + g;
            int64_t total = 0;
            for (int64_t i = 0; i < a->nq; i++) total += row_work(a, b, h, i);
            for (int64_t i = 0; i < a->nq; i++)
                run->item[n++] = (attn_item){ total, row_work(a, b, h, i), (int32_t)(b * a->Hq + h),
                                              (int32_t)i };
        }
    sort_items(run->item, n);
    return n;
}

/* Rows with gaps between them are copied: in place they would share a few cache sets (5 to 8 %
 * slower). So are rows that a copy would give another form. Tiles are read by whole cache lines,
 * which must not lie across two. */
static int32_t reads_in_place(const esa_attn_args *a, const void *rows, int64_t stride,
                              int32_t same_form)
{
    const esa_cpu_kernels *kern = a->kern;
    const int32_t dtype = kern->packed_bytes == 4 ? ESA_DTYPE_F32 : ESA_DTYPE_BF16;
    return same_form && a->dtype == dtype && !a->perm_k && stride == a->D &&
           (uintptr_t)rows % (uintptr_t)(kern->depth_unit > 2 ? 64 : 4) == 0;
}

void esa_attn_cpu(const esa_attn_args *args, void *ws)
{
    if (esa_attn_cpu_eight_takes(args)) {
        esa_attn_cpu_eight(args, ws);
        return;
    }
    attn_run run = { .a = args, .z = sizes_of(args), .factor = (float)(args->scale * LOG2_E) };
    esa_carve carve = { ws, 0 };
    carve_run(&run, &carve);
    run.k_in_place = reads_in_place(args, args->k, args->k_stride[2], run.z.depth == args->D);
    run.v_in_place = reads_in_place(args, args->v, args->v_stride[2], args->kern->keys_unit == 1);
    const int32_t copies = !run.k_in_place || !run.v_in_place || args->tail;
    const int64_t all = args->B * args->Hkv, window = copies ? run.z.window : all;
    for (run.first = 0; run.first < all; run.first += run.heads) {
        run.heads = esa_min64(window, all - run.first);
        if (copies) esa_pool_run(args->pool, copy_item, &run, run.heads * args->nk);
        if (args->tail)
            esa_pool_run(args->pool, esa_attn_tail_copy, &run, run.heads * run.z.tail_blocks);
        esa_pool_run(args->pool, attn_item_run, &run, list_items(&run));
    }
}
