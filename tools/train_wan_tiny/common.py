"""What the training steps share: model sizes, the whole-clip autoencoder passes, averaging, logs, pictures.

Every step reads and writes folders in diffusers' own layout (`vae/`, `transformer/`, `text_encoder/`,
`tokenizer/`), complete or not. A stage therefore restarts from an earlier stage's folder or from the
exported model alike.
"""
import json
import math
import time
import types
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from models import PARTS

VAE_CONFIG = dict(base_dim=24, z_dim=16, dim_mult=[1, 2, 4], num_res_blocks=1, attn_scales=[],
                  temperal_downsample=[False, True], scale_factor_temporal=2, scale_factor_spatial=4)
TEXT_CONFIG = dict(d_model=192, d_kv=64, num_heads=3, d_ff=384, num_layers=2, feed_forward_proj="gated-gelu",
                   relative_attention_num_buckets=32, relative_attention_max_distance=128, dropout_rate=0.0,
                   pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, is_encoder_decoder=False,
                   use_cache=False, tie_word_embeddings=True)

# Seeds of the clip lists. Held-out clips come from a seed no training stage uses.
HELD_OUT_SEED = 777_777

# Twelve prompts to judge the model by: every colour, shape, background and most motions occur.
EVAL_PROMPTS = [
    "a red ball rolls to the right over a blue floor",
    "a large yellow star spins in place over a purple background",
    "a white square moves to the left over a green striped background",
    "a small orange triangle moves up over a black background",
    "a large green ring grows over a white checkered background",
    "a blue cross bounces up and down over a yellow floor",
    "a purple ball moves in a circle over an orange gradient background",
    "a large black square shrinks over a red dotted background",
    "a small white ball rolls to the left behind a large red triangle over a blue background",
    "a red star falls down and a small blue ring spins over a white background",
    "a yellow triangle swings from side to side over a black striped background",
    "a green cross moves to the right in front of a large orange ball over a purple floor",
]


def _whole_clip_resample(self, x, feat_cache=None, feat_idx=None):
    """WanResample for a whole clip in one pass.

    diffusers feeds the autoencoder chunk by chunk through a feature cache. For training that means many
    small kernels. All its convolutions are causal, so one pass over the whole clip gives the same numbers,
    except that the first frame goes around the temporal resampling; without a cache diffusers' own forward
    leaves the temporal resampling out altogether, so it is done here.
    """
    if feat_cache is not None:
        return WanResample.forward(self, x, feat_cache, [0] if feat_idx is None else feat_idx)
    if self.mode == "upsample3d" and x.shape[2] > 1:
        b, c, t, h, w = x.shape
        rest = self.time_conv(x[:, :, 1:]).reshape(b, 2, c, t - 1, h, w)
        rest = torch.stack((rest[:, 0], rest[:, 1]), 3).reshape(b, c, 2 * (t - 1), h, w)
        x = torch.cat([x[:, :, :1], rest], 2)
    b, c, t, h, w = x.shape
    y = self.resample(x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w))
    x = y.reshape(b, t, *y.shape[1:]).permute(0, 2, 1, 3, 4)
    if self.mode == "downsample3d" and t > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], 2)
    return x


def enable_whole_clip(vae):
    for module in vae.modules():
        if isinstance(module, WanResample):
            module.forward = types.MethodType(_whole_clip_resample, module)
    return vae


def encode(vae, video, encoder=None):
    """Posterior mean and log-variance; `encoder` may be a compiled form of vae.encoder."""
    hidden = vae.encoder(video) if encoder is None else encoder(video)
    mean, logvar = vae.quant_conv(hidden).chunk(2, 1)
    return mean, logvar.clamp(-30, 20)


def decode(vae, latents, decoder=None):
    hidden = vae.post_quant_conv(latents)
    return vae.decoder(hidden) if decoder is None else decoder(hidden)


def _load(kind, folder, device):
    """A diffusers model in fp32 from config.json and its safetensors, in one file or several."""
    model = kind.from_config(kind.load_config(folder))
    state = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        state.update({name: value.float() for name, value in load_file(path).items()})
    model.load_state_dict(state)
    return model.to(device)


def find_part(folders, name):
    """The part's folder in the last of the stage folders that has it (they are given oldest first), or None."""
    found = [Path(f) / name for f in folders if (Path(f) / name / PARTS[name]).is_file()]
    return found[-1] if found else None


