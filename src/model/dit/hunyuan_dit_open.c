/* hunyuan_dit_open.c - names the tensors of HunyuanVideo's transformer with their shapes, and opens
 * it.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include "model/dit/hunyuan_dit_internal.h"
#include "model/lora.h"

/* A layer whose name is prefix.part. */
static void want_part(esa_weights *w, esa_linear *l, int32_t flags, int64_t out, int64_t in,
                      const char *prefix, const char *part)
{
    char name[128];
    snprintf(name, sizeof name, "%s.%s", prefix, part);
    esa_part_want_linear(w, l, flags, out, in, name);
}

static void want_mlp(esa_weights *w, hunyuan_mlp *m, int64_t d, int64_t in, const char *prefix)
{
    want_part(w, &m->one, 0, d, in, prefix, "linear_1");
    want_part(w, &m->two, 0, d, d, prefix, "linear_2");
}

/* q, k and v are one matrix on devices that can use it. */
static void want_qkv(esa_weights *w, esa_linear *q, esa_linear *k, esa_linear *v, int64_t d,
                     int32_t f8, const char *prefix, const char *const name[3])
{
    esa_linear *const part[3] = { q, k, v };
    for (int32_t i = 0; i < 3; i++)
        esa_weights_want(w, &part[i]->weight, ESA_WANT_PRODUCT | f8 | (i ? ESA_WANT_JOIN : 0), 2,
                         (int64_t[]){ d, d }, "%s.%s.weight", prefix, name[i]);
    for (int32_t i = 0; i < 3; i++)
        esa_weights_want(w, &part[i]->bias, i ? ESA_WANT_JOIN : 0, 1, &d, "%s.%s.bias", prefix,
                         name[i]);
}

static const char *const own[3] = { "attn.to_q", "attn.to_k", "attn.to_v" }, *const added[3] = {
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"
};

static void want_refiner(esa_weights *w, esa_hunyuan_dit *dit, int32_t i)
{
    const int64_t d = dit->d, wide = ESA_HUNYUAN_WIDE * d;
    hunyuan_refiner *r = &dit->refiner[i];
    char prefix[96];
    snprintf(prefix, sizeof prefix, "context_embedder.token_refiner.refiner_blocks.%d", (int)i);
    esa_weights_want(w, &r->norm1, ESA_WANT_F32, 1, &d, "%s.norm1.weight", prefix);
    esa_weights_want(w, &r->bias1, ESA_WANT_F32, 1, &d, "%s.norm1.bias", prefix);
    esa_weights_want(w, &r->norm2, ESA_WANT_F32, 1, &d, "%s.norm2.weight", prefix);
    esa_weights_want(w, &r->bias2, ESA_WANT_F32, 1, &d, "%s.norm2.bias", prefix);
    want_qkv(w, &r->q, &r->k, &r->v, d, 0, prefix, own);
    want_part(w, &r->out, 0, d, d, prefix, "attn.to_out.0");
    want_part(w, &r->up, 0, wide, d, prefix, "ff.net.0.proj");
    want_part(w, &r->down, 0, d, wide, prefix, "ff.net.2");
    want_part(w, &r->gates, 0, 2 * d, d, prefix, "norm_out.linear");
}

/* text 1: the stream of the text in a double block. */
static void want_double(esa_weights *w, esa_hunyuan_dit *dit, int32_t i, int32_t text, int32_t f8)
{
    const int64_t d = dit->d, D = dit->config.head_dim, ffn = dit->config.ffn;
    hunyuan_stream *s = &dit->stream[2 * i + text];
    char prefix[64];
    snprintf(prefix, sizeof prefix, "transformer_blocks.%d", (int)i);
    want_part(w, &s->modulation, 0, 6 * d, d, prefix,
              text ? "norm1_context.linear" : "norm1.linear");
    want_qkv(w, &s->q, &s->k, &s->v, d, f8, prefix, text ? added : own);
    esa_weights_want(w, &s->norm_q, ESA_WANT_F32, 1, &D, "%s.attn.norm_%sq.weight", prefix,
                     text ? "added_" : "");
    esa_weights_want(w, &s->norm_k, ESA_WANT_F32, 1, &D, "%s.attn.norm_%sk.weight", prefix,
                     text ? "added_" : "");
    want_part(w, &s->out, f8, d, d, prefix, text ? "attn.to_add_out" : "attn.to_out.0");
    want_part(w, &s->up, f8, ffn, d, prefix, text ? "ff_context.net.0.proj" : "ff.net.0.proj");
    want_part(w, &s->down, f8, d, ffn, prefix, text ? "ff_context.net.2" : "ff.net.2");
}

