/* mask_file.c - queries of an open mask file: cells, masks, importance, values per head.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "base/half.h"
#include "base/number.h"
#include "base/status.h"

/* Bindings depend on this layout; a change here changes the ABI. */
_Static_assert(offsetof(esa_mask_file_info, budget_permille) == 48 &&
                   offsetof(esa_mask_file_info, warmup_frac) == 136 &&
                   offsetof(esa_mask_file_info, H) == 144 &&
                   offsetof(esa_mask_file_info, layout) == 192,
               "esa_mask_file_info offsets");

esa_status esa_mask_file_check_ctx(esa_ctx *ctx, const esa_mask_file *file)
{
    if (!file) return esa_fail(ctx, ESA_ERR_ARGUMENT, "file is NULL");
    if (file->ctx != ctx)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the mask file belongs to another ctx");
    return ESA_OK;
}

int32_t esa_budget_permille(esa_ctx *ctx, double budget)
{
    if (budget >= 0 && budget <= 1) return (int32_t)floor(budget * 1000 + 0.5);
    esa_fail(ctx, ESA_ERR_ARGUMENT, "budget is %g, expected 0 to 1", budget);
    return -1;
}

int64_t esa_mask_file_cell(const esa_mask_file *f, int32_t layer, int32_t group, int32_t branch)
{
    if (layer < 0 || layer >= f->info.layers || group < 0 || group >= f->info.groups || branch < 0)
        return -1;
    const int64_t ls = f->layer_slot[layer], gs = f->group_slot[group],
                  b = f->info.branches == 1 ? 0 : branch;
    if (ls < 0 || gs < 0 || b >= f->info.branches) return -1;
    return (b * f->info.stored_layers + ls) * f->info.stored_groups + gs;
}

double esa_mask_file_cell_density(const esa_budget_masks *masks, int64_t cell)
{
    float v;
    if (!masks->density) return masks->permille / 1000.0;
    memcpy(&v, masks->density + 4 * cell, 4);
    return (double)v;
}

int32_t esa_mask_file_has_works(const esa_mask_file *f)
{
    return f->budgets && f->budgets->density != NULL;
}

int64_t esa_mask_file_existing(const esa_mask_file_info *f)
{
    if (!f->causal) return f->H * f->nq * f->nk;
    int64_t n = 0;
    for (int64_t i = 0; i < f->nq; i++) {
        /* Keys that the last query of the block sees. */
        const int64_t keys = esa_min64((i + 1) * f->block_q, f->Nq) + f->Nk - f->Nq;
        if (keys > 0) n += esa_ceil_div(keys, f->block_k);
    }
    return f->H * esa_max64(n, 1);
}

void esa_mask_file_load(const esa_mask_file *f, esa_cell *cell, int64_t index)
{
    const int64_t blocks = f->info.H * f->info.nq * f->info.nk;
    if (f->info.importance == ESA_IMPORTANCE_U8)
        esa_cell_load_u8(cell, f->importance + index * blocks,
                         f->fine + index * f->info.H * f->info.nq * esa_fine_bytes(f->info.nk));
    else
        esa_cell_load_f16(cell, f->importance + index * blocks * 2);
}

static esa_status no_budget(const esa_mask_file *f, int32_t permille)
{
    char list[160] = "";
    for (int32_t i = 0, n = 0; i < f->info.budget_count; i++)
        n += esa_text_format(list + n, sizeof list - (size_t)n, "%s%.3f", i ? ", " : "",
                             f->info.budget_permille[i] / 1000.0);
    return esa_fail(f->ctx, ESA_ERR_MISMATCH,
                    esa_mask_file_has_works(f)
                        ? "%s has masks for the total works %s, but not for %.3f"
                        : "%s has masks for the budgets %s and no importance, so %.3f cannot be "
                          "derived",
                    f->tensors->label, list, permille / 1000.0);
}

static esa_status no_memory(const esa_mask_file *f, int32_t permille)
{
    return esa_fail(f->ctx, ESA_ERR_MEMORY, "out of memory for masks of budget %.3f",
                    permille / 1000.0);
}

