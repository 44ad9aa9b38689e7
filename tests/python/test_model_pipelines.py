# SPDX-License-Identifier: Apache-2.0
"""Real pipelines of diffusers around the minis: steps, guidance branches and grids are told apart as each pipeline
goes about them. Prompts come as embeddings and latents go out, so text encoders and most VAEs are not needed."""
import inspect
import types

import diffusers
import esa
import model_minis
import pytest
import torch
from model_minis import words

STEPS = 3
VIDEO = {"num_frames": 9, "height": 160, "width": 192}         # 3 x 10 x 12 tokens at 4 x 8 x 8 and patches of 2
PICTURE = {"height": 240, "width": 320}                         # 15 x 20 tokens
SPARSE = esa.EsaConfig(block=32, warmup_frac=0.4, dense_first_layer=False, selector="entropy", budget=0.4)
flow = diffusers.FlowMatchEulerDiscreteScheduler


def prompts(text=12, **more):
    return {"prompt_embeds": words(text=text), "negative_prompt_embeds": words(text=text), **more}


def picture():
    from PIL import Image
    return Image.new("RGB", (192, 160), (90, 140, 60))


def pooled(text=model_minis.TEXT):
    return prompts(text, pooled_prompt_embeds=torch.randn(1, 8), negative_pooled_prompt_embeds=torch.randn(1, 8))


def build(cls, mini, scheduler=None, settings=None, **parts):
    """A pipeline with nothing but a transformer and a scheduler, and the parts given."""
    names = [n for n, p in inspect.signature(cls.__init__).parameters.items() if n != "self" and p.default is p.empty]
    parts = {**dict.fromkeys(names), "transformer": model_minis.make(mini, **(settings or {})).model,
             "scheduler": scheduler or flow(shift=3.0), **parts}
    pipe = cls(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def unipc():
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)


def wan_vae():
    return diffusers.AutoencoderKLWan(base_dim=2, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                      temperal_downsample=[False, True, True]).eval()


def vision():
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel
    config = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                              image_size=16, patch_size=8)
    return {"image_encoder": CLIPVisionModel(config).eval(),
            "image_processor": CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)}


def wan_i2v():
    """Wan 2.1: features of the image come beside its latents."""
    pipe = build(diffusers.WanImageToVideoPipeline, "wan_i2v", unipc(), {"channels": 36}, vae=wan_vae(), **vision())
    return pipe, {**VIDEO, **prompts(512), "image": picture()}, 2, (3, 10, 12)


def wan_22_i2v():
    """Wan 2.2 A14B: the second transformer takes over; the first runs the noisy steps."""
    settings = {"channels": 36, "out": 16}
    pipe = build(diffusers.WanImageToVideoPipeline, "wan_ti2v", unipc(), settings, vae=wan_vae(),
                 transformer_2=model_minis.make("wan_ti2v", seed=1, **settings).model, boundary_ratio=0.5)
    return pipe, {**VIDEO, **prompts(), "image": picture()}, 2, (3, 10, 12)


def wan_22_ti2v():
    """Wan 2.2 TI2V-5B with an image: every token has its timestep."""
    pipe = build(diffusers.WanImageToVideoPipeline, "wan_ti2v", unipc(), {"channels": 16, "out": 16}, vae=wan_vae(),
                 expand_timesteps=True)
    return pipe, {**VIDEO, **prompts(), "image": picture()}, 2, (3, 10, 12)


def wan_vace():
    """A reference image is a frame in front."""
    pipe = build(diffusers.WanVACEPipeline, "wan_vace", unipc(), {"channels": 16, "control": 96}, vae=wan_vae())
    return pipe, {**VIDEO, **prompts(), "reference_images": [picture()]}, 2, (4, 10, 12)


def wan_animate():
    """One segment of 8 frames and the reference picture."""
    pipe = build(diffusers.WanAnimatePipeline, "wan_animate", unipc(), {"latent": 16}, vae=wan_vae(), **vision())
    call = {"height": 160, "width": 192, **prompts(512), "image": picture(),
            "pose_video": [picture()] * 5, "face_video": [picture()] * 5, "segment_frame_length": 5,
            "prev_segment_conditioning_frames": 1, "guidance_scale": 2.0}
    return pipe, call, 2, (3, 10, 12)


def cogvideox_i2v():
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D", ) * 4, up_block_types=("CogVideoXUpBlock3D", ) * 4,
        block_out_channels=(4, 4, 4, 4), latent_channels=4, layers_per_block=1, norm_num_groups=2,
        temporal_compression_ratio=4).eval()
    scheduler = diffusers.CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction",
                                                 timestep_spacing="trailing")
    pipe = build(diffusers.CogVideoXImageToVideoPipeline, "cogvideox_i2v", scheduler, {"batch": 1}, vae=vae)
    return pipe, {**VIDEO, **prompts(20), "image": picture()}, 1, (3, 10, 12)


