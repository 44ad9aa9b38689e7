/* mask_build.c - builds a mask file from recordings, and rewrites a mask file with other budgets or
 * less importance.
 * SPDX-License-Identifier: Apache-2.0
 *
 * It works cell by cell. Sums are averaged and coded, and masks are made from the codes (never from
 * the sums), so a reader derives the same masks. With importance NONE the codes are made too, but
 * not stored. */
#include "maskfile/mask_build.h"

#include <string.h>
#include "base/half.h"
#include "base/pool.h"
#include "base/status.h"
#include "maskfile/recording.h"
#include "rules/exact_rows.h"

esa_mask_build esa_mask_build_default(void)
{
    esa_mask_build b;
    memset(&b, 0, sizeof b);
    b.struct_size = (uint32_t)sizeof b;
    b.importance = ESA_IMPORTANCE_U8;
    b.dense_first_layer = -1;
    b.warmup_frac = -1;
    b.exact_rows = -1;
    return b;
}

static esa_status check_build(esa_ctx *ctx, const esa_mask_build *build)
{
    if (build->struct_size == sizeof *build) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_VERSION,
                    "esa_mask_build has struct_size %u, this library expects %u",
                    (unsigned)build->struct_size, (unsigned)sizeof *build);
}

/* Copies importance and budgets (in per mille, ascending) to info. */
static esa_status read_build(esa_ctx *ctx, esa_mask_file_info *info, const esa_mask_build *build)
{
    if (build->importance < ESA_IMPORTANCE_NONE || build->importance > ESA_IMPORTANCE_F16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "importance is %d, expected ESA_IMPORTANCE_NONE, U8 or F16",
                        build->importance);
    if (build->budget_count < 0 || build->budget_count > ESA_MAX_BUDGETS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "budget_count is %d, expected 0 to %d",
                        build->budget_count, ESA_MAX_BUDGETS);
    if (build->budget_count && !build->budgets)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "budget_count is %d, but budgets is NULL",
                        build->budget_count);
    if (!build->budget_count && build->importance == ESA_IMPORTANCE_NONE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        esa_run_errors(info)
                            ? "no work is given: masks from error scores are built for total works"
                            : "neither budgets nor importance are given: the file would be empty");
    info->importance = build->importance;
    info->budget_count = 0;
    memset(info->budget_permille, 0, sizeof info->budget_permille);
    for (int32_t i = 0; i < build->budget_count; i++) {
        const int32_t v = esa_budget_permille(ctx, build->budgets[i]);
        if (v < 0) return ESA_ERR_ARGUMENT;
        int32_t at = info->budget_count;
        for (int32_t j = 0; j < info->budget_count; j++)
            if (info->budget_permille[j] == v)
                return esa_fail(ctx, ESA_ERR_ARGUMENT, "budget %.3f was given twice", v / 1000.0);
        for (; at > 0 && info->budget_permille[at - 1] > v; at--)
            info->budget_permille[at] = info->budget_permille[at - 1];
        info->budget_permille[at] = v;
        info->budget_count++;
    }
    return ESA_OK;
}

/* ---------------------------------------------------------------- from recordings */

typedef struct coder {
    const esa_recording *rec;
    int32_t count, f16;
    int64_t cell, contributions;
    uint8_t *code; /* [H][nq][nk], 1 or 2 bytes each */
    uint8_t *fine; /* [H][nq][esa_fine_bytes(nk)] */
    float *rowmax; /* [H][nq] */
    uint64_t *sum; /* [threads][nk] */
} coder;

