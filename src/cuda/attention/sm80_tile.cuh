// sm80_tile.cuh - the parts of the sm80 kernel that handle tiles: loading rows, the two products,
// the online softmax, the store.
// SPDX-License-Identifier: Apache-2.0
//
// Shared tiles are [rows][DP] 16-bit elements without padding. The 16-byte chunk c of row r is at
// place c ^ (r % 8), so that eight rows of one chunk (ldmatrix) and eight chunks of one row
// (copies) use different banks. Offsets of a fragment along D are then an XOR of the lane's address
// with a constant.
//
// A row of codes (int8) counts as half as many 16-bit elements: ldmatrix and mma.sync hold four
// codes where they hold two 16-bit elements.
#pragma once

#include "cuda/attention/carry_store.cuh"
#include "cuda/attention/walk.cuh"
#include "cuda/runtime/sm80_ptx.cuh"

constexpr int SM80_THREADS = 128, SM80_WARPS = 4;
constexpr int SM80_KEYS = 64; // keys per step

// Where a chunk of a row is in a tile with rows of BYTES. Two rows of 64 bytes share the banks of
// one row of 128, so there the pair of rows chooses the place.
template <int BYTES> DEV uint32_t chunk_place(int chunk, int row)
{
    static_assert(BYTES == 64 || BYTES % 128 == 0, "rows of 4 chunks, or of a multiple of 8");
    return row * BYTES + (chunk ^ (BYTES == 64 ? row / 2 % 4 : row % 8)) * 16;
}

// Copies 64 rows from global to shared memory. Rows whose bit in valid is 0 and columns from D on
// become 0. A thread moves one 16-byte chunk of every PASS-th row.
template <class T, int DP> struct row_loader {
    static constexpr int CHUNKS = DP / 8, PASS = SM80_THREADS / CHUNKS, PASSES = 64 / PASS;

    DEV uint32_t place(int chunk, int row) { return chunk_place<DP * 2>(chunk, row); }

    // Pointer and stride are multiples of 16 bytes, D of 8, and all rows exist.
    DEV void copy_all(uint32_t dst, const T *src, int64_t stride, int D)
    {
        const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
        src += row * stride + chunk * 8;
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            copy_16(dst + place(chunk, row + i * PASS), src, chunk * 8 < D);
            src += PASS * stride;
        }
    }

    // The same if some rows do not exist. This is rare, so the code is small rather than fast.
    DEV void copy_some(uint32_t dst, const T *src, int64_t stride, uint64_t valid, int D)
    {
        const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
        src += row * stride + chunk * 8;
#pragma unroll 1
        for (int i = 0; i < PASSES; ++i) {
            copy_16(dst + place(chunk, row + i * PASS), src,
                    chunk * 8 < D && (valid >> (row + i * PASS) & 1));
            src += PASS * stride;
        }
    }

    // Fine means from column `first` of the tile on, `exist` of which exist. src: those of the
    // head, in rows of DP.
    DEV void copy_fine(uint32_t dst, const T *src, const uint16_t *list, int fine, int first,
                       int exist)
    {
        const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
#pragma unroll 1
        for (int r = row; r < 64; r += PASS) {
            const int64_t from = r < exist ? fine_row(list, fine, first + r) : 0;
            copy_16(dst + place(chunk, r), src + from * DP + chunk * 8, r < exist);
        }
    }

    // Any pointer, stride and D: reads every element separately.
    DEV void read(uint32_t dst, const T *src, int64_t stride, uint64_t valid, int D)
    {
        const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
        src += row * stride + chunk * 8;
#pragma unroll 1
        for (int i = 0; i < PASSES; ++i) {
            uint32_t x[4] = { 0, 0, 0, 0 };
            const int columns = valid >> (row + i * PASS) & 1 ? D - chunk * 8 : 0;
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (e < columns) x[e / 2] |= (uint32_t)((const uint16_t *)src)[e] << e % 2 * 16;
            store_shared(dst + place(chunk, row + i * PASS), make_uint4(x[0], x[1], x[2], x[3]));
            src += PASS * stride;
        }
    }

    DEV void load(uint32_t dst, const T *src, int64_t stride, uint64_t valid, int D, bool vectors)
    {
        if (vectors)
            copy_some(dst, src, stride, valid, D);
        else
            read(dst, src, stride, valid, D);
    }
};

