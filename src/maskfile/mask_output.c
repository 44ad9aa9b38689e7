/* mask_output.c - writes a mask file cell by cell. All tensors grow side by side, so one pass over
 * the cells is enough and only one cell is in memory.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file.h"

#include <stdio.h>
#include <string.h>
#include "base/status.h"

typedef struct declarer {
    esa_tensors_writer *writer;
    const esa_mask_file_info *info;
    int64_t count; /* tensors declared */
} declarer;

/* Declares [branches if > 1][Ls][Gs][tail...]; *number receives the number of the tensor. */
static esa_status declare(declarer *d, int64_t *number, const char *name, int32_t dtype,
                          int32_t rank, const int64_t *tail)
{
    int64_t dim[ESA_FILE_MAX_RANK];
    int32_t n = 0;
    if (d->info->branches > 1) dim[n++] = d->info->branches;
    dim[n++] = d->info->stored_layers;
    dim[n++] = d->info->stored_groups;
    for (int32_t i = 0; i < rank; i++) dim[n++] = tail[i];
    *number = d->count++;
    return esa_st_writer_declare(d->writer, name, dtype, n, dim);
}

static esa_status declare_axis(declarer *d, const char *name, int64_t length)
{
    d->count++;
    return esa_st_writer_declare(d->writer, name, ESA_FILE_I32, 1, &length);
}

static esa_status declare_all(declarer *d, esa_mask_output *out, const esa_mask_axes *axes)
{
    const esa_mask_file_info *f = d->info;
    const int64_t H = f->H, rows[2] = { H, f->nq }, blocks[3] = { H, f->nq, f->nk },
                  fines[3] = { H, f->nq, esa_fine_bytes(f->nk) },
                  bytes[3] = { H, f->nq, esa_ceil_div(f->nk, 8) };
    out->tensor_importance = out->tensor_fine = out->tensor_rowmax = out->tensor_entropy = -1;
    /* Four-byte tensors first: the data starts at a multiple of 64, so they are aligned. */
    ESA_TRY(declare_axis(d, "step_group", f->steps));
    ESA_TRY(declare_axis(d, "stored_layers", f->stored_layers));
    ESA_TRY(declare_axis(d, "stored_groups", f->stored_groups));
    char name[24];
    if (axes->with_entropy)
        ESA_TRY(declare(d, &out->tensor_entropy, "entropy", ESA_FILE_F32, 1, &H));
    for (int32_t b = 0; b < f->budget_count; b++) {
        snprintf(name, sizeof name, "mask.%04d.mass", f->budget_permille[b]);
        out->tensor_mass[b] = -1;
        if (axes->with_mass) ESA_TRY(declare(d, &out->tensor_mass[b], name, ESA_FILE_F32, 1, &H));
        snprintf(name, sizeof name, "mask.%04d.density", f->budget_permille[b]);
        out->tensor_density[b] = -1;
        if (axes->with_density)
            ESA_TRY(declare(d, &out->tensor_density[b], name, ESA_FILE_F32, 0, NULL));
    }
    const int32_t u8 = f->importance == ESA_IMPORTANCE_U8;
    if (u8) ESA_TRY(declare(d, &out->tensor_rowmax, "importance.rowmax", ESA_FILE_F32, 2, rows));
    if (f->importance != ESA_IMPORTANCE_NONE)
        ESA_TRY(declare(d, &out->tensor_importance, "importance", u8 ? ESA_FILE_U8 : ESA_FILE_F16,
                        3, blocks));
    if (u8) ESA_TRY(declare(d, &out->tensor_fine, "importance.fine", ESA_FILE_U8, 3, fines));
    for (int32_t b = 0; b < f->budget_count; b++) {
        snprintf(name, sizeof name, "mask.%04d.bits", f->budget_permille[b]);
        ESA_TRY(declare(d, &out->tensor_bits[b], name, ESA_FILE_U8, 3, bytes));
        snprintf(name, sizeof name, "mask.%04d.fine", f->budget_permille[b]);
        out->tensor_level[b] = -1;
        if (f->fine) ESA_TRY(declare(d, &out->tensor_level[b], name, ESA_FILE_U8, 3, bytes));
    }
    return ESA_OK;
}

