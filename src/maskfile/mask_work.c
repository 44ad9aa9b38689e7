/* mask_work.c - how much attention work the masks of a file mean for a whole run.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file.h"

#include <stdio.h>
#include <string.h>
#include "base/number.h"
#include "base/status.h"
#include "rules/work.h"

/* Works are whole per mille, so a work that is asked for may be half of one below. */
static const double rounding = 0.0005;

double esa_mask_file_mask_work(const esa_mask *m, int32_t tail, int32_t exact_rows)
{
    const int32_t levels = tail == ESA_TAIL_LEVELS && m->fine;
    const esa_attn_args a = { .B = 1,
                              .Hq = m->H,
                              .Hkv = m->H,
                              .Nq = m->Nq,
                              .Nk = m->Nk,
                              .nq = m->nq,
                              .nk = m->nk,
                              .block_q = m->block_q,
                              .block_k = m->block_k,
                              .causal = m->causal,
                              .tail = tail == ESA_TAIL_LEVELS && !levels ? ESA_TAIL_POOLED : tail,
                              .exact_rows = exact_rows,
                              .count = m->count,
                              .index = m->index,
                              .cap = m->cap,
                              .fine = levels ? m->fine : 0,
                              .fine_count = levels ? m->fine_count : NULL,
                              .fine_index = levels ? m->fine_index : NULL };
    return esa_work_attention(&a);
}

/* Steps of the run that use the masks of a stored group. */
static int32_t steps_of(const esa_mask_file *f, int64_t group)
{
    const int32_t warmup = esa_warmup_steps(f->info.warmup_frac, f->info.steps);
    int32_t n = 0;
    for (int32_t t = warmup; t < f->info.steps; t++)
        n += f->step_group[t] == f->stored_group[group];
    return n;
}

static double all_calls(const esa_mask_file *f)
{
    return (double)f->info.branches * f->info.layers * f->info.steps;
}

static int32_t is_dense(const esa_budget_masks *masks, int64_t cell)
{
    return masks->density && esa_mask_file_cell_density(masks, cell) >= 1;
}

double esa_mask_file_exact_work(const esa_mask_file_info *f)
{
    const esa_attn_args a = {
        .block_q = f->block_q, .Nq = f->Nq, .nq = f->nq, .exact_rows = f->exact_rows
    };
    return (double)esa_work_exact_rows(&a) / (double)f->Nq;
}

esa_status esa_mask_file_pick(esa_mask_file *f, int32_t *permille, double work)
{
    const esa_mask_file_info *info = &f->info;
    char list[200] = "";
    *permille = -1;
    for (int32_t b = 0, n = 0; b < info->budget_count; b++) {
        const double stored = info->budget_permille[b] / 1000.0;
        if (stored <= work + rounding) *permille = info->budget_permille[b];
        n += esa_text_format(list + n, sizeof list - (size_t)n, "%s%.3f", b ? ", " : "", stored);
    }
    if (*permille >= 0) return ESA_OK;
    return esa_fail(f->ctx, ESA_ERR_MISMATCH, "work is %.3f, but %.120s has masks for the works %s",
                    work, f->tensors->label, list);
}

/* mask: scratch. */
static esa_status count_work(esa_mask_file *f, double *work, const esa_budget_masks *masks,
                             esa_mask *mask)
{
    const int32_t own = f->info.fine || esa_run_errors(&f->info);
    const int32_t tail = own ? f->info.tail : ESA_TAIL_POOLED;
    double calls = 0, sum = 0;
    for (int64_t i = 0; i < f->cells; i++) {
        const int64_t at = i * f->cell_bytes;
        const int32_t steps = steps_of(f, i % f->info.stored_groups);
        ESA_TRY(esa_mask_file_check_bits(f, masks, i));
        esa_mask_set_bits(mask, masks->bits + at, masks->fine ? masks->fine + at : NULL);
        sum += steps *
               (is_dense(masks, i) ? 1 : esa_mask_file_mask_work(mask, tail, f->info.exact_rows));
        calls += steps;
    }
    *work = (sum + all_calls(f) - calls) / all_calls(f);
    return ESA_OK;
}

static esa_status work_of(esa_mask_file *f, double *work, double budget)
{
    const esa_mask_file_info *info = &f->info;
    const int32_t permille = esa_budget_permille(f->ctx, budget);
    if (permille < 0) return ESA_ERR_ARGUMENT;
    const esa_budget_masks *masks;
    ESA_TRY(esa_mask_file_budget(f, &masks, permille));
    esa_mask *mask = esa_mask_new(&f->mem, 1, info->H, info->Nq, info->Nk, info->nq, info->nk,
                                  info->block_q, info->block_k);
    const int32_t made = mask && (!info->fine || esa_mask_add_fine(mask, info->fine));
    if (made) mask->causal = info->causal;
    const esa_status status = made ? count_work(f, work, masks, mask)
                                   : esa_fail(f->ctx, ESA_ERR_MEMORY, "out of memory for a mask");
    esa_mask_free(mask);
    return status;
}

esa_status esa_mask_file_work(esa_mask_file *file, double *work, double budget)
{
    if (!file) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(file->ctx));
    const esa_status status = work ? work_of(file, work, budget)
                                   : esa_fail(file->ctx, ESA_ERR_ARGUMENT, "work is NULL");
    esa_ctx_leave(file->ctx);
    return status;
}
