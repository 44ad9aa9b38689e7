/* embeds.c - the embeddings of a run, from a file or from the text encoder. Branch 0 is the prompt,
 * branch 1 the negative prompt.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/run/model.h"

#include <string.h>
#include "model/run/random.h"
#include "model/run/tensor_file.h"

static const char *const names[2] = { "prompt_embeds", "negative_prompt_embeds" };
static const char *const pooled_names[2] = { "pooled_prompt_embeds",
                                             "negative_pooled_prompt_embeds" };

static esa_status lacks_memory(esa_model *m)
{
    return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for the embeddings of the prompt");
}

/* Zeros for `rows` rows and the pooled vector. *bytes is set even on failure. */
static esa_status make_text(esa_model *m, esa_text *t, int64_t *bytes, int64_t rows)
{
    const int64_t pooled = m->facts.pooled_dim,
                  count = esa_size_add(esa_size_mul(rows, m->facts.info.text_dim), pooled);
    *bytes = esa_size_mul(count, 4);
    *t = (esa_text){ .data = esa_mem_zalloc(&m->ctx->mem, *bytes), .rows = rows, .valid = rows };
    if (!t->data) return lacks_memory(m);
    if (pooled) t->pooled = t->data + (count - pooled);
    return ESA_OK;
}

/* ---------------------------------------------------------------- files */

static esa_status read_pooled(esa_model *m, esa_text *t, const char *path, int32_t branch)
{
    const int64_t expected[1] = { m->facts.pooled_dim };
    esa_loaded pooled;
    ESA_TRY(esa_loaded_read(m->ctx, &pooled, path, pooled_names[branch], 1, expected));
    memcpy(t->pooled, pooled.data, (size_t)expected[0] * sizeof *t->pooled);
    esa_loaded_free(m->ctx, &pooled);
    return ESA_OK;
}

static esa_status from_file(esa_model *m, esa_embeds *e, const esa_generate_params *p,
                            int32_t branches)
{
    const int64_t expected[2] = { -1, m->facts.info.text_dim };
    for (int32_t i = 0; i < branches; i++) {
        esa_loaded t;
        ESA_TRY(esa_loaded_read(m->ctx, &t, p->prompt_embeds, names[i], 2, expected));
        const esa_status status = make_text(m, &e->text[i], &e->bytes[i], t.dim[0]);
        if (!status) memcpy(e->text[i].data, t.data, (size_t)(t.dim[0] * t.dim[1]) * sizeof(float));
        esa_loaded_free(m->ctx, &t);
        ESA_TRY(status);
        if (m->facts.pooled_dim) ESA_TRY(read_pooled(m, &e->text[i], p->prompt_embeds, i));
    }
    return ESA_OK;
}

esa_status esa_embeds_save(esa_model *m, const esa_embeds *e, const char *path)
{
    esa_to_save save[4];
    int32_t count = 0;
    for (int i = 0; i < 2 && e->text[i].data; i++) {
        const esa_text *t = &e->text[i];
        /* padding behind the video is not attended: a file without it says where it begins */
        const int64_t rows = esa_dit_text_place(m->family->dit) == ESA_TEXT_BACK ? t->valid
                                                                                 : t->rows;
        save[count++] = (esa_to_save){ names[i], t->data, { rows, m->facts.info.text_dim } };
        if (t->pooled)
            save[count++] = (esa_to_save){ pooled_names[i], t->pooled, { 1, m->facts.pooled_dim } };
    }
    return esa_loaded_write(m->ctx, path, save, count, 2);
}

/* ---------------------------------------------------------------- prompts */

static void forget(esa_model *m, esa_known_text *k)
{
    esa_mem_free(&m->ctx->mem, k->text, k->length);
    esa_mem_free(&m->ctx->mem, k->embeds.data, k->bytes);
    *k = (esa_known_text){ 0 };
}

