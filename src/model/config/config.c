/* config.c - reads the config files of a Wan folder. Ranges are generous (several times the largest
 * published model), but small enough that products of sizes stay far below 2^62.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/config/config.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "esa/esa.h"
#include "io/safetensors.h"
#include "model/config/json_file.h"

#define MAX_WIDTH 65536 /* widest layer */

esa_status esa_path_join(esa_ctx *ctx, char **path, int64_t *bytes, const char *folder,
                         const char *name)
{
    const size_t a = strlen(folder), b = strlen(name);
    *bytes = (int64_t)(a + b + 2);
    *path = esa_mem_alloc(&ctx->mem, *bytes);
    if (!*path) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a path");
    snprintf(*path, a + b + 2, "%s%s%s", folder, a && folder[a - 1] == '/' ? "" : "/", name);
    return ESA_OK;
}

static esa_status done(esa_json_file *f)
{
    const esa_status status = f->status;
    esa_json_file_close(f);
    return status;
}

/* ---------------------------------------------------------------- model_index.json */

static void class_of(esa_json_file *f, const char *key, char *out, size_t size)
{
    out[0] = 0;
    const json_t *pair = f->root ? json_object_get(f->root, key) : NULL;
    const json_t *name = json_array_get(pair, 1);
    if (json_array_size(pair) == 2 && json_is_string(name) &&
        strlen(json_string_value(name)) < size)
        snprintf(out, size, "%s", json_string_value(name));
    else
        esa_json_fail(f, ESA_ERR_FORMAT, "%s is missing, or is not a pair of library and class",
                      key);
}

/* A part is missing, null, or a pair of nulls. */
static void class_if_any(esa_json_file *f, const char *key, char *out, size_t size)
{
    out[0] = 0;
    const json_t *pair = f->root ? json_object_get(f->root, key) : NULL;
    if (json_is_string(json_array_get(pair, 1))) class_of(f, key, out, size);
}

esa_status esa_config_index(esa_ctx *ctx, esa_model_index *index, const char *path)
{
    esa_json_file f;
    memset(index, 0, sizeof *index);
    if (!esa_json_file_open(ctx, &f, path)) {
        const char *name = esa_json_text(&f, "_class_name", NULL);
        snprintf(index->pipeline, sizeof index->pipeline, "%.63s", name ? name : "");
        class_of(&f, "transformer", index->transformer, sizeof index->transformer);
        class_of(&f, "vae", index->vae, sizeof index->vae);
        class_of(&f, "text_encoder", index->text_encoder, sizeof index->text_encoder);
        class_of(&f, "tokenizer", index->tokenizer, sizeof index->tokenizer);
        class_of(&f, "scheduler", index->scheduler, sizeof index->scheduler);
        class_if_any(&f, "transformer_2", index->transformer_2, sizeof index->transformer_2);
        index->boundary = esa_json_real(&f, "boundary_ratio", 0, 1, 0);
        class_if_any(&f, "text_encoder_2", index->text_encoder_2, sizeof index->text_encoder_2);
        class_if_any(&f, "tokenizer_2", index->tokenizer_2, sizeof index->tokenizer_2);
        class_if_any(&f, "image_encoder", index->image_encoder, sizeof index->image_encoder);
    }
    return done(&f);
}

/* ---------------------------------------------------------------- transformer */

