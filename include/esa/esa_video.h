/* esa_video.h - the engine: a diffusers model folder and a prompt become frames. Library libesa_video.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The shortest use:
 *
 *     esa_ctx *ctx;  esa_model *model;  esa_frames *frames;
 *     esa_generate_params p = esa_generate_params_default();
 *     p.prompt = "a red ball rolls to the right over a blue floor";
 *     esa_ctx_create(&ctx, NULL);
 *     esa_model_open(ctx, &model, "models/wan-tiny", NULL);        // config, names and shapes are checked before anything is read
 *     esa_generate(model, &frames, &p, NULL);                      // text encoder, denoising loop, decoder
 *     esa_frames_save(ctx, frames, "ball.mp4", NULL);
 *     esa_frames_free(frames);  esa_model_free(model);  esa_ctx_free(ctx);
 *
 * The rules of esa.h hold here too: a status and one sentence in the ctx, nothing printed, objects NULL after a failure, params
 * with struct_size, same inputs same bits whatever the number of threads. libesa and libesa_video must come from the same build.
 *
 * A model computes with threads of its own, as many as its ctx has. While one of its calls runs, the ctx is busy. Strings in params
 * are UTF-8, borrowed for the call. CPU arithmetic is f32. */
#ifndef ESA_VIDEO_H
#define ESA_VIDEO_H

#include "esa.h"
#include "esa_session.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_model esa_model;
typedef struct esa_frames esa_frames;

/* Sizes of this header's structs in the order below; a binding compares them at import. */
enum { ESA_VIDEO_ABI_MODEL_PARAMS = 0, ESA_VIDEO_ABI_MODEL_INFO, ESA_VIDEO_ABI_PROGRESS, ESA_VIDEO_ABI_GENERATE_PARAMS,
       ESA_VIDEO_ABI_GENERATE_STATS, ESA_VIDEO_ABI_FRAMES_INFO, ESA_VIDEO_ABI_SAVE_PARAMS, ESA_VIDEO_ABI_METRICS,
       ESA_VIDEO_ABI_LOAD_PARAMS, ESA_VIDEO_ABI_DECODE_PARAMS, ESA_VIDEO_ABI_COUNT };
ESA_API const uint32_t *esa_video_abi(void);    /* ESA_VIDEO_ABI_COUNT entries, static storage */

/* ---------------------------------------------------------------- models */

/* How weights are held. AUTO: f32 for parts below 1 GB, else FILE for 16-bit files and BF16 for f32 files. FILE: mapped, converted
 * while used. F32, BF16: tensors of another type are converted once while reading (those of the same type are used where they lie); the
 * file's pages are given back piece by piece, so that file and copy never stand side by side. The few tensors that Wan keeps in f32
 * are held in f32 always. */
enum { ESA_HOLD_AUTO = 0, ESA_HOLD_FILE = 1, ESA_HOLD_F32 = 2, ESA_HOLD_BF16 = 3 };
/* Parts of a model, as bits. */
enum { ESA_PART_TRANSFORMER = 1, ESA_PART_VAE = 2, ESA_PART_TEXT = 4, ESA_PART_ALL = 7 };

struct esa_progress;                /* below */

typedef struct esa_model_params {
    uint32_t struct_size;
    int32_t  hold;                  /* ESA_HOLD_* (AUTO) */
    int32_t  parts;                 /* ESA_PART_* that are needed and checked (ALL); the others may be missing */
    int32_t  reserved0;
    void   (*report)(void *user, const char *line); /* NULL, or called once per tensor that is missing, unexpected or of another
                                       shape, and once per part with its totals. The sentence in the ctx names the first ones only */
    void    *report_user;
    int32_t (*progress)(void *user, const struct esa_progress *progress);   /* NULL, or called while weights are read: stage LOAD of each part,
                                       megabytes done of total; a return other than 0 cancels: ESA_ERR_STATE */
    void    *progress_user;
    int64_t  reserved[2];
} esa_model_params;

ESA_API esa_model_params esa_model_params_default(void);

/* Reads the configs and the headers of all weight files and compares every name and shape with what the configs ask for; reads no
 * weights. ESA_ERR_IO, ESA_ERR_FORMAT or ESA_ERR_MISMATCH with a sentence that names file or tensor. */
ESA_API esa_status esa_model_check(esa_ctx *ctx, const char *folder, const esa_model_params *params);
/* Checks, then loads transformer and VAE; the text encoder is loaded when first needed. ctx is kept and must outlive the model. */
ESA_API esa_status esa_model_open(esa_ctx *ctx, esa_model **model, const char *folder, const esa_model_params *params);
ESA_API void       esa_model_free(esa_model *model);

