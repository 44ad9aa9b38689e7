/* test_bpe_read.c - tokenizer.json with one thing changed: other forms of the same, and what is
 * refused.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/golden.h"
#include <jansson.h>
#include "io/scratch.h"
#include "model/text/tokenizer_kind.h"

static esa_ctx *make_ctx(void)
{
    esa_ctx *ctx = NULL;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    return ctx;
}

static json_t *load(const char *name)
{
    const char *folder = getenv("ESA_TEST_GOLDEN");
    char path[600];
    snprintf(path, sizeof path, "%s/bpe/%s/tokenizer.json",
             folder && *folder ? folder : "tests/golden", name);
    json_t *root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    return root;
}

/* Sets the member at a path such as "model/vocab/a" or "added_tokens/0/id"; value NULL removes it.
 */
static void change(json_t *root, const char *path, const char *value)
{
    char part[80];
    json_t *at = root, *v = value ? json_loads(value, JSON_DECODE_ANY, NULL) : NULL;
    assert_true(!value || v);
    for (;;) {
        const char *slash = strchr(path, '/');
        snprintf(part, sizeof part, "%.*s", slash ? (int)(slash - path) : 79, path);
        const size_t index = (size_t)strtol(part, NULL, 10);
        if (!slash) {
            if (json_is_array(at))
                assert_int_equal(
                    v ? json_array_set_new(at, index, v) : json_array_remove(at, index), 0);
            else if (v)
                assert_int_equal(json_object_set_new(at, part, v), 0);
            else
                json_object_del(at, part);
            return;
        }
        at = json_is_array(at) ? json_array_get(at, index) : json_object_get(at, part);
        assert_non_null(at);
        path = slash + 1;
    }
}

static esa_status open_json(esa_ctx *ctx, esa_tokenizer **t, const json_t *root)
{
    char *text = json_dumps(root, JSON_COMPACT);
    const esa_status status = esa_bpe_open_memory(ctx, t, text, (int64_t)strlen(text));
    free(text);
    return status;
}

typedef struct refusal {
    const char *file, *path, *value;
    esa_status status;
    const char *says;
} refusal;

