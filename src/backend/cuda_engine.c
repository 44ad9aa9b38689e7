/* cuda_engine.c - the operations of networks on the GPU: calls the plugin, and copies its messages
 * into the ctx.
 * SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda_engine.h"

#include "backend/plugin.h"

static esa_status rows_norm(esa_ctx *ctx, const esa_norm_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->rows->norm(c->dev, args, ctx->cuda_stream));
}

static esa_status rows_qk(esa_ctx *ctx, const esa_qk_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->rows->qk(c->dev, args, ctx->cuda_stream));
}

static esa_status rows_act(esa_ctx *ctx, const esa_act_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->rows->act(c->dev, args, ctx->cuda_stream));
}

const esa_engine_rows esa_cuda_engine_rows = { rows_norm, rows_qk, rows_act };

static esa_status products_library(esa_ctx *ctx, const char **name)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->products->library(c->dev, name));
}

static esa_status products_prepare(esa_ctx *ctx, const esa_product_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->products->prepare(c->dev, args, ctx->cuda_stream));
}

static int64_t products_workspace(esa_ctx *ctx)
{
    return ctx->cuda->table->products->workspace(ctx->cuda->dev);
}

static esa_status products_product(esa_ctx *ctx, const esa_product_args *args, void *ws)
{
    const esa_cuda *c = ctx->cuda;
    if (!ws) ESA_TRY(esa_cuda_scratch(ctx, &ws, c->table->products->workspace(c->dev)));
    return esa_cuda_status(ctx, c->table->products->product(c->dev, args, ws, ctx->cuda_stream));
}

const esa_engine_products esa_cuda_engine_products = { products_library, products_prepare,
                                                       products_workspace, products_product };

static esa_status latents_patches(esa_ctx *ctx, const esa_patch_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->latents->patches(c->dev, args, ctx->cuda_stream));
}

static esa_status latents_modulate(esa_ctx *ctx, float *e, const float *table, const float *add,
                                   int64_t rows, int64_t cols)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(
        ctx, c->table->latents->modulate(c->dev, e, table, add, rows, cols, ctx->cuda_stream));
}

static esa_status latents_guide(esa_ctx *ctx, float *v, const float *negative, float scale,
                                int64_t count)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(
        ctx, c->table->latents->guide(c->dev, v, negative, scale, count, ctx->cuda_stream));
}

static esa_status latents_step(esa_ctx *ctx, const esa_step_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->latents->step(c->dev, args, ctx->cuda_stream));
}

static esa_status latents_figures(esa_ctx *ctx, const esa_figures_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->latents->figures(c->dev, args, ctx->cuda_stream));
}

const esa_engine_latents esa_cuda_engine_latents = { latents_patches, latents_modulate,
                                                     latents_guide, latents_step, latents_figures };

static esa_status biased_attention(esa_ctx *ctx, const esa_biased_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->biased->attention(c->dev, args, ctx->cuda_stream));
}

const esa_engine_biased esa_cuda_engine_biased = { biased_attention };

_Static_assert((int)ESA_TRANSFER_LANES == (int)ESA_CUDA_LANES &&
                   (int)ESA_CARRY_LANE == (int)ESA_CUDA_CARRY_LANE,
               "lanes of the backend and the plugin");

static esa_status transfer_pin(esa_ctx *ctx, void **ptr, int64_t bytes)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->transfer->pin(c->dev, ptr, bytes));
}

static void transfer_unpin(esa_ctx *ctx, void *ptr)
{
    if (ptr) ctx->cuda->table->transfer->unpin(ctx->cuda->dev, ptr);
}

static esa_status transfer_fetch(esa_ctx *ctx, int32_t lane, void *dst, const void *src,
                                 int64_t bytes)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->transfer->fetch(c->dev, lane, dst, src, bytes));
}

static esa_status transfer_store(esa_ctx *ctx, int32_t lane, void *dst, const void *src,
                                 int64_t bytes)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(
        ctx, c->table->transfer->store(c->dev, lane, dst, src, bytes, ctx->cuda_stream));
}

static esa_status transfer_arrive(esa_ctx *ctx, int32_t lane)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->transfer->arrive(c->dev, lane, ctx->cuda_stream));
}

static esa_status transfer_used(esa_ctx *ctx, int32_t lane)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->transfer->used(c->dev, lane, ctx->cuda_stream));
}

static esa_status transfer_landed(esa_ctx *ctx, int32_t lane)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->transfer->landed(c->dev, lane));
}

static esa_status transfer_convert(esa_ctx *ctx, const esa_convert_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->transfer->convert(c->dev, args, ctx->cuda_stream));
}

static esa_status transfer_room(esa_ctx *ctx, int64_t *bytes)
{
    const esa_cuda *c = ctx->cuda;
    esa_cuda_info info;
    ESA_TRY(esa_cuda_status(ctx, c->table->info(c->dev, &info)));
    *bytes = info.free_memory;
    return ESA_OK;
}

const esa_engine_transfer esa_cuda_engine_transfer = {
    transfer_pin,  transfer_unpin,  transfer_fetch,   transfer_store, transfer_arrive,
    transfer_used, transfer_landed, transfer_convert, transfer_room
};

static int64_t planes_conv_bytes(esa_ctx *ctx, const esa_plane_conv_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return c->table->planes->conv_bytes(c->dev, args);
}

static esa_status planes_conv_pack(esa_ctx *ctx, void *packed, const esa_plane_conv_args *args,
                                   const float *weight)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(
        ctx, c->table->planes->conv_pack(c->dev, packed, args, weight, ctx->cuda_stream));
}

static esa_status planes_conv(esa_ctx *ctx, const esa_plane_conv_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->planes->conv(c->dev, args, ctx->cuda_stream));
}

static esa_status planes_pixel_norm(esa_ctx *ctx, const esa_plane_norm_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->planes->pixel_norm(c->dev, args, ctx->cuda_stream));
}

static esa_status planes_group_norm(esa_ctx *ctx, const esa_plane_group_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->planes->group_norm(c->dev, args, ctx->cuda_stream));
}

static esa_status planes_border(esa_ctx *ctx, const esa_plane_border_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->planes->border(c->dev, args, ctx->cuda_stream));
}

static esa_status planes_from_latents(esa_ctx *ctx, const esa_plane_latent_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->planes->from_latents(c->dev, args, ctx->cuda_stream));
}

static esa_status planes_to_bytes(esa_ctx *ctx, const esa_plane_bytes_args *args)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->planes->to_bytes(c->dev, args, ctx->cuda_stream));
}

static esa_status planes_zero(esa_ctx *ctx, void *ptr, int64_t bytes)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->planes->zero(c->dev, ptr, bytes, ctx->cuda_stream));
}

const esa_engine_planes esa_cuda_engine_planes = {
    planes_conv_bytes, planes_conv_pack,    planes_conv,     planes_pixel_norm, planes_group_norm,
    planes_border,     planes_from_latents, planes_to_bytes, planes_zero
};
