// sm90.cu - the Hopper attention kernel as attention.cu sees it: which jobs it takes, tensor maps,
// the launch.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90_attn.cuh"

#include <math.h>

namespace
{

using namespace sm90;

// Row and key numbers are int32, with room for a tile beyond the end.
constexpr int64_t MOST_TOKENS = 1 << 30;
constexpr double LOG2_E = 1.4426950408889634;

bool make_maps(attn_launch *l, const esa_cuda_device *dev, const attention_job *job)
{
    const esa_attn_args *a = &job->a;
    const int chunks = (int)a->D / 64, key_chunks = l->args.Bk == STAGE_KEYS ? chunks : 1;
    const auto make = [&](CUtensorMap *map, const view &x, int rows, int box_chunks) {
        return make_map(map, dev, a->dtype, x, a->D, rows, box_chunks);
    };
    if (!make(&l->q, { a->q, a->q_stride, { a->B, a->Hq, a->Nq } }, l->wide ? WIDE_TILE : TILE_Q,
              chunks) ||
        !make(&l->k, { a->k, a->k_stride, { a->B, a->Hkv, a->Nk } }, l->args.Bk, key_chunks) ||
        !make(&l->v, { a->v, a->v_stride, { a->B, a->Hkv, a->Nk } }, l->args.Bk, key_chunks))
        return false;
    if (!l->args.stands) return true;
    const auto make_means = [&](CUtensorMap *map, const void *means, int64_t n, int rows,
                                int box_chunks) {
        const int64_t stride[3] = { a->Hkv * n * job->mean_pitch, n * job->mean_pitch,
                                    job->mean_pitch };
        return make(map, { means, stride, { a->B, a->Hkv, n } }, rows, box_chunks);
    };
    if (!make_means(&l->k_mean, job->k_mean, job->nk_pad, STAGE_KEYS, chunks) ||
        !make_means(&l->v_mean, job->v_mean, job->nk_pad, STAGE_KEYS, chunks))
        return false;
    if (!l->args.fine_columns) return true;
    // A box is one chunk of the means of one block.
    return make_means(&l->k_fine, job->k_fine, a->nk * a->fine, a->fine, 1) &&
           make_means(&l->v_fine, job->v_fine, a->nk * a->fine, a->fine, 1);
}

// Wide tiles pay if there are several for each multiprocessor.
bool wide_tiles(const esa_cuda_device *dev, const esa_attn_args *a)
{
    return a->D == 64 && !a->count && !a->causal &&
           a->B * a->Hq * (a->Nq / WIDE_TILE) >= 4 * dev->multiprocessors;
}
// Without a mask there are no blocks, so rows are cut as the kernel likes.
int64_t query_blocks(const esa_attn_args *a, int tile = TILE_Q)
{
    return a->count ? a->nq : ceil_div(a->Nq, (int64_t)tile);
}
int64_t tiles_per_block(const esa_attn_args *a) { return a->count ? a->block_q / TILE_Q : 1; }

// tile: rows of a tile, TILE_Q or WIDE_TILE
kernel_args kernel_args_of(const attention_job *job, int tile)
{
    const esa_attn_args *a = &job->a;
    const bool tail = a->count && a->tail != ESA_TAIL_NONE;
    kernel_args k = {};
    k.count = a->count, k.index = a->index, k.kv_len = a->kv_len, k.scatter = job->scatter,
    k.next = job->next;
    for (int i = 0; i < 2; ++i) k.scatter_stride[i] = job->scatter_stride[i];
    k.order = a->count ? job->order : nullptr;
    k.o = a->o, k.lse = a->lse;
    for (int i = 0; i < 3; ++i) k.o_stride[i] = a->o_stride[i], k.lse_stride[i] = a->lse_stride[i];
    k.o_vectors = rows_in_pieces({ a->o, a->o_stride, { a->B, a->Hq, a->Nq } }, a->D, 2, 16);
    k.Hq = (int32_t)a->Hq, k.group = (int32_t)(a->Hq / a->Hkv);
    k.Nq = (int32_t)a->Nq, k.Nk = (int32_t)a->Nk;
    k.Bk = a->count ? a->block_k : STAGE_KEYS;
    k.Bk_log2 = k.Bk == 64 ? 6 : 7;
    k.nq = (int32_t)query_blocks(a, tile), k.nk = (int32_t)ceil_div(a->Nk, (int64_t)k.Bk);
    k.split = (int32_t)tiles_per_block(a);
    k.tiles = (int32_t)(a->B * a->Hq) * k.nq * k.split;
    k.cap = (int32_t)a->cap, k.mask_batch = (int32_t)a->mask_batch;
    k.scale = (float)a->scale;
    k.floor = -1e38f / fmaxf(1.0f, (float)(a->scale * LOG2_E));
    k.causal = a->causal, k.shift = (int32_t)(a->Nk - a->Nq);
    k.from_log2 = (float)(1.0 / (a->scale * LOG2_E));
    if (tail && a->tail == ESA_TAIL_POOLED)
        k.stands = job->stands, k.mean_stages = (int32_t)(job->nk_pad / STAGE_KEYS);
    k.q_scale = job->q8.q_scale, k.k_scale = job->q8.k_scale;
    k.v_scale = job->q8.v_scale, k.v_centre = job->q8.v_centre, k.q_centre = job->q8.q_centre;
    k.k_fine = (const uint8_t *)job->q8.k_fine, k.v_fine = (const uint8_t *)job->q8.v_fine;
    if (k.stands && job->fine_columns) {
        k.fine_columns = job->fine_columns, k.fine_index = a->fine_index;
        while (1 << k.fine_log2 < a->fine) ++k.fine_log2;
    }
    if (tail && a->tail == ESA_TAIL_CENTROID)
        k.state_o = job->state_o, k.state_m = job->state_m, k.state_l = job->state_l;
    return k;
}

// Maps of the tiles of 8 bit: rows of 128 bytes, which are keys, or columns of values.
bool make_maps8(attn_launch *l, const esa_cuda_device *dev, const attention_job *job)
{
    const esa_attn_args *a = &job->a;
    const quantised &x = job->q8;
    const auto make = [&](CUtensorMap *map, const void *data, int64_t H, int64_t rows) {
        const int64_t stride[3] = { H * rows * 64, rows * 64, 64 }; // as if elements had 2 bytes
        return make_map(map, dev, ESA_DTYPE_BF16, { data, stride, { a->B, H, rows } }, 64, TILE_Q,
                        1);
    };
    return make(&l->q, x.q, a->Hq, x.nq * RUN_8BIT) && make(&l->k, x.k, a->Hkv, x.nk * RUN_8BIT) &&
           make(&l->v, x.v, a->Hkv, x.nk * RUN_8BIT) &&
           (!l->args.stands || (make(&l->k_mean, x.k_mean, a->Hkv, x.nk_pad) &&
                                make(&l->v_mean, x.v_mean, a->Hkv, x.nk_pad)));
}

attn_launch launch_of(const esa_cuda_device *dev, const attention_job *job, int tile,
                      cudaStream_t stream)
{
    attn_launch l = {};
    (kernel_args &)l.args = kernel_args_of(job, tile);
    l.args.carry = job->a.carry;
    l.wide = tile == WIDE_TILE;
    l.D = (int32_t)job->a.D;
    l.full = l.args.causal || l.args.stands || l.args.state_o;
    l.blocks = dev->multiprocessors < l.args.tiles ? dev->multiprocessors : l.args.tiles;
    l.stream = stream;
    return l;
}

template <class T> cudaError_t run16(const attn_launch &l)
{
    return l.args.carry.value ? attn_run_carry<T>(l) : attn_run<T>(l);
}
template <class T> cudaError_t run8(const attn_launch &l)
{
    return l.args.carry.value ? attn8_run_carry<T>(l) : attn8_run<T>(l);
}

// What does not depend on views.
bool takes_sizes(const esa_cuda_device *dev, const esa_attn_args *a)
{
    if (dev->level < LEVEL_SM90A || !dev->encode_tiled) return false;
    if ((a->dtype != ESA_DTYPE_BF16 && a->dtype != ESA_DTYPE_F16) || (a->D != 64 && a->D != 128))
        return false;
    if (a->count &&
        ((a->block_q != 128 && a->block_q != 256) || (a->block_k != 64 && a->block_k != 128)))
        return false;
    // f32 holds both scaled and unscaled logits.
    if (!(a->scale > 1e-30 && a->scale < 1e30)) return false;
    if (a->B < 1 || a->Nq < 1 || a->Nk < 1 || a->Nq > MOST_TOKENS || a->Nk > MOST_TOKENS)
        return false;
    // Teams ask for tiles until there are none, so the counter exceeds the number of tiles by up to
    // one per team.
    return a->B * a->Hq <=
           (INT32_MAX - 4 * dev->multiprocessors) / (query_blocks(a) * tiles_per_block(a));
}

} // namespace

