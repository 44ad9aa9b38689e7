/* safetensors_write.c - the writer. Everything is declared first, so the header is final before the
 * data, and a small buffer can stream a file of any size.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/safetensors.h"

#include <stdio.h>
#include <string.h>
#include "base/status.h"
#include "io/json.h"
#include "io/outfile.h"

enum { DECLARING = 0, WRITING = 1, FINISHED = 2, FAILED = 3 };

typedef struct text {
    char *at;
    int64_t used, cap;
} text;

struct esa_tensors_writer {
    esa_ctx *ctx;
    esa_allocator mem;
    esa_outfile out;
    int32_t state;
    esa_status failure; /* FAILED: the status of the failure */
    text metadata;      /* "key":"value",... already escaped */
    text tensors;       /* "name":{...},... already escaped */
    uint64_t *hash;     /* hashes of the keys and names so far, to find duplicates */
    int64_t *hash_at;   /* start of the escaped name: >= 0 in tensors, else ~offset in metadata */
    int64_t hash_count, hash_cap;
    int64_t *end; /* [tensor_count] end of each tensor within the data */
    int64_t tensor_count, end_cap;
    int64_t total;  /* bytes declared */
    int64_t header; /* bytes before the data, once written */
};

static esa_status no_memory(esa_tensors_writer *w)
{
    return esa_fail(w->ctx, ESA_ERR_MEMORY, "out of memory while describing %.200s", w->out.path);
}

static int reserve(esa_tensors_writer *w, text *t, int64_t more)
{
    if (t->cap - t->used >= more) return 1;
    const int64_t cap = esa_max64(t->cap * 2, esa_size_add(t->used, more) + 256);
    char *next = esa_mem_alloc(&w->mem, cap);
    if (!next) return 0;
    if (t->used) memcpy(next, t->at, (size_t)t->used);
    esa_mem_free(&w->mem, t->at, t->cap);
    t->at = next;
    t->cap = cap;
    return 1;
}

/* Appends s as a JSON string. The caller reserves 6 strlen(s) + 2 bytes. */
static void put_string(text *t, const char *s)
{
    t->at[t->used++] = '"';
    for (; *s; s++) {
        const unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\') {
            t->at[t->used++] = '\\';
            t->at[t->used++] = (char)c;
        } else if (c < 0x20)
            t->used += snprintf(t->at + t->used, 7, "\\u%04x", c);
        else
            t->at[t->used++] = (char)c;
    }
    t->at[t->used++] = '"';
}

static int is_utf8(const char *s)
{
    for (const char *end = s + strlen(s); s < end;) {
        const int n = esa_utf8_length(s, end);
        if (!n) return 0;
        s += n;
    }
    return 1;
}

static uint64_t hash_of(const char *s, int metadata)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325) ^ (uint64_t)metadata;
    for (; *s; s++) h = (h ^ (unsigned char)*s) * UINT64_C(0x100000001b3);
    return h;
}

/* Makes room for one more hash entry. */
static int reserve_hash(esa_tensors_writer *w)
{
    if (w->hash_count < w->hash_cap) return 1;
    const int64_t cap = w->hash_cap ? w->hash_cap * 2 : 32;
    uint64_t *hash = esa_mem_alloc(&w->mem, cap * 8);
    int64_t *at = esa_mem_alloc(&w->mem, cap * 8);
    if (!hash || !at) {
        esa_mem_free(&w->mem, hash, cap * 8);
        esa_mem_free(&w->mem, at, cap * 8);
        return 0;
    }
    if (w->hash_count) {
        memcpy(hash, w->hash, (size_t)w->hash_count * 8);
        memcpy(at, w->hash_at, (size_t)w->hash_count * 8);
    }
    esa_mem_free(&w->mem, w->hash, w->hash_cap * 8);
    esa_mem_free(&w->mem, w->hash_at, w->hash_cap * 8);
    w->hash = hash;
    w->hash_at = at;
    w->hash_cap = cap;
    return 1;
}

