/* hunyuan_vae_tile.c - pieces in time and tiles in space, blended as diffusers does it, in host
 * memory.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include "model/vae/hunyuan_vae.h"

/* Frames of pixels, which factor_t = 4 turns into frames of latents: a piece has 16 and one more,
 * pieces are 12 apart and overlap by 4. */
enum { PIECE = 16, STRIDE = 12, OVERLAP = PIECE - STRIDE };

typedef struct tile_run {
    esa_hunyuan_vae *vae;
    const float *latents;
    int32_t latent[3];
    int64_t height, width;       /* of the picture, in pixels */
    int64_t side, stride, blend; /* of tiles, in pixels; side 0: whole frames */
    int64_t columns, rows;       /* of tiles */
    float *piece[2];             /* [frames][height][width][3]: the current and the last piece */
    int64_t frames[2];
    float *tile[2]; /* room for [columns][frames][side][side][3]: the current and the last row */
    int64_t piece_bytes, tile_bytes;
    int64_t done, total; /* for env's tick */
} tile_run;

static void mix(float *to, const float *from, int64_t n, int64_t i, int64_t extent)
{
    const float keep = (float)((double)i / (double)extent),
                take = (float)(1 - (double)i / (double)extent);
    for (int64_t k = 0; k < n; k++) to[k] = from[k] * take + to[k] * keep;
}

static esa_status count_cut(tile_run *r)
{
    r->done++;
    return esa_part_tick(&r->vae->vae.part, r->done, r->total);
}

/* Latents of `frames` frames from `first` on, at these pixels. */
static esa_vae_cut cut_of(const tile_run *r, int64_t first, int64_t frames, int64_t top,
                          int64_t left, int64_t height, int64_t width)
{
    const int64_t factor = r->vae->config.factor_s, plane = (int64_t)r->latent[1] * r->latent[2];
    return (esa_vae_cut){ .latents = r->latents + first * plane + top / factor * r->latent[2] +
                                     left / factor,
                          .frames = frames,
                          .height = height / factor,
                          .width = width / factor,
                          .row = r->latent[2],
                          .frame = plane,
                          .channel = r->latent[0] * plane };
}

/* ---------------------------------------------------------------- tiles */

static int64_t tile_height(const tile_run *r, int64_t i)
{
    return esa_min64(r->side, r->height - i * r->stride);
}
static int64_t tile_width(const tile_run *r, int64_t j)
{
    return esa_min64(r->side, r->width - j * r->stride);
}
/* Tile j of a row of tiles: [frames][its height][its width][3]. */
static float *tile_of(const tile_run *r, float *row, int64_t frames, int64_t j)
{
    return row + j * frames * r->side * r->side * 3;
}

/* Blends tile (i, j) with the one above and then the one on its left, which are blended already. */
static void blend_tile(tile_run *r, int64_t frames, int64_t i, int64_t j)
{
    const int64_t h = tile_height(r, i), w = tile_width(r, j), line = w * 3;
    float *tile = tile_of(r, r->tile[0], frames, j);
    for (int64_t f = 0; f < frames && i; f++) {
        const int64_t above_h = tile_height(r, i - 1),
                      extent = esa_min64(esa_min64(above_h, h), r->blend);
        const float *above = tile_of(r, r->tile[1], frames, j) + f * above_h * line;
        for (int64_t y = 0; y < extent; y++)
            mix(tile + (f * h + y) * line, above + (above_h - extent + y) * line, line, y, extent);
    }
    for (int64_t y = 0; y < frames * h && j; y++) {
        const int64_t beside_w = tile_width(r, j - 1),
                      extent = esa_min64(esa_min64(beside_w, w), r->blend);
        const float *beside = tile_of(r, r->tile[0], frames, j - 1) +
                              (y * beside_w + beside_w - extent) * 3;
        for (int64_t x = 0; x < extent; x++)
            mix(tile + y * line + x * 3, beside + x * 3, 3, x, extent);
    }
}

/* Copies the share of tile (i, j) into the picture. */
static void place_tile(tile_run *r, float *picture, int64_t frames, int64_t i, int64_t j)
{
    const int64_t high = tile_height(r, i), wide = tile_width(r, j), h = esa_min64(high, r->stride),
                  w = esa_min64(wide, r->stride);
    const float *tile = tile_of(r, r->tile[0], frames, j);
    for (int64_t f = 0; f < frames; f++)
        for (int64_t y = 0; y < h; y++)
            memcpy(picture + ((f * r->height + i * r->stride + y) * r->width + j * r->stride) * 3,
                   tile + (f * high + y) * wide * 3, (size_t)(w * 3) * 4);
}

/* ---------------------------------------------------------------- pieces */

/* Decodes latents of `count` frames from `first` on into a picture [frames][height][width][3]. */
static esa_status decode_piece(tile_run *r, float *picture, int64_t first, int64_t count)
{
    const int64_t frames = esa_hunyuan_vae_count(&r->vae->config, count);
    if (!r->side) {
        const esa_vae_cut cut = cut_of(r, first, count, 0, 0, r->height, r->width);
        ESA_TRY(esa_hunyuan_vae_cut(r->vae, &cut, picture));
        return count_cut(r);
    }
    for (int64_t i = 0; i < r->rows; i++) {
        float *const last = r->tile[1];
        r->tile[1] = r->tile[0];
        r->tile[0] = last;
        for (int64_t j = 0; j < r->columns; j++) {
            const esa_vae_cut cut = cut_of(r, first, count, i * r->stride, j * r->stride,
                                           tile_height(r, i), tile_width(r, j));
            ESA_TRY(esa_hunyuan_vae_cut(r->vae, &cut, tile_of(r, r->tile[0], frames, j)));
            ESA_TRY(count_cut(r));
            blend_tile(r, frames, i, j);
            place_tile(r, picture, frames, i, j);
        }
    }
    return ESA_OK;
}

