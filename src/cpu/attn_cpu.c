/* attn_cpu.c - flash attention over block lists on the CPU.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Kv heads are taken in windows: as few as keep all threads busy (the packed keys of one head after the other then reuse the same
 * memory, which stays in cache: 2 to 10 % at density 0.1), and never more than fit WINDOW_BYTES. Per window: (1) all threads pack key blocks (and their
 * means, if there is a tail), (2) all threads take (query head, query block) items, heads with most work first and the heaviest
 * rows first inside a head, so that one head's packed K and V stay in cache and no thread ends on a long item.
 *
 * One item = one query block, computed by one worker in list order: the same bits whatever the thread count. For each listed
 * key block, for each group of mr rows:  S = Q K^T (log2 units),  P = exp2(S - m),  O = O alpha + P V.
 * The tail enters as extra blocks of pooled keys with a per-column bias log2(n_j), -inf for columns that the list holds. */
#include "cpu/attn_cpu.h"
#include "base/half.h"

#include <math.h>
#include <string.h>

#define WINDOW_BYTES (INT64_C(200) << 20)
#define ITEMS_PER_THREAD 8                      /* a window ends with threads waiting for the last item: 1/8 of a share at most */
#define LOG2_E 1.4426950408889634
#define LN_2   0.6931471805599453
#define TAIL_BLOCK 128                          /* pooled columns handled at a time */

typedef struct attn_sizes {
    int64_t window;                             /* kv heads packed at a time */
    int64_t v_rows, k_block, v_block;           /* rows per V block, bytes of one packed K and V block */
    int64_t tail_blocks, tail_k, tail_v;        /* virtual blocks, bytes of one packed pooled K and V block */
    int64_t depth, d_pad, ld_s, rows_pad;       /* D of Q/K packs, of O rows; score pitch; rows of a block up to mr */
} attn_sizes;

typedef struct attn_worker {                    /* one thread's scratch */
    void *q;                                    /* Q pack of one block */
    float *o;                                   /* [rows_pad][d_pad] */
    float *s;                                   /* [mr][ld_s] */
    float *m, *l, *alpha;                       /* [rows_pad], [rows_pad][lanes], [mr] */
    void *p;                                    /* bf16 set: [mr][ld_s]; f32 sets: = s */
    int32_t *limit;                             /* [mr] causal */
    float *bias;                                /* [nk rounded up] tail */
    float *mean_q;                              /* [D] centroid */
    float *clean;                               /* [TAIL_BLOCK][D] and */
    void *clean_v;                              /* their V pack: see attend_tail */
} attn_worker;

typedef struct attn_item { int64_t head_work, work; int32_t head, row; } attn_item;

typedef struct attn_run {
    const esa_attn_args *a;
    attn_sizes z;
    float factor;                               /* scale * log2(e) */
    char *k_pack, *v_pack;                      /* [window][nk] blocks */
    float *k_mean, *v_mean;                     /* [window][nk][D] */
    uint8_t *odd;                               /* [window][nk] 1: the mean value is not finite */
    char *tail_k, *tail_v;                      /* [window][tail_blocks] */
    attn_worker *worker;
    attn_item *item;                            /* items of the window */
    int64_t first, heads;                       /* kv heads (b*Hkv + h) of the window */
} attn_run;

