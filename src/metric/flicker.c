/* flicker.c - see metric.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "metric/metric.h"

#include <math.h>

int64_t esa_change_error(const uint8_t *a0, const uint8_t *a1, const uint8_t *b0, const uint8_t *b1,
                         int64_t count)
{
    int64_t total = 0;
    for (int64_t i = 0; i < count;) {
        /* 16384 * 510^2 < 2^32: the inner sum may be narrow */
        const int64_t end = esa_min64(i + 16384, count);
        uint32_t sum = 0;
        for (; i < end; i++) {
            const int32_t d = ((int32_t)b1[i] - (int32_t)b0[i]) - ((int32_t)a1[i] - (int32_t)a0[i]);
            sum += (uint32_t)(d * d);
        }
        total += sum;
    }
    return total;
}

double esa_root_mean(int64_t squared_error, int64_t count)
{
    return sqrt((double)squared_error / (double)count);
}
