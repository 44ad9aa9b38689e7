/* gpu_engine.h - what the tests of the engine's operations on a GPU share: a ctx with its backend
 * opened, and random numbers whose seed is printed.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CUDA_GPU_ENGINE_H
#define ESA_TESTS_CUDA_GPU_ENGINE_H

#include <stdio.h>
#include "backend/backend.h"
#include "base/rng.h"
#include "common/naive.h"
#include "gpu_kit.h"

static esa_ctx *ctx;
static const esa_backend *be;
static esa_rng rng;

/* Setup and teardown of a group of tests. */
static inline int engine_begin(void **state)
{
    (void)state;
    ctx = kit_ctx(1);
    be = esa_backend_of(ESA_DEVICE_CUDA);
    rng = (esa_rng){ test_seed() };
    printf("seed %llu\n", (unsigned long long)test_seed());
    return be->open(ctx) ? -1 : 0;
}

static inline int engine_end(void **state)
{
    (void)state;
    esa_ctx_free(ctx);
    return 0;
}

#endif
