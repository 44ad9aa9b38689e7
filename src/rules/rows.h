/* rows.h - which key blocks a row sees and which ones it must keep.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Visible: key j exists if j < kv_len. With causal attention, query i sees it if j <= i + Nk - Nq
 * (positions in the ordered sequence). A block is visible to a query block if one of its queries
 * sees one of its keys. Visible blocks are always the first ones of a row.
 *
 * Forced in fixed mode:
 *   - every block with a text token or a token of a protected frame 0, as row and as column
 *   - with causal attention every block on the diagonal, so that each query keeps itself
 *   - the sink and the last block of ada_bsa
 * Forced blocks count inside the quota of the row. Compat rf_v2 forces its own rows and columns;
 * the other compat selectors force nothing here. In a sequence of several clips every selector
 * forces the same in all modes: blocks with context, and the protected frames 0.
 *
 * Pure functions for the CPU and the GPU. */
#ifndef ESA_RULES_ROWS_H
#define ESA_RULES_ROWS_H

#include <math.h>
#include "base/args.h"
#include "rules/selectors.h"

/* Clamps a given length to 0 .. Nk. */
ESA_INLINE int64_t esa_kv_len(int64_t len, int64_t Nk) { return len < 0 ? 0 : esa_min64(len, Nk); }

/* 1 if frame 0 is protected where a layout leaves it open; given: frame 0 is the picture of a model
 * of image to video. */
static inline int32_t esa_protects_by_default(int32_t selector, int32_t given)
{
    const int32_t protects = esa_selector_of(selector)->protects;
    return protects == ESA_PROTECTS_ALWAYS || (given && protects == ESA_PROTECTS_GIVEN);
}

/* 1 if frame 0 of this side is protected and so a segment of its own. The layout is resolved. In
 * fixed mode this needs t > 1. */
ESA_INLINE int32_t esa_layout_protects(const esa_layout *layout, int32_t side, int32_t mode)
{
    const int32_t t = side ? layout->grid_k[0] : layout->grid_q[0];
    return layout->protect_first_frame == 1 && (t > 1 || (t == 1 && mode != ESA_MODE_FIXED));
}

/* 1 for compat rf_v2, which forces its own rows and columns. */
ESA_INLINE int32_t esa_rf_compat(const esa_select_params *p)
{
    return p->mode != ESA_MODE_FIXED && esa_selector_has(p->selector, ESA_ROW_GRID_COMPAT);
}

/* 1 for compat rf_v2 of release 3.0, which pools image and text separately. */
ESA_INLINE int32_t esa_pools_apart(const esa_select_params *p)
{
    return esa_rf_compat(p) && p->release == ESA_RELEASE_30;
}

ESA_INLINE int64_t esa_span_tokens(const esa_span *s)
{
    return (int64_t)s->grid[0] * s->grid[1] * s->grid[2];
}

/* First position after the context that follows clip c, whose last token stands before `end`. */
ESA_INLINE int64_t esa_span_next(const esa_layout *l, int32_t c, int64_t end, int64_t N)
{
    return c + 1 < l->span_count ? esa_ceil_div(end, l->span_align) * l->span_align : N;
}

/* 1 if every visible block is kept: FULL, or a budget of 1. ada_bsa may still drop blocks by its
 * CDF rule. */
ESA_INLINE int32_t esa_keeps_all(const esa_select_params *p)
{
    if (esa_selector_has(p->selector, ESA_ROW_KEEPS_ALL)) return 1;
    if (p->mode != ESA_MODE_FIXED || p->budget < 1.0) return 0;
    return p->cdf_threshold >= 1.0 || !esa_selector_has(p->selector, ESA_ROW_CUTS_MASS);
}

/* First token of block i of a side (0: q, 1: k). *end receives one past the last token, limited to
 * the first N tokens; end <= first means empty. */
ESA_INLINE int64_t esa_args_block(const esa_select_args *args, int32_t side, int64_t i, int64_t N,
                                  int64_t *end)
{
    const esa_layout *l = &args->params.layout;
    const int64_t B = side ? args->params.block_k : args->params.block_q;
    int64_t first = i * B, stop = N;
    if (esa_pools_apart(&args->params)) {
        const int64_t image = side ? args->Nk - l->text_front_k - l->text_back_k
                                   : args->Nq - l->text_front_q - l->text_back_q;
        const int64_t n = esa_ceil_div(image, B);
        if (i < n)
            stop = esa_min64(stop, image);
        else
            first = image + (i - n) * B;
    }
    *end = esa_min64(stop, first + B);
    return first;
}