void esa_embeds_forget(esa_model *m)
{
    for (int32_t i = 0; i < 2; i++) forget(m, &m->known[i]);
}

static esa_status remember(esa_model *m, esa_known_text *k, const char *prompt,
                           const esa_text *text)
{
    forget(m, k);
    k->length = (int64_t)strlen(prompt) + 1;
    k->text = esa_mem_alloc(&m->ctx->mem, k->length);
    const esa_status status = make_text(m, &k->embeds, &k->bytes, text->rows);
    if (status || !k->text) {
        forget(m, k);
        return lacks_memory(m);
    }
    memcpy(k->text, prompt, (size_t)k->length);
    memcpy(k->embeds.data, text->data, (size_t)k->bytes);
    k->embeds.valid = text->valid;
    return ESA_OK;
}

/* Opens the text encoder if need be. */
static esa_status encode(esa_model *m, esa_text *text, const char *prompt)
{
    ESA_TRY(esa_model_need_text(m));
    const esa_status status = esa_text_encode(m->text, text, prompt);
    if (status) esa_model_drop_text(m); /* its weights may be where nothing can use them */
    return status;
}

/* As in diffusers: one row for each token, then padding up to max_text_tokens. */
static esa_status from_prompt(esa_model *m, esa_embeds *e, const esa_generate_params *p,
                              int32_t branches)
{
    const int32_t rows = p->max_text_tokens > 0 ? p->max_text_tokens : m->facts.info.text_tokens;
    for (int32_t i = 0; i < branches; i++) {
        const char *prompt = i ? (p->negative_prompt ? p->negative_prompt : "") : p->prompt;
        esa_known_text *k = &m->known[i];
        ESA_TRY(make_text(m, &e->text[i], &e->bytes[i], rows));
        if (k->text && k->bytes == e->bytes[i] && strcmp(k->text, prompt) == 0) {
            memcpy(e->text[i].data, k->embeds.data, (size_t)k->bytes);
            e->text[i].valid = k->embeds.valid;
        } else {
            ESA_TRY(encode(m, &e->text[i], prompt));
            ESA_TRY(remember(m, k, prompt, &e->text[i]));
        }
        ESA_TRY(esa_model_progress(m, ESA_STAGE_TEXT, i + 1, branches));
    }
    return ESA_OK;
}

/* ---------------------------------------------------------------- random weights */

/* A prompt of so many tokens and padding, as the text encoder gives it: rows of zeros. */
#define ROWS 20
#define SIZE 0.1f

static esa_status from_random(esa_model *m, esa_embeds *e, int32_t branches)
{
    const int64_t width = m->facts.info.text_dim, pooled = m->facts.pooled_dim;
    for (int32_t b = 0; b < branches; b++) {
        esa_text *t = &e->text[b];
        esa_torch_rng rng;
        ESA_TRY(make_text(m, t, &e->bytes[b], m->facts.info.text_tokens));
        t->valid = ROWS;
        esa_torch_seed(&rng, (uint64_t)b);
        esa_torch_randn(&rng, t->data, ROWS * width);
        for (int64_t i = 0; i < ROWS * width; i++) t->data[i] *= SIZE;
        if (pooled) esa_torch_randn(&rng, t->pooled, pooled);
    }
    return ESA_OK;
}

/* ---------------------------------------------------------------- */

esa_status esa_embeds_get(esa_model *m, esa_embeds *e, const esa_generate_params *p,
                          int32_t branches)
{
    memset(e, 0, sizeof *e);
    if (p->prompt_embeds) return from_file(m, e, p, branches);
    return m->random ? from_random(m, e, branches) : from_prompt(m, e, p, branches);
}

void esa_embeds_free(esa_model *m, esa_embeds *e)
{
    for (int i = 0; i < 2; i++) esa_mem_free(&m->ctx->mem, e->text[i].data, e->bytes[i]);
    memset(e, 0, sizeof *e);
}
