/* leaf_avx2.c - the row loops compiled for AVX2.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/leaf.inc.h"

const esa_nn_leaf esa_nn_leaf_avx2 = ESA_NN_LEAF_TABLE("avx2");
