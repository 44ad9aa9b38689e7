// sm90_8bit.cu - the 8-bit Hopper kernels: D 128, plain and full.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90_8bit.cuh"

template cudaError_t sm90::attn8_run<bf16>(const sm90::attn_launch &l);
template cudaError_t sm90::attn8_run<f16>(const sm90::attn_launch &l);
