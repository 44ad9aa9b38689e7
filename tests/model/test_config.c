/* test_config.c - reads the configs of wan-tiny, and those that must be refused with one
 * message.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/golden.h"
#include "model/family/family.h"
#include "model/config/json_file.h"

static esa_ctx *ctx;
static scratch dir;

static const char *file(const char *text)
{
    const char *path = scratch_path(&dir, "config.json");
    scratch_write(path, text, strlen(text));
    return path;
}

static void expect(esa_status got, esa_status want, const char *words)
{
    if (got != want || !strstr(esa_ctx_error(ctx), words))
        print_error("%s: %s\n(expected '%s')\n", esa_status_name(got), esa_ctx_error(ctx), words);
    assert_int_equal(got, want);
    assert_non_null(strstr(esa_ctx_error(ctx), words));
    assert_null(strchr(esa_ctx_error(ctx), '\n'));
}

static const char *model_path(const char *name)
{
    static char path[700];
    const char *models = getenv("ESA_TEST_MODELS");
    snprintf(path, sizeof path, "%s/wan-tiny/%s", models && *models ? models : "models", name);
    return path;
}

static void wan_tiny(void **state)
{
    (void)state;
    esa_model_index index;
    esa_wan_config t;
    static esa_wan_vae_config v;
    esa_umt5_config u;
    esa_sched_config s;
    assert_int_equal(esa_config_index(ctx, &index, model_path("model_index.json")), ESA_OK);
    assert_string_equal(index.transformer, "WanTransformer3DModel");
    assert_int_equal(esa_config_wan(ctx, &t, model_path("transformer/config.json")), ESA_OK);
    assert_true(t.heads == 4 && t.head_dim == 64 && t.layers == 8 && t.ffn == 512 &&
                t.text_dim == 192 && t.cross_norm == 1);
    assert_true(t.patch[0] == 1 && t.patch[1] == 2 && t.patch[2] == 2 &&
                strncmp(t.hash, "fnv1a64:", 8) == 0);
    assert_int_equal(esa_config_wan_vae(ctx, &v, model_path("vae/config.json")), ESA_OK);
    assert_true(v.levels == 3 && v.factor_t == 2 && v.factor_s == 4 && v.z_dim == 16 &&
                v.base_dim == 24 && v.decoder_base_dim == 24);
    assert_true(v.temporal[0] == 0 && v.temporal[1] == 1 && v.std[15] > 0);
    assert_int_equal(esa_config_umt5(ctx, &u, model_path("text_encoder/config.json")), ESA_OK);
    assert_true(u.d_model == 192 && u.heads == 3 && u.layers == 2 && u.eos == 1);
    assert_int_equal(esa_config_sched(ctx, &s, model_path("scheduler/scheduler_config.json")),
                     ESA_OK);
    assert_true(s.kind == ESA_SCHED_UNIPC && s.order == 2 && s.shift == 8.0 &&
                s.train_steps == 1000);
}

#define WAN(more)                                                                                  \
    "{\"num_attention_heads\": 2, \"attention_head_dim\": 12, \"num_layers\": 2, \"ffn_dim\": "    \
    "32, \"in_channels\": 4, \"text_dim\": 16" more "}"

static void transformer(void **state)
{
    (void)state;
    esa_wan_config c;
    char hash[80];
    assert_int_equal(esa_config_wan(ctx, &c, file(WAN(""))), ESA_OK);
    assert_true(c.out_channels == 4 && c.freq_dim == 256 && c.rope_max == 1024 && c.eps == 1e-6);
    memcpy(hash, c.hash, sizeof hash);
    assert_int_equal(esa_config_wan(ctx, &c, file(WAN(", \"_diffusers_version\": \"9\""))), ESA_OK);
    assert_string_equal(hash, c.hash); /* the version that saved it does not matter */
    assert_int_equal(esa_config_wan(ctx, &c, file(WAN(", \"eps\": 1e-5"))), ESA_OK);
    assert_string_not_equal(hash, c.hash);
    static const struct {
        const char *text, *words;
        esa_status status;
    } bad[] = {
        { "", "is not JSON", ESA_ERR_FORMAT },
        { "{", "is not JSON", ESA_ERR_FORMAT },
        { "7", "is not JSON", ESA_ERR_FORMAT },
        { "[1]", "is not a JSON object", ESA_ERR_FORMAT },
        { "{\"a\": 1, \"a\": 2}", "is not JSON", ESA_ERR_FORMAT },
        { "{}", "num_attention_heads is missing", ESA_ERR_FORMAT },
        { WAN(", \"num_layers\": 2"), "is not JSON", ESA_ERR_FORMAT },
        { "{\"num_attention_heads\": 1000000000, \"attention_head_dim\": 12}",
          "num_attention_heads is 1000000000, expected an integer from 1 to 1024", ESA_ERR_FORMAT },
        { "{\"num_attention_heads\": -2}", "num_attention_heads is -2", ESA_ERR_FORMAT },
        { "{\"num_attention_heads\": 2.5}", "num_attention_heads is 2.5", ESA_ERR_FORMAT },
        { "{\"num_attention_heads\": \"2\"}", "num_attention_heads is \"2\"", ESA_ERR_FORMAT },
        { "{\"num_attention_heads\": 1024, \"attention_head_dim\": 256, \"num_layers\": 1, "
          "\"ffn_dim\": 1, \"in_channels\": 1, \"text_dim\": 1}",
          "are more than 65536", ESA_ERR_FORMAT },
        { WAN(", \"patch_size\": [1, 2]"), "expected a list of 3 integers", ESA_ERR_FORMAT },
        { WAN(", \"patch_size\": [0, 2, 2]"), "expected a list of 3 integers", ESA_ERR_FORMAT },
        { WAN(", \"freq_dim\": 3"), "freq_dim is 3, expected an even number", ESA_ERR_UNSUPPORTED },
        { WAN(", \"eps\": 0"), "eps is 0", ESA_ERR_FORMAT },
        { WAN(", \"cross_attn_norm\": 1"), "expected true or false", ESA_ERR_FORMAT },
        { WAN(", \"image_dim\": 1280"), "added_kv_proj_dim is 0, expected the model",
          ESA_ERR_UNSUPPORTED },
        { WAN(", \"_class_name\": \"HunyuanVideoTransformer3DModel\""),
          "expected \"WanTransformer3DModel\"", ESA_ERR_UNSUPPORTED },
        { WAN(", \"qk_norm\": \"layer\""), "qk_norm is", ESA_ERR_UNSUPPORTED },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect(esa_config_wan(ctx, &c, file(bad[i].text)), bad[i].status, bad[i].words);
    expect(esa_config_wan(ctx, &c, scratch_path(&dir, "nowhere.json")), ESA_ERR_IO, "No such file");
    expect(esa_config_wan(ctx, &c, dir.dir), ESA_ERR_IO, "is a folder, expected a file");
    assert_int_equal(esa_config_wan_memory(ctx, &c, "{\"num_layers\": 1\0}", 18, "bytes"),
                     ESA_ERR_FORMAT);
}

