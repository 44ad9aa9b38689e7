/* marks.h - how long the kinds of work take on a device that runs behind the host.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A mark is recorded where one kind of work follows another. When marks are read, the times between
 * them are added to nn->seconds. Reading a step's marks takes the host a millisecond or two, in
 * which the device would have nothing to do. So there are two sets: the marks of a step are read
 * after the first block of the next step has been enqueued. */
#ifndef ESA_NN_MARKS_H
#define ESA_NN_MARKS_H

#include "nn/nn.h"

/* Marks of a set: a step of 40 blocks and 2 guidance branches has about 1000. */
enum { ESA_NN_MARKS = 2048 };
/* Blocks that the host may be ahead of the device. */
enum { ESA_NN_AHEAD = 4 };

typedef struct esa_nn_mark_set {
    int32_t used;
    int32_t reached; /* 1: the device has passed them, so reading does not wait */
    int8_t kind[ESA_NN_MARKS];
    esa_mark mark[ESA_NN_MARKS];
} esa_nn_mark_set;

struct esa_nn_marks {
    int32_t now;   /* the set that marks are recorded in; the other one is empty or complete */
    int32_t begun; /* blocks so far */
    esa_nn_mark_set set[2];
    esa_mark block[ESA_NN_AHEAD];
};

esa_status esa_nn_marks_make(esa_nn *nn);
void esa_nn_marks_free(esa_nn *nn);
/* Work that is enqueued from now on is of this kind. */
esa_status esa_nn_mark(esa_nn *nn, int32_t kind);
/* ops->pace, ops->turn and ops->settle */
esa_status esa_nn_marks_pace(esa_nn *nn);
esa_status esa_nn_marks_turn(esa_nn *nn);
esa_status esa_nn_marks_settle(esa_nn *nn);

#endif
