// carry_store.cuh - carried differences (esa_carry.h) in the store of the sm80 kernels: adds d, or
// makes it.
// SPDX-License-Identifier: Apache-2.0
//
// A warp stages 16 finished rows at a time in shared memory, in f32, because they must not be
// rounded before d is added. Then it goes through them as they lie in global memory: a lane has 8
// neighbouring columns, and 16 rows take a few passes. What a pass reads from global memory is in
// L2 since the beginning of the tile, and is asked for one pass ahead.
#pragma once

#include "cuda/attention/walk.cuh"
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/ptx.cuh"
#include "rules/carry.h"

constexpr int CARRY_ROWS = 16; // staged at a time by a warp

// Where four neighbouring columns of a staged row are, in bytes. Rows that a warp writes together
// use different banks.
template <int DP> DEV uint32_t staged_place(int row, int four)
{
    return row * DP * 4 + (four ^ row % 4 * 2) * 16;
}

// Up to 8 bytes that are not aligned.
DEV uint64_t load_bytes(const uint8_t *src, int n)
{
    uint64_t x = 0;
#pragma unroll 1
    for (int i = 0; i < n; ++i) x |= (uint64_t)src[i] << 8 * i;
    return x;
}
DEV void store_bytes(uint8_t *dst, uint64_t x, int n)
{
#pragma unroll 1
    for (int i = 0; i < n; ++i) dst[i] = (uint8_t)(x >> 8 * i);
}
// 8 or, where `two` is set, 16 bytes; aligned to that many, or only n of them exist.
struct some_bytes {
    uint64_t low, high;
    __device__ __forceinline__ void load(const void *src, bool two, bool aligned, int n)
    {
        low = high = 0;
        if (!aligned) {
            low = load_bytes((const uint8_t *)src, min(n, 8));
            high = load_bytes((const uint8_t *)src + 8, n - 8);
        } else if (two) {
            const ulonglong2 x = *(const ulonglong2 *)src;
            low = x.x, high = x.y;
        } else {
            low = *(const uint64_t *)src;
        }
    }
    __device__ __forceinline__ void store(void *dst, bool two, bool aligned, int n) const
    {
        if (!aligned) {
            store_bytes((uint8_t *)dst, low, min(n, 8));
            store_bytes((uint8_t *)dst + 8, high, n - 8);
        } else if (two) {
            *(ulonglong2 *)dst = make_ulonglong2(low, high);
        } else {
            *(uint64_t *)dst = low;
        }
    }
    __device__ __forceinline__ uint32_t word(int i) const
    {
        return (uint32_t)((i < 2 ? low : high) >> i % 2 * 32);
    }
    template <class T> __device__ __forceinline__ void unpack(float (&x)[8]) const
    {
#pragma unroll
        for (int i = 0; i < 4; ++i) packed<T>::unpack_word(x + 2 * i, word(i), (T *)nullptr);
    }
    template <class T> __device__ __forceinline__ void pack(const float (&x)[8])
    {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
        low = w[0] | (uint64_t)w[1] << 32, high = w[2] | (uint64_t)w[3] << 32;
    }
};