static void code_head(void *arg, int64_t h, int32_t worker)
{
    const coder *c = arg;
    const int64_t nq = c->rec->info.nq, nk = c->rec->info.nk;
    uint64_t *sum = c->sum + worker * nk;
    const double one = (double)c->contributions * ESA_RECORD_ONE;
    for (int64_t r = h * nq; r < (h + 1) * nq; r++) {
        esa_recordings_row(sum, c->rec, c->count, c->cell, r);
        if (c->f16) {
            for (int64_t j = 0; j < nk; j++)
                esa_store_f32(c->code, r * nk + j, ESA_DTYPE_F16, (float)((double)sum[j] / one));
        } else {
            const uint64_t top = esa_code_from_sums(c->code + r * nk,
                                                    c->fine + r * esa_fine_bytes(nk), sum, nk);
            c->rowmax[r] = (float)((double)top / one);
        }
    }
}

/* Fills in what the kind of recording decides. */
static void complete(esa_mask_build *b, const esa_mask_file_info *recorded)
{
    const int32_t errors = esa_run_errors(recorded);
    if (b->dense_first_layer == -1) b->dense_first_layer = !errors;
    if (b->warmup_frac == -1) b->warmup_frac = errors ? 0 : 0.2;
    if (b->exact_rows == -1) b->exact_rows = esa_selector_of(recorded->selector)->exact_rows;
    if (errors) b->importance = ESA_IMPORTANCE_NONE;
}

/* Maps each step of the file to the group of the recorded step at the same noise level: noise
 * levels depend on the fraction of steps done, not on their number. */
static void map_steps(int32_t *step_group, int32_t steps, const esa_mask_file_info *recorded)
{
    for (int32_t i = 0; i < steps; i++)
        step_group[i] = esa_step_group((int32_t)((int64_t)i * recorded->steps / steps),
                                       recorded->groups, recorded->steps);
}

/* Chooses the layers and groups to store. Fills layer[L], group[G] and the counts in info, whose
 * steps are those of step_group. */
static esa_status choose(esa_ctx *ctx, esa_mask_file_info *info, int32_t *layer, int32_t *group,
                         const int32_t *step_group, const esa_recording *rec, int32_t count,
                         const esa_mask_build *build)
{
    const int32_t warmup = build->store_dense ? 0
                                              : esa_warmup_steps(build->warmup_frac, info->steps);
    info->stored_layers = info->stored_groups = 0;
    for (int32_t l = 0; l < info->layers; l++)
        if (!(l == 0 && build->dense_first_layer && !build->store_dense) &&
            !esa_recording_is_dense(rec, l))
            layer[info->stored_layers++] = l;
    /* A group is stored if one of its steps is not warm-up. Groups are runs of steps, so the last
     * step decides. */
    for (int32_t i = 0; i < info->steps; i++) {
        const int32_t last = i + 1 == info->steps || step_group[i + 1] != step_group[i];
        if (last && i >= warmup) group[info->stored_groups++] = step_group[i];
    }
    if (!info->stored_layers || !info->stored_groups)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "nothing would be stored: all of the %d layers and %d steps are dense "
                        "(warm-up %g, first layer dense %d)",
                        info->layers, info->steps, build->warmup_frac, build->dense_first_layer);
    for (int32_t b = 0; b < info->branches; b++)
        for (int32_t l = 0; l < info->stored_layers; l++)
            for (int32_t g = 0; g < info->stored_groups; g++)
                if (!esa_recordings_count(rec, count,
                                          ((int64_t)b * info->layers + layer[l]) * info->groups +
                                              group[g]))
                    return esa_fail(ctx, ESA_ERR_STATE,
                                    "layer %d, step group %d, branch %d was never recorded: record "
                                    "the missing part, or give all shards",
                                    layer[l], group[g], b);
    return ESA_OK;
}

/* Codes one recorded cell and writes it as cell number index of the file. */
static esa_status build_cell(esa_ctx *ctx, esa_mask_output *out, int64_t index, coder *c,
                             esa_cell *cell)
{
    c->contributions = esa_recordings_count(c->rec, c->count, c->cell);
    esa_pool_run(ctx->pool, code_head, c, out->info.H);
    if (c->f16)
        esa_cell_load_f16(cell, c->code);
    else
        esa_cell_load_u8(cell, c->code, c->fine);
    ESA_TRY(esa_mask_output_importance(out, index, c->code, c->fine, c->rowmax));
    return esa_mask_output_select(out, index, cell);
}

