/* check.c - validates arguments on their own: views, shapes, settings, masks and lengths. Whether
 * they fit a plan is checked in plan.c, and what a single call needs in that call.
 * SPDX-License-Identifier: Apache-2.0 */
#include "attn/attn.h"
#include "base/half.h"
#include "base/number.h"
#include "rules/levels.h"

#include <math.h>
#include <string.h>

#define LL(x)      ((long long)(x))
#define MOST_PAIRS (INT64_C(1) << 56) /* of a query and a key, over all heads */

static esa_status check_struct(esa_ctx *ctx, uint32_t given, size_t expected, const char *name)
{
    if (given == expected) return ESA_OK;
    return esa_fail(
        ctx, ESA_ERR_VERSION,
        "%s has struct_size %u, this library expects %u: fill it with its default function and "
        "build against the headers of esa %s",
        name, given, (unsigned)expected, esa_version());
}

static esa_status check_reserved(esa_ctx *ctx, const int64_t *reserved, int32_t n, const char *name)
{
    for (int32_t i = 0; i < n; i++)
        if (reserved[i])
            return esa_fail(
                ctx, ESA_ERR_ARGUMENT,
                "%s has non-zero reserved fields: fill it with its default function first", name);
    return ESA_OK;
}

/* 1 if every element of the view has its own address: each stride, from the smallest to the
 * largest, steps over everything that the smaller ones reach. */
static int32_t view_is_injective(const esa_tensor *t)
{
    int64_t dim[3], stride[3], inner = t->dim[3];
    int32_t n = 0;
    for (int32_t i = 0; i < 3; i++)
        if (t->dim[i] > 1) {
            dim[n] = t->dim[i];
            stride[n++] = t->stride[i] < 0 ? -t->stride[i] : t->stride[i];
        }
    for (int32_t i = 0; i < n; i++) {
        int32_t least = i;
        for (int32_t j = i + 1; j < n; j++)
            if (stride[j] < stride[least]) least = j;
        const int64_t s = stride[least], d = dim[least];
        stride[least] = stride[i];
        dim[least] = dim[i];
        if (s < inner) return 0;
        inner = s * (d - 1) + inner;
    }
    return 1;
}

esa_status esa_check_view(esa_ctx *ctx, const esa_tensor *t, const char *name)
{
    if (!t) return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL, expected a tensor view", name);
    ctx->views_checked++;
    ESA_TRY(check_struct(ctx, t->struct_size, sizeof *t, name));
    if (t->dtype < ESA_DTYPE_F32 || t->dtype > ESA_DTYPE_BF16)
        return esa_fail(ctx, ESA_ERR_DTYPE, "%s has dtype %d, expected ESA_DTYPE_F32, F16 or BF16",
                        name, (int)t->dtype);
    const esa_backend *backend = esa_backend_of(t->device);
    if (!backend)
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "%s has device %d, expected ESA_DEVICE_CPU or ESA_DEVICE_CUDA", name,
                        (int)t->device);
    if (!t->data)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s has no data (its pointer is NULL)", name);
    ESA_TRY(backend->reach(ctx, t, name));
    for (int32_t i = 0; i < 4; i++) {
        if (t->dim[i] < 1)
            return esa_fail(
                ctx, ESA_ERR_SHAPE,
                "%s has shape [%lld,%lld,%lld,%lld], every dimension must be at least 1", name,
                LL(t->dim[0]), LL(t->dim[1]), LL(t->dim[2]), LL(t->dim[3]));
        const int64_t stride = t->stride[i] == INT64_MIN ? INT64_MAX
                               : t->stride[i] < 0        ? -t->stride[i]
                                                         : t->stride[i];
        if (esa_size_mul(t->dim[i], esa_max64(stride, 1)) < 0 ||
            esa_size_mul(t->dim[i], esa_max64(stride, 1)) > (INT64_C(1) << 60))
            return esa_fail(
                ctx, ESA_ERR_SHAPE,
                "%s: dimension %d of size %lld with stride %lld exceeds the address space", name,
                (int)i, LL(t->dim[i]), LL(t->stride[i]));
    }
    if (t->stride[3] != 1)
        return esa_fail(ctx, ESA_ERR_SHAPE, "%s has a head-dim stride of %lld, expected 1", name,
                        LL(t->stride[3]));
    if (t->dim[3] > ESA_MAX_HEAD_DIM)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "%s has head dim %lld, the largest supported is %d", name, LL(t->dim[3]),
                        ESA_MAX_HEAD_DIM);
    if (t->dim[2] > INT32_MAX || t->dim[0] > INT32_MAX || t->dim[1] > INT32_MAX ||
        esa_size_mul(t->dim[0], t->dim[1]) > INT32_MAX)
        return esa_fail(
            ctx, ESA_ERR_SHAPE,
            "%s has shape [%lld,%lld,%lld,%lld]: tokens and batch x heads must stay below 2^31",
            name, LL(t->dim[0]), LL(t->dim[1]), LL(t->dim[2]), LL(t->dim[3]));
    return ESA_OK;
}

