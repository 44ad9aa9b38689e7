/* test_conv.c - convolutions and the norm of pixels against loops that follow their definition in
 * double.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/case_run.h"
#include "nn/any_set.h"
#include "nn/nn.h"

static uint32_t state = 1;
static float draw(void) /* in [-1, 1) */
{
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state / 2147483648.0f;
}

typedef struct conv_case {
    int32_t kt, kh, kw, cin, cout, height, width, up2, frames, residual;
} conv_case;

/* Planes have a border of one pixel; with fewer than kt frames the oldest are absent. Returns y in
 * a new block of count floats. */
static float *run_case(const conv_case *t, int32_t threads, int32_t level, int32_t bf16,
                       float *worst, int64_t *count)
{
    esa_ctx *ctx = any_set_ctx(threads, level);
    if (!ctx) return NULL;
    esa_nn nn;
    esa_nn_init(&nn, ctx);
    if (bf16 && esa_nn_use_dtype(&nn, ESA_DTYPE_BF16) != ESA_OK) {
        esa_ctx_free(ctx);
        return NULL;
    }
    state = 7;
    const int64_t taps = (int64_t)t->kt * t->kh * t->kw,
                  plane = (int64_t)(t->height + 2) * (t->width + 2) * t->cin;
    const int64_t H = t->up2 ? 2 * t->height : t->height, W = t->up2 ? 2 * t->width : t->width,
                  n = H * W * t->cout;
    float *w = malloc((size_t)(4 * t->cout * t->cin * taps)), *bias = malloc((size_t)(4 * t->cout)),
          *x = calloc((size_t)(t->kt * plane), 4);
    float *y = malloc((size_t)(4 * n)), *res = malloc((size_t)(4 * n));
    for (int64_t i = 0; i < t->cout * t->cin * taps; i++) w[i] = draw();
    for (int64_t i = 0; i < t->cout; i++) bias[i] = draw();
    for (int64_t i = 0; i < n; i++) y[i] = res[i] = draw();
    const float *frame[3] = { NULL, NULL, NULL };
    const int64_t row = (int64_t)(t->width + 2) * t->cin;
    for (int32_t f = t->kt - t->frames; f < t->kt; f++) {
        frame[f] = x + f * plane + row + t->cin;
        for (int64_t r = 0; r < t->height; r++)
            for (int64_t i = 0; i < t->width * t->cin; i++)
                x[f * plane + (r + 1) * row + t->cin + i] = draw();
    }
    const esa_weight weight =
        t->kt == 1
            ? (esa_weight){ w, ESA_DTYPE_F32, 4, { t->cout, t->cin, t->kh, t->kw }, NULL, 0, 0 }
            : (esa_weight){ w, ESA_DTYPE_F32, 5, { t->cout, t->cin, t->kt, t->kh, t->kw }, NULL, 0,
                            0 };
    const esa_weight b = { bias, ESA_DTYPE_F32, 1, { t->cout }, NULL, 0, 0 };
    esa_conv conv;
    assert_int_equal(esa_nn_conv_pack(&nn, &conv, &weight, &b, t->up2), ESA_OK);
    assert_int_equal(esa_nn_conv(&nn, &conv, y, W * t->cout, frame, row, t->height, t->width,
                                 t->residual ? y : NULL, W * t->cout),
                     ESA_OK);

    float scale = 1;
    *worst = 0;
    for (int64_t r = 0; r < H; r++)
        for (int64_t q = 0; q < W; q++)
            for (int64_t o = 0; o < t->cout; o++) {
                double sum = bias[o];
                for (int64_t a = 0; a < t->kt; a++)
                    for (int64_t u = 0; u < t->kh; u++)
                        for (int64_t v = 0; v < t->kw; v++) {
                            int64_t rr = r + u - t->kh / 2, qq = q + v - t->kw / 2;
                            if (!frame[a] || rr < 0 || qq < 0 || rr >= H || qq >= W) continue;
                            if (t->up2) {
                                rr /= 2;
                                qq /= 2;
                            }
                            for (int64_t c = 0; c < t->cin; c++)
                                sum += (double)
                                           w[(((o * t->cin + c) * t->kt + a) * t->kh + u) * t->kw +
                                             v] *
                                       frame[a][rr * row + qq * t->cin + c];
                        }
                const int64_t at = (r * W + q) * t->cout + o;
                if (t->residual) sum += res[at];
                *worst = fmaxf(*worst, fabsf(y[at] - (float)sum));
                scale = fmaxf(scale, fabsf((float)sum));
            }
    *worst /= scale;
    esa_nn_conv_free(&nn, &conv);
    assert_int_equal(nn.held, nn.scratch_bytes);
    esa_nn_close(&nn);
    esa_ctx_free(ctx);
    free(w);
    free(bias);
    free(x);
    free(res);
    *count = n;
    return y;
}

