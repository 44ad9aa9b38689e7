/* convert.c - converts masks to and from the caller's arrays: lists, bits, levels, and the
 * full_block_cnt / full_block_idx of FA4.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Input is read once and checked while it is copied. The first error ends the call with a message
 * that names the row, the value and what was expected; the unfinished mask is freed. */
#include <stdio.h>
#include <string.h>
#include "base/status.h"
#include "mask/mask.h"
#include "rules/levels.h"

/* In tokens. Far above any kernel's block, and low enough that no product overflows. */
#define MAX_BLOCK_SIZE (1 << 20)

/* 1 if the layout was never filled, which counts as no layout. */
static int32_t layout_is_blank(const esa_layout *layout)
{
    const unsigned char *p = (const unsigned char *)layout;
    for (size_t i = 0; i < sizeof *layout; i++)
        if (p[i]) return 0;
    return 1;
}

/* Checks info and makes an empty mask of its geometry. */
static esa_status begin(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info)
{
    if (!info) return esa_fail(ctx, ESA_ERR_ARGUMENT, "info is NULL, expected a mask description");
    if (info->struct_size != sizeof *info)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_mask_info has struct_size %u, this library expects %u",
                        (unsigned)info->struct_size, (unsigned)sizeof *info);
    if (info->B < 1 || info->H < 1 || info->Nq < 1 || info->Nk < 1)
        return esa_fail(
            ctx, ESA_ERR_SHAPE, "mask of B=%lld H=%lld Nq=%lld Nk=%lld: each must be at least 1",
            (long long)info->B, (long long)info->H, (long long)info->Nq, (long long)info->Nk);
    if (info->block_q < 1 || info->block_k < 1 || info->block_q > MAX_BLOCK_SIZE ||
        info->block_k > MAX_BLOCK_SIZE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "mask of %dx%d blocks: each side must be 1..%d tokens", (int)info->block_q,
                        (int)info->block_k, MAX_BLOCK_SIZE);
    if (info->Nq > INT32_MAX || info->Nk > INT32_MAX)
        return esa_fail(ctx, ESA_ERR_SHAPE, "mask of Nq=%lld Nk=%lld: at most %d tokens per side",
                        (long long)info->Nq, (long long)info->Nk, INT32_MAX);
    const int64_t nq = esa_ceil_div(info->Nq, info->block_q),
                  nk = esa_ceil_div(info->Nk, info->block_k);
    if (nq > ESA_MAX_BLOCKS || nk > ESA_MAX_BLOCKS)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "mask of %lld x %lld blocks: at most %d per side; use larger blocks",
                        (long long)nq, (long long)nk, ESA_MAX_BLOCKS);
    esa_layout layout = info->layout, resolved;
    if (layout_is_blank(&layout)) layout = esa_layout_default();
    if (layout.span_count)
        ESA_TRY(esa_span_align(ctx, &layout.span_align, info->block_q, info->block_k));
    ESA_TRY(esa_layout_resolve(ctx, &resolved, &layout, info->Nq, info->Nk, -1, ESA_MODE_FIXED, 0));
    *mask = esa_mask_new(&ctx->mem, info->B, info->H, info->Nq, info->Nk, nq, nk, info->block_q,
                         info->block_k);
    if (!*mask)
        return esa_fail(ctx, ESA_ERR_MEMORY,
                        "out of memory for a mask of %lld x %lld x %lld x %lld blocks",
                        (long long)info->B, (long long)info->H, (long long)nq, (long long)nk);
    (*mask)->layout = resolved;
    return ESA_OK;
}

/* Name of a row for messages: "b=0 h=1 i=2". */
static const char *row_name(char buf[80], const esa_mask *m, int64_t row)
{
    snprintf(buf, 80, "b=%lld h=%lld i=%lld", (long long)(row / m->nq / m->H),
             (long long)(row / m->nq % m->H), (long long)(row % m->nq));
    return buf;
}