bool sm90_8bit_takes(const esa_cuda_device *dev, const esa_attn_args *a)
{
    if (a->precision != 8 || !takes_sizes(dev, a) || a->D != 128 || a->causal) return false;
    if (a->count && a->block_k != RUN_8BIT) return false;
    if (a->tail == ESA_TAIL_CENTROID) return false;
    if (a->tail == ESA_TAIL_LEVELS && a->fine && a->fine != 4 && a->fine != 8 && a->fine != 16)
        return false;
    // Thread blocks of one launch.
    return a->B * a->Hkv <= 65535 && a->B * (a->Hq * ceil_div(a->Nq, (int64_t)RUN_8BIT) +
                                             2 * a->Hkv * ceil_div(a->Nk, (int64_t)RUN_8BIT)) <=
                                         INT32_MAX;
}

esa_status sm90_8bit_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    attn_launch l = launch_of(dev, job, TILE_Q, stream);
    if (!make_maps8(&l, dev, job))
        return device_fail(dev, ESA_ERR_UNSUPPORTED, "the driver refused a tensor map of 8 bit");
    return device_check(dev, job->a.dtype == ESA_DTYPE_BF16 ? run8<bf16>(l) : run8<f16>(l),
                        "the 8-bit sm90a attention kernel");
}

bool sm90_takes(const esa_cuda_device *dev, const esa_attn_args *a)
{
    if (!takes_sizes(dev, a)) return false;
    return fits_map({ a->q, a->q_stride, { a->B, a->Hq, a->Nq } }) &&
           fits_map({ a->k, a->k_stride, { a->B, a->Hkv, a->Nk } }) &&
           fits_map({ a->v, a->v_stride, { a->B, a->Hkv, a->Nk } });
}

esa_status sm90_launch(esa_cuda_device *dev, const attention_job *job, cudaStream_t stream)
{
    const int tile = wide_tiles(dev, &job->a) ? WIDE_TILE : TILE_Q;
    attn_launch l = launch_of(dev, job, tile, stream);
    if (!make_maps(&l, dev, job))
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "the driver refused a tensor map for q, k or v, whose strides are "
                           "positive multiples of 16 bytes");
    return device_check(dev, job->a.dtype == ESA_DTYPE_BF16 ? run16<bf16>(l) : run16<f16>(l),
                        "the sm90a attention kernel");
}
