/* joint_cases.h - operations of joint transformers, text encoders with causal attention and
 * decoders with group norms, against their definitions, on any device.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_NN_JOINT_CASES_H
#define ESA_TESTS_NN_JOINT_CASES_H

#include "common/naive.h"
#include "io/scratch.h"
#include <math.h>
#include <stdlib.h>
#include "base/rng.h"
#include "nn/ops.h"

typedef struct joint {
    esa_ctx *ctx;
    esa_nn nn;
    esa_rng rng;
    double half; /* what rounding to the device's type may change, relative */
} joint;

static inline void joint_ok(joint *j, esa_status status)
{
    if (status) print_error("%s: %s\n", esa_status_name(status), esa_ctx_error(j->ctx));
    assert_int_equal(status, ESA_OK);
}

static inline joint joint_open(int32_t device)
{
    joint j = { .rng = { test_seed() } };
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 3;
    assert_int_equal(esa_ctx_create(&j.ctx, &p), ESA_OK);
    esa_nn_init(&j.nn, j.ctx);
    joint_ok(&j, esa_nn_use(&j.nn, device));
    j.half = j.nn.ops->dtype == ESA_DTYPE_BF16 ? 0x1.02p-8 : 2e-6;
    print_message("seed %llu\n", (unsigned long long)test_seed());
    return j;
}

static inline void joint_close(joint *j)
{
    assert_int_equal(j->nn.held, j->nn.scratch_bytes);
    esa_nn_close(&j->nn);
    esa_ctx_free(j->ctx);
}

/* A matrix on the device with its values as the device rounds them. */
typedef struct matrix {
    esa_view view;
    float *value;
    int64_t bytes;
} matrix;

static inline matrix matrix_of(joint *j, int32_t dtype, int64_t rows, int64_t cols, float size)
{
    matrix m = { .view = esa_view_of(NULL, dtype, j->nn.be->device, rows, cols),
                 .bytes = rows * cols * esa_view_element(dtype) };
    joint_ok(j, esa_nn_alloc(&j->nn, &m.view.data, m.bytes, "a matrix"));
    m.value = malloc((size_t)(rows * cols) * 4);
    for (int64_t i = 0; i < rows * cols; i++) {
        m.value[i] = size * (2 * esa_rng_unit(&j->rng) - 1);
        if (dtype == ESA_DTYPE_BF16) m.value[i] = esa_bf16_to_f32(esa_f32_to_bf16(m.value[i]));
    }
    joint_ok(j, esa_nn_write(&j->nn, &m.view, m.value));
    return m;
}

static inline void matrix_drop(joint *j, matrix *m)
{
    esa_nn_free(&j->nn, m->view.data, m->bytes);
    free(m->value);
}

static inline void matrix_compare(joint *j, const matrix *m, const double *want, double allowed,
                                  const char *what)
{
    const int64_t n = m->view.rows * m->view.cols;
    float *got = malloc((size_t)n * 4);
    joint_ok(j, esa_nn_read(&j->nn, got, &m->view));
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) <= j->half * fabs(want[i]) + allowed))
            fail_msg("%s: element %lld is %.8g, expected %.8g", what, (long long)i, (double)got[i],
                     want[i]);
    free(got);
}

/* ---------------------------------------------------------------- norms of heads */

static inline void want_heads(double *x, int64_t heads, int64_t D, const esa_qk_args *a,
                              const float *weight, const float *bias, const float *cos,
                              const float *sin)
{
    for (int64_t h = 0; h < heads; h++, x += D) {
        double mean = 0, squares = 0;
        for (int64_t i = 0; i < D && a->norm == ESA_QK_HEAD_LAYER; i++) mean += x[i] / (double)D;
        for (int64_t i = 0; i < D; i++) squares += (x[i] - mean) * (x[i] - mean) / (double)D;
        for (int64_t i = 0; i < D && a->norm != ESA_QK_NONE; i++)
            x[i] = (x[i] - mean) / sqrt(squares + (double)a->eps) * (double)weight[i] +
                   (a->norm == ESA_QK_HEAD_LAYER ? (double)bias[i] : 0);
        for (int64_t i = 0; i < D / 2 && a->cos; i++) {
            double *one = x + (a->halves ? i : 2 * i),
                   *two = x + (a->halves ? i + D / 2 : 2 * i + 1);
            const double p = *one, q = *two, c = (double)cos[i], s = (double)sin[i];
            *one = p * c - q * s;
            *two = p * s + q * c;
        }
    }
}

