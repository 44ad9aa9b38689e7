/* weights_merge.c - adds the changes of LoRA files to a tensor while it is loaded.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each thread expands some rows of the tensor to f32, adds the products of the changes, and writes
 * the rows in the type that is asked for. The rows of a piece do not depend on the number of
 * threads, and neither does the result. */
#include <math.h>
#include <string.h>

#include "base/blocks.h"
#include "model/weights/lora.h"
#include "model/weights/weights_internal.h"
#include "nn/leaf.h"
#include "nn/product.h"

/* elements of one piece */
#define PIECE (INT64_C(1) << 18)

/* The factors of one change in f32. */
typedef struct factors {
    float *up;   /* [rows][rank]; NULL: there is only down */
    float *down; /* [rank][cols], packed for products (nn/product.h); without up [rows][cols] */
    int64_t up_bytes, down_bytes, rank;
    float factor;
} factors;

typedef struct merge_job {
    esa_weight from;                 /* the rows, which lie in one run of the file */
    int64_t first, rows, cols, step; /* rows of the tensor; rows of a piece */
    const factors *f;
    int64_t changes;
    void *to;
    int32_t dtype;
    const esa_ctx *ctx;
    float *room; /* [threads]: [step][cols], then sums of a product (nn/product.h) */
    int64_t room_floats;
} merge_job;

/* Elements of a tensor of a LoRA file in f32. */
static void read_f32(float *dst, const esa_tensors *file, const esa_st_entry *e, int64_t first,
                     int64_t count)
{
    const esa_weight view = {
        .data = esa_st_data(file, e), .dtype = e->dtype, .rank = 1, .dim = { first + count }
    };
    esa_weight_to_f32(dst, &view, first, count);
}

/* 32 numbers as a block of Q8_0. */
static void write_block(uint8_t *dst, const float *x)
{
    float most = 0;
    for (int32_t i = 0; i < 32; i++) most = fmaxf(most, fabsf(x[i]));
    const uint16_t scale = esa_f32_to_f16(most / 127);
    const float d = esa_f16_to_f32(scale), inverse = d > 0 ? 1 / d : 0;
    memcpy(dst, &scale, 2);
    for (int32_t i = 0; i < 32; i++) {
        const float code = fminf(127, fmaxf(-127, rintf(x[i] * inverse)));
        dst[2 + i] = (uint8_t)(int8_t)code;
    }
}

static void write_rows(const merge_job *j, int64_t row, const float *x, int64_t count)
{
    const int64_t at = row * j->cols;
    if (j->dtype == ESA_DTYPE_BF16) {
        esa_nn_leaf_plain.to_bf16((uint16_t *)j->to + at, x, count);
    } else if (j->dtype == ESA_DTYPE_F16) {
        for (int64_t i = 0; i < count; i++) ((uint16_t *)j->to)[at + i] = esa_f32_to_f16(x[i]);
    } else if (j->dtype == ESA_BLOCKS_Q8_0) {
        uint8_t *dst = (uint8_t *)j->to + at / 32 * esa_blocks_bytes(j->dtype);
        for (int64_t i = 0; i < count; i += 32, dst += esa_blocks_bytes(j->dtype))
            write_block(dst, x + i);
    } else {
        memcpy((float *)j->to + at, x, (size_t)count * 4);
    }
}

static void merge_piece(void *arg, int64_t item, int32_t worker)
{
    const merge_job *j = arg;
    const int64_t row = item * j->step, rows = esa_min64(j->step, j->rows - row);
    float *x = j->room + worker * j->room_floats;
    esa_weight_to_f32(x, &j->from, row * j->cols, rows * j->cols);
    for (int64_t k = 0; k < j->changes; k++) {
        const factors *f = &j->f[k];
        if (f->up) {
            esa_panels_add(j->ctx, x, f->up + row * f->rank, f->down, rows, j->cols, f->rank,
                           f->factor, x + rows * j->cols);
            continue;
        }
        const float *d = f->down + row * j->cols;
        for (int64_t i = 0; i < rows * j->cols; i++) x[i] += f->factor * d[i];
    }
    write_rows(j, row, x, rows * j->cols);
}

static esa_status lacks_memory(esa_weights *w, const esa_wanted *e)
{
    return esa_fail(w->ctx, ESA_ERR_MEMORY, "out of memory to merge LoRAs into %s of the %s",
                    e->name, w->part);
}

/* The numbers of a tensor of a change that belong to elements first .. first+count-1 of its tensor:
 * `to` of them stand for `from` elements. */
