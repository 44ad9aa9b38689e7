/* clip.h - one clip: an open model, a request, frames, and a record of times and densities.
 * `esa generate`, the benchmarks, `esa calibrate` and `esa experiment` all make their clips here.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_CLIP_H
#define ESA_CLI_CLIP_H

#include "clip/video.h"

enum {
    METHOD_DENSE = 0,
    METHOD_ENTROPY,
    METHOD_RF_V2,
    METHOD_ADA_BSA,
    METHOD_CACHED,
    METHOD_ERROR,
    METHOD_RECORD, /* not offered to users: `esa calibrate` sets these three */
    METHOD_PROBE,
    METHOD_RECORD_ERROR
};
#define METHODS          "dense|entropy|rf_v2|ada_bsa|cached|error"
#define ONLINE_METHODS   "entropy|rf_v2|ada_bsa|error"
#define CLIP_SCHEDULERS  "model|unipc|unipc-0.36|euler|ddim|dpm" /* ESA_SCHEDULER_* */
#define CLIP_INTERRUPTED 130                                     /* exit status after a signal */

/* ---------------------------------------------------------------- the model (clip.c) */

typedef struct clip_maker {
    cli_video video; /* the engine's functions: frames, metrics, files */
    esa_ctx *ctx;
    esa_model *model;
    esa_model_info info;
    cli_device device;
    esa_lpips *lpips;  /* weights of --lpips, or NULL */
    char folder[4200]; /* the model's */
    char said[1200];   /* lines of memory plans that were printed */
    int tiled;         /* clips that were decoded in tiles for lack of memory */
    const char *what;  /* the command's name, for messages; borrowed */
    /* Called with the progress of the model and of every clip instead of showing it; a return value
     * other than 0 cancels. NULL: it is shown. */
    int32_t (*listen)(void *user, const esa_progress *progress);
    void *listen_user;
} clip_maker;

typedef struct clip_opening {
    const char *model;         /* a name, a folder, or NULL: wan-tiny */
    const char *transformer;   /* a file with the transformer's weights; NULL: the model's own */
    cli_texts lora;            /* LoRA files, FILE[:SCALE] each */
    const char *transformer_2; /* the same for the second transformer of Wan 2.2 */
    cli_texts lora_2;
    int64_t threads;        /* 0: one per core */
    int hold;               /* ESA_HOLD_* */
    int parts;              /* ESA_PART_* that will be needed; 0: all */
    int check;              /* 1: checks names and shapes only, opens no model */
    const char *check_file; /* check: a weight file alone instead of a model; NULL: the model */
    const char *device;     /* --device; NULL: auto */
    int linear;             /* ESA_LINEAR_* */
    int dtype;              /* ESA_COMPUTE_* */
    const char *keep;       /* F8: tensors that stay in bf16; NULL: none */
    const char *max_vram;   /* a size; NULL: no limit */
    const char *lpips;      /* weights of LPIPS, for clip_compare; NULL: it is not measured */
    int random;             /* 1: random weights; model is then the name of a shape */
    void (*report)(void *user, const char *line); /* NULL, or as in esa_model_params */
    int32_t (*listen)(void *user, const esa_progress *progress); /* as in clip_maker */
    void *listen_user;
} clip_opening;

/* Opens the engine and a model and catches signals. CLI_OK, or CLI_FAILED after a message; call
 * clip_close in any case. */
int clip_open(clip_maker *maker, const clip_opening *opening, const char *what);
void clip_close(clip_maker *maker);
/* Splits FILE[:SCALE] and copies the name to name. The part behind the last colon is the scale if
 * it is a number and no file has the whole text as its name. CLI_FAILED after a message. */
int clip_lora(esa_lora *lora, char *name, size_t size, const char *text, const char *what);
/* "bf16" or "f32": the type that the model's linear layers and attention are computed in. */
const char *clip_dtype(const clip_maker *maker);
/* Writes where the model runs and what it takes there into the open object. */
void clip_maker_json(cli_json *json, const clip_maker *maker);
/* 1 if the built-in prompts are those of wan-tiny. */
int clip_is_tiny(const clip_maker *maker);

