/* test_gpu_rounding.c - the step that rounds q, k and v to 8 bits, alone: every code, scale, centre
 * and mean against docs/precision.md, for all formats of values. ESA_TEST_TIMES=1 also prints the
 * time of each launch at true shapes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Bounds: a code of int8 is within half of the number that was rounded. E4M3 has 3 bits of mantissa
 * and f16 has 10, so a code is within 2^-4 or 2^-11 of its number, or half of the smallest step,
 * 2^-10 or 2^-25. The number itself is computed in f32 with two or three roundings, so it is known
 * to SLIGHTLY of its size, and to SLIGHTLY of the centre, in units of the scale. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/tests.h"
#include "base/half.h"
#include "base/rng.h"
#include "common/naive.h"
#include "cuda/rounding.h"
#include "rules/eight_bit.h"

#define SLIGHTLY 0x1p-20

/* The formats of values: that of the sm90a kernel, of the sm89 and of the sm80 kernel. */
enum { E4M3, E4M3_64, F16, FORMATS };
static const struct {
    const char *name;
    int (*runs)(void);
    const char *(*round)(rounded *out, const esa_attn_args *args);
    const char *(*times)(float *ms, const esa_attn_args *args);
} formats[] = { { "E4M3", rounding_e4m3_runs, rounding_e4m3, rounding_e4m3_times },
                { "E4M3, sm89", rounding_e4m3_64_runs, rounding_e4m3_64, rounding_e4m3_64_times },
                { "f16", rounding_f16_runs, rounding_f16, rounding_f16_times } };
enum { RUN = 128, SAMPLED = 8192 }; /* from so many keys on, centres come from a sample */

/* One call. views: 0 plain, 1 rows padded by one element (not in pieces of 16 bytes), 2 tokens
 * before heads. odd: what stands in one element of each of q, k and v. */
typedef struct round_case {
    int format;
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int32_t dtype, block_k, tail, fine, views, ordered;
    const int32_t *kv_len;
    float centre, odd;
    int64_t odd_row; /* its token */
    int32_t quiet;   /* v is 0 but for the odd element */
} round_case;

typedef struct inputs {
    esa_attn_args a;
    uint16_t *q, *k, *v;
    int32_t *perm_q, *perm_k;
} inputs;

static float an_lse; /* makes a call have an LSE; never read or written */

static void *allocate(int64_t bytes)
{
    void *memory = calloc(1, (size_t)bytes);
    assert_non_null(memory);
    return memory;
}

static uint16_t *fill(int64_t *stride, const round_case *c, int64_t H, int64_t N, uint64_t seed,
                      float centre, int quiet)
{
    const int64_t row = c->D + (c->views == 1);
    stride[0] = H * N * row;
    stride[1] = c->views == 2 ? row : N * row;
    stride[2] = c->views == 2 ? H * row : row;
    uint16_t *x = allocate(c->B * H * N * row * 2);
    esa_rng r = { test_seed() + seed };
    for (int64_t i = 0; i < c->B * H * N * row; i++) {
        const float value = quiet ? 0.0f : centre + 3.0f * (float)esa_rng_unit(&r) - 1.5f;
        esa_store_f32(x, i, c->dtype, value);
    }
    if (c->odd != 0.0f && c->odd_row < N) /* of the last head */
        esa_store_f32(x, (c->B - 1) * stride[0] + (H - 1) * stride[1] + c->odd_row * stride[2] + 5,
                      c->dtype, c->odd);
    return x;
}

/* An order of tokens that keeps those from `end` on where they are. */
static int32_t *order(int64_t *stride, int64_t B, int64_t H, int64_t N, int64_t end, uint64_t seed)
{
    stride[0] = H * N;
    stride[1] = N;
    int32_t *perm = allocate(B * H * N * 4);
    esa_rng r = { test_seed() + seed };
    for (int64_t g = 0; g < B * H; g++) {
        int32_t *at = perm + g * N;
        for (int64_t n = 0; n < N; n++) at[n] = (int32_t)n;
        for (int64_t n = end - 1; n > 0; n--) {
            const int64_t other = (int64_t)((double)esa_rng_unit(&r) * (double)n);
            const int32_t x = at[n];
            at[n] = at[other];
            at[other] = x;
        }
    }
    return perm;
}