/* Number of key blocks that exist with kv_len keys. */
ESA_INLINE int64_t esa_blocks_existing(const esa_select_args *args, int64_t kv_len)
{
    if (!esa_pools_apart(&args->params)) return esa_ceil_div(kv_len, args->params.block_k);
    int64_t n = 0, end;
    while (n < args->nk && esa_args_block(args, 1, n, kv_len, &end) < kv_len) n++;
    return n;
}

/* Number of blocks row i sees: 0 .. visible-1. */
ESA_INLINE int64_t esa_row_visible(const esa_select_args *args, int64_t kv_len, int64_t existing,
                                   int64_t i)
{
    if (!args->params.causal || esa_rf_compat(&args->params)) return existing;
    const int64_t end = esa_min64(kv_len, esa_min64(args->Nq, (i + 1) * args->params.block_q) +
                                              args->Nk - args->Nq);
    return end > 0 ? esa_ceil_div(end, args->params.block_k) : 0;
}

/* First block of row i on the causal diagonal. Blocks diagonal .. visible-1 are forced. */
ESA_INLINE int64_t esa_row_diagonal(const esa_select_args *args, int64_t kv_len, int64_t visible,
                                    int64_t i)
{
    if (!args->params.causal || args->params.mode != ESA_MODE_FIXED) return visible;
    const int64_t offset = args->Nk - args->Nq;
    const int64_t end = esa_min64(kv_len,
                                  esa_min64(args->Nq, (i + 1) * args->params.block_q) + offset);
    /* first key on the diagonal */
    const int64_t own = esa_max64(0, i * args->params.block_q + offset);
    return own < end ? own / args->params.block_k : visible;
}

/* 1 if block i of size B holds a token of first .. end-1. */
ESA_INLINE int32_t esa_block_holds(int64_t i, int64_t B, int64_t first, int64_t end)
{
    return first < end && i * B < end && (i + 1) * B > first;
}

/* 1 if block i of size B holds context, or a token of a protected frame 0, in a sequence of several
 * clips. */
ESA_INLINE int32_t esa_spans_force(const esa_layout *l, int64_t B, int64_t i, int64_t N)
{
    int64_t first = 0;
    for (int32_t c = 0; c < l->span_count; c++) {
        const int64_t end = first + esa_span_tokens(&l->span[c]),
                      next = esa_span_next(l, c, end, N),
                      frame = (int64_t)l->span[c].grid[1] * l->span[c].grid[2];
        if (l->protect_first_frame == 1 && esa_block_holds(i, B, first, first + frame)) return 1;
        if (esa_block_holds(i, B, end, next)) return 1;
        first = next;
    }
    return 0;
}

/* 1 if row i keeps every block it sees. */
ESA_INLINE int32_t esa_row_dense(const esa_select_args *args, int64_t i)
{
    const esa_layout *l = &args->params.layout;
    const int64_t B = args->params.block_q, frame = (int64_t)l->grid_q[1] * l->grid_q[2];
    if (l->span_count) return esa_spans_force(l, B, i, args->Nq);
    if (esa_rf_compat(&args->params)) {
        const int64_t text = esa_ceil_div((int64_t)l->text_front_q + l->text_back_q, B);
        return (l->protect_first_frame && i < esa_ceil_div(frame, B)) || i >= args->nq - text;
    }
    if (args->params.mode != ESA_MODE_FIXED) return 0;
    if (esa_block_holds(i, B, 0, l->text_front_q) ||
        esa_block_holds(i, B, args->Nq - l->text_back_q, args->Nq))
        return 1;
    return esa_layout_protects(l, 0, args->params.mode) &&
           esa_block_holds(i, B, l->text_front_q, l->text_front_q + frame);
}

/* 1 if every row that sees column j keeps it. */
ESA_INLINE int32_t esa_column_forced(const esa_select_args *args, int64_t kv_len, int64_t existing,
                                     int64_t j)
{
    const esa_select_params *p = &args->params;
    const esa_layout *l = &p->layout;
    const int64_t B = p->block_k;
    if (l->span_count && esa_spans_force(l, B, j, args->Nk)) return 1;
    if (esa_rf_compat(p) && !l->span_count) { /* the original ignores the shape of the key side */
        const int64_t text = esa_ceil_div((int64_t)l->text_front_q + l->text_back_q, B);
        return (l->protect_first_frame &&
                j < esa_ceil_div((int64_t)l->grid_q[1] * l->grid_q[2], B)) ||
               j >= args->nk - text;
    }
    if (p->mode != ESA_MODE_FIXED) return 0;
    if (esa_selector_has(p->selector, ESA_ROW_KEEPS_ENDS)) {
        if (p->keep_sink && j == 0) return 1;
        if (p->keep_recent && !p->causal && j == existing - 1) return 1;
    }
    if (esa_block_holds(j, B, 0, esa_min64(l->text_front_k, kv_len)) ||
        esa_block_holds(j, B, args->Nk - l->text_back_k, kv_len))
        return 1;
    if (!esa_layout_protects(l, 1, p->mode)) return 0;
    return esa_block_holds(
        j, B, l->text_front_k,
        esa_min64(kv_len, l->text_front_k + (int64_t)l->grid_k[1] * l->grid_k[2]));
}

