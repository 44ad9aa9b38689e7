/* npy.c - NPY, NumPy's file format: a line of Python that names dtype, order and shape, then the
 * elements. tensor_video.c describes the layout of a video.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/outfile.h"
#include "io/safetensors.h"
#include "media/frames.h"

#include <stdio.h>
#include <string.h>

#define MAX_RANK 8

typedef struct npy {
    const char *name;
    const char *at, *end;
} npy;

static esa_status broken(esa_ctx *ctx, const npy *n)
{
    return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s is a damaged NPY: its header cannot be read",
                    n->name);
}

/* Finds 'key' in the header's dictionary and moves n->at to its value. Returns 0 if it is not
 * there. */
static int find(npy *n, const char *key)
{
    const size_t k = strlen(key);
    for (const char *p = n->at; n->end - p > (int64_t)k + 3; p++)
        if (*p == '\'' && memcmp(p + 1, key, k) == 0 && p[k + 1] == '\'') {
            p += k + 2;
            while (p < n->end && *p == ' ') p++;
            if (p == n->end || *p != ':') return 0;
            p++;
            while (p < n->end && *p == ' ') p++;
            n->at = p;
            return p < n->end;
        }
    return 0;
}

/* Reads a word such as '<f4' at n->at; -1 if it is none that a video may have. */
static int32_t dtype_at(const npy *n)
{
    static const struct {
        const char *word;
        int32_t dtype;
    } known[] = {
        { "'|u1'", ESA_FILE_U8 },  { "'<u1'", ESA_FILE_U8 },  { "'<f2'", ESA_FILE_F16 },
        { "'<f4'", ESA_FILE_F32 }, { "'<f8'", ESA_FILE_F64 },
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (n->end - n->at >= 5 && memcmp(n->at, known[i].word, 5) == 0) return known[i].dtype;
    return -1;
}

/* Reads a shape such as (2, 3) at n->at and returns its rank; -1 if it cannot be read. */
static int32_t shape_at(const npy *n, int64_t dim[MAX_RANK])
{
    const char *p = n->at;
    int32_t rank = 0;
    if (*p++ != '(') return -1;
    for (;;) {
        while (p < n->end && (*p == ' ' || *p == ',')) p++;
        if (p == n->end) return -1;
        if (*p == ')') return rank;
        int64_t x = 0;
        const char *from = p;
        for (; p < n->end && *p >= '0' && *p <= '9' && x < INT64_C(1) << 50; p++)
            x = 10 * x + (*p - '0');
        if (p == from || rank == MAX_RANK) return -1;
        dim[rank++] = x;
    }
}

/* The part of the file after the header's text, and what the header says about it. */
typedef struct elements {
    int32_t dtype, rank;
    int64_t dim[MAX_RANK];
} elements;

static esa_status read_header(esa_ctx *ctx, npy *n, elements *e)
{
    const char *text = n->at;
    if (!find(n, "descr")) return broken(ctx, n);
    e->dtype = dtype_at(n);
    if (e->dtype < 0)
        return esa_fail(ctx, ESA_ERR_DTYPE,
                        "%.200s holds elements of type %.*s, expected '|u1' (0 .. 255), or '<f2', "
                        "'<f4' or '<f8' in [0, 1]",
                        n->name, (int)esa_min64(n->end - n->at, 5), n->at);
    n->at = text;
    if (!find(n, "fortran_order")) return broken(ctx, n);
    if (*n->at != 'F')
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "%.200s is in Fortran order, which is not supported; save "
                        "numpy.ascontiguousarray(x)",
                        n->name);
    n->at = text;
    if (!find(n, "shape")) return broken(ctx, n);
    e->rank = shape_at(n, e->dim);
    return e->rank < 0 ? broken(ctx, n) : ESA_OK;
}

esa_status esa_npy_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps)
{
    npy n = { .name = name };
    elements e = { 0 };
    if (frames) *frames = NULL;
    /* Six bytes of magic, two of version, then the header's length: two bytes, or four from
     * version 2 on. */
    const int64_t head = size >= 12 && bytes[6] >= 2 ? 12 : 10;
    if (size < head || bytes[6] < 1 || bytes[6] > 3) return broken(ctx, &n);
    const int64_t length = head == 10 ? bytes[8] | bytes[9] << 8
                                      : bytes[8] | bytes[9] << 8 | bytes[10] << 16 |
                                            (int64_t)bytes[11] << 24;
    if (length > size - head) return broken(ctx, &n);
    n.at = (const char *)bytes + head;
    n.end = n.at + length;
    ESA_TRY(read_header(ctx, &n, &e));
    const int64_t there = size - head - length, needed = esa_file_bytes(e.dtype, e.rank, e.dim);
    if (needed < 0 || needed != there)
        return esa_fail(ctx, ESA_ERR_FORMAT,
                        "%.200s holds %lld bytes of elements, but its shape needs %lld", name,
                        (long long)there, (long long)needed);
    return esa_layout_read(ctx, frames, info, name, e.dtype, e.rank, e.dim, bytes + head + length,
                           fps);
}

static esa_status write_all(esa_outfile *out, const esa_frames *frames, uint8_t *row,
                            int32_t pixels)
{
    static const char *const words[] = { "|u1", "<f4", "<f2" };
    const int64_t count = (int64_t)frames->height * frames->width * 3;
    char head[129], text[118]; /* 128 bytes in all: the elements are aligned as in NumPy's files */
    snprintf(text, sizeof text,
             "{'descr': '%s', 'fortran_order': False, 'shape': (%d, %d, %d, 3), }", words[pixels],
             frames->count, frames->height, frames->width);
    memcpy(head, "\x93NUMPY\x01\x00\x76\x00", 10);
    snprintf(head + 10, sizeof head - 10, "%-117s\n", text);
    ESA_TRY(esa_outfile_write(out, head, 128));
    for (int64_t i = 0; i < frames->count; i++)
        ESA_TRY(esa_outfile_write(out, row,
                                  esa_layout_write(row, frames->rgb + i * count, count, pixels)));
    return esa_outfile_commit(out);
}

esa_status esa_npy_save(esa_ctx *ctx, const esa_frames *frames, const char *path, int32_t pixels)
{
    const int64_t room = (int64_t)frames->height * frames->width * 3 * 4;
    uint8_t *row = esa_mem_alloc(&ctx->mem, room);
    if (!row) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while writing %.200s", path);
    esa_outfile out;
    esa_status status = esa_outfile_open(ctx, &out, path);
    if (!status) status = write_all(&out, frames, row, pixels);
    esa_outfile_close(&out);
    esa_mem_free(&ctx->mem, row, room);
    return status;
}