static const refusal refusals[] = {
    { "llama", "model", "7", ESA_ERR_FORMAT, "model is missing" },
    { "llama", "model/type", "\"Unigram\"", ESA_ERR_UNSUPPORTED, "model is Unigram, expected BPE" },
    { "llama", "model/type", "\"WordPiece\"", ESA_ERR_UNSUPPORTED, "WordPiece" },
    { "llama", "model/dropout", "0.1", ESA_ERR_UNSUPPORTED, "dropout" },
    { "llama", "model/byte_fallback", "true", ESA_ERR_UNSUPPORTED, "byte_fallback" },
    { "llama", "model/fuse_unk", "true", ESA_ERR_UNSUPPORTED, "fuse_unk" },
    { "llama", "model/continuing_subword_prefix", "\"##\"", ESA_ERR_UNSUPPORTED, "prefix" },
    { "llama", "model/end_of_word_suffix", "\"</w>\"", ESA_ERR_UNSUPPORTED, "end_of_word_suffix" },
    { "clip", "model/end_of_word_suffix", "\"@\"", ESA_ERR_UNSUPPORTED, "</w>" },
    { "clip", "model/end_of_word_suffix", NULL, ESA_ERR_UNSUPPORTED, "</w>" },
    { "llama", "model/vocab", "[]", ESA_ERR_FORMAT, "vocab has 0 entries" },
    { "llama", "model/vocab", NULL, ESA_ERR_FORMAT, "vocab has 0 entries" },
    { "llama", "model/vocab/!", "-1", ESA_ERR_FORMAT, "vocab gives ! no id" },
    { "llama", "model/vocab/!", "2097152", ESA_ERR_FORMAT, "from 0 to 2097151" },
    { "llama", "model/vocab/!", "\"x\"", ESA_ERR_FORMAT, "vocab gives ! no id" },
    { "llama", "model/vocab/!", NULL, ESA_ERR_FORMAT, "no ! for byte 0x21" },
    { "llama", "model/vocab/", "3", ESA_ERR_FORMAT, "an entry of 0 bytes" },
    { "llama", "model/unk_token", "\"<none>\"", ESA_ERR_FORMAT, "unk_token <none>" },
    { "llama", "model/merges", "{}", ESA_ERR_FORMAT, "merges has 0 entries" },
    { "llama", "model/merges/3", "\"a\"", ESA_ERR_FORMAT, "merge 3 is not a pair" },
    { "llama", "model/merges/3", "\"a b c\"", ESA_ERR_FORMAT, "merge 3 is not a pair" },
    { "llama", "model/merges/3", "\" b\"", ESA_ERR_FORMAT, "merge 3 is not a pair" },
    { "llama", "model/merges/3", "[\"a\"]", ESA_ERR_FORMAT, "merge 3 is not a pair" },
    { "llama", "model/merges/3", "[\"a\", 1]", ESA_ERR_FORMAT, "merge 3 is not a pair" },
    { "llama", "model/merges/3", "7", ESA_ERR_FORMAT, "merge 3 is not a pair" },
    { "llama", "model/merges/3", "\"q ~\"", ESA_ERR_FORMAT, "merge 3 makes q~" },
    { "llama", "normalizer", "{\"type\": \"NFKC\"}", ESA_ERR_UNSUPPORTED, "normalizer is NFKC" },
    { "clip", "normalizer", "null", ESA_ERR_UNSUPPORTED, "normalizer is absent" },
    { "clip", "normalizer/normalizers/0/type", "\"NFD\"", ESA_ERR_UNSUPPORTED,
      "part 1 of normalizer is NFD, expected NFC" },
    { "clip", "normalizer/normalizers/2", NULL, ESA_ERR_UNSUPPORTED, "2 parts, expected 3" },
    { "clip", "normalizer/normalizers/1/content", "\"_\"", ESA_ERR_UNSUPPORTED, "white space" },
    { "clip", "normalizer/normalizers/1/pattern/Regex", "\" \"", ESA_ERR_UNSUPPORTED, "white" },
    { "llama", "pre_tokenizer", "null", ESA_ERR_UNSUPPORTED, "pre_tokenizer is absent" },
    { "llama", "pre_tokenizer", "{\"type\": \"Whitespace\"}", ESA_ERR_UNSUPPORTED,
      "pre_tokenizer is Whitespace, expected Sequence" },
    { "llama", "pre_tokenizer/pretokenizers/0/type", "\"Digits\"", ESA_ERR_UNSUPPORTED,
      "part 1 of pre_tokenizer is Digits, expected Split" },
    { "llama", "pre_tokenizer/pretokenizers/1/type", "\"Metaspace\"", ESA_ERR_UNSUPPORTED,
      "part 2 of pre_tokenizer is Metaspace, expected ByteLevel" },
    { "llama", "pre_tokenizer/pretokenizers/0/pattern/Regex", "\"\\\\w+\"", ESA_ERR_UNSUPPORTED,
      "splits by \\w+" },
    { "llama", "pre_tokenizer/pretokenizers/0/behavior", "\"Removed\"", ESA_ERR_UNSUPPORTED,
      "behavior Removed" },
    { "llama", "pre_tokenizer/pretokenizers/0/invert", "true", ESA_ERR_UNSUPPORTED, "invert true" },
    { "clip", "pre_tokenizer/pretokenizers/0/invert", "false", ESA_ERR_UNSUPPORTED, "invert" },
    { "llama", "pre_tokenizer/pretokenizers/1/use_regex", "true", ESA_ERR_UNSUPPORTED,
      "use_regex" },
    { "clip", "pre_tokenizer/pretokenizers/1/use_regex", "false", ESA_ERR_UNSUPPORTED,
      "use_regex" },
    { "llama", "pre_tokenizer/pretokenizers/1/add_prefix_space", "true", ESA_ERR_UNSUPPORTED,
      "add_prefix_space" },
    { "llama", "added_tokens/1/lstrip", "true", ESA_ERR_UNSUPPORTED, "lstrip true" },
    { "llama", "added_tokens/1/rstrip", "true", ESA_ERR_UNSUPPORTED, "rstrip true" },
    { "llama", "added_tokens/1/single_word", "true", ESA_ERR_UNSUPPORTED, "single_word true" },
    { "llama", "added_tokens/1/id", "5", ESA_ERR_FORMAT, "<|end_of_text|> has id 5, expected 901" },
    { "clip", "added_tokens/1/id", "5", ESA_ERR_FORMAT, "has id 5, expected 1221" },
    { "llama", "added_tokens/1/id", "\"5\"", ESA_ERR_FORMAT, "an added token has no id" },
    { "llama", "added_tokens/1/content", "\"\"", ESA_ERR_FORMAT, "an added token has no id" },
    { "llama", "added_tokens/1/content", "\"<|begin_of_text|>\"", ESA_ERR_FORMAT, "listed twice" },
    { "llama", "post_processor", "{\"type\": \"BertProcessing\"}", ESA_ERR_UNSUPPORTED,
      "post_processor is BertProcessing" },
    { "llama", "post_processor/processors/1/single/0/SpecialToken/id", "\"<s>\"", ESA_ERR_FORMAT,
      "adds <s>, which has no id" },
    { "llama", "post_processor/processors/1/single/1", NULL, ESA_ERR_FORMAT, "the text 0 times" },
    { "llama", "post_processor/processors/1/single/1",
      "{\"SpecialToken\": {\"id\": \"<pad>\", \"type_id\": 0}}", ESA_ERR_UNSUPPORTED,
      "two tokens before" },
    { "clip", "post_processor/sep/0", "\"</s>\"", ESA_ERR_FORMAT, "adds </s>" },
    { "clip", "post_processor/cls", NULL, ESA_ERR_FORMAT, "without a name" },
};

