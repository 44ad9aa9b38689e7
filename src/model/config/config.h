/* config.h - reads the JSON files of a diffusers model folder into checked structs. Does not open
 * weights.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Reading is strict. A file must be one JSON object. A key is an error if it is missing and
 * diffusers has no default, if it has the wrong type, or if it is out of the engine's range; sizes
 * are bounded so that no product of them overflows 2^62. The message names file, key, value and
 * what was expected. Settings that the engine does not run (image conditioning, other prediction
 * types) are refused, not ignored. Unknown keys are ignored, because every new version of diffusers
 * adds some.
 *
 * All functions fail with ESA_ERR_IO, ESA_ERR_FORMAT (not such a file) or ESA_ERR_UNSUPPORTED
 * (valid, but not supported), and one message in ctx. */
#ifndef ESA_MODEL_CONFIG_H
#define ESA_MODEL_CONFIG_H

#include "base/status.h"
#include "ctx/ctx.h"

#define ESA_CONFIG_MAX_LEVELS 8
#define ESA_CONFIG_MAX_LATENT 256

/* WanTransformer3DModel. d = heads * head_dim. */
typedef struct esa_wan_config {
    int32_t heads, head_dim, layers, ffn;
    int32_t in_channels, out_channels;
    int32_t patch[3];
    int32_t text_dim, freq_dim;
    int32_t rope_max;   /* longest side of the grid */
    int32_t image_dim;  /* features of an image encoder; 0: no image */
    int32_t cross_norm; /* cross_attn_norm: norm2 has weight and bias; 0: it is the identity */
    double eps;
    char hash[80]; /* esa_json_hash of the file; stored in mask files */
} esa_wan_config;

/* AutoencoderKLWan. */
typedef struct esa_wan_vae_config {
    int32_t base_dim, decoder_base_dim, z_dim, levels, res_blocks;
    int32_t dim_mult[ESA_CONFIG_MAX_LEVELS];
    int32_t temporal[ESA_CONFIG_MAX_LEVELS]; /* temperal_downsample, [levels - 1] */
    int32_t attn_scales;                     /* number of entries; only 0 is supported */
    int32_t in_channels, out_channels;
    int32_t encoder;            /* 1: the encoder is used too; set by the caller */
    int32_t factor_t, factor_s; /* checked against temporal and levels */
    double mean[ESA_CONFIG_MAX_LATENT], std[ESA_CONFIG_MAX_LATENT]; /* [z_dim] */
} esa_wan_vae_config;

/* CogVideoXTransformer3DModel of version 1.0. d = heads * head_dim; the feed-forward has 4 d. */
typedef struct esa_cog_config {
    int32_t heads, head_dim, layers;
    int32_t in_channels, out_channels;
    int32_t patch; /* side of a patch; one frame deep */
    int32_t text_dim, time_dim;
    int32_t max_text;           /* rows of text; with sums as positions there are always so many */
    int32_t sample_h, sample_w; /* latents of the model's own size, over which positions are laid */
    int32_t attention_bias, patch_bias; /* 1: there are such biases */
    int32_t rotary;                     /* 1: positions are rotations; 0: they are added */
    double spatial_scale, temporal_scale, eps;
    char hash[80];
} esa_cog_config;

/* AutoencoderKLCogVideoX. */
typedef struct esa_cog_vae_config {
    int32_t levels, width[ESA_CONFIG_MAX_LEVELS]; /* block_out_channels */
    int32_t z_dim, layers, groups;
    int32_t factor_t, factor_s;
    int32_t sample_h, sample_w; /* pixels */
    double eps, scaling;
} esa_cog_vae_config;

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

/* T5EncoderModel and UMT5EncoderModel. */
typedef struct esa_umt5_config {
    int32_t vocab, d_model, d_kv, heads, layers, ff;
    int32_t buckets, max_distance;
    int32_t pad, eos;
    int32_t shared_bias; /* 1: all layers use the first one's biases by distance (T5) */
    /* How the family treats prompts; set by the caller. cleans 1: it cleans them first (prompt.h);
     * pads 1: it encodes the padding too, without a mask, else the rows of padding are zeros. */
    int32_t cleans, pads;
    double eps;
} esa_umt5_config;

