/* test_metrics.c - PSNR and SSIM against scikit-image, and esa_frames_compare over them.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <math.h>
#include "esa/esa_tensors.h"
#include "esa/esa_video.h"
#include "metric/metric.h"

/* scikit-image blurs in f64 too, with another order of summation. 1e-9 is far above that difference
 * and far below any mistake. */
#define CLOSE 1e-9

static esa_ctx *context(int32_t threads)
{
    esa_ctx_params p = esa_ctx_params_default();
    esa_ctx *ctx;
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

static esa_tensor_info find(esa_tensors *file, const char *name, const char *part)
{
    esa_tensor_info info = { .struct_size = sizeof info };
    char full[64];
    snprintf(full, sizeof full, "%s.%s", name, part);
    if (esa_tensors_find(file, full, &info) != ESA_OK) fail_msg("no tensor %s", full);
    return info;
}

static double real(const esa_tensor_info *info, int64_t i)
{
    double x;
    memcpy(&x, (const char *)info->data + 8 * i, 8);
    return x;
}

static esa_tensors *golden(esa_ctx *ctx)
{
    char path[640];
    esa_tensors *file;
    const char *folder = getenv("ESA_TEST_GOLDEN");
    snprintf(path, sizeof path, "%s/metrics.safetensors", folder ? folder : "tests/golden");
    if (esa_tensors_open(ctx, &file, path) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    return file;
}

static void like_scikit_image(void **state)
{
    static const char *const names[] = { "noise", "shift", "smallest", "darker", "opposite" };
    (void)state;
    esa_ctx *ctx = context(2);
    esa_tensors *file = golden(ctx);
    for (int n = 0; n < 5; n++) {
        const esa_tensor_info a = find(file, names[n], "a"), b = find(file, names[n], "b"),
                              psnr = find(file, names[n], "psnr");
        const esa_tensor_info ssim = find(file, names[n], "ssim"),
                              total = find(file, names[n], "total");
        const int64_t frames = a.dim[0], height = a.dim[1], width = a.dim[2],
                      size = height * width * 3;
        double *scratch = malloc((size_t)esa_ssim_scratch(width) * sizeof *scratch), mean = 0,
               least = 1;
        assert_non_null(scratch);
        for (int64_t i = 0; i < frames; i++) {
            const uint8_t *p = (const uint8_t *)a.data + i * size,
                          *q = (const uint8_t *)b.data + i * size;
            const double got = esa_ssim(p, q, height, width, scratch);
            if (!(fabs(got - real(&ssim, i)) < CLOSE))
                fail_msg("%s, frame %d: SSIM %.12f, expected %.12f", names[n], (int)i, got,
                         real(&ssim, i));
            assert_true(fabs(esa_psnr(esa_squared_error(p, q, size), size) - real(&psnr, i)) <
                        CLOSE);
            mean += got / (double)frames;
            least = fmin(least, got);
        }
        free(scratch);
        esa_frames *left, *right;
        esa_metrics m = { .struct_size = sizeof m };
        assert_int_equal(esa_frames_create(ctx, &left, a.data, (int32_t)frames, (int32_t)height,
                                           (int32_t)width, 16),
                         ESA_OK);
        assert_int_equal(esa_frames_create(ctx, &right, b.data, (int32_t)frames, (int32_t)height,
                                           (int32_t)width, 16),
                         ESA_OK);
        assert_int_equal(esa_frames_compare(ctx, &m, left, right), ESA_OK);
        assert_int_equal(m.frames, frames);
        assert_true(fabs(m.psnr - real(&total, 0)) < CLOSE);
        assert_true(fabs(m.ssim - mean) < CLOSE && m.ssim_min == least);
        double worst = INFINITY;
        for (int64_t i = 0; i < frames; i++) worst = fmin(worst, real(&psnr, i));
        assert_true(fabs(m.psnr_min - worst) < CLOSE);
        esa_frames_free(left);
        esa_frames_free(right);
    }
    esa_tensors_free(file);
    esa_ctx_free(ctx);
}

static void equal_frames(void **state)
{
    (void)state;
    esa_ctx *ctx = context(1);
    esa_frames *a;
    uint8_t rgb[2 * 12 * 16 * 3];
    for (size_t i = 0; i < sizeof rgb; i++) rgb[i] = (uint8_t)(i * 37);
    esa_metrics m = { .struct_size = sizeof m };
    assert_int_equal(esa_frames_create(ctx, &a, rgb, 2, 12, 16, 16), ESA_OK);
    assert_int_equal(esa_frames_compare(ctx, &m, a, a), ESA_OK);
    assert_true(isinf(m.psnr) && m.psnr > 0 && isinf(m.psnr_min));
    assert_true(m.ssim == 1.0 && m.ssim_min == 1.0);
    esa_frames_free(a);
    esa_ctx_free(ctx);
}

static void same_bits_with_any_threads(void **state)
{
    (void)state;
    enum { COUNT = 7, H = 20, W = 30 };
    static uint8_t a[COUNT * H * W * 3], b[sizeof a];
    for (size_t i = 0; i < sizeof a; i++) {
        a[i] = (uint8_t)(i * 2654435761u >> 13);
        b[i] = (uint8_t)(a[i] + (i % 7));
    }
    esa_metrics first = { .struct_size = sizeof first };
    for (int32_t threads = 1; threads <= 4; threads++) {
        esa_ctx *ctx = context(threads);
        esa_frames *x, *y;
        esa_metrics m = { .struct_size = sizeof m };
        assert_int_equal(esa_frames_create(ctx, &x, a, COUNT, H, W, 16), ESA_OK);
        assert_int_equal(esa_frames_create(ctx, &y, b, COUNT, H, W, 16), ESA_OK);
        assert_int_equal(esa_frames_compare(ctx, &m, x, y), ESA_OK);
        if (threads == 1) first = m;
        assert_memory_equal(&m, &first, sizeof m);
        esa_frames_free(x);
        esa_frames_free(y);
        esa_ctx_free(ctx);
    }
}

/* Values of each frame, and flicker against its definition, written here a second time. */
static void frame_by_frame(void **state)
{
    (void)state;
    enum { COUNT = 5, H = 13, W = 15, SIZE = H * W * 3 };
    static uint8_t a[COUNT * SIZE], b[sizeof a];
    for (size_t i = 0; i < sizeof a; i++) {
        a[i] = (uint8_t)(i * 2654435761u >> 13);
        /* the first two frames are equal */
        b[i] = (uint8_t)(i < 2 * SIZE ? a[i] : a[i] / 2 + i / SIZE * 9);
    }
    esa_ctx *ctx = context(2);
    esa_frames *x, *y, *z;
    esa_metrics m = { .struct_size = sizeof m }, one = { .struct_size = sizeof one };
    double each[COUNT][ESA_METRIC_COUNT], total = 0, ssim = 0;
    assert_int_equal(esa_frames_create(ctx, &x, a, COUNT, H, W, 16), ESA_OK);
    assert_int_equal(esa_frames_create(ctx, &y, b, COUNT, H, W, 16), ESA_OK);
    assert_int_equal(esa_frames_measure(ctx, &m, &each[0][0], x, y, NULL, NULL, NULL), ESA_OK);
    for (int t = 0; t < COUNT; t++) {
        double sum = 0, error = 0;
        for (int i = t * SIZE; i < (t + 1) * SIZE; i++) {
            error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]) / SIZE;
            const double d = t ? ((double)b[i] - b[i - SIZE]) - ((double)a[i] - a[i - SIZE]) : 0;
            sum += d * d / SIZE;
        }
        total += sum;
        ssim += each[t][ESA_METRIC_SSIM] / COUNT;
        if (t)
            assert_true(fabs(each[t][ESA_METRIC_FLICKER] - sqrt(sum)) < CLOSE);
        else
            assert_true(isnan(each[t][ESA_METRIC_FLICKER]));
        if (t < 2)
            assert_true(isinf(each[t][ESA_METRIC_PSNR]) && each[t][ESA_METRIC_SSIM] == 1);
        else
            assert_true(fabs(each[t][ESA_METRIC_PSNR] - 10 * log10(65025 / error)) < CLOSE);
        assert_true(isnan(each[t][ESA_METRIC_LPIPS]));
    }
    assert_true(fabs(m.flicker - sqrt(total / (COUNT - 1))) < CLOSE && m.flicker > 10);
    assert_true(fabs(m.ssim - ssim) < CLOSE && isnan(m.lpips) && isnan(m.lpips_max));
    for (size_t i = 0; i < sizeof b; i++) b[i] = (uint8_t)(a[i] / 2 + 7);
    /* an error that does not move does not flicker */
    for (size_t i = SIZE; i < sizeof a; i++) a[i] = a[i % SIZE], b[i] = b[i % SIZE];
    esa_frames_free(x);
    esa_frames_free(y);
    assert_int_equal(esa_frames_create(ctx, &x, a, COUNT, H, W, 16), ESA_OK);
    assert_int_equal(esa_frames_create(ctx, &y, b, COUNT, H, W, 16), ESA_OK);
    assert_int_equal(esa_frames_compare(ctx, &m, x, y), ESA_OK);
    assert_true(m.flicker == 0 && m.psnr < 20);
    assert_int_equal(esa_frames_create(ctx, &z, a, 1, H, W, 16), ESA_OK);
    assert_int_equal(esa_frames_compare(ctx, &one, z, z), ESA_OK);
    assert_true(isnan(one.flicker));
    esa_frames_free(x);
    esa_frames_free(y);
    esa_frames_free(z);
    esa_ctx_free(ctx);
}

