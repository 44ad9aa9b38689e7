/* recorder.c - the sums of a recording in memory: adds to them, saves them, resumes from a file.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/recording.h"

#include <string.h>
#include "base/status.h"
#include "mask/mask.h"
#include "rules/levels.h"

esa_status esa_recorder_create(esa_ctx *ctx, esa_recorder *rec, const esa_mask_file_info *info,
                               const int32_t *dense_layer, int32_t dense_layers)
{
    memset(rec, 0, sizeof *rec);
    rec->ctx = ctx;
    rec->info = rec->asked = *info;
    rec->cells = (int64_t)info->branches * info->layers * info->groups;
    rec->width = esa_record_width(info);
    rec->dense_layers = dense_layers;
    rec->dense_layer = esa_mem_alloc(&ctx->mem, 4 * (int64_t)dense_layers);
    rec->count = esa_mem_zalloc(&ctx->mem, 4 * rec->cells);
    rec->sum = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *rec->sum * rec->cells);
    if (rec->dense_layer && rec->count && rec->sum) {
        if (dense_layers) memcpy(rec->dense_layer, dense_layer, 4 * (size_t)dense_layers);
        return ESA_OK;
    }
    esa_recorder_free(rec);
    return esa_fail(ctx, ESA_ERR_MEMORY,
                    "out of memory for a recording of %d layers and %d step groups", info->layers,
                    info->groups);
}

void esa_recorder_free(esa_recorder *rec)
{
    if (!rec->ctx) return;
    const esa_allocator *mem = &rec->ctx->mem;
    for (int64_t i = 0; rec->sum && i < rec->cells; i++)
        esa_mem_free(mem, rec->sum[i], rec->width * rec->blocks);
    esa_mem_free(mem, rec->sum, (int64_t)sizeof *rec->sum * rec->cells);
    esa_mem_free(mem, rec->count, 4 * rec->cells);
    esa_mem_free(mem, rec->dense_layer, 4 * (int64_t)rec->dense_layers);
    memset(rec, 0, sizeof *rec);
}

void esa_recorder_sizes(esa_mask_file_info *f, int64_t Nk)
{
    esa_select_params p = { .selector = f->selector,
                            .block_q = f->block_q,
                            .block_k = f->block_k,
                            .tail = f->tail,
                            .fine = f->fine,
                            .group_q = f->group_q,
                            .group_k = f->group_k };
    esa_record_sizes(&p, Nk);
    f->block_q = p.block_q;
    f->block_k = p.block_k;
    if (!esa_run_errors(f)) return;
    f->fine = p.tail == ESA_TAIL_LEVELS ? p.fine : 0;
    f->group_q = p.group_q;
    f->group_k = p.group_k;
}

/* Branch, layer and group of a cell number. */
static void cell_place(const esa_recorder *rec, int64_t cell, int32_t *branch, int32_t *layer,
                       int32_t *group)
{
    *group = (int32_t)(cell % rec->info.groups);
    *layer = (int32_t)(cell / rec->info.groups % rec->info.layers);
    *branch = (int32_t)(cell / rec->info.groups / rec->info.layers);
}

esa_status esa_recorder_reserve(esa_recorder *rec, int64_t cell, int32_t more)
{
    int32_t branch, layer, group;
    cell_place(rec, cell, &branch, &layer, &group);
    if (rec->count[cell] > ESA_RECORD_MOST - more)
        return esa_fail(rec->ctx, ESA_ERR_STATE,
                        "layer %d, step group %d already holds %d contributions; %d more do not "
                        "fit (at most %d): record more groups, or fewer prompts per recording and "
                        "merge them",
                        layer, group, rec->count[cell], more, ESA_RECORD_MOST);
    if (rec->sum[cell]) return ESA_OK;
    rec->sum[cell] = esa_mem_zalloc(&rec->ctx->mem, rec->width * rec->blocks);
    if (rec->sum[cell]) return ESA_OK;
    return esa_fail(
        rec->ctx, ESA_ERR_MEMORY,
        "out of memory: cannot allocate %lld bytes for the sums of layer %d, step group %d (fewer "
        "step groups need less)",
        (long long)(rec->width * rec->blocks), layer, group);
}

