/* cog_names.c - names of the tensors of CogVideoX's transformer in the files of its authors (which
 * publish them for torch; people convert them to safetensors), and in those of ComfyUI.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The authors have q, k and v in one tensor. Their modulation of a block holds the parts in front
 * of attention and of the feed-forward, first for the video and then for the text; diffusers has a
 * layer for attention and one for the feed-forward, both with video in front of text. */
#include "model/dit/dit.h"

#define BLOCK "transformer_blocks.#."
#define LAYER "transformer.layers.#."
#define ADALN "mixins.adaln_layer."
#define FINAL "mixins.final_layer."

static const esa_naming_rule authors[] = {
    { "patch_embed", "mixins.patch_embed" },
    { "time_embedding.linear_1", "time_embed.0" },
    { "time_embedding.linear_2", "time_embed.2" },
    { BLOCK "norm1.linear", ADALN "adaLN_modulations.#.1@02" },
    { BLOCK "norm2.linear", ADALN "adaLN_modulations.#.1@13" },
    { BLOCK "norm1.norm", LAYER "input_layernorm" },
    { BLOCK "norm2.norm", LAYER "post_attention_layernorm" },
    { BLOCK "attn1.to_q", LAYER "attention.query_key_value@0" },
    { BLOCK "attn1.to_k", LAYER "attention.query_key_value@1" },
    { BLOCK "attn1.to_v", LAYER "attention.query_key_value@2" },
    { BLOCK "attn1.to_out.0", LAYER "attention.dense" },
    { BLOCK "attn1.norm_q", ADALN "query_layernorm_list.#" },
    { BLOCK "attn1.norm_k", ADALN "key_layernorm_list.#" },
    { BLOCK "ff.net.0.proj", LAYER "mlp.dense_h_to_4h" },
    { BLOCK "ff.net.2", LAYER "mlp.dense_4h_to_h" },
    { "norm_final", "transformer.final_layernorm" },
    { "norm_out.norm", FINAL "norm_final" },
    { "norm_out.linear", FINAL "adaLN_modulation.1" },
    { "proj_out", FINAL "linear" },
};

static const esa_naming_rule comfy[] = {
    { "time_embedding.linear_1", "time_embedding_linear_1" },
    { "time_embedding.linear_2", "time_embedding_linear_2" },
    { BLOCK "attn1.to_q", "blocks.#.q" },
    { BLOCK "attn1.to_k", "blocks.#.k" },
    { BLOCK "attn1.to_v", "blocks.#.v" },
    { BLOCK "attn1.to_out.0", "blocks.#.attn_out" },
    { BLOCK "attn1.norm_q", "blocks.#.norm_q" },
    { BLOCK "attn1.norm_k", "blocks.#.norm_k" },
    { BLOCK "ff.net.0.proj", "blocks.#.ff_proj" },
    { BLOCK "ff.net.2", "blocks.#.ff_out" },
    { BLOCK "norm1", "blocks.#.norm1" },
    { BLOCK "norm2", "blocks.#.norm2" },
};

#define COUNT(rules) (int32_t)(sizeof(rules) / sizeof(rules)[0])

static const esa_naming prefixed = { .name = "diffusers",
                                     .marker = "transformer_blocks.0.attn1.to_q.weight" },
                        comfy_names = { .name = "ComfyUI's CogVideoX",
                                        .marker = "blocks.0.ff_proj.weight",
                                        .rule = comfy,
                                        .rules = COUNT(comfy),
                                        .next = &prefixed };

const esa_naming esa_cog_original = {
    .name = "the original CogVideoX",
    .marker = "transformer.layers.0.attention.query_key_value.weight",
    .rule = authors,
    .rules = COUNT(authors),
    .next = &comfy_names
};