/* The writer is open: allocates scratch, declares every tensor and writes the axes. */
static esa_status begin(esa_mask_output *out, const char *path, const esa_mask_axes *axes)
{
    const esa_mask_file_info *info = &out->info;
    out->bits = esa_mem_alloc(&out->ctx->mem, 2 * out->cell_bytes);
    out->heads = esa_mem_alloc(&out->ctx->mem, info->H * 4);
    if (!out->bits || !out->heads)
        return esa_fail(out->ctx, ESA_ERR_MEMORY, "out of memory while writing %.200s", path);
    ESA_TRY(esa_run_write(out->writer, info, "esa.masks"));
    declarer d = { out->writer, info, 0 };
    ESA_TRY(declare_all(&d, out, axes));
    ESA_TRY(esa_st_writer_put(out->writer, 0, 0, axes->step_group, 4 * (int64_t)info->steps));
    ESA_TRY(
        esa_st_writer_put(out->writer, 1, 0, axes->stored_layer, 4 * (int64_t)info->stored_layers));
    return esa_st_writer_put(out->writer, 2, 0, axes->stored_group,
                             4 * (int64_t)info->stored_groups);
}

esa_status esa_mask_output_begin(esa_ctx *ctx, esa_mask_output *out, const char *path,
                                 const esa_mask_file_info *info, const esa_mask_axes *axes)
{
    memset(out, 0, sizeof *out);
    out->ctx = ctx;
    out->info = *info;
    out->cells = (int64_t)info->branches * info->stored_layers * info->stored_groups;
    out->cell_bytes = esa_size_mul(info->H * info->nq, esa_ceil_div(info->nk, 8));
    ESA_TRY(esa_st_writer_open(ctx, &out->writer, path));
    const esa_status status = begin(out, path, axes);
    if (status) esa_mask_output_free(out);
    return status;
}

esa_status esa_mask_output_masks(esa_mask_output *out, int64_t index, int32_t b,
                                 const esa_cell_masks *m)
{
    const int64_t H = out->info.H, at = index * out->cell_bytes, bytes = out->cell_bytes;
    ESA_TRY(esa_st_writer_put(out->writer, out->tensor_bits[b], at, m->bits, bytes));
    if (out->tensor_level[b] >= 0)
        ESA_TRY(esa_st_writer_put(out->writer, out->tensor_level[b], at, m->fine, bytes));
    if (out->tensor_density[b] >= 0)
        ESA_TRY(esa_st_writer_put(out->writer, out->tensor_density[b], index * 4, &m->density, 4));
    if (out->tensor_mass[b] < 0) return ESA_OK;
    return esa_st_writer_put(out->writer, out->tensor_mass[b], index * H * 4, m->mass, H * 4);
}

esa_status esa_mask_output_select(esa_mask_output *out, int64_t index, esa_cell *cell)
{
    const int64_t H = out->info.H;
    if (out->tensor_entropy >= 0) {
        esa_cell_entropy(cell, out->heads);
        ESA_TRY(
            esa_st_writer_put(out->writer, out->tensor_entropy, index * H * 4, out->heads, H * 4));
    }
    for (int32_t b = 0; b < out->info.budget_count; b++) {
        esa_cell_mask(cell, out->info.budget_permille[b], out->bits, out->heads);
        const esa_cell_masks masks = { .bits = out->bits, .mass = out->heads };
        ESA_TRY(esa_mask_output_masks(out, index, b, &masks));
    }
    return ESA_OK;
}

esa_status esa_mask_output_importance(esa_mask_output *out, int64_t index, const void *importance,
                                      const uint8_t *fine, const float *rowmax)
{
    if (out->tensor_importance < 0) return ESA_OK;
    const int64_t rows = out->info.H * out->info.nq,
                  bytes = rows * out->info.nk * (out->info.importance == ESA_IMPORTANCE_U8 ? 1 : 2);
    const int64_t fine_bytes = rows * esa_fine_bytes(out->info.nk);
    ESA_TRY(
        esa_st_writer_put(out->writer, out->tensor_importance, index * bytes, importance, bytes));
    if (out->tensor_fine >= 0)
        ESA_TRY(
            esa_st_writer_put(out->writer, out->tensor_fine, index * fine_bytes, fine, fine_bytes));
    if (out->tensor_rowmax < 0) return ESA_OK;
    return esa_st_writer_put(out->writer, out->tensor_rowmax, index * rows * 4, rowmax, rows * 4);
}

esa_status esa_mask_output_finish(esa_mask_output *out)
{
    return esa_st_writer_finish(out->writer);
}

void esa_mask_output_free(esa_mask_output *out)
{
    if (!out->ctx) return;
    esa_mem_free(&out->ctx->mem, out->bits, 2 * out->cell_bytes);
    esa_mem_free(&out->ctx->mem, out->heads, out->info.H * 4);
    esa_st_writer_close(out->writer);
    out->bits = NULL;
    out->heads = NULL;
    out->writer = NULL;
}
