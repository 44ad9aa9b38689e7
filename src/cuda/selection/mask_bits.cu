// mask_bits.cu - converts masks between bits (stored) and lists (in use). One warp per
// row, no scratch.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/selection/pick.cuh"

namespace
{

enum { WARPS = PICK_WARPS };

// One of the two levels of a mask, and its number of blocks in the facts.
struct level_lists {
    int32_t *count;
    uint16_t *index;
    int64_t *total;
};

__global__ void __launch_bounds__(WARPS * 32)
    to_lists(const __grid_constant__ esa_cuda_mask m, const level_lists to, const uint8_t *bits)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32,
                  pitch = ceil_div<int64_t>(m.nk, 8);
    if (row >= m.B * m.H * m.nq) return;
    const uint8_t *src = bits + row * pitch;
    row_writer out = { to.index + row * m.cap };
    for (int first = 0; first < m.nk; first += 32) {
        const int j = first + threadIdx.x % 32;
        out.put(j, j < m.nk && (src[j / 8] >> j % 8 & 1));
    }
    if (threadIdx.x % 32) return;
    to.count[row] = out.n;
    atomicAdd((unsigned long long *)to.total, (unsigned long long)out.n);
}

// A lane makes one byte. It finds its first block in the ascending list by bisection.
__global__ void __launch_bounds__(WARPS * 32)
    to_bits(const __grid_constant__ esa_cuda_mask m, const level_lists from, uint8_t *bits)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32,
                  pitch = ceil_div<int64_t>(m.nk, 8);
    if (row >= m.B * m.H * m.nq) return;
    const uint16_t *list = from.index + row * m.cap;
    const int n = from.count[row];
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

level_lists exact_lists(const esa_cuda_mask *m) { return { m->count, m->index, m->facts + 1 }; }

level_lists fine_lists(const esa_cuda_mask *m)
{
    return { m->fine_count, m->fine_index, m->facts + 2 };
}

} // namespace

esa_status bits_to_lists(esa_cuda_device *dev, const esa_cuda_mask *mask, const uint8_t *bits,
                         const uint8_t *fine, void *stream)
{
    const current_device scope(dev->ordinal);
    if (mask->cap < mask->nk)
        return device_fail(dev, ESA_ERR_ARGUMENT, "a mask has room for %lld of %lld blocks a row",
                           (long long)mask->cap, (long long)mask->nk);
    const cudaStream_t s = (cudaStream_t)stream;
    esa_status status = device_check(
        dev, cudaMemsetAsync(mask->facts + 1, 0, 2 * sizeof *mask->facts, s), "clearing counts");
    if (!status && mask->fine_count && !fine)
        status = device_check(
            dev,
            cudaMemsetAsync(mask->fine_count, 0, sizeof(int32_t) * mask->B * mask->H * mask->nq, s),
            "clearing the fine level");
    if (status) return status;
    to_lists<<<grid_of(mask), WARPS * 32, 0, s>>>(*mask, exact_lists(mask), bits);
    if (mask->fine_count && fine)
        to_lists<<<grid_of(mask), WARPS * 32, 0, s>>>(*mask, fine_lists(mask), fine);
    return launch_check(dev, "turning bits into lists");
}

esa_status lists_to_bits(esa_cuda_device *dev, const esa_cuda_mask *mask, uint8_t *bits,
                         uint8_t *fine, void *stream)
{
    const current_device scope(dev->ordinal);
    const cudaStream_t s = (cudaStream_t)stream;
    to_bits<<<grid_of(mask), WARPS * 32, 0, s>>>(*mask, exact_lists(mask), bits);
    if (mask->fine_count)
        to_bits<<<grid_of(mask), WARPS * 32, 0, s>>>(*mask, fine_lists(mask), fine);
    return launch_check(dev, "turning lists into bits");
}
