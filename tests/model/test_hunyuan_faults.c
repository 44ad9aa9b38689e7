/* test_hunyuan_faults.c - configs of HunyuanVideo that are read or refused; every allocation of its
 * parts fails once: a message, and no leak.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/open_part.h"
#include "model/hunyuan_cases.h"

/* ---------------------------------------------------------------- configs */

static esa_ctx *ctx;
static scratch dir;

static const char *file(const char *text)
{
    const char *path = scratch_path(&dir, "config.json");
    scratch_write(path, text, strlen(text));
    return path;
}

static void transformer_configs(void **unused)
{
    (void)unused;
    static const struct {
        const char *text, *says;
        esa_status status;
    } bad[] = {
        { "{\"_class_name\": \"WanTransformer3DModel\"}", "WanTransformer3DModel",
          ESA_ERR_UNSUPPORTED },
        { "{\"qk_norm\": \"layer_norm\"}", "qk_norm", ESA_ERR_UNSUPPORTED },
        { "{\"image_condition_type\": \"token_replace\"}", "image_condition_type",
          ESA_ERR_UNSUPPORTED },
        { "{\"attention_head_dim\": 64}", "rope_axes_dim", ESA_ERR_FORMAT },
        { "{\"rope_axes_dim\": [15, 57, 56]}", "even", ESA_ERR_UNSUPPORTED },
        { "{\"num_layers\": 0}", "num_layers", ESA_ERR_FORMAT },
        { "{\"num_attention_heads\": 1000}", "heads", ESA_ERR_FORMAT },
    };
    esa_hunyuan_config c;
    assert_int_equal(esa_config_hunyuan(ctx, &c, file("{}")), ESA_OK); /* diffusers' defaults */
    assert_true(c.heads == 24 && c.head_dim == 128 && c.ffn == 12288 && c.doubles == 20 &&
                c.singles == 40 && c.refiners == 2 && c.patch[0] == 1 && c.patch[2] == 2);
    assert_true(c.text_dim == 4096 && c.pooled_dim == 768 && c.guidance == 1 && c.axis[0] == 16);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_refused(ctx, esa_config_hunyuan(ctx, &c, file(bad[i].text)), bad[i].status,
                       bad[i].says, NULL);
}

static void vae_configs(void **unused)
{
    (void)unused;
    esa_hunyuan_vae_config c;
    assert_int_equal(esa_config_hunyuan_vae(ctx, &c, file("{}")), ESA_OK);
    assert_true(c.z_dim == 16 && c.levels == 4 && c.width[0] == 128 && c.groups == 32 &&
                c.factor_s == 8 && c.factor_t == 4 && fabs(c.scaling - 0.476986) < 1e-12);
    assert_refused(ctx, esa_config_hunyuan_vae(ctx, &c, file("{\"block_out_channels\": [32, 64]}")),
                   ESA_ERR_UNSUPPORTED, "2 levels", NULL);
    assert_refused(ctx,
                   esa_config_hunyuan_vae(ctx, &c, file("{\"block_out_channels\": [32, 64, 96]}")),
                   ESA_ERR_UNSUPPORTED, "spatial_compression_ratio is 8, expected 4", NULL);
    assert_refused(ctx, esa_config_hunyuan_vae(ctx, &c, file("{\"norm_num_groups\": 96}")),
                   ESA_ERR_FORMAT, "96 groups", NULL);
    assert_refused(ctx, esa_config_hunyuan_vae(ctx, &c, file("{\"act_fn\": \"gelu\"}")),
                   ESA_ERR_UNSUPPORTED, "act_fn", NULL);
    assert_refused(ctx,
                   esa_config_hunyuan_vae(ctx, &c, file("{\"temporal_compression_ratio\": 8}")),
                   ESA_ERR_FORMAT, "temporal_compression_ratio", NULL);
}

#define SIZES                                                                                      \
    "\"vocab_size\": 9, \"hidden_size\": 32, \"num_attention_heads\": 4, "                         \
    "\"num_hidden_layers\": 3, \"intermediate_size\": 40"

