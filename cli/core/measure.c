/* measure.c - the work a mask leaves, and the error of an output.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/data.h"

#include <math.h>
#include <stdlib.h>

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Counts the visible pairs of queries q0 .. q1-1 and keys k0 .. k1-1; shift = Nk - Nq. */
static int64_t block_pairs(int64_t q0, int64_t q1, int64_t k0, int64_t k1, int causal,
                           int64_t shift)
{
    if (!causal || k1 - 1 <= q0 + shift) return (q1 - q0) * (k1 - k0);
    int64_t pairs = 0;
    for (int64_t i = q0; i < q1; i++) {
        const int64_t end = least(k1, i + shift + 1);
        if (end > k0) pairs += end - k0;
    }
    return pairs;
}

int64_t measure_pairs(const esa_mask *mask, const esa_tensor *q, const esa_tensor *k, int causal,
                      int64_t *head)
{
    const int64_t B = q->dim[0], H = q->dim[1], Nq = q->dim[2], Nk = k->dim[2];
    if (!mask) {
        const int64_t pairs = block_pairs(0, Nq, 0, Nk, causal, Nk - Nq);
        for (int64_t h = 0; head && h < H; h++) head[h] = pairs;
        return B * H * pairs;
    }
    esa_mask_info info;
    info.struct_size = sizeof info;
    if (esa_mask_get_info(mask, &info)) return -1;
    const int64_t rows = info.B * info.H * info.nq;
    int32_t *count = malloc((size_t)rows * sizeof *count),
            *index = malloc((size_t)(rows * info.nk) * sizeof *index);
    int64_t total = -1;
    if (count && index && !esa_mask_to_lists(mask, count, index, info.nk)) {
        total = 0;
        for (int64_t h = 0; head && h < H; h++) head[h] = 0;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t q0 = r % info.nq * info.block_q, q1 = least(q0 + info.block_q, Nq);
            int64_t pairs = 0;
            for (int32_t c = 0; c < count[r]; c++) {
                const int64_t k0 = (int64_t)index[r * info.nk + c] * info.block_k;
                pairs += block_pairs(q0, q1, k0, least(k0 + info.block_k, Nk), causal, Nk - Nq);
            }
            total += pairs;
            if (head && r / info.nq < H) head[r / info.nq] += pairs;
        }
        if (info.B < B) total *= B; /* one batch entry serves all */
    }
    free(count);
    free(index);
    return total;
}

double measure_error(const esa_tensor *o, const esa_tensor *ref, int64_t head)
{
    const int64_t n = o->dim[2] * o->dim[3];
    const float *a = (const float *)o->data + head * n, *b = (const float *)ref->data + head * n;
    double top = 0, bottom = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = (double)a[i] - (double)b[i];
        top += d * d;
        bottom += (double)b[i] * (double)b[i];
    }
    return bottom > 0 ? sqrt(top / bottom) : (top > 0 ? INFINITY : 0.0);
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double measure_median(double *values, int64_t n)
{
    if (n < 1) return (double)NAN;
    qsort(values, (size_t)n, sizeof *values, ascending);
    return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

double measure_mean(const double *values, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += values[i];
    return n > 0 ? sum / (double)n : (double)NAN;
}
