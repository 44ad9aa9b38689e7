# SPDX-License-Identifier: Apache-2.0
"""Small random transformers of every class that `esa.supported()` lists, with inputs as their pipelines give them, and
the attention that should come out.

MODELS has a maker for each, MISSING the names that this diffusers has no class for. Sequences are a few hundred tokens
with an incomplete block at the end."""
from __future__ import annotations

import contextlib
import dataclasses

import diffusers
import minis
import torch
from esa.core.layout import Layout
from minis import Mini, spread
from torch.overrides import TorchFunctionMode

GRID, IMAGE = (3, 10, 12), (1, 15, 20)
HEADS, DIM, TEXT = 2, 32, 20
ROPE = (8, 12, 12)


@dataclasses.dataclass
class Model(Mini):
    """A mini with the calls of its layers where they differ: `others` are the layouts of calls of other lengths, valid
    marks the text that is not padding, where some text stands in front of the video."""
    others: tuple[Layout, ...] = ()
    valid: torch.Tensor | None = None
    protected: bool = False                 # esa.apply protects frame 0 by default

    def later(self, timestep):
        """The inputs that are others at a timestep."""
        return {"timestep": torch.full_like(self.inputs["timestep"], timestep)}

    def at(self, timestep, **changes):
        return self(**self.later(timestep), **changes)

    def layout_of(self, tokens):
        return next((x for x in (self.layout, *self.others) if x.tokens == tokens), None)


def latents(channels, grid=GRID, patch=2, batch=1):
    t, h, w = grid
    return torch.randn(batch, channels, t, patch * h, patch * w)


def at(batch=1, value=900.0):
    return torch.full((batch, ), value)


def wan_settings(**more):
    return dict(patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, out_channels=4,
                text_dim=16, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=64, **more)


def words(batch=1, text=12, width=16):
    return torch.randn(batch, text, width)


def wan_i2v(channels=9):
    """Wan 2.1 I2V: the image's features are attended beside 512 text tokens, its latents are channels."""
    settings = wan_settings(image_dim=16, added_kv_proj_dim=64)
    model = diffusers.WanTransformer3DModel(**{**settings, "in_channels": channels, "out_channels": min(16, channels)})
    inputs = {"hidden_states": latents(channels), "timestep": at(), "encoder_hidden_states": words(text=512),
              "encoder_hidden_states_image": words(text=7)}
    return Model("wan_i2v", model, inputs, Layout(grid=GRID), 2, protected=True)


def wan_ti2v(channels=4, out=4):
    """Wan 2.2 TI2V-5B: a timestep per token, 0 in the given frame."""
    model = diffusers.WanTransformer3DModel(**{**wan_settings(), "in_channels": channels, "out_channels": out})
    times = torch.full((1, 360), 900.0)
    times[:, :120] = 0
    inputs = {"hidden_states": latents(channels), "timestep": times, "encoder_hidden_states": words()}
    return Model("wan_ti2v", model, inputs, Layout(grid=GRID), 2)


def wan_vace(channels=4, control=6):
    model = diffusers.WanVACETransformer3DModel(**{**wan_settings(vace_layers=[0, 1], vace_in_channels=control),
                                                   "in_channels": channels, "out_channels": channels})
    inputs = {"hidden_states": latents(channels), "timestep": at(), "encoder_hidden_states": words(),
              "control_hidden_states": latents(control)}
    return Model("wan_vace", model, inputs, Layout(grid=GRID), 4)


def wan_animate(latent=4):
    channels = {"4": 8, "8": 8, "16": 8}
    settings = {**wan_settings(image_dim=16, added_kv_proj_dim=64), "in_channels": 2 * latent + 4,
                "out_channels": latent}
    model = diffusers.WanAnimateTransformer3DModel(
        **settings, latent_channels=latent, motion_encoder_channel_sizes=channels, motion_encoder_size=16,
        motion_style_dim=8, motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=16, face_encoder_num_heads=2,
        inject_face_latents_blocks=2)
    inputs = {"hidden_states": latents(2 * latent + 4), "timestep": at(), "encoder_hidden_states": words(text=512),
              "encoder_hidden_states_image": words(text=7), "pose_hidden_states": latents(latent, (2, 10, 12)),
              "face_pixel_values": torch.rand(1, 3, 5, 16, 16) * 2 - 1}
    return Model("wan_animate", model, inputs, Layout(grid=GRID), 2, protected=True)


