/* t5_text.c - see t5_text.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/t5_text.h"

#include <string.h>
#include "model/text/prompt.h"
#include "model/text/tokenizer.h"
#include "model/text/umt5.h"

struct esa_t5_text {
    esa_ctx *ctx;
    esa_tokenizer *tokenizer;
    esa_umt5 *encoder;
    int32_t d_model;
    int32_t flags; /* ESA_T5_* */
};

static esa_status open_tokenizer(const esa_part_env *env, esa_tokenizer **tokenizer,
                                 const esa_umt5_config *config)
{
    esa_ctx *ctx = env->nn->ctx;
    char *folder;
    int64_t bytes;
    *tokenizer = NULL;
    ESA_TRY(esa_path_join(ctx, &folder, &bytes, env->folder, "tokenizer"));
    const esa_status status = esa_tokenizer_open(ctx, tokenizer, folder, config->vocab);
    esa_mem_free(&ctx->mem, folder, bytes);
    return status;
}

esa_status esa_t5_text_check(const esa_part_env *env, const esa_umt5_config *config)
{
    esa_tokenizer *tokenizer;
    ESA_TRY(esa_umt5_check(env, config));
    const esa_status status = open_tokenizer(env, &tokenizer, config);
    esa_tokenizer_free(tokenizer);
    return status;
}

esa_status esa_t5_text_open(const esa_part_env *env, esa_t5_text **part,
                            const esa_umt5_config *config, int32_t flags)
{
    esa_ctx *ctx = env->nn->ctx;
    *part = NULL;
    esa_t5_text *p = esa_mem_zalloc(&ctx->mem, sizeof *p);
    if (!p) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the text encoder");
    p->ctx = ctx;
    p->d_model = config->d_model;
    p->flags = flags;
    esa_status status = open_tokenizer(env, &p->tokenizer, config);
    if (!status) status = esa_umt5_open(env, &p->encoder, config);
    if (!status)
        *part = p;
    else
        esa_t5_text_free(p);
    return status;
}

void esa_t5_text_free(esa_t5_text *part)
{
    if (!part) return;
    const esa_allocator mem = part->ctx->mem;
    esa_umt5_free(part->encoder);
    esa_tokenizer_free(part->tokenizer);
    esa_mem_free(&mem, part, sizeof *part);
}

void esa_t5_text_memory(const esa_t5_text *part, int64_t *parameters, int64_t *held,
                        int64_t *mapped)
{
    esa_umt5_memory(part->encoder, parameters, held, mapped);
}

/* clean: the prompt, checked. ids: scratch [rows]. */
static esa_status encode(esa_t5_text *part, float *out, const char *clean, int32_t *ids,
                         int32_t rows, int64_t *valid)
{
    int32_t count = 0, total = 0;
    ESA_TRY(esa_tokenizer_encode(part->tokenizer, clean, ids, rows, &count, &total));
    if (total > count)
        esa_log(part->ctx, ESA_LOG_WARNING, "the prompt has %d tokens, the last %d are cut off",
                total, total - count);
    *valid = count;
    if (part->flags & ESA_T5_PAD) return esa_umt5_encode(part->encoder, out, ids, rows);
    ESA_TRY(esa_umt5_encode(part->encoder, out, ids, count));
    memset(out + (int64_t)count * part->d_model, 0,
           (size_t)(rows - count) * (size_t)part->d_model * sizeof *out);
    return ESA_OK;
}

esa_status esa_t5_text_encode(esa_t5_text *part, float *out, const char *prompt, int32_t rows,
                              int64_t *valid)
{
    esa_ctx *ctx = part->ctx;
    char *clean;
    int64_t clean_bytes;
    ESA_TRY(part->flags & ESA_T5_CLEAN ? esa_prompt_clean(ctx, &clean, &clean_bytes, prompt)
                                       : esa_prompt_copy(ctx, &clean, &clean_bytes, prompt));
    const int64_t id_bytes = (int64_t)rows * (int64_t)sizeof(int32_t);
    int32_t *ids = esa_mem_alloc(&ctx->mem, id_bytes);
    const esa_status status = ids ? encode(part, out, clean, ids, rows, valid)
                                  : esa_fail(ctx, ESA_ERR_MEMORY,
                                             "out of memory for the tokens of the prompt");
    esa_mem_free(&ctx->mem, ids, id_bytes);
    esa_mem_free(&ctx->mem, clean, clean_bytes);
    return status;
}
