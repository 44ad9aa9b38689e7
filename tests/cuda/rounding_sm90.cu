// rounding_sm90.cu - rounding.h for values in E4M3 as the sm90a kernel takes them.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90_quantise.cu"
#include "cuda/rounding.cuh"

int rounding_e4m3_runs(void) { return level_of_gpu() == 90; }

const char *rounding_e4m3(rounded *out, const esa_attn_args *args)
{
    return round_once<hopper_values>(out, args, 1);
}

const char *rounding_e4m3_times(float *ms, const esa_attn_args *args)
{
    return round_times<hopper_values>(ms, args, 1);
}
