// biased_few.cu - attention to at most 64 keys: cross-attention over a folded prompt.
// SPDX-License-Identifier: Apache-2.0
//
// With so few keys the time is that of reading q and writing o. So keys and values of one head stay
// in shared memory while each warp goes through rows of q, 16 at a time. Queries come from memory
// straight into the registers that mma.sync reads, and outputs leave in the same way. A warp asks
// for its next queries as soon as it has the scores of the last.
//
// Queries may have a norm. Its weights are multiplied into the keys, and its factor for each row
// (biased_norm.cu) into the scores.
//
// A fragment of mma.sync has two neighbouring channels in a lane, which would mean accesses of 4
// bytes. But the order of channels in a dot product is free, and so is the order of the columns of
// an output. So lane t of four takes the pieces t, t + 4, ... of 8 channels. What a lane calls
// channels 2t, 2t + 1, 2t + 8 and 2t + 9 of step h are the channels 4h .. 4h + 3 of its piece, in
// q and in k alike. The columns of the values are stored in the order that gives a lane whole
// pieces of the output.
#include "cuda/engine/biased.cuh"

namespace
{

enum { WARPS = 8, THREADS = 32 * WARPS, UNIT = 16 * WARPS, MAX_KEYS = 64 };

// D: channels of a head, GROUPS: of 16 keys.
template <int D, int GROUPS> struct few {
    static constexpr int KEYS = 16 * GROUPS, PIECES = D / 8, EACH = PIECES / 4;
    // Bytes from row to row. Four pieces more put two rows of four pieces (a load of 8 lanes) into
    // different banks, one piece more puts eight rows of one piece (ldmatrix) there.
    static constexpr int K_ROW = 16 * (PIECES + 4), V_ROW = 16 * (PIECES + 1);

    struct memory {
        alignas(16) unsigned char k[KEYS * K_ROW];
        alignas(16) unsigned char v[KEYS * V_ROW];
        float bias[KEYS]; // log2 units
    };

    // 8 channels of a key times the weights of the queries' norm: the product is the same.
    DEV uint4 weighted(uint4 k, const float *weight)
    {
        float x[8];
        packed<bf16>{ k }.unpack(x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= __ldg(weight + i);
        return make_uint4(pack2<bf16>(x[0], x[1]), pack2<bf16>(x[2], x[3]), pack2<bf16>(x[4], x[5]),
                          pack2<bf16>(x[6], x[7]));
    }

    // Keys that do not exist become 0.
    DEV void load_head(memory &m, const biased_job &job, int h)
    {
        const int64_t first = (int64_t)(h / job.share) * D;
        for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES;
            uint4 k = make_uint4(0, 0, 0, 0), v = k;
            if (row < job.Nk) {
                k = *(const uint4 *)(job.k + row * job.ldk + first + piece * 8);
                if (job.weight) k = weighted(k, job.weight + (int64_t)h * D + piece * 8);
                v = *(const uint4 *)(job.v + row * job.ldv + first + piece * 8);
            }
            *(uint4 *)(m.k + row * K_ROW + piece * 16) = k;
            // Word w of piece 4g + t goes to word t of piece 4g + w.
            uint32_t *const to = (uint32_t *)(m.v + row * V_ROW + piece / 4 * 64) + piece % 4;
            to[0] = v.x, to[4] = v.y, to[8] = v.z, to[12] = v.w;
        }
    }

    uint4 q[2][EACH]; // rows lane / 4 and lane / 4 + 8
    float scale[2];   // of their scores, in log2 units

    __device__ __forceinline__ void load(const biased_job &job, int64_t head, int row, int lane)
    {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool exists = row + 8 * r < job.Nq;
#pragma unroll
            for (int j = 0; j < EACH; ++j)
                q[r][j] = exists ? __ldcs((const uint4 *)(job.q + (row + 8 * r) * job.ldq + head +
                                                          (4 * j + lane % 4) * 8))
                                 : make_uint4(0, 0, 0, 0);
            scale[r] = exists && job.factor ? __ldg(job.factor + row + 8 * r) * job.scale
                                            : job.scale;
        }
    }

    // s = q k^T in log2 units, without biases
    __device__ __forceinline__ void scores(float (&s)[2 * GROUPS][4], const memory &m, int lane)
    {
        const uint32_t k = smem_addr(m.k) + lane / 4 * K_ROW + lane % 4 * 16;
#pragma unroll
        for (int n = 0; n < 2 * GROUPS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const uint32_t low[4] = { q[0][j].x, q[1][j].x, q[0][j].y, q[1][j].y },
                           high[4] = { q[0][j].z, q[1][j].z, q[0][j].w, q[1][j].w };
#pragma unroll
            for (int n = 0; n < 2 * GROUPS; ++n) {
                const uint4 b = load_shared(k + n * 8 * K_ROW + j * 64);
                multiply_add<bf16>(s[n], low, b.x, b.y);
                multiply_add<bf16>(s[n], high, b.z, b.w);
            }
        }
#pragma unroll
        for (int n = 0; n < 2 * GROUPS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] *= scale[e / 2];
    }