static esa_status check_same(esa_ctx *ctx, const esa_tensor *a, const char *an, const esa_tensor *b,
                             const char *bn, const int32_t *dims, int32_t n)
{
    static const char *const word[] = { "batch", "heads", "tokens", "head dim" };
    if (a->device != b->device)
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "%s and %s are on different devices, one on the CPU and one on a GPU", an,
                        bn);
    if (a->dtype != b->dtype)
        return esa_fail(ctx, ESA_ERR_DTYPE, "%s and %s have different dtypes (%d and %d)", an, bn,
                        (int)a->dtype, (int)b->dtype);
    for (int32_t i = 0; i < n; i++)
        if (a->dim[dims[i]] != b->dim[dims[i]])
            return esa_fail(ctx, ESA_ERR_SHAPE, "%s and %s differ in %s: %lld and %lld", an, bn,
                            word[dims[i]], LL(a->dim[dims[i]]), LL(b->dim[dims[i]]));
    return ESA_OK;
}

esa_status esa_check_qk(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k)
{
    static const int32_t batch_and_dim[] = { 0, 3 };
    ESA_TRY(esa_check_view(ctx, q, "q"));
    ESA_TRY(esa_check_view(ctx, k, "k"));
    ESA_TRY(check_same(ctx, q, "q", k, "k", batch_and_dim, 2));
    if (q->dim[1] % k->dim[1])
        return esa_fail(
            ctx, ESA_ERR_SHAPE,
            "q has %lld heads and k has %lld: query heads must be a multiple of key heads",
            LL(q->dim[1]), LL(k->dim[1]));
    /* The sizes of all scratch memory are products of these numbers and of some that are at most
     * 256: below this bound none of them leaves 64 bits. */
    const int64_t pairs = esa_size_mul(esa_max64(q->dim[2], 256), esa_max64(k->dim[2], 256)),
                  all = esa_size_mul(q->dim[0] * q->dim[1], pairs);
    if (all < 0 || all > MOST_PAIRS)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "batch %lld x %lld heads x %lld queries x %lld keys are too many: their "
                        "product must be at most 2^56",
                        LL(q->dim[0]), LL(q->dim[1]), LL(q->dim[2]), LL(k->dim[2]));
    return ESA_OK;
}

/* A view in bytes: its lowest address, the length of a row (D), and the other dimensions that have
 * more than one element, with positive strides. */
typedef struct byte_view {
    const char *low;
    int64_t run, dim[3], stride[3];
    int32_t dims;
} byte_view;

static byte_view bytes_of(const esa_tensor *t)
{
    const int64_t size = esa_dtype_size(t->dtype);
    byte_view v = { t->data, t->dim[3] * size, { 0 }, { 0 }, 0 };
    for (int32_t i = 0; i < 3; i++) {
        if (t->dim[i] < 2) continue;
        const int64_t stride = t->stride[i] * size;
        if (stride < 0) v.low += (t->dim[i] - 1) * stride;
        v.dim[v.dims] = t->dim[i];
        v.stride[v.dims++] = stride < 0 ? -stride : stride;
    }
    return v;
}

/* Bytes from the lowest address to one past the highest, counting only strides below `below`. */
static int64_t extent(const byte_view *v, int64_t below)
{
    int64_t bytes = v->run;
    for (int32_t i = 0; i < v->dims; i++)
        if (v->stride[i] < below) bytes += (v->dim[i] - 1) * v->stride[i];
    return bytes;
}

