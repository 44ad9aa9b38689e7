// biased.cu - attention with a bias for each key or for each distance: cross-attention over a
// folded prompt, text encoders, the wide head of a decoder.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block holds the queries of one head in shared memory, 16 for each warp, and streams keys
// and values, 64 at a time, through a ring of stages [64][W]. A head wider than W is cut into
// chunks: the scores are summed over the chunks of the keys, and blockIdx.z says which chunk of the
// values, and so of the output, is computed here. The order of the ring is
//
//   K0 K1 .. V   K0 K1 .. V   ...
//
// biased_few.cu does the same for at most 64 keys, such as those of a folded prompt.
//
// In shared memory the 16-byte piece p of row r is at place p ^ (r % 8), so that eight rows of one
// piece (ldmatrix) and eight pieces of one row (copies) use different banks.
#include "cuda/engine/biased.cuh"

namespace
{

constexpr int KEYS = 64; // keys of a stage

// W: columns of a chunk, WARPS: of a thread block, STAGES: of the ring.
template <int W, int WARPS_, int STAGES_> struct layout {
    static constexpr int WARPS = WARPS_, STAGES = STAGES_, THREADS = 32 * WARPS,
                         QUERIES = 16 * WARPS, PIECES = W / 8, ROW = W * 2, STAGE = KEYS * ROW,
                         CHUNK = QUERIES * ROW; // of the queries
    static int bytes(int chunks) { return chunks * CHUNK + STAGES * STAGE; }
    DEV uint32_t place(int piece, int row) { return row * ROW + (piece ^ row % 8) * 16; }

    // Copies ROWS rows of a chunk. Rows from `rows` on and columns from `cols` on become 0.
    template <int ROWS>
    DEV void load(uint32_t dst, const bf16 *src, int64_t ld, int rows, int cols, bool vectors)
    {
        constexpr int PASS = THREADS / PIECES;
        const int piece = threadIdx.x % PIECES;
#pragma unroll 4
        for (int row = threadIdx.x / PIECES; row < ROWS; row += PASS) {
            const bf16 *from = src + row * ld + piece * 8;
            const int count = row < rows ? cols - piece * 8 : 0;
            if (vectors) {
                copy_16(dst + place(piece, row), from, count > 0);
                continue;
            }
            uint32_t x[4] = { 0, 0, 0, 0 };
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (e < count) x[e / 2] |= (uint32_t)((const uint16_t *)from)[e] << e % 2 * 16;
            store_shared(dst + place(piece, row), make_uint4(x[0], x[1], x[2], x[3]));
        }
    }
};

// 16 queries of a warp. A lane holds rows lane / 4 and lane / 4 + 8; a quad shares a row.
template <class L, int W> struct warp_state {
    float o[W / 8][4], s[8][4];
    float top[2] = { -INFINITY, -INFINITY }; // maxima of the scores, log2 units
    float sum[2] = { 0.0f, 0.0f };           // this lane's part

    __device__ __forceinline__ void clear_scores()
    {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
    }

    // s += Q K^T over one chunk, for the first `keys` keys; in groups of 16.
    __device__ __forceinline__ void add_scores(uint32_t q, uint32_t k, int keys, int lane)
    {
        q += lane % 16 * L::ROW + (lane / 16 ^ lane % 8) * 16;
        k += (lane / 16 * 8 + lane % 8) * L::ROW + (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
        for (int step = 0; step < W / 16; ++step) {
            uint32_t a[4], b[4];
            load_matrices(a, q ^ step * 32);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                if (n * 8 >= keys) continue;
                load_matrices(b, (k ^ step * 32) + n * 8 * L::ROW);
                multiply_add<bf16>(s[n], a, b[0], b[1]);
                multiply_add<bf16>(s[n + 1], a, b[2], b[3]);
            }
        }
    }

    // Scales the scores to log2 units and adds the biases. Keys that do not exist get -inf.
    // row: the first of this lane. Rows past the last read the bias of the last.
    __device__ __forceinline__ void add_biases(const biased_job &job, int head, int row, int first,
                                               int lane)
    {
        const float *line[2] = { nullptr, nullptr };
        if (job.distance)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                line[r] = job.distance + head * job.distance_ld + job.center -
                          min(row + 8 * r, job.Nq - 1);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int k = first + n * 8 + lane % 4 * 2 + c;
                const bool exists = k < job.Nk;
                const float bias = exists && job.key ? __ldg(job.key + k) * LOG2_E : 0.0f;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float x = fmaf(s[n][2 * r + c], job.scale, bias);
                    if (exists && job.distance) x = fmaf(__ldg(line[r] + k), LOG2_E, x);
                    s[n][2 * r + c] = exists ? x : -INFINITY;
                }
            }
    }

    // Nothing seen yet: subtract 0, because -inf - -inf would be NaN and exp2(-inf - 0) is 0.
    DEV float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

    // Updates the maxima, and what was computed with the old ones.
    __device__ __forceinline__ void follow()
    {
        float now[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            now[r] = top[r];
#pragma unroll
            for (int n = 0; n < 8; ++n) now[r] = fmaxf(now[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
            now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
        }
        // If no row of the warp grew, the factors are exactly 1.
        if (!__any_sync(~0u, now[0] > top[0] || now[1] > top[1])) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float factor = exp2_approx(top[r] - finite(now[r]));
            top[r] = now[r];
            sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < W / 8; ++n) o[n][2 * r] *= factor, o[n][2 * r + 1] *= factor;
        }
    }

    // O += exp2(S - top) V for the first `keys` keys.
    __device__ __forceinline__ void add_values(uint32_t v, int keys, int lane)
    {
        v += lane % 16 * L::ROW + (lane / 16 ^ lane % 8) * 16;
        const float shift[2] = { finite(top[0]), finite(top[1]) };
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            if (g * 16 >= keys) continue;
            uint32_t p[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *from = &s[2 * g + i / 2][i % 2 * 2];
                const float x = exp2_approx(from[0] - shift[i % 2]),
                            y = exp2_approx(from[1] - shift[i % 2]);
                sum[i % 2] += x + y;
                p[i] = pack2<bf16>(x, y);
            }
#pragma unroll
            for (int n = 0; n < W / 8; n += 2) {
                load_matrices_transposed(b, (v ^ n * 16) + g * 16 * L::ROW);
                multiply_add<bf16>(o[n], p, b[0], b[1]);
                multiply_add<bf16>(o[n + 1], p, b[2], b[3]);
            }
        }
    }

    // Writes O / sum to the 16 rows of shared memory at `rows`. A sum of 0 is a query without keys.
    __device__ __forceinline__ void finish(uint32_t rows, int lane)
    {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float all = sum[r];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            const float inverse = all == 0.0f ? 0.0f : 1.0f / all; // NaN stays NaN
            const int row = r * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < W / 8; ++n)
                store_shared(rows + L::place(n, row) + lane % 4 * 4,
                             pack2<bf16>(o[n][2 * r] * inverse, o[n][2 * r + 1] * inverse));
        }
    }
};

