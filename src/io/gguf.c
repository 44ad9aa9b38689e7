/* gguf.c - reads GGUF files; see gguf.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The header is walked twice: first to check it and to count its strings, then to keep them. Both
 * walks read the head (safetensors.h), a copy that nobody else can change meanwhile. Its length is
 * not known before: the first walk begins again with a longer one until it fits. */
#include "io/gguf.h"

#include <stdlib.h>
#include <string.h>
#include "base/blocks.h"
#include "base/status.h"
#include "io/json.h"

enum {
    TYPE_BOOL = 7,
    TYPE_STRING = 8,
    TYPE_ARRAY = 9,
    TYPES = 13,
    MAX_NESTED = 4, /* arrays of arrays */
    ALIGN_USUAL = 32,
    ALIGN_MOST = 1 << 20,
    FIRST_HEAD = 1 << 20 /* most headers of video models are shorter */
};

/* Bytes of a metadata value; 0: a string or an array. */
static const uint8_t value_bytes[TYPES] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

/* Types of tensors by their number in the file. */
static const struct {
    int32_t dtype; /* -1: not supported */
    const char *name;
} types[] = {
    [0] = { ESA_FILE_F32, "F32" },
    [1] = { ESA_FILE_F16, "F16" },
    [2] = { -1, "Q4_0" },
    [3] = { -1, "Q4_1" },
    [4] = { -1, "Q4_2" },
    [5] = { -1, "Q4_3" },
    [6] = { -1, "Q5_0" },
    [7] = { -1, "Q5_1" },
    [8] = { ESA_BLOCKS_Q8_0, "Q8_0" },
    [9] = { -1, "Q8_1" },
    [10] = { -1, "Q2_K" },
    [11] = { -1, "Q3_K" },
    [12] = { ESA_BLOCKS_Q4_K, "Q4_K" },
    [13] = { ESA_BLOCKS_Q5_K, "Q5_K" },
    [14] = { ESA_BLOCKS_Q6_K, "Q6_K" },
    [15] = { -1, "Q8_K" },
    [16] = { -1, "IQ2_XXS" },
    [17] = { -1, "IQ2_XS" },
    [18] = { -1, "IQ3_XXS" },
    [19] = { -1, "IQ1_S" },
    [20] = { -1, "IQ4_NL" },
    [21] = { -1, "IQ3_S" },
    [22] = { -1, "IQ2_S" },
    [23] = { -1, "IQ4_XS" },
    [24] = { -1, "I8" },
    [25] = { -1, "I16" },
    [26] = { -1, "I32" },
    [27] = { -1, "I64" },
    [28] = { -1, "F64" },
    [29] = { -1, "IQ1_M" },
    [30] = { ESA_FILE_BF16, "BF16" },
    [31] = { -1, "Q4_0_4_4" },
    [32] = { -1, "Q4_0_4_8" },
    [33] = { -1, "Q4_0_8_8" },
    [34] = { -1, "TQ1_0" },
    [35] = { -1, "TQ2_0" },
    [36] = { -1, "IQ4_NL_4_4" },
    [37] = { -1, "IQ4_NL_4_8" },
    [38] = { -1, "IQ4_NL_8_8" },
    [39] = { -1, "MXFP4" },
};
#define KNOWN_TYPES ((uint32_t)(sizeof types / sizeof types[0]))

/* A place in the header. */
typedef struct walk {
    esa_tensors *file;
    int64_t at;      /* next byte of the file */
    int64_t strings; /* bytes of the strings so far, with their ends */
    int32_t keep;    /* 1: the second walk, which fills the object */
    int32_t beyond;  /* 1: the walk ended because the header is longer than the file's head */
    int64_t tensors, pairs;
    int64_t alignment;
} walk;

/* A string of the file; text is not terminated. */
typedef struct span {
    const char *text;
    int64_t bytes;
} span;

/* The beginning of a string as text for messages. */
static esa_quoted quote(span s)
{
    char text[ESA_QUOTE_MOST + 8];
    const size_t n = s.bytes < ESA_QUOTE_MOST + 4 ? (size_t)s.bytes : ESA_QUOTE_MOST + 4;
    memcpy(text, s.text, n);
    text[n] = 0;
    return esa_quote(text);
}

