/* hunyuan_vae_decode.c - runs the decoder on one piece, layer by layer over all its frames.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Three buffers hold frames: x is the stream, [frames][height][width][channels]; t is of the same
 * kind; p has a border of one pixel around every frame and is what convolutions read. The last res
 * block of a level writes into t with a border, from which the frames are doubled into x.
 *
 * Planes are of the type of the device's activations. The last convolution gives f32 pixels. */
#include <math.h>
#include "model/vae/hunyuan_vae.h"

typedef struct vae_run {
    esa_hunyuan_vae *vae;
    esa_nn *nn;
    const esa_nn_planes *op;
    int64_t element; /* bytes of a plane's element */
    char *x, *t, *p;
    char *z, *qkv;                 /* one frame of latents; q, k and v of the middle block */
    float *rgb;                    /* one frame of pixels */
    void *room;                    /* of group norms */
    int64_t frames, height, width; /* at the current level */
} vae_run;

/* ---------------------------------------------------------------- memory */

/* The largest of x, t and p: in elements. */
static int64_t widest(const esa_hunyuan_vae *vae, int64_t frames, int64_t height, int64_t width)
{
    const esa_hunyuan_vae_config *c = &vae->config;
    int64_t most = 0;
    for (int32_t i = 0; i < c->levels; i++) {
        const hunyuan_level *l = &vae->level[i];
        const int64_t channels = esa_max64(esa_max64(l->cin, l->cout), c->z_dim);
        most = esa_max64(most, frames * (height + 2) * (width + 2) * channels);
        if (l->time) frames = 2 * frames - 1;
        height *= 2;
        width *= 2;
    }
    return most;
}

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(vae_run *r, esa_carve *carve)
{
    const esa_hunyuan_vae *vae = r->vae;
    const esa_hunyuan_vae_config *c = &vae->config;
    const int64_t plane = r->height * r->width, deep = c->width[c->levels - 1],
                  most = r->element * widest(vae, r->frames, r->height, r->width),
                  pixels = plane * c->factor_s * c->factor_s;
    int64_t channels = 0;
    for (int32_t i = 0; i < c->levels; i++) channels = esa_max64(channels, c->width[i]);
    r->x = esa_carve_take(carve, most);
    r->t = esa_carve_take(carve, most);
    r->p = esa_carve_take(carve, most);
    r->z = esa_carve_take(carve, r->element * plane * c->z_dim);
    r->qkv = esa_carve_take(carve, c->attention ? r->element * 3 * r->frames * plane * deep : 0);
    r->rgb = esa_carve_take(carve, 4 * pixels * 3);
    r->room = esa_carve_take(carve, ESA_GROUP_BYTES(channels, c->groups));
}

static vae_run new_run(const esa_hunyuan_vae *vae, int64_t frames, int64_t height, int64_t width)
{
    return (vae_run){ .vae = (esa_hunyuan_vae *)vae,
                      .nn = vae->vae.nn,
                      .op = vae->vae.nn->ops->planes,
                      .element = esa_view_element(vae->vae.nn->ops->dtype),
                      .frames = frames,
                      .height = height,
                      .width = width };
}

int64_t esa_hunyuan_vae_cut_bytes(const esa_hunyuan_vae *vae, int64_t frames, int64_t height,
                                  int64_t width)
{
    vae_run r = new_run(vae, frames, height, width);
    esa_carve carve = { 0 };
    place(&r, &carve);
    return carve.used;
}

/* ---------------------------------------------------------------- layers */

/* Frames with or without a border: the first pixel, and the pitches in elements. */
typedef struct plane {
    char *data;
    int64_t row, frame;
} plane;

static plane plain(const vae_run *r, char *data, int64_t channels)
{
    const int64_t row = r->width * channels;
    return (plane){ data, row, r->height * row };
}

static plane bordered(const vae_run *r, char *data, int64_t channels)
{
    const int64_t row = (r->width + 2) * channels;
    return (plane){ data + r->element * (row + channels), row, (r->height + 2) * row };
}

static char *frame_of(const vae_run *r, const plane *p, int64_t f)
{
    return p->data + r->element * f * p->frame;
}

static esa_status edge(vae_run *r, const plane *p, int64_t channels)
{
    const esa_plane_border_args args = { p->data,   p->row,   p->frame, r->frames,
                                         r->height, r->width, channels, r->nn->ops->dtype };
    return r->op->border(r->nn, &args);
}

static esa_status group_norm(vae_run *r, const hunyuan_norm *n, const plane *y, const plane *x,
                             int32_t act)
{
    const esa_plane_group_args args = { .y = y->data,
                                        .y_row = y->row,
                                        .y_frame = y->frame,
                                        .x = x->data,
                                        .x_row = x->row,
                                        .x_frame = x->frame,
                                        .frames = r->frames,
                                        .height = r->height,
                                        .width = r->width,
                                        .channels = n->channels,
                                        .groups = r->vae->config.groups,
                                        .weight = n->weight,
                                        .bias = n->bias,
                                        .eps = 1e-6f,
                                        .act = act,
                                        .dtype = r->nn->ops->dtype,
                                        .room = r->room };
    return r->op->group_norm(r->nn, &args);
}