static void read_wan(esa_json_file *f, esa_wan_config *c)
{
    static const int32_t patch[3] = { 1, 2, 2 };
    memset(c, 0, sizeof *c);
    esa_json_only_text(f, "_class_name", "WanTransformer3DModel");
    esa_json_only_null(f, "pos_embed_seq_len");
    esa_json_only_text(f, "qk_norm", "rms_norm_across_heads");
    c->heads = (int32_t)esa_json_int(f, "num_attention_heads", 1, 1024, ESA_JSON_REQUIRED);
    c->head_dim = (int32_t)esa_json_int(f, "attention_head_dim", 2, ESA_MAX_HEAD_DIM,
                                        ESA_JSON_REQUIRED);
    c->layers = (int32_t)esa_json_int(f, "num_layers", 1, 1024, ESA_JSON_REQUIRED);
    c->ffn = (int32_t)esa_json_int(f, "ffn_dim", 1, 4 * MAX_WIDTH, ESA_JSON_REQUIRED);
    c->in_channels = (int32_t)esa_json_int(f, "in_channels", 1, ESA_CONFIG_MAX_LATENT,
                                           ESA_JSON_REQUIRED);
    c->out_channels = (int32_t)esa_json_int(f, "out_channels", 1, ESA_CONFIG_MAX_LATENT,
                                            c->in_channels);
    c->text_dim = (int32_t)esa_json_int(f, "text_dim", 1, MAX_WIDTH, ESA_JSON_REQUIRED);
    c->freq_dim = (int32_t)esa_json_int(f, "freq_dim", 2, MAX_WIDTH, 256);
    c->rope_max = (int32_t)esa_json_int(f, "rope_max_seq_len", 1, 1 << 20, 1024);
    c->cross_norm = esa_json_bool(f, "cross_attn_norm", 1);
    c->eps = esa_json_real(f, "eps", 1e-12, 1e-1, 1e-6);
    esa_json_ints(f, "patch_size", c->patch, 3, 3, 1, 16, patch);
    c->image_dim = (int32_t)esa_json_int(f, "image_dim", 1, MAX_WIDTH, 0);
    const int64_t added = esa_json_int(f, "added_kv_proj_dim", 1, MAX_WIDTH, 0);
    if (added != (c->image_dim ? (int64_t)c->heads * c->head_dim : 0))
        esa_json_fail(f, ESA_ERR_UNSUPPORTED,
                      "added_kv_proj_dim is %lld, expected the model's width with an image_dim and "
                      "null without",
                      (long long)added);
    if (c->head_dim % 2)
        esa_json_fail(f, ESA_ERR_UNSUPPORTED, "attention_head_dim is %d, expected an even number",
                      c->head_dim);
    if (c->freq_dim % 2)
        esa_json_fail(f, ESA_ERR_UNSUPPORTED, "freq_dim is %d, expected an even number",
                      c->freq_dim);
    if ((int64_t)c->heads * c->head_dim > MAX_WIDTH)
        esa_json_fail(f, ESA_ERR_FORMAT, "%d heads of %d channels are more than %d", c->heads,
                      c->head_dim, MAX_WIDTH);
    esa_json_hash(f, c->hash);
}

esa_status esa_config_wan(esa_ctx *ctx, esa_wan_config *config, const char *path)
{
    esa_json_file f;
    if (!esa_json_file_open(ctx, &f, path)) read_wan(&f, config);
    return done(&f);
}

esa_status esa_config_wan_memory(esa_ctx *ctx, esa_wan_config *config, const char *text,
                                 int64_t bytes, const char *label)
{
    esa_json_file f;
    if (!esa_json_file_parse(ctx, &f, text, bytes, label)) read_wan(&f, config);
    return done(&f);
}

/* ---------------------------------------------------------------- VAE */

static void read_constants(esa_json_file *f, const char *key, double *out, int32_t count, double lo,
                           double hi)
{
    const json_t *list = f->root ? json_object_get(f->root, key) : NULL;
    if (f->status) return;
    if ((int64_t)json_array_size(list) != count) {
        esa_json_fail(f, ESA_ERR_FORMAT, "%s has %lld numbers, expected %d (z_dim)", key,
                      (long long)json_array_size(list), count);
        return;
    }
    for (int32_t i = 0; i < count; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        out[i] = json_is_number(v) ? json_number_value(v) : (double)NAN;
        if (!(out[i] >= lo && out[i] <= hi)) {
            esa_json_fail(f, ESA_ERR_FORMAT, "entry %d of %s is not a number from %g to %g", i, key,
                          lo, hi);
            return;
        }
    }
}

