/* mask_convert.c - converts single masks and the full_block_cnt / full_block_idx of FA4 to and from
 * mask files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/status.h"

/* ---------------------------------------------------------------- one mask */

static esa_status save_mask(esa_ctx *ctx, const char *output, const esa_mask *mask)
{
    if (!mask->filled)
        return esa_fail(ctx, ESA_ERR_STATE,
                        "the mask is empty: no selector or conversion has filled it");
    if (mask->layout.span_count)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "the mask is for %d clips in one sequence, but mask files know one video",
                        (int)mask->layout.span_count);
    if (!mask->runnable)
        return esa_fail(
            ctx, ESA_ERR_UNSUPPORTED,
            "this compat mask has blocks that no kernel runs: it can be printed, but not stored");
    const int64_t all = mask->B * mask->H * mask->nq * mask->nk;
    const double budget = mask->asked >= 0 && mask->asked <= 1 ? mask->asked
                          : all ? (double)esa_mask_kept(mask) / (double)all
                                : 1;
    if (mask->B > ESA_MAX_CELL_AXIS)
        return esa_fail(ctx, ESA_ERR_SHAPE, "the mask has %lld batch entries, expected at most %d",
                        (long long)mask->B, ESA_MAX_CELL_AXIS);
    if (mask->layout.order == ESA_ORDER_ADAPTIVE)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "the mask has an adaptive order, which belongs to its q and k: mask files "
                        "hold masks of fixed orders");
    esa_mask_file_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = (uint32_t)sizeof info;
    info.selector = mask->selector;
    info.fine = mask->fine;
    info.tail = mask->fine              ? ESA_TAIL_LEVELS
                : esa_run_errors(&info) ? ESA_TAIL_POOLED
                                        : ESA_TAIL_NONE;
    info.format_version = esa_run_version(&info);
    info.mode = mask->mode;
    info.causal = mask->causal;
    info.block_q = mask->block_q;
    info.block_k = mask->block_k;
    info.layers = info.steps = info.groups = info.stored_layers = info.stored_groups = 1;
    info.branches = (int32_t)mask->B;
    info.budget_count = 1;
    info.budget_permille[0] = esa_budget_permille(ctx, budget);
    info.H = mask->H;
    info.Nq = mask->Nq;
    info.Nk = mask->Nk;
    info.nq = mask->nq;
    info.nk = mask->nk;
    info.layout = mask->layout;
    const int32_t zero = 0;
    const esa_mask_axes axes = { &zero, &zero, &zero, 0, 0, 0 };
    const int64_t pitch = esa_ceil_div(mask->nk, 8),
                  bytes = esa_size_mul(mask->B * mask->H * mask->nq, pitch);
    const esa_mask *host;
    const esa_status copied = esa_mask_on_host(&host, mask, &ctx->mem);
    if (copied) return esa_fail(ctx, copied, "the mask cannot be copied to the host");
    uint8_t *bits = esa_mem_alloc(&ctx->mem, 2 * bytes);
    if (!bits) {
        if (host != mask) esa_mask_free((esa_mask *)host);
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while saving a mask");
    }
    uint8_t *fine = bits + bytes;
    esa_mask_write_bits(bits, host, host->count, host->index);
    if (host->fine) esa_mask_write_bits(fine, host, host->fine_count, host->fine_index);
    if (host != mask) esa_mask_free((esa_mask *)host);
    esa_mask_output out = { 0 };
    esa_status status = esa_mask_output_begin(ctx, &out, output, &info, &axes);
    for (int64_t b = 0; !status && b < mask->B; b++) {
        const int64_t at = b * out.cell_bytes;
        const esa_cell_masks masks = { .bits = bits + at, .fine = fine + at };
        status = esa_mask_output_masks(&out, b, 0, &masks);
    }
    if (!status) status = esa_mask_output_finish(&out);
    esa_mask_output_free(&out);
    esa_mem_free(&ctx->mem, bits, 2 * bytes);
    return status;
}

esa_status esa_mask_file_save(esa_ctx *ctx, const char *output, const esa_mask *mask)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = mask ? save_mask(ctx, output, mask)
                                   : esa_fail(ctx, ESA_ERR_ARGUMENT, "mask is NULL");
    esa_ctx_leave(ctx);
    return status;
}

/* ---------------------------------------------------------------- to FA4 */

enum { FA4_STEP_GROUP, FA4_LAYERS, FA4_GROUPS, FA4_COUNT, FA4_INDEX };