/* One frame: from[] are the frames of x that the kernel sees, oldest first. */
static esa_status conv_frame(vae_run *r, const esa_conv *conv, void *y, int64_t y_row,
                             const plane *x, const int64_t from[3], const void *residual,
                             int64_t residual_row, int32_t dtype)
{
    esa_plane_conv_args args = { .y = y,
                                 .y_row = y_row,
                                 .x_row = x->row,
                                 .height = r->height,
                                 .width = r->width,
                                 .residual = residual,
                                 .residual_row = residual_row,
                                 .y_dtype = dtype };
    for (int32_t k = 0; k < conv->kt; k++) args.x[k] = frame_of(r, x, from[k]);
    return r->op->conv(r->nn, conv, &args);
}

/* All frames; the first stands for those before it. */
static esa_status convolve(vae_run *r, const esa_conv *conv, const plane *y, const plane *x,
                           const plane *residual)
{
    for (int64_t f = 0; f < r->frames; f++) {
        const int64_t first = f - (conv->kt - 1);
        const int64_t from[3] = { esa_max64(0, first), esa_max64(0, first + 1), f };
        ESA_TRY(conv_frame(r, conv, frame_of(r, y, f), y->row, x, from,
                           residual ? frame_of(r, residual, f) : NULL, residual ? residual->row : 0,
                           r->nn->ops->dtype));
    }
    return ESA_OK;
}

/* Norm, SiLU and convolution. */
static esa_status norm_conv(vae_run *r, const hunyuan_norm *n, const esa_conv *conv, const plane *y,
                            const plane *x, const plane *residual)
{
    const plane p = bordered(r, r->p, n->channels);
    ESA_TRY(group_norm(r, n, &p, x, ESA_ACT_SILU));
    ESA_TRY(edge(r, &p, n->channels));
    return convolve(r, conv, y, &p, residual);
}

/* From x to y, which may be x. */
static esa_status res_block(vae_run *r, const hunyuan_res *b, const plane *y)
{
    const plane x = plain(r, r->x, b->cin), t = plain(r, r->t, b->cout),
                p = bordered(r, r->p, b->cout);
    ESA_TRY(norm_conv(r, &b->norm[0], &b->conv[0], &t, &x, NULL));
    ESA_TRY(group_norm(r, &b->norm[1], &p, &t, ESA_ACT_SILU));
    ESA_TRY(edge(r, &p, b->cout));
    if (b->shortcut.packed) ESA_TRY(convolve(r, &b->shortcut, &t, &x, NULL));
    return convolve(r, &b->conv[1], y, &p, b->shortcut.packed ? &t : &x);
}

/* Attention with one head as wide as the stream: the pixels of a frame see it and those before. */
static esa_status mid_attention(vae_run *r)
{
    const esa_hunyuan_vae *vae = r->vae;
    esa_nn *nn = r->nn;
    const int64_t c = vae->out.cin, n = r->height * r->width, all = r->frames * n;
    const plane x = plain(r, r->x, c), t = plain(r, r->t, c);
    const esa_conv *const conv[3] = { &vae->q, &vae->k, &vae->v };
    esa_view part[3], o = esa_view_of(r->t, nn->ops->dtype, nn->be->device, all, c);
    ESA_TRY(group_norm(r, &vae->attn_norm, &t, &x, ESA_ACT_NONE));
    for (int32_t i = 0; i < 3; i++) {
        const plane to = plain(r, r->qkv + r->element * i * all * c, c);
        part[i] = esa_view_of(to.data, nn->ops->dtype, nn->be->device, all, c);
        ESA_TRY(convolve(r, conv[i], &to, &t, NULL));
    }
    for (int64_t f = 0; f < r->frames; f++) {
        const esa_biased_args args = { .o = esa_view_rows(o, f * n, n),
                                       .q = esa_view_rows(part[0], f * n, n),
                                       .k = esa_view_rows(part[1], 0, (f + 1) * n),
                                       .v = esa_view_rows(part[2], 0, (f + 1) * n),
                                       .heads = 1,
                                       .D = c,
                                       .scale = (float)(1 / sqrt((double)c)) };
        ESA_TRY(nn->ops->biased(nn, &args));
    }
    return convolve(r, &vae->out, &x, &t, &x);
}

/* ---------------------------------------------------------------- the decoder */

