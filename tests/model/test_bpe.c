/* test_bpe.c - byte-level BPE against the `tokenizers` package (tests/golden/bpe.json), the prompts
 * of HunyuanVideo, and what is refused.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/golden.h"
#include <jansson.h>
#include "model/text/bpe.h"
#include "model/text/prompt.h"
#include "model/text/unicode.h"

static const char *const names[] = { "llama", "clip" };

static esa_ctx *make_ctx(void)
{
    esa_ctx *ctx = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

static void golden_path(char *path, size_t size, const char *name)
{
    const char *folder = getenv("ESA_TEST_GOLDEN");
    snprintf(path, size, "%s/%s", folder && *folder ? folder : "tests/golden", name);
}

static json_t *load(const char *name)
{
    char path[600];
    golden_path(path, sizeof path, name);
    json_t *root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    return root;
}

static esa_tokenizer *open_golden(esa_ctx *ctx, const char *name)
{
    char folder[600], part[40];
    esa_tokenizer *t = NULL;
    snprintf(part, sizeof part, "bpe/%s", name);
    golden_path(folder, sizeof folder, part);
    if (esa_tokenizer_open(ctx, &t, folder, 0) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    return t;
}

static int32_t same_ids(const int32_t *ids, int32_t count, const json_t *want)
{
    int32_t same = count == (int32_t)json_array_size(want);
    for (int32_t k = 0; k < count && same; k++)
        same = ids[k] == json_integer_value(json_array_get(want, (size_t)k));
    return same;
}

static void ids_as_tokenizers(void **unused)
{
    (void)unused;
    enum { LONG = 4096, SHORT = 12 };
    static int32_t ids[LONG];
    esa_ctx *ctx = make_ctx();
    json_t *root = load("bpe.json"), *cases = json_object_get(root, "cases"), *item;
    print_message("%d strings, seed %d\n", (int)json_array_size(cases),
                  (int)json_integer_value(json_object_get(root, "seed")));
    assert_true(json_array_size(cases) >= 400);
    int wrong = 0;
    for (int v = 0; v < 2; v++) {
        esa_tokenizer *t = open_golden(ctx, names[v]);
        size_t i;
        json_array_foreach(cases, i, item)
        {
            int32_t few[SHORT], count, total, short_count;
            const char *text = json_string_value(json_object_get(item, "text"));
            assert_int_equal(esa_tokenizer_encode(t, text, ids, LONG, &count, &total), ESA_OK);
            int32_t same = total == count && same_ids(ids, count, json_object_get(item, names[v]));
            for (int32_t k = count; k < LONG && same; k++) same = ids[k] == t->pad;
            assert_int_equal(esa_tokenizer_encode(t, text, few, SHORT, &short_count, &total),
                             ESA_OK);
            for (int32_t k = 0; k < SHORT && same; k++)
                same = few[k] == (v && count > SHORT && k == SHORT - 1 ? t->eos : ids[k]);
            if (same && total == count && short_count == (count < SHORT ? count : SHORT)) continue;
            char *shown = json_dumps(item, JSON_COMPACT | JSON_ENSURE_ASCII);
            print_error("%s, case %d: %s\n got", names[v], (int)i, shown);
            for (int32_t k = 0; k < count; k++) print_error(" %d", (int)ids[k]);
            print_error("\n");
            free(shown);
            wrong++;
        }
        esa_tokenizer_free(t);
    }
    assert_int_equal(wrong, 0);
    json_decref(root);
    esa_ctx_free(ctx);
}

/* Where words end, whatever the vocabulary makes of them. */
static void words_as_tokenizers(void **unused)
{
    (void)unused;
    static const char *const keys[] = { "llama words", "clip words" };
    json_t *root = load("bpe.json"), *cases = json_object_get(root, "cases"), *item;
    size_t i;
    int wrong = 0;
    json_array_foreach(cases, i, item)
    {
        const char *text = json_string_value(json_object_get(item, "text"));
        const int64_t n = (int64_t)strlen(text);
        char *normal = malloc((size_t)ESA_BPE_NORMAL(n));
        int32_t *work = malloc((size_t)(ESA_BPE_WORK(n) + 1) * sizeof *work);
        const int64_t normal_bytes = esa_bpe_normalize(normal, work, text, n);
        for (int v = 0; v < 2; v++) {
            const json_t *want = json_object_get(item, keys[v]);
            const char *s = v ? normal : text, *end = v ? normal + normal_bytes : text + n, *word;
            int32_t inner = 0, same = 1;
            size_t count = 0;
            for (;; count++) {
                s = esa_bpe_word(v ? ESA_BPE_CLIP_NAMES : ESA_BPE_LLAMA, s, end, &word, &inner);
                if (!s) break;
                same &= json_integer_value(json_array_get(want, count)) == s - word;
            }
            if (same && count == json_array_size(want)) continue;
            print_error("%s, case %d: %s\n", keys[v], (int)i, text);
            wrong++;
        }
        free(normal);
        free(work);
    }
    assert_int_equal(wrong, 0);
    json_decref(root);
}

