/* test_vae_gpu.c - the VAE decoder on the GPU in bf16 against the CPU in f32: pixels, bytes, tiles,
 * memory, cancelling.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_TIMES=1 prints the time of 81 frames at true shapes too. */
#include "model/vae_bf16.h"
#include "nn/ops.h"

static void as_close_as_diffusers(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        compare(&cases[i], NULL, ESA_DEVICE_CUDA);
}

/* wan-tiny's decoder with its own weights. */
static void wan_tiny(void **unused)
{
    (void)unused;
    compare_tiny(ESA_DEVICE_CUDA);
}

/* Bytes are those of the pixels, whole and in tiles, on each device. */
static void bytes(void **unused)
{
    static const int32_t tiles[] = { 0, 32 };
    (void)unused;
    for (int32_t device = 0; device < 2; device++)
        for (int32_t t = 0; t < 2; t++) {
            bench b;
            const int32_t latent[3] = { 3, 5, 21 };
            bench_open_on(&b, &small, NULL, 2, device ? ESA_DEVICE_CUDA : ESA_DEVICE_CPU);
            ok(&b, decode(&b, "bytes", latent, tiles[t]));
            uint8_t *got = malloc((size_t)b.count);
            ok(&b, decode_to(&b, "bytes", latent, tiles[t], got));
            check_bytes(&b, got);
            free(got);
            bench_close(&b);
        }
}

/* Decoding takes exactly the announced memory of the device; the planes are half as large as on the
 * CPU. */
static void memory_is_announced(void **unused)
{
    (void)unused;
    bench cpu, gpu;
    bench_open_on(&cpu, &small, NULL, 1, ESA_DEVICE_CPU);
    bench_open_on(&gpu, &small, NULL, 1, ESA_DEVICE_CUDA);
    for (int32_t tile = 0; tile <= 16; tile += 16) {
        const int32_t latent[3] = { 6, 8, 8 };
        uint8_t *out = malloc(1 << 20);
        const int64_t held = gpu.nn.held;
        gpu.nn.peak = 0;
        ok(&gpu, decode_to(&gpu, "memory", latent, tile, out));
        const int64_t said = esa_vae_bytes(gpu.vae, latent, tile);
        assert_int_equal(gpu.nn.held, held);
        assert_int_equal(gpu.nn.peak, held + said);
        if (!tile) assert_true(said < 6 * esa_vae_bytes(cpu.vae, latent, tile) / 10);
        free(out);
    }
    bench_close(&cpu);
    bench_close(&gpu);
}

static void cancelled(void **unused)
{
    (void)unused;
    bench b;
    bench_open_on(&b, &tiny, NULL, 1, ESA_DEVICE_CUDA);
    const int64_t held = b.nn.held;
    b.stop_at = 2;
    assert_int_equal(decode(&b, "x", (const int32_t[]){ 4, 4, 4 }, 0), ESA_ERR_STATE);
    assert_int_equal(b.ticks, 2);
    assert_int_equal(b.nn.held, held);
    b.stop_at = 0;
    ok(&b, decode(&b, "x", (const int32_t[]){ 2, 4, 4 }, 0));
    bench_close(&b);
}

/* Each call of the device fails once, while a decoder is opened or decodes: one message, nothing is
 * lost, and the next try works. Only the stand-in can be told to fail. */
static void bad_luck(void **unused)
{
    (void)unused;
    const char *library = getenv("ESA_CUDA_LIB");
    if (!library || !strstr(library, "stand_in")) return;
    bench b;
    uint8_t *out = malloc(1 << 20);
    bench_begin(&b, &tiny, NULL, 1, ESA_DEVICE_CUDA, 0);
    int32_t n = 0, failures = 0, over = 0;
    for (; !over && n < 4000; n += n < 200 ? 7 : 29) {
        char text[16];
        snprintf(text, sizeof text, "%d", n);
        setenv("ESA_STAND_IN_FAIL", text, 1);
        esa_status status = open_vae(&b.env, &b.vae, &esa_wan_vae_kind, &b.config);
        if (!status) status = decode_to(&b, "x", (const int32_t[]){ 2, 2, 3 }, 0, out);
        over = getenv("ESA_STAND_IN_FAIL") != NULL;
        unsetenv("ESA_STAND_IN_FAIL");
        if (over) ok(&b, status);
        if (status) assert_true(esa_ctx_error(b.ctx)[0]);
        failures += status != ESA_OK;
        esa_vae_free(b.vae);
        b.vae = NULL;
        assert_int_equal(b.nn.held, b.nn.scratch_bytes);
    }
    assert_true(over && failures > 40);
    free(out);
    bench_close(&b);
}