/* Fills m with masks of all cells, made from the stored importance. */
static esa_status derive(const esa_mask_file *f, esa_budget_masks *m, int32_t permille)
{
    const int64_t bits_bytes = esa_size_mul(f->cells, f->cell_bytes),
                  mass_bytes = esa_size_mul(f->cells, f->info.H * 4);
    m->permille = permille;
    m->owned_bytes = esa_size_add(mass_bytes, bits_bytes);
    m->owned = esa_mem_alloc(&f->mem, m->owned_bytes);
    if (!m->owned) return no_memory(f, permille);
    esa_cell cell = { 0 };
    ESA_TRY(esa_cell_create(f->ctx, &cell, &f->info));
    m->mass = m->owned; /* floats first, so that they are aligned */
    m->bits = m->owned + mass_bytes;
    for (int64_t i = 0; i < f->cells; i++) {
        esa_mask_file_load(f, &cell, i);
        esa_cell_mask(&cell, permille, m->owned + mass_bytes + i * f->cell_bytes,
                      (float *)(void *)m->owned + i * f->info.H);
    }
    esa_cell_free(&cell);
    return ESA_OK;
}

esa_status esa_mask_file_budget(esa_mask_file *f, const esa_budget_masks **masks, int32_t permille)
{
    esa_budget_masks **last = &f->budgets;
    for (; *last; last = &(*last)->next)
        if ((*last)->permille == permille) {
            *masks = *last;
            return ESA_OK;
        }
    if (!f->importance) return no_budget(f, permille);

    esa_budget_masks *m = esa_mem_zalloc(&f->mem, (int64_t)sizeof *m);
    if (!m) return no_memory(f, permille);
    const esa_status status = derive(f, m, permille);
    if (status) {
        esa_mem_free(&f->mem, m->owned, m->owned_bytes);
        esa_mem_free(&f->mem, m, (int64_t)sizeof *m);
        return status;
    }
    *last = m;
    *masks = m;
    return ESA_OK;
}

/* ---------------------------------------------------------------- the public calls */

esa_status esa_mask_file_get_info(const esa_mask_file *file, esa_mask_file_info *info)
{
    if (!file || !info) return ESA_ERR_ARGUMENT;
    if (info->struct_size != sizeof *info) return ESA_ERR_VERSION;
    *info = file->info;
    return ESA_OK;
}

esa_status esa_mask_file_require(esa_mask_file *file, double budget)
{
    if (!file) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(file->ctx));
    const int32_t permille = esa_budget_permille(file->ctx, budget);
    const esa_budget_masks *masks;
    const esa_status status = permille < 0 ? ESA_ERR_ARGUMENT
                                           : esa_mask_file_budget(file, &masks, permille);
    esa_ctx_leave(file->ctx);
    return status;
}

int32_t esa_mask_file_stored(const esa_mask_file *file, int32_t layer, int32_t step)
{
    if (!file || step < 0 || step >= file->info.steps) return 0;
    return esa_mask_file_cell(file, layer, file->step_group[step], 0) >= 0;
}

/* Finds the cell of a public call, or fails with a message. */
static esa_status locate(esa_mask_file *f, int64_t *cell, int32_t layer, int32_t step,
                         int32_t branch)
{
    const esa_mask_file_info *info = &f->info;
    if (layer < 0 || layer >= info->layers || step < 0 || step >= info->steps || branch < 0 ||
        (info->branches > 1 && branch >= info->branches))
        return esa_fail(
            f->ctx, ESA_ERR_ARGUMENT,
            "layer is %d, step is %d and branch is %d, but %s has %d layers, %d steps and %d "
            "branches",
            layer, step, branch, f->tensors->label, info->layers, info->steps, info->branches);
    *cell = esa_mask_file_cell(f, layer, f->step_group[step], branch);
    if (*cell < 0)
        return esa_fail(f->ctx, ESA_ERR_STATE,
                        "layer %d, step %d is not stored in %s: it runs dense (%s)", layer, step,
                        f->tensors->label, f->layer_slot[layer] < 0 ? "a dense layer" : "warm-up");
    return ESA_OK;
}

