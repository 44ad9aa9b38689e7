// SPDX-License-Identifier: Apache-2.0
//
// v2: QK of the next block and PV of the last one are issued together; the maximum is found while
// PV still runs.
#include "launch.cuh"

extern "C" int ladder_v2(const ladder_args *a, void *stream)
{
    return dispatch<policy_v2, policy_v2>(a, stream);
}