def need_part(folders, name):
    found = find_part(folders, name)
    if found is None:
        raise SystemExit(f"none of these folders holds {name}/{PARTS[name]}: {', '.join(map(str, folders))}")
    return found


def load_vae(folder, device):
    return enable_whole_clip(_load(AutoencoderKLWan, folder, device))


def load_transformer(folder, device):
    return _load(WanTransformer3DModel, folder, device)


def same_shape(model):
    """A new model with the same configuration. diffusers' from_config() replaces values that were defaults when the
    model was built, even if they were registered anew since (the latent statistics!), so it gets the plain values."""
    if hasattr(type(model), "from_config"):
        return type(model).from_config({k: v for k, v in model.config.items() if not k.startswith("_")})
    return type(model)(model.config)


def save_half(model, folder):
    """Write config and weights in f16. Its rounding (2^-11 relative) is far below one optimiser step, so
    these files serve as restart points as well as for the release; f16 keeps three bits more than bf16
    and all weights here are well inside its range. New files replace old ones only when they are complete: a
    run that is stopped in the middle of this still has its last checkpoint."""
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to("cpu", torch.float16) for k, v in model.state_dict().items()}
    for name, value in state.items():
        if not torch.isfinite(value).all():
            raise SystemExit(f"{folder.name}: {name} does not fit f16")
    copy = same_shape(model).half()
    copy.load_state_dict(state)
    copy.save_pretrained(unfinished, max_shard_size="16MB")
    for path in sorted(unfinished.iterdir()):
        path.replace(folder / path.name)
    unfinished.rmdir()


class Average:
    """Exponential moving average of a model's parameters, held in a second copy of the model."""

    def __init__(self, model, copy, decay):
        self.copy, self.decay, self.steps = copy.requires_grad_(False).eval(), decay, 0
        self.ours, self.theirs = list(self.copy.parameters()), list(model.parameters())
        torch._foreach_copy_(self.ours, [p.detach() for p in self.theirs])

    @torch.no_grad()
    def update(self):
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 10))
        torch._foreach_lerp_(self.ours, [p.detach() for p in self.theirs], 1 - decay)


def learning_rate(peak, step, fraction, warmup, decay_from, end):
    """Warm-up by steps, then constant, then a cosine over the last part of the stage's time, so that a stage
    given a number of minutes always ends with small steps. `fraction` is the part of the time used up."""
    rise = min(1.0, (step + 1) / warmup)
    if fraction <= decay_from:
        return peak * rise
    x = min(1.0, (fraction - decay_from) / (1 - decay_from))
    return peak * rise * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * x)))


class Log:
    """One JSON object per line: the loss curve. Also printed, so that a terminal shows progress."""

    def __init__(self, path):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file, self.start = open(path, "a"), time.time()

    def __call__(self, **values):
        values = {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
        values["seconds"] = round(time.time() - self.start, 1)
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        print("  ".join(f"{k} {v}" for k, v in values.items()), flush=True)


def psnr(a, b):
    """Per clip, for pictures in [-1, 1]."""
    error = ((a.float() - b.float()) ** 2).flatten(1).mean(1)
    return 10 * torch.log10(4 / error)


def contact_sheet(path, rows, titles, frames=(0, 6, 13, 19, 26, 32), largest=192):
    """Frames of each clip side by side under its title; `rows` are clips (3, frames, height, width) in [-1, 1].
    Pictures larger than `largest` are drawn smaller."""
    height, width = rows[0].shape[-2:]
    shrink = -(-max(height, width) // largest)
    height, width = height // shrink, width // shrink
    bar = 14
    sheet = Image.new("RGB", (width * len(frames), (height + bar) * len(rows)), (255, 255, 255))
    pen = ImageDraw.Draw(sheet)
    for i, (clip, title) in enumerate(zip(rows, titles)):
        pen.text((3, i * (height + bar) + 1), title, fill=(0, 0, 0))
        for j, frame in enumerate(frames):
            picture = clip[:, min(frame, clip.shape[1] - 1)].float().clamp(-1, 1)
            picture = torch.nn.functional.avg_pool2d(picture[None], shrink)[0] if shrink > 1 else picture
            picture = ((picture + 1) * 127.5).round().byte()
            sheet.paste(Image.fromarray(picture.permute(1, 2, 0).cpu().numpy()), (j * width, i * (height + bar) + bar))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
