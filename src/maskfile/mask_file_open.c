/* mask_file_open.c - opens a mask file. Every shape is compared with the metadata before its data
 * is used.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file.h"

#include <stdio.h>
#include <string.h>
#include "base/status.h"

/* A tensor to find: [branches if > 1][Ls][Gs][tail...], or only [tail...] if plain. find returns
 * NULL with a status if it is wrong, and NULL with ESA_OK if it is missing and optional. */
typedef struct wanted {
    const char *name;
    int32_t dtype, plain, optional, rank;
    int64_t tail[3];
} wanted;

static const uint8_t *find(const esa_mask_file *f, const wanted *want, esa_status *status)
{
    int64_t dim[ESA_FILE_MAX_RANK];
    int32_t rank = 0;
    if (!want->plain) {
        if (f->info.branches > 1) dim[rank++] = f->info.branches;
        dim[rank++] = f->info.stored_layers;
        dim[rank++] = f->info.stored_groups;
    }
    for (int32_t i = 0; i < want->rank; i++) dim[rank++] = want->tail[i];
    const esa_st_entry *e = esa_st_find(f->tensors, want->name);
    *status = ESA_OK;
    if (!e) {
        if (!want->optional)
            *status = esa_fail(f->ctx, ESA_ERR_FORMAT, "%s: tensor '%s' is missing",
                               f->tensors->label, want->name);
        return NULL;
    }
    int same = e->dtype == want->dtype && e->rank == rank;
    for (int32_t i = 0; same && i < rank; i++) same = e->dim[i] == dim[i];
    if (same) return esa_st_data(f->tensors, e);
    char expected[128] = "", found[128] = "";
    for (int32_t i = 0, n = 0; i < rank && n < 100; i++)
        n += snprintf(expected + n, sizeof expected - (size_t)n, i ? ",%lld" : "%lld",
                      (long long)dim[i]);
    for (int32_t i = 0, n = 0; i < e->rank && n < 100; i++)
        n += snprintf(found + n, sizeof found - (size_t)n, i ? ",%lld" : "%lld",
                      (long long)e->dim[i]);
    *status = esa_fail(f->ctx, ESA_ERR_FORMAT,
                       "%s: tensor '%s' is %s [%s], but the metadata needs %s [%s]",
                       f->tensors->label, want->name, esa_file_dtype_name(e->dtype), found,
                       esa_file_dtype_name(want->dtype), expected);
    return NULL;
}

/* Length of an I32 vector of 1 .. most entries, or -1. */
static int32_t vector_length(const esa_mask_file *f, const char *name, int32_t most,
                             esa_status *status)
{
    const esa_st_entry *e = esa_st_find(f->tensors, name);
    if (e && e->dtype == ESA_FILE_I32 && e->rank == 1 && e->dim[0] >= 1 && e->dim[0] <= most)
        return (int32_t)e->dim[0];
    *status = esa_fail(f->ctx, ESA_ERR_FORMAT,
                       "%s: tensor '%s' is %s, expected I32 with 1 to %d entries",
                       f->tensors->label, name, e ? "of another shape" : "missing", most);
    return -1;
}

static esa_status read_stored(const esa_mask_file *f, const char *name, int32_t *stored,
                              int32_t count, int32_t *slot, int32_t limit)
{
    memcpy(stored, esa_st_data(f->tensors, esa_st_find(f->tensors, name)), (size_t)count * 4);
    for (int32_t i = 0; i < limit; i++) slot[i] = -1;
    for (int32_t i = 0; i < count; i++) {
        if (stored[i] < 0 || stored[i] >= limit || (i && stored[i] <= stored[i - 1]))
            return esa_fail(f->ctx, ESA_ERR_FORMAT,
                            "%s: '%s' entry %d is %d, expected ascending numbers below %d",
                            f->tensors->label, name, i, stored[i], limit);
        slot[stored[i]] = i;
    }
    return ESA_OK;
}

