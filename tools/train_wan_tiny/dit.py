"""Train the text-to-video transformer of wan-tiny or of the judge by flow matching.

    python dit.py --init stage --out stage --size 64 --minutes 1.5
    python dit.py --init stage --out stage --minutes 4
    python dit.py --model judge --init ../../models/wan-tiny --adopt FOLDER --out stage-judge --minutes 2

The clips of a stage are rendered and encoded once, then kept on the device. A first stage at half size learns
words, colours and motions about eight times as fast per clip; the later ones learn the full size.

wan-tiny's small UMT5 encoder (see text.py) is trained along, not frozen: its cost is lost beside the transformer's,
and its states then say what the transformer needs. The others read the finished states of that encoder.

Prompts are treated exactly as WanPipeline does: rows past the prompt are zero, the transformer attends all
512 rows without a mask, and "no prompt" is the empty string.
"""
import argparse
import itertools
import time
from pathlib import Path

import torch
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
from transformers import UMT5EncoderModel

import tokenizer as tokenizer_step
from adopt import adopt
from clips import make_clip, render, swap_colours
from common import (EVAL_PROMPTS, HELD_OUT_SEED, Average, Log, contact_sheet, decode, encode, find_part,
                    learning_rate, load_transformer, load_vae, need_part, same_shape, save_half)
from models import MODELS
from optim import MuonAdam, split_parameters
from real import RealClips
from text import tokenize

TEXT_ROWS = 512      # WanPipeline's default max_sequence_length
SHIFT = 3.0          # of the noise levels all held-out losses are measured at


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=MODELS, default="wan-tiny")
    p.add_argument("--init", required=True, nargs="+", help="folders with vae/, tokenizer/ and text_encoder/, oldest "
                   "first; a transformer/ in them is continued, else a new one begun")
    p.add_argument("--new", action="store_true", help="begin a new transformer even where --init has one")
    p.add_argument("--adopt", help="begin from the transformer of this folder, whose heads are half as wide")
    p.add_argument("--out", required=True, help="stage folder to write")
    p.add_argument("--minutes", type=float, default=4, help="for everything, preparation included")
    p.add_argument("--steps", type=int, default=10**9)
    p.add_argument("--seed", type=int, default=11, help="clips and noise of this stage: give each stage its own")
    p.add_argument("--clips", type=int, default=8000)
    p.add_argument("--real", help="file of real clips that real.py wrote (default: drawn clips only)")
    p.add_argument("--real-clips", type=int, default=400, help="windows to cut from them, beside --clips drawn ones")
    p.add_argument("--held-out", type=int, default=64, help="clips to judge by")
    p.add_argument("--size", type=int, default=128)
    p.add_argument("--frames", type=int, default=33)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--warmup", type=int, default=100)
    p.add_argument("--decay-from", type=float, default=0.5, help="part of the time after which the rate falls")
    p.add_argument("--end-lr", type=float, default=0.02, help="rate at the end, as a part of the peak")
    p.add_argument("--average", type=float, default=0.995, help="decay of the weight average")
    p.add_argument("--dropout", type=float, default=0.1, help="part of the captions left empty, for guidance")
    p.add_argument("--shift", type=float, default=SHIFT, help="of the noise levels trained: more is noisier")
    p.add_argument("--end-shift", type=float, help="the shift moves there evenly over the time (default: it stays)")
    p.add_argument("--save-every", type=float, default=100, help="seconds between checkpoints")
    p.add_argument("--log-every", type=int, help="steps between log lines (default: 100, without a GPU 5)")
    p.add_argument("--sheet-steps", type=int, default=8)
    p.add_argument("--sheet-shifts", type=float, nargs="+", help="draw a sheet with each of these (default: the "
                   "last one trained)")
    p.add_argument("--guidance", type=float, nargs="+", default=[2.5], help="and with each of these")
    p.add_argument("--prompts", type=int, default=len(EVAL_PROMPTS), help="how many to draw at the end")
    p.add_argument("--real-prompts", type=int, default=6, help="and how many captions of real clips")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--profile", action="store_true", help="write where the time of a step goes to profile.txt")
    args = p.parse_args()
    args.end_shift = args.end_shift or args.shift
    return args


