/* hunyuan_config.c - reads the JSON files of a HunyuanVideo folder (config.h).
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/config/config.h"

#include <string.h>
#include "esa/esa.h"
#include "io/safetensors.h"
#include "model/config/json_file.h"

#define MAX_WIDTH 65536 /* widest layer */
#define SKIP      2     /* layers of Llama that diffusers' pipeline leaves out */
#define OLD_EOS   2     /* configs of old CLIP models: the token with the largest id is meant */

static esa_status done(esa_json_file *f)
{
    const esa_status status = f->status;
    esa_json_file_close(f);
    return status;
}

static void check_width(esa_json_file *f, int32_t heads, int32_t head_dim)
{
    if ((int64_t)heads * head_dim > MAX_WIDTH)
        esa_json_fail(f, ESA_ERR_FORMAT, "%d heads of %d channels are more than %d", heads,
                      head_dim, MAX_WIDTH);
}

/* ---------------------------------------------------------------- transformer */

static void read_positions(esa_json_file *f, esa_hunyuan_config *c)
{
    static const int32_t axis[3] = { 16, 56, 56 };
    c->theta = esa_json_real(f, "rope_theta", 1, 1e9, 256.0);
    esa_json_ints(f, "rope_axes_dim", c->axis, 3, 3, 0, ESA_MAX_HEAD_DIM, axis);
    if (f->status) return;
    if (c->axis[0] + c->axis[1] + c->axis[2] != c->head_dim)
        esa_json_fail(f, ESA_ERR_FORMAT,
                      "rope_axes_dim is [%d, %d, %d], but attention_head_dim is %d", c->axis[0],
                      c->axis[1], c->axis[2], c->head_dim);
    for (int32_t i = 0; i < 3; i++)
        if (c->axis[i] % 2)
            esa_json_fail(f, ESA_ERR_UNSUPPORTED, "rope_axes_dim has %d, expected even numbers",
                          c->axis[i]);
}

esa_status esa_config_hunyuan(esa_ctx *ctx, esa_hunyuan_config *c, const char *path)
{
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (esa_json_file_open(ctx, &f, path)) return done(&f);
    esa_json_only_text(&f, "_class_name", "HunyuanVideoTransformer3DModel");
    esa_json_only_text(&f, "qk_norm", "rms_norm");
    esa_json_only_null(&f, "image_condition_type");
    c->heads = (int32_t)esa_json_int(&f, "num_attention_heads", 1, 1024, 24);
    c->head_dim = (int32_t)esa_json_int(&f, "attention_head_dim", 2, ESA_MAX_HEAD_DIM, 128);
    c->doubles = (int32_t)esa_json_int(&f, "num_layers", 1, 1024, 20);
    c->singles = (int32_t)esa_json_int(&f, "num_single_layers", 0, 1024, 40);
    c->refiners = (int32_t)esa_json_int(&f, "num_refiner_layers", 0, 64, 2);
    c->in_channels = (int32_t)esa_json_int(&f, "in_channels", 1, ESA_CONFIG_MAX_LATENT, 16);
    c->out_channels = (int32_t)esa_json_int(&f, "out_channels", 1, ESA_CONFIG_MAX_LATENT,
                                            c->in_channels);
    c->patch[1] = c->patch[2] = (int32_t)esa_json_int(&f, "patch_size", 1, 16, 2);
    c->patch[0] = (int32_t)esa_json_int(&f, "patch_size_t", 1, 16, 1);
    c->text_dim = (int32_t)esa_json_int(&f, "text_embed_dim", 1, MAX_WIDTH, 4096);
    c->pooled_dim = (int32_t)esa_json_int(&f, "pooled_projection_dim", 1, MAX_WIDTH, 768);
    c->guidance = esa_json_bool(&f, "guidance_embeds", 1);
    const double ratio = esa_json_real(&f, "mlp_ratio", 0.01, 64, 4.0);
    c->ffn = (int32_t)((double)c->heads * c->head_dim * ratio);
    check_width(&f, c->heads, c->head_dim);
    if (!f.status && c->ffn < 1)
        esa_json_fail(&f, ESA_ERR_FORMAT, "mlp_ratio is %g, which leaves no hidden layer", ratio);
    read_positions(&f, c);
    esa_json_hash(&f, c->hash);
    return done(&f);
}

/* ---------------------------------------------------------------- VAE */

static void check_levels(esa_json_file *f, esa_hunyuan_vae_config *c)
{
    if (f->status) return;
    if (c->factor_s != 1 << (c->levels - 1))
        esa_json_fail(f, ESA_ERR_UNSUPPORTED,
                      "spatial_compression_ratio is %d, expected %d with %d levels", c->factor_s,
                      1 << (c->levels - 1), c->levels);
    for (int32_t i = 0; i < c->levels; i++)
        if (c->width[i] % c->groups)
            esa_json_fail(f, ESA_ERR_FORMAT,
                          "a level has %d channels, which %d groups do not share", c->width[i],
                          c->groups);
}

