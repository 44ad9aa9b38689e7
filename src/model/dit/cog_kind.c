/* cog_kind.c - says from names and shapes alone which CogVideoX transformer a file holds.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A published size is known by its layers and its width. All its other sizes are then those of the
 * table, so that a file with one wrong shape does not pass as an unknown model. The sizes of other
 * models come from the tensors. */
#include <stdio.h>

#include "model/dit/cog_dit.h"
#include "model/weights/weights_internal.h"

typedef struct size {
    const char *name;
    int32_t layers, heads;
} size;

static const size sizes[] = { { "cogvideox-2b", 30, 30 }, { "cogvideox-5b", 42, 48 } };

static void read_sizes(const esa_weights *w, esa_cog_config *c)
{
    const char *const proj = "patch_embed.proj.weight", *const out = "proj_out.weight";
    const int32_t d = esa_weights_side(w, "transformer_blocks.0.attn1.to_out.0.weight", 2, 0, 1),
                  head_dim = esa_weights_side(w, "transformer_blocks.0.attn1.norm_q.weight", 1, 0,
                                              64),
                  patch = esa_weights_side(w, proj, 4, 2, 2);
    *c = (esa_cog_config){
        .heads = d / head_dim ? d / head_dim : 1,
        .head_dim = head_dim,
        .layers = esa_weights_blocks(w, "transformer_blocks.0.attn1.to_out.0.weight"),
        .in_channels = esa_weights_side(w, proj, 4, 1, 16),
        .patch = patch,
        .text_dim = esa_weights_side(w, "patch_embed.text_proj.weight", 2, 1, 4096),
        .time_dim = esa_weights_side(w, "time_embedding.linear_1.weight", 2, 0, 512),
        .attention_bias = esa_weights_entry(w, "transformer_blocks.0.attn1.to_q.bias") != NULL,
        .patch_bias = esa_weights_entry(w, "patch_embed.proj.bias") != NULL,
    };
    const int64_t area = (int64_t)patch * patch, rows = esa_weights_side(w, out, 2, 0, 0);
    c->out_channels = rows ? (int32_t)esa_max64(1, rows / area) : c->in_channels;
}

int32_t esa_cog_recognise(esa_weights *w, void *config, char *line, size_t bytes)
{
    esa_cog_config *c = config;
    const esa_st_entry *patch = esa_weights_entry(w, "patch_embed.proj.weight");
    const size *s = NULL;
    if (!patch || !esa_weights_entry(w, "patch_embed.text_proj.weight") ||
        !esa_weights_entry(w, "transformer_blocks.0.norm1.linear.weight"))
        return ESA_KIND_OTHER;
    read_sizes(w, c);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (sizes[i].layers == c->layers && 64 * sizes[i].heads == c->heads * c->head_dim)
            s = &sizes[i];
    if (s && patch->rank == 4) {
        *c = (esa_cog_config){ .heads = s->heads,
                               .head_dim = 64,
                               .layers = s->layers,
                               .in_channels = 16,
                               .out_channels = 16,
                               .patch = 2,
                               .text_dim = 4096,
                               .time_dim = 512,
                               .attention_bias = 1,
                               .patch_bias = 1 };
    }
    snprintf(line, bytes, "family: CogVideoX, %s: %d layers of width %d, %d channels",
             patch->rank != 4 ? "version 1.5"
             : s              ? s->name
                              : "not a published size",
             c->layers, c->heads * c->head_dim, c->in_channels);
    return patch->rank == 4 ? ESA_KIND_RUNS : ESA_KIND_KNOWN;
}
