// sm90_quantise.cu - queries, keys and values as the 8-bit kernel of sm_90a reads them: values in
// E4M3. D 128, blocks of 128 keys. It is apart from sm89_quantise.cu because kernels without the
// other shapes keep fewer sums.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/quantise_e4m3.cuh"

using hopper_values = e4m3_values<128, false>;

esa_status sm90_quantise(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                         cudaStream_t stream)
{
    return quantise<hopper_values>(dev, a, q, stream);
}
