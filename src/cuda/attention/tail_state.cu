// tail_state.cu - what the tail needs: the plan for means.cu, and the first states of
// the centroid tail.
// SPDX-License-Identifier: Apache-2.0
//
// state_kernel is centroid_state of src/cpu/attn_cpu.c: softmax of the mean query over the means
// that stand in, in f32:
//
//   s_j = scale log2(e) qm.km_j + log2 n_j
//   m = max s,   l = sum exp2(s_j - m),   o = sum exp2(s_j - m) vm_j
//
// A thread block takes ROWS query blocks of one head and walks all its means. A warp owns four
// of the rows from logits to o, so the softmax needs no other warp. A lane holds COLS columns of
// the logits, then PITCH / 32 columns of o. 4 x COLS products per shared-memory read keep it
// near the f32 rate. At 591 x 591 means and 12 heads that is 2.1 GFLOP, a few percent of what
// the mask saves.
#include "cuda/runtime/lanes.cuh"
#include "cuda/attention/means.cuh"
#include "cuda/attention/prepare.cuh"

#include <math.h>

namespace
{

enum { STATE_WARPS = 8, WARP_ROWS = 4, ROWS = STATE_WARPS * WARP_ROWS };

struct tail_plan {
    const int32_t *kv_len;
    const uint32_t *stands;
    int32_t Hq, group, nq, nk_pad, block_k, Nk;
    const void *k_mean, *v_mean;
    const float *q_mean;
    float *state_o, *state_m, *state_l;
    float factor; // scale * log2(e)
    int32_t dtype;
};

template <int PITCH> struct state_shape {
    // Columns of the logits per lane. A pitch of 256 must fit into 99 KB of shared memory.
    static constexpr int COLS = PITCH == 256 ? 1 : 2;
    static constexpr int KEYS = 32 * COLS;        // means per step
    static constexpr int OUT = PITCH / 32;        // columns of o per lane
    static constexpr int VEC = OUT < 4 ? OUT : 4; // adjacent columns among them
    // 16 bytes more, so that eight rows use eight different sets of banks.
    static constexpr int KV_PITCH = PITCH + 4;
    static constexpr int BYTES = (KEYS * KV_PITCH + ROWS * PITCH + ROWS * KEYS) * 4;
};

// Loads rows x PITCH elements into f32 rows of KV_PITCH. Returns whether this thread saw a value
// that is not finite.
template <class T, int PITCH> __device__ bool load_means(float *dst, const T *src)
{
    constexpr int VEC = packed<T>::N, PER_ROW = PITCH / VEC;
    bool odd = false;
#pragma unroll
    for (int e = threadIdx.x; e < state_shape<PITCH>::KEYS * PER_ROW; e += STATE_WARPS * 32) {
        float x[VEC];
        ((const packed<T> *)src)[e].unpack(x);
        float *row = dst + e / PER_ROW * state_shape<PITCH>::KV_PITCH + e % PER_ROW * VEC;
#pragma unroll
        for (int i = 0; i < VEC; i += 4) {
            *(float4 *)(row + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
            odd |= !isfinite(x[i]) || !isfinite(x[i + 1]) || !isfinite(x[i + 2]) ||
                   !isfinite(x[i + 3]);
        }
    }
    return odd;
}

template <int PITCH>
__device__ bool load_means(float *dst, const void *mean, int64_t first_row, int dtype)
{
    const int64_t at = first_row * PITCH;
    if (dtype == ESA_DTYPE_F32) return load_means<float, PITCH>(dst, (const float *)mean + at);
    if (dtype == ESA_DTYPE_F16) return load_means<__half, PITCH>(dst, (const __half *)mean + at);
    return load_means<__nv_bfloat16, PITCH>(dst, (const __nv_bfloat16 *)mean + at);
}

template <int PITCH> struct warp_state { // the four rows of a warp, as one lane holds them
    using S = state_shape<PITCH>;
    float o[WARP_ROWS][S::OUT] = {};
    float m[WARP_ROWS];
    float l[WARP_ROWS] = {};           // sum over this lane's columns
    uint32_t bits[WARP_ROWS][S::COLS]; // columns of this step that stand in

    // q [WARP_ROWS][PITCH], k [KEYS][KV_PITCH] -> scores in log2 units, then p [KEYS][WARP_ROWS],
    // m, l, and rescaled o.
    __device__ void weigh(float *p, const float *q, const float *k, const float (&bias)[S::COLS],
                          float factor, int lane)
    {
        float s[WARP_ROWS][S::COLS] = {};
#pragma unroll 4
        for (int d = 0; d < PITCH; d += 4) {
            float4 x[S::COLS];
#pragma unroll
            for (int c = 0; c < S::COLS; ++c)
                x[c] = *(const float4 *)(k + (lane + 32 * c) * S::KV_PITCH + d);
#pragma unroll
            for (int r = 0; r < WARP_ROWS; ++r) {
                const float4 y = *(const float4 *)(q + r * PITCH + d);
#pragma unroll
                for (int c = 0; c < S::COLS; ++c)
                    s[r][c] += x[c].x * y.x + x[c].y * y.y + x[c].z * y.z + x[c].w * y.w;
            }
        }
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) {
            float top = -INFINITY;
#pragma unroll
            for (int c = 0; c < S::COLS; ++c) {
                s[r][c] = bits[r][c] >> lane & 1 ? s[r][c] * factor + bias[c] : -INFINITY;
                top = fmaxf(top, s[r][c]);
            }
            top = fmaxf(m[r], lanes_max<32>(top));
            const float base = top == -INFINITY ? 0.0f : top, alpha = exp2f(m[r] - base);
            m[r] = top;
            l[r] *= alpha;
#pragma unroll
            for (int x = 0; x < S::OUT; ++x) o[r][x] *= alpha;
#pragma unroll
            for (int c = 0; c < S::COLS; ++c) {
                const float weight = exp2f(s[r][c] - base);
                l[r] += weight;
                p[(lane + 32 * c) * WARP_ROWS + r] = weight;
            }
        }
    }

    // o += p v. Columns that do not stand in have weight 0, but 0 times NaN is NaN, so tiles with
    // such values (odd) test every column.
    __device__ void add(const float *p, const float *v, bool odd, int lane)
    {
        if (!odd) {
#pragma unroll 4
            for (int c = 0; c < S::KEYS; ++c)
                add_key(*(const float4 *)(p + c * WARP_ROWS), v + c * S::KV_PITCH, lane, 0xf);
            return;
        }
        for (int c = 0; c < S::KEYS; ++c) {
            unsigned which = 0;
#pragma unroll
            for (int r = 0; r < WARP_ROWS; ++r)
                which |= ((c < 32 ? bits[r][0] : bits[r][S::COLS - 1]) >> c % 32 & 1) << r;
            add_key(*(const float4 *)(p + c * WARP_ROWS), v + c * S::KV_PITCH, lane, which);
        }
    }

    __device__ void add_key(float4 p, const float *v, int lane, unsigned which)
    {
        const float weight[WARP_ROWS] = { p.x, p.y, p.z, p.w };
#pragma unroll
        for (int x = 0; x < S::OUT; ++x) {
            const float value = v[x / S::VEC * 32 * S::VEC + lane * S::VEC + x % S::VEC];
#pragma unroll
            for (int r = 0; r < WARP_ROWS; ++r)
                if (which >> r & 1) o[r][x] += weight[r] * value;
        }
    }
};

template <int PITCH> __global__ void __launch_bounds__(STATE_WARPS * 32) state_kernel(tail_plan p)
{
    using S = state_shape<PITCH>;
    extern __shared__ float4 block_shared[];
    float *kv = (float *)block_shared, *q = kv + S::KEYS * S::KV_PITCH, *weights = q + ROWS * PITCH;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = ceil_div(p.nq, (int)ROWS),
              words = p.nk_pad / 32;
    // bh / group = b * Hkv + h / group
    const int64_t bh = blockIdx.x / tiles, b = bh / p.Hq, kv_row = bh / p.group * p.nk_pad;
    const int row0 = (int)(blockIdx.x % tiles) * ROWS, length = key_length(p.kv_len, b, p.Nk);
    for (int e = threadIdx.x; e < ROWS * PITCH; e += STATE_WARPS * 32)
        q[e] = row0 + e / PITCH < p.nq ? p.q_mean[(bh * p.nq + row0) * PITCH + e] : 0.0f;

    float *const my_q = q + warp * WARP_ROWS * PITCH, *const my_p = weights +
                                                                    warp * WARP_ROWS * S::KEYS;
    warp_state<PITCH> state;
#pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) state.m[r] = -INFINITY;
    for (int j0 = 0; j0 * p.block_k < length; j0 += S::KEYS) {
        uint32_t any = 0;
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r)
#pragma unroll
            for (int c = 0; c < S::COLS; ++c) {
                const int i = row0 + warp * WARP_ROWS + r;
                state.bits[r][c] = i < p.nq ? p.stands[(bh * p.nq + i) * words + j0 / 32 + c] : 0;
                any |= state.bits[r][c];
            }
        // This also waits until the values of the last step have been read.
        if (!__syncthreads_or(any != 0)) continue;
        load_means<PITCH>(kv, p.k_mean, kv_row + j0, p.dtype);
        __syncthreads();
        float bias[S::COLS];
#pragma unroll
        for (int c = 0; c < S::COLS; ++c)
            bias[c] = log2f(
                (float)max(1, min(p.block_k, length - (j0 + lane + 32 * c) * p.block_k)));
        state.weigh(my_p, my_q, kv, bias, p.factor, lane);
        __syncthreads();
        const bool odd = __syncthreads_or(load_means<PITCH>(kv, p.v_mean, kv_row + j0, p.dtype));
        state.add(my_p, kv, odd, lane);
    }

#pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) {
        const int64_t i = row0 + warp * WARP_ROWS + r;
        const float sum = lanes_sum<32>(state.l[r]);
        if (i >= p.nq) continue;
        const int64_t row = bh * p.nq + i;
#pragma unroll
        for (int x = 0; x < S::OUT; ++x)
            p.state_o[row * PITCH + x / S::VEC * 32 * S::VEC + lane * S::VEC + x % S::VEC] =
                state.o[r][x];
        if (lane == 0) {
            p.state_l[row] = sum;
            // If every logit is NaN, the NaN must reach the rows.
            p.state_m[row] = state.m[r] == -INFINITY && sum != 0.0f ? 0.0f : state.m[r];
        }
    }
}