typedef struct esa_model_info {     /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t  layers, heads, head_dim, ffn;
    int32_t  latent_channels;
    int32_t  patch[3];              /* t, h, w, in latents */
    int32_t  factor[3];             /* pixels per latent in t, h, w */
    int32_t  text_dim;
    int32_t  text_tokens;           /* rows of text the transformer sees */
    int32_t  frames, height, width, steps;      /* defaults of this model */
    int32_t  reserved0;
    double   guidance, fps;
    int64_t  parameters[3];         /* transformer, VAE, text encoder */
    int64_t  held_bytes;            /* memory of weights held now, mapped files not counted */
    int64_t  mapped_bytes;
    char     name[128];             /* of the folder, or of the model where its shape is known */
    char     config_hash[80];       /* goes into mask files */
    int64_t  reserved[4];
} esa_model_info;

ESA_API esa_status esa_model_get_info(const esa_model *model, esa_model_info *info);
/* The config_hash of a diffusers folder by itself, text into hash[80]; also of models that the engine does not run. What diffusers records is
 * then told by the same hash as what the engine records. */
ESA_API esa_status esa_model_config_hash(esa_ctx *ctx, char *hash, const char *folder);

/* ---------------------------------------------------------------- generation */

enum { ESA_STAGE_TEXT = 0, ESA_STAGE_DENOISE = 1, ESA_STAGE_DECODE = 2, ESA_STAGE_LOAD = 3 };

typedef struct esa_progress {
    uint32_t struct_size;
    int32_t  stage;                 /* ESA_STAGE_* */
    int32_t  done, total;           /* denoise: steps; decode: latent frames; text: prompts; load: megabytes */
    double   seconds;               /* since the call began */
    double   unit_seconds;          /* mean seconds of one unit of this stage so far; 0: none done yet */
    double   density;               /* realised density of the sparse calls so far; NaN: none yet */
    int64_t  reserved[4];
} esa_progress;

/* The scheduler. MODEL: what the folder names, with its own settings. UNIPC uses the sigmas of diffusers 0.37 and newer, UNIPC_036
 * those of diffusers up to 0.36 and of Wan's own code. */
enum { ESA_SCHEDULER_MODEL = 0, ESA_SCHEDULER_UNIPC = 1, ESA_SCHEDULER_UNIPC_036 = 2, ESA_SCHEDULER_EULER = 3 };

typedef struct esa_generate_params {
    uint32_t struct_size;
    int32_t  frames, height, width; /* 0: the model's default. height and width must be multiples of factor * patch; frames is rounded
                                       down to 1 + k * factor[0], as diffusers does */
    int32_t  steps;                 /* 0: the model's default */
    int32_t  scheduler;             /* ESA_SCHEDULER_* (MODEL) */
    int32_t  max_text_tokens;       /* 0: 512, as the pipeline */
    int32_t  decode;                /* 1: decode to frames (1); 0: only latents, *frames stays NULL */
    uint64_t seed;                  /* of torch's CPU generator: the same noise as in diffusers */
    double   guidance;              /* NaN: the model's default; <= 1: no negative branch */
    double   flow_shift;            /* 0: what the scheduler's config says */
    const char *prompt;             /* NULL needs prompt_embeds */
    const char *negative_prompt;    /* NULL: "" */
    const char *prompt_embeds;      /* safetensors file with prompt_embeds [tokens, text_dim] (and negative_prompt_embeds with guidance):
                                       skips the text encoder */
    const char *save_embeds;        /* writes such a file */
    const char *latents;            /* safetensors file with latents [C,T,H,W] to start from instead of noise */
    const char *save_latents;       /* writes the final latents */
    const char *masks;              /* mask file of session mode CACHED */
    const char *record;             /* recording file of session mode RECORD: added to if it exists */
    int32_t  vae_tile;              /* pixels of a decoder tile, 0: whole frames */
    int32_t  reserved0;
    /* How self-attention runs: mode, select (selector, budget, blocks, order), attention (tail), warm-up, dense layers, refresh. The
     * engine fills in layers, steps, branches, model, config_hash, masks, the grid and order_applied. */
    esa_session_params session;
    int32_t (*progress)(void *user, const esa_progress *progress);  /* NULL, or called in the calling thread after every unit; a return
                                       other than 0 cancels: ESA_ERR_STATE, nothing is written */
    void    *progress_user;
    void   (*denoised)(void *user, const esa_session *session);     /* NULL, or called once between the last step and the decoder: here
                                       figures of single layers, steps and heads can be read from the session, nothing else done with it */
    void    *denoised_user;
    int64_t  reserved[6];
} esa_generate_params;

