/* conv_leaf.inc.h - the tile function of conv_leaf.h. The including file defines vec, LANES, PIXELS
 * (a power of two), LOAD, STORE, BROADCAST and FMA(a, b, c) = a * b + c, and names its table.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A tile keeps P x V accumulators in registers; per k it loads V vectors of weights and broadcasts
 * one float of each pixel. P and V are constants after inlining, so that the loops over them
 * disappear. */
#include "nn/conv_leaf.h"

static inline __attribute__((always_inline)) void tile_of(float *acc, const float *x,
                                                          int64_t x_pixel, int64_t k,
                                                          const float *w, const int V, const int P,
                                                          int32_t add)
{
    vec a[PIXELS][ESA_CONV_VECTORS];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 3
        for (int v = 0; v < V; v++)
            a[p][v] = add ? LOAD(acc + (p * V + v) * LANES) : BROADCAST(0.0f);
    for (int64_t i = 0; i < k; i++, w += V * LANES) {
        vec b[ESA_CONV_VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < V; v++) b[v] = LOAD(w + v * LANES);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            const vec s = BROADCAST(x[p * x_pixel + i]);
#pragma GCC unroll 3
            for (int v = 0; v < V; v++) a[p][v] = FMA(s, b[v], a[p][v]);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 3
        for (int v = 0; v < V; v++) STORE(acc + (p * V + v) * LANES, a[p][v]);
}

typedef void (*tile_fn)(float *acc, const float *x, int64_t x_pixel, int64_t k, const float *w,
                        int32_t add);
#define TILE(V, P)                                                                                 \
    static void tile_##V##_##P(float *acc, const float *x, int64_t x_pixel, int64_t k,             \
                               const float *w, int32_t add)                                        \
    {                                                                                              \
        tile_of(acc, x, x_pixel, k, w, V, P, add);                                                 \
    }
/* clang-format off */
TILE(1, 1) TILE(2, 1) TILE(3, 1)
TILE(1, 2) TILE(2, 2) TILE(3, 2)
TILE(1, 4) TILE(2, 4) TILE(3, 4)
#if PIXELS == 8
TILE(1, 8) TILE(2, 8) TILE(3, 8)
#endif

static const tile_fn sizes[][ESA_CONV_VECTORS] = {
    { tile_1_1, tile_2_1, tile_3_1 },
    { tile_1_2, tile_2_2, tile_3_2 },
    { tile_1_4, tile_2_4, tile_3_4 },
#if PIXELS == 8
    { tile_1_8, tile_2_8, tile_3_8 },
#endif
};
/* clang-format on */

/* A full tile is one call. The rest of a row is cut into powers of two. */
static void tile(float *acc, const float *x, int64_t x_pixel, int64_t k, const float *w,
                 int32_t vectors, int32_t pixels, int32_t add)
{
    for (int32_t log = (int32_t)(sizeof sizes / sizeof sizes[0]) - 1; pixels > 0; log--) {
        const int32_t p = 1 << log;
        if (pixels < p) continue;
        sizes[log][vectors - 1](acc, x, x_pixel, k, w, add);
        acc += p * vectors * LANES;
        x += p * x_pixel;
        pixels -= p;
    }
}