tail_plan plan_of(const esa_attn_args *a, const prepared *p)
{
    tail_plan t = {};
    t.kv_len = a->kv_len, t.stands = p->stands;
    t.Hq = (int32_t)a->Hq, t.group = (int32_t)(a->Hq / a->Hkv), t.nq = (int32_t)a->nq,
    t.nk_pad = (int32_t)p->nk_pad;
    t.block_k = a->block_k, t.Nk = (int32_t)a->Nk;
    t.k_mean = p->k_mean, t.v_mean = p->v_mean, t.q_mean = p->q_mean;
    t.state_o = p->state_o, t.state_m = p->state_m, t.state_l = p->state_l;
    t.factor = (float)(a->scale * 1.4426950408889634);
    t.dtype = a->dtype;
    return t;
}

template <int PITCH>
esa_status launch_states(esa_cuda_device *dev, const tail_plan &t, int64_t heads,
                         cudaStream_t stream)
{
    constexpr int bytes = state_shape<PITCH>::BYTES;
    const cudaError_t result = cudaFuncSetAttribute(
        state_kernel<PITCH>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (result != cudaSuccess) return device_check(dev, result, "preparing the centroid tail");
    state_kernel<PITCH>
        <<<(unsigned)(heads * ceil_div(t.nq, (int)ROWS)), STATE_WARPS * 32, bytes, stream>>>(t);
    return launch_check(dev, "the centroid tail");
}

} // namespace

