// sm90.cu - the Hopper attention kernel as attention.cu sees it: which jobs it takes, tensor maps, the launch.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90_attn.cuh"

#include <math.h>

namespace {

using namespace sm90;

constexpr int64_t MOST_TOKENS = 1 << 30;            // row and key numbers are int32, with room for a tile beyond the end
constexpr int64_t STRIDE_BYTES = (int64_t)1 << 40;  // a tensor map's strides are below this
constexpr double LOG2_E = 1.4426950408889634;

struct view { const void *data; const int64_t *stride; int64_t dim[3]; };   // B, H, N

// An axis of length 1 is never stepped along: its stride may be anything.
bool strides_in_16_bytes(const view &x) {
    for (int i = 0; i < 3; ++i)
        if (x.dim[i] > 1 && x.stride[i] % 8) return false;
    return (uintptr_t)x.data % 16 == 0;
}

bool fits_map(const view &x) {
    for (int i = 0; i < 3; ++i)
        if (x.dim[i] > 1 && (x.stride[i] <= 0 || x.stride[i] >= STRIDE_BYTES / 2)) return false;
    return strides_in_16_bytes(x);
}

// x [B][H][N][D] seen as (64, N, D/64, H, B), so that one copy of (64, rows, chunks) lands as [chunk][row][64], the layout wgmma
// reads under the 128-byte swizzle. Rows past N read as zero.
bool make_map(CUtensorMap *map, const esa_cuda_device *dev, const esa_attn_args *a, const view &x, int rows, int chunks) {
    auto bytes = [&](int axis) { return x.dim[axis] > 1 ? (cuuint64_t)x.stride[axis] * 2 : (cuuint64_t)16; };
    const cuuint64_t dims[5] = { 64, (cuuint64_t)x.dim[2], (cuuint64_t)a->D / 64, (cuuint64_t)x.dim[1], (cuuint64_t)x.dim[0] };
    const cuuint64_t strides[4] = { bytes(2), 128, bytes(1), bytes(0) };
    const cuuint32_t box[5] = { 64, (cuuint32_t)rows, (cuuint32_t)chunks, 1, 1 };
    const cuuint32_t ones[5] = { 1, 1, 1, 1, 1 };
    const CUtensorMapDataType type = a->dtype == ESA_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return dev->encode_tiled(map, type, 5, (void *)x.data, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool make_maps(attn_launch *l, const esa_cuda_device *dev, const attention_job *job) {
    const esa_attn_args *a = &job->a;
    const int chunks = (int)a->D / 64, key_chunks = l->args.Bk == STAGE_KEYS ? chunks : 1;
    if (!make_map(&l->q, dev, a, { a->q, a->q_stride, { a->B, a->Hq, a->Nq } }, TILE_Q, chunks) ||
        !make_map(&l->k, dev, a, { a->k, a->k_stride, { a->B, a->Hkv, a->Nk } }, l->args.Bk, key_chunks) ||
        !make_map(&l->v, dev, a, { a->v, a->v_stride, { a->B, a->Hkv, a->Nk } }, l->args.Bk, key_chunks))
        return false;
    if (!l->args.stands) return true;
    const int64_t stride[3] = { a->Hkv * job->nk_pad * job->mean_pitch, job->nk_pad * job->mean_pitch, job->mean_pitch };
    return make_map(&l->k_mean, dev, a, { job->k_mean, stride, { a->B, a->Hkv, job->nk_pad } }, STAGE_KEYS, chunks) &&
           make_map(&l->v_mean, dev, a, { job->v_mean, stride, { a->B, a->Hkv, job->nk_pad } }, STAGE_KEYS, chunks);
}

// Without a mask there are no blocks: rows are cut as suits the kernel.
int64_t query_blocks(const esa_attn_args *a) { return a->count ? a->nq : ceil_div(a->Nq, (int64_t)TILE_Q); }
int64_t tiles_per_block(const esa_attn_args *a) { return a->count ? a->block_q / TILE_Q : 1; }

kernel_args kernel_args_of(const attention_job *job) {
    const esa_attn_args *a = &job->a;
    const bool tail = a->count && a->tail != ESA_TAIL_NONE;
    kernel_args k = {};
    k.count = a->count, k.index = a->index, k.kv_len = a->kv_len, k.scatter = job->scatter, k.next = job->next;
    k.order = a->count ? job->order : nullptr;
    k.o = a->o, k.lse = a->lse;
    for (int i = 0; i < 3; ++i) k.o_stride[i] = a->o_stride[i], k.lse_stride[i] = a->lse_stride[i];
    k.o_vectors = strides_in_16_bytes({ a->o, a->o_stride, { a->B, a->Hq, a->Nq } });
    k.Hq = (int32_t)a->Hq, k.group = (int32_t)(a->Hq / a->Hkv);
    k.Nq = (int32_t)a->Nq, k.Nk = (int32_t)a->Nk;
    k.Bk = a->count ? a->block_k : STAGE_KEYS;
    k.Bk_log2 = k.Bk == 64 ? 6 : 7;
    k.nq = (int32_t)query_blocks(a), k.nk = (int32_t)ceil_div(a->Nk, (int64_t)k.Bk);
    k.split = (int32_t)tiles_per_block(a);
    k.tiles = (int32_t)(a->B * a->Hq) * k.nq * k.split;
    k.cap = (int32_t)a->cap, k.mask_batch = (int32_t)a->mask_batch;
    k.scale = (float)a->scale;
    k.floor = -1e38f / fmaxf(1.0f, (float)(a->scale * LOG2_E));
    k.causal = a->causal, k.shift = (int32_t)(a->Nk - a->Nq);
    k.from_log2 = (float)(1.0 / (a->scale * LOG2_E));
    if (tail && a->tail == ESA_TAIL_POOLED) k.stands = job->stands, k.mean_stages = (int32_t)(job->nk_pad / STAGE_KEYS);
    if (tail && a->tail == ESA_TAIL_CENTROID) k.state_o = job->state_o, k.state_m = job->state_m, k.state_l = job->state_l;
    return k;
}

} // namespace

bool sm90_takes(const esa_cuda_device *dev, const esa_attn_args *a) {
    if (dev->level < LEVEL_SM90A || !dev->encode_tiled) return false;
    if ((a->dtype != ESA_DTYPE_BF16 && a->dtype != ESA_DTYPE_F16) || (a->D != 64 && a->D != 128)) return false;
    if (a->count && ((a->block_q != 128 && a->block_q != 256) || (a->block_k != 64 && a->block_k != 128))) return false;
    if (!(a->scale > 1e-30 && a->scale < 1e30)) return false;          // scaled and unscaled logits are both at home in f32
    if (a->B < 1 || a->Nq < 1 || a->Nk < 1 || a->Nq > MOST_TOKENS || a->Nk > MOST_TOKENS) return false;
    // Teams ask for tiles until there are none: the counter passes their number by up to one for each team.
    if (a->B * a->Hq > (INT32_MAX - 4 * dev->multiprocessors) / (query_blocks(a) * tiles_per_block(a))) return false;
    return fits_map({ a->q, a->q_stride, { a->B, a->Hq, a->Nq } }) && fits_map({ a->k, a->k_stride, { a->B, a->Hkv, a->Nk } }) &&
           fits_map({ a->v, a->v_stride, { a->B, a->Hkv, a->Nk } });
}

esa_status sm90_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream) {
    attn_launch l = {};
    l.args = kernel_args_of(job);
    l.D = (int32_t)job->a.D;
    l.full = l.args.causal || l.args.stands || l.args.state_o;
    l.blocks = dev->multiprocessors < l.args.tiles ? dev->multiprocessors : l.args.tiles;
    l.stream = stream;
    if (!make_maps(&l, dev, job))
        return device_fail(dev, ESA_ERR_UNSUPPORTED, "the driver refused a tensor map for q, k or v, whose strides are positive multiples of 16 bytes");
    return device_check(dev, job->a.dtype == ESA_DTYPE_BF16 ? attn_run<bf16>(l) : attn_run<f16>(l), "the sm90a attention kernel");
}
