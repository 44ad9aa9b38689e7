/* store_load.c - brings the tensors of files to the device: bytes as they are in the file go
 * through two pieces of pinned memory, and the device converts them. Blocks of GGUF files are
 * expanded on the way into those pieces.
 * SPDX-License-Identifier: Apache-2.0
 *
 * While one piece is copied to the device, the threads fill the other. A group that is copied for
 * each use is made in a lane, once, and kept in host memory. */
#include <string.h>

#include "base/blocks.h"
#include "model/weights/store_internal.h"

#define PIECE_BYTES (INT64_C(64) << 20)
enum { FIRST_LANE = ESA_STORE_LANES, PIECES = 2 };

typedef struct loader {
    esa_store *s;
    void *pinned[PIECES], *piece[PIECES]; /* host; device */
    int64_t bytes;                        /* of each */
    float *scale;                         /* device: scales of an E4M3 tensor */
    int64_t scale_bytes;
    int32_t turn;
    int64_t done, total;
} loader;

/* The type in which a tensor comes to the device: that of the file. Blocks, and tensors that LoRAs
 * change, are expanded by the threads: to bf16 if it is held so, else to f32. */
static int32_t sent_dtype(const esa_stored *t)
{
    const int32_t file = esa_weights_file_dtype(t->e);
    if (!t->e->delta && !esa_blocks_elements(file)) return file;
    return t->dtype == ESA_DTYPE_BF16 ? ESA_DTYPE_BF16 : ESA_DTYPE_F32;
}

/* Bytes of a row in a piece. */
static int64_t row_bytes(const esa_stored *t) { return t->cols * esa_view_element(sent_dtype(t)); }

/* Bytes of a piece and of the scales; 0 if nothing is read. Under a limit of all memory the pieces
 * are a small part of it. */
static void sizes_of(const esa_store *s, int64_t *piece, int64_t *scales)
{
    const int64_t most = s->limit ? esa_min64(PIECE_BYTES, s->limit / 64) : PIECE_BYTES;
    int64_t row = 1, tensor = 1, rows = 1;
    *piece = *scales = 0;
    if (s->w->random) return;
    for (int64_t i = 0; i < s->tensors; i++) {
        const esa_stored *t = &s->tensor[i];
        row = esa_max64(row, row_bytes(t));
        tensor = esa_max64(tensor, row_bytes(t) * t->rows);
        rows = esa_max64(rows, t->rows);
    }
    *piece = esa_max64(row, esa_min64(tensor, most));
    *scales = 4 * rows;
}

int64_t esa_store_loading(const esa_store *s)
{
    int64_t piece, scales;
    sizes_of(s, &piece, &scales);
    return PIECES * piece + scales;
}

static esa_status open_loader(loader *l)
{
    esa_store *s = l->s;
    const esa_backend *be = s->nn->be;
    for (int64_t i = 0; i < s->tensors; i++) l->total += esa_weights_bytes(s->w, s->tensor[i].e);
    sizes_of(s, &l->bytes, &l->scale_bytes);
    if (!l->bytes) return ESA_OK;
    for (int32_t i = 0; i < PIECES; i++) {
        ESA_TRY(be->transfer->pin(s->nn->ctx, &l->pinned[i], l->bytes));
        ESA_TRY(esa_nn_alloc(s->nn, &l->piece[i], l->bytes, "the weights"));
    }
    return esa_nn_alloc(s->nn, (void **)&l->scale, l->scale_bytes, "the weights");
}

static void close_loader(loader *l)
{
    const esa_backend *be = l->s->nn->be;
    esa_ctx *ctx = l->s->nn->ctx;
    for (int32_t i = 0; i < PIECES; i++) {
        if (l->pinned[i]) be->transfer->landed(ctx, FIRST_LANE + i); /* a failure frees all alike */
        be->transfer->unpin(ctx, l->pinned[i]);
        esa_nn_free(l->s->nn, l->piece[i], l->bytes);
    }
    esa_nn_free(l->s->nn, l->scale, l->scale_bytes);
}

