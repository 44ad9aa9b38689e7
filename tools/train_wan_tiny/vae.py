"""Train the autoencoder of wan-tiny: AutoencoderKLWan with 2x4x4 compression.

    python vae.py --out stage --minutes 6
    python vae.py --init stage --out stage2 --minutes 3 --decoder-only

It learns from 64-pixel, 17-frame pieces of the clips, drawn afresh for every step, and is judged on whole
held-out clips. `--decoder-only` improves the pictures while the latents stay what they were, so that a
transformer trained on them still fits.
"""
import argparse
import random
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from clips import FRAMES, SIZE, make_clip, render
from common import (HELD_OUT_SEED, VAE_CONFIG, Average, Log, contact_sheet, decode, enable_whole_clip, encode,
                    learning_rate, load_vae, psnr, same_shape, save_half)


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", required=True, help="stage folder to write")
    p.add_argument("--init", help="folder to start from (a stage or the exported model)")
    p.add_argument("--minutes", type=float, default=6)
    p.add_argument("--steps", type=int, default=10**9, help="stop after so many steps even if time is left; 0 only "
                   "measures, and writes the latent statistics")
    p.add_argument("--seed", type=int, default=1, help="clips of this stage")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--crop", type=int, default=64)
    p.add_argument("--window", type=int, default=17, help="frames of a training piece")
    p.add_argument("--width", type=int, default=VAE_CONFIG["base_dim"])
    p.add_argument("--kl", type=float, default=1e-4)
    p.add_argument("--held-out", type=int, default=32, help="clips to judge by")
    p.add_argument("--save-every", type=float, default=100, help="seconds between checkpoints")
    p.add_argument("--decoder-only", action="store_true")
    p.add_argument("--no-compile", action="store_true")
    return p.parse_args()


