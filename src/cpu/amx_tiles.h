/* amx_tiles.h - the tile operations of AMX that kernels use, with two fillings: the instructions,
 * and plain C for tests on machines that lack them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A kernel is written once over these names. A file with the flags of AMX gets the instructions; a
 * file that defines ESA_TILES_EMULATED first gets the emulation, on any processor. There are eight
 * tiles of 16 rows of 64 bytes. Tile numbers must be literal digits, because gcc pastes them into
 * the instruction.
 *
 *     TILES_BEGIN()             shapes the tiles of this thread
 *     TILES_END()               releases them
 *     TILE_ZERO(t)              t = 0
 *     TILE_LOAD(t, at, pitch)   t = 16 rows of 64 bytes, pitch bytes apart
 *     TILE_STORE(t, at, pitch)  writes them
 *     TILE_BF16(c, a, b)        c[16][16] += a[16][32] b[32][16], c in f32; b holds pairs of its
 *                               rows side by side: [16][16][2]
 *     TILES_FENCE()             stands between stores by other instructions and tile loads of the
 *                               same memory
 *
 * TILE_BF16 computes as Intel's manual writes TDPBF16PS. One instruction adds up the products of
 * even positions and those of odd positions in two chains of fused multiply-adds that start from 0;
 * then it adds the two sums, and then the result to c. Every step rounds to nearest even, takes
 * denormals as 0 and gives 0 for them, whatever MXCSR says. So products of up to 32 terms are added
 * up before they meet c. */
#ifndef ESA_CPU_AMX_TILES_H
#define ESA_CPU_AMX_TILES_H

#include "cpu/amx.h"

#if !defined(ESA_TILES_EMULATED)

#define TILES_BEGIN()            esa_amx_begin()
#define TILES_END()              esa_amx_end()
#define TILE_ZERO(t)             _tile_zero(t)
#define TILE_LOAD(t, at, pitch)  _tile_loadd(t, at, pitch)
#define TILE_STORE(t, at, pitch) _tile_stored(t, at, pitch)
#define TILE_BF16(c, a, b)       _tile_dpbf16ps(c, a, b)
#define TILES_FENCE()            ESA_AMX_FENCE()

#else

#include <stdlib.h>
#include <string.h>

typedef union esa_tile {
    uint32_t word[16][16]; /* pairs of bf16, or the bits of f32 */
    float f32[16][16];
} esa_tile;

/* The tiles of this thread. As the instructions fault without a shape, the emulation aborts. */
static _Thread_local esa_tile esa_tiles[8];
static _Thread_local int32_t esa_tiles_shaped;

static inline esa_tile *esa_tile_at(int t)
{
    if (!esa_tiles_shaped) abort();
    return &esa_tiles[t];
}

static inline void esa_tiles_begin(void)
{
    memset(esa_tiles, 0, sizeof esa_tiles);
    esa_tiles_shaped = 1;
}

static inline void esa_tiles_end(void)
{
    memset(esa_tiles, 0xff, sizeof esa_tiles); /* NaN: whoever uses what is left notices */
    esa_tiles_shaped = 0;
}

static inline void esa_tile_load(int t, const void *at, int64_t pitch)
{
    for (int i = 0; i < ESA_AMX_ROWS; i++)
        memcpy(esa_tile_at(t)->word[i], (const char *)at + i * pitch, ESA_AMX_ROW_BYTES);
}

static inline void esa_tile_store(int t, void *at, int64_t pitch)
{
    for (int i = 0; i < ESA_AMX_ROWS; i++)
        memcpy((char *)at + i * pitch, esa_tile_at(t)->word[i], ESA_AMX_ROW_BYTES);
}

/* x, or 0 with its sign if x is denormal. (The processor also gives 0 for the few sums that only
 * the coarser rounding of denormals lifts to the smallest normal number.) */
static inline float esa_tile_flush(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    u &= u & 0x7f800000u ? 0xffffffffu : 0x80000000u;
    memcpy(&x, &u, 4);
    return x;
}

static inline float esa_tile_half(uint32_t word, int high)
{
    const uint32_t u = high ? word & 0xffff0000u : word << 16;
    float x;
    memcpy(&x, &u, 4);
    return esa_tile_flush(x);
}

static inline void esa_tile_bf16(int c_at, int a_at, int b_at)
{
    esa_tile *c = esa_tile_at(c_at);
    const esa_tile *a = esa_tile_at(a_at), *b = esa_tile_at(b_at);
    float even[16][16], odd[16][16]; /* b, widened */
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < 16; n++) {
            even[k][n] = esa_tile_half(b->word[k][n], 0);
            odd[k][n] = esa_tile_half(b->word[k][n], 1);
        }
    for (int m = 0; m < 16; m++) {
        float sum[2][16] = { { 0 } };
        for (int k = 0; k < 16; k++) {
            const float x = esa_tile_half(a->word[m][k], 0), y = esa_tile_half(a->word[m][k], 1);
            for (int n = 0; n < 16; n++) {
                sum[0][n] = esa_tile_flush(__builtin_fmaf(x, even[k][n], sum[0][n]));
                sum[1][n] = esa_tile_flush(__builtin_fmaf(y, odd[k][n], sum[1][n]));
            }
        }
        for (int n = 0; n < 16; n++)
            c->f32[m][n] = esa_tile_flush(esa_tile_flush(c->f32[m][n]) +
                                          esa_tile_flush(sum[0][n] + sum[1][n]));
    }
}

#define TILES_BEGIN()            esa_tiles_begin()
#define TILES_END()              esa_tiles_end()
#define TILE_ZERO(t)             memset(esa_tile_at(t), 0, sizeof(esa_tile))
#define TILE_LOAD(t, at, pitch)  esa_tile_load(t, at, pitch)
#define TILE_STORE(t, at, pitch) esa_tile_store(t, at, pitch)
#define TILE_BF16(c, a, b)       esa_tile_bf16(c, a, b)
#define TILES_FENCE()            ((void)0)

#endif
#endif