/* 1 if the addresses of the two views, taken modulo a period, do not meet. That is so when q, k, v
 * and o are interleaved in one buffer. */
static int32_t apart_modulo(const byte_view *a, const byte_view *b, int64_t period)
{
    const byte_view *const view[2] = { a, b };
    for (int32_t n = 0; n < 2; n++)
        for (int32_t i = 0; i < view[n]->dims; i++)
            if (view[n]->stride[i] >= period && view[n]->stride[i] % period) return 0;
    const int64_t phase = (((b->low - a->low) % period) + period) % period;
    return phase >= extent(a, period) && period - phase >= extent(b, period);
}

/* 0 only where the two views are proven to share no byte. */
static int32_t views_touch(const esa_tensor *ta, const esa_tensor *tb)
{
    const byte_view a = bytes_of(ta), b = bytes_of(tb);
    if (a.low + extent(&a, INT64_MAX) <= b.low || b.low + extent(&b, INT64_MAX) <= a.low) return 0;
    for (int32_t i = 0; i < a.dims; i++)
        if (a.stride[i] > 0 && apart_modulo(&a, &b, a.stride[i])) return 0;
    for (int32_t i = 0; i < b.dims; i++)
        if (b.stride[i] > 0 && apart_modulo(&a, &b, b.stride[i])) return 0;
    return 1;
}

esa_status esa_check_qkvo(esa_ctx *ctx, const esa_qkvo *t)
{
    static const int32_t all[] = { 0, 1, 2, 3 };
    ESA_TRY(esa_check_qk(ctx, t->q, t->k));
    ESA_TRY(esa_check_view(ctx, t->v, "v"));
    ESA_TRY(esa_check_view(ctx, t->o, "o"));
    ESA_TRY(check_same(ctx, t->k, "k", t->v, "v", all, 4));
    ESA_TRY(check_same(ctx, t->q, "q", t->o, "o", all, 4));
    if (!view_is_injective(t->o))
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "o has strides that make two of its elements share an address");
    if (views_touch(t->o, t->q) || views_touch(t->o, t->k) || views_touch(t->o, t->v))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "o overlaps q, k or v: the output needs memory of its own");
    if (!t->lse) return ESA_OK;
    ESA_TRY(esa_check_view(ctx, t->lse, "lse"));
    if (t->lse->device != t->q->device)
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "q and lse are on different devices, one on the CPU and one on a GPU");
    if (t->lse->dtype != ESA_DTYPE_F32)
        return esa_fail(ctx, ESA_ERR_DTYPE, "lse has dtype %d, expected ESA_DTYPE_F32",
                        (int)t->lse->dtype);
    if ((uintptr_t)t->lse->data % 4)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "lse must point to f32 memory aligned to 4 bytes");
    if (t->lse->dim[0] != t->q->dim[0] || t->lse->dim[1] != t->q->dim[1] ||
        t->lse->dim[2] != t->q->dim[2] || t->lse->dim[3] != 1)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "lse has shape [%lld,%lld,%lld,%lld], expected [%lld,%lld,%lld,1]",
                        LL(t->lse->dim[0]), LL(t->lse->dim[1]), LL(t->lse->dim[2]),
                        LL(t->lse->dim[3]), LL(t->q->dim[0]), LL(t->q->dim[1]), LL(t->q->dim[2]));
    if (!view_is_injective(t->lse))
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "lse has strides that make two of its elements share an address");
    if (views_touch(t->lse, t->o) || views_touch(t->lse, t->q) || views_touch(t->lse, t->k) ||
        views_touch(t->lse, t->v))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "lse overlaps q, k, v or o: it needs memory of its own");
    return ESA_OK;
}

