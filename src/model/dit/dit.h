/* dit.h - a transformer of any family: computes the velocity from latents, timestep and text.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     esa_dit_make(env, &dit, &esa_wan_dit_kind, &config);          // compares the files
 *     esa_dit_load(dit);
 *     esa_dit_begin(dit, latent, &layout, selector, mode, branches);  // for one video size
 *     esa_dit_text(dit, branch, &text);                               // once for each branch
 *     for each step and branch: esa_session_place(s, i, branch); esa_dit_forward(dit, &call);
 *
 * Tokens of the video are put into the session's order when latents become patches, and back when
 * patches become latents. Positions follow the same order. Latents are f32 [channels][T][H][W] in
 * the memory of nn's device; what lies between them has the type of the device's activations.
 *
 * A function that fails leaves one message in the ctx. */
#ifndef ESA_MODEL_DIT_H
#define ESA_MODEL_DIT_H

#include "esa/esa_session.h"
#include "model/config/config.h"
#include "model/part/part.h"

typedef struct esa_dit esa_dit;
typedef struct esa_dit_kind esa_dit_kind; /* dit_kind.h */

/* The kinds. Their configurations are esa_wan_config, esa_cog_config and esa_hunyuan_config. */
extern const esa_dit_kind esa_wan_dit_kind, esa_cog_dit_kind, esa_hunyuan_dit_kind;
/* The sizes of the published HunyuanVideo; its hash is empty. */
extern const esa_hunyuan_config esa_hunyuan_published;
/* Layouts of weight files beside that of diffusers. */
extern const esa_naming esa_wan_original, esa_cog_original, esa_hunyuan_original;

/* Where text is in self-attention: nowhere, in front of the video, behind it. */
enum { ESA_TEXT_APART = 0, ESA_TEXT_FRONT, ESA_TEXT_BACK };

/* Bytes of device memory that others will allocate after begin, beside weights and activations. */
typedef struct esa_dit_room {
    int64_t scratch;   /* size of the ctx's scratch */
    int64_t beside;    /* taken while the transformer works: masks of the session */
    int64_t after;     /* taken after end, when the activations are gone: the decoder */
    int64_t text_rows; /* sum of esa_dit_text_rows over the branches; 0: not known */
} esa_dit_room;

/* One forward pass. esa_session_place has been called for its step and branch. */
typedef struct esa_dit_call {
    esa_session *session;
    int32_t branch;
    float *v;        /* the model's output, as large as x; f32 on the device, like x */
    const float *x;  /* [latent_channels][t][h][w] */
    double t;        /* timestep */
    double guidance; /* for transformers that take it as an input */
    int32_t second;  /* 1: the second of two transformers (pair.h) */
} esa_dit_call;

/* Opens the weight files and compares them with the config; copies it. */
esa_status esa_dit_make(const esa_part_env *env, esa_dit **dit, const esa_dit_kind *kind,
                        const void *config);
esa_status esa_dit_load(esa_dit *dit);
void esa_dit_free(esa_dit *dit); /* accepts NULL */
void esa_dit_memory(const esa_dit *dit, int64_t *parameters, int64_t *held, int64_t *mapped);
/* The store of the weights, for its device memory (store.h); NULL before load. */
esa_store *esa_dit_store(esa_dit *dit);

/* Fills in the layout that begin will make, but allocates nothing. The caller has set the numbers
 * of text tokens. Fails with ESA_ERR_ARGUMENT for sizes that the patches do not divide. */
esa_status esa_dit_layout(const esa_dit *dit, const int32_t latent[3], esa_layout *layout,
                          int32_t selector, int32_t mode);
/* Says how much device memory begin must leave free, for which it moves weights out; NULL: it
 * estimates. */
void esa_dit_set_room(esa_dit *dit, const esa_dit_room *room);
/* Prepares a video with latents (t, h, w). layout gives order, window and protect_first_frame of
 * the session; the selector's defaults are filled in. On return it is ready for
 * esa_session_params.select.layout. mode: ESA_MODE_* of the selection. branches: the number of
 * texts, 1 to 16. */
esa_status esa_dit_begin(esa_dit *dit, const int32_t latent[3], esa_layout *layout,
                         int32_t selector, int32_t mode, int32_t branches);
void esa_dit_end(esa_dit *dit);            /* frees what begin, text and image have made */
int64_t esa_dit_bytes(const esa_dit *dit); /* the memory that begin has allocated */
/* The number of rows of this text that the transformer keeps. */
int64_t esa_dit_text_rows(const esa_dit *dit, const esa_text *text);
/* Sets the text of a branch. */
esa_status esa_dit_text(esa_dit *dit, int32_t branch, const esa_text *text);
/* Sets the image; fails with ESA_ERR_STATE if the transformer takes none. */
esa_status esa_dit_image(esa_dit *dit, const esa_image *image);
esa_status esa_dit_forward(esa_dit *dit, const esa_dit_call *call);

/* For tests and tools: called with the output of each block, hidden f32 [rows][d] with the video in
 * grid order and the text where self-attention has it, and with block = -1 for the input of the
 * first. May be NULL. */
typedef void (*esa_dit_watch)(void *user, int32_t block, const float *hidden, int64_t rows,
                              int64_t d);
void esa_dit_set_watch(esa_dit *dit, esa_dit_watch watch, void *user);

/* What a weight file without a folder is: no model of the kind, one of the kind that the engine
 * does not run, or one that it runs if the tensors fit. */
enum { ESA_KIND_OTHER = 0, ESA_KIND_KNOWN = 1, ESA_KIND_RUNS = 2 };
int64_t esa_dit_config_bytes(const esa_dit_kind *kind); /* of the config of a kind */
int32_t esa_dit_text_place(const esa_dit_kind *kind);   /* ESA_TEXT_* */
/* Which of them an opened file is. *config = its configuration as far as names and shapes tell it,
 * and line = what it is, unless it is OTHER. */
int32_t esa_dit_recognise(const esa_dit_kind *kind, esa_weights *w, void *config, char *line,
                          size_t bytes);

#endif
