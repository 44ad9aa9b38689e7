/* embeds.c - the embeddings of a run, from a file or from the text encoder. Branch 0 is the prompt,
 * branch 1 the negative prompt.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/model.h"

#include <string.h>
#include "model/tensor_file.h"

static const char *const names[2] = { "prompt_embeds", "negative_prompt_embeds" };

static esa_status from_file(esa_model *m, esa_embeds *e, const esa_generate_params *p,
                            int32_t branches)
{
    const int64_t expected[2] = { -1, m->wan.text_dim };
    for (int32_t i = 0; i < branches; i++) {
        esa_loaded t;
        ESA_TRY(esa_loaded_read(m->ctx, &t, p->prompt_embeds, names[i], 2, expected));
        e->data[i] = t.data;
        e->bytes[i] = t.bytes;
        e->rows[i] = t.dim[0];
    }
    return ESA_OK;
}

static void forget(esa_model *m, esa_known_text *k)
{
    esa_mem_free(&m->ctx->mem, k->text, k->length);
    esa_mem_free(&m->ctx->mem, k->embeds, k->bytes);
    *k = (esa_known_text){ 0 };
}

void esa_embeds_forget(esa_model *m)
{
    for (int32_t i = 0; i < 2; i++) forget(m, &m->known[i]);
}

static esa_status lacks_memory(esa_model *m)
{
    return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for the embeddings of the prompt");
}

static esa_status remember(esa_model *m, esa_known_text *k, const char *prompt, const float *embeds,
                           int64_t bytes)
{
    forget(m, k);
    k->length = (int64_t)strlen(prompt) + 1;
    k->bytes = bytes;
    k->text = esa_mem_alloc(&m->ctx->mem, k->length);
    k->embeds = esa_mem_alloc(&m->ctx->mem, bytes);
    if (!k->text || !k->embeds) {
        forget(m, k);
        return lacks_memory(m);
    }
    memcpy(k->text, prompt, (size_t)k->length);
    memcpy(k->embeds, embeds, (size_t)bytes);
    return ESA_OK;
}

/* Opens the text encoder if need be. */
static esa_status encode(esa_model *m, float *embeds, const char *prompt, int32_t rows)
{
    ESA_TRY(esa_model_need_text(m));
    const esa_status status = esa_text_part_encode(m->text, embeds, prompt, rows);
    if (status) esa_model_drop_text(m); /* its weights may be where nothing can use them */
    return status;
}

/* As in diffusers: one row for each token, then rows of zeros up to max_text_tokens. */
static esa_status from_prompt(esa_model *m, esa_embeds *e, const esa_generate_params *p,
                              int32_t branches)
{
    const int32_t rows = p->max_text_tokens > 0 ? p->max_text_tokens : m->info.text_tokens;
    for (int32_t i = 0; i < branches; i++) {
        const char *prompt = i ? (p->negative_prompt ? p->negative_prompt : "") : p->prompt;
        esa_known_text *k = &m->known[i];
        e->rows[i] = rows;
        e->bytes[i] = esa_size_mul(rows, (int64_t)m->wan.text_dim * 4);
        e->data[i] = esa_mem_zalloc(&m->ctx->mem, e->bytes[i]);
        if (!e->data[i]) return lacks_memory(m);
        if (k->text && k->bytes == e->bytes[i] && strcmp(k->text, prompt) == 0) {
            memcpy(e->data[i], k->embeds, (size_t)k->bytes);
        } else {
            ESA_TRY(encode(m, e->data[i], prompt, rows));
            ESA_TRY(remember(m, k, prompt, e->data[i], e->bytes[i]));
        }
        ESA_TRY(esa_model_progress(m, ESA_STAGE_TEXT, i + 1, branches));
    }
    return ESA_OK;
}

esa_status esa_embeds_get(esa_model *m, esa_embeds *e, const esa_generate_params *p,
                          int32_t branches)
{
    memset(e, 0, sizeof *e);
    if (p->prompt_embeds) return from_file(m, e, p, branches);
    return m->random ? esa_embeds_random(m, e, branches) : from_prompt(m, e, p, branches);
}

esa_status esa_embeds_save(esa_model *m, const esa_embeds *e, const char *path)
{
    esa_to_save save[2];
    int32_t count = 0;
    for (int i = 0; i < 2 && e->data[i]; i++)
        save[count++] = (esa_to_save){ names[i], e->data[i], { e->rows[i], m->wan.text_dim } };
    return esa_loaded_write(m->ctx, path, save, count, 2);
}

void esa_embeds_free(esa_model *m, esa_embeds *e)
{
    for (int i = 0; i < 2; i++) esa_mem_free(&m->ctx->mem, e->data[i], e->bytes[i]);
    memset(e, 0, sizeof *e);
}
