// order_block.cu - all cuts of a small node by one thread block: its tokens are compared pair by
// pair once, and every part of it uses its part of the table.
// SPDX-License-Identifier: Apache-2.0
//
// K = X C X^T by mma.sync: a warp owns 16 tokens. Y = X C takes 32 rows of C at a time. K stays in
// registers until X and Y are read, and then takes their place.
//
// After that a token position has two threads, which share the columns of its row of K: even and
// odd ones. All parts of a level are cut at the same time. A thread keeps its columns in registers,
// minus the means of the part and divided by the trace, so a turn y <- K y needs only y and one
// barrier, and nothing overflows. Ranks are counted directly.
#include "cuda/selection/order.cuh"
#include "cuda/runtime/sm80_ptx.cuh"

namespace
{

enum { PANEL = 32 };

// Two threads per token.
template <int TOKENS> struct block_shared {
    static constexpr int PITCH = TOKENS +
                                 2; // of K: rows of 16 tokens and both parities hit all banks
    float pair[TOKENS * PITCH];
    float y[2][TOKENS], mean[TOKENS], diagonal[TOKENS];
    uint32_t key[TOKENS];
    uint32_t firsts[TOKENS / 16]; // bit 2i of word j: token 16j + i goes into the first half
    int32_t id[TOKENS];           // position -> place in token
};

template <int TOKENS> __host__ __device__ constexpr int tile_bytes(int pitch)
{
    const int tiles = (2 * TOKENS + PANEL) * (pitch + 8) * 2,
              table = (int)sizeof(block_shared<TOKENS>);
    return ((tiles > table ? tiles : table) + 15) / 16 * 16;
}
template <int TOKENS> constexpr int all_bytes(int pitch)
{
    return tile_bytes<TOKENS>(pitch) + TOKENS * 4;
}

// acc (16 x 8 COLUMNS) += rows of a times rows of b, both [..][stride] from column 0 to depth.
template <int COLUMNS>
DEV void multiply_rows(float (&acc)[COLUMNS][4], const bf16 *a, const bf16 *b, int stride,
                       int depth, int columns)
{
    const int lane = threadIdx.x % 32;
    const uint32_t a_at = smem_addr(a + lane % 16 * stride + lane / 16 * 8),
                   b_at = smem_addr(b + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
    for (int k = 0; k < depth; k += 16) {
        uint32_t x[4];
        load_matrices(x, a_at + 2 * k);
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            if (8 * c >= columns) break;
            uint32_t y[4];
            load_matrices(y, b_at + 2 * (k + 8 * c * stride));
            multiply_add<bf16>(acc[c], x, y[0], y[1]);
            multiply_add<bf16>(acc[c + 1], x, y[2], y[3]);
        }
    }
}

// K of the n tokens into shared memory. Ends with a barrier.
template <class T, int TOKENS>
DEV void compare(const order_job &x, const order_head<T> &head, int own, const int32_t *token,
                 int n, char *memory)
{
    const int stride = x.pitch + 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
              rows = (n + 15) / 16 * 16;
    bf16 *const X = (bf16 *)memory, *const Y = X + TOKENS * stride, *const C = Y + TOKENS * stride;
    const bf16 *const metric = x.metric + (int64_t)own * x.pitch * x.pitch;
    load_centred(X, head, token, n, rows, x.D, x.pitch);
    const int r = 16 * warp + lane / 4, c = lane % 4 * 2;
    for (int first = 0; first < x.pitch; first += PANEL) {
        const int wide = min((int)PANEL, x.pitch - first), pieces = x.pitch / 8;
        for (int i = threadIdx.x; i < wide * pieces; i += 2 * TOKENS)
            *(uint4 *)(C + i / pieces * stride + i % pieces * 8) = __ldg(
                (const uint4 *)(metric + (int64_t)(first + i / pieces) * x.pitch) + i % pieces);
        __syncthreads();
        if (16 * warp < rows) {
            float acc[PANEL / 8][4] = {};
            multiply_rows(acc, X + 16 * warp * stride, C, stride, x.pitch, wide);
#pragma unroll
            for (int j = 0; j < PANEL / 8; ++j) {
                if (8 * j >= wide) break;
                const int d = first + 8 * j + c;
                *(uint32_t *)(Y + r * stride + d) = pack2<bf16>(acc[j][0], acc[j][1]);
                *(uint32_t *)(Y + (r + 8) * stride + d) = pack2<bf16>(acc[j][2], acc[j][3]);
            }
        }
        __syncthreads(); // C has been read
    }
    float acc[TOKENS / 8][4] = {};
    if (16 * warp < rows) multiply_rows(acc, Y + 16 * warp * stride, X, stride, x.pitch, rows);
    __syncthreads(); // X and Y have been read
    auto &s = *(block_shared<TOKENS> *)memory;
    if (16 * warp < rows) {
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
            if (8 * j >= rows) break;
            float *const out = s.pair + r * s.PITCH + 8 * j + c;
            *(float2 *)out = make_float2(acc[j][0], acc[j][1]);
            *(float2 *)(out + 8 * s.PITCH) = make_float2(acc[j][2], acc[j][3]);
        }
    }
    __syncthreads();
}

