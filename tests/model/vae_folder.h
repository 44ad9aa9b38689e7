/* vae_folder.h - makes VAE folders for tests: the names and shapes of a Wan decoder, written here a
 * second time, with made-up weights.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_VAE_FOLDER_H
#define ESA_TESTS_MODEL_VAE_FOLDER_H

#include "model/wan_folder.h"

static inline void shapes_conv(wan_shapes *s, int64_t out, int64_t in, int64_t kt, int64_t kh,
                               int64_t kw, const char *name)
{
    char full[160];
    snprintf(full, sizeof full, "%.140s.weight", name);
    if (kt)
        shapes_add(s, 5, out, in, kt, kh, kw, full);
    else
        shapes_add(s, 4, out, in, kh, kw, 0, full);
    snprintf(full, sizeof full, "%.140s.bias", name);
    shapes_add(s, 1, out, 0, 0, 0, 0, full);
}

static inline void shapes_res(wan_shapes *s, int64_t in, int64_t out, const char *prefix)
{
    char name[160];
    snprintf(name, sizeof name, "%s.norm1.gamma", prefix);
    shapes_add(s, 4, in, 1, 1, 1, 0, name);
    snprintf(name, sizeof name, "%s.conv1", prefix);
    shapes_conv(s, out, in, 3, 3, 3, name);
    snprintf(name, sizeof name, "%s.norm2.gamma", prefix);
    shapes_add(s, 4, out, 1, 1, 1, 0, name);
    snprintf(name, sizeof name, "%s.conv2", prefix);
    shapes_conv(s, out, out, 3, 3, 3, name);
    snprintf(name, sizeof name, "%s.conv_shortcut", prefix);
    if (in != out) shapes_conv(s, out, in, 1, 1, 1, name);
}

/* 108 tensors for Wan2.1. */
static inline wan_shapes vae_decoder_shapes(const esa_wan_vae_config *c)
{
    wan_shapes s = { 0 };
    char name[128];
    const int64_t deep = (int64_t)c->decoder_base_dim * c->dim_mult[c->levels - 1];
    shapes_conv(&s, c->z_dim, c->z_dim, 1, 1, 1, "post_quant_conv");
    shapes_conv(&s, deep, c->z_dim, 3, 3, 3, "decoder.conv_in");
    shapes_res(&s, deep, deep, "decoder.mid_block.resnets.0");
    shapes_add(&s, 3, deep, 1, 1, 0, 0, "decoder.mid_block.attentions.0.norm.gamma");
    shapes_conv(&s, 3 * deep, deep, 0, 1, 1, "decoder.mid_block.attentions.0.to_qkv");
    shapes_conv(&s, deep, deep, 0, 1, 1, "decoder.mid_block.attentions.0.proj");
    shapes_res(&s, deep, deep, "decoder.mid_block.resnets.1");
    int64_t in = deep;
    for (int32_t i = 0; i < c->levels; i++) {
        const int64_t out = (int64_t)c->decoder_base_dim * c->dim_mult[c->levels - 1 - i];
        for (int32_t r = 0; r <= c->res_blocks; r++) {
            snprintf(name, sizeof name, "decoder.up_blocks.%d.resnets.%d", i, r);
            shapes_res(&s, r ? out : in, out, name);
        }
        in = out / 2;
        if (i + 1 < c->levels) {
            snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.resample.1", i);
            shapes_conv(&s, in, out, 0, 3, 3, name);
        }
        if (i + 1 < c->levels && c->temporal[c->levels - 2 - i]) {
            snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.time_conv", i);
            shapes_conv(&s, 2 * out, out, 3, 1, 1, name);
        }
    }
    snprintf(name, sizeof name, "decoder.norm_out.gamma");
    shapes_add(&s, 4, (int64_t)c->decoder_base_dim * c->dim_mult[0], 1, 1, 1, 0, name);
    shapes_conv(&s, 3, (int64_t)c->decoder_base_dim * c->dim_mult[0], 3, 3, 3, "decoder.conv_out");
    return s;
}

static inline void vae_write_config(const char *path, const esa_wan_vae_config *c)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f,
            "{\"_class_name\": \"AutoencoderKLWan\", \"base_dim\": %d, \"decoder_base_dim\": %d, "
            "\"z_dim\": %d, \"num_res_blocks\": %d,\n"
            "\"attn_scales\": [], \"scale_factor_temporal\": %d, \"scale_factor_spatial\": %d, "
            "\"dim_mult\": [",
            c->base_dim, c->decoder_base_dim, c->z_dim, c->res_blocks, c->factor_t, c->factor_s);
    for (int32_t i = 0; i < c->levels; i++) fprintf(f, "%s%d", i ? ", " : "", c->dim_mult[i]);
    fprintf(f, "], \"temperal_downsample\": [");
    for (int32_t i = 0; i + 1 < c->levels; i++)
        fprintf(f, "%s%s", i ? ", " : "", c->temporal[i] ? "true" : "false");
    fprintf(f, "], \"latents_mean\": [");
    for (int32_t i = 0; i < c->z_dim; i++) fprintf(f, "%s%.9g", i ? ", " : "", c->mean[i]);
    fprintf(f, "], \"latents_std\": [");
    for (int32_t i = 0; i < c->z_dim; i++) fprintf(f, "%s%.9g", i ? ", " : "", c->std[i]);
    fprintf(f, "]}\n");
    fclose(f);
}

/* DIR/vae with config and weights; remove with wan_folder_remove. */
static inline wan_folder vae_folder_make(esa_ctx *ctx, const esa_wan_vae_config *c)
{
    wan_folder f = { .top = scratch_make() };
    snprintf(f.part.dir, sizeof f.part.dir, "%.200s/vae", f.top.dir);
    assert_int_equal(mkdir(f.part.dir, 0755), 0);
    vae_write_config(scratch_path(&f.part, "config.json"), c);
    wan_shapes s = vae_decoder_shapes(c);
    wan_write_weights(ctx, scratch_path(&f.part, "diffusion_pytorch_model.safetensors"), s.list,
                      s.count);
    free(s.list);
    return f;
}

#endif
