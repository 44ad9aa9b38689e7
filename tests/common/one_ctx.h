/* one_ctx.h - the context that all tests of a program share, for cmocka_run_group_tests(tests,
 * setup, teardown).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_COMMON_ONE_CTX_H
#define ESA_TESTS_COMMON_ONE_CTX_H

#include "esa/esa.h"

static esa_ctx *ctx;

static inline int setup(void **state)
{
    (void)state;
    return esa_ctx_create(&ctx, NULL) != ESA_OK;
}

static inline int teardown(void **state)
{
    (void)state;
    esa_ctx_free(ctx);
    return 0;
}

#endif
