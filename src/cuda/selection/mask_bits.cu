// mask_bits.cu - converts masks between bits (stored) and lists (in use). One warp per
// row, no scratch.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/selection/pick.cuh"

namespace
{

enum { WARPS = PICK_WARPS };

__global__ void __launch_bounds__(WARPS * 32)
    to_lists(const __grid_constant__ esa_cuda_mask m, const uint8_t *bits)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32,
                  pitch = ceil_div<int64_t>(m.nk, 8);
    if (row >= m.B * m.H * m.nq) return;
    const uint8_t *src = bits + row * pitch;
    row_writer out = { m.index + row * m.cap };
    for (int first = 0; first < m.nk; first += 32) {
        const int j = first + threadIdx.x % 32;
        out.put(j, j < m.nk && (src[j / 8] >> j % 8 & 1));
    }
    if (threadIdx.x % 32) return;
    m.count[row] = out.n;
    atomicAdd((unsigned long long *)m.facts + 1, (unsigned long long)out.n);
}

// A lane makes one byte. It finds its first block in the ascending list by bisection.
__global__ void __launch_bounds__(WARPS * 32)
    to_bits(const __grid_constant__ esa_cuda_mask m, uint8_t *bits)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32,
                  pitch = ceil_div<int64_t>(m.nk, 8);
    if (row >= m.B * m.H * m.nq) return;
    const uint16_t *list = m.index + row * m.cap;
    const int n = m.count[row];
    for (int64_t byte = threadIdx.x % 32; byte < pitch; byte += 32) {
        int low = 0, high = n;
        while (low < high) {
            const int mid = (low + high) / 2;
            if (list[mid] < 8 * byte)
                low = mid + 1;
            else
                high = mid;
        }
        unsigned out = 0;
        for (; low < n && list[low] < 8 * byte + 8; low++) out |= 1u << list[low] % 8;
        bits[row * pitch + byte] = (uint8_t)out;
    }
}

unsigned grid_of(const esa_cuda_mask *m)
{
    return (unsigned)ceil_div<int64_t>(m->B * m->H * m->nq, WARPS);
}

} // namespace

esa_status bits_to_lists(esa_cuda_device *dev, const esa_cuda_mask *mask, const uint8_t *bits,
                         void *stream)
{
    const current_device scope(dev->ordinal);
    if (mask->cap < mask->nk)
        return device_fail(dev, ESA_ERR_ARGUMENT, "a mask has room for %lld of %lld blocks a row",
                           (long long)mask->cap, (long long)mask->nk);
    const esa_status status = device_check(
        dev, cudaMemsetAsync(mask->facts + 1, 0, sizeof *mask->facts, (cudaStream_t)stream),
        "clearing a count");
    if (status) return status;
    to_lists<<<grid_of(mask), WARPS * 32, 0, (cudaStream_t)stream>>>(*mask, bits);
    return launch_check(dev, "turning bits into lists");
}

esa_status lists_to_bits(esa_cuda_device *dev, const esa_cuda_mask *mask, uint8_t *bits,
                         void *stream)
{
    const current_device scope(dev->ordinal);
    to_bits<<<grid_of(mask), WARPS * 32, 0, (cudaStream_t)stream>>>(*mask, bits);
    return launch_check(dev, "turning lists into bits");
}
