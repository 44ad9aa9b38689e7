/* wan_vae_decode.c - runs the decoder, one frame of latents after the other; wan_vae.h explains the
 * order.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Planes: the inputs of convolutions are planes with a border of one pixel of zeros. The border is
 * set when the plane is made and never written again. Planes are passed on: a norm fills one, it
 * becomes the newest of a convolution's history, and two frames later it is spare for the next norm
 * of that shape. The stream between blocks has no border.
 *
 * A dry run takes the same path without computing and only counts. The memory that it counts is
 * allocated as one block, from which planes and buffers are taken.
 *
 * Planes are of the type of the device's activations. The last convolution gives f32 pixels. */
#include <math.h>
#include <string.h>
#include "model/vae/wan_vae_parts.h"
#include "nn/ops.h"

typedef struct plane {
    char *data;              /* (height + 2) x (width + 2) x channels; NULL: none */
    int32_t level, channels; /* the level gives the size */
} plane;

typedef struct vae_run {
    esa_wan_vae *vae;
    esa_nn *nn;
    const esa_nn_planes *op;
    int32_t dry, clamp;
    int64_t element;       /* bytes of a plane's element */
    char *block;           /* the memory of the run */
    int64_t size, used;    /* bytes of the block; taken so far */
    int64_t height, width; /* size of the latents */
    int64_t frames;        /* of pixels */
    plane *kept;           /* [slots][2]: older, newer */
    plane *spare;          /* [spare_cap] */
    int64_t spare_count, spare_cap, list_bytes;
    int32_t started[ESA_CONFIG_MAX_LEVELS]; /* 1 after the first frame of the doubling in time */
    void *stream[ESA_CONFIG_MAX_LEVELS], *temp[ESA_CONFIG_MAX_LEVELS];
    void *z, *qkv;
    float *rgb;
    int32_t *wrong;       /* [frames]: 1 if a pixel of the frame is not a number */
    uint8_t *bytes, *out; /* [frames][pixels]: on the device, in host memory; NULL: to sink */
    float *seen;          /* room for pixels in host memory; NULL if rgb is there */
    esa_vae_sink sink;
    void *user;
    int64_t frame; /* the next frame of pixels */
} vae_run;

static int64_t high(const vae_run *r, int32_t level) { return r->height << level; }
static int64_t wide(const vae_run *r, int32_t level) { return r->width << level; }
static int64_t pitch(const vae_run *r, const plane *p)
{
    return (wide(r, p->level) + 2) * p->channels;
}
static void *inside(const vae_run *r, const plane *p)
{
    return p->data ? p->data + r->element * (pitch(r, p) + p->channels) : NULL;
}
static int64_t plane_bytes(const vae_run *r, const plane *p)
{
    return r->element * (high(r, p->level) + 2) * pitch(r, p);
}
/* Elements of a frame of pixels. */
static int64_t pixels(const vae_run *r)
{
    const int32_t level = r->vae->levels - 1;
    return high(r, level) * wide(r, level) * r->vae->conv_out.cout;
}

/* In a dry run memory is only counted, and the pointer is never dereferenced. */
static esa_status take(vae_run *r, void *out, int64_t bytes)
{
    static char nothing;
    const int64_t at = r->used;
    char *const place = r->dry ? &nothing : r->block + at;
    r->used += esa_ceil_div(bytes, 256) * 256;
    if (!r->dry && r->used > r->size)
        return esa_fail(r->nn->ctx, ESA_ERR_INTERNAL, "the VAE decoder counted its memory wrong");
    memcpy(out, &place, sizeof place);
    return ESA_OK;
}

static esa_status plane_take(vae_run *r, plane *out, int32_t level, int32_t channels)
{
    for (int64_t i = 0; i < r->spare_count; i++)
        if (r->spare[i].level == level && r->spare[i].channels == channels) {
            *out = r->spare[i];
            r->spare[i] = r->spare[--r->spare_count];
            return ESA_OK;
        }
    *out = (plane){ .level = level, .channels = channels };
    ESA_TRY(take(r, &out->data, plane_bytes(r, out)));
    return r->dry ? ESA_OK : r->op->zero(r->nn, out->data, plane_bytes(r, out));
}

