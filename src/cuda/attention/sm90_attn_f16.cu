// sm90_attn_f16.cu - the Hopper attention kernels for f16: D 64 and 128, plain and full.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90_attn_kernel.cuh"

template cudaError_t sm90::attn_run<f16>(const sm90::attn_launch &l);