// The ring: what the thread block reads, in its order. The copies of an entry are one group.
template <class L, int W> struct ring {
    const biased_job &job;
    uint32_t base;
    int64_t head; // first column of the head of k and v
    int chunk;    // of the values
    int entries, next = 0;

    __device__ __forceinline__ uint32_t stage(int entry) const
    {
        return base + entry % L::STAGES * L::STAGE;
    }
    __device__ __forceinline__ void issue()
    {
        if (next < entries) {
            const int tile = next / (job.chunks + 1), part = next % (job.chunks + 1);
            const bool values = part == job.chunks;
            const int column = (values ? chunk : part) * W;
            const int64_t first = (int64_t)tile * KEYS, ld = values ? job.ldv : job.ldk;
            L::template load<KEYS>(stage(next),
                                   (values ? job.v : job.k) + first * ld + head + column, ld,
                                   job.Nk - (int)first, job.D - column, job.vectors);
        }
        copy_commit();
        ++next;
    }
    // Waits for an entry and asks for the one that takes the place of the entry before it.
    __device__ __forceinline__ uint32_t take(int entry)
    {
        copy_wait<L::STAGES - 2>();
        __syncthreads();
        issue();
        return stage(entry);
    }
};

template <class L, int W>
__global__ void __launch_bounds__(L::THREADS, L::WARPS == 8 ? 2 : 1)
    biased_kernel(const __grid_constant__ biased_job job)
{
    extern __shared__ __align__(1024) unsigned char raw[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = blockIdx.y;
    const int64_t first = (int64_t)blockIdx.x * L::QUERIES, head = (int64_t)h * job.D;
    const int rows = (int)min((int64_t)L::QUERIES, job.Nq - first);
    const uint32_t queries = smem_addr(raw), mine = queries + warp * 16 * L::ROW;
    ring<L, W> r = { job, queries + job.chunks * L::CHUNK, (int64_t)(h / job.share) * job.D,
                     (int)blockIdx.z, (job.Nk + KEYS - 1) / KEYS * (job.chunks + 1) };
    for (int c = 0; c < job.chunks; ++c)
        L::template load<L::QUERIES>(queries + c * L::CHUNK, job.q + first * job.ldq + head + c * W,
                                     job.ldq, rows, job.D - c * W, job.vectors);
    for (int i = 0; i < L::STAGES - 1; ++i) r.issue();

    warp_state<L, W> state;
#pragma unroll
    for (int n = 0; n < W / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) state.o[n][e] = 0.0f;
    int entry = 0;
    for (int k = 0; k < job.Nk; k += KEYS) {
        state.clear_scores();
        for (int c = 0; c < job.chunks; ++c) {
            const uint32_t keys = r.take(entry++);
            state.add_scores(mine + c * L::CHUNK, keys, job.Nk - k, lane);
        }
        state.add_biases(job, h, (int)first + warp * 16 + lane / 4, k, lane);
        state.follow();
        const uint32_t values = r.take(entry++);
        state.add_values(values, job.Nk - k, lane);
    }
    copy_wait<0>();  // nothing was read if there are no keys
    __syncthreads(); // and the queries of this warp came through all threads
    state.finish(mine, lane);
    __syncwarp();
    const int piece = lane % L::PIECES, column = (int)blockIdx.z * W + piece * 8;
    for (int row = lane / L::PIECES; row < 16 && warp * 16 + row < rows; row += 32 / L::PIECES) {
        bf16 *const to = job.o + (first + warp * 16 + row) * job.ldo + head + column;
        const uint4 x = load_shared(mine + L::place(piece, row));
        if (job.vectors && column < job.D) {
            *(uint4 *)to = x;
            continue;
        }
        const uint32_t word[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (column + e < job.D) ((uint16_t *)to)[e] = (uint16_t)(word[e / 2] >> e % 2 * 16);
    }
}

template <int W, int WARPS, int STAGES>
esa_status launch(esa_cuda_device *dev, const biased_job &job, int64_t heads, cudaStream_t stream)
{
    using L = layout<W, WARPS, STAGES>;
    const int bytes = L::bytes(job.chunks);
    const esa_status status = device_check(
        dev,
        cudaFuncSetAttribute(biased_kernel<L, W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             bytes),
        "preparing attention with biases");
    if (status) return status;
    const dim3 grid((unsigned)ceil_div(job.Nq, L::QUERIES), (unsigned)heads, (unsigned)job.chunks);
    biased_kernel<L, W><<<grid, L::THREADS, bytes, stream>>>(job);
    return launch_check(dev, "attention with biases");
}

bool in_pieces(const esa_view &v)
{
    return (uintptr_t)v.data % 16 == 0 && (v.rows < 2 || v.ld % 8 == 0);
}

} // namespace

esa_status biased_run(esa_cuda_device *dev, const esa_biased_args *a, void *stream)
{
    const current_device scope(dev->ordinal);
    const int64_t Nq = a->q.rows, Nk = a->k.rows;
    if (Nq < 1 || a->heads < 1 || a->D < 1) return ESA_OK;
    if (a->D > ESA_BIASED_MAX_D || Nq > 1 << 30 || Nk > 1 << 30 || a->heads > 65535)
        return device_fail(
            dev, ESA_ERR_UNSUPPORTED,
            "attention with biases of %lld queries, %lld keys, %lld heads of dimension %lld: the "
            "GPU takes dimensions up to %d",
            (long long)Nq, (long long)Nk, (long long)a->heads, (long long)a->D,
            (int)ESA_BIASED_MAX_D);
    const bool narrow = a->D <= 64;
    biased_job job = { (const bf16 *)a->q.data,
                       (const bf16 *)a->k.data,
                       (const bf16 *)a->v.data,
                       (bf16 *)a->o.data,
                       a->q.ld,
                       a->k.ld,
                       a->v.ld,
                       a->o.ld,
                       (int)Nq,
                       (int)Nk,
                       (int)a->D,
                       narrow ? 1 : (int)ceil_div(a->D, (int64_t)128),
                       a->kv_heads ? (int)(a->heads / a->kv_heads) : 1,
                       a->D % 8 == 0 && in_pieces(a->q) && in_pieces(a->k) && in_pieces(a->v) &&
                           in_pieces(a->o),
                       a->scale * LOG2_E,
                       a->key,
                       a->distance,
                       a->distance_ld,
                       a->center,
                       nullptr,
                       nullptr };
    if (biased_few_takes(job)) {
        if (a->q_weight) {
            const esa_status status = biased_factors(dev, a->q, a->eps, a->room,
                                                     (cudaStream_t)stream);
            if (status) return status;
            job.factor = a->room;
            job.weight = a->q_weight;
        }
        return biased_few_run(dev, job, a->heads, (cudaStream_t)stream);
    }
    if (a->q_weight) {
        esa_qk_args norm = {};
        norm.q = a->q, norm.q_weight = a->q_weight, norm.D = a->D, norm.eps = a->eps;
        const esa_status status = qk_run(dev, &norm, stream);
        if (status) return status;
    }
    if (narrow) return launch<64, 8, 4>(dev, job, a->heads, (cudaStream_t)stream);
    if (layout<128, 8, 4>::bytes(job.chunks) <= dev->shared_bytes)
        return launch<128, 8, 4>(dev, job, a->heads, (cudaStream_t)stream);
    if (layout<128, 4, 3>::bytes(job.chunks) > dev->shared_bytes)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "attention with biases and heads of dimension %lld needs %d KiB of "
                           "shared memory, this GPU has %d KiB",
                           (long long)a->D, layout<128, 4, 3>::bytes(job.chunks) / 1024,
                           (int)(dev->shared_bytes / 1024));
    return launch<128, 4, 3>(dev, job, a->heads, (cudaStream_t)stream);
}
