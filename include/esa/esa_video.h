/* esa_video.h - the engine: turns a prompt into frames with a model folder of diffusers. Library
 * libesa_video.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The shortest use:
 *
 *     esa_ctx *ctx;  esa_model *model;  esa_frames *frames;
 *     esa_generate_params p = esa_generate_params_default();
 *     p.prompt = "a red ball rolls to the right over a blue floor";
 *     esa_ctx_create(&ctx, NULL);
 *     esa_model_open(ctx, &model, "models/wan-tiny", NULL);  // checks configs, names and shapes
 *     esa_generate(model, &frames, &p, NULL);                // text encoder, denoising, decoder
 *     esa_frames_save(ctx, frames, "ball.mp4", NULL);
 *     esa_frames_free(frames);  esa_model_free(model);  esa_ctx_free(ctx);
 *
 * The rules of esa.h hold here too: a status and one message in the ctx, nothing printed, objects
 * NULL after a failure, params with struct_size, and the same bits for the same inputs on any
 * number of threads. libesa and libesa_video must come from the same build.
 *
 * A model computes with the threads of its ctx. While one of its calls runs, other calls on the ctx
 * return ESA_ERR_STATE.
 *
 * Strings in params are UTF-8 and are only read during the call. The CPU computes in f32, a GPU in
 * bf16 with f32 where diffusers keeps it. */
#ifndef ESA_VIDEO_H
#define ESA_VIDEO_H

#include "esa_frames.h"
#include "esa_session.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_model esa_model;

/* Sizes of the structs of this header and of esa_frames.h, in this order. A binding compares them
 * when it loads. */
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
    ESA_VIDEO_ABI_PREVIEW,
    ESA_VIDEO_ABI_COUNT
};
ESA_API const uint32_t *esa_video_abi(void); /* ESA_VIDEO_ABI_COUNT entries, static storage */
/* The build id of libesa_video, which works only with a libesa of the same esa_build_id. */
ESA_API const char *esa_video_build_id(void);

/* ---------------------------------------------------------------- models */

/* How weights are kept in memory:
 *  - AUTO: F32 for parts below 1 GB; for larger ones FILE if the file has 16 bits or fewer, else
 *    BF16.
 *  - FILE: the file stays mapped, and weights are converted while they are used. Those of GGUF
 *    files keep their blocks; fp8 becomes BF16.
 *  - F32, BF16: tensors of another type are converted once, while reading. The pages of the file
 *    are given back piece by piece, so that file and copy are never in memory together. Tensors
 *    that have the type already are used from the mapped file.
 * A file of weights must not become shorter while the model is open: the process would end by
 * SIGBUS (esa_tensors.h). Replace it by renaming.
 * Vectors, and tensors that Wan keeps in f32, are always f32. */
enum { ESA_HOLD_AUTO = 0, ESA_HOLD_FILE = 1, ESA_HOLD_F32 = 2, ESA_HOLD_BF16 = 3 };
/* Parts of a model, as bits. */
enum { ESA_PART_TRANSFORMER = 1, ESA_PART_VAE = 2, ESA_PART_TEXT = 4, ESA_PART_ALL = 7 };

/* How the linear layers of the transformer run on a GPU. F8 is E4M3 with one scale for each output
 * of a weight and each token; the first and the last block and the embedders stay in BF16. It needs
 * compute capability 9.0. F8_FAST is F8 whose sums the GPU may keep with fewer bits than f32 has,
 * which is faster, and less exact where sums are long. */
enum { ESA_LINEAR_BF16 = 0, ESA_LINEAR_F8 = 1, ESA_LINEAR_F8_FAST = 2 };

/* The type that the CPU multiplies in. BF16 holds and multiplies the weights of linear layers and
 * of the decoder's convolutions in bf16, and computes self-attention in bf16; sums, norms and the
 * rest stay in f32. It needs a processor with bf16 instructions (else ESA_ERR_UNSUPPORTED) and a
 * hold other than F32. AUTO is BF16 where that is faster (AMX, AVX-512 BF16 on AMD) and hold is not
 * F32, else F32. DEFAULT is F32. A GPU computes in bf16; there F32 is ESA_ERR_UNSUPPORTED. */