esa_status esa_config_wan_vae(esa_ctx *ctx, esa_wan_vae_config *c, const char *path)
{
    static const int32_t mult[4] = { 1, 2, 4, 4 }, temporal[3] = { 0, 1, 1 };
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (esa_json_file_open(ctx, &f, path)) return done(&f);
    esa_json_only_text(&f, "_class_name", "AutoencoderKLWan");
    esa_json_only_bool(&f, "is_residual", 0);
    esa_json_only_null(&f, "patch_size");
    c->base_dim = (int32_t)esa_json_int(&f, "base_dim", 1, 4096, 96);
    c->decoder_base_dim = (int32_t)esa_json_int(&f, "decoder_base_dim", 1, 4096, c->base_dim);
    c->z_dim = (int32_t)esa_json_int(&f, "z_dim", 1, ESA_CONFIG_MAX_LATENT, 16);
    c->res_blocks = (int32_t)esa_json_int(&f, "num_res_blocks", 1, 16, 2);
    c->in_channels = (int32_t)esa_json_int(&f, "in_channels", 3, 3, 3);
    c->out_channels = (int32_t)esa_json_int(&f, "out_channels", 3, 3, 3);
    const int32_t given = json_is_array(json_object_get(f.root, "dim_mult"));
    c->levels = esa_json_ints(&f, "dim_mult", c->dim_mult, given ? -1 : 4,
                              given ? ESA_CONFIG_MAX_LEVELS : 4, 1, 64, given ? NULL : mult);
    if (c->levels > 1)
        esa_json_ints(&f, "temperal_downsample", c->temporal, c->levels - 1, c->levels - 1, 0, 1,
                      c->levels == 4 ? temporal : NULL);
    for (int32_t i = 1; i < c->levels; i++)
        if ((int64_t)c->decoder_base_dim * c->dim_mult[i] < 2)
            esa_json_fail(
                &f, ESA_ERR_FORMAT,
                "level %d of the decoder has 1 channel, which cannot be halved for the next", i);
    const json_t *scales = json_object_get(f.root, "attn_scales");
    c->attn_scales = (int32_t)json_array_size(scales);
    if (c->attn_scales)
        esa_json_fail(&f, ESA_ERR_UNSUPPORTED, "attn_scales has %d entries, expected none",
                      c->attn_scales);
    int32_t t = 1;
    for (int32_t i = 0; i + 1 < c->levels; i++) t *= c->temporal[i] ? 2 : 1;
    /* These keys belong to the pipeline. Without them it uses Wan's 4 and 8. */
    c->factor_t = (int32_t)esa_json_int(&f, "scale_factor_temporal", 1, 1 << ESA_CONFIG_MAX_LEVELS,
                                        4);
    c->factor_s = (int32_t)esa_json_int(&f, "scale_factor_spatial", 1, 1 << ESA_CONFIG_MAX_LEVELS,
                                        8);
    if (c->factor_t != t)
        esa_json_fail(&f, ESA_ERR_FORMAT,
                      "scale_factor_temporal is %d, but temperal_downsample gives %d", c->factor_t,
                      t);
    if (c->factor_s != 1 << (c->levels - 1))
        esa_json_fail(&f, ESA_ERR_FORMAT, "scale_factor_spatial is %d, but %d levels give %d",
                      c->factor_s, c->levels, 1 << (c->levels - 1));
    read_constants(&f, "latents_mean", c->mean, c->z_dim, -1e6, 1e6);
    read_constants(&f, "latents_std", c->std, c->z_dim, 1e-9, 1e6);
    return done(&f);
}

/* ---------------------------------------------------------------- text encoder */

