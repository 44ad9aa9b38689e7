# SPDX-License-Identifier: Apache-2.0
"""A mini pipeline of every family that the engine runs, as a folder for `esa` and as a pipeline of diffusers.

    family = make("wan22", folder)
    family.ours("--method", "entropy", ...)         latents of the engine; family.said is its JSON
    family.theirs()                                 latents of diffusers

Weights are random, and of a size that lets attention prefer some blocks. The videos are long enough for a dozen blocks
of video besides those of text."""
from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import subprocess

import numpy as np
import pipelines
import pytest
import torch
from esa.core.layout import Layout
from esa.programs.native import find_command
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "wan-tiny"
WORDS = ROOT / "tests" / "golden" / "bpe"
PROMPT = "a red ball rolls to the right"
STEPS, SEED, BLOCK = 2, 7, 32
VISION = dict(hidden_size=48, num_attention_heads=4, num_hidden_layers=3, intermediate_size=96, image_size=56,
              patch_size=14, hidden_act="gelu")
WAN = dict(num_attention_heads=3, attention_head_dim=24, in_channels=16, out_channels=16, text_dim=192, freq_dim=32,
           ffn_dim=80, num_layers=2, cross_attn_norm=True)


def run_esa(*words):
    return subprocess.run([str(find_command()), *map(str, words)], capture_output=True, text=True)


def change_index(folder, **values):
    index = json.loads((folder / "model_index.json").read_text())
    index.update(values)
    (folder / "model_index.json").write_text(json.dumps(index))


# ---------------------------------------------------------------- folders


def random_transformer(seed=0, **settings):
    """Weights of a size that makes every part count."""
    from diffusers import WanTransformer3DModel
    torch.manual_seed(seed)
    model = WanTransformer3DModel(**settings)
    for name, value in model.state_dict().items():
        if value.ndim > 1 and "scale_shift" not in name:
            value.copy_(torch.randn(value.shape) / value[0].numel()**0.5)
        else:
            value.copy_(torch.randn(value.shape) * 0.2 + (1 if "norm" in name and name.endswith("weight") else 0))
    return model


def _small_vae(folder):
    """The VAE of Wan in few channels, with encoder."""
    from diffusers import AutoencoderKLWan
    shutil.rmtree(folder / "vae")
    torch.manual_seed(2)
    vae = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 2, 3, 3], num_res_blocks=2,
                           temperal_downsample=[False, True, True])
    for name, value in vae.state_dict().items():
        if name.endswith("gamma"):
            value.copy_(1 + 0.2 * torch.randn(value.shape))
    vae.save_pretrained(folder / "vae")


def make_wan(folder, transformers=1):
    """Wan 2.1, or with two transformers 2.2: wan-tiny's text encoder and small random parts."""
    shutil.copytree(TINY, folder)
    for seed, part in enumerate(("transformer", "transformer_2")[:transformers]):
        shutil.rmtree(folder / part, ignore_errors=True)
        random_transformer(seed, **WAN).save_pretrained(folder / part)
    if transformers == 2:                           # with the shift of wan-tiny the second step is the second's
        change_index(folder, transformer_2=["diffusers", "WanTransformer3DModel"], boundary_ratio=0.9)
    _small_vae(folder)


def make_wan_i2v(folder):
    """Image to video with an image encoder; the picture lies beside the folder."""
    from PIL import Image
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel
    shutil.copytree(TINY, folder)
    shutil.rmtree(folder / "transformer")
    random_transformer(**{**WAN, "in_channels": 36}, image_dim=48, added_kv_proj_dim=72).save_pretrained(
        folder / "transformer")
    torch.manual_seed(1)
    CLIPVisionModel(CLIPVisionConfig(**VISION)).save_pretrained(folder / "image_encoder")
    CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}).save_pretrained(
        folder / "image_processor")
    _small_vae(folder)
    change_index(folder, _class_name="WanImageToVideoPipeline", image_encoder=["transformers", "CLIPVisionModel"],
                 image_processor=["transformers", "CLIPImageProcessor"])
    random = np.random.default_rng(3)
    small = random.integers(0, 256, (12, 9, 3), dtype=np.uint8)
    Image.fromarray(small).resize((90, 120), Image.Resampling.BICUBIC).save(folder.parent / "picture.png")


