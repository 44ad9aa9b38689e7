/* part.h - what every part of a model (transformer, VAE, encoder) begins with: its environment, its
 * weights, and the memory of its struct.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The engine works on the caller's ctx. Its public calls hold the guard, so parts call the rooms
 * behind libesa's public calls (session/session.h, attn/attn.h), which do not take it.
 *
 * A part comes to life in two steps. `make` opens its files, states its tensors (weights/rows.h)
 * and compares them; `load` brings the compared weights to the device. A model that is only checked
 * ends after the first.
 *
 * Parts never print. They report progress through env.tick if they take longer than a second. */
#ifndef ESA_MODEL_PART_H
#define ESA_MODEL_PART_H

#include "model/weights/store.h"
#include "model/weights/rows.h"

typedef struct esa_part_env {
    esa_nn *nn;         /* nn->ctx is the caller's ctx; must outlive the part */
    const char *folder; /* the model's folder */
    /* The folder of the transformer in it; NULL: transformer. */
    const char *transformer_folder;
    /* The transformer's weights in one file, safetensors or GGUF, instead of those in the folder;
     * NULL: none. Only read while the transformer is made. */
    const char *transformer;
    const esa_lora *lora; /* [loras] LoRA files of the transformer; likewise */
    int32_t loras;
    /* The same for the second transformer of a model that has two. */
    const char *transformer_2;
    const esa_lora *lora_2;
    int32_t loras_2;
    /* The transformer's weight file in memory, which must outlive the part; for fuzzing. NULL:
     * none. */
    const void *file;
    int64_t file_bytes;
    int32_t hold;     /* ESA_HOLD_*, for weights in host memory */
    int32_t linear;   /* ESA_DTYPE_BF16 (or 0) or ESA_DTYPE_F8: linear layers on a device */
    const char *keep; /* tensors that stay in BF16 (store.h); may be NULL; read while loading */
    int64_t limit;    /* bytes of device memory in all; 0: no limit */
    /* Asks another part to give device memory back (store.h); may be NULL. */
    esa_status (*ask)(void *user, int64_t bytes);
    void *ask_user;
    int32_t random;                               /* 1: random weights instead of files */
    void (*report)(void *user, const char *line); /* esa_model_params.report */
    void *report_user;
    /* Called between units of work with done and total; may be NULL. A return value other than 0
     * stops the part with ESA_ERR_STATE "cancelled". */
    int32_t (*tick)(void *user, int64_t done, int64_t total);
    void *tick_user;
} esa_part_env;

typedef struct esa_part {
    esa_part_env env;
    esa_weights *weights; /* compared by make; owned */
    esa_store *store;     /* owned; NULL before load */
    struct {
        void *data;
        int64_t bytes;
    } own[4]; /* the struct itself, then its arrays */
    int32_t owned;
} esa_part;

/* Returns a zeroed struct of so many bytes, which begins with an esa_part; on failure NULL, with
 * the message "out of memory for WHAT". Copies env. */
void *esa_part_new(const esa_part_env *env, int64_t bytes, const char *what);
/* *data = a zeroed array that lives as long as the part; at most three per part. */
esa_status esa_part_array(esa_part *part, void **data, int64_t count, int64_t size);
/* Frees the store, the weights, the arrays and the struct; accepts NULL. */
void esa_part_free(esa_part *part);

/* Opens the files folder/STEM* in the model's folder, or random weights if env says so. name is
 * that of the part in messages. */
esa_status esa_part_open(esa_part *part, const char *folder, const char *stem, const char *name);
/* The same for a transformer, which may also come from a file that env names. */
esa_status esa_part_open_transformer(esa_part *part);
/* Compares the tensors that were stated with those of the files. */
esa_status esa_part_compare(esa_part *part);

/* Loads compared weights into a store, as env says. */
enum {
    ESA_LOAD_TRANSFORMER, /* linear layers as env.linear and env.keep say */
    ESA_LOAD_ENCODER      /* BF16; a large one, which runs once, stays in its file */
};
esa_status esa_part_load(esa_part *part, int32_t kind);
/* The number of parameters, and the bytes of weights in copies and in mapped files. */
void esa_part_memory(const esa_part *part, int64_t *parameters, int64_t *held, int64_t *mapped);

/* ESA_ERR_STATE "cancelled" if env.tick says so. */
esa_status esa_part_tick(const esa_part *part, int64_t done, int64_t total);
/* Calls run for blocks 0 .. count-1, each while the weights of its group, 1 + i, are in place. */
esa_status esa_part_blocks(esa_part *part, int32_t count, esa_status (*run)(void *user, int32_t i),
                           void *user);

/* One call of an encoder: the buffers that it places on the device, and what it computes in them.
 * place is called with a NULL base first, which counts. esa_part_run then makes weights leave the
 * device until the buffers fit. */
typedef struct esa_part_work {
    void (*place)(void *user, esa_carve *carve);
    esa_status (*run)(void *user);
    const char *what; /* "out of memory for WHAT" */
} esa_part_work;
esa_status esa_part_run(esa_part *part, const esa_part_work *work, void *user);

/* ---------------------------------------------------------------- what parts hand on */

/* The embeddings of one prompt, in host memory. */
typedef struct esa_text {
    float *data;   /* [rows][text_dim] */
    float *pooled; /* [pooled_dim]; NULL if the family has none */
    int64_t rows;
    int64_t valid; /* the first rows, which are tokens; the others are padding */
} esa_text;

/* What a model of image to video gets from its image, in host memory; free with esa_image_free. */
typedef struct esa_image {
    float *embeds; /* [rows][width] states of the image encoder; NULL: the model has none */
    int64_t rows, embeds_bytes;
    float *condition; /* [channels][t][h][w] behind the latents in the transformer's input */
    int64_t condition_bytes;
} esa_image;
void esa_image_free(esa_ctx *ctx, esa_image *image);

#endif
