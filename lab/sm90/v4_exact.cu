// SPDX-License-Identifier: Apache-2.0
//
// v4: v3, and O is multiplied by alpha only when a maximum of the warp moved. Same bits as v3.
#include "launch.cuh"

extern "C" int ladder_v4(const ladder_args *a, void *stream)
{
    return dispatch<policy_v4, policy_v4>(a, stream);
}