/* ---------------------------------------------------------------- carry (clip_carry.c) */

#define CLIP_MOST_STEPS    10000
#define CLIP_MOST_ANCHORS  64
#define CLIP_CARRY_TEXT    400                     /* bytes of the longest list of anchors */
#define CLIP_CARRY_FORMATS "e4m3|bf16"             /* ESA_CARRY_E4M3, ESA_CARRY_BF16 */
#define CLIP_DTYPES        "default|f32|bf16|auto" /* in the order of ESA_COMPUTE_* */

/* What --carry says. */
typedef struct clip_anchors {
    int32_t carry; /* as in esa_session_params; the number of steps if they are listed */
    int32_t count; /* of the listed steps; 0: the library places the anchors */
    int32_t step[CLIP_MOST_ANCHORS];
} clip_anchors;
/* Reads auto, off, a number of anchors, or their steps. CLI_USAGE after a message. */
int clip_carry_parse(clip_anchors *anchors, const char *text, const char *what);
/* Whether a run of so many steps can have these anchors. CLI_USAGE after a message. */
int clip_carry_fits(const clip_anchors *anchors, int32_t steps, const char *what);
/* Writes anchors as --carry takes them. */
void clip_carry_name(char out[CLIP_CARRY_TEXT], const clip_anchors *anchors);

/* ---------------------------------------------------------------- requests (clip_request.c) */

#define CLIP_RECOMMENDED INT32_MIN /* of a schedule, where -1 is ESA_REFRESH_EARLY */

/* The settings of a clip. p holds the engine's settings. From the rest, clip_resolve completes its
 * session: mode, selector, order, blocks and tail. Strings are borrowed. */
typedef struct clip_request {
    esa_generate_params p;
    clip_opening open;  /* the model that makes the clip */
    int method;         /* METHOD_* */
    int order;          /* ESA_ORDER_*; DEFAULT: the recommended one */
    int tail;           /* ESA_TAIL_* where blocks are skipped; -1: the recommended one */
    int32_t exact_rows; /* of each query block; -1: the recommended number */
    /* The recommended ones if NaN or -1. */
    double warmup;
    int32_t dense_first_layer, share_branches;
    int32_t refresh_every, order_every;  /* CLIP_RECOMMENDED: the recommended ones */
    int preset;                          /* ESA_PRESET_*: the work of the session; -1: none */
    cli_list sigmas, timesteps;          /* of the steps; count 0: the scheduler's own */
    const char *carry;                   /* --carry; NULL: the method's own */
    int carry_format;                    /* ESA_CARRY_E4M3 or ESA_CARRY_BF16 */
    clip_anchors anchors;                /* of carry; set by clip_resolve */
    const char *cache;                   /* --cache: "off", "auto" or a number; NULL: off */
    const char *block;                   /* "QxK"; NULL: the recommended blocks */
    const char *score_groups;            /* error: "QxK"; NULL: the recommended groups */
    cli_list window;                     /* box of order tile3d; count 0: its default */
    cli_list dense_layers;               /* more dense layers */
    int eight;                           /* 1: attention in 8 bits, but for ... */
    int32_t steps16_first, steps16_last; /* ... so many steps ... */
    cli_list layers16;                   /* ... and these layers */
    int64_t tokens;                      /* length of self-attention; set by clip_resolve */
} clip_request;

/* The METHOD_* whose name is the i-th of "a|b|c". */
int clip_method(const char *names, int64_t i);
/* 1 if the method chooses blocks online with a selector that has the trait (ESA_TRAIT_*). */
int clip_method_has(int method, int trait);
/* Method entropy with esa_session_params_recommended; sizes, steps and guidance are the model's. */
clip_request clip_request_default(void);
/* The default of every command that makes videos: what was not given becomes method error at the
 * work of preset balanced, or method entropy if a budget was given. method, budget: 1 if given. */
void clip_use_defaults(clip_request *request, int method, int budget);
/* The same, with masks: the method is then cached unless it was given. CLI_USAGE after a message if
 * a budget and a work were given. */
