// rounding_sm80.cu - rounding.h for values in f16.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm80_quantise.cu"
#include "cuda/rounding.cuh"

// Both files of the test link this. The plugin's writes a message into dev; here dev is not used.
esa_status device_check(esa_cuda_device *, cudaError_t result, const char *)
{
    return result == cudaSuccess ? ESA_OK : ESA_ERR_DEVICE;
}

int rounding_f16_runs(void) { return level_of_gpu() >= 80; }

const char *rounding_f16(rounded *out, const esa_attn_args *args)
{
    return round_once<f16_values>(out, args, 2);
}

const char *rounding_f16_times(float *ms, const esa_attn_args *args)
{
    return round_times<f16_values>(ms, args, 2);
}
