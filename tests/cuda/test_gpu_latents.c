/* test_gpu_latents.c - patches, guidance, steps of the scheduler and their figures: the same bits
 * as plain C gives.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/tests.h"
#include "backend/backend.h"
#include "base/half.h"
#include "base/rng.h"
#include "common/naive.h"
#include "gpu_engine.h"

/* Values on the host, and a copy on the GPU. */
typedef struct array {
    float *host, *gpu;
    int64_t count;
} array;

static array array_new(int64_t count)
{
    array a = { .host = malloc((size_t)count * 4), .count = count };
    void *gpu;
    for (int64_t i = 0; i < count; i++) a.host[i] = 4 * esa_rng_unit(&rng) - 2;
    must(ctx, be->alloc(ctx, &gpu, count * 4));
    must(ctx, be->upload(ctx, gpu, a.host, count * 4));
    a.gpu = gpu;
    return a;
}

static void array_free(array *a)
{
    be->release(ctx, a->gpu, a->count * 4);
    free(a->host);
}

/* The copy on the GPU has the bits of the host's values. */
static void same(const array *a, const char *what)
{
    float *got = malloc((size_t)a->count * 4);
    must(ctx, be->download(ctx, got, a->gpu, a->count * 4));
    for (int64_t i = 0; i < a->count; i++)
        if (memcmp(&got[i], &a->host[i], 4))
            fail_msg("%s: element %lld is %.9g, expected %.9g", what, (long long)i, (double)got[i],
                     (double)a->host[i]);
    free(got);
}

/* ---------------------------------------------------------------- patches */

static int32_t *some_order(int64_t n)
{
    int32_t *perm = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) perm[i] = (int32_t)i;
    for (int64_t i = n - 1; i > 0; i--) {
        const uint32_t j = esa_rng_below(&rng, (uint32_t)i + 1);
        const int32_t kept = perm[i];
        perm[i] = perm[j];
        perm[j] = kept;
    }
    return perm;
}

/* Gathers, compares, scatters other channels back, and compares again. pad: of the rows. */
static void check_patches(const int32_t size[3], const int32_t patch[3], int32_t channels,
                          int32_t dtype, int64_t pad, int moved)
{
    const int64_t T = size[0], Hh = size[1], W = size[2];
    const int64_t pt = patch[0], ph = patch[1], pw = patch[2], volume = pt * ph * pw;
    const int64_t n = T / pt * (Hh / ph) * (W / pw), cols = volume * channels, ld = cols + pad;
    const int64_t element = esa_view_element(dtype), bytes = n * ld * element;
    array latent = array_new(channels * T * Hh * W);
    int32_t *perm = some_order(n);
    void *gpu_perm, *rows;
    uint8_t *got = malloc((size_t)bytes), *want = malloc((size_t)bytes);
    must(ctx, be->alloc(ctx, &gpu_perm, n * 4));
    must(ctx, be->upload(ctx, gpu_perm, perm, n * 4));
    must(ctx, be->alloc(ctx, &rows, bytes));
    memset(want, 0x55, (size_t)bytes); /* the padding must stay so */
    must(ctx, be->upload(ctx, rows, want, bytes));
    esa_patch_args args = { .rows = esa_view_of(rows, dtype, ESA_DEVICE_CUDA, n, cols),
                            .latent = latent.gpu,
                            .perm = moved ? gpu_perm : NULL,
                            .channels = channels,
                            .gather = 1,
                            .size = { size[0], size[1], size[2] },
                            .patch = { patch[0], patch[1], patch[2] } };
    args.rows.ld = ld;
    /* Loops over the latents, the other way round than the kernel. */
    for (int32_t back = 0; back < 2; back++) {
        args.gather = !back;
        must(ctx, be->latents->patches(ctx, &args));
        must(ctx, be->download(ctx, got, rows, bytes));
        for (int64_t i = 0; i < n; i++) {
            const int64_t token = moved ? perm[i] : i, gw = W / pw, gh = Hh / ph;
            for (int64_t c = 0; c < channels; c++)
                for (int64_t m = 0; m < volume; m++) {
                    const int64_t t = token / (gh * gw) * pt + m / (ph * pw),
                                  y = token / gw % gh * ph + m / pw % ph,
                                  x = token % gw * pw + m % pw;
                    float *value = latent.host + ((c * T + t) * Hh + y) * W + x;
                    uint8_t *at = want +
                                  (i * ld + (back ? m * channels + c : c * volume + m)) * element;
                    const uint16_t half = esa_f32_to_bf16(*value);
                    if (!back && dtype == ESA_DTYPE_F32) memcpy(at, value, 4);
                    if (!back && dtype == ESA_DTYPE_BF16) memcpy(at, &half, 2);
                    if (back && dtype == ESA_DTYPE_F32) memcpy(value, at, 4);
                    if (back && dtype == ESA_DTYPE_BF16) {
                        uint16_t kept;
                        memcpy(&kept, at, 2);
                        *value = esa_bf16_to_f32(kept);
                    }
                }
        }
        assert_memory_equal(got, want, bytes);
    }
    same(&latent, "latents from patches");
    be->release(ctx, gpu_perm, n * 4);
    be->release(ctx, rows, bytes);
    array_free(&latent);
    free(perm);
    free(got);
    free(want);
}