int clip_choose_method(clip_request *request, int method, int budget, const char *what);
/* Whether the settings of one video agree with its method; compare: 1 if it is also made dense.
 * CLI_OK, or CLI_USAGE after a message. */
int clip_request_agrees(const clip_request *request, int compare, const char *what);
/* Checks what needs no model. CLI_OK, or CLI_USAGE after a message. */
int clip_request_check(const clip_request *request, const char *what);
/* The request for the dense clip that others are compared with: in 16 bits, every step computed. */
clip_request clip_dense(const clip_request *request);
/* 1 if the request says how much work to spend: a work, a quality, a plan or a preset. */
int clip_wants_work(const clip_request *request);
/* The session that the library recommends for the method of a request. */
esa_session_params clip_recommended(const clip_request *request);
/* The order of a request; ESA_ORDER_DEFAULT: cached masks bring theirs. */
int clip_order(const clip_request *request);
/* The anchors of a request: what was given, else those of the method. */
clip_anchors clip_anchors_of(const clip_request *request);
/* Their number in a request whose steps are known; 0: it does not carry. */
int32_t clip_anchor_count(const clip_request *request);
/* Lets the engine check the request and fill in what it leaves open; p is then what will run. May
 * be called again after the method, or anything else, has changed. CLI_FAILED or CLI_USAGE after a
 * message. */
int clip_resolve(clip_maker *maker, clip_request *request);

/* Writes what the videos depend on besides size, guidance and scheduler: guidance of a second
 * transformer, dynamic guidance, listed sigmas, the picture. null: not given. */
void clip_noise_json(cli_json *json, const clip_request *request);

/* Settings most commands share, as rows of an option table: copies the caller's rows, then the
 * chosen groups of rows, then the end, into table and returns it. */
enum {
    CLIP_OPTIONS_SIZE = 1, /* --frames --height --width --steps */
    CLIP_OPTIONS_NOISE =
        2, /* --guidance --guidance-2 --image --negative-prompt --scheduler --flow-shift
              --sigmas --timesteps */
    CLIP_OPTIONS_DENSE = 4,  /* --warmup --dense-first-layer --dense-layers */
    CLIP_OPTIONS_BLOCKS = 8, /* --order --window --block --samples --score-groups */
    CLIP_OPTIONS_SPARSE =
        16, /* --tail --exact-rows --cdf --refresh --order-every --share-branches */
    CLIP_OPTIONS_CACHED = 32,     /* --masks --step-map */
    CLIP_OPTIONS_MODEL = 64,      /* --model --threads --device --linear --keep --max-vram */
    CLIP_OPTIONS_WORK = 128,      /* --work --quality --plan --preset --cache */
    CLIP_OPTIONS_PRECISION = 256, /* --precision --steps16-first --steps16-last --layers16 */
    CLIP_OPTIONS_CARRY = 512,     /* --carry --carry-format */
    CLIP_OPTIONS_ALL = 1023
};
#define CLIP_MAX_OPTIONS 80
#define CLIP_REFRESH_HELP                                                                          \
    "make new masks every N sparse steps and reuse them in between; 0: only once, at the first "   \
    "sparse step; early: at the first, and at 1/8, 1/4 and 1/2 of them (1; error: at the anchors " \
    "of --carry, without carry early)"
#define CLIP_ORDER_EVERY_HELP "order adaptive: when to make new orders, as --refresh (as masks)"
const cli_option *clip_options(cli_option table[CLIP_MAX_OPTIONS], const cli_option *own,
                               int groups, clip_request *request);

/* ---------------------------------------------------------------- records */

