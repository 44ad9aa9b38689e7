/* tokenizer.c - see tokenizer.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/tokenizer.h"

#include <sys/stat.h>
#include "model/config/config.h"
#include "model/config/json_file.h"
#include "model/text/tokenizer_kind.h"

const char *esa_token_content(const void *json)
{
    const json_t *token = json;
    const json_t *text = json_is_object(token) ? json_object_get(token, "content") : token;
    return json_is_string(text) ? json_string_value(text) : NULL;
}

static esa_status has_file(esa_ctx *ctx, int32_t *has, const char *folder, const char *name)
{
    char *path;
    int64_t bytes;
    struct stat st;
    ESA_TRY(esa_path_join(ctx, &path, &bytes, folder, name));
    *has = stat(path, &st) == 0;
    esa_mem_free(&ctx->mem, path, bytes);
    return ESA_OK;
}

static esa_status check_ids(const esa_tokenizer *t, const char *folder, int32_t vocab)
{
    if (t->pad < 0)
        return esa_fail(t->ctx, ESA_ERR_FORMAT, "the tokenizer in %s has no padding token", folder);
    if (vocab > 0 && t->largest >= vocab)
        return esa_fail(t->ctx, ESA_ERR_MISMATCH,
                        "the tokenizer in %s has ids up to %d, but the text encoder has %d", folder,
                        (int)t->largest, (int)vocab);
    return ESA_OK;
}

esa_status esa_tokenizer_open(esa_ctx *ctx, esa_tokenizer **out, const char *folder, int32_t vocab)
{
    int32_t pieces, json;
    *out = NULL;
    ESA_TRY(has_file(ctx, &pieces, folder, "spiece.model"));
    ESA_TRY(has_file(ctx, &json, folder, "tokenizer.json"));
    esa_tokenizer *t;
    ESA_TRY(json && !pieces ? esa_bpe_open(ctx, &t, folder)
                            : esa_sp_tokenizer_open(ctx, &t, folder));
    const esa_status status = check_ids(t, folder, vocab);
    if (!status)
        *out = t;
    else
        esa_tokenizer_free(t);
    return status;
}

void esa_tokenizer_free(esa_tokenizer *t)
{
    if (t) t->kind->free(t);
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

esa_status esa_tokenizer_encode(const esa_tokenizer *t, const char *text, int32_t *ids, int32_t max,
                                int32_t *count, int32_t *total)
{
    const int32_t front = t->bos >= 0, back = t->eos >= 0;
    if (max < front + back || max < 1)
        return esa_fail(t->ctx, ESA_ERR_ARGUMENT, "a prompt has room for %d tokens, expected %d",
                        (int)max, front + back > 1 ? front + back : 1);
    id_list list = { ids + front, max - front - back, 0 };
    if (front) ids[0] = t->bos;
    ESA_TRY(t->kind->encode(t, text, put_id, &list));
    int32_t n = front + (int32_t)esa_min64(list.count, list.max);
    if (back) ids[n++] = t->eos;
    for (int32_t i = n; i < max; i++) ids[i] = t->pad;
    *count = n;
    if (total) *total = (int32_t)esa_min64(list.count + front + back, INT32_MAX);
    return ESA_OK;
}
