/* tiles.h - decodes in overlapping tiles, as diffusers does with enable_tiling, to save memory for
 * large frames.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Tiles are `stride` apart and overlap by side - stride. They are decoded row by row, from left to
 * right. Each tile is blended linearly with the lower edge of the tile above and then with the
 * right edge of the tile on its left, which are blended already; its first `stride` pixels then go
 * into the picture. Only the picture, one tile, and the edges for later tiles are kept, in host
 * memory. */
#ifndef ESA_MODEL_TILES_H
#define ESA_MODEL_TILES_H

#include "model/vae/vae.h"

/* A tile of the picture, in pixels. number of count: its place in the order of decoding. */
typedef struct esa_tile {
    int64_t top, left, height, width;
    int64_t number, count;
} esa_tile;

typedef struct esa_tiling {
    esa_nn *nn;
    int64_t frames, channels, height, width; /* of the picture */
    int64_t side[2], stride[2];              /* of tiles: height, width */
    /* Decodes one tile over all frames, not clamped. */
    esa_status (*decode)(void *owner, const esa_tile *tile, esa_vae_sink sink, void *user);
    void *owner;
} esa_tiling;

/* Decodes all tiles and gives the frames, clamped to [-1, 1], to sink. */
esa_status esa_tiles_decode(const esa_tiling *tiling, esa_vae_sink sink, void *user);
/* The host memory that it takes. */
int64_t esa_tiles_bytes(const esa_tiling *tiling);

static inline void esa_vae_clamp(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = x[i] < -1.0f ? -1.0f : x[i] > 1.0f ? 1.0f : x[i];
}

#endif
