/* preview.c - shows what a video will look like while it is made: one frame of the clean latents
 * that a step expects, pooled and decoded.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Pooled latents decode to about the same picture, smaller: so any decoder gives a preview at a
 * cost that does not grow with the video. */
#include "model/run/run.h"

#include "nn/ops.h"

#define SIDE 256 /* default of preview_side */

esa_status esa_run_preview_check(const esa_model *m, const esa_generate_params *p)
{
    if (!p->preview) return ESA_OK;
    if (!m->vae)
        return esa_fail(m->ctx, ESA_ERR_STATE,
                        "this model was opened without its VAE; it has no previews");
    if (p->preview_every < 0)
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "preview_every is %d, expected 0 or more",
                        p->preview_every);
    if (p->preview_side && (p->preview_side < 32 || p->preview_side > 1024))
        return esa_fail(m->ctx, ESA_ERR_ARGUMENT, "preview_side is %d, expected 32 .. 1024",
                        p->preview_side);
    return ESA_OK;
}

/* Latents of a preview: one frame, and how many of the video's it pools in each direction. */
static int32_t small_size(const esa_model *m, const esa_run *r, int32_t small[3])
{
    const int32_t *f = m->facts.info.factor;
    const int32_t most = r->p.preview_side ? r->p.preview_side : SIDE;
    int32_t pool = 1;
    while (pool < r->latent[1] && pool < r->latent[2] &&
           (r->latent[1] / pool * f[1] > most || r->latent[2] / pool * f[2] > most))
        pool++;
    small[0] = 1;
    small[1] = r->latent[1] / pool;
    small[2] = r->latent[2] / pool;
    return pool;
}

static int64_t small_count(const esa_model *m, const int32_t small[3])
{
    return (int64_t)m->facts.info.latent_channels * small[1] * small[2];
}

int64_t esa_run_preview_bytes(const esa_model *m, const esa_run *r)
{
    int32_t small[3];
    if (!r->p.preview || !r->p.preview_every) return 0;
    small_size(m, r, small);
    const int64_t bytes = esa_vae_bytes(m->vae, small, 0);
    return bytes == INT64_MAX ? 0 : bytes + 4 * small_count(m, small);
}

/* Fills out[C][small h][small w] with the means of the clean latents of the middle frame. plane has
 * room for two frames of one channel. */
static esa_status pool_latents(esa_model *m, const esa_run *r, float *out, const float of[2],
                               const float *v, float *plane, const int32_t small[3], int32_t pool)
{
    const int64_t h = r->latent[1], w = r->latent[2], frame = h * w;
    const float share = 1.0f / (float)(pool * pool);
    for (int32_t c = 0; c < m->facts.info.latent_channels; c++) {
        const int64_t at = ((int64_t)c * r->latent[0] + r->latent[0] / 2) * frame;
        ESA_TRY(esa_nn_download(&m->nn, plane, r->x + at, 4 * frame));
        ESA_TRY(esa_nn_download(&m->nn, plane + frame, v + at, 4 * frame));
        for (int64_t i = 0; i < frame; i++) plane[i] = of[0] * plane[i] + of[1] * plane[frame + i];
        for (int32_t y = 0; y < small[1]; y++)
            for (int32_t x = 0; x < small[2]; x++) {
                float sum = 0;
                for (int32_t k = 0; k < pool * pool; k++)
                    sum += plane[(y * pool + k / pool) * w + x * pool + k % pool];
                *out++ = share * sum;
            }
    }
    return ESA_OK;
}

typedef struct picture {
    int32_t small[3], size[3], pool;
    int64_t count, frame;              /* elements of the latents; of a frame of the video */
    int64_t host_bytes, pixels, bytes; /* of host, of rgb, of device */
    float *host, *plane;               /* plane lies behind the latents */
    uint8_t *rgb;
    void *device;
} picture;

static esa_status decode_picture(esa_model *m, const esa_run *r, picture *p, int32_t i,
                                 const float *v)
{
    float of[2];
    esa_sched_clean(r->sched, i, &of[0], &of[1]);
    p->host = esa_mem_alloc(&m->ctx->mem, p->host_bytes);
    p->rgb = esa_mem_alloc(&m->ctx->mem, p->pixels);
    if (!p->host || !p->rgb) return esa_fail(m->ctx, ESA_ERR_MEMORY, "out of memory for a preview");
    p->plane = p->host + p->count;
    ESA_TRY(pool_latents(m, r, p->host, of, v, p->plane, p->small, p->pool));
    ESA_TRY(esa_nn_alloc(&m->nn, &p->device, p->bytes, "a preview"));
    ESA_TRY(esa_nn_upload(&m->nn, p->device, p->host, p->bytes));
    ESA_TRY(esa_vae_frames(m->vae, p->device, p->small, 0, p->rgb));
    return m->nn.ops->settle(&m->nn);
}

static void show(const esa_run *r, const picture *p, int32_t i)
{
    const int64_t frame = (int64_t)p->size[1] * p->size[2] * 3;
    const esa_preview shown = { .struct_size = sizeof shown,
                                .step = i + 1,
                                .steps = r->p.steps,
                                .height = p->size[1],
                                .width = p->size[2],
                                .rgb = p->rgb + (p->size[0] - 1) * frame };
    r->p.preview(r->p.preview_user, &shown);
}

esa_status esa_run_preview(esa_model *m, esa_run *r, int32_t i, const float *v)
{
    picture p = { .count = 0 };
    if (!r->p.preview || !r->p.preview_every || (i + 1) % r->p.preview_every) return ESA_OK;
    if (i + 1 == r->p.steps) return ESA_OK;
    p.pool = small_size(m, r, p.small);
    esa_model_size(m, p.small, p.size);
    p.count = small_count(m, p.small);
    p.frame = (int64_t)r->latent[1] * r->latent[2];
    p.bytes = 4 * p.count;
    p.host_bytes = p.bytes + 8 * p.frame;
    p.pixels = (int64_t)p.size[0] * p.size[1] * p.size[2] * 3;
    /* The decoder reports its own progress, which is not that of the video. */
    const esa_generate_params *call = m->call;
    const int32_t stage = m->stage, done = m->done, total = m->total;
    const double began = m->stage_began;
    m->call = NULL;
    const esa_status status = decode_picture(m, r, &p, i, v);
    m->call = call;
    m->stage = stage;
    m->done = done;
    m->total = total;
    m->stage_began = began;
    if (!status) show(r, &p, i);
    esa_nn_free(&m->nn, p.device, p.device ? p.bytes : 0);
    esa_mem_free(&m->ctx->mem, p.rgb, p.rgb ? p.pixels : 0);
    esa_mem_free(&m->ctx->mem, p.host, p.host ? p.host_bytes : 0);
    if (status != ESA_ERR_MEMORY) return status;
    m->ctx->error[0] = 0; /* no failure of the video */
    return ESA_OK;
}
