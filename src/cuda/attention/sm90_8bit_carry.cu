// sm90_8bit_carry.cu - the 8-bit Hopper kernels with a carried difference.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90_8bit.cuh"

template cudaError_t sm90::attn8_run_carry<bf16>(const sm90::attn_launch &l);
template cudaError_t sm90::attn8_run_carry<f16>(const sm90::attn_launch &l);
