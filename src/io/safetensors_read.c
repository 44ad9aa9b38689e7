/* safetensors_read.c - parses the header of a safetensors file and checks it as a whole before any
 * offset is used.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Everything the format does not allow is refused. Offsets must cover the data exactly: a gap could
 * hide bytes, and an overlap could make two tensors of one. A byte count must equal dtype times
 * shape. Names must be unique. */
#include "io/safetensors.h"

#include <stdlib.h>
#include <string.h>
#include "base/blocks.h"
#include "base/status.h"
#include "io/json.h"

static const struct {
    const char *name;
    int64_t size;
} dtypes[] = {
    [ESA_FILE_F32] = { "F32", 4 },         [ESA_FILE_F16] = { "F16", 2 },
    [ESA_FILE_BF16] = { "BF16", 2 },       [ESA_FILE_F64] = { "F64", 8 },
    [ESA_FILE_I64] = { "I64", 8 },         [ESA_FILE_I32] = { "I32", 4 },
    [ESA_FILE_I16] = { "I16", 2 },         [ESA_FILE_I8] = { "I8", 1 },
    [ESA_FILE_U8] = { "U8", 1 },           [ESA_FILE_BOOL] = { "BOOL", 1 },
    [ESA_FILE_U16] = { "U16", 2 },         [ESA_FILE_U32] = { "U32", 4 },
    [ESA_FILE_U64] = { "U64", 8 },         [ESA_FILE_F8_E4M3] = { "F8_E4M3", 1 },
    [ESA_FILE_F8_E5M2] = { "F8_E5M2", 1 },
};
#define DTYPES ((int32_t)(sizeof dtypes / sizeof dtypes[0]))

int64_t esa_file_dtype_size(int32_t dtype)
{
    return dtype >= 0 && dtype < DTYPES ? dtypes[dtype].size : 0;
}
const char *esa_file_dtype_name(int32_t dtype)
{
    return dtype >= 0 && dtype < DTYPES ? dtypes[dtype].name : esa_blocks_name(dtype);
}

int32_t esa_file_dtype_from_name(const char *name)
{
    for (int32_t i = 0; i < DTYPES; i++)
        if (strcmp(dtypes[i].name, name) == 0) return i;
    return -1;
}

int64_t esa_file_bytes(int32_t dtype, int32_t rank, const int64_t *dim)
{
    int64_t n = 1;
    for (int32_t i = 0; i < rank; i++) n = esa_size_mul(n, dim[i]);
    return esa_size_mul(n, esa_file_dtype_size(dtype));
}

esa_quoted esa_quote(const char *name)
{
    esa_quoted q;
    const size_t n = strlen(name);
    const char *const end = name + n;
    size_t used = 0;
    while (name < end) {
        int len = esa_utf8_length(name, end);
        const int plain = len > 1 || (len == 1 && (unsigned char)*name >= 0x20 && *name != 0x7f);
        if (len == 0) len = 1;
        if (used + (size_t)len > ESA_QUOTE_MOST) {
            memcpy(q.text + used, "...", 3);
            used += 3;
            break;
        }
        if (plain)
            memcpy(q.text + used, name, (size_t)len);
        else
            q.text[used] = '?';
        used += plain ? (size_t)len : 1;
        name += len;
    }
    q.text[used] = 0;
    return q;
}

/* Makes room for one more element. NULL if out of memory; the old array stays. */
static void *grow(esa_tensors *file, void *array, int64_t count, int64_t *cap, int64_t element)
{
    if (count < *cap) return array;
    const int64_t wider = *cap ? *cap * 2 : 16;
    void *next = esa_mem_alloc(&file->mem, esa_size_mul(wider, element));
    if (!next) return NULL;
    if (count) memcpy(next, array, (size_t)(count * element));
    esa_mem_free(&file->mem, array, *cap * element);
    *cap = wider;
    return next;
}

static esa_status no_memory(esa_tensors *file)
{
    return esa_fail(file->ctx, ESA_ERR_MEMORY, "%s: out of memory while reading the header",
                    file->label);
}

static esa_status bad_json(esa_tensors *file, const esa_json *json)
{
    return esa_fail(file->ctx, ESA_ERR_FORMAT, "%s: the header is not valid at byte %lld: %s",
                    file->label, (long long)(json->at - json->base),
                    json->error ? json->error : "unexpected text");
}

