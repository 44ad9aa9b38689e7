/* attn_cpu.h - attention on the CPU: bound arguments in, output rows out.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_ATTN_CPU_H
#define ESA_CPU_ATTN_CPU_H

#include "base/args.h"
#include "cpu/cpu.h"

/* Scratch for esa_attn_cpu; only sizes, kern, pool, blocks and tail are read. */
int64_t esa_attn_cpu_workspace(const esa_attn_args *args);
/* Computes; cannot fail. ws: esa_attn_cpu_workspace bytes, ESA_WORKSPACE_ALIGN aligned. */
void esa_attn_cpu(const esa_attn_args *args, void *ws);

#endif