def make_cogvideox(folder, rotary):
    """A mini as pipelines.make_cogvideox has it, with the tokenizer's own file, and 2B's ways if not rotary."""
    pipelines.make_cogvideox(str(folder))
    shutil.copy(TINY / "tokenizer" / "spiece.model", folder / "tokenizer")
    if rotary:
        return
    from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
    torch.manual_seed(9)
    transformer = CogVideoXTransformer3DModel(num_attention_heads=2, attention_head_dim=32, in_channels=4,
                                              out_channels=4, time_embed_dim=8, text_embed_dim=32, num_layers=2,
                                              sample_width=24, sample_height=16, sample_frames=5,
                                              spatial_interpolation_scale=1.875)
    pipelines._spread(transformer, 2.0)
    transformer.save_pretrained(folder / "transformer")
    scheduler = CogVideoXDPMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction",
                                      timestep_spacing="trailing", snr_shift_scale=1.0)
    scheduler.save_pretrained(folder / "scheduler")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"))


def make_hunyuan(folder):
    """A mini pipeline with every part."""
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel
    torch.manual_seed(0)
    llama, clip = (AutoTokenizer.from_pretrained(WORDS / name) for name in ("llama", "clip"))
    llama.padding_side = "right"            # as the published tokenizer has it
    text = LlamaModel(
        LlamaConfig(vocab_size=len(llama), hidden_size=48, intermediate_size=64, num_hidden_layers=4,
                    num_attention_heads=4, num_key_value_heads=2, rope_theta=500000.0, pad_token_id=llama.pad_token_id))
    pooled = CLIPTextModel(
        CLIPTextConfig(vocab_size=len(clip), hidden_size=24, intermediate_size=48, num_hidden_layers=2,
                       num_attention_heads=4, max_position_embeddings=77, eos_token_id=clip.eos_token_id,
                       bos_token_id=clip.bos_token_id))
    transformer = HunyuanVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=2,
                                                 attention_head_dim=32, num_layers=1, num_single_layers=2,
                                                 num_refiner_layers=2, text_embed_dim=48, pooled_projection_dim=24,
                                                 rope_axes_dim=(8, 12, 12))
    vae = AutoencoderKLHunyuanVideo(latent_channels=4, block_out_channels=(8, 8, 16, 16), layers_per_block=1,
                                    norm_num_groups=4)
    with torch.no_grad():                   # attention that prefers some keys, and a gate that lets it through
        for name, value in transformer.named_parameters():
            if value.dim() > 1:
                value.mul_(2.0)
            elif "norm_q" in name or "norm_k" in name:
                value.mul_(1.5)
    pipe = HunyuanVideoPipeline(text_encoder=text.eval(), tokenizer=llama, transformer=transformer.eval(),
                                vae=vae.eval(), scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
                                text_encoder_2=pooled.eval(), tokenizer_2=clip)
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


# ---------------------------------------------------------------- families


