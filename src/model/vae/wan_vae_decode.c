/* wan_vae_decode.c - runs the decoder, one frame of latents after the other; wan_vae.h explains the
 * order.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Planes and blocks are those of wan_vae_run.h. The last convolution gives f32 pixels. */
#include <string.h>
#include "model/vae/wan_vae_run.h"

typedef struct vae_run {
    esa_vae_run r;
    esa_wan_vae *vae;
    int32_t clamp;
    int64_t frames;                         /* of pixels */
    int32_t started[ESA_CONFIG_MAX_LEVELS]; /* 1 after the first frame of the doubling in time */
    void *z;
    float *rgb;
    int32_t *wrong;       /* [frames]: 1 if a pixel of the frame is not a number */
    uint8_t *bytes, *out; /* [frames][pixels]: on the device, in host memory; NULL: to sink */
    float *seen;          /* room for pixels in host memory; NULL if rgb is there */
    esa_vae_sink sink;
    void *user;
    int64_t frame; /* the next frame of pixels */
} vae_run;

/* Elements of a frame of pixels. */
static int64_t pixels(const vae_run *d)
{
    const int32_t level = d->vae->levels - 1;
    return esa_vae_high(&d->r, level) * esa_vae_wide(&d->r, level) * d->vae->conv_out.cout;
}

/* Gives the frame in rgb to the sink, or keeps its bytes. */
static esa_status give_frame(vae_run *d)
{
    const int64_t n = pixels(d), frame = d->frame++;
    float *rgb = d->rgb;
    if (d->bytes) {
        const esa_plane_bytes_args args = { d->bytes + frame * n, rgb, n, d->wrong + frame };
        return d->r.op->to_bytes(d->r.nn, &args);
    }
    if (d->seen) {
        ESA_TRY(esa_nn_download(d->r.nn, d->seen, rgb, 4 * n));
        rgb = d->seen;
    }
    if (d->clamp) esa_vae_clamp(rgb, n);
    return d->sink(d->user, frame, rgb);
}

static esa_status to_pixels(vae_run *d)
{
    const esa_wan_vae *vae = d->vae;
    const int32_t level = vae->levels - 1;
    const esa_vae_target end = { .y = d->rgb,
                                 .row = esa_vae_wide(&d->r, level) * vae->conv_out.cout };
    ESA_TRY(esa_vae_norm_conv(&d->r, vae->norm_out, &vae->conv_out, vae->out_slot, level,
                              d->r.stream[level], &end, ESA_DTYPE_F32));
    return d->r.dry ? ESA_OK : give_frame(d);
}

static esa_status run_level(vae_run *d, int32_t level);

/* Doubles p in space and runs the next level. p becomes spare. */
static esa_status next_level(vae_run *d, int32_t level, esa_vae_plane *p)
{
    const esa_vae_level *l = &d->vae->level[level];
    const void *const x[3] = { esa_vae_inside(&d->r, p) };
    const esa_vae_target to = { .y = d->r.stream[level + 1],
                                .row = esa_vae_wide(&d->r, level + 1) * l->up.cout };
    const esa_status status = esa_vae_convolve(&d->r, &l->up, &to, d->r.nn->ops->dtype, x,
                                               esa_vae_pitch(&d->r, p), level);
    esa_vae_plane_give(&d->r, p);
    return status ? status : run_level(d, level + 1);
}

/* The two frames that p becomes where time doubles. */
static esa_status split_time(vae_run *d, int32_t level, const esa_vae_plane *p,
                             esa_vae_plane two[2])
{
    const esa_vae_level *l = &d->vae->level[level];
    for (int32_t i = 0; i < 2; i++) {
        ESA_TRY(esa_vae_plane_take(&d->r, &two[i], level, l->cout));
        const esa_vae_target to = { .y = esa_vae_inside(&d->r, &two[i]),
                                    .row = esa_vae_pitch(&d->r, &two[i]) };
        ESA_TRY(esa_vae_causal(&d->r, &l->time[i], l->slot, p, &to, d->r.nn->ops->dtype));
    }
    return ESA_OK;
}