static int reserve_end(esa_tensors_writer *w)
{
    if (w->tensor_count < w->end_cap) return 1;
    const int64_t cap = w->end_cap ? w->end_cap * 2 : 32;
    int64_t *end = esa_mem_alloc(&w->mem, cap * 8);
    if (!end) return 0;
    if (w->tensor_count) memcpy(end, w->end, (size_t)w->tensor_count * 8);
    esa_mem_free(&w->mem, w->end, w->end_cap * 8);
    w->end = end;
    w->end_cap = cap;
    return 1;
}

/* 1 if the escaped string at the end of t (from offset start) was given before. */
static int is_duplicate(const esa_tensors_writer *w, const text *t, int64_t start, uint64_t hash,
                        int metadata)
{
    const int64_t length = t->used - start;
    for (int64_t i = 0; i < w->hash_count; i++) {
        if (w->hash[i] != hash || (w->hash_at[i] < 0) != metadata) continue;
        const int64_t at = metadata ? ~w->hash_at[i] : w->hash_at[i];
        /* This compares the closing quote too, so a prefix does not match. */
        if (start - at >= length && memcmp(t->at + at, t->at + start, (size_t)length) == 0)
            return 1;
    }
    return 0;
}

esa_status esa_st_writer_open(esa_ctx *ctx, esa_tensors_writer **writer, const char *path)
{
    *writer = NULL;
    esa_tensors_writer *w = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *w);
    if (!w)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while creating %.200s",
                        path ? path : "a file");
    w->ctx = ctx;
    w->mem = ctx->mem;
    const esa_status status = esa_outfile_open(ctx, &w->out, path);
    if (status)
        esa_mem_free(&ctx->mem, w, (int64_t)sizeof *w);
    else
        *writer = w;
    return status;
}

/* Fails if an earlier write failed or the file is finished. */
static esa_status check_open(const esa_tensors_writer *w)
{
    if (w->state == FAILED)
        return esa_fail(w->ctx, w->failure, "%.200s was abandoned because an earlier write failed",
                        w->out.path);
    if (w->state == FINISHED)
        return esa_fail(w->ctx, ESA_ERR_STATE, "%.200s is already finished", w->out.path);
    return ESA_OK;
}

static esa_status check_name(esa_tensors_writer *w, const char *what, const char *name)
{
    if (w->state == FAILED) return check_open(w);
    if (w->state != DECLARING)
        return esa_fail(w->ctx, ESA_ERR_STATE,
                        "%.200s: everything must be declared before the first data is written",
                        w->out.path);
    if (!name || !*name)
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT, "%.200s: a %s has no name", w->out.path, what);
    if (!is_utf8(name))
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT, "%.200s: the %s name '%s' is not UTF-8",
                        w->out.path, what, esa_quote(name).text);
    return ESA_OK;
}

esa_status esa_st_writer_metadata(esa_tensors_writer *w, const char *key, const char *value)
{
    ESA_TRY(check_name(w, "metadata", key));
    if (!value || !is_utf8(value))
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT, "%.200s: the value of metadata '%s' is %s",
                        w->out.path, esa_quote(key).text, value ? "not UTF-8" : "NULL");
    text *t = &w->metadata;
    const int64_t need = 6 * (int64_t)(strlen(key) + strlen(value)) + 8;
    if (!reserve(w, t, need) || !reserve_hash(w)) return no_memory(w);
    const int64_t before = t->used;
    if (before) t->at[t->used++] = ',';
    const int64_t start = t->used;
    put_string(t, key);
    const uint64_t hash = hash_of(key, 1);
    if (is_duplicate(w, t, start, hash, 1)) {
        t->used = before;
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT, "%.200s: metadata '%s' was already given",
                        w->out.path, esa_quote(key).text);
    }
    w->hash[w->hash_count] = hash;
    w->hash_at[w->hash_count++] = ~start;
    t->at[t->used++] = ':';
    put_string(t, value);
    return ESA_OK;
}

