/* bpe_open.c - opens byte-level BPE tokenizers: added tokens, the frame of a text, padding; see
 * bpe.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include "io/safetensors.h"
#include "model/config/config.h"
#include "model/text/bpe_read.h"

typedef esa_bpe_reader reader;

/* The id of a token of the vocabulary or of the added ones, or -1. */
static int32_t find(const esa_bpe *bpe, const char *text)
{
    const int64_t n = (int64_t)strlen(text);
    for (int32_t i = 0; i < bpe->added_count; i++)
        if (strcmp(bpe->added[i].name, text) == 0) return bpe->added[i].id;
    return n ? esa_bpe_words_find(&bpe->words, text, n) : -1;
}

/* The id that `tokenizers` gives to an added token: that of the vocabulary, or the next free one
 * behind it and behind the tokens that were added before. */
static int64_t id_of_added(const reader *r, const char *text)
{
    const int32_t known = find(r->bpe, text);
    int64_t next = r->vocab;
    if (known >= 0) return known;
    for (int32_t i = 0; i < r->bpe->added_count; i++)
        next = r->bpe->added[i].id >= next ? r->bpe->added[i].id + 1 : next;
    return next;
}

static esa_status check_added(reader *r, const json_t *token, const char *text)
{
    static const char *const flags[] = { "single_word", "lstrip", "rstrip" };
    const json_t *id = json_object_get(token, "id");
    if (!*text || strlen(text) > ESA_BPE_MAX_TOKEN || !json_is_integer(id))
        return esa_json_fail(r->file, ESA_ERR_FORMAT,
                             "an added token has no id, or no content of 1 to %d bytes",
                             ESA_BPE_MAX_TOKEN);
    for (size_t i = 0; i < 3; i++)
        if (json_is_true(json_object_get(token, flags[i])))
            return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED,
                                 "added token %s has %s true, expected false", esa_quote(text).text,
                                 flags[i]);
    for (int32_t i = 0; i < r->bpe->added_count; i++)
        if (strcmp(r->bpe->added[i].name, text) == 0)
            return esa_json_fail(r->file, ESA_ERR_FORMAT, "added token %s is listed twice",
                                 esa_quote(text).text);
    const int64_t want = id_of_added(r, text);
    if (json_integer_value(id) != want)
        return esa_json_fail(r->file, ESA_ERR_FORMAT, "added token %s has id %lld, expected %lld",
                             esa_quote(text).text, (long long)json_integer_value(id),
                             (long long)want);
    return ESA_OK;
}

static esa_status add_token(reader *r, const json_t *token)
{
    const char *text = esa_bpe_text(token, "content");
    ESA_TRY(check_added(r, token, text));
    esa_bpe *bpe = r->bpe;
    const esa_allocator *mem = &bpe->base.ctx->mem;
    const int64_t n = (int64_t)strlen(text);
    esa_bpe_added *a = &bpe->added[bpe->added_count];
    a->normalized = json_is_true(json_object_get(token, "normalized"));
    a->id = (int32_t)json_integer_value(json_object_get(token, "id"));
    a->block_bytes = n + 1 + ESA_BPE_NORMAL(n);
    a->name = esa_mem_alloc(mem, a->block_bytes);
    if (!a->name) return esa_bpe_no_memory(r);
    bpe->added_count++;
    bpe->base.largest = a->id > bpe->base.largest ? a->id : bpe->base.largest;
    memcpy(a->name, text, (size_t)n + 1);
    a->text = a->name;
    a->length = n;
    if (!a->normalized || bpe->split == ESA_BPE_LLAMA) return ESA_OK;
    /* It is looked for in normalised text, so it is normalised, too. */
    const int64_t work_bytes = ESA_BPE_WORK(n) * (int64_t)sizeof(int32_t);
    int32_t *work = esa_mem_alloc(mem, work_bytes);
    if (!work) return esa_bpe_no_memory(r);
    a->text = a->name + n + 1;
    a->length = esa_bpe_normalize(a->name + n + 1, work, text, n);
    esa_mem_free(mem, work, work_bytes);
    return ESA_OK;
}

static esa_status read_added(reader *r)
{
    const json_t *list = json_object_get(r->file->root, "added_tokens");
    const size_t count = json_array_size(list);
    if (count > ESA_BPE_MAX_ADDED)
        return esa_json_fail(r->file, ESA_ERR_FORMAT,
                             "added_tokens has %lld entries, expected at most %d", (long long)count,
                             ESA_BPE_MAX_ADDED);
    r->bpe->added = esa_mem_zalloc(&r->bpe->base.ctx->mem,
                                   ESA_BPE_MAX_ADDED * (int64_t)sizeof(esa_bpe_added));
    if (!r->bpe->added) return esa_bpe_no_memory(r);
    for (size_t i = 0; i < count; i++) ESA_TRY(add_token(r, json_array_get(list, i)));
    return ESA_OK;
}

/* One token of the frame: at the front (before the text) or at the back, each at most once. */
static esa_status set_frame(reader *r, const char *name, int32_t back)
{
    int32_t *id = back ? &r->bpe->base.eos : &r->bpe->base.bos;
    const int32_t found = find(r->bpe, name);
    if (found < 0)
        return esa_json_fail(r->file, ESA_ERR_FORMAT, "post_processor adds %s, which has no id",
                             *name ? esa_quote(name).text : "a token without a name");
    if (*id >= 0)
        return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED,
                             "post_processor adds two tokens %s a text, expected at most one",
                             back ? "behind" : "before");
    *id = found;
    return ESA_OK;
}

