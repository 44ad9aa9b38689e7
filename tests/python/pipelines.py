# SPDX-License-Identifier: Apache-2.0
"""Small local pipelines with random weights, in diffusers' folder layout: nothing is downloaded.

    make_wan(folder)  make_wan22(folder)  make_cogvideox(folder)  make_hunyuan(folder)     -> the folder
    make_named(root)        root/wan-t2v-1.3b ... root/hunyuan-video: what $ESA_MODELS points at
    python tests/python/pipelines.py ROOT      the same from a shell

Every part is the real class: text encoder, tokenizer, transformer, scheduler, VAE. The mini Wan says that its VAE
compresses 80 times in space and 40 times in time (the pipeline takes latent sizes from those two numbers), while its
decoder enlarges 2 times: asked for 81 frames of 720 x 1280 it computes 3 x 9 x 16 tokens and hands back 3 frames of
18 x 32, so that command lines written for the real sizes run in seconds."""
from __future__ import annotations

import os
import shutil
import sys

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = os.path.join(HERE, "..", "..", "models", "wan-tiny")

# Sizes at which the mini CogVideoX and HunyuanVideo make a few hundred tokens.
COGVIDEOX_SIZE = {"num_frames": 5, "height": 64, "width": 96}
HUNYUAN_SIZE = {"num_frames": 5, "height": 64, "width": 96}


def _tokenizer():
    """A T5 tokenizer that knows English letters: that of wan-tiny (264 pieces)."""
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(os.path.join(TINY, "tokenizer"))


def _word_tokenizer(texts, bos, eos, pad, length):
    """A byte-level BPE learned from texts: words of the prompt template become single pieces, anything else becomes
    bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[pad, bos],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([eos])                 # last: CLIP's old pooling takes the largest number for the end
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(bos, tokenizer.token_to_id(bos)), (eos, tokenizer.token_to_id(eos))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad,
                                   model_max_length=length, padding_side="right")


def _t5(kind, width):
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel
    config, model = (UMT5Config, UMT5EncoderModel) if kind == "umt5" else (T5Config, T5EncoderModel)
    return model(
        config(vocab_size=264, d_model=width, d_kv=16, d_ff=2 * width, num_layers=1, num_heads=2,
               feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False))


def _spread(module, gain):
    """Random attention is nearly uniform: larger query and key weights give the selectors something to choose
    between."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if any(part in name for part in ("to_q.weight", "to_k.weight", "norm_q.weight", "norm_k.weight")):
                parameter.mul_(gain)


def _save(pipe, folder):
    pipe.set_progress_bar_config(disable=True)
    if os.path.exists(folder):
        shutil.rmtree(folder)
    pipe.save_pretrained(folder)
    return folder


def _wan_parts(heads, dim, layers, space, time, patch, seed):
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
    torch.manual_seed(seed)
    vae = AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
                           scale_factor_spatial=space, scale_factor_temporal=time)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0,
                                        num_train_timesteps=1000)

    def transformer():
        model = WanTransformer3DModel(patch_size=patch, num_attention_heads=heads, attention_head_dim=dim,
                                      in_channels=16, out_channels=16, text_dim=32, freq_dim=32, ffn_dim=64,
                                      num_layers=layers, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
                                      rope_max_seq_len=64)
        _spread(model, 2.0)
        return model
    return vae, scheduler, transformer


def make_wan(folder, heads=2, dim=32, layers=2, space=80, time=40, patch=(1, 1, 1), seed=1):
    """WanPipeline with a UMT5 text encoder."""
    from diffusers import WanPipeline
    vae, scheduler, transformer = _wan_parts(heads, dim, layers, space, time, patch, seed)
    return _save(
        WanPipeline(tokenizer=_tokenizer(), text_encoder=_t5("umt5", 32), vae=vae, scheduler=scheduler,
                    transformer=transformer()), folder)


def make_wan22(folder, heads=2, dim=32, layers=2, space=80, time=40, patch=(1, 1, 1), boundary=0.7, seed=2):
    """Wan2.2's shape: a second transformer takes over below the boundary."""
    from diffusers import WanPipeline
    vae, scheduler, transformer = _wan_parts(heads, dim, layers, space, time, patch, seed)
    return _save(
        WanPipeline(tokenizer=_tokenizer(), text_encoder=_t5("umt5", 32), vae=vae, scheduler=scheduler,
                    transformer=transformer(), transformer_2=transformer(), boundary_ratio=boundary), folder)