static esa_status ends_early(walk *w, const char *what)
{
    if (w->file->have < w->file->size) {
        w->beyond = 1;
        return ESA_ERR_FORMAT; /* parse() tries again, or says why not */
    }
    return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                    "%s: the file ends at byte %lld, inside %s: not complete, or damaged",
                    w->file->label, (long long)w->file->size, what);
}

static int64_t left(const walk *w) { return w->file->have - w->at; }

/* Reads a number of 4 or 8 bytes. */
static esa_status number(walk *w, uint64_t *value, int32_t bytes, const char *what)
{
    *value = 0;
    if (left(w) < bytes) return ends_early(w, what);
    for (int32_t i = bytes - 1; i >= 0; i--) *value = *value << 8 | w->file->head[w->at + i];
    w->at += bytes;
    return ESA_OK;
}

static esa_status string(walk *w, span *s, const char *what)
{
    uint64_t length;
    ESA_TRY(number(w, &length, 8, what));
    if (length > (uint64_t)left(w)) return ends_early(w, what);
    *s = (span){ (const char *)w->file->head + w->at, (int64_t)length };
    w->at += (int64_t)length;
    return ESA_OK;
}

/* 1 if the string can be a C string: UTF-8 without zero bytes. */
static int32_t is_text(span s)
{
    const char *const end = s.text + s.bytes;
    for (const char *at = s.text; at < end;) {
        const int n = esa_utf8_length(at, end);
        if (n == 0 || *at == 0) return 0;
        at += n;
    }
    return 1;
}

/* Reads the name of a tensor or a key. */
static esa_status name_of(walk *w, span *s, const char *what)
{
    ESA_TRY(string(w, s, what));
    if (s->bytes == 0)
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT, "%s: %s is empty", w->file->label, what);
    if (!is_text(*s))
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s: %s '%s' is not UTF-8, or has a zero byte in it", w->file->label, what,
                        quote(*s).text);
    return ESA_OK;
}

/* In the second walk the terminated copy; in the first only its bytes are counted. */
static const char *keep(walk *w, span s)
{
    char *copy = w->keep ? w->file->strings + w->strings : NULL;
    w->strings += s.bytes + 1;
    if (!copy) return NULL;
    if (s.bytes) memcpy(copy, s.text, (size_t)s.bytes);
    copy[s.bytes] = 0;
    return copy;
}

/* ---------------------------------------------------------------- metadata */

static esa_status bad_value(walk *w, span key, const char *what)
{
    return esa_fail(w->file->ctx, ESA_ERR_FORMAT, "%s: metadata '%s' %s", w->file->label,
                    quote(key).text, what);
}

/* Steps over count values of a type. */
static esa_status skip_values(walk *w, span key, uint64_t type, uint64_t count, int32_t depth)
{
    if (type >= TYPES) return bad_value(w, key, "has a type of value that does not exist");
    const uint64_t size = value_bytes[type];
    if (size) {
        if (count > (uint64_t)left(w) / size) return ends_early(w, "the metadata");
        for (uint64_t i = 0; type == TYPE_BOOL && i < count; i++)
            if (w->file->head[w->at + (int64_t)i] > 1)
                return bad_value(w, key, "is a truth value other than 0 and 1");
        w->at += (int64_t)(count * size);
        return ESA_OK;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (type == TYPE_STRING) {
            span ignored;
            ESA_TRY(string(w, &ignored, "the metadata"));
            continue;
        }
        uint64_t element, elements;
        if (depth == MAX_NESTED) return bad_value(w, key, "has arrays nested too deeply");
        ESA_TRY(number(w, &element, 4, "the metadata"));
        ESA_TRY(number(w, &elements, 8, "the metadata"));
        ESA_TRY(skip_values(w, key, element, elements, depth + 1));
    }
    return ESA_OK;
}