static inputs make_inputs(const round_case *c)
{
    inputs in = { .a = { .dtype = c->dtype,
                         .tail = c->tail,
                         .precision = 8,
                         .block_q = RUN,
                         .block_k = c->block_k,
                         .B = c->B,
                         .Hq = c->Hq,
                         .Hkv = c->Hkv,
                         .Nq = c->Nq,
                         .Nk = c->Nk,
                         .D = c->D,
                         .nq = (c->Nq + RUN - 1) / RUN,
                         .nk = (c->Nk + c->block_k - 1) / c->block_k,
                         .kv_len = c->kv_len,
                         .fine = c->fine } };
    in.a.q = in.q = fill(in.a.q_stride, c, c->Hq, c->Nq, 1, 0.0f, 0);
    in.a.k = in.k = fill(in.a.k_stride, c, c->Hkv, c->Nk, 2, c->centre, 0);
    in.a.v = in.v = fill(in.a.v_stride, c, c->Hkv, c->Nk, 3, -c->centre, c->quiet);
    in.a.lse = &an_lse;
    if (c->ordered) {
        int64_t end = c->Nk;
        for (int64_t b = 0; c->kv_len && b < c->B; b++)
            if (c->kv_len[b] < end) end = c->kv_len[b];
        in.a.perm_q = in.perm_q = order(in.a.perm_q_stride, c->B, c->Hq, c->Nq, c->Nq, 4);
        in.a.perm_k = in.perm_k = order(in.a.perm_k_stride, c->B, c->Hkv, c->Nk, end, 5);
    }
    return in;
}

/* Row of a head at a position, as floats. */
static void row_at(float *row, const inputs *in, const void *data, const int64_t *stride,
                   const int32_t *perm, const int64_t *perm_stride, int64_t b, int64_t h, int64_t n)
{
    const int64_t token = perm ? perm[b * perm_stride[0] + h * perm_stride[1] + n] : n;
    for (int64_t d = 0; d < in->a.D; d++)
        row[d] = esa_load_f32(data, b * stride[0] + h * stride[1] + token * stride[2] + d,
                              in->a.dtype);
}
static void key_row(float *row, const inputs *in, const void *data, const int64_t *stride,
                    int64_t b, int64_t h, int64_t n)
{
    row_at(row, in, data, stride, in->a.perm_k, in->a.perm_k_stride, b, h, n);
}

static int64_t length_of(const round_case *c, int64_t b)
{
    const int64_t n = c->kv_len ? c->kv_len[b] : c->Nk;
    return n < 0 ? 0 : n > c->Nk ? c->Nk : n;
}

/* ---------------------------------------------------------------- formats of values */

/* slot of a key among 16, as src/cuda/attention/quantise.cuh draws it */
static int64_t slot_of(int64_t key)
{
    static const int slot[16] = { 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15 };
    return key / 16 * 16 + slot[key % 16];
}

/* Value of channel d of row n of kv head g. Rows are keys (per = rows of a head) or means. */
static float value_at(const round_case *c, const void *v, int64_t per, int64_t g, int64_t n,
                      int64_t d)
{
    if (c->format == F16) return esa_load_f32(v, (g * per + n) * c->D + d, ESA_DTYPE_F16);
    return esa_f8_to_f32(
        ((const uint8_t *)v)[((g * per / RUN + n / RUN) * c->D + d) * RUN + slot_of(n % RUN)]);
}

/* Checks one value. what: the exact number, in units of the scale; about: the size of the numbers
 * it is computed from. */
static void check_value(const round_case *c, float got, double what, double about)
{
    if (isnan(what)) {
        if (!isnan(got)) fail_msg("%g instead of NaN", (double)got);
        return;
    }
    const double step = c->format == F16 ? 0x1p-25 : 0x1p-10,
                 relative = c->format == F16 ? 0x1p-11 : 0x1p-4,
                 bound = fmax(step, relative * fabs(what)) + SLIGHTLY * (fabs(what) + about);
    if (!(fabs((double)got - what) <= bound))
        fail_msg("value %g instead of %g +- %g", (double)got, what, bound);
}

static void check_code(int8_t got, double what, double about)
{
    const double bound = 0.5 + SLIGHTLY * (fabs(what) + about);
    if (!(fabs((double)got - what) <= bound) || got < -127)
        fail_msg("code %d instead of %g", got, what);
}

/* ---------------------------------------------------------------- the parts */

