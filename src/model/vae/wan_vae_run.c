/* wan_vae_run.c - see wan_vae_run.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/wan_vae_run.h"

#include <math.h>
#include <string.h>

static int64_t plane_bytes(const wan_vae_run *r, const wan_vae_plane *p)
{
    return r->element * (esa_wan_vae_high(r, p->level) + 2) * esa_wan_vae_pitch(r, p);
}

esa_status esa_wan_vae_lists(wan_vae_run *r, int32_t slots, int64_t more)
{
    esa_ctx *ctx = r->nn->ctx;
    r->spare_cap = (ESA_VAE_KEPT + 1) * slots + more;
    r->list_bytes = (int64_t)sizeof(wan_vae_plane) * (ESA_VAE_KEPT * slots + r->spare_cap);
    r->kept = esa_mem_zalloc(&ctx->mem, r->list_bytes);
    if (!r->kept) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
    r->spare = r->kept + ESA_VAE_KEPT * slots;
    return ESA_OK;
}

void esa_wan_vae_lists_free(wan_vae_run *r)
{
    esa_mem_free(&r->nn->ctx->mem, r->kept, r->list_bytes);
}

esa_status esa_wan_vae_take(wan_vae_run *r, void *out, int64_t bytes)
{
    static char nothing;
    const int64_t at = r->used;
    char *const place = r->dry ? &nothing : r->block + at;
    r->used += esa_ceil_div(bytes, 256) * 256;
    if (!r->dry && r->used > r->size)
        return esa_fail(r->nn->ctx, ESA_ERR_INTERNAL, "the VAE counted its memory wrong");
    memcpy(out, &place, sizeof place);
    return ESA_OK;
}

esa_status esa_wan_vae_plane_take(wan_vae_run *r, wan_vae_plane *out, int32_t level,
                                  int32_t channels)
{
    for (int64_t i = 0; i < r->spare_count; i++)
        if (r->spare[i].level == level && r->spare[i].channels == channels) {
            *out = r->spare[i];
            r->spare[i] = r->spare[--r->spare_count];
            return ESA_OK;
        }
    *out = (wan_vae_plane){ .level = level, .channels = channels };
    ESA_TRY(esa_wan_vae_take(r, &out->data, plane_bytes(r, out)));
    return r->dry ? ESA_OK : r->op->zero(r->nn, out->data, plane_bytes(r, out));
}

void esa_wan_vae_plane_give(wan_vae_run *r, wan_vae_plane *p)
{
    if (p->data) r->spare[r->spare_count++] = *p;
    *p = (wan_vae_plane){ 0 };
}

void esa_wan_vae_remember(wan_vae_run *r, int32_t slot, const wan_vae_plane *p)
{
    wan_vae_plane *kept = r->kept + ESA_VAE_KEPT * slot;
    esa_wan_vae_plane_give(r, &kept[0]);
    kept[0] = kept[1];
    kept[1] = *p;
}

esa_status esa_wan_vae_convolve(wan_vae_run *r, const esa_conv *conv, const wan_vae_target *to,
                                int32_t dtype, const void *const x[3], int64_t x_row, int32_t level)
{
    const esa_plane_conv_args args = { .y = to->y,
                                       .y_row = to->row,
                                       .x = { x[0], x[1], x[2] },
                                       .x_row = x_row,
                                       .height = esa_wan_vae_high(r, level),
                                       .width = esa_wan_vae_wide(r, level),
                                       .residual = to->residual,
                                       .residual_row = to->residual_row,
                                       .y_dtype = dtype };
    return r->dry ? ESA_OK : r->op->conv(r->nn, conv, &args);
}

esa_status esa_wan_vae_mix(wan_vae_run *r, const esa_conv *conv, const wan_vae_target *to,
                           const void *x, int32_t level)
{
    const void *const from[3] = { x };
    return esa_wan_vae_convolve(r, conv, to, r->nn->ops->dtype, from,
                                esa_wan_vae_wide(r, level) * conv->cin, level);
}

esa_status esa_wan_vae_causal(wan_vae_run *r, const esa_conv *conv, int32_t slot,
                              const wan_vae_plane *p, const wan_vae_target *to, int32_t dtype)
{
    const wan_vae_plane *kept = r->kept + ESA_VAE_KEPT * slot;
    const void *const x[3] = { esa_wan_vae_inside(r, &kept[0]), esa_wan_vae_inside(r, &kept[1]),
                               esa_wan_vae_inside(r, p) };
    return esa_wan_vae_convolve(r, conv, to, dtype, x, esa_wan_vae_pitch(r, p), p->level);
}

/* Norm and act of the stream x, into a plane with the given pitch. */
static esa_status normalise(wan_vae_run *r, const float *gamma, int32_t channels, int32_t level,
                            const void *x, void *y, int64_t y_row, int32_t act)
{
    const esa_plane_norm_args args = { .y = y,
                                       .y_row = y_row,
                                       .x = x,
                                       .x_row = esa_wan_vae_wide(r, level) * channels,
                                       .height = esa_wan_vae_high(r, level),
                                       .width = esa_wan_vae_wide(r, level),
                                       .channels = channels,
                                       .gamma = gamma,
                                       .act = act,
                                       .dtype = r->nn->ops->dtype };
    return r->dry ? ESA_OK : r->op->pixel_norm(r->nn, &args);
}

