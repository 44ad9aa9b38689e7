/* wan_vae.c - Wan's VAE: the table of its functions, and its layers.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/wan_vae.h"

enum { WIDENS = 1, TIME = 2 }; /* sizes.have */

#define AT(field) offsetof(wan_vae_res, field)
static const esa_row res_rows[] = {
    { ESA_VAE_GAMMA, AT(norm[0]), "norm1", "i,1,1,1", 0, 0 },
    { ESA_VAE_CONV, AT(conv[0]), "conv1", "o,i,3,3,3", 0, 0 },
    { ESA_VAE_GAMMA, AT(norm[1]), "norm2", "o,1,1,1", 0, 0 },
    { ESA_VAE_CONV, AT(conv[1]), "conv2", "o,o,3,3,3", 0, 0 },
    { ESA_VAE_CONV, AT(shortcut), "conv_shortcut", "o,i,1,1,1", 0, WIDENS },
};
#undef AT
#define AT(field) offsetof(wan_vae_attention, field)
static const esa_row attention_rows[] = {
    { ESA_VAE_GAMMA, AT(norm), "norm", "o,1,1", 0, 0 },
    { ESA_VAE_CONV, AT(qkv), "to_qkv", "3o,o,1,1", 0, 0 },
    { ESA_VAE_CONV, AT(proj), "proj", "o,o,1,1", 0, 0 },
};
#undef AT
#define AT(field) offsetof(esa_wan_vae, field)
static const esa_row in_rows[] = {
    { ESA_VAE_CONV, AT(post_quant), "post_quant_conv", "z,z,1,1,1", 0, 0 },
    { ESA_VAE_CONV, AT(conv_in), "decoder.conv_in", "o,z,3,3,3", 0, 0 },
};
static const esa_row out_rows[] = {
    { ESA_VAE_GAMMA, AT(norm_out), "decoder.norm_out", "o,1,1,1", 0, 0 },
    { ESA_VAE_CONV, AT(conv_out), "decoder.conv_out", "p,o,3,3,3", 0, 0 },
};
#undef AT
#define AT(field) offsetof(wan_vae_level, field)
static const esa_row up_rows[] = {
    { ESA_VAE_HALVES, AT(time), "time_conv", "2o,o,3,1,1", 0, TIME },
    { ESA_VAE_UP2, AT(up), "resample.1", "h,o,3,3", 0, 0 },
};
#undef AT
#define AT(field) offsetof(wan_vae_down, field)
static const esa_row down_rows[] = {
    { ESA_VAE_CONV, AT(down), "resample.1", "o,o,3,3", 0, 0 },
    { ESA_VAE_CONV, AT(time), "time_conv", "o,o,3,1,1", 0, TIME },
};
#undef AT
#define AT(field) offsetof(wan_vae_encoder, field)
static const esa_row pixel_rows[] = {
    { ESA_VAE_CONV, AT(conv_in), "encoder.conv_in", "o,p,3,3,3", 0, 0 },
};
/* Only the channels of the means are used, and the last convolution mixes both halves. */
static const esa_row mean_rows[] = {
    { ESA_VAE_GAMMA, AT(norm_out), "encoder.norm_out", "o,1,1,1", 0, 0 },
    { ESA_VAE_CONV, AT(conv_out), "encoder.conv_out", "2z,o,3,3,3", 0, 0 },
    { ESA_VAE_HALF, AT(quant), "quant_conv", "2z,2z,1,1,1", 0, 0 },
};

/* One walk over the decoder or the encoder. */
typedef struct walk {
    esa_wan_vae *wan;
    esa_sizes sizes; /* i, o: channels in and out; z, p: of latents and pixels */
    int32_t *slots;
} walk;

static void set_channels(walk *k, int32_t cin, int32_t cout)
{
    k->sizes.letter['i'] = cin;
    k->sizes.letter['o'] = cout;
}

static void res_block(walk *k, wan_vae_res *r, int32_t cin, int32_t cout, const char *side,
                      const char *list, int32_t level, int32_t number)
{
    *r = (wan_vae_res){ .cin = cin, .cout = cout, .slot = *k->slots };
    *k->slots += 2;
    set_channels(k, cin, cout);
    k->sizes.have = cin != cout ? WIDENS : 0;
    if (level < 0)
        esa_vae_rows(&k->wan->vae, ESA_ROWS(res_rows), r, &k->sizes, "%s.%s.%d.", side, list,
                     number);
    else
        esa_vae_rows(&k->wan->vae, ESA_ROWS(res_rows), r, &k->sizes, "%s.%s.%d.resnets.%d.", side,
                     list, level, number);
}

/* The blocks at the size of the latents. */
static void middle(walk *k, wan_vae_res mid[2], wan_vae_attention *a, int32_t deep,
                   const char *side)
{
    res_block(k, &mid[0], deep, deep, side, "mid_block.resnets", -1, 0);
    esa_vae_rows(&k->wan->vae, ESA_ROWS(attention_rows), a, &k->sizes, "%s.mid_block.attentions.0.",
                 side);
    res_block(k, &mid[1], deep, deep, side, "mid_block.resnets", -1, 1);
}

