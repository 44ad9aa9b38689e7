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

#include "model/weights.h"
#include "nn/nn.h"

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

#endif