/* Session mode DENSE. */
ESA_API esa_generate_params esa_generate_params_default(void);

typedef struct esa_generate_stats { /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t  frames, height, width, steps;      /* as run */
    int32_t  tokens;                /* of self-attention */
    double   text_seconds, denoise_seconds, decode_seconds, seconds;
    double   attention_seconds;     /* of denoise: self-attention, selection included */
    double   gemm_seconds;          /* of denoise: matrix products */
    int64_t  peak_bytes;            /* the most memory the call held, weights included, mapped files not */
    esa_session_stats session;
    int64_t  reserved[4];
} esa_generate_stats;

/* One video. On success *frames is the caller's (NULL with decode 0). stats may be NULL. */
ESA_API esa_status esa_generate(esa_model *model, esa_frames **frames, const esa_generate_params *params, esa_generate_stats *stats);

typedef struct esa_decode_params {
    uint32_t struct_size;
    int32_t  vae_tile;              /* as in esa_generate_params */
    const char *latents;            /* safetensors file with latents [C,T,H,W], as save_latents writes it */
    int32_t (*progress)(void *user, const esa_progress *progress);  /* as in esa_generate_params; stage DECODE only */
    void    *progress_user;
    int64_t  reserved[4];
} esa_decode_params;

ESA_API esa_decode_params esa_decode_params_default(void);
/* Latents become frames; the model needs its VAE only (ESA_PART_VAE). On success *frames is the caller's. */
ESA_API esa_status esa_decode(esa_model *model, esa_frames **frames, const esa_decode_params *params);

/* ---------------------------------------------------------------- frames */

typedef struct esa_frames_info {    /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t  frames, height, width;
    double   fps;
    const uint8_t *rgb;             /* [frames][height][width][3], owned by the object */
    int64_t  reserved[4];
} esa_frames_info;

/* rgb is copied (NULL: black). */
ESA_API esa_status esa_frames_create(esa_ctx *ctx, esa_frames **frames, const uint8_t *rgb, int32_t count, int32_t height, int32_t width,
                                     double fps);
ESA_API void       esa_frames_free(esa_frames *frames);
ESA_API esa_status esa_frames_get_info(const esa_frames *frames, esa_frames_info *info);
/* Left and right of one another; both must have the same count and height. */
ESA_API esa_status esa_frames_beside(esa_ctx *ctx, esa_frames **both, const esa_frames *left, const esa_frames *right);

/* Codecs of MP4. AUTO: H.264, else MPEG-4. LOSSLESS: H.264 of RGB without loss; every pixel comes back, few browsers play it. */
enum { ESA_CODEC_AUTO = 0, ESA_CODEC_H264 = 1, ESA_CODEC_HEVC = 2, ESA_CODEC_AV1 = 3, ESA_CODEC_MPEG4 = 4, ESA_CODEC_LOSSLESS = 5 };
/* Elements of tensor files: bytes 0 .. 255, or numbers in [0, 1]. */
enum { ESA_PIXELS_U8 = 0, ESA_PIXELS_F32 = 1, ESA_PIXELS_F16 = 2 };

typedef struct esa_save_params {
    uint32_t struct_size;
    int32_t  quality;               /* 0 .. 100, 0: default; lossy formats */
    double   fps;                   /* 0: the frames' own */
    int32_t  codec;                 /* ESA_CODEC_*, of MP4 */
    int32_t  pixels;                /* ESA_PIXELS_*, of .safetensors and .npy */
    int64_t  reserved[3];
} esa_save_params;

ESA_API esa_save_params esa_save_params_default(void);
/* The ending chooses: .mp4 (needs FFmpeg), .y4m, .png (one frame), .safetensors or .npy (a tensor [frames, height, width, 3]; in
 * .safetensors it is called `frames` and fps stands in the metadata), or a path that ends in '/': a folder of 00000.png .. . Written to a
 * temporary name and renamed; on failure nothing is left. */
ESA_API esa_status esa_frames_save(esa_ctx *ctx, const esa_frames *frames, const char *path, const esa_save_params *params);
/* What can be said against saving so many frames there before they are made: params, the ending, a folder that holds other things. Whether there is
 * room and permission only saving tells. */
ESA_API esa_status esa_frames_save_check(esa_ctx *ctx, const char *path, int64_t frames, const esa_save_params *params);