static void plane_give(vae_run *r, plane *p)
{
    if (p->data) r->spare[r->spare_count++] = *p;
    *p = (plane){ 0 };
}

/* Adds the newest frame to a slot's history; the oldest becomes spare. */
static void remember(vae_run *r, int32_t slot, const plane *p)
{
    plane *kept = r->kept + ESA_VAE_KEPT * slot;
    plane_give(r, &kept[0]);
    kept[0] = kept[1];
    kept[1] = *p;
}

/* A plane or a part of the stream as output of a convolution. */
typedef struct target {
    void *y;
    int64_t row;
    const void *residual;
    int64_t residual_row;
} target;

static esa_status convolve(vae_run *r, const esa_conv *conv, const target *to, int32_t dtype,
                           const void *const x[3], int64_t x_row, int32_t level)
{
    const esa_plane_conv_args args = { .y = to->y,
                                       .y_row = to->row,
                                       .x = { x[0], x[1], x[2] },
                                       .x_row = x_row,
                                       .height = high(r, level),
                                       .width = wide(r, level),
                                       .residual = to->residual,
                                       .residual_row = to->residual_row,
                                       .y_dtype = dtype };
    return r->dry ? ESA_OK : r->op->conv(r->nn, conv, &args);
}

/* A convolution of one frame without a border. */
static esa_status mix(vae_run *r, const esa_conv *conv, const target *to, const void *x,
                      int32_t level)
{
    const void *const from[3] = { x };
    return convolve(r, conv, to, r->nn->ops->dtype, from, wide(r, level) * conv->cin, level);
}

/* A convolution over its history and p. Does not add p to the history. */
static esa_status causal(vae_run *r, const esa_conv *conv, int32_t slot, const plane *p,
                         const target *to, int32_t dtype)
{
    const plane *kept = r->kept + ESA_VAE_KEPT * slot;
    const void *const x[3] = { inside(r, &kept[0]), inside(r, &kept[1]), inside(r, p) };
    return convolve(r, conv, to, dtype, x, pitch(r, p), p->level);
}

/* Norm and act of the stream x, into a plane with the given pitch. */
static esa_status normalise(vae_run *r, const float *gamma, int32_t channels, int32_t level,
                            const void *x, void *y, int64_t y_row, int32_t act)
{
    const esa_plane_norm_args args = { .y = y,
                                       .y_row = y_row,
                                       .x = x,
                                       .x_row = wide(r, level) * channels,
                                       .height = high(r, level),
                                       .width = wide(r, level),
                                       .channels = channels,
                                       .gamma = gamma,
                                       .act = act,
                                       .dtype = r->nn->ops->dtype };
    return r->dry ? ESA_OK : r->op->pixel_norm(r->nn, &args);
}

/* Norm, SiLU and causal convolution of the stream x. */
static esa_status norm_conv(vae_run *r, const float *gamma, const esa_conv *conv, int32_t slot,
                            int32_t level, const void *x, const target *to, int32_t dtype)
{
    plane p;
    ESA_TRY(plane_take(r, &p, level, conv->cin));
    esa_status status = normalise(r, gamma, conv->cin, level, x, inside(r, &p), pitch(r, &p),
                                  ESA_ACT_SILU);
    if (!status) status = causal(r, conv, slot, &p, to, dtype);
    remember(r, slot, &p);
    return status;
}

/* The second half of a res block: norm (from temp into p), shortcut (into temp), convolution. */
static esa_status res_end(vae_run *r, const esa_vae_res *b, int32_t level, const plane *p, void *y,
                          int64_t y_row)
{
    void *x = r->stream[level], *t = r->temp[level];
    const int64_t row = wide(r, level) * b->cout;
    const target shortcut = { .y = t, .row = row },
                 end = { y, y_row, b->shortcut.packed ? t : x, row };
    ESA_TRY(normalise(r, b->norm[1], b->cout, level, t, inside(r, p), pitch(r, p), ESA_ACT_SILU));
    if (b->shortcut.packed) ESA_TRY(mix(r, &b->shortcut, &shortcut, x, level));
    return causal(r, &b->conv[1], b->slot + 1, p, &end, r->nn->ops->dtype);
}