static esa_status parse_metadata(esa_tensors *file, esa_json *json)
{
    if (!esa_json_take(json, '{')) return bad_json(file, json);
    if (esa_json_peek(json) == '}') {
        json->at++;
        return ESA_OK;
    }
    for (;;) {
        esa_st_pair pair;
        pair.key = esa_json_string(json);
        if (!pair.key || !esa_json_take(json, ':')) return bad_json(file, json);
        if (esa_json_peek(json) != '"')
            return esa_fail(file->ctx, ESA_ERR_FORMAT, "%s: metadata '%s' is not a string",
                            file->label, esa_quote(pair.key).text);
        pair.value = esa_json_string(json);
        if (!pair.value) return bad_json(file, json);
        void *array = grow(file, file->pair, file->pair_count, &file->pair_cap,
                           (int64_t)sizeof *file->pair);
        if (!array) return no_memory(file);
        file->pair = array;
        file->pair[file->pair_count++] = pair;
        const int more = esa_json_next(json, '}');
        if (more < 0) return bad_json(file, json);
        if (!more) return ESA_OK;
    }
}

static esa_status parse_shape(esa_tensors *file, esa_json *json, esa_st_entry *e)
{
    if (!esa_json_take(json, '[')) return bad_json(file, json);
    e->rank = 0;
    if (esa_json_peek(json) == ']') {
        json->at++;
        return ESA_OK;
    }
    for (;;) {
        int64_t d;
        if (!esa_json_integer(json, &d)) return bad_json(file, json);
        if (e->rank == ESA_FILE_MAX_RANK)
            return esa_fail(file->ctx, ESA_ERR_FORMAT,
                            "%s: tensor '%s' has more than %d dimensions", file->label,
                            esa_quote(e->name).text, ESA_FILE_MAX_RANK);
        e->dim[e->rank++] = d;
        const int more = esa_json_next(json, ']');
        if (more < 0) return bad_json(file, json);
        if (!more) return ESA_OK;
    }
}

static esa_status parse_offsets(esa_tensors *file, esa_json *json, esa_st_entry *e)
{
    if (!esa_json_take(json, '[') || !esa_json_integer(json, &e->begin))
        return bad_json(file, json);
    if (esa_json_next(json, ']') != 1 || !esa_json_integer(json, &e->end) ||
        !esa_json_take(json, ']')) {
        if (!json->error) json->error = "data_offsets must hold two numbers";
        return bad_json(file, json);
    }
    return ESA_OK;
}

/* Parses the object of one tensor. Its three keys come in any order, each exactly once,
 * and no others. */
static esa_status parse_entry(esa_tensors *file, esa_json *json, esa_st_entry *e)
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    int seen = 0;
    if (!esa_json_take(json, '{')) return bad_json(file, json);
    if (esa_json_peek(json) == '}')
        json->at++;
    else
        for (int more = 1; more;) {
            const char *key = esa_json_string(json);
            if (!key || !esa_json_take(json, ':')) return bad_json(file, json);
            const int which = strcmp(key, "dtype") == 0          ? DTYPE
                              : strcmp(key, "shape") == 0        ? SHAPE
                              : strcmp(key, "data_offsets") == 0 ? OFFSETS
                                                                 : 0;
            if (!which || (seen & which))
                return esa_fail(file->ctx, ESA_ERR_FORMAT, "%s: tensor '%s' has %s key '%s'",
                                file->label, esa_quote(e->name).text,
                                which ? "a second" : "an unknown", esa_quote(key).text);
            seen |= which;
            if (which == DTYPE) {
                const char *name = esa_json_string(json);
                if (!name) return bad_json(file, json);
                e->dtype = esa_file_dtype_from_name(name);
                if (e->dtype < 0)
                    return esa_fail(
                        file->ctx, ESA_ERR_FORMAT,
                        "%s: tensor '%s' has dtype '%s', which this library does not know",
                        file->label, esa_quote(e->name).text, esa_quote(name).text);
            } else {
                ESA_TRY(which == SHAPE ? parse_shape(file, json, e) : parse_offsets(file, json, e));
            }
            more = esa_json_next(json, '}');
            if (more < 0) return bad_json(file, json);
        }
    if (seen != (DTYPE | SHAPE | OFFSETS))
        return esa_fail(file->ctx, ESA_ERR_FORMAT, "%s: tensor '%s' has no %s", file->label,
                        esa_quote(e->name).text,
                        !(seen & DTYPE)   ? "dtype"
                        : !(seen & SHAPE) ? "shape"
                                          : "data_offsets");
    return ESA_OK;
}