esa_status esa_check_shapes(esa_ctx *ctx, const esa_shapes *s)
{
    if (!s) return esa_fail(ctx, ESA_ERR_ARGUMENT, "shapes is NULL");
    ESA_TRY(check_struct(ctx, s->struct_size, sizeof *s, "esa_shapes"));
    ESA_TRY(check_reserved(ctx, s->reserved, 4, "esa_shapes"));
    const int64_t dim[6] = { s->B, s->Hq, s->Hkv, s->Nq, s->Nk, s->D };
    for (int32_t i = 0; i < 6; i++)
        if (dim[i] < 1 || dim[i] > INT32_MAX)
            return esa_fail(ctx, ESA_ERR_SHAPE,
                            "shapes are B %lld, Hq %lld, Hkv %lld, Nq %lld, Nk %lld, D %lld: each "
                            "must be 1 .. 2^31 - 1",
                            LL(dim[0]), LL(dim[1]), LL(dim[2]), LL(dim[3]), LL(dim[4]), LL(dim[5]));
    if (esa_size_mul(esa_size_mul(s->B, esa_max64(s->Hq, s->Hkv)),
                     esa_size_mul(esa_max64(s->Nq, s->Nk), s->D)) < 0)
        return esa_fail(ctx, ESA_ERR_SHAPE, "tensors of these shapes exceed the address space");
    /* Views of these shapes follow the same rules; their data is never read. */
    int64_t nothing = 0;
    esa_tensor q = esa_tensor_bnsd(&nothing, s->dtype, s->B, s->Hq, s->Nq, s->D),
               k = esa_tensor_bnsd(&nothing, s->dtype, s->B, s->Hkv, s->Nk, s->D);
    q.device = k.device = s->device;
    q.device_index = k.device_index = s->device_index;
    return esa_check_qk(ctx, &q, &k);
}

esa_status esa_check_against_shapes(esa_ctx *ctx, const esa_tensor *t, const esa_shapes *s,
                                    const char *name, int64_t H, int64_t N)
{
    ESA_TRY(esa_check_view(ctx, t, name));
    if (t->device != s->device)
        return esa_fail(ctx, ESA_ERR_DEVICE, "%s is on the %s, but the plan was made for the %s",
                        name, esa_backend_of(t->device)->name, esa_backend_of(s->device)->name);
    if (t->dtype != s->dtype)
        return esa_fail(ctx, ESA_ERR_DTYPE, "%s has dtype %d, but the plan was made for %d", name,
                        (int)t->dtype, (int)s->dtype);
    if (t->dim[0] != s->B || t->dim[1] != H || t->dim[2] != N || t->dim[3] != s->D)
        return esa_fail(
            ctx, ESA_ERR_SHAPE,
            "%s has shape [%lld,%lld,%lld,%lld], but the plan was made for [%lld,%lld,%lld,%lld]",
            name, LL(t->dim[0]), LL(t->dim[1]), LL(t->dim[2]), LL(t->dim[3]), LL(s->B), LL(H),
            LL(N), LL(s->D));
    return ESA_OK;
}

esa_status esa_check_kv_len(esa_ctx *ctx, const int32_t *kv_len, int32_t device, int64_t B,
                            int64_t Nk, const esa_layout *layout, int32_t mode)
{
    if (!kv_len || !esa_backend_of(device)->host_memory) return ESA_OK;
    /* A length counts tokens of the sequence as given, so the order must not move tokens across
     * that point. */
    int64_t least = 0;
    if (layout && esa_layout_moves(layout, 1, mode))
        least = mode != ESA_MODE_FIXED && layout->order == ESA_ORDER_TILE && layout->text_front_k
                    ? Nk
                    : Nk - layout->text_back_k;
    for (int64_t b = 0; b < B; b++) {
        if (kv_len[b] < 0 || kv_len[b] > Nk)
            return esa_fail(ctx, ESA_ERR_ARGUMENT, "kv_len[%lld] is %d, expected 0 .. %lld", LL(b),
                            (int)kv_len[b], LL(Nk));
        if (kv_len[b] < least)
            return esa_fail(
                ctx, ESA_ERR_UNSUPPORTED,
                "kv_len[%lld] is %d and cuts into tokens that the order moves (only text at the "
                "end, from %lld on, may be cut): use raster order, or tensors that are already in "
                "their order (order_applied)",
                LL(b), (int)kv_len[b], LL(least));
    }
    return ESA_OK;
}

esa_status esa_check_v(esa_ctx *ctx, const esa_tensor *k, const esa_tensor *v)
{
    static const int32_t all[] = { 0, 1, 2, 3 };
    if (!v)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "v is NULL, but the error selector reads v: use esa_select_qkv or "
                        "esa_plan_select_qkv");
    ESA_TRY(esa_check_view(ctx, v, "v"));
    return check_same(ctx, k, "k", v, "v", all, 4);
}