/* From the stream to y, which may be the stream itself. */
static esa_status res_block(vae_run *r, const esa_vae_res *b, int32_t level, void *y, int64_t y_row)
{
    plane p;
    const target middle = { .y = r->temp[level], .row = wide(r, level) * b->cout };
    ESA_TRY(norm_conv(r, b->norm[0], &b->conv[0], b->slot, level, r->stream[level], &middle,
                      r->nn->ops->dtype));
    ESA_TRY(plane_take(r, &p, level, b->cout));
    const esa_status status = res_end(r, b, level, &p, y, y_row);
    remember(r, b->slot + 1, &p);
    return status;
}

/* Attention over the pixels of the frame, with one head as wide as the stream. */
static esa_status mid_attention(vae_run *r)
{
    const esa_wan_vae *vae = r->vae;
    esa_nn *nn = r->nn;
    const int32_t channels = vae->proj.cin, dtype = nn->ops->dtype;
    const int64_t n = r->height * r->width, c = channels, row = r->width * c;
    void *x = r->stream[0], *t = r->temp[0];
    const target qkv = { .y = r->qkv, .row = 3 * row }, end = { x, row, x, row };
    ESA_TRY(normalise(r, vae->attn_norm, channels, 0, x, t, row, ESA_ACT_NONE));
    ESA_TRY(mix(r, &vae->qkv, &qkv, t, 0));
    const esa_view all = esa_view_of(r->qkv, dtype, nn->be->device, n, 3 * c);
    const esa_biased_args args = { .o = esa_view_of(t, dtype, nn->be->device, n, c),
                                   .q = esa_view_cols(all, 0, c),
                                   .k = esa_view_cols(all, c, c),
                                   .v = esa_view_cols(all, 2 * c, c),
                                   .heads = 1,
                                   .D = c,
                                   .scale = 1.0f / sqrtf((float)c) };
    if (!r->dry) ESA_TRY(nn->ops->biased(nn, &args));
    return mix(r, &vae->proj, &end, t, 0);
}

/* Gives the frame in rgb to the sink, or keeps its bytes. */
static esa_status give_frame(vae_run *r)
{
    const int64_t n = pixels(r), frame = r->frame++;
    float *rgb = r->rgb;
    if (r->bytes) {
        const esa_plane_bytes_args args = { r->bytes + frame * n, rgb, n, r->wrong + frame };
        return r->op->to_bytes(r->nn, &args);
    }
    if (r->seen) {
        ESA_TRY(esa_nn_download(r->nn, r->seen, rgb, 4 * n));
        rgb = r->seen;
    }
    if (r->clamp) esa_vae_clamp(rgb, n);
    return r->sink(r->user, frame, rgb);
}

static esa_status to_pixels(vae_run *r)
{
    const esa_wan_vae *vae = r->vae;
    const int32_t level = vae->levels - 1;
    const target end = { .y = r->rgb, .row = wide(r, level) * vae->conv_out.cout };
    ESA_TRY(norm_conv(r, vae->norm_out, &vae->conv_out, vae->out_slot, level, r->stream[level],
                      &end, ESA_DTYPE_F32));
    return r->dry ? ESA_OK : give_frame(r);
}

static esa_status run_level(vae_run *r, int32_t level);

/* Doubles p in space and runs the next level. p becomes spare. */
static esa_status next_level(vae_run *r, int32_t level, plane *p)
{
    const esa_vae_level *l = &r->vae->level[level];
    const void *const x[3] = { inside(r, p) };
    const target to = { .y = r->stream[level + 1], .row = wide(r, level + 1) * l->up.cout };
    const esa_status status = convolve(r, &l->up, &to, r->nn->ops->dtype, x, pitch(r, p), level);
    plane_give(r, p);
    return status ? status : run_level(r, level + 1);
}

/* The two frames that p becomes where time doubles. */
static esa_status split_time(vae_run *r, int32_t level, const plane *p, plane two[2])
{
    const esa_vae_level *l = &r->vae->level[level];
    for (int32_t i = 0; i < 2; i++) {
        ESA_TRY(plane_take(r, &two[i], level, l->cout));
        const target to = { .y = inside(r, &two[i]), .row = pitch(r, &two[i]) };
        ESA_TRY(causal(r, &l->time[i], l->slot, p, &to, r->nn->ops->dtype));
    }
    return ESA_OK;
}

