/* wan_names.c - names of the tensors of Wan's transformer in the files of its authors, which
 * ComfyUI's single files and GGUF files have too.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Only names differ: no tensor is split, merged, turned or reordered. The norm in front of
 * cross-attention is norm3 there and norm2 in diffusers; the other norms of a block have no
 * weights. */
#include "model/dit/dit.h"

static const esa_naming_rule rules[] = {
    { "condition_embedder.time_embedder.linear_1", "time_embedding.0" },
    { "condition_embedder.time_embedder.linear_2", "time_embedding.2" },
    { "condition_embedder.time_proj", "time_projection.1" },
    { "condition_embedder.text_embedder.linear_1", "text_embedding.0" },
    { "condition_embedder.text_embedder.linear_2", "text_embedding.2" },
    { "condition_embedder.image_embedder.norm1", "img_emb.proj.0" },
    { "condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1" },
    { "condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3" },
    { "condition_embedder.image_embedder.norm2", "img_emb.proj.4" },
    { "blocks.#.attn2.add_k_proj", "blocks.#.cross_attn.k_img" },
    { "blocks.#.attn2.add_v_proj", "blocks.#.cross_attn.v_img" },
    { "blocks.#.attn2.norm_added_k", "blocks.#.cross_attn.norm_k_img" },
    { "proj_out", "head.head" },
    { "scale_shift_table", "head.modulation" },
    { "blocks.#.scale_shift_table", "blocks.#.modulation" },
    { "blocks.#.attn1.to_q", "blocks.#.self_attn.q" },
    { "blocks.#.attn1.to_k", "blocks.#.self_attn.k" },
    { "blocks.#.attn1.to_v", "blocks.#.self_attn.v" },
    { "blocks.#.attn1.to_out.0", "blocks.#.self_attn.o" },
    { "blocks.#.attn1.norm_q", "blocks.#.self_attn.norm_q" },
    { "blocks.#.attn1.norm_k", "blocks.#.self_attn.norm_k" },
    { "blocks.#.attn2.to_q", "blocks.#.cross_attn.q" },
    { "blocks.#.attn2.to_k", "blocks.#.cross_attn.k" },
    { "blocks.#.attn2.to_v", "blocks.#.cross_attn.v" },
    { "blocks.#.attn2.to_out.0", "blocks.#.cross_attn.o" },
    { "blocks.#.attn2.norm_q", "blocks.#.cross_attn.norm_q" },
    { "blocks.#.attn2.norm_k", "blocks.#.cross_attn.norm_k" },
    { "blocks.#.norm2", "blocks.#.norm3" },
    { "blocks.#.ffn.net.0.proj", "blocks.#.ffn.0" },
    { "blocks.#.ffn.net.2", "blocks.#.ffn.2" },
};

static const esa_naming prefixed = { .name = "diffusers", .marker = "blocks.0.attn1.to_q.weight" };

const esa_naming esa_wan_original = { .name = "the original Wan",
                                      .marker = "blocks.0.self_attn.q.weight",
                                      .rule = rules,
                                      .rules = (int32_t)(sizeof rules / sizeof rules[0]),
                                      .next = &prefixed };
