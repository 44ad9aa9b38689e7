/* test_nn.c - the operations of src/nn against their formulas in double, in every instruction set,
 * at odd sizes, pitches and thread counts.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"
#include <math.h>
#include "model/fill.h"
#include "nn/leaf.h"
#include "nn/nn.h"

/* Rounding in f32: a sum of n products is off by about sqrt(n) 2^-24 of the sum of magnitudes. All
 * values are near 1 and n <= 700, so 1e-6 of that sum is generous, and a wrong index is far above
 * it. */
#define TOLERANCE 1e-6

static esa_ctx *ctx[2]; /* 1 and 3 threads */
static esa_nn nn[2];

static float *room(int64_t count)
{
    float *p = malloc((size_t)(count + 1) * 4);
    assert_non_null(p);
    p[count] = 12345.0f; /* a guard */
    return p;
}

static float *made(const char *name, int64_t count)
{
    float *p = room(count);
    fill_tensor(p, count, name, 1, 0);
    return p;
}

static void drop(float *p, int64_t count)
{
    assert_true(p[count] == 12345.0f);
    free(p);
}

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
}
static double silu(double x) { return x / (1 + exp(-x)); }

/* ---------------------------------------------------------------- rows, in every instruction set
 * of this machine */

static const esa_nn_leaf *leaf_of(int32_t i)
{
    static const int32_t level[] = { ESA_CPU_REF, ESA_CPU_AVX2, ESA_CPU_AVX512 };
    if (i == 0) return &esa_nn_leaf_plain;
    return i < 3 && (esa_cpu_detect() >> level[i] & 1) ? esa_nn_leaf_get(level[i]) : NULL;
}

static void norms(void **state)
{
    (void)state;
    static const int64_t size[] = { 1, 2, 15, 16, 17, 64, 255, 700 };
    for (int32_t l = 0; l < 3; l++) {
        const esa_nn_leaf *leaf = leaf_of(l);
        if (!leaf) continue;
        for (size_t s = 0; s < sizeof size / sizeof *size; s++) {
            const int64_t n = size[s];
            float *x = made("x", n), *w = made("w", n), *b = made("b", n), *scale = made("s", n),
                  *shift = made("t", n), *y = room(n), *z = made("x", n);
            double mean = 0, var = 0, square = 0;
            for (int64_t i = 0; i < n; i++) {
                mean += (double)x[i] / (double)n;
                square += (double)x[i] * (double)x[i] / (double)n;
            }
            for (int64_t i = 0; i < n; i++)
                var += ((double)x[i] - mean) * ((double)x[i] - mean) / (double)n;
            leaf->layer_norm(y, x, n, 1e-2f, w, b, scale, shift);
            leaf->layer_norm(z, z, n, 1e-2f, w, b, scale, shift);
            for (int64_t i = 0; i < n; i++) {
                const double want = ((((double)x[i] - mean) / sqrt(var + 1e-2)) * (double)w[i] +
                                     (double)b[i]) *
                                        (1 + (double)scale[i]) +
                                    (double)shift[i];
                assert_true(fabs((double)y[i] - want) < 20 * TOLERANCE && y[i] == z[i]);
            }
            leaf->layer_norm(y, x, n, 1e-2f, NULL, NULL, NULL, NULL);
            for (int64_t i = 0; i < n; i++)
                assert_true(fabs((double)y[i] - ((double)x[i] - mean) / sqrt(var + 1e-2)) <
                            10 * TOLERANCE);
            leaf->rms_norm(y, x, n, 1e-3f, w);
            for (int64_t i = 0; i < n; i++)
                assert_true(fabs((double)y[i] - (double)x[i] / sqrt(square + 1e-3) * (double)w[i]) <
                            10 * TOLERANCE);
            leaf->rms_norm(y, x, n, 1e-3f, NULL);
            for (int64_t i = 0; i < n; i++)
                assert_true(fabs((double)y[i] - (double)x[i] / sqrt(square + 1e-3)) <
                            10 * TOLERANCE);
            drop(x, n);
            drop(w, n);
            drop(b, n);
            drop(scale, n);
            drop(shift, n);
            drop(y, n);
            drop(z, n);
        }
    }
}