static void check_queries(const round_case *c, const inputs *in, const rounded *x)
{
    float row[128];
    for (int64_t g = 0; g < c->B * c->Hq; g++)
        for (int64_t n = 0; n < c->Nq; n++) {
            const int64_t b = g / c->Hq, h = g % c->Hq, at = g * x->nq * RUN + n,
                          kv = b * c->Hkv + h / (c->Hq / c->Hkv);
            row_at(row, in, in->q, in->a.q_stride, in->a.perm_q, in->a.perm_q_stride, b, h, n);
            float largest = 0.0f;
            double product = 0.0, size = 0.0;
            for (int64_t d = 0; d < c->D; d++) {
                const double term = (double)row[d] * (double)x->k_centre[kv * c->D + d];
                largest = esa_eight_larger(largest, row[d]);
                product += term;
                size += fabs(term);
            }
            if (isnan(largest)) {
                assert_true(isnan(x->q_scale[at]));
                continue;
            }
            const float scale = esa_eight_scale(largest, ESA_EIGHT_CODE);
            assert_true(x->q_scale[at] == scale);
            for (int64_t d = 0; d < c->D; d++)
                check_code(x->q[at * c->D + d], (double)row[d] / (double)scale, 0.0);
            assert_true(fabs((double)x->q_centre[g * c->Nq + n] - product) <=
                        SLIGHTLY * size + 1e-30);
        }
}

/* Centres are the means; those of a sample are near them: 6 standard deviations of 4,096 rows. */
static void check_centre(const round_case *c, const inputs *in, const float *got, const void *data,
                         const int64_t *stride, int64_t b, int64_t h)
{
    float row[128];
    double sum[128] = { 0 }, squares[128] = { 0 };
    int64_t count[128] = { 0 };
    const int64_t length = length_of(c, b);
    for (int64_t n = 0; n < length; n++) {
        key_row(row, in, data, stride, b, h, n);
        for (int64_t d = 0; d < c->D; d++)
            if (isfinite(row[d]))
                sum[d] += (double)row[d], squares[d] += (double)row[d] * (double)row[d], count[d]++;
    }
    for (int64_t d = 0; d < c->D; d++) {
        const double n = count[d] ? (double)count[d] : 1.0, mean = sum[d] / n,
                     deviation = sqrt(fmax(0.0, squares[d] / n - mean * mean)),
                     /* an element that is not finite counts as 0 */
            bound = (length >= SAMPLED ? deviation * 6.0 / 64.0 : 0.0) + 1e-5 +
                    fabs(mean) * (1e-5 + ((double)length - n) / n);
        if (!(fabs((double)got[d] - mean) <= bound))
            fail_msg("centre %g instead of %g +- %g", (double)got[d], mean, bound);
    }
}

/* Checks the means of n rows of k and v from position `from` on. k8, v8: their codes. */
static void check_mean(const round_case *c, const inputs *in, const rounded *x, int64_t g,
                       int64_t from, int64_t n, const int8_t *k8, const float *v8, float k_scale)
{
    const int64_t b = g / c->Hkv, h = g % c->Hkv;
    const float *k_centre = x->k_centre + g * c->D, *v_centre = x->v_middle + g * c->D;
    float row[128];
    double k_sum[128] = { 0 }, v_sum[128] = { 0 };
    for (int64_t i = 0; i < n; i++) {
        key_row(row, in, in->k, in->a.k_stride, b, h, from + i);
        for (int64_t d = 0; d < c->D; d++) k_sum[d] += (double)row[d] - (double)k_centre[d];
        key_row(row, in, in->v, in->a.v_stride, b, h, from + i);
        for (int64_t d = 0; d < c->D; d++) v_sum[d] += (double)row[d] - (double)v_centre[d];
    }
    for (int64_t d = 0; d < c->D; d++) {
        const double scale = (double)x->v_scale[g * c->D + d], mean = v_sum[d] / (double)n / scale,
                     most = ((double)fabsf(v_centre[d]) + 3.0) / scale; /* of what is added */
        if (k_scale > 0.0f)
            check_code(k8[d], k_sum[d] / (double)n / (double)k_scale,
                       ((double)fabsf(k_centre[d]) + 3.0) / (double)k_scale);
        check_value(c, v8[d], isfinite(mean) ? mean : (double)NAN,
                    c->odd == 0.0f ? most : most * 1e4);
    }
}

