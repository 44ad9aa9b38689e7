/* stand_in.h - what the files of the stand-in GPU share.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CUDA_STAND_IN_H
#define ESA_TESTS_CUDA_STAND_IN_H

#include "cpu/cpu.h"
#include "base/pool.h"
#include "cuda/cuda.h"

/* Copies into a lane that have not happened yet. */
enum { STAND_IN_COPIES = 256 };
typedef struct stand_in_lane {
    struct {
        void *dst;
        const void *src;
        int64_t bytes, number; /* number: copies are numbered as they are asked for */
    } copy[STAND_IN_COPIES];
    int32_t copies;
} stand_in_lane;

struct esa_cuda_device {
    char level[8];         /* "sm90a", or what $ESA_CUDA says */
    char kernel[24];       /* name of its 8-bit kernel */
    esa_cpu_kernels eight; /* for 8-bit attention below sm90a, as the kernels of the level do it */
    esa_pool *pool;
    stand_in_lane lane[ESA_CUDA_LANES];
    int64_t copies;
    char error[512];
};

/* Put around work that touches "device" memory; pairs may nest. */
void stand_in_enter(void);
void stand_in_leave(void);
/* Writes the message into dev and returns status. */
esa_status stand_in_say(esa_cuda_device *dev, esa_status status, const char *text);
/* The failure of a call that needs no memory, if $ESA_STAND_IN_FAIL says that it is its turn. */
esa_status stand_in_luck(esa_cuda_device *dev);

/* Counts something small that must be given back, so that a leak of it is seen: 1 when it is made,
 * -1 when it is gone. */
void stand_in_count(int64_t change);

/* stand_in_engine.c */
extern const esa_cuda_rows stand_in_rows;
extern const esa_cuda_latents stand_in_latents;
/* stand_in_transfer.c */
extern const esa_cuda_transfer stand_in_transfer;
/* stand_in_products.c */
extern const esa_cuda_products stand_in_products;
/* stand_in_biased.c */
extern const esa_cuda_biased stand_in_biased;
/* stand_in_planes.c */
extern const esa_cuda_planes stand_in_planes;

#endif