/* Latents through 1 x 1 x 1 into p, then into x. */
static esa_status start(vae_run *r, const esa_vae_cut *cut)
{
    const esa_hunyuan_vae *vae = r->vae;
    const int32_t z = vae->config.z_dim;
    const plane p = bordered(r, r->p, z), x = plain(r, r->x, vae->conv_in.cout),
                one = plain(r, r->z, z);
    const int64_t first[3] = { 0, 0, 0 };
    for (int64_t f = 0; f < r->frames; f++) {
        const esa_plane_latent_args args = { .y = r->z,
                                             .y_row = one.row,
                                             .latents = cut->latents + f * cut->frame,
                                             .channel = cut->channel,
                                             .row = cut->row,
                                             .height = r->height,
                                             .width = r->width,
                                             .channels = z,
                                             .scale = vae->vae.scale,
                                             .shift = vae->vae.shift,
                                             .dtype = r->nn->ops->dtype };
        ESA_TRY(r->op->from_latents(r->nn, &args));
        ESA_TRY(conv_frame(r, &vae->post_quant, frame_of(r, &p, f), p.row, &one, first, NULL, 0,
                           r->nn->ops->dtype));
    }
    ESA_TRY(edge(r, &p, z));
    return convolve(r, &vae->conv_in, &x, &p, NULL);
}

/* Doubles the frames in t, which have a border, into x, and goes to the next level. In time, each
 * frame but the first becomes two. */
static esa_status double_frames(vae_run *r, const hunyuan_level *l)
{
    const plane from = bordered(r, r->t, l->cout);
    const int64_t frames = l->time ? 2 * r->frames - 1 : r->frames;
    vae_run next = *r;
    next.height *= 2;
    next.width *= 2;
    const plane to = plain(&next, r->x, l->cout);
    for (int64_t f = 0; f < frames; f++) {
        int64_t seen[3];
        for (int64_t k = 0; k < 3; k++) {
            const int64_t at = esa_max64(0, f - 2 + k);
            seen[k] = l->time ? (at + 1) / 2 : at;
        }
        ESA_TRY(conv_frame(r, &l->up, frame_of(r, &to, f), to.row, &from, seen, NULL, 0,
                           r->nn->ops->dtype));
    }
    r->frames = frames;
    r->height = next.height;
    r->width = next.width;
    return ESA_OK;
}

static esa_status run_level(vae_run *r, const hunyuan_level *l)
{
    for (int32_t i = 0; i < l->res_count; i++) {
        const int32_t ends = l->up.packed && i + 1 == l->res_count;
        const plane to = ends ? bordered(r, r->t, l->cout) : plain(r, r->x, l->cout);
        ESA_TRY(res_block(r, &l->res[i], &to));
        if (!ends) continue;
        ESA_TRY(edge(r, &to, l->cout));
        return double_frames(r, l);
    }
    return ESA_OK;
}

/* Pixels of all frames, one after the other to host memory. */
static esa_status finish(vae_run *r, float *rgb)
{
    const esa_hunyuan_vae *vae = r->vae;
    const int64_t c = vae->norm_out.channels, line = r->width * 3, size = r->height * line;
    const plane x = plain(r, r->x, c), p = bordered(r, r->p, c);
    ESA_TRY(group_norm(r, &vae->norm_out, &p, &x, ESA_ACT_SILU));
    ESA_TRY(edge(r, &p, c));
    for (int64_t f = 0; f < r->frames; f++) {
        const int64_t from[3] = { esa_max64(0, f - 2), esa_max64(0, f - 1), f };
        ESA_TRY(conv_frame(r, &vae->conv_out, r->rgb, line, &p, from, NULL, 0, ESA_DTYPE_F32));
        ESA_TRY(esa_nn_download(r->nn, rgb + f * size, r->rgb, 4 * size));
    }
    return ESA_OK;
}

static esa_status run_all(vae_run *r, const esa_vae_cut *cut, float *rgb)
{
    const esa_hunyuan_vae *vae = r->vae;
    const plane x = plain(r, r->x, vae->conv_in.cout);
    ESA_TRY(start(r, cut));
    ESA_TRY(res_block(r, &vae->mid[0], &x));
    if (vae->config.attention) ESA_TRY(mid_attention(r));
    ESA_TRY(res_block(r, &vae->mid[1], &x));
    for (int32_t i = 0; i < vae->config.levels; i++) {
        ESA_TRY(run_level(r, &vae->level[i]));
        ESA_TRY(r->nn->ops->pace(r->nn));
    }
    return finish(r, rgb);
}

esa_status esa_hunyuan_vae_cut(esa_hunyuan_vae *vae, const esa_vae_cut *cut, float *rgb)
{
    vae_run r = new_run(vae, cut->frames, cut->height, cut->width);
    esa_carve carve = { 0 };
    void *block = NULL;
    place(&r, &carve);
    const int64_t bytes = carve.used;
    ESA_TRY(esa_nn_alloc(vae->vae.nn, &block, bytes, "the frames of the VAE decoder"));
    carve = (esa_carve){ .base = block };
    place(&r, &carve);
    const esa_status status = run_all(&r, cut, rgb);
    esa_nn_free(vae->vae.nn, block, bytes);
    return status;
}
