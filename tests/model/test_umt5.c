/* test_umt5.c - the text encoder against transformers; all ways to hold weights agree; bad ids and
 * files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/text.h"
#include "model/umt5_cases.h"

/* f32 against f32 with another order of sums: 1e-6 of the scale is seen, the engine promises
 * 1e-4. */
#define TOLERANCE 2e-5

static void compare(bench *b, const esa_tensors *golden, const char *name, const float *got,
                    int64_t n)
{
    char scale[64];
    int64_t count, one;
    const int64_t every = atoll(esa_tensors_metadata(golden, "every"));
    const float *want = golden_find(golden, name, &count);
    snprintf(scale, sizeof scale, "%s.scale", name);
    assert_int_equal(count, (n * b->config.d_model + every - 1) / every);
    const double e = golden_error(got, every, want, count, golden_find(golden, scale, &one)[0]);
    print_message("%s: %.2e\n", name, e);
    assert_true(e < TOLERANCE);
}

static void matches_transformers(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx(2);
    esa_tensors *golden = golden_open(ctx, "umt5.safetensors");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        wan_folder f = make_folder(ctx, &cases[i].config, ESA_FILE_F32);
        bench b;
        bench_open(&b, ctx, f.top.dir, ESA_HOLD_F32);
        float *out = encode(&b, cases[i].name, cases[i].tokens);
        compare(&b, golden, cases[i].name, out, cases[i].tokens);
        free(out);
        bench_close(&b);
        wan_folder_remove(&f);
    }
    esa_tensors_free(golden);
    esa_ctx_free(ctx);
}

/* Only the live golden has it, because the real weights may be trained again. */
static void matches_transformers_with_real_weights(void **unused)
{
    (void)unused;
    char folder[512];
    model_folder(folder, sizeof folder);
    esa_ctx *ctx = make_ctx(2);
    bench b;
    bench_open(&b, ctx, folder, ESA_HOLD_AUTO);
    esa_tensors *golden = golden_open(ctx, "umt5.safetensors");
    float *out = encode(&b, "model", 40);
    esa_tensor_info info = { .struct_size = sizeof info };
    if (esa_tensors_find(golden, "model", &info) == ESA_OK) compare(&b, golden, "model", out, 40);
    free(out);
    esa_tensors_free(golden);
    bench_close(&b);
    esa_ctx_free(ctx);
}

/* bf16 weights mapped, converted once, or kept give the same bits, on any number of threads. */
static void held_in_any_way(void **unused)
{
    (void)unused;
    static const int32_t holds[] = { ESA_HOLD_F32, ESA_HOLD_FILE, ESA_HOLD_BF16, ESA_HOLD_AUTO };
    float *first = NULL;
    const umt5_case *c = &cases[1];
    for (int32_t i = 0; i < 4; i++) {
        esa_ctx *ctx = make_ctx(1 + i % 3);
        wan_folder f = make_folder(ctx, &c->config, ESA_FILE_BF16);
        bench b;
        bench_open(&b, ctx, f.top.dir, holds[i]);
        int64_t parameters, held, mapped;
        esa_part_memory(b.encoder, &parameters, &held, &mapped);
        /* the others use the bf16 of the file */
        const int32_t copied = holds[i] == ESA_HOLD_F32 || holds[i] == ESA_HOLD_AUTO;
        assert_true(copied ? held >= 4 * parameters
                           : mapped >= 2 * parameters && held < parameters);
        float *out = encode(&b, c->name, c->tokens);
        if (!first)
            first = out;
        else {
            assert_memory_equal(first, out, (size_t)(c->tokens * c->config.d_model) * 4);
            free(out);
        }
        bench_close(&b);
        wan_folder_remove(&f);
        esa_ctx_free(ctx);
    }
    free(first);
}

static void refuses(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx(1);
    wan_folder f = make_folder(ctx, &cases[0].config, ESA_FILE_F32);
    bench b;
    bench_open(&b, ctx, f.top.dir, ESA_HOLD_AUTO);
    float out[64];
    assert_refused(ctx, esa_umt5_encode(b.encoder, out, (const int32_t[]){ 5, 99 }, 2),
                   ESA_ERR_ARGUMENT, "99", "98", NULL);
    assert_refused(ctx, esa_umt5_encode(b.encoder, out, NULL, 0), ESA_ERR_ARGUMENT, "no tokens",
                   NULL);
    esa_umt5_config other = b.config;
    other.layers = 4;
    esa_part *none = b.encoder;
    assert_refused(ctx, open_umt5(&b.env, &none, &other), ESA_ERR_MISMATCH, "encoder.block.3",
                   NULL);
    assert_null(none);
    bench_close(&b);
    wan_folder_remove(&f);
    esa_ctx_free(ctx);
}

/* UMT5-XXL as on the hub (bf16, 11 GB): names and shapes match, and opening maps the file instead
 * of reading it. */
