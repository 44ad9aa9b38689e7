/* wan_kind.c - says from names and shapes alone which Wan transformer a file holds.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A published size is known by its layers and its width. All its other sizes are then those of the
 * table, so that a file with one wrong shape does not pass as an unknown model. The sizes of other
 * models come from the tensors. */
#include <stdio.h>

#include "model/dit/wan_dit.h"
#include "model/weights/weights_internal.h"

typedef struct size {
    const char *name;
    int32_t layers, heads, head_dim, ffn, channels, text_dim, image;
    int32_t runs; /* 1: the engine runs it */
} size;

static const size sizes[] = {
    { "wan-tiny", 8, 4, 64, 512, 16, 192, 0, 1 },
    { "wan-t2v-1.3b", 30, 12, 128, 8960, 16, 4096, 0, 1 },
    { "wan-t2v-14b or one half of wan2.2-t2v-a14b", 40, 40, 128, 13824, 16, 4096, 0, 1 },
    { "wan-i2v-14b", 40, 40, 128, 13824, 36, 4096, 1280, 1 },
    { "one half of Wan 2.2 I2V A14B", 40, 40, 128, 13824, 36, 4096, 0, 1 },
    { "Wan 2.2 TI2V 5B", 30, 24, 128, 14336, 48, 4096, 0, 0 },
};

/* The sizes of the tensors themselves. The number of heads does not show in them. */
static void read_sizes(const esa_weights *w, esa_wan_config *c)
{
    const int32_t d = esa_weights_side(w, "blocks.0.attn1.to_q.weight", 2, 0, 1);
    const int32_t head_dim = d % 128 ? 2 : 128;
    *c = (esa_wan_config){ .heads = d < head_dim ? 1 : d / head_dim,
                           .head_dim = head_dim,
                           .layers = esa_weights_blocks(w, "blocks.0.attn1.to_q.weight"),
                           .ffn = esa_weights_side(w, "blocks.0.ffn.net.0.proj.weight", 2, 0, 1),
                           .in_channels = esa_weights_side(w, "patch_embedding.weight", 5, 1, 16),
                           .text_dim = esa_weights_side(
                               w, "condition_embedder.text_embedder.linear_1.weight", 2, 1, 4096),
                           .freq_dim = esa_weights_side(
                               w, "condition_embedder.time_embedder.linear_1.weight", 2, 1, 256),
                           .rope_max = 1024,
                           .cross_norm = esa_weights_entry(w, "blocks.0.norm2.weight") != NULL,
                           .eps = 1e-6 };
    for (int32_t i = 0; i < 3; i++)
        c->patch[i] = esa_weights_side(w, "patch_embedding.weight", 5, 2 + i, i ? 2 : 1);
    const int64_t volume = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    const int64_t out = esa_weights_side(w, "proj_out.weight", 2, 0, 0);
    c->out_channels = out ? (int32_t)esa_max64(1, out / volume) : c->in_channels;
}

/* The published size with these layers and this width; among several, the one with as many
 * channels and with an image as well; NULL: none. */
static const size *published(const esa_wan_config *c, int32_t image)
{
    const size *best = NULL;
    int32_t most = -1;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const size *s = &sizes[i];
        const int32_t fits = 2 * (s->channels == c->in_channels) + ((s->image > 0) == (image > 0));
        if (s->layers != c->layers || s->heads * s->head_dim != c->heads * c->head_dim ||
            fits <= most)
            continue;
        best = s;
        most = fits;
    }
    return best;
}

int32_t esa_wan_recognise(esa_weights *w, void *config, char *line, size_t bytes)
{
    esa_wan_config *c = config;
    if (!esa_weights_entry(w, "blocks.0.attn1.to_q.weight")) return ESA_KIND_OTHER;
    read_sizes(w, c);
    c->image_dim = esa_weights_side(w, "condition_embedder.image_embedder.norm1.weight", 1, 0, 0);
    const size *s = published(c, esa_weights_entry(w, "blocks.0.attn2.add_k_proj.weight") != NULL);
    if (s) {
        c->heads = s->heads;
        c->head_dim = s->head_dim;
        c->ffn = s->ffn;
        c->in_channels = s->channels;
        c->out_channels = s->channels == 36 ? 16 : s->channels;
        c->text_dim = s->text_dim;
        c->image_dim = s->image;
        c->freq_dim = 256;
        c->patch[0] = 1;
        c->patch[1] = c->patch[2] = 2;
        c->cross_norm = 1;
    }
    snprintf(line, bytes, "family: Wan, %s: %d layers of width %d, feed-forward %d, %d channels",
             s ? s->name : "not a published size", c->layers, c->heads * c->head_dim, c->ffn,
             c->in_channels);
    return s && !s->runs ? ESA_KIND_KNOWN : ESA_KIND_RUNS;
}