static attn_sizes sizes_of(const esa_attn_args *a)
{
    const esa_cpu_kernels *kern = a->kern;
    attn_sizes z;
    z.depth = esa_pad_depth(kern, a->D);
    z.d_pad = esa_ceil_div(a->D, kern->dr) * kern->dr;
    z.v_rows = esa_ceil_div(a->block_k, 2) * 2;
    z.k_block = esa_k_pack_bytes(kern, a->block_k, a->D);
    z.v_block = esa_v_pack_bytes(kern, z.v_rows, a->D);
    z.rows_pad = esa_ceil_div(a->block_q, kern->mr) * kern->mr;
    z.ld_s = esa_ceil_div(esa_max64(a->block_k, TAIL_BLOCK), 64) * 64;
    z.tail_blocks = a->tail ? esa_ceil_div(a->nk, TAIL_BLOCK) : 0;
    z.tail_k = esa_k_pack_bytes(kern, TAIL_BLOCK, a->D);
    z.tail_v = esa_v_pack_bytes(kern, TAIL_BLOCK, a->D);
    int64_t per_head = a->nk * (z.k_block + z.v_block);
    if (a->tail) per_head += a->nk * 2 * a->D * 4 + z.tail_blocks * (z.tail_k + z.tail_v);
    const int64_t items_per_head = a->nq * (a->Hq / a->Hkv), fit = esa_max64(1, WINDOW_BYTES / esa_max64(1, per_head));
    const int64_t wanted = esa_ceil_div((int64_t)ITEMS_PER_THREAD * esa_pool_threads(a->pool), items_per_head);
    z.window = esa_min64(a->B * a->Hkv, esa_min64(fit, wanted));
    return z;
}

static void carve_run(attn_run *run, esa_carve *carve)
{
    const esa_attn_args *a = run->a;
    const attn_sizes *z = &run->z;
    const esa_cpu_kernels *kern = a->kern;
    const int64_t threads = esa_pool_threads(a->pool), group = a->Hq / a->Hkv;
    run->k_pack = esa_carve_take(carve, z->window * a->nk * z->k_block);
    run->v_pack = esa_carve_take(carve, z->window * a->nk * z->v_block);
    run->item = esa_carve_take(carve, z->window * group * a->nq * (int64_t)sizeof(attn_item));
    run->k_mean = run->v_mean = NULL;
    if (a->tail) {
        run->k_mean = esa_carve_take(carve, z->window * a->nk * a->D * 4);
        run->v_mean = esa_carve_take(carve, z->window * a->nk * a->D * 4);
        run->odd = esa_carve_take(carve, z->window * a->nk);
        run->tail_k = esa_carve_take(carve, z->window * z->tail_blocks * z->tail_k);
        run->tail_v = esa_carve_take(carve, z->window * z->tail_blocks * z->tail_v);
    }
    run->worker = esa_carve_take(carve, threads * (int64_t)sizeof(attn_worker));
    for (int64_t t = 0; t < threads; t++) {
        attn_worker w;
        w.q = esa_carve_take(carve, z->rows_pad * z->depth * kern->packed_bytes);
        w.o = esa_carve_take(carve, z->rows_pad * z->d_pad * 4);
        w.s = esa_carve_take(carve, kern->mr * z->ld_s * 4);
        w.p = kern->packed_bytes == 2 ? esa_carve_take(carve, kern->mr * z->ld_s * 2) : w.s;
        w.m = esa_carve_take(carve, z->rows_pad * 4);
        w.l = esa_carve_take(carve, z->rows_pad * kern->lanes * 4);
        w.alpha = esa_carve_take(carve, kern->mr * 4);
        w.limit = esa_carve_take(carve, kern->mr * 4);
        w.bias = esa_carve_take(carve, z->tail_blocks * TAIL_BLOCK * 4);
        w.mean_q = esa_carve_take(carve, a->D * 4);
        w.clean = esa_carve_take(carve, a->tail ? TAIL_BLOCK * a->D * 4 : 0);
        w.clean_v = esa_carve_take(carve, a->tail ? z->tail_v : 0);
        if (carve->base) run->worker[t] = w;
    }
}

int64_t esa_attn_cpu_workspace(const esa_attn_args *args)
{
    attn_run run = { .a = args, .z = sizes_of(args) };
    esa_carve carve = { NULL, 0 };
    carve_run(&run, &carve);
    return carve.used;
}

static int64_t kv_len_of(const esa_attn_args *a, int64_t b)
{
    return a->kv_len ? esa_min64(esa_max64(a->kv_len[b], 0), a->Nk) : a->Nk;
}