enum { ESA_COMPUTE_DEFAULT = 0, ESA_COMPUTE_F32 = 1, ESA_COMPUTE_BF16 = 2, ESA_COMPUTE_AUTO = 3 };

struct esa_progress; /* below */

/* A LoRA file: what it adds to the transformer is multiplied by scale. */
typedef struct esa_lora {
    const char *file; /* safetensors, with the names of diffusers (PEFT), kohya or ComfyUI */
    double scale;     /* 1: as it was trained */
} esa_lora;
enum { ESA_LORA_MOST = 16 }; /* files that a model can have at once */

typedef struct esa_model_params {
    uint32_t struct_size;
    int32_t hold;   /* ESA_HOLD_* (AUTO) */
    int32_t parts;  /* ESA_PART_* bits to check and use (ALL); other parts may be missing */
    int32_t device; /* ESA_DEVICE_* that computes (CPU); CUDA: the GPU of the ctx */
    int32_t linear; /* GPU: ESA_LINEAR_* (BF16) */
    /* 1: random weights of true shapes, for measurements. The folder is then the name of a shape:
     * wan-1.3b-480p, wan-1.3b-720p, wan-14b-480p, wan-14b-720p, cogvideox-2b, cogvideox-5b,
     * hunyuan-544p or hunyuan-720p. There is no text encoder; without prompt_embeds the embeddings
     * are random too. (0) */
    int32_t random;
    /* F8, F8_FAST: names of more tensors that stay in BF16: patterns with *, separated by commas
     * (NULL) */
    const char *keep;
    /* GPU: bytes that weights, activations and scratch may take together; 0: what is free. Weights
     * that do not fit are copied from host memory when they are used. */
    int64_t max_memory;
    /* Called for each tensor that is missing, unexpected or has the wrong shape, and once per part
     * with its totals; may be NULL. The message in the ctx names only the first ones. */
    void (*report)(void *user, const char *line);
    void *report_user;
    /* Called while weights are read (stage LOAD, in megabytes, for each part); may be NULL. A
     * return value other than 0 cancels the call with ESA_ERR_STATE. */
    int32_t (*progress)(void *user, const struct esa_progress *progress);
    void *progress_user;
    /* The transformer's weights in one file instead of those in the folder: safetensors or GGUF,
     * with the names of diffusers, of the model's authors or of ComfyUI. The folder still has the
     * configurations and the other parts. Only read during the call; NULL: none. */
    const char *transformer;
    /* LoRA files that are merged into the transformer while it is loaded, in this order. One that
     * does not fit fails with ESA_ERR_MISMATCH and the first names. Only read during the call;
     * NULL: none. */
    const esa_lora *lora;
    int32_t lora_count;
    /* As lora_count, transformer and lora, for the second transformer of Wan 2.2 A14B. */
    int32_t lora_2_count;
    const char *transformer_2;
    const esa_lora *lora_2;
    int32_t compute; /* ESA_COMPUTE_* (DEFAULT) */
    int32_t reserved0;
    int64_t reserved[3];
} esa_model_params;

ESA_API esa_model_params esa_model_params_default(void);

/* Reads the configs and the headers of all weight files, and compares every name and shape with
 * what the configs ask for. Reads no weights. Fails with ESA_ERR_IO, ESA_ERR_FORMAT or
 * ESA_ERR_MISMATCH; the message names the file or tensor. */
ESA_API esa_status esa_model_check(esa_ctx *ctx, const char *folder,
                                   const esa_model_params *params);
/* Says what a weight file is, without a model folder: safetensors or GGUF, its types, names and
 * number of tensors, and the model that its names and shapes belong to. params->report gets the
 * lines; other params are not used. Succeeds if the engine runs that model and every name and shape
 * is right. Fails with ESA_ERR_UNSUPPORTED for other files, or as esa_model_check. */