static esa_status read_t5(esa_ctx *ctx, esa_umt5_config *c, const char *path, const char *type)
{
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (esa_json_file_open(ctx, &f, path)) return done(&f);
    esa_json_only_text(&f, "model_type", type);
    const char *act = esa_json_text(&f, "feed_forward_proj", "gated-gelu");
    if (strcmp(act, "gated-gelu") != 0)
        esa_json_fail(&f, ESA_ERR_UNSUPPORTED, "feed_forward_proj is %s, expected gated-gelu",
                      esa_quote(act).text);
    c->vocab = (int32_t)esa_json_int(&f, "vocab_size", 1, 1 << 24, ESA_JSON_REQUIRED);
    c->d_model = (int32_t)esa_json_int(&f, "d_model", 1, MAX_WIDTH, ESA_JSON_REQUIRED);
    c->d_kv = (int32_t)esa_json_int(&f, "d_kv", 1, 1024, ESA_JSON_REQUIRED);
    c->heads = (int32_t)esa_json_int(&f, "num_heads", 1, 1024, ESA_JSON_REQUIRED);
    c->layers = (int32_t)esa_json_int(&f, "num_layers", 1, 1024, ESA_JSON_REQUIRED);
    c->ff = (int32_t)esa_json_int(&f, "d_ff", 1, 4 * MAX_WIDTH, ESA_JSON_REQUIRED);
    c->buckets = (int32_t)esa_json_int(&f, "relative_attention_num_buckets", 2, 4096, 32);
    c->max_distance = (int32_t)esa_json_int(&f, "relative_attention_max_distance", 1, 1 << 20, 128);
    c->pad = (int32_t)esa_json_int(&f, "pad_token_id", 0, c->vocab - 1, 0);
    c->eos = (int32_t)esa_json_int(&f, "eos_token_id", 0, c->vocab - 1, 1);
    c->eps = esa_json_real(&f, "layer_norm_epsilon", 1e-12, 1e-1, 1e-6);
    if ((int64_t)c->heads * c->d_kv > MAX_WIDTH)
        esa_json_fail(&f, ESA_ERR_FORMAT, "%d heads of %d channels are more than %d", c->heads,
                      c->d_kv, MAX_WIDTH);
    /* A quarter of the buckets hold one distance each. Longer distances are spread by log(distance
     * / quarter) / log(max_distance / quarter). */
    if (c->max_distance <= esa_max64(1, c->buckets / 4))
        esa_json_fail(
            &f, ESA_ERR_FORMAT,
            "relative_attention_max_distance is %d, expected more than %d with %d buckets",
            c->max_distance, (int)esa_max64(1, c->buckets / 4), c->buckets);
    return done(&f);
}

esa_status esa_config_umt5(esa_ctx *ctx, esa_umt5_config *c, const char *path)
{
    return read_t5(ctx, c, path, "umt5");
}

esa_status esa_config_t5(esa_ctx *ctx, esa_umt5_config *c, const char *path)
{
    const esa_status status = read_t5(ctx, c, path, "t5");
    c->shared_bias = 1;
    return status;
}

/* ---------------------------------------------------------------- scheduler */

static void read_unipc(esa_json_file *f, esa_sched_config *c)
{
    c->kind = ESA_SCHED_UNIPC;
    esa_json_only_text(f, "prediction_type", "flow_prediction");
    esa_json_only_bool(f, "use_flow_sigmas", 1);
    esa_json_only_bool(f, "predict_x0", 1);
    esa_json_only_text(f, "solver_type", "bh2");
    esa_json_only_text(f, "final_sigmas_type", "zero");
    /* without it the last step divides by zero, in diffusers too */
    esa_json_only_bool(f, "lower_order_final", 1);
    esa_json_only_bool(f, "thresholding", 0);
    esa_json_only_null(f, "solver_p");
    if (json_array_size(json_object_get(f->root, "disable_corrector")))
        esa_json_fail(f, ESA_ERR_UNSUPPORTED,
                      "disable_corrector is not empty; the engine corrects every step");
    if (!json_object_get(f->root, "use_flow_sigmas") ||
        !json_object_get(f->root, "prediction_type"))
        esa_json_fail(
            f, ESA_ERR_UNSUPPORTED,
            "use_flow_sigmas or prediction_type is missing; the engine runs flow models only");
    c->order = (int32_t)esa_json_int(f, "solver_order", 1, 2, 2);
    c->shift = esa_json_real(f, "flow_shift", 1e-3, 1e3, 1.0);
}

