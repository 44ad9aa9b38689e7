/* family.h - a family of models (Wan, CogVideoX, ...) as the pipeline sees it: one constant table.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The files beside this one (model.c, embeds.c, prepare.c, begin.c, denoise.c, decode.c) run every
 * family through its table and never ask which family it is. A family X has x_family.c, which holds
 * its table, reads its configurations, names its defaults, and forwards to its parts in dit/, vae/
 * and text/. family.c lists the tables.
 *
 * Handles are opaque here: the family's dit.open makes an esa_dit, and so on. A function that fails
 * leaves one message in the ctx. Members that may be NULL say so. */
#ifndef ESA_MODEL_FAMILY_H
#define ESA_MODEL_FAMILY_H

#include "esa/esa_session.h"
#include "esa/esa_video.h"
#include "model/config.h"
#include "model/part.h"
#include "model/store.h"

typedef struct esa_dit esa_dit;
typedef struct esa_vae esa_vae;
typedef struct esa_text_part esa_text_part;

/* ---------------------------------------------------------------- text */

/* The embeddings of one prompt, in host memory. */
typedef struct esa_text {
    float *data;   /* [rows][text_dim] */
    float *pooled; /* [pooled_dim]; NULL if the family has none */
    int64_t rows;
    int64_t valid; /* the first rows, which are tokens; the others are padding */
} esa_text;

typedef struct esa_text_ops {
    /* Compares names and shapes, and opens the tokenizers once. */
    esa_status (*check)(const esa_part_env *env, const void *configs);
    esa_status (*open)(const esa_part_env *env, esa_text_part **part, const void *configs);
    void (*free)(esa_text_part *part); /* accepts NULL */
    void (*memory)(const esa_text_part *part, int64_t *parameters, int64_t *held, int64_t *mapped);
    /* Fills text->data, pooled and valid. The caller has set data to zero. Fails with
     * ESA_ERR_ARGUMENT if the prompt is not UTF-8 or too long. */
    esa_status (*encode)(esa_text_part *part, esa_text *text, const char *prompt);
} esa_text_ops;

/* ---------------------------------------------------------------- image */

/* What a model of image to video gets from its image, in host memory; free with esa_image_free. */
typedef struct esa_image {
    float *embeds; /* [rows][width] states of the image encoder; NULL: the model has none */
    int64_t rows, embeds_bytes;
    float *condition; /* [channels][t][h][w] behind the latents in the transformer's input */
    int64_t condition_bytes;
} esa_image;
void esa_image_free(esa_ctx *ctx, esa_image *image);

/* ---------------------------------------------------------------- transformer */

/* Bytes of device memory that others will allocate after begin, beside weights and activations. */
typedef struct esa_dit_room {
    int64_t scratch;   /* size of the ctx's scratch */
    int64_t beside;    /* taken while the transformer works: masks of the session */
    int64_t after;     /* taken after end, when the activations are gone: the decoder */
    int64_t text_rows; /* sum of dit.text_rows over the branches; 0: not known */
} esa_dit_room;

/* One forward pass. esa_session_place has been called for its step and branch. */
typedef struct esa_dit_call {
    esa_session *session;
    int32_t branch;
    float *v;        /* the model's output, as large as x; f32 on the device, like x */
    const float *x;  /* [latent_channels][t][h][w] */
    double t;        /* timestep */
    double guidance; /* for transformers that take it as an input */
    int32_t second;  /* 1: the second of two transformers */
} esa_dit_call;