/* Lists of a cell: count[rows], index[rows][nk] with 0 after the count. */
static void lists_from_bits(int32_t *count, int32_t *index, const uint8_t *bits, int64_t rows,
                            int64_t nk)
{
    const int64_t pitch = esa_ceil_div(nk, 8);
    memset(index, 0, (size_t)(rows * nk) * 4);
    for (int64_t r = 0; r < rows; r++) {
        int32_t n = 0;
        for (int64_t j = 0; j < nk; j++)
            if (bits[r * pitch + j / 8] >> (j % 8) & 1) index[r * nk + n++] = (int32_t)j;
        count[r] = n;
    }
}

static esa_status export_declare(esa_tensors_writer *w, const esa_mask_file_info *f)
{
    const int64_t T = f->steps, Ls = f->stored_layers, Gs = f->stored_groups;
    int64_t dim[6] = { f->branches, Ls, Gs, f->H, f->nq, f->nk };
    const int32_t skip = f->branches == 1;
    char text[16];
    snprintf(text, sizeof text, "%d", f->budget_permille[0]);
    ESA_TRY(esa_run_write(w, f, "esa.fa4"));
    ESA_TRY(esa_st_writer_metadata(w, "budget_permille", text));
    ESA_TRY(esa_st_writer_declare(w, "step_group", ESA_FILE_I32, 1, &T));
    ESA_TRY(esa_st_writer_declare(w, "stored_layers", ESA_FILE_I32, 1, &Ls));
    ESA_TRY(esa_st_writer_declare(w, "stored_groups", ESA_FILE_I32, 1, &Gs));
    ESA_TRY(esa_st_writer_declare(w, "full_block_cnt", ESA_FILE_I32, 5 - skip, dim + skip));
    return esa_st_writer_declare(w, "full_block_idx", ESA_FILE_I32, 6 - skip, dim + skip);
}

/* count[rows], index[rows][nk]: scratch for the lists of a cell. */
static esa_status export_cells(esa_tensors_writer *w, const esa_mask_file *f,
                               const esa_mask_file_info *info, const esa_budget_masks *masks,
                               int32_t *count, int32_t *index)
{
    const int64_t rows = info->H * info->nq, nk = info->nk;
    ESA_TRY(export_declare(w, info));
    ESA_TRY(esa_st_writer_put(w, FA4_STEP_GROUP, 0, f->step_group, 4 * (int64_t)info->steps));
    ESA_TRY(esa_st_writer_put(w, FA4_LAYERS, 0, f->stored_layer, 4 * (int64_t)info->stored_layers));
    ESA_TRY(esa_st_writer_put(w, FA4_GROUPS, 0, f->stored_group, 4 * (int64_t)info->stored_groups));
    for (int64_t i = 0; i < f->cells; i++) {
        lists_from_bits(count, index, masks->bits + i * f->cell_bytes, rows, nk);
        ESA_TRY(esa_st_writer_put(w, FA4_COUNT, 4 * i * rows, count, 4 * rows));
        ESA_TRY(esa_st_writer_put(w, FA4_INDEX, 4 * i * rows * nk, index, 4 * rows * nk));
    }
    return esa_st_writer_finish(w);
}

static esa_status export_fa4(esa_ctx *ctx, const char *output, esa_mask_file *f, double budget)
{
    ESA_TRY(esa_mask_file_check_ctx(ctx, f));
    const int32_t permille = esa_budget_permille(ctx, budget);
    if (permille < 0) return ESA_ERR_ARGUMENT;
    const esa_budget_masks *masks;
    ESA_TRY(esa_mask_file_budget(f, &masks, permille));
    esa_mask_file_info info = f->info;
    if (esa_run_errors(&info) || info.fine) { /* the exchange holds exact blocks alone */
        info.selector = -1;
        info.tail = info.fine = info.group_q = info.group_k = info.exact_rows = 0;
    }
    info.importance = ESA_IMPORTANCE_NONE;
    info.budget_permille[0] = permille;
    const int64_t count_bytes = 4 * info.H * info.nq,
                  index_bytes = esa_size_mul(count_bytes, info.nk);
    esa_tensors_writer *w = NULL;
    int32_t *count = esa_mem_alloc(&ctx->mem, count_bytes),
            *index = esa_mem_alloc(&ctx->mem, index_bytes);
    esa_status status = count && index
                            ? esa_st_writer_open(ctx, &w, output)
                            : esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while converting masks");
    if (!status) status = export_cells(w, f, &info, masks, count, index);
    esa_st_writer_close(w);
    esa_mem_free(&ctx->mem, count, count_bytes);
    esa_mem_free(&ctx->mem, index, index_bytes);
    return status;
}

