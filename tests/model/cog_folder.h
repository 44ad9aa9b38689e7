/* cog_folder.h - makes model folders for tests: the names and shapes of CogVideoX's transformer and
 * decoder, written here a second time, with made-up weights.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_COG_FOLDER_H
#define ESA_TESTS_MODEL_COG_FOLDER_H

#include "model/vae_folder.h"

static inline void shapes_norm(wan_shapes *s, int64_t n, const char *name)
{
    static const char *const part[2] = { "weight", "bias" };
    char full[160];
    for (int32_t i = 0; i < 2; i++) {
        snprintf(full, sizeof full, "%.140s.%s", name, part[i]);
        shapes_add(s, 1, n, 0, 0, 0, 0, full);
    }
}

/* The tensors of one block: 12 of the two norms and the layers behind them, 12 of attention. */
static inline void shapes_cog_block(wan_shapes *s, const esa_cog_config *c, int32_t i)
{
    static const char *const qkv[3] = { "to_q", "to_k", "to_v" };
    const int64_t d = (int64_t)c->heads * c->head_dim;
    char name[128];
    for (int32_t k = 1; k <= 2; k++) {
        snprintf(name, sizeof name, "transformer_blocks.%d.norm%d.linear", i, k);
        shapes_linear(s, 6 * d, c->time_dim, name);
        snprintf(name, sizeof name, "transformer_blocks.%d.norm%d.norm", i, k);
        shapes_norm(s, d, name);
    }
    for (int32_t k = 0; k < 3; k++) {
        snprintf(name, sizeof name, "transformer_blocks.%d.attn1.%s.weight", i, qkv[k]);
        shapes_add(s, 2, d, d, 0, 0, 0, name);
        snprintf(name, sizeof name, "transformer_blocks.%d.attn1.%s.bias", i, qkv[k]);
        if (c->attention_bias) shapes_add(s, 1, d, 0, 0, 0, 0, name);
    }
    snprintf(name, sizeof name, "transformer_blocks.%d.attn1.to_out.0", i);
    shapes_linear(s, d, d, name);
    for (int32_t k = 0; k < 2; k++) {
        snprintf(name, sizeof name, "transformer_blocks.%d.attn1.norm_%s", i, k ? "k" : "q");
        shapes_norm(s, c->head_dim, name);
    }
    snprintf(name, sizeof name, "transformer_blocks.%d.ff.net.0.proj", i);
    shapes_linear(s, 4 * d, d, name);
    snprintf(name, sizeof name, "transformer_blocks.%d.ff.net.2", i);
    shapes_linear(s, d, 4 * d, name);
}

static inline wan_shapes cog_transformer_shapes(const esa_cog_config *c)
{
    wan_shapes s = { 0 };
    const int64_t d = (int64_t)c->heads * c->head_dim;
    shapes_add(&s, 4, d, c->in_channels, c->patch, c->patch, 0, "patch_embed.proj.weight");
    if (c->patch_bias) shapes_add(&s, 1, d, 0, 0, 0, 0, "patch_embed.proj.bias");
    shapes_linear(&s, d, c->text_dim, "patch_embed.text_proj");
    shapes_linear(&s, c->time_dim, d, "time_embedding.linear_1");
    shapes_linear(&s, c->time_dim, c->time_dim, "time_embedding.linear_2");
    for (int32_t i = 0; i < c->layers; i++) shapes_cog_block(&s, c, i);
    shapes_norm(&s, d, "norm_final");
    shapes_linear(&s, 2 * d, c->time_dim, "norm_out.linear");
    shapes_norm(&s, d, "norm_out.norm");
    shapes_linear(&s, (int64_t)c->patch * c->patch * c->out_channels, d, "proj_out");
    return s;
}

/* ---------------------------------------------------------------- the decoder */

static inline void shapes_guided(wan_shapes *s, int64_t n, int64_t z, const char *prefix)
{
    char name[160];
    snprintf(name, sizeof name, "%.120s.norm_layer", prefix);
    shapes_norm(s, n, name);
    snprintf(name, sizeof name, "%.120s.conv_y.conv", prefix);
    shapes_conv(s, n, z, 1, 1, 1, name);
    snprintf(name, sizeof name, "%.120s.conv_b.conv", prefix);
    shapes_conv(s, n, z, 1, 1, 1, name);
}