typedef struct esa_dit_ops {
    esa_status (*check)(const esa_part_env *env, const void *configs);
    /* dit keeps env->nn, which must outlive it. */
    esa_status (*open)(const esa_part_env *env, esa_dit **dit, const void *configs);
    void (*free)(esa_dit *dit); /* accepts NULL */
    void (*memory)(const esa_dit *dit, int64_t *parameters, int64_t *held, int64_t *mapped);
    /* The store of the weights, for its device memory (store.h). */
    esa_store *(*store)(esa_dit *dit);
    /* Fills in the layout that begin will make, but allocates nothing. The caller has set the
     * numbers of text tokens, as the family's text_place says. */
    esa_status (*layout)(const esa_dit *dit, const int32_t latent[3], esa_layout *layout,
                         int32_t selector, int32_t mode);
    /* Says how much device memory begin must leave free; it moves weights out for that. */
    void (*set_room)(esa_dit *dit, const esa_dit_room *room);
    /* The number of text rows that the transformer keeps. */
    int64_t (*text_rows)(const esa_dit *dit, const esa_text *text);
    /* Prepares a video with latents (t, h, w). Takes and fills in layout as the function layout
     * does; on return it is ready for esa_session_params.select.layout. branches: the number of
     * texts. */
    esa_status (*begin)(esa_dit *dit, const int32_t latent[3], esa_layout *layout, int32_t selector,
                        int32_t mode, int32_t branches);
    void (*end)(esa_dit *dit);            /* frees what begin and text have made */
    int64_t (*bytes)(const esa_dit *dit); /* the memory that begin has allocated */
    esa_status (*text)(esa_dit *dit, int32_t branch, const esa_text *text);
    /* Sets the image, which must live until end; NULL: the family has none. */
    esa_status (*image)(esa_dit *dit, const esa_image *image);
    esa_status (*forward)(esa_dit *dit, const esa_dit_call *call);
} esa_dit_ops;

/* ---------------------------------------------------------------- VAE */

typedef struct esa_vae_ops {
    esa_status (*check)(const esa_part_env *env, const void *configs);
    esa_status (*open)(const esa_part_env *env, esa_vae **vae, const void *configs);
    void (*free)(esa_vae *vae); /* accepts NULL */
    void (*memory)(const esa_vae *vae, int64_t *parameters, int64_t *held, int64_t *mapped);
    /* Frames, height and width that latents (t, h, w) give. The VAE need not be open. */
    void (*size)(const void *configs, const int32_t latent[3], int32_t size[3]);
    /* Fails with ESA_ERR_ARGUMENT for sizes and tiles that the decoder does not take. */
    esa_status (*check_sizes)(const esa_vae *vae, const int32_t latent[3], int32_t tile);
    /* The memory that the function frames needs beside the weights; INT64_MAX: it is not known. */
    int64_t (*bytes)(const esa_vae *vae, const int32_t latent[3], int32_t tile);
    /* Decodes latents on the device to rgb bytes [frames][height][width][3] in host memory.
     * tile: side of a tile in pixels; 0: whole frames. */
    esa_status (*frames)(esa_vae *vae, const float *latents, const int32_t latent[3], int32_t tile,
                         uint8_t *rgb);
} esa_vae_ops;

/* ---------------------------------------------------------------- families */

/* What a weight file without a folder is: no model of the family, one of the family that the engine
 * does not run, or one that it runs if the tensors fit. */
enum { ESA_KIND_OTHER = 0, ESA_KIND_KNOWN = 1, ESA_KIND_RUNS = 2 };

/* A published model: how it is recognised, its name and its defaults. */
typedef struct esa_known_model {
    const char *name;
    int32_t variant; /* as in esa_facts */
    int32_t layers, heads, head_dim, text_dim;
    int32_t frames, height, width, steps;
    double guidance;
    double guidance_2; /* guidance of the second transformer; 0: there is only one */
} esa_known_model;

/* What the pipeline must know of an opened model. */
typedef struct esa_facts {
    /* Filled in by describe: layers to text_tokens, fps, config_hash. model.c adds the name and the
     * defaults of the known model. */
    esa_model_info info;
    int32_t variant;    /* tells models of one shape apart */
    int32_t pooled_dim; /* size of esa_text.pooled; 0: none */
    int32_t image;      /* 1: the model makes a video from an image */
    double boundary;    /* the second transformer runs timesteps below boundary * train_steps; 0:
                         * there is only one transformer */
    int32_t tile_unit;  /* the side of a decoder tile in pixels is a multiple of this */
} esa_facts;

