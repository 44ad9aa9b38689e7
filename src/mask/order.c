/* order.c - orders: permutations of the video tokens that put similar tokens into one block.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The sequence is [text front][video t*h*w][text back], and perm[p] is the token at position p. An
 * order moves tokens only inside the segments [text front][frame 0 if protected][other frames]
 * [text back], so forced blocks (text, frame 0) follow from positions alone. One exception: tile in
 * compat mode moves the front text behind the video, because the original does. Sequences of
 * several clips have segments of their own: see esa_layout. */
#include "base/status.h"
#include "mask/mask.h"

/* Fills perm from front to back. */
typedef struct writer {
    int32_t *perm;
    int64_t at;   /* next position */
    int32_t base; /* token number of video token 0 */
} writer;

static void put_run(writer *w, int64_t first, int64_t n)
{
    for (int64_t i = 0; i < n; i++) w->perm[w->at++] = (int32_t)(first + i);
}

/* One h x wd frame whose tokens start at `first`: 8x8 tiles of the largest part that is a multiple
 * of 8, then the remaining bottom rows at full width, then the remaining right columns. */
static void put_tiled_frame(writer *w, int64_t first, int64_t h, int64_t wd)
{
    const int64_t hm = h / 8 * 8, wm = wd / 8 * 8;
    for (int64_t y0 = 0; y0 < hm; y0 += 8)
        for (int64_t x0 = 0; x0 < wm; x0 += 8)
            for (int64_t y = y0; y < y0 + 8; y++) put_run(w, first + y * wd + x0, 8);
    for (int64_t y = hm; y < h; y++) put_run(w, first + y * wd, wd);
    for (int64_t y = 0; y < hm; y++) put_run(w, first + y * wd + wm, wd - wm);
}

/* Boxes of window[t,h,w] over frames f0 .. f1-1, clipped at the edges. Boxes and the tokens inside
 * them are in raster order. */
static void put_boxes(writer *w, int64_t f0, int64_t f1, int64_t h, int64_t wd,
                      const int32_t window[3])
{
    for (int64_t f = f0; f < f1; f += window[0])
        for (int64_t y = 0; y < h; y += window[1])
            for (int64_t x = 0; x < wd; x += window[2]) {
                const int64_t fe = esa_min64(f1, f + window[0]), ye = esa_min64(h, y + window[1]),
                              xe = esa_min64(wd, x + window[2]);
                for (int64_t a = f; a < fe; a++)
                    for (int64_t b = y; b < ye; b++)
                        put_run(w, w->base + (a * h + b) * wd + x, xe - x);
            }
}

/* One clip, whose tokens start at w->base. protect: its frame 0 is walked on its own. */
static void put_clip(writer *w, const esa_layout *layout, const int32_t grid[3], int32_t protect,
                     int32_t mode)
{
    const int64_t t = grid[0], h = grid[1], wd = grid[2], frame = h * wd;
    if (layout->order == ESA_ORDER_TILE) {
        const int32_t raster0 = mode != ESA_MODE_FIXED && (h % 8 != 0 || wd % 8 != 0);
        for (int64_t f = 0; f < t; f++) {
            if (f == 0 && raster0)
                put_run(w, w->base, frame);
            else
                put_tiled_frame(w, w->base + f * frame, h, wd);
        }
    } else if (layout->order == ESA_ORDER_TILE3D) {
        const int32_t flat[3] = { 1, layout->window[1], layout->window[2] };
        if (protect) put_boxes(w, 0, 1, h, wd, flat);
        put_boxes(w, protect, t, h, wd, layout->window);
    } else if (layout->order == ESA_ORDER_HILBERT || layout->order == ESA_ORDER_ADAPTIVE) {
        if (protect) {
            esa_hilbert(w->perm + w->at, w->base, 1, h, wd);
            w->at += frame;
        }
        const int64_t rest = t - protect;
        if (rest > 0)
            esa_hilbert(w->perm + w->at, (int32_t)(w->base + protect * frame), rest, h, wd);
        w->at += rest * frame;
    } else {
        put_run(w, w->base, t * frame);
    }
}

/* Several clips, with context between them where a clip does not end at a multiple of span_align,
 * and the rest of the context at the end. */
