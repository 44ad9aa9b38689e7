/* backend.h - the interface to the devices: one table of functions per device.
 * SPDX-License-Identifier: Apache-2.0
 *
 * There are two tables: esa_backend_cpu (cpu_backend.c) and esa_backend_cuda (cuda_backend.c). Code
 * above this header gets the table of a device from esa_backend_of and calls its functions. It does
 * not test which device it has. Where devices differ, members of the table say how (host_memory,
 * order_room).
 *
 * The caller of every function holds the guard of ctx. On failure a function returns a status and
 * leaves one message in ctx. Arguments must be checked and bound: the functions do not check them.
 *
 * "Device pointers" point into the memory of the device. If a workspace (ws) is NULL, the function
 * uses the ctx's scratch of that device. Scratch is valid until the next call that takes scratch.
 * Without host_memory, functions only enqueue work on the ctx's stream, unless a comment says that
 * they wait.
 *
 * A new device is a new table; no file above changes. The operations of networks are groups of
 * their own (engine.h), which use the memory, copies, marks and scratch that are here. A device
 * that lacks a group leaves its pointer NULL. */
#ifndef ESA_BACKEND_BACKEND_H
#define ESA_BACKEND_BACKEND_H

#include "backend/engine.h"
#include "base/args.h"
#include "base/engine.h"
#include "base/status.h"
#include "ctx/ctx.h"
#include "mask/mask.h"

/* A point in a device's work, for timing. Zero it before first use; mark_release empties it. */
typedef struct esa_mark {
    void *handle;   /* without host_memory: the device's event */
    double seconds; /* with host_memory: the time */
} esa_mark;