def initialise(net):
    """Start as the identity: zero gates, zero output. Padding rows start with a low attention score.

    The pipeline appends some 490 zero rows to a prompt of 20 tokens and masks none. Left to a random start the
    cross-attention spreads over them and hardly sees the words. A zero row's key is the bias alone, so opposite
    biases of query and key give exactly those rows a score of about -5, and every other row its usual one.
    """
    for module in net.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
            torch.nn.init.zeros_(module.bias)
    torch.nn.init.xavier_uniform_(net.patch_embedding.weight.data.view(net.patch_embedding.weight.shape[0], -1))
    torch.nn.init.zeros_(net.patch_embedding.bias)
    torch.nn.init.zeros_(net.condition_embedder.time_proj.weight)
    torch.nn.init.zeros_(net.proj_out.weight)
    torch.nn.init.zeros_(net.scale_shift_table)
    for block in net.blocks:
        torch.nn.init.zeros_(block.scale_shift_table)
        torch.nn.init.zeros_(block.attn2.to_out[0].weight)
        sign = torch.randint(0, 2, block.attn2.to_q.bias.shape, device=block.attn2.to_q.bias.device) * 2.0 - 1
        block.attn2.to_q.bias.data.copy_(0.8 * sign)
        block.attn2.to_k.bias.data.copy_(-0.05 * sign)
    return net


class TrainingAttention:
    """What diffusers' WanAttnProcessor computes, with the rotation of channel pairs written as a product with a
    constant matrix. Written with strided halves, as there, the compiler makes one slow kernel of rotation and norm: a
    quarter of the card's time. Nothing of this reaches the saved model."""

    def __init__(self, head_dim, device):
        even = torch.arange(0, head_dim, 2)
        turn = torch.zeros(head_dim, head_dim)  # x @ turn: (a, b) -> (-b, a) in every pair
        turn[even + 1, even], turn[even, even + 1] = -1.0, 1.0
        self.turn = turn.to(device)

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context)), attn.to_v(context)
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        if rotary_emb is not None:
            cos, sin = rotary_emb
            query, key = (x * cos + (x @ self.turn) * sin for x in (query, key))
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


def load_models(args, device):
    """The text encoder, and the transformer: continued where a folder has one, else new."""
    config = MODELS[args.model].transformer
    text = UMT5EncoderModel.from_pretrained(need_part(args.init, "text_encoder"), dtype=torch.float32).to(device)
    folder = None if args.new else find_part(args.init, "transformer")
    if args.adopt:
        net = adopt(WanTransformer3DModel(**config), load_transformer(args.adopt, "cpu"))
        return net.to(device), text, "adopted"
    if folder is None:
        return initialise(WanTransformer3DModel(**config).to(device)), text, "new"
    net = load_transformer(folder, device)
    other = {k: net.config[k] for k, v in config.items() if k != "patch_size" and net.config[k] != v}
    if other:
        raise SystemExit(f"{folder} is no {args.model}: it has {other}; --new begins a new transformer")
    return net, text, "continued"


def token_states(text_encoder, ids):
    """Hidden states of the tokens; padding is zero."""
    mask = (ids != 0).long()
    return text_encoder(ids, mask).last_hidden_state * mask.unsqueeze(-1)


def pad_states(states):
    return torch.nn.functional.pad(states, (0, 0, 0, TEXT_ROWS - states.shape[1]))


def encode_text(text_encoder, ids):
    """Hidden states of the tokens, then zero rows up to TEXT_ROWS: what WanPipeline hands the transformer."""
    return pad_states(token_states(text_encoder, ids))


