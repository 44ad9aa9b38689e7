/* test_lpips.c - LPIPS against the package lpips, with weights and pictures from a formula
 * (tools/golden/lpips_golden.py), and faults in its file.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <math.h>
#include "esa/esa_tensors.h"
#include "esa/esa_video.h"
#include "model/fill.h"

/* The package computes in f32 with another order of summation. Distances here are about 0.1 and
 * their rounding errors about 1e-7. The promise is 1e-4; a wrong border, pooling or normalisation
 * changes them by 1e-3 or more. */
#define CLOSE 1e-5

typedef struct conv {
    int out, in, k;
} conv;
static const conv alex[] = {
    { 64, 3, 11 }, { 192, 64, 5 }, { 384, 192, 3 }, { 256, 384, 3 }, { 256, 256, 3 }
};
static const conv vgg[] = { { 64, 3, 3 },    { 64, 64, 3 },   { 128, 64, 3 },  { 128, 128, 3 },
                            { 256, 128, 3 }, { 256, 256, 3 }, { 256, 256, 3 }, { 512, 256, 3 },
                            { 512, 512, 3 }, { 512, 512, 3 }, { 512, 512, 3 }, { 512, 512, 3 },
                            { 512, 512, 3 } };
static const int alex_taps[] = { 64, 192, 384, 256, 256 }, vgg_taps[] = { 64, 128, 256, 512, 512 };

static esa_ctx *context(int32_t threads)
{
    esa_ctx_params p = esa_ctx_params_default();
    esa_ctx *ctx;
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

/* What is wrong with a file: nothing, another format, an unknown network, a missing layer, a wrong
 * shape. */
enum { WHOLE, FORMAT, UNKNOWN, SHORT, SHAPE };

static void declare(esa_tensors_writer *w, const char *name, int rank, int64_t a, int64_t b,
                    int64_t k)
{
    const int64_t dim[4] = { a, b, k, k };
    assert_int_equal(esa_tensors_writer_declare(w, name, ESA_FILE_F32, rank, dim), ESA_OK);
}

static void put(esa_tensors_writer *w, const char *net, const char *name, int64_t count,
                double scale, float offset)
{
    char full[80];
    float *x = malloc((size_t)count * sizeof *x);
    assert_non_null(x);
    snprintf(full, sizeof full, "%s.%s", net, name);
    fill_tensor(x, count, full, (float)scale, offset);
    assert_int_equal(esa_tensors_writer_data(w, x, count * 4), ESA_OK);
    free(x);
}

static void make_weights(esa_ctx *ctx, const char *path, const char *net, int fault)
{
    const int is_vgg = strcmp(net, "vgg") == 0, convs = is_vgg ? 13 : 5;
    const conv *c = is_vgg ? vgg : alex;
    const int *taps = is_vgg ? vgg_taps : alex_taps;
    char name[64];
    esa_tensors_writer *w;
    assert_int_equal(esa_tensors_writer_create(ctx, &w, path), ESA_OK);
    esa_tensors_writer_metadata(w, "format", fault == FORMAT ? "other" : "esa-lpips-1");
    esa_tensors_writer_metadata(w, "net", fault == UNKNOWN ? "squeeze" : net);
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < convs; i++) {
            const int64_t fan = (int64_t)c[i].in * c[i].k * c[i].k;
            snprintf(name, sizeof name, "conv.%d.weight", i);
            if (!pass)
                declare(w, name, 4, c[i].out, c[i].in, c[i].k);
            else
                put(w, net, name, c[i].out * fan, sqrt(6.0 / (double)fan), 0);
            snprintf(name, sizeof name, "conv.%d.bias", i);
            if (!pass)
                declare(w, name, 1, c[i].out, 0, 0);
            else
                put(w, net, name, c[i].out, 0.25, 0);
        }
        for (int t = 0; t < (fault == SHORT ? 4 : 5); t++) {
            const int64_t n = taps[t] - (fault == SHAPE && t == 2);
            snprintf(name, sizeof name, "lin.%d.weight", t);
            if (!pass)
                declare(w, name, 1, n, 0, 0);
            else
                put(w, net, name, n, 0.5, 0.5f);
        }
    }
    if (esa_tensors_writer_finish(w) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    esa_tensors_writer_free(w);
}

/* Two videos of `frames` pictures: frame i is the pair rolled by i rows, so that neighbouring
 * frames differ. */