static void patches(void **state)
{
    static const int32_t size[][3] = { { 3, 8, 10 }, { 1, 2, 2 }, { 4, 6, 8 }, { 5, 30, 52 } };
    static const int32_t patch[][3] = { { 1, 2, 2 }, { 1, 2, 2 }, { 2, 3, 4 }, { 1, 1, 1 } };
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int n = 0; n < 4; n++)
            check_patches(size[i], patch[i], n % 2 ? 16 : 3, n < 2 ? ESA_DTYPE_F32 : ESA_DTYPE_BF16,
                          3 * (n % 2), (i + n) % 3 != 0);
}

/* ---------------------------------------------------------------- guidance and steps */

static void guidance(void **state)
{
    (void)state;
    for (int64_t count = 1; count < 200000; count = 7 * count + 3) {
        array v = array_new(count), negative = array_new(count);
        const float scale = 5.1f;
        must(ctx, be->latents->guide(ctx, v.gpu, negative.gpu, scale, count));
        for (int64_t i = 0; i < count; i++) {
            /* volatile: each operation is rounded by itself */
            volatile float difference = v.host[i] - negative.host[i], product = scale * difference;
            v.host[i] = negative.host[i] + product;
        }
        same(&v, "guidance");
        same(&negative, "the negative branch");
        array_free(&v);
        array_free(&negative);
    }
}

/* (keep x - pull m0) - pull rest, each operation rounded by itself. */
static float leap(float keep, float x, float pull, float m0, float rest)
{
    volatile float a = keep * x, b = pull * m0, c = pull * rest, d = a - b;
    return d - c;
}

static void unipc_reference(const esa_step_args *a, float *x, float *m0, float *m1, float *last,
                            const float *v)
{
    for (int64_t i = 0; i < a->count; i++) {
        volatile float moved = a->sigma * v[i], m = x[i] - moved, ahead = 0;
        if (a->correct) {
            volatile float old = 0, change = m - m0[i], share = a->rho2 * change;
            if (a->order[0] > 1) {
                volatile float slope = m1[i] - m0[i], quotient = slope / a->r[0];
                old = a->rho1 * quotient;
            }
            volatile float rest = old + share;
            x[i] = leap(a->keep[0], last[i], a->pull[0], m0[i], rest);
            m1[i] = m0[i];
        }
        m0[i] = m;
        last[i] = x[i];
        if (a->order[1] > 1) {
            volatile float slope = m1[i] - m0[i], quotient = slope / a->r[1];
            ahead = 0.5f * quotient;
        }
        x[i] = leap(a->keep[1], x[i], a->pull[1], m0[i], ahead);
    }
}

/* Steps of CogVideoX's schedulers: of order 1 and 2, with and without noise, with and without the
 * clean sample of the step before. */
static void mixes(array *x, array *m0, const array *v, const array *noise, int64_t count)
{
    for (int k = 0; k < 4; k++) {
        const esa_step_args a = { .x = x->gpu,
                                  .m0 = k ? m0->gpu : NULL,
                                  .v = v->gpu,
                                  .noise = k % 2 ? noise->gpu : NULL,
                                  .count = count,
                                  .kind = ESA_STEP_MIX,
                                  .order = { 0, k > 1 ? 2 : 1 },
                                  .sigma = 0.19f,
                                  .keep = { 0.83f, 0.71f },
                                  .pull = { 0.55f, -0.37f },
                                  .rho1 = 1.7f,
                                  .rho2 = 0.7f };
        must(ctx, be->latents->step(ctx, &a));
        for (int64_t i = 0; i < count; i++) {
            volatile float p = a.keep[0] * x->host[i], q = a.pull[0] * v->host[i], m = p - q, d = m;
            if (k > 1) {
                volatile float near = a.rho1 * m, far = a.rho2 * m0->host[i];
                d = near - far;
            }
            volatile float kept = a.keep[1] * x->host[i], pulled = a.pull[1] * d,
                           next = kept - pulled, more = a.sigma * noise->host[i];
            x->host[i] = k % 2 ? next + more : next;
            if (k) m0->host[i] = m;
        }
        same(x, "x after a mixed step");
        same(m0, "m0 after a mixed step");
    }
}

