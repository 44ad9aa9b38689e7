// SPDX-License-Identifier: Apache-2.0
//
// v5: v4, and Q stays in registers: QK then reads 4 KB instead of 6 KB of shared memory per
// instruction.
#include "launch.cuh"

extern "C" int ladder_v5(const ladder_args *a, void *stream)
{
    return dispatch<policy_v5, policy_v5>(a, stream);
}