/* Copies count[rows] and index[rows][cap]. Messages use the names of the caller's arrays. */
static esa_status copy_lists(esa_ctx *ctx, esa_mask *m, const int32_t *count, const int32_t *index,
                             int64_t cap, const char *count_name, const char *index_name)
{
    const int64_t rows = m->B * m->H * m->nq, most = esa_min64(cap, m->nk);
    char buf[80];
    for (int64_t r = 0; r < rows; r++) {
        if (count[r] < 0 || count[r] > most)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "%s at %s is %d, expected 0..%lld (nk %lld, room for %lld)", count_name,
                            row_name(buf, m, r), (int)count[r], (long long)most, (long long)m->nk,
                            (long long)cap);
        const int32_t *src = index + r * cap;  /* [cap] */
        uint16_t *dst = m->index + r * m->cap; /* [nk] */
        int64_t last = -1;
        for (int32_t c = 0; c < count[r]; c++) {
            if (src[c] < 0 || src[c] >= m->nk)
                return esa_fail(
                    ctx, ESA_ERR_ARGUMENT, "%s at %s, entry %d is %d, expected a key block 0..%lld",
                    index_name, row_name(buf, m, r), (int)c, (int)src[c], (long long)(m->nk - 1));
            if (src[c] <= last)
                return esa_fail(ctx, ESA_ERR_ARGUMENT,
                                "%s at %s, entry %d is %d after %lld: entries must ascend",
                                index_name, row_name(buf, m, r), (int)c, (int)src[c],
                                (long long)last);
            last = src[c];
            dst[c] = (uint16_t)src[c];
        }
        m->count[r] = count[r];
    }
    m->filled = 1;
    return ESA_OK;
}

static esa_status from_lists(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                             const int32_t *count, const int32_t *index, int64_t cap,
                             const char *count_name, const char *index_name)
{
    if (!mask || !count || !index)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL",
                        !mask    ? "mask"
                        : !count ? count_name
                                 : index_name);
    esa_mask *m = NULL;
    ESA_TRY(begin(ctx, &m, info));
    if (cap < 0) cap = m->nk; /* fa4: the pitch is nk */
    const esa_status status = copy_lists(ctx, m, count, index, cap, count_name, index_name);
    if (status)
        esa_mask_free(m);
    else
        *mask = m;
    return status;
}

static esa_status check_bits(esa_ctx *ctx, const esa_mask *m, const uint8_t *bits)
{
    const int64_t rows = m->B * m->H * m->nq, pitch = esa_ceil_div(m->nk, 8);
    const uint8_t beyond = m->nk % 8 ? (uint8_t)(0xff << (m->nk % 8)) : 0;
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t byte = bits[r * pitch + pitch - 1];
        char buf[80];
        if (byte & beyond)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "bits at %s: last byte is 0x%02x, expected no bit at or above %lld",
                            row_name(buf, m, r), (unsigned)byte, (long long)m->nk);
    }
    return ESA_OK;
}

static esa_status from_bits(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                            const uint8_t *bits)
{
    if (!mask || !bits)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL", !mask ? "mask" : "bits");
    esa_mask *m = NULL;
    ESA_TRY(begin(ctx, &m, info));
    const esa_status status = check_bits(ctx, m, bits);
    if (status) {
        esa_mask_free(m);
        return status;
    }
    esa_mask_set_bits(m, bits, NULL);
    *mask = m;
    return ESA_OK;
}

/* Fills both lists of every row from level[rows][nk]. */
static esa_status copy_levels(esa_ctx *ctx, esa_mask *m, const uint8_t *level)
{
    const int64_t rows = m->B * m->H * m->nq;
    const uint8_t most = ESA_LEVEL_MEAN;
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *src = level + r * m->nk;
        char buf[80];
        int32_t exact = 0, fine = 0;
        for (int64_t j = 0; j < m->nk; j++) {
            if (src[j] > most || (src[j] == ESA_LEVEL_FINE && !m->fine))
                return esa_fail(ctx, ESA_ERR_ARGUMENT, "level at %s, block %lld is %d, expected %s",
                                row_name(buf, m, r), (long long)j, (int)src[j],
                                m->fine ? "0 (exact), 1 (fine) or 2 (neither)"
                                        : "0 (exact) or 2 (neither), because info.fine is 0");
            if (src[j] == ESA_LEVEL_EXACT) m->index[r * m->cap + exact++] = (uint16_t)j;
            if (src[j] == ESA_LEVEL_FINE) m->fine_index[r * m->cap + fine++] = (uint16_t)j;
        }
        m->count[r] = exact;
        if (m->fine) m->fine_count[r] = fine;
    }
    m->filled = 1;
    return ESA_OK;
}

static esa_status fill_levels(esa_ctx *ctx, esa_mask *m, int32_t fine, const uint8_t *level)
{
    if (fine && fine != 2 && fine != 4 && fine != 8 && fine != 16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "info.fine is %d, expected 2, 4, 8 or 16 means per block, or 0 for no "
                        "fine level",
                        (int)fine);
    if (fine && m->block_k % fine)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "info.fine is %d and block_k is %d: fine must divide the block", (int)fine,
                        (int)m->block_k);
    if (fine && !esa_mask_add_fine(m, fine))
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the fine level of a mask");
    return copy_levels(ctx, m, level);
}