static void put_clips(writer *w, int64_t N, const esa_layout *l, int32_t mode)
{
    int64_t token = 0; /* next context token, once the clips that start at it are stepped over */
    for (int32_t c = 0, after = 0; c < l->span_count; c++) {
        w->base = l->span[c].start;
        put_clip(w, l, l->span[c].grid, l->protect_first_frame == 1, mode);
        const int64_t next = esa_span_next(l, c, w->at, N);
        while (w->at < next) {
            while (after < l->span_count && token == l->span[after].start)
                token += esa_span_tokens(&l->span[after++]);
            put_run(w, token++, 1);
        }
    }
}

int32_t esa_order_is_identity(const esa_layout *layout, int32_t side, int32_t mode)
{
    (void)mode; /* raster is the identity in every mode; no other order is */
    if (layout->order == ESA_ORDER_ADAPTIVE || layout->span_count) return 0; /* need no grid */
    return layout->order == ESA_ORDER_RASTER || (side ? layout->grid_k[0] : layout->grid_q[0]) == 0;
}

void esa_order_build(int32_t *perm, int64_t N, const esa_layout *layout, int32_t side, int32_t mode)
{
    writer w = { perm, 0, side ? layout->text_front_k : layout->text_front_q };
    const int32_t *grid = side ? layout->grid_k : layout->grid_q;
    if (layout->span_count) {
        put_clips(&w, N, layout, mode);
        return;
    }
    if (esa_order_is_identity(layout, side, mode) || !grid[0]) {
        put_run(&w, 0, N);
        return;
    }
    const int32_t text_last = layout->order == ESA_ORDER_TILE && mode != ESA_MODE_FIXED;
    if (!text_last) put_run(&w, 0, w.base);
    put_clip(&w, layout, grid, esa_layout_protects(layout, side, mode), mode);
    if (text_last) put_run(&w, 0, w.base);
    put_run(&w, w.at, N - w.at);
}

static esa_status order_checked(esa_ctx *ctx, int32_t *perm, int64_t N, const esa_layout *layout,
                                int32_t side, int32_t mode)
{
    if (!perm || !layout)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL", perm ? "layout" : "perm");
    if (side != 0 && side != 1)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "side is %d, expected 0 (q) or 1 (k)", (int)side);
    if (mode < ESA_MODE_FIXED || mode > ESA_MODE_COMPAT_ROUND)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "mode is %d, expected 0 .. %d", (int)mode,
                        ESA_MODE_COMPAT_ROUND);
    if (N < 1 || N > INT32_MAX)
        return esa_fail(ctx, ESA_ERR_SHAPE, "N is %lld, expected 1 .. %d tokens", (long long)N,
                        INT32_MAX);
    if (layout->struct_size != sizeof *layout)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_layout has struct_size %u, this library expects %u",
                        layout->struct_size, (unsigned)sizeof *layout);
    if (layout->order == ESA_ORDER_ADAPTIVE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "order adaptive is made from q and k, by esa_plan_order: a layout alone "
                        "does not give it");
    /* The length of the other side is unknown and does not matter: this side is used for both. */
    esa_layout one = *layout, resolved;
    const int32_t k_blank = !one.grid_k[0] && !one.grid_k[1] && !one.grid_k[2] &&
                            !one.text_front_k && !one.text_back_k;
    if (side == 1 && !k_blank) {
        for (int32_t i = 0; i < 3; i++) one.grid_q[i] = one.grid_k[i];
        one.text_front_q = one.text_front_k;
        one.text_back_q = one.text_back_k;
    }
    for (int32_t i = 0; i < 3; i++) one.grid_k[i] = 0;
    one.text_front_k = one.text_back_k = 0;
    ESA_TRY(esa_layout_resolve(ctx, &resolved, &one, N, N, -1, mode, 0));
    esa_order_build(perm, N, &resolved, 0, mode);
    return ESA_OK;
}

esa_status esa_order(esa_ctx *ctx, int32_t *perm, int64_t N, const esa_layout *layout, int32_t side,
                     int32_t mode)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = order_checked(ctx, perm, N, layout, side, mode);
    esa_ctx_leave(ctx);
    return status;
}
