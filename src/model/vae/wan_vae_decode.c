/* wan_vae_decode.c - runs the decoder, one frame of latents after the other; wan_vae.h explains the
 * order.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Planes and blocks are those of wan_vae_run.h. The last convolution gives f32 pixels. */
#include <string.h>
#include "model/vae/wan_vae_run.h"

typedef struct vae_run {
    wan_vae_run r;
    const esa_wan_vae *vae;
    esa_vae_out out;
    int32_t started[ESA_CONFIG_MAX_LEVELS]; /* 1 after the first frame of the doubling in time */
    void *z;
} vae_run;

static esa_status to_pixels(vae_run *d)
{
    const esa_wan_vae *vae = d->vae;
    const int32_t level = vae->levels - 1;
    const wan_vae_target end = { .y = d->out.rgb, .row = esa_wan_vae_wide(&d->r, level) * 3 };
    ESA_TRY(esa_wan_vae_norm_conv(&d->r, vae->norm_out, &vae->conv_out, vae->out_slot, level,
                                  d->r.stream[level], &end, ESA_DTYPE_F32));
    return d->r.dry ? ESA_OK : esa_vae_out_give(&d->out);
}

static esa_status run_level(vae_run *d, int32_t level);

/* Doubles p in space and runs the next level. p becomes spare. */
static esa_status next_level(vae_run *d, int32_t level, wan_vae_plane *p)
{
    const wan_vae_level *l = &d->vae->level[level];
    const void *const x[3] = { esa_wan_vae_inside(&d->r, p) };
    const wan_vae_target to = { .y = d->r.stream[level + 1],
                                .row = esa_wan_vae_wide(&d->r, level + 1) * l->up.cout };
    const esa_status status = esa_wan_vae_convolve(&d->r, &l->up, &to, d->r.nn->ops->dtype, x,
                                                   esa_wan_vae_pitch(&d->r, p), level);
    esa_wan_vae_plane_give(&d->r, p);
    return status ? status : run_level(d, level + 1);
}

/* The two frames that p becomes where time doubles. */
static esa_status split_time(vae_run *d, int32_t level, const wan_vae_plane *p,
                             wan_vae_plane two[2])
{
    const wan_vae_level *l = &d->vae->level[level];
    for (int32_t i = 0; i < 2; i++) {
        ESA_TRY(esa_wan_vae_plane_take(&d->r, &two[i], level, l->cout));
        const wan_vae_target to = { .y = esa_wan_vae_inside(&d->r, &two[i]),
                                    .row = esa_wan_vae_pitch(&d->r, &two[i]) };
        ESA_TRY(esa_wan_vae_causal(&d->r, &l->time[i], l->slot, p, &to, d->r.nn->ops->dtype));
    }
    return ESA_OK;
}

/* Doubles p in time; the first of the two frames goes all the way to pixels, then the second. */
static esa_status double_time(vae_run *d, int32_t level, wan_vae_plane *p)
{
    wan_vae_plane two[2] = { { 0 } };
    esa_status status = split_time(d, level, p, two);
    if (!status)
        esa_wan_vae_remember(&d->r, d->vae->level[level].slot, p);
    else
        esa_wan_vae_plane_give(&d->r, p);
    for (int32_t i = 0; i < 2 && !status; i++) status = next_level(d, level, &two[i]);
    esa_wan_vae_plane_give(&d->r, &two[0]); /* what next_level did not reach */
    esa_wan_vae_plane_give(&d->r, &two[1]);
    return status;
}

