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
    int64_t bytes; /* with the final 0 */
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

/* A token is a string, or an object with a string as its content (as older versions of transformers
 * write it). */
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

/* added_tokens_decoder gives the ids itself. The other keys have strings, whose ids are looked up
 * in the vocabulary. */
static esa_status read_specials(esa_tokenizer *t, const json_t *root)
{
    static const char *const names[] = { "pad_token", "eos_token", "unk_token" };
    static const char *const lists[] = { "extra_special_tokens", "additional_special_tokens" };
    const char *key;
    json_t *value;
    json_t *decoder = json_object_get(root, "added_tokens_decoder");
    json_object_foreach(decoder, key, value)
    {
        const char *text = content(value);
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

static int32_t special_id(const esa_tokenizer *t, const char *text)
{
    for (int32_t i = 0; i < t->count; i++)
        if (strcmp(t->list[i].text, text) == 0) return t->list[i].id;
    return esa_sp_find(t->sp, text);
}

static esa_status open_model(esa_tokenizer *t, const char *path)
{
    struct stat st;
    char why[200];
    if (stat(path, &st) != 0)
        return esa_fail(t->ctx, ESA_ERR_IO, "%s cannot be opened: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode) || st.st_size > MAX_MODEL)
        return esa_fail(t->ctx, ESA_ERR_FORMAT, "%s is not a SentencePiece model", path);
    if (esa_sp_open(&t->sp, path, why, sizeof why) != 0)
        return esa_fail(t->ctx, ESA_ERR_FORMAT, "%s is not a SentencePiece model: %s", path,
                        esa_quote(why).text);
    return ESA_OK;
}

static esa_status read_config(esa_tokenizer *t, const char *path)
{
    esa_json_file f;
    esa_status status = esa_json_file_open(t->ctx, &f, path);
    if (!status) status = read_specials(t, f.root);
    if (!status) {
        const char *eos = content(json_object_get(f.root, "eos_token"));
        const char *pad = content(json_object_get(f.root, "pad_token"));
        t->eos = special_id(t, eos ? eos : "</s>");
        t->pad = special_id(t, pad ? pad : "<pad>");
    }
    esa_json_file_close(&f);
    return status;
}

static esa_status check_ids(const esa_tokenizer *t, const char *folder, int32_t vocab)
{
    if (t->eos < 0 || t->pad < 0)
        return esa_fail(t->ctx, ESA_ERR_FORMAT, "the tokenizer in %s has no %s token", folder,
                        t->eos < 0 ? "end-of-sentence" : "padding");
    int32_t largest = esa_sp_size(t->sp) - 1;
    for (int32_t i = 0; i < t->count; i++)
        largest = t->list[i].id > largest ? t->list[i].id : largest;
    if (vocab > 0 && largest >= vocab)
        return esa_fail(t->ctx, ESA_ERR_MISMATCH,
                        "the tokenizer in %s has ids up to %d, but the text encoder has %d", folder,
                        (int)largest, (int)vocab);
    return ESA_OK;
}

/* Opens folder/name with one of the functions above. */
static esa_status open_with(esa_tokenizer *t, const char *folder, const char *name,
                            esa_status (*open)(esa_tokenizer *t, const char *path))
{
    char *path;
    int64_t bytes;
    ESA_TRY(esa_path_join(t->ctx, &path, &bytes, folder, name));
    const esa_status status = open(t, path);
    esa_mem_free(&t->ctx->mem, path, bytes);
    return status;
}

static esa_status open_parts(esa_tokenizer *t, const char *folder, int32_t vocab)
{
    t->list = esa_mem_zalloc(&t->ctx->mem, MAX_SPECIAL * (int64_t)sizeof(special));
    if (!t->list) return esa_fail(t->ctx, ESA_ERR_MEMORY, "out of memory for the tokenizer");
    ESA_TRY(open_with(t, folder, "spiece.model", open_model));
    ESA_TRY(open_with(t, folder, "tokenizer_config.json", read_config));
    return check_ids(t, folder, vocab);
}

esa_status esa_tokenizer_open(esa_ctx *ctx, esa_tokenizer **out, const char *folder, int32_t vocab)
{
    *out = NULL;
    esa_tokenizer *t = esa_mem_zalloc(&ctx->mem, sizeof *t);
    if (!t) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the tokenizer");
    t->ctx = ctx;
    const esa_status status = open_parts(t, folder, vocab);
    if (!status)
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
    int64_t max, count; /* count may exceed max */
} id_list;

static void put_id(void *user, int32_t id)
{
    id_list *l = user;
    if (l->count < l->max) l->ids[l->count] = id;
    l->count++;
}

/* The longest special token at s, or NULL. */
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
            return esa_fail(t->ctx, ESA_ERR_MEMORY, "the prompt could not be split into tokens");
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
                    "%s cannot be read: this build has no libsentencepiece to split prompts into "
                    "tokens; give prompt embeddings instead",
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
