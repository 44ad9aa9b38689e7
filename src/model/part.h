/* part.h - what every part of a model (transformer, VAE, text encoder) is given.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The engine makes an inner ctx with the threads, allocator and logger of the caller's, so that
 * public calls (sessions, attention) can be used below esa_generate, which holds the guard of the
 * caller's ctx; sentences are copied outward when a call ends.
 *
 * A part has three calls, each with its own names:
 *     X_check(env, &config)          names and shapes only
 *     X_open(env, &x, &config)       check and load; owns its weights and activations
 *     X_free(x)
 * and its forward. Parts never print, and report units through env->tick where they take longer
 * than a second. */
#ifndef ESA_MODEL_PART_H
#define ESA_MODEL_PART_H

#include "model/weights.h"
#include "nn/nn.h"

typedef struct esa_part_env {
    esa_nn *nn;         /* nn->ctx is the inner ctx */
    const char *folder; /* of the model */
    int32_t hold;       /* ESA_HOLD_* */
    int32_t reserved0;
    void (*report)(void *user, const char *line); /* esa_model_params.report */
    void *report_user;
    /* NULL, or called between units of work (done of total); not 0: stop with ESA_ERR_STATE
     * "cancelled". */
    int32_t (*tick)(void *user, int64_t done, int64_t total);
    void *tick_user;
} esa_part_env;

#endif
