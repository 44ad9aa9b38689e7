/* wan_vae_decode.c - runs the decoder, one frame of latents after the other; wan_vae.h explains the
 * order.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Planes: the inputs of convolutions are planes with a border of one pixel of zeros. The border is
 * set when the plane is made and never written again. Planes are passed on: a norm fills one, it
 * becomes the newest of a convolution's history, and two frames later it is spare for the next norm
 * of that shape. The stream between blocks has no border.
 *
 * A dry run takes the same path without computing and only counts, so the memory that is announced
 * is the memory that is used. */
#include <math.h>
#include <string.h>
#include "model/vae/wan_vae_parts.h"

typedef struct plane {
    float *data;             /* (height + 2) x (width + 2) x channels; NULL: none */
    int32_t level, channels; /* the level gives the size */
} plane;

typedef struct vae_run {
    esa_wan_vae *vae;
    esa_nn *nn;
    int32_t dry, clamp;
    int64_t bytes;         /* allocated so far */
    int64_t height, width; /* size of the latents */
    plane *kept;           /* [slots][2]: older, newer */
    plane *spare;          /* [spare_cap] */
    int64_t spare_count, spare_cap, list_bytes;
    int32_t started[ESA_CONFIG_MAX_LEVELS]; /* 1 after the first frame of the doubling in time */
    float *stream[ESA_CONFIG_MAX_LEVELS], *temp[ESA_CONFIG_MAX_LEVELS];
    float *z, *qkv, *rgb;
    esa_wan_vae_sink sink;
    void *user;
    int64_t frame; /* the next frame of pixels */
} vae_run;

static int64_t high(const vae_run *r, int32_t level) { return r->height << level; }
static int64_t wide(const vae_run *r, int32_t level) { return r->width << level; }
static int64_t pitch(const vae_run *r, const plane *p)
{
    return (wide(r, p->level) + 2) * p->channels;
}
static float *inside(const vae_run *r, const plane *p)
{
    return p->data ? p->data + pitch(r, p) + p->channels : NULL;
}
static int64_t plane_bytes(const vae_run *r, const plane *p)
{
    return 4 * (high(r, p->level) + 2) * pitch(r, p);
}

/* In a dry run memory is only counted, and the pointer is never dereferenced. */
static esa_status take(vae_run *r, float **out, int64_t bytes)
{
    static float nothing;
    r->bytes += bytes;
    *out = &nothing;
    return r->dry ? ESA_OK : esa_nn_alloc(r->nn, (void **)out, bytes, "a plane of the VAE decoder");
}

