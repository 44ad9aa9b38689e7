/* adaptive_direction.c - the metric of a head and the principal direction of a node
 * (rules/order.h).
 * SPDX-License-Identifier: Apache-2.0
 *
 * All products go through the kernel set. A panel of head-dim columns holds pieces of the rows as
 * they are, so X^T y needs no transposed copy. */
#include <math.h>
#include <string.h>
#include "select/adaptive.h"

/* Pieces of width `wide` of rows[n][D] as a panel of columns: out[ceil(D/wide)][depth][wide], from
 * row `first` of the depth on. */
static void put_columns(float *out, const float *rows, int64_t n, int64_t D, int64_t wide,
                        int64_t depth)
{
    for (int64_t c = 0; c < D; c += wide, out += depth * wide) {
        const int64_t width = esa_min64(wide, D - c);
        for (int64_t i = 0; i < n; i++) {
            memcpy(out + i * wide, rows + i * D + c, (size_t)width * sizeof *out);
            for (int64_t j = width; j < wide; j++) out[i * wide + j] = 0.0f;
        }
    }
}

/* Adds the second moments of rows[n] to moment[D][ld]. */
static void add_moments(const esa_adaptive_job *job, const esa_adaptive_room *room, float *moment,
                        int64_t ld, int64_t n, int32_t more)
{
    const esa_cpu_kernels *kern = job->args->kern;
    const int64_t D = job->args->D, mr = kern->mr;
    put_columns(room->z_panel, room->rows, n, D, kern->nr, n);
    for (int64_t d = 0; d < D; d += mr) {
        const int64_t rows = esa_min64(mr, D - d);
        for (int64_t i = 0; i < n; i++)
            for (int64_t r = 0; r < mr; r++)
                room->group[i * mr + r] = r < rows ? room->rows[i * D + d + r] : 0.0f;
        if (more)
            for (int64_t r = 0; r < rows; r++)
                memcpy(room->tile + r * job->ld, moment + (d + r) * ld, (size_t)D * sizeof(float));
        kern->qk(room->tile, job->ld, room->group, room->z_panel, rows, D, n, 1.0f, more);
        for (int64_t r = 0; r < rows; r++)
            memcpy(moment + (d + r) * ld, room->tile + r * job->ld, (size_t)D * sizeof(float));
    }
}

/* Tokens of the other side that the head's metric can sample: [others][tokens]. */
static int64_t others_of(const esa_adaptive_job *job, const esa_adaptive_head *x, int64_t *heads)
{
    const esa_select_args *a = job->args;
    *heads = x->side == &job->side[1] ? a->Hq / a->Hkv : 1;
    return x->side == &job->side[1] ? a->Nq : esa_args_kv_len(a, x->b);
}

void esa_adaptive_metric(const esa_adaptive_job *job, int64_t head, int32_t worker)
{
    const esa_select_args *a = job->args;
    const esa_adaptive_room *room = &job->room[worker];
    const esa_adaptive_head x = esa_adaptive_head_of(job, head);
    const esa_adaptive_side *other = &job->side[x.side == &job->side[0]];
    const int64_t D = a->D, size = esa_dtype_size(a->dtype);
    float *moment = room->y_panel; /* [D][D] fits: a panel holds SAMPLE or D rows */
    int64_t heads;
    const int64_t N = others_of(job, &x, &heads), all = heads * N,
                  count = esa_min64(all, ESA_ORDER_MOMENTS);
    const int64_t ratio = a->Hq / a->Hkv, h0 = x.side == &job->side[0] ? x.h / ratio : x.h * ratio;
    memset(moment, 0, (size_t)(D * D) * sizeof *moment);
    for (int64_t i = 0; i < count; i += ESA_ORDER_SAMPLE) {
        const int64_t n = esa_min64(ESA_ORDER_SAMPLE, count - i);
        for (int64_t j = 0; j < n; j++) {
            const int64_t at = esa_order_sample((uint32_t)(i + j), (uint32_t)count, (uint64_t)all);
            const int64_t place = x.b * other->stride[0] + (h0 + at / N) * other->stride[1] +
                                  at % N * other->stride[2];
            a->kern->rows_k(room->rows + j * D, other->data + place * size, a->dtype, D, NULL, 1,
                            D);
        }
        add_moments(job, room, moment, D, n, i > 0);
    }
    double trace = 0.0;
    for (int64_t d = 0; d < D; d++) trace += (double)moment[d * D + d];
    const float mean = (float)(trace / (double)D);
    const int32_t usable = mean > 0.0f && isfinite(mean) && isfinite(1.0f / mean);
    for (int64_t i = 0; i < D; i++)
        for (int64_t j = 0; j < D; j++) {
            float *c = &moment[i * D + j];
            *c = usable ? *c / mean + (i == j ? ESA_ORDER_RIDGE : 0.0f) : i == j ? 1.0f : 0.0f;
        }
    a->kern->pack_k(job->metric + head * job->metric_bytes, moment, ESA_DTYPE_F32, D, NULL, D, D);
}

