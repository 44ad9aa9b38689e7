/* sp_tokenizer.c - see tokenizer.h: tokenizers with a SentencePiece vocabulary.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "io/mapfile.h"
#include "io/safetensors.h"
#include "model/config/config.h"
#include "model/config/json_file.h"
#include "model/text/tokenizer_kind.h"
#ifdef ESA_HAVE_SENTENCEPIECE
#include "model/text/sp_shim.h"

#define MAX_SPECIAL 4096 /* UMT5 has 304 */

typedef struct special {
    char *text;
    int64_t bytes; /* with the final 0 */
    int32_t id;
} special;

typedef struct sp_tokenizer {
    esa_tokenizer base;
    esa_sp *sp;
    special *list; /* [MAX_SPECIAL] */
    int32_t count;
} sp_tokenizer;

static esa_status add_special(sp_tokenizer *t, const char *text, int64_t id)
{
    if (id < 0 || id > INT32_MAX || !*text) return ESA_OK;
    for (int32_t i = 0; i < t->count; i++)
        if (strcmp(t->list[i].text, text) == 0) return ESA_OK;
    if (t->count == MAX_SPECIAL)
        return esa_fail(t->base.ctx, ESA_ERR_FORMAT,
                        "tokenizer_config.json has more than %d special tokens", MAX_SPECIAL);
    special *s = &t->list[t->count];
    s->bytes = (int64_t)strlen(text) + 1;
    s->text = esa_mem_alloc(&t->base.ctx->mem, s->bytes);
    if (!s->text) return esa_fail(t->base.ctx, ESA_ERR_MEMORY, "out of memory for the tokenizer");
    memcpy(s->text, text, (size_t)s->bytes);
    s->id = (int32_t)id;
    t->count++;
    return ESA_OK;
}

static esa_status add_token(sp_tokenizer *t, const json_t *token)
{
    const char *text = esa_token_content(token);
    return text ? add_special(t, text, esa_sp_find(t->sp, text)) : ESA_OK;
}

/* added_tokens_decoder gives the ids itself. The other keys have strings, whose ids are looked up
 * in the vocabulary. */
static esa_status read_specials(sp_tokenizer *t, const json_t *root)
{
    static const char *const names[] = { "pad_token", "eos_token", "unk_token" };
    static const char *const lists[] = { "extra_special_tokens", "additional_special_tokens" };
    const char *key;
    json_t *value;
    json_t *decoder = json_object_get(root, "added_tokens_decoder");
    json_object_foreach(decoder, key, value)
    {
        const char *text = esa_token_content(value);
        if (text && json_is_true(json_object_get(value, "special")))
            ESA_TRY(add_special(t, text, strtoll(key, NULL, 10)));
    }
    for (size_t i = 0; i < 3; i++) ESA_TRY(add_token(t, json_object_get(root, names[i])));
    for (size_t i = 0; i < 2; i++) {
        const json_t *list = json_object_get(root, lists[i]);
        for (size_t at = 0; at < json_array_size(list); at++)
            ESA_TRY(add_token(t, json_array_get(list, at)));
    }
    return ESA_OK;
}

static int32_t special_id(const sp_tokenizer *t, const char *text)
{
    for (int32_t i = 0; i < t->count; i++)
        if (strcmp(t->list[i].text, text) == 0) return t->list[i].id;
    return esa_sp_find(t->sp, text);
}

static esa_status open_model(sp_tokenizer *t, const char *path)
{
    esa_mapped m;
    char why[200];
    ESA_TRY(esa_map_file(t->base.ctx, &m, path, path));
    const int32_t failed = !m.copy || esa_sp_open(&t->sp, m.copy, (size_t)m.size, why, sizeof why);
    if (!m.copy) snprintf(why, sizeof why, "it has %lld bytes", (long long)m.size);
    esa_unmap_file(&m);
    if (!failed) return ESA_OK;
    return esa_fail(t->base.ctx, ESA_ERR_FORMAT, "%s is not a SentencePiece model: %s", path,
                    esa_quote(why).text);
}

static esa_status read_config(sp_tokenizer *t, const char *path)
{
    esa_json_file f;
    esa_status status = esa_json_file_open(t->base.ctx, &f, path);
    if (!status) status = read_specials(t, f.root);
    if (!status) {
        const char *eos = esa_token_content(json_object_get(f.root, "eos_token"));
        const char *pad = esa_token_content(json_object_get(f.root, "pad_token"));
        t->base.eos = special_id(t, eos ? eos : "</s>");
        t->base.pad = special_id(t, pad ? pad : "<pad>");
    }
    esa_json_file_close(&f);
    return status;
}