static const struct {
    const char *name;
    conv_case c;
} cases[] = {
#define CONV_CASE(name, ...) { name, { __VA_ARGS__ } },
#include "cases/engine.def"
};

static void matches_definition(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (!case_begin(cases[i].name, 1)) continue;
        for (int32_t each = 0; each < 2 * ANY_SETS; each++) {
            const int32_t level = each / 2, bf16 = each % 2;
            float worst;
            int64_t n;
            float *y = run_case(&cases[i].c, 2, level, bf16, &worst, &n);
            if (!y) continue; /* not a level of this machine */
            /* Relative to the largest value: chains of up to 5400 f32 sums round by 6e-8 each,
             * partly up, partly down: 4e-6 is seen. In bf16 pixels and weights are rounded to 2^-9
             * of themselves, which a sum of many partly evens out: 3e-3 is seen. */
            if (worst > (bf16 ? 1e-2f : 1e-5f))
                fail_msg("level %d, bf16 %d: off by %g", (int)level, (int)bf16, (double)worst);
            free(y);
        }
        case_end(0);
    }
    cases_done("conv/");
}

static void same_bits_for_any_threads(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (!case_begin(cases[i].name, 1)) continue;
        float worst;
        int64_t n;
        for (int32_t bf16 = 0; bf16 < 2; bf16++) {
            float *one = run_case(&cases[i].c, 1, 0, bf16, &worst, &n),
                  *three = run_case(&cases[i].c, 3, 0, bf16, &worst, &n);
            if (one) assert_memory_equal(one, three, (size_t)(4 * n));
            free(one);
            free(three);
        }
        case_end(0);
    }
    cases_done("conv/");
}

static void pixel_norm(void **unused)
{
    (void)unused;
    esa_ctx *ctx = any_set_ctx(2, ANY_SET_BEST);
    esa_nn nn;
    esa_nn_init(&nn, ctx);
    enum { H = 3, W = 5, C = 24 };
    float x[H * W * C], y[(H + 2) * (W + 2) * C] = { 0 }, gamma[C];
    for (int i = 0; i < H * W * C; i++) x[i] = 3 * draw();
    for (int i = 0; i < C; i++) gamma[i] = draw();
    memset(x + 7 * C, 0, C * 4); /* a pixel of zeros stays zero */
    esa_nn_pixel_norm(&nn, y + (W + 3) * C, (W + 2) * C, x, W * C, H, W, C, gamma, ESA_ACT_SILU);
    for (int r = -1; r <= H; r++)
        for (int q = -1; q <= W; q++) {
            const int inside = r >= 0 && q >= 0 && r < H && q < W;
            double norm = 0;
            for (int c = 0; inside && c < C; c++) norm += pow(x[(r * W + q) * C + c], 2);
            for (int c = 0; c < C; c++) {
                const double u = inside ? x[(r * W + q) * C + c] / fmax(sqrt(norm), 1e-12) *
                                              sqrt(C) * gamma[c]
                                        : 0;
                /* values up to 4: a few ulp */
                assert_true(fabs(y[((r + 1) * (W + 2) + q + 1) * C + c] - u / (1 + exp(-u))) <
                            1e-6);
            }
        }
    esa_nn_close(&nn);
    esa_ctx_free(ctx);
}

int main(void)
{
    static const struct CMUnitTest tests[] = { CASES(matches_definition),
                                               CASES(same_bits_for_any_threads),
                                               cmocka_unit_test(pixel_norm) };
    return RUN_CASES(tests, NULL, NULL);
}