static int by_offset(const void *a, const void *b)
{
    const esa_st_entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return x->order < y->order ? -1 : x->order > y->order;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(esa_st_entry *const *)a)->name, (*(esa_st_entry *const *)b)->name);
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const esa_st_pair *)a)->key, ((const esa_st_pair *)b)->key);
}

esa_status esa_st_index(esa_tensors *file)
{
    file->by_name = esa_mem_alloc(&file->mem,
                                  esa_size_mul(file->count, (int64_t)sizeof *file->by_name));
    if (!file->by_name) return no_memory(file);
    for (int64_t i = 0; i < file->count; i++) file->by_name[i] = &file->entry[i];
    if (file->count) qsort(file->by_name, (size_t)file->count, sizeof *file->by_name, by_name);
    for (int64_t i = 1; i < file->count; i++)
        if (strcmp(file->by_name[i - 1]->name, file->by_name[i]->name) == 0)
            return esa_fail(file->ctx, ESA_ERR_FORMAT, "%s: tensor '%s' appears twice", file->label,
                            esa_quote(file->by_name[i]->name).text);
    if (file->pair_count) qsort(file->pair, (size_t)file->pair_count, sizeof *file->pair, by_key);
    for (int64_t i = 1; i < file->pair_count; i++)
        if (strcmp(file->pair[i - 1].key, file->pair[i].key) == 0)
            return esa_fail(file->ctx, ESA_ERR_FORMAT, "%s: metadata '%s' appears twice",
                            file->label, esa_quote(file->pair[i].key).text);
    return ESA_OK;
}

/* Checks sizes, offsets and unique names of all tensors together. */
static esa_status check_entries(esa_tensors *file, int64_t data_bytes)
{
    for (int64_t i = 0; i < file->count; i++) {
        const esa_st_entry *e = &file->entry[i];
        const int64_t bytes = esa_file_bytes(e->dtype, e->rank, e->dim);
        if (e->begin > e->end || e->end > data_bytes)
            return esa_fail(
                file->ctx, ESA_ERR_FORMAT,
                "%s: tensor '%s' claims bytes %lld to %lld, but the file has %lld bytes of data",
                file->label, esa_quote(e->name).text, (long long)e->begin, (long long)e->end,
                (long long)data_bytes);
        if (bytes < 0 || bytes != e->end - e->begin)
            return esa_fail(file->ctx, ESA_ERR_FORMAT,
                            "%s: tensor '%s' has %lld bytes, but its dtype and shape need %s%lld",
                            file->label, esa_quote(e->name).text, (long long)(e->end - e->begin),
                            bytes < 0 ? "more than " : "",
                            (long long)(bytes < 0 ? INT64_MAX : bytes));
    }
    if (file->count) qsort(file->entry, (size_t)file->count, sizeof *file->entry, by_offset);
    int64_t at = 0;
    for (int64_t i = 0; i < file->count; i++) {
        const esa_st_entry *e = &file->entry[i];
        if (e->begin < at)
            return esa_fail(file->ctx, ESA_ERR_FORMAT, "%s: tensors '%s' and '%s' overlap",
                            file->label, esa_quote(file->entry[i - 1].name).text,
                            esa_quote(e->name).text);
        if (e->begin > at)
            return esa_fail(file->ctx, ESA_ERR_FORMAT,
                            "%s: bytes %lld to %lld of the data (before '%s') belong to no tensor",
                            file->label, (long long)at, (long long)e->begin,
                            esa_quote(e->name).text);
        at = e->end;
    }
    if (at != data_bytes)
        return esa_fail(file->ctx, ESA_ERR_FORMAT,
                        "%s: the tensors end at byte %lld of the data, but the file has %lld",
                        file->label, (long long)at, (long long)data_bytes);
    return esa_st_index(file);
}