static esa_status read_template(reader *r, const json_t *part)
{
    const json_t *single = json_object_get(part, "single");
    int32_t back = 0;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *item = json_array_get(single, i);
        const json_t *token = json_object_get(item, "SpecialToken");
        if (token)
            ESA_TRY(set_frame(r, esa_bpe_text(token, "id"), back));
        else
            back++;
    }
    if (back == 1) return ESA_OK;
    return esa_json_fail(r->file, ESA_ERR_FORMAT, "post_processor has the text %d times in single",
                         (int)back);
}

static esa_status read_roberta(reader *r, const json_t *part)
{
    const char *const keys[] = { "cls", "sep" };
    for (int32_t back = 0; back < 2; back++) {
        const json_t *name = json_array_get(json_object_get(part, keys[back]), 0);
        ESA_TRY(set_frame(r, json_is_string(name) ? json_string_value(name) : "", back));
    }
    return ESA_OK;
}

/* ByteLevel only changes offsets. */
static esa_status read_frame(reader *r, const json_t *part)
{
    const char *type = esa_bpe_text(part, "type");
    if (!part || json_is_null(part) || strcmp(type, "ByteLevel") == 0) return ESA_OK;
    if (strcmp(type, "TemplateProcessing") == 0) return read_template(r, part);
    if (strcmp(type, "RobertaProcessing") == 0) return read_roberta(r, part);
    return esa_json_fail(r->file, ESA_ERR_UNSUPPORTED,
                         "post_processor is %s, expected ByteLevel, TemplateProcessing, "
                         "RobertaProcessing or a Sequence of them",
                         esa_quote(type).text);
}

static esa_status read_post_processor(reader *r)
{
    const json_t *part = json_object_get(r->file->root, "post_processor");
    if (strcmp(esa_bpe_text(part, "type"), "Sequence") != 0) return read_frame(r, part);
    const json_t *list = json_object_get(part, "processors");
    for (size_t i = 0; i < json_array_size(list); i++)
        ESA_TRY(read_frame(r, json_array_get(list, i)));
    return ESA_OK;
}

static esa_status read_json(esa_bpe *bpe, esa_json_file *file)
{
    reader r = { .file = file, .bpe = bpe };
    ESA_TRY(esa_bpe_read_model(&r));
    ESA_TRY(read_added(&r));
    return read_post_processor(&r);
}

/* tokenizer_config.json: the padding. LlamaTokenizer adds bos_token even if tokenizer.json does
 * not, unless add_bos_token is false. */
static esa_status read_config(esa_bpe *bpe, esa_json_file *file)
{
    const char *pad = esa_token_content(json_object_get(file->root, "pad_token"));
    const char *bos = esa_token_content(json_object_get(file->root, "bos_token"));
    const char *class = esa_bpe_text(file->root, "tokenizer_class");
    const char *side = esa_bpe_text(file->root, "padding_side");
    if (*side && strcmp(side, "right") != 0)
        return esa_json_fail(file, ESA_ERR_UNSUPPORTED, "padding_side is %s, expected right",
                             esa_quote(side).text);
    bpe->base.pad = pad ? find(bpe, pad) : -1;
    if (bpe->base.bos < 0 && bos && strncmp(class, "LlamaTokenizer", 14) == 0 &&
        !json_is_false(json_object_get(file->root, "add_bos_token")))
        bpe->base.bos = find(bpe, bos);
    return ESA_OK;
}

static esa_status read_file(esa_bpe *bpe, const char *folder, const char *name,
                            esa_status (*read)(esa_bpe *bpe, esa_json_file *file))
{
    esa_ctx *ctx = bpe->base.ctx;
    char *path;
    int64_t bytes;
    esa_json_file file;
    ESA_TRY(esa_path_join(ctx, &path, &bytes, folder, name));
    esa_status status = esa_json_file_open(ctx, &file, path);
    if (!status) status = read(bpe, &file);
    esa_json_file_close(&file);
    esa_mem_free(&ctx->mem, path, bytes);
    return status;
}

static esa_status make(esa_ctx *ctx, esa_bpe **bpe)
{
    *bpe = esa_mem_zalloc(&ctx->mem, sizeof **bpe);
    if (!*bpe) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the tokenizer");
    (*bpe)->base = (esa_tokenizer){
        .kind = &esa_bpe_kind, .ctx = ctx, .bos = -1, .eos = -1, .pad = -1
    };
    return ESA_OK;
}

/* Hands the object over, or frees it. */
static esa_status finish(esa_bpe *bpe, esa_tokenizer **out, esa_status status)
{
    if (!status)
        *out = &bpe->base;
    else
        bpe->base.kind->free(&bpe->base);
    return status;
}

esa_status esa_bpe_open(esa_ctx *ctx, esa_tokenizer **out, const char *folder)
{
    esa_bpe *bpe;
    *out = NULL;
    ESA_TRY(make(ctx, &bpe));
    esa_status status = read_file(bpe, folder, "tokenizer.json", read_json);
    if (!status) status = read_file(bpe, folder, "tokenizer_config.json", read_config);
    return finish(bpe, out, status);
}

esa_status esa_bpe_open_memory(esa_ctx *ctx, esa_tokenizer **out, const char *text, int64_t bytes)
{
    esa_bpe *bpe;
    esa_json_file file;
    *out = NULL;
    ESA_TRY(make(ctx, &bpe));
    esa_status status = esa_json_file_parse(ctx, &file, text, bytes, "tokenizer.json");
    if (!status) status = read_json(bpe, &file);
    esa_json_file_close(&file);
    return finish(bpe, out, status);
}