def skyreels():
    model = diffusers.SkyReelsV2Transformer3DModel(**wan_settings())
    inputs = {"hidden_states": latents(4), "timestep": at(), "encoder_hidden_states": words()}
    return Model("skyreels", model, inputs, Layout(grid=GRID), 2)


def skyreels_forcing():
    """Diffusion forcing: a timestep per frame."""
    model = diffusers.SkyReelsV2Transformer3DModel(**wan_settings(inject_sample_info=True))
    inputs = {"hidden_states": latents(4), "timestep": torch.tensor([[300.0, 600.0, 900.0]]),
              "encoder_hidden_states": words(), "enable_diffusion_forcing": True, "fps": [0]}
    return Model("skyreels_forcing", model, inputs, Layout(grid=GRID), 2)


def cogvideox_i2v(name="cogvideox_i2v", batch=2, **settings):
    """CogVideoX-5b-I2V: the image's latents are channels, positions are learned as well."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    t, h, w = GRID
    model = diffusers.CogVideoXTransformer3DModel(**{
        **dict(num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=8, out_channels=4, time_embed_dim=8,
               text_embed_dim=16, num_layers=2, sample_width=2 * w, sample_height=2 * h, sample_frames=4 * t - 3,
               patch_size=2, temporal_compression_ratio=4, max_text_seq_length=TEXT,
               use_rotary_positional_embeddings=True, use_learned_positional_embeddings=True), **settings})
    rope = get_3d_rotary_pos_embed(embed_dim=DIM, crops_coords=((0, 0), (h, w)), grid_size=(h, w), temporal_size=t)
    frames = t * (settings.get("patch_size_t") or 1)
    inputs = {"hidden_states": torch.randn(batch, frames, model.config.in_channels, 2 * h, 2 * w),
              "timestep": torch.full((batch, ), 900), "encoder_hidden_states": words(batch, TEXT),
              "image_rotary_emb": rope}
    return Model(name, model, inputs, Layout(grid=GRID, text_front=TEXT), 2)


def cogvideox_15():
    """CogVideoX 1.5: patches of two frames, an offset embedding in the image-to-video model."""
    model = cogvideox_i2v("cogvideox_15", patch_size_t=2, patch_bias=False, ofs_embed_dim=8, sample_frames=21,
                      use_learned_positional_embeddings=False)
    model.inputs["ofs"] = torch.full((1, ), 2.0)
    return model


HUNYUAN = dict(num_attention_heads=HEADS, attention_head_dim=DIM, num_refiner_layers=1, mlp_ratio=2.0, patch_size=2,
               patch_size_t=1, text_embed_dim=16, rope_axes_dim=ROPE)


def half_masked(text=TEXT, batch=2):
    mask = torch.ones(batch, text)
    mask[0, 13:] = 0
    return mask


def hunyuan_i2v(name="hunyuan_i2v", kind="token_replace", channels=4):
    mask = half_masked()
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=channels, out_channels=4, num_layers=1, num_single_layers=1, pooled_projection_dim=8,
        guidance_embeds=False, image_condition_type=kind, **HUNYUAN)
    inputs = {"hidden_states": latents(channels, batch=2), "timestep": at(2), "encoder_hidden_states": words(2, TEXT),
              "encoder_attention_mask": mask, "pooled_projections": torch.randn(2, 8)}
    return Model(name, model, inputs, Layout(grid=GRID, text_back=TEXT), 2,
                 kv_len=(360 + mask.sum(1)).to(torch.int32), protected=True)


def hunyuan_concat():
    return hunyuan_i2v("hunyuan_concat", "latent_concat", 9)


def hunyuan_15(channels=4):
    """Three texts, each with its own padding; valid tokens are put in front by the transformer."""
    mask, second = half_masked(), half_masked(14)
    settings = {k: v for k, v in HUNYUAN.items() if k != "patch_size"}
    model = diffusers.HunyuanVideo15Transformer3DModel(in_channels=channels, out_channels=4, num_layers=2, patch_size=1,
                                                       text_embed_2_dim=12, image_embed_dim=10, task_type="i2v",
                                                       target_size=64, **settings)
    inputs = {"hidden_states": latents(channels, patch=1, batch=2), "timestep": at(2),
              "encoder_hidden_states": words(2, TEXT), "encoder_attention_mask": mask,
              "encoder_hidden_states_2": words(2, 14, 12), "encoder_attention_mask_2": second,
              "image_embeds": words(2, 6, 10)}
    valid = mask.sum(1) + second.sum(1) + 6
    return Model("hunyuan_15", model, inputs, Layout(grid=GRID, text_back=TEXT + 14 + 6), 2,
                 kv_len=(360 + valid).to(torch.int32), protected=True)


def framepack(batch=1):
    """The past in three resolutions in front; at batch 1 the transformer cuts the text to its valid tokens."""
    mask = half_masked(batch=batch)
    model = diffusers.HunyuanVideoFramepackTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, pooled_projection_dim=8, guidance_embeds=True,
        has_image_proj=True, image_proj_dim=10, has_clean_x_embedder=True, **HUNYUAN)
    inputs = {"hidden_states": latents(4, batch=batch), "timestep": at(batch),
              "encoder_hidden_states": words(batch, TEXT), "encoder_attention_mask": mask,
              "pooled_projections": torch.randn(batch, 8), "image_embeds": words(batch, 5, 10),
              "guidance": at(batch, 6000.0), "indices_latents": torch.arange(20, 23),
              "latents_clean": latents(4, (2, 10, 12), batch=batch), "indices_latents_clean": torch.arange(2),
              "latents_history_2x": latents(4, (2, 10, 12), batch=batch),
              "indices_latents_history_2x": torch.arange(2, 4),
              "latents_history_4x": latents(4, (3, 10, 12), batch=batch),
              "indices_latents_history_4x": torch.arange(4, 7)}
    past = 2 * 10 * 12 + 5 * 6 + 3 * 3
    text = 5 + (13 if batch == 1 else TEXT)
    valid = torch.cat([torch.ones(batch, past + 5), mask], 1).bool() if batch > 1 else None
    return Model("framepack", model, inputs, Layout(grid=GRID, text_front=past, text_back=text), 2, valid=valid)


def framepack_batch():
    return framepack(2)


def ltx(name="ltx", extra=0):
    t, h, w = GRID
    model = diffusers.LTXVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=HEADS,
                                                 attention_head_dim=DIM, cross_attention_dim=64, num_layers=2,
                                                 caption_channels=16)
    inputs = {"hidden_states": torch.randn(2, (t + extra) * h * w, 4), "timestep": at(2),
              "encoder_hidden_states": words(2), "encoder_attention_mask": half_masked(12)}
    inputs["encoder_attention_mask"][0, 7:] = 0
    return Model(name, model, {**inputs, "num_frames": t, "height": h, "width": w}, Layout(grid=GRID), 2)


def ltx_condition():
    """LTXConditionPipeline: a given frame stands in front, and positions come instead of sizes."""
    model = ltx("ltx_condition", extra=1)
    t, h, w = GRID
    frames = torch.tensor([16.0, 0.0, 1.0, 9.0])                    # the first is the condition's
    place = torch.stack(torch.meshgrid(frames, torch.arange(h) * 32.0, torch.arange(w) * 32.0, indexing="ij"))
    for name in ("num_frames", "height", "width"):
        del model.inputs[name]
    model.inputs["video_coords"] = place.flatten(1).expand(2, -1, -1)
    return dataclasses.replace(model, layout=Layout(grid=(4, h, w)))


def ltx2(audio=4, name="ltx2", grid=GRID, batch=2, **settings):
    """The video's self-attention alone is esa's; sound is attended as before."""
    t, h, w = grid
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=DIM, cross_attention_dim=64,
        audio_in_channels=audio, audio_out_channels=audio, audio_num_attention_heads=2, audio_attention_head_dim=16,
        audio_cross_attention_dim=32, **{"num_layers": 2, "caption_channels": 16, **settings})
    inputs = {"hidden_states": torch.randn(batch, t * h * w, 4), "audio_hidden_states": torch.randn(batch, 9, audio),
              "timestep": at(batch), "encoder_hidden_states": words(batch), "audio_encoder_hidden_states": words(batch),
              "encoder_attention_mask": torch.ones(batch, 12), "audio_encoder_attention_mask": torch.ones(batch, 12),
              "num_frames": t, "height": h, "width": w, "fps": 24.0, "audio_num_frames": 9}
    return Model(name, model, inputs, Layout(grid=grid), len(model.transformer_blocks))


LTX23 = dict(gated_attn=True, cross_attn_mod=True, audio_gated_attn=True, audio_cross_attn_mod=True, rope_type="split",
             perturbed_attn=True, use_prompt_embeddings=False)


def ltx23(name="ltx23", **settings):
    """The switches of LTX-2.3: gates, modulated text without a projection, positions in halves, sigma beside the
    timestep."""
    model = ltx2(name=name, **{**LTX23, **settings})
    for kind, width in (("", HEADS * DIM), ("audio_", 32)):
        model.inputs[f"{kind}encoder_hidden_states"] = torch.randn(2, 12, width)
    return dataclasses.replace(model, inputs={**model.inputs, "sigma": at(2), "use_cross_timestep": True})


def ltx25():
    """And of LTX-2.5: pictures between are marked, no bias in the video's feed-forward, static modulation of text."""
    model = ltx23("ltx25", ff_bias=False, use_prompt_adaln_single=False, use_keyframes_abs_pos_embedding=True)
    torch.nn.init.normal_(model.model.keyframes_abs_pos_embedding)
    marks = torch.zeros(2, 360, 1)
    marks[:, 120:240] = 1
    return dataclasses.replace(model, inputs={**model.inputs, "video_keyframes_mask": marks})


