/* leaf_avx512.c - the row loops compiled for AVX512.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/leaf.inc.h"

const esa_nn_leaf esa_nn_leaf_avx512 = ESA_NN_LEAF_TABLE("avx512");