static esa_status alignment(walk *w, span key, uint64_t type)
{
    uint64_t value;
    if (type != 4) return bad_value(w, key, "is not a u32");
    ESA_TRY(number(w, &value, 4, "the metadata"));
    if (value < 1 || value > ALIGN_MOST || (value & (value - 1)))
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s: general.alignment is %llu, expected a power of two up to %d",
                        w->file->label, (unsigned long long)value, ALIGN_MOST);
    w->alignment = (int64_t)value;
    return ESA_OK;
}

/* The value of a pair; text is set if it is a string. */
static esa_status value_of(walk *w, span key, span *text)
{
    static const char aligned[] = "general.alignment";
    uint64_t type;
    ESA_TRY(number(w, &type, 4, "the metadata"));
    if (key.bytes == sizeof aligned - 1 && memcmp(key.text, aligned, sizeof aligned - 1) == 0)
        return alignment(w, key, type);
    if (type != TYPE_STRING) return skip_values(w, key, type, 1, 0);
    ESA_TRY(string(w, text, "the metadata"));
    return is_text(*text) ? ESA_OK : bad_value(w, key, "is not UTF-8, or has a zero byte in it");
}

static esa_status pair(walk *w)
{
    span key, text = { NULL, 0 };
    ESA_TRY(name_of(w, &key, "a key of the metadata"));
    ESA_TRY(value_of(w, key, &text));
    const char *name = keep(w, key);
    if (w->keep) w->file->pair[w->file->pair_count].key = name;
    const char *value = text.text ? keep(w, text) : NULL;
    if (w->keep) w->file->pair[w->file->pair_count].value = value;
    w->file->pair_count++;
    return ESA_OK;
}

/* ---------------------------------------------------------------- tensors */

static esa_status bad_tensor(walk *w, span name, const char *what)
{
    return esa_fail(w->file->ctx, ESA_ERR_FORMAT, "%s: tensor '%s' %s", w->file->label,
                    quote(name).text, what);
}

/* Bytes of the data; -1 for overflow. Dimensions are multiplied from the first on, as everybody
 * does: a zero behind them does not excuse two that overflow. */
static int64_t data_bytes(const esa_st_entry *e)
{
    const int64_t block = esa_blocks_elements(e->dtype);
    if (!block) return esa_file_bytes(e->dtype, e->rank, e->dim);
    int64_t n = 1;
    for (int32_t i = 0; i < e->rank; i++) n = esa_size_mul(n, e->dim[i]);
    return n < 0 ? -1 : esa_size_mul(n / block, esa_blocks_bytes(e->dtype));
}

static esa_status dims(walk *w, span name, esa_st_entry *e)
{
    uint64_t rank, dim;
    ESA_TRY(number(w, &rank, 4, "the list of tensors"));
    if (rank > ESA_FILE_MAX_RANK)
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s: tensor '%s' has %llu dimensions, expected at most %d", w->file->label,
                        quote(name).text, (unsigned long long)rank, ESA_FILE_MAX_RANK);
    e->rank = (int32_t)rank;
    for (int32_t i = e->rank - 1; i >= 0; i--) {
        ESA_TRY(number(w, &dim, 8, "the list of tensors"));
        if (dim > INT64_MAX) return bad_tensor(w, name, "has a dimension beyond 63 bits");
        e->dim[i] = (int64_t)dim;
    }
    return ESA_OK;
}

static esa_status type_of(walk *w, span name, esa_st_entry *e)
{
    uint64_t type;
    ESA_TRY(number(w, &type, 4, "the list of tensors"));
    e->dtype = type < KNOWN_TYPES ? types[type].dtype : -1;
    if (e->dtype < 0 && type < KNOWN_TYPES)
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s: tensor '%s' has type %s, expected F32, F16, BF16, Q8_0, Q4_K, Q5_K or "
                        "Q6_K",
                        w->file->label, quote(name).text, types[type].name);
    if (e->dtype < 0)
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s: tensor '%s' has type number %llu, which this library does not know",
                        w->file->label, quote(name).text, (unsigned long long)type);
    const int64_t block = esa_blocks_elements(e->dtype);
    if (block && (e->rank < 1 || e->dim[e->rank - 1] % block))
        return esa_fail(
            w->file->ctx, ESA_ERR_FORMAT,
            "%s: tensor '%s' has rows of %lld elements, but %s needs a multiple of %lld",
            w->file->label, quote(name).text, (long long)(e->rank ? e->dim[e->rank - 1] : 1),
            types[type].name, (long long)block);
    return ESA_OK;
}