static void read_euler(esa_json_file *f, esa_sched_config *c)
{
    c->kind = ESA_SCHED_EULER;
    esa_json_only_bool(f, "invert_sigmas", 0);
    esa_json_only_bool(f, "stochastic_sampling", 0);
    c->order = 2; /* used if the caller asks for UniPC instead */
    c->shift = esa_json_real(f, "shift", 1e-3, 1e3, 1.0);
}

/* CogVideoX's two schedulers have the same settings. */
static void read_v_schedule(esa_json_file *f, esa_sched_config *c, int32_t kind)
{
    static const char *const names[] = { [ESA_SPACING_TRAILING] = "trailing",
                                         [ESA_SPACING_LEADING] = "leading",
                                         [ESA_SPACING_LINSPACE] = "linspace" };
    const char *spacing = esa_json_text(f, "timestep_spacing", "leading");
    c->kind = kind;
    c->shift = 1;
    c->order = 2;
    esa_json_only_null(f, "trained_betas");
    esa_json_only_text(f, "beta_schedule", "scaled_linear");
    if (strcmp(esa_json_text(f, "prediction_type", "epsilon"), "v_prediction") != 0)
        esa_json_fail(f, ESA_ERR_UNSUPPORTED,
                      "prediction_type is not v_prediction, which the engine runs alone");
    c->beta_first = esa_json_real(f, "beta_start", 1e-9, 0.5, 0.00085);
    c->beta_last = esa_json_real(f, "beta_end", 1e-9, 0.5, 0.012);
    c->snr_shift = esa_json_real(f, "snr_shift_scale", 1e-3, 1e3, 3.0);
    c->zero_snr = esa_json_bool(f, "rescale_betas_zero_snr", 0);
    c->last_is_clean = esa_json_bool(f, "set_alpha_to_one", 1);
    c->offset = (int32_t)esa_json_int(f, "steps_offset", 0, 1000, 0);
    c->spacing = -1;
    for (int32_t i = 0; i <= ESA_SPACING_LINSPACE; i++)
        if (strcmp(spacing, names[i]) == 0) c->spacing = i;
    if (c->spacing < 0)
        esa_json_fail(f, ESA_ERR_UNSUPPORTED,
                      "timestep_spacing is %s, expected trailing, leading or linspace",
                      esa_quote(spacing).text);
}

esa_status esa_config_sched(esa_ctx *ctx, esa_sched_config *c, const char *path)
{
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (esa_json_file_open(ctx, &f, path)) return done(&f);
    const char *name = esa_json_text(&f, "_class_name", NULL);
    if (!f.status) {
        if (strcmp(name, "UniPCMultistepScheduler") == 0)
            read_unipc(&f, c);
        else if (strcmp(name, "FlowMatchEulerDiscreteScheduler") == 0)
            read_euler(&f, c);
        else if (strcmp(name, "CogVideoXDDIMScheduler") == 0)
            read_v_schedule(&f, c, ESA_SCHED_DDIM);
        else if (strcmp(name, "CogVideoXDPMScheduler") == 0)
            read_v_schedule(&f, c, ESA_SCHED_DPM);
        else
            esa_json_fail(&f, ESA_ERR_UNSUPPORTED,
                          "_class_name is %s, expected UniPCMultistepScheduler, "
                          "FlowMatchEulerDiscreteScheduler, CogVideoXDDIMScheduler or "
                          "CogVideoXDPMScheduler",
                          esa_quote(name).text);
    }
    c->train_steps = (int32_t)esa_json_int(&f, "num_train_timesteps", 1, 1000000, 1000);
    esa_json_only_bool(&f, "use_dynamic_shifting", 0);
    esa_json_only_bool(&f, "use_karras_sigmas", 0);
    esa_json_only_bool(&f, "use_exponential_sigmas", 0);
    esa_json_only_bool(&f, "use_beta_sigmas", 0);
    esa_json_only_null(&f, "shift_terminal");
    return done(&f);
}
