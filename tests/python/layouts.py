# SPDX-License-Identifier: Apache-2.0
"""The layouts in which HunyuanVideo's and CogVideoX's authors and ComfyUI publish a transformer, made from the tensors
of diffusers. Written a second time, not taken from the engine. Values are tensors, on "meta" too."""
import re

import torch


def rename(name, pairs):
    for ours, theirs in pairs:
        name = re.sub(ours, theirs, name)
    return name


def join(state, groups):
    """Tensors whose names match (pattern, template, place) are joined in the order of their places; others stay."""
    out, parts = {}, {}
    for name, value in state.items():
        for pattern, template, place in groups:
            found = re.fullmatch(pattern, name)
            if found:
                parts.setdefault(found.expand(template), {})[place] = value
                break
        else:
            out[name] = value
    for name, values in parts.items():
        out[name] = torch.cat([values[place] for place in sorted(values)])
    return out


# ---------------------------------------------------------------- HunyuanVideo

_REFINER = r"context_embedder\.token_refiner\.refiner_blocks\."
_HUNYUAN_GROUPS = [
    *((rf"transformer_blocks\.(\d+)\.attn\.to_{x}\.(\w+)", r"double_blocks.\1.img_attn_qkv.\2", i)
      for i, x in enumerate("qkv")),
    *((rf"transformer_blocks\.(\d+)\.attn\.add_{x}_proj\.(\w+)", r"double_blocks.\1.txt_attn_qkv.\2", i)
      for i, x in enumerate("qkv")),
    *((rf"{_REFINER}(\d+)\.attn\.to_{x}\.(\w+)", r"txt_in.individual_token_refiner.blocks.\1.self_attn_qkv.\2", i)
      for i, x in enumerate("qkv")),
    *((rf"single_transformer_blocks\.(\d+)\.{x}\.(\w+)", r"single_blocks.\1.linear1.\2", i)
      for i, x in enumerate((r"attn\.to_q", r"attn\.to_k", r"attn\.to_v", "proj_mlp"))),
]
_HUNYUAN_NAMES = [
    (r"^x_embedder\.", "img_in."),
    (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
    (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.mlp.0"),
    (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.mlp.2"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1", "txt_in.t_embedder.mlp.0"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2", "txt_in.t_embedder.mlp.2"),
    (r"^context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"^context_embedder\.proj_in\.", "txt_in.input_embedder."),
    (rf"^{_REFINER}(\d+)\.attn\.to_out\.0\.", r"txt_in.individual_token_refiner.blocks.\1.self_attn_proj."),
    (rf"^{_REFINER}(\d+)\.ff\.net\.0\.proj\.", r"txt_in.individual_token_refiner.blocks.\1.mlp.fc1."),
    (rf"^{_REFINER}(\d+)\.ff\.net\.2\.", r"txt_in.individual_token_refiner.blocks.\1.mlp.fc2."),
    (rf"^{_REFINER}(\d+)\.norm_out\.linear\.", r"txt_in.individual_token_refiner.blocks.\1.adaLN_modulation.1."),
    (rf"^{_REFINER}(\d+)\.", r"txt_in.individual_token_refiner.blocks.\1."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^proj_out\.", "final_layer.linear."),
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_(\w)\.", r"single_blocks.\1.\2_norm."),
    (r"^single_transformer_blocks\.(\d+)\.norm\.linear\.", r"single_blocks.\1.modulation.linear."),
    (r"^single_transformer_blocks\.(\d+)\.proj_out\.", r"single_blocks.\1.linear2."),
    (r"^transformer_blocks\.(\d+)\.norm1\.linear\.", r"double_blocks.\1.img_mod.linear."),
    (r"^transformer_blocks\.(\d+)\.norm1_context\.linear\.", r"double_blocks.\1.txt_mod.linear."),
    (r"^transformer_blocks\.(\d+)\.attn\.norm_added_(\w)\.", r"double_blocks.\1.txt_attn_\2_norm."),
    (r"^transformer_blocks\.(\d+)\.attn\.norm_(\w)\.", r"double_blocks.\1.img_attn_\2_norm."),
    (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0\.", r"double_blocks.\1.img_attn_proj."),
    (r"^transformer_blocks\.(\d+)\.attn\.to_add_out\.", r"double_blocks.\1.txt_attn_proj."),
    (r"^transformer_blocks\.(\d+)\.ff\.net\.0\.proj\.", r"double_blocks.\1.img_mlp.fc1."),
    (r"^transformer_blocks\.(\d+)\.ff\.net\.2\.", r"double_blocks.\1.img_mlp.fc2."),
    (r"^transformer_blocks\.(\d+)\.ff_context\.net\.0\.proj\.", r"double_blocks.\1.txt_mlp.fc1."),
    (r"^transformer_blocks\.(\d+)\.ff_context\.net\.2\.", r"double_blocks.\1.txt_mlp.fc2."),
]
_HUNYUAN_COMFY = [
    (r"^txt_in\.t_embedder\.mlp\.0\.", "txt_in.t_embedder.in_layer."),
    (r"^txt_in\.t_embedder\.mlp\.2\.", "txt_in.t_embedder.out_layer."),
    (r"^txt_in\.c_embedder\.linear_1\.", "txt_in.c_embedder.in_layer."),
    (r"^txt_in\.c_embedder\.linear_2\.", "txt_in.c_embedder.out_layer."),
    (r"^(time|guidance)_in\.mlp\.0\.", r"\1_in.in_layer."),
    (r"^(time|guidance)_in\.mlp\.2\.", r"\1_in.out_layer."),
    (r"_attn_(qkv|proj)\.", r"_attn.\1."),
    (r"_attn_q_norm\.weight", "_attn.norm.query_norm.scale"),
    (r"_attn_k_norm\.weight", "_attn.norm.key_norm.scale"),
    (r"\.q_norm\.weight", ".norm.query_norm.scale"),
    (r"\.k_norm\.weight", ".norm.key_norm.scale"),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"_mod\.linear\.", "_mod.lin."),
    (r"\.modulation\.linear\.", ".modulation.lin."),
]


def hunyuan(state):
    """The layout of Tencent, of GGUF files and of Comfy-Org's files."""
    out = {}
    for name, value in join(state, _HUNYUAN_GROUPS).items():
        if name.startswith("norm_out.linear."):
            value = torch.cat(value.chunk(2)[::-1])
        out[rename(name, _HUNYUAN_NAMES)] = value
    return out


def hunyuan_comfy(state):
    """The names that ComfyUI itself uses and saves."""
    return {rename(name, _HUNYUAN_COMFY): value for name, value in hunyuan(state).items()}


# ---------------------------------------------------------------- CogVideoX

_COG_GROUPS = [(rf"transformer_blocks\.(\d+)\.attn1\.to_{x}\.(\w+)",
                r"transformer.layers.\1.attention.query_key_value.\2", i) for i, x in enumerate("qkv")]
_COG_NAMES = [
    (r"^patch_embed\.", "mixins.patch_embed."),
    (r"^time_embedding\.linear_1\.", "time_embed.0."),
    (r"^time_embedding\.linear_2\.", "time_embed.2."),
    (r"^norm_final\.", "transformer.final_layernorm."),
    (r"^norm_out\.norm\.", "mixins.final_layer.norm_final."),
    (r"^norm_out\.linear\.", "mixins.final_layer.adaLN_modulation.1."),
    (r"^proj_out\.", "mixins.final_layer.linear."),
    (r"^transformer_blocks\.(\d+)\.attn1\.norm_q\.", r"mixins.adaln_layer.query_layernorm_list.\1."),
    (r"^transformer_blocks\.(\d+)\.attn1\.norm_k\.", r"mixins.adaln_layer.key_layernorm_list.\1."),
    (r"^transformer_blocks\.(\d+)\.attn1\.to_out\.0\.", r"transformer.layers.\1.attention.dense."),
    (r"^transformer_blocks\.(\d+)\.norm1\.norm\.", r"transformer.layers.\1.input_layernorm."),
    (r"^transformer_blocks\.(\d+)\.norm2\.norm\.", r"transformer.layers.\1.post_attention_layernorm."),
    (r"^transformer_blocks\.(\d+)\.ff\.net\.0\.proj\.", r"transformer.layers.\1.mlp.dense_h_to_4h."),
    (r"^transformer_blocks\.(\d+)\.ff\.net\.2\.", r"transformer.layers.\1.mlp.dense_4h_to_h."),
]
_COG_COMFY = [
    (r"^time_embedding\.", "time_embedding_"), (r"^transformer_blocks\.", "blocks."),
    (r"\.attn1\.to_([qkv])\.", r".\1."), (r"\.attn1\.to_out\.0\.", ".attn_out."), (r"\.attn1\.", "."),
    (r"\.ff\.net\.0\.proj\.", ".ff_proj."), (r"\.ff\.net\.2\.", ".ff_out."),
]


def cog(state):
    """The layout of the authors' files, without their prefix. A modulation has twelve parts: shift, scale and gate of
    the video before attention, then before the feed-forward, then all of the text."""
    state = join(dict(state), _COG_GROUPS)
    for name in [name for name in state if name.endswith(("norm1.linear.weight", "norm1.linear.bias"))]:
        one, two = state.pop(name).chunk(2), state.pop(name.replace("norm1", "norm2")).chunk(2)
        _, block, _, _, kind = name.split(".")
        state[f"mixins.adaln_layer.adaLN_modulations.{block}.1.{kind}"] = torch.cat([one[0], two[0], one[1], two[1]])
    return {rename(name, _COG_NAMES): value for name, value in state.items()}


def cog_comfy(state):
    return {rename(name, _COG_COMFY): value for name, value in state.items()}
