/* other_abi.c - a plugin of another interface version: it must be refused with its own words.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "cuda/cuda.h"

__attribute__((visibility("default"))) const esa_cuda_table *esa_cuda_entry(
    uint32_t abi, const esa_cuda_host *host, char *error, int32_t error_bytes)
{
    (void)host;
    snprintf(error, (size_t)error_bytes,
             "libesa_cuda has plugin interface %u, libesa has %u: install both from one build",
             abi + 1, abi);
    return NULL;
}