static esa_status tensor(walk *w)
{
    span name;
    uint64_t offset;
    esa_st_entry e = { .order = w->file->count };
    ESA_TRY(name_of(w, &name, "the name of a tensor"));
    ESA_TRY(dims(w, name, &e));
    ESA_TRY(type_of(w, name, &e));
    ESA_TRY(number(w, &offset, 8, "the list of tensors"));
    const int64_t bytes = data_bytes(&e);
    if (bytes < 0) return bad_tensor(w, name, "has more bytes than 63 bits can count");
    if (offset > (uint64_t)w->file->size || bytes > w->file->size)
        return bad_tensor(w, name, "lies behind the end of the file");
    if (offset % (uint64_t)w->alignment)
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s: tensor '%s' begins at byte %llu of the data, expected a multiple of "
                        "%lld",
                        w->file->label, quote(name).text, (unsigned long long)offset,
                        (long long)w->alignment);
    e.begin = (int64_t)offset;
    e.end = e.begin + bytes;
    e.name = keep(w, name);
    if (w->keep) w->file->entry[w->file->count] = e;
    w->file->count++;
    return ESA_OK;
}

static int by_offset(const void *a, const void *b)
{
    const esa_st_entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return x->order < y->order ? -1 : x->order > y->order;
}

/* Data of size bytes: tensors follow one another, with only padding between. */
static esa_status check_data(walk *w, int64_t size)
{
    esa_tensors *f = w->file;
    int64_t at = 0;
    if (f->count) qsort(f->entry, (size_t)f->count, sizeof *f->entry, by_offset);
    for (int64_t i = 0; i < f->count; i++) {
        const esa_st_entry *e = &f->entry[i];
        if (e->end > size)
            return esa_fail(
                f->ctx, ESA_ERR_FORMAT,
                "%s: tensor '%s' claims bytes %lld to %lld, but the file has %lld bytes of data",
                f->label, esa_quote(e->name).text, (long long)e->begin, (long long)e->end,
                (long long)size);
        if (e->begin < at)
            return esa_fail(f->ctx, ESA_ERR_FORMAT, "%s: tensors '%s' and '%s' overlap", f->label,
                            esa_quote(f->entry[i - 1].name).text, esa_quote(e->name).text);
        if (e->begin - at >= w->alignment)
            return esa_fail(f->ctx, ESA_ERR_FORMAT,
                            "%s: bytes %lld to %lld of the data (before '%s') belong to no tensor",
                            f->label, (long long)at, (long long)e->begin, esa_quote(e->name).text);
        at = e->end;
    }
    if (size - at >= w->alignment)
        return esa_fail(f->ctx, ESA_ERR_FORMAT,
                        "%s: the tensors end at byte %lld of the data, but the file has %lld",
                        f->label, (long long)at, (long long)size);
    return ESA_OK;
}

/* ---------------------------------------------------------------- the whole */

int32_t esa_gguf_begins(const void *bytes, int64_t size)
{
    return size >= 4 && memcmp(bytes, "GGUF", 4) == 0;
}

static esa_status version(walk *w)
{
    uint64_t v;
    if (!esa_gguf_begins(w->file->head, w->file->have))
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s is not a GGUF file: it does not begin with \"GGUF\"", w->file->label);
    w->at = 4;
    ESA_TRY(number(w, &v, 4, "its first 24 bytes"));
    if (v != 0 && (v & 0xffff) == 0)
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s is a big-endian GGUF file, expected a little-endian one",
                        w->file->label);
    if (v != 2 && v != 3)
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s: the version of GGUF is %llu, expected 2 or 3", w->file->label,
                        (unsigned long long)v);
    return ESA_OK;
}