/* Doubles p in time; the first of the two frames goes all the way to pixels, then the second. */
static esa_status double_time(vae_run *r, int32_t level, plane *p)
{
    plane two[2] = { { 0 } };
    esa_status status = split_time(r, level, p, two);
    if (!status)
        remember(r, r->vae->level[level].slot, p);
    else
        plane_give(r, p);
    for (int32_t i = 0; i < 2 && !status; i++) status = next_level(r, level, &two[i]);
    plane_give(r, &two[0]); /* what next_level did not reach */
    plane_give(r, &two[1]);
    return status;
}

static esa_status run_level(vae_run *r, int32_t level)
{
    const esa_vae_level *l = &r->vae->level[level];
    const esa_vae_res *last = &l->res[l->res_count - 1];
    const int64_t row = wide(r, level) * l->cout;
    for (int32_t i = 0; i + 1 < l->res_count; i++)
        ESA_TRY(res_block(r, &l->res[i], level, r->stream[level], row));
    if (level == r->vae->levels - 1) {
        ESA_TRY(res_block(r, last, level, r->stream[level], row));
        return to_pixels(r);
    }
    plane p;
    ESA_TRY(plane_take(r, &p, level, l->cout));
    const esa_status status = res_block(r, last, level, inside(r, &p), pitch(r, &p));
    if (status) {
        plane_give(r, &p);
        return status;
    }
    if (l->time[0].packed && r->started[level]) return double_time(r, level, &p);
    r->started[level] = 1;
    return next_level(r, level, &p);
}

/* The first convolutions: r->z through 1 x 1 x 1 into p, then into the stream. */
static esa_status start_frame(vae_run *r, const plane *p)
{
    const esa_wan_vae *vae = r->vae;
    const target first = { .y = inside(r, p), .row = pitch(r, p) },
                 second = { .y = r->stream[0], .row = r->width * vae->conv_in.cout };
    ESA_TRY(mix(r, &vae->post_quant, &first, r->z, 0));
    return causal(r, &vae->conv_in, vae->in_slot, p, &second, r->nn->ops->dtype);
}

/* One frame of latents: applies the statistics, then runs the decoder. */
static esa_status run_frame(vae_run *r, const esa_vae_cut *cut, int64_t t)
{
    const esa_wan_vae *vae = r->vae;
    const int32_t z = vae->config.z_dim;
    const esa_plane_latent_args args = { .y = r->z,
                                         .y_row = r->width * z,
                                         .latents = r->dry ? NULL : cut->latents + t * cut->frame,
                                         .channel = cut->channel,
                                         .row = cut->row,
                                         .height = r->height,
                                         .width = r->width,
                                         .channels = z,
                                         .scale = vae->scale,
                                         .shift = vae->shift,
                                         .dtype = r->nn->ops->dtype };
    if (!r->dry) ESA_TRY(r->op->from_latents(r->nn, &args));
    plane p;
    ESA_TRY(plane_take(r, &p, 0, z));
    const esa_status status = start_frame(r, &p);
    remember(r, vae->in_slot, &p);
    if (status) return status;
    ESA_TRY(res_block(r, &vae->mid[0], 0, r->stream[0], r->width * vae->conv_in.cout));
    ESA_TRY(mid_attention(r));
    ESA_TRY(res_block(r, &vae->mid[1], 0, r->stream[0], r->width * vae->conv_in.cout));
    return run_level(r, 0);
}

/* Takes the streams and single buffers. */
static esa_status take_buffers(vae_run *r, const esa_vae_cut *cut)
{
    const esa_wan_vae *vae = r->vae;
    const int64_t n = r->height * r->width;
    ESA_TRY(take(r, &r->z, r->element * n * vae->config.z_dim));
    ESA_TRY(take(r, &r->qkv, r->element * n * vae->qkv.cout));
    ESA_TRY(take(r, &r->rgb, 4 * pixels(r)));
    for (int32_t l = 0; l < vae->levels; l++) {
        const int64_t bytes = r->element * high(r, l) * wide(r, l) * vae->level[l].widest;
        ESA_TRY(take(r, &r->stream[l], bytes));
        ESA_TRY(take(r, &r->temp[l], bytes));
    }
    /* A device with host memory writes bytes where they are wanted. */
    r->bytes = r->out = cut->bytes;
    if (cut->bytes && !r->nn->be->host_memory) ESA_TRY(take(r, &r->bytes, r->frames * pixels(r)));
    ESA_TRY(take(r, &r->wrong, 4 * r->frames));
    return r->dry ? ESA_OK : r->op->zero(r->nn, r->wrong, 4 * r->frames);
}

