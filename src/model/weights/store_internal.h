/* store_internal.h - the struct behind esa_store: store.c opens and fits, store_plan.c chooses
 * types and what stays, store_load.c brings files to the device, store_stream.c runs the lanes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A group is one block of bytes in final layout. It is in device memory (it stays) or in host
 * memory (it is copied into a lane for each use), and its bytes are the same in both. */
#ifndef ESA_MODEL_STORE_INTERNAL_H
#define ESA_MODEL_STORE_INTERNAL_H

#include "model/weights/store.h"
#include "model/weights/weights_internal.h"

enum {
    ESA_STORE_LANES = 2, /* of the transfer group: 0 and 1 stream, the next two load */
    ESA_STORE_ALIGN = 256
};

typedef struct esa_stored {
    esa_wanted *e;
    int32_t dtype;        /* on the device */
    int64_t rows, cols;   /* as a matrix; a vector is one row */
    int64_t offset, size; /* in the group, bytes */
    int64_t scale;        /* F8: offset of the scales; else -1 */
} esa_stored;

typedef struct esa_store_group {
    int64_t first, count; /* of esa_store.tensor */
    int64_t bytes;
    void *device;   /* it stays here; NULL: it is copied */
    void *host;     /* source of the copies; NULL: it stays */
    int32_t pinned; /* of host */
    int32_t stays;  /* what the plan says */
} esa_store_group;

struct esa_store {
    esa_nn *nn;
    esa_weights *w;
    int64_t limit; /* of the settings */
    esa_status (*ask)(void *user, int64_t bytes);
    void *ask_user;
    esa_stored *tensor; /* [tensors], by group */
    int64_t tensors;
    esa_store_group *group; /* [groups]; NULL: host memory, nothing to do */
    int32_t groups, f8;

    int32_t *queue; /* [groups] numbers of the groups that are copied, in order */
    int32_t queued;
    int32_t lanes;
    void *lane[ESA_STORE_LANES];
    int64_t lane_bytes; /* of each */
    /* Pinned memory for groups whose host memory is not pinned; NULL: not needed, or refused. */
    void *stage[ESA_STORE_LANES];
    int32_t no_stage;               /* 1: refused */
    int32_t holds[ESA_STORE_LANES]; /* place in the queue of what is in the lane; -1: nothing */
    int32_t open, open_lane;        /* the group between begin and end; 0: none */
    double rate;                    /* bytes per second of the copies; 0: not measured */
    int64_t pin_room;               /* bytes that may still be pinned */
};

/* store_plan.c */
esa_status esa_store_layout(esa_store *s, const esa_store_settings *settings);
/* Sets group[].stays, the number of lanes and their size for a limit in bytes. */
esa_status esa_store_choose(esa_store *s, int64_t limit);
/* Bytes of device memory if all groups stay, and with the least plan that works. */
int64_t esa_store_all(const esa_store *s);
int64_t esa_store_least(const esa_store *s);
/* Bytes of device memory that the weights take now. */
int64_t esa_store_held(const esa_store *s);

/* store_load.c: fills the groups as the plan says; lanes are there. */
esa_status esa_store_load(esa_store *s);
/* Bytes of device memory that this takes for a while beside the groups. */
int64_t esa_store_loading(const esa_store *s);

/* store_stream.c */
/* Looks how much host memory may be pinned. */
void esa_store_look(esa_store *s);
/* Host memory for a group that is copied; pinned if there is room for that. */
esa_status esa_store_host(esa_store *s, esa_store_group *g);
void esa_store_host_free(esa_store *s, esa_store_group *g);
esa_status esa_store_lanes(esa_store *s); /* as the plan says */
void esa_store_lanes_free(esa_store *s);
/* Makes the queue, points the views of groups that stay, and starts the first copies. */
esa_status esa_store_start(esa_store *s);

#endif
