/* cuda_engine.h - the groups of engine.h for the GPU, filled by cuda_engine.c.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_BACKEND_CUDA_ENGINE_H
#define ESA_BACKEND_CUDA_ENGINE_H

#include "backend/engine.h"

extern const esa_engine_rows esa_cuda_engine_rows;
extern const esa_engine_products esa_cuda_engine_products;
extern const esa_engine_latents esa_cuda_engine_latents;
extern const esa_engine_biased esa_cuda_engine_biased;
extern const esa_engine_planes esa_cuda_engine_planes;
extern const esa_engine_transfer esa_cuda_engine_transfer;

#endif
