/* store.h - the weights of a part where its operations read them: in the memory of the device of
 * nn.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A part wants its tensors (weights.h) in groups: esa_weights_group gives the number of the group
 * of the wants that follow. Group 0 is what every forward needs outside the blocks; group 1 + i is
 * block i. The store takes the place of esa_weights_load and fills the same views:
 *
 *     esa_weights_check(w, report, user);
 *     esa_store_open(nn, &store, w, &settings);
 *     for each forward: for each group g from 1 on:
 *         esa_store_begin(store, g); ... operations with the views of group g ...
 *         esa_store_end(store, g);
 *
 * On a device with host memory the views are those of esa_weights_load, and begin and end do
 * nothing. On another device a tensor is held
 *   - in F32 if it is wanted with ESA_WANT_F32,
 *   - in F8 if it is wanted with ESA_WANT_F8, settings ask for it and `keep` does not name it; its
 *     view has scale then,
 *   - in BF16 otherwise, biases included.
 * Tensors begin at multiples of 256 bytes. One with ESA_WANT_JOIN begins where the tensor before it
 * ends (so do its scales), so that q, k and v are one matrix.
 *
 * Group 0 stays on the device. Other groups stay too if they fit; the rest is copied from host
 * memory for each use, two groups ahead of the work at most. data and scale of the views of such a
 * group are valid between begin and end only, and may change from one begin to the next. Groups are
 * begun in ascending order, one at a time; after the last the order starts again at 1. A begin
 * without the end of the one before it ends that first, so a forward may be broken off. */
#ifndef ESA_MODEL_STORE_H
#define ESA_MODEL_STORE_H

#include "model/weights/weights.h"
#include "nn/nn.h"

typedef struct esa_store esa_store;

typedef struct esa_store_settings {
    int32_t hold;   /* ESA_HOLD_*, for host memory */
    int32_t linear; /* ESA_DTYPE_F8 for tensors with ESA_WANT_F8; anything else: BF16 */
    /* Names of tensors that stay in BF16: patterns with *, separated by commas; NULL: none. Only
     * read by esa_store_open. */
    const char *keep;
    /* Bytes of device memory in all: the weights with their lanes, what nn and the ctx's scratch
     * hold, what loading needs, what esa_store_leave leaves, and a share for the driver. 0: what is
     * free. */
    int64_t limit;
    /* Called when weights would have to be copied for lack of device memory: another owner may give
     * memory back. bytes: what would let all weights stay. NULL: there is no other owner. */
    esa_status (*ask)(void *user, int64_t bytes);
    void *ask_user;
} esa_store_settings;

/* What the store has on the device. All 0 with host memory. */
typedef struct esa_store_plan {
    int64_t groups, resident;  /* groups with a number from 1 on; those that stay */
    int64_t resident_bytes;    /* of the weights that stay, group 0 included */
    int64_t lanes, lane_bytes; /* buffers for groups that are copied; bytes of all */
    int64_t streamed_bytes;    /* copied for each forward */
    int32_t pinned;            /* 1: the device reads the copies' source directly */
    int32_t f8;                /* tensors in F8 */
    double rate;               /* bytes per second of a copy, measured; 0: nothing is copied */
} esa_store_plan;

/* Loads checked weights. store keeps nn and w, which must outlive it; views stay in place. w's tick
 * is called while tensors are loaded (esa_weights_watch). The caller owns *store; on failure it is
 * NULL. Fails with ESA_ERR_MEMORY, ESA_ERR_DEVICE, ESA_ERR_UNSUPPORTED (F8 on a device without it),
 * or ESA_ERR_STATE "cancelled". */
esa_status esa_store_open(esa_nn *nn, esa_store **store, esa_weights *w,
                          const esa_store_settings *settings);
void esa_store_free(esa_store *store);
/* Makes the weights take at most so many bytes of device memory (0: the limit of the settings).
 * Groups that no longer fit are copied from now on, and groups that fit again stay. Nothing moves
 * if every group is where the new plan wants it. Must not be called between begin and end; waits.
 * ESA_ERR_MEMORY says the least that works; then all is as it was. */
esa_status esa_store_fit(esa_store *store, int64_t bytes);
/* Does the same, but leaves device memory for what is allocated next: bytes (activations, masks),
 * and what the ctx's scratch needs to become as large as scratch. Keeps the limit of the settings
 * and calls ask before groups are copied. */
esa_status esa_store_leave(esa_store *store, int64_t bytes, int64_t scratch);
/* The same as esa_store_leave, but no group that is copied now comes to stay. */
esa_status esa_store_clear(esa_store *store, int64_t bytes, int64_t scratch);
/* The most bytes that esa_store_leave could leave beside such a scratch, without asking; may be
 * negative. INT64_MAX with host memory. */
esa_status esa_store_spare(const esa_store *store, int64_t *bytes, int64_t scratch);
/* *bytes = device memory that is left beside the weights where they are, when what is allocated
 * next (bytes, a scratch of the ctx) is there; calls ask if that is less than `want`. May be
 * negative. INT64_MAX with host memory. */
esa_status esa_store_left(const esa_store *store, int64_t *bytes, int64_t want, int64_t next,
                          int64_t scratch);
/* Gives bytes of device memory back, or as many as the least plan that works allows. */
esa_status esa_store_give(esa_store *store, int64_t bytes);
void esa_store_get_plan(const esa_store *store, esa_store_plan *plan);
/* The plan in words, one line at a time: what stays, what is copied, and what that costs. Nothing
 * with host memory. */
void esa_store_describe(const esa_store *store, void (*say)(void *user, const char *line),
                        void *user);

/* 1 if it pays to measure the products of a block with this layer (nn/ops.h: prepares). Where other
 * blocks are F8, only the first and the last block are BF16, and measuring their products would
 * take longer than it saves. */
int32_t esa_store_measures(const esa_store *store, const esa_linear *l);

/* Only enqueue. After begin the views of the group can be used; work enqueued before end may read
 * them. */
esa_status esa_store_begin(esa_store *store, int32_t group);
esa_status esa_store_end(esa_store *store, int32_t group);

#endif
