/* part.c - see part.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/part/part.h"

#include <string.h>
#include "nn/ops.h"

/* An encoder with this many bytes in f32 stays in its file. */
#define LARGE (INT64_C(1) << 30)

/* ---------------------------------------------------------------- memory */

void *esa_part_new(const esa_part_env *env, int64_t bytes, const char *what)
{
    esa_part *part = esa_mem_zalloc(&env->nn->ctx->mem, bytes);
    if (!part) {
        esa_fail(env->nn->ctx, ESA_ERR_MEMORY, "out of memory for %s", what);
        return NULL;
    }
    part->env = *env;
    part->own[part->owned].data = part;
    part->own[part->owned++].bytes = bytes;
    return part;
}

esa_status esa_part_array(esa_part *part, void **data, int64_t count, int64_t size)
{
    esa_ctx *ctx = part->env.nn->ctx;
    *data = esa_mem_zalloc(&ctx->mem, count * size);
    if (!*data) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a part of the model");
    part->own[part->owned].data = *data;
    part->own[part->owned++].bytes = count * size;
    return ESA_OK;
}

void esa_part_free(esa_part *part)
{
    if (!part) return;
    const esa_allocator mem = part->env.nn->ctx->mem;
    esa_store_free(part->store);
    esa_weights_free(part->weights);
    for (int32_t i = part->owned - 1; i >= 0; i--)
        esa_mem_free(&mem, part->own[i].data, part->own[i].bytes);
}

void esa_image_free(esa_ctx *ctx, esa_image *image)
{
    if (image->embeds) esa_mem_free(&ctx->mem, image->embeds, image->embeds_bytes);
    if (image->condition) esa_mem_free(&ctx->mem, image->condition, image->condition_bytes);
    memset(image, 0, sizeof *image);
}

/* ---------------------------------------------------------------- weights */

esa_status esa_part_open(esa_part *part, const char *folder, const char *stem, const char *name)
{
    const esa_part_env *env = &part->env;
    esa_ctx *ctx = env->nn->ctx;
    return env->random
               ? esa_weights_open_random(ctx, &part->weights, name)
               : esa_weights_open_part(ctx, &part->weights, env->folder, folder, stem, name);
}

esa_status esa_part_open_transformer(esa_part *part)
{
    const esa_part_env *env = &part->env;
    esa_ctx *ctx = env->nn->ctx;
    const char *name = env->transformer_folder ? env->transformer_folder : "transformer";
    if (env->file)
        return esa_weights_open_memory(ctx, &part->weights, env->file, env->file_bytes, name);
    return env->transformer && !env->random
               ? esa_weights_open_file(ctx, &part->weights, env->transformer, name)
               : esa_part_open(part, name, "diffusion_pytorch_model", name);
}

esa_status esa_part_compare(esa_part *part)
{
    return esa_weights_check(part->weights, part->env.report, part->env.report_user);
}

esa_status esa_part_load(esa_part *part, int32_t kind)
{
    const esa_part_env *env = &part->env;
    esa_store_settings settings = {
        .hold = env->hold, .limit = env->limit, .ask = env->ask, .ask_user = env->ask_user
    };
    if (kind == ESA_LOAD_TRANSFORMER) {
        settings.linear = env->linear;
        settings.keep = env->keep;
    } else if (env->hold == ESA_HOLD_AUTO && esa_weights_parameters(part->weights) >= LARGE / 4) {
        settings.hold = ESA_HOLD_FILE;
    }
    esa_weights_watch(part->weights, env->tick, env->tick_user);
    return esa_store_open(env->nn, &part->store, part->weights, &settings);
}

void esa_part_memory(const esa_part *part, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = esa_weights_parameters(part->weights);
    esa_weights_memory(part->weights, held, mapped);
}

/* ---------------------------------------------------------------- work */

esa_status esa_part_tick(const esa_part *part, int64_t done, int64_t total)
{
    const esa_part_env *env = &part->env;
    if (!env->tick || !env->tick(env->tick_user, done, total)) return ESA_OK;
    return esa_fail(env->nn->ctx, ESA_ERR_STATE, "cancelled");
}

esa_status esa_part_blocks(esa_part *part, int32_t count, esa_status (*run)(void *user, int32_t i),
                           void *user)
{
    for (int32_t i = 0; i < count; i++) {
        ESA_TRY(esa_store_begin(part->store, 1 + i));
        ESA_TRY(run(user, i));
        ESA_TRY(esa_store_end(part->store, 1 + i));
        ESA_TRY(part->env.nn->ops->pace(part->env.nn));
        ESA_TRY(esa_part_tick(part, i + 1, count));
    }
    return ESA_OK;
}

esa_status esa_part_run(esa_part *part, const esa_part_work *work, void *user)
{
    esa_nn *nn = part->env.nn;
    esa_carve carve = { 0 };
    void *block = NULL;
    int64_t products;
    work->place(user, &carve);
    const int64_t bytes = carve.used;
    ESA_TRY(esa_nn_reserve(nn, -1, &products));
    ESA_TRY(esa_store_leave(part->store, bytes, products));
    ESA_TRY(esa_nn_alloc(nn, &block, bytes, work->what));
    carve = (esa_carve){ .base = block };
    work->place(user, &carve);
    const esa_status status = work->run(user);
    esa_nn_free(nn, block, bytes);
    return status;
}
