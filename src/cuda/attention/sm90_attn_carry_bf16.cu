// sm90_attn_carry_bf16.cu - the Hopper attention kernels for bf16 with a carried difference.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90_attn_kernel.cuh"

template cudaError_t sm90::attn_run_carry<bf16>(const sm90::attn_launch &l);
