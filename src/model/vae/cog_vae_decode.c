/* cog_vae_decode.c - runs CogVideoX's decoder, one batch of latent frames after the other;
 * cog_vae.h explains the order.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Three buffers hold the frames of a batch: the stream between blocks; planes with a border of one
 * pixel of zeros, the inputs of convolutions; and temp. A norm fills the planes, a convolution
 * reads them and writes the stream or temp, and the last two planes are copied to the history of
 * the convolution. Buffers have the size of the largest level.
 *
 * Planes are of the type of the device's activations. The last convolution gives f32 pixels. */
#include "model/vae/cog_vae.h"

#define NORM_EPS 1e-6f /* of the guided norms; no setting of the model */

/* The shape of bordered planes. */
typedef struct shape {
    int32_t level, channels;
} shape;

typedef struct vae_run {
    esa_cog_vae *vae;
    esa_nn *nn;
    const esa_nn_planes *op;
    int64_t element; /* bytes of a plane's element */
    int64_t height, width;
    int64_t latents;      /* latent frames of this batch */
    int64_t largest;      /* of the largest batch */
    int32_t level, batch; /* batch: its number */
    void *block;          /* the memory of the run */
    char *stream, *temp, *planes;
    shape zeroed; /* the shape whose border is zero in planes; channels 0: none */
    char *z;      /* [latents][height][width][z_dim] */
    float *times, *plus;
    void *room; /* of group norms */
    esa_vae_out out;
    int32_t more; /* 1 if another batch follows */
} vae_run;

/* ---------------------------------------------------------------- sizes */

static int64_t high(const vae_run *r, int32_t level) { return r->height << level; }
static int64_t wide(const vae_run *r, int32_t level) { return r->width << level; }

/* Frames of a batch of so many latent frames at a level. */
static int64_t frames_at(const esa_cog_vae *vae, int64_t latents, int32_t level)
{
    int64_t n = latents;
    for (int32_t i = 0; i < level; i++)
        if (vae->level[i].doubles_time && n > 1) n = n % 2 ? 2 * n - 1 : 2 * n;
    return n;
}

static int64_t pitch(const vae_run *r, shape s) { return (wide(r, s.level) + 2) * s.channels; }
/* Elements of a plane with its border. */
static int64_t plane_size(const vae_run *r, shape s)
{
    return (high(r, s.level) + 2) * pitch(r, s);
}
/* Pixel (0, 0) of frame f of planes. */
static char *inside(const vae_run *r, char *planes, shape s, int64_t f)
{
    return planes + r->element * (f * plane_size(r, s) + pitch(r, s) + s.channels);
}
/* Elements of a frame without a border. */
static int64_t area(const vae_run *r, int32_t level, int32_t channels)
{
    return high(r, level) * wide(r, level) * channels;
}

/* ---------------------------------------------------------------- memory */

/* The largest of everything: [0] elements of the stream, [1] of the planes, [2] channels. */
static void measure(const vae_run *r, int64_t size[3])
{
    const esa_cog_vae *vae = r->vae;
    const shape first = { 0, vae->config.z_dim };
    size[0] = 0;
    size[1] = r->largest * plane_size(r, first);
    size[2] = 0;
    for (int32_t i = 0; i < vae->config.levels; i++) {
        const cog_vae_level *l = &vae->level[i];
        const shape s = { i, l->cin > l->cout ? l->cin : l->cout };
        const int64_t n = frames_at(vae, r->largest, i);
        size[0] = esa_max64(size[0], n * area(r, i, s.channels));
        size[1] = esa_max64(size[1], n * plane_size(r, s));
        size[2] = esa_max64(size[2], s.channels);
    }
}

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(vae_run *r, esa_carve *carve)
{
    esa_cog_vae *vae = r->vae;
    const int64_t n = r->height * r->width, largest = r->largest;
    int64_t size[3];
    measure(r, size);
    r->stream = esa_carve_take(carve, r->element * size[0]);
    r->temp = esa_carve_take(carve, r->element * size[1]);
    r->planes = esa_carve_take(carve, r->element * size[1]);
    r->z = esa_carve_take(carve, r->element * largest * n * vae->config.z_dim);
    r->times = esa_carve_take(carve, 4 * largest * n * size[2]);
    r->plus = esa_carve_take(carve, 4 * largest * n * size[2]);
    r->room = esa_carve_take(carve, ESA_GROUP_BYTES(size[2], vae->config.groups));
    esa_vae_out_place(&r->out, carve);
    for (int32_t i = 0; i < vae->slots && r->out.frames > 1; i++) {
        cog_vae_slot *slot = &vae->slot[i];
        const shape s = { slot->level, slot->channels };
        for (int32_t k = 0; k < ESA_COG_KEPT; k++) {
            char *kept = esa_carve_take(carve, r->element * plane_size(r, s));
            if (carve->base) slot->kept[k] = kept;
        }
    }
}

