/* cog_dit_open.c - names the tensors of CogVideoX's transformer with their shapes, and opens it.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/cog_dit_internal.h"

#include <stdio.h>
#include "model/lora.h"

/* Weight and bias of a layer norm. */
static void want_norm(esa_weights *w, esa_weight *weight, esa_weight *bias, int64_t n,
                      const char *name)
{
    esa_weights_want(w, weight, ESA_WANT_F32, 1, &n, "%s.weight", name);
    esa_weights_want(w, bias, ESA_WANT_F32, 1, &n, "%s.bias", name);
}

/* f8: ESA_WANT_F8 or 0. q, k and v are one matrix on devices that can use it. */
static void want_attention(esa_weights *w, esa_cog_dit *dit, int32_t i, int32_t f8)
{
    static const char *const called[3] = { "to_q", "to_k", "to_v" };
    cog_block *b = &dit->block[i];
    esa_linear *const part[3] = { &b->q, &b->k, &b->v };
    const int64_t d = dit->d;
    char name[96];
    for (int32_t k = 0; k < 3; k++)
        esa_weights_want(w, &part[k]->weight, ESA_WANT_PRODUCT | f8 | (k ? ESA_WANT_JOIN : 0), 2,
                         (int64_t[]){ d, d }, "transformer_blocks.%d.attn1.%s.weight", i,
                         called[k]);
    for (int32_t k = 0; k < 3 && dit->config.attention_bias; k++)
        esa_weights_want(w, &part[k]->bias, k ? ESA_WANT_JOIN : 0, 1, &d,
                         "transformer_blocks.%d.attn1.%s.bias", i, called[k]);
    snprintf(name, sizeof name, "transformer_blocks.%d.attn1.to_out.0", i);
    esa_part_want_linear(w, &b->out, f8, d, d, name);
    snprintf(name, sizeof name, "transformer_blocks.%d.attn1.norm_q", i);
    want_norm(w, &b->q_norm[0], &b->q_norm[1], dit->config.head_dim, name);
    snprintf(name, sizeof name, "transformer_blocks.%d.attn1.norm_k", i);
    want_norm(w, &b->k_norm[0], &b->k_norm[1], dit->config.head_dim, name);
}

static void want_block(esa_weights *w, esa_cog_dit *dit, int32_t i)
{
    const int64_t d = dit->d;
    /* The first and the last block lose most by F8. */
    const int32_t f8 = i > 0 && i < dit->config.layers - 1 ? ESA_WANT_F8 : 0;
    cog_block *b = &dit->block[i];
    char name[96];
    for (int32_t k = 0; k < 2; k++) {
        snprintf(name, sizeof name, "transformer_blocks.%d.norm%d.linear", i, k + 1);
        esa_part_want_linear(w, &b->norm[k].layer, 0, 6 * d, dit->config.time_dim, name);
        snprintf(name, sizeof name, "transformer_blocks.%d.norm%d.norm", i, k + 1);
        want_norm(w, &b->norm[k].weight, &b->norm[k].bias, d, name);
    }
    want_attention(w, dit, i, f8);
    snprintf(name, sizeof name, "transformer_blocks.%d.ff.net.0.proj", i);
    esa_part_want_linear(w, &b->up, f8, dit->ffn, d, name);
    snprintf(name, sizeof name, "transformer_blocks.%d.ff.net.2", i);
    esa_part_want_linear(w, &b->down, f8, d, dit->ffn, name);
}

