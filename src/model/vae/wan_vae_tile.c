/* wan_vae_tile.c - the tiles of Wan's decoder: squares that overlap by a quarter.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/wan_vae_parts.h"

typedef struct tile_job {
    esa_wan_vae *vae;
    const float *latents;
    const int32_t *latent;
} tile_job;

static esa_status decode_tile(void *owner, const esa_tile *tile, esa_vae_sink sink, void *user)
{
    const tile_job *j = owner;
    const esa_vae_cut cut = esa_vae_tile(j->latents, j->latent, j->vae->config.factor_s, tile);
    return esa_vae_decode_cut(j->vae, &cut, sink, user);
}

static esa_tiling tiling_of(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile,
                            tile_job *job)
{
    int32_t size[3];
    esa_wan_vae_size(&vae->config, latent, size);
    return (esa_tiling){ .nn = vae->env.nn,
                         .frames = size[0],
                         .channels = vae->config.out_channels,
                         .height = size[1],
                         .width = size[2],
                         .side = { tile, tile },
                         .stride = { tile / 4 * 3, tile / 4 * 3 },
                         .decode = decode_tile,
                         .owner = job };
}

esa_status esa_vae_decode_tiled(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                                int32_t tile, esa_vae_sink sink, void *user)
{
    tile_job job = { vae, latents, latent };
    const esa_tiling tiling = tiling_of(vae, latent, tile, &job);
    return esa_tiles_decode(&tiling, sink, user);
}

int64_t esa_vae_tiled_bytes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile)
{
    const esa_tiling tiling = tiling_of(vae, latent, tile, NULL);
    const int64_t side = tile / vae->config.factor_s;
    return (vae->env.nn->be->host_memory ? esa_tiles_bytes(&tiling) : 0) +
           esa_vae_cut_bytes(vae, latent[0], esa_min64(side, latent[1]), esa_min64(side, latent[2]),
                             0);
}
