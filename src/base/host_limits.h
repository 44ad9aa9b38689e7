/* host_limits.h - how much memory and how many CPUs the system leaves to this process.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Both functions read /proc and /sys. root: the folder where these are found; "" for the machine's
 * own. */
#ifndef ESA_BASE_HOST_LIMITS_H
#define ESA_BASE_HOST_LIMITS_H

#include <stdint.h>
#include "base/engine.h"

/* The least of what the machine has left and of what the memory limits of the process's control
 * groups (containers, batch systems) leave, in bytes. INT64_MAX if the system does not say. */
ESA_ENGINE int64_t esa_host_available(const char *root);

/* The CPU time that the control groups grant, in thousandths of a CPU: 1500 is one and a half
 * CPUs. INT64_MAX without a quota. */
int64_t esa_host_quota(const char *root);

#endif
