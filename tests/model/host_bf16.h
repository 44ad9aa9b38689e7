/* host_bf16.h - bf16 on the CPU as one more device of the tests that compare bf16 with f32.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_MODEL_HOST_BF16_H
#define ESA_TESTS_MODEL_HOST_BF16_H

#include "nn/nn.h"

enum { ON_HOST_BF16 = 64 }; /* beside ESA_DEVICE_* */

/* The ESA_DEVICE_* of such a number. */
static inline int32_t device_of(int32_t number)
{
    return number == ON_HOST_BF16 ? ESA_DEVICE_CPU : number;
}

static inline esa_status use_device(esa_nn *nn, int32_t number)
{
    const esa_status status = esa_nn_use(nn, device_of(number));
    return status || number != ON_HOST_BF16 ? status : esa_nn_use_dtype(nn, ESA_DTYPE_BF16);
}

/* 1 if this machine has products in bf16. */
static inline int32_t host_has_bf16(void)
{
    esa_ctx *ctx;
    if (esa_ctx_create(&ctx, NULL) != ESA_OK) return 0;
    const int32_t has = ctx->kern->bf16 != NULL;
    esa_ctx_free(ctx);
    return has;
}

#endif
