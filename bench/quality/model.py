# SPDX-License-Identifier: Apache-2.0
"""wan-tiny (or another small Wan transformer with its VAE and text encoder) through diffusers, with the self-attention
of all layers given to a Hub; clips; and embeddings of prompts made beforehand, for machines without transformers."""
import copy
import importlib.metadata
import json
import os
import struct
import sys
import types

import torch

import plans
from hub import Hub


def stand_ins():
    """diffusers imports a few packages that nothing here uses. Where they are missing, empty ones stand in."""
    class Anything(type):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return 0

    class Empty(types.ModuleType):
        __path__, __version__ = [], "99.0.0"

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return sys.modules.get(f"{self.__name__}.{name}") or Anything(name, (), {})

    missing = set()
    parts = {"requests": ("requests", "requests.adapters", "requests.exceptions"), "regex": ("regex",),
             "PIL": ("PIL", "PIL.Image", "PIL.ImageOps", "PIL.ImageFilter"), "importlib_metadata": ()}
    for name, modules in parts.items():
        try:
            __import__(name)
        except ImportError:
            missing.add(name)
            for module in modules:
                sys.modules[module] = Empty(module)
            if name == "importlib_metadata":
                sys.modules[name] = importlib.metadata
            if name == "regex":
                import re
                sys.modules[name] = re
    real = importlib.metadata.version

    def version(name):
        try:
            return real(name)
        except importlib.metadata.PackageNotFoundError:
            if name in missing or name in ("requests", "filelock", "diffusers"):
                return "99.0.0"
            raise
    importlib.metadata.version = version
    return missing


def read_safetensors(path):
    """Tensors of a file, as f32."""
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    with open(path, "rb") as f:
        head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = bytearray(f.read())
    out = {}
    for name, entry in head.items():
        if name != "__metadata__":
            lo, hi = entry["data_offsets"]
            flat = torch.frombuffer(data[lo:hi], dtype=kinds[entry["dtype"]])
            out[name] = flat.reshape(entry["shape"]).float()
    return out


def load(model, transformer, diffusers_dir, device):
    """(transformer, VAE, scheduler) in f32."""
    if diffusers_dir and os.path.isdir(diffusers_dir):
        sys.path.insert(0, diffusers_dir)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    missing = stand_ins()
    if missing:
        print("stand-ins for", *sorted(missing), flush=True)
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel

    def part(kind, folder):                     # from_pretrained wants accelerate for this model
        with open(os.path.join(folder, "config.json")) as f:
            x = kind.from_config(json.load(f))
        state = {}
        for name in sorted(os.listdir(folder)):
            if name.endswith(".safetensors"):
                state.update(read_safetensors(os.path.join(folder, name)))
        x.load_state_dict(state)
        return x.float().to(device).eval()
    with open(os.path.join(model, "scheduler", "scheduler_config.json")) as f:
        sched = UniPCMultistepScheduler.from_config(json.load(f))
    return (part(WanTransformer3DModel, transformer or os.path.join(model, "transformer")),
            part(AutoencoderKLWan, os.path.join(model, "vae")), sched)


def encode(model, prompts):
    """As WanPipeline: {prompt: embeddings of its tokens [n, dim]}, f32. Needs transformers."""
    from transformers import AutoTokenizer, UMT5EncoderModel
    tok = AutoTokenizer.from_pretrained(os.path.join(model, "tokenizer"))
    enc = UMT5EncoderModel.from_pretrained(os.path.join(model, "text_encoder")).float().eval()
    out = {}
    for p in prompts:
        ids = tok(p, truncation=True, max_length=512, add_special_tokens=True).input_ids
        out[p] = enc(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long)).last_hidden_state[0].float()
    return out


class Processor:
    """WanAttnProcessor's steps with the attention itself given to the hub."""

    def __init__(self, layer, hub):
        self.layer, self.hub = layer, hub

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None, **_):
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, attn.to_v(hidden_states)))
        cos, sin = rotary_emb

        def turn(x):
            a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
            c, s = cos[..., 0::2], sin[..., 1::2]
            return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
        o = self.hub.attend(self.layer, turn(q).transpose(1, 2), turn(k).transpose(1, 2), v.transpose(1, 2))
        return attn.to_out[0](o.transpose(1, 2).flatten(2))