static void activations(void **state)
{
    (void)state;
    enum { N = 4003 };
    float *x = room(N), *y = room(N), *u = made("u", N);
    for (int32_t i = 0; i < N; i++) x[i] = ((float)i - 2001.5f) / 40.0f;
    x[0] = -1e30f;
    x[1] = 1e30f;
    x[2] = -INFINITY;
    x[3] = INFINITY;
    x[4] = NAN;
    x[5] = -0.0f;
    x[6] = 1e-30f;
    for (int32_t l = 0; l < 3; l++) {
        const esa_nn_leaf *leaf = leaf_of(l);
        if (!leaf) continue;
        leaf->silu(y, x, N);
        for (int32_t i = 5; i < N; i++)
            assert_true(fabs((double)y[i] - silu((double)x[i])) <= 4e-7 * fabs((double)x[i]));
        assert_true(y[0] == 0 && y[1] == 1e30f && isinf(y[3]) && isnan(y[4]));
        leaf->gelu_tanh(y, x, N);
        /* 2 ulp of e^z, z up to 90 whose own rounding is 2^-24 z: 6e-6 relative where the result is
         * 1e-30 of x, less elsewhere */
        for (int32_t i = 5; i < N; i++)
            assert_true(fabs((double)y[i] - gelu((double)x[i])) <=
                        1e-6 * fabs((double)x[i]) + 1e-30);
        assert_true(y[1] == 1e30f && isinf(y[3]) && isnan(y[4]));
        leaf->geglu(y, x, u, N);
        for (int32_t i = 5; i < N; i++)
            assert_true(fabs((double)y[i] - gelu((double)x[i]) * (double)u[i]) <=
                        1e-6 * fabs((double)x[i]) + 1e-30);
    }
    drop(x, N);
    drop(y, N);
    drop(u, N);
}

static void halves(void **state)
{
    (void)state;
    enum { N = 65536 };
    uint16_t *h = malloc(N * 2), *back = malloc(N * 2);
    float *y = room(N);
    assert_true(h && back);
    for (int32_t i = 0; i < N; i++) h[i] = (uint16_t)i;
    for (int32_t l = 0; l < 3; l++) {
        const esa_nn_leaf *leaf = leaf_of(l);
        if (!leaf) continue;
        leaf->from_f16(y, h, N);
        for (int32_t i = 0; i < N; i++) {
            const float want = esa_f16_to_f32(h[i]);
            assert_true(isnan(want) ? isnan(y[i]) : memcmp(&want, &y[i], 4) == 0);
        }
        leaf->from_bf16(y, h, N);
        leaf->to_bf16(back, y, N);
        for (int32_t i = 0; i < N; i++) assert_true(isnan(y[i]) || back[i] == h[i]);
    }
    free(h);
    free(back);
    drop(y, N);
}

