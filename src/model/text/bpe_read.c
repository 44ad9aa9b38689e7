/* bpe_read.c - reads tokenizer.json of a byte-level BPE tokenizer; see bpe.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The file can describe many tokenizers. Those of Llama 3 and CLIP are known; a part that they do
 * not have is refused by its name. truncation, padding and decoder are not used: transformers sets
 * the first two for every call, and nothing is decoded here. */
#include <stdio.h>
#include <string.h>
#include "io/safetensors.h"
#include "model/text/bpe_read.h"

#define LLAMA_WORDS                                                                                \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "                     \
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define CLIP_WORDS "'s|'t|'re|'ve|'m|'ll|'d|[\\p{L}]+|[\\p{N}]|[^\\s\\p{L}\\p{N}]+"
#define CLIP_NAMES "<\\|startoftext\\|>|<\\|endoftext\\|>|"

typedef esa_bpe_reader reader;

const char *esa_bpe_text(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return json_is_string(v) ? json_string_value(v) : "";
}

static int32_t is_text(const json_t *object, const char *key, const char *text)
{
    return strcmp(esa_bpe_text(object, key), text) == 0;
}

/* Absent and null mean no; so does "" for strings. */
static int32_t is_unset(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return !v || json_is_null(v) || json_is_false(v) ||
           (json_is_string(v) && json_string_length(v) == 0);
}

esa_status esa_bpe_type(reader *r, const json_t *part, const char *where, const char *type)
{
    if (json_is_object(part) && is_text(part, "type", type)) return ESA_OK;
    const char *got = esa_bpe_text(part, "type");
    return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED, "%s is %s, expected %s", where,
                         *got ? esa_quote(got).text : "absent", type);
}

/* A sequence of count parts. */
static esa_status check_sequence(reader *r, const json_t *part, const char *where, const char *list,
                                 size_t count)
{
    ESA_TRY(esa_bpe_type(r, part, where, "Sequence"));
    const json_t *parts = json_object_get(part, list);
    if (json_array_size(parts) == count) return ESA_OK;
    return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED, "%s has %d parts, expected %d", where,
                         (int)json_array_size(parts), (int)count);
}

/* CLIP: NFC, runs of white space to one space, lower case. White space only separates its words, so
 * the second one changes nothing. */
static esa_status read_normalizer(reader *r)
{
    static const char *const types[] = { "NFC", "Replace", "Lowercase" };
    const json_t *part = json_object_get(r->file->root, "normalizer");
    if (r->bpe->split == ESA_BPE_LLAMA) {
        if (!part || json_is_null(part)) return ESA_OK;
        return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED,
                             "normalizer is %s, but words are split as in Llama 3, which has none",
                             esa_quote(esa_bpe_text(part, "type")).text);
    }
    ESA_TRY(check_sequence(r, part, "normalizer", "normalizers", 3));
    const json_t *list = json_object_get(part, "normalizers");
    for (size_t i = 0; i < 3; i++) {
        char where[32];
        snprintf(where, sizeof where, "part %d of normalizer", (int)i + 1);
        ESA_TRY(esa_bpe_type(r, json_array_get(list, i), where, types[i]));
    }
    const json_t *replace = json_array_get(list, 1);
    if (is_text(json_object_get(replace, "pattern"), "Regex", "\\s+") &&
        is_text(replace, "content", " "))
        return ESA_OK;
    return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED,
                         "normalizer replaces something else than white space (\\s+) by a space");
}

