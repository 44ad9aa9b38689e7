/* test_hunyuan_vae.c - the VAE decoder against diffusers, whole and in tiles; announced memory;
 * threads, cancelling, wrong files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/hunyuan_cases.h"

static void matches_diffusers(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof hunyuan_vaes / sizeof hunyuan_vaes[0]; i++) {
        const hunyuan_vae_case *c = &hunyuan_vaes[i];
        bench b;
        hunyuan_open_vae(&b, c, 2, ESA_DEVICE_CPU);
        const int64_t held = b.nn.held - b.nn.scratch_bytes;
        b.nn.peak = 0;
        ok(&b, decode(&b, c->name, c->latent, c->tile));
        assert_int_equal(b.ticks, b.total);
        esa_tensors *golden = golden_open(b.ctx, "hunyuan.safetensors");
        print_message("%s: %.2e\n", c->name, hunyuan_compare(golden, c->name, b.clip, b.count));
        esa_tensors_free(golden);
        /* it takes what it announced, and the scratch of single operations */
        const int64_t said = esa_vae_bytes(b.vae, c->latent, c->tile);
        assert_int_equal(b.nn.held - b.nn.scratch_bytes, held);
        assert_true(b.nn.peak <= held + said + b.nn.scratch_bytes);
        assert_true(b.nn.peak >= held + said);
        bench_close(&b);
    }
}

static void bytes_and_threads(void **unused)
{
    (void)unused;
    const hunyuan_vae_case *c = &hunyuan_vaes[1];
    bench one, three;
    hunyuan_open_vae(&one, c, 1, ESA_DEVICE_CPU);
    hunyuan_open_vae(&three, c, 3, ESA_DEVICE_CPU);
    ok(&one, decode(&one, c->name, c->latent, c->tile));
    ok(&three, decode(&three, c->name, c->latent, c->tile));
    assert_memory_equal(one.clip, three.clip, (size_t)one.count * 4);
    uint8_t *bytes = malloc((size_t)one.count);
    ok(&three, decode_to(&three, c->name, c->latent, c->tile, bytes));
    check_bytes(&one, bytes);
    free(bytes);
    bench_close(&one);
    bench_close(&three);
}

static void refuses_and_stops(void **unused)
{
    (void)unused;
    const hunyuan_vae_case *c = &hunyuan_vaes[2];
    bench b;
    hunyuan_open_vae(&b, c, 1, ESA_DEVICE_CPU);
    assert_refused(b.ctx, decode(&b, c->name, c->latent, 40), ESA_ERR_ARGUMENT, "40 pixels", "32",
                   NULL);
    const int64_t held = b.nn.held - b.nn.scratch_bytes;
    b.stop_at = 2;
    assert_int_equal(decode(&b, c->name, c->latent, 0), ESA_ERR_STATE);
    assert_int_equal(b.nn.held - b.nn.scratch_bytes, held);
    esa_hunyuan_vae_config other = c->config;
    other.res_blocks = 2;
    assert_refused(b.ctx, check_vae(&b.env, &esa_hunyuan_vae_kind, &other), ESA_ERR_MISMATCH,
                   "decoder.up_blocks.0.resnets.2", NULL);
    other = c->config;
    other.attention = 0;
    assert_refused(b.ctx, check_vae(&b.env, &esa_hunyuan_vae_kind, &other), ESA_ERR_MISMATCH,
                   "decoder.mid_block.attentions.0", NULL);
    bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(matches_diffusers),
                                        cmocka_unit_test(bytes_and_threads),
                                        cmocka_unit_test(refuses_and_stops) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
