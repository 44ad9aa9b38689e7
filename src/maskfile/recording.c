/* recording.c - recording files: opens them, compares their settings, reads rows and merges them.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/recording.h"

#include <string.h>
#include "base/status.h"

static esa_status bad(esa_ctx *ctx, const esa_tensors *file, const char *what)
{
    return esa_fail(ctx, ESA_ERR_FORMAT, "%s: %s", file->label, what);
}

static esa_status check(esa_ctx *ctx, esa_recording *rec)
{
    ESA_TRY(esa_run_read(ctx, &rec->info, rec->tensors, "esa.recording"));
    const esa_mask_file_info *f = &rec->info;
    const esa_st_entry *dense = esa_st_find(rec->tensors, "dense_layers"),
                       *count = esa_st_find(rec->tensors, "count"),
                       *sums = esa_st_find(rec->tensors, "sums");
    const int32_t errors = esa_run_errors(f), front = errors;
    if (esa_selector_of(f->selector)->records == ESA_RECORDS_NOTHING)
        return bad(ctx, rec->tensors,
                   "its selector is neither entropy nor error, the only ones that are recorded");
    if (!dense || dense->dtype != ESA_FILE_I32 || dense->rank != 1 || dense->dim[0] > f->layers)
        return bad(ctx, rec->tensors, "tensor 'dense_layers' is missing or of another shape");
    if (!count || count->dtype != ESA_FILE_I32 || count->rank != 3 ||
        count->dim[0] != f->branches || count->dim[1] != f->layers || count->dim[2] != f->groups)
        return bad(ctx, rec->tensors,
                   "tensor 'count' is missing or not I32 [branches, layers, groups]");
    if (!sums || sums->dtype != (errors ? ESA_FILE_U64 : ESA_FILE_U32) || sums->rank != 4 + front ||
        (errors && sums->dim[1] != esa_run_levels(f)) || sums->dim[front + 1] != f->H ||
        sums->dim[front + 2] != f->nq || sums->dim[front + 3] != f->nk)
        return bad(ctx, rec->tensors,
                   errors ? "tensor 'sums' is missing or not U64 [cells, levels, heads, nq, nk]"
                          : "tensor 'sums' is missing or not U32 [cells, heads, nq, nk]");
    rec->dense_layers = (int32_t)dense->dim[0];
    rec->dense_layer = esa_st_data(rec->tensors, dense);
    rec->sums = esa_st_data(rec->tensors, sums);
    rec->cells = (int64_t)f->branches * f->layers * f->groups;
    rec->width = esa_record_width(f);
    rec->blocks = esa_size_mul(esa_size_mul(f->H * esa_run_levels(f), f->nq), f->nk);
    if (rec->blocks < 0 || rec->blocks > INT64_MAX / 8)
        return bad(ctx, rec->tensors, "its blocks do not fit into the address space");
    rec->count = esa_mem_alloc(&ctx->mem, 4 * rec->cells);
    rec->slot = esa_mem_alloc(&ctx->mem, 8 * rec->cells);
    if (!rec->count || !rec->slot)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while opening %s", rec->tensors->label);
    memcpy(rec->count, esa_st_data(rec->tensors, count), 4 * (size_t)rec->cells);
    int64_t used = 0;
    for (int64_t i = 0; i < rec->cells; i++) {
        if (rec->count[i] < 0 || rec->count[i] > ESA_RECORD_MOST)
            return bad(ctx, rec->tensors, "a count is not within 0 .. 255");
        rec->slot[i] = rec->count[i] ? used++ : -1;
    }
    if (used != sums->dim[0])
        return bad(ctx, rec->tensors, "'sums' and 'count' do not agree on the number of cells");
    return ESA_OK;
}

esa_status esa_recording_make(esa_ctx *ctx, esa_recording *rec, esa_tensors *tensors)
{
    memset(rec, 0, sizeof *rec);
    rec->tensors = tensors;
    const esa_status status = check(ctx, rec);
    if (status) esa_recording_close(ctx, rec);
    return status;
}

esa_status esa_recording_open(esa_ctx *ctx, esa_recording *rec, const char *path)
{
    esa_tensors *tensors = NULL;
    memset(rec, 0, sizeof *rec);
    ESA_TRY(esa_st_open(ctx, &tensors, path));
    return esa_recording_make(ctx, rec, tensors);
}

void esa_recording_close(esa_ctx *ctx, esa_recording *rec)
{
    esa_mem_free(&ctx->mem, rec->count, 4 * rec->cells);
    esa_mem_free(&ctx->mem, rec->slot, 8 * rec->cells);
    esa_st_close(rec->tensors);
    memset(rec, 0, sizeof *rec);
}

/* Opens rec[count] and fills info. */
static esa_status open_all(esa_ctx *ctx, esa_recording *rec, esa_mask_file_info *info,
                           const char *const *path, int32_t count)
{
    int64_t prompts = 0;
    for (int32_t i = 0; i < count; i++) {
        ESA_TRY(esa_recording_open(ctx, &rec[i], path[i]));
        ESA_TRY(esa_run_same(ctx, &rec[0].info, rec[0].tensors->label, &rec[i].info,
                             rec[i].tensors->label));
        if (rec[i].dense_layers != rec[0].dense_layers ||
            memcmp(rec[i].dense_layer, rec[0].dense_layer, 4 * (size_t)rec[0].dense_layers) != 0)
            return esa_fail(ctx, ESA_ERR_MISMATCH, "%.200s and %.200s have different dense layers",
                            rec[0].tensors->label, rec[i].tensors->label);
        prompts += rec[i].info.prompts;
    }
    if (prompts > INT32_MAX)
        return esa_fail(ctx, ESA_ERR_FORMAT, "the recordings claim %lld prompts together",
                        (long long)prompts);
    *info = rec[0].info;
    info->prompts = (int32_t)prompts;
    return ESA_OK;
}

