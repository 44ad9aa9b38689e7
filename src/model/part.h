/* part.h - the environment of a model part (transformer, VAE, text encoder).
 * SPDX-License-Identifier: Apache-2.0
 *
 * The engine works on the caller's ctx. Its public calls hold the guard, so parts call the rooms
 * behind libesa's public calls (session/session.h, attn/attn.h), which do not take it.
 *
 * A part X has a forward call and three others:
 *     X_check(env, &config)          compares names and shapes only
 *     X_open(env, &x, &config)       checks and loads; x owns its weights and activations
 *     X_free(x)
 * Parts never print. They report progress through env->tick if they take longer than a second. */
#ifndef ESA_MODEL_PART_H
#define ESA_MODEL_PART_H

#include "model/store.h"

typedef struct esa_part_env {
    esa_nn *nn;         /* nn->ctx is the caller's ctx */
    const char *folder; /* the model's folder */
    /* The transformer's weights in one file, safetensors or GGUF, instead of those in the folder;
     * NULL: none. Only read while the transformer is checked and opened. */
    const char *transformer;
    const esa_lora *lora; /* [loras] LoRA files of the transformer; likewise */
    int32_t loras;
    /* The same for the second transformer of a model that has two. */
    const char *transformer_2;
    const esa_lora *lora_2;
    int32_t loras_2;
    int32_t hold;     /* ESA_HOLD_*, for weights in host memory */
    int32_t linear;   /* ESA_DTYPE_BF16 (or 0) or ESA_DTYPE_F8: linear layers on a device */
    const char *keep; /* tensors that stay in BF16 (store.h); may be NULL */
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

/* Opens the files folder/STEM* in the model's folder, or random weights if env says so. part is
 * the name in messages. */
esa_status esa_part_open(const esa_part_env *env, esa_weights **w, const char *folder,
                         const char *stem, const char *part);
/* The same for a transformer, which may also come from the file env->transformer. */
esa_status esa_part_open_transformer(const esa_part_env *env, esa_weights **w, const char *folder);

/* Wants name.weight [out][in] and name.bias [out]. flags: ESA_WANT_*; a bias is never in F8. */
void esa_part_want_linear(esa_weights *w, esa_linear *l, int32_t flags, int64_t out, int64_t in,
                          const char *name);

/* Loads checked weights into a store, as env says. */
enum {
    ESA_LOAD_TRANSFORMER, /* linear layers as env->linear and env->keep say */
    ESA_LOAD_ENCODER      /* BF16; a large one, which runs once, stays in its file */
};
esa_status esa_part_load(const esa_part_env *env, esa_store **store, esa_weights *w, int32_t kind);

#endif
