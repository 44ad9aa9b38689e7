/* hunyuan_kind.c - says from names and shapes alone which transformer of HunyuanVideo a file holds.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The published size is known by its blocks and its width. All its other sizes are then those of
 * the table, so that a file with one wrong shape does not pass as an unknown model. The sizes of
 * other models come from the tensors. */
#include <stdio.h>

#include "model/dit/hunyuan_dit.h"
#include "model/weights/weights_internal.h"

const esa_hunyuan_config esa_hunyuan_published = { .heads = 24,
                                                   .head_dim = 128,
                                                   .ffn = 12288,
                                                   .doubles = 20,
                                                   .singles = 40,
                                                   .refiners = 2,
                                                   .in_channels = 16,
                                                   .out_channels = 16,
                                                   .patch = { 1, 2, 2 },
                                                   .text_dim = 4096,
                                                   .pooled_dim = 768,
                                                   .guidance = 1,
                                                   .axis = { 16, 56, 56 },
                                                   .theta = 256 };

static void read_sizes(const esa_weights *w, esa_hunyuan_config *c)
{
    const char *const first = "transformer_blocks.0.attn.to_out.0.weight";
    const int32_t d = esa_weights_side(w, first, 2, 0, 1),
                  head_dim = esa_weights_side(w, "transformer_blocks.0.attn.norm_q.weight", 1, 0,
                                              128);
    *c = (esa_hunyuan_config){
        .heads = d / head_dim ? d / head_dim : 1,
        .head_dim = head_dim,
        .ffn = esa_weights_side(w, "transformer_blocks.0.ff.net.0.proj.weight", 2, 0, 4),
        .doubles = esa_weights_blocks(w, first),
        .singles = esa_weights_blocks(w, "single_transformer_blocks.0.proj_out.weight"),
        .refiners = esa_weights_blocks(
            w, "context_embedder.token_refiner.refiner_blocks.0.norm1.weight"),
        .in_channels = esa_weights_side(w, "x_embedder.proj.weight", 5, 1, 16),
        .text_dim = esa_weights_side(w, "context_embedder.proj_in.weight", 2, 1, 4096),
        .pooled_dim = esa_weights_side(w, "time_text_embed.text_embedder.linear_1.weight", 2, 1,
                                       768),
        .guidance = esa_weights_entry(w, "time_text_embed.guidance_embedder.linear_1.weight") !=
                    NULL,
        .theta = esa_hunyuan_published.theta,
    };
    for (int32_t i = 0; i < 3; i++)
        c->patch[i] = esa_weights_side(w, "x_embedder.proj.weight", 5, 2 + i, i ? 2 : 1);
    const int64_t volume = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    const int64_t out = esa_weights_side(w, "proj_out.weight", 2, 0, 0);
    c->out_channels = out ? (int32_t)esa_max64(1, out / volume) : c->in_channels;
}

int32_t esa_hunyuan_recognise(esa_weights *w, void *config, char *line, size_t bytes)
{
    esa_hunyuan_config *c = config;
    if (!esa_weights_entry(w, "context_embedder.proj_in.weight") ||
        !esa_weights_entry(w, "transformer_blocks.0.attn.to_out.0.weight"))
        return ESA_KIND_OTHER;
    read_sizes(w, c);
    /* Models that make videos from images have more channels. */
    const int32_t same = c->doubles == esa_hunyuan_published.doubles &&
                         c->singles == esa_hunyuan_published.singles &&
                         c->heads * c->head_dim ==
                             esa_hunyuan_published.heads * esa_hunyuan_published.head_dim,
                  image = same && c->in_channels >= 2 * esa_hunyuan_published.in_channels;
    if (same && !image) *c = esa_hunyuan_published;
    snprintf(line, bytes,
             "family: HunyuanVideo, %s: %d double and %d single blocks of width %d, feed-forward "
             "%d, %d channels",
             image  ? "for images"
             : same ? "hunyuan-video"
                    : "not a published size",
             c->doubles, c->singles, c->heads * c->head_dim, c->ffn, c->in_channels);
    return image ? ESA_KIND_KNOWN : ESA_KIND_RUNS;
}