static void refusals(void **state)
{
    (void)state;
    counting c;
    esa_ctx *ctx = counting_ctx(&c, 1);
    esa_frames *a, *b, *small;
    esa_metrics m = { .struct_size = sizeof m };
    assert_int_equal(esa_frames_create(ctx, &a, NULL, 2, 12, 16, 16), ESA_OK);
    assert_int_equal(esa_frames_create(ctx, &b, NULL, 2, 16, 16, 16), ESA_OK);
    assert_int_equal(esa_frames_create(ctx, &small, NULL, 1, 10, 16, 16), ESA_OK);
    assert_refused(ctx, esa_frames_compare(ctx, &m, a, b), ESA_ERR_SHAPE, "2 frames of 16 x 16",
                   "16 x 12", NULL);
    assert_refused(ctx, esa_frames_compare(ctx, &m, small, small), ESA_ERR_SHAPE, "16 x 10",
                   "11 x 11", NULL);
    assert_refused(ctx, esa_frames_compare(ctx, &m, a, NULL), ESA_ERR_ARGUMENT, "NULL", NULL);
    m.struct_size = 4;
    assert_refused(ctx, esa_frames_compare(ctx, &m, a, a), ESA_ERR_VERSION,
                   "esa_metrics has struct_size 4", NULL);
    m.struct_size = sizeof m;
    c.left = 0;
    assert_refused(ctx, esa_frames_compare(ctx, &m, a, a), ESA_ERR_MEMORY, "memory", NULL);
    esa_frames_free(a);
    esa_frames_free(b);
    esa_frames_free(small);
    esa_ctx_free(ctx);
    assert_int_equal(c.live, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(like_scikit_image),
        cmocka_unit_test(equal_frames),
        cmocka_unit_test(same_bits_with_any_threads),
        cmocka_unit_test(frame_by_frame),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
