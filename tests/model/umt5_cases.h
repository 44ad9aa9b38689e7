/* umt5_cases.h - the text encoders that tests make up, and what they encode, on any device.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_UMT5_CASES_H
#define ESA_TESTS_MODEL_UMT5_CASES_H

#include "model/golden.h"
#include "model/host_bf16.h"
#include "model/open_part.h"
#include "model/wan_folder.h"

typedef struct umt5_case {
    const char *name;
    esa_umt5_config config;
    int64_t tokens;
} umt5_case;
/* The table of tools/golden/umt5.py. */
static const umt5_case cases[] = {
    { "mini",
      { .vocab = 99,
        .d_model = 32,
        .d_kv = 8,
        .ff = 37,
        .layers = 3,
        .heads = 4,
        .buckets = 32,
        .max_distance = 128 },
      7 },
    { "small",
      { .vocab = 264,
        .d_model = 192,
        .d_kv = 64,
        .ff = 384,
        .layers = 2,
        .heads = 3,
        .buckets = 32,
        .max_distance = 128 },
      33 },
    { "long",
      { .vocab = 120,
        .d_model = 48,
        .d_kv = 12,
        .ff = 64,
        .layers = 2,
        .heads = 5,
        .buckets = 20,
        .max_distance = 90 },
      300 },
    { "one",
      { .vocab = 99,
        .d_model = 32,
        .d_kv = 8,
        .ff = 37,
        .layers = 1,
        .heads = 4,
        .buckets = 32,
        .max_distance = 128 },
      1 },
    /* T5: the first layer's biases serve all. Padding is attended. */
    { "t5",
      { .vocab = 80,
        .d_model = 40,
        .d_kv = 12,
        .ff = 52,
        .layers = 3,
        .heads = 4,
        .buckets = 32,
        .max_distance = 128,
        .shared_bias = 1 },
      26 },
};

static inline wan_shapes umt5_shapes(const esa_umt5_config *c)
{
    wan_shapes s = { 0 };
    char name[128];
    const int64_t d = c->d_model, inner = (int64_t)c->heads * c->d_kv;
    shapes_add(&s, 2, c->vocab, d, 0, 0, 0, "shared.weight");
    for (int32_t i = 0; i < c->layers; i++) {
        static const char *const part[] = { "q", "k", "v", "o" };
        for (int32_t p = 0; p < 4; p++) {
            snprintf(name, sizeof name, "encoder.block.%d.layer.0.SelfAttention.%s.weight", i,
                     part[p]);
            shapes_add(&s, 2, p < 3 ? inner : d, p < 3 ? d : inner, 0, 0, 0, name);
        }
        snprintf(name, sizeof name,
                 "encoder.block.%d.layer.0.SelfAttention.relative_attention_bias.weight", i);
        if (i == 0 || !c->shared_bias) shapes_add(&s, 2, c->buckets, c->heads, 0, 0, 0, name);
        for (int32_t p = 0; p < 2; p++) {
            snprintf(name, sizeof name, "encoder.block.%d.layer.%d.layer_norm.weight", i, p);
            shapes_add(&s, 1, d, 0, 0, 0, 0, name);
            snprintf(name, sizeof name, "encoder.block.%d.layer.1.DenseReluDense.wi_%d.weight", i,
                     p);
            shapes_add(&s, 2, c->ff, d, 0, 0, 0, name);
        }
        snprintf(name, sizeof name, "encoder.block.%d.layer.1.DenseReluDense.wo.weight", i);
        shapes_add(&s, 2, d, c->ff, 0, 0, 0, name);
    }
    shapes_add(&s, 1, d, 0, 0, 0, 0, "encoder.final_layer_norm.weight");
    return s;
}

/* A folder with made-up weights of a case as f32 or bf16; queries are a quarter as large, as in the
 * golden. */