static esa_status check_block(esa_ctx *ctx, int32_t block, const char *name)
{
    if (block >= 16 && block <= 256 && block % 16 == 0) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_UNSUPPORTED, "%s is %d, expected a multiple of 16 from 16 to 256",
                    name, (int)block);
}

static esa_status check_blocks_fit(esa_ctx *ctx, int64_t N, int32_t block, const char *name)
{
    if (esa_ceil_div(N, block) <= ESA_MAX_BLOCKS) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                    "%lld tokens in blocks of %d (%s) are more than %d blocks: use larger blocks",
                    LL(N), (int)block, name, ESA_MAX_BLOCKS);
}

static esa_status check_flag(esa_ctx *ctx, int32_t flag, const char *name)
{
    return flag == 0 || flag == 1
               ? ESA_OK
               : esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is %d, expected 0 or 1", name, (int)flag);
}

static esa_status check_group(esa_ctx *ctx, int32_t group, const char *name)
{
    if (group >= 0 && group <= 16 && (group & (group - 1)) == 0) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_ARGUMENT,
                    "%s is %d, expected 1, 2, 4, 8 or 16 tokens, or 0 for the default", name,
                    (int)group);
}

/* The params of a selector that weighs tails. Fills in its default group sizes. Every group
 * divides its block, because blocks are multiples of 16. */
static esa_status check_error_params(esa_ctx *ctx, esa_select_params *p)
{
    if (p->tail != ESA_TAIL_NONE && p->tail != ESA_TAIL_POOLED && p->tail != ESA_TAIL_LEVELS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "tail of the error selector is %d, expected ESA_TAIL_NONE (%d), POOLED "
                        "(%d) or LEVELS (%d)",
                        (int)p->tail, ESA_TAIL_NONE, ESA_TAIL_POOLED, ESA_TAIL_LEVELS);
    ESA_TRY(check_group(ctx, p->group_q, "group_q"));
    ESA_TRY(check_group(ctx, p->group_k, "group_k"));
    const int32_t levels = p->tail == ESA_TAIL_LEVELS, given = p->group_k;
    p->fine = esa_error_fine(p);
    if (levels && p->fine != 2 && p->fine != 4 && p->fine != 8 && p->fine != 16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "fine is %d, expected 2, 4, 8 or 16 means per block, or 0 for the default",
                        (int)p->fine);
    const int32_t tokens = levels ? p->block_k / p->fine : p->block_k;
    if (tokens < 2)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "fine is %d and block_k is %d: a fine mean must stand for 2 tokens or more",
                        (int)p->fine, (int)p->block_k);
    if (levels && given && (tokens <= given || tokens % given != 0))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "group_k is %d, but a fine mean stands for %d tokens (block_k %d / fine "
                        "%d): a group must be smaller and divide it",
                        (int)given, (int)tokens, (int)p->block_k, (int)p->fine);
    p->group_q = esa_error_queries(p);
    p->group_k = esa_error_keys(p);
    return ESA_OK;
}

static esa_status unknown_selector(esa_ctx *ctx, int32_t selector)
{
#define NAME(ID, ...) #ID,
    static const char *const names[] = { ESA_SELECTORS(NAME) };
#undef NAME
    enum { LAST = ESA_SELECTOR_COUNT - 1 };
    char list[256];
    for (int32_t i = 0, n = 0; i < LAST; i++)
        n += esa_text_format(list + n, sizeof list - (size_t)n, "%s%s", i ? ", " : "", names[i]);
    return esa_fail(ctx, ESA_ERR_ARGUMENT, "selector is %d, expected ESA_SELECT_%s or %s",
                    (int)selector, list, names[LAST]);
}