/* ---------------------------------------------------------------- layers */

/* Makes the border of the planes zero for this shape. */
static esa_status clear(vae_run *r, char *planes, shape s)
{
    const int64_t n = frames_at(r->vae, r->latents, s.level);
    return r->op->zero(r->nn, planes, r->element * n * plane_size(r, s));
}

static esa_status shape_planes(vae_run *r, shape s)
{
    if (r->zeroed.level == s.level && r->zeroed.channels == s.channels) return ESA_OK;
    r->zeroed = s;
    return clear(r, r->planes, s);
}

/* A convolution of single frames without a border: x [frames][pixels][cin] to y [..][cout]. */
static esa_status mix(vae_run *r, const esa_conv *conv, void *y, int32_t dtype, const char *x,
                      int64_t frames, int32_t level)
{
    const int64_t from = r->element * area(r, level, conv->cin),
                  to = esa_view_element(dtype) * area(r, level, conv->cout);
    for (int64_t f = 0; f < frames; f++) {
        const esa_plane_conv_args args = { .y = (char *)y + f * to,
                                           .y_row = wide(r, level) * conv->cout,
                                           .x = { x + f * from },
                                           .x_row = wide(r, level) * conv->cin,
                                           .height = high(r, level),
                                           .width = wide(r, level),
                                           .y_dtype = dtype };
        ESA_TRY(r->op->conv(r->nn, conv, &args));
    }
    return ESA_OK;
}

/* The norm of x (the stream or temp) with its guide, and SiLU, into the planes. */
static esa_status normalise(vae_run *r, const cog_vae_norm *norm, const char *x)
{
    const shape s = { r->level, norm->channels };
    const int64_t frames = frames_at(r->vae, r->latents, s.level);
    int32_t doubled = 0;
    for (int32_t i = 0; i < s.level && r->latents > 1; i++)
        doubled += r->vae->level[i].doubles_time;
    ESA_TRY(mix(r, &norm->times, r->times, ESA_DTYPE_F32, r->z, r->latents, 0));
    ESA_TRY(mix(r, &norm->plus, r->plus, ESA_DTYPE_F32, r->z, r->latents, 0));
    ESA_TRY(shape_planes(r, s));
    const esa_plane_group_args args = { .y = inside(r, r->planes, s, 0),
                                        .y_row = pitch(r, s),
                                        .y_frame = plane_size(r, s),
                                        .x = x,
                                        .x_row = wide(r, s.level) * s.channels,
                                        .x_frame = area(r, s.level, s.channels),
                                        .frames = frames,
                                        .height = high(r, s.level),
                                        .width = wide(r, s.level),
                                        .channels = s.channels,
                                        .groups = r->vae->config.groups,
                                        .weight = norm->weight,
                                        .bias = norm->bias,
                                        .eps = NORM_EPS,
                                        .act = ESA_ACT_SILU,
                                        .dtype = r->nn->ops->dtype,
                                        .guide = { .times = r->times,
                                                   .plus = r->plus,
                                                   .level = s.level,
                                                   .time_level = doubled,
                                                   .first_apart = frames > 1 && frames % 2 },
                                        .room = r->room };
    return r->op->group_norm(r->nn, &args);
}

/* The last planes become the history of a convolution. */
static esa_status remember(vae_run *r, cog_vae_slot *slot, shape s)
{
    const int64_t bytes = r->element * plane_size(r, s),
                  first = frames_at(r->vae, r->latents, s.level) - ESA_COG_KEPT;
    for (int32_t k = 0; k < ESA_COG_KEPT && r->more; k++)
        ESA_TRY(esa_nn_copy(r->nn, slot->kept[k], r->planes + (first + k) * bytes, bytes));
    return ESA_OK;
}

/* Frame f of the planes; before them comes the history, or the first frame again. */
static const void *frame_of(const vae_run *r, const cog_vae_slot *slot, shape s, int64_t f)
{
    if (f >= 0) return inside(r, r->planes, s, f);
    return r->batch ? inside(r, slot->kept[ESA_COG_KEPT + f], s, 0) : inside(r, r->planes, s, 0);
}

/* Where a convolution writes its frames. */
typedef struct target {
    char *y; /* of the first frame */
    int64_t row, frame;
    const char *residual; /* without a border; NULL: none */
} target;