static const void *at(const void *base, int64_t offset, int32_t dtype) { return (const char *)base + offset * esa_dtype_size(dtype); }

/* Where the rows of a block start: with an order the gather list is advanced, else the pointer. */
typedef struct rows_ref { const void *data; const int32_t *gather; } rows_ref;

static rows_ref rows_at(const void *base, const int64_t *stride, const int32_t *perm, int64_t b, int64_t h, int64_t n, int32_t dtype)
{
    rows_ref r;
    r.gather = perm ? perm + n : NULL;
    r.data = at(base, b * stride[0] + h * stride[1] + (perm ? 0 : n * stride[2]), dtype);
    return r;
}

/* ---------------------------------------------------------------- phase 1: packing */

static void pack_item(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const attn_run *run = arg;
    const esa_attn_args *a = run->a;
    const attn_sizes *z = &run->z;
    const int64_t slot = item / a->nk, j = item % a->nk, head = run->first + slot, b = head / a->Hkv, h = head % a->Hkv;
    const int64_t n = esa_min64(a->block_k, kv_len_of(a, b) - j * a->block_k);
    if (n <= 0) return;
    const rows_ref k = rows_at(a->k, a->k_stride, a->perm_k, b, h, j * a->block_k, a->dtype);
    const rows_ref v = rows_at(a->v, a->v_stride, a->perm_k, b, h, j * a->block_k, a->dtype);
    a->kern->pack_k(run->k_pack + item * z->k_block, k.data, a->dtype, a->k_stride[2], k.gather, n, a->D);
    a->kern->pack_v(run->v_pack + item * z->v_block, v.data, a->dtype, a->v_stride[2], v.gather, n, z->v_rows, a->D);
    if (a->tail) {
        a->kern->mean(run->k_mean + item * a->D, k.data, a->dtype, a->k_stride[2], k.gather, n, a->D);
        a->kern->mean(run->v_mean + item * a->D, v.data, a->dtype, a->v_stride[2], v.gather, n, a->D);
        run->odd[item] = 0;
        for (int64_t d = 0; d < a->D; d++) run->odd[item] |= !isfinite(run->v_mean[item * a->D + d]);
    }
}

static void pack_tail_item(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const attn_run *run = arg;
    const esa_attn_args *a = run->a;
    const attn_sizes *z = &run->z;
    const int64_t slot = item / z->tail_blocks, t = item % z->tail_blocks, b = (run->first + slot) / a->Hkv;
    const int64_t blocks = esa_ceil_div(kv_len_of(a, b), a->block_k), n = esa_min64(TAIL_BLOCK, blocks - t * TAIL_BLOCK);
    if (n <= 0) return;
    const int64_t from = slot * a->nk + t * TAIL_BLOCK;
    a->kern->pack_k(run->tail_k + item * z->tail_k, run->k_mean + from * a->D, ESA_DTYPE_F32, a->D, NULL, n, a->D);
    a->kern->pack_v(run->tail_v + item * z->tail_v, run->v_mean + from * a->D, ESA_DTYPE_F32, a->D, NULL, n, TAIL_BLOCK, a->D);
}

/* ---------------------------------------------------------------- phase 2: one query block */

/* A block of keys ready for the products: columns valid, packed K and V. */
typedef struct key_block { const void *k, *v; int64_t keys, v_rows; const float *bias; } key_block;

