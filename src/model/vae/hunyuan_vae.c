/* hunyuan_vae.c - HunyuanVideo's VAE: the table of its functions, and the layers of its decoder.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/hunyuan_vae.h"

#include <stdio.h>

enum { WIDENS = 1 }; /* sizes.have */

/* Convolutions of diffusers' causal class have one more level of names. */
#define AT(field) offsetof(hunyuan_res, field)
static const esa_row res_rows[] = {
    { ESA_VAE_NORM, AT(norm[0].weight), "norm1", "i", 0, 0 },
    { ESA_VAE_CONV, AT(conv[0]), "conv1.conv", "o,i,3,3,3", 0, 0 },
    { ESA_VAE_NORM, AT(norm[1].weight), "norm2", "o", 0, 0 },
    { ESA_VAE_CONV, AT(conv[1]), "conv2.conv", "o,o,3,3,3", 0, 0 },
    { ESA_VAE_CONV, AT(shortcut), "conv_shortcut.conv", "o,i,1,1,1", 0, WIDENS },
};
#undef AT
#define AT(field) offsetof(esa_hunyuan_vae, field)
static const esa_row in_rows[] = {
    { ESA_VAE_CONV, AT(post_quant), "post_quant_conv", "z,z,1,1,1", 0, 0 },
    { ESA_VAE_CONV, AT(conv_in), "decoder.conv_in.conv", "o,z,3,3,3", 0, 0 },
};
static const esa_row attention_rows[] = {
    { ESA_VAE_NORM, AT(attn_norm.weight), "group_norm", "o", 0, 0 },
    { ESA_VAE_CONV, AT(q), "to_q", "o,o", 0, 0 },
    { ESA_VAE_CONV, AT(k), "to_k", "o,o", 0, 0 },
    { ESA_VAE_CONV, AT(v), "to_v", "o,o", 0, 0 },
    { ESA_VAE_CONV, AT(out), "to_out.0", "o,o", 0, 0 },
};
static const esa_row out_rows[] = {
    { ESA_VAE_NORM, AT(norm_out.weight), "decoder.conv_norm_out", "o", 0, 0 },
    { ESA_VAE_CONV, AT(conv_out), "decoder.conv_out.conv", "3,o,3,3,3", 0, 0 },
};
#undef AT
#define AT(field) offsetof(hunyuan_level, field)
static const esa_row up_rows[] = {
    { ESA_VAE_UP2, AT(up), "upsamplers.0.conv.conv", "o,o,3,3,3", 0, 0 },
};

static void res_block(esa_hunyuan_vae *hy, esa_sizes *sizes, hunyuan_res *r, int32_t cin,
                      int32_t cout, const char *list, int32_t number)
{
    r->cin = cin;
    r->cout = cout;
    r->norm[0].channels = sizes->letter['i'] = cin;
    r->norm[1].channels = sizes->letter['o'] = cout;
    sizes->have = cin != cout ? WIDENS : 0;
    esa_vae_rows(&hy->vae, ESA_ROWS(res_rows), r, sizes, "decoder.%s.resnets.%d.", list, number);
}

static void walk_level(esa_hunyuan_vae *hy, esa_sizes *sizes, int32_t i)
{
    const esa_hunyuan_vae_config *c = &hy->config;
    hunyuan_level *l = &hy->level[i];
    char list[32];
    snprintf(list, sizeof list, "up_blocks.%d", (int)i);
    l->res = hy->res_all + i * (c->res_blocks + 1);
    l->res_count = c->res_blocks + 1;
    l->cin = i ? hy->level[i - 1].cout : c->width[c->levels - 1];
    l->cout = c->width[c->levels - 1 - i];
    for (int32_t r = 0; r < l->res_count; r++)
        res_block(hy, sizes, &l->res[r], r ? l->cout : l->cin, l->cout, list, r);
    if (i == c->levels - 1) return;
    l->time = i >= c->levels - 3; /* the last two doublings are in time too */
    esa_vae_rows(&hy->vae, ESA_ROWS(up_rows), l, sizes, "decoder.%s.", list);
}

/* The decoder from input to output; it uses the levels of the config in reverse order. */
static void walk_layers(esa_hunyuan_vae *hy)
{
    const esa_hunyuan_vae_config *c = &hy->config;
    const int32_t deep = c->width[c->levels - 1];
    esa_sizes sizes = { .letter = { ['z'] = c->z_dim, ['o'] = deep } };
    esa_vae_rows(&hy->vae, ESA_ROWS(in_rows), hy, &sizes, "%s", "");
    res_block(hy, &sizes, &hy->mid[0], deep, deep, "mid_block", 0);
    hy->attn_norm.channels = deep;
    if (c->attention)
        esa_vae_rows(&hy->vae, ESA_ROWS(attention_rows), hy, &sizes,
                     "decoder.mid_block.attentions.0.");
    res_block(hy, &sizes, &hy->mid[1], deep, deep, "mid_block", 1);
    for (int32_t i = 0; i < c->levels; i++) walk_level(hy, &sizes, i);
    hy->norm_out.channels = c->width[0];
    esa_vae_rows(&hy->vae, ESA_ROWS(out_rows), hy, &sizes, "%s", "");
}

static esa_status make(esa_vae *vae, const void *config)
{
    esa_hunyuan_vae *hy = (esa_hunyuan_vae *)vae;
    esa_hunyuan_vae_config *c = &hy->config;
    *c = *(const esa_hunyuan_vae_config *)config;
    vae->config = c;
    vae->z_dim = c->z_dim;
    vae->factor_t = c->factor_t;
    vae->factor_s = c->factor_s;
    vae->factor = 1 / c->scaling;
    ESA_TRY(esa_part_array(&vae->part, (void **)&hy->res_all,
                           c->levels * ((int64_t)c->res_blocks + 1), sizeof *hy->res_all));
    walk_layers(hy);
    return ESA_OK;
}

static void size_of(const void *config, const int32_t latent[3], int32_t size[3])
{
    const esa_hunyuan_vae_config *c = config;
    size[0] = (int32_t)esa_hunyuan_vae_count(c, latent[0]);
    size[1] = latent[1] * c->factor_s;
    size[2] = latent[2] * c->factor_s;
}

const esa_vae_kind esa_hunyuan_vae_kind = { .bytes = sizeof(esa_hunyuan_vae),
                                            .tile_unit = 4,
                                            .size = size_of,
                                            .make = make,
                                            .decode = esa_hunyuan_vae_pieces,
                                            .decode_bytes = esa_hunyuan_vae_bytes };