/* The keys and values of block j, and their means. */
static void check_block(const round_case *c, const inputs *in, const rounded *x, int64_t g,
                        int64_t j)
{
    const int64_t b = g / c->Hkv, h = g % c->Hkv, D = c->D, from = j * c->block_k,
                  left = length_of(c, b) - from, n = left < c->block_k ? left : c->block_k,
                  at = g * x->nk * RUN + from;
    const float *k_centre = x->k_centre + g * D, *v_centre = x->v_middle + g * D,
                k_scale = x->k_scale[g * x->nk * (RUN / c->block_k) + j];
    float row[128], v8[128], largest = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        key_row(row, in, in->k, in->a.k_stride, b, h, from + i);
        for (int64_t d = 0; d < D; d++) largest = esa_eight_larger(largest, row[d] - k_centre[d]);
    }
    if (isnan(largest))
        assert_true(isnan(k_scale));
    else
        assert_true(k_scale ==
                    (largest < ESA_EIGHT_LITTLE ? 0.0f : esa_eight_scale(largest, 127.0f)));
    for (int64_t i = 0; i < n; i++) {
        key_row(row, in, in->k, in->a.k_stride, b, h, from + i);
        for (int64_t d = 0; d < D && k_scale > 0.0f; d++)
            check_code(x->k[(at + i) * D + d], (double)(row[d] - k_centre[d]) / (double)k_scale,
                       0.0);
        key_row(row, in, in->v, in->a.v_stride, b, h, from + i);
        for (int64_t d = 0; d < D; d++) {
            const double scale = (double)x->v_scale[g * D + d],
                         what = isfinite(row[d]) ? (double)(row[d] - v_centre[d]) / scale
                                                 : (double)NAN;
            assert_false(fabs(what) > (c->format == F16 ? 65504.0 : 448.0));
            check_value(c, value_at(c, x->v, x->nk * RUN, g, from + i, d), what,
                        (double)fabsf(v_centre[d]) / scale);
        }
    }
    if (c->tail == ESA_TAIL_NONE) return;
    for (int64_t d = 0; d < D; d++) v8[d] = value_at(c, x->v_mean, x->nk_pad, g, j, d);
    check_mean(c, in, x, g, from, n, x->k_mean + (g * x->nk_pad + j) * D, v8, k_scale);
    for (int64_t p = 0, size = c->fine ? c->block_k / c->fine : 1; p < c->fine && p * size < n;
         p++) {
        const int64_t mean = (g * x->nk * (RUN / c->block_k) + j) * c->fine + p;
        for (int64_t d = 0; d < D; d++) /* E4M3: the means of a block, side by side */
            v8[d] = c->format == F16
                        ? esa_load_f32(x->v_fine, mean * D + d, ESA_DTYPE_F16)
                        : esa_f8_to_f32(
                              ((const uint8_t *)x->v_fine)[(mean - p) * D + d * c->fine + p]);
        check_mean(c, in, x, g, from + p * size, n - p * size < size ? n - p * size : size,
                   x->k_fine + mean * D, v8, k_scale);
    }
}

/* Scales from all rows leave room for twice the largest value. Those from a sample, or of a second
 * rounding, leave room for between one and 16 times as much; f16 holds larger values, so its scale
 * may also be smaller, by 128 at most. */
static void check_value_scales(const round_case *c, const inputs *in, const rounded *x, int64_t g)
{
    const int64_t b = g / c->Hkv, length = length_of(c, b);
    float row[128], largest[128] = { 0 };
    for (int64_t n = 0; n < length; n++) {
        key_row(row, in, in->v, in->a.v_stride, b, g % c->Hkv, n);
        for (int64_t d = 0; d < c->D; d++) {
            const float size = fabsf(row[d] - x->v_middle[g * c->D + d]);
            if (size < INFINITY && size > largest[d]) largest[d] = size;
        }
    }
    for (int64_t d = 0; d < c->D; d++) {
        const float scale = x->v_scale[g * c->D + d],
                    exact = esa_eight_scale(largest[d], ESA_EIGHT_TOP);
        if (length < SAMPLED)
            assert_true(scale == 2.0f * exact);
        else if (largest[d] >= ESA_EIGHT_LITTLE)
            assert_true(scale <= 16.0f * exact &&
                        scale >= (c->format == F16 ? exact / 128.0f : exact));
    }
}

/* E4M3 without a tail: the kernels add the middle of a channel and the mean error of its codes. The
 * codes are summed in f16, which has 2^-7 of the error of E4M3, with random signs. */