static esa_status check_ids(sp_tokenizer *t, const char *folder)
{
    if (t->base.eos < 0)
        return esa_fail(t->base.ctx, ESA_ERR_FORMAT,
                        "the tokenizer in %s has no end-of-sentence token", folder);
    t->base.largest = esa_sp_size(t->sp) - 1;
    for (int32_t i = 0; i < t->count; i++)
        t->base.largest = t->list[i].id > t->base.largest ? t->list[i].id : t->base.largest;
    return ESA_OK;
}

/* Opens folder/name with one of the functions above. */
static esa_status open_with(sp_tokenizer *t, const char *folder, const char *name,
                            esa_status (*open)(sp_tokenizer *t, const char *path))
{
    char *path;
    int64_t bytes;
    ESA_TRY(esa_path_join(t->base.ctx, &path, &bytes, folder, name));
    const esa_status status = open(t, path);
    esa_mem_free(&t->base.ctx->mem, path, bytes);
    return status;
}

static esa_status open_parts(sp_tokenizer *t, const char *folder)
{
    t->list = esa_mem_zalloc(&t->base.ctx->mem, MAX_SPECIAL * (int64_t)sizeof(special));
    if (!t->list) return esa_fail(t->base.ctx, ESA_ERR_MEMORY, "out of memory for the tokenizer");
    ESA_TRY(open_with(t, folder, "spiece.model", open_model));
    ESA_TRY(open_with(t, folder, "tokenizer_config.json", read_config));
    return check_ids(t, folder);
}

/* The longest special token at s, or NULL. */
static const special *special_at(const sp_tokenizer *t, const char *s)
{
    const special *best = NULL;
    for (int32_t i = 0; i < t->count; i++)
        if (t->list[i].text[0] == *s && (!best || t->list[i].bytes > best->bytes) &&
            strncmp(s, t->list[i].text, (size_t)(t->list[i].bytes - 1)) == 0)
            best = &t->list[i];
    return best;
}

static esa_status encode(const esa_tokenizer *base, const char *text,
                         void (*put)(void *user, int32_t id), void *user)
{
    const sp_tokenizer *t = (const sp_tokenizer *)base;
    for (const char *s = text, *from = text;; s++) {
        const special *token = *s ? special_at(t, s) : NULL;
        if (*s && !token) continue;
        if (s > from && esa_sp_encode(t->sp, from, (size_t)(s - from), put, user) != 0)
            return esa_fail(base->ctx, ESA_ERR_MEMORY, "the prompt could not be split into tokens");
        if (!*s) return ESA_OK;
        put(user, token->id);
        s += token->bytes - 2; /* the loop adds one */
        from = s + 1;
    }
}

static void free_sp(esa_tokenizer *base)
{
    sp_tokenizer *t = (sp_tokenizer *)base;
    const esa_allocator *mem = &base->ctx->mem;
    esa_sp_close(t->sp);
    for (int32_t i = 0; i < t->count; i++) esa_mem_free(mem, t->list[i].text, t->list[i].bytes);
    esa_mem_free(mem, t->list, MAX_SPECIAL * (int64_t)sizeof(special));
    esa_mem_free(mem, t, sizeof *t);
}

static const esa_tokenizer_kind sp_kind = { encode, free_sp };

esa_status esa_sp_tokenizer_open(esa_ctx *ctx, esa_tokenizer **out, const char *folder)
{
    *out = NULL;
    sp_tokenizer *t = esa_mem_zalloc(&ctx->mem, sizeof *t);
    if (!t) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the tokenizer");
    t->base = (esa_tokenizer){ .kind = &sp_kind, .ctx = ctx, .bos = -1, .eos = -1, .pad = -1 };
    const esa_status status = open_parts(t, folder);
    if (!status)
        *out = &t->base;
    else
        free_sp(&t->base);
    return status;
}
#else
esa_status esa_sp_tokenizer_open(esa_ctx *ctx, esa_tokenizer **tokenizer, const char *folder)
{
    *tokenizer = NULL;
    return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                    "%s cannot be read: this build has no libsentencepiece to split prompts into "
                    "tokens; give prompt embeddings instead",
                    folder);
}
#endif