/* The encoder from input to output. Its file counts all blocks in one list. */
static void walk_encoder(walk *k)
{
    const esa_wan_vae_config *c = &k->wan->config;
    esa_vae *vae = &k->wan->vae;
    wan_vae_encoder *e = &k->wan->encoder;
    int32_t width = c->base_dim, number = 0;
    e->in_slot = e->slots++;
    set_channels(k, 0, width);
    esa_vae_rows(vae, ESA_ROWS(pixel_rows), e, &k->sizes, "%s", "");
    for (int32_t i = c->levels - 1; i >= 0; i--) {
        const int32_t at = c->levels - 1 - i; /* in the order of the config */
        wan_vae_down *l = &e->level[i];
        l->res = e->res_all + at * c->res_blocks;
        l->cin = width;
        l->cout = c->base_dim * c->dim_mult[at];
        l->widest = l->cin > l->cout ? l->cin : l->cout;
        for (int32_t r = 0; r < c->res_blocks; r++)
            res_block(k, &l->res[r], r ? l->cout : l->cin, l->cout, "encoder", "down_blocks", -1,
                      number++);
        width = l->cout;
        if (i == 0) break;
        k->sizes.have = c->temporal[at] ? TIME : 0;
        if (c->temporal[at]) l->slot = e->slots++;
        esa_vae_rows(vae, ESA_ROWS(down_rows), l, &k->sizes, "encoder.down_blocks.%d.", number++);
    }
    middle(k, e->mid, &e->attention, width, "encoder");
    e->out_slot = e->slots++;
    esa_vae_rows(vae, ESA_ROWS(mean_rows), e, &k->sizes, "%s", "");
}

/* The decoder from input to output; it uses the levels of the config in reverse order. */
static void walk_decoder(walk *k)
{
    esa_wan_vae *wan = k->wan;
    const esa_wan_vae_config *c = &wan->config;
    const int32_t deep = c->decoder_base_dim * c->dim_mult[c->levels - 1];
    int32_t width = deep;
    wan->in_slot = wan->slots++;
    set_channels(k, 0, deep);
    esa_vae_rows(&wan->vae, ESA_ROWS(in_rows), wan, &k->sizes, "%s", "");
    middle(k, wan->mid, &wan->attention, deep, "decoder");
    for (int32_t i = 0; i < c->levels; i++) {
        wan_vae_level *l = &wan->level[i];
        l->res = wan->res_all + i * (c->res_blocks + 1);
        l->res_count = c->res_blocks + 1;
        l->cin = width;
        l->cout = c->decoder_base_dim * c->dim_mult[c->levels - 1 - i];
        l->widest = l->cin > l->cout ? l->cin : l->cout;
        for (int32_t r = 0; r < l->res_count; r++)
            res_block(k, &l->res[r], r ? l->cout : l->cin, l->cout, "decoder", "up_blocks", i, r);
        if (i == c->levels - 1) break;
        k->sizes.letter['h'] = width = l->cout / 2;
        k->sizes.have = c->temporal[c->levels - 2 - i] ? TIME : 0;
        if (k->sizes.have) l->slot = wan->slots++;
        esa_vae_rows(&wan->vae, ESA_ROWS(up_rows), l, &k->sizes,
                     "decoder.up_blocks.%d.upsamplers.0.", i);
    }
    wan->out_slot = wan->slots++;
    esa_vae_rows(&wan->vae, ESA_ROWS(out_rows), wan, &k->sizes, "%s", "");
}

static esa_status make(esa_vae *vae, const void *config)
{
    esa_wan_vae *wan = (esa_wan_vae *)vae;
    esa_wan_vae_config *c = &wan->config;
    *c = *(const esa_wan_vae_config *)config;
    vae->config = c;
    vae->z_dim = c->z_dim;
    vae->factor_t = c->factor_t;
    vae->factor_s = c->factor_s;
    vae->encoder = c->encoder;
    vae->std = c->std;
    vae->mean = c->mean;
    wan->levels = c->levels;
    ESA_TRY(esa_part_array(&vae->part, (void **)&wan->res_all,
                           c->levels * (2 * (int64_t)c->res_blocks + 1), sizeof *wan->res_all));
    wan->encoder.res_all = wan->res_all + c->levels * (c->res_blocks + 1);
    walk k = { .wan = wan, .slots = &wan->slots };
    k.sizes.letter['z'] = c->z_dim;
    k.sizes.letter['p'] = 3;
    walk_decoder(&k);
    k.slots = &wan->encoder.slots;
    if (c->encoder) walk_encoder(&k);
    return ESA_OK;
}

static void size_of(const void *config, const int32_t latent[3], int32_t size[3])
{
    const esa_wan_vae_config *c = config;
    size[0] = 1 + (latent[0] - 1) * c->factor_t;
    size[1] = latent[1] * c->factor_s;
    size[2] = latent[2] * c->factor_s;
}

const esa_vae_kind esa_wan_vae_kind = { .bytes = sizeof(esa_wan_vae),
                                        .tile_unit = 4,
                                        .overlap = { 4, 4 },
                                        .size = size_of,
                                        .make = make,
                                        .cut = esa_wan_vae_cut,
                                        .cut_bytes = esa_wan_vae_cut_bytes };