static void give(vae_run *r, float *data, int64_t bytes)
{
    if (!r->dry) esa_nn_free(r->nn, data, bytes);
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
    if (!r->dry) memset(out->data, 0, (size_t)plane_bytes(r, out));
    return ESA_OK;
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

/* A convolution over its history and p. Does not add p to the history. */
static esa_status causal(vae_run *r, const esa_conv *conv, int32_t slot, const plane *p, float *y,
                         int64_t y_row, const float *residual, int64_t residual_row)
{
    const plane *kept = r->kept + ESA_VAE_KEPT * slot;
    const float *x[3] = { inside(r, &kept[0]), inside(r, &kept[1]), inside(r, p) };
    if (r->dry) return ESA_OK;
    return esa_nn_conv(r->nn, conv, y, y_row, x, pitch(r, p), high(r, p->level), wide(r, p->level),
                       residual, residual_row);
}

/* Norm, SiLU and causal convolution of the stream x. */
static esa_status norm_conv(vae_run *r, const float *gamma, const esa_conv *conv, int32_t slot,
                            int32_t level, const float *x, float *y, int64_t y_row,
                            const float *residual, int64_t residual_row)
{
    plane p;
    ESA_TRY(plane_take(r, &p, level, conv->cin));
    if (!r->dry)
        esa_nn_pixel_norm(r->nn, inside(r, &p), pitch(r, &p), x, wide(r, level) * conv->cin,
                          high(r, level), wide(r, level), conv->cin, gamma, ESA_ACT_SILU);
    const esa_status status = causal(r, conv, slot, &p, y, y_row, residual, residual_row);
    remember(r, slot, &p);
    return status;
}

/* The second half of a res block: norm (from temp into p), shortcut (into temp), convolution. */
static esa_status res_end(vae_run *r, const esa_vae_res *b, int32_t level, const plane *p, float *y,
                          int64_t y_row)
{
    float *x = r->stream[level], *t = r->temp[level];
    const int64_t row_in = wide(r, level) * b->cin, row_out = wide(r, level) * b->cout;
    const float *from[1] = { x };
    if (!r->dry)
        esa_nn_pixel_norm(r->nn, inside(r, p), pitch(r, p), t, row_out, high(r, level),
                          wide(r, level), b->cout, b->norm[1], ESA_ACT_SILU);
    if (!r->dry && b->shortcut.packed)
        ESA_TRY(esa_nn_conv(r->nn, &b->shortcut, t, row_out, from, row_in, high(r, level),
                            wide(r, level), NULL, 0));
    return causal(r, &b->conv[1], b->slot + 1, p, y, y_row, b->shortcut.packed ? t : x, row_out);
}

/* From the stream to y, which may be the stream itself. */
static esa_status res_block(vae_run *r, const esa_vae_res *b, int32_t level, float *y,
                            int64_t y_row)
{
    plane p;
    ESA_TRY(norm_conv(r, b->norm[0], &b->conv[0], b->slot, level, r->stream[level], r->temp[level],
                      wide(r, level) * b->cout, NULL, 0));
    ESA_TRY(plane_take(r, &p, level, b->cout));
    const esa_status status = res_end(r, b, level, &p, y, y_row);
    remember(r, b->slot + 1, &p);
    return status;
}

/* Attention over the pixels of the frame, with one head as wide as the stream. */
static esa_status mid_attention(vae_run *r)
{
    const esa_wan_vae *vae = r->vae;
    if (r->dry) return ESA_OK;
    const int64_t n = r->height * r->width, c = vae->proj.cin, row = r->width * c;
    float *x = r->stream[0], *t = r->temp[0];
    const float *from[1] = { t };
    esa_nn_pixel_norm(r->nn, t, row, x, row, r->height, r->width, c, vae->attn_norm, ESA_ACT_NONE);
    ESA_TRY(
        esa_nn_conv(r->nn, &vae->qkv, r->qkv, 3 * row, from, row, r->height, r->width, NULL, 0));
    ESA_TRY(esa_nn_attention(r->nn, t, c, r->qkv, 3 * c, r->qkv + c, 3 * c, r->qkv + 2 * c, 3 * c,
                             n, n, 1, c, 1.0f / sqrtf((float)c), NULL));
    return esa_nn_conv(r->nn, &vae->proj, x, row, from, row, r->height, r->width, x, row);
}

static esa_status to_pixels(vae_run *r)
{
    const int32_t level = r->vae->levels - 1;
    const int64_t row = wide(r, level) * r->vae->conv_out.cout, n = high(r, level) * row;
    ESA_TRY(norm_conv(r, r->vae->norm_out, &r->vae->conv_out, r->vae->out_slot, level,
                      r->stream[level], r->rgb, row, NULL, 0));
    if (r->dry) return ESA_OK;
    if (r->clamp) esa_vae_clamp(r->rgb, n);
    return r->sink(r->user, r->frame++, r->rgb);
}

static esa_status run_level(vae_run *r, int32_t level);

/* Doubles p in space and runs the next level. p becomes spare. */
static esa_status next_level(vae_run *r, int32_t level, plane *p)
{
    const esa_vae_level *l = &r->vae->level[level];
    const float *x[1] = { inside(r, p) };
    esa_status status = ESA_OK;
    if (!r->dry)
        status = esa_nn_conv(r->nn, &l->up, r->stream[level + 1], wide(r, level + 1) * l->up.cout,
                             x, pitch(r, p), high(r, level), wide(r, level), NULL, 0);
    plane_give(r, p);
    return status ? status : run_level(r, level + 1);
}

/* The two frames that p becomes where time doubles. */
static esa_status split_time(vae_run *r, int32_t level, const plane *p, plane two[2])
{
    const esa_vae_level *l = &r->vae->level[level];
    for (int32_t i = 0; i < 2; i++) {
        ESA_TRY(plane_take(r, &two[i], level, l->cout));
        ESA_TRY(causal(r, &l->time[i], l->slot, p, inside(r, &two[i]), pitch(r, &two[i]), NULL, 0));
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
    const float *from[1] = { r->z };
    if (!r->dry)
        ESA_TRY(esa_nn_conv(r->nn, &vae->post_quant, inside(r, p), pitch(r, p), from,
                            r->width * vae->config.z_dim, r->height, r->width, NULL, 0));
    return causal(r, &vae->conv_in, vae->in_slot, p, r->stream[0], r->width * vae->conv_in.cout,
                  NULL, 0);
}

/* One frame of latents: applies the statistics, then runs the decoder. */
static esa_status run_frame(vae_run *r, const esa_vae_cut *cut, int64_t t)
{
    const esa_wan_vae *vae = r->vae;
    const int64_t n = r->height * r->width, z = vae->config.z_dim;
    for (int64_t c = 0; c < z && !r->dry; c++) {
        const float scale = (float)vae->config.std[c], shift = (float)vae->config.mean[c];
        const float *from = cut->latents + c * cut->channel + t * cut->frame;
        for (int64_t i = 0; i < n; i++)
            r->z[i * z + c] = from[i / r->width * cut->row + i % r->width] * scale + shift;
    }
    plane p;
    ESA_TRY(plane_take(r, &p, 0, (int32_t)z));
    const esa_status status = start_frame(r, &p);
    remember(r, vae->in_slot, &p);
    if (status) return status;
    ESA_TRY(res_block(r, &vae->mid[0], 0, r->stream[0], r->width * vae->conv_in.cout));
    ESA_TRY(mid_attention(r));
    ESA_TRY(res_block(r, &vae->mid[1], 0, r->stream[0], r->width * vae->conv_in.cout));
    return run_level(r, 0);
}

/* Allocates the streams and single buffers, or frees them if set is 0. */
static esa_status buffers(vae_run *r, int32_t set)
{
    const esa_wan_vae *vae = r->vae;
    const int64_t n = r->height * r->width;
    const int32_t last = vae->levels - 1;
    struct {
        float **at;
        int64_t bytes;
    } list[3 + 2 * ESA_CONFIG_MAX_LEVELS];
    int32_t count = 0;
    list[count].at = &r->z, list[count++].bytes = 4 * n * vae->config.z_dim;
    list[count].at = &r->qkv, list[count++].bytes = 4 * n * vae->qkv.cout;
    list[count].at = &r->rgb,
    list[count++].bytes = 4 * high(r, last) * wide(r, last) * vae->conv_out.cout;
    for (int32_t l = 0; l <= last; l++) {
        const int64_t bytes = 4 * high(r, l) * wide(r, l) * vae->level[l].widest;
        list[count].at = &r->stream[l], list[count++].bytes = bytes;
        list[count].at = &r->temp[l], list[count++].bytes = bytes;
    }
    for (int32_t i = 0; i < count; i++)
        if (set)
            ESA_TRY(take(r, list[i].at, list[i].bytes));
        else
            give(r, *list[i].at, list[i].bytes);
    return ESA_OK;
}

static esa_status run_frames(vae_run *r, const esa_vae_cut *cut)
{
    const esa_part_env *env = &r->vae->env;
    ESA_TRY(buffers(r, 1));
    for (int64_t t = 0; t < cut->frames; t++) {
        ESA_TRY(run_frame(r, cut, t));
        if (!r->dry && env->tick &&
            env->tick(env->tick_user, cut->tick_base + t + 1, cut->tick_total))
            return esa_fail(r->nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    return ESA_OK;
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
    for (int32_t i = 0; i < ESA_VAE_KEPT * r->vae->slots; i++) plane_give(r, &r->kept[i]);
    for (int64_t i = 0; i < r->spare_count; i++)
        give(r, r->spare[i].data, plane_bytes(r, &r->spare[i]));
    buffers(r, 0);
    esa_mem_free(&ctx->mem, r->kept, r->list_bytes);
    return status;
}

esa_status esa_vae_decode_cut(esa_wan_vae *vae, const esa_vae_cut *cut, esa_wan_vae_sink sink,
                              void *user)
{
    vae_run run = { .vae = vae,
                    .nn = vae->env.nn,
                    .height = cut->height,
                    .width = cut->width,
                    .sink = sink,
                    .user = user,
                    .clamp = cut->clamp };
    esa_nn_enter(run.nn);
    const esa_status status = run_all(&run, cut);
    esa_nn_leave(run.nn);
    return status;
}

int64_t esa_vae_cut_bytes(const esa_wan_vae *vae, int64_t frames, int64_t height, int64_t width)
{
    /* From the fourth latent frame on nothing more is allocated. */
    const esa_vae_cut cut = { .frames = esa_min64(frames, 4), .height = height, .width = width };
    vae_run run = {
        .vae = (esa_wan_vae *)vae, .nn = vae->env.nn, .dry = 1, .height = height, .width = width
    };
    return run_all(&run, &cut) ? INT64_MAX : run.bytes;
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
    return esa_vae_cut_bytes(vae, latent[0], latent[1], latent[2]);
}

esa_status esa_wan_vae_decode(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, esa_wan_vae_sink sink, void *user)
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
    if (esa_vae_tiles(&vae->config, latent, tile))
        return esa_vae_decode_tiled(vae, latents, latent, tile, sink, user);
    const int64_t frame = (int64_t)latent[1] * latent[2];
    const esa_vae_cut cut = { .latents = latents,
                              .frames = latent[0],
                              .height = latent[1],
                              .width = latent[2],
                              .row = latent[2],
                              .frame = frame,
                              .channel = latent[0] * frame,
                              .tick_total = latent[0],
                              .clamp = 1 };
    return esa_vae_decode_cut(vae, &cut, sink, user);
}
