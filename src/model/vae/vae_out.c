/* vae_out.c - the way of frames from the last convolution of a decoder to the caller.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/vae_kind.h"

#include "model/vae/tiles.h"

esa_status esa_vae_nan(esa_ctx *ctx, int64_t frame)
{
    return esa_fail(ctx, ESA_ERR_FORMAT,
                    "the VAE gave NaN for pixels of frame %lld: its weights are damaged",
                    (long long)frame);
}

esa_vae_out esa_vae_out_of(esa_nn *nn, const esa_vae_cut *cut, int64_t frames, int64_t pixels,
                           esa_vae_sink sink, void *user)
{
    return (esa_vae_out){ .nn = nn,
                          .frames = frames,
                          .pixels = pixels,
                          .host = cut->bytes,
                          .clamp = cut->clamp,
                          .sink = sink,
                          .user = user };
}

void esa_vae_out_place(esa_vae_out *o, esa_carve *carve)
{
    o->rgb = esa_carve_take(carve, 4 * o->pixels);
    o->wrong = esa_carve_take(carve, 4 * o->frames);
    o->bytes = o->host;
    /* A device with host memory writes bytes where they are wanted. */
    if (o->host && !o->nn->be->host_memory) o->bytes = esa_carve_take(carve, o->frames * o->pixels);
}

esa_status esa_vae_out_begin(esa_vae_out *o)
{
    if (!o->host && !o->nn->be->host_memory)
        ESA_TRY(esa_nn_alloc_host(o->nn, (void **)&o->seen, 4 * o->pixels,
                                  "a frame of the VAE decoder"));
    return o->nn->ops->planes->zero(o->nn, o->wrong, 4 * o->frames);
}

void esa_vae_out_free(esa_vae_out *o)
{
    esa_nn_free_host(o->nn, o->seen, o->seen ? 4 * o->pixels : 0);
}

esa_status esa_vae_out_give(esa_vae_out *o)
{
    const int64_t n = o->pixels, frame = o->frame++;
    float *rgb = o->rgb;
    if (o->bytes) {
        const esa_plane_bytes_args args = { o->bytes + frame * n, rgb, n, o->wrong + frame };
        return o->nn->ops->planes->to_bytes(o->nn, &args);
    }
    if (o->seen) {
        ESA_TRY(esa_nn_download(o->nn, o->seen, rgb, 4 * n));
        rgb = o->seen;
    }
    if (o->clamp) esa_vae_clamp(rgb, n);
    return o->sink(o->user, frame, rgb);
}

esa_status esa_vae_out_end(esa_vae_out *o)
{
    esa_ctx *ctx = o->nn->ctx;
    if (!o->host) return ESA_OK;
    if (o->bytes != o->host)
        ESA_TRY(esa_nn_download(o->nn, o->host, o->bytes, o->frames * o->pixels));
    int32_t *wrong = esa_mem_alloc(&ctx->mem, 4 * o->frames);
    if (!wrong) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE decoder");
    esa_status status = esa_nn_download(o->nn, wrong, o->wrong, 4 * o->frames);
    for (int64_t f = 0; f < o->frames && !status; f++)
        if (wrong[f]) status = esa_vae_nan(ctx, f);
    esa_mem_free(&ctx->mem, wrong, 4 * o->frames);
    return status;
}
