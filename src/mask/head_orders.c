/* head_orders.c - adaptive orders in masks: the caller's arrays in and out.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An adaptive order is a permutation of its own for every (batch entry, head). src/select and the
 * GPU make them; here the caller gives or reads them. Given orders are checked completely before
 * the mask changes. */
#include <string.h>
#include "base/status.h"
#include "mask/mask.h"

#define LL(x) ((long long)(x))

/* Ends of the segments of one side: [text front][frame 0 if protected][other video][text back]. */
typedef struct segments {
    int64_t end[4];
} segments;

static segments segments_of(const esa_layout *l, int32_t side, int32_t mode, int64_t N)
{
    const int32_t *grid = side ? l->grid_k : l->grid_q;
    const int64_t front = side ? l->text_front_k : l->text_front_q,
                  back = side ? l->text_back_k : l->text_back_q,
                  frame = esa_layout_protects(l, side, mode) ? (int64_t)grid[1] * grid[2] : 0;
    return (segments){ { front, front + frame, N - back, N } };
}

static int32_t segment_of(const segments *s, int64_t position)
{
    int32_t i = 0;
    while (position >= s->end[i]) i++;
    return i;
}

/* Checks the orders of one side, [heads][N]. seen: N bytes of scratch. */
static esa_status check_side(esa_ctx *ctx, const esa_mask *m, const int32_t *perm, int32_t side,
                             int64_t Hkv, uint8_t *seen)
{
    const char *const name = side ? "perm_k" : "perm_q";
    const int64_t N = side ? m->Nk : m->Nq, H = side ? Hkv : m->H;
    const segments cut = segments_of(&m->layout, side, m->mode, N);
    for (int64_t head = 0; head < m->B * H; head++) {
        const int32_t *row = perm + head * N;
        memset(seen, 0, (size_t)N);
        for (int64_t p = 0; p < N; p++) {
            if (row[p] < 0 || row[p] >= N || seen[row[p]])
                return esa_fail(ctx, ESA_ERR_ARGUMENT,
                                "%s at b=%lld h=%lld, position %lld is %d: expected every token "
                                "0..%lld once",
                                name, LL(head / H), LL(head % H), LL(p), (int)row[p], LL(N - 1));
            if (segment_of(&cut, row[p]) != segment_of(&cut, p))
                return esa_fail(ctx, ESA_ERR_ARGUMENT,
                                "%s at b=%lld h=%lld, position %lld is %d: a token may not leave "
                                "its segment (text, protected frame, other frames)",
                                name, LL(head / H), LL(head % H), LL(p), (int)row[p]);
            seen[row[p]] = 1;
        }
    }
    return ESA_OK;
}

static esa_status set_orders(esa_ctx *ctx, esa_mask *m, const int32_t *perm_q,
                             const int32_t *perm_k, int64_t Hkv)
{
    if (!m || !perm_q || !perm_k)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL",
                        !m        ? "mask"
                        : !perm_q ? "perm_q"
                                  : "perm_k");
    if (m->heap.download)
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "the mask is on a GPU: set the orders of a CPU mask, then copy it with "
                        "esa_mask_to_device");
    if (m->layout.order != ESA_ORDER_ADAPTIVE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the mask has order %d, expected a layout with ESA_ORDER_ADAPTIVE (%d)",
                        (int)m->layout.order, ESA_ORDER_ADAPTIVE);
    if (Hkv < 1 || m->H % Hkv)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "Hkv is %lld, but the mask has %lld heads: expected a divisor", LL(Hkv),
                        LL(m->H));
    void *seen;
    ESA_TRY(esa_ctx_scratch(ctx, &seen, esa_max64(m->Nq, m->Nk)));
    ESA_TRY(check_side(ctx, m, perm_q, 0, Hkv, seen));
    ESA_TRY(check_side(ctx, m, perm_k, 1, Hkv, seen));
    if (m->Hkv != Hkv && !esa_mask_add_orders(m, Hkv))
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the orders of a mask");
    memcpy(m->perm_q, perm_q, (size_t)esa_mask_order_bytes(m, 0));
    memcpy(m->perm_k, perm_k, (size_t)esa_mask_order_bytes(m, 1));
    m->ordered = 1;
    return ESA_OK;
}

esa_status esa_mask_set_orders(esa_ctx *ctx, esa_mask *mask, const int32_t *perm_q,
                               const int32_t *perm_k, int64_t Hkv)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = set_orders(ctx, mask, perm_q, perm_k, Hkv);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_mask_get_orders(const esa_mask *mask, int32_t *perm_q, int32_t *perm_k, int64_t *Hkv)
{
    if (!mask) return ESA_ERR_ARGUMENT;
    if (!mask->ordered) return ESA_ERR_STATE;
    const int32_t *const from[2] = { mask->perm_q, mask->perm_k };
    int32_t *const to[2] = { perm_q, perm_k };
    for (int32_t side = 0; side < 2; side++) {
        const int64_t bytes = esa_mask_order_bytes(mask, side);
        if (!to[side]) continue;
        if (mask->heap.download)
            ESA_TRY(mask->heap.download(mask->heap.ordinal, to[side], from[side], bytes, NULL));
        else
            memcpy(to[side], from[side], (size_t)bytes);
    }
    if (Hkv) *Hkv = mask->Hkv;
    return ESA_OK;
}
