/* hunyuan_text.c - see hunyuan_text.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/hunyuan_text.h"

#include <string.h>
#include "model/text/causal.h"
#include "model/text/prompt.h"
#include "model/text/tokenizer.h"

#define CLIP_TOKENS 77 /* that diffusers gives to CLIP */

struct esa_hunyuan_text {
    esa_ctx *ctx;
    esa_tokenizer *words[2]; /* of Llama, of CLIP */
    esa_causal *encoder[2];
    esa_causal_config config[2];
};

static const char *const encoders[2] = { "text_encoder", "text_encoder_2" },
                         *const tokenizers[2] = { "tokenizer", "tokenizer_2" };

static esa_status open_tokenizer(const esa_part_env *env, esa_tokenizer **tokenizer,
                                 const esa_causal_config *config, int32_t which)
{
    esa_ctx *ctx = env->nn->ctx;
    char *folder;
    int64_t bytes;
    *tokenizer = NULL;
    ESA_TRY(esa_path_join(ctx, &folder, &bytes, env->folder, tokenizers[which]));
    const esa_status status = esa_tokenizer_open(ctx, tokenizer, folder, config->vocab);
    esa_mem_free(&ctx->mem, folder, bytes);
    return status;
}

esa_status esa_hunyuan_text_check(const esa_part_env *env, const esa_causal_config *llama,
                                  const esa_causal_config *clip)
{
    const esa_causal_config *const config[2] = { llama, clip };
    esa_status status = ESA_OK;
    for (int32_t i = 0; i < 2 && !status; i++) {
        esa_tokenizer *tokenizer = NULL;
        status = esa_causal_check(env, config[i], encoders[i]);
        if (!status) status = open_tokenizer(env, &tokenizer, config[i], i);
        esa_tokenizer_free(tokenizer);
    }
    return status;
}

esa_status esa_hunyuan_text_open(const esa_part_env *env, esa_hunyuan_text **part,
                                 const esa_causal_config *llama, const esa_causal_config *clip)
{
    esa_ctx *ctx = env->nn->ctx;
    *part = NULL;
    esa_hunyuan_text *p = esa_mem_zalloc(&ctx->mem, sizeof *p);
    if (!p) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the text encoders");
    p->ctx = ctx;
    p->config[0] = *llama;
    p->config[1] = *clip;
    esa_status status = ESA_OK;
    for (int32_t i = 0; i < 2 && !status; i++) {
        status = open_tokenizer(env, &p->words[i], &p->config[i], i);
        if (!status) status = esa_causal_open(env, &p->encoder[i], &p->config[i], encoders[i]);
    }
    if (!status)
        *part = p;
    else
        esa_hunyuan_text_free(p);
    return status;
}

void esa_hunyuan_text_free(esa_hunyuan_text *part)
{
    if (!part) return;
    const esa_allocator mem = part->ctx->mem;
    for (int32_t i = 0; i < 2; i++) {
        esa_causal_free(part->encoder[i]);
        esa_tokenizer_free(part->words[i]);
    }
    esa_mem_free(&mem, part, sizeof *part);
}

void esa_hunyuan_text_memory(const esa_hunyuan_text *part, int64_t *parameters, int64_t *held,
                             int64_t *mapped)
{
    *parameters = *held = *mapped = 0;
    for (int32_t i = 0; i < 2; i++) {
        int64_t one[3];
        esa_causal_memory(part->encoder[i], &one[0], &one[1], &one[2]);
        *parameters += one[0];
        *held += one[1];
        *mapped += one[2];
    }
}

/* ---------------------------------------------------------------- a prompt */

/* ids: room for rows + ESA_HUNYUAN_CROP; states: for as many rows of Llama. */
static esa_status encode_llama(esa_hunyuan_text *p, esa_text *text, const char *framed,
                               int32_t *ids, float *states)
{
    const int32_t most = (int32_t)text->rows + ESA_HUNYUAN_CROP;
    const int64_t d = p->config[0].d;
    int32_t count = 0, total = 0;
    ESA_TRY(esa_tokenizer_encode(p->words[0], framed, ids, most, &count, &total));
    if (total > count)
        esa_log(p->ctx, ESA_LOG_WARNING, "the prompt has %d tokens, the last %d are cut off",
                total - ESA_HUNYUAN_CROP, total - count);
    if (count <= ESA_HUNYUAN_CROP)
        return esa_fail(p->ctx, ESA_ERR_UNSUPPORTED,
                        "the prompt in its template has %d tokens, expected more than %d: this "
                        "tokenizer is not that of Llama 3",
                        count, ESA_HUNYUAN_CROP);
    ESA_TRY(esa_causal_encode(p->encoder[0], states, ids, count));
    text->valid = count - ESA_HUNYUAN_CROP;
    memcpy(text->data, states + ESA_HUNYUAN_CROP * d, (size_t)(text->valid * d) * 4);
    return ESA_OK;
}

/* Where the pooled vector comes from: the first eos, or the first of the largest ids. */
static int32_t pooled_at(const esa_causal_config *c, const int32_t *ids, int32_t count)
{
    int32_t at = 0;
    for (int32_t i = 0; i < count; i++) {
        if (c->eos >= 0 && ids[i] == c->eos) return i;
        if (c->eos < 0 && ids[i] > ids[at]) at = i;
    }
    return at;
}

static esa_status encode_clip(esa_hunyuan_text *p, esa_text *text, const char *prompt,
                              float *states)
{
    const esa_causal_config *c = &p->config[1];
    const int32_t most = c->positions < CLIP_TOKENS ? c->positions : CLIP_TOKENS;
    int32_t ids[CLIP_TOKENS], count = 0, total = 0;
    ESA_TRY(esa_tokenizer_encode(p->words[1], prompt, ids, most, &count, &total));
    if (total > count)
        esa_log(p->ctx, ESA_LOG_INFO, "CLIP sees the first %d of %d tokens", count, total);
    const int32_t at = pooled_at(c, ids, count);
    ESA_TRY(esa_causal_encode(p->encoder[1], states, ids, at + 1));
    memcpy(text->pooled, states + (int64_t)at * c->d, (size_t)c->d * 4);
    return ESA_OK;
}

esa_status esa_hunyuan_text_encode(esa_hunyuan_text *p, esa_text *text, const char *prompt)
{
    esa_ctx *ctx = p->ctx;
    const int64_t rows = text->rows + ESA_HUNYUAN_CROP,
                  floats = esa_max64(rows * p->config[0].d, CLIP_TOKENS * (int64_t)p->config[1].d),
                  bytes = 4 * (rows + floats);
    char *framed;
    int64_t framed_bytes;
    ESA_TRY(esa_prompt_hunyuan(ctx, &framed, &framed_bytes, prompt));
    int32_t *ids = esa_mem_alloc(&ctx->mem, bytes);
    float *states = (float *)(ids + rows);
    esa_status status = ids ? encode_llama(p, text, framed, ids, states)
                            : esa_fail(ctx, ESA_ERR_MEMORY,
                                       "out of memory for the prompt's states");
    if (!status) status = encode_clip(p, text, prompt, states);
    esa_mem_free(&ctx->mem, ids, bytes);
    esa_mem_free(&ctx->mem, framed, framed_bytes);
    return status;
}
