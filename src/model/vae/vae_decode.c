/* vae_decode.c - the calls of a decoder: sizes, whole frames, tiles.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/tiles.h"
#include "model/vae/vae_kind.h"

#define MOST_PIXELS (1 << 20) /* of a side */

void esa_vae_size(const esa_vae_kind *kind, const void *config, const int32_t latent[3],
                  int32_t size[3])
{
    kind->size(config, latent, size);
}

esa_status esa_vae_check_sizes(const esa_vae *vae, const int32_t latent[3], int32_t tile)
{
    esa_ctx *ctx = vae->nn->ctx;
    const int32_t factor = vae->factor_s, unit = vae->kind->tile_unit * factor;
    for (int32_t i = 0; i < 3; i++)
        if (latent[i] < 1 || latent[i] > MOST_PIXELS / factor)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the VAE cannot decode latents of %d x %d x %d, expected 1 to %d each",
                            (int)latent[0], (int)latent[1], (int)latent[2],
                            (int)(MOST_PIXELS / factor));
    if (tile < 0 || tile % unit)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the VAE tile is %d pixels, expected 0 or a multiple of %d", (int)tile,
                        (int)unit);
    return ESA_OK;
}

/* All latents in one piece, clamped. */
static esa_vae_cut whole(const float *latents, const int32_t latent[3])
{
    const int64_t frame = (int64_t)latent[1] * latent[2];
    return (esa_vae_cut){ .latents = latents,
                          .frames = latent[0],
                          .height = latent[1],
                          .width = latent[2],
                          .row = latent[2],
                          .frame = frame,
                          .channel = latent[0] * frame,
                          .tick_total = latent[0],
                          .clamp = 1 };
}

/* ---------------------------------------------------------------- tiles */

typedef struct tile_job {
    esa_vae *vae;
    const float *latents;
    const int32_t *latent;
} tile_job;

static int32_t has_tiles(const esa_vae *vae, const int32_t latent[3], int32_t tile)
{
    const int32_t side = tile / vae->factor_s;
    return tile > 0 && (latent[1] > side || latent[2] > side);
}

static esa_status decode_tile(void *owner, const esa_tile *tile, esa_vae_sink sink, void *user)
{
    const tile_job *j = owner;
    const int64_t factor = j->vae->factor_s, top = tile->top / factor, left = tile->left / factor;
    esa_vae_cut cut = whole(j->latents + top * j->latent[2] + left, j->latent);
    cut.height = tile->height / factor;
    cut.width = tile->width / factor;
    cut.tick_base = tile->number * j->latent[0];
    cut.tick_total = tile->count * j->latent[0];
    cut.clamp = 0;
    return j->vae->kind->cut(j->vae, &cut, sink, user);
}

static esa_tiling tiling_of(const esa_vae *vae, const int32_t latent[3], int32_t tile,
                            tile_job *job)
{
    const int64_t factor = vae->factor_s, side = tile / factor;
    int32_t size[3];
    vae->kind->size(vae->config, latent, size);
    return (esa_tiling){ .nn = vae->nn,
                         .frames = size[0],
                         .channels = 3,
                         .height = size[1],
                         .width = size[2],
                         .side = { tile, tile },
                         .stride = { factor * (side - side / vae->kind->overlap[0]),
                                     factor * (side - side / vae->kind->overlap[1]) },
                         .decode = decode_tile,
                         .owner = job };
}

static esa_status decode_tiled(esa_vae *vae, const float *latents, const int32_t latent[3],
                               int32_t tile, esa_vae_sink sink, void *user)
{
    tile_job job = { vae, latents, latent };
    const esa_tiling tiling = tiling_of(vae, latent, tile, &job);
    return esa_tiles_decode(&tiling, sink, user);
}

int64_t esa_vae_bytes(const esa_vae *vae, const int32_t latent[3], int32_t tile)
{
    const esa_vae_kind *kind = vae->kind;
    if (kind->decode_bytes) return kind->decode_bytes(vae, latent, tile);
    if (!has_tiles(vae, latent, tile))
        return kind->cut_bytes(vae, latent[0], latent[1], latent[2], 1);
    const esa_tiling tiling = tiling_of(vae, latent, tile, NULL);
    const int64_t side = tile / vae->factor_s,
                  host = vae->nn->be->host_memory ? esa_tiles_bytes(&tiling) : 0,
                  cut = kind->cut_bytes(vae, latent[0], esa_min64(side, latent[1]),
                                        esa_min64(side, latent[2]), 0);
    return esa_size_add(host, cut);
}

/* ---------------------------------------------------------------- frames */

esa_status esa_vae_decode(esa_vae *vae, const float *latents, const int32_t latent[3], int32_t tile,
                          esa_vae_sink sink, void *user)
{
    ESA_TRY(esa_vae_check_sizes(vae, latent, tile));
    if (vae->kind->decode) return vae->kind->decode(vae, latents, latent, tile, sink, user);
    if (has_tiles(vae, latent, tile)) return decode_tiled(vae, latents, latent, tile, sink, user);
    const esa_vae_cut cut = whole(latents, latent);
    return vae->kind->cut(vae, &cut, sink, user);
}

typedef struct byte_sink {
    esa_ctx *ctx;
    uint8_t *rgb;   /* [frames][pixels] */
    int64_t pixels; /* elements of a frame */
} byte_sink;

static esa_status to_bytes(void *user, int64_t frame, const float *rgb)
{
    const byte_sink *b = user;
    const int32_t wrong = esa_nn_pixel_bytes(b->rgb + frame * b->pixels, rgb, b->pixels);
    return wrong ? esa_vae_nan(b->ctx, frame) : ESA_OK;
}

esa_status esa_vae_frames(esa_vae *vae, const float *latents, const int32_t latent[3], int32_t tile,
                          uint8_t *rgb)
{
    if (vae->kind->decode || has_tiles(vae, latent, tile)) {
        int32_t size[3];
        vae->kind->size(vae->config, latent, size);
        byte_sink bytes = { vae->nn->ctx, rgb, (int64_t)size[1] * size[2] * 3 };
        return esa_vae_decode(vae, latents, latent, tile, to_bytes, &bytes);
    }
    ESA_TRY(esa_vae_check_sizes(vae, latent, tile));
    esa_vae_cut cut = whole(latents, latent);
    cut.bytes = rgb;
    return vae->kind->cut(vae, &cut, NULL, NULL);
}