ESA_API esa_status esa_model_check_file(esa_ctx *ctx, const char *path,
                                        const esa_model_params *params);
/* Checks the folder, then loads the transformer and the VAE. The text encoder is loaded when it is
 * first needed. On success the caller owns *model and frees it with esa_model_free. The model keeps
 * ctx, which must outlive it. */
ESA_API esa_status esa_model_open(esa_ctx *ctx, esa_model **model, const char *folder,
                                  const esa_model_params *params);
ESA_API void esa_model_free(esa_model *model);

typedef struct esa_model_info { /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t layers, heads, head_dim, ffn;
    int32_t latent_channels;
    int32_t patch[3];  /* latents per token in t, h, w */
    int32_t factor[3]; /* pixels per latent in t, h, w */
    int32_t text_dim;
    int32_t text_tokens;                  /* rows of text that the transformer reads */
    int32_t frames, height, width, steps; /* defaults of this model */
    int32_t image;                        /* 1: it makes a video from a picture, and needs one */
    double guidance, fps;
    int64_t parameters[3]; /* transformer, VAE, text encoder */
    int64_t held_bytes;    /* weights in memory now, without mapped files */
    int64_t mapped_bytes;  /* weights in mapped files */
    char name[128];        /* the model if its shape is known, else the folder */
    char config_hash[80];  /* stored in mask files */
    /* The transformer on a GPU; all 0 on the CPU. Blocks that do not stay there are copied for each
     * forward. */
    int32_t device, resident_blocks;
    int64_t device_bytes;   /* GPU memory of the weights */
    int64_t streamed_bytes; /* copied to the GPU for each forward */
    /* Models with two transformers: the default guidance of the second one, and the boundary: the
     * second one runs the steps whose timestep is below boundary * 1000. 0: there is only one. */
    double guidance_2, boundary;
    int32_t compute; /* ESA_COMPUTE_F32 or BF16 */
    int32_t reserved1;
    int64_t reserved[3];
} esa_model_info;

ESA_API esa_status esa_model_get_info(const esa_model *model, esa_model_info *info);
/* Writes the config_hash of a diffusers folder into hash[80], also for models that the engine
 * cannot run. Recordings made with diffusers and with the engine carry the same hash. */
ESA_API esa_status esa_model_config_hash(esa_ctx *ctx, char *hash, const char *folder);

/* ---------------------------------------------------------------- generation */

enum { ESA_STAGE_TEXT = 0, ESA_STAGE_DENOISE = 1, ESA_STAGE_DECODE = 2, ESA_STAGE_LOAD = 3 };

typedef struct esa_progress {
    uint32_t struct_size;
    int32_t stage; /* ESA_STAGE_* */
    /* The unit is a step (DENOISE), a latent frame (DECODE), a prompt (TEXT) or a megabyte (LOAD).
     */
    int32_t done, total;
    double seconds;      /* since the call began */
    double unit_seconds; /* mean time of a unit of this stage so far; 0 before the first */
    double density;      /* density of the sparse calls so far; NaN before the first */
    int64_t reserved[4];
} esa_progress;

/* What the video will look like, shown while it is made: one frame of the present estimate, small.
 */
typedef struct esa_preview {
    uint32_t struct_size;
    int32_t step, steps;   /* steps done, of all */
    int32_t height, width; /* in pixels; the longer side is at most preview_side */
    int32_t reserved0;
    const uint8_t *rgb; /* [height][width][3]; lives until the callback returns */
    int64_t reserved[3];
} esa_preview;

/* The scheduler. MODEL is the one the folder names, with its settings. UNIPC uses the sigmas of
 * diffusers 0.37 and newer; UNIPC_036 uses those of diffusers 0.36 and older and of Wan's code.
 * These and EULER are for flow models. DDIM and DPM are CogVideoX's; DPM adds noise at each step,
 * drawn from the generator that made the first latents. */
enum {
    ESA_SCHEDULER_MODEL = 0,
    ESA_SCHEDULER_UNIPC = 1,
    ESA_SCHEDULER_UNIPC_036 = 2,
    ESA_SCHEDULER_EULER = 3,
    ESA_SCHEDULER_DDIM = 4,
    ESA_SCHEDULER_DPM = 5
};