static esa_status from_levels(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                              const uint8_t *level)
{
    if (!mask || !level)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL", !mask ? "mask" : "level");
    esa_mask *m = NULL;
    ESA_TRY(begin(ctx, &m, info));
    const esa_status status = fill_levels(ctx, m, info->fine, level);
    if (status)
        esa_mask_free(m);
    else
        *mask = m;
    return status;
}

esa_status esa_mask_from_lists(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                               const int32_t *count, const int32_t *index, int64_t cap)
{
    if (mask) *mask = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = cap < 0
                                  ? esa_fail(ctx, ESA_ERR_ARGUMENT,
                                             "cap is %lld, expected the pitch of index, 0 or more",
                                             (long long)cap)
                                  : from_lists(ctx, mask, info, count, index, cap, "count",
                                               "index");
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_mask_from_fa4(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                             const int32_t *full_block_cnt, const int32_t *full_block_idx)
{
    if (mask) *mask = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = from_lists(ctx, mask, info, full_block_cnt, full_block_idx, -1,
                                         "full_block_cnt", "full_block_idx");
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_mask_from_bits(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                              const uint8_t *bits)
{
    if (mask) *mask = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = from_bits(ctx, mask, info, bits);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_mask_from_levels(esa_ctx *ctx, esa_mask **mask, const esa_mask_info *info,
                                const uint8_t *level)
{
    if (mask) *mask = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = from_levels(ctx, mask, info, level);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status write_lists(const esa_mask *mask, int32_t *count, int32_t *index, int64_t cap)
{
    const int64_t rows = mask->B * mask->H * mask->nq;
    for (int64_t r = 0; r < rows; r++)
        if (mask->count[r] > cap) return ESA_ERR_ARGUMENT;
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *src = mask->index + r * mask->cap;
        int32_t *dst = index + r * cap;
        count[r] = mask->count[r];
        for (int64_t c = 0; c < cap; c++) dst[c] = c < count[r] ? src[c] : 0;
    }
    return ESA_OK;
}

esa_status esa_mask_to_lists(const esa_mask *mask, int32_t *count, int32_t *index, int64_t cap)
{
    if (!mask || !count || !index || cap < 0) return ESA_ERR_ARGUMENT;
    if (!mask->filled) return ESA_ERR_STATE;
    const esa_mask *host;
    ESA_TRY(esa_mask_on_host(&host, mask, &mask->mem));
    const esa_status status = write_lists(host, count, index, cap);
    if (host != mask) esa_mask_free((esa_mask *)host);
    return status;
}

esa_status esa_mask_to_fa4(const esa_mask *mask, int32_t *full_block_cnt, int32_t *full_block_idx)
{
    return mask ? esa_mask_to_lists(mask, full_block_cnt, full_block_idx, mask->nk)
                : ESA_ERR_ARGUMENT;
}

esa_status esa_mask_to_bits(const esa_mask *mask, uint8_t *bits)
{
    if (!mask || !bits) return ESA_ERR_ARGUMENT;
    if (!mask->filled) return ESA_ERR_STATE;
    const esa_mask *host;
    ESA_TRY(esa_mask_on_host(&host, mask, &mask->mem));
    esa_mask_write_bits(bits, host, host->count, host->index);
    if (host != mask) esa_mask_free((esa_mask *)host);
    return ESA_OK;
}

esa_status esa_mask_to_levels(const esa_mask *mask, uint8_t *level)
{
    if (!mask || !level) return ESA_ERR_ARGUMENT;
    if (!mask->filled) return ESA_ERR_STATE;
    const esa_mask *host;
    ESA_TRY(esa_mask_on_host(&host, mask, &mask->mem));
    const int64_t rows = mask->B * mask->H * mask->nq;
    memset(level, ESA_LEVEL_MEAN, (size_t)(rows * mask->nk));
    for (int64_t r = 0; r < rows; r++) {
        uint8_t *dst = level + r * mask->nk;
        for (int32_t c = 0; c < host->count[r]; c++)
            dst[host->index[r * host->cap + c]] = ESA_LEVEL_EXACT;
        for (int32_t c = 0; host->fine && c < host->fine_count[r]; c++)
            dst[host->fine_index[r * host->cap + c]] = ESA_LEVEL_FINE;
    }
    if (host != mask) esa_mask_free((esa_mask *)host);
    return ESA_OK;
}
