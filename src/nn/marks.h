/* marks.h - how long the kinds of work take on a device that runs behind the host.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A mark is recorded where one kind of work follows another. The time between two marks is added to
 * nn->seconds when the host waits for the device anyway (settle). */
#ifndef ESA_NN_MARKS_H
#define ESA_NN_MARKS_H

#include "nn/nn.h"

/* Marks until settle must run: a step of 40 blocks and 2 guidance branches has about 1000. */
enum { ESA_NN_MARKS = 2048 };
/* Blocks that the host may be ahead of the device. */
enum { ESA_NN_AHEAD = 4 };

struct esa_nn_marks {
    int32_t used, begun; /* marks since settle; blocks so far */
    int8_t kind[ESA_NN_MARKS];
    esa_mark mark[ESA_NN_MARKS];
    esa_mark block[ESA_NN_AHEAD];
};

esa_status esa_nn_marks_make(esa_nn *nn);
void esa_nn_marks_free(esa_nn *nn);
/* Work that is enqueued from now on is of this kind. */
esa_status esa_nn_mark(esa_nn *nn, int32_t kind);
/* ops->pace and ops->settle */
esa_status esa_nn_marks_pace(esa_nn *nn);
esa_status esa_nn_marks_settle(esa_nn *nn);

#endif