static esa_status build_cells(esa_ctx *ctx, esa_mask_output *out, coder *c, const int32_t *layer,
                              const int32_t *group)
{
    const esa_mask_file_info *info = &out->info;
    esa_cell cell = { 0 };
    esa_status status = esa_cell_create(ctx, &cell, info);
    for (int64_t i = 0; !status && i < out->cells; i++) {
        const int64_t g = i % info->stored_groups,
                      l = i / info->stored_groups % info->stored_layers,
                      b = i / info->stored_groups / info->stored_layers;
        c->cell = (b * info->layers + layer[l]) * info->groups + group[g];
        status = build_cell(ctx, out, i, c, &cell);
    }
    esa_cell_free(&cell);
    return status;
}

/* Buffers are allocated: chooses the cells and writes the file. axis has room for layers, groups
 * and steps. */
static esa_status write_file(esa_ctx *ctx, const char *output, coder *c, int32_t *axis,
                             esa_mask_file_info *info, const esa_mask_file_info *recorded,
                             const esa_mask_build *build)
{
    int32_t *layer = axis, *group = axis + info->layers, *step_group = group + info->groups;
    map_steps(step_group, info->steps, recorded);
    ESA_TRY(choose(ctx, info, layer, group, step_group, c->rec, c->count, build));
    const int32_t errors = esa_run_errors(info);
    const esa_mask_axes axes = { step_group, layer, group, !errors, 1, errors };
    esa_mask_output out = { 0 };
    ESA_TRY(esa_mask_output_begin(ctx, &out, output, info, &axes));
    esa_status status = errors ? esa_mask_build_errors(&out, c->rec, c->count, &axes, build->plan)
                               : build_cells(ctx, &out, c, layer, group);
    if (!status) status = esa_mask_output_finish(&out);
    esa_mask_output_free(&out);
    return status;
}

static esa_status build(esa_ctx *ctx, const char *output, const esa_recording *rec, int32_t count,
                        esa_mask_file_info *info, const esa_mask_build *given)
{
    ESA_TRY(check_build(ctx, given));
    esa_mask_build completed = *given;
    const esa_mask_build *build = &completed;
    complete(&completed, info);
    ESA_TRY(read_build(ctx, info, build));
    if (build->plan && !esa_run_errors(info))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "a work plan weighs error scores, but these recordings hold importance");
    if (build->exact_rows < 0 || build->exact_rows > ESA_MAX_EXACT_ROWS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "exact_rows is %d, expected 0 to %d",
                        build->exact_rows, ESA_MAX_EXACT_ROWS);
    if (build->exact_rows && !esa_run_errors(info))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "exact_rows is %d, but these recordings hold importance: their masks have "
                        "budgets, and sessions choose exact rows",
                        build->exact_rows);
    if (!(build->warmup_frac >= 0 && build->warmup_frac <= 1))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "warmup_frac is %g, expected 0 to 1",
                        build->warmup_frac);
    if (build->steps && (build->steps < info->groups || build->steps > ESA_MAX_CELL_AXIS))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "steps is %d, expected %d (the recorded groups) to %d", build->steps,
                        info->groups, ESA_MAX_CELL_AXIS);
    const esa_mask_file_info recorded = *info;
    if (build->steps) info->steps = build->steps;
    info->exact_rows = build->exact_rows;
    info->warmup_frac = build->store_dense ? 0 : build->warmup_frac;
    info->dense_first_layer = build->store_dense ? 0 : build->dense_first_layer != 0;

    coder c = { .rec = rec, .count = count, .f16 = info->importance == ESA_IMPORTANCE_F16 };
    const int64_t rows = info->H * info->nq, code_bytes = rows * info->nk * (c.f16 ? 2 : 1),
                  fine_bytes = rows * esa_fine_bytes(info->nk);
    const int64_t sum_bytes = 8 * info->nk * esa_pool_threads(ctx->pool),
                  axis_bytes = 4 * ((int64_t)info->layers + info->groups + info->steps);
    c.code = esa_mem_alloc(&ctx->mem, code_bytes);
    c.fine = esa_mem_alloc(&ctx->mem, fine_bytes);
    c.rowmax = esa_mem_alloc(&ctx->mem, 4 * rows);
    c.sum = esa_mem_alloc(&ctx->mem, sum_bytes);
    int32_t *axis = esa_mem_alloc(&ctx->mem, axis_bytes);
    const esa_status status = c.code && c.fine && c.rowmax && c.sum && axis
                                  ? write_file(ctx, output, &c, axis, info, &recorded, build)
                                  : esa_fail(ctx, ESA_ERR_MEMORY,
                                             "out of memory while building %.200s",
                                             output ? output : "a mask file");
    esa_mem_free(&ctx->mem, axis, axis_bytes);
    esa_mem_free(&ctx->mem, c.code, code_bytes);
    esa_mem_free(&ctx->mem, c.fine, fine_bytes);
    esa_mem_free(&ctx->mem, c.rowmax, 4 * rows);
    esa_mem_free(&ctx->mem, c.sum, sum_bytes);
    return status;
}