static void refuses_other_forms(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx();
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        const refusal *r = &refusals[i];
        json_t *root = load(r->file);
        esa_tokenizer *t = NULL;
        change(root, r->path, r->value);
        const esa_status status = open_json(ctx, &t, root);
        if (status != r->status || !strstr(esa_ctx_error(ctx), r->says))
            fail_msg("%s %s = %s: status %d, %s; expected %s", r->file, r->path,
                     r->value ? r->value : "nothing", (int)status, esa_ctx_error(ctx), r->says);
        assert_null(t);
        json_decref(root);
    }
    esa_tokenizer *t = NULL;
    assert_refused(ctx, esa_bpe_open_memory(ctx, &t, "[]", 2), ESA_ERR_FORMAT, "JSON object", NULL);
    assert_refused(ctx, esa_bpe_open_memory(ctx, &t, "{\"model\": {", 11), ESA_ERR_FORMAT,
                   "tokenizer.json: is not JSON", NULL);
    esa_ctx_free(ctx);
}

/* Ids of a text that has merges, whole words and added tokens. */
static int32_t sample(esa_ctx *ctx, const json_t *root, int32_t *ids, int32_t max)
{
    esa_tokenizer *t = NULL;
    int32_t count;
    if (open_json(ctx, &t, root) != ESA_OK) fail_msg("%s", esa_ctx_error(ctx));
    assert_int_equal(esa_tokenizer_encode(t, "A red ball's colour, <|ENDOFTEXT|>!! 12345 é\n<pad>",
                                          ids, max, &count, NULL),
                     ESA_OK);
    esa_tokenizer_free(t);
    return count;
}