typedef struct esa_generate_params {
    uint32_t struct_size;
    /* 0: the model's default. height and width must be multiples of factor * patch. frames is
     * rounded down to 1 + k * factor[0], as in diffusers; CogVideoX adds three if k is odd. */
    int32_t frames, height, width;
    int32_t steps;           /* 0: the model's default */
    int32_t scheduler;       /* ESA_SCHEDULER_* (MODEL) */
    int32_t max_text_tokens; /* 0: text_tokens of the model's info, as in diffusers */
    int32_t decode;          /* 1: decode to frames (1); 0: latents only, *frames stays NULL */
    uint64_t seed;           /* for torch's CPU generator: the noise is that of diffusers */
    /* NaN: the model's default; <= 1: no negative branch. HunyuanVideo takes it as an input, and
     * never has a negative branch. */
    double guidance;
    double flow_shift;           /* 0: the value in the scheduler's config */
    const char *prompt;          /* may be NULL if prompt_embeds is given */
    const char *negative_prompt; /* NULL: ""; not used without a negative branch */
    /* safetensors file with prompt_embeds [tokens, text_dim], and with negative_prompt_embeds if
     * there is a negative branch; HunyuanVideo: also with pooled_prompt_embeds. The text encoder is
     * then skipped. */
    const char *prompt_embeds;
    const char *save_embeds; /* writes such a file */
    /* safetensors file with latents [C,T,H,W] to start from instead of noise */
    const char *latents;
    const char *save_latents; /* writes the final latents */
    const char *masks;        /* mask file for session mode CACHED */
    const char *record;       /* recording file for session mode RECORD; extended if it exists */
    /* side of a decoder tile in pixels; 0: whole frames, or tiles if there is no memory for that */
    int32_t vae_tile;
    /* CogVideoX: 1 lets the guidance grow during the steps, as use_dynamic_cfg in diffusers (0) */
    int32_t dynamic_guidance;
    /* How self-attention runs: mode, select (selector, budget, blocks, order), attention (tail),
     * warm-up, dense layers, refresh, work. The engine sets layers, steps, branches, model,
     * config_hash, masks, plan, sigma, the grid and order_applied. */
    esa_session_params session;
    /* Called after every unit, in the calling thread; may be NULL. A return value other than 0
     * cancels the call with ESA_ERR_STATE; nothing is written. */
    int32_t (*progress)(void *user, const esa_progress *progress);
    void *progress_user;
    /* Called once between the last step and the decoder; may be NULL. It may read the statistics of
     * the session (esa_session_get_stats, esa_session_get_heads), and must do nothing else with it.
     * It may use the ctx, but not this model: such a call returns ESA_ERR_STATE. */
    void (*denoised)(void *user, const esa_session *session);
    void *denoised_user;
    const char *plan; /* work plan file for session.work and quality; NULL: the uniform rule */
    /* Step cache: a step reuses the velocity of the last computed step as long as it is expected to
     * have changed by less than this part of its size; 0: off. The warm-up, the first tenth and the
     * last step are always computed. */
    double cache;
    double quality; /* instead of session.work: the PSNR against dense, in dB, that the plan shall
                     * expect; 0: not given */
    /* Called before the first step: on the CPU with a line that says in which type it computes, on
     * a GPU with lines that say where its memory goes: which weights stay there, which are copied
     * and what that costs; may be NULL */
    void (*say)(void *user, const char *line);
    void *say_user;
    /* Noise levels of the steps instead of the scheduler's own, for EULER and UNIPC: they fall, are
     * at most 1 and above 0. flow_shift shifts them too. Distilled models need the list that they
     * were trained with. steps must be 0 or sigma_count. (NULL: none) */
    const double *sigmas;
    int32_t sigma_count;
    int32_t reserved1;
    /* Guidance of the second transformer of a model that has two. NaN: the same as guidance, or the
     * model's default if guidance is NaN too. Only guidance decides whether there is a negative
     * branch, as in diffusers. */
    double guidance_2;
    /* Models of image to video: a file with the picture that the video begins with. esa_frames_load
     * reads it, and its first frame is used. If height and width are 0, they get the aspect ratio
     * of the picture and about the area of the model's default size. */
    const char *image;
    /* Called after every preview_every-th step but the last, in the calling thread; may be NULL.
     * Calls on the ctx return ESA_ERR_STATE meanwhile. The picture is a frame in the middle of the
     * video that this step expects at the end. Its latents are pooled, so that its longer side has
     * at most preview_side pixels, and decoded: the decoder's work for one frame of that size. The
     * video has the same bits with and without it. A step that has no memory for it shows none. It
     * needs the VAE. preview_every: 1 or more (0: off); preview_side: 32 to 1024 (0: 256). */
    void (*preview)(void *user, const esa_preview *preview);
    void *preview_user;
    int32_t preview_every, preview_side;
    int64_t reserved[5];
} esa_generate_params;

