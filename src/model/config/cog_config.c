/* config_cog.c - reads the config files of a CogVideoX folder: transformer and VAE.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/config/config.h"

#include <string.h>
#include "esa/esa.h"
#include "model/config/json_file.h"

#define MAX_WIDTH 65536 /* widest layer */

static esa_status done(esa_json_file *f)
{
    const esa_status status = f->status;
    esa_json_file_close(f);
    return status;
}

/* ---------------------------------------------------------------- transformer */

/* Settings of other versions and of other tasks. */
static void refuse_others(esa_json_file *f)
{
    esa_json_only_text(f, "_class_name", "CogVideoXTransformer3DModel");
    esa_json_only_null(f, "patch_size_t"); /* version 1.5 */
    esa_json_only_null(f, "ofs_embed_dim");
    esa_json_only_bool(f, "use_learned_positional_embeddings", 0);
    esa_json_only_bool(f, "flip_sin_to_cos", 1);
    esa_json_only_bool(f, "norm_elementwise_affine", 1);
    esa_json_only_text(f, "activation_fn", "gelu-approximate");
    esa_json_only_text(f, "timestep_activation_fn", "silu");
    esa_json_int(f, "freq_shift", 0, 0, 0);
}

static void check_sizes(esa_json_file *f, const esa_cog_config *c)
{
    const int64_t d = (int64_t)c->heads * c->head_dim;
    if (d > MAX_WIDTH)
        esa_json_fail(f, ESA_ERR_FORMAT, "%d heads of %d channels are more than %d", c->heads,
                      c->head_dim, MAX_WIDTH);
    if (c->rotary && c->head_dim % 16)
        esa_json_fail(f, ESA_ERR_UNSUPPORTED,
                      "attention_head_dim is %d, expected a multiple of 16 for rotary positions",
                      c->head_dim);
    if (!c->rotary && d % 16)
        esa_json_fail(f, ESA_ERR_UNSUPPORTED,
                      "the width is %lld, expected a multiple of 16 for positions", (long long)d);
    if (d % 2)
        esa_json_fail(f, ESA_ERR_UNSUPPORTED, "the width is %lld, an odd number", (long long)d);
    if (c->sample_h < c->patch || c->sample_w < c->patch)
        esa_json_fail(f, ESA_ERR_FORMAT, "sample_height and sample_width are less than a patch");
}

esa_status esa_config_cog(esa_ctx *ctx, esa_cog_config *c, const char *path)
{
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (esa_json_file_open(ctx, &f, path)) return done(&f);
    refuse_others(&f);
    c->heads = (int32_t)esa_json_int(&f, "num_attention_heads", 1, 1024, 30);
    c->head_dim = (int32_t)esa_json_int(&f, "attention_head_dim", 2, ESA_MAX_HEAD_DIM, 64);
    c->layers = (int32_t)esa_json_int(&f, "num_layers", 1, 1024, 30);
    c->in_channels = (int32_t)esa_json_int(&f, "in_channels", 1, ESA_CONFIG_MAX_LATENT, 16);
    c->out_channels = (int32_t)esa_json_int(&f, "out_channels", 1, ESA_CONFIG_MAX_LATENT, 16);
    c->patch = (int32_t)esa_json_int(&f, "patch_size", 1, 16, 2);
    c->text_dim = (int32_t)esa_json_int(&f, "text_embed_dim", 1, MAX_WIDTH, 4096);
    c->time_dim = (int32_t)esa_json_int(&f, "time_embed_dim", 1, MAX_WIDTH, 512);
    c->max_text = (int32_t)esa_json_int(&f, "max_text_seq_length", 1, 65536, 226);
    c->sample_h = (int32_t)esa_json_int(&f, "sample_height", 1, 1 << 20, 60);
    c->sample_w = (int32_t)esa_json_int(&f, "sample_width", 1, 1 << 20, 90);
    c->attention_bias = esa_json_bool(&f, "attention_bias", 1);
    c->patch_bias = esa_json_bool(&f, "patch_bias", 1);
    c->rotary = esa_json_bool(&f, "use_rotary_positional_embeddings", 0);
    c->spatial_scale = esa_json_real(&f, "spatial_interpolation_scale", 1e-3, 1e3, 1.875);
    c->temporal_scale = esa_json_real(&f, "temporal_interpolation_scale", 1e-3, 1e3, 1.0);
    c->eps = esa_json_real(&f, "norm_eps", 1e-12, 1e-1, 1e-5);
    if (!f.status) check_sizes(&f, c);
    if (!f.status) esa_json_hash(&f, c->hash);
    return done(&f);
}

/* ---------------------------------------------------------------- VAE */

static void check_levels(esa_json_file *f, esa_cog_vae_config *c, double ratio)
{
    c->factor_s = 1 << (c->levels - 1);
    c->factor_t = (int32_t)ratio;
    if (c->factor_t != ratio || c->factor_t < 1 || (c->factor_t & (c->factor_t - 1)) ||
        c->factor_t > c->factor_s)
        esa_json_fail(f, ESA_ERR_UNSUPPORTED,
                      "temporal_compression_ratio is %g, expected a power of 2 up to %d", ratio,
                      c->factor_s);
    for (int32_t i = 0; i < c->levels; i++)
        if (c->width[i] % c->groups)
            esa_json_fail(f, ESA_ERR_FORMAT, "%d channels of level %d are no multiple of %d groups",
                          c->width[i], i, c->groups);
}

esa_status esa_config_cog_vae(esa_ctx *ctx, esa_cog_vae_config *c, const char *path)
{
    static const int32_t widths[4] = { 128, 256, 256, 512 };
    esa_json_file f;
    memset(c, 0, sizeof *c);
    if (esa_json_file_open(ctx, &f, path)) return done(&f);
    esa_json_only_text(&f, "_class_name", "AutoencoderKLCogVideoX");
    esa_json_only_text(&f, "act_fn", "silu");
    esa_json_only_bool(&f, "use_post_quant_conv", 0);
    esa_json_int(&f, "out_channels", 3, 3, 3);
    const int32_t given = json_is_array(json_object_get(f.root, "block_out_channels"));
    c->levels = esa_json_ints(&f, "block_out_channels", c->width, given ? -1 : 4,
                              given ? ESA_CONFIG_MAX_LEVELS : 4, 1, 4096, given ? NULL : widths);
    c->z_dim = (int32_t)esa_json_int(&f, "latent_channels", 1, ESA_CONFIG_MAX_LATENT, 16);
    c->layers = (int32_t)esa_json_int(&f, "layers_per_block", 1, 16, 3);
    c->groups = (int32_t)esa_json_int(&f, "norm_num_groups", 1, 1024, 32);
    c->sample_h = (int32_t)esa_json_int(&f, "sample_height", 16, 1 << 20, 480);
    c->sample_w = (int32_t)esa_json_int(&f, "sample_width", 16, 1 << 20, 720);
    c->eps = esa_json_real(&f, "norm_eps", 1e-12, 1e-1, 1e-6);
    c->scaling = esa_json_real(&f, "scaling_factor", 1e-3, 1e3, 1.15258426);
    const double ratio = esa_json_real(&f, "temporal_compression_ratio", 1, 128, 4);
    if (!f.status) check_levels(&f, c, ratio);
    return done(&f);
}