/* Runs one key block against the rows of the query block. Row r sees the first `seen + r` columns (causal: may be negative). */
static void attend(const attn_run *run, attn_worker *w, const key_block *kb, int64_t rows, int64_t seen)
{
    const esa_attn_args *a = run->a;
    const esa_cpu_kernels *kern = a->kern;
    const attn_sizes *z = &run->z;
    for (int64_t r = 0; r < rows; r += kern->mr) {
        const int64_t n = esa_min64(kern->mr, rows - r);
        const int32_t *limit = NULL;
        if (seen + r < kb->keys) {
            for (int64_t i = 0; i < n; i++) w->limit[i] = (int32_t)esa_min64(esa_max64(seen + r + i, 0), kb->keys);
            limit = w->limit;
        }
        kern->qk(w->s, z->ld_s, (char *)w->q + r * z->depth * kern->packed_bytes, kb->k, n, kb->keys, z->depth, run->factor, 0);
        const int32_t moved = kern->softmax(w->p, w->s, z->ld_s, n, kb->keys, limit, kb->bias, w->m + r, w->l + r * kern->lanes, w->alpha);
        kern->pv(w->o + r * z->d_pad, z->d_pad, w->p, z->ld_s, kb->v, kb->v_rows, n, kb->keys, a->D, moved ? w->alpha : NULL);
    }
}

/* Fills bias[nk]: log2 of the block length where the tail stands in, -inf where the list computes the block, or where some row of
 * the query block may not see all of it. Returns 0 if nothing is left to stand in for. */
static int32_t tail_bias(float *bias, const esa_attn_args *a, int64_t blocks, int64_t kv_len, int64_t visible, const uint16_t *list,
                         int64_t count)
{
    int32_t any = 0;
    int64_t c = 0;
    for (int64_t j = 0; j < blocks; j++) {
        const int64_t n = esa_min64(a->block_k, kv_len - j * a->block_k);
        const int32_t listed = c < count && list[c] == j;
        c += listed;
        const int32_t stands = !listed && j * a->block_k + n <= visible;
        bias[j] = stands ? log2f((float)n) : -INFINITY;
        any |= stands;
    }
    for (int64_t j = blocks; j < esa_ceil_div(blocks, TAIL_BLOCK) * TAIL_BLOCK; j++) bias[j] = -INFINITY;
    return any;
}

/* Columns that do not stand in have probability 0, but 0 times NaN is NaN: where such a column's mean value is not finite, the
 * values are packed anew with zeros in its place. */
static const void *tail_values(const attn_run *run, attn_worker *w, int64_t slot, int64_t t, int64_t keys, const float *bias)
{
    const esa_attn_args *a = run->a;
    const int64_t first = slot * a->nk + t * TAIL_BLOCK;
    int32_t poisoned = 0;
    for (int64_t c = 0; c < keys; c++) poisoned |= run->odd[first + c] && bias[c] == -INFINITY;
    if (!poisoned) return run->tail_v + (slot * run->z.tail_blocks + t) * run->z.tail_v;
    for (int64_t c = 0; c < keys; c++) {
        if (bias[c] == -INFINITY) memset(w->clean + c * a->D, 0, (size_t)a->D * 4);
        else memcpy(w->clean + c * a->D, run->v_mean + (first + c) * a->D, (size_t)a->D * 4);
    }
    a->kern->pack_v(w->clean_v, w->clean, ESA_DTYPE_F32, a->D, NULL, keys, TAIL_BLOCK, a->D);
    return w->clean_v;
}

static void attend_tail(const attn_run *run, attn_worker *w, int64_t slot, int64_t blocks, int64_t rows)
{
    const attn_sizes *z = &run->z;
    for (int64_t t = 0; t * TAIL_BLOCK < blocks; t++) {
        const float *bias = w->bias + t * TAIL_BLOCK;
        const int64_t keys = esa_min64(TAIL_BLOCK, blocks - t * TAIL_BLOCK);
        int32_t any = 0;
        for (int64_t c = 0; c < keys && !any; c++) any = bias[c] != -INFINITY;
        if (!any) continue;
        const key_block kb = { run->tail_k + (slot * z->tail_blocks + t) * z->tail_k, tail_values(run, w, slot, t, keys, bias), keys, TAIL_BLOCK, bias };
        attend(run, w, &kb, rows, keys);
    }
}

