// lanes.cuh - sums and maxima over groups of lanes along a fixed tree: the same bits every time and
// in every lane of the group.
// SPDX-License-Identifier: Apache-2.0
#pragma once

// N: lanes per group, a power of two. Groups are aligned, and all lanes of the warp take part.
template <int N, class T> static __device__ __forceinline__ T lanes_sum(T x)
{
#pragma unroll
    for (int step = N / 2; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Ignores NaN unless all values are NaN.
template <int N, class T> static __device__ __forceinline__ T lanes_max(T x)
{
#pragma unroll
    for (int step = N / 2; step; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