typedef struct esa_backend {
    const char *name; /* "CPU", "GPU": for messages */
    int32_t device;   /* ESA_DEVICE_* */
    /* 1: the host can read and write device memory, and calls return when their work is done.
     * 0: it cannot, and calls only enqueue work. */
    int32_t host_memory;
    /* 1: moving tokens into an order needs workspace, so a plan must know the order when it is
     * made. */
    int32_t order_room;

    /* Opens the device on first use; later calls cost nothing. */
    esa_status (*open)(esa_ctx *ctx);
    /* The number of the device that ctx uses among those of this kind (esa_tensor.device_index). */
    int32_t (*ordinal)(const esa_ctx *ctx);
    /* Opens the device and checks that it can read this view. name is the view's name in
     * messages. */
    esa_status (*reach)(esa_ctx *ctx, const esa_tensor *view, const char *name);

    /* Memory. On success the caller of alloc owns *ptr; on failure *ptr is NULL. release takes the
     * size given to alloc, and accepts NULL. scratch gives memory that the ctx owns. upload copies
     * from the host; src may change once it returns. download copies to the host and waits. copy
     * stays on the device. */
    esa_status (*alloc)(esa_ctx *ctx, void **ptr, int64_t bytes);
    void (*release)(esa_ctx *ctx, void *ptr, int64_t bytes);
    esa_status (*scratch)(esa_ctx *ctx, void **ws, int64_t bytes);
    esa_status (*upload)(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);
    esa_status (*download)(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);
    esa_status (*copy)(esa_ctx *ctx, void *dst, const void *src, int64_t bytes);

    /* Timing. mark_elapsed gives the seconds between two recorded marks. It waits for the second
     * mark. */
    esa_status (*mark_record)(esa_ctx *ctx, esa_mark *mark);
    esa_status (*mark_elapsed)(esa_ctx *ctx, double *seconds, const esa_mark *from,
                               const esa_mark *to);
    void (*mark_release)(esa_ctx *ctx, esa_mark *mark);

    /* Attention. attention_workspace gives the bytes for any views of these sizes; it only tests
     * whether pointers in args are NULL. attention_kernel says which kernel would run. */
    int64_t (*attention_workspace)(esa_ctx *ctx, const esa_attn_args *args);
    esa_status (*attention)(esa_ctx *ctx, const esa_attn_args *args, void *ws);
    esa_attn_kernel (*attention_kernel)(esa_ctx *ctx, const esa_attn_args *args);
    /* Two calls that do not depend on one another, with a workspace each; the device may run them
     * at the same time. NULL: the device runs one call after the other. */
    esa_status (*attention_both)(esa_ctx *ctx, const esa_attn_args *first, void *first_ws,
                                 const esa_attn_args *second, void *second_ws);

    /* Exact rows: R = args->exact_rows rows of every query block (rules/exact_rows.h). exact_take
     * copies these rows of q to rows [B][Hq][nq*R][D], contiguous, in args->dtype. exact_mend has
     * their exact output o [B][Hq][nq*R][D] and, if args->lse is set, lse [B][Hq][nq*R]. It writes
     * them to args->o and args->lse, and corrects the other rows of args->o. */
    esa_status (*exact_take)(esa_ctx *ctx, const esa_attn_args *args, void *rows);
    esa_status (*exact_mend)(esa_ctx *ctx, const esa_attn_args *args, const void *o,
                             const float *lse);

    /* Selection. select fills the mask and its facts. If importance is not NULL, it receives the
     * entropy selector's importance f32[B][Hq][nq][nk]; without host_memory it must be NULL. If
     * there is no scratch, the mask stays as it was; after any other failure it is empty. */
    int64_t (*select_workspace)(esa_ctx *ctx, const esa_select_args *args);
    esa_status (*select)(esa_ctx *ctx, const esa_select_args *args, esa_mask *mask,
                         float *importance, void *ws);
    /* Writes importance f32[B][Hq][nq][nk] and entropies f64[B][Hq] (entropy may be NULL) to host
     * memory; waits. */
    int64_t (*importance_workspace)(esa_ctx *ctx, const esa_select_args *args);
    esa_status (*importance)(esa_ctx *ctx, const esa_select_args *args, float *out, double *entropy,
                             void *ws);

    /* The error selector. errors writes its scores f32[levels][B][Hq][nq][nk] to host memory and
     * waits; levels is 2 with tail LEVELS, else 1. */
    int64_t (*errors_workspace)(esa_ctx *ctx, const esa_select_args *args);
    esa_status (*errors)(esa_ctx *ctx, const esa_select_args *args, float *out, void *ws);

    /* Makes adaptive orders from q and k: perm_q [B][Hq][Nq] and perm_k [B][Hkv][Nk] are device
     * pointers. perm_q and perm_k of args are the orders to start from ([Nq], [Nk]; NULL:
     * raster). */
    int64_t (*order_workspace)(esa_ctx *ctx, const esa_select_args *args);
    esa_status (*order)(esa_ctx *ctx, const esa_select_args *args, int32_t *perm_q, int32_t *perm_k,
                        void *ws);

    /* Masks. mask_create makes an empty mask on the device with the geometry, layout and settings
     * of like, which may be on any device. The caller owns *mask; on failure it is NULL. bits and
     * fine are device pointers, [B][H][nq][ceil(nk/8)]; fine is NULL if the mask has no fine level.
     * mask_set_bits fills the lists, facts[1] and facts[2], and leaves facts[0]. */
    esa_status (*mask_create)(esa_ctx *ctx, esa_mask **mask, const esa_mask *like);
    esa_status (*mask_set_bits)(esa_ctx *ctx, esa_mask *mask, const uint8_t *bits,
                                const uint8_t *fine);
    esa_status (*mask_get_bits)(esa_ctx *ctx, const esa_mask *mask, uint8_t *bits, uint8_t *fine);

    /* The operations of networks (engine.h); NULL: the device has none. */
    const esa_engine_rows *rows;
    const esa_engine_products *products;
    const esa_engine_latents *latents;
    const esa_engine_biased *biased;
    const esa_engine_planes *planes;
    const esa_engine_transfer *transfer;
} esa_backend;

/* The table of a device, in static storage; NULL for a number that is no ESA_DEVICE_*. */
ESA_ENGINE const esa_backend *esa_backend_of(int32_t device);

/* Makes the permutations of a resolved layout for one call, and a workspace of bytes. All three are
 * device pointers into the ctx's scratch, valid until the next call that takes scratch. A
 * permutation is NULL if the layout moves nothing on that side. */
esa_status esa_backend_orders(esa_ctx *ctx, const esa_backend *be, const int32_t **perm_q,
                              const int32_t **perm_k, void **ws, const esa_layout *layout,
                              int32_t mode, int64_t Nq, int64_t Nk, int64_t bytes);
/* *perm = the permutation of one side (0: q, 1: k) in device memory, N * 4 bytes. The caller owns
 * it and gives it to release. */
esa_status esa_backend_order(esa_ctx *ctx, const esa_backend *be, int32_t **perm,
                             const esa_layout *layout, int32_t side, int32_t mode, int64_t N);
/* *copy = a copy of a filled mask, in the memory of be. The caller owns *copy; on failure it is
 * NULL. */
esa_status esa_backend_mask_copy(esa_ctx *ctx, const esa_backend *be, esa_mask **copy,
                                 const esa_mask *mask);

/* 1 if the mask is in the memory of be, and on the GPU that ctx uses if be is a GPU. */
int32_t esa_backend_mask_here(const esa_ctx *ctx, const esa_backend *be, const esa_mask *mask);

extern const esa_backend esa_backend_cpu, esa_backend_cuda;

#endif
