/* open_part.h - opens parts of models in one call, and runs a transformer without a pipeline.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_OPEN_PART_H
#define ESA_TESTS_MODEL_OPEN_PART_H

#include "model/dit/dit.h"
#include "model/text/causal.h"
#include "model/text/umt5.h"
#include "model/vae/vae.h"

static inline esa_status open_dit(const esa_part_env *env, esa_dit **dit, const esa_dit_kind *kind,
                                  const void *config)
{
    esa_status status = esa_dit_make(env, dit, kind, config);
    if (!status) status = esa_dit_load(*dit);
    if (!status) return ESA_OK;
    esa_dit_free(*dit);
    *dit = NULL;
    return status;
}

static inline esa_status check_dit(const esa_part_env *env, const esa_dit_kind *kind,
                                   const void *config)
{
    esa_dit *dit;
    const esa_status status = esa_dit_make(env, &dit, kind, config);
    esa_dit_free(dit);
    return status;
}

static inline esa_status open_vae(const esa_part_env *env, esa_vae **vae, const esa_vae_kind *kind,
                                  const void *config)
{
    esa_status status = esa_vae_make(env, vae, kind, config);
    if (!status) status = esa_vae_load(*vae);
    if (!status) return ESA_OK;
    esa_vae_free(*vae);
    *vae = NULL;
    return status;
}

static inline esa_status check_vae(const esa_part_env *env, const esa_vae_kind *kind,
                                   const void *config)
{
    esa_vae *vae;
    const esa_status status = esa_vae_make(env, &vae, kind, config);
    esa_vae_free(vae);
    return status;
}

static inline esa_status load_encoder(esa_status made, esa_part **encoder)
{
    const esa_status status = made ? made : esa_part_load(*encoder, ESA_LOAD_ENCODER);
    if (!status) return ESA_OK;
    esa_part_free(*encoder);
    *encoder = NULL;
    return status;
}

static inline esa_status open_umt5(const esa_part_env *env, esa_part **encoder,
                                   const esa_umt5_config *config)
{
    return load_encoder(esa_umt5_make(env, encoder, config), encoder);
}

static inline esa_status check_umt5(const esa_part_env *env, const esa_umt5_config *config)
{
    esa_part *encoder;
    const esa_status status = esa_umt5_make(env, &encoder, config);
    esa_part_free(encoder);
    return status;
}

static inline esa_status open_causal(const esa_part_env *env, esa_part **encoder,
                                     const esa_causal_config *config, const char *folder)
{
    return load_encoder(esa_causal_make(env, encoder, config, folder), encoder);
}

static inline esa_status check_causal(const esa_part_env *env, const esa_causal_config *config,
                                      const char *folder)
{
    esa_part *encoder;
    const esa_status status = esa_causal_make(env, &encoder, config, folder);
    esa_part_free(encoder);
    return status;
}

static inline esa_status set_text(esa_dit *dit, int32_t branch, const float *embeds, int64_t rows)
{
    const esa_text text = { .data = (float *)(uintptr_t)embeds, .rows = rows, .valid = rows };
    return esa_dit_text(dit, branch, &text);
}

static inline esa_status forward(esa_dit *dit, esa_session *session, int32_t branch, float *v,
                                 const float *x, double t)
{
    const esa_dit_call call = { .session = session, .branch = branch, .v = v, .x = x, .t = t };
    return esa_dit_forward(dit, &call);
}

#endif