static esa_status conv_frame(vae_run *r, const esa_conv *conv, const cog_vae_slot *slot,
                             const target *to, int32_t dtype, int64_t f)
{
    const shape s = { slot->level, slot->channels };
    const int64_t out = wide(r, s.level) * conv->cout;
    const esa_plane_conv_args args = {
        .y = to->y + f * to->frame * esa_view_element(dtype),
        .y_row = to->row,
        .x = { frame_of(r, slot, s, f - 2), frame_of(r, slot, s, f - 1), frame_of(r, slot, s, f) },
        .x_row = pitch(r, s),
        .height = high(r, s.level),
        .width = wide(r, s.level),
        .residual = to->residual ? to->residual + f * high(r, s.level) * out * r->element : NULL,
        .residual_row = out,
        .y_dtype = dtype
    };
    return r->op->conv(r->nn, conv, &args);
}

/* A causal convolution of the planes. */
static esa_status causal(vae_run *r, const esa_conv *conv, int32_t number, const target *to)
{
    cog_vae_slot *slot = &r->vae->slot[number];
    const int64_t frames = frames_at(r->vae, r->latents, slot->level);
    for (int64_t f = 0; f < frames; f++)
        ESA_TRY(conv_frame(r, conv, slot, to, r->nn->ops->dtype, f));
    return remember(r, slot, (shape){ slot->level, slot->channels });
}

/* From the stream to the stream, or to planes in temp for the doubling. */
static esa_status res_block(vae_run *r, const cog_vae_res *b, int32_t to_planes)
{
    const int32_t level = r->level;
    const int64_t frames = frames_at(r->vae, r->latents, level), row = wide(r, level) * b->cout,
                  frame = high(r, level) * row;
    const shape s = { level, b->cout };
    const target middle = { r->temp, row, frame, NULL };
    target end = { r->stream, row, frame, r->stream };
    ESA_TRY(normalise(r, &b->norm[0], r->stream));
    ESA_TRY(causal(r, &b->conv[0], b->slot, &middle));
    ESA_TRY(normalise(r, &b->norm[1], r->temp));
    if (b->shortcut.packed) {
        ESA_TRY(mix(r, &b->shortcut, r->temp, r->nn->ops->dtype, r->stream, frames, level));
        end.residual = r->temp;
    } else if (to_planes) {
        ESA_TRY(clear(r, r->temp, s));
        end = (target){ inside(r, r->temp, s, 0), pitch(r, s), plane_size(r, s), r->stream };
    }
    return causal(r, &b->conv[1], b->slot + 1, &end);
}

/* Doubles the planes in temp in space, and in time, into the stream of the next level. */
static esa_status double_size(vae_run *r, const cog_vae_level *l)
{
    const shape s = { r->level, l->cout };
    const int64_t n = frames_at(r->vae, r->latents, s.level),
                  bytes = r->element * area(r, s.level + 1, l->cout);
    const int32_t repeats = l->doubles_time && n > 1;
    char *to = r->stream;
    for (int64_t f = 0; f < n; f++, to += bytes) {
        const esa_plane_conv_args args = { .y = to,
                                           .y_row = wide(r, s.level + 1) * l->cout,
                                           .x = { inside(r, r->temp, s, f) },
                                           .x_row = pitch(r, s),
                                           .height = high(r, s.level),
                                           .width = wide(r, s.level),
                                           .y_dtype = r->nn->ops->dtype };
        ESA_TRY(r->op->conv(r->nn, &l->up, &args));
        if (!repeats || (f == 0 && n % 2)) continue;
        ESA_TRY(esa_nn_copy(r->nn, to + bytes, to, bytes));
        to += bytes;
    }
    return ESA_OK;
}

static esa_status run_level(vae_run *r, int32_t level)
{
    const cog_vae_level *l = &r->vae->level[level];
    r->level = level;
    for (int32_t i = 0; i < l->res_count; i++)
        ESA_TRY(res_block(r, &l->res[i], l->up.packed && i + 1 == l->res_count));
    return l->up.packed ? double_size(r, l) : ESA_OK;
}

/* ---------------------------------------------------------------- from latents to pixels */