def minimax_h3(name="minimax_h3", keyframes=("first", ), batch=1, text=TEXT, grid=GRID):
    """One packed sequence, made by the pipeline's own function: text, keyframes, sound, video."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import (
        MiniMaxH3PrepareLayoutStep,
        MiniMaxH3SetTimestepsStep,
    )
    t, h, w = grid
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, hidden_size=48, num_layers=2, num_refiner_layers=2,
        ffn_dim=64, in_channels=4, audio_in_channels=8, text_dim=16, freq_dim=16, time_embed_hidden_dim=24,
        time_embed_dim=16, rope_freq_dim=4)
    sound = 9
    tags = torch.ones(text, dtype=torch.long)
    tags[3:7] = 0                                       # a picture in the prompt is tagged as video
    places, tags, video, audio, words_at, given, given_sound = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags, t, 2 * h, 2 * w, sound, (1, 2, 2), 2, 2, 0, keyframes)
    times, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(video, audio, given, given_sound, text, 0.1, 0.3,
                                                                   0.999, 1.0)
    inputs = {"hidden_states": torch.randn(batch, len(video), 16), "audio_hidden_states": torch.randn(batch, 18, 8),
              "encoder_hidden_states": words(batch, text), "timestep": times, "timestep_indices": indices,
              "token_tags": tags, "position_ids": places, "video_indices": video, "audio_indices": audio,
              "text_indices": words_at}
    return H3(name, model, inputs, Layout(grid=grid, text_front=text + given + 2 * sound), 2)


class H3(Model):

    def later(self, timestep):
        """Timesteps are distinct levels, rising to 1; the last rows are the video's."""
        times = self.inputs["timestep"].clone()
        times[self.inputs["timestep_indices"][-1]] = 1 - timestep / 1000
        return {"timestep": times}


