/* tokenizer.c - see tokenizer.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "io/safetensors.h"
#include "model/config.h"
#include "model/json_file.h"
#ifdef ESA_HAVE_SENTENCEPIECE
#include "model/text/sp_shim.h"

#define MAX_SPECIAL 4096 /* UMT5 has 304 */
#define MAX_MODEL   (INT64_C(256) << 20)

typedef struct special {
    char *text;
    int64_t bytes; /* with its 0 */
    int32_t id;
} special;

struct esa_tokenizer {
    esa_ctx *ctx;
    esa_sp *sp;
    special *list; /* [MAX_SPECIAL] */
    int32_t count, pad, eos;
};

static esa_status add_special(esa_tokenizer *t, const char *text, int64_t id)
{
    if (id < 0 || id > INT32_MAX || !*text) return ESA_OK;
    for (int32_t i = 0; i < t->count; i++)
        if (strcmp(t->list[i].text, text) == 0) return ESA_OK;
    if (t->count == MAX_SPECIAL)
        return esa_fail(t->ctx, ESA_ERR_FORMAT,
                        "tokenizer_config.json has more than %d special tokens", MAX_SPECIAL);
    special *s = &t->list[t->count];
    s->bytes = (int64_t)strlen(text) + 1;
    s->text = esa_mem_alloc(&t->ctx->mem, s->bytes);
    if (!s->text) return esa_fail(t->ctx, ESA_ERR_MEMORY, "out of memory for the tokenizer");
    memcpy(s->text, text, (size_t)s->bytes);
    s->id = (int32_t)id;
    t->count++;
    return ESA_OK;
}

/* A token is a string, or an object whose content is one (the form older versions of transformers
 * write). */
static const char *content(const json_t *token)
{
    const json_t *text = json_is_object(token) ? json_object_get(token, "content") : token;
    return json_is_string(text) ? json_string_value(text) : NULL;
}

static esa_status add_token(esa_tokenizer *t, const json_t *token)
{
    const char *text = content(token);
    return text ? add_special(t, text, esa_sp_find(t->sp, text)) : ESA_OK;
}

/* added_tokens_decoder says ids itself; the other keys name strings whose ids the vocabulary
 * knows. */
static esa_status read_specials(esa_tokenizer *t, esa_json_file *f)
{
    static const char *const names[] = { "pad_token", "eos_token", "unk_token" }, *const lists[] = {
        "extra_special_tokens", "additional_special_tokens"
    };
    esa_status status = ESA_OK;
    const char *key;
    json_t *value;
    json_t *decoder = json_object_get(f->root, "added_tokens_decoder");
    json_object_foreach(decoder, key, value)
    {
        const char *text = content(value);
        if (status == ESA_OK && text && json_is_true(json_object_get(value, "special")))
            status = add_special(t, text, strtoll(key, NULL, 10));
    }
    for (size_t i = 0; i < 3 && status == ESA_OK; i++)
        status = add_token(t, json_object_get(f->root, names[i]));
    for (size_t i = 0; i < 2; i++) {
        const json_t *list = json_object_get(f->root, lists[i]);
        size_t at;
        json_array_foreach(list, at, value) if (status == ESA_OK) status = add_token(t, value);
    }
    return status;
}

static int32_t special_id(const esa_tokenizer *t, const char *text)
{
    for (int32_t i = 0; i < t->count; i++)
        if (strcmp(t->list[i].text, text) == 0) return t->list[i].id;
    return esa_sp_find(t->sp, text);
}

static esa_status open_parts(esa_tokenizer *t, const char *folder, const char *config,
                             const char *model, int32_t vocab)
{
    esa_ctx *ctx = t->ctx;
    struct stat st;
    char why[200];
    if (stat(model, &st) != 0)
        return esa_fail(ctx, ESA_ERR_IO, "%s cannot be opened: %s", model, strerror(errno));
    if (!S_ISREG(st.st_mode) || st.st_size > MAX_MODEL)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%s is not a SentencePiece model", model);
    if (esa_sp_open(&t->sp, model, why, sizeof why) != 0)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%s is not a SentencePiece model: %s", model,
                        esa_quote(why).text);
    esa_json_file f;
    esa_status status = esa_json_file_open(ctx, &f, config);
    const char *eos = "</s>", *pad = "<pad>", *named;
    if (status == ESA_OK) status = read_specials(t, &f);
    if (status == ESA_OK && (named = content(json_object_get(f.root, "eos_token")))) eos = named;
    if (status == ESA_OK && (named = content(json_object_get(f.root, "pad_token")))) pad = named;
    t->eos = special_id(t, eos);
    t->pad = special_id(t, pad);
    esa_json_file_close(&f);
    if (status != ESA_OK) return status;
    if (t->eos < 0 || t->pad < 0)
        return esa_fail(ctx, ESA_ERR_FORMAT, "the tokenizer in %s has no %s token", folder,
                        t->eos < 0 ? "end-of-sentence" : "padding");
    int32_t largest = esa_sp_size(t->sp) - 1;
    for (int32_t i = 0; i < t->count; i++)
        largest = t->list[i].id > largest ? t->list[i].id : largest;
    if (vocab > 0 && largest >= vocab)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the tokenizer in %s has ids up to %d, the text encoder knows %d", folder,
                        (int)largest, (int)vocab);
    return ESA_OK;
}

