/* marks.c - records marks between kinds of work, and adds up the times between them.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/marks.h"

esa_status esa_nn_marks_make(esa_nn *nn)
{
    nn->marks = esa_mem_zalloc(&nn->ctx->mem, (int64_t)sizeof *nn->marks);
    return nn->marks ? ESA_OK : esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for marks");
}

void esa_nn_marks_free(esa_nn *nn)
{
    if (!nn->marks) return;
    for (int32_t k = 0; k < 2; k++)
        for (int32_t i = 0; i < ESA_NN_MARKS; i++)
            nn->be->mark_release(nn->ctx, &nn->marks->set[k].mark[i]);
    for (int32_t i = 0; i < ESA_NN_AHEAD; i++) nn->be->mark_release(nn->ctx, &nn->marks->block[i]);
    esa_mem_free(&nn->ctx->mem, nn->marks, (int64_t)sizeof *nn->marks);
    nn->marks = NULL;
}

/* Adds up the times of a closed set; waits for its last mark. */
static esa_status read_set(esa_nn *nn, esa_nn_mark_set *s)
{
    const int32_t used = s->used;
    s->used = s->reached = 0;
    for (int32_t i = 0; i + 1 < used; i++) {
        double seconds;
        ESA_TRY(nn->be->mark_elapsed(nn->ctx, &seconds, &s->mark[i], &s->mark[i + 1]));
        nn->seconds[s->kind[i]] += seconds;
    }
    return ESA_OK;
}

/* Records the next mark of the set of now. Both sets get their marks at the same time, so that the
 * memory does not depend on the number of steps. */
static esa_status record(esa_nn *nn)
{
    esa_nn_marks *m = nn->marks;
    esa_nn_mark_set *s = &m->set[m->now];
    esa_mark *twin = &m->set[1 - m->now].mark[s->used];
    if (!twin->handle) ESA_TRY(nn->be->mark_record(nn->ctx, twin));
    ESA_TRY(nn->be->mark_record(nn->ctx, &s->mark[s->used]));
    s->used++;
    return ESA_OK;
}

/* Ends the set of now with a last mark and goes on in the other one. */
static esa_status close_set(esa_nn *nn, int32_t reached)
{
    esa_nn_marks *m = nn->marks;
    esa_nn_mark_set *s = &m->set[m->now];
    if (!s->used) return ESA_OK;
    ESA_TRY(read_set(nn, &m->set[1 - m->now]));
    ESA_TRY(record(nn));
    s->reached = reached;
    m->now = 1 - m->now;
    return ESA_OK;
}

esa_status esa_nn_mark(esa_nn *nn, int32_t kind)
{
    const esa_nn_mark_set *full = &nn->marks->set[nn->marks->now];
    if (full->used && full->kind[full->used - 1] == kind) return ESA_OK;
    if (full->used == ESA_NN_MARKS - 1) ESA_TRY(close_set(nn, 0)); /* one is kept for the end */
    esa_nn_mark_set *s = &nn->marks->set[nn->marks->now];
    s->kind[s->used] = (int8_t)kind;
    return record(nn);
}

esa_status esa_nn_marks_pace(esa_nn *nn)
{
    esa_nn_marks *m = nn->marks;
    esa_nn_mark_set *last = &m->set[1 - m->now];
    esa_mark *mark = &m->block[m->begun % ESA_NN_AHEAD];
    double seconds;
    if (last->reached) ESA_TRY(read_set(nn, last));
    if (m->begun >= ESA_NN_AHEAD) ESA_TRY(nn->be->mark_elapsed(nn->ctx, &seconds, mark, mark));
    ESA_TRY(nn->be->mark_record(nn->ctx, mark));
    m->begun++;
    return ESA_OK;
}

esa_status esa_nn_marks_turn(esa_nn *nn) { return close_set(nn, 1); }

esa_status esa_nn_marks_settle(esa_nn *nn)
{
    ESA_TRY(close_set(nn, 1));
    for (int32_t k = 0; k < 2; k++) ESA_TRY(read_set(nn, &nn->marks->set[k]));
    return ESA_OK;
}
