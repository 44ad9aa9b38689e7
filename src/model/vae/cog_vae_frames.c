/* cog_vae_frames.c - the calls of CogVideoX's decoder: sizes, whole frames, tiles.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/cog_vae_parts.h"
#include "nn/ops.h"

void esa_cog_vae_size(const esa_cog_vae_config *config, const int32_t latent[3], int32_t size[3])
{
    const int32_t t = latent[0];
    size[0] = t % ESA_COG_BATCH ? 1 + (t - 1) * config->factor_t : t * config->factor_t;
    size[1] = latent[1] * config->factor_s;
    size[2] = latent[2] * config->factor_s;
}

esa_status esa_cog_vae_check_sizes(const esa_cog_vae *vae, const int32_t latent[3], int32_t tile)
{
    const int32_t factor = vae->config.factor_s;
    return esa_vae_check_sizes(vae->env.nn->ctx, latent, factor, tile, 2 * factor);
}

/* ---------------------------------------------------------------- tiles */

typedef struct tile_job {
    esa_cog_vae *vae;
    const float *latents;
    const int32_t *latent;
} tile_job;

static int32_t has_tiles(const esa_cog_vae *vae, const int32_t latent[3], int32_t tile)
{
    return esa_vae_has_tiles(latent, vae->config.factor_s, tile);
}

static esa_status decode_tile(void *owner, const esa_tile *tile, esa_vae_sink sink, void *user)
{
    const tile_job *j = owner;
    const esa_vae_cut cut = esa_vae_tile(j->latents, j->latent, j->vae->config.factor_s, tile);
    return esa_cog_vae_decode_cut(j->vae, &cut, sink, user);
}

static esa_tiling tiling_of(const esa_cog_vae *vae, const int32_t latent[3], int32_t tile,
                            tile_job *job)
{
    const int32_t factor = vae->config.factor_s, side = tile / factor;
    int32_t size[3];
    esa_cog_vae_size(&vae->config, latent, size);
    return (esa_tiling){ .nn = vae->env.nn,
                         .frames = size[0],
                         .channels = 3,
                         .height = size[1],
                         .width = size[2],
                         .side = { tile, tile },
                         .stride = { (int64_t)factor * (side - side / 6),
                                     (int64_t)factor * (side - side / 5) },
                         .decode = decode_tile,
                         .owner = job };
}

static esa_status decode_tiled(esa_cog_vae *vae, const float *latents, const int32_t latent[3],
                               int32_t tile, esa_vae_sink sink, void *user)
{
    tile_job job = { vae, latents, latent };
    const esa_tiling tiling = tiling_of(vae, latent, tile, &job);
    return esa_tiles_decode(&tiling, sink, user);
}

int64_t esa_cog_vae_bytes(const esa_cog_vae *vae, const int32_t latent[3], int32_t tile)
{
    if (!has_tiles(vae, latent, tile))
        return esa_cog_vae_cut_bytes(vae, latent[0], latent[1], latent[2], 1);
    const esa_tiling tiling = tiling_of(vae, latent, tile, NULL);
    const int64_t side = tile / vae->config.factor_s;
    return (vae->env.nn->be->host_memory ? esa_tiles_bytes(&tiling) : 0) +
           esa_cog_vae_cut_bytes(vae, latent[0], esa_min64(side, latent[1]),
                                 esa_min64(side, latent[2]), 0);
}

/* ---------------------------------------------------------------- frames */

esa_status esa_cog_vae_decode(esa_cog_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, esa_vae_sink sink, void *user)
{
    ESA_TRY(esa_cog_vae_check_sizes(vae, latent, tile));
    if (has_tiles(vae, latent, tile)) return decode_tiled(vae, latents, latent, tile, sink, user);
    const esa_vae_cut cut = esa_vae_whole(latents, latent);
    return esa_cog_vae_decode_cut(vae, &cut, sink, user);
}

esa_status esa_cog_vae_frames(esa_cog_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, uint8_t *rgb)
{
    ESA_TRY(esa_cog_vae_check_sizes(vae, latent, tile));
    if (has_tiles(vae, latent, tile)) {
        int32_t size[3];
        esa_cog_vae_size(&vae->config, latent, size);
        esa_vae_bytes bytes = { vae->env.nn->ctx, rgb, (int64_t)size[1] * size[2] * 3 };
        return decode_tiled(vae, latents, latent, tile, esa_vae_to_bytes, &bytes);
    }
    esa_vae_cut cut = esa_vae_whole(latents, latent);
    cut.bytes = rgb;
    return esa_cog_vae_decode_cut(vae, &cut, NULL, NULL);
}
