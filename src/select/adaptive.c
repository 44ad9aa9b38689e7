/* adaptive.c - the adaptive order on the CPU: an order of q per query head and of k per kv head,
 * made by balanced cuts across principal directions (rules/order.h).
 * SPDX-License-Identifier: Apache-2.0
 *
 * All heads of both sides go level by level, so that few heads keep many threads busy:
 *   1. metric     item (head)
 *   2. per level of large nodes
 *        direction  item (head, node)
 *        keys       item (head, node, piece of CHUNK tokens): coordinates of all tokens
 *        partition  item (head, node)
 *   3. blocks     item (head, small node): all further cuts
 * An item alone decides what it writes, so the order does not depend on the number of threads. */
#include <string.h>
#include "select/adaptive.h"

enum { CHUNK = 1024, RUN = 64, AHEAD = 4 };

static void lay_out(esa_adaptive_job *x, esa_carve *c, const esa_select_args *a)
{
    const esa_cpu_kernels *kern = a->kern;
    const int64_t D = a->D, f = (int64_t)sizeof(float), nr = kern->nr, mr = kern->mr,
                  threads = esa_pool_threads(a->pool);
    const int64_t deep = esa_max64(D, ESA_ORDER_SAMPLE);
    const esa_layout *l = &a->params.layout;
    memset(x, 0, sizeof *x);
    x->args = a;
    int64_t tokens = 0, slots = 1;
    for (int32_t side = 0; side < 2; side++) {
        esa_adaptive_side *s = &x->side[side];
        s->data = side ? a->k : a->q;
        s->stride = side ? a->k_stride : a->q_stride;
        s->N = side ? a->Nk : a->Nq;
        s->heads = side ? a->Hkv : a->Hq;
        s->block = (uint32_t)(side ? a->params.block_k : a->params.block_q);
        s->small = esa_order_small(s->block);
        s->root = esa_order_root(l, side, a->params.mode, s->N);
        s->levels = esa_order_levels(s->root, s->block, s->small);
        s->start = side ? a->perm_k : a->perm_q;
        s->at = x->heads;
        s->tokens_at = tokens;
        x->heads += a->B * s->heads;
        tokens += a->B * s->heads * s->N;
        if (s->levels > 0) slots = esa_max64(slots, (int64_t)1 << (s->levels - 1));
    }
    x->slots = slots;
    x->ld = esa_ceil_div(deep, nr) * nr;
    x->metric_bytes = esa_ceil_div(esa_k_pack_bytes(kern, D, D), 64) * 64;
    x->metric = esa_carve_take(c, x->heads * x->metric_bytes);
    x->direction = esa_carve_take(c, x->heads * slots * D * f);
    x->key = esa_carve_take(c, tokens * (int64_t)sizeof *x->key);
    x->spare = esa_carve_take(c, tokens * (int64_t)sizeof *x->spare);
    x->room = esa_carve_take(c, threads * (int64_t)sizeof *x->room);
    for (int64_t t = 0; t < threads; t++) {
        const esa_adaptive_room r = {
            .rows = esa_carve_take(c, ESA_ORDER_SAMPLE * D * f),
            .y_panel = esa_carve_take(c, esa_k_pack_bytes(kern, deep, D)),
            .z_panel = esa_carve_take(c, esa_ceil_div(D, nr) * nr * deep * f),
            .group = esa_carve_take(c, deep * mr * f),
            .y = esa_carve_take(c, deep * f),
            .z = esa_carve_take(c, deep * f),
            .w = esa_carve_take(c, deep * f),
            .tile = esa_carve_take(c, mr * x->ld * f),
            .pair = esa_carve_take(c, (ESA_ORDER_SAMPLE / 2) * x->ld * f),
            .part = esa_carve_take(c, (ESA_ORDER_SAMPLE / 2) * (ESA_ORDER_SAMPLE / 2) * f),
            .q = esa_carve_take(c, esa_q_pack_bytes(kern, ESA_ORDER_SAMPLE / 2, D)),
        };
        if (x->room) x->room[t] = r;
    }
}

int64_t esa_adaptive_workspace(const esa_select_args *args)
{
    esa_carve c = { NULL, 0 };
    esa_adaptive_job job;
    lay_out(&job, &c, args);
    return c.used;
}

esa_adaptive_head esa_adaptive_head_of(const esa_adaptive_job *job, int64_t head)
{
    const esa_adaptive_side *s = &job->side[head >= job->side[1].at];
    const int64_t at = head - s->at, b = at / s->heads, h = at % s->heads;
    const int64_t offset = (b * s->stride[0] + h * s->stride[1]) * esa_dtype_size(job->args->dtype);
    const esa_adaptive_head x = { .side = s,
                                  .b = b,
                                  .h = h,
                                  .data = s->data + offset,
                                  .perm = s->perm + at * s->N,
                                  .key = job->key + s->tokens_at + at * s->N,
                                  .spare = job->spare + s->tokens_at + at * s->N };
    return x;
}

static void start_item(void *arg, int64_t item, int32_t worker)
{
    const esa_adaptive_job *job = arg;
    const esa_adaptive_head x = esa_adaptive_head_of(job, item);
    for (int64_t i = 0; i < x.side->N; i++)
        x.perm[i] = x.side->start ? x.side->start[i] : (int32_t)i;
    esa_adaptive_metric(job, item, worker);
}

static void direction_item(void *arg, int64_t item, int32_t worker)
{
    const esa_adaptive_job *job = arg;
    esa_adaptive_direction(job, item >> job->level, (uint32_t)(item & ((1 << job->level) - 1)),
                           worker);
}