esa_status esa_check_select(esa_ctx *ctx, esa_select_params *out, const esa_select_params *in,
                            int64_t Nq, int64_t Nk, int64_t D)
{
    /* Check the size before reading more: an older caller's struct may be shorter. */
    if (in) ESA_TRY(check_struct(ctx, in->struct_size, sizeof *in, "esa_select_params"));
    *out = in ? *in : esa_select_params_default(ESA_SELECT_ENTROPY);
    ESA_TRY(check_reserved(ctx, out->reserved, 1, "esa_select_params"));
    if (out->release != 0 && out->release != ESA_RELEASE_30 && out->release != ESA_RELEASE_31)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "release is %d, expected 0, %d or %d",
                        (int)out->release, ESA_RELEASE_30, ESA_RELEASE_31);
    if (!esa_selector_of(out->selector)->name) return unknown_selector(ctx, out->selector);
    const esa_selector *row = esa_selector_of(out->selector);
    if (out->mode < ESA_MODE_FIXED || out->mode > ESA_MODE_COMPAT_ROUND)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "mode is %d, expected ESA_MODE_FIXED, COMPAT or COMPAT_ROUND",
                        (int)out->mode);
    esa_default_blocks(out, Nk);
    ESA_TRY(check_block(ctx, out->block_q, "block_q"));
    ESA_TRY(check_block(ctx, out->block_k, "block_k"));
    ESA_TRY(check_blocks_fit(ctx, Nq, out->block_q, "block_q"));
    ESA_TRY(check_blocks_fit(ctx, Nk, out->block_k, "block_k"));
    if (out->samples < 1 || out->samples > 256)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "samples is %d, expected 1 .. 256",
                        (int)out->samples);
    if (!(out->budget >= 0.0 && out->budget <= 1.0))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "budget is %g, expected 0 .. 1", out->budget);
    if (isnan(out->cdf_threshold)) return esa_fail(ctx, ESA_ERR_ARGUMENT, "cdf_threshold is NaN");
    if (!isfinite(out->scale))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "scale is %g, expected a finite number (0 means D^-0.5)", out->scale);
    if (out->scale == 0.0) out->scale = 1.0 / sqrt((double)D);
    ESA_TRY(check_flag(ctx, out->keep_sink, "keep_sink"));
    ESA_TRY(check_flag(ctx, out->keep_recent, "keep_recent"));
    ESA_TRY(check_flag(ctx, out->causal, "causal"));
    if (esa_rf_compat(out)) {
        const int32_t *g = out->layout.grid_q, clips = out->layout.span_count;
        if (Nq != Nk)
            return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                            "rf_v2 in compat mode needs as many queries as keys, got %lld and %lld",
                            LL(Nq), LL(Nk));
        if (!clips && (g[0] < 1 || g[1] < 1 || g[2] < 1))
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "rf_v2 in compat mode needs a grid t,h,w, got none");
        if (out->causal)
            return esa_fail(
                ctx, ESA_ERR_UNSUPPORTED,
                "causal is 1, but rf_v2 in compat mode is bidirectional: use fixed mode");
        if (clips && out->release == ESA_RELEASE_30)
            return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                            "release 3.0 of rf_v2 knows one video, but the layout has %d clips: "
                            "use release 3.1",
                            (int)clips);
    }
    if (out->layout.span_count)
        ESA_TRY(esa_span_align(ctx, &out->layout.span_align, out->block_q, out->block_k));
    if (row->traits & ESA_ROW_SQUARE_CAUSAL && out->mode != ESA_MODE_FIXED && out->causal &&
        Nq != Nk)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "causal %s in compat mode needs as many queries as keys, got %lld and %lld",
                        row->name, LL(Nq), LL(Nk));
    if (out->mode != ESA_MODE_FIXED && !(row->traits & ESA_TRAIT_COMPAT))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "mode is %d, but the %s selector has no compat mode: use ESA_MODE_FIXED "
                        "(%d)",
                        (int)out->mode, row->name, ESA_MODE_FIXED);
    if (out->causal && !(row->traits & ESA_TRAIT_CAUSAL))
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "causal is 1, but the %s selector is bidirectional: use another selector "
                        "for causal attention",
                        row->name);
    if (row->traits & ESA_TRAIT_WEIGHS_TAIL) ESA_TRY(check_error_params(ctx, out));
    return esa_layout_resolve(ctx, &out->layout, &out->layout, Nq, Nk, out->selector, out->mode,
                              out->causal);
}