static esa_status run_level(vae_run *d, int32_t level)
{
    const wan_vae_level *l = &d->vae->level[level];
    const wan_vae_res *last = &l->res[l->res_count - 1];
    const int64_t row = esa_wan_vae_wide(&d->r, level) * l->cout;
    for (int32_t i = 0; i + 1 < l->res_count; i++)
        ESA_TRY(esa_wan_vae_res_block(&d->r, &l->res[i], level, d->r.stream[level], row));
    if (level == d->vae->levels - 1) {
        ESA_TRY(esa_wan_vae_res_block(&d->r, last, level, d->r.stream[level], row));
        return to_pixels(d);
    }
    wan_vae_plane p;
    ESA_TRY(esa_wan_vae_plane_take(&d->r, &p, level, l->cout));
    const esa_status status = esa_wan_vae_res_block(
        &d->r, last, level, esa_wan_vae_inside(&d->r, &p), esa_wan_vae_pitch(&d->r, &p));
    if (status) {
        esa_wan_vae_plane_give(&d->r, &p);
        return status;
    }
    if (l->time[0].packed && d->started[level]) return double_time(d, level, &p);
    d->started[level] = 1;
    return next_level(d, level, &p);
}

/* The first convolutions: d->z through 1 x 1 x 1 into p, then into the stream. */
static esa_status start_frame(vae_run *d, const wan_vae_plane *p)
{
    const esa_wan_vae *vae = d->vae;
    const wan_vae_target first = { .y = esa_wan_vae_inside(&d->r, p),
                                   .row = esa_wan_vae_pitch(&d->r, p) },
                         second = { .y = d->r.stream[0], .row = d->r.width * vae->conv_in.cout };
    ESA_TRY(esa_wan_vae_mix(&d->r, &vae->post_quant, &first, d->z, 0));
    return esa_wan_vae_causal(&d->r, &vae->conv_in, vae->in_slot, p, &second, d->r.nn->ops->dtype);
}

/* One frame of latents: applies the statistics, then runs the decoder. */
static esa_status run_frame(vae_run *d, const esa_vae_cut *cut, int64_t t)
{
    const esa_wan_vae *vae = d->vae;
    const int32_t z = vae->config.z_dim;
    const esa_plane_latent_args args = { .y = d->z,
                                         .y_row = d->r.width * z,
                                         .latents = d->r.dry ? NULL : cut->latents + t * cut->frame,
                                         .channel = cut->channel,
                                         .row = cut->row,
                                         .height = d->r.height,
                                         .width = d->r.width,
                                         .channels = z,
                                         .scale = vae->vae.scale,
                                         .shift = vae->vae.shift,
                                         .dtype = d->r.nn->ops->dtype };
    if (!d->r.dry) ESA_TRY(d->r.op->from_latents(d->r.nn, &args));
    wan_vae_plane p;
    ESA_TRY(esa_wan_vae_plane_take(&d->r, &p, 0, z));
    const esa_status status = start_frame(d, &p);
    esa_wan_vae_remember(&d->r, vae->in_slot, &p);
    if (status) return status;
    ESA_TRY(esa_wan_vae_res_block(&d->r, &vae->mid[0], 0, d->r.stream[0],
                                  d->r.width * vae->conv_in.cout));
    ESA_TRY(esa_wan_vae_attend(&d->r, &vae->attention));
    ESA_TRY(esa_wan_vae_res_block(&d->r, &vae->mid[1], 0, d->r.stream[0],
                                  d->r.width * vae->conv_in.cout));
    return run_level(d, 0);
}

/* Takes the streams and single buffers. */
static esa_status take_buffers(vae_run *d)
{
    const esa_wan_vae *vae = d->vae;
    const int64_t n = d->r.height * d->r.width;
    esa_carve carve = { 0 };
    void *out = NULL;
    ESA_TRY(esa_wan_vae_take(&d->r, &d->z, d->r.element * n * vae->config.z_dim));
    ESA_TRY(esa_wan_vae_take(&d->r, &d->r.qkv, d->r.element * n * vae->attention.qkv.cout));
    esa_vae_out_place(&d->out, &carve);
    ESA_TRY(esa_wan_vae_take(&d->r, &out, carve.used));
    for (int32_t l = 0; l < vae->levels; l++) {
        const int64_t bytes = d->r.element * esa_wan_vae_high(&d->r, l) *
                              esa_wan_vae_wide(&d->r, l) * vae->level[l].widest;
        ESA_TRY(esa_wan_vae_take(&d->r, &d->r.stream[l], bytes));
        ESA_TRY(esa_wan_vae_take(&d->r, &d->r.temp[l], bytes));
    }
    if (d->r.dry) return ESA_OK;
    carve = (esa_carve){ .base = out };
    esa_vae_out_place(&d->out, &carve);
    return esa_vae_out_begin(&d->out);
}

