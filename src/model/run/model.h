/* model.h - an opened model folder: configurations, parts, and the state of the current call.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The calls of esa_video.h: model.c opens and describes a folder, embeds.c gets the embeddings,
 * pipeline.c makes latents and videos, decode.c turns latents into frames. */
#ifndef ESA_MODEL_MODEL_H
#define ESA_MODEL_MODEL_H

#include "esa/esa_video.h"
#include "model/family/family.h"

/* A text and its embeddings, kept for the next video: a prompt is often used again, with other
 * settings, and the negative prompt hardly changes. */
typedef struct esa_known_text {
    char *text;     /* NULL: none */
    int64_t length; /* bytes of text, with its end */
    esa_text embeds;
    int64_t bytes; /* of embeds.data, with pooled behind it */
} esa_known_text;

struct esa_model {
    esa_ctx *ctx; /* the caller's; its guard is held while a call runs */
    esa_nn nn;    /* on the device of the model */
    esa_part_env env;
    char *folder; /* owned */
    int64_t folder_bytes;
    int32_t parts;         /* ESA_PART_* bits that may be used */
    int32_t random;        /* 1: random weights; folder is the name of a shape */
    const char *host_root; /* where esa_host_available looks (NULL: the machine's own); for tests */
    esa_model_index index;
    const esa_family *family;
    void *configs; /* of the family; owned */
    esa_sched_config sched;
    esa_pair *dit;
    esa_vae *vae;
    esa_text_part *text;     /* loaded when it is first needed; NULL: made anew then */
    esa_known_text known[2]; /* of the branches, embeds.c */
    esa_facts facts;         /* defaults and sizes; esa_model_get_info adds parameters and memory */
    /* the current call, for the ticks of the parts */
    const esa_generate_params *call;
    esa_session *session;
    double began, stage_began;
    int32_t stage, done, total;
    int32_t cancelled;
    double density; /* density of the sparse calls so far */
};

/* Fails with ESA_ERR_STATE if a call of this model runs. That happens when its denoised callback,
 * to which the ctx is lent, calls the same model. */
esa_status esa_model_check_idle(const esa_model *model);

/* Frames, height and width that latents (t, h, w) give. The VAE need not be open. */
void esa_model_size(const esa_model *model, const int32_t latent[3], int32_t size[3]);

/* Loads the text encoder unless it is loaded. It stays until the transformer or the decoder need
 * its device memory; in host memory it stays as long as the model. */
esa_status esa_model_need_text(esa_model *model);
/* Frees the text encoder on a device; in host memory it stays. */
void esa_model_drop_text(esa_model *model);

/* Reports progress. Fails with ESA_ERR_STATE if the caller cancels the call. */
esa_status esa_model_progress(esa_model *model, int32_t stage, int32_t done, int32_t total);

/* decode.c: decodes latents [C][t][h][w], which are in the memory of the device of nn. The caller
 * owns *frames, even after a failure; then it may be NULL. */
esa_status esa_model_decode(esa_model *model, esa_frames **frames, const float *latents,
                            const int32_t latent[3], int32_t tile);

/* What the decoder must leave to others, and what there is. */
typedef struct esa_decoder_room {
    int64_t scratch; /* of calls on the device */
    int64_t more;    /* other bytes beside the decoder */
    int64_t host;    /* in host memory: esa_model_host_spare */
} esa_decoder_room;

/* begin.c: host memory that the decoder can have at most: what the machine and the limits of the
 * process's control groups leave, less a margin, with the transformer's activations, whose place
 * the decoder takes. INT64_MAX if the system does not say. Activations that are new do not count in
 * the machine's figures yet, so ask before they are allocated. */
int64_t esa_model_host_spare(const esa_model *model);

/* begin.c: finds a side of tiles with which decoding fits into memory. *tile is the side that was
 * asked for; 0: whole frames, or else the largest tiles that fit. *bytes = what the decoder takes.
 * Fails with ESA_ERR_MEMORY. */
esa_status esa_model_find_tile(esa_model *model, const int32_t latent[3],
                               const esa_decoder_room *room, int32_t *tile, int64_t *bytes);

/* The embeddings of the prompts: branch 0 is the prompt, branch 1 the negative prompt. */
typedef struct esa_embeds {
    /* data is from the ctx, with pooled behind it; [1].data is NULL without guidance */
    esa_text text[2];
    int64_t bytes[2];
} esa_embeds;

/* Reads params->prompt_embeds or runs the text encoder. Call esa_embeds_free, also after a failure.
 */
esa_status esa_embeds_get(esa_model *model, esa_embeds *embeds, const esa_generate_params *params,
                          int32_t branches);
/* Writes a file that params->prompt_embeds can name. */
esa_status esa_embeds_save(esa_model *model, const esa_embeds *embeds, const char *path);
void esa_embeds_free(esa_model *model, esa_embeds *embeds);
void esa_embeds_forget(esa_model *model); /* the texts that the model knows */

#endif