/* The centroid tail: evaluated once with the mean query, then given to every row as its first state. */
static void centroid_state(const attn_run *run, attn_worker *w, rows_ref q, int64_t slot, int64_t blocks, int64_t rows)
{
    const esa_attn_args *a = run->a;
    const esa_cpu_kernels *kern = a->kern;
    const attn_sizes *z = &run->z;
    kern->mean(w->mean_q, q.data, a->dtype, a->q_stride[2], q.gather, rows, a->D);
    kern->pack_q(w->q, w->mean_q, ESA_DTYPE_F32, a->D, NULL, 1, a->D, run->factor);
    attend_tail(run, w, slot, blocks, 1);
    for (int64_t r = 1; r < rows; r++) {
        memcpy(w->o + r * z->d_pad, w->o, (size_t)(z->d_pad * 4));
        memcpy(w->l + r * kern->lanes, w->l, (size_t)kern->lanes * 4);
        w->m[r] = w->m[0];
    }
}

/* Four chains in a fixed tree: one long chain of dependent adds per row would be 2 % of a short list's time. */
static float lane_sum(const float *l, int64_t lanes)
{
    if (lanes < 4) {
        float sum = 0.0f;
        for (int64_t i = 0; i < lanes; i++) sum += l[i];
        return sum;
    }
    float s[4] = { l[0], l[1], l[2], l[3] };
    for (int64_t i = 4; i < lanes; i += 4)
        for (int32_t c = 0; c < 4; c++) s[c] += l[i + c];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

static void finish_rows(const attn_run *run, attn_worker *w, int64_t b, int64_t h, int64_t row0, int64_t rows)
{
    const esa_attn_args *a = run->a;
    const esa_cpu_kernels *kern = a->kern;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t n = a->perm_q ? a->perm_q[row0 + r] : row0 + r;
        const float sum = lane_sum(w->l + r * kern->lanes, kern->lanes);
        void *dst = (char *)a->o + (b * a->o_stride[0] + h * a->o_stride[1] + n * a->o_stride[2]) * esa_dtype_size(a->dtype);
        /* Nothing visible: sum is 0, o is 0, and 0 * 0 keeps it 0. NaN is not equal to 0 and goes through. */
        kern->store(dst, a->dtype, w->o + r * run->z.d_pad, sum == 0.0f ? 0.0f : 1.0f / sum, a->D);
        if (a->lse) {
            const float lse = sum == 0.0f ? -INFINITY : (float)(LN_2 * ((double)w->m[r] + log2((double)sum)));
            a->lse[b * a->lse_stride[0] + h * a->lse_stride[1] + n * a->lse_stride[2]] = lse;
        }
    }
}