/* The latents of the batch as z and as planes, and the first convolution. */
static esa_status start(vae_run *r, const esa_vae_cut *cut, int64_t first)
{
    const esa_cog_vae *vae = r->vae;
    const int32_t z = vae->config.z_dim;
    const shape s = { 0, z };
    const target to = { r->stream, r->width * vae->conv_in.cout,
                        r->height * r->width * vae->conv_in.cout, NULL };
    r->level = 0;
    ESA_TRY(shape_planes(r, s));
    for (int64_t f = 0; f < r->latents; f++) {
        esa_plane_latent_args args = { .y = r->z + r->element * f * area(r, 0, z),
                                       .y_row = r->width * z,
                                       .latents = cut->latents + (first + f) * cut->frame,
                                       .channel = cut->channel,
                                       .row = cut->row,
                                       .height = r->height,
                                       .width = r->width,
                                       .channels = z,
                                       .scale = vae->vae.scale,
                                       .shift = vae->vae.shift,
                                       .dtype = r->nn->ops->dtype };
        ESA_TRY(r->op->from_latents(r->nn, &args));
        args.y = inside(r, r->planes, s, f);
        args.y_row = pitch(r, s);
        ESA_TRY(r->op->from_latents(r->nn, &args));
    }
    return causal(r, &vae->conv_in, vae->in_slot, &to);
}

static esa_status to_pixels(vae_run *r)
{
    const esa_cog_vae *vae = r->vae;
    cog_vae_slot *slot = &r->vae->slot[vae->out_slot];
    const int64_t frames = frames_at(vae, r->latents, r->level);
    /* All frames go to one place, one after the other. */
    const target to = { (char *)r->out.rgb, wide(r, r->level) * 3, 0, NULL };
    ESA_TRY(normalise(r, &vae->norm_out, r->stream));
    for (int64_t f = 0; f < frames; f++) {
        ESA_TRY(conv_frame(r, &vae->conv_out, slot, &to, ESA_DTYPE_F32, f));
        ESA_TRY(esa_vae_out_give(&r->out));
    }
    return remember(r, slot, (shape){ slot->level, slot->channels });
}

static esa_status run_batch(vae_run *r, const esa_vae_cut *cut, int64_t first)
{
    ESA_TRY(start(r, cut, first));
    for (int32_t i = 0; i < 2; i++) ESA_TRY(res_block(r, &r->vae->mid[i], 0));
    for (int32_t i = 0; i < r->vae->config.levels; i++) ESA_TRY(run_level(r, i));
    return to_pixels(r);
}

static esa_status run_batches(vae_run *r, const esa_vae_cut *cut)
{
    ESA_TRY(esa_vae_out_begin(&r->out));
    for (int64_t t = 0; t < cut->frames; t += r->latents, r->batch++) {
        r->latents = t ? ESA_COG_BATCH : r->largest;
        r->more = t + r->latents < cut->frames;
        r->zeroed = (shape){ 0 };
        ESA_TRY(run_batch(r, cut, t));
        ESA_TRY(r->nn->ops->pace(r->nn));
        ESA_TRY(esa_part_tick(&r->vae->vae.part, cut->tick_base + t + r->latents, cut->tick_total));
    }
    return esa_vae_out_end(&r->out);
}

static vae_run new_run(const esa_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink, void *user)
{
    const int32_t latent[3] = { (int32_t)cut->frames, 1, 1 };
    const int64_t factor = vae->factor_s, pixels = cut->height * cut->width * factor * factor * 3;
    int32_t size[3];
    esa_cog_vae_size(vae->config, latent, size);
    return (vae_run){ .vae = (esa_cog_vae *)(uintptr_t)vae,
                      .nn = vae->nn,
                      .op = vae->nn->ops->planes,
                      .element = esa_view_element(vae->nn->ops->dtype),
                      .height = cut->height,
                      .width = cut->width,
                      .largest = cut->frames == 1 ? 1 : ESA_COG_BATCH + cut->frames % ESA_COG_BATCH,
                      .out = esa_vae_out_of(vae->nn, cut, size[0], pixels, sink, user) };
}

esa_status esa_cog_vae_cut(esa_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink, void *user)
{
    vae_run r = new_run(vae, cut, sink, user);
    esa_carve carve = { 0 };
    place(&r, &carve);
    const int64_t size = carve.used;
    ESA_TRY(esa_nn_alloc(r.nn, &r.block, size, "the planes of the VAE decoder"));
    carve = (esa_carve){ .base = r.block };
    place(&r, &carve);
    const esa_status status = run_batches(&r, cut);
    esa_vae_out_free(&r.out);
    esa_nn_free(r.nn, r.block, size);
    return status;
}

int64_t esa_cog_vae_cut_bytes(const esa_vae *vae, int64_t frames, int64_t height, int64_t width,
                              int32_t bytes)
{
    static uint8_t somewhere; /* not written: nothing is computed */
    const esa_vae_cut cut = {
        .frames = frames, .height = height, .width = width, .bytes = bytes ? &somewhere : NULL
    };
    vae_run r = new_run(vae, &cut, NULL, NULL);
    esa_carve carve = { 0 };
    place(&r, &carve);
    return carve.used;
}
