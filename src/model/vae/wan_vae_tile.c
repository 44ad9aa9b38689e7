/* wan_vae_tile.c - decodes in overlapping squares, as diffusers does with enable_tiling, to save
 * memory for large frames.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Tiles are 3/4 of a tile apart and overlap by a quarter. They are decoded row by row, from left to
 * right. Each tile is blended linearly with the lower edge of the tile above and then with the
 * right edge of the tile on its left, which are blended already; its first 3/4 then go into the
 * picture. Only the picture, one tile, and the edges for later tiles are kept, in host memory. */
#include <string.h>
#include "model/vae/wan_vae_parts.h"

typedef struct tile_run {
    esa_wan_vae *vae;
    int64_t frames, channels, out_h, out_w; /* size of the picture */
    int64_t side, stride, blend;            /* pixels */
    int64_t top, left, h, w;                /* the current tile, in pixels */
    float *out;                             /* [frames][out_h][out_w][channels] */
    float *tile;                            /* [frames][h][w][channels] */
    /* [frames][blend][columns of tiles * side][channels]: lower edges of the row of tiles above */
    float *above;
    float *beside;     /* [frames][side][blend][channels]: right edge of the previous tile */
    int64_t above_row; /* floats in one row of above */
    int64_t above_h, beside_w; /* how many rows and columns of them are valid: the last ones */
} tile_run;

static esa_status keep_frame(void *user, int64_t frame, const float *rgb)
{
    tile_run *r = user;
    memcpy(r->tile + frame * r->h * r->w * r->channels, rgb,
           (size_t)(4 * r->h * r->w * r->channels));
    return ESA_OK;
}

static void mix(float *to, const float *from, int64_t n, int64_t i, int64_t extent)
{
    const float keep = (float)((double)i / (double)extent),
                take = (float)(1 - (double)i / (double)extent);
    for (int64_t k = 0; k < n; k++) to[k] = from[k] * take + to[k] * keep;
}

/* Blends the tile, copies its share into the picture and keeps its edges. column: the tile's place
 * in its row. */
static void place(tile_run *r, int64_t column)
{
    const int64_t c = r->channels, row = r->w * c, across = column * r->side * c;
    const int64_t down = r->top ? esa_min64(esa_min64(r->above_h, r->h), r->blend) : 0;
    const int64_t right = r->left ? esa_min64(esa_min64(r->beside_w, r->w), r->blend) : 0;
    const int64_t lower = esa_min64(r->h, r->blend), edge = esa_min64(r->w, r->blend);
    for (int64_t f = 0; f < r->frames; f++) {
        float *tile = r->tile + f * r->h * row,
              *above = r->above + f * r->blend * r->above_row + across;
        float *beside = r->beside + f * r->side * r->blend * c;
        for (int64_t y = 0; y < down; y++)
            mix(tile + y * row, above + (r->blend - down + y) * r->above_row, row, y, down);
        for (int64_t y = 0; y < r->h; y++)
            for (int64_t x = 0; x < right; x++)
                mix(tile + y * row + x * c, beside + (y * r->blend + r->blend - right + x) * c, c,
                    x, right);
        const int64_t h = esa_min64(r->h, r->stride), w = esa_min64(r->w, r->stride);
        for (int64_t y = 0; y < h; y++)
            memcpy(r->out + ((f * r->out_h + r->top + y) * r->out_w + r->left) * c, tile + y * row,
                   (size_t)(4 * w * c));
        for (int64_t y = 0; y < lower; y++)
            memcpy(above + (r->blend - lower + y) * r->above_row, tile + (r->h - lower + y) * row,
                   (size_t)(4 * row));
        for (int64_t y = 0; y < r->h; y++)
            memcpy(beside + (y * r->blend + r->blend - edge) * c,
                   tile + y * row + (r->w - edge) * c, (size_t)(4 * edge * c));
    }
}

typedef struct tile_sizes {
    int64_t out, tile, above, beside, columns, rows;
} tile_sizes;