static void want_single(esa_weights *w, esa_hunyuan_dit *dit, int32_t i, int32_t f8)
{
    const int64_t d = dit->d, D = dit->config.head_dim, ffn = dit->config.ffn;
    hunyuan_stream *s = &dit->stream[2 * dit->config.doubles + i];
    char prefix[64];
    snprintf(prefix, sizeof prefix, "single_transformer_blocks.%d", (int)i);
    want_part(w, &s->modulation, 0, 3 * d, d, prefix, "norm.linear");
    want_qkv(w, &s->q, &s->k, &s->v, d, f8, prefix, own);
    esa_weights_want(w, &s->norm_q, ESA_WANT_F32, 1, &D, "%s.attn.norm_q.weight", prefix);
    esa_weights_want(w, &s->norm_k, ESA_WANT_F32, 1, &D, "%s.attn.norm_k.weight", prefix);
    want_part(w, &s->up, f8, ffn, d, prefix, "proj_mlp");
    want_part(w, &s->out, f8, d, d + ffn, prefix, "proj_out");
}

static void want_all(esa_weights *w, esa_hunyuan_dit *dit)
{
    const esa_hunyuan_config *c = &dit->config;
    const int64_t d = dit->d, volume = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    const int64_t kernel[5] = { d, c->in_channels, c->patch[0], c->patch[1], c->patch[2] };
    esa_weights_want(w, &dit->patch.weight, ESA_WANT_PRODUCT, 5, kernel, "x_embedder.proj.weight");
    esa_weights_want(w, &dit->patch.bias, 0, 1, &d, "x_embedder.proj.bias");
    want_mlp(w, &dit->time, d, ESA_HUNYUAN_WAVE, "time_text_embed.timestep_embedder");
    if (c->guidance)
        want_mlp(w, &dit->guidance, d, ESA_HUNYUAN_WAVE, "time_text_embed.guidance_embedder");
    want_mlp(w, &dit->pooled, d, c->pooled_dim, "time_text_embed.text_embedder");
    want_mlp(w, &dit->refine_time, d, ESA_HUNYUAN_WAVE,
             "context_embedder.time_text_embed.timestep_embedder");
    want_mlp(w, &dit->refine_text, d, c->text_dim,
             "context_embedder.time_text_embed.text_embedder");
    esa_part_want_linear(w, &dit->proj_in, 0, d, c->text_dim, "context_embedder.proj_in");
    for (int32_t i = 0; i < c->refiners; i++) want_refiner(w, dit, i);
    esa_part_want_linear(w, &dit->norm_out, 0, 2 * d, d, "norm_out.linear");
    esa_part_want_linear(w, &dit->proj_out, 0, volume * c->out_channels, d, "proj_out");
    for (int32_t i = 0; i < dit->blocks; i++) {
        /* The first and the last block lose most by F8. */
        const int32_t f8 = i > 0 && i < dit->blocks - 1 ? ESA_WANT_F8 : 0;
        esa_weights_group(w, 1 + i);
        for (int32_t text = 0; text < 2 && i < c->doubles; text++) want_double(w, dit, i, text, f8);
        if (i >= c->doubles) want_single(w, dit, i - c->doubles, f8);
    }
}

/* ---------------------------------------------------------------- opening */