/* What was measured. Arrays are owned; free with clip_record_free. NaN means unknown. */
typedef struct clip_record {
    /* sizes as run; seconds of text, denoising, decoding; session totals; peak_bytes */
    esa_generate_stats stats;
    int32_t steps, layers, heads;
    int32_t warmup;              /* dense steps at the start; 0 if nothing ran sparse */
    double *step_seconds;        /* [steps] */
    double *step_select;         /* [steps] part of it: choosing blocks */
    double *step_attention;      /* [steps] part of it: attention */
    double *layer_density;       /* [layers] mean over sparse calls, NaN: none ran sparse */
    double *head_density;        /* [layers][heads] likewise; NaN on a GPU */
    double *step_anchors;        /* [steps] calls that made a carried difference */
    double *step_age;            /* [steps] mean age of those that were added, NaN: none */
    int carry_format;            /* of the request */
    char carry[CLIP_CARRY_TEXT]; /* what was asked for, as --carry takes it */
} clip_record;
void clip_record_free(clip_record *record);
/* Mean seconds of a step: with the warm-up steps, or without. */
double clip_step_mean(const clip_record *record, int with_warmup);
/* Realised density of the sparse calls; 1 if there were none. */
double clip_density(const clip_record *record);
/* Writes the fields of a record into the open object. */
void clip_record_json(cli_json *json, const clip_record *record);
/* (clip_carry.c) The steps in which a layer was an anchor: steps int32[record->steps] (may be
 * NULL). Returns their number. */
int clip_anchor_steps(int32_t *steps, const clip_record *record);
/* Writes the object "carry" of a record. */
void clip_carry_json(cli_json *json, const clip_record *record);
/* Prints a line about it, if anything was carried. */
void clip_carry_print(FILE *out, const clip_record *record);

/* ---------------------------------------------------------------- making */

/* Progress of one clip (clip_watch.c). */
typedef struct clip_watch {
    const char *label;   /* names the clip */
    int64_t clips_left;  /* clips of the same size after this one: they count in the time left */
    int32_t quiet;       /* 1: progress goes to a terminal only */
    int32_t stage, done; /* last shown; stage is -1 at first */
} clip_watch;

/* Makes one clip. frames is the caller's (NULL is allowed with p.decode 0). record may be NULL.
 * CLI_OK; CLI_FAILED after a message; CLIP_INTERRUPTED without one, because only the caller knows
 * what is left on disk. After a failure *frames is NULL and the record empty. */
int clip_make(clip_maker *maker, esa_frames **frames, clip_record *record,
              const clip_request *request, const char *label, int64_t clips_left, int quiet);
/* Whether the mask file of a resolved request can be read and has its number of steps. clip_make
 * checks it too. */
int clip_check_masks(const clip_maker *maker, const clip_request *request);
/* PSNR and SSIM of frames against reference; LPIPS if clip_open was given weights, else NaN. */
int clip_compare(clip_maker *maker, esa_metrics *metrics, const esa_frames *reference,
                 const esa_frames *frames);

/* A clip, and the dense one that it is compared with (clip_pair.c). */
typedef struct clip_pair {
    esa_frames *frames, *dense; /* dense: NULL without comparison */
    clip_record record, dense_record;
    esa_metrics metrics;
} clip_pair;
/* Makes both, the dense one first, and measures the difference. clips_left: pairs after this one.
 * The result and the messages are those of clip_make. Free with clip_pair_free, also after a
 * failure. */
int clip_pair_make(clip_maker *maker, clip_pair *pair, const clip_request *request, int compare,
                   int64_t clips_left);
void clip_pair_free(const clip_maker *maker, clip_pair *pair);
/* Speedup of the denoising steps; NaN without comparison. */
double clip_pair_speedup(const clip_pair *pair);
/* Saves frames with a quality of MP4 and frames per second (0: the default, those of the frames).
 * CLI_FAILED after a message. */
int clip_save(clip_maker *maker, const esa_frames *frames, const char *path, int64_t quality,
              double fps);
/* The same with two videos side by side. */
int clip_save_beside(clip_maker *maker, const esa_frames *left, const esa_frames *right,
                     const char *path, int64_t quality, double fps);

/* SIGINT, SIGTERM and SIGHUP end the work between two layers, or a call that waits for input, and
 * leave nothing behind; a second signal ends the process. Those that are ignored stay ignored. */
void clip_catch_signals(void);
int clip_interrupted(void);
/* Waits until standard input can be read without waiting. Returns 1 if a signal came first. */
int clip_wait_input(void);
/* Progress of esa_generate: user is a clip_watch. */
int32_t clip_progress(void *user, const esa_progress *progress);
/* "1:05" or "2:03:04". */
void clip_clock(char out[24], double seconds);

#endif