/* Doubles p in time; the first of the two frames goes all the way to pixels, then the second. */
static esa_status double_time(vae_run *d, int32_t level, esa_vae_plane *p)
{
    esa_vae_plane two[2] = { { 0 } };
    esa_status status = split_time(d, level, p, two);
    if (!status)
        esa_vae_remember(&d->r, d->vae->level[level].slot, p);
    else
        esa_vae_plane_give(&d->r, p);
    for (int32_t i = 0; i < 2 && !status; i++) status = next_level(d, level, &two[i]);
    esa_vae_plane_give(&d->r, &two[0]); /* what next_level did not reach */
    esa_vae_plane_give(&d->r, &two[1]);
    return status;
}

static esa_status run_level(vae_run *d, int32_t level)
{
    const esa_vae_level *l = &d->vae->level[level];
    const esa_vae_res *last = &l->res[l->res_count - 1];
    const int64_t row = esa_vae_wide(&d->r, level) * l->cout;
    for (int32_t i = 0; i + 1 < l->res_count; i++)
        ESA_TRY(esa_vae_res_block(&d->r, &l->res[i], level, d->r.stream[level], row));
    if (level == d->vae->levels - 1) {
        ESA_TRY(esa_vae_res_block(&d->r, last, level, d->r.stream[level], row));
        return to_pixels(d);
    }
    esa_vae_plane p;
    ESA_TRY(esa_vae_plane_take(&d->r, &p, level, l->cout));
    const esa_status status = esa_vae_res_block(&d->r, last, level, esa_vae_inside(&d->r, &p),
                                                esa_vae_pitch(&d->r, &p));
    if (status) {
        esa_vae_plane_give(&d->r, &p);
        return status;
    }
    if (l->time[0].packed && d->started[level]) return double_time(d, level, &p);
    d->started[level] = 1;
    return next_level(d, level, &p);
}

/* The first convolutions: d->z through 1 x 1 x 1 into p, then into the stream. */
static esa_status start_frame(vae_run *d, const esa_vae_plane *p)
{
    const esa_wan_vae *vae = d->vae;
    const esa_vae_target first = { .y = esa_vae_inside(&d->r, p), .row = esa_vae_pitch(&d->r, p) },
                         second = { .y = d->r.stream[0], .row = d->r.width * vae->conv_in.cout };
    ESA_TRY(esa_vae_mix(&d->r, &vae->post_quant, &first, d->z, 0));
    return esa_vae_causal(&d->r, &vae->conv_in, vae->in_slot, p, &second, d->r.nn->ops->dtype);
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
                                         .scale = vae->held.scale,
                                         .shift = vae->held.shift,
                                         .dtype = d->r.nn->ops->dtype };
    if (!d->r.dry) ESA_TRY(d->r.op->from_latents(d->r.nn, &args));
    esa_vae_plane p;
    ESA_TRY(esa_vae_plane_take(&d->r, &p, 0, z));
    const esa_status status = start_frame(d, &p);
    esa_vae_remember(&d->r, vae->in_slot, &p);
    if (status) return status;
    ESA_TRY(
        esa_vae_res_block(&d->r, &vae->mid[0], 0, d->r.stream[0], d->r.width * vae->conv_in.cout));
    ESA_TRY(esa_vae_attend(&d->r, &vae->attention));
    ESA_TRY(
        esa_vae_res_block(&d->r, &vae->mid[1], 0, d->r.stream[0], d->r.width * vae->conv_in.cout));
    return run_level(d, 0);
}