esa_status esa_wan_vae_norm_conv(wan_vae_run *r, const float *gamma, const esa_conv *conv,
                                 int32_t slot, int32_t level, const void *x,
                                 const wan_vae_target *to, int32_t dtype)
{
    wan_vae_plane p;
    ESA_TRY(esa_wan_vae_plane_take(r, &p, level, conv->cin));
    esa_status status = normalise(r, gamma, conv->cin, level, x, esa_wan_vae_inside(r, &p),
                                  esa_wan_vae_pitch(r, &p), ESA_ACT_SILU);
    if (!status) status = esa_wan_vae_causal(r, conv, slot, &p, to, dtype);
    esa_wan_vae_remember(r, slot, &p);
    return status;
}

/* The second half of a res block: norm (from temp into p), shortcut (into temp), convolution. */
static esa_status res_end(wan_vae_run *r, const wan_vae_res *b, int32_t level,
                          const wan_vae_plane *p, void *y, int64_t y_row)
{
    void *x = r->stream[level], *t = r->temp[level];
    const int64_t row = esa_wan_vae_wide(r, level) * b->cout;
    const wan_vae_target shortcut = { .y = t, .row = row },
                         end = { y, y_row, b->shortcut.packed ? t : x, row };
    ESA_TRY(normalise(r, b->norm[1], b->cout, level, t, esa_wan_vae_inside(r, p),
                      esa_wan_vae_pitch(r, p), ESA_ACT_SILU));
    if (b->shortcut.packed) ESA_TRY(esa_wan_vae_mix(r, &b->shortcut, &shortcut, x, level));
    return esa_wan_vae_causal(r, &b->conv[1], b->slot + 1, p, &end, r->nn->ops->dtype);
}

esa_status esa_wan_vae_res_block(wan_vae_run *r, const wan_vae_res *b, int32_t level, void *y,
                                 int64_t y_row)
{
    wan_vae_plane p;
    const wan_vae_target middle = { .y = r->temp[level],
                                    .row = esa_wan_vae_wide(r, level) * b->cout };
    ESA_TRY(esa_wan_vae_norm_conv(r, b->norm[0], &b->conv[0], b->slot, level, r->stream[level],
                                  &middle, r->nn->ops->dtype));
    ESA_TRY(esa_wan_vae_plane_take(r, &p, level, b->cout));
    const esa_status status = res_end(r, b, level, &p, y, y_row);
    esa_wan_vae_remember(r, b->slot + 1, &p);
    return status;
}

esa_status esa_wan_vae_attend(wan_vae_run *r, const wan_vae_attention *a)
{
    esa_nn *nn = r->nn;
    const int32_t channels = a->proj.cin, dtype = nn->ops->dtype;
    const int64_t n = r->height * r->width, c = channels, row = r->width * c;
    void *x = r->stream[0], *t = r->temp[0];
    const wan_vae_target qkv = { .y = r->qkv, .row = 3 * row }, end = { x, row, x, row };
    ESA_TRY(normalise(r, a->norm, channels, 0, x, t, row, ESA_ACT_NONE));
    ESA_TRY(esa_wan_vae_mix(r, &a->qkv, &qkv, t, 0));
    const esa_view all = esa_view_of(r->qkv, dtype, nn->be->device, n, 3 * c);
    const esa_biased_args args = { .o = esa_view_of(t, dtype, nn->be->device, n, c),
                                   .q = esa_view_cols(all, 0, c),
                                   .k = esa_view_cols(all, c, c),
                                   .v = esa_view_cols(all, 2 * c, c),
                                   .heads = 1,
                                   .D = c,
                                   .scale = 1.0f / sqrtf((float)c) };
    if (!r->dry) ESA_TRY(nn->ops->biased(nn, &args));
    return esa_wan_vae_mix(r, &a->proj, &end, t, 0);
}