static void text_configs(void **unused)
{
    (void)unused;
    esa_causal_config c;
    assert_int_equal(esa_config_llama(ctx, &c,
                                      file("{\"model_type\": \"llama\", " SIZES
                                           ", \"num_key_value_heads\": 2, \"rope_theta\": 5e5}")),
                     ESA_OK);
    assert_true(c.kv_heads == 2 && c.head_dim == 8 && c.skip == 2 && c.theta == 5e5);
    assert_int_equal(esa_config_llama(ctx, &c,
                                      file("{" SIZES ", \"rope_parameters\": {\"rope_theta\": 7.0, "
                                           "\"rope_type\": \"default\"}}")),
                     ESA_OK);
    assert_true(c.theta == 7 && c.kv_heads == 4);
    static const struct {
        const char *text, *says;
    } bad[] = {
        { "{" SIZES ", \"rope_parameters\": {\"rope_type\": \"llama3\"}}", "rope_type" },
        { "{" SIZES ", \"rope_scaling\": {\"type\": \"linear\"}}", "rope_scaling" },
        { "{" SIZES ", \"attention_bias\": true}", "attention_bias" },
        { "{" SIZES ", \"num_key_value_heads\": 3}", "3 heads of keys" },
        { "{" SIZES ", \"model_type\": \"qwen2\"}", "qwen2" },
        { "{\"hidden_size\": 32}", "vocab_size" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const esa_status status = esa_config_llama(ctx, &c, file(bad[i].text));
        assert_true(status == ESA_ERR_UNSUPPORTED || status == ESA_ERR_FORMAT);
        assert_non_null(strstr(esa_ctx_error(ctx), bad[i].says));
    }
    assert_int_equal(esa_config_clip_text(ctx, &c, file("{" SIZES ", \"eos_token_id\": 2}")),
                     ESA_OK);
    assert_true(c.eos == -1 && c.positions == 77 && c.skip == 0); /* an old config */
    assert_refused(ctx,
                   esa_config_clip_text(ctx, &c, file("{" SIZES ", \"hidden_act\": \"gelu\"}")),
                   ESA_ERR_UNSUPPORTED, "hidden_act", NULL);
}

/* ---------------------------------------------------------------- memory */

typedef struct fault_run {
    esa_ctx *ctx;
    esa_nn nn;
    esa_part_env env;
} fault_run;

static esa_status run_dit(fault_run *r)
{
    const hunyuan_dit_case *c = &hunyuan_dits[0];
    float x[4 * 48], v[4 * 48], data[12 * 16], pooled[8];
    esa_dit *dit = NULL;
    esa_session *s = NULL;
    esa_session_params p = esa_session_params_default();
    const esa_text text = { .data = data, .pooled = pooled, .rows = 12, .valid = 7 };
    fill_tensor(x, 4 * 48, "x", 1, 0);
    fill_tensor(data, 12 * 16, "text", 1, 0);
    fill_tensor(pooled, 8, "pooled", 1, 0);
    p.mode = ESA_SESSION_DENSE;
    p.layers = 2;
    p.steps = 1;
    p.select.layout.text_back_q = 12;
    p.select.layout.order = ESA_ORDER_HILBERT;
    esa_status status = open_dit(&r->env, &dit, &esa_hunyuan_dit_kind, &c->config);
    if (!status)
        status = esa_dit_begin(dit, c->latent, &p.select.layout, p.select.selector, p.select.mode,
                               1);
    if (!status) status = esa_dit_text(dit, 0, &text);
    if (!status) status = esa_session_create(r->ctx, &s, &p);
    if (!status) status = esa_session_begin(s);
    if (!status) status = esa_session_step(s, 0, 0);
    const esa_dit_call call = { .session = s, .v = v, .x = x, .t = c->t, .guidance = 6 };
    if (!status) status = esa_dit_forward(dit, &call);
    esa_session_free(s);
    esa_dit_free(dit);
    return status;
}

static esa_status run_text(fault_run *r)
{
    esa_part *e = NULL;
    float out[4 * 32];
    esa_status status = open_causal(&r->env, &e, &hunyuan_texts[0].config, "text_encoder");
    if (!status) status = esa_causal_encode(e, out, (const int32_t[]){ 5, 9, 0, 98 }, 4);
    esa_part_free(e);
    return status;
}

static esa_status run_vae(fault_run *r)
{
    esa_vae *vae = NULL;
    static uint8_t rgb[17 * 16 * 24 * 3];
    float z[5 * 5 * 4 * 6];
    fill_tensor(z, 5 * 5 * 4 * 6, "z", 1, 0);
    esa_status status = open_vae(&r->env, &vae, &esa_hunyuan_vae_kind, &hunyuan_vaes[4].config);
    if (!status) status = esa_vae_frames(vae, z, (const int32_t[]){ 5, 4, 6 }, 16, rgb);
    esa_vae_free(vae);
    return status;
}

static void fail_each(const char *key, const char *part, const char *name,
                      esa_status (*run)(fault_run *))
{
    counting counter;
    fault_run r = { .ctx = counting_ctx(&counter, 1) };
    wan_folder folder = hunyuan_folder(r.ctx, key, part, name);
    const int64_t live = counter.live;
    int64_t at = 0;
    for (int32_t done = 0; !done; at++) {
        esa_nn_init(&r.nn, r.ctx);
        r.env = (esa_part_env){ .nn = &r.nn, .folder = folder.top.dir };
        counter.left = at;
        const esa_status status = run(&r);
        done = counter.left >= 0;
        counter.left = -1;
        if (done && status) print_error("%s\n", esa_ctx_error(r.ctx));
        if (done)
            assert_int_equal(status, ESA_OK);
        else
            assert_refused(r.ctx, status, ESA_ERR_MEMORY, "memory", NULL);
        assert_int_equal(r.nn.held, r.nn.scratch_bytes);
        esa_nn_close(&r.nn);
        if (at == 0 || done) continue; /* the ctx keeps its own scratch from the first success on */
        assert_true(counter.live <= live + 1);
    }
    print_message("%s: %lld allocations\n", part, (long long)at);
    esa_ctx_free(r.ctx);
    assert_int_equal(counter.live, 0);
    wan_folder_remove(&folder);
}

static void out_of_memory(void **unused)
{
    (void)unused;
    fail_each("dit.tiny", "transformer", "diffusion_pytorch_model.safetensors", run_dit);
    fail_each("llama.mini", "text_encoder", "model.safetensors", run_text);
    fail_each("vae3", "vae", "diffusion_pytorch_model.safetensors", run_vae);
}

static int begin(void **unused)
{
    (void)unused;
    dir = scratch_make();
    return esa_ctx_create(&ctx, NULL) != ESA_OK;
}

static int end(void **unused)
{
    (void)unused;
    esa_ctx_free(ctx);
    scratch_remove(&dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(transformer_configs),
                                        cmocka_unit_test(vae_configs),
                                        cmocka_unit_test(text_configs),
                                        cmocka_unit_test(out_of_memory) };
    return cmocka_run_group_tests(tests, begin, end);
}
