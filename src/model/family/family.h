/* family.h - a family of models (Wan, CogVideoX, ...) as the pipeline sees it: one constant table.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The pipeline (model.c, embeds.c, prepare.c, begin.c, denoise.c, decode.c) runs every family
 * through its table and never asks which family it is. A family X has x_family.c, which holds its
 * table, reads its configurations, names its defaults, and says of which kinds its parts are; the
 * parts are in dit/, vae/ and text/. family.c lists the tables.
 *
 * Members that may be NULL say so. */
#ifndef ESA_MODEL_FAMILY_H
#define ESA_MODEL_FAMILY_H

#include "esa/esa_video.h"
#include "model/dit/pair.h"
#include "model/text/text.h"
#include "model/vae/vae.h"

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

typedef struct esa_family {
    const char *name;                   /* for messages */
    const char *const *pipelines;       /* classes in model_index.json; ends with NULL */
    int64_t config_bytes;               /* size of the family's struct of configurations */
    const esa_known_model *known;       /* [known_count] */
    int32_t known_count, known_default; /* an unknown model gets the sizes of known_default */
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

    /* The parts, and where their configurations are in the family's struct. */
    const esa_dit_kind *dit;
    size_t dit_config, dit_2_config; /* dit_2_config: of the second transformer, if there is one */
    const esa_vae_kind *vae;
    size_t vae_config;
    const esa_text_kind *text;
    size_t text_config;
} esa_family;

extern const esa_family esa_wan_family, esa_cog_family, esa_hunyuan_family;
/* All of them; ends with NULL. */
extern const esa_family *const esa_families[];
/* Their names: "A, B or C". */
void esa_family_names(char *text, size_t size);

/* Finds the family of the folder's pipeline. Fails with ESA_ERR_UNSUPPORTED. */
esa_status esa_family_find(esa_ctx *ctx, const esa_family **family, const esa_model_index *index);
/* Fails with ESA_ERR_UNSUPPORTED if the family does not run with this scheduler (ESA_SCHED_*). */
esa_status esa_family_check_sched(esa_ctx *ctx, const esa_family *family, int32_t kind);
/* Finds the family that has random weights of this name, and makes configs as shape fills them in;
 * the caller frees configs (family->config_bytes). Fails with ESA_ERR_ARGUMENT. */
esa_status esa_family_shape(esa_ctx *ctx, const esa_family **family, void **configs,
                            const char *name, esa_sched_config *sched, int32_t size[3]);

#endif
