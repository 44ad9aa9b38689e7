/* pair.c - see pair.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/pair.h"

#include <string.h>

enum { BRANCHES = 2 };

struct esa_pair {
    esa_ctx *ctx;
    esa_dit *dit[2]; /* [1] NULL: there is one */
    int32_t active;
    /* env's, which the pair asks after the other transformer gave its memory */
    esa_status (*ask)(void *user, int64_t bytes);
    void *ask_user;
    /* of the video, for the transformer that becomes active later */
    esa_dit_room room;
    int32_t latent[3], selector, mode, branches;
    esa_layout layout;
    const esa_text *text[BRANCHES];
    const esa_image *image; /* NULL: none */
};

/* A transformer lacks device memory: the other one gives its own, then other parts give theirs. */
static esa_status ask_other(void *user, int64_t bytes)
{
    esa_pair *p = user;
    for (int32_t i = 0; i < 2; i++)
        if (p->dit[i] && esa_dit_store(p->dit[i]) && i != p->active)
            ESA_TRY(esa_store_give(esa_dit_store(p->dit[i]), bytes));
    return p->ask ? p->ask(p->ask_user, bytes) : ESA_OK;
}

/* With a report both are compared, and the message is that of the first that failed. */
static esa_status make_second(const esa_part_env *env, esa_pair *p, const esa_dit_kind *kind,
                              const void *config, esa_status first)
{
    esa_part_env two = *env;
    char message[sizeof p->ctx->error];
    two.transformer_folder = "transformer_2";
    two.transformer = env->transformer_2;
    two.lora = env->lora_2;
    two.loras = env->loras_2;
    memcpy(message, p->ctx->error, sizeof message);
    const esa_status status = esa_dit_make(&two, &p->dit[1], kind, config);
    if (first) memcpy(p->ctx->error, message, sizeof message);
    return first ? first : status;
}

esa_status esa_pair_make(const esa_part_env *env, esa_pair **out, const esa_dit_kind *kind,
                         const void *first, const void *second)
{
    esa_ctx *ctx = env->nn->ctx;
    *out = NULL;
    if (!second && (env->transformer_2 || env->loras_2))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "weights for a second transformer were given, but this model has one");
    esa_pair *p = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *p);
    if (!p) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer");
    p->ctx = ctx;
    p->ask = env->ask;
    p->ask_user = env->ask_user;
    esa_part_env one = *env;
    one.ask = ask_other;
    one.ask_user = p;
    esa_status status = esa_dit_make(&one, &p->dit[0], kind, first);
    if (second && (!status || env->report)) status = make_second(&one, p, kind, second, status);
    if (status)
        esa_pair_free(p);
    else
        *out = p;
    return status;
}

/* The second is loaded first: the first then takes the device memory that it needs to begin. */
esa_status esa_pair_load(esa_pair *p)
{
    p->active = 1;
    const esa_status status = p->dit[1] ? esa_dit_load(p->dit[1]) : ESA_OK;
    p->active = 0;
    return status ? status : esa_dit_load(p->dit[0]);
}

void esa_pair_free(esa_pair *p)
{
    if (!p) return;
    const esa_allocator mem = p->ctx->mem;
    for (int32_t i = 0; i < 2; i++) esa_dit_free(p->dit[i]);
    esa_mem_free(&mem, p, (int64_t)sizeof *p);
}

void esa_pair_memory(const esa_pair *p, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    int64_t more[3];
    esa_dit_memory(p->dit[0], parameters, held, mapped);
    if (!p->dit[1]) return;
    esa_dit_memory(p->dit[1], &more[0], &more[1], &more[2]);
    *parameters += more[0];
    *held += more[1];
    *mapped += more[2];
}

esa_dit *esa_pair_active(const esa_pair *p) { return p->dit[p->active]; }

/* Makes the active transformer ready for the video. */
static esa_status begin(esa_pair *p, esa_layout *layout)
{
    esa_dit_set_room(p->dit[p->active], &p->room);
    return esa_dit_begin(p->dit[p->active], p->latent, layout, p->selector, p->mode, p->branches);
}

/* Lets the transformer `which` take the place of the active one, without what a video needs. Its
 * begin asks for device memory that the other one still has. */
static void activate(esa_pair *p, int32_t which)
{
    if (p->active == which) return;
    esa_dit_end(p->dit[p->active]);
    p->active = which;
}

void esa_pair_set_room(esa_pair *p, const esa_dit_room *room) { p->room = *room; }

esa_status esa_pair_begin(esa_pair *p, const int32_t latent[3], esa_layout *layout,
                          int32_t selector, int32_t mode, int32_t branches)
{
    memcpy(p->latent, latent, sizeof p->latent);
    p->layout = *layout;
    p->selector = selector;
    p->mode = mode;
    p->branches = branches;
    memset(p->text, 0, sizeof p->text);
    p->image = NULL;
    activate(p, 0);
    return begin(p, layout);
}

void esa_pair_end(esa_pair *p)
{
    for (int32_t i = 0; i < 2; i++)
        if (p->dit[i]) esa_dit_end(p->dit[i]);
    memset(p->text, 0, sizeof p->text);
    p->image = NULL;
}

esa_status esa_pair_text(esa_pair *p, int32_t branch, const esa_text *text)
{
    p->text[branch] = text;
    return esa_dit_text(p->dit[p->active], branch, text);
}

esa_status esa_pair_image(esa_pair *p, const esa_image *image)
{
    p->image = image;
    return esa_dit_image(p->dit[p->active], image);
}

static esa_status change(esa_pair *p, int32_t which)
{
    esa_layout layout = p->layout;
    activate(p, which);
    ESA_TRY(begin(p, &layout));
    if (p->image) ESA_TRY(esa_dit_image(p->dit[which], p->image));
    for (int32_t b = 0; b < p->branches; b++)
        if (p->text[b]) ESA_TRY(esa_dit_text(p->dit[which], b, p->text[b]));
    return ESA_OK;
}

esa_status esa_pair_forward(esa_pair *p, const esa_dit_call *c)
{
    const int32_t which = p->dit[1] && c->second;
    if (which != p->active) ESA_TRY(change(p, which));
    return esa_dit_forward(p->dit[which], c);
}
