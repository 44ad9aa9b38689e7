/* part.c - see part.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/part.h"

/* An encoder with this many bytes in f32 stays in its file. */
#define LARGE (INT64_C(1) << 30)

esa_status esa_part_open(const esa_part_env *env, esa_weights **w, const char *folder,
                         const char *stem, const char *part)
{
    esa_ctx *ctx = env->nn->ctx;
    return env->random ? esa_weights_open_random(ctx, w, part)
                       : esa_weights_open_part(ctx, w, env->folder, folder, stem, part);
}

esa_status esa_part_open_transformer(const esa_part_env *env, esa_weights **w, const char *folder)
{
    return env->transformer && !env->random
               ? esa_weights_open_file(env->nn->ctx, w, env->transformer, folder)
               : esa_part_open(env, w, folder, "diffusion_pytorch_model", folder);
}

void esa_part_want_linear(esa_weights *w, esa_linear *l, int32_t flags, int64_t out, int64_t in,
                          const char *name)
{
    esa_weights_want(w, &l->weight, flags | ESA_WANT_PRODUCT, 2, (int64_t[]){ out, in },
                     "%s.weight", name);
    esa_weights_want(w, &l->bias, flags & ~ESA_WANT_F8, 1, &out, "%s.bias", name);
}

esa_status esa_part_load(const esa_part_env *env, esa_store **store, esa_weights *w, int32_t kind)
{
    esa_store_settings settings = {
        .hold = env->hold, .limit = env->limit, .ask = env->ask, .ask_user = env->ask_user
    };
    if (kind == ESA_LOAD_TRANSFORMER) {
        settings.linear = env->linear;
        settings.keep = env->keep;
    } else if (env->hold == ESA_HOLD_AUTO && esa_weights_parameters(w) >= LARGE / 4) {
        settings.hold = ESA_HOLD_FILE;
    }
    esa_weights_watch(w, env->tick, env->tick_user);
    return esa_store_open(env->nn, store, w, &settings);
}