/* Subtracts the mean of rows[n][D] from them. mean: D. */
static void centre(float *rows, float *mean, int64_t n, int64_t D)
{
    memset(mean, 0, (size_t)D * sizeof *mean);
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d++) mean[d] += rows[i * D + d];
    for (int64_t d = 0; d < D; d++) mean[d] /= (float)n;
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < D; d++) rows[i * D + d] -= mean[d];
}

void esa_adaptive_direction(const esa_adaptive_job *job, int64_t head, uint32_t slot,
                            int32_t worker)
{
    const esa_select_args *a = job->args;
    const esa_cpu_kernels *kern = a->kern;
    const esa_adaptive_room *room = &job->room[worker];
    const esa_adaptive_head x = esa_adaptive_head_of(job, head);
    const esa_order_node node = esa_order_find(x.side->root, x.side->block, x.side->small,
                                               job->level, slot);
    const float *metric = (const float *)(job->metric + head * job->metric_bytes);
    float *w = job->direction + (head * job->slots + slot) * a->D;
    if (node.n <= x.side->small) return;
    const int64_t D = a->D, mr = kern->mr, n = esa_min64(node.n, ESA_ORDER_SAMPLE);
    int32_t token[ESA_ORDER_SAMPLE];
    for (int64_t i = 0; i < n; i++)
        token[i] = x.perm[node.first + esa_order_sample((uint32_t)i, (uint32_t)n, node.n)];
    kern->rows_k(room->rows, x.data, a->dtype, x.side->stride[2], token, n, D);
    centre(room->rows, room->z, n, D);
    kern->pack_k(room->y_panel, room->rows, ESA_DTYPE_F32, D, NULL, n, D);
    put_columns(room->z_panel, room->rows, n, D, kern->nr, n);
    for (int64_t i = 0; i < n; i++) room->y[i] = esa_order_weight((uint32_t)i);
    for (int32_t turn = 0; turn <= ESA_ORDER_ROUNDS; turn++) {
        for (int64_t i = 0; i < n; i++) room->group[i * mr] = room->y[i];
        esa_adaptive_product(job, room, room->z, room->z_panel, D, n);
        for (int64_t d = 0; d < D; d++) room->group[d * mr] = room->z[d];
        esa_adaptive_product(job, room, room->w, metric, D, D);
        float top = 0.0f;
        for (int64_t d = 0; d < D; d++) top = fmaxf(top, fabsf(room->w[d]));
        if (!(top > 0.0f)) top = 1.0f; /* no variance */
        for (int64_t d = 0; d < D; d++) {
            room->w[d] /= top;
            room->group[d * mr] = room->w[d];
        }
        esa_adaptive_product(job, room, room->y, room->y_panel, n, D);
    }
    int64_t far = 0;
    for (int64_t i = 1; i < n; i++)
        if (fabsf(room->y[i]) > fabsf(room->y[far])) far = i;
    for (int64_t d = 0; d < D; d++) w[d] = room->y[far] < 0.0f ? -room->w[d] : room->w[d];
}