/* What a file that is not safetensors looks like, for the message. NULL: unknown. */
static const char *looks_like(const uint8_t *bytes, int64_t size)
{
    if (size >= 4 && memcmp(bytes, "PK\3\4", 4) == 0) return "a zip archive (as torch.save writes)";
    if (size >= 2 && bytes[0] == 0x80 && bytes[1] >= 2 && bytes[1] <= 5) return "a Python pickle";
    if (size >= 4 && memcmp(bytes, "GGUF", 4) == 0) return "a GGUF file";
    if (size >= 6 && memcmp(bytes, "\x93NUMPY", 6) == 0) return "a NumPy array";
    if (size >= 8 && memcmp(bytes, "\x89HDF\r\n\x1a\n", 8) == 0) return "an HDF5 file";
    if (size >= 8 && memcmp(bytes, "version ", 8) == 0)
        return "a Git LFS pointer, not the file itself";
    return NULL;
}

esa_status esa_st_parse(esa_tensors *file)
{
    ESA_TRY(esa_st_head(file, 16));
    const char *other = looks_like(file->head, file->have);
    if (file->size < 8 && !other)
        return esa_fail(file->ctx, ESA_ERR_FORMAT,
                        "%s: %lld bytes is too short for a safetensors file", file->label,
                        (long long)file->size);
    uint64_t length = 0;
    if (file->size >= 8)
        for (int i = 7; i >= 0; i--) length = length << 8 | file->head[i];
    if (file->size < 8 || length > (uint64_t)ESA_ST_MAX_HEADER ||
        (int64_t)length > file->size - 8 || length < 2 || file->head[8] != '{') {
        if (other)
            return esa_fail(file->ctx, ESA_ERR_FORMAT, "%s is %s, expected a safetensors file",
                            file->label, other);
        if (length <= (uint64_t)ESA_ST_MAX_HEADER && (int64_t)length > file->size - 8)
            return esa_fail(file->ctx, ESA_ERR_FORMAT,
                            "%s: the header claims %llu bytes, but the file has %lld: not "
                            "safetensors, or truncated",
                            file->label, (unsigned long long)length, (long long)(file->size - 8));
        if (length > (uint64_t)ESA_ST_MAX_HEADER)
            return esa_fail(file->ctx, ESA_ERR_FORMAT,
                            "%s: not a safetensors file: its first 8 bytes give a header of %llu "
                            "bytes, expected at most %lld",
                            file->label, (unsigned long long)length, (long long)ESA_ST_MAX_HEADER);
        return esa_fail(file->ctx, ESA_ERR_FORMAT,
                        "%s: not a safetensors file: the header does not start with '{'",
                        file->label);
    }
    ESA_TRY(esa_st_head(file, 8 + (int64_t)length));
    const char *text = (const char *)file->head + 8;
    file->data = file->bytes + 8 + length;
    file->strings = esa_mem_alloc(&file->mem, (int64_t)length);
    if (!file->strings) return no_memory(file);
    file->strings_bytes = (int64_t)length;

    esa_json json = { text, text, text + length, file->strings, NULL };
    int metadata = 0;
    if (!esa_json_take(&json, '{')) return bad_json(file, &json);
    if (esa_json_peek(&json) == '}')
        json.at++;
    else
        for (int more = 1; more;) {
            const char *name = esa_json_string(&json);
            if (!name || !esa_json_take(&json, ':')) return bad_json(file, &json);
            if (strcmp(name, "__metadata__") == 0) {
                if (metadata++)
                    return esa_fail(file->ctx, ESA_ERR_FORMAT, "%s: __metadata__ appears twice",
                                    file->label);
                ESA_TRY(parse_metadata(file, &json));
            } else {
                void *array = grow(file, file->entry, file->count, &file->entry_cap,
                                   (int64_t)sizeof *file->entry);
                if (!array) return no_memory(file);
                file->entry = array;
                esa_st_entry *e = &file->entry[file->count];
                memset(e, 0, sizeof *e);
                e->name = name;
                e->order = file->count;
                ESA_TRY(parse_entry(file, &json, e));
                file->count++;
            }
            more = esa_json_next(&json, '}');
            if (more < 0) return bad_json(file, &json);
        }
    for (; json.at < json.end; json.at++)
        if (*json.at != ' ') {
            json.error = "only spaces may follow the object";
            return bad_json(file, &json);
        }
    return check_entries(file, file->size - 8 - (int64_t)length);
}