/* Eight sums side by side, added up in a fixed order. */
static float dot(const float *a, const float *b, int64_t n)
{
    float s[8] = { 0 };
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int64_t j = 0; j < 8; j++) s[j] += a[i + j] * b[i + j];
    for (; i < n; i++) s[i % 8] += a[i] * b[i];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

static void key_item(void *arg, int64_t item, int32_t worker)
{
    const esa_adaptive_job *job = arg;
    const esa_select_args *a = job->args;
    const int64_t piece = item % job->chunks, at = item / job->chunks, D = a->D;
    const uint32_t slot = (uint32_t)(at & ((1 << job->level) - 1));
    const int64_t head = at >> job->level;
    const esa_adaptive_head x = esa_adaptive_head_of(job, head);
    const esa_order_node node = esa_order_find(x.side->root, x.side->block, x.side->small,
                                               job->level, slot);
    const float *w = job->direction + (head * job->slots + slot) * D;
    float *rows = job->room[worker].rows;
    if (node.n <= x.side->small) return;
    const int64_t first = node.first + piece * CHUNK,
                  end = esa_min64(first + CHUNK, node.first + node.n);
    for (int64_t p = first; p < end; p += RUN) {
        const int64_t n = esa_min64(RUN, end - p);
        const float *row[RUN];
        if (a->dtype != ESA_DTYPE_F32)
            a->kern->rows_k(rows, x.data, a->dtype, x.side->stride[2], x.perm + p, n, D);
        for (int64_t i = 0; i < n; i++)
            row[i] = a->dtype != ESA_DTYPE_F32
                         ? rows + i * D
                         : (const float *)x.data + x.perm[p + i] * x.side->stride[2];
        for (int64_t i = 0; i < n; i++) {
            /* Rows lie anywhere in memory: without this, most of the time is waiting. */
            if (i + AHEAD < n)
                for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(row[i + AHEAD] + d);
            x.key[p + i] = esa_rank_bits(dot(row[i], w, D));
        }
    }
}

void esa_adaptive_partition(int32_t *perm, const uint32_t *key, int32_t *spare, int64_t n,
                            int64_t k)
{
    /* The bar: the k-th smallest key, found byte by byte. left: how many keys equal to it go into
     * the first half. */
    uint32_t bar = 0, known = 0;
    int64_t left = k;
    for (int32_t shift = 24; shift >= 0; shift -= 8) {
        uint32_t count[256] = { 0 }, digit = 0;
        for (int64_t i = 0; i < n; i++)
            if (((key[i] ^ bar) & known) == 0) count[key[i] >> shift & 255]++;
        while (left > count[digit]) left -= count[digit++];
        bar |= digit << shift;
        known |= 255u << shift;
    }
    int64_t low = 0, high = k;
    for (int64_t i = 0; i < n; i++) {
        const int32_t first = key[i] < bar || (key[i] == bar && left-- > 0);
        spare[first ? low++ : high++] = perm[i];
    }
    memcpy(perm, spare, (size_t)n * sizeof *perm);
}

static void partition_item(void *arg, int64_t item, int32_t worker)
{
    const esa_adaptive_job *job = arg;
    const esa_adaptive_head x = esa_adaptive_head_of(job, item >> job->level);
    const uint32_t slot = (uint32_t)(item & ((1 << job->level) - 1));
    const esa_order_node node = esa_order_find(x.side->root, x.side->block, x.side->small,
                                               job->level, slot);
    (void)worker;
    if (node.n <= x.side->small) return;
    esa_adaptive_partition(x.perm + node.first, x.key + node.first, x.spare + node.first, node.n,
                           esa_order_cut(node, x.side->block) - node.first);
}

/* item = (head, slot) below the last level of large nodes; the sides may differ in levels. */
static void block_item(void *arg, int64_t item, int32_t worker)
{
    const esa_adaptive_job *job = arg;
    const esa_adaptive_head x = esa_adaptive_head_of(job, item >> job->level);
    const uint32_t slot = (uint32_t)(item & ((1 << job->level) - 1));
    esa_adaptive_block(job, item >> job->level,
                       esa_order_find(x.side->root, x.side->block, x.side->small, job->level, slot),
                       worker);
}

void esa_adaptive_order(const esa_select_args *args, int32_t *perm_q, int32_t *perm_k, void *ws)
{
    esa_carve c = { ws, 0 };
    esa_adaptive_job job;
    lay_out(&job, &c, args);
    job.side[0].perm = perm_q;
    job.side[1].perm = perm_k;
    const int32_t levels = job.side[0].levels > job.side[1].levels ? job.side[0].levels
                                                                   : job.side[1].levels;
    const int64_t largest = esa_max64(job.side[0].root.n, job.side[1].root.n);
    for (int32_t t = 0; t < esa_pool_threads(args->pool); t++)
        memset(job.room[t].group, 0,
               (size_t)(esa_max64(args->D, ESA_ORDER_SAMPLE) * args->kern->mr) * sizeof(float));
    esa_pool_run(args->pool, start_item, &job, job.heads);
    for (job.level = 0; job.level < levels; job.level++) {
        const int64_t nodes = job.heads << job.level;
        /* Halves differ by at most one block from the mean. */
        job.chunks = esa_ceil_div((largest >> job.level) + 2 * ESA_ORDER_SAMPLE, CHUNK);
        esa_pool_run(args->pool, direction_item, &job, nodes);
        esa_pool_run(args->pool, key_item, &job, nodes * job.chunks);
        esa_pool_run(args->pool, partition_item, &job, nodes);
    }
    esa_pool_run(args->pool, block_item, &job, job.heads << levels);
}
