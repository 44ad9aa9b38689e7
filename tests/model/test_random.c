/* test_random.c - torch's CPU generator: equal bits for any count and any sequence of calls.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include "esa/esa_tensors.h"
#include "model/run/random.h"

static esa_tensors *golden(esa_ctx *ctx)
{
    char path[640];
    esa_tensors *file;
    const char *folder = getenv("ESA_TEST_GOLDEN");
    snprintf(path, sizeof path, "%s/random.safetensors", folder ? folder : "tests/golden");
    if (esa_tensors_open(ctx, &file, path) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    return file;
}

static void expect_bits(const float *got, const void *want, int64_t count, const char *name)
{
    const uint8_t *raw = want;
    for (int64_t i = 0; i < count; i++) {
        float w;
        memcpy(&w, raw + 4 * i, 4);
        if (memcmp(&got[i], &w, 4) != 0)
            fail_msg("%s, element %d: %.9g, expected %.9g", name, (int)i, (double)got[i],
                     (double)w);
    }
}

static void one_call(void **state)
{
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    esa_tensors *file = golden(ctx);
    int checked = 0;
    for (int64_t i = 0; i < esa_tensors_count(file); i++) {
        esa_tensor_info info = { .struct_size = sizeof info };
        char kind[16];
        unsigned long long seed;
        long long count;
        assert_int_equal(esa_tensors_at(file, i, &info), ESA_OK);
        if (sscanf(info.name, "%15[a-z].%llu.%lld", kind, &seed, &count) != 3) continue;
        esa_torch_rng rng;
        float *x = malloc((size_t)count * sizeof *x);
        assert_non_null(x);
        esa_torch_seed(&rng, seed);
        esa_torch_randn(&rng, x, count);
        if (strcmp(kind, "randn") == 0) {
            assert_int_equal(info.dim[0], count);
            expect_bits(x, info.data, count, info.name);
        } else if (strcmp(kind, "every") == 0) {
            for (int64_t j = 0; j < info.dim[0]; j++) x[j] = x[j * 1009];
            expect_bits(x, info.data, info.dim[0], info.name);
        } else {
            int64_t want, sum = 0;
            memcpy(&want, info.data, 8);
            for (long long j = 0; j < count; j++) {
                int32_t bits;
                memcpy(&bits, &x[j], 4);
                sum += bits;
            }
            assert_true(sum == want);
        }
        free(x);
        checked++;
    }
    assert_int_equal(checked, 12);
    esa_tensors_free(file);
    esa_ctx_free(ctx);
}

static void calls_follow_one_another(void **state)
{
    static const int counts[] = { 3, 20, 4, 16, 1 };
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    esa_tensors *file = golden(ctx);
    esa_tensor_info info = { .struct_size = sizeof info };
    assert_int_equal(esa_tensors_find(file, "calls", &info), ESA_OK);
    float x[44];
    int used = 0;
    esa_torch_rng rng;
    esa_torch_seed(&rng, 3);
    for (int i = 0; i < 5; i++) {
        esa_torch_randn(&rng, x + used, counts[i]);
        used += counts[i];
    }
    assert_int_equal(info.dim[0], used);
    expect_bits(x, info.data, used, "calls");
    esa_torch_randn(&rng, x, 0); /* nothing happens */
    esa_tensors_free(file);
    esa_ctx_free(ctx);
}

/* The three steps give what one call gives, whatever the order of the groups. */
static void in_steps(void **state)
{
    static const int64_t counts[] = { 16, 17, 31, 160, 1000 };
    (void)state;
    float whole[1000], steps[1000];
    esa_torch_rng a, b;
    esa_torch_seed(&a, 7);
    esa_torch_seed(&b, 7);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        const int64_t count = counts[i], groups = count / 16, half = groups / 2;
        esa_torch_randn(&a, whole, count);
        esa_torch_begin(&b, steps, count);
        esa_torch_normals(steps, half, groups - half);
        esa_torch_normals(steps, 0, half);
        esa_torch_end(&b, steps, count);
        expect_bits(steps, whole, count, "three steps");
    }
    assert_int_equal(esa_torch_next(&a), esa_torch_next(&b));
}

/* Mean and variance of 2^20 numbers within five standard errors: our seeds pass, a wrong scale
 * fails. */
static void looks_normal(void **state)
{
    enum { N = 1 << 20 };
    (void)state;
    float *x = malloc(N * sizeof *x);
    assert_non_null(x);
    esa_torch_rng rng;
    esa_torch_seed(&rng, 12345);
    esa_torch_randn(&rng, x, N);
    double sum = 0, squares = 0;
    for (int i = 0; i < N; i++) {
        sum += (double)x[i];
        squares += (double)x[i] * (double)x[i];
    }
    const double mean = sum / N, variance = squares / N;
    free(x);
    assert_true(mean > -5.0 / 1024 && mean < 5.0 / 1024);
    assert_true(variance > 1 - 5 * 1.4143 / 1024 && variance < 1 + 5 * 1.4143 / 1024);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_call),
        cmocka_unit_test(calls_follow_one_another),
        cmocka_unit_test(in_steps),
        cmocka_unit_test(looks_normal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
