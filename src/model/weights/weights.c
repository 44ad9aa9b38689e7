/* weights.c - finds the weight files of a part and compares their tensors with those it needs.
 * weights_load.c loads them.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/weights/weights_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/blocks.h"
#include "base/number.h"
#include "io/gguf.h"
#include "io/mapfile.h"
#include "model/config/config.h"
#include "model/config/json_file.h"

/* ---------------------------------------------------------------- files */

static esa_status add_shard(esa_weights *w, const char *folder, const char *name)
{
    if (w->shard_count == ESA_WEIGHTS_MAX_SHARDS)
        return esa_fail(w->ctx, ESA_ERR_FORMAT, "%s: more than %d weight files", w->part,
                        ESA_WEIGHTS_MAX_SHARDS);
    char *path = NULL;
    int64_t bytes = 0;
    ESA_TRY(esa_path_join(w->ctx, &path, &bytes, folder, name));
    const esa_status status = esa_st_open_weights(w->ctx, &w->shard[w->shard_count], path);
    if (!status) w->shard_count++;
    esa_mem_free(&w->ctx->mem, path, bytes);
    return status;
}

/* A file name from an index must stay inside the folder. */
static int plain_name(const char *name)
{
    const size_t n = strlen(name);
    return n > 12 && n < 200 && name[0] != '.' && !strchr(name, '/') &&
           strcmp(name + n - 12, ".safetensors") == 0;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Checks the file names of the index and lists them in file[], sorted. */
static esa_status list_files(esa_json_file *f, json_t *map, const char **file, int64_t count)
{
    int64_t i = 0;
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value)
    {
        file[i] = json_is_string(value) ? json_string_value(value) : "";
        if (!plain_name(file[i]))
            return esa_json_fail(f, ESA_ERR_FORMAT,
                                 "weight_map names '%s', expected a .safetensors file of the same "
                                 "folder",
                                 esa_quote(file[i]).text);
        i++;
    }
    qsort(file, (size_t)count, sizeof *file, by_text);
    return ESA_OK;
}

/* Opens the shards that the index names, and checks that each tensor is where the index says. */
static esa_status open_shards(esa_weights *w, esa_json_file *f, json_t *map, const char **file,
                              int64_t count, const char *folder)
{
    const char *opened[ESA_WEIGHTS_MAX_SHARDS], *name;
    json_t *value;
    ESA_TRY(list_files(f, map, file, count));
    for (int64_t i = 0; i < count; i++) {
        if (i > 0 && strcmp(file[i], file[i - 1]) == 0) continue;
        opened[w->shard_count < ESA_WEIGHTS_MAX_SHARDS ? w->shard_count : 0] = file[i];
        ESA_TRY(add_shard(w, folder, file[i]));
    }
    json_object_foreach(map, name, value)
    {
        int32_t s = 0;
        while (strcmp(opened[s], json_string_value(value)) != 0) s++;
        if (!esa_st_find(w->shard[s], name))
            return esa_fail(w->ctx, ESA_ERR_MISMATCH,
                            "%s: the index says that %s is in %s, but it is not", w->part,
                            esa_quote(name).text, esa_quote(opened[s]).text);
    }
    return ESA_OK;
}

static esa_status read_index(esa_weights *w, esa_json_file *f, const char *folder)
{
    json_t *map = json_object_get(f->root, "weight_map");
    const int64_t count = (int64_t)json_object_size(map), size = (int64_t)sizeof(char *);
    if (count < 1) return esa_json_fail(f, ESA_ERR_FORMAT, "weight_map is missing or empty");
    const char **file = esa_mem_alloc(&w->ctx->mem, count * size);
    if (!file) return esa_json_fail(f, ESA_ERR_MEMORY, "out of memory");
    const esa_status status = open_shards(w, f, map, file, count, folder);
    esa_mem_free(&w->ctx->mem, file, count * size);
    return status;
}

