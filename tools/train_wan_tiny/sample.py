"""Make clips with the exported folder through diffusers' own WanPipeline, and a contact sheet to look at.

    python sample.py --model ../../models/wan-tiny --out sheet.png
    python sample.py --model ../../models/wan-tiny --out one.png --prompt "a red ball rolls to the right over a blue
    floor"

This is the check that a release works outside the training code: nothing but diffusers touches the model.
"""
import argparse
import json
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from PIL import Image

from clips import FRAMES, SIZE, make_clip, render
from common import EVAL_PROMPTS, HELD_OUT_SEED, contact_sheet, psnr


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", required=True)
    p.add_argument("--out", required=True, help="contact sheet (PNG)")
    p.add_argument("--prompt", action="append", help="repeat for several; default: the twelve evaluation prompts")
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--guidance", type=float, default=2.5)
    p.add_argument("--seed", type=int, default=100)
    p.add_argument("--size", type=int, default=SIZE)
    p.add_argument("--frames", type=int, default=FRAMES)
    p.add_argument("--gifs", help="also write each clip as an animated GIF into this folder")
    p.add_argument("--reconstruct", type=int, default=0,
                   help="instead of prompts, pass so many held-out clips through the autoencoder and print PSNR")
    return p.parse_args()


def reconstruct(args, device):
    vae = AutoencoderKLWan.from_pretrained(args.model, subfolder="vae", torch_dtype=torch.float32).to(device)
    rows, titles, found = [], [], []
    for i in range(args.reconstruct):
        clip = make_clip(HELD_OUT_SEED, i)
        video = render([clip.row], device=device)
        with torch.no_grad():
            output = vae.decode(vae.encode(video).latent_dist.mean).sample
        found.append(psnr(output, video).item())
        print(f"{found[-1]:6.2f} dB  {clip.caption}", flush=True)
        rows += [video[0], output[0]]
        titles += [f"original: {clip.caption}", f"decoded: {found[-1]:.1f} dB"]
    contact_sheet(args.out, rows[:12], titles[:12])
    print(json.dumps(dict(clips=len(found), psnr=round(sum(found) / len(found), 2), worst=round(min(found), 2))))


def main():
    args = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.reconstruct:
        reconstruct(args, device)
        return
    pipe = WanPipeline.from_pretrained(args.model, torch_dtype=torch.float32).to(device)
    pipe.set_progress_bar_config(disable=True)
    prompts, rows = args.prompt or EVAL_PROMPTS, []
    for i, prompt in enumerate(prompts):
        start = time.time()
        # A generator on the CPU gives the same noise on every machine.
        video = pipe(prompt=prompt, height=args.size, width=args.size, num_frames=args.frames,
                     num_inference_steps=args.steps, guidance_scale=args.guidance, output_type="pt",
                     generator=torch.Generator().manual_seed(args.seed + i)).frames[0]
        rows.append(video.permute(1, 0, 2, 3).cpu() * 2 - 1)
        print(f"{time.time() - start:6.1f} s  {prompt}", flush=True)
        if args.gifs:
            Path(args.gifs).mkdir(parents=True, exist_ok=True)
            pictures = [Image.fromarray((f.permute(1, 2, 0) * 255).round().byte().cpu().numpy()) for f in video]
            pictures[0].save(Path(args.gifs) / f"{i:02d}.gif", save_all=True, append_images=pictures[1:], duration=62,
                             loop=0)
        contact_sheet(args.out, rows, prompts[:len(rows)])


if __name__ == "__main__":
    main()