def framepack():
    """Two sections, each a video of its own; the branches' texts have different lengths."""
    class Images:
        def __call__(self, images, **more):
            return self

        def to(self, **where):
            return {}

    class Encoder:
        dtype = torch.float32

        def __call__(self):
            return types.SimpleNamespace(last_hidden_state=words(text=5, width=10))

    class Vae:
        spatial_compression_ratio, temporal_compression_ratio, dtype = 8, 4, torch.float32
        config = types.SimpleNamespace(scaling_factor=1.0)

        def encode(self, image):
            return encoded((1, 4, 1, 20, 24))
    pipe = build(diffusers.HunyuanVideoFramepackPipeline, "framepack", vae=Vae(), image_encoder=Encoder(),
                 feature_extractor=Images())
    masks = {"prompt_attention_mask": torch.ones(1, 20), "negative_prompt_attention_mask": torch.ones(1, 20)}
    masks["negative_prompt_attention_mask"][:, 7:] = 0
    call = {**VIDEO, "num_frames": 18, **pooled(), **masks, "image": picture(), "latent_window_size": 3,
            "true_cfg_scale": 2.0}
    return pipe, call, 2, (3, 10, 12)


def encoded(shape):
    """What a VAE's encode returns."""
    latents = torch.randn(shape)
    return types.SimpleNamespace(
        latent_dist=types.SimpleNamespace(sample=lambda generator=None: latents, mode=lambda: latents))


def hunyuan_i2v():
    """The first frame's tokens have a timestep of their own, so they must stay in front: frame 0 is protected."""
    class Vae:
        spatial_compression_ratio, temporal_compression_ratio, dtype = 8, 4, torch.float32
        config = types.SimpleNamespace(scaling_factor=1.0)

        def encode(self, image):
            return encoded((1, 4, 1, 20, 24))
    pipe = build(diffusers.HunyuanVideoImageToVideoPipeline, "hunyuan_i2v", vae=Vae())
    masks = {"prompt_attention_mask": torch.ones(1, 20), "negative_prompt_attention_mask": torch.ones(1, 20)}
    return pipe, {**VIDEO, **pooled(), **masks, "image": picture(), "true_cfg_scale": 2.0}, 2, (3, 10, 12)


def ltx_condition():
    """A picture for a later frame: its tokens stand in front, and positions come instead of sizes."""
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

    class Vae:
        spatial_compression_ratio, temporal_compression_ratio, dtype = 32, 8, torch.float32
        latents_mean, latents_std = torch.zeros(4), torch.ones(4)
        config = types.SimpleNamespace(scaling_factor=1.0)

        def encode(self, video):
            return encoded((1, 4, 1, 10, 12))
    pipe = build(diffusers.LTXConditionPipeline, "ltx", vae=Vae())
    masks = {"prompt_attention_mask": torch.ones(1, 12), "negative_prompt_attention_mask": torch.ones(1, 12)}
    size = {"num_frames": 17, "height": 320, "width": 384}
    call = {**size, **prompts(), **masks, "conditions": [LTXVideoCondition(image=picture(), frame_index=8)]}
    return pipe, call, 1, (4, 10, 12)


def hunyuan_15():
    """A guider names the branches; text to video has 729 image tokens, all of them masked."""
    from diffusers.guiders import ClassifierFreeGuidance

    class Vae:
        spatial_compression_ratio, temporal_compression_ratio, dtype = 16, 4, torch.float32
        config = types.SimpleNamespace(latent_channels=4, scaling_factor=1.0)
    pipe = build(diffusers.HunyuanVideo15Pipeline, "hunyuan_15", None, {"channels": 9}, vae=Vae(),
                 guider=ClassifierFreeGuidance(guidance_scale=6.0))
    embeds = prompts(20)
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        embeds.update({f"{name}_mask": torch.ones(1, 20), f"{name}_2": words(text=14, width=12),
                       f"{name}_mask_2": torch.zeros(1, 14)})
    return pipe, {**VIDEO, **embeds}, 2, (3, 10, 12)


def cosmos():
    """Two calls per step without a cache context."""
    class Anything:
        def to(self, *where):
            return self

        def check_text_safety(self, text):
            return True
    scheduler = flow(use_karras_sigmas=True)
    pipe = build(diffusers.Cosmos2TextToImagePipeline, "cosmos", scheduler, safety_checker=Anything())
    return pipe, {"height": 240, "width": 320, **prompts()}, 2, (1, 15, 20)


def skyreels_forcing():
    """A timestep per frame."""
    pipe = build(diffusers.SkyReelsV2DiffusionForcingPipeline, "skyreels_forcing", unipc())
    return pipe, {**VIDEO, **prompts(), "prompt": None, "base_num_frames": 9, "fps": 24}, 2, (3, 10, 12)


