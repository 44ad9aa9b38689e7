// product.cuh - what the files of matrix products share: plans of cuBLASLt (lt_plan.cu), the
// measuring and the entry points (product.cu), and kernels of our own (gemv.cu, plain_product.cu).
// SPDX-License-Identifier: Apache-2.0
//
// Row-major y[rows][out] = x W^T is column-major D[out x rows] = A^T B with A = W (in x out) and
// B = x (in x rows), so cuBLASLt reads all matrices where they are.
//
// A product runs in one of three ways: FUSED, with bias and activation in cuBLASLt; BARE, with
// cuBLASLt for the sums and a kernel of ours for bias and activation, where it does not offer the
// combination of types; PLAIN, a kernel of ours for everything, where it offers nothing (F8 with
// rows that are no multiple of 16 bytes). One row always runs in gemv.cu.
#pragma once

#include "cuda/engine/activate.cuh"
#include "cuda/runtime/blas.h"
#include "cuda/runtime/views.cuh"

namespace products
{

enum { PLANS = 128, CANDIDATES = 8 };
static constexpr int64_t WORKSPACE = (int64_t)64 << 20;

enum way { FUSED, BARE, PLAIN };

// What an algorithm depends on. All members have the same size, so keys are compared as bytes.
struct plan_key {
    int64_t rows, in, out;
    int64_t ldx, ldw, ldy;
    int64_t align_x, align_w, align_y; // bytes, up to 256
    int64_t type, y_type;              // ESA_DTYPE_* of x and w; of y
    int64_t bias, act, fast, add;
};

struct plan {
    plan_key key;
    int64_t used; // number of the product that used it last; 0: the place is free
    int way;
    int measured;
    void *desc, *a, *b, *d; // of cuBLASLt
    lt_algo algo[CANDIDATES];
    int count, choice; // algorithms; the one in use
};

} // namespace products

// The products of one device object.
struct product_state {
    blas_library library;
    void *handle;
    int64_t products; // how many have run
    char name[1100];  // version and path
    products::plan plan[products::PLANS];
};

namespace products
{

// Opens cuBLASLt on first use. Fails with the message of blas_open.
esa_status open_library(esa_cuda_device *dev);
// The plan of a product, made on first use; null: out of memory for descriptors (message in dev).
plan *find_plan(esa_cuda_device *dev, const esa_product_args &args);
// Goes to the next algorithm after the one in use, or to the next way if there is none.
esa_status next_algorithm(esa_cuda_device *dev, plan *p, const esa_product_args &args);
// Runs algorithm number i of a plan that is not PLAIN. *refused: cuBLASLt does not take it, and
// nothing was enqueued.
esa_status run_algorithm(esa_cuda_device *dev, const plan *p, const esa_product_args &args, int i,
                         void *ws, cudaStream_t stream, bool *refused);

// plain_product.cu: all of a product; bias and activation alone, in place.
esa_status run_plain(esa_cuda_device *dev, const esa_product_args &args, cudaStream_t stream);
esa_status run_finish(esa_cuda_device *dev, const esa_product_args &args, cudaStream_t stream);
// gemv.cu: one row.
esa_status run_gemv(esa_cuda_device *dev, const esa_product_args &args, cudaStream_t stream);

#ifdef __CUDACC__
// Adds the bias to the sum of column c and applies the activation.
static __device__ __forceinline__ float finished(const esa_product_args &a, float x, int64_t c)
{
    if (a.bias)
        x += a.w.dtype == ESA_DTYPE_F32 ? ((const float *)a.bias)[c]
                                        : __bfloat162float(((const __nv_bfloat16 *)a.bias)[c]);
    return activate(x, a.act);
}

static __device__ __forceinline__ float stored(const esa_view &y, int64_t r, int64_t c)
{
    return y.dtype == ESA_DTYPE_F32
               ? ((const float *)y.data)[r * y.ld + c]
               : __bfloat162float(((const __nv_bfloat16 *)y.data)[r * y.ld + c]);
}

static __device__ __forceinline__ void store(const esa_view &y, int64_t r, int64_t c, float x)
{
    if (y.dtype == ESA_DTYPE_F32)
        ((float *)y.data)[r * y.ld + c] = x;
    else
        round_to((__nv_bfloat16 *)y.data + r * y.ld + c, x);
}
#endif

} // namespace products