esa_status esa_mask_file_check_bits(const esa_mask_file *f, const esa_budget_masks *masks,
                                    int64_t cell)
{
    const uint8_t *bits = masks->bits + cell * f->cell_bytes,
                  *fine = masks->fine ? masks->fine + cell * f->cell_bytes : NULL;
    const int64_t rows = f->info.H * f->info.nq;
    int32_t twice = 0;
    for (int64_t i = 0; fine && i < f->cell_bytes; i++) twice |= bits[i] & fine[i];
    if (!twice && esa_bits_clean(bits, rows, f->info.nk) &&
        (!fine || esa_bits_clean(fine, rows, f->info.nk)))
        return ESA_OK;
    const int64_t layer = cell / f->info.stored_groups % f->info.stored_layers,
                  group = cell % f->info.stored_groups;
    return esa_fail(
        f->ctx, ESA_ERR_FORMAT,
        twice ? "%s: a mask of layer %d, step group %d has one of its %lld key blocks on "
                "two levels"
              : "%s: a mask of layer %d, step group %d has bits beyond its %lld key "
                "blocks",
        f->tensors->label, f->stored_layer[layer], f->stored_group[group], (long long)f->info.nk);
}

static esa_status get(esa_mask_file *f, esa_mask **mask, int32_t layer, int32_t step,
                      int32_t branch, double budget)
{
    int64_t cell = -1;
    const int32_t permille = esa_budget_permille(f->ctx, budget);
    if (permille < 0) return ESA_ERR_ARGUMENT;
    const esa_budget_masks *masks = NULL;
    ESA_TRY(locate(f, &cell, layer, step, branch));
    ESA_TRY(esa_mask_file_budget(f, &masks, permille));
    ESA_TRY(esa_mask_file_check_bits(f, masks, cell));
    const esa_mask_file_info *info = &f->info;
    const uint8_t *bits = masks->bits + cell * f->cell_bytes;
    esa_mask *m = esa_mask_new(&f->mem, 1, info->H, info->Nq, info->Nk, info->nq, info->nk,
                               info->block_q, info->block_k);
    if (!m || (info->fine && !esa_mask_add_fine(m, info->fine))) {
        esa_mask_free(m);
        return esa_fail(f->ctx, ESA_ERR_MEMORY, "out of memory for a mask");
    }
    esa_mask_set_bits(m, bits, masks->fine ? masks->fine + cell * f->cell_bytes : NULL);
    m->filled = 1;
    m->selector = info->selector;
    m->mode = info->mode;
    m->causal = info->causal;
    m->asked = masks->density ? esa_mask_file_cell_density(masks, cell) : permille / 1000.0;
    m->layout = info->layout;
    *mask = m;
    return ESA_OK;
}

esa_status esa_mask_file_get(esa_mask_file *file, esa_mask **mask, int32_t layer, int32_t step,
                             int32_t branch, double budget)
{
    if (mask) *mask = NULL;
    if (!file) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(file->ctx));
    const esa_status status = mask ? get(file, mask, layer, step, branch, budget)
                                   : esa_fail(file->ctx, ESA_ERR_ARGUMENT, "mask is NULL");
    esa_ctx_leave(file->ctx);
    return status;
}

/* Reads f32 number i at any alignment. */
static float float_at(const uint8_t *data, int64_t i)
{
    float v;
    memcpy(&v, data + 4 * i, 4);
    return v;
}