static void rotation(void **state)
{
    (void)state;
    static const int32_t grid[3] = { 3, 2, 4 };
    enum { TOKENS = 24, H = 3, D = 20 }; /* D / 6 = 3: axes of 8, 6, 6 */
    int32_t perm[TOKENS];
    for (int32_t i = 0; i < TOKENS; i++) perm[i] = (i * 7 + 3) % TOKENS;
    float *c = room(TOKENS * D / 2), *s = room(TOKENS * D / 2), *x = made("x", TOKENS * H * D),
          *start = made("x", TOKENS * H * D);
    esa_rope_table(c, s, grid, perm, D, 10000.0);
    esa_nn_rope(&nn[1], x, H * D, TOKENS, H, D, c, s);
    for (int32_t p = 0; p < TOKENS; p++)
        for (int32_t h = 0; h < H; h++)
            for (int32_t i = 0; i < D / 2; i++) {
                const int32_t at[3] = { perm[p] / 8, perm[p] / 4 % 2, perm[p] % 4 },
                              axis = i < 4   ? 0
                                     : i < 7 ? 1
                                             : 2;
                const int32_t dim = axis == 0 ? 8 : 6, j = axis == 0   ? i
                                                           : axis == 1 ? i - 4
                                                                       : i - 7;
                const double angle = at[axis] * pow(10000.0, -2.0 * j / dim);
                const int64_t k = (p * H + h) * D + 2 * i;
                const double a = (double)start[k], b = (double)start[k + 1];
                assert_true(fabs((double)x[k] - (a * cos(angle) - b * sin(angle))) < TOLERANCE);
                assert_true(fabs((double)x[k + 1] - (a * sin(angle) + b * cos(angle))) < TOLERANCE);
            }
    drop(c, TOKENS * D / 2);
    drop(s, TOKENS * D / 2);
    drop(x, TOKENS * H * D);
    drop(start, TOKENS * H * D);
    float wave[8];
    esa_timestep_sinusoid(wave, 8, 500);
    for (int32_t j = 0; j < 4; j++) { /* f32 angles: 500 * 2^-24 */
        assert_true(fabs((double)wave[j] - cos(500 * pow(10000.0, -j / 4.0))) < 5e-5);
        assert_true(fabs((double)wave[4 + j] - sin(500 * pow(10000.0, -j / 4.0))) < 5e-5);
    }
}

/* ---------------------------------------------------------------- attention */

static void attention_case(int64_t Nq, int64_t Nk, int64_t H, int64_t D, int32_t key,
                           int32_t distance)
{
    const int64_t ld = H * D + 2, span = Nq + Nk;
    float *q = made("q", Nq * ld), *k = made("k", Nk * ld), *v = made("v", Nk * ld),
          *bias = made("bias", Nk), *far = made("far", H * span);
    if (key) bias[Nk - 1] = -INFINITY;
    if (key == 2)
        for (int64_t j = 0; j < Nk; j++) bias[j] = -INFINITY;
    const esa_nn_bias b = { key ? bias : NULL, distance ? far : NULL, span, Nq };
    float *o[2];
    for (int32_t t = 0; t < 2; t++) {
        o[t] = room(Nq * ld);
        memset(o[t], 0, (size_t)(Nq * ld) * 4);
        assert_int_equal(
            esa_nn_attention(&nn[t], o[t], ld, q, ld, k, ld, v, ld, Nq, Nk, H, H, D, 0.7f, &b),
            ESA_OK);
    }
    assert_memory_equal(o[0], o[1], (size_t)(Nq * ld) * 4);
    double *p = malloc((size_t)Nk * sizeof *p);
    assert_non_null(p);
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < Nq; i++) {
            double top = -INFINITY, sum = 0;
            for (int64_t j = 0; j < Nk; j++) {
                p[j] = 0;
                for (int64_t d = 0; d < D; d++)
                    p[j] += (double)q[i * ld + h * D + d] * (double)k[j * ld + h * D + d];
                p[j] = p[j] * (double)0.7f + (key ? (double)bias[j] : 0) +
                       (distance ? (double)far[h * span + j - i + Nq] : 0);
                top = fmax(top, p[j]);
            }
            for (int64_t j = 0; j < Nk; j++) sum += p[j] = isinf(top) ? 0 : exp(p[j] - top);
            for (int64_t d = 0; d < D; d++) {
                double want = 0;
                for (int64_t j = 0; j < Nk; j++)
                    want += sum > 0 ? p[j] / sum * (double)v[j * ld + h * D + d] : 0;
                /* scores up to 20: their rounding is 20 * 2^-24 */
                assert_true(fabs((double)o[0][i * ld + h * D + d] - want) < 20 * TOLERANCE);
            }
        }
    free(p);
    for (int32_t t = 0; t < 2; t++) drop(o[t], Nq * ld);
    drop(q, Nq * ld);
    drop(k, Nk * ld);
    drop(v, Nk * ld);
    drop(bias, Nk);
    drop(far, H * span);
}

