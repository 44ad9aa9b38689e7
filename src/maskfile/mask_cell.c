/* mask_cell.c - one cell of a mask file; see mask_cell.h. The pool gets one item per head, so every
 * number is computed by one worker in one order.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_cell.h"

#include <string.h>
#include "base/half.h"
#include "base/pool.h"
#include "maskfile/run_info.h"

esa_status esa_cell_create(esa_ctx *ctx, esa_cell *cell, const esa_mask_file_info *info)
{
    memset(cell, 0, sizeof *cell);
    cell->ctx = ctx;
    cell->info = *info;
    esa_code_table_init(&cell->table);
    esa_select_args *a = &cell->args;
    esa_run_bind(a, ctx, ESA_SELECT_ENTROPY, info);
    if (info->samples) a->params.samples = info->samples;
    cell->p_bytes = esa_size_mul(esa_size_mul(esa_size_mul(info->H, info->nq), info->nk), 4);
    cell->p = esa_mem_alloc(&ctx->mem, cell->p_bytes);
    cell->mask = cell->p ? esa_mask_new(&ctx->mem, 1, info->H, info->Nq, info->Nk, info->nq,
                                        info->nk, info->block_q, info->block_k)
                         : NULL;
    cell->ws_bytes = esa_select_workspace(a);
    cell->ws = cell->mask ? esa_mem_alloc(&ctx->mem, cell->ws_bytes) : NULL;
    if (cell->ws) return ESA_OK;
    esa_cell_free(cell);
    return esa_fail(ctx, ESA_ERR_MEMORY,
                    "out of memory for masks of %lld heads and %lld x %lld blocks",
                    (long long)info->H, (long long)info->nq, (long long)info->nk);
}

void esa_cell_free(esa_cell *cell)
{
    if (!cell->ctx) return;
    const esa_allocator *mem = &cell->ctx->mem;
    esa_mem_free(mem, cell->p, cell->p_bytes);
    esa_mem_free(mem, cell->ws, cell->ws_bytes);
    esa_mask_free(cell->mask);
    cell->p = NULL;
    cell->ws = NULL;
    cell->mask = NULL;
}

typedef struct load_job {
    esa_cell *cell;
    const uint8_t *code, *fine, *half;
    float *entropy;
    float *mass;
} load_job;

/* Scales a row to sum 1, summed in double from left to right. */
static void normalise(float *row, int64_t nk)
{
    double sum = 0;
    for (int64_t j = 0; j < nk; j++) sum += row[j];
    if (sum > 0) {
        for (int64_t j = 0; j < nk; j++) row[j] = (float)(row[j] / sum);
    } else {
        const float even = (float)(1.0 / (double)nk);
        for (int64_t j = 0; j < nk; j++) row[j] = even;
    }
}

static void load_head(void *arg, int64_t h, int32_t worker)
{
    (void)worker;
    const load_job *job = arg;
    const int64_t nq = job->cell->info.nq, nk = job->cell->info.nk;
    for (int64_t r = h * nq; r < (h + 1) * nq; r++) {
        float *row = job->cell->p + r * nk;
        if (job->code) {
            esa_code_decode(row, job->code + r * nk, job->fine + r * esa_fine_bytes(nk), 1.0f, nk,
                            &job->cell->table);
        } else {
            for (int64_t j = 0; j < nk; j++) {
                const float v = esa_load_f32(job->half, r * nk + j, ESA_DTYPE_F16);
                /* Foreign files: NaN, infinity and negatives count as 0. */
                row[j] = v > 0 && v <= 65504.0f ? v : 0;
            }
        }
        normalise(row, nk);
    }
}

void esa_cell_load_u8(esa_cell *cell, const uint8_t *code, const uint8_t *fine)
{
    load_job job = { .cell = cell, .code = code, .fine = fine };
    esa_pool_run(cell->ctx->pool, load_head, &job, cell->info.H);
}

void esa_cell_load_f16(esa_cell *cell, const void *half)
{
    load_job job = { .cell = cell, .half = half };
    esa_pool_run(cell->ctx->pool, load_head, &job, cell->info.H);
}

static void entropy_head(void *arg, int64_t h, int32_t worker)
{
    (void)worker;
    const load_job *job = arg;
    const int64_t nq = job->cell->info.nq, nk = job->cell->info.nk;
    double sum = 0;
    for (int64_t r = h * nq; r < (h + 1) * nq; r++)
        sum += esa_row_entropy(job->cell->p + r * nk, nk);
    job->entropy[h] = (float)(sum / (double)nq);
}

void esa_cell_entropy(esa_cell *cell, float *entropy)
{
    load_job job = { .cell = cell, .entropy = entropy };
    esa_pool_run(cell->ctx->pool, entropy_head, &job, cell->info.H);
}

static void mass_head(void *arg, int64_t h, int32_t worker)
{
    (void)worker;
    const load_job *job = arg;
    const esa_mask *m = job->cell->mask;
    double sum = 0;
    for (int64_t r = h * m->nq; r < (h + 1) * m->nq; r++) {
        const float *row = job->cell->p + r * m->nk;
        const uint16_t *index = m->index + r * m->cap;
        double kept = 0;
        for (int32_t c = 0; c < m->count[r]; c++) kept += row[index[c]];
        sum += kept;
    }
    job->mass[h] = (float)(sum / (double)m->nq);
}

void esa_cell_mask(esa_cell *cell, int32_t permille, uint8_t *bits, float *mass)
{
    cell->args.params.budget = permille / 1000.0;
    esa_select_from_importance(&cell->args, cell->mask, cell->p, cell->ws);
    cell->mask->filled = 1;
    esa_mask_to_bits(cell->mask, bits);
    load_job job = { .cell = cell, .mass = mass };
    esa_pool_run(cell->ctx->pool, mass_head, &job, cell->info.H);
}

int64_t esa_bits_kept(const uint8_t *bits, int64_t rows, int64_t nk)
{
    const int64_t bytes = rows * esa_ceil_div(nk, 8);
    int64_t kept = 0;
    for (int64_t i = 0; i < bytes; i++) kept += __builtin_popcount(bits[i]);
    return kept;
}

int32_t esa_bits_clean(const uint8_t *bits, int64_t rows, int64_t nk)
{
    const int64_t pitch = esa_ceil_div(nk, 8);
    const uint8_t beyond = nk % 8 ? (uint8_t)(0xff << (nk % 8)) : 0;
    for (int64_t r = 0; beyond && r < rows; r++)
        if (bits[(r + 1) * pitch - 1] & beyond) return 0;
    return 1;
}