esa_status esa_recordings_open(esa_ctx *ctx, esa_recording **out, esa_mask_file_info *info,
                               const char *const *path, int32_t count)
{
    *out = NULL;
    if (!path || count < 1) return esa_fail(ctx, ESA_ERR_ARGUMENT, "no recordings were given");
    esa_recording *rec = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *rec * count);
    if (!rec) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for %d recordings", count);
    const esa_status status = open_all(ctx, rec, info, path, count);
    if (status)
        esa_recordings_close(ctx, rec, count);
    else
        *out = rec;
    return status;
}

void esa_recordings_close(esa_ctx *ctx, esa_recording *rec, int32_t count)
{
    for (int32_t i = 0; rec && i < count; i++) esa_recording_close(ctx, &rec[i]);
    esa_mem_free(&ctx->mem, rec, (int64_t)sizeof *rec * count);
}

int32_t esa_recording_is_dense(const esa_recording *rec, int32_t layer)
{
    for (int32_t i = 0; i < rec->dense_layers; i++) {
        int32_t v;
        memcpy(&v, rec->dense_layer + 4 * i, 4);
        if (v == layer) return 1;
    }
    return 0;
}

int64_t esa_recordings_count(const esa_recording *rec, int32_t count, int64_t cell)
{
    int64_t n = 0;
    for (int32_t i = 0; i < count; i++) n += rec[i].count[cell];
    return n;
}

void esa_recordings_row(uint64_t *sum, const esa_recording *rec, int32_t count, int64_t cell,
                        int64_t r)
{
    const int64_t nk = rec[0].info.nk;
    memset(sum, 0, (size_t)nk * sizeof *sum);
    for (int32_t i = 0; i < count; i++) {
        if (!rec[i].count[cell]) continue;
        const int64_t width = rec[i].width;
        const uint8_t *row = rec[i].sums + width * (rec[i].slot[cell] * rec[i].blocks + r * nk);
        for (int64_t j = 0; j < nk; j++) {
            const uint64_t v = esa_recording_sum(row, j, width);
            sum[j] = v > UINT64_MAX - sum[j] ? UINT64_MAX : sum[j] + v;
        }
    }
}

esa_status esa_recording_check_sums(esa_ctx *ctx, const esa_recording *rec)
{
    for (int64_t c = 0; c < rec->cells; c++) {
        if (!rec->count[c]) continue;
        const uint8_t *sums = rec->sums + rec->width * rec->slot[c] * rec->blocks;
        const uint64_t most = (uint64_t)rec->count[c] * esa_record_top(&rec->info);
        for (int64_t i = 0; i < rec->blocks; i++)
            if (esa_recording_sum(sums, i, rec->width) > most)
                return bad(ctx, rec->tensors,
                           "a sum is larger than its number of contributions allows");
    }
    return ESA_OK;
}

/* ---------------------------------------------------------------- merging into one recording */

