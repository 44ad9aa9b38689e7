/* esa_video.h - the engine: a diffusers model folder and a prompt become frames. Library
 libesa_video.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The shortest use:
 *
 *     esa_ctx *ctx;  esa_model *model;  esa_frames *frames;
 *     esa_generate_params p = esa_generate_params_default();
 *     p.prompt = "a red ball rolls to the right over a blue floor";
 *     esa_ctx_create(&ctx, NULL);
 *     esa_model_open(ctx, &model, "models/wan-tiny", NULL);        // config, names and shapes are
 checked before anything is read
 // text encoder, denoising loop, decoder
 *     esa_generate(model, &frames, &p, NULL);
 *     esa_frames_save(ctx, frames, "ball.mp4", NULL);
 *     esa_frames_free(frames);  esa_model_free(model);  esa_ctx_free(ctx);
 *
 * The rules of esa.h hold here too: a status and one sentence in the ctx, nothing printed, objects
 NULL after a failure, params
 * with struct_size, same inputs same bits whatever the number of threads. libesa and libesa_video
 must come from the same build.
 *
 * A model computes with threads of its own, as many as its ctx has. While one of its calls runs,
 the ctx is busy. Strings in params
 * are UTF-8, borrowed for the call. CPU arithmetic is f32. */
#ifndef ESA_VIDEO_H
#define ESA_VIDEO_H

#include "esa_frames.h"
#include "esa_session.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_model esa_model;

/* Sizes of this header's structs in the order below; a binding compares them at import. */
enum {
    ESA_VIDEO_ABI_MODEL_PARAMS = 0,
    ESA_VIDEO_ABI_MODEL_INFO,
    ESA_VIDEO_ABI_PROGRESS,
    ESA_VIDEO_ABI_GENERATE_PARAMS,
    ESA_VIDEO_ABI_GENERATE_STATS,
    ESA_VIDEO_ABI_FRAMES_INFO,
    ESA_VIDEO_ABI_SAVE_PARAMS,
    ESA_VIDEO_ABI_METRICS,
    ESA_VIDEO_ABI_LOAD_PARAMS,
    ESA_VIDEO_ABI_DECODE_PARAMS,
    ESA_VIDEO_ABI_COUNT
};
ESA_API const uint32_t *esa_video_abi(void); /* ESA_VIDEO_ABI_COUNT entries, static storage */

/* ---------------------------------------------------------------- models */

/* How weights are held. AUTO: f32 for parts below 1 GB, else FILE for 16-bit files and BF16 for f32
 * files. FILE: mapped, converted while used. F32, BF16: tensors of another type are converted once
 * while reading (those of the same type are used where they lie); the file's pages are given back
 * piece by piece, so that file and copy never stand side by side. The few tensors that Wan keeps in
 * f32 are held in f32 always. */
enum { ESA_HOLD_AUTO = 0, ESA_HOLD_FILE = 1, ESA_HOLD_F32 = 2, ESA_HOLD_BF16 = 3 };
/* Parts of a model, as bits. */
enum { ESA_PART_TRANSFORMER = 1, ESA_PART_VAE = 2, ESA_PART_TEXT = 4, ESA_PART_ALL = 7 };

struct esa_progress; /* below */

typedef struct esa_model_params {
    uint32_t struct_size;
    int32_t hold;  /* ESA_HOLD_* (AUTO) */
    int32_t parts; /* ESA_PART_* that are needed and checked (ALL); the others may be missing */
    int32_t reserved0;
    /* NULL, or called once per tensor that is missing, unexpected or of another shape, and once
     * per part with its totals. The sentence in the ctx names the first ones only */
    void (*report)(void *user, const char *line);
    void *report_user;
    /* NULL, or called while weights are read: stage LOAD of each part, megabytes done of total;
     * a return other than 0 cancels: ESA_ERR_STATE */
    int32_t (*progress)(void *user, const struct esa_progress *progress);
    void *progress_user;
    int64_t reserved[2];
} esa_model_params;

ESA_API esa_model_params esa_model_params_default(void);

/* Reads the configs and the headers of all weight files and compares every name and shape with what
 * the configs ask for; reads no weights. ESA_ERR_IO, ESA_ERR_FORMAT or ESA_ERR_MISMATCH with a
 * sentence that names file or tensor. */
ESA_API esa_status esa_model_check(esa_ctx *ctx, const char *folder,
                                   const esa_model_params *params);
/* Checks, then loads transformer and VAE; the text encoder is loaded when first needed. ctx is kept
 * and must outlive the model. */
ESA_API esa_status esa_model_open(esa_ctx *ctx, esa_model **model, const char *folder,
                                  const esa_model_params *params);
ESA_API void esa_model_free(esa_model *model);

typedef struct esa_model_info { /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t layers, heads, head_dim, ffn;
    int32_t latent_channels;
    int32_t patch[3];  /* t, h, w, in latents */
    int32_t factor[3]; /* pixels per latent in t, h, w */
    int32_t text_dim;
    int32_t text_tokens;                  /* rows of text the transformer sees */
    int32_t frames, height, width, steps; /* defaults of this model */
    int32_t reserved0;
    double guidance, fps;
    int64_t parameters[3]; /* transformer, VAE, text encoder */
    int64_t held_bytes;    /* memory of weights held now, mapped files not counted */
    int64_t mapped_bytes;
    char name[128];       /* of the folder, or of the model where its shape is known */
    char config_hash[80]; /* goes into mask files */
    int64_t reserved[4];
} esa_model_info;

ESA_API esa_status esa_model_get_info(const esa_model *model, esa_model_info *info);
/* The config_hash of a diffusers folder by itself, text into hash[80]; also of models that the
 * engine does not run. What diffusers records is then told by the same hash as what the engine
 * records. */
