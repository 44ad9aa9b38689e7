# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/pipeline.safetensors: whole videos of models/wan-tiny by diffusers' WanPipeline in f32 (pip
install torch==2.13.0 diffusers==0.42.1 transformers safetensors sentencepiece). To be made anew whenever the weights in
models/wan-tiny change.

    python tools/golden/pipeline.py models/wan-tiny tests/golden/pipeline.safetensors

Per case N: N.latents F32 [C,T,H,W] after the last step, N.video U8 [frames,height,width,3]; the settings are in the
metadata."""
import json
import sys

import diffusers
import torch
from diffusers import WanPipeline
from safetensors.torch import save_file

CASES = {
    "guided": dict(prompt="a red ball rolls to the right over a blue floor", num_frames=5, height=64, width=48,
                   num_inference_steps=4, guidance_scale=4.0, seed=0),
    "negative": dict(prompt="A &lt;large&gt;  green ring grows", negative_prompt="blue", num_frames=1, height=32,
                     width=64, num_inference_steps=3, guidance_scale=2.5, seed=7),
    "plain": dict(prompt="", num_frames=9, height=32, width=32, num_inference_steps=1, guidance_scale=1.0,
                  seed=2**33 + 1),
}
folder, output = sys.argv[1:3]
torch.set_num_threads(2)
pipe = WanPipeline.from_pretrained(folder, torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
tensors = {}
for name, case in CASES.items():
    settings = {k: v for k, v in case.items() if k != "seed"}
    latents = pipe(**settings, generator=torch.Generator("cpu").manual_seed(case["seed"]), output_type="latent").frames
    video = pipe(**settings, generator=torch.Generator("cpu").manual_seed(case["seed"]), output_type="np").frames
    tensors[f"{name}.latents"] = latents[0].contiguous()
    tensors[f"{name}.video"] = torch.from_numpy((video[0] * 255).round()).to(torch.uint8).contiguous()
save_file(tensors, output, {"cases": json.dumps(CASES), "diffusers": diffusers.__version__, "torch": torch.__version__})