esa_status esa_mask_file_export_fa4(esa_ctx *ctx, const char *output, esa_mask_file *file,
                                    double budget)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = export_fa4(ctx, output, file, budget);
    esa_ctx_leave(ctx);
    return status;
}

/* ---------------------------------------------------------------- from FA4 */

typedef struct fa4 {
    const esa_tensors *file;
    const uint8_t *count, *index; /* i32, any alignment */
    int64_t cells, rows, nk;
    int32_t *axis; /* step_group[T], stored_layer[Ls], stored_group[Gs]; owned */
    int64_t axis_bytes;
} fa4;

static int32_t int_at(const uint8_t *data, int64_t i)
{
    int32_t v;
    memcpy(&v, data + 4 * i, 4);
    return v;
}

/* Converts the lists of a cell to bits and adds the number of kept blocks to *kept. */
static esa_status bits_from_lists(esa_ctx *ctx, uint8_t *bits, int64_t *kept, const fa4 *x,
                                  int64_t cell)
{
    const int64_t pitch = esa_ceil_div(x->nk, 8);
    memset(bits, 0, (size_t)(x->rows * pitch));
    for (int64_t r = 0; r < x->rows; r++) {
        const int64_t row = cell * x->rows + r;
        const int32_t n = int_at(x->count, row);
        if (n < 0 || n > x->nk)
            return esa_fail(ctx, ESA_ERR_FORMAT,
                            "%s: full_block_cnt of row %lld is %d, expected 0 to %lld",
                            x->file->label, (long long)row, n, (long long)x->nk);
        for (int32_t c = 0; c < n; c++) {
            const int32_t j = int_at(x->index, row * x->nk + c);
            if (j < 0 || j >= x->nk || (bits[r * pitch + j / 8] >> (j % 8) & 1))
                return esa_fail(ctx, ESA_ERR_FORMAT, "%s: full_block_idx of row %lld holds %d %s",
                                x->file->label, (long long)row, j,
                                j < 0 || j >= x->nk ? "beyond its key blocks" : "twice");
            bits[r * pitch + j / 8] |= (uint8_t)(1u << (j % 8));
        }
        *kept += n;
    }
    return ESA_OK;
}

/* Reads the shapes: count [B?,L,G,H,nq], index the same with nk at the end. */
static esa_status import_shapes(esa_ctx *ctx, fa4 *x, int64_t dim[5])
{
    const esa_st_entry *count = esa_st_find(x->file, "full_block_cnt"),
                       *index = esa_st_find(x->file, "full_block_idx");
    if (!count || !index || count->dtype != ESA_FILE_I32 || index->dtype != ESA_FILE_I32 ||
        (count->rank != 4 && count->rank != 5) || index->rank != count->rank + 1 ||
        memcmp(count->dim, index->dim, sizeof *count->dim * (size_t)count->rank) != 0)
        return esa_fail(
            ctx, ESA_ERR_FORMAT,
            "%s: expected full_block_cnt I32 [L,G,H,nq] and full_block_idx I32 [L,G,H,nq,nk]",
            x->file->label);
    for (int32_t i = 0; i < count->rank; i++)
        if (count->dim[i] < 1)
            return esa_fail(ctx, ESA_ERR_FORMAT, "%s: full_block_cnt has an empty dimension",
                            x->file->label);
    const int32_t skip = count->rank == 4;
    dim[0] = 1;
    memcpy(dim + skip, count->dim, sizeof *count->dim * (size_t)count->rank);
    x->nk = index->dim[index->rank - 1];
    x->count = esa_st_data(x->file, count);
    x->index = esa_st_data(x->file, index);
    return ESA_OK;
}

