/* layout.c - layouts: defaults, checks, comparison. order.c makes the permutations.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include "base/status.h"
#include "mask/mask.h"
#include "rules/rows.h"

esa_layout esa_layout_default(void)
{
    esa_layout layout;
    memset(&layout, 0, sizeof layout);
    layout.struct_size = sizeof layout;
    layout.order = ESA_ORDER_DEFAULT;
    layout.protect_first_frame = -1;
    /* 128 tokens: one box fills one key block. */
    layout.window[0] = 2;
    layout.window[1] = 8;
    layout.window[2] = 8;
    return layout;
}

enum { DEFAULT_ALIGN = 128 }; /* of clips, where no block size is known */

static const char *order_name(int32_t order)
{
    static const char *const name[] = { "raster", "tile", "tile3d", "hilbert", "adaptive" };
    return order >= 0 && order <= ESA_ORDER_ADAPTIVE ? name[order] : "default";
}

static int32_t has_grid(const int32_t grid[3]) { return grid[0] > 0; }

/* Checks the clips of a sequence of N tokens, and that context fills the room between them. */
static esa_status check_spans(esa_ctx *ctx, const esa_layout *l, int64_t Nq, int64_t Nk)
{
    int64_t end = 0, context = Nq, room = 0;
    if (has_grid(l->grid_q) || has_grid(l->grid_k) || l->text_front_q || l->text_back_q ||
        l->text_front_k || l->text_back_k)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the layout has %d clips and a grid or text too: expected one of them",
                        (int)l->span_count);
    if (Nq != Nk)
        return esa_fail(ctx, ESA_ERR_SHAPE, "clips need as many queries as keys, got %lld and %lld",
                        (long long)Nq, (long long)Nk);
    for (int32_t c = 0; c < l->span_count; c++) {
        const esa_span *s = &l->span[c];
        if (s->grid[0] < 1 || s->grid[1] < 1 || s->grid[2] < 1)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "clip %d has the grid %d,%d,%d, expected t,h,w of at least 1 each",
                            (int)c, (int)s->grid[0], (int)s->grid[1], (int)s->grid[2]);
        const int64_t video = esa_size_mul(esa_size_mul(s->grid[0], s->grid[1]), s->grid[2]);
        if (s->start < end || video < 0 || video > Nq - s->start)
            return esa_fail(ctx, ESA_ERR_SHAPE,
                            "clip %d starts at %d with %dx%dx%d tokens, expected a start of at "
                            "least %lld (clips ascend and do not overlap) and an end of at most "
                            "%lld",
                            (int)c, (int)s->start, (int)s->grid[0], (int)s->grid[1],
                            (int)s->grid[2], (long long)end, (long long)Nq);
        end = s->start + video;
        context -= video;
        if (c + 1 < l->span_count)
            room += esa_ceil_div(video, l->span_align) * l->span_align - video;
    }
    if (room > context)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "%d clips need %lld tokens of context to end at multiples of %d, but the "
                        "sequence has %lld: run it dense",
                        (int)l->span_count, (long long)room, (int)l->span_align,
                        (long long)context);
    return ESA_OK;
}

/* Checks the grid and text of one side against its length N. */
static esa_status check_side(esa_ctx *ctx, const char *side, const int32_t grid[3], int32_t front,
                             int32_t back, int64_t N)
{
    const int32_t zeros = (grid[0] == 0) + (grid[1] == 0) + (grid[2] == 0);
    if (grid[0] < 0 || grid[1] < 0 || grid[2] < 0 || (zeros != 0 && zeros != 3))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "grid_%s is %d,%d,%d, expected t,h,w of at least 1 each, or three zeros",
                        side, (int)grid[0], (int)grid[1], (int)grid[2]);
    if (front < 0 || back < 0)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "text on the %s side is %d front, %d back, expected 0 or more", side,
                        (int)front, (int)back);
    const int64_t text = (int64_t)front + back;
    if (zeros == 3) {
        if (text > N)
            return esa_fail(ctx, ESA_ERR_SHAPE,
                            "text on the %s side is %d front + %d back, but N%s is %lld", side,
                            (int)front, (int)back, side, (long long)N);
        return ESA_OK;
    }
    const int64_t video = esa_size_mul(esa_size_mul(grid[0], grid[1]), grid[2]);
    if (video < 0 || video > INT32_MAX || video + text != N)
        return esa_fail(
            ctx, ESA_ERR_SHAPE,
            "grid_%s %dx%dx%d with text %d front, %d back does not make N%s = %lld tokens", side,
            (int)grid[0], (int)grid[1], (int)grid[2], (int)front, (int)back, side, (long long)N);
    return ESA_OK;
}

