/* mask_errors.c - one cell of a recording of errors: scores, masks, remaining errors, costs.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The pool gets one item per head, so every number is computed by one worker in one order. */
#include "maskfile/mask_build.h"

#include <string.h>
#include "base/pool.h"
#include "base/status.h"

esa_status esa_error_cell_create(esa_ctx *ctx, esa_error_cell *cell, const esa_mask_file_info *info)
{
    memset(cell, 0, sizeof *cell);
    cell->ctx = ctx;
    cell->info = *info;
    esa_select_args *a = &cell->args;
    esa_run_bind(a, ctx, ESA_SELECT_ERROR, info);
    a->params.tail = info->tail;
    a->params.fine = info->fine;
    a->params.group_q = info->group_q;
    a->params.group_k = info->group_k;
    const esa_allocator *mem = &ctx->mem;
    cell->errors_bytes = esa_size_mul(
        esa_size_mul(esa_size_mul(4 * esa_run_levels(info), info->H), info->nq), info->nk);
    cell->sum_bytes = 8 * info->nk * esa_pool_threads(ctx->pool);
    cell->ws_bytes = esa_select_errors_workspace(a);
    cell->errors = esa_mem_alloc(mem, cell->errors_bytes);
    cell->sum = esa_mem_alloc(mem, cell->sum_bytes);
    cell->left = esa_mem_alloc(mem, 16 * info->H);
    cell->ws = esa_mem_alloc(mem, cell->ws_bytes);
    cell->mask = esa_mask_new(mem, 1, info->H, info->Nq, info->Nk, info->nq, info->nk,
                              info->block_q, info->block_k);
    if (cell->errors && cell->sum && cell->left && cell->ws && cell->mask &&
        (!info->fine || esa_mask_add_fine(cell->mask, info->fine)))
        return ESA_OK;
    esa_error_cell_free(cell);
    return esa_fail(ctx, ESA_ERR_MEMORY,
                    "out of memory for masks of %lld heads and %lld x %lld blocks",
                    (long long)info->H, (long long)info->nq, (long long)info->nk);
}

void esa_error_cell_free(esa_error_cell *cell)
{
    if (!cell->ctx) return;
    const esa_allocator *mem = &cell->ctx->mem;
    esa_mem_free(mem, cell->errors, cell->errors_bytes);
    esa_mem_free(mem, cell->sum, cell->sum_bytes);
    esa_mem_free(mem, cell->left, 16 * cell->info.H);
    esa_mem_free(mem, cell->ws, cell->ws_bytes);
    esa_mask_free(cell->mask);
    memset(cell, 0, sizeof *cell);
}

/* ---------------------------------------------------------------- scores */

typedef struct load_job {
    esa_error_cell *cell;
    const esa_recording *rec;
    int32_t count;
    int64_t index;
    double one;
} load_job;

/* Item: one head of one level. */
static void load_head(void *arg, int64_t item, int32_t worker)
{
    const load_job *job = arg;
    const int64_t nq = job->cell->info.nq, nk = job->cell->info.nk;
    uint64_t *sum = job->cell->sum + worker * nk;
    for (int64_t r = item * nq; r < (item + 1) * nq; r++) {
        esa_recordings_row(sum, job->rec, job->count, job->index, r);
        for (int64_t j = 0; j < nk; j++)
            job->cell->errors[r * nk + j] = (float)((double)sum[j] / job->one);
    }
}

void esa_error_cell_load(esa_error_cell *cell, const esa_recording *rec, int32_t count,
                         int64_t index)
{
    load_job job = { cell, rec, count, index,
                     (double)esa_recordings_count(rec, count, index) * ESA_RECORD_ERROR_ONE };
    esa_pool_run(cell->ctx->pool, load_head, &job, esa_run_levels(&cell->info) * cell->info.H);
}

/* ---------------------------------------------------------------- masks */

static void left_head(void *arg, int64_t h, int32_t worker)
{
    (void)worker;
    esa_error_cell *cell = arg;
    const esa_mask *m = cell->mask;
    const int64_t level = m->H * m->nq * m->nk;
    double left = 0, all = 0;
    for (int64_t r = h * m->nq; r < (h + 1) * m->nq; r++) {
        const float *mean = cell->errors + r * m->nk, *fine = mean + level;
        double row = 0, gone = 0;
        for (int64_t j = 0; j < m->nk; j++) row += mean[j];
        for (int32_t c = 0; c < m->count[r]; c++) gone += mean[m->index[r * m->cap + c]];
        for (int32_t c = 0; m->fine && c < m->fine_count[r]; c++) {
            const int64_t j = m->fine_index[r * m->cap + c];
            gone += (double)mean[j] - (double)fine[j];
        }
        all += row;
        left += row > gone ? row - gone : 0;
    }
    cell->left[h] = left;
    cell->left[m->H + h] = all;
}

void esa_error_cell_choose(esa_error_cell *cell, double budget)
{
    cell->args.params.budget = budget;
    esa_select_from_errors(&cell->args, cell->mask, cell->errors, cell->ws);
    cell->mask->filled = 1;
    esa_pool_run(cell->ctx->pool, left_head, cell, cell->info.H);
}

double esa_error_cell_error(const esa_error_cell *cell)
{
    double sum = 0;
    for (int64_t h = 0; h < cell->info.H; h++) sum += cell->left[h];
    return sum / ((double)cell->info.H * (double)cell->info.nq);
}

double esa_error_cell_work(const esa_error_cell *cell)
{
    return esa_mask_file_mask_work(cell->mask, cell->info.tail, cell->info.exact_rows);
}