esa_status esa_tokenizer_open(esa_ctx *ctx, esa_tokenizer **out, const char *folder, int32_t vocab)
{
    *out = NULL;
    esa_tokenizer *t = esa_mem_zalloc(&ctx->mem, sizeof *t);
    if (!t) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the tokenizer");
    t->ctx = ctx;
    char *config = NULL, *model = NULL;
    int64_t config_bytes = 0, model_bytes = 0;
    t->list = esa_mem_zalloc(&ctx->mem, MAX_SPECIAL * (int64_t)sizeof(special));
    esa_status status = t->list ? ESA_OK
                                : esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the tokenizer");
    if (status == ESA_OK)
        status = esa_path_join(ctx, &config, &config_bytes, folder, "tokenizer_config.json");
    if (status == ESA_OK) status = esa_path_join(ctx, &model, &model_bytes, folder, "spiece.model");
    if (status == ESA_OK) status = open_parts(t, folder, config, model, vocab);
    esa_mem_free(&ctx->mem, config, config_bytes);
    esa_mem_free(&ctx->mem, model, model_bytes);
    if (status == ESA_OK)
        *out = t;
    else
        esa_tokenizer_free(t);
    return status;
}

void esa_tokenizer_free(esa_tokenizer *t)
{
    if (!t) return;
    esa_sp_close(t->sp);
    for (int32_t i = 0; i < t->count; i++)
        esa_mem_free(&t->ctx->mem, t->list[i].text, t->list[i].bytes);
    esa_mem_free(&t->ctx->mem, t->list, MAX_SPECIAL * (int64_t)sizeof(special));
    esa_mem_free(&t->ctx->mem, t, sizeof *t);
}

typedef struct id_list {
    int32_t *ids;
    int64_t max, count; /* count goes on past max */
} id_list;

static void put_id(void *user, int32_t id)
{
    id_list *l = user;
    if (l->count < l->max) l->ids[l->count] = id;
    l->count++;
}

/* The longest special token that begins at s, or NULL. */
static const special *special_at(const esa_tokenizer *t, const char *s)
{
    const special *best = NULL;
    for (int32_t i = 0; i < t->count; i++)
        if (t->list[i].text[0] == *s && (!best || t->list[i].bytes > best->bytes) &&
            strncmp(s, t->list[i].text, (size_t)(t->list[i].bytes - 1)) == 0)
            best = &t->list[i];
    return best;
}

esa_status esa_tokenizer_encode(esa_tokenizer *t, const char *text, int32_t *ids, int32_t max,
                                int32_t *count, int32_t *total)
{
    id_list list = { ids, max - 1, 0 };
    for (const char *s = text, *from = text;; s++) {
        const special *token = *s ? special_at(t, s) : NULL;
        if (*s && !token) continue;
        if (s > from && esa_sp_encode(t->sp, from, (size_t)(s - from), put_id, &list) != 0)
            return esa_fail(t->ctx, ESA_ERR_MEMORY, "the prompt could not be cut into tokens");
        if (!*s) break;
        put_id(&list, token->id);
        s += token->bytes - 2; /* the loop adds one */
        from = s + 1;
    }
    const int32_t n = (int32_t)esa_min64(list.count, list.max);
    ids[n] = t->eos;
    for (int32_t i = n + 1; i < max; i++) ids[i] = t->pad;
    *count = n + 1;
    if (total) *total = (int32_t)esa_min64(list.count + 1, INT32_MAX);
    return ESA_OK;
}
#else
struct esa_tokenizer {
    esa_ctx *ctx;
};

esa_status esa_tokenizer_open(esa_ctx *ctx, esa_tokenizer **tokenizer, const char *folder,
                              int32_t vocab)
{
    (void)vocab;
    *tokenizer = NULL;
    return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                    "this build cannot cut prompts into tokens (it was made without "
                    "libsentencepiece), so %s is not read: "
                    "give prompt embeddings instead",
                    folder);
}

void esa_tokenizer_free(esa_tokenizer *tokenizer) { (void)tokenizer; }

esa_status esa_tokenizer_encode(esa_tokenizer *tokenizer, const char *text, int32_t *ids,
                                int32_t max, int32_t *count, int32_t *total)
{
    (void)text;
    (void)ids;
    (void)max;
    (void)count;
    (void)total;
    return esa_fail(tokenizer->ctx, ESA_ERR_UNSUPPORTED, "this build has no tokenizer");
}
#endif
