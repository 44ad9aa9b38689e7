/* hunyuan_names.c - names of the tensors of HunyuanVideo's transformer in the files of its authors,
 * which GGUF files and those of Comfy-Org have too, and in files that ComfyUI writes itself.
 * SPDX-License-Identifier: Apache-2.0
 *
 * There q, k and v are one tensor, in a single block together with the layer in front of GELU, and
 * the last modulation has shift in front of scale. Norms in front of the layers have no weights.
 * LoRAs use the same names. */
#include "model/dit/dit.h"

#define REFINER  "context_embedder.token_refiner.refiner_blocks.#."
#define INDIVID  "txt_in.individual_token_refiner.blocks.#."
#define TIME     "time_text_embed.timestep_embedder."
#define GUIDANCE "time_text_embed.guidance_embedder."
#define POOLED   "time_text_embed.text_embedder."
#define CONTEXT  "context_embedder.time_text_embed."
#define DOUBLE   "transformer_blocks.#."
#define SINGLE   "single_transformer_blocks.#."

/* The same in both. */
/* clang-format off */
#define COMMON \
    { "x_embedder", "img_in" }, \
    { POOLED "linear_1", "vector_in.in_layer" }, \
    { POOLED "linear_2", "vector_in.out_layer" }, \
    { "context_embedder.proj_in", "txt_in.input_embedder" }, \
    { REFINER "norm1", INDIVID "norm1" }, \
    { REFINER "norm2", INDIVID "norm2" }, \
    { REFINER "norm_out.linear", INDIVID "adaLN_modulation.1" }, \
    { SINGLE "attn.to_q", "single_blocks.#.linear1@0" }, \
    { SINGLE "attn.to_k", "single_blocks.#.linear1@1" }, \
    { SINGLE "attn.to_v", "single_blocks.#.linear1@2" }, \
    { SINGLE "proj_mlp", "single_blocks.#.linear1@3" }, \
    { SINGLE "proj_out", "single_blocks.#.linear2" }, \
    { "norm_out.linear", "final_layer.adaLN_modulation.1@10" }, \
    { "proj_out", "final_layer.linear" }
/* clang-format on */

static const esa_naming_rule authors[] = {
    COMMON,
    { TIME "linear_1", "time_in.mlp.0" },
    { TIME "linear_2", "time_in.mlp.2" },
    { GUIDANCE "linear_1", "guidance_in.mlp.0" },
    { GUIDANCE "linear_2", "guidance_in.mlp.2" },
    { CONTEXT "timestep_embedder.linear_1", "txt_in.t_embedder.mlp.0" },
    { CONTEXT "timestep_embedder.linear_2", "txt_in.t_embedder.mlp.2" },
    { CONTEXT "text_embedder.linear_1", "txt_in.c_embedder.linear_1" },
    { CONTEXT "text_embedder.linear_2", "txt_in.c_embedder.linear_2" },
    { REFINER "attn.to_q", INDIVID "self_attn_qkv@0" },
    { REFINER "attn.to_k", INDIVID "self_attn_qkv@1" },
    { REFINER "attn.to_v", INDIVID "self_attn_qkv@2" },
    { REFINER "attn.to_out.0", INDIVID "self_attn_proj" },
    { REFINER "ff.net.0.proj", INDIVID "mlp.fc1" },
    { REFINER "ff.net.2", INDIVID "mlp.fc2" },
    { DOUBLE "norm1.linear", "double_blocks.#.img_mod.linear" },
    { DOUBLE "norm1_context.linear", "double_blocks.#.txt_mod.linear" },
    { DOUBLE "attn.to_q", "double_blocks.#.img_attn_qkv@0" },
    { DOUBLE "attn.to_k", "double_blocks.#.img_attn_qkv@1" },
    { DOUBLE "attn.to_v", "double_blocks.#.img_attn_qkv@2" },
    { DOUBLE "attn.add_q_proj", "double_blocks.#.txt_attn_qkv@0" },
    { DOUBLE "attn.add_k_proj", "double_blocks.#.txt_attn_qkv@1" },
    { DOUBLE "attn.add_v_proj", "double_blocks.#.txt_attn_qkv@2" },
    { DOUBLE "attn.norm_q", "double_blocks.#.img_attn_q_norm" },
    { DOUBLE "attn.norm_k", "double_blocks.#.img_attn_k_norm" },
    { DOUBLE "attn.norm_added_q", "double_blocks.#.txt_attn_q_norm" },
    { DOUBLE "attn.norm_added_k", "double_blocks.#.txt_attn_k_norm" },
    { DOUBLE "attn.to_out.0", "double_blocks.#.img_attn_proj" },
    { DOUBLE "attn.to_add_out", "double_blocks.#.txt_attn_proj" },
    { DOUBLE "ff.net.0.proj", "double_blocks.#.img_mlp.fc1" },
    { DOUBLE "ff.net.2", "double_blocks.#.img_mlp.fc2" },
    { DOUBLE "ff_context.net.0.proj", "double_blocks.#.txt_mlp.fc1" },
    { DOUBLE "ff_context.net.2", "double_blocks.#.txt_mlp.fc2" },
    { SINGLE "norm.linear", "single_blocks.#.modulation.linear" },
    { SINGLE "attn.norm_q", "single_blocks.#.q_norm" },
    { SINGLE "attn.norm_k", "single_blocks.#.k_norm" },
};

