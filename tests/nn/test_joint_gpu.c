/* test_joint_gpu.c - the operations of joint_cases.h on a GPU.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/joint_cases.h"

JOINT_TESTS(ESA_DEVICE_CUDA)