static void read_share(float *dst, const esa_wanted *e, const esa_delta *d,
                       const esa_st_entry *entry, int64_t first, int64_t count, int64_t from,
                       int64_t to)
{
    for (int64_t i = 0, left; i < count; i += left) {
        const int64_t at = esa_share_element(&d->place->share, e, first + i, &left);
        left = esa_min64(left, count - i);
        read_f32(dst + i / from * to, d->file, entry, at / from * to, left / from * to);
    }
}

static esa_status read_factors(esa_weights *w, const esa_wanted *e, factors *f, const esa_delta *d,
                               const merge_job *j)
{
    f->factor = d->factor;
    f->rank = d->up ? d->down->dim[0] : 0;
    f->down_bytes = d->up ? esa_panels_bytes(j->ctx, ESA_DTYPE_F32, j->cols, f->rank)
                          : 4 * j->rows * j->cols;
    f->up_bytes = 4 * f->rank * j->rows;
    f->down = esa_mem_alloc(&w->ctx->mem, f->down_bytes);
    f->up = d->up ? esa_mem_alloc(&w->ctx->mem, f->up_bytes) : NULL;
    if (!f->down || (d->up && !f->up)) return lacks_memory(w, e);
    const int64_t first = j->first * j->cols, count = j->rows * j->cols;
    if (!d->up) {
        read_share(f->down, e, d, d->down, first, count, 1, 1);
        return ESA_OK;
    }
    const int64_t bytes = 4 * f->rank * j->cols;
    float *rows = esa_mem_alloc(&w->ctx->mem, bytes);
    if (!rows) return lacks_memory(w, e);
    read_f32(rows, d->file, d->down, 0, f->rank * j->cols);
    esa_panels_fill_rows(j->ctx, f->down, rows, f->rank, j->cols);
    esa_mem_free(&w->ctx->mem, rows, bytes);
    read_share(f->up, e, d, d->up, first, count, j->cols, f->rank);
    return ESA_OK;
}

/* The numbers of the file, the factors and the room are there in the job. */
static esa_status run(esa_weights *w, const esa_wanted *e, merge_job *j)
{
    factors f[ESA_LORA_MOST] = { { 0 } };
    const int32_t threads = esa_pool_threads(w->ctx->pool);
    j->room_floats = j->step * j->cols + esa_panels_sums(w->ctx, j->step);
    const int64_t room = esa_size_mul(4 * (int64_t)threads, j->room_floats);
    esa_status status = ESA_OK;
    for (const esa_delta *d = e->delta; d && !status; d = d->next)
        status = read_factors(w, e, &f[j->changes++], d, j);
    j->f = f;
    j->room = esa_mem_alloc(&w->ctx->mem, room);
    if (!status && !j->room) status = lacks_memory(w, e);
    if (!status) esa_pool_run(w->ctx->pool, merge_piece, j, esa_ceil_div(j->rows, j->step));
    esa_mem_free(&w->ctx->mem, j->room, room);
    for (int64_t k = 0; k < j->changes; k++) {
        esa_mem_free(&w->ctx->mem, f[k].down, f[k].down_bytes);
        esa_mem_free(&w->ctx->mem, f[k].up, f[k].up_bytes);
    }
    return status;
}

esa_status esa_weights_merge(esa_weights *w, const esa_wanted *e, void *dst, int32_t dtype,
                             int64_t first, int64_t rows)
{
    const int64_t all = esa_weights_rows(e), cols = esa_wanted_count(e) / all;
    float *scale = NULL;
    esa_status status = ESA_OK;
    if (esa_weights_file_dtype(e) == ESA_DTYPE_F8) ESA_TRY(esa_weights_scales(w, e, &scale));
    for (int64_t row = first, end = first + rows; row < end && !status;) {
        int64_t left;
        esa_share_element(&e->share, e, row * cols, &left);
        merge_job j = {
            .first = row, .rows = esa_min64(end - row, left / cols), .cols = cols, .ctx = w->ctx
        };
        j.from = (esa_weight){ .data = esa_weights_data(w, e, row * cols),
                               .dtype = esa_weights_file_dtype(e),
                               .rank = 2,
                               .dim = { j.rows, cols },
                               .scale = scale ? scale + row : NULL };
        j.step = esa_max64(1, PIECE / cols);
        j.to = (char *)dst + esa_weights_size(dtype, (row - first) * cols);
        j.dtype = dtype;
        status = run(w, e, &j);
        esa_weights_give_back(w, e, row * cols, (row + j.rows) * cols);
        row += j.rows;
    }
    if (scale) esa_mem_free(&w->ctx->mem, scale, all * (int64_t)sizeof(float));
    return status;
}
