// SPDX-License-Identifier: Apache-2.0
//
// v6: at D = 128 v5 without turns; at D = 64 two tiles at a time per multiprocessor, 64 keys a
// step. The version to take over.
#include "launch.cuh"

extern "C" int ladder_v6(const ladder_args *a, void *stream)
{
    return dispatch<policy_v6_128, policy_v6_64>(a, stream);
}
