/* t5_text.c - prompts of Wan and CogVideoX: cleaning, tokenizer, T5 or UMT5.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include "model/text/prompt.h"
#include "model/text/text.h"
#include "model/text/umt5.h"

static esa_status make(const esa_part_env *env, esa_part **encoder, int32_t *vocab,
                       const void *config, int32_t i)
{
    (void)i;
    const esa_umt5_config *c = config;
    *vocab = c->vocab;
    return esa_umt5_make(env, encoder, c);
}

/* clean: the prompt, checked. ids: scratch [rows]. */
static esa_status encode_clean(esa_text_part *part, esa_text *text, const char *clean, int32_t *ids)
{
    const esa_umt5_config *c = part->config;
    int32_t count = 0, total = 0;
    ESA_TRY(esa_tokenizer_encode(part->words[0], clean, ids, (int32_t)text->rows, &count, &total));
    if (total > count)
        esa_log(part->ctx, ESA_LOG_WARNING, "the prompt has %d tokens, the last %d are cut off",
                total, total - count);
    text->valid = count;
    if (c->pads) return esa_umt5_encode(part->encoder[0], text->data, ids, text->rows);
    memset(text->data + count * (int64_t)c->d_model, 0,
           (size_t)((text->rows - count) * c->d_model) * sizeof *text->data);
    return esa_umt5_encode(part->encoder[0], text->data, ids, count);
}

static esa_status encode(esa_text_part *part, esa_text *text, const char *prompt)
{
    const esa_umt5_config *c = part->config;
    esa_ctx *ctx = part->ctx;
    char *clean;
    int64_t clean_bytes;
    ESA_TRY((c->cleans ? esa_prompt_clean : esa_prompt_copy)(ctx, &clean, &clean_bytes, prompt));
    const int64_t id_bytes = text->rows * (int64_t)sizeof(int32_t);
    int32_t *ids = esa_mem_alloc(&ctx->mem, id_bytes);
    const esa_status status = ids ? encode_clean(part, text, clean, ids)
                                  : esa_fail(ctx, ESA_ERR_MEMORY,
                                             "out of memory for the tokens of the prompt");
    esa_mem_free(&ctx->mem, ids, id_bytes);
    esa_mem_free(&ctx->mem, clean, clean_bytes);
    return status;
}

const esa_text_kind esa_t5_text = { 1, make, encode };