def encoding_batch(size):
    """Clips that the autoencoder takes at once: as many pixels as 32 clips of 128 x 128 have."""
    return max(1, 32 * 128**2 // size**2)


def drawn_clips(world, seed, count, size, frames, device):
    """Clips 0..count-1 of a seed with their captions, in batches."""
    batch = encoding_batch(size)
    for i in range(0, count, batch):
        clips = [make_clip(seed, j, world) for j in range(i, min(i + batch, count))]
        yield render([c.row for c in clips], frames, size, device=device, world=world), [c.caption for c in clips]


@torch.no_grad()
def make_latents(vae, batches, device):
    """Normalised latents of clips and their captions, both given in batches."""
    mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
    captions, parts = [], []
    for video, texts in batches:
        captions += texts
        with torch.autocast(device.type, torch.bfloat16):
            latents = encode(vae, video.to(device).contiguous(memory_format=torch.channels_last_3d))[0]
        parts.append(((latents.float() - mean) / std).to(torch.bfloat16).contiguous())
    return torch.cat(parts), captions


def flow_loss(net, latents, text, noise, sigma):
    """Squared error of the predicted velocity (noise - data) at x = (1 - sigma) data + sigma noise, per clip."""
    s = sigma.view(-1, 1, 1, 1, 1)
    mixed = (1 - s) * latents + s * noise
    with torch.autocast(latents.device.type, torch.bfloat16):
        velocity = net(mixed, sigma * 1000, text, return_dict=False)[0]
    return ((velocity.float() - (noise - latents)) ** 2).flatten(1).mean(1)


def shifted(u, shift=SHIFT):
    return shift * u / (1 + (shift - 1) * u)


@torch.no_grad()
def generate(net, text_encoder, tokenizer, prompts, shape, steps, shift, guidance, seed, device):
    """Latents for the prompts, by the exported scheduler; each prompt has its own noise."""
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed + i)) for i in range(len(prompts))]
    latents = torch.stack(noise).to(device)
    text = encode_text(text_encoder, tokenize(tokenizer, prompts, device))
    empty = encode_text(text_encoder, tokenize(tokenizer, [""] * len(prompts), device))
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    scheduler.set_timesteps(steps, device=device)
    for t in scheduler.timesteps:
        when = t.expand(len(prompts)).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            yes = net(latents, when, text, return_dict=False)[0].float()
            no = net(latents, when, empty, return_dict=False)[0].float()
        latents = scheduler.step(no + guidance * (yes - no), t, latents, return_dict=False)[0]
    return latents


def quickest_attention(shape, log):
    """PyTorch's fused attention kernels differ a good deal from card to card: time them and keep the best."""
    backends = {"flash": torch.backends.cuda.enable_flash_sdp, "cudnn": torch.backends.cuda.enable_cudnn_sdp}
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    found = {}
    for name in backends:
        for other, switch in backends.items():
            switch(other == name)
        try:
            # Layout (batch, tokens, heads, dim) as the model has it, seen as (batch, heads, tokens, dim).
            q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            for i in range(4):
                if i == 1:
                    torch.cuda.synchronize()
                    start = time.time()
                out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
                out.sum().backward()
            torch.cuda.synchronize()
            found[name] = (time.time() - start) / 3
        except RuntimeError as error:
            log(attention=name, failed=str(error)[:200])
    best = min(found, key=found.get)
    for name, switch in backends.items():
        switch(name == best)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    log(attention=best, ms={k: round(v * 1e3, 2) for k, v in found.items()})