/* Takes the streams and single buffers. */
static esa_status take_buffers(vae_run *d, const esa_vae_cut *cut)
{
    const esa_wan_vae *vae = d->vae;
    const int64_t n = d->r.height * d->r.width;
    ESA_TRY(esa_vae_take(&d->r, &d->z, d->r.element * n * vae->config.z_dim));
    ESA_TRY(esa_vae_take(&d->r, &d->r.qkv, d->r.element * n * vae->attention.qkv.cout));
    ESA_TRY(esa_vae_take(&d->r, &d->rgb, 4 * pixels(d)));
    for (int32_t l = 0; l < vae->levels; l++) {
        const int64_t bytes = d->r.element * esa_vae_high(&d->r, l) * esa_vae_wide(&d->r, l) *
                              vae->level[l].widest;
        ESA_TRY(esa_vae_take(&d->r, &d->r.stream[l], bytes));
        ESA_TRY(esa_vae_take(&d->r, &d->r.temp[l], bytes));
    }
    /* A device with host memory writes bytes where they are wanted. */
    d->bytes = d->out = cut->bytes;
    if (cut->bytes && !d->r.nn->be->host_memory)
        ESA_TRY(esa_vae_take(&d->r, &d->bytes, d->frames * pixels(d)));
    ESA_TRY(esa_vae_take(&d->r, &d->wrong, 4 * d->frames));
    return d->r.dry ? ESA_OK : d->r.op->zero(d->r.nn, d->wrong, 4 * d->frames);
}

/* Brings the bytes of all frames to the host. */
static esa_status take_bytes(vae_run *d)
{
    esa_ctx *ctx = d->r.nn->ctx;
    if (!d->out || d->r.dry) return ESA_OK;
    if (d->bytes != d->out)
        ESA_TRY(esa_nn_download(d->r.nn, d->out, d->bytes, d->frames * pixels(d)));
    int32_t *wrong = esa_mem_alloc(&ctx->mem, 4 * d->frames);
    if (!wrong) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE decoder");
    esa_status status = esa_nn_download(d->r.nn, wrong, d->wrong, 4 * d->frames);
    for (int64_t f = 0; f < d->frames && !status; f++)
        if (wrong[f]) status = esa_vae_nan(d->vae->env.nn->ctx, f);
    esa_mem_free(&ctx->mem, wrong, 4 * d->frames);
    return status;
}

