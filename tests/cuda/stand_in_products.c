/* stand_in_products.c - the matrix products of the stand-in GPU in plain C. Sums run in f32, column
 * by column; the result is rounded once, after bias and activation.
 * SPDX-License-Identifier: Apache-2.0 */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/half.h"

/* Outputs that are summed side by side. Their weights lie transposed in the room, so the inner loop
 * is one that compilers turn into vector code without changing the order of a sum. */
enum { LANES = 32 };

/* The stored number, without the scale of an F8 row. */
static float element(const esa_view *v, int64_t row, int64_t col, const float *f8)
{
    const int64_t at = row * v->ld + col;
    if (v->dtype == ESA_DTYPE_F32) return ((const float *)v->data)[at];
    if (v->dtype == ESA_DTYPE_BF16) return esa_bf16_to_f32(((const uint16_t *)v->data)[at]);
    return f8[((const uint8_t *)v->data)[at]];
}

static float finish(const esa_product_args *a, float x, int64_t col)
{
    if (a->bias)
        x += a->w.dtype == ESA_DTYPE_F32 ? ((const float *)a->bias)[col]
                                         : esa_bf16_to_f32(((const uint16_t *)a->bias)[col]);
    if (a->act == ESA_ACT_SILU) return x / (1 + expf(-x));
    if (a->act == ESA_ACT_GELU_TANH)
        return 0.5f * x * (1 + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    if (a->act == ESA_ACT_QUICK_GELU) return x / (1 + expf(-1.702f * x));
    if (a->act == ESA_ACT_GELU) return 0.5f * x * (1 + erff(x * 0.70710678f));
    return x;
}

/* Columns first .. first+n-1 of the output. room: [LANES + 1][in] */
static void columns(const esa_product_args *a, int64_t first, int64_t n, const float *f8,
                    float *room)
{
    const int64_t in = a->x.cols;
    float *w = room, *x = room + LANES * in; /* [in][LANES], [in] */
    for (int64_t k = 0; k < in; k++)
        for (int64_t c = 0; c < LANES; c++)
            w[k * LANES + c] = c < n ? element(&a->w, first + c, k, f8) : 0;
    for (int64_t r = 0; r < a->x.rows; r++) {
        float sum[LANES] = { 0 };
        for (int64_t k = 0; k < in; k++) x[k] = element(&a->x, r, k, f8);
        for (int64_t k = 0; k < in; k++)
            for (int c = 0; c < LANES; c++) sum[c] += x[k] * w[k * LANES + c];
        for (int64_t c = 0; c < n; c++) {
            const float scale = a->w.scale ? a->x.scale[r] * a->w.scale[first + c] : 1;
            float y = finish(a, sum[c] * scale, first + c);
            const int64_t at = r * a->y.ld + first + c;
            if (a->add) y += element(&a->y, r, first + c, f8);
            if (a->y.dtype == ESA_DTYPE_F32)
                ((float *)a->y.data)[at] = y;
            else
                ((uint16_t *)a->y.data)[at] = esa_f32_to_bf16(y);
        }
    }
}

static void all_columns(const esa_product_args *a, float *room)
{
    float f8[256];
    for (int i = 0; i < 256; i++) f8[i] = esa_f8_to_f32((uint8_t)i);
    for (int64_t c = 0; c < a->w.rows; c += LANES)
        columns(a, c, a->w.rows - c < LANES ? a->w.rows - c : LANES, f8, room);
}

/* All bits set is no number in any of the types. */
static void spoil(const esa_view *v)
{
    const int64_t element_bytes = esa_view_element(v->dtype);
    for (int64_t r = 0; r < v->rows; r++)
        memset((char *)v->data + r * v->ld * element_bytes, 0xff,
               (size_t)(v->cols * element_bytes));
    if (v->scale) memset(v->scale, 0xff, (size_t)v->rows * 4);
}

/* ---------------------------------------------------------------- the group */

/* The library that a real GPU opens for products. */
static esa_status find_blas(esa_cuda_device *dev)
{
    const char *state = getenv("ESA_STAND_IN_BLAS");
    if (!state || strcmp(state, "missing")) return stand_in_luck(dev);
    return stand_in_say(dev, ESA_ERR_DEVICE,
                        "the engine needs cuBLASLt on a GPU, and libcublasLt.so.13 was not found: "
                        "install the CUDA toolkit, or run `pip install nvidia-cublas`, or set "
                        "ESA_CUBLAS_LIB to the file");
}

static esa_status library(esa_cuda_device *dev, const char **name)
{
    const esa_status status = find_blas(dev);
    *name = status ? NULL : "stand-in";
    return status;
}

/* Loses what preparing may lose: x, its scales and y are no numbers afterwards. */
static esa_status prepare(esa_cuda_device *dev, const esa_product_args *args, void *stream)
{
    (void)stream;
    const esa_status status = find_blas(dev);
    if (status) return status;
    stand_in_enter();
    spoil(&args->x);
    spoil(&args->y);
    stand_in_leave();
    return ESA_OK;
}

/* The workspace is filled, so that a caller that keeps something in it sees it lost. */
enum { WORKSPACE = 64 << 10 };
static int64_t workspace(const esa_cuda_device *dev)
{
    (void)dev;
    return WORKSPACE;
}

static esa_status product(esa_cuda_device *dev, const esa_product_args *args, void *ws,
                          void *stream)
{
    (void)stream;
    const esa_status status = find_blas(dev);
    if (status) return status;
    if (args->add && (args->x.rows == 1 || args->act != ESA_ACT_NONE))
        return stand_in_say(dev, ESA_ERR_UNSUPPORTED, "a product cannot be added to its output");
    float *room = malloc((size_t)((LANES + 1) * (args->x.cols + 1)) * sizeof *room);
    if (!room) return stand_in_say(dev, ESA_ERR_MEMORY, "out of memory for a product");
    stand_in_enter();
    memset(ws, 0xff, WORKSPACE);
    all_columns(args, room);
    stand_in_leave();
    free(room);
    return ESA_OK;
}

const esa_cuda_products stand_in_products = { library, prepare, workspace, product };