/* UniPCMultistepScheduler with flow sigmas, FlowMatchEulerDiscreteScheduler, or one of CogVideoX's.
 * The caller may override kind by another of its group. */
enum {
    ESA_SCHED_UNIPC = 0,
    ESA_SCHED_UNIPC_036,
    ESA_SCHED_EULER,
    ESA_SCHED_DDIM, /* CogVideoXDDIMScheduler */
    ESA_SCHED_DPM   /* CogVideoXDPMScheduler */
};
/* What the model's output means: the velocity of a flow, or "v" of a diffusion. */
enum { ESA_SCHED_GROUP_FLOW = 0, ESA_SCHED_GROUP_V };
enum { ESA_SPACING_TRAILING = 0, ESA_SPACING_LEADING, ESA_SPACING_LINSPACE };
typedef struct esa_sched_config {
    int32_t kind;        /* ESA_SCHED_* */
    int32_t train_steps; /* num_train_timesteps */
    int32_t order;       /* UniPC: solver_order, 1 or 2 */
    double shift;        /* flow_shift, or shift */
    int32_t to_zero;     /* Euler: sigmas run from 1 to 0, as HunyuanVideoPipeline asks for */
    /* Flow schedulers: u of each step (sched.h) instead of the rule of the kind, which steps has as
     * many of; the caller's. NULL: the rule. */
    const double *list;
    /* DDIM and DPM */
    double beta_first, beta_last; /* of a scaled linear schedule */
    double snr_shift;
    int32_t zero_snr;      /* the last step of training has no signal */
    int32_t last_is_clean; /* set_alpha_to_one */
    int32_t spacing;       /* ESA_SPACING_* */
    int32_t offset;        /* of timesteps with ESA_SPACING_LEADING */
} esa_sched_config;

/* model_index.json: the classes of the folder's parts. */
typedef struct esa_model_index {
    char pipeline[64], transformer[64], vae[64], text_encoder[64], tokenizer[64], scheduler[64];
    /* parts that only some families have; empty if they are missing or null */
    double boundary; /* boundary_ratio, from which transformer_2 runs; 0: none */
    char transformer_2[64], text_encoder_2[64], tokenizer_2[64], image_encoder[64];
} esa_model_index;

esa_status esa_config_index(esa_ctx *ctx, esa_model_index *index, const char *path);
esa_status esa_config_wan(esa_ctx *ctx, esa_wan_config *config, const char *path);
esa_status esa_config_wan_vae(esa_ctx *ctx, esa_wan_vae_config *config, const char *path);
esa_status esa_config_umt5(esa_ctx *ctx, esa_umt5_config *config, const char *path);
esa_status esa_config_t5(esa_ctx *ctx, esa_umt5_config *config, const char *path);
esa_status esa_config_cog(esa_ctx *ctx, esa_cog_config *config, const char *path);
esa_status esa_config_cog_vae(esa_ctx *ctx, esa_cog_vae_config *config, const char *path);
esa_status esa_config_hunyuan(esa_ctx *ctx, esa_hunyuan_config *config, const char *path);
esa_status esa_config_hunyuan_vae(esa_ctx *ctx, esa_hunyuan_vae_config *config, const char *path);
/* skip becomes 2: diffusers takes the third state from the end. */
esa_status esa_config_llama(esa_ctx *ctx, esa_causal_config *config, const char *path);
esa_status esa_config_clip_text(esa_ctx *ctx, esa_causal_config *config, const char *path);
esa_status esa_config_sched(esa_ctx *ctx, esa_sched_config *config, const char *path);
/* The same for text in memory, for fuzzing; label is its name in messages. */
esa_status esa_config_wan_memory(esa_ctx *ctx, esa_wan_config *config, const char *text,
                                 int64_t bytes, const char *label);

/* Writes folder/name to a new string of *bytes from ctx's allocator; free it with esa_mem_free. */
esa_status esa_path_join(esa_ctx *ctx, char **path, int64_t *bytes, const char *folder,
                         const char *name);

#endif