// Where a lane reads fragments of a tile: rows in order (A and transposed B), or two groups of
// eight rows by halves of the columns (B).
template <int DP> DEV uint32_t fragment_by_row(int lane)
{
    return chunk_place<DP * 2>(lane / 16, lane % 16);
}
template <int DP> DEV uint32_t fragment_by_column(int lane)
{
    return chunk_place<DP * 2>(lane / 8 % 2, lane / 16 * 8 + lane % 8);
}

// The queries of a warp, 16 MT rows: fragments in registers (HELD), or read from shared
// memory when needed.
template <int DP, int MT, bool HELD> struct warp_queries {
    uint32_t addr;
    uint32_t held[HELD ? DP / 16 : 1][MT][4];

    __device__ __forceinline__ void read(uint32_t (&q)[MT][4], int k) const
    {
#pragma unroll
        for (int m = 0; m < MT; ++m) load_matrices(q[m], (addr ^ k * 32) + m * 16 * DP * 2);
    }
    __device__ __forceinline__ void hold()
    {
        if constexpr (HELD) {
#pragma unroll
            for (int k = 0; k < DP / 16; ++k) read(held[k], k);
        }
    }
    __device__ __forceinline__ void fragments(uint32_t (&q)[MT][4], int k) const
    {
        if constexpr (HELD) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) q[m][i] = held[k][m][i];
        } else {
            read(q, k);
        }
    }
};

// s (16 MT x 64) = Q K^T, keys at address k of this lane. The sums of codes (T int8_t, DP half the
// number of codes of a row) start at EIGHT_WHOLE, so that s are floats too: EIGHT_WHOLE + sum.
template <class T, int DP, int MT, bool HELD>
DEV void scores(float (&s)[MT][8][4], const warp_queries<DP, MT, HELD> &queries, uint32_t k_addr)
{
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = sizeof(T) == 1 ? EIGHT_WHOLE : 0.0f;
    // Fragments are read one ahead, so that the products before them hide the latency.
    constexpr int LAST = DP / 16 - 1;
    uint32_t q[2][MT][4], b[2][4];
    queries.fragments(q[0], 0);
    load_matrices(b[0], k_addr);
#pragma unroll
    for (int k = 0; k <= LAST; ++k) {
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const int now = n / 2 % 2;
            if (n < 6)
                load_matrices(b[1 - now], (k_addr ^ k * 32) + (n + 2) * 8 * DP * 2);
            else if (k < LAST)
                load_matrices(b[1 - now], k_addr ^ (k + 1) * 32);
            if (n == 0 && k < LAST) queries.fragments(q[(k + 1) % 2], k + 1);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                multiply_add<T>(s[m][n], q[k % 2][m], b[now][0], b[now][1]);
                multiply_add<T>(s[m][n + 1], q[k % 2][m], b[now][2], b[now][3]);
            }
        }
    }
}

// Sets scores to -inf in columns that do not exist or that a row does not see. Row r of the warp
// sees the first seen + r columns.
template <int MT> DEV void hide_columns(float (&s)[MT][8][4], uint64_t valid, int seen, int lane)
{
    const int column = lane % 4 * 2;
    valid >>= column;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool visible = n * 8 + column + e % 2 < seen + m * 16 + lane / 4 + e / 2 * 8;
                if (!visible || !(valid >> (n * 8 + e % 2) & 1)) s[m][n][e] = -INFINITY;
            }
}

// Adds ln(keys), in units of the unscaled score, to the scores of means, which count for all keys
// of their blocks. Only the last block can be short.
template <int MT>
DEV void add_mean_bias(float (&s)[MT][8][4], float whole, float last, int last_column, int lane)
{
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float bias = n * 8 + lane % 4 * 2 + e % 2 == last_column ? last : whole;
#pragma unroll
            for (int m = 0; m < MT; ++m) s[m][n][e] += bias;
        }
}

