/* work_plan_file.c - reads and writes plan files: safetensors, checked before use.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Metadata: format "esa.plan", format_version, model, config_hash, prompts, selector, order, tail,
 * block, anchors (not in older files). Tensors, all F64: sigma [T], density [K], error [L,T,K],
 * weight [L,T], and with a quality curve quality.work, quality.psnr and quality.spread [Q]. */
#include "workplan/work_plan.h"

#include <stdio.h>
#include <string.h>
#include "base/status.h"

static const char format[] = "esa.plan";

/* ---------------------------------------------------------------- writing */

static esa_status put_int(esa_tensors_writer *w, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return esa_st_writer_metadata(w, key, text);
}

typedef struct part {
    const char *name;
    const double *data;
    int32_t rank;
    int64_t dim[3];
} part;

static esa_status write_parts(esa_tensors_writer *w, const part *p, int32_t parts)
{
    for (int32_t i = 0; i < parts; i++)
        ESA_TRY(esa_st_writer_declare(w, p[i].name, ESA_FILE_F64, p[i].rank, p[i].dim));
    for (int32_t i = 0; i < parts; i++) {
        int64_t n = 1;
        for (int32_t d = 0; d < p[i].rank; d++) n *= p[i].dim[d];
        ESA_TRY(esa_st_writer_data(w, p[i].data, n * 8));
    }
    return esa_st_writer_finish(w);
}

static esa_status write_all(const esa_work_plan *p, esa_tensors_writer *w)
{
    const esa_work_plan_info *f = &p->info;
    const int64_t L = f->layers, T = f->steps, K = f->points, Q = f->levels;
    const struct {
        const char *key;
        int64_t value;
    } ints[] = { { "format_version", ESA_WORK_FORMAT_VERSION },
                 { "prompts", f->prompts },
                 { "selector", f->selector },
                 { "order", f->order },
                 { "tail", f->tail },
                 { "block_q", f->block_q },
                 { "block_k", f->block_k },
                 { "anchors", f->anchors } };
    const part parts[] = {
        { "sigma", p->sigma, 1, { T } },          { "density", p->density, 1, { K } },
        { "error", p->error, 3, { L, T, K } },    { "weight", p->weight, 2, { L, T } },
        { "quality.work", p->work, 1, { Q } },    { "quality.psnr", p->psnr, 1, { Q } },
        { "quality.spread", p->spread, 1, { Q } }
    };
    ESA_TRY(esa_st_writer_metadata(w, "format", format));
    ESA_TRY(esa_st_writer_metadata(w, "model", f->model));
    ESA_TRY(esa_st_writer_metadata(w, "config_hash", f->config_hash));
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++)
        ESA_TRY(put_int(w, ints[i].key, ints[i].value));
    return write_parts(w, parts, Q ? 7 : 4);
}

esa_status esa_work_plan_save(const esa_work_plan *plan, const char *path)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(plan->ctx));
    esa_tensors_writer *w = NULL;
    esa_status status = esa_st_writer_open(plan->ctx, &w, path);
    if (!status) status = write_all(plan, w);
    esa_st_writer_close(w);
    esa_ctx_leave(plan->ctx);
    return status;
}

/* ---------------------------------------------------------------- reading */

static esa_status read_int(esa_ctx *ctx, const esa_tensors *file, const char *key, int32_t low,
                           int32_t high, int32_t *value)
{
    const char *text = esa_st_metadata(file, key), *at = text;
    int64_t v = 0;
    if (!text)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%s: metadata '%s' is missing", file->label, key);
    const int negative = *at == '-';
    at += negative;
    const char *const digits = at;
    for (; *at >= '0' && *at <= '9' && at - digits < 10; at++) v = v * 10 + (*at - '0');
    if (negative) v = -v;
    if (*at || at == digits || v < low || v > high)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%s: metadata '%s' is '%s', expected a whole number within %d .. %d",
                        file->label, key, esa_quote(text).text, low, high);
    *value = (int32_t)v;
    return ESA_OK;
}

static esa_status read_text(esa_ctx *ctx, const esa_tensors *file, const char *key, char *out,
                            size_t room)
{
    const char *text = esa_st_metadata(file, key);
    if (!text || strlen(text) >= room)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%s: metadata '%s' is %s", file->label, key,
                        text ? "too long" : "missing");
    strcpy(out, text);
    return ESA_OK;
}