DEV float both(float v) { return v + __shfl_xor_sync(~0u, v, 1); }

// Cuts every part of a level; HELD: half of the largest part. p: the position of this thread; the
// part of p is a .. a+m-1, cut at position cut (0: not cut). Ends with a barrier.
template <int HELD, class Shared> DEV void cut_level(Shared &s, int p, int a, int m, int cut)
{
    const int parity = threadIdx.x % 2;
    const bool works = cut != 0;
    const int id = works ? s.id[p] : 0;
    float k[HELD], sum = 0.0f, y = 0.0f;
    // Columns a + 2i + parity.
    const int n = works ? (m + 1 - parity) / 2 : 0, q0 = a + parity;
    const float *const row = s.pair + id * s.PITCH;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        k[i] = i < n ? row[s.id[q0 + 2 * i]] : 0.0f;
        sum += k[i];
    }
    const float mean = both(sum) / (float)m;
    if (works && parity == 0) {
        s.mean[p] = mean;
        s.diagonal[p] = row[id];
        s.y[0][p] = esa_order_weight(p - a);
    }
    __syncthreads();
    float all = 0.0f, trace = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        if (i < n) {
            const float other = s.mean[q0 + 2 * i];
            all += other;
            trace += s.diagonal[q0 + 2 * i];
            k[i] -= mean + other;
        }
    all = both(all);
    trace = both(trace) - all;
    all /= (float)m;
    const bool differs = trace > 0.0f;
    const float factor = differs ? 1.0f / trace : 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) k[i] = i < n && differs ? (k[i] + all) * factor : 0.0f;
    int now = 0;
    for (int turn = 0; turn <= ESA_ORDER_ROUNDS; ++turn, now ^= 1) {
        y = 0.0f;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (i < n) y = fmaf(k[i], s.y[now][q0 + 2 * i], y);
        y = both(y);
        if (works && parity == 0) s.y[now ^ 1][p] = y;
        __syncthreads();
    }
    // The largest magnitude, the first of equals.
    float far = -1.0f, value = 0.0f;
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
        const float v = s.y[now][q0 + 2 * i];
        if (fabsf(v) > far) far = fabsf(v), value = v;
    }
    {
        const float far2 = __shfl_xor_sync(~0u, far, 1), value2 = __shfl_xor_sync(~0u, value, 1);
        // Of equal magnitudes that differ in sign the one from the even columns counts.
        if (far2 > far || (far2 == far && parity == 1)) value = value2;
    }
    const uint32_t key = esa_rank_bits(value < 0.0f ? -y : y);
    if (works && parity == 0) s.key[p] = key;
    __syncthreads();
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
        const int q = q0 + 2 * i;
        const uint32_t other = s.key[q];
        rank += other < key || (other == key && q < p);
    }
    rank += __shfl_xor_sync(~0u, rank, 1);
    const bool goes = works && rank < cut - a;
    const uint32_t bits = __ballot_sync(~0u, goes && parity == 0);
    if (threadIdx.x % 32 == 0) s.firsts[threadIdx.x / 32] = bits;
    __syncthreads();
    if (works && parity == 0) {
        int before = 0; // tokens of the first half before p
        for (int w = a / 16; w <= p / 16; ++w) {
            uint32_t b = s.firsts[w];
            if (w == a / 16) b &= ~0u << 2 * (a % 16);
            if (w == p / 16) b &= (1u << 2 * (p % 16)) - 1;
            before += __popc(b);
        }
        s.id[goes ? a + before : cut + p - a - before] = id;
    }
    __syncthreads();
}