esa_status esa_mask_file_build(esa_ctx *ctx, const char *output, const char *const *recordings,
                               int32_t count, const esa_mask_build *params)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_mask_build fallback = esa_mask_build_default();
    esa_recording *rec = NULL;
    esa_mask_file_info info;
    esa_status status = esa_recordings_open(ctx, &rec, &info, recordings, count);
    if (!status) status = build(ctx, output, rec, count, &info, params ? params : &fallback);
    esa_recordings_close(ctx, rec, count);
    esa_ctx_leave(ctx);
    return status;
}

/* ---------------------------------------------------------------- from a mask file */

/* Derives one cell of a file with importance. The importance stays or becomes u8, and the masks
 * follow from what is stored. */
static esa_status derive_cell(const esa_mask_file *f, esa_mask_output *out, int64_t i,
                              esa_cell *cell, uint8_t *code, uint8_t *fine, float *rowmax,
                              float *row)
{
    const int64_t rows = f->info.H * f->info.nq, nk = f->info.nk, fines = esa_fine_bytes(nk);
    const int32_t recode = f->info.importance == ESA_IMPORTANCE_F16 &&
                           out->info.importance == ESA_IMPORTANCE_U8;
    if (recode) {
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t j = 0; j < nk; j++)
                row[j] = esa_load_f32(f->importance, (i * rows + r) * nk + j, ESA_DTYPE_F16);
            rowmax[r] = esa_code_from_f32(code + r * nk, fine + r * fines, row, nk);
        }
        esa_cell_load_u8(cell, code, fine);
        ESA_TRY(esa_mask_output_importance(out, i, code, fine, rowmax));
    } else {
        const int64_t width = f->info.importance == ESA_IMPORTANCE_U8 ? 1 : 2;
        esa_mask_file_load(f, cell, i);
        if (f->rowmax) memcpy(rowmax, f->rowmax + 4 * i * rows, 4 * (size_t)rows);
        ESA_TRY(esa_mask_output_importance(out, i, f->importance + i * rows * nk * width,
                                           f->fine ? f->fine + i * rows * fines : NULL, rowmax));
    }
    return esa_mask_output_select(out, i, cell);
}

