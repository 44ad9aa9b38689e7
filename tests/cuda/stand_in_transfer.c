/* stand_in_transfer.c - copies to the stand-in GPU beside its work, and conversions of weights.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A real GPU copies at any time between `fetch` and `arrive`. Here the target is spoilt at once, so
 * work that still reads the old contents is caught, and the copy happens as late as it may, so work
 * that does not wait, and a source that changes too early, are caught. $ESA_STAND_IN_PIN=n lets
 * the next n calls of pin fail. */
#include "stand_in.h"

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/half.h"
#include "base/rng.h"

enum { MOST_PINNED = 256 };
static struct {
    char *base;
    int64_t bytes;
} pinned[MOST_PINNED];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* 1: $ESA_STAND_IN_PIN says that this call is to fail. */
static int refuse_pin(void)
{
    const char *left = getenv("ESA_STAND_IN_PIN");
    char now[16];
    if (!left) return 0;
    snprintf(now, sizeof now, "%d", atoi(left) - 1);
    if (atoi(left) > 1)
        setenv("ESA_STAND_IN_PIN", now, 1);
    else
        unsetenv("ESA_STAND_IN_PIN");
    return 1;
}

static esa_status pin(esa_cuda_device *dev, void **ptr, int64_t bytes)
{
    *ptr = NULL;
    const esa_status status = stand_in_luck(dev);
    if (status) return stand_in_say(dev, ESA_ERR_MEMORY, "the stand-in GPU pins no more memory");
    char *base = bytes < 0 || bytes > INT64_C(1) << 34 || refuse_pin() ? NULL
                                                                       : malloc((size_t)bytes + 1);
    if (!base) return stand_in_say(dev, ESA_ERR_MEMORY, "out of memory to pin");
    pthread_mutex_lock(&lock);
    int32_t place = 0;
    while (place < MOST_PINNED && pinned[place].base) place++;
    if (place < MOST_PINNED) {
        pinned[place].base = base;
        pinned[place].bytes = bytes;
    }
    pthread_mutex_unlock(&lock);
    if (place == MOST_PINNED) {
        free(base);
        return stand_in_say(dev, ESA_ERR_MEMORY, "too much is pinned: something leaks");
    }
    stand_in_count(1);
    *ptr = base;
    return ESA_OK;
}

/* 1 if the bytes lie in pinned memory. */
static int is_pinned(const char *src, int64_t bytes)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int32_t i = 0; i < MOST_PINNED; i++)
        found |= pinned[i].base && src >= pinned[i].base &&
                 src + bytes <= pinned[i].base + pinned[i].bytes;
    pthread_mutex_unlock(&lock);
    return found;
}

static void unpin(esa_cuda_device *dev, void *ptr)
{
    (void)dev;
    if (!ptr) return;
    pthread_mutex_lock(&lock);
    int32_t place = 0;
    while (place < MOST_PINNED && pinned[place].base != ptr) place++;
    if (place == MOST_PINNED) abort();              /* freed twice, or never ours */
    memset(ptr, 0xff, (size_t)pinned[place].bytes); /* a copy that comes too late is seen */
    pinned[place].base = NULL;
    pthread_mutex_unlock(&lock);
    stand_in_count(-1);
    free(ptr);
}

static esa_status check_lane(esa_cuda_device *dev, int32_t lane)
{
    if (lane < 0 || lane >= ESA_CUDA_LANES)
        return stand_in_say(dev, ESA_ERR_INTERNAL, "no such lane, expected 0 to 6");
    return stand_in_luck(dev);
}

static esa_status queue(esa_cuda_device *dev, int32_t lane, void *dst, const void *src,
                        int64_t bytes)
{
    stand_in_lane *l = &dev->lane[lane];
    if (l->copies == STAND_IN_COPIES)
        return stand_in_say(dev, ESA_ERR_DEVICE, "too many copies into one lane");
    l->copy[l->copies].dst = dst;
    l->copy[l->copies].src = src;
    l->copy[l->copies].number = ++dev->copies;
    l->copy[l->copies++].bytes = bytes;
    return ESA_OK;
}

/* Makes the oldest of the copies that wait, up to a number, in lanes first .. last - 1. 0: none. */
static int32_t copy_oldest(esa_cuda_device *dev, int32_t first, int32_t last, int64_t number)
{
    stand_in_lane *from = NULL;
    for (int32_t i = first; i < last; i++) {
        stand_in_lane *l = &dev->lane[i];
        if (l->copies && l->copy[0].number <= number &&
            (!from || l->copy[0].number < from->copy[0].number))
            from = l;
    }
    if (!from) return 0;
    memcpy(from->copy[0].dst, from->copy[0].src, (size_t)from->copy[0].bytes);
    memmove(from->copy, from->copy + 1, (size_t)--from->copies * sizeof from->copy[0]);
    return 1;
}