/* The session mode is DENSE. */
ESA_API esa_generate_params esa_generate_params_default(void);

/* Says what esa_generate would run. Checks the settings and fills in what they leave open: frames,
 * height, width, steps, guidance, the branches of a step unless the session mode is DENSE, and in
 * modes ONLINE, RECORD and PROBE the order, the block sizes, the grid and the text of the
 * selection. *tokens (may be NULL) receives the number of tokens of self-attention. Prompt and
 * files are not read. On failure params is unchanged. */
ESA_API esa_status esa_generate_resolve(esa_model *model, esa_generate_params *params,
                                        int64_t *tokens);

/* Kinds of work. ATTENTION is self-attention, CROSS all other attention, SELECTION what chooses
 * blocks and orders. */
enum {
    ESA_WORK_PRODUCTS = 0,
    ESA_WORK_ATTENTION = 1,
    ESA_WORK_SELECTION = 2,
    ESA_WORK_CROSS = 3,
    ESA_WORK_CONVOLUTIONS = 4,
    ESA_WORK_OTHER = 5,
    ESA_WORK_KINDS = 6
};

typedef struct esa_generate_stats { /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t frames, height, width, steps; /* as computed */
    int32_t tokens;                       /* tokens of a self-attention call */
    int32_t computed_steps;               /* less than steps with a step cache */
    int32_t vae_tile;                     /* side of the decoder's tiles; 0: whole frames */
    double text_seconds, denoise_seconds, decode_seconds, seconds;
    double attention_seconds;  /* self-attention and selection, part of denoise_seconds */
    double gemm_seconds;       /* matrix products, part of denoise_seconds */
    int64_t peak_bytes;        /* most memory held at once, with weights, without mapped files */
    int64_t device_peak_bytes; /* the same on the GPU; 0 on the CPU */
    double work_seconds[ESA_WORK_KINDS]; /* of text, denoising and decoding together */
    esa_session_stats session;
    int64_t reserved[4];
} esa_generate_stats;

/* Makes one video. On success the caller owns *frames (NULL if decode is 0). stats may be NULL. */
ESA_API esa_status esa_generate(esa_model *model, esa_frames **frames,
                                const esa_generate_params *params, esa_generate_stats *stats);

typedef struct esa_decode_params {
    uint32_t struct_size;
    int32_t vae_tile;    /* as in esa_generate_params */
    const char *latents; /* safetensors file with latents [C,T,H,W], as save_latents writes it */
    /* as in esa_generate_params; the stage is always DECODE */
    int32_t (*progress)(void *user, const esa_progress *progress);
    void *progress_user;
    int64_t reserved[4];
} esa_decode_params;

ESA_API esa_decode_params esa_decode_params_default(void);
/* Decodes latents to frames. The model needs only its VAE (ESA_PART_VAE). On success the caller
 * owns *frames. */
ESA_API esa_status esa_decode(esa_model *model, esa_frames **frames,
                              const esa_decode_params *params);

#ifdef __cplusplus
}
#endif
#endif