def minimax_h3_ends():
    """Both ends given, two videos in a batch."""
    return minimax_h3("minimax_h3_ends", ("first", "last"), batch=2)


def mochi(valid=TEXT):
    model = diffusers.MochiTransformer3DModel(patch_size=2, num_attention_heads=HEADS, attention_head_dim=DIM,
                                              num_layers=2, pooled_projection_dim=16, in_channels=4, text_embed_dim=16,
                                              time_embed_dim=8, max_sequence_length=TEXT)
    torch.nn.init.normal_(model.pos_frequencies, std=0.5)
    mask = torch.ones(2, TEXT, dtype=torch.bool)
    mask[0, valid:] = False
    inputs = {"hidden_states": latents(4, batch=2), "timestep": at(2), "encoder_hidden_states": words(2, TEXT),
              "encoder_attention_mask": mask}
    return Model("mochi", model, inputs, Layout(grid=GRID, text_back=TEXT), 2)


def cosmos():
    model = diffusers.CosmosTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=HEADS,
                                               attention_head_dim=DIM, num_layers=2, mlp_ratio=2.0, text_embed_dim=16,
                                               adaln_lora_dim=4, max_size=(4, 48, 48), patch_size=(1, 2, 2),
                                               extra_pos_embed_type="learnable", concat_padding_mask=False)
    inputs = {"hidden_states": latents(4), "timestep": at(), "encoder_hidden_states": words(), "fps": 16}
    return Model("cosmos", model, inputs, Layout(grid=GRID), 2)


