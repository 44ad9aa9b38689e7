/* stand_in_engine.c - the operations of networks of the stand-in GPU, in groups: luck and memory
 * around the plain C of stand_in_*.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "stand_in.h"

#include <stdlib.h>
#include "stand_in_latents.h"
#include "stand_in_rows.h"

static esa_status room_for(esa_cuda_device *dev, float **room, int64_t cols)
{
    *room = NULL;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    *room = malloc((size_t)(cols > 0 ? cols : 1) * 4);
    return *room ? ESA_OK : stand_in_say(dev, ESA_ERR_MEMORY, "out of memory for a row");
}

static esa_status norm(esa_cuda_device *dev, const esa_norm_args *args, void *stream)
{
    float *room;
    (void)stream;
    const esa_status status = room_for(dev, &room, args->x.cols);
    if (status) return status;
    stand_in_enter();
    stand_in_norm(args, room);
    stand_in_leave();
    free(room);
    return ESA_OK;
}

static esa_status qk(esa_cuda_device *dev, const esa_qk_args *args, void *stream)
{
    float *room;
    (void)stream;
    const esa_status status = room_for(dev, &room, args->q.cols);
    if (status) return status;
    stand_in_enter();
    stand_in_qk(args, room);
    stand_in_leave();
    free(room);
    return ESA_OK;
}

static esa_status act(esa_cuda_device *dev, const esa_act_args *args, void *stream)
{
    float *room;
    (void)stream;
    const esa_status status = room_for(dev, &room, args->x.cols);
    if (status) return status;
    stand_in_enter();
    stand_in_act(args, room);
    stand_in_leave();
    free(room);
    return ESA_OK;
}

const esa_cuda_rows stand_in_rows = { norm, qk, act };

static esa_status patches(esa_cuda_device *dev, const esa_patch_args *args, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    stand_in_patches(args);
    stand_in_leave();
    return ESA_OK;
}

static esa_status modulate(esa_cuda_device *dev, float *e, const float *table, const float *add,
                           int64_t rows, int64_t cols, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    for (int64_t i = 0; i < rows * cols; i++) e[i] = table[i] + add[i % cols];
    stand_in_leave();
    return ESA_OK;
}

static esa_status guide(esa_cuda_device *dev, float *v, const float *negative, float scale,
                        int64_t count, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    stand_in_guide(v, negative, scale, count);
    stand_in_leave();
    return ESA_OK;
}

static esa_status step(esa_cuda_device *dev, const esa_step_args *args, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    stand_in_step(args);
    stand_in_leave();
    return ESA_OK;
}

static esa_status figures(esa_cuda_device *dev, const esa_figures_args *args, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    stand_in_figures(args);
    stand_in_leave();
    return ESA_OK;
}

const esa_cuda_latents stand_in_latents = { patches, modulate, guide, step, figures };