static int64_t stream_bytes(const esa_hunyuan_dit *dit)
{
    return (2 * (int64_t)dit->config.doubles + dit->config.singles) * (int64_t)sizeof *dit->stream;
}

static esa_status check_file(const esa_part_env *env, esa_hunyuan_dit *dit)
{
    esa_ctx *ctx = env->nn->ctx;
    dit->stream = esa_mem_zalloc(&ctx->mem, stream_bytes(dit));
    dit->refiner = esa_mem_zalloc(&ctx->mem,
                                  (1 + dit->config.refiners) * (int64_t)sizeof *dit->refiner);
    dit->wave = esa_mem_alloc(&ctx->mem, 2 * 4 * ESA_HUNYUAN_WAVE);
    if (!dit->stream || !dit->refiner || !dit->wave)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer");
    ESA_TRY(esa_part_open_transformer(env, &dit->weights, "transformer"));
    esa_weights_naming(dit->weights, &esa_hunyuan_original);
    ESA_TRY(esa_weights_lora(dit->weights, env->lora, env->loras));
    want_all(dit->weights, dit);
    return esa_weights_check(dit->weights, env->report, env->report_user);
}

/* Does everything but load the weights. */
static esa_status make(const esa_part_env *env, esa_hunyuan_dit **out,
                       const esa_hunyuan_config *config)
{
    esa_ctx *ctx = env->nn->ctx;
    *out = NULL;
    esa_hunyuan_dit *dit = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *dit);
    if (!dit) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer");
    dit->nn = env->nn;
    dit->config = *config;
    dit->d = (int64_t)config->heads * config->head_dim;
    dit->blocks = config->doubles + config->singles;
    dit->tick = env->tick;
    dit->tick_user = env->tick_user;
    const esa_status status = check_file(env, dit);
    if (status)
        esa_hunyuan_dit_free(dit);
    else
        *out = dit;
    return status;
}

esa_status esa_hunyuan_dit_check(const esa_part_env *env, const esa_hunyuan_config *config)
{
    esa_hunyuan_dit *dit = NULL;
    const esa_status status = make(env, &dit, config);
    esa_hunyuan_dit_free(dit);
    return status;
}

esa_status esa_hunyuan_dit_open(const esa_part_env *env, esa_hunyuan_dit **dit,
                                const esa_hunyuan_config *config)
{
    ESA_TRY(make(env, dit, config));
    const esa_status status = esa_part_load(env, &(*dit)->store, (*dit)->weights,
                                            ESA_LOAD_TRANSFORMER);
    if (!status) return ESA_OK;
    esa_hunyuan_dit_free(*dit);
    *dit = NULL;
    return status;
}

void esa_hunyuan_dit_free(esa_hunyuan_dit *dit)
{
    if (!dit) return;
    const esa_allocator mem = dit->nn->ctx->mem;
    esa_hunyuan_dit_end(dit);
    esa_store_free(dit->store);
    esa_weights_free(dit->weights);
    esa_mem_free(&mem, dit->wave, 2 * 4 * ESA_HUNYUAN_WAVE);
    esa_mem_free(&mem, dit->refiner, (1 + dit->config.refiners) * (int64_t)sizeof *dit->refiner);
    esa_mem_free(&mem, dit->stream, stream_bytes(dit));
    esa_mem_free(&mem, dit, (int64_t)sizeof *dit);
}

void esa_hunyuan_dit_memory(const esa_hunyuan_dit *dit, int64_t *parameters, int64_t *held,
                            int64_t *mapped)
{
    *parameters = esa_weights_parameters(dit->weights);
    esa_weights_memory(dit->weights, held, mapped);
}

esa_store *esa_hunyuan_dit_store(esa_hunyuan_dit *dit) { return dit->store; }

void esa_hunyuan_dit_set_watch(esa_hunyuan_dit *dit, esa_hunyuan_dit_watch watch, void *user)
{
    dit->watch = watch;
    dit->watch_user = user;
}
