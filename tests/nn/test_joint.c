/* test_joint.c - the operations of joint_cases.h in host memory.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/joint_cases.h"

JOINT_TESTS(ESA_DEVICE_CPU)
