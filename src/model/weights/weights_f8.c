/* weights_f8.c - tensors that a file holds in E4M3, and their scales.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The scale of X.weight is called X.weight_scale or X.scale_weight. It holds one number, or one for
 * each row, by which the stored numbers are multiplied; without it the factor is 1. Beside an E4M3
 * tensor there may also be a scale of activations (X.input_scale, X.scale_input), which we do not
 * use, because ours are computed for every token. Beside a tensor of another type both are refused:
 * the file does not mean what we would read. A tensor scaled_fp8 only says what the file is, and so
 * does X.comfy_quant, a few bytes of JSON; formats in it other than float8_e4m3fn are refused.
 *
 * If X.weight holds several wanted tensors (weights_place.c), each takes the scales of its rows. */
#include <stdio.h>
#include <string.h>

#include "model/weights/weights_internal.h"

/* The first place of the tensor whose name is that of entry with `end` replaced by ".weight"; NULL:
 * none. */
static esa_place *owner(const esa_weights *w, const char *name, const char *end)
{
    char full[208];
    const size_t length = strlen(name), tail = strlen(end);
    if (length <= tail || length - tail > 180 || strcmp(name + length - tail, end) != 0)
        return NULL;
    snprintf(full, sizeof full, "%.*s.weight", (int)(length - tail), name);
    return esa_places_find(w->place, w->count, full);
}

/* 1 if the bytes of the tensor hold the text. */
static int32_t holds(const esa_weights *w, const esa_st_entry *entry, int32_t shard,
                     const char *text)
{
    const char *data = (const char *)esa_st_data(w->shard[shard], entry);
    const int64_t length = (int64_t)strlen(text), most = entry->end - entry->begin - length;
    for (int64_t i = 0; i <= most; i++)
        if (memcmp(data + i, text, (size_t)length) == 0) return 1;
    return 0;
}

int32_t esa_weights_take_scale(esa_weights *w, const esa_st_entry *entry, int32_t shard)
{
    if (strcmp(entry->name + strlen(w->prefix), "scaled_fp8") == 0) return 1;
    if (owner(w, entry->name, ".comfy_quant")) return holds(w, entry, shard, "\"float8_e4m3fn\"");
    esa_place *p = owner(w, entry->name, ".input_scale");
    if (!p) p = owner(w, entry->name, ".scale_input");
    if (p) {
        if (p->e->input) return 0; /* under both names */
        for (; p; p = esa_places_next(w->place, w->count, p)) p->e->input = entry;
        return 1;
    }
    p = owner(w, entry->name, ".weight_scale");
    if (!p) p = owner(w, entry->name, ".scale_weight");
    if (!p || p->e->scale) return 0;
    for (; p; p = esa_places_next(w->place, w->count, p)) {
        p->e->scale = entry;
        p->e->scale_shard = shard;
    }
    return 1;
}

static int64_t scale_count(const esa_st_entry *scale)
{
    int64_t n = 1;
    for (int32_t i = 0; i < scale->rank; i++) n = esa_size_mul(n, scale->dim[i]);
    return n;
}

const char *esa_weights_scale_fault(const esa_wanted *e, const char **name)
{
    const esa_st_entry *any = e->scale ? e->scale : e->input;
    if (!any) return NULL;
    *name = any->name;
    if (!e->entry || e->entry->dtype != ESA_FILE_F8_E4M3)
        return "a scale of a tensor that is not F8_E4M3";
    if (!e->scale) return NULL;
    const int32_t type = e->scale->dtype;
    if (type != ESA_FILE_F32 && type != ESA_FILE_F16 && type != ESA_FILE_BF16)
        return "the type is not F32, F16 or BF16";
    const int64_t n = scale_count(e->scale), rows = e->share.runs ? e->share.side : e->dim[0];
    return n == 1 || (e->rank > 1 && n == rows) ? NULL : "expected one number, or one for each row";
}

esa_status esa_weights_scales(esa_weights *w, const esa_wanted *e, float **scale)
{
    const int64_t rows = esa_weights_rows(e);
    float *out = esa_mem_alloc(&w->ctx->mem, esa_size_mul(rows, 4));
    *scale = out;
    if (!out)
        return esa_fail(w->ctx, ESA_ERR_MEMORY, "out of memory for the scales of %s of the %s",
                        e->name, w->part);
    const int64_t n = e->scale ? scale_count(e->scale) : 0;
    const void *data = e->scale ? esa_st_data(w->shard[e->scale_shard], e->scale) : NULL;
    const int64_t cols = esa_wanted_count(e) / rows;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = n > 1 ? esa_share_element(&e->share, e, i * cols, NULL) / cols : 0;
        out[i] = n ? esa_load_f32(data, row, e->scale->dtype) : 1.0f;
    }
    return ESA_OK;
}