def flux(name="flux", reference=None):
    _, h, w = IMAGE
    model = diffusers.FluxTransformer2DModel(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
                                             attention_head_dim=DIM, num_attention_heads=HEADS, joint_attention_dim=16,
                                             pooled_projection_dim=8, axes_dims_rope=ROPE)

    def ids(number, height, width):
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        return torch.stack([torch.full_like(rows, number), rows, columns], -1).reshape(-1, 3).float()
    places = torch.cat([ids(0, h, w)] + ([ids(1, *reference)] if reference else []))
    inputs = {"hidden_states": torch.randn(1, len(places), 4), "timestep": at(value=0.9), "img_ids": places,
              "encoder_hidden_states": words(text=TEXT), "pooled_projections": torch.randn(1, 8),
              "txt_ids": torch.zeros(TEXT, 3)}
    return Model(name, model, inputs, Layout(grid=IMAGE, text_front=TEXT, text_back=len(places) - h * w), 2)


def flux_kontext():
    """A picture of the same size is a second frame."""
    return dataclasses.replace(flux("flux_kontext", IMAGE[1:]), layout=Layout(grid=(2, *IMAGE[1:]), text_front=TEXT))


def flux2():
    """Positions have a fourth number; the single blocks project text, image and the feed-forward in one."""
    _, h, w = IMAGE
    model = diffusers.Flux2Transformer2DModel(in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=DIM,
                                              num_attention_heads=HEADS, joint_attention_dim=16,
                                              timestep_guidance_channels=8, mlp_ratio=1.0, axes_dims_rope=(8, 8, 8, 8))
    one = torch.arange(1)
    places = torch.cartesian_prod(one, torch.arange(h), torch.arange(w), one)[None]
    inputs = {"hidden_states": torch.randn(1, h * w, 4), "timestep": at(value=0.9), "guidance": at(value=4.0),
              "encoder_hidden_states": words(text=TEXT), "img_ids": places,
              "txt_ids": torch.cartesian_prod(one, one, one, torch.arange(TEXT))[None]}
    return Model("flux2", model, inputs, Layout(grid=IMAGE, text_front=TEXT), 2)


def flux_kontext_other_size():
    return flux("flux_kontext_other_size", (7, 9))


def qwen(name="qwen", valid=TEXT, others=()):
    _, h, w = IMAGE
    model = diffusers.QwenImageTransformer2DModel(patch_size=2, in_channels=4, out_channels=1, num_layers=2,
                                                  attention_head_dim=DIM, num_attention_heads=HEADS,
                                                  joint_attention_dim=16, axes_dims_rope=ROPE)
    shapes = [IMAGE, *others]
    tokens = sum(a * b * c for a, b, c in shapes)
    mask = torch.ones(2, TEXT, dtype=torch.int64)
    mask[0, valid:] = 0
    inputs = {"hidden_states": torch.randn(2, tokens, 4), "timestep": at(2, 0.9), "img_shapes": [shapes] * 2,
              "encoder_hidden_states": words(2, TEXT), "encoder_hidden_states_mask": mask if valid < TEXT else None}
    if diffusers.__version__ < "0.37":
        inputs["txt_seq_lens"] = [TEXT, TEXT]
    return Model(name, model, inputs, Layout(grid=IMAGE, text_front=TEXT, text_back=tokens - h * w), 2,
                 valid=mask.bool() if valid < TEXT and diffusers.__version__ >= "0.37" else None)


def qwen_padded():
    return qwen("qwen_padded", valid=13)


def qwen_edit():
    return qwen("qwen_edit", others=((1, 7, 9), ))