static inline void check_heads(joint *j, int64_t rows, int64_t hq, int64_t hk, int64_t D,
                               int32_t norm, int32_t halves, int32_t turned)
{
    const int64_t heads[2] = { hq, hk };
    matrix x[2] = { matrix_of(j, j->nn.ops->dtype, rows, hq * D, 2),
                    matrix_of(j, j->nn.ops->dtype, rows, hk * D, 2) };
    matrix v[4], cs[2];
    for (int i = 0; i < 4; i++) v[i] = matrix_of(j, ESA_DTYPE_F32, 1, D, 1);
    for (int i = 0; i < 2; i++) cs[i] = matrix_of(j, ESA_DTYPE_F32, rows, D / 2, 1);
    const esa_qk_args args = { .q = x[0].view,
                               .k = x[1].view,
                               .q_weight = v[0].view.data,
                               .k_weight = v[1].view.data,
                               .q_bias = v[2].view.data,
                               .k_bias = v[3].view.data,
                               .cos = turned ? cs[0].view.data : NULL,
                               .sin = turned ? cs[1].view.data : NULL,
                               .D = D,
                               .eps = 1e-5f,
                               .norm = norm,
                               .halves = halves };
    joint_ok(j, j->nn.ops->qk(&j->nn, &args));
    for (int i = 0; i < 2; i++) {
        const int64_t n = heads[i] * D;
        double *want = malloc((size_t)(rows * n) * 8);
        for (int64_t k = 0; k < rows * n; k++) want[k] = (double)x[i].value[k];
        for (int64_t r = 0; r < rows; r++)
            want_heads(want + r * n, heads[i], D, &args, v[i].value, v[2 + i].value,
                       cs[0].value + r * (D / 2), cs[1].value + r * (D / 2));
        matrix_compare(j, &x[i], want, 2e-6, "norm of heads");
        free(want);
        matrix_drop(j, &x[i]);
    }
    for (int i = 0; i < 4; i++) matrix_drop(j, &v[i]);
    for (int i = 0; i < 2; i++) matrix_drop(j, &cs[i]);
}

static inline void heads_everywhere(int32_t device)
{
    joint j = joint_open(device);
    static const int64_t size[][4] = { { 5, 24, 24, 128 }, { 3, 2, 2, 12 },   { 7, 4, 2, 64 },
                                       { 2, 3, 1, 20 },    { 1, 32, 8, 128 }, { 4, 2, 2, 256 } };
    for (int i = 0; i < 6; i++)
        for (int32_t norm = ESA_QK_HEAD_RMS; norm <= ESA_QK_NONE; norm++)
            for (int32_t halves = 0; halves < 2; halves++)
                check_heads(&j, size[i][0], size[i][1], size[i][2], size[i][3], norm, halves,
                            norm == ESA_QK_NONE || (i + halves) % 2);
    joint_close(&j);
}

/* ---------------------------------------------------------------- causal attention with few keys
 */

static inline void causal_everywhere(int32_t device)
{
    joint j = joint_open(device);
    enum { N = 37, HEADS = 6, KV = 2, D = 16 };
    const int32_t type = j.nn.ops->dtype;
    matrix q = matrix_of(&j, type, N, HEADS * D, 2), k = matrix_of(&j, type, N, KV * D, 2),
           v = matrix_of(&j, type, N, KV * D, 1), o = matrix_of(&j, type, N, HEADS * D, 1),
           bias = matrix_of(&j, ESA_DTYPE_F32, 1, 2 * N - 1, 1);
    for (int i = 0; i < 2 * N - 1; i++) bias.value[i] = i < N ? 0 : -INFINITY;
    joint_ok(&j, esa_nn_write(&j.nn, &bias.view, bias.value));
    const esa_biased_args args = { .o = o.view,
                                   .q = q.view,
                                   .k = k.view,
                                   .v = v.view,
                                   .heads = HEADS,
                                   .kv_heads = KV,
                                   .D = D,
                                   .scale = 0.25f,
                                   .distance = bias.view.data,
                                   .center = N - 1 };
    joint_ok(&j, j.nn.ops->biased(&j.nn, &args));
    static double want[N * HEADS * D];
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < N; i++) {
            const int from = h / (HEADS / KV) * D;
            double weight[N], sum = 0;
            for (int t = 0; t <= i; t++) {
                double s = 0;
                for (int d = 0; d < D; d++)
                    s += (double)q.value[i * HEADS * D + h * D + d] *
                         (double)k.value[t * KV * D + from + d];
                weight[t] = exp(0.25 * s);
                sum += weight[t];
            }
            for (int d = 0; d < D; d++) {
                double x = 0;
                for (int t = 0; t <= i; t++)
                    x += weight[t] * (double)v.value[t * KV * D + from + d];
                want[(i * HEADS + h) * D + d] = x / sum;
            }
        }
    /* weights are rounded to the device's type before they meet the values, which are at most 1 */
    matrix_compare(&j, &o, want, j.half, "causal attention with shared keys");
    matrix *const all[] = { &q, &k, &v, &o, &bias };
    for (int i = 0; i < 5; i++) matrix_drop(&j, all[i]);
    joint_close(&j);
}