// Running state of the rows of a warp. A lane holds rows lane / 4 + 8 r, r < 2 MT; the four lanes
// of a quad share a row.
template <int DP, int MT> struct warp_rows {
    float o[MT][DP / 8][4];
    float m[MT * 2]; // maximum of the unscaled scores, the same in a quad
    float l[MT * 2]; // this lane's part of the sum

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int m_ = 0; m_ < MT; ++m_)
#pragma unroll
            for (int n = 0; n < DP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[m_][n][e] = 0.0f;
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) m[r] = -INFINITY, l[r] = 0.0f;
    }

    // Starts every row with the state of the centroid tail: weighted sum o [DP], reference maximum
    // (log2 units), sum.
    __device__ __forceinline__ void begin_with(const float *state_o, float state_m, float state_l,
                                               float unscale, int lane)
    {
        if (state_m == -INFINITY) return;
#pragma unroll
        for (int n = 0; n < DP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float x = state_o[n * 8 + lane % 4 * 2 + e];
#pragma unroll
                for (int m_ = 0; m_ < MT; ++m_) o[m_][n][e] = o[m_][n][e + 2] = x;
            }
#pragma unroll
        for (int r = 0; r < MT * 2; ++r)
            m[r] = state_m * unscale, l[r] = lane % 4 == 0 ? state_l : 0.0f;
    }

    // Updates the maxima from s.
    __device__ __forceinline__ void follow(const float (&s)[MT][8][4], float scale_log2)
    {
        float top[MT * 2];
        find_tops(top, s);
        raise(top, scale_log2);
    }

    // The largest score of every row, the same in a quad.
    DEV void find_tops(float (&top)[MT * 2], const float (&s)[MT][8][4])
    {
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) {
            const int e = r % 2 * 2;
            float x = fmaxf(s[r / 2][0][e], s[r / 2][0][e + 1]),
                  y = fmaxf(s[r / 2][1][e], s[r / 2][1][e + 1]);
#pragma unroll
            for (int n = 2; n < 8; n += 2) {
                x = fmaxf(x, fmaxf(s[r / 2][n][e], s[r / 2][n][e + 1]));
                y = fmaxf(y, fmaxf(s[r / 2][n + 1][e], s[r / 2][n + 1][e + 1]));
            }
            top[r] = fmaxf(x, y);
        }
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
    }

    // Raises the maxima to top. If no row of the warp grew, nothing is multiplied: alpha would be
    // exactly 1. NaN is left out.
    __device__ __forceinline__ void raise(float (&top)[MT * 2], float scale_log2)
    {
        bool grew = false;
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) grew |= top[r] > m[r];
        if (!__any_sync(~0u, grew)) return;
        float alpha[MT * 2];
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) {
            top[r] = fmaxf(top[r], m[r]);
            alpha[r] = exp2_approx((m[r] - finite(top[r])) * scale_log2);
            m[r] = top[r];
            l[r] *= alpha[r];
        }
#pragma unroll
        for (int m_ = 0; m_ < MT; ++m_)