esa_status esa_st_writer_declare(esa_tensors_writer *w, const char *name, int32_t dtype,
                                 int32_t rank, const int64_t *dim)
{
    ESA_TRY(check_name(w, "tensor", name));
    if (strcmp(name, "__metadata__") == 0)
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT, "%.200s: a tensor cannot be named __metadata__",
                        w->out.path);
    if (!esa_file_dtype_name(dtype))
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT, "%.200s: tensor '%s' has the unknown dtype %d",
                        w->out.path, esa_quote(name).text, dtype);
    if (rank < 0 || rank > ESA_FILE_MAX_RANK || (rank && !dim))
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT,
                        "%.200s: tensor '%s' has rank %d, expected 0 to %d", w->out.path,
                        esa_quote(name).text, rank, ESA_FILE_MAX_RANK);
    const int64_t bytes = esa_file_bytes(dtype, rank, dim), end = esa_size_add(w->total, bytes);
    if (bytes < 0 || end < 0)
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT,
                        "%.200s: the shape of tensor '%s' is negative or too large", w->out.path,
                        esa_quote(name).text);
    text *t = &w->tensors;
    if (!reserve(w, t, 6 * (int64_t)strlen(name) + 64 + 21 * (rank + 2) + 32) || !reserve_hash(w) ||
        !reserve_end(w))
        return no_memory(w);
    const int64_t before = t->used;
    if (before) t->at[t->used++] = ',';
    const int64_t start = t->used;
    put_string(t, name);
    const uint64_t hash = hash_of(name, 0);
    if (is_duplicate(w, t, start, hash, 0)) {
        t->used = before;
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT, "%.200s: tensor '%s' was already declared",
                        w->out.path, esa_quote(name).text);
    }
    w->hash[w->hash_count] = hash;
    w->hash_at[w->hash_count++] = start;
    t->used += sprintf(t->at + t->used, ":{\"dtype\":\"%s\",\"shape\":[",
                       esa_file_dtype_name(dtype));
    for (int32_t i = 0; i < rank; i++)
        t->used += sprintf(t->at + t->used, i ? ",%lld" : "%lld", (long long)dim[i]);
    t->used += sprintf(t->at + t->used, "],\"data_offsets\":[%lld,%lld]}", (long long)w->total,
                       (long long)end);
    w->end[w->tensor_count++] = end;
    w->total = end;
    return ESA_OK;
}

static esa_status write_header(esa_tensors_writer *w)
{
    static const char open_metadata[] = "{\"__metadata__\":{",
                      spaces[ESA_ST_ALIGN + 1] =
                          "                                                                ";
    const int has_metadata = w->metadata.used > 0;
    int64_t length = w->tensors.used + 2;
    if (has_metadata)
        length += w->metadata.used + (int64_t)sizeof open_metadata - 2 + (w->tensors.used ? 2 : 1);
    /* Spaces after the object align the data to 64 bytes, so that a mapped tensor can be
     * used in place. */
    const int64_t pad = (ESA_ST_ALIGN - (8 + length) % ESA_ST_ALIGN) % ESA_ST_ALIGN;
    const int64_t total = length + pad;
    if (total > ESA_ST_MAX_HEADER)
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT,
                        "%.200s: the header would have %lld bytes, expected at most %lld",
                        w->out.path, (long long)total, (long long)ESA_ST_MAX_HEADER);
    uint8_t prefix[8];
    for (int i = 0; i < 8; i++) prefix[i] = (uint8_t)((uint64_t)total >> (8 * i));
    ESA_TRY(esa_outfile_write(&w->out, prefix, 8));
    if (has_metadata) {
        ESA_TRY(esa_outfile_write(&w->out, open_metadata, (int64_t)sizeof open_metadata - 1));
        ESA_TRY(esa_outfile_write(&w->out, w->metadata.at, w->metadata.used));
        ESA_TRY(esa_outfile_write(&w->out, "},", w->tensors.used ? 2 : 1));
    } else {
        ESA_TRY(esa_outfile_write(&w->out, "{", 1));
    }
    ESA_TRY(esa_outfile_write(&w->out, w->tensors.at, w->tensors.used));
    ESA_TRY(esa_outfile_write(&w->out, "}", 1));
    ESA_TRY(esa_outfile_write(&w->out, spaces, pad));
    w->header = 8 + total;
    w->state = WRITING;
    return ESA_OK;
}