static esa_status open_index(esa_weights *w, const char *folder, const char *path)
{
    esa_json_file f;
    esa_status status = esa_json_file_open(w->ctx, &f, path);
    if (!status) status = read_index(w, &f, folder);
    esa_json_file_close(&f);
    return status;
}

static esa_status make(esa_ctx *ctx, esa_weights **out, const char *part)
{
    *out = NULL;
    esa_weights *w = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *w);
    if (!w) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the weights of the %s", part);
    w->ctx = ctx;
    w->prefix = "";
    snprintf(w->part, sizeof w->part, "%s", part);
    *out = w;
    return ESA_OK;
}

esa_status esa_weights_open_memory(esa_ctx *ctx, esa_weights **out, const void *bytes, int64_t size,
                                   const char *part)
{
    ESA_TRY(make(ctx, out, part));
    const esa_status status = esa_gguf_begins(bytes, size)
                                  ? esa_gguf_open_memory(ctx, &(*out)->shard[0], bytes, size)
                                  : esa_st_open_memory(ctx, &(*out)->shard[0], bytes, size);
    if (!status) {
        (*out)->shard_count = 1;
    } else {
        esa_weights_free(*out);
        *out = NULL;
    }
    return status;
}

/* *gguf = 1 if the file begins like a GGUF file. */
static esa_status look(esa_ctx *ctx, const char *path, int32_t *gguf)
{
    char start[4];
    int64_t size;
    int fd;
    ESA_TRY(esa_open_file(ctx, &fd, &size, path, path));
    size = esa_min64(size, (int64_t)sizeof start);
    const esa_status status = esa_read_start(ctx, fd, start, size, path);
    *gguf = !status && esa_gguf_begins(start, size);
    close(fd);
    return status;
}

esa_status esa_weights_open_file(esa_ctx *ctx, esa_weights **out, const char *path,
                                 const char *part)
{
    int32_t gguf = 0;
    *out = NULL;
    ESA_TRY(look(ctx, path, &gguf));
    ESA_TRY(make(ctx, out, part));
    const esa_status status = gguf ? esa_gguf_open(ctx, &(*out)->shard[0], path)
                                   : esa_st_open_weights(ctx, &(*out)->shard[0], path);
    if (status) {
        esa_weights_free(*out);
        *out = NULL;
        return status;
    }
    (*out)->shard_count = (*out)->named = 1;
    return ESA_OK;
}

esa_status esa_weights_open_random(esa_ctx *ctx, esa_weights **out, const char *part)
{
    ESA_TRY(make(ctx, out, part));
    (*out)->random = 1;
    return ESA_OK;
}

/* Opens folder/name, or the shards of folder/name.index.json, whichever exists. */
static esa_status open_files(esa_weights *w, const char *folder, const char *name)
{
    char *single = NULL, *index = NULL, index_name[192];
    int64_t single_bytes = 0, index_bytes = 0;
    snprintf(index_name, sizeof index_name, "%s.index.json", name);
    esa_status status = esa_path_join(w->ctx, &single, &single_bytes, folder, name);
    if (!status) status = esa_path_join(w->ctx, &index, &index_bytes, folder, index_name);
    if (!status && access(index, F_OK) == 0)
        status = open_index(w, folder, index);
    else if (!status && (access(single, F_OK) == 0 || errno != ENOENT))
        status = add_shard(w, folder, name);
    else if (!status)
        status = esa_fail(w->ctx, ESA_ERR_IO, "%s: %.200s holds neither %s nor its .index.json",
                          w->part, folder, name);
    esa_mem_free(&w->ctx->mem, single, single_bytes);
    esa_mem_free(&w->ctx->mem, index, index_bytes);
    return status;
}

esa_status esa_weights_open(esa_ctx *ctx, esa_weights **out, const char *folder, const char *stem,
                            const char *part)
{
    char name[160];
    snprintf(name, sizeof name, "%s.safetensors", stem);
    ESA_TRY(make(ctx, out, part));
    const esa_status status = open_files(*out, folder, name);
    if (status) {
        esa_weights_free(*out);
        *out = NULL;
    }
    return status;
}