// Thread blocks of (head, small node).
template <class T, int TOKENS>
__global__ void __launch_bounds__(2 * TOKENS, TOKENS == 128 ? 2 : 4)
    block_kernel(const __grid_constant__ order_job x)
{
    extern __shared__ __align__(16) char memory[];
    const int own = blockIdx.x >> x.levels;
    const order_head<T> head(x, own);
    const uint4 node = head.s.nodes[(1 << x.levels) + (blockIdx.x & ((1 << x.levels) - 1))];
    const int n = (int)node.y, p = threadIdx.x / 2;
    if (!node.z || (n <= 64) != (TOKENS == 64)) return;
    int32_t *const token = (int32_t *)(memory + tile_bytes<TOKENS>(x.pitch)), *const perm =
                                                                                  head.s.perm +
                                                                                  head.at + node.x;
    if (p < n && threadIdx.x % 2 == 0) token[p] = perm[p];
    __syncthreads();
    compare<T, TOKENS>(x, head, own, token, n, memory);
    auto &s = *(block_shared<TOKENS> *)memory;
    if (threadIdx.x % 2 == 0) s.id[p] = p;
    int a = 0, m = p < n ? n : 0;
    __syncthreads();
    for (;;) {
        const esa_order_node part = { node.x + (uint32_t)a, (uint32_t)m };
        const uint32_t at = esa_order_cut(part, head.s.block);
        const int cut = at ? (int)(at - node.x) : 0;
        if (!__syncthreads_or(cut)) break;
        const int over64 = TOKENS > 64 && __syncthreads_or(m > 64);
        if constexpr (TOKENS > 64) {
            if (over64) cut_level<64>(s, p, a, m, cut);
        }
        if (!over64) {
            if (__syncthreads_or(m > 32))
                cut_level<32>(s, p, a, m, cut);
            else
                cut_level<16>(s, p, a, m, cut);
        }
        if (!cut) continue;
        if (p < cut)
            m = cut - a;
        else
            m -= cut - a, a = cut;
    }
    if (p < n && threadIdx.x % 2 == 0) perm[p] = token[s.id[p]];
}

template <class T, int TOKENS>
esa_status launch(esa_cuda_device *dev, const order_job &job, cudaStream_t stream)
{
    const int bytes = all_bytes<TOKENS>(job.pitch);
    const esa_status status = device_check(
        dev,
        cudaFuncSetAttribute(block_kernel<T, TOKENS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             bytes),
        "shared memory of the blocks of an order");
    if (status) return status;
    block_kernel<T, TOKENS>
        <<<(unsigned)job.heads << job.levels, 2 * TOKENS, (size_t)bytes, stream>>>(job);
    return launch_check(dev, "the blocks of an order");
}

// Two kernels: for nodes of up to 64 tokens and up to 128. Every node is cut by one of them.
template <class T>
esa_status launch_both(esa_cuda_device *dev, const order_job &job, cudaStream_t stream)
{
    esa_status status = launch<T, 64>(dev, job, stream);
    if (!status && (job.side[0].small > 64 || job.side[1].small > 64))
        status = launch<T, 128>(dev, job, stream);
    return status;
}

} // namespace

int order_block_bytes(int tokens, int pitch)
{
    return tokens > 64 ? all_bytes<128>(pitch) : all_bytes<64>(pitch);
}

esa_status order_block(esa_cuda_device *dev, const order_job &job, int32_t dtype,
                       cudaStream_t stream)
{
    if (dtype == ESA_DTYPE_F32) return launch_both<float>(dev, job, stream);
    return dtype == ESA_DTYPE_F16 ? launch_both<f16>(dev, job, stream)
                                  : launch_both<bf16>(dev, job, stream);
}