/* Several steps in a row, as UniPC takes them: order 1, then 2, then the last with order 1. */
static void steps(void **state)
{
    static const int32_t order[][3] = { { 0, 1, 1 }, { 1, 1, 2 }, { 1, 2, 2 }, { 1, 2, 1 } };
    (void)state;
    for (int64_t count = 1; count < 300000; count = 11 * count + 5) {
        array x = array_new(count), m0 = array_new(count), m1 = array_new(count),
              last = array_new(count), v = array_new(count);
        for (int i = 0; i < 4; i++) {
            const esa_step_args args = { .x = x.gpu,
                                         .m0 = m0.gpu,
                                         .m1 = m1.gpu,
                                         .last = last.gpu,
                                         .v = v.gpu,
                                         .count = count,
                                         .correct = order[i][0],
                                         .order = { order[i][1], order[i][2] },
                                         .sigma = 0.93f - 0.2f * (float)i,
                                         .keep = { 0.83f, 0.71f },
                                         .pull = { -0.21f, -0.37f },
                                         .r = { -1.3f, -0.8f },
                                         .rho1 = 0.11f,
                                         .rho2 = 0.47f };
            must(ctx, be->latents->step(ctx, &args));
            unipc_reference(&args, x.host, m0.host, m1.host, last.host, v.host);
            same(&x, "x after a step");
            same(&m0, "m0 after a step");
            same(&m1, "m1 after a step");
            same(&last, "last after a step");
        }
        const esa_step_args euler = {
            .x = x.gpu, .v = v.gpu, .count = count, .kind = ESA_STEP_EULER, .dt = -0.07f
        };
        must(ctx, be->latents->step(ctx, &euler));
        for (int64_t i = 0; i < count; i++) {
            volatile float product = euler.dt * v.host[i];
            x.host[i] += product;
        }
        same(&x, "x after a step of Euler");
        mixes(&x, &m0, &v, &last, count);
        array *const all[] = { &x, &m0, &m1, &last, &v };
        for (int i = 0; i < 5; i++) array_free(all[i]);
    }
}

/* ---------------------------------------------------------------- figures */

/* Sums in double differ only by their order: 1e-13 of the sum for a million terms. */
static void close_to(double got, double want, const char *what)
{
    if (!(fabs(got - want) <= 1e-12 * fabs(want)))
        fail_msg("%s is %.17g, expected %.17g", what, got, want);
}

static void check_figures(int64_t count, int before, int branches)
{
    array x = array_new(count), xb = array_new(count), v[2], vb[2];
    esa_step_figures got, again, want = { 0 };
    void *out;
    const int64_t bytes = (1 + ESA_STEP_PARTS) * (int64_t)sizeof got;
    for (int b = 0; b < 2; b++) {
        v[b] = array_new(count);
        vb[b] = array_new(count);
    }
    must(ctx, be->alloc(ctx, &out, bytes));
    esa_figures_args args = { .out = out, .x = x.gpu, .count = count };
    if (before) args.x_before = xb.gpu;
    for (int b = 0; b < branches; b++) {
        args.v[b] = v[b].gpu;
        if (before) args.v_before[b] = vb[b].gpu;
    }
    for (int64_t i = 0; i < count; i++) {
        if (before) want.x_change += fabs((double)x.host[i] - xb.host[i]);
        for (int b = 0; b < branches; b++) {
            want.v_size[b] += fabs((double)v[b].host[i]);
            if (before) want.v_change[b] += fabs((double)v[b].host[i] - vb[b].host[i]);
        }
    }
    must(ctx, be->latents->figures(ctx, &args));
    must(ctx, be->download(ctx, &got, out, sizeof got));
    assert_true(got.wrong == 0);
    close_to(got.x_change, want.x_change, "the change of x");
    for (int b = 0; b < 2; b++) {
        close_to(got.v_size[b], want.v_size[b], "the size of v");
        close_to(got.v_change[b], want.v_change[b], "the change of v");
    }
    must(ctx, be->latents->figures(ctx, &args));
    must(ctx, be->download(ctx, &again, out, sizeof again));
    assert_memory_equal(&got, &again, sizeof got);

    const float wrong[3] = { NAN, INFINITY, -INFINITY };
    const int64_t some = count < 3 ? count : 3;
    must(ctx, be->upload(ctx, x.gpu + count - some, wrong, some * 4));
    must(ctx, be->latents->figures(ctx, &args));
    must(ctx, be->download(ctx, &got, out, sizeof got));
    assert_true(got.wrong == (double)some);
    be->release(ctx, out, bytes);
    array_free(&x);
    array_free(&xb);
    for (int b = 0; b < 2; b++) {
        array_free(&v[b]);
        array_free(&vb[b]);
    }
}

static void figures(void **state)
{
    (void)state;
    for (int n = 0; n < 4; n++) {
        check_figures(1, n % 2, 1 + n / 2);
        check_figures(1000, n % 2, 1 + n / 2);
        check_figures(70001, n % 2, 1 + n / 2);
    }
}

static void modulation(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = { { 1, 6 }, { 2, 60 }, { 1, 6 * 1536 }, { 7, 5121 } };
    for (int n = 0; n < 4; n++) {
        const int64_t rows = sizes[n][0], cols = sizes[n][1];
        array e = array_new(rows * cols), table = array_new(rows * cols), add = array_new(cols);
        must(ctx, be->latents->modulate(ctx, e.gpu, table.gpu, add.gpu, rows, cols));
        for (int64_t i = 0; i < rows * cols; i++) e.host[i] = table.host[i] + add.host[i % cols];
        same(&e, "modulation");
        array_free(&e);
        array_free(&table);
        array_free(&add);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(patches), cmocka_unit_test(guidance),
                                        cmocka_unit_test(steps), cmocka_unit_test(figures),
                                        cmocka_unit_test(modulation) };
    return cmocka_run_group_tests(tests, engine_begin, engine_end);
}