def losses(output, target):
    """L1 keeps flat areas clean, the squared error is what PSNR counts, and the error of differences between
    neighbours keeps edges in place."""
    error = output.float() - target
    edges = (error[..., 1:] - error[..., :-1]).abs().mean() + (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    square = (error * error).mean()
    return error.abs().mean() + 0.5 * edges + 5 * square, square


class Trainer:
    def __init__(self, args, device):
        self.args, self.device, self.rng = args, device, random.Random(args.seed)
        self.clips_used = 0
        if args.init:
            self.vae = load_vae(Path(args.init) / "vae", device)
        else:
            self.vae = enable_whole_clip(AutoencoderKLWan(**dict(VAE_CONFIG, base_dim=args.width))).to(device)
        if args.decoder_only:
            self.vae.encoder.requires_grad_(False)
            self.vae.quant_conv.requires_grad_(False)
        copy = enable_whole_clip(same_shape(self.vae)).to(device)
        self.average = Average(self.vae, copy, decay=0.998)
        self.encoder, self.decoder = self.vae.encoder, self.vae.decoder
        self.layout = torch.contiguous_format
        self.new_optimizer()

    def new_optimizer(self):
        self.parameters = [p for p in self.vae.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.args.lr, betas=(0.9, 0.99), weight_decay=0.0,
                                           fused=self.device.type == "cuda")

    def step(self, lr):
        a = self.args
        rows = [make_clip(a.seed, self.clips_used + i).row for i in range(a.batch)]
        self.clips_used += a.batch
        video = render(rows, FRAMES, SIZE, crop=a.crop, window=a.window, device=self.device, rng=self.rng)
        video = video.contiguous(memory_format=self.layout)
        with torch.autocast(self.device.type, torch.bfloat16):
            mean, logvar = encode(self.vae, video, self.encoder)
            mean, logvar = mean.float(), logvar.float().clamp(-10, 4)
            latents = mean + torch.randn_like(mean) * (logvar / 2).exp()
            output = decode(self.vae, latents, self.decoder)
        loss, square = losses(output, video)
        if not a.decoder_only:
            loss = loss + a.kl * 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.average.update()
        return loss.detach(), square.detach()

    def use_channels_last(self):
        self.layout = torch.channels_last_3d
        for p in self.vae.parameters():
            if p.dim() == 5:
                p.data = p.data.contiguous(memory_format=self.layout)
        self.new_optimizer()

    def use_plain(self):
        self.layout = torch.contiguous_format
        for p in self.vae.parameters():
            p.data = p.data.contiguous()
        self.encoder, self.decoder = self.vae.encoder, self.vae.decoder
        self.new_optimizer()

    def choose_speed(self, log):
        """Which way of running the convolutions is quickest depends on card and library versions, so the first
        steps are spent on trying: plain, channels last, channels last compiled."""
        def timed():
            for _ in range(3):
                self.step(self.args.lr * 0.05)
            torch.cuda.synchronize()
            start = time.time()
            for _ in range(6):
                self.step(self.args.lr * 0.05)
            torch.cuda.synchronize()
            return (time.time() - start) / 6

        plain = timed()
        log(variant="plain", ms=plain * 1e3)
        self.use_channels_last()
        last = timed()
        log(variant="channels_last", ms=last * 1e3)
        if last > plain:
            self.use_plain()
        if self.args.no_compile:
            return
        eager = (self.encoder, self.decoder)
        try:
            self.encoder, self.decoder = torch.compile(self.vae.encoder), torch.compile(self.vae.decoder)
            compiled = timed()
            log(variant="compiled", ms=compiled * 1e3)
        except Exception as error:  # a compiler that fails must not cost the training run
            log(variant="compiled", failed=str(error)[:300])
            compiled = float("inf")
        if compiled > min(plain, last):
            self.encoder, self.decoder = eager

    @torch.no_grad()
    def latent_statistics(self, count=96):
        vae, values = self.average.copy, []
        for i in range(0, count, 8):
            video = render([make_clip(self.args.seed + 10_000, i + j).row for j in range(8)], device=self.device)
            values.append(encode(vae, video)[0].float())
        values = torch.cat(values)
        return values.mean((0, 2, 3, 4)).tolist(), values.std((0, 2, 3, 4)).tolist()

    @torch.no_grad()
    def held_out(self, count):
        """PSNR on whole held-out clips in fp32, and some clips for the eye."""
        vae, found, pairs = self.average.copy, [], []
        for i in range(0, count, 4):
            clips = [make_clip(HELD_OUT_SEED, i + j) for j in range(4)]
            video = render([c.row for c in clips], device=self.device)
            output = decode(vae, encode(vae, video)[0]).clamp(-1, 1)
            found.append(psnr(output, video))
            pairs += [(c.caption, v, o) for c, v, o in zip(clips, video, output)][:1]
        return torch.cat(found), pairs[:6]

    def save(self, final=False):
        vae = self.average.copy
        if not self.args.decoder_only and final:
            mean, std = self.latent_statistics()
            vae.register_to_config(latents_mean=[round(v, 4) for v in mean], latents_std=[round(v, 4) for v in std])
        save_half(vae, Path(self.args.out) / "vae")


def main():
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    log = Log(Path(args.out) / "vae_log.jsonl")
    start = saved = time.time()
    trainer = Trainer(args, device)
    log(event="start", parameters=sum(p.numel() for p in trainer.vae.parameters()), seed=args.seed,
        init=args.init or "random", device=str(device))
    if device.type == "cuda" and args.steps:
        trainer.choose_speed(log)
    step, total, budget = 0, torch.zeros(2, device=device), args.minutes * 60
    every = 100 if device.type == "cuda" else 5
    while step < args.steps and time.time() - start < budget:
        lr = learning_rate(args.lr, step, (time.time() - start) / budget, 50, 0.3, 0.005)
        total += torch.stack(trainer.step(lr))
        step += 1
        if step % every == 0:
            loss, square = (total / every).tolist()
            log(step=step, loss=loss, train_psnr=10 * torch.log10(torch.tensor(4 / square)).item(), lr=lr)
            total.zero_()
            if time.time() - saved > args.save_every:
                trainer.save()
                saved = time.time()
    trainer.save(final=True)
    # Exactness of the reference comes first here: no tf32, and clip by clip numbers.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found, pairs = trainer.held_out(args.held_out)
    log(event="held out", clips=args.held_out, psnr=found.mean().item(), worst=found.min().item(),
        median=found.median().item(), steps=step)
    rows, titles = [], []
    for caption, video, output in pairs:
        rows += [video, output]
        titles += [f"original: {caption}", f"decoded: {psnr(output[None], video[None]).item():.1f} dB"]
    contact_sheet(Path(args.out) / "vae.png", rows, titles)
    config = trainer.average.copy.config
    log(event="latent statistics", mean=list(config.latents_mean), std=list(config.latents_std))


if __name__ == "__main__":
    main()
