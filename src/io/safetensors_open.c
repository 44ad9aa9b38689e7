/* safetensors_open.c - opens a safetensors file (copied, mapped, or the caller's memory) and looks
 * up its tensors and metadata. SPDX-License-Identifier: Apache-2.0 */
#include "io/safetensors.h"

#include <string.h>
#include <unistd.h>
#include "base/status.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tensor data is used as it lies in the file, which is little-endian");

/* Makes an empty object that can be closed. Copies label. */
static esa_status make(esa_ctx *ctx, esa_tensors **file, const char *label)
{
    esa_tensors *f = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *f);
    if (!f) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while opening %.200s", label);
    f->ctx = ctx;
    f->mem = ctx->mem;
    f->fd = -1;
    /* Messages have 512 bytes. Keep only the last 200 of a path. */
    const size_t n = strlen(label), keep = n < 200 ? n : 200;
    f->label_bytes = (int64_t)keep + 1;
    f->label = esa_mem_alloc(&f->mem, f->label_bytes);
    if (!f->label) {
        f->label_bytes = 0;
        esa_st_close(f);
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while opening %.200s", label);
    }
    memcpy(f->label, label + (n - keep), keep);
    f->label[keep] = 0;
    *file = f;
    return ESA_OK;
}

static void drop_head(esa_tensors *f)
{
    esa_mem_free(&f->mem, f->head_copy, f->have);
    f->head_copy = NULL;
    f->head = NULL;
    f->have = 0;
}

esa_status esa_st_head(esa_tensors *f, int64_t most)
{
    drop_head(f);
    if (!f->mapped) {
        f->head = f->bytes;
        f->have = f->size;
        return ESA_OK;
    }
    const int64_t bytes = esa_min64(most, f->size);
    f->head_copy = esa_mem_alloc(&f->mem, bytes);
    if (!f->head_copy)
        return esa_fail(f->ctx, ESA_ERR_MEMORY, "%s: out of memory while reading the header",
                        f->label);
    f->head = f->head_copy;
    f->have = bytes;
    return esa_read_start(f->ctx, f->fd, f->head_copy, bytes, f->label);
}

static esa_status take_file(esa_tensors *f, const esa_st_source *s)
{
    int64_t size;
    ESA_TRY(esa_open_file(f->ctx, &f->fd, &size, s->path, f->label));
    ESA_TRY(esa_take_file(f->ctx, &f->file, f->fd, size, s->weights, f->label));
    f->bytes = f->file.bytes;
    f->size = size;
    f->mapped = f->bytes && !f->file.copy;
    return f->bytes ? ESA_OK
                    : esa_fail(f->ctx, ESA_ERR_FORMAT, "%s is empty, expected a %s file", f->label,
                               s->kind);
}

static esa_status open_parsed(esa_tensors *f, const esa_st_source *s)
{
    if (s->path) {
        ESA_TRY(take_file(f, s));
    } else {
        f->bytes = s->bytes;
        f->size = s->size;
    }
    return s->parse(f);
}

esa_status esa_st_open_with(esa_ctx *ctx, esa_tensors **file, const esa_st_source *s)
{
    *file = NULL;
    esa_tensors *f = NULL;
    ESA_TRY(make(ctx, &f, s->path ? s->path : "the file in memory"));
    const esa_status status = open_parsed(f, s);
    drop_head(f);
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
    if (status)
        esa_st_close(f);
    else
        *file = f;
    return status;
}

static esa_status open_path(esa_ctx *ctx, esa_tensors **file, const char *path, int32_t weights)
{
    const esa_st_source source = {
        .path = path, .kind = "safetensors", .weights = weights, .parse = esa_st_parse
    };
    *file = NULL;
    if (!path || !*path) return esa_fail(ctx, ESA_ERR_ARGUMENT, "no file name was given");
    return esa_st_open_with(ctx, file, &source);
}

esa_status esa_st_open(esa_ctx *ctx, esa_tensors **file, const char *path)
{
    return open_path(ctx, file, path, 0);
}

esa_status esa_st_open_weights(esa_ctx *ctx, esa_tensors **file, const char *path)
{
    return open_path(ctx, file, path, 1);
}

esa_status esa_st_open_memory(esa_ctx *ctx, esa_tensors **file, const void *bytes, int64_t size)
{
    const esa_st_source source = { .bytes = bytes, .size = size, .parse = esa_st_parse };
    *file = NULL;
    if (!bytes || size < 0)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "bytes is NULL or size is negative (%lld)",
                        (long long)size);
    return esa_st_open_with(ctx, file, &source);
}

void esa_st_close(esa_tensors *file)
{
    if (!file) return;
    const esa_allocator mem = file->mem;
    esa_unmap_file(&file->file);
    esa_mem_free(&mem, file->by_name, file->count * (int64_t)sizeof *file->by_name);
    esa_mem_free(&mem, file->entry, file->entry_cap * (int64_t)sizeof *file->entry);
    esa_mem_free(&mem, file->pair, file->pair_cap * (int64_t)sizeof *file->pair);
    esa_mem_free(&mem, file->strings, file->strings_bytes);
    esa_mem_free(&mem, file->label, file->label_bytes);
    esa_mem_free(&mem, file, (int64_t)sizeof *file);
}

const esa_st_entry *esa_st_find(const esa_tensors *file, const char *name)
{
    for (int64_t lo = 0, hi = file->count; lo < hi;) {
        const int64_t mid = lo + (hi - lo) / 2;
        const int c = strcmp(name, file->by_name[mid]->name);
        if (c == 0) return file->by_name[mid];
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

const char *esa_st_metadata(const esa_tensors *file, const char *key)
{
    for (int64_t lo = 0, hi = file->pair_count; lo < hi;) {
        const int64_t mid = lo + (hi - lo) / 2;
        const int c = strcmp(key, file->pair[mid].key);
        if (c == 0) return file->pair[mid].value;
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}