/* Reads the two counts. A tensor takes at least 25 bytes of the header, a pair 14. */
static esa_status counts(walk *w)
{
    uint64_t tensors, pairs;
    ESA_TRY(number(w, &tensors, 8, "its first 24 bytes"));
    ESA_TRY(number(w, &pairs, 8, "its first 24 bytes"));
    const uint64_t behind = (uint64_t)(w->file->size - w->at);
    if (tensors > behind / 25 || pairs > behind / 14)
        return esa_fail(w->file->ctx, ESA_ERR_FORMAT,
                        "%s: the header claims %llu tensors and %llu metadata pairs, more than the "
                        "file's %lld bytes can hold",
                        w->file->label, (unsigned long long)tensors, (unsigned long long)pairs,
                        (long long)w->file->size);
    w->tensors = (int64_t)tensors;
    w->pairs = (int64_t)pairs;
    return ESA_OK;
}

static esa_status header(walk *w)
{
    w->file->count = w->file->pair_count = 0;
    w->strings = 0;
    w->alignment = ALIGN_USUAL;
    ESA_TRY(version(w));
    ESA_TRY(counts(w));
    for (int64_t i = 0; i < w->pairs; i++) ESA_TRY(pair(w));
    for (int64_t i = 0; i < w->tensors; i++) ESA_TRY(tensor(w));
    return ESA_OK;
}

/* Memory for what the first walk counted. */
static esa_status make_room(walk *w)
{
    esa_tensors *f = w->file;
    const int64_t pair_cap = f->pair_count, entry_cap = f->count;
    f->count = f->pair_count = 0; /* until they are filled, for esa_st_close */
    f->strings = esa_mem_alloc(&f->mem, w->strings);
    f->strings_bytes = f->strings ? w->strings : 0;
    f->pair = esa_mem_alloc(&f->mem, pair_cap * (int64_t)sizeof *f->pair);
    f->pair_cap = f->pair ? pair_cap : 0;
    f->entry = esa_mem_alloc(&f->mem, entry_cap * (int64_t)sizeof *f->entry);
    f->entry_cap = f->entry ? entry_cap : 0;
    return f->strings && f->pair && f->entry
               ? ESA_OK
               : esa_fail(f->ctx, ESA_ERR_MEMORY, "%s: out of memory while reading the header",
                          f->label);
}

/* The first walk, over a head that is long enough. */
static esa_status first_walk(walk *w)
{
    esa_tensors *f = w->file;
    for (int64_t most = FIRST_HEAD;; most *= 8) {
        ESA_TRY(esa_st_head(f, esa_min64(most, ESA_ST_MAX_HEADER)));
        w->beyond = 0;
        const esa_status status = header(w);
        if (!w->beyond) return status;
        if (f->have == ESA_ST_MAX_HEADER)
            return esa_fail(f->ctx, ESA_ERR_FORMAT,
                            "%s: the header has more than %lld bytes, or is damaged", f->label,
                            (long long)ESA_ST_MAX_HEADER);
    }
}

static esa_status parse(esa_tensors *file)
{
    walk w = { .file = file };
    file->blocks = 1;
    const esa_status status = first_walk(&w);
    if (status) {
        file->count = file->pair_count = 0; /* nothing was kept */
        return status;
    }
    ESA_TRY(make_room(&w));
    w.keep = 1;
    ESA_TRY(header(&w));
    /* A file without data may end before the alignment. */
    const int64_t begin = esa_min64((w.at + w.alignment - 1) / w.alignment * w.alignment,
                                    file->size);
    file->data = file->bytes + begin;
    ESA_TRY(check_data(&w, file->size - begin));
    return esa_st_index(file);
}

esa_status esa_gguf_open(esa_ctx *ctx, esa_tensors **file, const char *path)
{
    const esa_st_source source = { .path = path, .kind = "GGUF", .weights = 1, .parse = parse };
    return esa_st_open_with(ctx, file, &source);
}

esa_status esa_gguf_open_memory(esa_ctx *ctx, esa_tensors **file, const void *bytes, int64_t size)
{
    const esa_st_source source = { .bytes = bytes, .size = size, .parse = parse };
    return esa_st_open_with(ctx, file, &source);
}
