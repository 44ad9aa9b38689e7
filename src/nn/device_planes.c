/* device_planes.c - the operations of planes.h on a device whose backend has the group of planes
 * (backend/engine.h): BF16 planes, packed weights in the layout of the device.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/planes.h"

#include <string.h>
#include "nn/marks.h"

static esa_plane_conv_args with_sizes(esa_plane_conv_args a, const esa_conv *c)
{
    a.kt = c->kt;
    a.kh = c->kh;
    a.kw = c->kw;
    a.cin = c->cin;
    a.cout = c->cout;
    a.up2 = c->up2;
    a.dtype = ESA_DTYPE_BF16;
    return a;
}

/* Copies the weight and the bias, as f32 at host, to the device and packs the weight there. */
static esa_status pack(esa_nn *nn, esa_conv *c, const esa_plane_conv_args *a, const float *host,
                       int64_t count)
{
    const esa_backend *be = nn->be;
    void *weight = NULL;
    ESA_TRY(esa_nn_scratch(nn, &weight, 4 * count));
    ESA_TRY(be->upload(nn->ctx, weight, host, 4 * count));
    ESA_TRY(be->upload(nn->ctx, c->bias, host + count, (int64_t)4 * c->cout));
    return be->planes->conv_pack(nn->ctx, c->packed, a, weight);
}

static esa_status device_conv_pack(esa_nn *nn, esa_conv *c, const esa_weight *w,
                                   const esa_weight *bias, int32_t up2)
{
    *c = (esa_conv){ .cout = (int32_t)w->dim[0],
                     .cin = (int32_t)w->dim[1],
                     .kt = w->rank == 5 ? (int32_t)w->dim[2] : 1,
                     .kh = (int32_t)w->dim[w->rank - 2],
                     .kw = (int32_t)w->dim[w->rank - 1],
                     .up2 = up2 };
    const esa_plane_conv_args a = with_sizes((esa_plane_conv_args){ 0 }, c);
    const int64_t count = esa_weight_count(w), bytes = 4 * (count + c->cout);
    const int64_t packed = esa_ceil_div(nn->be->planes->conv_bytes(nn->ctx, &a), 256) * 256;
    c->bytes = packed + (int64_t)4 * c->cout;
    ESA_TRY(esa_nn_alloc(nn, (void **)&c->packed, c->bytes, "the weights of a convolution"));
    c->bias = c->packed + packed / 4;
    float *host = esa_mem_zalloc(&nn->ctx->mem, bytes);
    if (!host)
        return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the weights of a convolution");
    esa_weight_to_f32(host, w, 0, count);
    if (bias && bias->data) esa_weight_to_f32(host + count, bias, 0, c->cout);
    const esa_status status = pack(nn, c, &a, host, count);
    esa_mem_free(&nn->ctx->mem, host, bytes);
    return status;
}

static esa_status device_conv(esa_nn *nn, const esa_conv *c, const esa_plane_conv_args *args)
{
    esa_plane_conv_args a = with_sizes(*args, c);
    a.packed = c->packed;
    a.bias = c->bias;
    ESA_TRY(esa_nn_mark(nn, ESA_NN_CONV));
    return nn->be->planes->conv(nn->ctx, &a);
}

static esa_status device_pixel_norm(esa_nn *nn, const esa_plane_norm_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->planes->pixel_norm(nn->ctx, args);
}

static esa_status device_group_norm(esa_nn *nn, const esa_plane_group_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->planes->group_norm(nn->ctx, args);
}

static esa_status device_border(esa_nn *nn, const esa_plane_border_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->planes->border(nn->ctx, args);
}

static esa_status device_from_latents(esa_nn *nn, const esa_plane_latent_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->planes->from_latents(nn->ctx, args);
}

static esa_status device_to_bytes(esa_nn *nn, const esa_plane_bytes_args *args)
{
    ESA_TRY(esa_nn_mark(nn, ESA_NN_OTHER));
    return nn->be->planes->to_bytes(nn->ctx, args);
}

static esa_status device_zero(esa_nn *nn, void *ptr, int64_t bytes)
{
    return nn->be->planes->zero(nn->ctx, ptr, bytes);
}

const esa_nn_planes esa_nn_device_planes = { device_conv_pack,  device_conv,   device_pixel_norm,
                                             device_group_norm, device_border, device_from_latents,
                                             device_to_bytes,   device_zero };
