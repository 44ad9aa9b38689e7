// act.cu - activations by rows, the gated activation of T5, and conversions between types, F8 with
// its scales among them.
// SPDX-License-Identifier: Apache-2.0
//
// With BF16 in and F8 out it moves 3 bytes for each element. A row is held until its largest
// magnitude is known, so the memory idles unless other rows are loaded meanwhile. So kernels for
// wide rows use few registers, and several thread blocks fit on a multiprocessor. For 32760 rows of
// 8960 columns, GELU to F8 took 0.68 ms with 256 threads a row, 0.44 with 512, and 0.23 with 384
// and four thread blocks.
#include "cuda/engine/activate.cuh"
#include "cuda/engine/rows.cuh"

namespace
{

using namespace rows;

template <int ACT, class Row> __device__ __forceinline__ void activate_row(Row &v, int cols)
{
    v.each(cols, [](auto &x, int) {
#pragma unroll
        for (auto &one : x) one = activate(one, ACT);
    });
}

// Thread blocks that a multiprocessor holds at least.
template <int LANES, int W> constexpr int resident()
{
    return W < 8 ? 1 : LANES == 384 ? 4 : LANES == 352 ? 3 : LANES == 512 ? 2 : 1;
}

template <class T, int LANES, int PIECES, int W>
__global__ void __launch_bounds__(team_threads<LANES>(), (resident<LANES, W>()))
    act_kernel(const __grid_constant__ esa_act_args a)
{
    __shared__ float room[32];
    const int64_t r = team_row<LANES>();
    if (r >= a.x.rows) return; // a whole team: a thread block with larger teams has one row
    const int cols = (int)a.x.cols;
    row<T, LANES, PIECES, W> v;
    if (a.gate.data) {
        piece<T, W> raw_x[PIECES], raw_gate[PIECES];
        v.fetch(raw_x, (const T *)a.x.data + r * a.x.ld, cols);
        v.fetch(raw_gate, (const T *)a.gate.data + r * a.gate.ld, cols);
        v.set(raw_x, cols);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            if (v.column(p) >= cols) continue;
            float gate[W];
            unpack(gate, raw_gate[p]);
#pragma unroll
            for (int i = 0; i < W; ++i) v.x[p][i] *= activate(gate[i], a.act);
        }
    } else {
        v.load((const T *)a.x.data + r * a.x.ld, cols);
        if (a.act == ESA_ACT_GELU_TANH) // outside the loops: one branch for the row
            activate_row<ESA_ACT_GELU_TANH>(v, cols);
        else if (a.act == ESA_ACT_SILU)
            activate_row<ESA_ACT_SILU>(v, cols);
        else if (a.act == ESA_ACT_QUICK_GELU)
            activate_row<ESA_ACT_QUICK_GELU>(v, cols);
        else if (a.act == ESA_ACT_GELU)
            activate_row<ESA_ACT_GELU>(v, cols);
    }
    store_row(a.y, r, v, room);
}

struct act_launch {
    static constexpr int WIDE_LANES = 128, WIDE_PIECES = 5;
    const esa_act_args &a;
    cudaStream_t stream;
    template <class T, int LANES, int PIECES, int W> void run(unsigned blocks) const
    {
        act_kernel<T, LANES, PIECES, W><<<blocks, team_threads<LANES>(), 0, stream>>>(a);
    }
};

} // namespace

esa_status act_run(esa_cuda_device *dev, const esa_act_args *args, void *stream)
{
    const current_device scope(dev->ordinal);
    const esa_act_args &a = *args;
    const esa_status status = check_rows(dev, a.x, "an activation");
    if (status || a.x.rows < 1 || a.x.cols < 1) return status;
    const bool in_eights = wide(a.x) && wide(a.y) && wide(a.gate);
    const act_launch launch = { a, (cudaStream_t)stream };
    if (a.x.dtype == ESA_DTYPE_BF16)
        choose_team<1, __nv_bfloat16>(a.x.cols, a.x.rows, in_eights, launch);
    else
        choose_team<1, float>(a.x.cols, a.x.rows, in_eights, launch);
    return launch_check(dev, "activation");
}