static esa_status run_frames(vae_run *d, const esa_vae_cut *cut)
{
    const esa_part *part = &d->vae->vae.part;
    ESA_TRY(take_buffers(d));
    for (int64_t t = 0; t < cut->frames; t++) {
        ESA_TRY(run_frame(d, cut, t));
        if (d->r.dry) continue;
        /* The pages of the frames are made while the device works, not while they arrive. */
        if (t == 0 && d->out.bytes != d->out.host)
            memset(d->out.host, 0, (size_t)(d->out.frames * d->out.pixels));
        ESA_TRY(d->r.nn->ops->pace(d->r.nn));
        ESA_TRY(esa_part_tick(part, cut->tick_base + t + 1, cut->tick_total));
    }
    return d->r.dry ? ESA_OK : esa_vae_out_end(&d->out);
}

static esa_status run_all(vae_run *d, const esa_vae_cut *cut)
{
    /* The most planes there can be besides: one in use per slot's shape, three per doubling. */
    ESA_TRY(esa_wan_vae_lists(&d->r, d->vae->slots, 3 * d->vae->levels + 4));
    const esa_status status = run_frames(d, cut);
    esa_wan_vae_lists_free(&d->r);
    return status;
}

static vae_run new_run(const esa_vae *vae, const esa_vae_cut *cut, int32_t dry, esa_vae_sink sink,
                       void *user)
{
    esa_nn *nn = vae->nn;
    const int64_t factor = vae->factor_s, pixels = cut->height * cut->width * factor * factor * 3;
    return (vae_run){ .r = { .nn = nn,
                             .op = nn->ops->planes,
                             .dry = dry,
                             .element = esa_view_element(nn->ops->dtype),
                             .height = cut->height,
                             .width = cut->width },
                      .vae = (const esa_wan_vae *)vae,
                      .out = esa_vae_out_of(nn, cut, 1 + (cut->frames - 1) * vae->factor_t, pixels,
                                            sink, user) };
}

/* The memory of a run; INT64_MAX if there is not enough to count it. */
static int64_t count_bytes(const esa_vae *vae, const esa_vae_cut *cut)
{
    esa_vae_cut first = *cut;
    vae_run run = new_run(vae, cut, 1, NULL, NULL);
    /* From the fourth latent frame on nothing more is taken. */
    first.frames = esa_min64(cut->frames, 4);
    return run_all(&run, &first) ? INT64_MAX : run.r.used;
}

esa_status esa_wan_vae_cut(esa_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink, void *user)
{
    esa_nn *nn = vae->nn;
    vae_run d = new_run(vae, cut, 0, sink, user);
    d.r.size = count_bytes(vae, cut);
    ESA_TRY(esa_nn_alloc(nn, (void **)&d.r.block, d.r.size, "the planes of the VAE decoder"));
    const esa_status status = run_all(&d, cut);
    esa_vae_out_free(&d.out);
    esa_nn_free(nn, d.r.block, d.r.size);
    return status;
}

int64_t esa_wan_vae_cut_bytes(const esa_vae *vae, int64_t frames, int64_t height, int64_t width,
                              int32_t bytes)
{
    static uint8_t somewhere; /* not written: nothing is computed */
    const esa_vae_cut cut = {
        .frames = frames, .height = height, .width = width, .bytes = bytes ? &somewhere : NULL
    };
    return count_bytes(vae, &cut);
}
