/* wan_dit_open.c - names the tensors of Wan's transformer with their shapes, and opens it.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/wan_dit_internal.h"
#include "model/lora.h"

#include <stdio.h>
#include <string.h>

/* q, k and v of self-attention are one matrix on devices that can use it. f8: ESA_WANT_F8 or 0. The
 * keys and values of the text are made once, so they stay as they are. */
static void want_attn(esa_weights *w, wan_attn *a, int64_t d, int32_t layer, int32_t number,
                      int32_t f8)
{
    static const char *const called[3] = { "to_q", "to_k", "to_v" };
    esa_linear *const part[3] = { &a->q, &a->k, &a->v };
    const int32_t self = number == 1;
    char name[96];
    for (int32_t i = 0; i < 3; i++)
        esa_weights_want(
            w, &part[i]->weight,
            ESA_WANT_PRODUCT | (self || i == 0 ? f8 : 0) | (self && i ? ESA_WANT_JOIN : 0), 2,
            (int64_t[]){ d, d }, "blocks.%d.attn%d.%s.weight", layer, number, called[i]);
    for (int32_t i = 0; i < 3; i++)
        esa_weights_want(w, &part[i]->bias, self && i ? ESA_WANT_JOIN : 0, 1, &d,
                         "blocks.%d.attn%d.%s.bias", layer, number, called[i]);
    snprintf(name, sizeof name, "blocks.%d.attn%d.to_out.0", layer, number);
    esa_part_want_linear(w, &a->out, f8, d, d, name);
    esa_weights_want(w, &a->norm_q, ESA_WANT_F32, 1, &d, "blocks.%d.attn%d.norm_q.weight", layer,
                     number);
    esa_weights_want(w, &a->norm_k, ESA_WANT_F32, 1, &d, "blocks.%d.attn%d.norm_k.weight", layer,
                     number);
}

static void want_block(esa_weights *w, esa_wan_dit *dit, int32_t i)
{
    const esa_wan_config *c = &dit->config;
    const int64_t d = dit->d;
    /* The first and the last block lose most by F8. */
    const int32_t f8 = i > 0 && i < c->layers - 1 ? ESA_WANT_F8 : 0;
    wan_block *b = &dit->block[i];
    char name[96];
    want_attn(w, &b->self, d, i, 1, f8);
    want_attn(w, &b->cross, d, i, 2, f8);
    if (c->image_dim) {
        snprintf(name, sizeof name, "blocks.%d.attn2.add_k_proj", i);
        esa_part_want_linear(w, &b->cross.image_k, 0, d, d, name);
        snprintf(name, sizeof name, "blocks.%d.attn2.add_v_proj", i);
        esa_part_want_linear(w, &b->cross.image_v, 0, d, d, name);
        esa_weights_want(w, &b->cross.norm_image_k, ESA_WANT_F32, 1, &d,
                         "blocks.%d.attn2.norm_added_k.weight", i);
    }
    if (c->cross_norm) {
        esa_weights_want(w, &b->norm2_weight, ESA_WANT_F32, 1, &d, "blocks.%d.norm2.weight", i);
        esa_weights_want(w, &b->norm2_bias, ESA_WANT_F32, 1, &d, "blocks.%d.norm2.bias", i);
    }
    snprintf(name, sizeof name, "blocks.%d.ffn.net.0.proj", i);
    esa_part_want_linear(w, &b->up, f8, c->ffn, d, name);
    snprintf(name, sizeof name, "blocks.%d.ffn.net.2", i);
    esa_part_want_linear(w, &b->down, f8, d, c->ffn, name);
}

static void want_image(esa_weights *w, wan_embedder *e, int64_t image, int64_t d)
{
    static const char *const base = "condition_embedder.image_embedder";
    char name[96];
    esa_weights_want(w, &e->norm1_weight, ESA_WANT_F32, 1, &image, "%s.norm1.weight", base);
    esa_weights_want(w, &e->norm1_bias, ESA_WANT_F32, 1, &image, "%s.norm1.bias", base);
    snprintf(name, sizeof name, "%s.ff.net.0.proj", base);
    esa_part_want_linear(w, &e->up, 0, image, image, name);
    snprintf(name, sizeof name, "%s.ff.net.2", base);
    esa_part_want_linear(w, &e->down, 0, d, image, name);
    esa_weights_want(w, &e->norm2_weight, ESA_WANT_F32, 1, &d, "%s.norm2.weight", base);
    esa_weights_want(w, &e->norm2_bias, ESA_WANT_F32, 1, &d, "%s.norm2.bias", base);
}

/* Tensors that diffusers keeps in f32 when the rest is bf16 (time embedder, tables, norms) are held
 * in f32 here too. The tables of all blocks are in group 0, because the norm at the end of a block
 * uses that of the next. */
