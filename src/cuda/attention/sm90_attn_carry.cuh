// sm90_attn_carry.cuh - carried differences (esa_carry.h) in the store of the Hopper kernels: adds
// d, or makes it.
// SPDX-License-Identifier: Apache-2.0
//
// A thread holds two rows, and of each columns 8 c + 2 t and 8 c + 2 t + 1 (t = lane % 4). Rows of
// d lie in the order of their columns. So a quad moves them in pieces of 16 bytes, one for each
// lane, and turns them in registers. MAKE reads the dense output the same way.
//
// Nothing waits for device memory: the rows are brought to L2 while the tensor cores work on the
// first product of the tile, and read while they work on the last. No register is in use between.
//
// Kernels without a carry have carry_rows<..., false>, which is empty: their code does not change.
#pragma once

#include "cuda/attention/sm90_attn.cuh"
#include "cuda/runtime/sm89_ptx.cuh"
#include "rules/carry.h"

namespace sm90
{

template <bool CARRY> struct args_of {
    using type = kernel_args;
};
template <> struct args_of<true> {
    using type = carried_args;
};

// Word i of lane t of a quad becomes word t of lane i.
DEV void turn(uint4 &x, int t)
{
    const bool odd = t & 1, high = t & 2;
    const uint32_t a = __shfl_xor_sync(~0u, odd ? x.x : x.y, 1),
                   b = __shfl_xor_sync(~0u, odd ? x.z : x.w, 1);
    x = odd ? make_uint4(a, x.y, b, x.w) : make_uint4(x.x, a, x.z, b);
    const uint32_t c = __shfl_xor_sync(~0u, high ? x.x : x.z, 2),
                   d = __shfl_xor_sync(~0u, high ? x.y : x.w, 2);
    x = high ? make_uint4(c, d, x.z, x.w) : make_uint4(x.x, x.y, c, d);
}
// A piece in E4M3 is two times four pairs of columns. To words that each hold one pair of the first
// four and one of the others, and back.
DEV uint4 pairs_apart(const uint4 &x)
{
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                      __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
}
DEV uint4 pairs_together(const uint4 &x)
{
    return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410),
                      __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x7632));
}
DEV uint32_t word_of(const uint4 &x, int i)
{
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

template <class T> DEV float2 two_floats(uint32_t word)
{
    float x[2];
    packed<T>::unpack_word(x, word, (T *)nullptr);
    return make_float2(x[0], x[1]);
}

template <class T, int D, int ROWS, bool CARRY> struct carry_rows {
    __device__ __forceinline__ void prefetch(const kernel_args &, const tile_info &) const {}
    __device__ __forceinline__ void load(const kernel_args &, const tile_info &) {}
};

template <class T, int D, int ROWS> struct carry_rows<T, D, ROWS, true> {
    // What has been read for this thread's rows: their tokens (-1: past the end); pieces t, t + 4,
    // ... of d, or of the dense output; the scales.
    int32_t token[2];
    uint4 piece[2][D / 32];
    float scale[2];

    // Where the rows of a tile are: row number of d of token 0, and its row of o.
    struct place {
        int64_t number;
        T *o;
        const int32_t *order; // of the tile's head, or null
        int first;            // row of the warp
        __device__ __forceinline__ place(const carried_args &a, const tile_info &t)
        {
            int64_t b = 0, h = t.bh;
            if (h >= a.Hq) b = t.bh / a.Hq, h = t.bh % a.Hq;
            number = b * a.carry.batch + h * a.Nq;
            o = (T *)a.o + b * a.o_stride[0] + h * a.o_stride[1];
            order = nullptr;
            if (a.scatter) order = a.scatter + b * a.scatter_stride[0] + h * a.scatter_stride[1];
            first = t.q0 + 16 * (threadIdx.x / 32 % (ROWS / 16));
        }
        __device__ __forceinline__ int32_t token(const carried_args &a, int row) const
        {
            return row >= a.Nq ? -1 : order ? order[row] : row;
        }
        __device__ __forceinline__ uint8_t *d_row(const carried_args &a, int32_t token) const
        {
            return (uint8_t *)a.carry.value + (number + token) * (a.carry.scale ? D : 2 * D);
        }
        __device__ __forceinline__ const T *o_row(const carried_args &a, int32_t token) const
        {
            return o + token * a.o_stride[2];
        }
    };
    static __device__ __forceinline__ bool makes(const carried_args &a)
    {
        return a.carry.use == ESA_CARRY_MAKE;
    }

    __device__ __forceinline__ void prefetch(const carried_args &a, const tile_info &t) const
    {
        const place p(a, t);
        const int lane = threadIdx.x % 32, token = lane < 16 ? p.token(a, p.first + lane) : -1;
        if (token >= 0) {
            if (makes(a)) {
                if (a.o_vectors) prefetch_l2(p.o_row(a, token), D * 2);
            } else {
                if (a.carry.scale) prefetch_l2(a.carry.scale + p.number + token);
                prefetch_l2(p.d_row(a, token), a.carry.scale ? D : 2 * D);
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ void load(const carried_args &a, const tile_info &t)
    {
        const int lane = threadIdx.x % 32, quad = lane % 4;
        const place p(a, t);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            token[r] = p.token(a, p.first + lane / 4 + 8 * r);
            const bool inside = token[r] >= 0;
            scale[r] = 1.0f;
            if (makes(a)) {
                load_dense(r, p.o_row(a, token[r]), a.o_vectors, inside, quad);
                continue;
            }
            const bool codes = a.carry.scale;
            if (codes) scale[r] = load_once(a.carry.scale + p.number + token[r], inside);
            const uint4 *const d = (const uint4 *)p.d_row(a, token[r]) + quad;
#pragma unroll
            for (int j = 0; j < D / 32; ++j)
                piece[r][j] = load_once(d + 4 * j, inside && (j < D / 64 || !codes));
        }
    }
    // Rows that are not aligned are read as they are needed, without a turn.
    __device__ __forceinline__ void load_dense(int r, const T *o, bool vectors, bool inside,
                                               int quad)
    {
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
            if (vectors) {
                piece[r][j] = load_once((const uint4 *)o + 4 * j + quad, inside);
                continue;
            }
            const auto pair = [&](int c) {
                const uint16_t *const two = (const uint16_t *)o + 8 * c + 2 * quad;
                return inside ? two[0] | (uint32_t)two[1] << 16 : 0u;
            };
            piece[r][j] = make_uint4(pair(4 * j), pair(4 * j + 1), pair(4 * j + 2),
                                     pair(4 * j + 3));
        }
        __syncwarp();
    }

    // x += d; x: the columns of both rows, as store_tile has them.
    __device__ __forceinline__ void add(const carried_args &a, float (&x)[D / 2])
    {
        const int quad = threadIdx.x % 4;
        const auto add_two = [&](int c, int r, float2 d) {
            x[4 * c + 2 * r] = fmaf(d.x, scale[r], x[4 * c + 2 * r]);
            x[4 * c + 2 * r + 1] = fmaf(d.y, scale[r], x[4 * c + 2 * r + 1]);
        };
        if (a.carry.scale) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int j = 0; j < D / 64; ++j) {
                    uint4 d = pairs_apart(piece[r][j]);
                    turn(d, quad);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const uint32_t word = word_of(d, i);
                        add_two(8 * j + 2 * i, r, __half22float2(unpack_e4m3((uint16_t)word)));
                        add_two(8 * j + 2 * i + 1, r,
                                __half22float2(unpack_e4m3((uint16_t)(word >> 16))));
                    }
                }
            return;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int j = 0; j < D / 32; ++j) {
                turn(piece[r][j], quad);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    add_two(4 * j + i, r, two_floats<bf16>(word_of(piece[r][j], i)));
            }
    }

    // d = dense - x, where x are the columns of both rows; changes x.
    __device__ __forceinline__ void make(const carried_args &a, const tile_info &t,
                                         float (&x)[D / 2])
    {
        const int quad = threadIdx.x % 4;
        const place p(a, t);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = 0.0f;
#pragma unroll
            for (int j = 0; j < D / 32; ++j) {
                if (a.o_vectors) turn(piece[r][j], quad);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = 4 * (4 * j + i) + 2 * r;
                    const float2 dense = two_floats<T>(word_of(piece[r][j], i)),
                                 sparse = two_floats<T>(pack2<T>(x[at], x[at + 1]));
                    x[at] = esa_carry_difference(dense.x, sparse.x);
                    x[at + 1] = esa_carry_difference(dense.y, sparse.y);
                    largest = fmaxf(largest, fmaxf(fabsf(x[at]), fabsf(x[at + 1])));
                }
            }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const bool inside = token[r] >= 0;
            uint4 *const d = (uint4 *)p.d_row(a, token[r]) + quad;
            if (a.carry.scale)
                write_codes(x, r, largest, d, a.carry.scale + p.number + token[r], inside, quad);
            else
                write_bf16(x, r, d, inside, quad);
        }
    }
    static __device__ __forceinline__ void write_codes(const float (&x)[D / 2], int r,
                                                       float largest, uint4 *d, float *to,
                                                       bool inside, int quad)
    {
        const float factor = esa_carry_scale(largest), inverse = esa_carry_inverse(factor);
        if (inside && quad == 0) *to = factor;
#pragma unroll
        for (int j = 0; j < D / 64; ++j) {
            const auto word = [&](int i) {
                const int at = 4 * (8 * j + 2 * i) + 2 * r;
                return pack_e4m3(x[at] * inverse, x[at + 1] * inverse, x[at + 4] * inverse,
                                 x[at + 5] * inverse);
            };
            uint4 codes = make_uint4(word(0), word(1), word(2), word(3));
            turn(codes, quad);
            if (inside) d[4 * j] = pairs_together(codes);
        }
    }
    static __device__ __forceinline__ void write_bf16(const float (&x)[D / 2], int r, uint4 *d,
                                                      bool inside, int quad)
    {
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
            const auto word = [&](int i) {
                const int at = 4 * (4 * j + i) + 2 * r;
                return pack2<bf16>(x[at], x[at + 1]);
            };
            uint4 values = make_uint4(word(0), word(1), word(2), word(3));
            turn(values, quad);
            if (inside) d[4 * j] = values;
        }
    }
};

} // namespace sm90
