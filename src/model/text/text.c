/* text.c - see text.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/text.h"

#include "model/config/config.h"

static esa_status open_tokenizer(const esa_part_env *env, esa_tokenizer **tokenizer, int32_t vocab,
                                 const char *name)
{
    esa_ctx *ctx = env->nn->ctx;
    char *folder;
    int64_t bytes;
    ESA_TRY(esa_path_join(ctx, &folder, &bytes, env->folder, name));
    const esa_status status = esa_tokenizer_open(ctx, tokenizer, folder, vocab);
    esa_mem_free(&ctx->mem, folder, bytes);
    return status;
}

static esa_status make(const esa_part_env *env, esa_text_part *part)
{
    static const char *const tokenizers[2] = { "tokenizer", "tokenizer_2" };
    for (int32_t i = 0; i < part->kind->encoders; i++) {
        int32_t vocab;
        ESA_TRY(part->kind->make(env, &part->encoder[i], &vocab, part->config, i));
        ESA_TRY(open_tokenizer(env, &part->words[i], vocab, tokenizers[i]));
    }
    return ESA_OK;
}

esa_status esa_text_make(const esa_part_env *env, esa_text_part **out, const esa_text_kind *kind,
                         const void *config)
{
    esa_ctx *ctx = env->nn->ctx;
    *out = NULL;
    esa_text_part *part = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *part);
    if (!part) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    part->kind = kind;
    part->config = config;
    part->ctx = ctx;
    const esa_status status = make(env, part);
    if (status)
        esa_text_free(part);
    else
        *out = part;
    return status;
}

esa_status esa_text_load(esa_text_part *part)
{
    for (int32_t i = 0; i < part->kind->encoders; i++)
        ESA_TRY(esa_part_load(part->encoder[i], ESA_LOAD_ENCODER));
    part->loaded = 1;
    return ESA_OK;
}

void esa_text_free(esa_text_part *part)
{
    if (!part) return;
    const esa_allocator mem = part->ctx->mem;
    for (int32_t i = 0; i < part->kind->encoders; i++) {
        esa_part_free(part->encoder[i]);
        esa_tokenizer_free(part->words[i]);
    }
    esa_mem_free(&mem, part, (int64_t)sizeof *part);
}

void esa_text_memory(const esa_text_part *part, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = *held = *mapped = 0;
    for (int32_t i = 0; i < part->kind->encoders; i++) {
        int64_t one[3];
        esa_part_memory(part->encoder[i], &one[0], &one[1], &one[2]);
        *parameters += one[0];
        *held += one[1];
        *mapped += one[2];
    }
}

esa_status esa_text_encode(esa_text_part *part, esa_text *text, const char *prompt)
{
    return part->kind->encode(part, text, prompt);
}

esa_status esa_text_check_ids(esa_ctx *ctx, const int32_t *ids, int64_t n, int32_t vocab)
{
    if (n < 1) return esa_fail(ctx, ESA_ERR_ARGUMENT, "the text encoder got no tokens");
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "token id is %d, expected 0 .. %d for this text encoder", (int)ids[i],
                            (int)vocab - 1);
    return ESA_OK;
}
