/* adaptive_block.c - all cuts of a small node: its tokens are compared pair by pair once, and every
 * part of it uses its part of the table (rules/order.h).
 * SPDX-License-Identifier: Apache-2.0
 *
 * K = X C X^T of the node. For a part with m tokens, K minus the means of its rows and columns is
 * what X minus the mean of the part would give. y <- K y keeps the coordinates of the part. */
#include <math.h>
#include <string.h>
#include "select/adaptive.h"

enum { SMALL = 128 }; /* largest esa_order_small */

/* K of the n tokens that perm names, into room->pair [n][ld]. */
static void compare(const esa_adaptive_job *job, const esa_adaptive_head *x, int64_t head,
                    const int32_t *perm, int64_t n, const esa_adaptive_room *room)
{
    const esa_select_args *a = job->args;
    const esa_cpu_kernels *kern = a->kern;
    const int64_t D = a->D, mr = kern->mr, ld = job->ld;
    float *rows = room->rows, *mean = room->w, *turned = room->rows + SMALL * D;
    kern->rows_k(rows, x->data, a->dtype, x->side->stride[2], perm, n, D);
    memset(mean, 0, (size_t)D * sizeof *mean);
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d++) mean[d] += rows[i * D + d];
    for (int64_t d = 0; d < D; d++) mean[d] /= (float)n;
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d++) rows[i * D + d] -= mean[d];
    kern->pack_q(room->q, rows, ESA_DTYPE_F32, D, NULL, n, D, 1.0f);
    for (int64_t i = 0; i < n; i += mr) {
        const int64_t take = esa_min64(mr, n - i);
        kern->qk(room->tile, ld, room->q + i * D, job->metric + head * job->metric_bytes, take, D,
                 D, 1.0f, 0);
        for (int64_t r = 0; r < take; r++)
            memcpy(turned + (i + r) * D, room->tile + r * ld, (size_t)D * sizeof(float));
    }
    kern->pack_q(room->q, turned, ESA_DTYPE_F32, D, NULL, n, D, 1.0f);
    kern->pack_k(room->y_panel, rows, ESA_DTYPE_F32, D, NULL, n, D);
    for (int64_t i = 0; i < n; i += mr) {
        const int64_t take = esa_min64(mr, n - i);
        kern->qk(room->tile, ld, room->q + i * D, room->y_panel, take, n, D, 1.0f, 0);
        for (int64_t r = 0; r < take; r++)
            memcpy(room->pair + (i + r) * ld, room->tile + r * ld, (size_t)n * sizeof(float));
    }
}

/* part[m][m] = K of the tokens that id names, centred and divided by its trace. Returns 0 if it has
 * no positive trace: the tokens do not differ. */
static int32_t centred_part(float *part, const float *pair, int64_t ld, const int32_t *id,
                            int64_t m)
{
    float mean[SMALL], all = 0.0f, trace = 0.0f;
    for (int64_t p = 0; p < m; p++) {
        const float *row = pair + id[p] * ld;
        float sum = 0.0f;
        for (int64_t q = 0; q < m; q++) {
            part[p * m + q] = row[id[q]];
            sum += part[p * m + q];
        }
        mean[p] = sum / (float)m;
        all += mean[p];
    }
    all /= (float)m;
    for (int64_t p = 0; p < m; p++) trace += part[p * m + p] - 2.0f * mean[p] + all;
    if (!(trace > 0.0f)) return 0;
    const float factor = 1.0f / trace;
    for (int64_t p = 0; p < m; p++)
        for (int64_t q = 0; q < m; q++)
            part[p * m + q] = (part[p * m + q] - mean[p] - mean[q] + all) * factor;
    return 1;
}

/* out = part . y; part is symmetric, so its rows serve as columns. */
static void turn(float *out, const float *part, const float *y, int64_t m)
{
    int64_t q = 0;
    for (int64_t p = 0; p < m; p++) out[p] = 0.0f;
    for (; q + 4 <= m; q += 4) {
        const float *a = part + q * m, *b = a + m, *c = b + m, *d = c + m;
        const float ya = y[q], yb = y[q + 1], yc = y[q + 2], yd = y[q + 3];
        for (int64_t p = 0; p < m; p++) out[p] += (ya * a[p] + yb * b[p]) + (yc * c[p] + yd * d[p]);
    }
    for (; q < m; q++)
        for (int64_t p = 0; p < m; p++) out[p] += y[q] * part[q * m + p];
}

/* Cuts one part: id[m] and the tokens perm[m] are partitioned alike. */
static void cut_part(const esa_adaptive_room *room, int64_t ld, int32_t *id, int64_t m, int64_t k)
{
    float y[2][SMALL];
    uint32_t key[SMALL];
    int32_t spare[SMALL], now = 0;
    int64_t far = 0;
    if (!centred_part(room->part, room->pair, ld, id, m)) return;
    for (int64_t p = 0; p < m; p++) y[0][p] = esa_order_weight((uint32_t)p);
    for (int32_t t = 0; t <= ESA_ORDER_ROUNDS; t++, now = !now)
        turn(y[!now], room->part, y[now], m);
    for (int64_t p = 1; p < m; p++)
        if (fabsf(y[now][p]) > fabsf(y[now][far])) far = p;
    const float sign = y[now][far] < 0.0f ? -1.0f : 1.0f;
    for (int64_t p = 0; p < m; p++) key[p] = esa_rank_bits(sign * y[now][p]);
    esa_adaptive_partition(id, key, spare, m, k);
}

void esa_adaptive_block(const esa_adaptive_job *job, int64_t head, esa_order_node node,
                        int32_t worker)
{
    const esa_adaptive_room *room = &job->room[worker];
    const esa_adaptive_head x = esa_adaptive_head_of(job, head);
    const uint32_t block = x.side->block;
    int32_t *perm = x.perm + node.first, id[SMALL], token[SMALL];
    esa_order_node stack[32] = { node }; /* a cut leaves at least 8 of 128 tokens on each side */
    int32_t depth = 1;
    if (!esa_order_cut(node, block)) return;
    compare(job, &x, head, perm, node.n, room);
    for (uint32_t p = 0; p < node.n; p++) id[p] = (int32_t)p;
    while (depth > 0) {
        const esa_order_node part = stack[--depth];
        const uint32_t cut = esa_order_cut(part, block);
        if (!cut) continue;
        cut_part(room, job->ld, id + (part.first - node.first), part.n, cut - part.first);
        stack[depth++] = esa_order_half(part, cut, 1);
        stack[depth++] = esa_order_half(part, cut, 0);
    }
    memcpy(token, perm, node.n * sizeof *token);
    for (uint32_t p = 0; p < node.n; p++) perm[p] = token[id[p]];
}
