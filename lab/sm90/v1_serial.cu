// SPDX-License-Identifier: Apache-2.0
//
// v1: warp-specialised; inside a consumer product, softmax and product follow each other. The other
// consumer is the only cover.
#include "launch.cuh"

extern "C" int ladder_v1(const ladder_args *a, void *stream)
{
    return dispatch<policy_v1, policy_v1>(a, stream);
}
