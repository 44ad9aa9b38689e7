/* tiles.c - see tiles.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/tiles.h"

#include <string.h>

enum { DOWN = 0, ACROSS = 1 };

typedef struct tile_run {
    const esa_tiling *t;
    int64_t blend[2]; /* pixels */
    esa_tile tile;    /* the current one */
    float *out;       /* [frames][height][width][channels] */
    float *pixels;    /* [frames][tile height][tile width][channels] */
    /* [frames][blend][columns of tiles * side][channels]: lower edges of the row of tiles above */
    float *above;
    float *beside;     /* [frames][side][blend][channels]: right edge of the previous tile */
    int64_t above_row; /* floats in one row of above */
    int64_t above_h, beside_w; /* how many rows and columns of them are valid: the last ones */
} tile_run;

static esa_status keep_frame(void *user, int64_t frame, const float *rgb)
{
    tile_run *r = user;
    const int64_t count = r->tile.height * r->tile.width * r->t->channels;
    memcpy(r->pixels + frame * count, rgb, (size_t)(4 * count));
    return ESA_OK;
}

static void mix(float *to, const float *from, int64_t n, int64_t i, int64_t extent)
{
    const float keep = (float)((double)i / (double)extent),
                take = (float)(1 - (double)i / (double)extent);
    for (int64_t k = 0; k < n; k++) to[k] = from[k] * take + to[k] * keep;
}

/* Blends a frame of the tile, copies its share into the picture and keeps its edges. column: the
 * tile's place in its row. */
static void place_frame(tile_run *r, int64_t f, int64_t column)
{
    const esa_tiling *t = r->t;
    const esa_tile *at = &r->tile;
    const int64_t *blend = r->blend, c = t->channels, row = at->width * c, h = at->height;
    const int64_t down = at->top ? esa_min64(esa_min64(r->above_h, h), blend[DOWN]) : 0,
                  right = at->left ? esa_min64(esa_min64(r->beside_w, at->width), blend[ACROSS])
                                   : 0,
                  lower = esa_min64(h, blend[DOWN]), edge = esa_min64(at->width, blend[ACROSS]);
    float *tile = r->pixels + f * h * row,
          *above = r->above + f * blend[DOWN] * r->above_row + column * t->side[ACROSS] * c,
          *beside = r->beside + f * t->side[DOWN] * blend[ACROSS] * c;
    for (int64_t y = 0; y < down; y++)
        mix(tile + y * row, above + (blend[DOWN] - down + y) * r->above_row, row, y, down);
    for (int64_t y = 0; y < h; y++)
        for (int64_t x = 0; x < right; x++)
            mix(tile + y * row + x * c, beside + ((y + 1) * blend[ACROSS] - right + x) * c, c, x,
                right);
    const int64_t kept_h = esa_min64(h, t->stride[DOWN]),
                  kept_w = esa_min64(at->width, t->stride[ACROSS]);
    for (int64_t y = 0; y < kept_h; y++)
        memcpy(r->out + ((f * t->height + at->top + y) * t->width + at->left) * c, tile + y * row,
               (size_t)(4 * kept_w * c));
    for (int64_t y = 0; y < lower; y++)
        memcpy(above + (blend[DOWN] - lower + y) * r->above_row, tile + (h - lower + y) * row,
               (size_t)(4 * row));
    for (int64_t y = 0; y < h; y++)
        memcpy(beside + ((y + 1) * blend[ACROSS] - edge) * c,
               tile + y * row + (at->width - edge) * c, (size_t)(4 * edge * c));
}

typedef struct tile_sizes {
    int64_t out, pixels, above, beside, columns, rows;
} tile_sizes;

static tile_sizes prepare(tile_run *r, const esa_tiling *t)
{
    *r = (tile_run){ .t = t };
    for (int32_t i = 0; i < 2; i++) r->blend[i] = t->side[i] - t->stride[i];
    const int64_t pixel = 4 * t->frames * t->channels,
                  columns = esa_ceil_div(t->width, t->stride[ACROSS]);
    r->above_row = columns * t->side[ACROSS] * t->channels;
    return (tile_sizes){ pixel * t->height * t->width,
                         pixel * esa_min64(t->side[DOWN], t->height) *
                             esa_min64(t->side[ACROSS], t->width),
                         4 * t->frames * r->blend[DOWN] * r->above_row,
                         pixel * t->side[DOWN] * r->blend[ACROSS],
                         columns,
                         esa_ceil_div(t->height, t->stride[DOWN]) };
}

/* Decodes tile (i, j) and puts it into the picture. */
static esa_status run_tile(tile_run *r, const tile_sizes *size, int64_t i, int64_t j)
{
    const esa_tiling *t = r->t;
    r->tile = (esa_tile){ .top = i * t->stride[DOWN],
                          .left = j * t->stride[ACROSS],
                          .number = i * size->columns + j,
                          .count = size->rows * size->columns };
    r->tile.height = esa_min64(t->side[DOWN], t->height - r->tile.top);
    r->tile.width = esa_min64(t->side[ACROSS], t->width - r->tile.left);
    ESA_TRY(t->decode(t->owner, &r->tile, keep_frame, r));
    for (int64_t f = 0; f < t->frames; f++) place_frame(r, f, j);
    return ESA_OK;
}

static esa_status run_tiles(tile_run *r, const tile_sizes *size, esa_vae_sink sink, void *user)
{
    esa_nn *nn = r->t->nn;
    ESA_TRY(esa_nn_alloc_host(nn, (void **)&r->out, size->out, "the frames of a tiled decode"));
    ESA_TRY(esa_nn_alloc_host(nn, (void **)&r->pixels, size->pixels, "a tile of frames"));
    ESA_TRY(esa_nn_alloc_host(nn, (void **)&r->above, size->above, "the edges of tiles"));
    ESA_TRY(esa_nn_alloc_host(nn, (void **)&r->beside, size->beside, "the edges of tiles"));
    for (int64_t i = 0; i < size->rows; i++) {
        for (int64_t j = 0; j < size->columns; j++) {
            ESA_TRY(run_tile(r, size, i, j));
            r->beside_w = r->tile.width;
        }
        r->above_h = r->tile.height;
    }
    const int64_t count = r->t->height * r->t->width * r->t->channels;
    for (int64_t f = 0; f < r->t->frames; f++) {
        float *frame = r->out + f * count;
        esa_vae_clamp(frame, count);
        ESA_TRY(sink(user, f, frame));
    }
    return ESA_OK;
}

esa_status esa_tiles_decode(const esa_tiling *tiling, esa_vae_sink sink, void *user)
{
    esa_nn *nn = tiling->nn;
    tile_run r;
    const tile_sizes size = prepare(&r, tiling);
    const esa_status status = run_tiles(&r, &size, sink, user);
    esa_nn_free_host(nn, r.out, size.out);
    esa_nn_free_host(nn, r.pixels, size.pixels);
    esa_nn_free_host(nn, r.above, size.above);
    esa_nn_free_host(nn, r.beside, size.beside);
    return status;
}

int64_t esa_tiles_bytes(const esa_tiling *tiling)
{
    tile_run r;
    const tile_sizes size = prepare(&r, tiling);
    return size.out + size.pixels + size.above + size.beside;
}