/* The calls that HunyuanVideoPipeline makes: a template for Llama, 77 tokens for CLIP. */
static void hunyuan_prompts(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx();
    json_t *root = load("bpe.json"), *item;
    esa_tokenizer *llama = open_golden(ctx, "llama"), *clip = open_golden(ctx, "clip");
    assert_int_equal(json_integer_value(json_object_get(root, "crop")), ESA_HUNYUAN_CROP);
    size_t i;
    assert_int_equal(json_array_size(json_object_get(root, "prompts")), 4);
    json_array_foreach(json_object_get(root, "prompts"), i, item)
    {
        enum { ROWS = 256 + ESA_HUNYUAN_CROP, POOLED = 77 };
        const char *text = json_string_value(json_object_get(item, "text"));
        int32_t ids[ROWS], count;
        char *filled = NULL;
        int64_t bytes = 0;
        assert_int_equal(esa_prompt_hunyuan(ctx, &filled, &bytes, text), ESA_OK);
        assert_int_equal(bytes, strlen(filled) + 1);
        assert_int_equal(esa_tokenizer_encode(llama, filled, ids, ROWS, &count, NULL), ESA_OK);
        esa_mem_free(&ctx->mem, filled, bytes);
        assert_true(same_ids(ids, ROWS, json_object_get(item, "llama")));
        assert_int_equal(count, json_integer_value(json_object_get(item, "mask")));
        assert_int_equal(esa_tokenizer_encode(clip, text, ids, POOLED, &count, NULL), ESA_OK);
        assert_true(same_ids(ids, POOLED, json_object_get(item, "clip")));
    }
    char *filled = NULL;
    int64_t bytes = 0;
    assert_refused(ctx, esa_prompt_hunyuan(ctx, &filled, &bytes, "a\xff"), ESA_ERR_ARGUMENT,
                   "not valid UTF-8", "position 1", NULL);
    assert_null(filled);
    esa_tokenizer_free(llama);
    esa_tokenizer_free(clip);
    json_decref(root);
    esa_ctx_free(ctx);
}

static void refuses_texts(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx();
    static const char *const bad[] = { "ab\x80",           "\xc3(",        "\xc0\xaf",
                                       "\xe0\x80\xaf",     "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                       "\xf5\x80\x80\x80", "\xe2\x82",     "\xff" };
    int32_t ids[8], count;
    const int32_t large = (1 << 20) + 1;
    char *text = malloc((size_t)large + 1);
    memset(text, 'a', (size_t)large);
    text[large] = 0;
    for (int v = 0; v < 2; v++) {
        esa_tokenizer *t = open_golden(ctx, names[v]);
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
            assert_refused(ctx, esa_tokenizer_encode(t, bad[i], ids, 8, &count, NULL),
                           ESA_ERR_ARGUMENT, "not valid UTF-8",
                           i ? "position 0" : "0x80 at position 2", NULL);
        assert_refused(ctx, esa_tokenizer_encode(t, text, ids, 8, &count, NULL), ESA_ERR_ARGUMENT,
                       "1048577 bytes", "1048576", NULL);
        assert_refused(ctx, esa_tokenizer_encode(t, "a", ids, v, &count, NULL), ESA_ERR_ARGUMENT,
                       v ? "expected 2" : "expected 1", NULL);
        assert_int_equal(esa_tokenizer_encode(t, "a b c d", ids, 1 + v, &count, NULL), ESA_OK);
        assert_true(count == 1 + v && ids[0] == t->bos && (!v || ids[1] == t->eos));
        esa_tokenizer_free(t);
    }
    free(text);
    esa_ctx_free(ctx);
}

/* Memory for normalised text is sized by these bounds. Each holds for every character, so it holds
 * for every text: NFC decomposes, orders and composes, and lower case goes by single characters. */
static void unicode_bounds(void **unused)
{
    (void)unused;
    char bytes[8];
    int32_t one[ESA_NFC_GROWTH], low[2];
    for (int32_t c = 1; c < 0x110000; c++) {
        if (c >= 0xd800 && c < 0xe000) continue;
        const int32_t n = esa_utf8_put(bytes, c);
        int32_t now = 0;
        const int32_t k = esa_char_lower(c, low);
        for (int32_t i = 0; i < k; i++) now += esa_utf8_put(bytes, low[i]);
        assert_true(2 * now <= 3 * n);
        assert_true(esa_text_nfc(one, &c, 1) <= ESA_NFC_GROWTH);
    }
    for (int32_t i = 0; i < esa_unicode_part_count; i++) {
        /* the whole decomposition, by the first parts */
        int32_t now = 0;
        const uint32_t *p = esa_unicode_part[i];
        const int32_t n = esa_utf8_put(bytes, (int32_t)p[0]);
        for (int32_t j = i, steps = 0; j >= 0; steps++) {
            const uint32_t first = esa_unicode_part[j][1], second = esa_unicode_part[j][2];
            assert_true(steps < ESA_NFC_GROWTH - 1);
            now += second ? esa_utf8_put(bytes, (int32_t)second) : 0;
            for (j = esa_unicode_part_count - 1; j >= 0 && esa_unicode_part[j][0] != first;) j--;
            if (j < 0) now += esa_utf8_put(bytes, (int32_t)first);
        }
        assert_true(now <= 3 * n);
    }
    for (int32_t i = 0; i < esa_unicode_pair_count; i++) {
        const uint32_t *p = esa_unicode_part[esa_unicode_pair[i]];
        assert_true(esa_utf8_put(bytes, (int32_t)p[0]) <=
                    esa_utf8_put(bytes, (int32_t)p[1]) + esa_utf8_put(bytes, (int32_t)p[2]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(ids_as_tokenizers),
                                        cmocka_unit_test(words_as_tokenizers),
                                        cmocka_unit_test(hunyuan_prompts),
                                        cmocka_unit_test(refuses_texts),
                                        cmocka_unit_test(unicode_bounds) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
