/* psnr.c - see metric.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "metric/metric.h"

#include <math.h>

int64_t esa_squared_error(const uint8_t *a, const uint8_t *b, int64_t count)
{
    int64_t total = 0;
    for (int64_t i = 0; i < count;) {
        /* 32768 * 255^2 < 2^32: the inner sum may be narrow */
        const int64_t end = esa_min64(i + 32768, count);
        uint32_t sum = 0;
        for (; i < end; i++) {
            const int32_t d = (int32_t)a[i] - (int32_t)b[i];
            sum += (uint32_t)(d * d);
        }
        total += sum;
    }
    return total;
}

double esa_psnr(int64_t squared_error, int64_t count)
{
    if (squared_error == 0) return INFINITY;
    return 10.0 * log10(255.0 * 255.0 * (double)count / (double)squared_error);
}