static void make_pair(esa_ctx *ctx, esa_frames **a, esa_frames **b, int32_t frames, int32_t height,
                      int32_t width)
{
    const int64_t size = (int64_t)height * width * 3;
    uint8_t *x = malloc((size_t)(frames * size)), *y = malloc((size_t)(frames * size));
    assert_true(x && y);
    for (int64_t i = 0; i < frames * size; i++) {
        const int64_t frame = i / size, at = (i % size + frame * width * 3) % size;
        x[i] = (uint8_t)floor(((double)fill_unit(fill_name("a"), at) + 1) * 128);
        const double z = x[i] + floor((double)fill_unit(fill_name("d"), at) * 41);
        y[i] = (uint8_t)(z < 0 ? 0 : z > 255 ? 255 : z);
    }
    assert_int_equal(esa_frames_create(ctx, a, x, frames, height, width, 16), ESA_OK);
    assert_int_equal(esa_frames_create(ctx, b, y, frames, height, width, 16), ESA_OK);
    free(x);
    free(y);
}

static void like_the_package(void **state)
{
    static const struct {
        const char *net;
        int32_t height, width;
    } cases[] = { { "alex", 31, 31 },
                  { "alex", 40, 53 },
                  { "alex", 64, 47 },
                  { "vgg", 16, 16 },
                  { "vgg", 33, 40 } };
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx = context(2);
    char path[640], name[64];
    const char *folder = getenv("ESA_TEST_GOLDEN");
    snprintf(path, sizeof path, "%s/lpips.safetensors", folder ? folder : "tests/golden");
    esa_tensors *golden;
    if (esa_tensors_open(ctx, &golden, path) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    make_weights(ctx, scratch_path(&s, "alex"), "alex", WHOLE);
    make_weights(ctx, scratch_path(&s, "vgg"), "vgg", WHOLE);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        esa_tensor_info want = { .struct_size = sizeof want };
        esa_lpips *lpips;
        esa_frames *a, *b;
        esa_metrics m = { .struct_size = sizeof m };
        double expected, each[ESA_METRIC_COUNT];
        snprintf(name, sizeof name, "%s.%dx%d", cases[i].net, cases[i].height, cases[i].width);
        assert_int_equal(esa_tensors_find(golden, name, &want), ESA_OK);
        memcpy(&expected, want.data, 8);
        if (esa_lpips_open(ctx, &lpips, scratch_path(&s, cases[i].net)) != ESA_OK)
            fail_msg("%s", esa_ctx_error(ctx));
        assert_string_equal(esa_lpips_net(lpips), cases[i].net);
        make_pair(ctx, &a, &b, 1, cases[i].height, cases[i].width);
        if (esa_frames_measure(ctx, &m, each, a, b, lpips, NULL, NULL) != ESA_OK)
            fail_msg("%s", esa_ctx_error(ctx));
        print_message("%s: %.9f, lpips gives %.9f\n", name, m.lpips, expected);
        assert_true(expected > 0.01 && fabs(m.lpips - expected) < CLOSE);
        assert_true(m.lpips == m.lpips_max && m.lpips == each[ESA_METRIC_LPIPS]);
        assert_int_equal(esa_frames_measure(ctx, &m, NULL, a, a, lpips, NULL, NULL), ESA_OK);
        assert_true(m.lpips == 0);
        esa_frames_free(a);
        esa_frames_free(b);
        esa_lpips_free(lpips);
    }
    esa_tensors_free(golden);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

static int32_t count_and_stop(void *user, int32_t done, int32_t total)
{
    int32_t *left = user;
    assert_int_equal(total, 3);
    assert_true(done >= 1 && done <= 3);
    return --*left < 0;
}

static void frames_threads_and_memory(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_metrics first = { .struct_size = sizeof first };
    double each_first[3 * ESA_METRIC_COUNT], each[3 * ESA_METRIC_COUNT];
    esa_ctx *maker = context(1);
    make_weights(maker, scratch_path(&s, "w"), "alex", WHOLE);
    esa_ctx_free(maker);
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        counting c;
        esa_ctx *ctx = counting_ctx(&c, threads);
        esa_lpips *lpips;
        esa_frames *a, *b;
        esa_metrics m = { .struct_size = sizeof m };
        assert_int_equal(esa_lpips_open(ctx, &lpips, scratch_path(&s, "w")), ESA_OK);
        make_pair(ctx, &a, &b, 3, 32, 36);
        int32_t left = 3;
        assert_int_equal(esa_frames_measure(ctx, &m, each, a, b, lpips, count_and_stop, &left),
                         ESA_OK);
        assert_int_equal(left, 0);
        if (threads == 1) {
            first = m;
            memcpy(each_first, each, sizeof each);
            double sum = 0, most = 0;
            for (int i = 0; i < 3; i++) {
                sum += each[i * ESA_METRIC_COUNT + ESA_METRIC_LPIPS];
                most = fmax(most, each[i * ESA_METRIC_COUNT + ESA_METRIC_LPIPS]);
            }
            assert_true(fabs(sum / 3 - m.lpips) < 1e-15 && most == m.lpips_max);
        }
        assert_memory_equal(&m, &first, sizeof m);
        assert_memory_equal(each, each_first, sizeof each);
        left = 1;
        assert_refused(ctx, esa_frames_measure(ctx, &m, each, a, b, lpips, count_and_stop, &left),
                       ESA_ERR_STATE, "cancelled", NULL);
        esa_lpips_free(lpips);
        if (threads == 1) {
            assert_int_equal(esa_lpips_open(ctx, &lpips, scratch_path(&s, "w")), ESA_OK);
            for (int at = 0; at < 3; at++) { /* metrics, planes, scratch of the convolutions */
                c.left = at;
                esa_status status = esa_frames_measure(ctx, &m, each, a, b, lpips, NULL, NULL);
                if (status == ESA_OK) break; /* memory from an earlier turn was kept */
                assert_refused(ctx, status, ESA_ERR_MEMORY, "memory", NULL);
            }
            c.left = -1;
            assert_int_equal(esa_frames_measure(ctx, &m, each, a, b, lpips, NULL, NULL), ESA_OK);
            assert_memory_equal(&m, &first, sizeof m);
            esa_lpips_free(lpips);
            for (int at = 0;; at++) {
                c.left = at;
                const esa_status status = esa_lpips_open(ctx, &lpips, scratch_path(&s, "w"));
                if (status == ESA_OK) break;
                assert_refused(ctx, status, ESA_ERR_MEMORY, "memory", NULL);
                assert_null(lpips);
                assert_true(at < 60);
            }
            c.left = -1;
            esa_lpips_free(lpips);
        }
        esa_frames_free(a);
        esa_frames_free(b);
        esa_ctx_free(ctx);
        assert_int_equal(c.live, 0);
    }
    scratch_remove(&s);
}