static void want_all(esa_weights *w, esa_cog_dit *dit)
{
    const esa_cog_config *c = &dit->config;
    const int64_t d = dit->d, E = c->time_dim, p = c->patch;
    esa_weights_want(w, &dit->patch.weight, ESA_WANT_PRODUCT, 4,
                     (int64_t[]){ d, c->in_channels, p, p }, "patch_embed.proj.weight");
    if (c->patch_bias) esa_weights_want(w, &dit->patch.bias, 0, 1, &d, "patch_embed.proj.bias");
    esa_part_want_linear(w, &dit->text_proj, 0, d, c->text_dim, "patch_embed.text_proj");
    esa_part_want_linear(w, &dit->time1, 0, E, d, "time_embedding.linear_1");
    esa_part_want_linear(w, &dit->time2, 0, E, E, "time_embedding.linear_2");
    want_norm(w, &dit->final_norm[0], &dit->final_norm[1], d, "norm_final");
    esa_part_want_linear(w, &dit->norm_out, 0, 2 * d, E, "norm_out.linear");
    want_norm(w, &dit->out_norm[0], &dit->out_norm[1], d, "norm_out.norm");
    esa_part_want_linear(w, &dit->proj_out, 0, p * p * c->out_channels, d, "proj_out");
    for (int32_t i = 0; i < c->layers; i++) {
        esa_weights_group(w, 1 + i);
        want_block(w, dit, i);
    }
}

/* Opens the weight files and compares them with the config. */
static esa_status check_file(const esa_part_env *env, esa_cog_dit *dit)
{
    esa_ctx *ctx = env->nn->ctx;
    dit->block = esa_mem_zalloc(&ctx->mem, dit->config.layers * (int64_t)sizeof *dit->block);
    dit->wave = esa_mem_alloc(&ctx->mem, 4 * dit->d);
    if (!dit->block || !dit->wave)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer");
    ESA_TRY(esa_part_open_transformer(env, &dit->weights, "transformer"));
    esa_weights_naming(dit->weights, &esa_cog_original);
    /* Tables of positions, and of words that are not used, in the files of the authors. */
    esa_weights_ignore(dit->weights, "mixins.pos_embed.");
    esa_weights_ignore(dit->weights, "transformer.word_embeddings.");
    esa_weights_ignore(dit->weights, "transformer.position_embeddings.");
    want_all(dit->weights, dit);
    ESA_TRY(esa_weights_lora(dit->weights, env->lora, env->loras));
    return esa_weights_check(dit->weights, env->report, env->report_user);
}

/* Does everything but load the weights. */
static esa_status make(const esa_part_env *env, esa_cog_dit **out, const esa_cog_config *config)
{
    esa_ctx *ctx = env->nn->ctx;
    *out = NULL;
    esa_cog_dit *dit = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *dit);
    if (!dit) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer");
    dit->nn = env->nn;
    dit->config = *config;
    dit->d = (int64_t)config->heads * config->head_dim;
    dit->ffn = 4 * dit->d;
    dit->tick = env->tick;
    dit->tick_user = env->tick_user;
    const esa_status status = check_file(env, dit);
    if (status)
        esa_cog_dit_free(dit);
    else
        *out = dit;
    return status;
}

esa_status esa_cog_dit_check(const esa_part_env *env, const esa_cog_config *config)
{
    esa_cog_dit *dit = NULL;
    const esa_status status = make(env, &dit, config);
    esa_cog_dit_free(dit);
    return status;
}

esa_status esa_cog_dit_open(const esa_part_env *env, esa_cog_dit **dit,
                            const esa_cog_config *config)
{
    ESA_TRY(make(env, dit, config));
    const esa_status status = esa_part_load(env, &(*dit)->store, (*dit)->weights,
                                            ESA_LOAD_TRANSFORMER);
    if (!status) return ESA_OK;
    esa_cog_dit_free(*dit);
    *dit = NULL;
    return status;
}

void esa_cog_dit_free(esa_cog_dit *dit)
{
    if (!dit) return;
    const esa_allocator mem = dit->nn->ctx->mem;
    esa_cog_dit_end(dit);
    esa_store_free(dit->store);
    esa_weights_free(dit->weights);
    esa_mem_free(&mem, dit->wave, 4 * dit->d);
    esa_mem_free(&mem, dit->block, dit->config.layers * (int64_t)sizeof *dit->block);
    esa_mem_free(&mem, dit, (int64_t)sizeof *dit);
}

void esa_cog_dit_memory(const esa_cog_dit *dit, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = esa_weights_parameters(dit->weights);
    esa_weights_memory(dit->weights, held, mapped);
}

void esa_cog_dit_set_watch(esa_cog_dit *dit, esa_cog_dit_watch watch, void *user)
{
    dit->watch = watch;
    dit->watch_user = user;
}