static tile_sizes prepare(tile_run *r, const esa_wan_vae *vae, const int32_t latent[3],
                          int32_t tile)
{
    int32_t size[3];
    esa_wan_vae_size(&vae->config, latent, size);
    *r = (tile_run){ .vae = (esa_wan_vae *)vae,
                     .frames = size[0],
                     .channels = vae->config.out_channels,
                     .out_h = size[1],
                     .out_w = size[2],
                     .side = tile,
                     .stride = tile / 4 * 3,
                     .blend = tile / 4 };
    const int64_t pixel = 4 * r->frames * r->channels, columns = esa_ceil_div(r->out_w, r->stride);
    r->above_row = columns * r->side * r->channels;
    return (tile_sizes){ pixel * r->out_h * r->out_w,
                         pixel * esa_min64(r->side, r->out_h) * esa_min64(r->side, r->out_w),
                         4 * r->frames * r->blend * r->above_row,
                         pixel * r->side * r->blend,
                         columns,
                         esa_ceil_div(r->out_h, r->stride) };
}

/* Decodes tile (i, j) and puts it into the picture. */
static esa_status run_tile(tile_run *r, const tile_sizes *size, const float *latents,
                           const int32_t latent[3], int64_t i, int64_t j)
{
    const int64_t factor = r->vae->config.factor_s, plane = (int64_t)latent[1] * latent[2];
    r->top = i * r->stride;
    r->left = j * r->stride;
    r->h = esa_min64(r->side, r->out_h - r->top);
    r->w = esa_min64(r->side, r->out_w - r->left);
    const esa_vae_cut cut = { .latents = latents + r->top / factor * latent[2] + r->left / factor,
                              .frames = latent[0],
                              .height = r->h / factor,
                              .width = r->w / factor,
                              .row = latent[2],
                              .frame = plane,
                              .channel = latent[0] * plane,
                              .tick_base = (i * size->columns + j) * latent[0],
                              .tick_total = size->rows * size->columns * latent[0] };
    ESA_TRY(esa_vae_decode_cut(r->vae, &cut, keep_frame, r));
    place(r, j);
    return ESA_OK;
}

static esa_status run_tiles(tile_run *r, const tile_sizes *size, const float *latents,
                            const int32_t latent[3], esa_wan_vae_sink sink, void *user)
{
    esa_nn *nn = r->vae->env.nn;
    ESA_TRY(esa_nn_alloc_host(nn, (void **)&r->out, size->out, "the frames of a tiled decode"));
    ESA_TRY(esa_nn_alloc_host(nn, (void **)&r->tile, size->tile, "a tile of frames"));
    ESA_TRY(esa_nn_alloc_host(nn, (void **)&r->above, size->above, "the edges of tiles"));
    ESA_TRY(esa_nn_alloc_host(nn, (void **)&r->beside, size->beside, "the edges of tiles"));
    for (int64_t i = 0; i < size->rows; i++) {
        for (int64_t j = 0; j < size->columns; j++) {
            ESA_TRY(run_tile(r, size, latents, latent, i, j));
            r->beside_w = r->w;
        }
        r->above_h = r->h;
    }
    for (int64_t f = 0; f < r->frames; f++) {
        float *frame = r->out + f * r->out_h * r->out_w * r->channels;
        esa_vae_clamp(frame, r->out_h * r->out_w * r->channels);
        ESA_TRY(sink(user, f, frame));
    }
    return ESA_OK;
}

esa_status esa_vae_decode_tiled(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                                int32_t tile, esa_wan_vae_sink sink, void *user)
{
    esa_nn *nn = vae->env.nn;
    tile_run r;
    const tile_sizes size = prepare(&r, vae, latent, tile);
    const esa_status status = run_tiles(&r, &size, latents, latent, sink, user);
    esa_nn_free_host(nn, r.out, size.out);
    esa_nn_free_host(nn, r.tile, size.tile);
    esa_nn_free_host(nn, r.above, size.above);
    esa_nn_free_host(nn, r.beside, size.beside);
    return status;
}

int64_t esa_vae_tiled_bytes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile)
{
    tile_run r;
    const tile_sizes size = prepare(&r, vae, latent, tile);
    const int64_t side = tile / vae->config.factor_s;
    const int64_t host = size.out + size.tile + size.above + size.beside;
    return (vae->env.nn->be->host_memory ? host : 0) +
           esa_vae_cut_bytes(vae, latent[0], esa_min64(side, latent[1]), esa_min64(side, latent[2]),
                             0);
}