/* Infinity and NaN (a broken block) count as the largest error: such a block is computed exactly.
 */
static uint64_t error_units(float e)
{
    if (e < (float)ESA_RECORD_ERROR_TOP)
        return e > 0 ? (uint64_t)((double)e * ESA_RECORD_ERROR_ONE + 0.5) : 0;
    return (uint64_t)(ESA_RECORD_ERROR_TOP * ESA_RECORD_ERROR_ONE);
}

static void add_errors(esa_recorder *rec, int64_t cell, const float *p, int64_t level_stride)
{
    const int32_t levels = esa_run_levels(&rec->info);
    const int64_t level = rec->blocks / levels;
    uint64_t *sum = rec->sum[cell];
    for (int32_t l = 0; l < levels; l++)
        for (int64_t i = 0; i < level; i++)
            sum[l * level + i] += error_units(p[l * level_stride + i]);
    rec->count[cell]++;
}

void esa_recorder_add(esa_recorder *rec, int64_t cell, const float *p, int64_t level_stride)
{
    if (esa_run_errors(&rec->info)) {
        add_errors(rec, cell, p, level_stride);
        return;
    }
    uint32_t *sum = rec->sum[cell];
    for (int64_t i = 0; i < rec->blocks; i++) {
        /* Clamped to 0 .. 2^24. NaN (a broken row) counts as 0, so that it does not spoil the
         * other contributions. */
        const double v = (double)p[i] * ESA_RECORD_ONE;
        sum[i] += !(v > 0)              ? 0
                  : v >= ESA_RECORD_ONE ? (uint32_t)ESA_RECORD_ONE
                                        : (uint32_t)(v + 0.5);
    }
    rec->count[cell]++;
}

void esa_recorder_forget(esa_recorder *rec)
{
    for (int64_t i = 0; i < rec->cells; i++) {
        esa_mem_free(&rec->ctx->mem, rec->sum[i], rec->width * rec->blocks);
        rec->sum[i] = NULL;
    }
    const int32_t prompts = rec->info.prompts;
    rec->blocks = 0;
    rec->info = rec->asked;
    rec->info.prompts = prompts;
}

/* 1 if nothing was added yet. */
static int32_t is_empty(const esa_recorder *rec)
{
    for (int64_t i = 0; i < rec->cells; i++)
        if (rec->count[i]) return 0;
    return 1;
}

static esa_status write_sums(const esa_recorder *rec, esa_tensors_writer *w)
{
    const esa_mask_file_info *f = &rec->info;
    int64_t used = 0;
    for (int64_t i = 0; i < rec->cells; i++) used += rec->count[i] > 0;
    ESA_TRY(esa_recording_declare(w, f, rec->dense_layers, used));
    ESA_TRY(esa_st_writer_data(w, rec->dense_layer, 4 * (int64_t)rec->dense_layers));
    ESA_TRY(esa_st_writer_data(w, rec->count, 4 * rec->cells));
    for (int64_t i = 0; i < rec->cells; i++)
        if (rec->count[i]) ESA_TRY(esa_st_writer_data(w, rec->sum[i], rec->width * rec->blocks));
    return esa_st_writer_finish(w);
}

esa_status esa_recorder_save(const esa_recorder *rec, const char *path)
{
    esa_tensors_writer *w = NULL;
    if (is_empty(rec)) return esa_fail(rec->ctx, ESA_ERR_STATE, "nothing has been recorded yet");
    esa_status status = esa_st_writer_open(rec->ctx, &w, path);
    if (!status) status = write_sums(rec, w);
    esa_st_writer_close(w);
    return status;
}