static const esa_naming_rule comfy[] = {
    COMMON,
    { TIME "linear_1", "time_in.in_layer" },
    { TIME "linear_2", "time_in.out_layer" },
    { GUIDANCE "linear_1", "guidance_in.in_layer" },
    { GUIDANCE "linear_2", "guidance_in.out_layer" },
    { CONTEXT "timestep_embedder.linear_1", "txt_in.t_embedder.in_layer" },
    { CONTEXT "timestep_embedder.linear_2", "txt_in.t_embedder.out_layer" },
    { CONTEXT "text_embedder.linear_1", "txt_in.c_embedder.in_layer" },
    { CONTEXT "text_embedder.linear_2", "txt_in.c_embedder.out_layer" },
    { REFINER "attn.to_q", INDIVID "self_attn.qkv@0" },
    { REFINER "attn.to_k", INDIVID "self_attn.qkv@1" },
    { REFINER "attn.to_v", INDIVID "self_attn.qkv@2" },
    { REFINER "attn.to_out.0", INDIVID "self_attn.proj" },
    { REFINER "ff.net.0.proj", INDIVID "mlp.0" },
    { REFINER "ff.net.2", INDIVID "mlp.2" },
    { DOUBLE "norm1.linear", "double_blocks.#.img_mod.lin" },
    { DOUBLE "norm1_context.linear", "double_blocks.#.txt_mod.lin" },
    { DOUBLE "attn.to_q", "double_blocks.#.img_attn.qkv@0" },
    { DOUBLE "attn.to_k", "double_blocks.#.img_attn.qkv@1" },
    { DOUBLE "attn.to_v", "double_blocks.#.img_attn.qkv@2" },
    { DOUBLE "attn.add_q_proj", "double_blocks.#.txt_attn.qkv@0" },
    { DOUBLE "attn.add_k_proj", "double_blocks.#.txt_attn.qkv@1" },
    { DOUBLE "attn.add_v_proj", "double_blocks.#.txt_attn.qkv@2" },
    { DOUBLE "attn.norm_q.weight", "double_blocks.#.img_attn.norm.query_norm.scale" },
    { DOUBLE "attn.norm_k.weight", "double_blocks.#.img_attn.norm.key_norm.scale" },
    { DOUBLE "attn.norm_added_q.weight", "double_blocks.#.txt_attn.norm.query_norm.scale" },
    { DOUBLE "attn.norm_added_k.weight", "double_blocks.#.txt_attn.norm.key_norm.scale" },
    { DOUBLE "attn.to_out.0", "double_blocks.#.img_attn.proj" },
    { DOUBLE "attn.to_add_out", "double_blocks.#.txt_attn.proj" },
    { DOUBLE "ff.net.0.proj", "double_blocks.#.img_mlp.0" },
    { DOUBLE "ff.net.2", "double_blocks.#.img_mlp.2" },
    { DOUBLE "ff_context.net.0.proj", "double_blocks.#.txt_mlp.0" },
    { DOUBLE "ff_context.net.2", "double_blocks.#.txt_mlp.2" },
    { SINGLE "norm.linear", "single_blocks.#.modulation.lin" },
    { SINGLE "attn.norm_q.weight", "single_blocks.#.norm.query_norm.scale" },
    { SINGLE "attn.norm_k.weight", "single_blocks.#.norm.key_norm.scale" },
};

#define COUNT(rules) (int32_t)(sizeof(rules) / sizeof(rules)[0])

static const esa_naming prefixed = { .name = "diffusers",
                                     .marker = "transformer_blocks.0.attn.to_q.weight" },
                        comfy_names = { .name = "ComfyUI's HunyuanVideo",
                                        .marker = "double_blocks.0.img_attn.qkv.weight",
                                        .rule = comfy,
                                        .rules = COUNT(comfy),
                                        .next = &prefixed };

const esa_naming esa_hunyuan_original = { .name = "the original HunyuanVideo",
                                          .marker = "double_blocks.0.img_attn_qkv.weight",
                                          .rule = authors,
                                          .rules = COUNT(authors),
                                          .next = &comfy_names };