esa_status tail_means(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                      cudaStream_t stream)
{
    const int32_t D = (int32_t)a->D, nq = (int32_t)a->nq, nk = (int32_t)a->nk,
                  nk_pad = (int32_t)p->nk_pad;
    mean_plan plan = {};
    const auto add = [&](const void *src, void *dst, const int32_t *length, const int64_t *stride,
                         int64_t H, int64_t N, int32_t rows, int32_t blocks, int32_t padded,
                         int32_t dtype) {
        mean_part &part = plan.part[plan.parts++];
        part.src = src, part.dst = dst, part.length = length;
        for (int i = 0; i < 3; ++i) part.stride[i] = stride[i];
        part.H = (int32_t)H, part.N = (int32_t)N, part.rows = rows, part.blocks = blocks,
        part.padded = padded;
        part.dst_dtype = dtype, part.round = ESA_DTYPE_F32;
        return rows_in_pieces({ src, stride, { a->B, H, N } }, D, element_bytes(a->dtype), 16);
    };
    plan.D = D;
    plan.pitch = (int32_t)p->mean_pitch;
    bool wide = true;
    if (p->k_mean) { // in 8 bit quantise makes the means
        wide = add(a->k, p->k_mean, a->kv_len, a->k_stride, a->Hkv, a->Nk, a->block_k, nk, nk_pad,
                   a->dtype);
        wide = add(a->v, p->v_mean, a->kv_len, a->v_stride, a->Hkv, a->Nk, a->block_k, nk, nk_pad,
                   a->dtype) &&
               wide;
    }
    if (a->tail == ESA_TAIL_CENTROID)
        wide = add(a->q, p->q_mean, nullptr, a->q_stride, a->Hq, a->Nq, a->block_q, nq, nq,
                   ESA_DTYPE_F32) &&
               wide;
    if (p->k_mean && a->fine_count) {
        plan.part[0].fine = plan.part[1].fine = a->fine;
        plan.part[0].fine_dst = p->k_fine, plan.part[1].fine_dst = p->v_fine;
    }
    stands_part &s = plan.stands;
    s.fine_count = a->fine_count, s.fine_index = a->fine_index, s.fine_columns = p->fine_columns,
    s.fine = a->fine;
    s.count = a->count, s.kv_len = a->kv_len, s.index = a->index, s.stands = p->stands;
    s.mask_batch = a->mask_batch, s.cap = a->cap, s.rows = a->B * a->Hq * a->nq;
    s.Hq = (int32_t)a->Hq, s.nq = nq, s.nk_pad = nk_pad;
    s.block_q = a->block_q, s.block_k = a->block_k, s.Nk = (int32_t)a->Nk,
    s.shift = (int32_t)(a->Nk - a->Nq), s.causal = a->causal;
    return means_launch(dev, plan, a->dtype, a->B, wide, stream);
}

esa_status tail_states(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                       cudaStream_t stream)
{
    const tail_plan t = plan_of(a, p);
    const int64_t heads = a->B * a->Hq;
    if (p->mean_pitch == 64) return launch_states<64>(dev, t, heads, stream);
    if (p->mean_pitch == 128) return launch_states<128>(dev, t, heads, stream);
    return launch_states<256>(dev, t, heads, stream);
}