static void check_added(const round_case *c, const inputs *in, const rounded *x, int64_t g)
{
    const int64_t b = g / c->Hkv, length = length_of(c, b);
    float row[128];
    double sum[128] = { 0 }, squares[128] = { 0 };
    int finite[128];
    for (int64_t d = 0; d < c->D; d++) finite[d] = 1;
    for (int64_t n = 0; n < length; n++) {
        key_row(row, in, in->v, in->a.v_stride, b, g % c->Hkv, n);
        for (int64_t d = 0; d < c->D; d++) {
            const double error = (double)(row[d] - x->v_middle[g * c->D + d]) -
                                 (double)value_at(c, x->v, x->nk * RUN, g, n, d) *
                                     (double)x->v_scale[g * c->D + d];
            finite[d] &= isfinite(row[d]) != 0;
            sum[d] += error;
            squares[d] += error * error;
        }
    }
    for (int64_t d = 0; d < c->D; d++) {
        const float middle = x->v_middle[g * c->D + d], added = x->v_centre[g * c->D + d];
        const double n = (double)length, want = (double)middle + sum[d] / n,
                     bound = 0.1 * sqrt(squares[d]) / n + SLIGHTLY * (double)fabsf(middle) +
                             SLIGHTLY * (double)x->v_scale[g * c->D + d];
        if (c->format == F16 || c->tail)
            assert_true(added == middle);
        else if (finite[d] && !(fabs((double)added - want) <= bound))
            fail_msg("%g is added instead of %g +- %g", (double)added, want, bound);
    }
}

static void check(round_case c)
{
    if (!formats[c.format].runs()) return;
    inputs in = make_inputs(&c);
    rounded x;
    memset(&x, 0, sizeof x);
    const char *error = formats[c.format].round(&x, &in.a);
    if (error) fail_msg("%s", error);
    check_queries(&c, &in, &x);
    for (int64_t g = 0; g < c.B * c.Hkv; g++) {
        const int64_t b = g / c.Hkv, h = g % c.Hkv, length = length_of(&c, b);
        if (!length) continue;
        check_centre(&c, &in, x.k_centre + g * c.D, in.k, in.a.k_stride, b, h);
        check_centre(&c, &in, x.v_middle + g * c.D, in.v, in.a.v_stride, b, h);
        check_value_scales(&c, &in, &x, g);
        check_added(&c, &in, &x, g);
        for (int64_t j = 0; j * c.block_k < length; j++) check_block(&c, &in, &x, g, j);
        for (int64_t j = (length + c.block_k - 1) / c.block_k;
             c.format != F16 && c.tail && j < x.nk_pad; j++)
            for (int64_t d = 0; d < c.D; d++)
                assert_true(value_at(&c, x.v_mean, x.nk_pad, g, j, d) == 0.0f);
    }
    free(x.memory);
    free(in.q);
    free(in.k);
    free(in.v);
    free(in.perm_q);
    free(in.perm_k);
}

/* All formats and both types; that of the sm90a kernel has neither D 64 nor blocks of 64 keys. */
static void check_all(round_case c)
{
    for (c.D = 64; c.D <= 128; c.D += 64)
        for (c.dtype = ESA_DTYPE_F16; c.dtype <= ESA_DTYPE_BF16; c.dtype++) {
            c.block_k = 128;
            c.format = E4M3;
            if (c.D == 128) check(c);
            for (c.format = E4M3_64; c.format <= F16; c.format++)
                for (c.block_k = 64; c.block_k <= 128; c.block_k += 64) check(c);
        }
}

/* ---------------------------------------------------------------- tests */

static void lengths(void **state)
{
    static const int64_t size[][2] = { { 1, 1 }, { 127, 130 }, { 128, 128 }, { 300, 520 } };
    (void)state;
    for (int i = 0; i < 4; i++)
        check_all((round_case){ .B = 1, .Hq = 2, .Hkv = 2, .Nq = size[i][0], .Nk = size[i][1] });
}

static void tails(void **state)
{
    (void)state;
    check_all(
        (round_case){ .B = 1, .Hq = 1, .Hkv = 1, .Nq = 5, .Nk = 333, .tail = ESA_TAIL_POOLED });
    for (int32_t fine = 4; fine <= 16; fine *= 2)
        check_all((round_case){ .B = 1,
                                .Hq = 1,
                                .Hkv = 1,
                                .Nq = 5,
                                .Nk = 407,
                                .tail = ESA_TAIL_LEVELS,
                                .fine = fine,
                                .centre = 3.0f });
}

/* Views that are not in pieces of 16 bytes, or have tokens before heads; orders; key lengths, among
 * them none; grouped heads; a centre. */
