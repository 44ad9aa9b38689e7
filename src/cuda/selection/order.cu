// order.cu - makes the adaptive orders of q and k: lays out the workspace and enqueues the levels.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/selection/order.cuh"

namespace
{

enum { START_THREADS = 256, START_TOKENS = 2048 };

// perm = start order. Thread blocks of (head, part of its tokens).
__global__ void __launch_bounds__(START_THREADS)
    start_kernel(const __grid_constant__ order_job x, int parts)
{
    const order_head<char> head(x, blockIdx.x / parts);
    const int first = blockIdx.x % parts * START_TOKENS, end = min(head.s.N, first + START_TOKENS);
    for (int p = first + threadIdx.x; p < end; p += START_THREADS)
        head.s.perm[head.at + p] = head.s.start ? head.s.start[p] : p;
}

// The table of nodes of both sides.
__global__ void __launch_bounds__(START_THREADS) nodes_kernel(const __grid_constant__ order_job x)
{
    const order_side &s = x.side[blockIdx.y];
    const uint32_t entry = blockIdx.x * START_THREADS + threadIdx.x;
    if (entry == 0 || entry >= 2u << x.levels) return;
    const int level = 31 - __clz(entry);
    const esa_order_node node = esa_order_find(s.root, s.block, s.small, level,
                                               entry - (1u << level));
    s.nodes[entry] = make_uint4(node.first, node.n, esa_order_cut(node, s.block), 0);
}

order_job lay_out(carve &c, const esa_cuda_device *dev, const esa_select_args *a)
{
    order_job x = {};
    x.B = (int32_t)a->B, x.Hq = (int32_t)a->Hq, x.Hkv = (int32_t)a->Hkv, x.D = (int32_t)a->D;
    x.pitch = (x.D + 15) / 16 * 16;
    x.kv_len = a->params.kv_len;
    x.samples = ESA_ORDER_SAMPLE;
    while (order_direction_bytes(x.samples, x.pitch) > dev->shared_bytes) x.samples /= 2;
    for (int i = 0; i < 2; ++i) {
        order_side &s = x.side[i];
        s.data = i ? a->k : a->q;
        const int64_t *const stride = i ? a->k_stride : a->q_stride;
        for (int j = 0; j < 3; ++j) s.stride[j] = stride[j];
        s.N = (int32_t)(i ? a->Nk : a->Nq);
        s.heads = i ? x.Hkv : x.Hq;
        s.at = x.heads;
        x.heads += x.B * s.heads;
        s.block = (uint32_t)(i ? a->params.block_k : a->params.block_q);
        s.small = esa_order_small(s.block);
        while (order_block_bytes((int)s.small, x.pitch) > dev->shared_bytes) s.small /= 2;
        s.root = esa_order_root(&a->params.layout, i, a->params.mode, s.N);
        const view rows = { s.data, s.stride, { a->B, s.heads, s.N } };
        s.pieces = rows_in_pieces(rows, a->D, element_bytes(a->dtype), 16);
        s.start = i ? a->perm_k : a->perm_q;
        const int32_t levels = esa_order_levels(s.root, s.block, s.small);
        if (levels > x.levels) x.levels = levels;
        const int64_t tokens = a->B * s.heads * s.N;
        s.key = c.take<uint32_t>(tokens);
        s.spare = c.take<int32_t>(tokens);
    }
    for (order_side &s : x.side) s.nodes = c.take<uint4>((int64_t)2 << x.levels);
    x.moment = c.take<float>((int64_t)x.heads * x.pitch * x.pitch);
    x.metric = c.take<bf16>((int64_t)x.heads * x.pitch * x.pitch);
    const int64_t nodes = x.levels ? (int64_t)1 << (x.levels - 1) : 0;
    x.direction = c.take<float>(x.heads * nodes * x.pitch);
    return x;
}

} // namespace

int64_t order_workspace(const esa_cuda_device *dev, const esa_select_args *a)
{
    carve c(nullptr);
    lay_out(c, dev, a);
    return c.bytes();
}

esa_status order_run(esa_cuda_device *dev, const esa_select_args *a, int32_t *perm_q,
                     int32_t *perm_k, void *ws, void *stream_given)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t stream = (cudaStream_t)stream_given;
    carve c(ws);
    order_job x = lay_out(c, dev, a);
    x.side[0].perm = perm_q;
    x.side[1].perm = perm_k;
    const int parts = (int)ceil_div<int64_t>(esa_max64(a->Nq, a->Nk), START_TOKENS);
    if ((int64_t)x.heads * parts > INT32_MAX || (int64_t)x.heads << x.levels > INT32_MAX)
        return device_fail(dev, ESA_ERR_UNSUPPORTED, "an adaptive order of %d heads is too large",
                           x.heads);
    start_kernel<<<(unsigned)(x.heads * parts), START_THREADS, 0, stream>>>(x, parts);
    nodes_kernel<<<dim3(ceil_div(2u << x.levels, (unsigned)START_THREADS), 2), START_THREADS, 0,
                   stream>>>(x);
    esa_status status = launch_check(dev, "starting an order");
    if (!status) status = order_metric(dev, x, a->dtype, stream);
    const int64_t root = esa_max64(x.side[0].root.n, x.side[1].root.n);
    for (x.level = 0; x.level < x.levels && !status; ++x.level) {
        status = order_direction(dev, x, a->dtype, stream);
        // A node differs from its share by less than a block.
        if (!status) status = order_cut(dev, x, a->dtype, (root >> x.level) + 257, stream);
    }
    return status ? status : order_block(dev, x, a->dtype, stream);
}
