/* hunyuan_text.c - prompts of HunyuanVideo: states of Llama and the pooled vector of CLIP.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include "model/text/causal.h"
#include "model/text/prompt.h"
#include "model/text/text.h"

#define CLIP_TOKENS 77 /* that diffusers gives to CLIP */

static esa_status make(const esa_part_env *env, esa_part **encoder, int32_t *vocab,
                       const void *config, int32_t i)
{
    const esa_causal_config *c = (const esa_causal_config *)config + i;
    *vocab = c->vocab;
    return esa_causal_make(env, encoder, c, i ? "text_encoder_2" : "text_encoder");
}

/* ids: room for rows + ESA_HUNYUAN_CROP; states: for as many rows of Llama. */
static esa_status encode_llama(esa_text_part *p, esa_text *text, const char *framed, int32_t *ids,
                               float *states)
{
    const int32_t most = (int32_t)text->rows + ESA_HUNYUAN_CROP;
    const int64_t d = ((const esa_causal_config *)p->config)->d;
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

static esa_status encode_clip(esa_text_part *p, esa_text *text, const char *prompt, float *states)
{
    const esa_causal_config *c = (const esa_causal_config *)p->config + 1;
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

static esa_status encode(esa_text_part *p, esa_text *text, const char *prompt)
{
    const esa_causal_config *config = p->config;
    esa_ctx *ctx = p->ctx;
    const int64_t rows = text->rows + ESA_HUNYUAN_CROP,
                  floats = esa_max64(rows * config[0].d, CLIP_TOKENS * (int64_t)config[1].d),
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

const esa_text_kind esa_hunyuan_text = { 2, make, encode };