// The staged rows of one warp: 16 rows from `first` of the tile on.
template <class T, int DP> struct staged_rows {
    static constexpr int LANES = DP / 8, TOGETHER = 32 / LANES; // lanes per row, rows per pass
    static constexpr int PASSES = CARRY_ROWS / TOGETHER;

    const attention_job &job;
    const tile_place &p;
    const uint32_t tile; // in shared memory
    const int first, lane;
    const bool vectors, codes, makes; // rows of o in 16 bytes; d in E4M3
    T *const o;
    // Bytes of d and of 16-bit elements that this lane has of a row; how many would be 8 columns.
    const int columns;

    __device__ __forceinline__ staged_rows(const attention_job &job, const tile_place &p,
                                           uint32_t tile, int first, bool vectors, int lane)
        : job(job), p(p), tile(tile), first(first), lane(lane), vectors(vectors),
          codes(job.a.carry.scale), makes(job.a.carry.use == ESA_CARRY_MAKE),
          o((T *)job.a.o + p.b * job.a.o_stride[0] + p.h * job.a.o_stride[1] + lane % LANES * 8),
          columns(max(0, min(8, (int)job.a.D - lane % LANES * 8)))
    {
    }

    // A row of a pass: its token, and what it needs from global memory.
    struct row_parts {
        bool exists;
        int64_t token;
        some_bytes bytes; // of d, or of the dense output
        float scale;
    };
    // Rows of d are aligned to 8 codes, or 8 elements of 16 bits, if D is a multiple of 8.
    __device__ __forceinline__ bool d_aligned() const { return job.a.D % 8 == 0; }
    __device__ __forceinline__ int64_t number(int64_t token) const
    {
        return p.b * job.a.carry.batch + p.h * job.a.Nq + token;
    }
    __device__ __forceinline__ uint8_t *d_at(int64_t token) const
    {
        return (uint8_t *)job.a.carry.value +
               (number(token) * job.a.D + lane % LANES * 8) * (codes ? 1 : 2);
    }
    __device__ __forceinline__ int row_of_pass(int pass) const
    {
        return pass * TOGETHER + lane / LANES;
    }

    __device__ __forceinline__ void ask(row_parts &x, int pass) const
    {
        const int row = first + row_of_pass(pass);
        x.exists = pass < PASSES && row < p.rows && columns > 0;
        x.bytes.low = x.bytes.high = 0;
        x.scale = 1.0f;
        if (!x.exists) return;
        x.token = token_of(job, p, p.row + row);
        if (makes) {
            x.bytes.load(o + x.token * job.a.o_stride[2], true, vectors, columns * 2);
            return;
        }
        x.bytes.load(d_at(x.token), !codes, d_aligned(), columns * (codes ? 1 : 2));
        if (codes) x.scale = job.a.carry.scale[number(x.token)];
    }

    __device__ __forceinline__ void staged(float (&x)[8], int pass) const
    {
        const int row = row_of_pass(pass);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 four = load_shared(tile + staged_place<DP>(row, lane % LANES * 2 + i));
            x[4 * i] = __uint_as_float(four.x), x[4 * i + 1] = __uint_as_float(four.y);
            x[4 * i + 2] = __uint_as_float(four.z), x[4 * i + 3] = __uint_as_float(four.w);
        }
    }

    __device__ __forceinline__ void add(const row_parts &part, int pass) const
    {
        float x[8], d[8];
        staged(x, pass);
        if (codes) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                d[i] = esa_f8_to_f32((uint8_t)(part.bytes.low >> 8 * i)) * part.scale;
        } else {
            part.bytes.template unpack<bf16>(d);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += d[i];
        some_bytes sum;
        sum.template pack<T>(x);
        if (part.exists) sum.store(o + part.token * job.a.o_stride[2], true, vectors, columns * 2);
    }

    // All lanes take part, because those of a row share its scale.
    __device__ __forceinline__ void make(const row_parts &part, int pass) const
    {
        float x[8], dense[8], sparse[8], largest = 0.0f;
        some_bytes bytes;
        staged(x, pass);
        bytes.template pack<T>(x);
        bytes.template unpack<T>(sparse);
        part.bytes.template unpack<T>(dense);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = i < columns ? esa_carry_difference(dense[i], sparse[i]) : 0.0f;
            largest = fmaxf(largest, fabsf(x[i]));
        }
        largest = lanes_max<LANES>(largest);
        if (codes) {
            const float scale = esa_carry_scale(largest), inverse = esa_carry_inverse(scale);
            bytes.low = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                bytes.low |= (uint64_t)esa_f32_to_f8(x[i] * inverse) << 8 * i;
            if (part.exists && lane % LANES == 0) job.a.carry.scale[number(part.token)] = scale;
        } else {
            bytes.template pack<bf16>(x);
        }
        if (part.exists)
            bytes.store(d_at(part.token), !codes, d_aligned(), columns * (codes ? 1 : 2));
    }

    // stage() puts the rows into shared memory. The whole warp calls it.
    template <class Stage> __device__ __forceinline__ void finish(const Stage &stage) const
    {
        row_parts now, next;
        ask(now, 0);
        stage();
        __syncwarp();
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            ask(next, pass + 1);
            if (makes)
                make(now, pass);
            else
                add(now, pass);
            now = next;
        }
        __syncwarp(); // the rows have been read
    }
};

// Brings to L2 what store_carried will read for `rows` rows of the tile. All threads of the thread
// block call it.
template <class T>
DEV void prefetch_carry(const attention_job &job, const tile_place &p, int rows, int threads)
{
    const esa_attn_args &a = job.a;
    const bool makes = a.carry.use == ESA_CARRY_MAKE;
    for (int row = threadIdx.x; row < min(rows, p.rows); row += threads) {
        const int64_t token = token_of(job, p, p.row + row),
                      number = p.b * a.carry.batch + p.h * a.Nq + token;
        const int bytes = (int)a.D * (makes || !a.carry.scale ? 2 : 1);
        const char *const from = makes ? (const char *)((const T *)a.o + p.b * a.o_stride[0] +
                                                        p.h * a.o_stride[1] + token * a.o_stride[2])
                                       : (const char *)a.carry.value + number * bytes;
        for (int at = 0; at < bytes; at += 64) prefetch_l2(from + at);
        if (!makes && a.carry.scale) prefetch_l2(a.carry.scale + number);
    }
}
