// rounding_sm89.cu - rounding.h for values in E4M3 as the sm89 kernel takes them.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm89_quantise.cu"
#include "cuda/rounding.cuh"

int rounding_e4m3_64_runs(void)
{
    const int level = level_of_gpu();
    return level == 89 || level / 10 == 9 || level / 10 == 12;
}

const char *rounding_e4m3_64(rounded *out, const esa_attn_args *args)
{
    return round_once<ada_values>(out, args, 1);
}

const char *rounding_e4m3_64_times(float *ms, const esa_attn_args *args)
{
    return round_times<ada_values>(ms, args, 1);
}
