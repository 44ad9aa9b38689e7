/* cog_vae.c - CogVideoX's VAE: the table of its functions, and the layers of its decoder.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/cog_vae.h"

#define MID_BLOCKS 2

enum { WIDENS = 1 }; /* sizes.have */

/* A norm of c channels that is guided by the latents. */
/* clang-format off */
#define GUIDED(field, name, c) \
    { ESA_VAE_NORM, AT(field.weight), name ".norm_layer", c, 0, 0 }, \
    { ESA_VAE_CONV, AT(field.times), name ".conv_y.conv", c ",z,1,1,1", 0, 0 }, \
    { ESA_VAE_CONV, AT(field.plus), name ".conv_b.conv", c ",z,1,1,1", 0, 0 }
/* clang-format on */
#define AT(field) offsetof(cog_vae_res, field)
static const esa_row res_rows[] = {
    GUIDED(norm[0], "norm1", "i"),
    { ESA_VAE_CONV, AT(conv[0]), "conv1.conv", "o,i,3,3,3", 0, 0 },
    GUIDED(norm[1], "norm2", "o"),
    { ESA_VAE_CONV, AT(conv[1]), "conv2.conv", "o,o,3,3,3", 0, 0 },
    { ESA_VAE_CONV, AT(shortcut), "conv_shortcut", "o,i,1,1,1", 0, WIDENS },
};
#undef AT
#define AT(field) offsetof(esa_cog_vae, field)
static const esa_row in_rows[] = {
    { ESA_VAE_CONV, AT(conv_in), "conv_in.conv", "o,z,3,3,3", 0, 0 },
};
static const esa_row out_rows[] = {
    GUIDED(norm_out, "norm_out", "o"),
    { ESA_VAE_CONV, AT(conv_out), "conv_out.conv", "3,o,3,3,3", 0, 0 },
};
#undef AT
#define AT(field) offsetof(cog_vae_level, field)
static const esa_row up_rows[] = {
    { ESA_VAE_UP2, AT(up), "upsamplers.0.conv", "o,o,3,3", 0, 0 },
};

/* One walk over the decoder. */
typedef struct walk {
    esa_cog_vae *cog;
    esa_sizes sizes; /* i, o: channels in and out; z: of latents */
} walk;

static int32_t new_slot(esa_cog_vae *cog, int32_t level, int32_t channels)
{
    cog->slot[cog->slots] = (cog_vae_slot){ .level = level, .channels = channels };
    return cog->slots++;
}

/* up < 0: a block of the middle. */
static void res_block(walk *k, cog_vae_res *r, int32_t up, int32_t number, int32_t cin,
                      int32_t cout)
{
    const int32_t level = up < 0 ? 0 : up;
    r->cin = r->norm[0].channels = cin;
    r->cout = r->norm[1].channels = cout;
    r->slot = new_slot(k->cog, level, cin);
    new_slot(k->cog, level, cout);
    k->sizes.letter['i'] = cin;
    k->sizes.letter['o'] = cout;
    k->sizes.have = cin != cout ? WIDENS : 0;
    if (up < 0)
        esa_vae_rows(&k->cog->vae, ESA_ROWS(res_rows), r, &k->sizes,
                     "decoder.mid_block.resnets.%d.", number);
    else
        esa_vae_rows(&k->cog->vae, ESA_ROWS(res_rows), r, &k->sizes,
                     "decoder.up_blocks.%d.resnets.%d.", up, number);
}

static void walk_level(walk *k, int32_t i, int32_t cin)
{
    const esa_cog_vae_config *c = &k->cog->config;
    cog_vae_level *l = &k->cog->level[i];
    l->res = k->cog->res_all + i * (c->layers + 1);
    l->res_count = c->layers + 1;
    l->cin = cin;
    l->cout = c->width[c->levels - 1 - i];
    l->doubles_time = 1 << i < c->factor_t;
    for (int32_t r = 0; r < l->res_count; r++)
        res_block(k, &l->res[r], i, r, r ? l->cout : cin, l->cout);
    if (i < c->levels - 1)
        esa_vae_rows(&k->cog->vae, ESA_ROWS(up_rows), l, &k->sizes, "decoder.up_blocks.%d.", i);
}

/* The decoder from input to output; it uses the levels of the config in reverse order. */
static void walk_layers(walk *k)
{
    esa_cog_vae *cog = k->cog;
    const esa_cog_vae_config *c = &cog->config;
    const int32_t deep = c->width[c->levels - 1];
    cog->in_slot = new_slot(cog, 0, c->z_dim);
    k->sizes.letter['z'] = c->z_dim;
    k->sizes.letter['o'] = deep;
    esa_vae_rows(&cog->vae, ESA_ROWS(in_rows), cog, &k->sizes, "decoder.");
    for (int32_t i = 0; i < MID_BLOCKS; i++) res_block(k, &cog->mid[i], -1, i, deep, deep);
    for (int32_t i = 0; i < c->levels; i++) walk_level(k, i, i ? cog->level[i - 1].cout : deep);
    cog->norm_out.channels = c->width[0];
    cog->out_slot = new_slot(cog, c->levels - 1, c->width[0]);
    esa_vae_rows(&cog->vae, ESA_ROWS(out_rows), cog, &k->sizes, "decoder.");
}

static esa_status make(esa_vae *vae, const void *config)
{
    esa_cog_vae *cog = (esa_cog_vae *)vae;
    esa_cog_vae_config *c = &cog->config;
    *c = *(const esa_cog_vae_config *)config;
    vae->config = c;
    vae->z_dim = c->z_dim;
    vae->factor_t = c->factor_t;
    vae->factor_s = c->factor_s;
    vae->factor = 1 / c->scaling;
    const int64_t blocks = c->levels * ((int64_t)c->layers + 1);
    ESA_TRY(esa_part_array(&vae->part, (void **)&cog->res_all, blocks, sizeof *cog->res_all));
    ESA_TRY(esa_part_array(&vae->part, (void **)&cog->slot, 2 * (blocks + MID_BLOCKS) + 2,
                           sizeof *cog->slot));
    walk k = { .cog = cog };
    walk_layers(&k);
    return ESA_OK;
}

void esa_cog_vae_size(const void *config, const int32_t latent[3], int32_t size[3])
{
    const esa_cog_vae_config *c = config;
    const int32_t t = latent[0];
    size[0] = t % ESA_COG_BATCH ? 1 + (t - 1) * c->factor_t : t * c->factor_t;
    size[1] = latent[1] * c->factor_s;
    size[2] = latent[2] * c->factor_s;
}

/* Tiles are blended over a sixth of their height and a fifth of their width, in whole latents. */
const esa_vae_kind esa_cog_vae_kind = { .bytes = sizeof(esa_cog_vae),
                                        .tile_unit = 2,
                                        .overlap = { 6, 5 },
                                        .size = esa_cog_vae_size,
                                        .make = make,
                                        .cut = esa_cog_vae_cut,
                                        .cut_bytes = esa_cog_vae_cut_bytes };