def make_cogvideox(folder, heads=2, dim=32, layers=2, seed=3):
    """CogVideoXPipeline with a T5 text encoder, 226 text tokens in front. Compresses 4 times in space and time."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
    torch.manual_seed(seed)
    vae = AutoencoderKLCogVideoX(down_block_types=("CogVideoXDownBlock3D", ) * 3,
                                 up_block_types=("CogVideoXUpBlock3D", ) * 3, block_out_channels=(8, 8, 8),
                                 latent_channels=4, layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4,
                                 sample_height=64, sample_width=96)
    transformer = CogVideoXTransformer3DModel(num_attention_heads=heads, attention_head_dim=dim, in_channels=4,
                                              out_channels=4, time_embed_dim=8, text_embed_dim=32, num_layers=layers,
                                              sample_width=24, sample_height=16, sample_frames=5, patch_size=2,
                                              temporal_compression_ratio=4, max_text_seq_length=226,
                                              use_rotary_positional_embeddings=True)
    _spread(transformer, 2.0)
    return _save(
        CogVideoXPipeline(
            tokenizer=_tokenizer(), text_encoder=_t5("t5", 32), vae=vae, transformer=transformer,
            scheduler=CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction",
                                             timestep_spacing="trailing")), folder)


def make_hunyuan(folder, heads=2, dim=32, layers=1, single_layers=1, seed=4):
    """HunyuanVideoPipeline with its two text encoders (Llama and CLIP). Compresses 4 times in space and time."""
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel
    torch.manual_seed(seed)
    tokenizer = _word_tokenizer([DEFAULT_PROMPT_TEMPLATE["template"]] * 3, "<bos>", "<eos>", "<pad>", 512)
    tokenizer_2 = _word_tokenizer(["a cat walking on grass"], "<bos>", "<eos>", "<pad>", 77)
    text_encoder = LlamaModel(
        LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0))
    text_encoder_2 = CLIPTextModel(
        CLIPTextConfig(vocab_size=len(tokenizer_2), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                       num_attention_heads=2, projection_dim=16, bos_token_id=tokenizer_2.bos_token_id,
                       eos_token_id=tokenizer_2.eos_token_id, pad_token_id=tokenizer_2.pad_token_id))
    vae = AutoencoderKLHunyuanVideo(block_out_channels=(8, 8, 8), down_block_types=("HunyuanVideoDownBlock3D", ) * 3,
                                    up_block_types=("HunyuanVideoUpBlock3D", ) * 3, latent_channels=4,
                                    layers_per_block=1, norm_num_groups=2, spatial_compression_ratio=4,
                                    temporal_compression_ratio=4, mid_block_add_attention=False)
    transformer = HunyuanVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=heads,
                                                 attention_head_dim=dim, num_layers=layers,
                                                 num_single_layers=single_layers, num_refiner_layers=1, mlp_ratio=2.0,
                                                 patch_size=2, patch_size_t=1, text_embed_dim=32,
                                                 pooled_projection_dim=16, rope_axes_dim=(dim // 2, dim // 4, dim // 4))
    _spread(transformer, 2.0)
    return _save(
        HunyuanVideoPipeline(text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer, vae=vae,
                             scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0), text_encoder_2=text_encoder_2,
                             tokenizer_2=tokenizer_2), folder)


def make_named(root):
    """The four names of the original under one folder, for $ESA_MODELS."""
    os.makedirs(root, exist_ok=True)
    make_wan(os.path.join(root, "wan-t2v-1.3b"))
    make_wan(os.path.join(root, "wan-t2v-14b"), heads=3, layers=3, seed=5)
    make_cogvideox(os.path.join(root, "cogvideox-5b"))
    make_hunyuan(os.path.join(root, "hunyuan-video"))
    return root


def sigmas_of_version():
    """Options of `esa generate` for the sigmas that UniPC of the installed diffusers has."""
    import diffusers
    older = tuple(int(n) for n in diffusers.__version__.split(".")[:2]) < (0, 37)
    return ["--scheduler", "unipc-0.36"] if older else []


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python tests/python/pipelines.py ROOT")
    make_named(sys.argv[1])