/* Abandons the file after a failed write and frees its disk space at once. */
static esa_status give_up(esa_tensors_writer *w, esa_status status)
{
    w->state = FAILED;
    w->failure = status;
    esa_outfile_discard(&w->out);
    return status;
}

static esa_status append(esa_tensors_writer *w, const void *data, int64_t bytes)
{
    if (w->state == DECLARING) ESA_TRY(write_header(w));
    return esa_outfile_write(&w->out, data, bytes);
}

esa_status esa_st_writer_data(esa_tensors_writer *w, const void *data, int64_t bytes)
{
    ESA_TRY(check_open(w));
    if (bytes < 0 || (bytes && !data))
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT,
                        "%.200s: data is NULL or its size is negative (%lld)", w->out.path,
                        (long long)bytes);
    const int64_t done = w->state == WRITING ? w->out.written - w->header : 0;
    if (bytes > w->total - done)
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT,
                        "%.200s: %lld bytes of data were declared, but %lld would be written",
                        w->out.path, (long long)w->total, (long long)(done + bytes));
    const esa_status status = append(w, data, bytes);
    return status ? give_up(w, status) : ESA_OK;
}

static esa_status place(esa_tensors_writer *w, int64_t at, const void *data, int64_t bytes)
{
    if (w->state == DECLARING) ESA_TRY(write_header(w));
    return esa_outfile_put(&w->out, w->header + at, data, bytes);
}

esa_status esa_st_writer_put(esa_tensors_writer *w, int64_t tensor, int64_t offset,
                             const void *data, int64_t bytes)
{
    ESA_TRY(check_open(w));
    const int64_t begin = tensor > 0 && tensor < w->tensor_count ? w->end[tensor - 1] : 0;
    if (tensor < 0 || tensor >= w->tensor_count || offset < 0 || bytes < 0 ||
        bytes > w->end[tensor] - begin - offset)
        return esa_fail(w->ctx, ESA_ERR_INTERNAL, "%.200s: a write goes outside of tensor %lld",
                        w->out.path, (long long)tensor);
    const esa_status status = place(w, begin + offset, data, bytes);
    return status ? give_up(w, status) : ESA_OK;
}

static esa_status commit(esa_tensors_writer *w)
{
    if (w->state == DECLARING) ESA_TRY(write_header(w));
    const int64_t done = w->out.written - w->header;
    if (done != w->total)
        return esa_fail(w->ctx, ESA_ERR_STATE,
                        "%.200s: %lld bytes of data were declared, but only %lld were written",
                        w->out.path, (long long)w->total, (long long)done);
    return esa_outfile_commit(&w->out);
}

esa_status esa_st_writer_finish(esa_tensors_writer *w)
{
    ESA_TRY(check_open(w));
    const esa_status status = commit(w);
    if (status) return give_up(w, status);
    w->state = FINISHED;
    return ESA_OK;
}

void esa_st_writer_close(esa_tensors_writer *w)
{
    if (!w) return;
    const esa_allocator mem = w->mem;
    esa_outfile_close(&w->out);
    esa_mem_free(&mem, w->metadata.at, w->metadata.cap);
    esa_mem_free(&mem, w->tensors.at, w->tensors.cap);
    esa_mem_free(&mem, w->hash, w->hash_cap * 8);
    esa_mem_free(&mem, w->hash_at, w->hash_cap * 8);
    esa_mem_free(&mem, w->end, w->end_cap * 8);
    esa_mem_free(&mem, w, (int64_t)sizeof *w);
}

esa_ctx *esa_st_writer_ctx(const esa_tensors_writer *w) { return w->ctx; }