    // Turns scores into weights as mma.sync reads them; sum: of this lane's part of its two rows.
    DEV void weigh(uint32_t (&p)[GROUPS][4], float (&sum)[2], float (&s)[2 * GROUPS][4],
                   const biased_job &job, const memory &m, int lane)
    {
        float top[2] = { -INFINITY, -INFINITY };
#pragma unroll
        for (int n = 0; n < 2 * GROUPS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int key = n * 8 + lane % 4 * 2 + e % 2;
                s[n][e] = key < job.Nk ? s[n][e] + m.bias[key] : -INFINITY;
                top[e / 2] = fmaxf(top[e / 2], s[n][e]);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
            // Without keys: subtract 0, because -inf - -inf would be NaN.
            if (top[r] == -INFINITY) top[r] = 0.0f;
            sum[r] = 0.0f;
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *from = &s[2 * g + i / 2][i % 2 * 2];
                const float x = exp2_approx(from[0] - top[i % 2]),
                            y = exp2_approx(from[1] - top[i % 2]);
                sum[i % 2] += x + y;
                p[g][i] = pack2<bf16>(x, y);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        }
    }

    // Writes p v / sum, 32 columns at a time. A sum of 0 is a query without keys; NaN stays NaN.
    DEV void write(const biased_job &job, const uint32_t (&p)[GROUPS][4], const float (&sum)[2],
                   const memory &m, int64_t head, int row, int lane)
    {
        const uint32_t v = smem_addr(m.v) + lane % 16 * V_ROW + lane / 16 * 16;
        const float inverse[2] = { sum[0] == 0.0f ? 0.0f : 1.0f / sum[0],
                                   sum[1] == 0.0f ? 0.0f : 1.0f / sum[1] };
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            float o[4][4] = {};
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int w = 0; w < 4; w += 2) {
                    uint32_t b[4];
                    load_matrices_transposed(b, v + g * 16 * V_ROW + (4 * j + w) * 16);
                    multiply_add<bf16>(o[w], p[g], b[0], b[1]);
                    multiply_add<bf16>(o[w + 1], p[g], b[2], b[3]);
                }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (row + 8 * r >= job.Nq) continue;
                uint32_t x[4];
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    x[w] = pack2<bf16>(o[w][2 * r] * inverse[r], o[w][2 * r + 1] * inverse[r]);
                __stcs((uint4 *)(job.o + (row + 8 * r) * job.ldo + head + (4 * j + lane % 4) * 8),
                       make_uint4(x[0], x[1], x[2], x[3]));
            }
        }
    }
};

// A unit is UNIT rows of one head, 16 for each warp. Every thread block has the same number of
// units, one more at most, and they follow one another.
template <int D, int GROUPS>
__global__ void __launch_bounds__(THREADS, GROUPS > 2 ? 2 : 3)
    few_kernel(const __grid_constant__ biased_job job, int64_t units)
{
    using F = few<D, GROUPS>;
    __shared__ typename F::memory m;
    const int lane = threadIdx.x % 32, mine = threadIdx.x / 32 * 16 + lane / 4;
    const int each = (job.Nq + UNIT - 1) / UNIT; // units of a head
    int64_t unit = units * blockIdx.x / gridDim.x;
    const int64_t last = units * (blockIdx.x + 1) / gridDim.x;
    for (int i = threadIdx.x; i < job.Nk; i += THREADS)
        m.bias[i] = job.key ? __ldg(job.key + i) * LOG2_E : 0.0f;
    while (unit < last) {
        const int h = (int)(unit / each);
        const int64_t head = (int64_t)h * D;
        int tile = (int)(unit % each);
        const int end = (int)min((int64_t)each, tile + last - unit);
        unit += end - tile;
        F f;
        f.load(job, head, tile * UNIT + mine, lane);
        __syncthreads(); // the last head has been read
        F::load_head(m, job, h);
        __syncthreads();
        for (; tile < end; ++tile) {
            float s[2 * GROUPS][4], sum[2];
            uint32_t p[GROUPS][4];
            f.scores(s, m, lane);
            if (tile + 1 < end) f.load(job, head, (tile + 1) * UNIT + mine, lane);
            F::weigh(p, sum, s, job, m, lane);
            F::write(job, p, sum, m, head, tile * UNIT + mine, lane);
        }
    }
}

template <int D, int GROUPS>
esa_status launch(esa_cuda_device *dev, const biased_job &job, int64_t heads, cudaStream_t stream)
{
    const int64_t units = heads * ceil_div(job.Nq, (int)UNIT),
                  places = (int64_t)dev->multiprocessors * (GROUPS > 2 ? 2 : 3);
    few_kernel<D, GROUPS>
        <<<(unsigned)(units < places ? units : places), THREADS, 0, stream>>>(job, units);
    return launch_check(dev, "attention to few keys");
}

template <int D>
esa_status choose(esa_cuda_device *dev, const biased_job &job, int64_t heads, cudaStream_t stream)
{
    if (job.Nk <= 16) return launch<D, 1>(dev, job, heads, stream);
    if (job.Nk <= 32) return launch<D, 2>(dev, job, heads, stream);
    if (job.Nk <= 48) return launch<D, 3>(dev, job, heads, stream);
    return launch<D, 4>(dev, job, heads, stream);
}

} // namespace

bool biased_few_takes(const biased_job &job)
{
    return job.vectors && !job.distance && job.Nk >= 1 && job.Nk <= MAX_KEYS &&
           (job.D == 64 || job.D == 128);
}

esa_status biased_few_run(esa_cuda_device *dev, const biased_job &job, int64_t heads,
                          cudaStream_t stream)
{
    return job.D == 64 ? choose<64>(dev, job, heads, stream) : choose<128>(dev, job, heads, stream);
}
