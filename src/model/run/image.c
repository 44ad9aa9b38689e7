/* image.c - the picture of a call of esa_generate, for models of image to video.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/run/run.h"

#include <math.h>
#include "media/frames.h"

/* Models with an image need one, others take none. */
static esa_status check_given(const esa_model *m, const esa_generate_params *p)
{
    if (m->facts.image && !p->image)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT,
                        "this model makes a video from an image; give one");
    if (!m->facts.image && p->image)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "this model takes no image");
    return ESA_OK;
}

/* As in diffusers' example: the area of the default, in whole patches. */
static int32_t side_of(double side, int64_t unit)
{
    const int64_t whole = (int64_t)nearbyint(side) / unit * unit;
    return (int32_t)esa_max64(unit, whole);
}

esa_status esa_run_image_size(esa_model *m, esa_generate_params *p)
{
    const esa_model_info *i = &m->facts.info;
    ESA_TRY(check_given(m, p));
    if (!p->image || p->height || p->width) return ESA_OK;
    esa_frames_info info = { .struct_size = sizeof info };
    esa_ctx_lend(m->ctx); /* the public call takes the guard */
    const esa_status status = esa_frames_peek(m->ctx, &info, p->image, NULL);
    esa_ctx_take_back(m->ctx);
    if (status) return status;
    const double area = (double)i->height * i->width, ratio = (double)info.height / info.width;
    p->height = side_of(sqrt(area * ratio), (int64_t)i->factor[1] * i->patch[1]);
    p->width = side_of(sqrt(area / ratio), (int64_t)i->factor[2] * i->patch[2]);
    return ESA_OK;
}

esa_status esa_run_image(esa_model *m, esa_run *r)
{
    esa_frames *frames = NULL;
    if (!r->p.image) return ESA_OK;
    if (!m->vae)
        return esa_fail(m->ctx, ESA_ERR_STATE,
                        "this model was opened without its VAE, which encodes the image");
    esa_ctx_lend(m->ctx);
    esa_status status = esa_frames_load(m->ctx, &frames, r->p.image, NULL);
    esa_ctx_take_back(m->ctx);
    if (status) return status;
    const int32_t size[2] = { frames->height, frames->width };
    esa_part_env env = m->env;
    env.report = NULL;
    env.tick = NULL;
    status = esa_store_clear(esa_dit_store(esa_pair_active(m->dit)),
                             m->family->image_bytes(m->vae, m->configs, r->latent), 0);
    if (!status)
        status = m->family->image_make(&env, m->vae, m->configs, frames->rgb, size, r->latent,
                                       &r->image);
    esa_frames_free(frames);
    return status;
}