typedef struct esa_load_params {
    uint32_t struct_size;
    int32_t  reserved0;
    double   fps;                   /* of what does not say (PNG, .npy); 0: 16 */
    int64_t  reserved[4];
} esa_load_params;

ESA_API esa_load_params esa_load_params_default(void);
/* A video from a file or a folder, recognised by its content:
 *   a folder of PNG      in the order of the numbers in their names, else of the names; all of one size
 *   PNG                  every colour type and depth; 16 bits are rounded to 8, transparency is dropped; interlaced ones are refused
 *   Y4M                  8 bits, 4:2:0, 4:2:2, 4:4:4 or grey, BT.601
 *   safetensors, NPY     U8, or F16, BF16 (safetensors), F32, F64 in [0, 1], [frames, height, width, 3]; a batch of 1 may stand in front;
 *                        in safetensors the tensor called `frames`, or the only one
 *   anything else        the first video stream FFmpeg finds (MP4, WebM, MKV, AVI, ...)
 * ESA_ERR_IO for files that cannot be read, ESA_ERR_FORMAT for what is no video or damaged, ESA_ERR_UNSUPPORTED without FFmpeg; the
 * sentence names the file. params may be NULL. On success *frames is the caller's. */
ESA_API esa_status esa_frames_load(esa_ctx *ctx, esa_frames **frames, const char *path, const esa_load_params *params);
/* The same without the pictures: sizes as the file's header says; info->rgb is NULL, info->frames 0 where only decoding tells. */
ESA_API esa_status esa_frames_peek(esa_ctx *ctx, esa_frames_info *info, const char *path, const esa_load_params *params);

/* ---------------------------------------------------------------- metrics */

/* LPIPS (Zhang, Isola, Efros, Shechtman, Wang 2018), version 0.1, as the Python package `lpips` computes it. */
typedef struct esa_lpips esa_lpips;
/* From a file that tools/convert_lpips.py wrote: AlexNet or VGG16, its metadata says which. ctx is kept and must outlive it.
 * ESA_ERR_IO, ESA_ERR_FORMAT (no such file), ESA_ERR_MISMATCH (a tensor is missing or of another shape). */
ESA_API esa_status esa_lpips_open(esa_ctx *ctx, esa_lpips **lpips, const char *path);
ESA_API void       esa_lpips_free(esa_lpips *lpips);
ESA_API const char *esa_lpips_net(const esa_lpips *lpips);      /* "alex" or "vgg"; static storage */
ESA_API int32_t     esa_lpips_least(const esa_lpips *lpips);    /* shortest side of a picture it can look at, in pixels */

typedef struct esa_metrics {        /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t  frames;
    double   psnr;                  /* dB over all frames; +inf for equal ones */
    double   ssim;                  /* mean over frames */
    double   psnr_min, ssim_min;    /* worst frame */
    double   lpips, lpips_max;      /* mean over frames, worst frame; NaN: not measured */
    double   flicker;               /* how differently the videos change from frame to frame: the root of the mean square of
                                       (f[t] - f[t-1]) - (r[t] - r[t-1]) in grey levels; 0 for equal changes, NaN for one frame */
    int64_t  reserved[1];
} esa_metrics;

/* Values of one frame, as esa_frames_measure writes them. FLICKER is that of the change from the frame before, NaN for the first. */
enum { ESA_METRIC_PSNR = 0, ESA_METRIC_SSIM = 1, ESA_METRIC_LPIPS = 2, ESA_METRIC_FLICKER = 3, ESA_METRIC_COUNT = 4 };

/* PSNR, SSIM and flicker; LPIPS stays NaN. */
ESA_API esa_status esa_frames_compare(esa_ctx *ctx, esa_metrics *metrics, const esa_frames *reference, const esa_frames *frames);
/* The same frame by frame: each [frames][ESA_METRIC_COUNT] unless NULL, of the caller. lpips (of the same ctx) may be NULL. Videos must have the
 * same number of frames and size, sides of at least 11 pixels, with lpips esa_lpips_least: ESA_ERR_SHAPE. progress (may be NULL) is
 * called after every frame of LPIPS; not 0 cancels: ESA_ERR_STATE. */
ESA_API esa_status esa_frames_measure(esa_ctx *ctx, esa_metrics *metrics, double *each, const esa_frames *reference, const esa_frames *frames,
                                      esa_lpips *lpips, int32_t (*progress)(void *user, int32_t done, int32_t total), void *user);

#ifdef __cplusplus
}
#endif
#endif
