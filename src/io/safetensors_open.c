/* safetensors_open.c - opens a safetensors file (mmap, or the caller's memory) and looks up its
 * tensors and metadata.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/safetensors.h"

#include <string.h>
#include "base/status.h"
#include "io/mapfile.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tensor data is used as it lies in the file, which is little-endian");

esa_status esa_st_make(esa_ctx *ctx, esa_tensors **file, const char *label)
{
    esa_tensors *f = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *f);
    if (!f) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while opening %.200s", label);
    f->ctx = ctx;
    f->mem = ctx->mem;
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

esa_status esa_st_map(esa_tensors *f, const char *path, const char *kind)
{
    esa_mapped m;
    ESA_TRY(esa_map_file(f->ctx, &m, path, f->label));
    if (!m.bytes)
        return esa_fail(f->ctx, ESA_ERR_FORMAT, "%s is empty, expected a %s file", f->label, kind);
    f->bytes = m.bytes;
    f->size = m.size;
    f->mapped = 1;
    return ESA_OK;
}

esa_status esa_st_open(esa_ctx *ctx, esa_tensors **file, const char *path)
{
    *file = NULL;
    if (!path || !*path) return esa_fail(ctx, ESA_ERR_ARGUMENT, "no file name was given");
    esa_tensors *f = NULL;
    ESA_TRY(esa_st_make(ctx, &f, path));
    esa_status status = esa_st_map(f, path, "safetensors");
    if (!status) status = esa_st_parse(f);
    if (status)
        esa_st_close(f);
    else
        *file = f;
    return status;
}

esa_status esa_st_open_memory(esa_ctx *ctx, esa_tensors **file, const void *bytes, int64_t size)
{
    *file = NULL;
    if (!bytes || size < 0)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "bytes is NULL or size is negative (%lld)",
                        (long long)size);
    esa_tensors *f = NULL;
    ESA_TRY(esa_st_make(ctx, &f, "the file in memory"));
    f->bytes = bytes;
    f->size = size;
    const esa_status status = esa_st_parse(f);
    if (status)
        esa_st_close(f);
    else
        *file = f;
    return status;
}

void esa_st_close(esa_tensors *file)
{
    if (!file) return;
    const esa_allocator mem = file->mem;
    if (file->mapped) esa_unmap_file(&(esa_mapped){ file->bytes, file->size });
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
