/* host_memory.h - how much host memory this process can still have.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_HOST_MEMORY_H
#define ESA_MODEL_HOST_MEMORY_H

#include <stdint.h>

/* The least of what the machine has left and of what the memory limits of the process's control
 * groups (containers, batch systems) leave. root: where /proc and /sys are found; "" for the
 * machine's own. INT64_MAX if the system does not say. */
int64_t esa_host_available(const char *root);

#endif
