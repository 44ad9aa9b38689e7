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
    for (int32_t i = 0; i < ESA_NN_MARKS; i++) nn->be->mark_release(nn->ctx, &nn->marks->mark[i]);
    for (int32_t i = 0; i < ESA_NN_AHEAD; i++) nn->be->mark_release(nn->ctx, &nn->marks->block[i]);
    esa_mem_free(&nn->ctx->mem, nn->marks, (int64_t)sizeof *nn->marks);
    nn->marks = NULL;
}

esa_status esa_nn_mark(esa_nn *nn, int32_t kind)
{
    esa_nn_marks *m = nn->marks;
    if (m->used && m->kind[m->used - 1] == kind) return ESA_OK;
    if (m->used == ESA_NN_MARKS - 1) ESA_TRY(esa_nn_marks_settle(nn)); /* keeps one for the end */
    ESA_TRY(nn->be->mark_record(nn->ctx, &m->mark[m->used]));
    m->kind[m->used++] = (int8_t)kind;
    return ESA_OK;
}

esa_status esa_nn_marks_pace(esa_nn *nn)
{
    esa_nn_marks *m = nn->marks;
    esa_mark *mark = &m->block[m->begun % ESA_NN_AHEAD];
    double seconds;
    if (m->begun >= ESA_NN_AHEAD) ESA_TRY(nn->be->mark_elapsed(nn->ctx, &seconds, mark, mark));
    ESA_TRY(nn->be->mark_record(nn->ctx, mark));
    m->begun++;
    return ESA_OK;
}

esa_status esa_nn_marks_settle(esa_nn *nn)
{
    esa_nn_marks *m = nn->marks;
    const int32_t used = m->used;
    m->used = 0;
    if (!used) return ESA_OK;
    ESA_TRY(nn->be->mark_record(nn->ctx, &m->mark[used]));
    for (int32_t i = 0; i < used; i++) {
        double seconds;
        ESA_TRY(nn->be->mark_elapsed(nn->ctx, &seconds, &m->mark[i], &m->mark[i + 1]));
        nn->seconds[m->kind[i]] += seconds;
    }
    return ESA_OK;
}