/* Length of a vector of F64 with 1 .. most entries. */
static esa_status read_length(esa_ctx *ctx, const esa_tensors *file, const char *name, int32_t most,
                              int32_t *length)
{
    const esa_st_entry *e = esa_st_find(file, name);
    if (!e || e->dtype != ESA_FILE_F64 || e->rank != 1 || e->dim[0] < 1 || e->dim[0] > most)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%s: tensor '%s' is %s, expected F64 with 1 to %d entries", file->label,
                        name, e ? "of another shape" : "missing", most);
    *length = (int32_t)e->dim[0];
    return ESA_OK;
}

/* Copies a tensor of this shape to out, which the caller has sized. */
static esa_status read_part(esa_ctx *ctx, const esa_tensors *file, const part *want, double *out)
{
    const esa_st_entry *e = esa_st_find(file, want->name);
    int same = e && e->dtype == ESA_FILE_F64 && e->rank == want->rank;
    for (int32_t i = 0; same && i < want->rank; i++) same = e->dim[i] == want->dim[i];
    if (!same)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%s: tensor '%s' is %s, but the other tensors need F64 [%lld,%lld,%lld]",
                        file->label, want->name, e ? "of another shape" : "missing",
                        (long long)want->dim[0], (long long)want->dim[1], (long long)want->dim[2]);
    memcpy(out, esa_st_data(file, e), (size_t)(e->end - e->begin));
    return ESA_OK;
}

static esa_status read_info(esa_ctx *ctx, const esa_tensors *file, esa_work_plan_info *f)
{
    const char *found = esa_st_metadata(file, "format");
    if (!found || strcmp(found, format) != 0)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%s is a safetensors file of format '%s', not a work "
                        "plan (%s)",
                        file->label, esa_quote(found ? found : "").text, format);
    ESA_TRY(read_int(ctx, file, "format_version", 1, INT32_MAX, &f->format_version));
    if (f->format_version != ESA_WORK_FORMAT_VERSION)
        return esa_fail(ctx, ESA_ERR_VERSION, "%s has format version %d, this library expects %d",
                        file->label, f->format_version, ESA_WORK_FORMAT_VERSION);
    const struct {
        const char *key;
        int32_t low, high, *value;
    } ints[] = { { "prompts", 0, INT32_MAX, &f->prompts }, { "selector", -1, 255, &f->selector },
                 { "order", -1, 255, &f->order },          { "tail", 0, 255, &f->tail },
                 { "block_q", 0, 65536, &f->block_q },     { "block_k", 0, 65536, &f->block_k } };
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++)
        ESA_TRY(read_int(ctx, file, ints[i].key, ints[i].low, ints[i].high, ints[i].value));
    if (esa_st_metadata(file, "anchors"))
        ESA_TRY(read_int(ctx, file, "anchors", 0, ESA_WORK_MAX_AXIS, &f->anchors));
    ESA_TRY(read_text(ctx, file, "model", f->model, sizeof f->model));
    ESA_TRY(read_text(ctx, file, "config_hash", f->config_hash, sizeof f->config_hash));
    ESA_TRY(read_length(ctx, file, "sigma", ESA_WORK_MAX_AXIS, &f->steps));
    ESA_TRY(read_length(ctx, file, "density", ESA_WORK_MAX_POINTS, &f->points));
    const esa_st_entry *weight = esa_st_find(file, "weight");
    if (!weight || weight->rank != 2 || weight->dim[0] < 1 || weight->dim[0] > ESA_WORK_MAX_AXIS)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%s: tensor 'weight' is %s, expected F64 [layers, steps]", file->label,
                        weight ? "of another shape" : "missing");
    f->layers = (int32_t)weight->dim[0];
    if (esa_st_find(file, "quality.work"))
        ESA_TRY(read_length(ctx, file, "quality.work", ESA_WORK_MAX_LEVELS, &f->levels));
    return ESA_OK;
}