/* ---------------------------------------------------------------- resuming */

/* Compares the settings with those of the file. Before the first call the shapes come from the
 * file, and the first call is compared with them. layout: that of the session. */
static esa_status check_resume(const esa_recorder *rec, const esa_recording *file,
                               const esa_layout *layout)
{
    esa_ctx *ctx = rec->ctx;
    esa_mask_file_info mine = rec->info;
    const char *name = file->tensors->label;
    if (!mine.H) {
        mine.H = file->info.H;
        mine.Nq = file->info.Nq;
        mine.Nk = file->info.Nk;
        mine.nq = file->info.nq;
        mine.nk = file->info.nk;
        esa_recorder_sizes(&mine, mine.Nk);
        if (esa_layout_resolve(ctx, &mine.layout, layout, mine.Nq, mine.Nk, mine.selector,
                               mine.mode, 0))
            return esa_fail(ctx, ESA_ERR_MISMATCH, "%.160s was made for %s, but the session has %s",
                            name, esa_run_describe_layout(&file->info.layout).text,
                            esa_run_describe_layout(layout).text);
    }
    ESA_TRY(esa_run_same(ctx, &file->info, name, &mine, "the session"));
    const int32_t n = rec->dense_layers;
    if (file->dense_layers != n ||
        (n && memcmp(file->dense_layer, rec->dense_layer, 4 * (size_t)n) != 0))
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s has %d listed dense layers, but the session has %d or other ones", name,
                        file->dense_layers, n);
    if ((int64_t)rec->info.prompts + file->info.prompts > INT32_MAX)
        return esa_fail(
            ctx, ESA_ERR_FORMAT,
            "%s claims %d prompts, which is too many together with the %d of the session", name,
            file->info.prompts, rec->info.prompts);
    return esa_recording_check_sums(ctx, file);
}

/* Does everything that can fail before the first sum changes, so that a refused
 * file adds nothing. */
static esa_status reserve_all(esa_recorder *rec, const esa_recording *file)
{
    const int64_t blocks = rec->blocks;
    esa_status status = ESA_OK;
    rec->blocks = file->blocks;
    for (int64_t i = 0; !status && i < rec->cells; i++)
        if (file->count[i]) status = esa_recorder_reserve(rec, i, file->count[i]);
    if (!status) return ESA_OK;
    for (int64_t i = 0; i < rec->cells; i++) {
        if (rec->count[i] || !rec->sum[i]) continue;
        esa_mem_free(&rec->ctx->mem, rec->sum[i], rec->width * rec->blocks);
        rec->sum[i] = NULL;
    }
    rec->blocks = blocks;
    return status;
}

static void add_file(esa_recorder *rec, const esa_recording *file)
{
    if (!rec->info.H) {
        const int32_t prompts = rec->info.prompts;
        rec->info = file->info;
        rec->info.prompts = prompts;
    }
    for (int64_t i = 0; i < rec->cells; i++) {
        if (!file->count[i]) continue;
        const uint8_t *from = file->sums + file->slot[i] * rec->width * file->blocks;
        for (int64_t j = 0; j < rec->blocks; j++) {
            const uint64_t v = esa_recording_sum(from, j, rec->width);
            if (rec->width == 8)
                ((uint64_t *)rec->sum[i])[j] += v;
            else
                ((uint32_t *)rec->sum[i])[j] += (uint32_t)v;
        }
        rec->count[i] += file->count[i];
    }
    rec->info.prompts += file->info.prompts;
}

esa_status esa_recorder_load(esa_recorder *rec, const char *path, const esa_layout *layout)
{
    esa_recording file;
    ESA_TRY(esa_recording_open(rec->ctx, &file, path));
    esa_status status = check_resume(rec, &file, layout);
    if (!status) status = reserve_all(rec, &file);
    if (!status) add_file(rec, &file);
    esa_recording_close(rec->ctx, &file);
    return status;
}