/* Describes a foreign file: the caller's info, one group per step. */
static esa_status import_describe(esa_ctx *ctx, esa_mask_file_info *f, const fa4 *x,
                                  const int64_t dim[5], const esa_mask_info *info)
{
    if (!info)
        return esa_fail(
            ctx, ESA_ERR_ARGUMENT,
            "%s does not give its block sizes and token counts, so info must not be NULL",
            x->file->label);
    if (info->struct_size != sizeof *info)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_mask_info has struct_size %u, this library expects %u",
                        (unsigned)info->struct_size, (unsigned)sizeof *info);
    if (info->block_q < 1 || info->block_k < 1 || info->Nq < 1 || info->Nk < 1 ||
        info->Nq > INT32_MAX || info->Nk > INT32_MAX)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "blocks of %dx%d for %lld x %lld tokens: each must be at least 1",
                        info->block_q, info->block_k, (long long)info->Nq, (long long)info->Nk);
    memset(f, 0, sizeof *f);
    f->struct_size = (uint32_t)sizeof *f;
    f->format_version = ESA_MASK_FORMAT_VERSION;
    f->selector = -1;
    f->block_q = info->block_q;
    f->block_k = info->block_k;
    f->Nq = info->Nq;
    f->Nk = info->Nk;
    f->H = dim[3];
    f->nq = esa_ceil_div(f->Nq, f->block_q);
    f->nk = esa_ceil_div(f->Nk, f->block_k);
    if (dim[0] > ESA_MAX_CELL_AXIS || dim[1] > ESA_MAX_CELL_AXIS || dim[2] > ESA_MAX_CELL_AXIS ||
        f->nq > ESA_MAX_BLOCKS || f->nk > ESA_MAX_BLOCKS)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "%s has more layers, groups or blocks than the format holds (%d)",
                        x->file->label, ESA_MAX_CELL_AXIS);
    f->branches = (int32_t)dim[0];
    f->layers = f->stored_layers = (int32_t)dim[1];
    f->steps = f->groups = f->stored_groups = (int32_t)dim[2];
    esa_layout layout = info->layout;
    if (!layout.struct_size) layout = esa_layout_default();
    return esa_layout_resolve(ctx, &f->layout, &layout, f->Nq, f->Nk, -1, ESA_MODE_FIXED, 0);
}

/* Axes as our export wrote them; 0, 1, 2, ... for foreign files. */
static esa_status import_axes(esa_ctx *ctx, fa4 *x, esa_mask_file_info *f, int32_t ours,
                              esa_mask_axes *axes)
{
    const esa_st_entry *e[3] = { esa_st_find(x->file, "step_group"),
                                 esa_st_find(x->file, "stored_layers"),
                                 esa_st_find(x->file, "stored_groups") };
    const int64_t length[3] = { f->steps, f->stored_layers, f->stored_groups },
                  limit[3] = { f->groups, f->layers, f->groups };
    x->axis_bytes = 4 * (length[0] + length[1] + length[2]);
    x->axis = esa_mem_alloc(&ctx->mem, x->axis_bytes);
    if (!x->axis) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while converting masks");
    int32_t *part = x->axis;
    for (int k = 0; k < 3; part += length[k++]) {
        if (ours &&
            (!e[k] || e[k]->dtype != ESA_FILE_I32 || e[k]->rank != 1 || e[k]->dim[0] != length[k]))
            return esa_fail(ctx, ESA_ERR_FORMAT,
                            "%s: its step and layer indices do not fit its masks", x->file->label);
        for (int64_t i = 0; i < length[k]; i++) {
            part[i] = ours ? int_at(esa_st_data(x->file, e[k]), i) : (int32_t)i;
            if (part[i] < 0 || part[i] >= limit[k] || (k && i && part[i] <= part[i - 1]))
                return esa_fail(ctx, ESA_ERR_FORMAT,
                                "%s: its step and layer indices do not fit its masks",
                                x->file->label);
        }
    }
    *axes = (esa_mask_axes){
        x->axis, x->axis + length[0], x->axis + length[0] + length[1], 0, 0, 0
    };
    return ESA_OK;
}

/* bits: scratch for the bits of a cell. */
static esa_status write_cells(esa_ctx *ctx, const char *output, const fa4 *x, esa_mask_file_info *f,
                              const esa_mask_axes *axes, uint8_t *bits)
{
    /* A first pass checks everything and finds the density, which names the tensor. */
    int64_t kept = 0;
    for (int64_t i = 0; i < x->cells; i++) ESA_TRY(bits_from_lists(ctx, bits, &kept, x, i));
    f->importance = ESA_IMPORTANCE_NONE;
    if (!f->budget_count) {
        f->budget_count = 1;
        f->budget_permille[0] = (int32_t)floor(
            1000.0 * (double)kept / ((double)x->cells * (double)x->rows * (double)x->nk) + 0.5);
    }
    esa_mask_output out = { 0 };
    ESA_TRY(esa_mask_output_begin(ctx, &out, output, f, axes));
    esa_status status = ESA_OK;
    for (int64_t i = 0; !status && i < x->cells; i++) {
        status = bits_from_lists(ctx, bits, &kept, x, i);
        const esa_cell_masks masks = { .bits = bits };
        if (!status) status = esa_mask_output_masks(&out, i, 0, &masks);
    }
    if (!status) status = esa_mask_output_finish(&out);
    esa_mask_output_free(&out);
    return status;
}