static esa_status read_quality(esa_ctx *ctx, const esa_tensors *file, esa_work_plan *p,
                               int32_t levels)
{
    double work[ESA_WORK_MAX_LEVELS], psnr[ESA_WORK_MAX_LEVELS], spread[ESA_WORK_MAX_LEVELS];
    if (!levels) return ESA_OK;
    ESA_TRY(read_part(ctx, file, &(part){ "quality.work", NULL, 1, { levels } }, work));
    ESA_TRY(read_part(ctx, file, &(part){ "quality.psnr", NULL, 1, { levels } }, psnr));
    ESA_TRY(read_part(ctx, file, &(part){ "quality.spread", NULL, 1, { levels } }, spread));
    return esa_work_plan_rate(p, file->label, levels, work, psnr, spread);
}

/* memory: room for all arrays, in the order sigma, density, error, weight. */
static esa_status read_values(esa_ctx *ctx, const esa_tensors *file, esa_work_plan **plan,
                              const esa_work_plan_info *f, double *memory)
{
    const int64_t L = f->layers, T = f->steps, K = f->points;
    double *sigma = memory, *density = sigma + T, *error = density + K, *weight = error + L * T * K;
    ESA_TRY(read_part(ctx, file, &(part){ "sigma", NULL, 1, { T } }, sigma));
    ESA_TRY(read_part(ctx, file, &(part){ "density", NULL, 1, { K } }, density));
    ESA_TRY(read_part(ctx, file, &(part){ "error", NULL, 3, { L, T, K } }, error));
    ESA_TRY(read_part(ctx, file, &(part){ "weight", NULL, 2, { L, T } }, weight));
    ESA_TRY(esa_work_plan_make(ctx, plan, file->label, f, sigma, density, error, weight));
    return read_quality(ctx, file, *plan, f->levels);
}

esa_status esa_work_plan_read(esa_ctx *ctx, esa_work_plan **plan, esa_tensors *tensors)
{
    esa_work_plan_info f;
    memset(&f, 0, sizeof f);
    f.struct_size = (uint32_t)sizeof f;
    *plan = NULL;
    esa_status status = read_info(ctx, tensors, &f);
    /* the tensors are in the file, so these products are small; checked shapes back them below */
    const int64_t cells = (int64_t)f.layers * f.steps;
    const int64_t bytes = 8 * (f.steps + f.points + esa_size_mul(cells, f.points + 1));
    double *memory = NULL;
    if (!status && bytes / 2 > tensors->size)
        status = esa_fail(ctx, ESA_ERR_FORMAT,
                          "%s: %d x %d cells of %d points do not fit a file "
                          "of %lld bytes",
                          tensors->label, f.layers, f.steps, f.points, (long long)tensors->size);
    if (!status) {
        memory = esa_mem_alloc(&ctx->mem, bytes);
        status = memory ? read_values(ctx, tensors, plan, &f, memory)
                        : esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while opening %s",
                                   tensors->label);
    }
    esa_mem_free(&ctx->mem, memory, bytes);
    /* values that a plan cannot have are a fault of the file here */
    if (status == ESA_ERR_ARGUMENT) status = ESA_ERR_FORMAT;
    if (status) {
        esa_work_plan_free(*plan);
        *plan = NULL;
    }
    esa_st_close(tensors);
    return status;
}

static esa_status open_with(esa_ctx *ctx, esa_work_plan **plan, const char *path, const void *bytes,
                            int64_t size)
{
    esa_tensors *tensors;
    if (!plan) return esa_fail(ctx, ESA_ERR_ARGUMENT, "plan is NULL");
    ESA_TRY(path ? esa_st_open(ctx, &tensors, path)
                 : esa_st_open_memory(ctx, &tensors, bytes, size));
    return esa_work_plan_read(ctx, plan, tensors);
}

esa_status esa_work_plan_open(esa_ctx *ctx, esa_work_plan **plan, const char *path)
{
    if (plan) *plan = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = path ? open_with(ctx, plan, path, NULL, 0)
                                   : esa_fail(ctx, ESA_ERR_ARGUMENT, "path is NULL");
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_work_plan_open_memory(esa_ctx *ctx, esa_work_plan **plan, const void *bytes,
                                     int64_t size)
{
    if (plan) *plan = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = open_with(ctx, plan, NULL, bytes, size);
    esa_ctx_leave(ctx);
    return status;
}
