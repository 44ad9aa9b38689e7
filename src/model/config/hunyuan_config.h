/* hunyuan_config.h - reads the JSON files of a HunyuanVideo folder into checked structs, by the
 * rules of config.h.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_HUNYUAN_CONFIG_H
#define ESA_MODEL_HUNYUAN_CONFIG_H

#include "model/config/config.h"

/* HunyuanVideoTransformer3DModel. d = heads * head_dim. */
typedef struct esa_hunyuan_config {
    int32_t heads, head_dim, ffn;
    int32_t doubles, singles, refiners; /* num_layers, num_single_layers, num_refiner_layers */
    int32_t in_channels, out_channels;
    int32_t patch[3];
    int32_t text_dim, pooled_dim;
    int32_t guidance; /* guidance_embeds */
    int32_t axis[3];  /* rope_axes_dim: channels of a head that turn with t, h, w */
    double theta;
    char hash[80]; /* esa_json_hash of the file; stored in mask files */
} esa_hunyuan_config;

/* AutoencoderKLHunyuanVideo, its decoder. */
typedef struct esa_hunyuan_vae_config {
    int32_t z_dim, levels, res_blocks, groups;
    int32_t width[ESA_CONFIG_MAX_LEVELS]; /* block_out_channels, encoder side first */
    int32_t attention;                    /* mid_block_add_attention */
    int32_t factor_t, factor_s;
    double scaling;
} esa_hunyuan_vae_config;

/* LlamaModel, or CLIPTextModel. */
enum { ESA_CAUSAL_LLAMA = 0, ESA_CAUSAL_CLIP };
typedef struct esa_causal_config {
    int32_t kind; /* ESA_CAUSAL_* */
    int32_t vocab, d, heads, kv_heads, head_dim, layers, ff;
    int32_t skip;      /* layers at the end that are not run */
    int32_t positions; /* CLIP: rows of the table of positions */
    int32_t eos;       /* CLIP: whose state is the pooled vector; -1: the largest id of a text */
    double eps, theta;
} esa_causal_config;

esa_status esa_config_hunyuan(esa_ctx *ctx, esa_hunyuan_config *config, const char *path);
esa_status esa_config_hunyuan_vae(esa_ctx *ctx, esa_hunyuan_vae_config *config, const char *path);
/* skip becomes 2: diffusers takes the third state from the end. */
esa_status esa_config_llama(esa_ctx *ctx, esa_causal_config *config, const char *path);
esa_status esa_config_clip_text(esa_ctx *ctx, esa_causal_config *config, const char *path);

#endif