@dataclasses.dataclass
class Family:
    """A mini, and how its tokens lie. kv_len: keys that exist, where text is padded."""
    name: str
    folder: pathlib.Path
    pipe: object
    size: tuple             # frames, height, width
    layout: Layout
    layers: int
    branches: int = 2
    given: bool = False     # frame 0 is a picture that the model was given
    guidance: float | None = None
    work: float = 0.7       # that masks can reach beside the text
    extra: dict = dataclasses.field(default_factory=dict)   # more arguments of the pipeline
    words: list = dataclasses.field(default_factory=list)   # more options of every command
    kv_len: torch.Tensor | None = None
    said: dict = dataclasses.field(default_factory=dict)

    def options(self, steps=STEPS):
        """Size, steps and inputs, as `esa generate` and `esa calibrate` take them."""
        frames, height, width = self.size
        guidance = ["--guidance", self.guidance] if self.guidance else []
        return ["--model", self.folder, "--frames", frames, "--height", height, "--width", width, "--steps", steps,
                "--seed", SEED, "--threads", 1, "--device", "cpu", *guidance, *self.words]

    def generate(self, out, *more, steps=STEPS):
        """Runs the engine; what it says lies in `said`."""
        report = self.folder.parent / "said.json"
        done = run_esa("generate", *self.options(steps), "--prompt", PROMPT, "--out", out, "--json", report, *more)
        assert done.returncode == 0, done.stderr
        self.said = json.loads(report.read_text())["videos"][0]

    def ours(self, *more, steps=STEPS):
        saved = self.folder.parent / "latents.safetensors"
        self.generate(self.folder.parent / "video.npy", "--save-latents", saved, *more, steps=steps)
        return load_file(saved)["latents"]

    def theirs(self, steps=STEPS):
        frames, height, width = self.size
        guidance = {"guidance_scale": self.guidance} if self.guidance else {}
        with torch.no_grad():
            out = self.pipe(prompt=PROMPT, num_frames=frames, height=height, width=width, num_inference_steps=steps,
                            generator=torch.Generator().manual_seed(SEED), output_type="latent", **guidance,
                            **self.extra).frames[0]
        return out.transpose(0, 1) if self.name.startswith("cogvideox") else out

    def text_blocks(self, block=BLOCK):
        """Blocks that hold text, of the whole sequence."""
        n, front, back = self.layout.tokens, self.layout.text_front, self.layout.text_back
        count = -(-n // block)
        return [i for i in range(count) if i * block < front or min(n, (i + 1) * block) > n - back]


def far(got, want):
    """Largest difference, as a share of the largest number."""
    return ((got - want).abs().max() / want.abs().max()).item()


class Attention(TorchFunctionMode):
    """Inside, every self-attention over video and text that diffusers asks torch for is `attention(q, k, v)`."""

    def __init__(self, tokens, attention):
        super().__init__()
        self.tokens, self.attention, self.calls = tokens, attention, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            q, k, v = (args + tuple(kwargs[n] for n in ("query", "key", "value")[len(args):]))[:3]
            if q.shape[2] == k.shape[2] == self.tokens:
                self.calls += 1
                return self.attention(q, k, v)
        return function(*args, **kwargs)


FAMILIES = ("wan", "wan22", "wan_i2v", "cogvideox_2b", "cogvideox_5b", "hunyuan")


def families(*quick):
    """All families as parameters of a fixture; those that are not named here run with --slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def make(name, folder):
    """The family of that name, its mini in a new folder."""
    import diffusers
    folder = pathlib.Path(folder)
    known = dict(layers=2)
    if name.startswith("wan"):
        kind = diffusers.WanImageToVideoPipeline if name == "wan_i2v" else diffusers.WanPipeline
        make_wan_i2v(folder) if name == "wan_i2v" else make_wan(folder, 2 if name == "wan22" else 1)
        # Not four frames: then the VAE's attention would have as many tokens as the transformer's.
        known |= dict(size=(9, 160, 160), layout=Layout(grid=(3, 10, 10)), guidance=2.5,
                      words=pipelines.sigmas_of_version())
        if name == "wan_i2v":
            from PIL import Image
            picture = folder.parent / "picture.png"
            known |= dict(given=True, extra={"image": Image.open(picture).convert("RGB")},
                          words=[*known["words"], "--image", picture])
    elif name.startswith("cogvideox"):
        kind = diffusers.CogVideoXPipeline
        make_cogvideox(folder, name == "cogvideox_5b")
        known |= dict(size=(9, 96, 128), layout=Layout(grid=(3, 12, 16), text_front=226))
    else:
        kind = diffusers.HunyuanVideoPipeline
        make_hunyuan(folder)
        # The usual guidance, 6000 as an angle, has 5e-4 as its last bit, which two libraries of cosines round apart.
        known |= dict(size=(21, 96, 128), layout=Layout(grid=(6, 6, 8), text_back=256), layers=3, branches=1,
                      guidance=1.0, work=0.9)
    pipe = kind.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    family = Family(name, folder, pipe, **known)
    if family.given:                        # the picture is always the same, and its encoding the slowest part
        encode, kept = pipe.vae.encode, []

        def encode_once(*arguments, **more):
            kept[:] = kept or [encode(*arguments, **more)]
            return kept[0]
        pipe.vae.encode = encode_once
    if name == "hunyuan":
        with torch.no_grad():
            mask = pipe.encode_prompt(PROMPT)[2]
        grid = family.layout.grid
        family.kv_len = (grid[0] * grid[1] * grid[2] + mask.sum(1)).to(torch.int32)
    return family