static void hub_sized(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx(1);
    wan_folder f = make_folder(ctx, &cases[0].config, ESA_FILE_F32);
    bench b;
    bench_open(&b, ctx, f.top.dir, ESA_HOLD_AUTO);
    const esa_umt5_config xxl = { .vocab = 256384,
                                  .d_model = 4096,
                                  .d_kv = 64,
                                  .heads = 64,
                                  .layers = 24,
                                  .ff = 10240,
                                  .buckets = 32,
                                  .max_distance = 128,
                                  .eps = 1e-6 };
    wan_shapes s = umt5_shapes(&xxl);
    assert_int_equal(s.count, 242);
    wan_write_holes(scratch_path(&f.part, "model.safetensors"), s.list, s.count, "BF16", 2);
    ok(&b, check_umt5(&b.env, &xxl));
    esa_part *encoder = NULL;
    ok(&b, open_umt5(&b.env, &encoder, &xxl));
    int64_t parameters, held, mapped;
    esa_part_memory(encoder, &parameters, &held, &mapped);
    assert_true(parameters > INT64_C(5670000000) && parameters < INT64_C(5690000000));
    assert_true(mapped >= 2 * parameters && held < (8 << 20)); /* norms and tables only */
    esa_part_free(encoder);
    free(s.list);
    bench_close(&b);
    wan_folder_remove(&f);
    esa_ctx_free(ctx);
}

static esa_status open_t5(bench *b, esa_text_part **part)
{
    b->config.cleans = 1;
    const esa_status status = esa_text_make(&b->env, part, &esa_t5_text, &b->config);
    return status ? status : esa_text_load(*part);
}

static esa_status encode_t5(esa_text_part *part, float *out, const char *prompt, int64_t rows)
{
    esa_text text = { .data = out, .rows = rows };
    return esa_text_encode(part, &text, prompt);
}

/* Every allocation fails once: a message, and no leak. */
static void out_of_memory(void **unused)
{
    (void)unused;
    char folder[512];
    model_folder(folder, sizeof folder);
    counting counter;
    esa_ctx *ctx = counting_ctx(&counter, 1);
    bench b = { .ctx = ctx };
    char path[640];
    snprintf(path, sizeof path, "%s/text_encoder/config.json", folder);
    ok(&b, esa_config_umt5(ctx, &b.config, path));
    const int64_t live = counter.live;
    float *out = malloc((size_t)(16 * b.config.d_model) * 4);
    for (int64_t at = 0, done = 0; !done; at++) {
        esa_nn_init(&b.nn, ctx);
        b.env = (esa_part_env){ .nn = &b.nn, .folder = folder };
        esa_text_part *part = NULL;
        counter.left = at;
        esa_status status = open_t5(&b, &part);
        if (status == ESA_ERR_UNSUPPORTED) break;
        if (status == ESA_OK) status = encode_t5(part, out, "a red ball", 16);
        done = counter.left >= 0;
        counter.left = -1;
        if (done)
            ok(&b, status);
        else
            assert_refused(ctx, status, ESA_ERR_MEMORY, "memory", NULL);
        esa_text_free(part);
        assert_int_equal(b.nn.held, b.nn.scratch_bytes);
        esa_nn_close(&b.nn);
        assert_int_equal(counter.live, live);
    }
    free(out);
    esa_ctx_free(ctx);
}

/* From prompt to rows: zeros follow the tokens, and eos stays if the prompt is too long. */
static void whole_part(void **unused)
{
    (void)unused;
    char folder[512];
    model_folder(folder, sizeof folder);
    esa_ctx *ctx = make_ctx(2);
    bench b;
    bench_open(&b, ctx, folder, ESA_HOLD_AUTO);
    esa_text_part *part = NULL;
    const esa_status built = esa_text_make(&b.env, &part, &esa_t5_text, &b.config);
#ifndef ESA_HAVE_SENTENCEPIECE
    if (built == ESA_ERR_UNSUPPORTED) skip();
#endif
    ok(&b, built);
    esa_text_free(part);
    ok(&b, open_t5(&b, &part));
    const int64_t d = b.config.d_model;
    float *a = malloc((size_t)(64 * d) * 4), *c = malloc((size_t)(64 * d) * 4);
    ok(&b, encode_t5(part, a, "a red ball", 64));
    ok(&b, encode_t5(part, c, " a&nbsp;RED\tball\n", 64));
    assert_memory_equal(a, c, (size_t)(64 * d) * 4);
    int64_t last = 64 * d;
    while (last && a[last - 1] == 0) last--;
    assert_true(last > 3 * d && last <= 8 * d);
    ok(&b, encode_t5(part, c, "", 64)); /* eos alone */
    last = 64 * d;
    while (last && c[last - 1] == 0) last--;
    assert_true(last > 0 && last <= d);
    ok(&b, encode_t5(part, c, "a red ball rolls to the right over a blue floor", 4));
    assert_refused(ctx, encode_t5(part, c, "a \xff ball", 4), ESA_ERR_ARGUMENT, "not valid UTF-8",
                   "0xff", "position 2", NULL);
    char *much = malloc(10001);
    memset(much, 'a', 10000);
    much[10000] = 0;
    assert_refused(ctx, encode_t5(part, c, much, 4), ESA_ERR_ARGUMENT, "10000 characters", "8192",
                   NULL);
    free(much);
    free(a);
    free(c);
    esa_text_free(part);
    bench_close(&b);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_transformers),
        cmocka_unit_test(matches_transformers_with_real_weights),
        cmocka_unit_test(held_in_any_way),
        cmocka_unit_test(refuses),
        cmocka_unit_test(hub_sized),
        cmocka_unit_test(out_of_memory),
        cmocka_unit_test(whole_part),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