/* ---------------------------------------------------------------- rows */

static inline void quick_gelu_everywhere(int32_t device)
{
    joint j = joint_open(device);
    matrix x = matrix_of(&j, j.nn.ops->dtype, 5, 72, 4),
           y = matrix_of(&j, j.nn.ops->dtype, 5, 72, 1);
    const esa_act_args args = { .y = y.view, .x = x.view, .act = ESA_ACT_QUICK_GELU };
    joint_ok(&j, j.nn.ops->act(&j.nn, &args));
    double want[5 * 72];
    for (int i = 0; i < 5 * 72; i++)
        want[i] = (double)x.value[i] / (1 + exp(-1.702 * (double)x.value[i]));
    matrix_compare(&j, &y, want, 2e-6, "quick GELU");
    matrix_drop(&j, &x);
    matrix_drop(&j, &y);
    joint_close(&j);
}

static inline void gelu_everywhere(int32_t device)
{
    joint j = joint_open(device);
    matrix x = matrix_of(&j, j.nn.ops->dtype, 5, 72, 4),
           y = matrix_of(&j, j.nn.ops->dtype, 5, 72, 1);
    const esa_act_args args = { .y = y.view, .x = x.view, .act = ESA_ACT_GELU };
    joint_ok(&j, j.nn.ops->act(&j.nn, &args));
    double want[5 * 72];
    for (int i = 0; i < 5 * 72; i++)
        want[i] = 0.5 * (double)x.value[i] * (1 + erf((double)x.value[i] / sqrt(2.0)));
    matrix_compare(&j, &y, want, 2e-6, "GELU");
    matrix_drop(&j, &x);
    matrix_drop(&j, &y);
    joint_close(&j);
}

static inline void channels_first_everywhere(int32_t device)
{
    joint j = joint_open(device);
    enum { C = 3, T = 2, H = 4, W = 6, P = 4 };
    matrix rows = matrix_of(&j, ESA_DTYPE_F32, T * H * W / P, P * C, 1),
           latent = matrix_of(&j, ESA_DTYPE_F32, C, T * H * W, 1);
    const esa_patch_args args = { .rows = rows.view,
                                  .latent = latent.view.data,
                                  .channels = C,
                                  .size = { T, H, W },
                                  .patch = { 1, 2, 2 },
                                  .channel_first = 1 };
    joint_ok(&j, j.nn.ops->patches(&j.nn, &args));
    double want[C * T * H * W];
    for (int i = 0; i < C * T * H * W; i++) {
        const int c = i / (T * H * W), t = i / (H * W) % T, y = i / W % H, x = i % W,
                  row = (t * (H / 2) + y / 2) * (W / 2) + x / 2;
        want[i] = (double)rows.value[row * P * C + c * P + y % 2 * 2 + x % 2];
    }
    matrix_compare(&j, &latent, want, 0, "patches with channels first");
    matrix_drop(&j, &rows);
    matrix_drop(&j, &latent);
    joint_close(&j);
}

/* ---------------------------------------------------------------- group norm and border */

/* guided: frames, height and width are multiples of 4 of the guide's, after a first frame apart if
 * frames is odd. */