/* Brings the bytes of all frames to the host. */
static esa_status take_bytes(vae_run *r)
{
    esa_ctx *ctx = r->nn->ctx;
    if (!r->out || r->dry) return ESA_OK;
    if (r->bytes != r->out)
        ESA_TRY(esa_nn_download(r->nn, r->out, r->bytes, r->frames * pixels(r)));
    int32_t *wrong = esa_mem_alloc(&ctx->mem, 4 * r->frames);
    if (!wrong) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE decoder");
    esa_status status = esa_nn_download(r->nn, wrong, r->wrong, 4 * r->frames);
    for (int64_t f = 0; f < r->frames && !status; f++)
        if (wrong[f]) status = esa_vae_nan(r->vae, f);
    esa_mem_free(&ctx->mem, wrong, 4 * r->frames);
    return status;
}

static esa_status run_frames(vae_run *r, const esa_vae_cut *cut)
{
    const esa_part_env *env = &r->vae->env;
    ESA_TRY(take_buffers(r, cut));
    for (int64_t t = 0; t < cut->frames; t++) {
        ESA_TRY(run_frame(r, cut, t));
        if (r->dry) continue;
        /* The pages of the frames are made while the device works, not while they arrive. */
        if (t == 0 && r->bytes != r->out) memset(r->out, 0, (size_t)(r->frames * pixels(r)));
        ESA_TRY(r->nn->ops->pace(r->nn));
        if (env->tick && env->tick(env->tick_user, cut->tick_base + t + 1, cut->tick_total))
            return esa_fail(r->nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    return take_bytes(r);
}

static esa_status run_all(vae_run *r, const esa_vae_cut *cut)
{
    esa_ctx *ctx = r->nn->ctx;
    /* The most planes there can be: two per slot, one in use per slot's shape, three per
     * doubling. */
    r->spare_cap = (ESA_VAE_KEPT + 1) * r->vae->slots + 3 * r->vae->levels + 4;
    r->list_bytes = (int64_t)sizeof(plane) * (ESA_VAE_KEPT * r->vae->slots + r->spare_cap);
    r->kept = esa_mem_zalloc(&ctx->mem, r->list_bytes);
    if (!r->kept) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE decoder");
    r->spare = r->kept + ESA_VAE_KEPT * r->vae->slots;
    const esa_status status = run_frames(r, cut);
    esa_mem_free(&ctx->mem, r->kept, r->list_bytes);
    return status;
}

static vae_run new_run(const esa_wan_vae *vae, const esa_vae_cut *cut, int32_t dry)
{
    return (vae_run){ .vae = (esa_wan_vae *)vae,
                      .nn = vae->env.nn,
                      .op = vae->env.nn->ops->planes,
                      .dry = dry,
                      .clamp = cut->clamp,
                      .element = esa_view_element(vae->env.nn->ops->dtype),
                      .height = cut->height,
                      .width = cut->width,
                      .frames = 1 + (cut->frames - 1) * vae->config.factor_t };
}

/* The memory of a run; INT64_MAX if there is not enough to count it. */
static int64_t count_bytes(const esa_wan_vae *vae, const esa_vae_cut *cut)
{
    esa_vae_cut first = *cut;
    vae_run run = new_run(vae, cut, 1);
    /* From the fourth latent frame on nothing more is taken. */
    first.frames = esa_min64(cut->frames, 4);
    return run_all(&run, &first) ? INT64_MAX : run.used;
}

/* Allocates what the run needs, and frees it. */
static esa_status run_in_memory(vae_run *r, const esa_vae_cut *cut)
{
    esa_nn *nn = r->nn;
    const int64_t seen = cut->bytes || nn->be->host_memory ? 0 : 4 * pixels(r);
    r->size = count_bytes(r->vae, cut);
    ESA_TRY(esa_nn_alloc(nn, (void **)&r->block, r->size, "the planes of the VAE decoder"));
    esa_status status = ESA_OK;
    if (seen) status = esa_nn_alloc_host(nn, (void **)&r->seen, seen, "a frame of the VAE decoder");
    if (!status) status = run_all(r, cut);
    esa_nn_free_host(nn, r->seen, seen);
    esa_nn_free(nn, r->block, r->size);
    return status;
}

esa_status esa_vae_decode_cut(esa_wan_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink,
                              void *user)
{
    vae_run run = new_run(vae, cut, 0);
    run.sink = sink;
    run.user = user;
    esa_nn_enter(run.nn);
    const esa_status status = run_in_memory(&run, cut);
    esa_nn_leave(run.nn);
    return status;
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

esa_status esa_vae_nan(const esa_wan_vae *vae, int64_t frame)
{
    return esa_fail(vae->env.nn->ctx, ESA_ERR_FORMAT,
                    "the VAE gave NaN for pixels of frame %lld: its weights are damaged",
                    (long long)frame);
}

void esa_wan_vae_size(const esa_wan_vae_config *config, const int32_t latent[3], int32_t frames[3])
{
    frames[0] = 1 + (latent[0] - 1) * config->factor_t;
    frames[1] = latent[1] * config->factor_s;
    frames[2] = latent[2] * config->factor_s;
}

int64_t esa_wan_vae_bytes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile)
{
    if (esa_vae_tiles(&vae->config, latent, tile)) return esa_vae_tiled_bytes(vae, latent, tile);
    return esa_vae_cut_bytes(vae, latent[0], latent[1], latent[2], 1);
}

esa_status esa_wan_vae_check_sizes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile)
{
    esa_ctx *ctx = vae->env.nn->ctx;
    const int32_t unit = 4 * vae->config.factor_s;
    for (int32_t i = 0; i < 3; i++)
        if (latent[i] < 1 || latent[i] > (1 << 20) / vae->config.factor_s)
            return esa_fail(ctx, ESA_ERR_ARGUMENT, "the VAE cannot decode latents of %d x %d x %d",
                            (int)latent[0], (int)latent[1], (int)latent[2]);
    if (tile < 0 || tile % unit)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the VAE tile is %d pixels, expected 0 or a multiple of %d", (int)tile,
                        (int)unit);
    return ESA_OK;
}