static void want_all(esa_weights *w, esa_wan_dit *dit)
{
    const esa_wan_config *c = &dit->config;
    const int64_t d = dit->d, volume = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    const int64_t kernel[5] = { d, c->in_channels, c->patch[0], c->patch[1], c->patch[2] };
    esa_weights_want(w, &dit->patch.weight, ESA_WANT_PRODUCT, 5, kernel, "patch_embedding.weight");
    esa_weights_want(w, &dit->patch.bias, 0, 1, &d, "patch_embedding.bias");
    esa_part_want_linear(w, &dit->time1, ESA_WANT_F32, d, c->freq_dim,
                         "condition_embedder.time_embedder.linear_1");
    esa_part_want_linear(w, &dit->time2, ESA_WANT_F32, d, d,
                         "condition_embedder.time_embedder.linear_2");
    esa_part_want_linear(w, &dit->time_proj, 0, 6 * d, d, "condition_embedder.time_proj");
    esa_part_want_linear(w, &dit->text1, 0, d, c->text_dim,
                         "condition_embedder.text_embedder.linear_1");
    esa_part_want_linear(w, &dit->text2, 0, d, d, "condition_embedder.text_embedder.linear_2");
    if (c->image_dim) want_image(w, &dit->image, c->image_dim, d);
    esa_part_want_linear(w, &dit->proj_out, 0, volume * c->out_channels, d, "proj_out");
    esa_weights_want(w, &dit->table, ESA_WANT_F32, 3, (int64_t[]){ 1, 2, d }, "scale_shift_table");
    for (int32_t i = 0; i < c->layers; i++)
        esa_weights_want(w, &dit->block[i].table, ESA_WANT_F32, 3, (int64_t[]){ 1, 6, d },
                         "blocks.%d.scale_shift_table", i);
    for (int32_t i = 0; i < c->layers; i++) {
        esa_weights_group(w, 1 + i);
        want_block(w, dit, i);
    }
}

/* Opens the weight files (file NULL: from the folder) and compares them with the config. */
static esa_status check_file(const esa_part_env *env, esa_wan_dit *dit, const void *file,
                             int64_t size)
{
    esa_ctx *ctx = env->nn->ctx;
    dit->block = esa_mem_zalloc(&ctx->mem, dit->config.layers * (int64_t)sizeof *dit->block);
    dit->wave = esa_mem_alloc(&ctx->mem, 4 * (int64_t)dit->config.freq_dim);
    if (!dit->block || !dit->wave)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer");
    const char *const part = dit->config.folder ? dit->config.folder : "transformer";
    ESA_TRY(file ? esa_weights_open_memory(ctx, &dit->weights, file, size, part)
                 : esa_part_open_transformer(env, &dit->weights, part));
    esa_weights_naming(dit->weights, &esa_wan_original);
    if (!file) ESA_TRY(esa_weights_lora(dit->weights, env->lora, env->loras));
    want_all(dit->weights, dit);
    return esa_weights_check(dit->weights, env->report, env->report_user);
}

/* Does everything but load the weights. */
static esa_status make(const esa_part_env *env, esa_wan_dit **out, const esa_wan_config *config,
                       const void *file, int64_t size)
{
    esa_ctx *ctx = env->nn->ctx;
    *out = NULL;
    esa_wan_dit *dit = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *dit);
    if (!dit) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer");
    dit->nn = env->nn;
    dit->config = *config;
    dit->d = (int64_t)config->heads * config->head_dim;
    dit->tick = env->tick;
    dit->tick_user = env->tick_user;
    const esa_status status = check_file(env, dit, file, size);
    if (status)
        esa_wan_dit_free(dit);
    else
        *out = dit;
    return status;
}

esa_status esa_wan_dit_check(const esa_part_env *env, const esa_wan_config *config)
{
    esa_wan_dit *dit = NULL;
    const esa_status status = make(env, &dit, config, NULL, 0);
    esa_wan_dit_free(dit);
    return status;
}

static esa_status load(const esa_part_env *env, esa_wan_dit **dit)
{
    const esa_status status = esa_part_load(env, &(*dit)->store, (*dit)->weights,
                                            ESA_LOAD_TRANSFORMER);
    if (!status) return ESA_OK;
    esa_wan_dit_free(*dit);
    *dit = NULL;
    return status;
}

esa_status esa_wan_dit_open(const esa_part_env *env, esa_wan_dit **dit,
                            const esa_wan_config *config)
{
    ESA_TRY(make(env, dit, config, NULL, 0));
    return load(env, dit);
}

esa_status esa_wan_dit_open_memory(const esa_part_env *env, esa_wan_dit **dit,
                                   const esa_wan_config *config, const void *bytes, int64_t size)
{
    ESA_TRY(make(env, dit, config, bytes, size));
    return load(env, dit);
}

void esa_wan_dit_free(esa_wan_dit *dit)
{
    if (!dit) return;
    const esa_allocator mem = dit->nn->ctx->mem;
    esa_wan_dit_end(dit);
    esa_store_free(dit->store);
    esa_weights_free(dit->weights);
    esa_mem_free(&mem, dit->wave, 4 * (int64_t)dit->config.freq_dim);
    esa_mem_free(&mem, dit->block, dit->config.layers * (int64_t)sizeof *dit->block);
    esa_mem_free(&mem, dit, (int64_t)sizeof *dit);
}

void esa_wan_dit_memory(const esa_wan_dit *dit, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = esa_weights_parameters(dit->weights);
    esa_weights_memory(dit->weights, held, mapped);
}

void esa_wan_dit_set_watch(esa_wan_dit *dit, esa_wan_dit_watch watch, void *user)
{
    dit->watch = watch;
    dit->watch_user = user;
}