static esa_status check_fields(esa_ctx *ctx, const esa_layout *in)
{
    if (in->struct_size != sizeof *in)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_layout has struct_size %u, this library expects %u",
                        (unsigned)in->struct_size, (unsigned)sizeof *in);
    if (in->order < ESA_ORDER_DEFAULT || in->order > ESA_ORDER_ADAPTIVE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "order is %d, expected -1 (default) .. %d",
                        (int)in->order, ESA_ORDER_ADAPTIVE);
    if (in->order_applied < 0 || in->order_applied > 1)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "order_applied is %d, expected 0 or 1",
                        (int)in->order_applied);
    if (in->order_applied && in->order == ESA_ORDER_ADAPTIVE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "order_applied is 1 with order adaptive, but each head has its own "
                        "adaptive order, which only the library applies");
    if (in->protect_first_frame < -1 || in->protect_first_frame > 1)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "protect_first_frame is %d, expected -1, 0 or 1",
                        (int)in->protect_first_frame);
    if (in->order == ESA_ORDER_TILE3D &&
        (in->window[0] < 1 || in->window[1] < 1 || in->window[2] < 1))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "window is %d,%d,%d, expected t,h,w of at least 1 each", (int)in->window[0],
                        (int)in->window[1], (int)in->window[2]);
    if (in->span_count < 0 || in->span_count > ESA_MAX_SPANS || in->span_align < 0)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "span_count is %d and span_align %d, expected 0 .. %d clips and 0 or more",
                        (int)in->span_count, (int)in->span_align, ESA_MAX_SPANS);
    for (int32_t i = 0; i < 6; i++)
        if (in->reserved[i])
            return esa_fail(ctx, ESA_ERR_ARGUMENT, "esa_layout.reserved[%d] is %d, expected 0",
                            (int)i, (int)in->reserved[i]);
    return ESA_OK;
}

esa_status esa_span_align(esa_ctx *ctx, int32_t *align, int32_t block_q, int32_t block_k)
{
    const int32_t larger = block_q > block_k ? block_q : block_k;
    if (!*align)
        for (*align = larger; *align % block_q || *align % block_k;) *align += larger;
    if (*align > 0 && *align % block_q == 0 && *align % block_k == 0) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_ARGUMENT,
                    "span_align is %d, expected a multiple of the blocks of %d x %d", (int)*align,
                    (int)block_q, (int)block_k);
}

