/* cublaslt.h - the part of cuBLASLt that we call: types, numbers and function types.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The library is opened at run time (blas.h), and the plugin is built without its headers. The
 * numbers are part of its binary interface and are the same in versions 12 and 13. Handles and
 * descriptors are opaque pointers that the library creates and destroys. */
#ifndef ESA_CUDA_RUNTIME_CUBLASLT_H
#define ESA_CUDA_RUNTIME_CUBLASLT_H

#include <stddef.h>
#include <stdint.h>

/* cublasStatus_t. The last three refuse a product; nothing was enqueued then. */
enum { LT_SUCCESS = 0, LT_INVALID_VALUE = 7, LT_ARCH_MISMATCH = 8, LT_NOT_SUPPORTED = 15 };

enum { LT_F32 = 0, LT_F16 = 2, LT_BF16 = 14, LT_F8_E4M3 = 28 }; /* cudaDataType */
enum { LT_COMPUTE_F32 = 68, LT_COMPUTE_TF32 = 77 };             /* cublasComputeType_t */
enum { LT_OP_N = 0, LT_OP_T = 1 };                              /* cublasOperation_t */

/* cublasLtMatmulDescAttributes_t */
enum {
    LT_DESC_TRANSA = 3,        /* int32_t, LT_OP_* */
    LT_DESC_TRANSB = 4,        /* int32_t, LT_OP_* */
    LT_DESC_EPILOGUE = 7,      /* uint32_t, LT_EPILOGUE_* */
    LT_DESC_BIAS_POINTER = 8,  /* device pointer, one value for each row of D */
    LT_DESC_A_SCALE = 17,      /* device pointer to f32 */
    LT_DESC_B_SCALE = 18,      /* device pointer to f32 */
    LT_DESC_FAST_ACCUM = 25,   /* int8_t; 1 sums F8 products with fewer bits */
    LT_DESC_BIAS_TYPE = 26,    /* int32_t, cudaDataType */
    LT_DESC_A_SCALE_MODE = 31, /* int32_t, LT_SCALE_*; version 12.8 and newer */
    LT_DESC_B_SCALE_MODE = 32  /* int32_t, LT_SCALE_* */
};
/* cublasLtEpilogue_t. GELU is the approximation with tanh. */
enum {
    LT_EPILOGUE_NONE = 1,
    LT_EPILOGUE_BIAS = 4,
    LT_EPILOGUE_GELU = 32,
    LT_EPILOGUE_GELU_BIAS = 36
};
/* cublasLtMatmulMatrixScale_t: one scale, or one for each row of A and each column of B (compute
 * capability 9.0, version 12.9 and newer). */
enum { LT_SCALE_ONE = 0, LT_SCALE_OUTER = 3 };
enum { LT_VERSION_LEAST = 120000, LT_VERSION_OUTER = 120900 };
enum { LT_LAYOUT_BATCH = 5, LT_LAYOUT_BATCH_STRIDE = 6 }; /* int32_t; int64_t, in elements */
/* cublasLtMatmulPreferenceAttributes_t */
enum {
    LT_PREF_WORKSPACE = 1, /* uint64_t, bytes */
    LT_PREF_REDUCTION = 3, /* uint32_t, mask of ways to split the sums; 0: none */
    LT_PREF_ALIGN_A = 5,   /* uint32_t, bytes; the next three numbers are those of B, C and D */
    LT_PREF_ALIGN_B = 6,
    LT_PREF_ALIGN_C = 7,
    LT_PREF_ALIGN_D = 8
};

typedef struct lt_algo { /* cublasLtMatmulAlgo_t */
    uint64_t data[8];
} lt_algo;

typedef struct lt_result { /* cublasLtMatmulHeuristicResult_t */
    lt_algo algo;
    size_t workspace;
    int32_t state; /* LT_SUCCESS: the other fields are valid */
    float waves;
    int32_t reserved[4];
} lt_result;

/* The functions, with the names of the library after "cublasLt". All matrices are column-major. */
typedef struct lt_functions {
    int32_t (*Create)(void **handle);
    int32_t (*Destroy)(void *handle);
    size_t (*GetVersion)(void); /* 120902 is 12.9.2 */
    const char *(*GetStatusString)(int32_t status);
    int32_t (*MatmulDescCreate)(void **desc, int32_t compute, int32_t scale_type);
    int32_t (*MatmulDescDestroy)(void *desc);
    int32_t (*MatmulDescSetAttribute)(void *desc, int32_t attribute, const void *value,
                                      size_t bytes);
    int32_t (*MatrixLayoutCreate)(void **layout, int32_t type, uint64_t rows, uint64_t cols,
                                  int64_t ld);
    int32_t (*MatrixLayoutDestroy)(void *layout);
    int32_t (*MatrixLayoutSetAttribute)(void *layout, int32_t attribute, const void *value,
                                        size_t bytes);
    int32_t (*MatmulPreferenceCreate)(void **preference);
    int32_t (*MatmulPreferenceDestroy)(void *preference);
    int32_t (*MatmulPreferenceSetAttribute)(void *preference, int32_t attribute, const void *value,
                                            size_t bytes);
    /* Writes up to `most` results, fastest first by its own estimate. */
    int32_t (*MatmulAlgoGetHeuristic)(void *handle, void *desc, void *a, void *b, void *c, void *d,
                                      void *preference, int32_t most, lt_result *results,
                                      int32_t *count);
    /* D = alpha op(A) op(B) + beta C, then the epilogue. alpha and beta are in host memory. */
    int32_t (*Matmul)(void *handle, void *desc, const void *alpha, const void *A, void *a,
                      const void *B, void *b, const void *beta, const void *C, void *c, void *D,
                      void *d, const lt_algo *algo, void *ws, size_t ws_bytes, void *stream);
} lt_functions;

#endif