/* The same latents give the same bits. */
static void same_bits(void **unused)
{
    (void)unused;
    bench b;
    bench_open_on(&b, &small, NULL, 2, ESA_DEVICE_CUDA);
    ok(&b, decode(&b, "bits", (const int32_t[]){ 3, 5, 9 }, 0));
    float *first = malloc((size_t)b.count * 4);
    memcpy(first, b.clip, (size_t)b.count * 4);
    ok(&b, decode(&b, "bits", (const int32_t[]){ 3, 5, 9 }, 0));
    assert_memory_equal(first, b.clip, (size_t)b.count * 4);
    free(first);
    bench_close(&b);
}

/* Random weights need no file and are the same numbers on both devices. */
static void random_weights(void **unused)
{
    (void)unused;
    bench b[2];
    for (int32_t i = 0; i < 2; i++) {
        bench_begin(&b[i], &small, NULL, 2, i ? ESA_DEVICE_CUDA : ESA_DEVICE_CPU, 0);
        b[i].env.random = 1;
        b[i].env.folder = "/nowhere";
        ok(&b[i], open_vae(&b[i].env, &b[i].vae, &esa_wan_vae_kind, &b[i].config));
        ok(&b[i], decode(&b[i], "random", (const int32_t[]){ 2, 5, 7 }, 0));
    }
    double size = 0;
    for (int64_t i = 0; i < b[0].count; i++) size = fmax(size, fabs((double)b[0].clip[i]));
    assert_true(size > 1e-3);
    assert_true(apart(b[1].clip, b[0].clip, b[0].count) < 0.02 * size);
    bench_close(&b[0]);
    bench_close(&b[1]);
}

/* Seconds and memory of a decode of 81 frames with random weights of Wan's VAE. */
static void time_at(const char *name, int32_t height, int32_t width)
{
    const esa_wan_vae_config wan = { .base_dim = 96,
                                     .decoder_base_dim = 96,
                                     .z_dim = 16,
                                     .levels = 4,
                                     .res_blocks = 2,
                                     .dim_mult = { 1, 2, 4, 4 },
                                     .temporal = { 0, 1, 1 },
                                     .in_channels = 3,
                                     .out_channels = 3,
                                     .factor_t = 4,
                                     .factor_s = 8,
                                     .mean = WAN_MEAN,
                                     .std = WAN_STD };
    const int32_t latent[3] = { 21, height / 8, width / 8 };
    bench b;
    bench_begin(&b, &tiny, NULL, 0, ESA_DEVICE_CUDA, 0);
    b.config = wan;
    b.env.random = 1;
    double start = esa_nn_now(), seconds[3];
    ok(&b, open_vae(&b.env, &b.vae, &esa_wan_vae_kind, &wan));
    print_message("%s: opened in %.2f s, weights %.2f GiB", name, esa_nn_now() - start,
                  (double)b.nn.held / (1 << 30));
    uint8_t *out = malloc((size_t)81 * (size_t)height * (size_t)width * 3);
    for (int32_t i = 0; i < 3; i++) {
        b.nn.peak = 0;
        memset(b.nn.seconds, 0, sizeof b.nn.seconds);
        start = esa_nn_now();
        ok(&b, decode_to(&b, "times", latent, 0, out));
        seconds[i] = esa_nn_now() - start;
    }
    ok(&b, b.nn.ops->settle(&b.nn));
    print_message(", decode %.3f, %.3f, %.3f s (convolutions %.3f, attention %.3f, others %.3f), "
                  "memory %.2f GiB\n",
                  seconds[0], seconds[1], seconds[2], b.nn.seconds[ESA_NN_CONV],
                  b.nn.seconds[ESA_NN_ATTENTION], b.nn.seconds[ESA_NN_OTHER],
                  (double)b.nn.peak / (1 << 30));
    free(out);
    bench_close(&b);
}

static void times(void **unused)
{
    (void)unused;
    const char *library = getenv("ESA_CUDA_LIB");
    if (!getenv("ESA_TEST_TIMES") || (library && strstr(library, "stand_in"))) return;
    time_at("480p", 480, 832);
    time_at("720p", 720, 1280);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_close_as_diffusers),
        cmocka_unit_test(wan_tiny),
        cmocka_unit_test(bytes),
        cmocka_unit_test(memory_is_announced),
        cmocka_unit_test(cancelled),
        cmocka_unit_test(bad_luck),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(random_weights),
        cmocka_unit_test(times),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
