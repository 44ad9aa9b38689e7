/* wan_vae_encode.c - runs the encoder, one frame of pixels after the other.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every convolution in time sees the frames before it, so frames can be encoded one by one: the
 * chunks of diffusers give the same numbers. Where time is halved, the first frame passes as it is;
 * of those after it, every second gives a frame, from itself and the two before.
 *
 * Where space is halved, diffusers pads one row and one column at the end and steps by two. That is
 * every second pixel, beginning with the second, of a convolution with stride 1, which the device
 * has. */
#include <string.h>
#include "model/vae/wan_vae_run.h"

typedef struct encode_run {
    wan_vae_run r;
    const esa_wan_vae *vae;
    int64_t seen[ESA_CONFIG_MAX_LEVELS]; /* frames that came to the halving in time of a level */
    void *pixels;                        /* one frame [height][width][3] */
    float *means;                        /* one frame of latents [height][width][z] */
    float *host;                         /* the same in host memory */
    float *out;                          /* [z][frames][height][width], in host memory */
    int64_t frames, frame;               /* of latents: all, the next */
} encode_run;

/* Every second pixel of x, from the second on, into the stream of a level. */
static esa_status halve(encode_run *d, const void *x, void *y, int64_t y_row, int32_t level,
                        int32_t channels)
{
    esa_nn *nn = d->r.nn;
    const int32_t type = nn->ops->dtype, device = nn->be->device;
    const int64_t wide = esa_wan_vae_wide(&d->r, level), row = 2 * wide * channels;
    for (int64_t i = 0; i < esa_wan_vae_high(&d->r, level) && !d->r.dry; i++) {
        esa_act_args copy = { .y = esa_view_of((char *)y + i * y_row * d->r.element, type, device,
                                               wide, channels),
                              .act = ESA_ACT_NONE };
        copy.x = esa_view_of((char *)(uintptr_t)x + ((2 * i + 1) * row + channels) * d->r.element,
                             type, device, wide, channels);
        copy.x.ld = 2 * channels;
        ESA_TRY(nn->ops->act(nn, &copy));
    }
    return ESA_OK;
}

static esa_status run_level(encode_run *d, int32_t level);

/* Takes the frame in the stream of level 0 to the means of its latents. */
static esa_status finish(encode_run *d)
{
    const esa_wan_vae *vae = d->vae;
    const wan_vae_encoder *e = &vae->encoder;
    wan_vae_run *r = &d->r;
    const int32_t z = vae->config.z_dim;
    const int64_t row = r->width * e->level[0].cout, n = r->height * r->width;
    const wan_vae_target both = { .y = r->temp[0], .row = r->width * 2 * z },
                         mean = { .y = d->means, .row = r->width * z };
    const void *const x[3] = { r->temp[0] };
    ESA_TRY(esa_wan_vae_res_block(r, &e->mid[0], 0, r->stream[0], row));
    ESA_TRY(esa_wan_vae_attend(r, &e->attention));
    ESA_TRY(esa_wan_vae_res_block(r, &e->mid[1], 0, r->stream[0], row));
    ESA_TRY(esa_wan_vae_norm_conv(r, e->norm_out, &e->conv_out, e->out_slot, 0, r->stream[0], &both,
                                  r->nn->ops->dtype));
    ESA_TRY(esa_wan_vae_convolve(r, &e->quant, &mean, ESA_DTYPE_F32, x, r->width * 2 * z, 0));
    const int64_t frame = d->frame++;
    if (r->dry) return ESA_OK;
    ESA_TRY(esa_nn_download(r->nn, d->host, d->means, 4 * n * z));
    for (int64_t c = 0; c < z; c++)
        for (int64_t i = 0; i < n; i++)
            d->out[(c * d->frames + frame) * n + i] = (d->host[i * z + c] -
                                                       (float)vae->config.mean[c]) *
                                                      (1.0f / (float)vae->config.std[c]);
    return ESA_OK;
}