/* A group of lanes copies in the order of the calls, so older copies of other lanes come first. */
static void copy_now(esa_cuda_device *dev, int32_t lane)
{
    const stand_in_lane *l = &dev->lane[lane];
    const int32_t carries = lane >= ESA_CUDA_CARRY_LANE;
    const int64_t number = l->copies ? l->copy[l->copies - 1].number : 0;
    stand_in_enter();
    while (copy_oldest(dev, carries ? ESA_CUDA_CARRY_LANE : 0,
                       carries ? ESA_CUDA_LANES : ESA_CUDA_CARRY_LANE, number)) {}
    stand_in_leave();
}

static esa_status fetch(esa_cuda_device *dev, int32_t lane, void *dst, const void *src,
                        int64_t bytes)
{
    const esa_status status = check_lane(dev, lane);
    if (status) return status;
    if (!is_pinned(src, bytes))
        return stand_in_say(dev, ESA_ERR_DEVICE, "a copy from memory that is not pinned");
    /* a store of the lane comes first; it may still read the target */
    if (lane >= ESA_CUDA_CARRY_LANE) copy_now(dev, lane);
    stand_in_enter();
    memset(dst, 0xff, (size_t)bytes); /* spoilt */
    stand_in_leave();
    return queue(dev, lane, dst, src, bytes);
}

static esa_status store(esa_cuda_device *dev, int32_t lane, void *dst, const void *src,
                        int64_t bytes, void *stream)
{
    (void)stream;
    if (lane < ESA_CUDA_CARRY_LANE)
        return stand_in_say(dev, ESA_ERR_INTERNAL, "a store from a lane for weights");
    const esa_status status = check_lane(dev, lane);
    if (status) return status;
    if (!is_pinned(dst, bytes))
        return stand_in_say(dev, ESA_ERR_DEVICE, "a copy to memory that is not pinned");
    return queue(dev, lane, dst, src, bytes);
}

static esa_status arrive(esa_cuda_device *dev, int32_t lane, void *stream)
{
    (void)stream;
    const esa_status status = check_lane(dev, lane);
    if (!status) copy_now(dev, lane);
    return status;
}

/* A wait that fails means that the copies failed: their sources may be freed. */
static esa_status landed(esa_cuda_device *dev, int32_t lane)
{
    const esa_status status = arrive(dev, lane, NULL);
    if (status && lane >= 0 && lane < ESA_CUDA_LANES) dev->lane[lane].copies = 0;
    return status;
}

static esa_status used(esa_cuda_device *dev, int32_t lane, void *stream)
{
    (void)stream;
    return check_lane(dev, lane);
}

/* ---------------------------------------------------------------- conversions */

static float source(const esa_convert_args *a, int64_t row, int64_t i)
{
    if (!a->x) return a->mean + a->deviation * esa_rng_bell(a->seed, (uint64_t)(a->first + i));
    if (a->x_dtype != ESA_DTYPE_F8) return esa_load_f32(a->x, i, a->x_dtype);
    const float x = esa_f8_to_f32(((const uint8_t *)a->x)[i]);
    return a->x_scales ? x * a->x_scale[a->x_scales > 1 ? row : 0] : x;
}

static void convert_row(const esa_convert_args *a, int64_t row)
{
    const esa_view *y = &a->y;
    const int64_t first = row * y->cols;
    float top = 0;
    for (int64_t i = first; i < first + y->cols; i++) {
        const float x = source(a, row, i);
        if (y->dtype == ESA_DTYPE_F8)
            top = fmaxf(top, fabsf(x));
        else
            esa_store_f32(y->data, i, y->dtype, x);
    }
    if (y->dtype != ESA_DTYPE_F8) return;
    if (a->x && a->x_dtype == ESA_DTYPE_F8) {
        memcpy((uint8_t *)y->data + first, (const uint8_t *)a->x + first, (size_t)y->cols);
        y->scale[row] = a->x_scales ? a->x_scale[a->x_scales > 1 ? row : 0] : 1;
        return;
    }
    y->scale[row] = top > ESA_F8_ZERO ? top / ESA_F8_MAX : 1;
    for (int64_t i = first; i < first + y->cols; i++)
        ((uint8_t *)y->data)[i] = esa_f32_to_f8(source(a, row, i) / y->scale[row]);
}

static esa_status convert(esa_cuda_device *dev, const esa_convert_args *args, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    for (int64_t r = 0; r < args->y.rows; r++) convert_row(args, r);
    stand_in_leave();
    return ESA_OK;
}

const esa_cuda_transfer stand_in_transfer = { pin,    unpin, fetch,  store,
                                              arrive, used,  landed, convert };