static void refusals(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_ctx *ctx = context(1), *other = context(1);
    esa_lpips *lpips;
    esa_frames *a, *b;
    esa_metrics m = { .struct_size = sizeof m };
    make_weights(ctx, scratch_path(&s, "w"), "alex", FORMAT);
    assert_refused(ctx, esa_lpips_open(ctx, &lpips, scratch_path(&s, "w")), ESA_ERR_FORMAT,
                   "convert_lpips.py", NULL);
    make_weights(ctx, scratch_path(&s, "w"), "alex", UNKNOWN);
    assert_refused(ctx, esa_lpips_open(ctx, &lpips, scratch_path(&s, "w")), ESA_ERR_FORMAT,
                   "squeeze", "alex or vgg", NULL);
    make_weights(ctx, scratch_path(&s, "w"), "alex", SHORT);
    assert_refused(ctx, esa_lpips_open(ctx, &lpips, scratch_path(&s, "w")), ESA_ERR_MISMATCH,
                   "lin.4.weight", NULL);
    make_weights(ctx, scratch_path(&s, "w"), "alex", SHAPE);
    assert_refused(ctx, esa_lpips_open(ctx, &lpips, scratch_path(&s, "w")), ESA_ERR_MISMATCH,
                   "lin.2.weight", NULL);
    assert_null(lpips);
    assert_refused(ctx, esa_lpips_open(ctx, &lpips, scratch_path(&s, "none")), ESA_ERR_IO, "none",
                   NULL);
    make_weights(ctx, scratch_path(&s, "w"), "alex", WHOLE);
    assert_int_equal(esa_lpips_open(ctx, &lpips, scratch_path(&s, "w")), ESA_OK);
    make_pair(ctx, &a, &b, 1, 30, 40);
    assert_refused(ctx, esa_frames_measure(ctx, &m, NULL, a, b, lpips, NULL, NULL), ESA_ERR_SHAPE,
                   "40 x 30", "31 x 31", NULL);
    assert_refused(other, esa_frames_measure(other, &m, NULL, a, b, lpips, NULL, NULL),
                   ESA_ERR_SHAPE, "31 x 31", NULL);
    esa_frames_free(a);
    esa_frames_free(b);
    make_pair(ctx, &a, &b, 1, 31, 31);
    assert_refused(other, esa_frames_measure(other, &m, NULL, a, b, lpips, NULL, NULL),
                   ESA_ERR_ARGUMENT, "another ctx", NULL);
    esa_frames_free(a);
    esa_frames_free(b);
    esa_lpips_free(lpips);
    esa_lpips_free(NULL);
    esa_ctx_free(other);
    esa_ctx_free(ctx);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(like_the_package),
        cmocka_unit_test(frames_threads_and_memory),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