static inline wan_folder make_folder(esa_ctx *ctx, const esa_umt5_config *c, int32_t dtype)
{
    wan_folder f = { .top = scratch_make() };
    snprintf(f.part.dir, sizeof f.part.dir, "%.200s/text_encoder", f.top.dir);
    assert_int_equal(mkdir(f.part.dir, 0755), 0);
    FILE *config = fopen(scratch_path(&f.part, "config.json"), "w");
    assert_non_null(config);
    fprintf(config,
            "{\"model_type\": \"%s\", \"vocab_size\": %d, \"d_model\": %d, \"d_kv\": %d, "
            "\"num_heads\": %d, \"num_layers\": %d, \"d_ff\": %d,\n"
            "\"relative_attention_num_buckets\": %d, \"relative_attention_max_distance\": %d, "
            "\"feed_forward_proj\": \"gated-gelu\",\n"
            "\"layer_norm_epsilon\": 1e-06}\n",
            c->shared_bias ? "t5" : "umt5", c->vocab, c->d_model, c->d_kv, c->heads, c->layers,
            c->ff, c->buckets, c->max_distance);
    fclose(config);
    wan_shapes s = umt5_shapes(c);
    esa_tensors_writer *w = NULL;
    assert_int_equal(esa_tensors_writer_create(ctx, &w, scratch_path(&f.part, "model.safetensors")),
                     ESA_OK);
    for (int64_t i = 0; i < s.count; i++)
        assert_int_equal(
            esa_tensors_writer_declare(w, s.list[i].name, dtype, s.list[i].rank, s.list[i].dim),
            ESA_OK);
    for (int64_t i = 0; i < s.count; i++) {
        const int64_t n = shape_count(&s.list[i]);
        float *data = malloc((size_t)n * 4);
        fill_weight(data, s.list[i].name, s.list[i].rank, s.list[i].dim);
        for (int64_t k = 0; k < n && strstr(s.list[i].name, ".SelfAttention.q."); k++)
            data[k] *= 0.25f;
        uint16_t *half = (uint16_t *)data;
        if (dtype == ESA_FILE_BF16)
            for (int64_t k = 0; k < n; k++) half[k] = esa_f32_to_bf16(data[k]);
        assert_int_equal(esa_tensors_writer_data(w, data, n * (dtype == ESA_FILE_BF16 ? 2 : 4)),
                         ESA_OK);
        free(data);
    }
    assert_int_equal(esa_tensors_writer_finish(w), ESA_OK);
    esa_tensors_writer_free(w);
    free(s.list);
    return f;
}

typedef struct bench {
    esa_ctx *ctx;
    esa_nn nn;
    esa_umt5_config config;
    esa_part_env env;
    esa_part *encoder;
} bench;

static inline void ok(bench *b, esa_status status)
{
    if (status != ESA_OK) print_error("%s: %s\n", esa_status_name(status), esa_ctx_error(b->ctx));
    assert_int_equal(status, ESA_OK);
}

static inline void bench_open_on(bench *b, esa_ctx *ctx, const char *folder, int32_t hold,
                                 int32_t device)
{
    *b = (bench){ .ctx = ctx };
    esa_nn_init(&b->nn, ctx);
    ok(b, use_device(&b->nn, device));
    b->env = (esa_part_env){ .nn = &b->nn, .folder = folder, .hold = hold };
    char path[640];
    snprintf(path, sizeof path, "%s/text_encoder/config.json", folder);
    /* The folder of a case says which of the two it is. */
    if (esa_config_umt5(ctx, &b->config, path)) ok(b, esa_config_t5(ctx, &b->config, path));
    ok(b, open_umt5(&b->env, &b->encoder, &b->config));
}

static inline void bench_open(bench *b, esa_ctx *ctx, const char *folder, int32_t hold)
{
    bench_open_on(b, ctx, folder, hold, ESA_DEVICE_CPU);
}

static inline void bench_close(bench *b)
{
    esa_part_free(b->encoder);
    assert_int_equal(b->nn.held, b->nn.scratch_bytes);
    esa_nn_close(&b->nn);
}

static inline esa_ctx *make_ctx(int32_t threads)
{
    esa_ctx *ctx = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = threads;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

static inline float *encode(bench *b, const char *name, int64_t n)
{
    int32_t *ids = malloc((size_t)n * 4);
    float *out = malloc((size_t)(n * b->config.d_model) * 4);
    char full[64];
    snprintf(full, sizeof full, "%s.ids", name);
    for (int64_t i = 0; i < n; i++)
        ids[i] = (int32_t)(((double)fill_unit(fill_name(full), i) + 1) / 2 * b->config.vocab);
    ok(b, esa_umt5_encode(b->encoder, out, ids, n));
    free(ids);
    return out;
}

static inline void model_folder(char *folder, size_t size)
{
    const char *models = getenv("ESA_TEST_MODELS");
    snprintf(folder, size, "%s/wan-tiny", models ? models : "models");
}

#endif