class Trainer:
    def __init__(self, args, device, log):
        self.args, self.device, self.model = args, device, MODELS[args.model]
        self.shift, self.best = args.shift, float("inf")
        self.tokenizer = tokenizer_step.load(need_part(args.init, "tokenizer"))
        self.net, self.text, origin = load_models(args, device)
        self.average = Average(self.net, same_shape(self.net).to(device), args.average)
        self.text_average = Average(self.text, same_shape(self.text).to(device), args.average)
        attention = TrainingAttention(self.net.config.attention_head_dim, device)
        for block in self.net.blocks:
            block.attn1.set_processor(attention)
            block.attn2.set_processor(attention)
        self.vae = load_vae(need_part(args.init, "vae"), device).requires_grad_(False).eval()
        start = time.time()
        shape = (args.size, args.frames, device)
        drawn = drawn_clips(self.model.world, args.seed, args.clips, *shape)
        self.latents, captions = make_latents(
            self.vae, itertools.chain(drawn, self.real_clips(args.real_clips, False)), device)
        self.held_out, held_captions = make_latents(
            self.vae, drawn_clips(self.model.world, HELD_OUT_SEED, args.held_out, *shape), device)
        self.held_real = None
        if args.real:
            self.held_real, real_captions = make_latents(self.vae, self.real_clips(16, True), device)
            self.held_real_ids = tokenize(self.tokenizer, real_captions, device)
        self.prompts = EVAL_PROMPTS[:args.prompts] + self.some_captions(captions[args.clips:], args.real_prompts)
        self.ids = tokenize(self.tokenizer, captions, device)
        self.held_ids = tokenize(self.tokenizer, held_captions, device)
        self.swapped_ids = tokenize(self.tokenizer, [swap_colours(c) for c in held_captions], device)
        self.empty = tokenize(self.tokenizer, [""], device)
        if self.model.trains_text:
            matrices, others = split_parameters(self.net, self.text)
        else:
            matrices, others = split_parameters(self.net)
            self.freeze_text()
        self.parameters = matrices + others
        self.optimizer = MuonAdam(matrices, others)
        log(event="start", model=args.model, transformer=origin,
            parameters=sum(p.numel() for p in self.net.parameters()),
            text_parameters=sum(p.numel() for p in self.text.parameters()), latents=list(self.latents.shape),
            std=self.latents.float().std().item(), encode_seconds=round(time.time() - start, 1), seed=args.seed,
            held_out_at_shift=[args.end_shift, round(self.held_out_loss(self.held_ids, args.end_shift), 5)])
        if device.type == "cuda":
            frames, height, width = self.latents.shape[2:]
            quickest_attention((args.batch, frames * height * width // 4, self.net.config.num_attention_heads,
                                self.net.config.attention_head_dim), log)
        if not args.no_compile:
            self.compile(log)

    def real_clips(self, count, held_out):
        """Windows of the real clips, in batches: those to train on, or those held out."""
        a = self.args
        if not a.real:
            return ()
        seed = HELD_OUT_SEED if held_out else a.seed
        return RealClips(a.real, a.size, held_out).batches(seed, count, a.frames, encoding_batch(a.size))

    @staticmethod
    def some_captions(captions, count):
        """So many different captions, from all over the list."""
        different = sorted(set(captions))
        return different[::max(1, len(different) // count)][:count] if count else []

    @torch.no_grad()
    def freeze_text(self):
        """A text encoder that is not trained reads every caption once. The last row is the empty caption's."""
        self.text.requires_grad_(False)
        ids = torch.cat([self.ids, self.empty])
        self.states = torch.cat([token_states(self.text, part) for part in ids.split(512)])

    def compile(self, log):
        """All blocks are alike: compiling one serves them all and takes seconds instead of minutes."""
        start = time.time()
        try:
            self.net.compile_repeated_blocks(fullgraph=True, dynamic=False)
            self.step(0.0)
            log(event="compiled", compile_seconds=round(time.time() - start, 1))
        except Exception as error:  # a compiler that fails must not cost the training run
            torch.compiler.set_stance("force_eager")
            log(event="not compiled", reason=str(error)[:300])

    def step(self, lr):
        a = self.args
        pick = torch.randint(0, len(self.latents), (a.batch,), device=self.device)
        drop = torch.rand(a.batch, 1, device=self.device) < a.dropout
        if self.model.trains_text:
            text = encode_text(self.text, torch.where(drop, self.empty, self.ids[pick]))
        else:
            text = pad_states(self.states[torch.where(drop[:, 0], len(self.ids), pick)])
        latents = self.latents[pick].float()
        # One noise level from each of `batch` equal parts: the loss varies less from step to step.
        u = (torch.randperm(a.batch, device=self.device) + torch.rand(a.batch, device=self.device)) / a.batch
        loss = flow_loss(self.net, latents, text, torch.randn_like(latents), shifted(u, self.shift)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step(lr)
        self.average.update()
        if self.model.trains_text:
            self.text_average.update()
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self, ids, shift=SHIFT, clips=None):
        """Of the averaged weights, always with the same noise and noise levels. `ids` may be other captions than
        the clips' own: what the loss gains by the right ones is what the model has understood of them."""
        generator, losses = torch.Generator().manual_seed(5), []
        clips, batch = self.held_out if clips is None else clips, min(16, self.args.batch)
        for i in range(0, len(clips), batch):
            latents = clips[i:i + batch].float()
            noise = torch.randn(latents.shape, generator=generator).to(self.device)
            sigma = shifted((torch.arange(len(latents), device=self.device) + 0.5) / len(latents), shift)
            text = encode_text(self.text_average.copy, ids[i:i + batch])
            losses.append(flow_loss(self.average.copy, latents, text, noise, sigma))
        return torch.cat(losses).mean().item()

    def save(self, log):
        """Keep the averaged weights if they are the best so far on the held-out clips."""
        found = self.held_out_loss(self.held_ids, self.args.end_shift)
        log(event="held out", held_out_at_shift=[self.args.end_shift, round(found, 5)], saved=found < self.best)
        if not found < self.best:  # worse, or no number at all
            return
        self.best = found
        save_half(self.average.copy, Path(self.args.out) / "transformer")
        if self.model.trains_text:
            save_half(self.text_average.copy, Path(self.args.out) / "text_encoder")

    @torch.no_grad()
    def draw(self, path, shift, guidance):
        a, parts = self.args, []
        for i in range(0, len(self.prompts), a.batch):
            parts.append(generate(self.average.copy, self.text_average.copy, self.tokenizer,
                                  self.prompts[i:i + a.batch], self.latents.shape[1:], a.sheet_steps, shift, guidance,
                                  100 + i, self.device))
        latents = torch.cat(parts)
        mean = torch.tensor(self.vae.config.latents_mean, device=self.device).view(1, -1, 1, 1, 1)
        std = torch.tensor(self.vae.config.latents_std, device=self.device).view(1, -1, 1, 1, 1)
        with torch.autocast(self.device.type, torch.bfloat16):
            video = [decode(self.vae, z)[0] for z in (latents * std + mean).split(1)]
        contact_sheet(path, video, self.prompts)


def profile(trainer, path, steps=5):
    with torch.profiler.profile() as found:
        for _ in range(steps):
            trainer.step(0.0)
    Path(path).write_text(found.key_averages().table(sort_by="self_device_time_total", row_limit=30,
                                                     max_name_column_width=90))


def main():
    args = parse_arguments()
    begin = time.time()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    log = Log(Path(args.out) / "dit_log.jsonl")
    trainer = Trainer(args, device, log)
    if args.profile:
        profile(trainer, Path(args.out) / "profile.txt")
    start = saved = time.time()
    budget = max(1.0, args.minutes * 60 - (start - begin))
    every = args.log_every or (100 if device.type == "cuda" else 5)
    step, total = 0, torch.zeros((), device=device)
    while step < args.steps and time.time() - start < budget:
        fraction = (time.time() - start) / budget
        trainer.shift = args.shift + (args.end_shift - args.shift) * fraction
        lr = learning_rate(args.lr, step, fraction, args.warmup, args.decay_from, args.end_lr)
        total += trainer.step(lr)
        step += 1
        if step % every == 0:
            log(step=step, loss=total.item() / every, lr=lr)
            total.zero_()
            if time.time() - saved > args.save_every:
                trainer.save(log)
                saved = time.time()
    trainer.save(log)
    if trainer.held_real is not None:
        log(event="real clips", held_out_at_shift=[args.end_shift, round(trainer.held_out_loss(
            trainer.held_real_ids, args.end_shift, trainer.held_real), 5)])
    log(event="end", steps=step, clips_seen=step * args.batch, held_out_loss=trainer.held_out_loss(trainer.held_ids),
        held_out_at_shift=[args.end_shift, round(trainer.best, 5)],
        colours_swapped=trainer.held_out_loss(trainer.swapped_ids),
        no_caption=trainer.held_out_loss(trainer.empty.expand(len(trainer.held_ids), -1)))
    for shift in args.sheet_shifts or [args.end_shift]:
        for guidance in args.guidance:
            trainer.draw(
                Path(args.out) / "sheets" / f"dit_{args.size}_shift{shift:g}_guidance{guidance:g}.png", shift, guidance)


if __name__ == "__main__":
    main()
