/* backend.h - the seam to the devices: one table of functions per device.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The CPU (cpu_backend.c) and CUDA (cuda_backend.c) each fill one esa_backend. Code above this
 * header asks esa_backend_of for the table of its tensors' device and calls through it. It never
 * asks which device that is; where devices differ, the table says how (host_memory, order_room).
 *
 * Every function takes a ctx whose guard the caller holds. On failure it returns a status and
 * leaves one message in the ctx. Arguments are bound and checked: nothing below looks at them
 * again.
 *
 * Memory: "device pointers" lie in the device's own memory. A workspace (ws) may be NULL; then the
 * function takes the ctx's scratch of that device, which is valid until the next call that takes
 * scratch. Functions on a device without host_memory only enqueue work on the ctx's stream, except
 * where a comment says that they wait.
 *
 * A new device is a new filling and changes no file above. A new group of operations (those of
 * networks: linear, norm, rope, convolution, elementwise) is a new group of members here. It finds
 * memory, copies, marks and scratch in place, and a device that lacks it leaves its members NULL.
 */
#ifndef ESA_BACKEND_BACKEND_H
#define ESA_BACKEND_BACKEND_H

#include "base/args.h"
#include "base/status.h"
#include "ctx/ctx.h"
#include "mask/mask.h"

/* A point in a device's work, for timing. Zero it before first use; mark_release empties it. */
typedef struct esa_mark {
    void *handle;   /* devices that only enqueue */
    double seconds; /* devices that work at once */
} esa_mark;

typedef struct esa_backend {
    const char *name; /* "CPU", "GPU": for messages */
    int32_t device;   /* ESA_DEVICE_* */
    /* 1: the host reads and writes device memory directly, and calls return when their work is
     * done. 0: memory is apart, calls only enqueue. */
    int32_t host_memory;
    /* 1: moving tokens into an order takes workspace, so a plan must know the order beforehand. */
    int32_t order_room;

    /* Opens the device on first use; later calls cost nothing. */
    esa_status (*open)(esa_ctx *ctx);
    /* Opens the device and checks that it can read this view. name is the view's name in
     * messages. */
    esa_status (*reach)(esa_ctx *ctx, const esa_tensor *view, const char *name);

    /* Memory. release takes the size given to alloc, and accepts NULL. upload copies from the
     * host; src may change once it returns. download copies to the host and waits. copy stays on
     * the device. */
    esa_status (*alloc)(esa_ctx *ctx, void **ptr, int64_t bytes);
    void (*release)(esa_ctx *ctx, void *ptr, int64_t bytes);
    esa_status (*scratch)(esa_ctx *ctx, void **ws, int64_t bytes);
    esa_status (*upload)(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);
    esa_status (*download)(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);
    esa_status (*copy)(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);

    /* Timing. elapsed: seconds between two recorded marks; waits for the second. */
    esa_status (*mark_record)(esa_ctx *ctx, esa_mark *mark);
    esa_status (*mark_elapsed)(esa_ctx *ctx, double *seconds, const esa_mark *from,
                               const esa_mark *to);
    void (*mark_release)(esa_ctx *ctx, esa_mark *mark);

    /* Attention. workspace: the bytes for any views of these sizes; of the pointers in args only
     * NULL or not NULL counts. kernel: the name of what runs, in static storage. */
    int64_t (*attention_workspace)(esa_ctx *ctx, const esa_attn_args *args);
    esa_status (*attention)(esa_ctx *ctx, const esa_attn_args *args, void *ws);
    const char *(*attention_kernel)(esa_ctx *ctx, const esa_attn_args *args);

    /* Selection. select fills the mask and its facts. importance (host memory, or NULL) also
     * receives the entropy selector's importance f32[B][Hq][nq][nk]; it must be NULL without
     * host_memory. A selection that fails leaves an empty mask. */
    int64_t (*select_workspace)(esa_ctx *ctx, const esa_select_args *args);
    esa_status (*select)(esa_ctx *ctx, const esa_select_args *args, esa_mask *mask,
                         float *importance, void *ws);
    /* Importance f32[B][Hq][nq][nk] and entropies f64[B][Hq] (may be NULL) into host memory;
     * waits. */
    int64_t (*importance_workspace)(esa_ctx *ctx, const esa_select_args *args);
    esa_status (*importance)(esa_ctx *ctx, const esa_select_args *args, float *out, double *entropy,
                             void *ws);

    /* Masks. mask_create: an empty mask on the device with the geometry, layout and settings of
     * like, which may lie anywhere; *mask is the caller's. Bits are device pointers,
     * [B][H][nq][ceil(nk/8)]. mask_set_bits fills the lists and facts[1], and leaves facts[0]. */
    esa_status (*mask_create)(esa_ctx *ctx, esa_mask **mask, const esa_mask *like);
    esa_status (*mask_set_bits)(esa_ctx *ctx, esa_mask *mask, const uint8_t *bits);
    esa_status (*mask_get_bits)(esa_ctx *ctx, const esa_mask *mask, uint8_t *bits);
} esa_backend;

/* The table of a device, in static storage; NULL for a number that is no ESA_DEVICE_*. */
const esa_backend *esa_backend_of(int32_t device);

/* The permutations of a resolved layout in device memory, made for one call. The ctx's scratch
 * holds them, and behind them ws with bytes. A permutation is NULL where the layout moves nothing.
 * Valid until the next call that takes scratch. */
esa_status esa_backend_orders(esa_ctx *ctx, const esa_backend *be, const int32_t **perm_q,
                              const int32_t **perm_k, void **ws, const esa_layout *layout,
                              int32_t mode, int64_t Nq, int64_t Nk, int64_t bytes);
/* One side's permutation in device memory of its own, N * 4 bytes, for the caller to release. */
esa_status esa_backend_order(esa_ctx *ctx, const esa_backend *be, int32_t **perm,
                             const esa_layout *layout, int32_t side, int32_t mode, int64_t N);
/* *copy = a filled mask, wherever it lies, in the memory of be; the caller's. */
esa_status esa_backend_mask_copy(esa_ctx *ctx, const esa_backend *be, esa_mask **copy,
                                 const esa_mask *mask);

/* 1 if the mask lies in the memory of be, on the very device that ctx works on. */
int32_t esa_backend_mask_here(const esa_ctx *ctx, const esa_backend *be, const esa_mask *mask);

/* The two fillings. */
extern const esa_backend esa_backend_cpu, esa_backend_cuda;

#endif