static esa_status derive_cells(esa_mask_file *f, esa_mask_output *out)
{
    const int64_t rows = f->info.H * f->info.nq, nk = f->info.nk;
    esa_cell cell = { 0 };
    uint8_t *code = esa_mem_alloc(&f->mem, rows * nk),
            *fine = esa_mem_alloc(&f->mem, rows * esa_fine_bytes(nk));
    float *rowmax = esa_mem_alloc(&f->mem, 4 * rows), *row = esa_mem_alloc(&f->mem, 4 * nk);
    esa_status status = code && fine && rowmax && row
                            ? esa_cell_create(f->ctx, &cell, &f->info)
                            : esa_fail(f->ctx, ESA_ERR_MEMORY,
                                       "out of memory while deriving masks");
    for (int64_t i = 0; !status && i < f->cells; i++)
        status = derive_cell(f, out, i, &cell, code, fine, rowmax, row);
    esa_cell_free(&cell);
    esa_mem_free(&f->mem, code, rows * nk);
    esa_mem_free(&f->mem, fine, rows * esa_fine_bytes(nk));
    esa_mem_free(&f->mem, rowmax, 4 * rows);
    esa_mem_free(&f->mem, row, 4 * nk);
    return status;
}

/* Copies the prebuilt masks of a file without importance. */
static esa_status copy_cells(esa_mask_file *f, esa_mask_output *out)
{
    for (int32_t b = 0; b < out->info.budget_count; b++) {
        const esa_budget_masks *masks = NULL;
        ESA_TRY(esa_mask_file_budget(f, &masks, out->info.budget_permille[b]));
        for (int64_t i = 0; i < f->cells; i++) {
            ESA_TRY(esa_mask_file_check_bits(f, masks, i));
            if (masks->mass)
                memcpy(out->heads, masks->mass + 4 * i * f->info.H, 4 * (size_t)f->info.H);
            const int64_t at = i * f->cell_bytes;
            const esa_cell_masks cell = { masks->bits + at, masks->fine ? masks->fine + at : NULL,
                                          out->heads, (float)esa_mask_file_cell_density(masks, i) };
            ESA_TRY(esa_mask_output_masks(out, i, b, &cell));
        }
    }
    for (int64_t i = 0; out->tensor_entropy >= 0 && i < f->cells; i++)
        ESA_TRY(esa_st_writer_put(out->writer, out->tensor_entropy, 4 * i * f->info.H,
                                  f->entropy + 4 * i * f->info.H, 4 * f->info.H));
    return ESA_OK;
}

static esa_status derive(esa_ctx *ctx, const char *output, esa_mask_file *f,
                         const esa_mask_build *p)
{
    ESA_TRY(esa_mask_file_check_ctx(ctx, f));
    esa_mask_file_info info = f->info;
    ESA_TRY(check_build(ctx, p));
    ESA_TRY(read_build(ctx, &info, p));
    static const char *const name[] = { "none", "u8", "f16" };
    if (info.importance > f->info.importance)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "%s holds importance %s and cannot be rewritten with %s", f->tensors->label,
                        name[f->info.importance], name[info.importance]);
    int32_t with_mass = 1;
    if (!f->importance) {
        for (int32_t b = 0; b < info.budget_count; b++) {
            const esa_budget_masks *masks;
            ESA_TRY(esa_mask_file_budget(f, &masks, info.budget_permille[b]));
            with_mass = with_mass && masks->mass;
        }
    }
    const esa_mask_axes axes = { f->step_group,   f->stored_layer,
                                 f->stored_group, f->importance || f->entropy,
                                 with_mass,       esa_mask_file_has_works(f) };
    esa_mask_output out = { 0 };
    ESA_TRY(esa_mask_output_begin(ctx, &out, output, &info, &axes));
    esa_status status = f->importance ? derive_cells(f, &out) : copy_cells(f, &out);
    if (!status) status = esa_mask_output_finish(&out);
    esa_mask_output_free(&out);
    return status;
}

esa_status esa_mask_file_derive(esa_ctx *ctx, const char *output, esa_mask_file *file,
                                const esa_mask_build *params)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_mask_build fallback = esa_mask_build_default();
    const esa_status status = derive(ctx, output, file, params ? params : &fallback);
    esa_ctx_leave(ctx);
    return status;
}
