/* ssim.c - see metric.h. Works row by row: five quantities are blurred across each picture row, the
 * last 11 such rows are kept and blurred down, in f64.
 * SPDX-License-Identifier: Apache-2.0 */
#include "metric/metric.h"

#include <math.h>

#define W     ESA_SSIM_WINDOW
#define SIGMA 1.5

/* A ring of W rows of one channel, blurred across, with five quantities each (a, b, aa, bb, ab);
 * then one row that is blurred down too. */
int64_t esa_ssim_scratch(int64_t width) { return (W + 1) * 5 * width; }

static void gaussian(double g[W])
{
    double sum = 0;
    for (int i = 0; i < W; i++) {
        const double x = i - W / 2;
        g[i] = exp(-0.5 * x * x / (SIGMA * SIGMA));
        sum += g[i];
    }
    for (int i = 0; i < W; i++) g[i] /= sum;
}

/* One picture row of a channel: out[5][across]. */
static void blur_across(double *out, const double *g, const uint8_t *a, const uint8_t *b,
                        int64_t across)
{
    for (int64_t x = 0; x < across; x++) {
        double s[5] = { 0, 0, 0, 0, 0 };
        for (int i = 0; i < W; i++) {
            const double p = a[(x + i) * 3], q = b[(x + i) * 3];
            s[0] += g[i] * p;
            s[1] += g[i] * q;
            s[2] += g[i] * (p * p);
            s[3] += g[i] * (q * q);
            s[4] += g[i] * (p * q);
        }
        for (int k = 0; k < 5; k++) out[k * across + x] = s[k];
    }
}

static double channel(const uint8_t *a, const uint8_t *b, int64_t height, int64_t width,
                      const double *g, double *scratch)
{
    const double c1 = (0.01 * 255) * (0.01 * 255), c2 = (0.03 * 255) * (0.03 * 255);
    const int64_t across = width - W + 1, down = height - W + 1, row = 5 * across;
    double *sum = scratch + W * row, total = 0;
    for (int64_t y = 0; y < height; y++) {
        blur_across(scratch + y % W * row, g, a + y * width * 3, b + y * width * 3, across);
        if (y < W - 1) continue;
        for (int64_t j = 0; j < row; j++) sum[j] = 0;
        for (int i = 0; i < W; i++) {
            const double *from = scratch + (y - (W - 1) + i) % W * row;
            for (int64_t j = 0; j < row; j++) sum[j] += g[i] * from[j];
        }
        double line = 0;
        for (int64_t x = 0; x < across; x++) {
            const double ma = sum[x], mb = sum[across + x];
            const double va = sum[2 * across + x] - ma * ma, vb = sum[3 * across + x] - mb * mb,
                         vab = sum[4 * across + x] - ma * mb;
            line += (2 * ma * mb + c1) * (2 * vab + c2) /
                    ((ma * ma + mb * mb + c1) * (va + vb + c2));
        }
        total += line;
    }
    return total / (double)(across * down);
}

double esa_ssim(const uint8_t *a, const uint8_t *b, int64_t height, int64_t width, double *scratch)
{
    double g[W], sum = 0;
    gaussian(g);
    for (int c = 0; c < 3; c++) sum += channel(a + c, b + c, height, width, g, scratch);
    return sum / 3;
}
