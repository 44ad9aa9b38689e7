/* dit.c - makes, loads and frees transformers, and runs their blocks.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/dit_kind.h"

#include <string.h>
#include "model/weights/weights_internal.h"

/* ---------------------------------------------------------------- weights */

static void want_all(esa_dit *dit)
{
    const esa_dit_kind *kind = dit->kind;
    esa_weights *w = dit->part.weights;
    int64_t *letter = dit->sizes.letter;
    letter['d'] = dit->d;
    letter['c'] = dit->in_channels;
    letter['o'] = dit->out_channels;
    for (int32_t i = 0; i < 3; i++) letter[(int)"thw"[i]] = dit->patch[i];
    letter['v'] = letter['t'] * letter['h'] * letter['w'];
    esa_rows_want(w, kind->rows, kind->row_count, dit, &dit->sizes, "%s", "");
    if (kind->want) kind->want(dit);
    for (int32_t i = 0; i < dit->blocks; i++) {
        /* The first and the last block lose most by F8. */
        dit->sizes.without = i > 0 && i < dit->blocks - 1 ? 0 : ESA_WANT_F8;
        esa_weights_group(w, 1 + i);
        kind->want_block(dit, i);
    }
}

static esa_status open_file(esa_dit *dit)
{
    const esa_part_env *env = &dit->part.env;
    ESA_TRY(esa_part_open_transformer(&dit->part));
    esa_weights *w = dit->part.weights;
    esa_weights_naming(w, dit->kind->naming);
    for (const char *const *prefix = dit->kind->ignored; prefix && *prefix; prefix++)
        esa_weights_ignore(w, *prefix);
    if (!env->file) ESA_TRY(esa_weights_lora(w, env->lora, env->loras));
    want_all(dit);
    return esa_part_compare(&dit->part);
}

esa_status esa_dit_make(const esa_part_env *env, esa_dit **out, const esa_dit_kind *kind,
                        const void *config)
{
    *out = NULL;
    esa_dit *dit = esa_part_new(env, kind->bytes, "the transformer");
    if (!dit) return ESA_ERR_MEMORY;
    dit->kind = kind;
    dit->nn = env->nn;
    esa_status status = kind->make(dit, config);
    dit->d = (int64_t)dit->heads * dit->head_dim;
    if (!status) status = open_file(dit);
    if (status)
        esa_dit_free(dit);
    else
        *out = dit;
    return status;
}

esa_status esa_dit_load(esa_dit *dit) { return esa_part_load(&dit->part, ESA_LOAD_TRANSFORMER); }

void esa_dit_free(esa_dit *dit)
{
    if (!dit) return;
    esa_dit_end(dit);
    esa_part_free(&dit->part);
}

void esa_dit_memory(const esa_dit *dit, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    esa_part_memory(&dit->part, parameters, held, mapped);
}

esa_store *esa_dit_store(esa_dit *dit) { return dit->part.store; }

int64_t esa_dit_config_bytes(const esa_dit_kind *kind) { return kind->config_bytes; }
int32_t esa_dit_text_place(const esa_dit_kind *kind) { return kind->text_place; }

int32_t esa_dit_recognise(const esa_dit_kind *kind, esa_weights *w, void *config, char *line,
                          size_t bytes)
{
    esa_weights_naming(w, kind->naming);
    esa_weights_layout(w);
    return kind->recognise(w, config, line, bytes);
}

/* ---------------------------------------------------------------- text and image */

int64_t esa_dit_text_rows(const esa_dit *dit, const esa_text *text)
{
    return dit->kind->text_rows ? dit->kind->text_rows(dit, text) : text->rows;
}

esa_status esa_dit_text(esa_dit *dit, int32_t branch, const esa_text *text)
{
    if (branch < 0 || branch >= dit->branches || text->rows < 1 || text->rows > INT32_MAX)
        return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT,
                        "text of %lld rows for branch %d, expected 1 .. %d rows and branch 0 .. %d",
                        (long long)text->rows, branch, INT32_MAX, dit->branches - 1);
    dit->texts &= ~(1u << branch);
    ESA_TRY(dit->kind->text(dit, branch, text));
    dit->texts |= 1u << branch;
    return ESA_OK;
}

esa_status esa_dit_image(esa_dit *dit, const esa_image *image)
{
    if (!dit->kind->image)
        return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "this transformer takes no image");
    return dit->kind->image(dit, image);
}

/* ---------------------------------------------------------------- the forward pass */

void esa_dit_set_watch(esa_dit *dit, esa_dit_watch watch, void *user)
{
    dit->watch = watch;
    dit->watch_user = user;
}

/* Shows x to the watcher, the video in grid order. */
static esa_status show(esa_dit *dit, int32_t block)
{
    if (!dit->watch) return ESA_OK;
    const esa_allocator *mem = &dit->nn->ctx->mem;
    const int64_t d = dit->d, N = dit->tokens, S = dit->rows, bytes = S * (2 * d + 1) * 4,
                  first = dit->kind->text_place == ESA_TEXT_FRONT ? dit->text_rows : 0;
    float *hidden = esa_mem_alloc(mem, bytes), *rows = hidden + S * d;
    int32_t *perm = (int32_t *)(rows + S * d);
    if (!hidden) return esa_fail(dit->nn->ctx, ESA_ERR_MEMORY, "out of memory for a watched block");
    esa_status status = esa_nn_read(dit->nn, rows, &dit->x);
    if (!status && dit->perm) status = esa_nn_download(dit->nn, perm, dit->perm, N * 4);
    for (int64_t i = 0; !status && i < S; i++) {
        const int32_t moves = dit->perm && i >= first && i < first + N;
        memcpy(hidden + (moves ? first + perm[i - first] : i) * d, rows + i * d, (size_t)d * 4);
    }
    if (!status) dit->watch(dit->watch_user, block, hidden, S, d);
    esa_mem_free(mem, hidden, bytes);
    return status;
}

typedef struct run {
    esa_dit *dit;
    const esa_dit_call *call;
} run;

static esa_status run_block(void *user, int32_t i)
{
    const run *r = user;
    ESA_TRY(r->dit->kind->block(r->dit, r->call, i));
    return show(r->dit, i);
}

esa_status esa_dit_forward(esa_dit *dit, const esa_dit_call *call)
{
    run r = { dit, call };
    if (call->branch < 0 || call->branch >= dit->branches || !(dit->texts >> call->branch & 1))
        return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "the transformer has no text for branch %d",
                        call->branch);
    ESA_TRY(dit->kind->before(dit, call));
    ESA_TRY(show(dit, -1));
    ESA_TRY(esa_part_blocks(&dit->part, dit->blocks, run_block, &r));
    return dit->kind->after(dit, call);
}