esa_status esa_check_attention(esa_ctx *ctx, esa_attention_params *out,
                               const esa_attention_params *in, int64_t D)
{
    if (in) ESA_TRY(check_struct(ctx, in->struct_size, sizeof *in, "esa_attention_params"));
    *out = in ? *in : esa_attention_params_default();
    const int64_t reserved[4] = { out->reserved[0], out->reserved[1], out->reserved[2],
                                  out->reserved0 };
    ESA_TRY(check_reserved(ctx, reserved, 4, "esa_attention_params"));
    if (out->tail < ESA_TAIL_NONE || out->tail > ESA_TAIL_LEVELS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "tail is %d, expected ESA_TAIL_NONE, POOLED, CENTROID or LEVELS",
                        (int)out->tail);
    ESA_TRY(check_flag(ctx, out->causal, "causal"));
    if (out->precision != 0 && out->precision != 8 && out->precision != 16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "precision is %d, expected 8 or 16 bits, or 0 for the default",
                        (int)out->precision);
    if (out->precision == 0) out->precision = 16;
    if (out->exact_rows < 0 || out->exact_rows > ESA_MAX_EXACT_ROWS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "exact_rows is %d, expected 0 .. %d",
                        (int)out->exact_rows, ESA_MAX_EXACT_ROWS);
    if (out->exact_rows && out->causal)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "exact_rows is %d and causal is 1, but causal attention has no exact rows: "
                        "set one of them to 0",
                        (int)out->exact_rows);
    if (!isfinite(out->scale))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "scale is %g, expected a finite number (0 means D^-0.5)", out->scale);
    if (out->scale == 0.0) out->scale = 1.0 / sqrt((double)D);
    return ESA_OK;
}

esa_status esa_check_ordered(esa_ctx *ctx, const esa_mask *mask, const esa_shapes *s)
{
    if (mask->layout.order != ESA_ORDER_ADAPTIVE) return ESA_OK;
    if (!mask->ordered)
        return esa_fail(ctx, ESA_ERR_STATE,
                        "the mask has no adaptive order yet: run esa_plan_order or "
                        "esa_mask_set_orders on it first");
    if (mask->Hkv != s->Hkv)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "the mask's order was made for %lld key heads, but the call has %lld",
                        LL(mask->Hkv), LL(s->Hkv));
    return ESA_OK;
}

esa_status esa_check_mask(esa_ctx *ctx, const esa_mask *mask, const esa_shapes *s, int32_t causal)
{
    const int64_t B = s->B, Hq = s->Hq, Nq = s->Nq, Nk = s->Nk;
    if (!esa_backend_of(mask->device)->host_memory &&
        !esa_backend_mask_here(ctx, esa_backend_of(s->device), mask))
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "the mask is on GPU %d, but q is not: copy it with esa_mask_to_device",
                        (int)mask->heap.ordinal);
    if (!mask->filled)
        return esa_fail(ctx, ESA_ERR_STATE, "the mask is empty: run esa_plan_select on it first");
    if (!mask->runnable)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "the mask has %lld x %lld blocks, but kernels need %lld x %lld (compat "
                        "rf_v2 3.0 pools text and image separately): it can be printed, but not "
                        "run; use fixed mode or release 3.1",
                        LL(mask->nq), LL(mask->nk), LL(esa_ceil_div(Nq, mask->block_q)),
                        LL(esa_ceil_div(Nk, mask->block_k)));
    if ((mask->B != B && mask->B != 1) || mask->H != Hq || mask->Nq != Nq || mask->Nk != Nk)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "the mask was made for batch %lld, %lld heads, %lld queries, %lld keys, "
                        "but the call has %lld, %lld, %lld, %lld",
                        LL(mask->B), LL(mask->H), LL(mask->Nq), LL(mask->Nk), LL(B), LL(Hq), LL(Nq),
                        LL(Nk));
    ESA_TRY(esa_check_ordered(ctx, mask, s));
    ESA_TRY(check_block(ctx, mask->block_q, "the mask's block_q"));
    ESA_TRY(check_block(ctx, mask->block_k, "the mask's block_k"));
    if (causal && (esa_layout_moves(&mask->layout, 0, mask->mode) ||
                   esa_layout_moves(&mask->layout, 1, mask->mode)))
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "causal attention needs raster order, or tensors that are already in the "
                        "mask's order (order_applied)");
    return ESA_OK;
}
