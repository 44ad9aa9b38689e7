// error_scores.cu - the scores of the error selector on tensor cores (mma.sync): 16-bit means, D up
// to 128.
// SPDX-License-Identifier: Apache-2.0
//
// A warp holds 32 mean queries and their outputs o in registers, and walks over key blocks. The
// tile of a block is [mean keys, padded to 16 KS][fine means, block mean, padded to 8 FT] rows of k
// and the same of v; cp.async brings it into a ring of three. Per block and row, with weights p of
// the mean keys, t of the fine means and u of the block mean:
//
//     logits   q times all rows of the k tile, then exponentials, rounded to 16 bits
//     sums     w = sum p, w - sum t and w - u: the weights times a column of ones, so that they are
//              sums of the rounded weights, and a part that all values have in common cancels
//     errors   8 columns of D at a time: a = p v, then a - t v and a - u v, each from the same a;
//              minus the sums times o; squared and added up
//
// No vector of D elements leaves the registers. Weights are scaled by 2^SHIFT: they are shares of a
// row, most of them below what f16 holds well.
#include "cuda/attention/sm80_tile.cuh"
#include "cuda/selection/error.cuh"

namespace
{

constexpr int WARPS = SM80_WARPS, THREADS = SM80_THREADS, WARP_ROWS = 32, TILE = WARPS * WARP_ROWS,
              STAGES = 3, MT = WARP_ROWS / 16;
constexpr int SHIFT = 14;
constexpr int RESIDENT = 2; // thread blocks per multiprocessor
// Column blocks of o that lie in shared memory; the others fill the registers.
constexpr int O_SHARED = 2;

// Rows of a tile.
template <int DP, int KS, int FT> struct tile {
    static constexpr int GROUPS = 16 * KS, ROWS = GROUPS + 8 * FT;
    static constexpr int OPERAND = ROWS * DP * 2, STAGE = 2 * OPERAND;
    static constexpr int COLUMNS = ROWS;                // of the logits
    static constexpr int BIAS = STAGES * STAGE;         // [whole block, last block][COLUMNS]
    static constexpr int WALK = BIAS + 2 * COLUMNS * 4; // error_walk
    static constexpr int OUTPUTS = WALK + 64;           // [WARPS][O_SHARED][lane]
    static constexpr int BYTES = OUTPUTS + WARPS * O_SHARED * 512;
};

// d (16 x 8) = c + a (16 x 8) b (8 x 8); fragments as the low halves of multiply_add.
template <class T>
DEV void multiply_add_8(float (&d)[4], const uint32_t (&a)[2], uint32_t b, const float (&c)[4])
{
    if constexpr (is_bf16<T>)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%7, %8, %9, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    else
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%7, %8, %9, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

template <class T> DEV void unpack2(float &lo, float &hi, uint32_t w)
{
    if constexpr (is_bf16<T>) {
        lo = __uint_as_float(w << 16), hi = __uint_as_float(w & 0xffff0000u);
    } else {
        lo = __half2float(__ushort_as_half((unsigned short)w));
        hi = __half2float(__ushort_as_half((unsigned short)(w >> 16)));
    }
}
template <class T> constexpr uint32_t TWO_ONES = is_bf16<T> ? 0x3f803f80u : 0x3c003c00u;

// The parts of the work of a thread block: a tile of rows against consecutive key blocks of one kv
// head. Rows of a kv head: those of all its query heads. It lies in shared memory, and one thread
// moves it, because registers are scarce.
struct error_walk {
    int64_t at, end;      // position in B * Hkv * nk
    int item, tile, head; // head of B * Hkv
    int block0, block1, len;
    int more; // 0: no part is left
    __device__ void start() { at = end = 0, item = blockIdx.x; }
    // Moves to the next part with work in it.
    __device__ void next(const error_job &x) { more = find(x); }
    __device__ bool find(const error_job &x)
    {
        const int64_t all = (int64_t)x.B * x.Hkv * x.nk;
        for (;;) {
            if (at >= end) {
                if (item >= x.tiles * x.ranges) return false;
                const int range = item / x.tiles;
                tile = item - range * x.tiles;
                at = all * range / x.ranges, end = all * (range + 1) / x.ranges;
                item += gridDim.x;
                continue;
            }
            head = (int)(at / x.nk);
            block0 = (int)(at - (int64_t)head * x.nk);
            block1 = (int)min((int64_t)x.nk, block0 + end - at);
            at += block1 - block0;
            len = x.kv_len[head / x.Hkv];
            block1 = min(block1, ceil_div(len, x.block_k));
            if (block0 < block1) return true;
        }
    }
};

// Copies the tile of a key block: rows of k, then rows of v. place: the block of B * Hkv * nk.
template <class T, int DP, int KS, int FT>
DEV void load_tile(const error_job &x, uint32_t dst, int64_t place)
{
    using t = tile<DP, KS, FT>;
    constexpr int CHUNKS = DP / 8, PASS = THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    const int64_t groups = (place * x.per_k + row) * DP + chunk * 8,
                  tail = (place * (8 * FT) + row) * DP + chunk * 8;
#pragma unroll
    for (int operand = 0; operand < 2; ++operand) {
        const T *const g = (const T *)(operand ? x.v : x.k) + groups,
                       *const f = (const T *)(operand ? x.vt : x.kt) + tail;
#pragma unroll
        for (int first = 0; first < t::GROUPS; first += PASS) {
            const int r = first + row;
            const bool there = r < x.per_k;
            copy_16(dst + operand * t::OPERAND + r * DP * 2 + (chunk ^ r % 8) * 16,
                    there ? g + first * DP : g, there);
        }
#pragma unroll
        for (int first = 0; first < 8 * FT; first += PASS) {
            const int r = first + row;
            if (r < 8 * FT)
                copy_16(dst + operand * t::OPERAND + (t::GROUPS + r) * DP * 2 +
                            (chunk ^ r % 8) * 16,
                        f + first * DP, true);
        }
    }
}

// What a warp holds of its rows, and what it does with a tile.
template <class T, int DP, int KS, int FT, bool LEVELS> struct warp_errors {
    using t = tile<DP, KS, FT>;
    static constexpr int FINE_TILES = FT > 1 ? FT - 1 : 1; // the block mean is in the last tile
    static constexpr int LEVEL_COUNT = LEVELS ? 2 : 1;
    static constexpr int HELD = DP / 8 - O_SHARED;
    uint32_t q[DP / 16][MT][4];
    uint32_t o[HELD][MT][2];
    uint32_t o_shared; // the other columns of this lane
    // Bits of this lane's two columns in the last tail tile: fine means (FT = 1), the block mean.
    uint32_t fine_columns, mean_columns;
    float shift[2 * MT]; // minus the reference of the rows lane / 4 + 8 r
    // Of row (lane & 1) * 8 + (lane & 2) * 8 + lane / 4 of the warp: its share of the mean over its
    // query block; 0: it does not exist.
    float share;
    float *out; // null: this lane writes nothing

    __device__ __forceinline__ void find_columns(const error_job &x, int lane)
    {
        const int column = 8 * (FT - 1) + lane % 4 * 2;
        fine_columns = (column < x.fine ? 0xffffu : 0u) | (column + 1 < x.fine ? ~0xffffu : 0u);
        mean_columns = (column == x.fine ? 0xffffu : 0u) | (column + 1 == x.fine ? ~0xffffu : 0u);
    }

    // Reads two elements of a row.
    DEV uint32_t pair(const uint16_t *row, int d, int D)
    {
        if (d + 1 < D) return *(const uint32_t *)(row + d);
        return d < D ? row[d] : 0u;
    }

    __device__ __forceinline__ void open(const error_job &x, const error_walk &w, int warp,
                                         int lane)
    {
        const int ratio = x.Hq / x.Hkv, first = w.tile * TILE + warp * WARP_ROWS;
        const int rows = ratio * x.rows; // of the kv head
        const int64_t base = (int64_t)w.head * rows;
#pragma unroll
        for (int r = 0; r < 2 * MT; ++r) {
            const int row = first + 8 * r + lane / 4;
            const bool there = row < rows && error_queries(x, row % x.rows) > 0;
            const int64_t at = there ? base + row : base;
            const uint16_t *const qs = (const uint16_t *)x.q + at * DP;
            const uint16_t *const os = (const uint16_t *)x.o + at * DP;
            // An absent row has weights 0: its reference is infinite.
            shift[r] = there ? SHIFT - x.lse[at] * 1.44269504f : -INFINITY;
#pragma unroll
            for (int k = 0; k < DP / 16; ++k)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int d = 16 * k + 8 * half + lane % 4 * 2;
                    q[k][r / 2][2 * half + r % 2] = *(const uint32_t *)(qs + d);
                    const uint32_t word = pair(os, d, x.D);
                    const int n = 2 * k + half;
                    if (n < HELD)
                        o[n < HELD ? n : 0][r / 2][r % 2] = word;
                    else
                        store_shared(o_shared + (n - HELD) * 512 + r * 4, word);
                }
        }
        const int row = first + (lane & 1) * 8 + (lane & 2) * 8 + lane / 4;
        share = 0.0f;
        out = nullptr;
        if (row >= rows) return;
        const int block = row / x.per_q; // query block among those of the kv head
        const int i = block % x.nq, queries = min(x.block_q, x.Nq - i * x.block_q);
        share = (float)error_queries(x, row % x.rows) / (float)queries * exp2f(-2.0f * SHIFT);
        if (row % x.per_q == 0) out = x.out + ((int64_t)w.head * ratio * x.nq + block) * x.nk;
    }

    template <int N> DEV void clear(float (&s)[N][MT][4])
    {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[n][m][e] = 0.0f;
    }

    // s and tail = q times the mean keys and the means of the tail, together, so that many products
    // are in flight.
    __device__ __forceinline__ void logits(float (&s)[2 * KS][MT][4], float (&tail)[FT][MT][4],
                                           uint32_t k, int lane)
    {
        const uint32_t groups = k + fragment_by_column<DP>(lane),
                       tails = k + t::GROUPS * DP * 2 + tail_fragment(lane);
        clear(s);
        clear(tail);
#pragma unroll
        for (int kk = 0; kk < DP / 32; ++kk) {
            uint32_t f[FT][4]; // 32 elements of 8 rows
#pragma unroll
            for (int n = 0; n < FT; ++n) load_matrices(f[n], (tails ^ kk * 64) + n * 8 * DP * 2);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int n = 0; n < KS; ++n) {
                    uint32_t b[4]; // 16 elements of 16 rows
                    load_matrices(b, (groups ^ (2 * kk + half) * 32) + n * 16 * DP * 2);
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        multiply_add<T>(s[2 * n][m], q[2 * kk + half][m], b[0], b[1]);
                        multiply_add<T>(s[2 * n + 1][m], q[2 * kk + half][m], b[2], b[3]);
                    }
                }
#pragma unroll
                for (int n = 0; n < FT; ++n)
#pragma unroll
                    for (int m = 0; m < MT; ++m)
                        multiply_add<T>(tail[n][m], q[2 * kk + half][m], f[n][2 * half],
                                        f[n][2 * half + 1]);
            }
        }
    }

    // Where a lane reads 8 rows x 4 chunks.
    DEV uint32_t tail_fragment(int lane) { return lane % 8 * DP * 2 + (lane / 8 ^ lane % 8) * 16; }

    struct weights {
        uint32_t p[KS][MT][4];
        uint32_t fine[LEVELS ? FINE_TILES : 1][MT][2]; // negative
        uint32_t mean[MT][2];                          // negative
    };

    __device__ __forceinline__ void group_weights(weights &p, const float (&s)[2 * KS][MT][4],
                                                  float scale, const float *bias, int lane)
    {
#pragma unroll
        for (int n = 0; n < 2 * KS; ++n) {
            const float2 b = *(const float2 *)(bias + 8 * n + lane % 4 * 2);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    p.p[n / 2][m][n % 2 * 2 + half] = pack2<T>(
                        weight(s[n][m][2 * half], scale, shift[2 * m + half] + b.x),
                        weight(s[n][m][2 * half + 1], scale, shift[2 * m + half] + b.y));
        }
    }

    __device__ __forceinline__ void tail_weights(weights &p, const float (&s)[FT][MT][4],
                                                 float scale, const float *bias, int lane)
    {
#pragma unroll
        for (int n = 0; n < FT; ++n) {
            const int column = 8 * n + lane % 4 * 2;
            const float2 b = *(const float2 *)(bias + t::GROUPS + column);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float lo = weight(s[n][m][2 * half], scale, shift[2 * m + half] + b.x),
                                hi = weight(s[n][m][2 * half + 1], scale,
                                            shift[2 * m + half] + b.y);
                    const uint32_t both = pack2<T>(-lo, -hi);
                    if constexpr (LEVELS)
                        if (n < FINE_TILES)
                            p.fine[n][m][half] = FT > 1 ? both : both & fine_columns;
                    if (n == FT - 1) p.mean[m][half] = both & mean_columns;
                }
        }
    }
    DEV float weight(float s, float scale, float shift)
    {
        return exp2_approx(fmaf(s, scale, shift));
    }

    // One block of 8 columns: a minus the block mean, and a minus the fine means. f: the rows of
    // the tail tiles.
    struct column_block {
        float e[LEVEL_COUNT][4];
    };
    __device__ __forceinline__ column_block subtract(const weights &p, const float (&a)[4],
                                                     const uint32_t *f, int m)
    {
        column_block y;
        multiply_add_8<T>(y.e[0], p.mean[m], f[FT - 1], a);
        if constexpr (LEVELS) {
            multiply_add_8<T>(y.e[1], p.fine[0][m], f[0], a);
#pragma unroll
            for (int n = 1; n < FINE_TILES; ++n)
                multiply_add_8<T>(y.e[1], p.fine[n][m], f[n], y.e[1]);
        }
        return y;
    }

    // Column block n of o.
    __device__ __forceinline__ void outputs(uint32_t (&out)[MT][2], int n)
    {
        if (n >= HELD) {
            const uint4 x = load_shared(o_shared + (n - HELD) * 512);
            out[0][0] = x.x, out[0][1] = x.y, out[1][0] = x.z, out[1][1] = x.w;
            return;
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t &word = o[n < HELD ? n : 0][m][half];
                // The compiler would unpack it once for all key blocks and run out of registers.
                asm volatile("" : "+r"(word));
                out[m][half] = word;
            }
    }

    // norm[level][m][half]: this lane's part of the squared errors of its rows.
    __device__ __forceinline__ void errors(float (&norm)[LEVEL_COUNT][MT][2], const weights &p,
                                           uint32_t v, int lane)
    {
        const uint32_t groups = v + fragment_by_row<DP>(lane),
                       tail = v + t::GROUPS * DP * 2 + tail_fragment(lane);
        float gone[LEVEL_COUNT][MT][2]; // minus the weight that the tail does not cover
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            float w[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
            uint32_t ones[FT];
#pragma unroll
            for (int n = 0; n < FT; ++n) ones[n] = TWO_ONES<T>;
#pragma unroll
            for (int k = 0; k < KS; ++k) multiply_add<T>(w, p.p[k][m], ones[0], ones[0]);
            const column_block y = subtract(p, w, ones, m);
#pragma unroll
            for (int level = 0; level < LEVEL_COUNT; ++level)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    gone[level][m][half] = -y.e[level][2 * half];
                    norm[level][m][half] = 0.0f;
                }
        }
