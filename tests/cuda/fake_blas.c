/* fake_blas.c - libraries that look like cuBLASLt from outside; for test_blas.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * FAKE_VERSION: what it says of itself. FAKE_WITHOUT_MATMUL: one function is missing. */
#include <stddef.h>
#include <stdint.h>

#define SHOWN __attribute__((visibility("default")))
/* Each function is found by its name alone; the test calls none of these. */
#define FUNCTION(name)                                                                             \
    SHOWN int32_t name(void);                                                                      \
    int32_t name(void) { return 0; }

FUNCTION(cublasLtCreate)
FUNCTION(cublasLtDestroy)
FUNCTION(cublasLtMatmulDescCreate)
FUNCTION(cublasLtMatmulDescDestroy)
FUNCTION(cublasLtMatmulDescSetAttribute)
FUNCTION(cublasLtMatrixLayoutCreate)
FUNCTION(cublasLtMatrixLayoutDestroy)
FUNCTION(cublasLtMatrixLayoutSetAttribute)
FUNCTION(cublasLtMatmulPreferenceCreate)
FUNCTION(cublasLtMatmulPreferenceDestroy)
FUNCTION(cublasLtMatmulPreferenceSetAttribute)
FUNCTION(cublasLtMatmulAlgoGetHeuristic)
#ifndef FAKE_WITHOUT_MATMUL
FUNCTION(cublasLtMatmul)
#endif

SHOWN size_t cublasLtGetVersion(void);
size_t cublasLtGetVersion(void) { return FAKE_VERSION; }
SHOWN const char *cublasLtGetStatusString(int32_t status);
const char *cublasLtGetStatusString(int32_t status) { return status ? "wrong" : "good"; }