def sd3(dual=(0, )):
    """SD 3.5 medium's shape: the first block has a second attention, over the image alone; the last drops its text."""
    _, h, w = IMAGE
    model = diffusers.SD3Transformer2DModel(sample_size=48, patch_size=2, in_channels=4, num_layers=2,
                                            attention_head_dim=DIM, num_attention_heads=HEADS, joint_attention_dim=16,
                                            caption_projection_dim=64, pooled_projection_dim=8, out_channels=4,
                                            pos_embed_max_size=48, dual_attention_layers=dual, qk_norm="rms_norm")
    inputs = {"hidden_states": torch.randn(2, 4, 2 * h, 2 * w), "timestep": at(2),
              "encoder_hidden_states": words(2, TEXT), "pooled_projections": torch.randn(2, 8)}
    return Model("sd3", model, inputs, Layout(grid=IMAGE, text_back=TEXT), 2 + len(dual), others=(Layout(grid=IMAGE), ))


MODELS = {f.__name__: f
          for f in (wan_i2v, wan_ti2v, wan_vace, wan_animate, skyreels, skyreels_forcing, cogvideox_i2v, cogvideox_15,
                    hunyuan_i2v, hunyuan_concat, hunyuan_15, framepack, framepack_batch, ltx, ltx_condition, ltx2,
                    ltx23, ltx25, minimax_h3, minimax_h3_ends, mochi, cosmos, flux, flux2, flux_kontext,
                    flux_kontext_other_size, qwen, qwen_padded, qwen_edit, sd3)}


# What this diffusers does not have; test_missing_models_are_named holds esa.supported() to it.
MISSING = {name for name, part in (("ltx2", "LTX2VideoTransformer3DModel"),
                                   ("ltx23", "MiniMaxH3Transformer3DModel"), ("ltx25", "MiniMaxH3Transformer3DModel"),
                                   ("minimax_h3", "MiniMaxH3Transformer3DModel"),
                                   ("minimax_h3_ends", "MiniMaxH3Transformer3DModel")) if not hasattr(diffusers, part)}


def make(name, seed=0, **settings):
    torch.manual_seed(seed)
    model = MODELS[name](**settings)
    spread(model.model)
    return model


# ---------------------------------------------------------------- attention as it should be


def expected(model, config, q, k, v):
    """Masked attention of one call [B, H, N, D]. Where text is padded and some of it stands in front, valid text first
    and then padding are put behind the video."""
    layout = dataclasses.replace(model.layout_of(q.shape[2]),
                                 protect_first_frame=model.protected or config.protect_first_frame)
    kv_len, places = model.kv_len, None
    if model.valid is not None:
        n, front, back = q.shape[2], layout.text_front, layout.text_back
        text = torch.cat([torch.arange(front), torch.arange(n - back, n)])
        text = text[torch.argsort(~model.valid, dim=1, stable=True)]
        places = torch.cat([torch.arange(front, n - back).expand(len(text), -1), text], 1)
        places = places[:, None, :, None].expand_as(q)
        q, k, v = (x.gather(2, places) for x in (q, k, v))
        layout = dataclasses.replace(layout, text_front=0, text_back=back + front)
        kv_len = (n - (~model.valid).sum(1)).to(torch.int32)
    config = config.replace(protect_first_frame=layout.protect_first_frame)
    mask = minis.make_mask(q, k, config, layout, kv_len)
    out = minis.masked_attention(q, k, v, mask, config.tail, kv_len)
    return out if places is None else torch.empty_like(out).scatter_(2, places, out)


class _Reference(TorchFunctionMode):

    def __init__(self, model, config):
        super().__init__()
        self.model, self.config, self.calls = model, config, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            q, k, v = (args + tuple(kwargs[n] for n in ("query", "key", "value")[len(args):]))[:3]
            if q.shape[2] == k.shape[2] and self.model.layout_of(q.shape[2]) is not None:
                self.calls += 1
                return expected(self.model, self.config, q, k, v)
        return function(*args, **kwargs)


@contextlib.contextmanager
def reference(model, config):
    """Inside, the model runs diffusers' processors with attention masked as config asks. `calls` counts them."""
    with _Reference(model, config) as mode:
        yield mode