static esa_status import_cells(esa_ctx *ctx, const char *output, const fa4 *x,
                               esa_mask_file_info *f, const esa_mask_axes *axes)
{
    const int64_t bytes = esa_size_mul(x->rows, esa_ceil_div(x->nk, 8));
    uint8_t *bits = esa_mem_alloc(&ctx->mem, bytes);
    if (!bits) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while converting masks");
    const esa_status status = write_cells(ctx, output, x, f, axes, bits);
    esa_mem_free(&ctx->mem, bits, bytes);
    return status;
}

/* Reads the description of a file that esa exported, and compares it with the caller's. */
static esa_status import_own(esa_ctx *ctx, esa_mask_file_info *f, const fa4 *x,
                             const int64_t dim[5], const esa_mask_info *info, const char *model)
{
    ESA_TRY(esa_run_read(ctx, f, x->file, "esa.fa4"));
    if (f->fine || esa_run_errors(f))
        return esa_fail(
            ctx, ESA_ERR_FORMAT,
            "%s claims masks by error or of two levels, which the exchange does not hold",
            x->file->label);
    f->stored_layers = (int32_t)esa_min64(dim[1], ESA_MAX_CELL_AXIS);
    f->stored_groups = (int32_t)esa_min64(dim[2], ESA_MAX_CELL_AXIS);
    const char *asked = esa_st_metadata(x->file, "budget_permille");
    int32_t v = 0, n = 0;
    for (; asked && n < 4 && asked[n] >= '0' && asked[n] <= '9'; n++) v = v * 10 + (asked[n] - '0');
    if (n && !asked[n] && v <= 1000) {
        f->budget_count = 1;
        f->budget_permille[0] = v;
    }
    if (info && (info->Nq != f->Nq || info->Nk != f->Nk || info->block_q != f->block_q ||
                 info->block_k != f->block_k))
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s has %lld x %lld tokens in blocks of %dx%d, but the caller gives %lld x "
                        "%lld in blocks of %dx%d",
                        x->file->label, (long long)f->Nq, (long long)f->Nk, f->block_q, f->block_k,
                        (long long)info->Nq, (long long)info->Nk, info->block_q, info->block_k);
    if (info && info->layout.struct_size)
        ESA_TRY(esa_run_check_layout(ctx, f, x->file->label, &info->layout, "the caller"));
    if (model && f->model[0] && strcmp(model, f->model) != 0)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s was made for model '%s', but the caller gives '%s'", x->file->label,
                        esa_quote(f->model).text, esa_quote(model).text);
    return ESA_OK;
}

static esa_status import_fa4(esa_ctx *ctx, const char *output, fa4 *x, const esa_mask_info *info,
                             const char *model)
{
    int64_t dim[5];
    esa_mask_file_info f;
    ESA_TRY(import_shapes(ctx, x, dim));
    const char *format = esa_st_metadata(x->file, "format");
    const int32_t ours = format && strcmp(format, "esa.fa4") == 0;
    ESA_TRY(ours ? import_own(ctx, &f, x, dim, info, model)
                 : import_describe(ctx, &f, x, dim, info));
    if (dim[0] != f.branches || dim[1] > f.layers || dim[2] > f.groups || dim[3] != f.H ||
        dim[4] != f.nq || x->nk != f.nk)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s holds %lld heads of %lld x %lld blocks, but %lld x %lld tokens in "
                        "blocks of %dx%d make %lld heads of %lld x %lld",
                        x->file->label, (long long)dim[3], (long long)dim[4], (long long)x->nk,
                        (long long)f.Nq, (long long)f.Nk, f.block_q, f.block_k, (long long)f.H,
                        (long long)f.nq, (long long)f.nk);
    if (model) {
        if (strlen(model) >= sizeof f.model)
            return esa_fail(ctx, ESA_ERR_ARGUMENT, "the model's name is longer than %d bytes",
                            (int)sizeof f.model - 1);
        strcpy(f.model, model);
    }
    x->cells = dim[0] * dim[1] * dim[2];
    x->rows = dim[3] * dim[4];
    esa_mask_axes axes;
    ESA_TRY(import_axes(ctx, x, &f, ours, &axes));
    return import_cells(ctx, output, x, &f, &axes);
}

esa_status esa_mask_file_import_fa4(esa_ctx *ctx, const char *output, const char *input,
                                    const esa_mask_info *info, const char *model)
{
    ESA_TRY(esa_ctx_enter(ctx));
    esa_tensors *file = NULL;
    esa_status status = esa_st_open(ctx, &file, input);
    if (!status) {
        fa4 x = { .file = file };
        status = import_fa4(ctx, output, &x, info, model);
        esa_mem_free(&ctx->mem, x.axis, x.axis_bytes);
    }
    esa_st_close(file);
    esa_ctx_leave(ctx);
    return status;
}