esa_status esa_weights_open_part(esa_ctx *ctx, esa_weights **out, const char *root,
                                 const char *folder, const char *stem, const char *part)
{
    char *path;
    int64_t bytes;
    *out = NULL;
    ESA_TRY(esa_path_join(ctx, &path, &bytes, root, folder));
    const esa_status status = esa_weights_open(ctx, out, path, stem, part);
    esa_mem_free(&ctx->mem, path, bytes);
    return status;
}

void esa_weights_free(esa_weights *w)
{
    if (!w) return;
    const esa_allocator mem = w->ctx->mem;
    esa_lora_close(w);
    for (int64_t i = 0; i < w->count; i++)
        esa_mem_free(&mem, w->want[i].copy, w->want[i].copy_bytes);
    for (int32_t i = 0; i < w->shard_count; i++) esa_st_close(w->shard[i]);
    esa_mem_free(&mem, w->want, w->cap * (int64_t)sizeof *w->want);
    esa_mem_free(&mem, w->place, w->count * (int64_t)sizeof *w->place);
    esa_mem_free(&mem, w, (int64_t)sizeof *w);
}

/* ---------------------------------------------------------------- what a part needs */

void esa_weights_want(esa_weights *w, esa_weight *view, int32_t flags, int32_t rank,
                      const int64_t *dim, const char *name_format, ...)
{
    if (view) *view = (esa_weight){ 0 };
    if (w->status) return;
    if (w->count == w->cap) {
        const int64_t cap = w->cap ? 2 * w->cap : 256, size = (int64_t)sizeof *w->want;
        esa_wanted *bigger = esa_mem_alloc(&w->ctx->mem, cap * size);
        if (!bigger) {
            w->status = esa_fail(w->ctx, ESA_ERR_MEMORY,
                                 "out of memory for the tensor names of the %s", w->part);
            return;
        }
        if (w->count) memcpy(bigger, w->want, (size_t)(w->count * size));
        esa_mem_free(&w->ctx->mem, w->want, w->cap * size);
        w->want = bigger;
        w->cap = cap;
    }
    esa_wanted *e = &w->want[w->count];
    memset(e, 0, sizeof *e);
    va_list args;
    va_start(args, name_format);
    const int n = vsnprintf(e->name, sizeof e->name, name_format, args);
    va_end(args);
    if (n < 0 || n >= (int)sizeof e->name || rank < 0 || rank > 5) {
        w->status = esa_fail(w->ctx, ESA_ERR_INTERNAL,
                             "%s: the name or rank of tensor %s is too large", w->part, e->name);
        return;
    }
    e->view = view;
    e->flags = flags;
    e->group = w->group;
    e->rank = rank;
    for (int32_t i = 0; i < rank; i++) e->dim[i] = dim[i];
    w->count++;
}

void esa_weights_group(esa_weights *w, int32_t group) { w->group = group; }

void esa_weights_ignore(esa_weights *w, const char *prefix)
{
    if (w->ignore_count < ESA_WEIGHTS_MAX_IGNORED && strlen(prefix) < sizeof w->ignore[0])
        snprintf(w->ignore[w->ignore_count++], sizeof w->ignore[0], "%s", prefix);
    else if (!w->status)
        w->status = esa_fail(w->ctx, ESA_ERR_INTERNAL, "%s: too many ignored prefixes", w->part);
}

/* ---------------------------------------------------------------- comparison */

enum { MISSING, SHAPE, TYPE, EXTRA, KINDS };

typedef struct findings {
    int64_t count[KINDS];
    char first[KINDS][320]; /* the first names of each kind */
    void (*report)(void *user, const char *line);
    void *user;
} findings;

typedef struct shape_text {
    char text[80];
} shape_text;