/* Number of forced blocks of a row, at least 1 if anything is visible. columns: forced columns
 * before its diagonal. */
ESA_INLINE int32_t esa_row_least(int32_t visible, int32_t diagonal, int32_t dense, int32_t columns)
{
    const int32_t n = dense ? visible : visible - diagonal + columns;
    return n > 0 ? n : visible > 0;
}

/* Blocks that a row with v visible blocks adds to the total of its head (rf_v2, random). The
 * product is in double, as in the original rf_v2. */
ESA_INLINE int64_t esa_row_wish(const esa_select_params *p, int64_t v)
{
    if (v <= 0) return 0;
    const double n = esa_mul((double)v, p->budget);
    const int32_t up = esa_selector_has(p->selector, ESA_ROW_ROUNDS_UP);
    return esa_max64(1, (int64_t)(up ? ceil(n) : floor(n + 0.5)));
}

/* Total of ada_bsa. seen: visible blocks of all rows together. */
ESA_INLINE int64_t esa_ada_total(const esa_select_params *p, int64_t seen)
{
    return (int64_t)floor(esa_mul(p->budget, (double)seen) + 0.5);
}

/* ada_bsa scores groups of 8 tokens. Returns the number of key groups it scores; the original
 * leaves out a short last group. */
enum { ESA_ADA_GROUP = 8, ESA_ADA_CAUSAL_TILE = 1024 };
ESA_INLINE int64_t esa_ada_columns(const esa_select_args *args, int64_t kv_len)
{
    return args->params.mode == ESA_MODE_FIXED ? esa_ceil_div(kv_len, ESA_ADA_GROUP)
                                               : kv_len / ESA_ADA_GROUP;
}

/* Number of columns (key groups) that row i (a query group) looks at. */
ESA_INLINE int64_t esa_ada_limit(const esa_select_args *args, int64_t columns, int64_t i)
{
    enum { G = ESA_ADA_GROUP };
    if (!args->params.causal) return columns;
    const int64_t offset = args->Nk - args->Nq;
    int64_t end = G * i + G - 1 + offset; /* last key any query of the group sees */
    if (args->params.mode != ESA_MODE_FIXED) {
        const int64_t tile = G * i / ESA_ADA_CAUSAL_TILE * ESA_ADA_CAUSAL_TILE,
                      rows = esa_min64(ESA_ADA_CAUSAL_TILE, args->Nq - tile);
        end = tile + rows / G * G + offset - 1;
    }
    return end < 0 ? 0 : esa_min64(columns, end / G + 1);
}

/* Columns per online-softmax step on the original's device (compat-round). */
ESA_INLINE int64_t esa_ada_tile(int64_t kv_len) { return kv_len < 16384 ? 512 : 1024; }

/* The dtype compat-round rounds to. f32 in the other modes: no rounding. */
ESA_INLINE int32_t esa_rows_round(const esa_select_args *args)
{
    if (args->params.mode != ESA_MODE_COMPAT_ROUND) return ESA_DTYPE_F32;
    return args->dtype == ESA_DTYPE_F32 ? ESA_DTYPE_F16 : args->dtype;
}

/* Parts of esa_budget_spread, which spreads a total over rows: the number of bisection steps; the
 * whole blocks of a row at share f; its quota; and whether the row takes one of the blocks that
 * rounding left. A row that holds more than its share waits for the second turn. */
enum { ESA_SPREAD_STEPS = 64 };
ESA_INLINE int64_t esa_spread_whole(int32_t visible, double f) { return (int64_t)(f * visible); }
ESA_INLINE int64_t esa_spread_quota(int32_t least, int64_t whole)
{
    return esa_max64(least, whole);
}
ESA_INLINE int32_t esa_spread_takes(int32_t quota, int32_t visible, int32_t least, int64_t whole,
                                    int32_t turn)
{
    return quota < visible && !(turn == 0 && least > whole);
}

#endif