static void other_forms_of_the_same(void **unused)
{
    (void)unused;
    enum { MAX = 128 };
    esa_ctx *ctx = make_ctx();
    int32_t want[MAX], ids[MAX], n, count;
    /* Merges as strings and as pairs. */
    json_t *root = load("llama"),
           *merges = json_object_get(json_object_get(root, "model"), "merges");
    n = sample(ctx, root, want, MAX);
    for (size_t i = 0; i < json_array_size(merges); i++) {
        const char *text = json_string_value(json_array_get(merges, i)), *gap = strchr(text, ' ');
        json_array_set_new(merges, i, json_pack("[s#, s]", text, (int)(gap - text), gap + 1));
    }
    assert_int_equal(sample(ctx, root, ids, MAX), n);
    assert_memory_equal(ids, want, (size_t)n * sizeof *ids);
    /* Every merge is used without whole words; this vocabulary lacks some, so ids differ. */
    change(root, "model/ignore_merges", "false");
    count = sample(ctx, root, ids, MAX);
    assert_true(count != n || memcmp(ids, want, (size_t)n * sizeof *ids) != 0);
    /* No frame, or one at the end. */
    change(root, "model/ignore_merges", "true");
    change(root, "post_processor", "null");
    assert_int_equal(sample(ctx, root, ids, MAX), n - 1);
    assert_memory_equal(ids, want + 1, (size_t)(n - 1) * sizeof *ids);
    change(root, "post_processor",
           "{\"type\": \"TemplateProcessing\", \"single\": [{\"Sequence\": {\"id\": \"A\"}}, "
           "{\"SpecialToken\": {\"id\": \"<pad>\"}}]}");
    assert_int_equal(sample(ctx, root, ids, MAX), n);
    assert_memory_equal(ids, want + 1, (size_t)(n - 1) * sizeof *ids);
    assert_int_equal(ids[n - 1], ids[n - 2]);
    json_decref(root);
    /* CLIP's own file says less than that of transformers 5: only "|>!!" after a name differs. */
    root = load("clip");
    n = sample(ctx, root, want, MAX);
    change(root, "model/type", "\"BPE\"");
    assert_int_equal(sample(ctx, root, ids, MAX), n);
    assert_memory_equal(ids, want, (size_t)n * sizeof *ids);
    change(root, "pre_tokenizer/pretokenizers/0/pattern/Regex",
           "\"'s|'t|'re|'ve|'m|'ll|'d|[\\\\p{L}]+|[\\\\p{N}]|[^\\\\s\\\\p{L}\\\\p{N}]+\"");
    change(root, "pre_tokenizer/pretokenizers/1/use_regex", NULL);
    count = sample(ctx, root, ids, MAX);
    assert_true(count != n || memcmp(ids, want, (size_t)n * sizeof *ids) != 0);
    /* A byte without a symbol becomes unk_token. */
    json_object_del(json_object_get(json_object_get(root, "model"), "vocab"), "~</w>");
    esa_tokenizer *t = NULL;
    assert_int_equal(open_json(ctx, &t, root), ESA_OK);
    assert_int_equal(esa_tokenizer_encode(t, "~", ids, MAX, &count, NULL), ESA_OK);
    assert_true(count == 3 && ids[1] == t->eos);
    esa_tokenizer_free(t);
    json_decref(root);
    esa_ctx_free(ctx);
}

static void write_config(scratch *s, const char *text)
{
    scratch_write(scratch_path(s, "tokenizer_config.json"), text, strlen(text));
}

static void folders(void **unused)
{
    (void)unused;
    esa_ctx *ctx = make_ctx();
    scratch s = scratch_make();
    json_t *root = load("llama");
    change(root, "post_processor", "null");
    char *json = json_dumps(root, JSON_COMPACT);
    scratch_write(scratch_path(&s, "tokenizer.json"), json, strlen(json));
    free(json);
    esa_tokenizer *t = NULL;
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_ERR_IO, "tokenizer_config.json",
                   NULL);
    write_config(&s, "{}");
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_ERR_FORMAT, "no padding token",
                   NULL);
    write_config(&s, "{\"pad_token\": \"<pad>\", \"padding_side\": \"left\"}");
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_ERR_UNSUPPORTED,
                   "padding_side is left", NULL);
    write_config(&s, "{\"pad_token\": {\"content\": \"<pad>\"}}");
    assert_refused(ctx, esa_tokenizer_open(ctx, &t, s.dir, 906), ESA_ERR_MISMATCH, "906", NULL);
    assert_null(t);
    assert_int_equal(esa_tokenizer_open(ctx, &t, s.dir, 907), ESA_OK);
    assert_true(t->bos == -1 && t->eos == -1 && t->pad == 906);
    esa_tokenizer_free(t);
    /* LlamaTokenizer adds bos_token by itself. */
    write_config(&s, "{\"pad_token\": \"<pad>\", \"tokenizer_class\": \"LlamaTokenizerFast\", "
                     "\"bos_token\": \"<|begin_of_text|>\"}");
    assert_int_equal(esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_OK);
    assert_int_equal(t->bos, 900);
    esa_tokenizer_free(t);
    write_config(&s, "{\"pad_token\": \"<pad>\", \"tokenizer_class\": \"LlamaTokenizer\", "
                     "\"bos_token\": \"<|begin_of_text|>\", \"add_bos_token\": false}");
    assert_int_equal(esa_tokenizer_open(ctx, &t, s.dir, 0), ESA_OK);
    assert_int_equal(t->bos, -1);
    esa_tokenizer_free(t);
    json_decref(root);
    scratch_remove(&s);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(refuses_other_forms),
                                        cmocka_unit_test(other_forms_of_the_same),
                                        cmocka_unit_test(folders) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
