/* decode.c - turns latents into frames: the last stage of esa_generate, and esa_decode.
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctx/engine_door.h"
#include "model/run/model.h"

#include <math.h>
#include "media/frames.h"
#include "model/run/tensor_file.h"

esa_decode_params esa_decode_params_default(void)
{
    return (esa_decode_params){ .struct_size = sizeof(esa_decode_params) };
}

esa_status esa_model_decode(esa_model *m, esa_frames **frames, const float *latents,
                            const int32_t latent[3], int32_t tile)
{
    int32_t size[3];
    esa_model_size(m, latent, size);
    ESA_TRY(esa_frames_new(m->ctx, frames, size[0], size[1], size[2], m->facts.info.fps));
    ESA_TRY(esa_model_progress(m, ESA_STAGE_DECODE, 0, latent[0]));
    return esa_vae_frames(m->vae, latents, latent, tile, (*frames)->rgb);
}

/* Refuses sides that frames cannot have, before sizes are computed from them. */
static esa_status check_sides(esa_model *m, const char *path, const int64_t *dim)
{
    static const int64_t most[3] = { ESA_FRAMES_MAX_COUNT, ESA_FRAMES_MAX_SIDE,
                                     ESA_FRAMES_MAX_SIDE };
    for (int i = 0; i < 3; i++)
        if (dim[1 + i] > most[i])
            return esa_fail(m->ctx, ESA_ERR_MISMATCH,
                            "%.200s: latents of %lld x %lld x %lld are larger than a video can be",
                            path, (long long)dim[1], (long long)dim[2], (long long)dim[3]);
    return ESA_OK;
}

/* Decodes latents in host memory. */
static esa_status decode_host(esa_model *m, esa_frames **frames, const float *latents,
                              const int32_t latent[3], int32_t tile)
{
    const int64_t bytes = (int64_t)4 * m->facts.info.latent_channels * latent[0] * latent[1] *
                          latent[2];
    void *x = NULL;
    int64_t decoder;
    ESA_TRY(esa_vae_check_sizes(m->vae, latent, tile));
    const esa_decoder_room room = { .more = bytes, .host = esa_model_host_spare(m) };
    ESA_TRY(esa_model_find_tile(m, latent, &room, &tile, &decoder));
    if (m->dit)
        ESA_TRY(esa_store_leave(esa_dit_store(esa_pair_active(m->dit)), bytes + decoder, 0));
    ESA_TRY(esa_nn_alloc(&m->nn, &x, bytes, "the latents"));
    esa_status status = esa_nn_upload(&m->nn, x, latents, bytes);
    if (!status) status = esa_model_decode(m, frames, x, latent, tile);
    esa_nn_free(&m->nn, x, bytes);
    return status;
}

static esa_status decode_latents(esa_model *m, esa_frames **frames, const esa_loaded *t,
                                 const esa_decode_params *params)
{
    ESA_TRY(check_sides(m, params->latents, t->dim));
    const int32_t latent[3] = { (int32_t)t->dim[1], (int32_t)t->dim[2], (int32_t)t->dim[3] };
    esa_generate_params call = esa_generate_params_default(); /* holds the progress function */
    call.progress = params->progress;
    call.progress_user = params->progress_user;
    m->call = &call;
    m->cancelled = 0;
    m->density = NAN;
    m->began = m->stage_began = esa_nn_now();
    const esa_status status = decode_host(m, frames, t->data, latent, params->vae_tile);
    m->call = NULL;
    return status;
}

static esa_status decode_file(esa_model *m, esa_frames **frames, const esa_decode_params *params)
{
    esa_loaded t;
    ESA_TRY(esa_model_check_idle(m));
    if (!m->vae) return esa_fail(m->ctx, ESA_ERR_STATE, "this model was opened without its VAE");
    if (!params->latents) return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "no latents file was given");
    const int64_t expected[4] = { m->facts.info.latent_channels, -1, -1, -1 };
    ESA_TRY(esa_loaded_read(m->ctx, &t, params->latents, "latents", 4, expected));
    const esa_status status = decode_latents(m, frames, &t, params);
    esa_loaded_free(m->ctx, &t);
    return esa_frames_drop(status, frames);
}

esa_status esa_decode(esa_model *model, esa_frames **frames, const esa_decode_params *params)
{
    if (frames) *frames = NULL;
    if (!model) return ESA_ERR_ARGUMENT;
    esa_status status;
    ESA_TRY(esa_engine_enter(model->ctx));
    if (!frames || !params)
        status = esa_fail(model->ctx, ESA_ERR_ARGUMENT, "frames or params is NULL");
    else if (params->struct_size != sizeof *params)
        status = esa_fail(model->ctx, ESA_ERR_VERSION,
                          "esa_decode_params has struct_size %u, this library expects %u",
                          params->struct_size, (unsigned)sizeof *params);
    else
        status = decode_file(model, frames, params);
    esa_ctx_leave(model->ctx);
    return status;
}
