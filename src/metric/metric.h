/* metric.h - compares pictures and videos of 8-bit RGB: PSNR, SSIM, flicker; LPIPS is in lpips.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * PSNR = 10 log10(255^2 / mean squared error) in dB; equal pictures give +inf.
 *
 * SSIM (Wang, Bovik, Sheikh, Simoncelli 2004): 11 x 11 Gaussian window of sigma 1.5, population
 * statistics, C1 = (0.01 * 255)^2, C2 = (0.03 * 255)^2, mean over all windows inside the picture
 * and over the channels. It is the value of scikit-image's structural_similarity(a, b,
 * channel_axis=-1, data_range=255, gaussian_weights=True, sigma=1.5, use_sample_covariance=False).
 *
 * Flicker is the error of the changes from frame to frame. PSNR cannot tell an error that stays in
 * place from one that jumps; flicker measures only the jumps. */
#ifndef ESA_METRIC_METRIC_H
#define ESA_METRIC_METRIC_H

#include "ctx/ctx.h"

#define ESA_SSIM_WINDOW 11

/* Sum of squared differences of count bytes; exact below 2^63. */
int64_t esa_squared_error(const uint8_t *a, const uint8_t *b, int64_t count);
double esa_psnr(int64_t squared_error, int64_t count);

/* The number of doubles that esa_ssim needs as scratch for a picture of that width. */
int64_t esa_ssim_scratch(int64_t width);
/* SSIM of two pictures [height][width][3] with sides of at least ESA_SSIM_WINDOW. */
double esa_ssim(const uint8_t *a, const uint8_t *b, int64_t height, int64_t width, double *scratch);

/* Sum of ((b1 - b0) - (a1 - a0))^2 over count bytes of four pictures; exact. */
int64_t esa_change_error(const uint8_t *a0, const uint8_t *a1, const uint8_t *b0, const uint8_t *b1,
                         int64_t count);
double esa_root_mean(int64_t squared_error, int64_t count);

#endif