/* Halves time, where p is the newest frame; the stream of the level gets what comes out. */
static esa_status halve_time(encode_run *d, int32_t level, const wan_vae_down *from,
                             const wan_vae_plane *p)
{
    wan_vae_run *r = &d->r;
    const int64_t row = esa_wan_vae_wide(r, level) * from->cout, seen = d->seen[level]++;
    const wan_vae_target to = { .y = r->stream[level], .row = row };
    esa_status status = ESA_OK;
    if (seen > 0 && seen % 2 == 0)
        status = esa_wan_vae_causal(r, &from->time, from->slot, p, &to, r->nn->ops->dtype);
    esa_wan_vae_remember(r, from->slot, p);
    if (status || seen % 2) return status;
    return run_level(d, level);
}

/* A frame in the stream of level + 1 goes on at `level`. The convolution is in temp there. */
static esa_status next_level(encode_run *d, int32_t level)
{
    wan_vae_run *r = &d->r;
    const wan_vae_down *from = &d->vae->encoder.level[level + 1];
    const int64_t row = esa_wan_vae_wide(r, level) * from->cout;
    ESA_TRY(halve(d, r->temp[level + 1], r->stream[level], row, level, from->cout));
    if (!from->time.packed) return run_level(d, level);
    wan_vae_plane p;
    ESA_TRY(esa_wan_vae_plane_take(r, &p, level, from->cout));
    const esa_status status = halve(d, r->temp[level + 1], esa_wan_vae_inside(r, &p),
                                    esa_wan_vae_pitch(r, &p), level, from->cout);
    if (status) {
        esa_wan_vae_plane_give(r, &p);
        return status;
    }
    return halve_time(d, level, from, &p);
}

static esa_status run_level(encode_run *d, int32_t level)
{
    wan_vae_run *r = &d->r;
    const wan_vae_down *l = &d->vae->encoder.level[level];
    const int32_t last = d->vae->config.res_blocks - 1;
    const int64_t row = esa_wan_vae_wide(r, level) * l->cout;
    for (int32_t i = 0; i < last; i++)
        ESA_TRY(esa_wan_vae_res_block(r, &l->res[i], level, r->stream[level], row));
    if (level == 0) {
        ESA_TRY(esa_wan_vae_res_block(r, &l->res[last], level, r->stream[level], row));
        return finish(d);
    }
    wan_vae_plane p;
    ESA_TRY(esa_wan_vae_plane_take(r, &p, level, l->cout));
    esa_status status = esa_wan_vae_res_block(r, &l->res[last], level, esa_wan_vae_inside(r, &p),
                                              esa_wan_vae_pitch(r, &p));
    const void *const x[3] = { esa_wan_vae_inside(r, &p) };
    const wan_vae_target to = { .y = r->temp[level], .row = row };
    if (!status)
        status = esa_wan_vae_convolve(r, &l->down, &to, r->nn->ops->dtype, x,
                                      esa_wan_vae_pitch(r, &p), level);
    esa_wan_vae_plane_give(r, &p);
    return status ? status : next_level(d, level - 1);
}

/* One frame of pixels, f32 [height][width][3] in host memory from -1 to 1; NULL: zeros. */
static esa_status run_frame(encode_run *d, const float *rgb)
{
    const wan_vae_encoder *e = &d->vae->encoder;
    wan_vae_run *r = &d->r;
    esa_nn *nn = r->nn;
    const int32_t top = d->vae->levels - 1, c = e->conv_in.cin;
    const int64_t high = esa_wan_vae_high(r, top), wide = esa_wan_vae_wide(r, top);
    wan_vae_plane p;
    ESA_TRY(esa_wan_vae_plane_take(r, &p, top, c));
    esa_status status = ESA_OK;
    for (int64_t i = 0; i < high && !r->dry && !status; i++) {
        const esa_view row = esa_view_of((char *)esa_wan_vae_inside(r, &p) +
                                             i * esa_wan_vae_pitch(r, &p) * r->element,
                                         nn->ops->dtype, nn->be->device, 1, wide * c);
        status = rgb ? esa_nn_write(nn, &row, rgb + i * wide * c)
                     : r->op->zero(nn, row.data, wide * c * r->element);
    }
    const wan_vae_target to = { .y = r->stream[top], .row = wide * e->conv_in.cout };
    if (!status) status = esa_wan_vae_causal(r, &e->conv_in, e->in_slot, &p, &to, nn->ops->dtype);
    esa_wan_vae_remember(r, e->in_slot, &p);
    return status ? status : run_level(d, top);
}