#pragma unroll
            for (int n = 0; n < DP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[m_][n][e] *= alpha[m_ * 2 + e / 2];
    }

    // Nothing seen yet: subtract 0, because -inf - -inf would be NaN and exp2(-inf - 0) is 0.
    DEV float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

    // O += exp2(S - m) V.
    template <class T>
    __device__ __forceinline__ void attend(const float (&s)[MT][8][4], uint32_t v_addr,
                                           float scale_log2)
    {
        float shift[MT * 2];
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) shift[r] = -finite(m[r]) * scale_log2;
        float factor[MT * 2];
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) factor[r] = scale_log2;
        add_values<T>(s, v_addr, factor, shift);
    }

    // O += exp2(S factor + shift) V, 16 keys at a time, so that exponentials overlap the
    // products of the previous keys.
    template <class T>
    __device__ __forceinline__ void add_values(const float (&s)[MT][8][4], uint32_t v_addr,
                                               const float (&factor)[MT * 2],
                                               const float (&shift)[MT * 2])
    {
        uint32_t b[2][4], p[MT][4];
        load_matrices_transposed(b[0], v_addr);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            weights<T>(p, s, k, factor, shift);
#pragma unroll
            for (int n = 0; n < DP / 8; n += 2) {
                const int now = n / 2 % 2;
                if (n + 2 < DP / 8)
                    load_matrices_transposed(b[1 - now], (v_addr ^ (n + 2) * 16) + k * 16 * DP * 2);
                else if (k < 3)
                    load_matrices_transposed(b[1 - now], v_addr + (k + 1) * 16 * DP * 2);
#pragma unroll
                for (int m_ = 0; m_ < MT; ++m_) {
                    multiply_add<T>(o[m_][n], p[m_], b[now][0], b[now][1]);
                    multiply_add<T>(o[m_][n + 1], p[m_], b[now][2], b[now][3]);
                }
            }
        }
    }

    // P of keys 16k .. 16k + 15 as an A fragment; adds their sums to l.
    template <class T>
    __device__ __forceinline__ void weights(uint32_t (&p)[MT][4], const float (&s)[MT][8][4], int k,
                                            const float (&factor)[MT * 2],
                                            const float (&shift)[MT * 2])
    {
#pragma unroll
        for (int m_ = 0; m_ < MT; ++m_)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = m_ * 2 + i % 2;
                const float x = exp2_approx(
                    fmaf(s[m_][2 * k + i / 2][i % 2 * 2], factor[r], shift[r]));
                const float y = exp2_approx(
                    fmaf(s[m_][2 * k + i / 2][i % 2 * 2 + 1], factor[r], shift[r]));
                l[r] += x + y;
                p[m_][i] = pack2<T>(x, y);
            }
    }

    // Sum of row r.
    __device__ __forceinline__ float sum_of(int r) const
    {
        float sum = l[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        return sum + __shfl_xor_sync(~0u, sum, 2);
    }
    // What row r is multiplied by. A sum of 0 is an empty row; NaN stays NaN.
    DEV float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

    // Writes the LSE of row r, if it is asked for.
    __device__ __forceinline__ void store_lse(const attention_job &job, const tile_place &p,
                                              int first, int r, float sum, float scale_log2,
                                              int lane) const
    {
        const esa_attn_args &a = job.a;
        const int row = r * 8 + lane / 4;
        if (a.lse && lane % 4 == 0 && first + row < p.rows) {
            const int64_t token = token_of(job, p, p.row + first + row);
            a.lse[p.b * a.lse_stride[0] + p.h * a.lse_stride[1] + token * a.lse_stride[2]] =
                sum == 0.0f ? -INFINITY : fmaf(m[r] * scale_log2, 0.6931471805599453f, logf(sum));
        }
    }

    // Writes O / l to global memory through shared memory (16 MT rows at tile), whole rows at a
    // time, and the LSE.
    template <class T>
    __device__ __forceinline__ void store(const attention_job &job, const tile_place &p,
                                          uint32_t tile, int first, bool vectors, float scale_log2,
                                          int lane)
    {
        const esa_attn_args &a = job.a;
#pragma unroll
        for (int r = 0; r < MT * 2; ++r) {
            const float sum = sum_of(r), inverse = inverse_of(sum);
            const int row = r * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < DP / 8; ++n)
                store_shared(tile + row * DP * 2 + (n ^ row % 8) * 16 + lane % 4 * 4,
                             pack2<T>(o[r / 2][n][r % 2 * 2] * inverse,
                                      o[r / 2][n][r % 2 * 2 + 1] * inverse));
            store_lse(job, p, first, r, sum, scale_log2, lane);
        }
        __syncwarp();
        T *const head = (T *)a.o + p.b * a.o_stride[0] + p.h * a.o_stride[1];
        constexpr int CHUNKS = DP / 8, PASS = 32 / CHUNKS;
        const int chunk = lane % CHUNKS, D = (int)a.D;
        if (chunk * 8 >= D) return;
#pragma unroll 1
        for (int row = lane / CHUNKS; row < 16 * MT && first + row < p.rows; row += PASS) {
            const int64_t token = token_of(job, p, p.row + first + row);
            T *const dst = head + token * a.o_stride[2] + chunk * 8;
            const uint4 x = load_shared(tile + row * DP * 2 + (chunk ^ row % 8) * 16);
            if (vectors) {
                *(uint4 *)dst = x;
                continue;
            }
            const uint32_t word[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (chunk * 8 + e < D) ((uint16_t *)dst)[e] = (uint16_t)(word[e / 2] >> e % 2 * 16);
        }
    }

    // The same with a carried difference. tile: room for 16 rows in f32.
    template <class T>
    __device__ __forceinline__ void store_carried(const attention_job &job, const tile_place &p,
                                                  uint32_t tile, int first, bool vectors,
                                                  float scale_log2, int lane)
    {
#pragma unroll
        for (int m_ = 0; m_ < MT; ++m_) {
            const staged_rows<T, DP> rows(job, p, tile, first + 16 * m_, vectors, lane);
            rows.finish([&] {
#pragma unroll
                for (int r = 2 * m_; r < 2 * m_ + 2; ++r) {
                    const float sum = sum_of(r), inverse = inverse_of(sum);
                    const int row = r % 2 * 8 + lane / 4, e = r % 2 * 2;
#pragma unroll
                    for (int n = 0; n < DP / 8; ++n)
                        store_shared(tile + staged_place<DP>(row, 2 * n + lane % 4 / 2) +
                                         lane % 2 * 8,
                                     make_float2(o[m_][n][e] * inverse, o[m_][n][e + 1] * inverse));
                    store_lse(job, p, first, r, sum, scale_log2, lane);
                }
            });
        }
    }
};
