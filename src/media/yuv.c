/* yuv.c - converts RGB to the planes of video formats and back: limited-range BT.601 (luma 16 ..
 * 235, chroma 16 .. 240), rounded to nearest.
 * SPDX-License-Identifier: Apache-2.0 */
#include "media/frames.h"

#include <math.h>

/* Coefficients times 2^16: luma (0.299, 0.587, 0.114) * 219/255; blue chroma (B - Y) * 224/255
 * / 1.772, red (R - Y) * 224/255 / 1.402. Every chroma row sums to zero, so grey stays grey. */
static const int32_t matrix[3][3] = { { 16829, 33039, 6416 },
                                      { -9714, -19071, 28785 },
                                      { 28785, -24103, -4682 } };

/* Row m of the matrix, applied to the sum of 2^shift pixels. */
static uint8_t component(int m, int r, int g, int b, int shift)
{
    const int32_t x = matrix[m][0] * r + matrix[m][1] * g + matrix[m][2] * b;
    const int32_t offset = m ? 128 : 16;
    return (uint8_t)((x + (offset << (16 + shift)) + (1 << (15 + shift))) >> (16 + shift));
}

void esa_rgb_to_yuv444(uint8_t *const plane[3], const int64_t pitch[3], const uint8_t *rgb,
                       int64_t height, int64_t width)
{
    for (int64_t y = 0; y < height; y++)
        for (int64_t x = 0; x < width; x++, rgb += 3)
            for (int m = 0; m < 3; m++)
                plane[m][y * pitch[m] + x] = component(m, rgb[0], rgb[1], rgb[2], 0);
}

void esa_rgb_to_yuv420(uint8_t *const plane[3], const int64_t pitch[3], const uint8_t *rgb,
                       int64_t height, int64_t width)
{
    for (int64_t y = 0; y < height; y++)
        for (int64_t x = 0; x < width; x++) {
            const uint8_t *p = rgb + (y * width + x) * 3;
            plane[0][y * pitch[0] + x] = component(0, p[0], p[1], p[2], 0);
        }
    for (int64_t y = 0; y < height / 2; y++)
        for (int64_t x = 0; x < width / 2; x++) {
            const uint8_t *p = rgb + (2 * y * width + 2 * x) * 3, *q = p + width * 3;
            const int r = p[0] + p[3] + q[0] + q[3], g = p[1] + p[4] + q[1] + q[4],
                      b = p[2] + p[5] + q[2] + q[5];
            for (int m = 1; m < 3; m++) plane[m][y * pitch[m] + x] = component(m, r, g, b, 2);
        }
}

void esa_fps_fraction(int32_t *numerator, int32_t *denominator, double fps)
{
    static const int32_t parts[] = { 1, 1001, 1000 }; /* 16, 24000/1001, then to three digits */
    static const double slack[] = { 1e-6, 1e-2, 1 };
    for (int i = 0; i < 3; i++) {
        const double n = round(fps * parts[i]);
        *numerator = (int32_t)fmax(n, 1);
        *denominator = parts[i];
        if (fabs(fps * parts[i] - n) <= slack[i]) return;
    }
}

/* Where pixel p lies between chroma samples: *near is its own sample, *far the neighbour. Returns
 * the weight of the near one in quarters. A sample lies in the middle of its two pixels, or on the
 * first of them (first). */
static int32_t between(int64_t *near, int64_t *far, int64_t p, int64_t samples, int every,
                       int first)
{
    *near = *far = p / every;
    if (every == 1 || (first && p % 2 == 0)) return 4;
    *far = esa_min64(esa_max64(*near + (p % 2 ? 1 : -1), 0), samples - 1);
    return first ? 2 : 3;
}

/* Sixteen times the chroma at pixel (x, y), from the samples around it. */
static int32_t blended(const uint8_t *plane, int64_t x, int64_t y, const esa_yuv_layout *l)
{
    const int64_t rows = esa_ceil_div(l->height, l->down),
                  columns = esa_ceil_div(l->width, l->across);
    int64_t cx, nx, cy, ny;
    const int32_t u = between(&cx, &nx, x, columns, l->across, l->left),
                  v = between(&cy, &ny, y, rows, l->down, 0);
    const uint8_t *near = plane + cy * columns, *far = plane + ny * columns;
    return v * (u * near[cx] + (4 - u) * near[nx]) + (4 - v) * (u * far[cx] + (4 - u) * far[nx]);
}

static uint8_t clamped(double x) { return (uint8_t)lrint(x < 0 ? 0 : x > 255 ? 255 : x); }

void esa_yuv_to_rgb(uint8_t *rgb, const uint8_t *luma, const uint8_t *cb, const uint8_t *cr,
                    const esa_yuv_layout *l)
{
    const double gain = l->full ? 1.0 : 255.0 / 219, chroma = (l->full ? 1.0 : 255.0 / 224) / 16;
    for (int64_t y = 0; y < l->height; y++)
        for (int64_t x = 0; x < l->width; x++, rgb += 3) {
            const double light = (luma[y * l->width + x] - (l->full ? 0 : 16)) * gain;
            double u = 0, v = 0;
            if (cb) {
                u = (blended(cb, x, y, l) - 128 * 16) * chroma;
                v = (blended(cr, x, y, l) - 128 * 16) * chroma;
            }
            rgb[0] = clamped(light + 1.402 * v);
            rgb[1] = clamped(light - (0.114 * 1.772 * u + 0.299 * 1.402 * v) / 0.587);
            rgb[2] = clamped(light + 1.772 * u);
        }
}