static esa_status run_frames(encode_run *d, const float *rgb, int64_t frames)
{
    const esa_wan_vae *vae = d->vae;
    wan_vae_run *r = &d->r;
    const int64_t n = r->height * r->width;
    ESA_TRY(esa_wan_vae_take(r, &r->qkv, r->element * n * vae->encoder.attention.qkv.cout));
    ESA_TRY(esa_wan_vae_take(r, &d->means, 4 * n * vae->config.z_dim));
    for (int32_t l = 0; l < vae->levels; l++) {
        int64_t widest = vae->encoder.level[l].widest;
        if (l == 0) widest = esa_max64(widest, (int64_t)2 * vae->config.z_dim);
        const int64_t bytes = r->element * esa_wan_vae_high(r, l) * esa_wan_vae_wide(r, l) * widest;
        ESA_TRY(esa_wan_vae_take(r, &r->stream[l], bytes));
        ESA_TRY(esa_wan_vae_take(r, &r->temp[l], bytes));
    }
    for (int64_t t = 0; t < frames; t++) {
        ESA_TRY(run_frame(d, t ? NULL : rgb));
        if (r->dry) continue;
        ESA_TRY(r->nn->ops->pace(r->nn));
        ESA_TRY(esa_part_tick(&vae->vae.part, t + 1, frames));
    }
    return ESA_OK;
}

static esa_status run_all(encode_run *d, const float *rgb, int64_t frames)
{
    ESA_TRY(esa_wan_vae_lists(&d->r, d->vae->encoder.slots, 3 * d->vae->levels + 4));
    const esa_status status = run_frames(d, rgb, frames);
    esa_wan_vae_lists_free(&d->r);
    return status;
}

static encode_run new_run(const esa_vae *vae, const int32_t latent[3], int32_t dry)
{
    esa_nn *nn = vae->nn;
    return (encode_run){ .r = { .nn = nn,
                                .op = nn->ops->planes,
                                .dry = dry,
                                .element = esa_view_element(nn->ops->dtype),
                                .height = latent[1],
                                .width = latent[2] },
                         .vae = (const esa_wan_vae *)vae,
                         .frames = latent[0] };
}

int64_t esa_wan_vae_encode_bytes(const esa_vae *vae, const int32_t latent[3])
{
    encode_run run = new_run(vae, latent, 1);
    /* after two frames of latents nothing more is taken */
    const int64_t frames = 1 + (esa_min64(latent[0], 3) - 1) * vae->factor_t;
    return run_all(&run, NULL, frames) ? INT64_MAX : run.r.used;
}

esa_status esa_wan_vae_encode_image(esa_vae *vae, float *out, const float *rgb,
                                    const int32_t latent[3])
{
    esa_nn *nn = vae->nn;
    encode_run run = new_run(vae, latent, 0);
    const int64_t host = (int64_t)4 * latent[1] * latent[2] * vae->z_dim;
    if (!vae->encoder)
        return esa_fail(nn->ctx, ESA_ERR_STATE, "the VAE was opened without its encoder");
    run.out = out;
    run.r.size = esa_wan_vae_encode_bytes(vae, latent);
    run.host = esa_mem_alloc(&nn->ctx->mem, host);
    if (!run.host) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the VAE encoder");
    esa_status status = esa_nn_alloc(nn, (void **)&run.r.block, run.r.size,
                                     "the planes of the VAE encoder");
    if (!status) status = run_all(&run, rgb, 1 + (latent[0] - 1) * vae->factor_t);
    esa_nn_free(nn, run.r.block, run.r.size);
    esa_mem_free(&nn->ctx->mem, run.host, host);
    return status;
}