static void attn_item_run(void *arg, int64_t number, int32_t worker)
{
    const attn_run *run = arg;
    const esa_attn_args *a = run->a;
    const esa_cpu_kernels *kern = a->kern;
    const attn_sizes *z = &run->z;
    attn_worker *w = &run->worker[worker];
    const attn_item *it = &run->item[number];
    const int64_t b = it->head / a->Hq, h = it->head % a->Hq, i = it->row, slot = b * a->Hkv + h / (a->Hq / a->Hkv) - run->first;
    const int64_t row0 = i * a->block_q, rows = esa_min64(a->block_q, a->Nq - row0), kv_len = kv_len_of(a, b);
    const int64_t shift = a->Nk - a->Nq;        /* causal: key j is visible to query i iff j <= i + shift */
    const int64_t blocks = esa_ceil_div(kv_len, a->block_k);
    const int64_t mask_row = (b * a->mask_batch + h) * a->nq + i;
    const uint16_t *list = a->count ? a->index + mask_row * a->cap : NULL;
    const int64_t listed = a->count ? a->count[mask_row] : blocks;

    memset(w->o, 0, (size_t)(z->rows_pad * z->d_pad * 4));
    memset(w->l, 0, (size_t)(z->rows_pad * kern->lanes * 4));
    for (int64_t r = 0; r < z->rows_pad; r++) w->m[r] = -INFINITY;

    const rows_ref q = rows_at(a->q, a->q_stride, a->perm_q, b, h, row0, a->dtype);
    const int32_t tail = a->tail && a->count &&
        tail_bias(w->bias, a, blocks, kv_len, a->causal ? row0 + shift + 1 : a->Nk, list, listed);
    if (tail && a->tail == ESA_TAIL_CENTROID) centroid_state(run, w, q, slot, blocks, rows);
    kern->pack_q(w->q, q.data, a->dtype, a->q_stride[2], q.gather, rows, a->D, run->factor);
    if (tail && a->tail == ESA_TAIL_POOLED) attend_tail(run, w, slot, blocks, rows);

    for (int64_t c = 0; c < listed; c++) {
        const int64_t j = list ? list[c] : c;
        const int64_t keys = esa_min64(a->block_k, kv_len - j * a->block_k);
        if (keys <= 0) break;
        const int64_t seen = a->causal ? row0 + shift + 1 - j * a->block_k : keys;     /* columns the first row sees */
        if (seen + rows - 1 <= 0) break;                        /* not even the last row sees this block, nor any later one */
        const int64_t slot_block = slot * a->nk + j;
        const key_block kb = { run->k_pack + slot_block * z->k_block, run->v_pack + slot_block * z->v_block, keys, z->v_rows, NULL };
        attend(run, w, &kb, rows, seen);
    }
    finish_rows(run, w, b, h, row0, rows);
}

/* ---------------------------------------------------------------- schedule */

static int32_t item_before(const attn_item *a, const attn_item *b)
{
    if (a->head_work != b->head_work) return a->head_work > b->head_work;
    if (a->head != b->head) return a->head < b->head;
    if (a->work != b->work) return a->work > b->work;
    return a->row < b->row;
}

/* Heap sort: in place, no allocation (qsort of the C library may allocate). */
static void sort_items(attn_item *item, int64_t n)
{
    for (int64_t end = n, start = n / 2; end > 1;) {
        attn_item x;
        if (start > 0) x = item[--start];
        else { x = item[--end]; item[end] = item[0]; }
        int64_t hole = start;
        for (int64_t child; (child = 2 * hole + 1) < end; hole = child) {
            if (child + 1 < end && item_before(&item[child], &item[child + 1])) child++;
            if (!item_before(&x, &item[child])) break;
            item[hole] = item[child];
        }
        item[hole] = x;
    }
}

/* Work of a row in key blocks; what a causal row may not see does not count. */
static int64_t row_work(const esa_attn_args *a, int64_t b, int64_t h, int64_t i)
{
    if (a->count) return a->count[(b * a->mask_batch + h) * a->nq + i];
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
            const int64_t b = (run->first + slot) / a->Hkv, h = (run->first + slot) % a->Hkv * group + g;
            int64_t total = 0;
            for (int64_t i = 0; i < a->nq; i++) total += row_work(a, b, h, i);
            for (int64_t i = 0; i < a->nq; i++)
                run->item[n++] = (attn_item){ total, row_work(a, b, h, i), (int32_t)(b * a->Hq + h), (int32_t)i };
        }
    sort_items(run->item, n);
    return n;
}

void esa_attn_cpu(const esa_attn_args *args, void *ws)
{
    attn_run run = { .a = args, .z = sizes_of(args), .factor = (float)(args->scale * LOG2_E) };
    esa_carve carve = { ws, 0 };
    carve_run(&run, &carve);
    for (run.first = 0; run.first < args->B * args->Hkv; run.first += run.heads) {
        run.heads = esa_min64(run.z.window, args->B * args->Hkv - run.first);
        esa_pool_run(args->pool, pack_item, &run, run.heads * args->nk);
        if (args->tail) esa_pool_run(args->pool, pack_tail_item, &run, run.heads * run.z.tail_blocks);
        esa_pool_run(args->pool, attn_item_run, &run, list_items(&run));
    }
}
