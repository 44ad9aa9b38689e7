// SPDX-License-Identifier: Apache-2.0
//
// v3: v2, and the consumers take turns to issue, so that one has the tensor cores while the other
// does its exponentials.
#include "launch.cuh"

extern "C" int ladder_v3(const ladder_args *a, void *stream)
{
    return dispatch<policy_v3, policy_v3>(a, stream);
}