ESA_API esa_status esa_model_config_hash(esa_ctx *ctx, char *hash, const char *folder);

/* ---------------------------------------------------------------- generation */

enum { ESA_STAGE_TEXT = 0, ESA_STAGE_DENOISE = 1, ESA_STAGE_DECODE = 2, ESA_STAGE_LOAD = 3 };

typedef struct esa_progress {
    uint32_t struct_size;
    int32_t stage; /* ESA_STAGE_* */
    /* denoise: steps; decode: latent frames; text: prompts; load: megabytes */
    int32_t done, total;
    double seconds;      /* since the call began */
    double unit_seconds; /* mean seconds of one unit of this stage so far; 0: none done yet */
    double density;      /* realised density of the sparse calls so far; NaN: none yet */
    int64_t reserved[4];
} esa_progress;

/* The scheduler. MODEL: what the folder names, with its own settings. UNIPC uses the sigmas of
 * diffusers 0.37 and newer, UNIPC_036 those of diffusers up to 0.36 and of Wan's own code. */
enum {
    ESA_SCHEDULER_MODEL = 0,
    ESA_SCHEDULER_UNIPC = 1,
    ESA_SCHEDULER_UNIPC_036 = 2,
    ESA_SCHEDULER_EULER = 3
};

typedef struct esa_generate_params {
    uint32_t struct_size;
    /* 0: the model's default. height and width must be multiples of factor * patch; frames is
     * rounded down to 1 + k * factor[0], as diffusers does */
    int32_t frames, height, width;
    int32_t steps;               /* 0: the model's default */
    int32_t scheduler;           /* ESA_SCHEDULER_* (MODEL) */
    int32_t max_text_tokens;     /* 0: 512, as the pipeline */
    int32_t decode;              /* 1: decode to frames (1); 0: only latents, *frames stays NULL */
    uint64_t seed;               /* of torch's CPU generator: the same noise as in diffusers */
    double guidance;             /* NaN: the model's default; <= 1: no negative branch */
    double flow_shift;           /* 0: what the scheduler's config says */
    const char *prompt;          /* NULL needs prompt_embeds */
    const char *negative_prompt; /* NULL: "" */
    /* safetensors file with prompt_embeds [tokens, text_dim] (and negative_prompt_embeds with
     * guidance): skips the text encoder */
    const char *prompt_embeds;
    const char *save_embeds; /* writes such a file */
    /* safetensors file with latents [C,T,H,W] to start from instead of noise */
    const char *latents;
    const char *save_latents; /* writes the final latents */
    const char *masks;        /* mask file of session mode CACHED */
    const char *record;       /* recording file of session mode RECORD: added to if it exists */
    int32_t vae_tile;         /* pixels of a decoder tile, 0: whole frames */
    int32_t reserved0;
    /* How self-attention runs: mode, select (selector, budget, blocks, order), attention (tail),
     * warm-up, dense layers, refresh. The engine fills in layers, steps, branches, model,
     * config_hash, masks, the grid and order_applied. */
    esa_session_params session;
    /* NULL, or called in the calling thread after every unit; a return other than 0 cancels:
     * ESA_ERR_STATE, nothing is written */
    int32_t (*progress)(void *user, const esa_progress *progress);
    void *progress_user;
    /* NULL, or called once between the last step and the decoder: here figures of single layers,
     * steps and heads can be read from the session, nothing else done with it */
    void (*denoised)(void *user, const esa_session *session);
    void *denoised_user;
    int64_t reserved[6];
} esa_generate_params;

/* Session mode DENSE. */
ESA_API esa_generate_params esa_generate_params_default(void);

/* What esa_generate would run. Checks the settings and fills in what they leave open: frames,
 * height, width, steps, guidance, and in session modes ONLINE and RECORD the order and the block
 * sizes of the selection. *tokens (may be NULL) receives the tokens of self-attention. Prompt and
 * files are not looked at. On failure params is unchanged. */
ESA_API esa_status esa_generate_resolve(esa_model *model, esa_generate_params *params,
                                        int64_t *tokens);

typedef struct esa_generate_stats { /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t frames, height, width, steps; /* as run */
    int32_t tokens;                       /* of self-attention */
    double text_seconds, denoise_seconds, decode_seconds, seconds;
    double attention_seconds; /* of denoise: self-attention, selection included */
    double gemm_seconds;      /* of denoise: matrix products */
    int64_t peak_bytes; /* the most memory the call held, weights included, mapped files not */
    esa_session_stats session;
    int64_t reserved[4];
} esa_generate_stats;

/* One video. On success *frames is the caller's (NULL with decode 0). stats may be NULL. */
ESA_API esa_status esa_generate(esa_model *model, esa_frames **frames,
                                const esa_generate_params *params, esa_generate_stats *stats);

typedef struct esa_decode_params {
    uint32_t struct_size;
    int32_t vae_tile;    /* as in esa_generate_params */
    const char *latents; /* safetensors file with latents [C,T,H,W], as save_latents writes it */
    /* as in esa_generate_params; stage DECODE only */
    int32_t (*progress)(void *user, const esa_progress *progress);
    void *progress_user;
    int64_t reserved[4];
} esa_decode_params;

ESA_API esa_decode_params esa_decode_params_default(void);
/* Latents become frames; the model needs its VAE only (ESA_PART_VAE). On success *frames is the
 * caller's. */
ESA_API esa_status esa_decode(esa_model *model, esa_frames **frames,
                              const esa_decode_params *params);

#ifdef __cplusplus
}
#endif
#endif
