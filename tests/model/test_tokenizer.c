/* test_tokenizer.c - cleaning and token ids against diffusers and transformers
 * (tests/golden/tokens.json), and what is refused.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/golden.h"
#include <jansson.h>
#include "model/text/prompt.h"
#include "model/text/tokenizer.h"

static esa_ctx *make_ctx(void)
{
    esa_ctx *ctx = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

static const char *golden_folder(void)
{
    const char *folder = getenv("ESA_TEST_GOLDEN");
    return folder && *folder ? folder : "tests/golden";
}

static json_t *load_cases(json_t **root)
{
    char path[600];
    snprintf(path, sizeof path, "%s/tokens.json", golden_folder());
    *root = json_load_file(path, 0, NULL);
    assert_non_null(*root);
    json_t *cases = json_object_get(*root, "cases");
    assert_true(json_array_size(cases) >= 200);
    return cases;
}

static void vocabulary_folder(char *folder, size_t size, const char *name)
{
    const char *models = getenv("ESA_TEST_MODELS");
    if (strcmp(name, "world") == 0)
        snprintf(folder, size, "%s/world", golden_folder());
    else
        snprintf(folder, size, "%s/%s/tokenizer", models ? models : "models", name);
}

/* NULL in a build without libsentencepiece. */
/* NULL only in a build without sentencepiece. */
static esa_tokenizer *open_vocabulary(esa_ctx *ctx, const char *name)
{
    char folder[600];
    esa_tokenizer *t = NULL;
    vocabulary_folder(folder, sizeof folder, name);
    const esa_status status = esa_tokenizer_open(ctx, &t, folder, 0);
#ifndef ESA_HAVE_SENTENCEPIECE
    if (status == ESA_ERR_UNSUPPORTED) return NULL;
#endif
    if (status != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    return t;
}

static void cleans_as_diffusers(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx();
    json_t *root, *cases = load_cases(&root), *item;
    size_t i;
    int wrong = 0;
    json_array_foreach(cases, i, item)
    {
        char *clean = NULL;
        int64_t bytes = 0;
        assert_int_equal(
            esa_prompt_clean(ctx, &clean, &bytes, json_string_value(json_object_get(item, "text"))),
            ESA_OK);
        const char *want = json_string_value(json_object_get(item, "clean"));
        if (strcmp(clean, want) != 0) {
            print_error("%s: got %s, expected %s\n",
                        json_string_value(json_object_get(item, "text")), clean, want);
            wrong++;
        }
        esa_mem_free(&ctx->mem, clean, bytes);
    }
    assert_int_equal(wrong, 0);
    json_decref(root);
    esa_ctx_free(ctx);
}

static void ids_as_transformers(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx();
    json_t *root, *cases = load_cases(&root), *item;
    static const char *const names[] = { "wan-tiny", "world" };
    int wrong = 0;
    for (int v = 0; v < 2; v++) {
        esa_tokenizer *t = open_vocabulary(ctx, names[v]);
        if (!t) {
            json_decref(root);
            esa_ctx_free(ctx);
            skip();
            return;
        }
        size_t i;
        json_array_foreach(cases, i, item)
        {
            enum { LONG = 2048, SHORT = 16 };
            int32_t ids[LONG], few[SHORT], count, total, short_count;
            const char *text = json_string_value(json_object_get(item, "clean"));
            const json_t *want = json_object_get(item, names[v]);
            const int32_t n = (int32_t)json_array_size(want);
            assert_int_equal(esa_tokenizer_encode(t, text, ids, LONG, &count, &total), ESA_OK);
            int same = count == n && total == n;
            for (int32_t k = 0; k < n && same; k++)
                same = ids[k] == json_integer_value(json_array_get(want, (size_t)k));
            for (int32_t k = n; k < LONG && same; k++) same = ids[k] == 0;
            assert_int_equal(esa_tokenizer_encode(t, text, few, SHORT, &short_count, &total),
                             ESA_OK);
            for (int32_t k = 0; k < SHORT && same; k++)
                same = few[k] == (n > SHORT && k == SHORT - 1 ? 1 : ids[k]);
            if (!same || total != n || short_count != (n < SHORT ? n : SHORT)) {
                print_error("%s: %s\n", names[v], text);
                wrong++;
            }
        }
        esa_tokenizer_free(t);
    }
    assert_int_equal(wrong, 0);
    json_decref(root);
    esa_ctx_free(ctx);
}

static void refuses_broken_text(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx();
    char *out = NULL;
    int64_t bytes;
    /* Lone and missing continuations, overlong forms, surrogates, beyond U+10FFFF, an end within a
     * character. */
    static const char *const bad[] = { "ab\x80",           "\xc3(",        "\xc0\xaf",
                                       "\xe0\x80\xaf",     "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                       "\xf5\x80\x80\x80", "\xe2\x82",     "\xff" };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_refused(ctx, esa_prompt_clean(ctx, &out, &bytes, bad[i]), ESA_ERR_ARGUMENT,
                       "not valid UTF-8", i ? "position 0" : "0x80 at position 2", NULL);
    assert_null(out);
    /* 8,192 characters are the limit, however many bytes they have. */
    char *text = malloc(4 * 10000 + 1);
    for (int n = 8192; n <= 10000; n += 10000 - 8192) {
        for (int i = 0; i < n; i++) memcpy(text + 4 * i, "\xf0\x9f\x99\x82", 4);
        text[4 * n] = 0;
        const esa_status status = esa_prompt_clean(ctx, &out, &bytes, text);
        if (n == 8192) {
            assert_int_equal(status, ESA_OK);
            assert_string_equal(out, text);
            esa_mem_free(&ctx->mem, out, bytes);
        } else {
            assert_refused(ctx, status, ESA_ERR_ARGUMENT, "10000 characters", "8192", NULL);
        }
    }
    free(text);
    /* The text that grows the most. */
    char grow[5 * 1000 + 1] = "";
    for (int i = 0; i < 1000; i++) memcpy(grow + 5 * i, "&nLt;", 6);
    assert_int_equal(esa_prompt_clean(ctx, &out, &bytes, grow), ESA_OK);
    assert_int_equal(strlen(out), 6000);
    esa_mem_free(&ctx->mem, out, bytes);
    esa_ctx_free(ctx);
}

/* tokenizer_config.json as older versions of transformers write it: it gives the ids of special
 * tokens, some beyond the vocabulary. */
static void older_configs(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx();
    esa_tokenizer *t = open_vocabulary(ctx, "world");
    if (!t) {
        esa_ctx_free(ctx);
        skip();
        return;
    }
    esa_tokenizer_free(t);
    scratch s = scratch_make();
    char model[600];
    vocabulary_folder(model, sizeof model, "world");
    strcat(model, "/spiece.model");
    size_t n;
    uint8_t *bytes = scratch_read(model, &n);
    scratch_write(scratch_path(&s, "spiece.model"), bytes, n);
    const char *config = "{\"added_tokens_decoder\": {\"0\": {\"content\": \"<pad>\", \"special\": "
                         "true}, \"1\": {\"content\": \"</s>\", \"special\": true},\n"
                         "\"2\": {\"content\": \"<unk>\", \"special\": true}, \"900\": "
                         "{\"content\": \"<extra_id_0>\", \"special\": true},\n"
                         "\"901\": {\"content\": \"<extra_id_01>\", \"special\": true}}, "
                         "\"eos_token\": \"</s>\", \"pad_token\": {\"content\": \"<pad>\"}}";
    scratch_write(scratch_path(&s, "tokenizer_config.json"), config, strlen(config));
    assert_int_equal(esa_tokenizer_open(ctx, &t, s.dir, 1000), ESA_OK);
    int32_t ids[8], count;
    assert_int_equal(
        esa_tokenizer_encode(t, "<extra_id_0><extra_id_01> </s>", ids, 8, &count, NULL), ESA_OK);
    const int32_t want[8] = { 900, 901, 1, 1, 0, 0, 0, 0 };
    assert_int_equal(count, 4);
    assert_memory_equal(ids, want, sizeof want);
    assert_int_equal(esa_tokenizer_encode(t, "red ball", ids, 1, &count, NULL), ESA_OK);
    assert_true(count == 1 && ids[0] == 1);
    esa_tokenizer_free(t);
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 900), ESA_ERR_MISMATCH, "901", "900",
                   NULL);
    assert_null(t);
    /* Half a model, no model, no config, no end token. */
    scratch_write(scratch_path(&s, "spiece.model"), bytes, n / 2);
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_ERR_FORMAT,
                   "not a SentencePiece model", NULL);
    scratch_write(scratch_path(&s, "spiece.model"), "", 0);
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_ERR_FORMAT,
                   "not a SentencePiece model", NULL);
    unlink(scratch_path(&s, "spiece.model"));
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_ERR_IO, "spiece.model", NULL);
    scratch_write(scratch_path(&s, "spiece.model"), bytes, n);
    scratch_write(scratch_path(&s, "tokenizer_config.json"), "{\"eos_token\": \"<end>\"}", 22);
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_ERR_FORMAT, "end-of-sentence",
                   NULL);
    unlink(scratch_path(&s, "tokenizer_config.json"));
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_ERR_IO, "tokenizer_config.json",
                   NULL);
    free(bytes);
    scratch_remove(&s);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(cleans_as_diffusers),
                                        cmocka_unit_test(ids_as_transformers),
                                        cmocka_unit_test(refuses_broken_text),
                                        cmocka_unit_test(older_configs) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