static shape_text shape_of(int32_t rank, const int64_t *dim)
{
    shape_text t;
    int at = snprintf(t.text, sizeof t.text, "[");
    for (int32_t i = 0; i < rank && at < 60; i++)
        at += snprintf(t.text + at, sizeof t.text - (size_t)at, "%s%lld", i ? "," : "",
                       (long long)dim[i]);
    snprintf(t.text + at, sizeof t.text - (size_t)at, "]");
    return t;
}

static void found(findings *f, int32_t kind, const char *name, const char *detail, const char *part)
{
    if (f->report) {
        static const char *const says[KINDS] = { "is missing", "has the wrong shape: ",
                                                 "has an unsupported type: ", "was not expected" };
        char line[512];
        snprintf(line, sizeof line, "%s: %s %s%s", part, esa_quote(name).text, says[kind], detail);
        f->report(f->user, line);
    }
    if (f->count[kind]++ < 3) {
        char *text = f->first[kind];
        const size_t used = strlen(text), left = sizeof f->first[kind] - used;
        char entry[200];
        const int n = snprintf(entry, sizeof entry, "%s%s%s%s", used ? ", " : "",
                               esa_quote(name).text, *detail ? " " : "", detail);
        if (n > 0 && (size_t)n < left) memcpy(text + used, entry, (size_t)n + 1);
    }
}

static int ignored(const esa_weights *w, const char *name)
{
    name += strlen(w->prefix);
    for (int32_t i = 0; i < w->ignore_count; i++)
        if (strncmp(name, w->ignore[i], strlen(w->ignore[i])) == 0) return 1;
    return 0;
}

/* 1 if two shapes are equal; leading: but for leading dimensions of 1. */
static int same_shape(int32_t rank, const int64_t *dim, int32_t other_rank, const int64_t *other,
                      int32_t leading)
{
    for (; leading && rank > 0 && *dim == 1; rank--) dim++;
    for (; leading && other_rank > 0 && *other == 1; other_rank--) other++;
    int same = rank == other_rank;
    for (int32_t i = 0; same && i < rank; i++) same = dim[i] == other[i];
    return same;
}

/* A tensor of the files with the wanted ones that lie in it; p is the first of them. */
static void compare_entry(findings *f, const esa_weights *w, esa_place *p,
                          const esa_st_entry *entry, int32_t shard)
{
    const esa_wanted *e = p->e;
    int64_t dim[5];
    char detail[200];
    memcpy(dim, e->dim, sizeof dim);
    if (p->share.runs) dim[0] = p->share.side;
    if (!same_shape(entry->rank, entry->dim, e->rank, dim, w->shard[shard]->blocks)) {
        snprintf(detail, sizeof detail, "%s instead of %s", shape_of(entry->rank, entry->dim).text,
                 shape_of(e->rank, dim).text);
        found(f, SHAPE, e->file, detail, w->part);
    } else if (entry->dtype != ESA_FILE_F32 && entry->dtype != ESA_FILE_F16 &&
               entry->dtype != ESA_FILE_BF16 && entry->dtype != ESA_FILE_F8_E4M3 &&
               (!esa_blocks_elements(entry->dtype) || (p->share.runs && e->rank < 2))) {
        /* Pieces of a vector need not be whole blocks. */
        found(f, TYPE, e->file, esa_file_dtype_name(entry->dtype), w->part);
    }
    for (; p; p = esa_places_next(w->place, w->count, p)) {
        p->e->entry = entry;
        p->e->share = p->share;
        p->e->present = 1;
        p->e->shard = shard;
    }
}

/* One message with the count and the first names of each kind of finding. */
static esa_status mismatch(const esa_weights *w, const findings *f)
{
    static const char *const says[KINDS] = { "missing", "with the wrong shape",
                                             "with a type other than F32, F16, BF16, F8_E4M3",
                                             "not expected" };
    char text[512] = "";
    size_t at = 0;
    for (int32_t k = 0; k < KINDS; k++)
        if (f->count[k] && at < sizeof text)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%lld %s (%s%s)", at ? "; " : "",
                                   (long long)f->count[k], says[k], f->first[k],
                                   f->count[k] > 3 ? ", ..." : "");
    return esa_fail(w->ctx, ESA_ERR_MISMATCH, "%s: the weights do not match the config: %s",
                    w->part, text);
}