#pragma unroll
        for (int n4 = 0; n4 < DP / 8; n4 += 4) {
            uint32_t f[FT][4]; // 8 rows of four column blocks
#pragma unroll
            for (int n = 0; n < FT; ++n)
                load_matrices_transposed(f[n], (tail ^ n4 * 16) + n * 8 * DP * 2);
#pragma unroll
            for (int n2 = 0; n2 < 4; n2 += 2) {
                float a[2][MT][4];
#pragma unroll
                for (int k = 0; k < KS; ++k) {
                    uint32_t b[4]; // 16 rows of two column blocks
                    load_matrices_transposed(b, (groups ^ (n4 + n2) * 16) + k * 16 * DP * 2);
#pragma unroll
                    for (int n = 0; n < 2; ++n)
#pragma unroll
                        for (int m = 0; m < MT; ++m) {
                            if (k == 0) a[n][m][0] = a[n][m][1] = a[n][m][2] = a[n][m][3] = 0.0f;
                            multiply_add<T>(a[n][m], p.p[k][m], b[2 * n], b[2 * n + 1]);
                        }
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    uint32_t out[MT][2];
                    outputs(out, n4 + n2 + n);
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        uint32_t rows[FT];
#pragma unroll
                        for (int i = 0; i < FT; ++i) rows[i] = f[i][n2 + n];
                        const column_block y = subtract(p, a[n][m], rows, m);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float lo, hi;
                            unpack2<T>(lo, hi, out[m][half]);
#pragma unroll
                            for (int level = 0; level < LEVEL_COUNT; ++level) {
                                const float u = fmaf(gone[level][m][half], lo,
                                                     y.e[level][2 * half]),
                                            v_ = fmaf(gone[level][m][half], hi,
                                                      y.e[level][2 * half + 1]);
                                norm[level][m][half] = fmaf(u, u, norm[level][m][half]);
                                norm[level][m][half] = fmaf(v_, v_, norm[level][m][half]);
                            }
                        }
                    }
                }
            }
        }
    }

    // Mean over the rows of each query block. The four lanes of a quad exchange parts so that each
    // holds one row; then rows are added along a fixed tree.
    __device__ __forceinline__ void write(const float (&norm)[LEVEL_COUNT][MT][2],
                                          const error_job &x, int j, int lane)
    {
        static_assert(MT == 2, "a lane of a quad per 8 rows");
#pragma unroll
        for (int level = 0; level < LEVEL_COUNT; ++level) {
            float row[2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float keep = lane & 1 ? norm[level][m][1] : norm[level][m][0],
                            give = lane & 1 ? norm[level][m][0] : norm[level][m][1];
                row[m] = keep + __shfl_xor_sync(~0u, give, 1);
            }
            float e = lane & 2 ? row[1] : row[0];
            e += __shfl_xor_sync(~0u, lane & 2 ? row[0] : row[1], 2);
            e = share > 0.0f ? e * share : 0.0f; // an absent row may hold NaN
            if (x.per_q > 1) e += __shfl_xor_sync(~0u, e, 4);
            if (x.per_q > 2) e += __shfl_xor_sync(~0u, e, 8);
            if (x.per_q > 4) e += __shfl_xor_sync(~0u, e, 16);
            if (x.per_q > 8) e += __shfl_xor_sync(~0u, e, 1);
            if (x.per_q > 16) e += __shfl_xor_sync(~0u, e, 2);
            if (out) out[level * x.level_stride + j] = e;
        }
    }
};

