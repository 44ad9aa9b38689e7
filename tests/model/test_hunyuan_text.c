/* test_hunyuan_text.c - Llama and CLIP's text model against transformers; bad ids and files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/hunyuan_cases.h"
#include "model/open_part.h"

static void ids_of(int32_t *ids, const hunyuan_text_case *c)
{
    char full[64];
    snprintf(full, sizeof full, "%s.ids", c->name);
    for (int64_t i = 0; i < c->tokens; i++)
        ids[i] = (int32_t)(((double)fill_unit(fill_name(full), i) + 1) / 2 * (c->config.vocab - 1));
    if (c->config.kind == ESA_CAUSAL_CLIP) ids[c->tokens - 1] = c->config.eos;
}

static void matches_transformers(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof hunyuan_texts / sizeof hunyuan_texts[0]; i++) {
        const hunyuan_text_case *c = &hunyuan_texts[i];
        hunyuan_bench b;
        float *first = NULL;
        int32_t ids[256];
        ids_of(ids, c);
        for (int32_t threads = 1; threads <= 3; threads += 2) { /* the same bits with any number */
            hunyuan_begin(&b, threads, ESA_DEVICE_CPU);
            wan_folder f = hunyuan_folder(b.ctx, c->name, "text_encoder", "model.safetensors");
            esa_tensors *golden = golden_open(b.ctx, "hunyuan.safetensors");
            const int64_t d = c->config.d, n = c->tokens * d;
            float *out = malloc((size_t)n * 4);
            esa_part *e;
            b.env.folder = f.top.dir;
            hunyuan_ok(&b, open_causal(&b.env, &e, &c->config, "text_encoder"));
            hunyuan_ok(&b, esa_causal_encode(e, out, ids, c->tokens));
            const int32_t pooled = c->config.kind == ESA_CAUSAL_CLIP;
            const double error = hunyuan_compare(golden, c->name, pooled ? out + n - d : out,
                                                 pooled ? d : n);
            print_message("%s: %.2e\n", c->name, error);
            if (first) assert_memory_equal(first, out, (size_t)n * 4);
            free(first);
            first = out;
            esa_part_free(e);
            esa_tensors_free(golden);
            wan_folder_remove(&f);
            hunyuan_end(&b);
        }
        free(first);
    }
}

static void refuses(void **unused)
{
    (void)unused;
    const hunyuan_text_case *llama = &hunyuan_texts[0], *clip = &hunyuan_texts[2];
    hunyuan_bench b;
    hunyuan_begin(&b, 1, ESA_DEVICE_CPU);
    wan_folder f = hunyuan_folder(b.ctx, clip->name, "text_encoder_2", "model.safetensors");
    b.env.folder = f.top.dir;
    esa_part *e;
    float out[32];
    int32_t ids[32] = { 5, 99 };
    hunyuan_ok(&b, open_causal(&b.env, &e, &clip->config, "text_encoder_2"));
    assert_refused(b.ctx, esa_causal_encode(e, out, ids, 2), ESA_ERR_ARGUMENT, "99", "98", NULL);
    assert_refused(b.ctx, esa_causal_encode(e, out, ids, 0), ESA_ERR_ARGUMENT, "no tokens", NULL);
    assert_refused(b.ctx, esa_causal_encode(e, out, ids, 21), ESA_ERR_ARGUMENT, "21", "20", NULL);
    esa_part_free(e);
    esa_causal_config other = clip->config;
    other.layers = 4;
    assert_refused(b.ctx, check_causal(&b.env, &other, "text_encoder_2"), ESA_ERR_MISMATCH,
                   "layers.3", NULL);
    /* the last layers of Llama are not run, but must be there */
    assert_refused(b.ctx, check_causal(&b.env, &llama->config, "text_encoder_2"), ESA_ERR_MISMATCH,
                   "embed_tokens", NULL);
    wan_folder_remove(&f);
    hunyuan_end(&b);
}

/* Names with a prefix, as LlamaForCausalLM and older versions of CLIPTextModel have them. */
static void prefixes(void **unused)
{
    (void)unused;
    for (int32_t i = 0; i < 3; i += 2) {
        const hunyuan_text_case *c = &hunyuan_texts[i];
        const int32_t clip = c->config.kind == ESA_CAUSAL_CLIP;
        hunyuan_bench b;
        hunyuan_begin(&b, 1, ESA_DEVICE_CPU);
        wan_folder f = hunyuan_folder(b.ctx, c->name, "text_encoder", "model.safetensors");
        b.env.folder = f.top.dir;
        wan_shapes s = hunyuan_shapes(c->name);
        const char *prefix = clip ? "text_model." : "model.";
        for (int64_t k = 0; k < s.count; k++) {
            char name[160];
            const int32_t has = strncmp(s.list[k].name, prefix, strlen(prefix)) == 0;
            snprintf(name, sizeof name, "%s%.120s", has ? "" : prefix, s.list[k].name);
            snprintf(s.list[k].name, sizeof s.list[k].name, "%s", name);
        }
        if (!clip) shapes_add(&s, 2, 99, 32, 0, 0, 0, "lm_head.weight");
        wan_write_holes(scratch_path(&f.part, "model.safetensors"), s.list, s.count, "F32", 4);
        hunyuan_ok(&b, check_causal(&b.env, &c->config, "text_encoder"));
        free(s.list);
        wan_folder_remove(&f);
        hunyuan_end(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(matches_transformers),
                                        cmocka_unit_test(refuses), cmocka_unit_test(prefixes) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
