/* blas.h - opens cuBLASLt at run time. Plain C without CUDA, so that a test can run it anywhere.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The places that are searched, in this order:
 *   1. $ESA_CUBLAS_LIB: a file, or a folder with libcublasLt.so.13 or .12. If it is set, no other
 *      place is searched.
 *   2. a library that the process has loaded already (torch brings one)
 *   3. the CUDA toolkit: $CUDA_HOME, $CUDA_PATH, /usr/local/cuda
 *   4. where the system looks for libraries
 *   5. the packages of NVIDIA in a Python environment: the one that holds this plugin,
 *      $VIRTUAL_ENV, $CONDA_PREFIX, then the system's
 * In each place version 13 comes before 12. A library that cannot be used is passed over; the
 * message then names it. */
#ifndef ESA_CUDA_RUNTIME_BLAS_H
#define ESA_CUDA_RUNTIME_BLAS_H

#include "cuda/runtime/cublaslt.h"
#include "esa/esa.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct blas_library {
    void *handle; /* from dlopen; NULL: not open */
    lt_functions call;
    int64_t version; /* 120902 is 12.9.2 */
    char path[1024];
} blas_library;

/* newest: the highest major version that the driver serves (13 for CUDA 13); others are passed
 * over. On failure *library is zero, and error holds a message that says how to get the library;
 * the status is ESA_ERR_DEVICE. */
esa_status blas_open(blas_library *library, int32_t newest, char *error, int32_t error_bytes);
/* Accepts a library that is not open. */
void blas_close(blas_library *library);

#ifdef __cplusplus
}
#endif
#endif