template <class T, int DP, int KS, int FT, bool LEVELS>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    scores_kernel(const __grid_constant__ error_job x)
{
    using t = tile<DP, KS, FT>;
    extern __shared__ __align__(256) unsigned char raw[];
    float *const bias = (float *)(raw + t::BIAS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t base = smem_addr(raw);
    error_walk &w = *(error_walk *)(raw + t::WALK);
    warp_errors<T, DP, KS, FT, LEVELS> rows;
    rows.o_shared = base + t::OUTPUTS + warp * (O_SHARED * 512) + lane * 16;
    rows.find_columns(x, lane);
    if (threadIdx.x == 0) w.start();
    for (;;) {
        __syncthreads(); // the last part is done
        if (threadIdx.x == 0) w.next(x);
        __syncthreads();
        if (!w.more) return;
        const int64_t place = (int64_t)w.head * x.nk;
        const int last = w.len / x.block_k; // the first block that is not whole
        const int end = w.block1;
        int into = 0, from = 0;
        auto load = [&](int j) {
            if (j < end) load_tile<T, DP, KS, FT>(x, base + into * t::STAGE, place + j);
            if (++into == STAGES) into = 0;
            copy_commit();
        };
        for (int i = 0; i < STAGES - 1; i++) load(w.block0 + i);
        for (int c = threadIdx.x; c < 2 * t::COLUMNS; c += THREADS) {
            const int at = c % t::COLUMNS, column = at < t::GROUPS ? at : at - t::GROUPS + x.per_k;
            bias[c] = at < t::GROUPS && at >= x.per_k
                          ? -INFINITY
                          : error_bias(x, column, c < t::COLUMNS ? x.block_k : w.len % x.block_k);
        }
        rows.open(x, w, warp, lane);
        for (int j = w.block0; j < end; j++) {
            copy_wait<STAGES - 2>();
            __syncthreads();
            load(j + STAGES - 1);
            const uint32_t k = base + from * t::STAGE;
            if (++from == STAGES) from = 0;
            const float *const column_bias = bias + (j == last ? t::COLUMNS : 0);
            typename warp_errors<T, DP, KS, FT, LEVELS>::weights p;
            float tail[FT][MT][4], s[2 * KS][MT][4], norm[LEVELS ? 2 : 1][MT][2];
            rows.logits(s, tail, k, lane);
            rows.group_weights(p, s, x.scale, column_bias, lane);
            rows.tail_weights(p, tail, x.scale, column_bias, lane);
            rows.errors(norm, p, k + t::OPERAND, lane);
            rows.write(norm, x, j, lane);
        }
        copy_wait<0>();
    }
}

// Fills tiles and ranges. `slots` thread blocks run at once, and the slowest of them gets as little
// work as possible.
void cut(error_job &x, int64_t slots)
{
    x.tiles = (int32_t)ceil_div<int64_t>((int64_t)(x.Hq / x.Hkv) * x.rows, TILE);
    const int64_t all = (int64_t)x.B * x.Hkv * x.nk;
    int64_t least = INT64_MAX;
    for (int64_t ranges = 1; ranges <= all && (ranges - 1) * x.tiles < 8 * slots; ranges++) {
        // 4: loading queries and filling the ring.
        const int64_t waves = ceil_div<int64_t>(ranges * x.tiles, slots),
                      cost = waves * (ceil_div(all, ranges) + 4);
        if (cost >= least) continue;
        least = cost;
        x.ranges = (int32_t)ranges;
    }
}

template <class T, int DP, int KS, int FT, bool LEVELS>
esa_status launch(esa_cuda_device *dev, error_job x, cudaStream_t stream)
{
    const auto kernel = scores_kernel<T, DP, KS, FT, LEVELS>;
    constexpr int bytes = tile<DP, KS, FT>::BYTES;
    const int64_t slots = (int64_t)dev->multiprocessors * RESIDENT;
    cut(x, slots);
    const esa_status status = device_check(
        dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "preparing the error kernel");
    if (status) return status;
    const int blocks = (int)esa_min64(slots, (int64_t)x.tiles * x.ranges);
    kernel<<<blocks, THREADS, bytes, stream>>>(x);
    return launch_check(dev, "launching the error kernel");
}

template <class T, int DP, int KS>
esa_status launch_tail(esa_cuda_device *dev, const error_job &x, cudaStream_t stream)
{
    if (x.fine == 0) return launch<T, DP, KS, 1, false>(dev, x, stream);
    if (x.fine <= 4) return launch<T, DP, KS, 1, true>(dev, x, stream);
    return x.fine == 8 ? launch<T, DP, KS, 2, true>(dev, x, stream)
                       : launch<T, DP, KS, 3, true>(dev, x, stream);
}

template <class T>
esa_status launch_width(esa_cuda_device *dev, const error_job &x, cudaStream_t stream)
{
    const bool narrow = x.per_k <= 16;
    if (x.pitch == 64)
        return narrow ? launch_tail<T, 64, 1>(dev, x, stream)
                      : launch_tail<T, 64, 2>(dev, x, stream);
    return narrow ? launch_tail<T, 128, 1>(dev, x, stream) : launch_tail<T, 128, 2>(dev, x, stream);
}

} // namespace

bool error_scores_takes(const esa_cuda_device *dev, const error_job &x)
{
    if (x.dtype == ESA_DTYPE_F32 || (x.pitch != 64 && x.pitch != 128)) return false;
    // A query block is a power of two of rows within a warp.
    if (x.per_q > WARP_ROWS || (x.per_q & (x.per_q - 1)) || x.per_k > 32) return false;
    if ((int64_t)(x.Hq / x.Hkv) * x.rows > INT32_MAX - TILE) return false;
    return dev->shared_bytes >= tile<128, 2, 3>::BYTES;
}

esa_status error_scores_launch(esa_cuda_device *dev, error_job x, cudaStream_t stream)
{
    return x.dtype == ESA_DTYPE_BF16 ? launch_width<__nv_bfloat16>(dev, x, stream)
                                     : launch_width<__half>(dev, x, stream);
}