/* Rows first .. first+rows-1 of a tensor, which lie in one run, to the view y. */
static esa_status load_rows(loader *l, const esa_stored *t, const esa_view *y, int64_t first)
{
    esa_store *s = l->s;
    esa_ctx *ctx = s->nn->ctx;
    const esa_engine_transfer *tr = s->nn->be->transfer;
    const int32_t i = l->turn, dtype = sent_dtype(t), lane = FIRST_LANE + i;
    const int64_t bytes = y->rows * row_bytes(t);
    l->turn = (i + 1) % PIECES;
    ESA_TRY(tr->landed(ctx, lane)); /* the piece was read */
    if (t->e->delta)
        ESA_TRY(esa_weights_merge(s->w, t->e, l->pinned[i], dtype, first, y->rows));
    else if (esa_blocks_elements(esa_weights_file_dtype(t->e)))
        esa_weights_expand(s->w, t->e, l->pinned[i], dtype, first * t->cols, y->rows * t->cols);
    else
        esa_weights_copy(s->w, t->e->shard, l->pinned[i],
                         esa_weights_data(s->w, t->e, first * t->cols), bytes);
    const int32_t as_is = dtype == t->dtype && dtype != ESA_DTYPE_F8;
    ESA_TRY(tr->fetch(ctx, lane, as_is ? y->data : l->piece[i], l->pinned[i], bytes));
    ESA_TRY(tr->arrive(ctx, lane));
    const esa_convert_args convert = { .y = *y,
                                       .x = l->piece[i],
                                       .x_dtype = dtype,
                                       .x_scales = dtype == ESA_DTYPE_F8 ? (int32_t)t->rows : 0,
                                       .x_scale = l->scale + (t->rows > 1 ? first : 0) };
    if (!as_is) ESA_TRY(tr->convert(ctx, &convert));
    return tr->used(ctx, lane);
}

/* Puts the scales of an E4M3 tensor where convert reads them. */
static esa_status send_scales(loader *l, const esa_stored *t)
{
    esa_ctx *ctx = l->s->nn->ctx;
    float *scale;
    ESA_TRY(esa_weights_scales(l->s->w, t->e, &scale));
    const esa_status status = l->s->nn->be->upload(ctx, l->scale, scale, 4 * t->rows);
    esa_mem_free(&ctx->mem, scale, 4 * t->rows);
    return status;
}

static esa_status load_tensor(loader *l, const esa_stored *t, char *base)
{
    esa_store *s = l->s;
    esa_view y = esa_view_of(base + t->offset, t->dtype, s->nn->be->device, t->rows, t->cols);
    if (t->scale >= 0) y.scale = (float *)(void *)(base + t->scale);
    if (s->w->random) {
        esa_convert_args random = { .y = y, .seed = esa_weights_seed(t->e) };
        esa_weights_bell(t->e, &random.mean, &random.deviation);
        return s->nn->be->transfer->convert(s->nn->ctx, &random);
    }
    if (sent_dtype(t) == ESA_DTYPE_F8) ESA_TRY(send_scales(l, t));
    const int64_t step = esa_max64(1, l->bytes / esa_max64(1, row_bytes(t)));
    for (int64_t r = 0, rows; r < t->rows && t->cols; r += rows) {
        int64_t left; /* in the run, which alone lies in one piece in the file */
        esa_share_element(&t->e->share, t->e, r * t->cols, &left);
        rows = esa_min64(step, left / t->cols);
        const esa_view part = esa_view_rows(y, r, rows);
        ESA_TRY(load_rows(l, t, &part, r));
    }
    return ESA_OK;
}

/* One group into device memory. */
static esa_status load_group(loader *l, const esa_store_group *g, void *base)
{
    esa_weights *w = l->s->w;
    for (int64_t i = g->first; i < g->first + g->count; i++) {
        ESA_TRY(load_tensor(l, &l->s->tensor[i], base));
        l->done += esa_weights_bytes(w, l->s->tensor[i].e);
        if (w->tick && w->tick(w->tick_user, l->done, l->total))
            return esa_fail(w->ctx, ESA_ERR_STATE, "cancelled");
    }
    return ESA_OK;
}

static esa_status load_all(loader *l)
{
    esa_store *s = l->s;
    const esa_backend *be = s->nn->be;
    esa_ctx *ctx = s->nn->ctx;
    ESA_TRY(open_loader(l));
    for (int32_t n = 0; n < s->groups; n++) {
        esa_store_group *g = &s->group[n];
        if (g->stays) {
            ESA_TRY(esa_nn_alloc(s->nn, &g->device, g->bytes, "the weights"));
            ESA_TRY(load_group(l, g, g->device));
        } else {
            ESA_TRY(esa_store_host(s, g));
            ESA_TRY(load_group(l, g, s->lane[0]));
            ESA_TRY(be->download(ctx, g->host, s->lane[0], g->bytes));
        }
    }
    return ESA_OK;
}

esa_status esa_store_load(esa_store *s)
{
    loader l = { .s = s };
    const esa_status status = load_all(&l);
    close_loader(&l);
    return status;
}
