/* leaf_plain.c - the row loops for any processor: the reference.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/leaf.inc.h"

const esa_nn_leaf esa_nn_leaf_plain = ESA_NN_LEAF_TABLE("plain");

float esa_silu(float x) { return silu_of(x); }

const esa_nn_leaf *esa_nn_leaf_get(int32_t level)
{
#if defined(__x86_64__)
    if (esa_cpu_vectors(level) == ESA_CPU_AVX512) return &esa_nn_leaf_avx512;
    if (level == ESA_CPU_AVX2) return &esa_nn_leaf_avx2;
#endif
    (void)level;
    return &esa_nn_leaf_plain;
}