esa_status esa_recording_declare(esa_tensors_writer *w, const esa_mask_file_info *f,
                                 int64_t dense_layers, int64_t used)
{
    const int32_t errors = esa_run_errors(f);
    const int64_t count[3] = { f->branches, f->layers, f->groups },
                  narrow[4] = { used, f->H, f->nq, f->nk },
                  wide[5] = { used, esa_run_levels(f), f->H, f->nq, f->nk };
    ESA_TRY(esa_run_write(w, f, "esa.recording"));
    ESA_TRY(esa_st_writer_declare(w, "dense_layers", ESA_FILE_I32, 1, &dense_layers));
    ESA_TRY(esa_st_writer_declare(w, "count", ESA_FILE_I32, 3, count));
    return errors ? esa_st_writer_declare(w, "sums", ESA_FILE_U64, 5, wide)
                  : esa_st_writer_declare(w, "sums", ESA_FILE_U32, 4, narrow);
}

static esa_status merge_cells(esa_tensors_writer *w, const esa_recording *rec, int32_t count,
                              uint64_t *wide, uint32_t *row)
{
    const int64_t nk = rec->info.nk, rows = rec->blocks / nk;
    for (int64_t c = 0; c < rec->cells; c++) {
        if (!esa_recordings_count(rec, count, c)) continue;
        for (int64_t r = 0; r < rows; r++) {
            esa_recordings_row(wide, rec, count, c, r);
            for (int64_t j = 0; j < nk; j++) row[j] = (uint32_t)wide[j];
            ESA_TRY(esa_st_writer_data(w, rec->width == 8 ? (void *)wide : (void *)row,
                                       rec->width * nk));
        }
    }
    return ESA_OK;
}

/* Scratch: total[cells], wide[nk], row[nk]. */
static esa_status merge_all(esa_ctx *ctx, esa_tensors_writer *w, const esa_recording *rec,
                            int32_t count, const esa_mask_file_info *info, int32_t *total,
                            uint64_t *wide, uint32_t *row)
{
    int64_t used = 0;
    for (int64_t c = 0; c < rec->cells; c++) {
        const int64_t n = esa_recordings_count(rec, count, c);
        if (n > ESA_RECORD_MOST)
            return esa_fail(ctx, ESA_ERR_STATE,
                            "the recordings hold %lld contributions of one cell together, but one "
                            "recording takes at most %d: build the mask file from them directly",
                            (long long)n, ESA_RECORD_MOST);
        total[c] = (int32_t)n;
        used += n > 0;
    }
    for (int32_t i = 0; i < count; i++) ESA_TRY(esa_recording_check_sums(ctx, &rec[i]));
    ESA_TRY(esa_recording_declare(w, info, rec->dense_layers, used));
    ESA_TRY(esa_st_writer_data(w, rec->dense_layer, 4 * (int64_t)rec->dense_layers));
    ESA_TRY(esa_st_writer_data(w, total, 4 * rec->cells));
    ESA_TRY(merge_cells(w, rec, count, wide, row));
    return esa_st_writer_finish(w);
}

static esa_status merge(esa_ctx *ctx, esa_tensors_writer *w, const esa_recording *rec,
                        int32_t count, const esa_mask_file_info *info)
{
    int32_t *total = esa_mem_alloc(&ctx->mem, 4 * rec->cells);
    uint64_t *wide = esa_mem_alloc(&ctx->mem, 8 * info->nk);
    uint32_t *row = esa_mem_alloc(&ctx->mem, 4 * info->nk);
    const esa_status status = total && wide && row
                                  ? merge_all(ctx, w, rec, count, info, total, wide, row)
                                  : esa_fail(ctx, ESA_ERR_MEMORY,
                                             "out of memory while merging recordings");
    esa_mem_free(&ctx->mem, total, 4 * rec->cells);
    esa_mem_free(&ctx->mem, wide, 8 * info->nk);
    esa_mem_free(&ctx->mem, row, 4 * info->nk);
    return status;
}

esa_status esa_recording_merge(esa_ctx *ctx, const char *output, const char *const *recordings,
                               int32_t count)
{
    ESA_TRY(esa_ctx_enter(ctx));
    esa_recording *rec = NULL;
    esa_mask_file_info info;
    esa_tensors_writer *w = NULL;
    esa_status status = esa_recordings_open(ctx, &rec, &info, recordings, count);
    if (!status) status = esa_st_writer_open(ctx, &w, output);
    if (!status) status = merge(ctx, w, rec, count, &info);
    esa_st_writer_close(w);
    esa_recordings_close(ctx, rec, count);
    esa_ctx_leave(ctx);
    return status;
}
