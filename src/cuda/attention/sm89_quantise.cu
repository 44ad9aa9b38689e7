// sm89_quantise.cu - queries, keys and values as the 8-bit kernel of sm_89 reads them: values in
// E4M3. D 64 and 128, blocks of 64 or 128 keys.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/quantise_e4m3.cuh"

using ada_values = e4m3_values<64, true>;

esa_status sm89_quantise(esa_cuda_device *dev, const esa_attn_args *a, const quantised *q,
                         cudaStream_t stream)
{
    return quantise<ada_values>(dev, a, q, stream);
}