static esa_status read_split(reader *r)
{
    static const char *const known[] = { LLAMA_WORDS, CLIP_WORDS, CLIP_NAMES CLIP_WORDS };
    const json_t *part = json_object_get(r->file->root, "pre_tokenizer");
    ESA_TRY(check_sequence(r, part, "pre_tokenizer", "pretokenizers", 2));
    const json_t *list = json_object_get(part, "pretokenizers");
    const json_t *split = json_array_get(list, 0), *level = json_array_get(list, 1);
    ESA_TRY(esa_bpe_type(r, split, "part 1 of pre_tokenizer", "Split"));
    ESA_TRY(esa_bpe_type(r, level, "part 2 of pre_tokenizer", "ByteLevel"));
    const char *regex = esa_bpe_text(json_object_get(split, "pattern"), "Regex");
    int32_t kind = -1;
    for (int32_t i = 0; i < 3; i++)
        if (strcmp(regex, known[i]) == 0) kind = i;
    if (kind < 0)
        return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED,
                             "pre_tokenizer splits by %s, expected the pattern of Llama 3 or CLIP",
                             esa_quote(regex).text);
    const int32_t llama = kind == ESA_BPE_LLAMA;
    if (!is_text(split, "behavior", llama ? "Isolated" : "Removed") ||
        llama == json_is_true(json_object_get(split, "invert")))
        return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED,
                             "pre_tokenizer has behavior %s and invert %s, expected %s",
                             esa_quote(esa_bpe_text(split, "behavior")).text,
                             json_is_true(json_object_get(split, "invert")) ? "true" : "false",
                             llama ? "Isolated and false" : "Removed and true");
    if (!is_unset(level, "add_prefix_space") ||
        llama != json_is_false(json_object_get(level, "use_regex")))
        return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED,
                             "pre_tokenizer ByteLevel: expected add_prefix_space false and "
                             "use_regex %s",
                             llama ? "false" : "true or nothing");
    r->bpe->split = kind;
    return ESA_OK;
}

/* Old files do not say the type. */
static esa_status check_model_type(reader *r, const json_t *model)
{
    if (!json_is_object(model))
        return esa_json_fail(r->file, ESA_ERR_FORMAT, "model is missing, expected an object");
    return json_object_get(model, "type") ? esa_bpe_type(r, model, "model", "BPE") : ESA_OK;
}

static esa_status check_model(reader *r, const json_t *model)
{
    static const char *const unset[] = { "dropout", "continuing_subword_prefix", "fuse_unk",
                                         "byte_fallback" };
    for (size_t i = 0; i < sizeof unset / sizeof unset[0]; i++)
        if (!is_unset(model, unset[i]))
            return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED, "model has %s, expected none",
                                 unset[i]);
    const char *suffix = r->bpe->split == ESA_BPE_LLAMA ? "" : "</w>";
    if (!is_text(model, "end_of_word_suffix", suffix))
        return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED,
                             "model has end_of_word_suffix %s, expected \"%s\"",
                             esa_quote(esa_bpe_text(model, "end_of_word_suffix")).text, suffix);
    r->suffix = suffix;
    r->bpe->whole_words = json_is_true(json_object_get(model, "ignore_merges"));
    return ESA_OK;
}

esa_status esa_bpe_no_memory(reader *r)
{
    return esa_json_fail(r->file, ESA_ERR_MEMORY, "out of memory for the tokenizer");
}

static esa_status read_vocab(reader *r, json_t *vocab)
{
    const char *key;
    json_t *value;
    int64_t bytes = 1;
    r->vocab = json_is_object(vocab) ? (int64_t)json_object_size(vocab) : 0;
    if (r->vocab < 1 || r->vocab > ESA_BPE_MAX)
        return esa_json_fail(r->file, ESA_ERR_FORMAT,
                             "vocab has %lld entries, expected an object with 1 to %d",
                             (long long)r->vocab, ESA_BPE_MAX);
    json_object_foreach(vocab, key, value)
    {
        const size_t n = strlen(key);
        const json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (n < 1 || n > ESA_BPE_MAX_TOKEN)
            return esa_json_fail(r->file, ESA_ERR_FORMAT,
                                 "vocab has an entry of %lld bytes, expected 1 to %d", (long long)n,
                                 ESA_BPE_MAX_TOKEN);
        if (id < 0 || id >= 2 * ESA_BPE_MAX)
            return esa_json_fail(r->file, ESA_ERR_FORMAT, "vocab gives %s no id from 0 to %d",
                                 esa_quote(key).text, 2 * ESA_BPE_MAX - 1);
        bytes += (int64_t)n;
    }
    esa_bpe *bpe = r->bpe;
    if (!esa_bpe_words_make(&bpe->base.ctx->mem, &bpe->words, r->vocab, bytes))
        return esa_bpe_no_memory(r);
    json_object_foreach(vocab, key, value)
    {
        const int32_t id = (int32_t)json_integer_value(value);
        esa_bpe_words_add(&bpe->words, key, (int64_t)strlen(key), id);
        bpe->base.largest = id > bpe->base.largest ? id : bpe->base.largest;
    }
    return ESA_OK;
}