static void attention(void **state)
{
    (void)state;
    attention_case(1, 1, 1, 1, 0, 0);
    attention_case(130, 37, 3, 12, 1, 0);
    attention_case(64, 64, 2, 16, 1, 1);
    attention_case(150, 200, 1, 300, 0, 1);
    attention_case(33, 600, 1, 5, 1, 1); /* several blocks of keys */
    attention_case(5, 4, 2, 8, 2, 0);    /* no key at all: zeros */
}

/* c equal keys, and one that counts c times. */
static void folding(void **state)
{
    (void)state;
    enum { NQ = 20, NK = 12, SAME = 7, D = 16 };
    float *q = made("q", NQ * D), *k = made("k", NK * D), *v = made("v", NK * D),
          *all = room(NQ * D), *folded = room(NQ * D), bias[NK] = { 0 };
    for (int32_t j = NK - SAME; j < NK; j++) {
        memcpy(k + j * D, k + (NK - 1) * D, D * 4);
        memcpy(v + j * D, v + (NK - 1) * D, D * 4);
    }
    bias[NK - SAME] = logf(SAME);
    const esa_nn_bias b = { .key = bias };
    assert_int_equal(esa_nn_attention(&nn[0], all, D, q, D, k, D, v, D, NQ, NK, 1, 1, D, 1, NULL),
                     ESA_OK);
    assert_int_equal(
        esa_nn_attention(&nn[0], folded, D, q, D, k, D, v, D, NQ, NK - SAME + 1, 1, 1, D, 1, &b),
        ESA_OK);
    for (int32_t i = 0; i < NQ * D; i++)
        assert_true(fabs((double)all[i] - (double)folded[i]) < 10 * TOLERANCE);
    drop(q, NQ * D);
    drop(k, NK * D);
    drop(v, NK * D);
    drop(all, NQ * D);
    drop(folded, NQ * D);
}

/* Attention on every set of kernels of this machine. */
static void attention_levels(void **state)
{
    (void)state;
    esa_ctx *const best[2] = { ctx[0], ctx[1] };
    for (int32_t level = ESA_CPU_REF; level <= ESA_CPU_NEON; level++) {
        esa_ctx_params p = esa_ctx_params_default();
        esa_ctx *other[2] = { NULL, NULL };
        p.cpu_level = level;
        for (int32_t i = 0; i < 2; i++) {
            p.threads = 1 + 2 * i;
            if (esa_ctx_create(&other[i], &p) == ESA_OK) nn[i].ctx = other[i];
        }
        if (other[0] && other[1]) attention(state);
        for (int32_t i = 0; i < 2; i++) {
            esa_nn_close(&nn[i]);
            esa_ctx_free(other[i]);
            esa_nn_init(&nn[i], best[i]);
        }
    }
}

int main(void)
{
    for (int32_t i = 0; i < 2; i++) {
        esa_ctx_params p = esa_ctx_params_default();
        p.threads = 1 + 2 * i;
        if (esa_ctx_create(&ctx[i], &p) != ESA_OK) return 1;
        esa_nn_init(&nn[i], ctx[i]);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms),     cmocka_unit_test(activations),
        cmocka_unit_test(halves),    cmocka_unit_test(rotation),
        cmocka_unit_test(attention), cmocka_unit_test(attention_levels),
        cmocka_unit_test(folding),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    for (int32_t i = 0; i < 2; i++) {
        esa_nn_close(&nn[i]);
        esa_ctx_free(ctx[i]);
    }
    return failed;
}