/* A model folder while its configurations are read. */
typedef struct esa_folder {
    esa_ctx *ctx;
    const char *folder;
    int32_t parts; /* ESA_PART_* bits that will be used */
    const esa_model_index *index;
    char path[4400];
} esa_folder;

/* Sets f->path to folder/name. Fails with ESA_ERR_ARGUMENT if that is too long. */
esa_status esa_folder_path(esa_folder *f, const char *name);
/* Does the same, and returns 1 if the file can be read, else 0. */
int32_t esa_folder_has(esa_folder *f, const char *name);

/* Where text is in self-attention: nowhere, in front of the video, behind it. */
enum { ESA_TEXT_APART = 0, ESA_TEXT_FRONT, ESA_TEXT_BACK };

typedef struct esa_family {
    const char *name;                   /* for messages */
    const char *const *pipelines;       /* classes in model_index.json; ends with NULL */
    int64_t config_bytes;               /* size of the family's struct of configurations */
    const esa_known_model *known;       /* [known_count] */
    int32_t known_count, known_default; /* an unknown model gets the sizes of known_default */
    int32_t text_place;                 /* ESA_TEXT_* */
    int32_t sched_group;                /* the ESA_SCHED_GROUP_* of its schedulers */
    /* 1: its pipeline gives the Euler scheduler n sigmas: linspace(1, 0, n + 1) without the 0. */
    int32_t sigmas_to_zero;
    int32_t frames_first; /* 1: noise is drawn as [frames][channels], not [channels][frames] */
    /* 1: guidance is an input of the transformer, so there is one branch. */
    int32_t embedded_guidance;

    /* Reads the configurations of the parts in use and compares them with one another. The caller
     * has set configs to zero. */
    esa_status (*read)(esa_folder *folder, void *configs);
    void (*describe)(const void *configs, esa_facts *facts);
    /* Random weights: fills in the configurations and the size (frames, height, width) of a shape.
     * Returns 0 for a name that the family does not have; shape_names lists those it has. */
    int32_t (*shape)(const char *name, void *configs, esa_sched_config *sched, int32_t size[3]);
    const char *shape_names;
    /* Returns the guidance at a step with this timestep. NULL: it is the same at every step. */
    double (*guidance)(const esa_generate_params *params, int32_t step, double t);

    /* Models of image to video; NULL: the family has none. image_check compares the names and
     * shapes of the image encoder. image_make makes what the transformer needs from a picture rgb
     * [height][width][3] for latents (t, h, w); image_bytes is the device memory for that. */
    esa_status (*image_check)(const esa_part_env *env, const void *configs);
    int64_t (*image_bytes)(const esa_vae *vae, const void *configs, const int32_t latent[3]);
    esa_status (*image_make)(const esa_part_env *env, esa_vae *vae, const void *configs,
                             const uint8_t *rgb, const int32_t size[2], const int32_t latent[3],
                             esa_image *image);

    esa_dit_ops dit;
    esa_vae_ops vae;
    esa_text_ops text;
} esa_family;

extern const esa_family esa_wan_family, esa_cog_family, esa_hunyuan_family;

/* Finds the family of the folder's pipeline. Fails with ESA_ERR_UNSUPPORTED. */
esa_status esa_family_find(esa_ctx *ctx, const esa_family **family, const esa_model_index *index);
/* Fails with ESA_ERR_UNSUPPORTED if the family does not run with this scheduler (ESA_SCHED_*). */
esa_status esa_family_check_sched(esa_ctx *ctx, const esa_family *family, int32_t kind);
/* Finds the family that has random weights of this name, and makes configs as shape fills them in;
 * the caller frees configs (family->config_bytes). Fails with ESA_ERR_ARGUMENT. */
esa_status esa_family_shape(esa_ctx *ctx, const esa_family **family, void **configs,
                            const char *name, esa_sched_config *sched, int32_t size[3]);

#endif