static esa_status heads(esa_mask_file *f, double *entropy, double *mass, double *density,
                        int64_t cell, double budget)
{
    const int64_t H = f->info.H, rows = f->info.nq, row_bytes = esa_ceil_div(f->info.nk, 8);
    for (int64_t h = 0; entropy && h < H; h++)
        entropy[h] = f->entropy ? (double)float_at(f->entropy, cell * H + h) : (double)NAN;
    if (!mass && !density) return ESA_OK;
    const int32_t permille = esa_budget_permille(f->ctx, budget);
    if (permille < 0) return ESA_ERR_ARGUMENT;
    const esa_budget_masks *masks = NULL;
    ESA_TRY(esa_mask_file_budget(f, &masks, permille));
    ESA_TRY(esa_mask_file_check_bits(f, masks, cell));
    for (int64_t h = 0; h < H; h++) {
        if (mass) mass[h] = masks->mass ? (double)float_at(masks->mass, cell * H + h) : (double)NAN;
        if (density)
            density[h] = (double)esa_bits_kept(masks->bits + cell * f->cell_bytes +
                                                   h * rows * row_bytes,
                                               rows, f->info.nk) /
                         (double)(rows * f->info.nk);
    }
    return ESA_OK;
}

esa_status esa_mask_file_heads(esa_mask_file *file, double *entropy, double *mass, double *density,
                               int32_t layer, int32_t step, int32_t branch, double budget)
{
    if (!file) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(file->ctx));
    int64_t cell = -1;
    esa_status status = locate(file, &cell, layer, step, branch);
    if (!status) status = heads(file, entropy, mass, density, cell, budget);
    esa_ctx_leave(file->ctx);
    return status;
}

esa_status esa_mask_file_density(esa_mask_file *file, double *density, int32_t layer, int32_t step,
                                 int32_t branch, double budget)
{
    if (!file) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(file->ctx));
    int64_t cell = -1;
    const esa_budget_masks *masks = NULL;
    esa_status status = density ? locate(file, &cell, layer, step, branch)
                                : esa_fail(file->ctx, ESA_ERR_ARGUMENT, "density is NULL");
    const int32_t permille = status ? 0 : esa_budget_permille(file->ctx, budget);
    if (permille < 0) status = ESA_ERR_ARGUMENT;
    if (!status) status = esa_mask_file_budget(file, &masks, permille);
    if (!status) *density = esa_mask_file_cell_density(masks, cell);
    esa_ctx_leave(file->ctx);
    return status;
}

static esa_status importance(esa_mask_file *f, float *out, int64_t cell)
{
    const int64_t rows = f->info.H * f->info.nq, nk = f->info.nk;
    if (!f->importance)
        return esa_fail(f->ctx, ESA_ERR_MISMATCH, "%s holds masks, but no importance",
                        f->tensors->label);
    if (f->info.importance == ESA_IMPORTANCE_F16) {
        for (int64_t i = 0; i < rows * nk; i++)
            out[i] = esa_load_f32(f->importance, cell * rows * nk + i, ESA_DTYPE_F16);
        return ESA_OK;
    }
    for (int64_t r = 0; r < rows; r++) {
        const float top = float_at(f->rowmax, cell * rows + r);
        if (!(top >= 0) || isinf(top))
            return esa_fail(f->ctx, ESA_ERR_FORMAT,
                            "%s: a row maximum is %g, expected a number of at least 0",
                            f->tensors->label, (double)top);
    }
    esa_code_table table;
    esa_code_table_init(&table);
    for (int64_t r = 0; r < rows; r++)
        esa_code_decode(out + r * nk, f->importance + (cell * rows + r) * nk,
                        f->fine + (cell * rows + r) * esa_fine_bytes(nk),
                        float_at(f->rowmax, cell * rows + r), nk, &table);
    return ESA_OK;
}

esa_status esa_mask_file_importance(esa_mask_file *file, float *out, int32_t layer, int32_t step,
                                    int32_t branch)
{
    if (!file) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(file->ctx));
    int64_t cell = -1;
    esa_status status = out ? locate(file, &cell, layer, step, branch)
                            : esa_fail(file->ctx, ESA_ERR_ARGUMENT, "out is NULL");
    if (!status) status = importance(file, out, cell);
    esa_ctx_leave(file->ctx);
    return status;
}
