/* test_umt5_gpu.c - the text encoder on the GPU in bf16 against the CPU in f32.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_TIMES=1 prints the time of prompts at true shapes too. */
#include "model/umt5_bf16.h"

static void as_close_as_transformers(void **unused)
{
    (void)unused;
    compare_cases(ESA_DEVICE_CUDA);
}

static void wan_tiny(void **unused)
{
    (void)unused;
    compare_tiny(ESA_DEVICE_CUDA);
}

/* The same tokens give the same bits, also if layers are copied for each use. */
static void same_bits(void **unused)
{
    (void)unused;
    const umt5_case *c = &cases[0];
    esa_ctx *ctx = make_ctx(2);
    wan_folder f = make_folder(ctx, &c->config, ESA_FILE_BF16);
    float *out[3];
    for (int32_t i = 0; i < 3; i++) {
        bench b = { .ctx = ctx };
        esa_nn_init(&b.nn, ctx);
        ok(&b, esa_nn_use(&b.nn, ESA_DEVICE_CUDA));
        char path[640];
        snprintf(path, sizeof path, "%s/text_encoder/config.json", f.top.dir);
        ok(&b, esa_config_umt5(ctx, &b.config, path));
        /* A layer takes 16 KB: two of the three fit beside the states and the driver's share. */
        const int64_t limit = (b.nn.be->products->workspace(ctx) + 50000) * 16 / 15;
        b.env = (esa_part_env){ .nn = &b.nn, .folder = f.top.dir, .limit = i == 2 ? limit : 0 };
        ok(&b, open_umt5(&b.env, &b.encoder, &b.config));
        out[i] = encode(&b, c->name, c->tokens);
        bench_close(&b);
        if (i) assert_memory_equal(out[0], out[i], (size_t)(c->tokens * c->config.d_model) * 4);
    }
    for (int32_t i = 0; i < 3; i++) free(out[i]);
    wan_folder_remove(&f);
    esa_ctx_free(ctx);
}

/* Each call of the device fails once, while an encoder is opened or encodes: one message, nothing
 * is lost, and the next try works. Only the stand-in can be told to fail. */
static void bad_luck(void **unused)
{
    (void)unused;
    const char *library = getenv("ESA_CUDA_LIB");
    if (!library || !strstr(library, "stand_in")) return;
    const umt5_case *c = &cases[0];
    static const int32_t ids[5] = { 3, 1, 4, 1, 5 };
    float out[5 * 32];
    esa_ctx *ctx = make_ctx(1);
    wan_folder f = make_folder(ctx, &c->config, ESA_FILE_F32);
    bench b;
    bench_open_on(&b, ctx, f.top.dir, ESA_HOLD_AUTO, ESA_DEVICE_CUDA);
    esa_part_free(b.encoder);
    int32_t n = 0, failures = 0, over = 0;
    for (; !over && n < 1000; n++) {
        char text[16];
        snprintf(text, sizeof text, "%d", n);
        setenv("ESA_STAND_IN_FAIL", text, 1);
        esa_status status = open_umt5(&b.env, &b.encoder, &b.config);
        if (!status) status = esa_umt5_encode(b.encoder, out, ids, 5);
        over = getenv("ESA_STAND_IN_FAIL") != NULL;
        unsetenv("ESA_STAND_IN_FAIL");
        if (over) ok(&b, status);
        if (status) assert_true(esa_ctx_error(ctx)[0]);
        failures += status != ESA_OK;
        esa_part_free(b.encoder);
        b.encoder = NULL;
        assert_int_equal(b.nn.held, b.nn.scratch_bytes);
    }
    assert_true(over && failures > 30);
    bench_close(&b);
    wan_folder_remove(&f);
    esa_ctx_free(ctx);
}

/* Milliseconds for prompts of several lengths with random weights of UMT5-XXL; its vocabulary is
 * cut, because only rows of it are used. */
static void times(void **unused)
{
    static const int64_t lengths[] = { 21, 128, 512 };
    (void)unused;
    const char *library = getenv("ESA_CUDA_LIB");
    if (!getenv("ESA_TEST_TIMES") || (library && strstr(library, "stand_in"))) return;
    esa_ctx *ctx = make_ctx(0);
    bench b = { .ctx = ctx };
    b.config = (esa_umt5_config){ .vocab = 1000,
                                  .d_model = 4096,
                                  .d_kv = 64,
                                  .heads = 64,
                                  .layers = 24,
                                  .ff = 10240,
                                  .buckets = 32,
                                  .max_distance = 128,
                                  .eps = 1e-6 };
    esa_nn_init(&b.nn, ctx);
    ok(&b, esa_nn_use(&b.nn, ESA_DEVICE_CUDA));
    b.env = (esa_part_env){ .nn = &b.nn, .random = 1 };
    double start = esa_nn_now();
    ok(&b, open_umt5(&b.env, &b.encoder, &b.config));
    print_message("UMT5-XXL: opened in %.2f s\n", esa_nn_now() - start);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        double best = 1e9;
        for (int32_t round = 0; round < 6; round++) {
            start = esa_nn_now();
            free(encode(&b, "times", lengths[i]));
            best = fmin(best, esa_nn_now() - start);
        }
        print_message("  %3d tokens %7.2f ms\n", (int)lengths[i], 1e3 * best);
    }
    bench_close(&b);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_close_as_transformers),
        cmocka_unit_test(wan_tiny),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(bad_luck),
        cmocka_unit_test(times),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