esa_status esa_config_hunyuan_vae(esa_ctx *ctx, esa_hunyuan_vae_config *c, const char *path)
{
    static const int32_t width[4] = { 128, 256, 512, 512 };
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (esa_json_file_open(ctx, &f, path)) return done(&f);
    esa_json_only_text(&f, "_class_name", "AutoencoderKLHunyuanVideo");
    esa_json_only_text(&f, "act_fn", "silu");
    esa_json_int(&f, "in_channels", 3, 3, 3);
    esa_json_int(&f, "out_channels", 3, 3, 3);
    c->z_dim = (int32_t)esa_json_int(&f, "latent_channels", 1, ESA_CONFIG_MAX_LATENT, 16);
    c->res_blocks = (int32_t)esa_json_int(&f, "layers_per_block", 1, 16, 2);
    c->groups = (int32_t)esa_json_int(&f, "norm_num_groups", 1, 1024, 32);
    c->attention = esa_json_bool(&f, "mid_block_add_attention", 1);
    c->scaling = esa_json_real(&f, "scaling_factor", 1e-6, 1e6, 0.476986);
    const int32_t given = json_is_array(json_object_get(f.root, "block_out_channels"));
    c->levels = esa_json_ints(&f, "block_out_channels", c->width, given ? -1 : 4,
                              given ? ESA_CONFIG_MAX_LEVELS : 4, 1, 4096, given ? NULL : width);
    c->factor_s = (int32_t)esa_json_int(&f, "spatial_compression_ratio", 1,
                                        1 << ESA_CONFIG_MAX_LEVELS, 8);
    c->factor_t = (int32_t)esa_json_int(&f, "temporal_compression_ratio", 4, 4, 4);
    if (!f.status && c->levels < 3)
        esa_json_fail(&f, ESA_ERR_UNSUPPORTED, "block_out_channels has %d levels, expected 3 to %d",
                      c->levels, ESA_CONFIG_MAX_LEVELS);
    check_levels(&f, c);
    return done(&f);
}

/* ---------------------------------------------------------------- text encoders */

/* rope_theta is a key of its own, or in rope_parameters (transformers 5), which may also ask for
 * other kinds of positions. */
static double read_theta(esa_json_file *f)
{
    const json_t *all = f->root ? json_object_get(f->root, "rope_parameters") : NULL,
                 *theta = json_object_get(all, "rope_theta"),
                 *kind = json_object_get(all, "rope_type");
    if (kind && (!json_is_string(kind) || strcmp(json_string_value(kind), "default") != 0))
        esa_json_fail(f, ESA_ERR_UNSUPPORTED, "rope_type is not \"default\"");
    if (!theta) return esa_json_real(f, "rope_theta", 1, 1e9, 10000.0);
    const double value = json_is_number(theta) ? json_number_value(theta) : 0;
    if (!(value >= 1 && value <= 1e9))
        esa_json_fail(f, ESA_ERR_FORMAT, "rope_theta is not a number from 1 to 1e9");
    return value;
}

static void read_common(esa_json_file *f, esa_causal_config *c)
{
    c->vocab = (int32_t)esa_json_int(f, "vocab_size", 1, 1 << 24, ESA_JSON_REQUIRED);
    c->d = (int32_t)esa_json_int(f, "hidden_size", 2, MAX_WIDTH, ESA_JSON_REQUIRED);
    c->heads = (int32_t)esa_json_int(f, "num_attention_heads", 1, 1024, ESA_JSON_REQUIRED);
    c->layers = (int32_t)esa_json_int(f, "num_hidden_layers", 1, 1024, ESA_JSON_REQUIRED);
    c->ff = (int32_t)esa_json_int(f, "intermediate_size", 1, 4 * MAX_WIDTH, ESA_JSON_REQUIRED);
}

esa_status esa_config_llama(esa_ctx *ctx, esa_causal_config *c, const char *path)
{
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (esa_json_file_open(ctx, &f, path)) return done(&f);
    esa_json_only_text(&f, "model_type", "llama");
    esa_json_only_text(&f, "hidden_act", "silu");
    esa_json_only_bool(&f, "attention_bias", 0);
    esa_json_only_bool(&f, "mlp_bias", 0);
    esa_json_only_null(&f, "rope_scaling");
    read_common(&f, c);
    c->kind = ESA_CAUSAL_LLAMA;
    c->skip = SKIP;
    c->kv_heads = (int32_t)esa_json_int(&f, "num_key_value_heads", 1, 1024, c->heads);
    c->head_dim = (int32_t)esa_json_int(&f, "head_dim", 2, ESA_MAX_HEAD_DIM,
                                        f.status ? 2 : c->d / c->heads);
    c->eps = esa_json_real(&f, "rms_norm_eps", 1e-12, 1e-1, 1e-6);
    c->theta = read_theta(&f);
    check_width(&f, c->heads, c->head_dim);
    if (!f.status && (c->heads % c->kv_heads || c->head_dim % 2))
        esa_json_fail(&f, ESA_ERR_FORMAT,
                      "%d heads of %d channels share %d heads of keys, expected a divisor and an "
                      "even number of channels",
                      c->heads, c->head_dim, c->kv_heads);
    if (!f.status && c->layers <= c->skip)
        esa_json_fail(&f, ESA_ERR_UNSUPPORTED, "num_hidden_layers is %d, expected more than %d",
                      c->layers, c->skip);
    return done(&f);
}

esa_status esa_config_clip_text(esa_ctx *ctx, esa_causal_config *c, const char *path)
{
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (esa_json_file_open(ctx, &f, path)) return done(&f);
    esa_json_only_text(&f, "model_type", "clip_text_model");
    esa_json_only_text(&f, "hidden_act", "quick_gelu");
    read_common(&f, c);
    c->kind = ESA_CAUSAL_CLIP;
    c->kv_heads = c->heads;
    c->head_dim = f.status ? 1 : c->d / c->heads;
    c->positions = (int32_t)esa_json_int(&f, "max_position_embeddings", 2, 1 << 20, 77);
    c->eos = (int32_t)esa_json_int(&f, "eos_token_id", 0, c->vocab - 1, 49407);
    if (c->eos == OLD_EOS) c->eos = -1;
    c->eps = esa_json_real(&f, "layer_norm_eps", 1e-12, 1e-1, 1e-5);
    if (!f.status && c->d % c->heads)
        esa_json_fail(&f, ESA_ERR_FORMAT, "hidden_size is %d, expected a multiple of %d heads",
                      c->d, c->heads);
    return done(&f);
}