/* Bytes without a symbol of their own become the unknown token, if there is one. */
static esa_status read_symbols(reader *r, const json_t *model)
{
    const char *name = esa_bpe_text(model, "unk_token");
    const int32_t unknown = esa_bpe_words_find(&r->bpe->words, name, (int64_t)strlen(name));
    if (*name && unknown < 0)
        return esa_json_fail(r->file, ESA_ERR_FORMAT, "unk_token %s is not in vocab",
                             esa_quote(name).text);
    for (int32_t last = 0; last < 2; last++)
        for (int32_t byte = 0; byte < 256; byte++) {
            char text[16];
            const int32_t n = esa_bpe_byte(text, (uint8_t)byte);
            snprintf(text + n, sizeof text - (size_t)n, "%s", last ? r->suffix : "");
            const int32_t id = esa_bpe_words_find(&r->bpe->words, text, (int64_t)strlen(text));
            r->bpe->symbol[last][byte] = id < 0 && *name ? unknown : id;
            if (id < 0 && !*name)
                return esa_json_fail(r->file, ESA_ERR_FORMAT,
                                     "vocab has no %s for byte 0x%02x, and there is no unk_token",
                                     esa_quote(text).text, (unsigned)byte);
        }
    return ESA_OK;
}

/* The two halves of a merge, "a b" or ["a", "b"]; 0 if it is neither. */
static int32_t halves(const json_t *merge, const char *half[2], int64_t bytes[2])
{
    if (json_is_string(merge)) {
        const char *text = json_string_value(merge), *gap = strchr(text, ' ');
        if (!gap || strchr(gap + 1, ' ')) return 0;
        half[0] = text;
        half[1] = gap + 1;
        bytes[0] = gap - text;
        bytes[1] = (int64_t)strlen(gap + 1);
    } else {
        if (json_array_size(merge) != 2) return 0;
        for (size_t i = 0; i < 2; i++) {
            const json_t *part = json_array_get(merge, i);
            half[i] = json_is_string(part) ? json_string_value(part) : "";
            bytes[i] = (int64_t)strlen(half[i]);
        }
    }
    return bytes[0] > 0 && bytes[1] > 0 && bytes[0] + bytes[1] <= ESA_BPE_MAX_TOKEN;
}

static esa_status read_merges(reader *r, const json_t *merges)
{
    const esa_bpe_words *words = &r->bpe->words;
    const size_t count = json_array_size(merges);
    if (!json_is_array(merges) || count > ESA_BPE_MAX)
        return esa_json_fail(r->file, ESA_ERR_FORMAT,
                             "merges has %lld entries, expected a list of at most %d",
                             (long long)count, ESA_BPE_MAX);
    if (!esa_bpe_merges_make(&r->bpe->base.ctx->mem, &r->bpe->merges, (int64_t)count))
        return esa_bpe_no_memory(r);
    for (size_t i = 0; i < count; i++) {
        const char *half[2];
        int64_t n[2];
        char whole[ESA_BPE_MAX_TOKEN + 1];
        if (!halves(json_array_get(merges, i), half, n))
            return esa_json_fail(r->file, ESA_ERR_FORMAT,
                                 "merge %lld is not a pair: expected \"a b\" or [\"a\", \"b\"]",
                                 (long long)i);
        memcpy(whole, half[0], (size_t)n[0]);
        memcpy(whole + n[0], half[1], (size_t)n[1] + 1);
        const int32_t a = esa_bpe_words_find(words, half[0], n[0]);
        const int32_t b = esa_bpe_words_find(words, half[1], n[1]);
        const int32_t id = esa_bpe_words_find(words, whole, n[0] + n[1]);
        if (a < 0 || b < 0 || id < 0)
            return esa_json_fail(r->file, ESA_ERR_FORMAT,
                                 "merge %lld makes %s, but vocab lacks it or one of its halves",
                                 (long long)i, esa_quote(whole).text);
        esa_bpe_merges_add(&r->bpe->merges, a, b, (int32_t)i, id);
    }
    return ESA_OK;
}

esa_status esa_bpe_read_model(reader *r)
{
    const json_t *model = json_object_get(r->file->root, "model");
    ESA_TRY(check_model_type(r, model));
    ESA_TRY(read_split(r));
    ESA_TRY(read_normalizer(r));
    ESA_TRY(check_model(r, model));
    ESA_TRY(read_vocab(r, json_object_get(model, "vocab")));
    ESA_TRY(read_symbols(r, model));
    return read_merges(r, json_object_get(model, "merges"));
}