static esa_status read_axes(esa_mask_file *f)
{
    esa_mask_file_info *info = &f->info;
    esa_status status = ESA_OK;
    const int32_t layers = vector_length(f, "stored_layers", info->layers, &status);
    if (layers < 0) return status;
    const int32_t groups = vector_length(f, "stored_groups", info->groups, &status);
    if (groups < 0) return status;
    info->stored_layers = layers;
    info->stored_groups = groups;
    const uint8_t *step_group = find(
        f, &(wanted){ "step_group", ESA_FILE_I32, 1, 0, 1, { info->steps } }, &status);
    if (!step_group) return status;
    f->index_bytes = 4 * ((int64_t)info->steps + info->layers + info->groups + layers + groups);
    f->step_group = esa_mem_alloc(&f->mem, f->index_bytes);
    if (!f->step_group)
        return esa_fail(f->ctx, ESA_ERR_MEMORY, "out of memory while opening %s",
                        f->tensors->label);
    f->layer_slot = f->step_group + info->steps;
    f->group_slot = f->layer_slot + info->layers;
    f->stored_layer = f->group_slot + info->groups;
    f->stored_group = f->stored_layer + layers;
    memcpy(f->step_group, step_group, (size_t)info->steps * 4);
    for (int32_t i = 0; i < info->steps; i++)
        if (f->step_group[i] < 0 || f->step_group[i] >= info->groups)
            return esa_fail(f->ctx, ESA_ERR_FORMAT,
                            "%s: 'step_group' entry %d is %d, expected 0 to %d", f->tensors->label,
                            i, f->step_group[i], info->groups - 1);
    ESA_TRY(read_stored(f, "stored_layers", f->stored_layer, layers, f->layer_slot, info->layers));
    ESA_TRY(read_stored(f, "stored_groups", f->stored_group, groups, f->group_slot, info->groups));
    f->cells = (int64_t)info->branches * layers * groups; /* each below 2^16 */
    f->cell_bytes = esa_size_mul(esa_size_mul(info->H, info->nq), esa_ceil_div(info->nk, 8));
    return ESA_OK;
}

static esa_status read_importance(esa_mask_file *f)
{
    const esa_mask_file_info *info = &f->info;
    esa_status status = ESA_OK;
    if (info->importance != ESA_IMPORTANCE_NONE) {
        if (esa_selector_of(info->selector)->records != ESA_RECORDS_IMPORTANCE)
            return esa_fail(f->ctx, ESA_ERR_FORMAT,
                            "%s holds importance, but its selector is not entropy",
                            f->tensors->label);
        if (info->block_q % 16 || info->block_k % 16 || info->block_q > 256 || info->block_k > 256)
            return esa_fail(f->ctx, ESA_ERR_FORMAT,
                            "%s has blocks of %dx%d, expected multiples of 16 up to 256",
                            f->tensors->label, info->block_q, info->block_k);
        const int32_t u8 = info->importance == ESA_IMPORTANCE_U8;
        f->importance = find(f,
                             &(wanted){ "importance",
                                        u8 ? ESA_FILE_U8 : ESA_FILE_F16,
                                        0,
                                        0,
                                        3,
                                        { info->H, info->nq, info->nk } },
                             &status);
        if (f->importance && u8)
            f->fine = find(f,
                           &(wanted){ "importance.fine",
                                      ESA_FILE_U8,
                                      0,
                                      0,
                                      3,
                                      { info->H, info->nq, esa_fine_bytes(info->nk) } },
                           &status);
        if (f->fine)
            f->rowmax = find(
                f, &(wanted){ "importance.rowmax", ESA_FILE_F32, 0, 0, 2, { info->H, info->nq } },
                &status);
        if (status) return status;
    }
    f->entropy = find(f, &(wanted){ "entropy", ESA_FILE_F32, 0, 1, 1, { info->H } }, &status);
    return status;
}

/* Per mille of a name "mask.dddd.bits", or -1. */
static int32_t permille_of(const char *name)
{
    if (strlen(name) != 14 || memcmp(name, "mask.", 5) != 0 || memcmp(name + 9, ".bits", 5) != 0)
        return -1;
    int32_t v = 0;
    for (int i = 5; i < 9; i++) {
        if (name[i] < '0' || name[i] > '9') return -1;
        v = v * 10 + (name[i] - '0');
    }
    return v <= 1000 ? v : -1;
}

/* density f32[cells] at any alignment; NULL: none. */
static esa_status check_density(const esa_mask_file *f, const uint8_t *density, const char *name)
{
    for (int64_t i = 0; density && i < f->cells; i++) {
        float v;
        memcpy(&v, density + 4 * i, 4);
        if (!(v >= 0 && v <= 1))
            return esa_fail(f->ctx, ESA_ERR_FORMAT,
                            "%s: '%s' entry %lld is %g, expected numbers within 0 .. 1",
                            f->tensors->label, name, (long long)i, (double)v);
    }
    return ESA_OK;
}