def flux():
    return build(diffusers.FluxPipeline, "flux"), {**PICTURE, **pooled(), "true_cfg_scale": 2.0}, 2, (1, 15, 20)


def flux2():
    return build(diffusers.Flux2Pipeline, "flux2"), {**PICTURE, "prompt_embeds": words(text=20)}, 1, (1, 15, 20)


def qwen():
    """The two prompts have different lengths."""
    embeds = {}
    for name, text in (("prompt_embeds", 20), ("negative_prompt_embeds", 9)):
        embeds.update({name: words(text=text), f"{name}_mask": torch.ones(1, text, dtype=torch.int64)})
    return build(diffusers.QwenImagePipeline, "qwen"), {**PICTURE, **embeds}, 2, (1, 15, 20)


def sd3():
    return build(diffusers.StableDiffusion3Pipeline, "sd3"), {**PICTURE, **pooled()}, 1, (1, 15, 20)


def ltx():
    masks = {"prompt_attention_mask": torch.ones(1, 12), "negative_prompt_attention_mask": torch.ones(1, 12)}
    size = {"num_frames": 17, "height": 320, "width": 384}
    return build(diffusers.LTXPipeline, "ltx"), {**size, **prompts(), **masks}, 1, (3, 10, 12)


def ltx2():
    """Sound is made beside the video; both branches are in the batch, and two more guidances are calls."""
    class Vae:
        spatial_compression_ratio, temporal_compression_ratio, dtype = 32, 8, torch.float32
        latents_mean, latents_std = torch.zeros(4), torch.ones(4)
        config = types.SimpleNamespace(scaling_factor=1.0)

    class AudioVae:
        mel_compression_ratio, temporal_compression_ratio, dtype = 4, 4, torch.float32
        latents_mean, latents_std = torch.zeros(128), torch.ones(128)
        config = types.SimpleNamespace(sample_rate=16000, mel_hop_length=160, mel_bins=64, latent_channels=8)

    class Connectors:
        def __call__(self, embeds, mask, **more):
            return embeds, embeds, mask
    pipe = build(diffusers.LTX2Pipeline, "ltx2", None, {"audio": 128}, vae=Vae(), audio_vae=AudioVae(),
                 connectors=Connectors())
    masks = {"prompt_attention_mask": torch.ones(1, 12), "negative_prompt_attention_mask": torch.ones(1, 12)}
    size = {"num_frames": 17, "height": 320, "width": 384}
    return pipe, {**size, **prompts(), **masks}, 3, (3, 10, 12)


def mochi():
    masks = {"prompt_attention_mask": torch.ones(1, 20, dtype=torch.bool),
             "negative_prompt_attention_mask": torch.ones(1, 20, dtype=torch.bool)}
    return build(diffusers.MochiPipeline, "mochi"), {**VIDEO, "num_frames": 13, **prompts(20), **masks}, 1, (3, 10, 12)


def skyreels():
    return build(diffusers.SkyReelsV2Pipeline, "skyreels", unipc()), {**VIDEO, **prompts()}, 2, (3, 10, 12)


PIPELINES = [wan_i2v, wan_22_i2v, wan_22_ti2v, wan_vace, wan_animate, skyreels, skyreels_forcing, cogvideox_i2v,
             hunyuan_i2v, framepack, hunyuan_15, ltx, ltx_condition, ltx2, mochi, cosmos, flux, flux2, qwen, sd3]
PIPELINES = [make for make in PIPELINES if make.__name__ not in model_minis.MISSING]


@pytest.mark.parametrize("make", PIPELINES, ids=lambda f: f.__name__)
def test_steps_and_branches(make):
    torch.manual_seed(0)
    pipe, call, branches, grid = make()
    videos = 2 if make is framepack else 1
    with esa.apply(pipe, SPARSE) as handle:
        for video in (1, 2):
            out = pipe(**call, num_inference_steps=STEPS, output_type="latent", return_dict=False)[0]
            out = out[-1] if isinstance(out, list) else out             # Framepack: one per section
            assert torch.isfinite(out).all() and handle.videos == video * videos and handle.steps == STEPS
            steps = [handle.stats(step=i) for i in range(STEPS)]
            # 0.4 of 3 steps: two are warm-up
            assert [s.calls for s in steps] == [handle.layers * branches] * STEPS
            assert [s.sparse_calls for s in steps] == [0, 0, handle.layers * branches]
        assert handle._run.geometry.grid == grid
        last = 3 if make is ltx2 else branches - 1      # LTX-2 has no call of the name "uncond", which would be 1
        assert handle._run.clock.step == STEPS - 1 and handle._run._branch % 4 == last