esa_status esa_layout_resolve(esa_ctx *ctx, esa_layout *out, const esa_layout *in, int64_t Nq,
                              int64_t Nk, int32_t selector, int32_t mode, int32_t causal)
{
    ESA_TRY(check_fields(ctx, in));
    esa_layout r = *in;
    const int32_t k_blank = !r.grid_k[0] && !r.grid_k[1] && !r.grid_k[2] && !r.text_front_k &&
                            !r.text_back_k;
    /* Compat rf_v2 ignores the shape of the key side, as the original
     * ignores its latent_shape_k. */
    const int32_t compat_rf = mode != ESA_MODE_FIXED &&
                              esa_selector_has(selector, ESA_ROW_GRID_COMPAT);
    if ((k_blank && Nk == Nq) || (compat_rf && Nk == Nq)) {
        memcpy(r.grid_k, r.grid_q, sizeof r.grid_k);
        r.text_front_k = r.text_front_q;
        r.text_back_k = r.text_back_q;
    }
    if (r.span_count) {
        if (!r.span_align) r.span_align = DEFAULT_ALIGN;
        ESA_TRY(check_spans(ctx, &r, Nq, Nk));
    }
    ESA_TRY(check_side(ctx, "q", r.grid_q, r.text_front_q, r.text_back_q, Nq));
    ESA_TRY(check_side(ctx, "k", r.grid_k, r.text_front_k, r.text_back_k, Nk));

    const int32_t grid_q = r.span_count || has_grid(r.grid_q),
                  grid_k = r.span_count || has_grid(r.grid_k);
    if (compat_rf) {
        if (!grid_q || Nq != Nk)
            return esa_fail(ctx, ESA_ERR_SHAPE,
                            "rf_v2 in compat mode needs grid_q and Nq = Nk; grid_q is %d,%d,%d, Nq "
                            "%lld, Nk %lld",
                            (int)r.grid_q[0], (int)r.grid_q[1], (int)r.grid_q[2], (long long)Nq,
                            (long long)Nk);
        r.order = ESA_ORDER_TILE;
    }
    if (r.order == ESA_ORDER_DEFAULT) {
        const int32_t tiled = esa_selector_of(selector)->order == ESA_ORDER_TILE && grid_q &&
                              grid_k && (!causal || r.order_applied);
        r.order = tiled ? ESA_ORDER_TILE : ESA_ORDER_RASTER;
    }
    if (r.order == ESA_ORDER_ADAPTIVE && selector >= 0 &&
        !esa_selector_has(selector, ESA_TRAIT_ADAPTIVE))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "order adaptive needs the error selector (ESA_SELECT_ERROR), given "
                        "selector %d",
                        (int)selector);
    if (r.span_count && (r.order == ESA_ORDER_ADAPTIVE || causal))
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "a sequence of several clips takes neither the adaptive order nor causal "
                        "attention");
    if (r.order != ESA_ORDER_RASTER && r.order != ESA_ORDER_ADAPTIVE && !(grid_q && grid_k))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "order %s needs a grid of the %s side",
                        order_name(r.order), grid_q ? "k" : "q");
    /* Reordered keys have no past and future. Compat rf_v2 ignores causal. */
    if (causal && r.order != ESA_ORDER_RASTER && !r.order_applied && !compat_rf)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "causal attention needs order raster or order_applied = 1, given order %s",
                        order_name(r.order));

    if (r.protect_first_frame < 0) r.protect_first_frame = esa_protects_by_default(selector, 0);
    if (!grid_q && !grid_k) r.protect_first_frame = 0;
    /* Protecting frame 0 of a still image would make everything dense. Compat does exactly that. */
    int32_t still = r.grid_q[0] <= 1 && r.grid_k[0] <= 1;
    for (int32_t c = 0; c < r.span_count; c++) still = still && r.span[c].grid[0] == 1;
    if (mode == ESA_MODE_FIXED && still) r.protect_first_frame = 0;
    *out = r;
    return ESA_OK;
}

int32_t esa_layout_same(const esa_layout *a, const esa_layout *b)
{
    if (a->order != b->order) return 0;
    if (memcmp(a->grid_q, b->grid_q, sizeof a->grid_q) ||
        memcmp(a->grid_k, b->grid_k, sizeof a->grid_k))
        return 0;
    if (a->text_front_q != b->text_front_q || a->text_back_q != b->text_back_q) return 0;
    if (a->text_front_k != b->text_front_k || a->text_back_k != b->text_back_k) return 0;
    if (a->span_count != b->span_count) return 0;
    if (a->span_count && (a->span_align != b->span_align ||
                          memcmp(a->span, b->span, (size_t)a->span_count * sizeof *a->span)))
        return 0;
    if (a->order == ESA_ORDER_TILE3D && memcmp(a->window, b->window, sizeof a->window)) return 0;
    /* These orders walk a protected frame 0 on its own. Raster and tile do not depend on it. */
    const int32_t cut = a->order == ESA_ORDER_TILE3D || a->order == ESA_ORDER_HILBERT ||
                        a->order == ESA_ORDER_ADAPTIVE;
    return !cut || a->protect_first_frame == b->protect_first_frame;
}