/* All latents in one piece. */
static esa_vae_cut whole(const float *latents, const int32_t latent[3])
{
    const int64_t frame = (int64_t)latent[1] * latent[2];
    return (esa_vae_cut){ .latents = latents,
                          .frames = latent[0],
                          .height = latent[1],
                          .width = latent[2],
                          .row = latent[2],
                          .frame = frame,
                          .channel = latent[0] * frame,
                          .tick_total = latent[0],
                          .clamp = 1 };
}

esa_status esa_wan_vae_decode(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, esa_vae_sink sink, void *user)
{
    ESA_TRY(esa_wan_vae_check_sizes(vae, latent, tile));
    if (esa_vae_tiles(&vae->config, latent, tile))
        return esa_vae_decode_tiled(vae, latents, latent, tile, sink, user);
    const esa_vae_cut cut = whole(latents, latent);
    return esa_vae_decode_cut(vae, &cut, sink, user);
}

/* Where the frames of tiles go. */
typedef struct taker {
    const esa_wan_vae *vae;
    uint8_t *rgb;
    int64_t pixels;
} taker;

static esa_status take_frame(void *user, int64_t frame, const float *rgb)
{
    const taker *t = user;
    const int32_t wrong = esa_nn_pixel_bytes(t->rgb + frame * t->pixels, rgb, t->pixels);
    return wrong ? esa_vae_nan(t->vae, frame) : ESA_OK;
}

esa_status esa_wan_vae_frames(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, uint8_t *rgb)
{
    ESA_TRY(esa_wan_vae_check_sizes(vae, latent, tile));
    if (esa_vae_tiles(&vae->config, latent, tile)) {
        int32_t size[3];
        esa_wan_vae_size(&vae->config, latent, size);
        taker t = { vae, rgb, (int64_t)size[1] * size[2] * vae->config.out_channels };
        return esa_vae_decode_tiled(vae, latents, latent, tile, take_frame, &t);
    }
    esa_vae_cut cut = whole(latents, latent);
    cut.bytes = rgb;
    return esa_vae_decode_cut(vae, &cut, NULL, NULL);
}