#define VAE(more) "{\"z_dim\": 2, \"latents_mean\": [0, 1], \"latents_std\": [1, 2.5]" more "}"

static void vae(void **state)
{
    (void)state;
    static esa_wan_vae_config c;
    assert_int_equal(esa_config_wan_vae(ctx, &c, file(VAE(""))), ESA_OK);
    assert_true(c.levels == 4 && c.factor_t == 4 && c.factor_s == 8 && c.base_dim == 96 &&
                c.mean[1] == 1 && c.std[1] == 2.5);
    static const struct {
        const char *text, *words;
        esa_status status;
    } bad[] = {
        { VAE(", \"scale_factor_temporal\": 2"), "temperal_downsample gives 4", ESA_ERR_FORMAT },
        { VAE(", \"dim_mult\": [1, 2, 4]"), "temperal_downsample is missing", ESA_ERR_FORMAT },
        { VAE(", \"dim_mult\": []"), "a list of 1 to 8 integers", ESA_ERR_FORMAT },
        { VAE(", \"dim_mult\": [1, 2, 4, 4, 4, 4, 4, 4, 4]"), "a list of 1 to 8 integers",
          ESA_ERR_FORMAT },
        { VAE(", \"dim_mult\": [1, 2], \"temperal_downsample\": [true], \"scale_factor_temporal\": "
              "2"),
          "2 levels give 2", ESA_ERR_FORMAT },
        { VAE(", \"attn_scales\": [1.0]"), "attn_scales has 1 entries", ESA_ERR_UNSUPPORTED },
        { VAE(", \"is_residual\": true"), "is_residual is true", ESA_ERR_UNSUPPORTED },
        { VAE(", \"decoder_base_dim\": 1, \"dim_mult\": [1, 1, 2, 2]"),
          "level 1 of the decoder has 1 channel", ESA_ERR_FORMAT },
        { "{\"z_dim\": 3, \"latents_mean\": [0, 1], \"latents_std\": [1, 2]}",
          "latents_mean has 2 numbers, expected 3 (z_dim)", ESA_ERR_FORMAT },
        { "{\"z_dim\": 1, \"latents_mean\": [0], \"latents_std\": [0]}", "entry 0 of latents_std",
          ESA_ERR_FORMAT },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect(esa_config_wan_vae(ctx, &c, file(bad[i].text)), bad[i].status, bad[i].words);
}

#define UNIPC(more)                                                                                \
    "{\"_class_name\": \"UniPCMultistepScheduler\", \"use_flow_sigmas\": true, "                   \
    "\"prediction_type\": \"flow_prediction\"" more "}"

static void scheduler_and_text(void **state)
{
    (void)state;
    esa_sched_config s;
    esa_umt5_config u;
    esa_model_index index;
    assert_int_equal(esa_config_sched(ctx, &s, file(UNIPC(", \"flow_shift\": 5.0"))), ESA_OK);
    assert_true(s.shift == 5 && s.order == 2);
    assert_int_equal(
        esa_config_sched(
            ctx, &s,
            file("{\"_class_name\": \"FlowMatchEulerDiscreteScheduler\", \"shift\": 7.0}")),
        ESA_OK);
    assert_true(s.kind == ESA_SCHED_EULER && s.shift == 7);
    static const struct {
        const char *text, *words;
        esa_status status;
    } bad[] = {
        { "{\"_class_name\": \"DDIMScheduler\"}",
          "expected UniPCMultistepScheduler, FlowMatchEulerDiscreteScheduler,",
          ESA_ERR_UNSUPPORTED },
        { "{\"_class_name\": \"UniPCMultistepScheduler\"}", "the engine runs flow models only",
          ESA_ERR_UNSUPPORTED },
        { UNIPC(", \"solver_order\": 3"), "solver_order is 3", ESA_ERR_FORMAT },
        { UNIPC(", \"flow_shift\": -1"), "flow_shift is -1", ESA_ERR_FORMAT },
        { UNIPC(", \"use_karras_sigmas\": true"), "use_karras_sigmas is true",
          ESA_ERR_UNSUPPORTED },
        { UNIPC(", \"solver_type\": \"bh1\""), "solver_type is \"bh1\"", ESA_ERR_UNSUPPORTED },
        { UNIPC(", \"disable_corrector\": [0]"), "disable_corrector is not empty",
          ESA_ERR_UNSUPPORTED },
        { "{}", "_class_name is missing", ESA_ERR_FORMAT },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect(esa_config_sched(ctx, &s, file(bad[i].text)), bad[i].status, bad[i].words);
    expect(esa_config_umt5(ctx, &u, file("{\"model_type\": \"t5\"}")), ESA_ERR_UNSUPPORTED,
           "model_type is \"t5\"");
    expect(esa_config_umt5(ctx, &u, file("{\"vocab_size\": 0}")), ESA_ERR_FORMAT,
           "vocab_size is 0");
#define UMT5(more)                                                                                 \
    "{\"vocab_size\": 99, \"d_model\": 8, \"d_kv\": 2, \"num_heads\": 2, \"num_layers\": 1, "      \
    "\"d_ff\": 4" more "}"
    assert_int_equal(esa_config_umt5(ctx, &u,
                                     file(UMT5(", \"relative_attention_num_buckets\": 32, "
                                               "\"relative_attention_max_distance\": 9"))),
                     ESA_OK);
    /* longer distances would fall into buckets below 0 */
    expect(esa_config_umt5(ctx, &u, file(UMT5(", \"relative_attention_max_distance\": 1"))),
           ESA_ERR_FORMAT, "max_distance is 1, expected more than 8 with 32 buckets");
    expect(esa_config_umt5(ctx, &u, file(UMT5(", \"relative_attention_max_distance\": 8"))),
           ESA_ERR_FORMAT, "max_distance is 8");
    const esa_family *family;
    snprintf(index.pipeline, sizeof index.pipeline, "FluxPipeline");
    expect(esa_family_find(ctx, &family, &index), ESA_ERR_UNSUPPORTED,
           "_class_name is FluxPipeline, expected one of WanPipeline");
    snprintf(index.pipeline, sizeof index.pipeline, "WanPipeline");
    assert_int_equal(esa_family_find(ctx, &family, &index), ESA_OK);
    assert_string_equal(family->name, "Wan");
    expect(esa_config_index(ctx, &index,
                            file("{\"_class_name\": \"WanPipeline\", \"transformer\": [1]}")),
           ESA_ERR_FORMAT, "transformer is missing");
}

/* CogVideoX: the defaults are those of the 2B model; other versions and tasks are refused. */
static void cog(void **state)
{
    (void)state;
    esa_cog_config c;
    esa_cog_vae_config v;
    esa_sched_config s;
    assert_int_equal(esa_config_cog(ctx, &c, file("{}")), ESA_OK);
    assert_true(c.heads == 30 && c.head_dim == 64 && c.layers == 30 && c.max_text == 226 &&
                !c.rotary && c.patch_bias && c.attention_bias && c.sample_h == 60);
    static const struct {
        const char *text, *words;
    } bad[] = {
        { "{\"patch_size_t\": 2}", "patch_size_t is 2" },
        { "{\"ofs_embed_dim\": 512}", "ofs_embed_dim is 512" },
        { "{\"use_learned_positional_embeddings\": true}", "use_learned" },
        { "{\"activation_fn\": \"gelu\"}", "activation_fn is" },
        { "{\"freq_shift\": 1}", "freq_shift is 1" },
        { "{\"attention_head_dim\": 24, \"use_rotary_positional_embeddings\": true}",
          "expected a multiple of 16" },
        { "{\"num_attention_heads\": 1, \"attention_head_dim\": 20}", "the width is 20" },
        { "{\"sample_height\": 1}", "less than a patch" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_not_equal(esa_config_cog(ctx, &c, file(bad[i].text)), ESA_OK);
        assert_non_null(strstr(esa_ctx_error(ctx), bad[i].words));
    }
    assert_int_equal(esa_config_cog_vae(ctx, &v, file("{}")), ESA_OK);
    assert_true(v.levels == 4 && v.width[3] == 512 && v.factor_t == 4 && v.factor_s == 8);
    expect(esa_config_cog_vae(ctx, &v, file("{\"temporal_compression_ratio\": 3}")),
           ESA_ERR_UNSUPPORTED, "a power of 2 up to 8");
    expect(esa_config_cog_vae(ctx, &v, file("{\"norm_num_groups\": 48}")), ESA_ERR_FORMAT,
           "no multiple of 48 groups");
    expect(esa_config_cog_vae(ctx, &v, file("{\"use_post_quant_conv\": true}")),
           ESA_ERR_UNSUPPORTED, "use_post_quant_conv");
#define DDIM(more) "{\"_class_name\": \"CogVideoXDDIMScheduler\"" more "}"
    assert_int_equal(esa_config_sched(ctx, &s,
                                      file(DDIM(", \"prediction_type\": \"v_prediction\", "
                                                "\"timestep_spacing\": \"trailing\""))),
                     ESA_OK);
    assert_true(s.kind == ESA_SCHED_DDIM && s.snr_shift == 3 && s.spacing == ESA_SPACING_TRAILING);
    expect(esa_config_sched(ctx, &s, file(DDIM(""))), ESA_ERR_UNSUPPORTED, "prediction_type");
    expect(esa_config_sched(ctx, &s,
                            file(DDIM(", \"prediction_type\": \"v_prediction\", "
                                      "\"timestep_spacing\": \"other\""))),
           ESA_ERR_UNSUPPORTED, "timestep_spacing is other");
}

/* An integer that 64 bits cannot hold costs the file nothing else: only a reader that wants that
 * number refuses it, and says what it is. */
static void wide_integers(void **state)
{
    (void)state;
    static const char *const values[] = { "1000000000000000019884624838656", "9223372036854775808",
                                          "-9223372036854775809" };
    char text[400];
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        esa_json_file f;
        snprintf(text, sizeof text,
                 "{\"a\": 4, \"wide\":%s, \"b\": -7, \"text\": \"%s \\\" %s\", \"real\": 1.5e3,\n"
                 "\"list\":[%s, 3], \"most\": 9223372036854775807}",
                 values[i], values[i], values[i], values[i]);
        assert_int_equal(esa_json_file_open(ctx, &f, file(text)), ESA_OK);
        assert_int_equal(esa_json_int(&f, "a", 0, 9, ESA_JSON_REQUIRED), 4);
        assert_int_equal(esa_json_int(&f, "b", -9, 9, ESA_JSON_REQUIRED), -7);
        assert_true(esa_json_int(&f, "most", 0, INT64_MAX, ESA_JSON_REQUIRED) == INT64_MAX);
        assert_true(esa_json_real(&f, "real", 0, 1e4, (double)NAN) == 1500);
        assert_int_equal(strncmp(esa_json_text(&f, "text", NULL), values[i], strlen(values[i])), 0);
        assert_int_equal(json_integer_value(json_array_get(json_object_get(f.root, "list"), 1)), 3);
        assert_int_equal(f.status, ESA_OK);
        esa_json_int(&f, "wide", 1, 1024, ESA_JSON_REQUIRED);
        expect(f.status, ESA_ERR_FORMAT, i ? "wide is" : "wide is 1");
        expect(f.status, ESA_ERR_FORMAT,
               i == 0 ? "e30, expected an integer from 1 to 1024"
                      : "e18, expected an integer from 1 to 1024");
        esa_json_file_close(&f);
    }
    /* Text that ends within a string or a number is refused as before. */
    static const char *const cut[] = { "{\"wide\":99999999999999999999, \"a",
                                       "{\"wide\":99999999999999999999",
                                       "{\"wide\":99999999999999999999, \"a\\" };
    for (size_t i = 0; i < 3; i++) {
        esa_json_file f;
        expect(esa_json_file_open(ctx, &f, file(cut[i])), ESA_ERR_FORMAT, "is not JSON");
        esa_json_file_close(&f);
    }
}

/* jansson's allocations, of which one fails. */
static int calls, failing;
static void *fail_once(size_t bytes) { return ++calls == failing ? NULL : malloc(bytes); }

/* jansson leaves out a byte of a text or number for which it has no memory: then the file is
 * refused, and never read as another one. */
static void parse_without_memory(void **state)
{
    (void)state;
    static const char text[] = "{\"a_class_name_of_more_than_32_bytes\": "
                               "\"FlowMatchEulerDiscreteScheduler, and more than 64 "
                               "bytes of text\", \"x\": 0.123456789012345678901234567890123456789, "
                               "\"y\": [1234567890123456789]}";
    esa_json_file whole;
    int refused = 0, read = 0;
    assert_int_equal(esa_json_file_parse(ctx, &whole, text, sizeof text - 1, "text"), ESA_OK);
    for (failing = 1; !read; failing++) {
        esa_json_file f;
        calls = 0;
        json_set_alloc_funcs(fail_once, free);
        const esa_status status = esa_json_file_parse(ctx, &f, text, sizeof text - 1, "text");
        json_set_alloc_funcs(malloc, free);
        read = calls < failing;
        if (status) {
            refused++;
            /* or it meets what it left out */
            assert_true(status == ESA_ERR_MEMORY || status == ESA_ERR_FORMAT);
        } else
            assert_true(json_equal(f.root, whole.root));
        esa_json_file_close(&f);
        if (read) assert_int_equal(status, ESA_OK);
    }
    assert_true(refused > 10); /* objects, texts and their growth, in both passes */
    esa_json_file_close(&whole);
}

/* A hash that lacks a part would fit other masks than the model's: without memory there is none. */
static void hash_without_memory(void **state)
{
    (void)state;
    const char *text =
        "{\"a\": [1, {\"c\": 2.5, \"b\": \"text\"}], \"_note\": 1, \"d\": {\"e\": null}}";
    char want[80], hash[80];
    int refused = 0, whole = 0;
    for (failing = 0; whole < 2; failing++) { /* without a failure, and when n calls are too few */
        esa_json_file f;
        assert_int_equal(esa_json_file_open(ctx, &f, file(text)), ESA_OK);
        calls = 0;
        json_set_alloc_funcs(fail_once, free);
        esa_json_hash(&f, failing ? hash : want);
        json_set_alloc_funcs(malloc, free);
        if (failing && calls >= failing) {
            expect(f.status, ESA_ERR_MEMORY, "out of memory");
            refused++;
        } else {
            assert_int_equal(f.status, ESA_OK);
            assert_string_equal(failing ? hash : want, want);
            whole++;
        }
        esa_json_file_close(&f);
    }
    assert_true(refused > 5); /* objects, their tables, the sorted keys */
}

int main(void)
{
    if (esa_ctx_create(&ctx, NULL) != ESA_OK) return 1;
    dir = scratch_make();
    const struct CMUnitTest tests[] = { cmocka_unit_test(wan_tiny),
                                        cmocka_unit_test(transformer),
                                        cmocka_unit_test(vae),
                                        cmocka_unit_test(cog),
                                        cmocka_unit_test(scheduler_and_text),
                                        cmocka_unit_test(wide_integers),
                                        cmocka_unit_test(parse_without_memory),
                                        cmocka_unit_test(hash_without_memory) };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_remove(&dir);
    esa_ctx_free(ctx);
    return failed;
}