/* Compares every tensor of the files with what is wanted. */
static esa_status compare_files(esa_weights *w, findings *f, int64_t *tensors, int64_t *bytes)
{
    for (int32_t s = 0; s < w->shard_count; s++)
        for (int64_t i = 0; i < w->shard[s]->count; i++) {
            const esa_st_entry *entry = &w->shard[s]->entry[i];
            if (esa_weights_foreign(w, entry->name)) continue;
            esa_place *p = esa_places_find(w->place, w->count, entry->name);
            if (p && p->e->entry)
                return esa_fail(w->ctx, ESA_ERR_FORMAT, "%s: %s is in %s and in %s", w->part,
                                esa_quote(p->name).text, w->shard[p->e->shard]->label,
                                w->shard[s]->label);
            if (p)
                compare_entry(f, w, p, entry, s);
            else if (!ignored(w, entry->name) && !esa_weights_take_scale(w, entry, s))
                found(f, EXTRA, entry->name, "", w->part);
            *tensors += p != NULL;
            *bytes += entry->end - entry->begin;
        }
    for (int64_t i = 0; i < w->count; i++) {
        const esa_wanted *e = &w->want[i];
        if (esa_places_find(w->place, w->count, e->file)->e != e) continue; /* told once */
        const char *name, *fault = esa_weights_scale_fault(e, &name);
        if (fault) found(f, SHAPE, name, fault, w->part);
        if (!e->entry && !(e->flags & ESA_WANT_OPTIONAL)) found(f, MISSING, e->file, "", w->part);
    }
    for (int32_t k = 0; k < KINDS; k++)
        if (f->count[k]) return mismatch(w, f);
    return ESA_OK;
}

esa_status esa_weights_check(esa_weights *w, void (*report)(void *user, const char *line),
                             void *user)
{
    w->checked = 0;
    if (w->status) return w->status;
    if (!w->place) w->place = esa_mem_alloc(&w->ctx->mem, w->count * (int64_t)sizeof *w->place);
    if (!w->place)
        return esa_fail(w->ctx, ESA_ERR_MEMORY, "out of memory for the tensor names of the %s",
                        w->part);
    for (int64_t i = 0; i < w->count; i++) {
        w->want[i].entry = w->want[i].scale = w->want[i].input = NULL;
        w->want[i].present = w->random;
        w->want[i].share = (esa_share){ 0 };
    }
    ESA_TRY(esa_weights_rename(w));
    findings f = { .report = report, .user = user };
    int64_t tensors = 0, bytes = 0;
    if (report && w->named) esa_weights_about(w, report, user);
    if (!w->random) ESA_TRY(compare_files(w, &f, &tensors, &bytes));
    if (report && w->random) {
        char line[200];
        snprintf(line, sizeof line, "%s: %lld tensors, %lld parameters, random numbers", w->part,
                 (long long)w->count, (long long)esa_weights_parameters(w));
        report(user, line);
    } else if (report) {
        char line[200];
        esa_text_format(line, sizeof line,
                        "%s: %lld tensors, %lld parameters, %.2f GB in %d file%s", w->part,
                        (long long)tensors, (long long)esa_weights_parameters(w),
                        (double)bytes * 1e-9, w->shard_count, w->shard_count == 1 ? "" : "s");
        report(user, line);
    }
    ESA_TRY(esa_lora_match(w, report, user));
    w->checked = 1;
    return ESA_OK;
}

int64_t esa_weights_parameters(const esa_weights *w)
{
    int64_t n = 0;
    for (int64_t i = 0; i < w->count; i++)
        n += w->want[i].present ? esa_wanted_count(&w->want[i]) : 0;
    return n;
}