class Clips:
    """Prompts with seeds, the latents in front of every step of the dense run, the last ones, and decoded frames."""

    def __init__(self, sim, prompts, seeds, decode=True):
        self.n = len(prompts)
        self.embeds = torch.stack([sim.text(p) for p in prompts])
        self.negative = sim.text("").expand_as(self.embeds)
        noise = [torch.randn(sim.latent, generator=torch.Generator("cpu").manual_seed(s)) for s in seeds]
        sched = copy.deepcopy(sim.sched)
        sched.set_timesteps(sim.steps, device=sim.device)
        sched.set_begin_index(0)
        self.snaps = [(torch.cat(noise).to(sim.device), sched)]
        sim.hub.begin()
        self.last = sim.denoise(self, 0, snaps=self.snaps)
        self.frames = sim.decode(self.last) if decode else None

    def first(self, n):
        """The first n clips."""
        if n >= self.n:
            return self
        c = copy.copy(self)
        c.n, c.embeds, c.negative, c.last = n, self.embeds[:n], self.negative[:n], self.last[:n]
        c.snaps = []
        for x, old in self.snaps:
            sched = copy.deepcopy(old)
            for name, value in list(vars(sched).items()):
                if torch.is_tensor(value) and value.dim() == 5:
                    setattr(sched, name, value[:n])
                if isinstance(value, list):
                    cut = [y[:n] if torch.is_tensor(y) and y.dim() == 5 else y for y in value]
                    setattr(sched, name, cut)
            c.snaps.append((x[:n], sched))
        c.frames = None if self.frames is None else self.frames[:n]
        return c


class Sim:
    """The model, its hub, and the size of the clips."""

    def __init__(self, args, embeds):
        self.device = torch.device(args.device)
        self.steps, self.guidance, self.embeds = args.steps, args.guidance, embeds
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = True
        self.dit, self.vae, self.sched = load(args.model, args.transformer, args.diffusers, self.device)
        c, p = self.vae.config, self.dit.config.patch_size
        side = args.side // c.scale_factor_spatial
        self.latent = (1, c.z_dim, (args.frames - 1) // c.scale_factor_temporal + 1, side, side)
        grid = tuple(n // m for n, m in zip(self.latent[2:], p))
        self.branches = 1 if args.guidance == 1 else 2
        self.hub = Hub(grid, args.chunk or (8 if args.device == "cuda" else 1), self.branches)
        self.layers = len(self.dit.blocks)
        for i, block in enumerate(self.dit.blocks):
            block.attn1.processor = Processor(i, self.hub)
        sched = copy.deepcopy(self.sched)
        sched.set_timesteps(self.steps)
        self.shape = plans.Shape(self.steps, self.layers, grid[0] * grid[1] * grid[2],
                                 self.dit.config.attention_head_dim, [float(x) for x in sched.sigmas[:self.steps]],
                                 self.branches)

    def text(self, prompt, rows=512):
        x = self.embeds[prompt]
        return torch.cat([x, x.new_zeros(rows - x.shape[0], x.shape[1])]).to(self.device)

    def denoise(self, clips, start, snaps=None, skips=None):
        """The last latents. skips(step): the step is left out, the last velocity is used again."""
        x, sched = clips.snaps[start]
        sched, B, velocity = copy.deepcopy(sched), self.branches, None
        text = torch.cat([clips.embeds, clips.negative][:B])
        for i in range(start, self.steps):
            t = sched.timesteps[i]
            self.hub.step = i
            if velocity is None or not (skips and skips(i)):
                v = self.dit(torch.cat([x] * B), t.expand(B * clips.n), text, return_dict=False)[0]
                velocity = v if B == 1 else v[clips.n:] + self.guidance * (v[:clips.n] - v[clips.n:])
            x = sched.step(velocity, t, x, return_dict=False)[0]
            if snaps is not None and i + 1 < self.steps:
                snaps.append((x, copy.deepcopy(sched)))
        return x

    def decode(self, x, most=8 * 32 ** 2):
        """u8 [n, 3, T, H, W]; most: latent pixels of a frame at once, 8 clips of 128 x 128."""
        c, batch = self.vae.config, max(1, most // (x.shape[-1] * x.shape[-2]))
        mean, std = (torch.tensor(y, device=x.device).view(1, -1, 1, 1, 1) for y in (c.latents_mean, c.latents_std))
        x = x / (1.0 / std) + mean
        out = []
        for i in range(0, x.shape[0], batch):
            video = self.vae.decode(x[i:i + batch], return_dict=False)[0]
            out.append(((video * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8))
        return torch.cat(out)