static esa_status read_budgets(esa_mask_file *f)
{
    esa_mask_file_info *info = &f->info;
    esa_budget_masks **last = &f->budgets;
    for (int64_t i = 0; i < f->tensors->count; i++) {
        /* Names are sorted, so budgets ascend. */
        const char *name = f->tensors->by_name[i]->name;
        const int32_t permille = permille_of(name);
        if (permille < 0) continue;
        if (info->budget_count == ESA_MAX_BUDGETS)
            return esa_fail(f->ctx, ESA_ERR_FORMAT, "%s holds more than %d budgets",
                            f->tensors->label, ESA_MAX_BUDGETS);
        char mass_name[24], fine_name[24], density_name[24];
        snprintf(mass_name, sizeof mass_name, "mask.%04d.mass", permille);
        snprintf(fine_name, sizeof fine_name, "mask.%04d.fine", permille);
        snprintf(density_name, sizeof density_name, "mask.%04d.density", permille);
        esa_status status;
        const uint8_t *bits = find(
            f,
            &(wanted){
                name, ESA_FILE_U8, 0, 0, 3, { info->H, info->nq, esa_ceil_div(info->nk, 8) } },
            &status);
        if (!bits) return status;
        const uint8_t *mass = find(f, &(wanted){ mass_name, ESA_FILE_F32, 0, 1, 1, { info->H } },
                                   &status);
        if (status) return status;
        const uint8_t *fine = NULL, *density = NULL;
        if (info->fine)
            fine = find(f,
                        &(wanted){ fine_name,
                                   ESA_FILE_U8,
                                   0,
                                   0,
                                   3,
                                   { info->H, info->nq, esa_ceil_div(info->nk, 8) } },
                        &status);
        if (status) return status;
        if (esa_run_errors(info))
            density = find(f, &(wanted){ density_name, ESA_FILE_F32, 0, 1, 0, { 0 } }, &status);
        if (status) return status;
        ESA_TRY(check_density(f, density, density_name));
        esa_budget_masks *m = esa_mem_zalloc(&f->mem, (int64_t)sizeof *m);
        if (!m)
            return esa_fail(f->ctx, ESA_ERR_MEMORY, "out of memory while opening %s",
                            f->tensors->label);
        m->permille = permille;
        m->bits = bits;
        m->fine = fine;
        m->mass = mass;
        m->density = density;
        *last = m;
        last = &m->next;
        info->budget_permille[info->budget_count++] = permille;
    }
    if (!info->budget_count && !f->importance)
        return esa_fail(f->ctx, ESA_ERR_FORMAT, "%s holds neither masks nor importance",
                        f->tensors->label);
    return ESA_OK;
}

static esa_status read_file(esa_mask_file *f)
{
    ESA_TRY(esa_run_read(f->ctx, &f->info, f->tensors, "esa.masks"));
    ESA_TRY(read_axes(f));
    ESA_TRY(read_importance(f));
    return read_budgets(f);
}

esa_status esa_mask_file_make(esa_ctx *ctx, esa_mask_file **file, esa_tensors *tensors)
{
    *file = NULL;
    esa_mask_file *f = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *f);
    if (!f) {
        esa_st_close(tensors);
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while opening a mask file");
    }
    f->ctx = ctx;
    f->mem = ctx->mem;
    f->tensors = tensors;
    const esa_status status = read_file(f);
    if (status)
        esa_mask_file_free(f);
    else
        *file = f;
    return status;
}

void esa_mask_file_free(esa_mask_file *file)
{
    if (!file) return;
    const esa_allocator mem = file->mem;
    for (esa_budget_masks *m = file->budgets, *next; m; m = next) {
        next = m->next;
        esa_mem_free(&mem, m->owned, m->owned_bytes);
        esa_mem_free(&mem, m, (int64_t)sizeof *m);
    }
    esa_mem_free(&mem, file->step_group, file->index_bytes);
    esa_st_close(file->tensors);
    esa_mem_free(&mem, file, (int64_t)sizeof *file);
}

esa_status esa_mask_file_open(esa_ctx *ctx, esa_mask_file **file, const char *path)
{
    if (file) *file = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    esa_tensors *tensors = NULL;
    esa_status status = file ? esa_st_open(ctx, &tensors, path)
                             : esa_fail(ctx, ESA_ERR_ARGUMENT, "file is NULL");
    if (!status) status = esa_mask_file_make(ctx, file, tensors);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_mask_file_open_memory(esa_ctx *ctx, esa_mask_file **file, const void *bytes,
                                     int64_t size)
{
    if (file) *file = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    esa_tensors *tensors = NULL;
    esa_status status = file ? esa_st_open_memory(ctx, &tensors, bytes, size)
                             : esa_fail(ctx, ESA_ERR_ARGUMENT, "file is NULL");
    if (!status) status = esa_mask_file_make(ctx, file, tensors);
    esa_ctx_leave(ctx);
    return status;
}