static void views_and_orders(void **state)
{
    static const int32_t kv_len[3] = { 250, 0, 129 };
    (void)state;
    for (int32_t views = 0; views < 3; views++)
        for (int32_t ordered = 0; ordered < 2; ordered++)
            check_all((round_case){ .B = 3,
                                    .Hq = 4,
                                    .Hkv = 2,
                                    .Nq = 140,
                                    .Nk = 260,
                                    .tail = views == 2 ? ESA_TAIL_LEVELS : ESA_TAIL_NONE,
                                    .fine = views == 2 ? 8 : 0,
                                    .views = views,
                                    .ordered = ordered,
                                    .kv_len = ordered ? NULL : kv_len,
                                    .centre = 2.0f });
}

/* Elements that are not finite. */
static void not_finite(void **state)
{
    static const float odd[] = { NAN, INFINITY, -INFINITY };
    (void)state;
    for (int i = 0; i < 3; i++)
        check_all((round_case){ .B = 1,
                                .Hq = 2,
                                .Hkv = 2,
                                .Nq = 200,
                                .Nk = 300,
                                .tail = ESA_TAIL_POOLED,
                                .odd = odd[i],
                                .odd_row = 131 });
}

/* A sample takes every second row of 9,000. Row 4,001 is not in it: a value far beyond the others
 * there, or one in a channel that is 0 elsewhere, makes all values of its head be rounded again. */
static void beyond_the_sample(void **state)
{
    (void)state;
    for (int kind = 0; kind < 5; kind++)
        check_all((round_case){ .B = 1,
                                .Hq = 2,
                                .Hkv = kind == 3 ? 2 : 1,
                                .Nq = 1,
                                .Nk = 9000,
                                .tail = kind == 2 ? ESA_TAIL_POOLED : ESA_TAIL_NONE,
                                .ordered = kind == 3,
                                .odd = kind == 0   ? 0.0f
                                       : kind == 4 ? 0.01f
                                                   : 6e4f,
                                .odd_row = 4001,
                                .quiet = kind == 4,
                                .centre = kind == 3 ? 1.0f : 0.0f });
}

static void times(void **state)
{
    static const struct {
        const char *name;
        int64_t H, N, D;
    } given[] = { { "720p", 12, 75600, 128 },
                  { "480p", 12, 32760, 128 },
                  { "CogVideoX", 48, 17776, 64 } };
    (void)state;
    if (!getenv("ESA_TEST_TIMES")) return;
    for (int format = E4M3; format < FORMATS; format++)
        for (int i = 0; i < 3; i++)
            for (int32_t tail = ESA_TAIL_NONE; tail <= ESA_TAIL_POOLED; tail++) {
                if (!formats[format].runs() || (format == E4M3 && given[i].D != 128)) continue;
                const int64_t nk = (given[i].N + RUN - 1) / RUN;
                const esa_attn_args a = { .dtype = ESA_DTYPE_BF16,
                                          .tail = tail,
                                          .block_q = RUN,
                                          .block_k = RUN,
                                          .B = 1,
                                          .Hq = given[i].H,
                                          .Hkv = given[i].H,
                                          .Nq = given[i].N,
                                          .Nk = given[i].N,
                                          .D = given[i].D,
                                          .nq = nk,
                                          .nk = nk };
                float ms[ROUNDING_STEPS + 1];
                const char *error = formats[format].times(ms, &a);
                if (error) fail_msg("%s", error);
                /* read in 16 bits, written in 8; f16 values in 16 */
                const double bytes = (double)(given[i].H * given[i].N * given[i].D) *
                                     (format == F16 ? 10.0 : 9.0);
                printf("%-9s %-10s%s: %.3f ms, %.2f TB/s; stats %.3f, centres %.3f, round %.3f, "
                       "again %.3f\n",
                       given[i].name, formats[format].name, tail ? " with means" : "",
                       (double)ms[ROUNDING_STEPS], bytes / (double)ms[ROUNDING_STEPS] * 1e-9,
                       (double)ms[0], (double)ms[1], (double)ms[2], (double)ms[3]);
                fflush(stdout);
            }
}

static int start(void **state)
{
    (void)state;
    printf("seed %llu\n", (unsigned long long)test_seed());
    for (int i = 0; i < FORMATS; i++)
        printf("%s: %s\n", formats[i].name, formats[i].runs() ? "tested" : "not on this GPU");
    return rounding_f16_runs() ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lengths),           cmocka_unit_test(tails),
        cmocka_unit_test(views_and_orders),  cmocka_unit_test(not_finite),
        cmocka_unit_test(beyond_the_sample), cmocka_unit_test(times),
    };
    return cmocka_run_group_tests(tests, start, NULL);
}