static esa_status run_frames(vae_run *d, const esa_vae_cut *cut)
{
    const esa_part_env *env = &d->vae->env;
    ESA_TRY(take_buffers(d, cut));
    for (int64_t t = 0; t < cut->frames; t++) {
        ESA_TRY(run_frame(d, cut, t));
        if (d->r.dry) continue;
        /* The pages of the frames are made while the device works, not while they arrive. */
        if (t == 0 && d->bytes != d->out) memset(d->out, 0, (size_t)(d->frames * pixels(d)));
        ESA_TRY(d->r.nn->ops->pace(d->r.nn));
        if (env->tick && env->tick(env->tick_user, cut->tick_base + t + 1, cut->tick_total))
            return esa_fail(d->r.nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    return take_bytes(d);
}

static esa_status run_all(vae_run *d, const esa_vae_cut *cut)
{
    /* The most planes there can be besides: one in use per slot's shape, three per doubling. */
    ESA_TRY(esa_vae_lists(&d->r, d->vae->slots, 3 * d->vae->levels + 4));
    const esa_status status = run_frames(d, cut);
    esa_vae_lists_free(&d->r);
    return status;
}

static vae_run new_run(const esa_wan_vae *vae, const esa_vae_cut *cut, int32_t dry)
{
    esa_nn *nn = vae->env.nn;
    return (vae_run){ .r = { .nn = nn,
                             .op = nn->ops->planes,
                             .dry = dry,
                             .element = esa_view_element(nn->ops->dtype),
                             .height = cut->height,
                             .width = cut->width },
                      .vae = (esa_wan_vae *)vae,
                      .clamp = cut->clamp,
                      .frames = 1 + (cut->frames - 1) * vae->config.factor_t };
}

/* The memory of a run; INT64_MAX if there is not enough to count it. */
static int64_t count_bytes(const esa_wan_vae *vae, const esa_vae_cut *cut)
{
    esa_vae_cut first = *cut;
    vae_run run = new_run(vae, cut, 1);
    /* From the fourth latent frame on nothing more is taken. */
    first.frames = esa_min64(cut->frames, 4);
    return run_all(&run, &first) ? INT64_MAX : run.r.used;
}

/* Allocates what the run needs, and frees it. */
static esa_status run_in_memory(vae_run *d, const esa_vae_cut *cut)
{
    esa_nn *nn = d->r.nn;
    const int64_t seen = cut->bytes || nn->be->host_memory ? 0 : 4 * pixels(d);
    d->r.size = count_bytes(d->vae, cut);
    ESA_TRY(esa_nn_alloc(nn, (void **)&d->r.block, d->r.size, "the planes of the VAE decoder"));
    esa_status status = ESA_OK;
    if (seen) status = esa_nn_alloc_host(nn, (void **)&d->seen, seen, "a frame of the VAE decoder");
    if (!status) status = run_all(d, cut);
    esa_nn_free_host(nn, d->seen, seen);
    esa_nn_free(nn, d->r.block, d->r.size);
    return status;
}

esa_status esa_vae_decode_cut(esa_wan_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink,
                              void *user)
{
    vae_run run = new_run(vae, cut, 0);
    run.sink = sink;
    run.user = user;
    return run_in_memory(&run, cut);
}

int64_t esa_vae_cut_bytes(const esa_wan_vae *vae, int64_t frames, int64_t height, int64_t width,
                          int32_t bytes)
{
    static uint8_t somewhere; /* not written: nothing is computed */
    const esa_vae_cut cut = {
        .frames = frames, .height = height, .width = width, .bytes = bytes ? &somewhere : NULL
    };
    return count_bytes(vae, &cut);
}

void esa_wan_vae_size(const esa_wan_vae_config *config, const int32_t latent[3], int32_t frames[3])
{
    frames[0] = 1 + (latent[0] - 1) * config->factor_t;
    frames[1] = latent[1] * config->factor_s;
    frames[2] = latent[2] * config->factor_s;
}

int64_t esa_wan_vae_bytes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile)
{
    if (esa_vae_has_tiles(latent, vae->config.factor_s, tile))
        return esa_vae_tiled_bytes(vae, latent, tile);
    return esa_vae_cut_bytes(vae, latent[0], latent[1], latent[2], 1);
}

esa_status esa_wan_vae_check_sizes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile)
{
    const int32_t factor = vae->config.factor_s;
    return esa_vae_check_sizes(vae->env.nn->ctx, latent, factor, tile, 4 * factor);
}

esa_status esa_wan_vae_decode(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, esa_vae_sink sink, void *user)
{
    ESA_TRY(esa_wan_vae_check_sizes(vae, latent, tile));
    if (esa_vae_has_tiles(latent, vae->config.factor_s, tile))
        return esa_vae_decode_tiled(vae, latents, latent, tile, sink, user);
    const esa_vae_cut cut = esa_vae_whole(latents, latent);
    return esa_vae_decode_cut(vae, &cut, sink, user);
}

esa_status esa_wan_vae_frames(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, uint8_t *rgb)
{
    ESA_TRY(esa_wan_vae_check_sizes(vae, latent, tile));
    if (esa_vae_has_tiles(latent, vae->config.factor_s, tile)) {
        int32_t size[3];
        esa_wan_vae_size(&vae->config, latent, size);
        esa_vae_bytes bytes = { vae->env.nn->ctx, rgb,
                                (int64_t)size[1] * size[2] * vae->config.out_channels };
        return esa_vae_decode_tiled(vae, latents, latent, tile, esa_vae_to_bytes, &bytes);
    }
    esa_vae_cut cut = esa_vae_whole(latents, latent);
    cut.bytes = rgb;
    return esa_vae_decode_cut(vae, &cut, NULL, NULL);
}
