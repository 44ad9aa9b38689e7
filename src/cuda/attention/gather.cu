// gather.cu - rows of q, k and v in block order. One launch copies those of the three that
// an order moves.
// SPDX-License-Identifier: Apache-2.0
//
// dst[b][h][n] = src[b][h][perm[b][h][n]]. A thread block copies ROWS rows of one head. Each thread
// has PIECES loads in flight before its first store, so random rows still come at memory speed (a
// row of D = 128 is two 128-byte lines).
#include "cuda/attention/prepare.cuh"

namespace
{

enum { THREADS = 256, PIECES = 4, ROWS = 128 };

struct gather_part {
    const char *src;
    char *dst;
    const int32_t *perm;
    int64_t batch, head, row;   // bytes between entries of src
    int64_t perm_stride[2];     // elements between the orders of batch entries and heads
    int64_t first;              // first thread block of this part
    int32_t rows, heads, tiles; // N; H; thread blocks per head
};

struct gather_plan {
    gather_part part[3];
    int64_t blocks, pitch;  // number of thread blocks; bytes between rows of dst
    int32_t parts, columns; // pieces per row
};

template <class Piece> __global__ void __launch_bounds__(THREADS) gather_kernel(gather_plan plan)
{
    int which = 0;
    while (which + 1 < plan.parts && blockIdx.x >= plan.part[which + 1].first) ++which;
    const gather_part &part = plan.part[which];
    const int64_t block = blockIdx.x - part.first, bh = block / part.tiles;
    const int row0 = (int)(block % part.tiles) * ROWS, rows = min((int)ROWS, part.rows - row0);
    const char *src = part.src + bh / part.heads * part.batch + bh % part.heads * part.head;
    char *dst = part.dst + (bh * part.rows + row0) * plan.pitch;
    const int32_t *perm = part.perm + bh / part.heads * part.perm_stride[0] +
                          bh % part.heads * part.perm_stride[1] + row0;
    const unsigned columns = plan.columns, total = rows * columns;

    for (unsigned first = threadIdx.x; first < total; first += PIECES * THREADS) {
        Piece piece[PIECES];
#pragma unroll
        for (unsigned i = 0; i < PIECES; ++i) {
            const unsigned e = first + i * THREADS, row = e / columns, column = e % columns;
            if (e < total) piece[i] = ((const Piece *)(src + perm[row] * part.row))[column];
        }
#pragma unroll
        for (unsigned i = 0; i < PIECES; ++i) {
            const unsigned e = first + i * THREADS, row = e / columns, column = e % columns;
            if (e < total) ((Piece *)(dst + row * plan.pitch))[column] = piece[i];
        }
    }
}

struct gather_source {
    const void *src;
    void *dst;
    const int32_t *perm;
    const int64_t *stride, *perm_stride;
    int64_t H, N;
};

} // namespace

esa_status gather_rows(esa_cuda_device *dev, const esa_attn_args *a, const prepared *p,
                       cudaStream_t stream)
{
    const gather_source source[3] = {
        { a->q, p->q, a->perm_q, a->q_stride, a->perm_q_stride, a->Hq, a->Nq },
        { a->k, p->k, a->perm_k, a->k_stride, a->perm_k_stride, a->Hkv, a->Nk },
        { a->v, p->v, a->perm_k, a->v_stride, a->perm_k_stride, a->Hkv, a->Nk }
    };
    const int64_t element = element_bytes(a->dtype);
    bool wide = true;
    gather_plan plan = {};
    for (const gather_source &s : source) {
        if (!s.perm) continue;
        wide = wide && rows_in_pieces({ s.src, s.stride, { a->B, s.H, s.N } }, a->D, element, 16);
        const int64_t tiles = ceil_div(s.N, (int64_t)ROWS);
        gather_part &part = plan.part[plan.parts++];
        part.src = (const char *)s.src, part.dst = (char *)s.dst, part.perm = s.perm;
        part.batch = s.stride[0] * element, part.head = s.stride[1] * element,
        part.row = s.stride[2] * element;
        part.perm_stride[0] = s.perm_stride[0], part.perm_stride[1] = s.perm_stride[1];
        part.first = plan.blocks;
        part.rows = (int32_t)s.N, part.heads = (int32_t)s.H, part.tiles = (int32_t)tiles;
        plan.blocks += a->B * s.H * tiles;
    }
    if (plan.blocks == 0) return ESA_OK;
    plan.pitch = p->row_pitch * element;
    plan.columns = (int32_t)(wide ? a->D * element / 16 : a->D);
    const unsigned grid = (unsigned)plan.blocks;
    if (wide)
        gather_kernel<uint4><<<grid, THREADS, 0, stream>>>(plan);
    else if (element == 4)
        gather_kernel<uint32_t><<<grid, THREADS, 0, stream>>>(plan);
    else
        gather_kernel<uint16_t><<<grid, THREADS, 0, stream>>>(plan);
    return launch_check(dev, "gathering rows");
}