static inline void shapes_cog_res(wan_shapes *s, int64_t in, int64_t out, int64_t z,
                                  const char *prefix)
{
    char name[144];
    for (int32_t k = 1; k <= 2; k++) {
        snprintf(name, sizeof name, "%.120s.norm%d", prefix, k);
        shapes_guided(s, k == 1 ? in : out, z, name);
        snprintf(name, sizeof name, "%.120s.conv%d.conv", prefix, k);
        shapes_conv(s, out, k == 1 ? in : out, 3, 3, 3, name);
    }
    snprintf(name, sizeof name, "%.120s.conv_shortcut", prefix);
    if (in != out) shapes_conv(s, out, in, 1, 1, 1, name);
}

static inline wan_shapes cog_decoder_shapes(const esa_cog_vae_config *c)
{
    wan_shapes s = { 0 };
    const int64_t z = c->z_dim, deep = c->width[c->levels - 1];
    char name[128];
    int64_t in = deep;
    shapes_conv(&s, deep, z, 3, 3, 3, "decoder.conv_in.conv");
    shapes_cog_res(&s, deep, deep, z, "decoder.mid_block.resnets.0");
    shapes_cog_res(&s, deep, deep, z, "decoder.mid_block.resnets.1");
    for (int32_t i = 0; i < c->levels; i++) {
        const int64_t out = c->width[c->levels - 1 - i];
        for (int32_t r = 0; r <= c->layers; r++) {
            snprintf(name, sizeof name, "decoder.up_blocks.%d.resnets.%d", i, r);
            shapes_cog_res(&s, r ? out : in, out, z, name);
        }
        in = out;
        snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.conv", i);
        if (i + 1 < c->levels) shapes_conv(&s, out, out, 0, 3, 3, name);
    }
    shapes_guided(&s, c->width[0], z, "decoder.norm_out");
    shapes_conv(&s, 3, c->width[0], 3, 3, 3, "decoder.conv_out.conv");
    return s;
}

/* ---------------------------------------------------------------- folders */

static inline void cog_write_config(const char *path, const esa_cog_config *c)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f,
            "{\"_class_name\": \"CogVideoXTransformer3DModel\", \"activation_fn\": "
            "\"gelu-approximate\",\n\"num_attention_heads\": %d, \"attention_head_dim\": %d, "
            "\"num_layers\": %d, \"in_channels\": %d,\n\"out_channels\": %d, \"patch_size\": %d, "
            "\"text_embed_dim\": %d, \"time_embed_dim\": %d,\n\"max_text_seq_length\": %d, "
            "\"sample_height\": %d, \"sample_width\": %d, \"norm_eps\": %g,\n\"attention_bias\": "
            "%s, \"patch_bias\": %s, \"use_rotary_positional_embeddings\": %s}\n",
            c->heads, c->head_dim, c->layers, c->in_channels, c->out_channels, c->patch,
            c->text_dim, c->time_dim, c->max_text, c->sample_h, c->sample_w, c->eps,
            c->attention_bias ? "true" : "false", c->patch_bias ? "true" : "false",
            c->rotary ? "true" : "false");
    fclose(f);
}

static inline void cog_write_vae_config(const char *path, const esa_cog_vae_config *c)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f,
            "{\"_class_name\": \"AutoencoderKLCogVideoX\", \"latent_channels\": %d, "
            "\"layers_per_block\": %d,\n\"norm_num_groups\": %d, \"temporal_compression_ratio\": "
            "%d, \"scaling_factor\": %.9g,\n\"block_out_channels\": [",
            c->z_dim, c->layers, c->groups, c->factor_t, c->scaling);
    for (int32_t i = 0; i < c->levels; i++) fprintf(f, "%s%d", i ? ", " : "", c->width[i]);
    fprintf(f, "]}\n");
    fclose(f);
}

/* DIR/PART with weights of these shapes, which are freed; remove with wan_folder_remove. */
static inline wan_folder cog_folder_make(esa_ctx *ctx, const char *part, wan_shapes shapes)
{
    wan_folder f = { .top = scratch_make() };
    snprintf(f.part.dir, sizeof f.part.dir, "%.200s/%s", f.top.dir, part);
    assert_int_equal(mkdir(f.part.dir, 0755), 0);
    wan_write_weights(ctx, scratch_path(&f.part, "diffusion_pytorch_model.safetensors"),
                      shapes.list, shapes.count);
    free(shapes.list);
    return f;
}

#endif
