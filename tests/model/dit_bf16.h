/* dit_bf16.h - the transformer in bf16 against f32, block by block.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The bound is what diffusers loses: the file wan_dit_bf16 holds the error of its bf16 against its
 * own f32 for the same weights and inputs, and ours may be 1.2 times as large. Errors are the root
 * mean square of the difference over that of f32. */
#ifndef ESA_TESTS_MODEL_DIT_BF16_H
#define ESA_TESTS_MODEL_DIT_BF16_H

#include "model/golden.h"
#include "model/dit_cases.h"

/* A device in bf16 against the CPU in f32. */
static inline void compare(const dit_case *c, int32_t order, int32_t device)
{
    dit_bench b[2];
    for (int32_t i = 0; i < 2; i++)
        dit_open_on(&b[i], c, ESA_HOLD_AUTO, 2, i ? device : ESA_DEVICE_CPU);
    compare_blocks(b, order, "wan_dit_bf16.safetensors", c->name);
    for (int32_t i = 0; i < 2; i++) dit_close(&b[i]);
}

#endif