/* Frames of latents in a piece, and from one piece to the next. */
static int64_t piece_latents(const esa_hunyuan_vae_config *c, int64_t all)
{
    return all > PIECE / c->factor_t ? PIECE / c->factor_t + 1 : all;
}
static int64_t piece_step(const esa_hunyuan_vae_config *c, int64_t all)
{
    return all > PIECE / c->factor_t ? STRIDE / c->factor_t : all;
}

static esa_status run_pieces(tile_run *r, esa_vae_sink sink, void *user)
{
    const esa_hunyuan_vae_config *c = &r->vae->config;
    const int64_t all = r->latent[0], size = r->height * r->width * 3,
                  total = esa_hunyuan_vae_count(c, all), step = piece_step(c, all);
    int64_t given = 0;
    for (int64_t i = 0; i < all && given < total; i += step) {
        const int64_t count = esa_min64(piece_latents(c, all), all - i), later = i > 0;
        float *const last = r->piece[1];
        r->piece[1] = r->piece[0];
        r->frames[1] = r->frames[0];
        r->piece[0] = last;
        r->frames[0] = esa_hunyuan_vae_count(c, count) - later;
        ESA_TRY(decode_piece(r, r->piece[0], i, count));
        if (later) memmove(r->piece[0], r->piece[0] + size, (size_t)(r->frames[0] * size) * 4);
        const int64_t extent = later ? esa_min64(esa_min64(r->frames[0], r->frames[1]), OVERLAP)
                                     : 0;
        for (int64_t f = 0; f < extent; f++)
            mix(r->piece[0] + f * size, r->piece[1] + (r->frames[1] - extent + f) * size, size, f,
                extent);
        const int64_t most = step == all ? total
                             : later     ? STRIDE
                                         : STRIDE + 1,
                      keep = esa_min64(esa_min64(r->frames[0], most), total - given);
        for (int64_t f = 0; f < keep; f++) ESA_TRY(sink(user, given++, r->piece[0] + f * size));
    }
    return ESA_OK;
}

/* Fills in all sizes. */
static tile_run prepare(const esa_vae *vae, const int32_t latent[3], int32_t tile)
{
    const esa_hunyuan_vae_config *c = vae->config;
    tile_run r = { .vae = (esa_hunyuan_vae *)(uintptr_t)vae,
                   .latent = { latent[0], latent[1], latent[2] },
                   .height = (int64_t)latent[1] * c->factor_s,
                   .width = (int64_t)latent[2] * c->factor_s };
    const int64_t frames = esa_hunyuan_vae_count(c, piece_latents(c, latent[0]));
    /* A piece that begins with the last frame has no frame of its own. */
    const int64_t step = piece_step(c, latent[0]),
                  pieces = step < latent[0] ? esa_ceil_div(latent[0] - 1, step) : 1;
    r.piece_bytes = esa_size_mul(4 * 3 * frames, esa_size_mul(r.height, r.width));
    r.rows = r.columns = 1;
    if (tile > 0 && (r.height > tile || r.width > tile)) {
        r.side = tile;
        r.stride = tile / 4 * 3;
        r.blend = tile - r.stride;
        r.rows = esa_ceil_div(r.height, r.stride);
        r.columns = esa_ceil_div(r.width, r.stride);
        r.tile_bytes = esa_size_mul(4 * 3 * frames * r.columns, r.side * r.side);
    }
    r.total = pieces * r.rows * r.columns;
    return r;
}

int64_t esa_hunyuan_vae_bytes(const esa_vae *vae, const int32_t latent[3], int32_t tile)
{
    const esa_hunyuan_vae_config *c = vae->config;
    const tile_run r = prepare(vae, latent, tile);
    const int64_t side = r.side / c->factor_s,
                  height = r.side ? esa_min64(side, latent[1]) : latent[1],
                  width = r.side ? esa_min64(side, latent[2]) : latent[2],
                  host = vae->nn->be->host_memory ? 2 * (r.piece_bytes + r.tile_bytes) : 0;
    return esa_size_add(
        host, esa_hunyuan_vae_cut_bytes(r.vae, piece_latents(c, latent[0]), height, width));
}

static esa_status allocate(tile_run *r)
{
    esa_nn *nn = r->vae->vae.nn;
    for (int32_t i = 0; i < 2; i++) {
        ESA_TRY(
            esa_nn_alloc_host(nn, (void **)&r->piece[i], r->piece_bytes, "the frames of a piece"));
        if (r->tile_bytes)
            ESA_TRY(esa_nn_alloc_host(nn, (void **)&r->tile[i], r->tile_bytes, "a row of tiles"));
    }
    return ESA_OK;
}

esa_status esa_hunyuan_vae_pieces(esa_vae *vae, const float *latents, const int32_t latent[3],
                                  int32_t tile, esa_vae_sink sink, void *user)
{
    tile_run r = prepare(vae, latent, tile);
    r.latents = latents;
    esa_status status = allocate(&r);
    if (!status) status = run_pieces(&r, sink, user);
    for (int32_t i = 0; i < 2; i++) {
        esa_nn_free_host(vae->nn, r.piece[i], r.piece[i] ? r.piece_bytes : 0);
        esa_nn_free_host(vae->nn, r.tile[i], r.tile[i] ? r.tile_bytes : 0);
    }
    return status;
}