static inline void check_group(joint *j, int64_t frames, int64_t height, int64_t width,
                               int64_t channels, int64_t groups, int32_t act, int32_t guided)
{
    const int32_t type = j->nn.ops->dtype;
    const int64_t line = (width + 2) * channels, plane = (height + 2) * line,
                  each = channels / groups, count = frames * height * width * each;
    matrix x = matrix_of(j, type, frames * height, width * channels, 2),
           y = matrix_of(j, type, frames * (height + 2), line, 2),
           w = matrix_of(j, ESA_DTYPE_F32, 2, channels, 1), room, guide;
    const int64_t guides = frames % 2 + frames / 4, pixels = height / 4 * (width / 4);
    guide = matrix_of(j, ESA_DTYPE_F32, 2 * guides * pixels + 1, channels, 1);
    room = matrix_of(j, ESA_DTYPE_F32, 1, ESA_GROUP_BYTES(channels, groups) / 4, 1);
    char *inside = (char *)y.view.data + (line + channels) * esa_view_element(type);
    const esa_plane_group_args args = { .y = inside,
                                        .y_row = line,
                                        .y_frame = plane,
                                        .x = x.view.data,
                                        .x_row = width * channels,
                                        .x_frame = height * width * channels,
                                        .frames = frames,
                                        .height = height,
                                        .width = width,
                                        .channels = channels,
                                        .groups = groups,
                                        .weight = w.view.data,
                                        .bias = (float *)w.view.data + channels,
                                        .eps = 1e-6f,
                                        .act = act,
                                        .dtype = type,
                                        .guide = { .times = guided ? guide.view.data : NULL,
                                                   .plus = (float *)guide.view.data +
                                                           guides * pixels * channels,
                                                   .level = 2,
                                                   .time_level = 2,
                                                   .first_apart = frames % 2 },
                                        .room = room.view.data };
    const esa_plane_border_args border = { inside, line,  plane,    frames,
                                           height, width, channels, type };
    joint_ok(j, j->nn.ops->planes->group_norm(&j->nn, &args));
    joint_ok(j, j->nn.ops->planes->border(&j->nn, &border));
    double *want = malloc((size_t)(frames * plane) * 8), *sum = calloc((size_t)groups * 2, 8);
    for (int64_t i = 0; i < frames * height * width * channels; i++) {
        const int64_t g = i % channels / each;
        sum[2 * g] += (double)x.value[i] / (double)count;
        sum[2 * g + 1] += (double)x.value[i] * (double)x.value[i] / (double)count;
    }
    for (int64_t i = 0; i < frames * plane; i++) {
        const int64_t c = i % channels, g = c / each;
        int64_t r = i / line % (height + 2) - 1, p = i % line / channels - 1;
        r = r < 0 ? 0 : r < height ? r : height - 1;
        p = p < 0 ? 0 : p < width ? p : width - 1;
        const double v = (double)x.value[((i / plane * height + r) * width + p) * channels + c];
        want[i] = (v - sum[2 * g]) / sqrt(sum[2 * g + 1] - sum[2 * g] * sum[2 * g] + 1e-6) *
                      (double)w.value[c] +
                  (double)w.value[channels + c];
        if (guided) {
            const int64_t f = i / plane, at = frames % 2 ? (f + 3) / 4 : f / 4,
                          from = (at * pixels + r / 4 * (width / 4) + p / 4) * channels + c;
            want[i] = want[i] * (double)guide.value[from] +
                      (double)guide.value[from + guides * pixels * channels];
        }
        if (act == ESA_ACT_SILU) want[i] /= 1 + exp(-want[i]);
    }
    matrix_compare(j, &y, want, 4e-6, "group norm");
    free(want);
    free(sum);
    matrix *const all[] = { &x, &y, &w, &room, &guide };
    for (int i = 0; i < 5; i++) matrix_drop(j, all[i]);
}

static inline void groups_everywhere(int32_t device)
{
    joint j = joint_open(device);
    check_group(&j, 3, 5, 7, 32, 8, ESA_ACT_SILU, 0);
    check_group(&j, 1, 1, 1, 16, 4, ESA_ACT_NONE, 0);
    check_group(&j, 2, 9, 4, 12, 3, ESA_ACT_SILU, 0); /* pieces of single channels on a GPU */
    check_group(&j, 5, 16, 20, 128, 32, ESA_ACT_SILU, 0);
    check_group(&j, 2, 3, 2, 512, 32, ESA_ACT_NONE, 0);
    check_group(&j, 5, 16, 20, 64, 8, ESA_ACT_SILU, 1);
    check_group(&j, 8, 8, 4, 12, 3, ESA_ACT_NONE, 1);
    joint_close(&j);
}

#define JOINT_TESTS(DEVICE)                                                                        \
    static void heads(void **s) { (void)s, heads_everywhere(DEVICE); }                             \
    static void causal(void **s) { (void)s, causal_everywhere(DEVICE); }                           \
    static void quick_gelu(void **s) { (void)s, quick_gelu_everywhere(DEVICE); }                   \
    static void gelu(void **s) { (void)s, gelu_everywhere(DEVICE); }                               \
    static void channels_first(void **s) { (void)s, channels_first_everywhere(DEVICE); }           \
    static void group_norms(void **s) { (void)s, groups_everywhere(DEVICE); }                      \
    int main(void)                                                                                 \
    {                                                                                              \
        const struct CMUnitTest tests[] = { cmocka_unit_test(heads),                               \
                                            cmocka_unit_test(causal),                              \
                                            cmocka_unit_test(quick_gelu),                          \
                                            cmocka_unit_test(gelu),                                \
                                            cmocka_unit_test(channels_first),                      \
                                            cmocka_unit_test(group_norms) };                       \
        return cmocka_run_group_tests(tests, NULL, NULL);                                          \
    }

#endif
