# SPDX-License-Identifier: Apache-2.0
"""The models by name: where their folders are, loading them with diffusers, and making a video of the size each was
made for.

    pipe = load_pipeline("wan-t2v-1.3b")
    video = generate_video(pipe, "A cat walking on grass", "wan-t2v-1.3b")

A video is one tensor everywhere in esa: uint8 [frames, height, width, 3], RGB, on the CPU."""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from ..core.files import read_text


@dataclasses.dataclass(frozen=True)
class Model:
    """One known model: what the pipeline is asked for unless the caller says otherwise."""
    name: str
    hub: str | None             # organisation/name at the Hugging Face hub
    pipeline: str
    num_frames: int
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    fps: int


MODELS: dict[str, Model] = {m.name: m for m in (
    Model("wan-t2v-1.3b", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "WanPipeline", 81, 480, 832, 50, 5.0, 16),
    Model("wan-t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "WanPipeline", 81, 480, 832, 50, 5.0, 16),
    Model("cogvideox-5b", "THUDM/CogVideoX-5b", "CogVideoXPipeline", 49, 480, 720, 50, 6.0, 8),
    Model("hunyuan-video", "hunyuanvideo-community/HunyuanVideo", "HunyuanVideoPipeline", 129, 544, 960, 50, 6.0, 15),
    Model("wan-tiny", None, "WanPipeline", 33, 128, 128, 8, 2.5, 16))}

_NAME = "_esa_model_name"


def _is_model(folder: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(folder, "model_index.json"))


def _in_hub_cache(hub: str) -> str | None:
    """models--ORG--NAME/snapshots/<what refs/main says> in the local cache of the hub."""
    root = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub")
    place = os.path.join(root, "models--" + hub.replace("/", "--"))
    try:
        revision = read_text(os.path.join(place, "refs", "main")).strip()
    except OSError:
        return None
    folder = os.path.join(place, "snapshots", revision)
    return folder if revision and _is_model(folder) else None


def find_model(name: str | os.PathLike[str], *, download: bool = False) -> str:
    """The folder of a model: given as a folder, or by name under $ESA_MODELS/<name>, then in the local cache of the
    Hugging Face hub (and wan-tiny in the source tree). The network is used only with download=True. FileNotFoundError
    if it is in none of these places."""
    name = os.fspath(name)
    if os.path.isdir(name):
        if not _is_model(name):
            raise FileNotFoundError(f"{name} is a folder without a model_index.json: not a diffusers pipeline")
        return name
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise FileNotFoundError(f"there is no folder {name!r}, and it is not one of the models {known}")
    root = os.environ.get("ESA_MODELS")
    if root and _is_model(os.path.join(root, name)):
        return os.path.join(root, name)
    hub = MODELS[name].hub
    if hub is None:
        tree = pathlib.Path(__file__).resolve().parents[3] / "models" / name
        if _is_model(tree):
            return str(tree)
        raise FileNotFoundError(
            f"the model {name} was found neither under $ESA_MODELS ({root or 'not set'}) nor in a source tree of esa")
    cached = _in_hub_cache(hub)
    if cached is not None:
        return cached
    if download:
        from huggingface_hub import snapshot_download
        return str(snapshot_download(hub))
    raise FileNotFoundError(
        f"the model {name} was found neither under $ESA_MODELS ({root or 'not set'}) nor in the hub's cache; "
        f"`hf download {hub}` or load_pipeline(..., download=True) puts it there")


def _check_device(device: str | torch.device | None) -> None:
    """A missing device is a ValueError now, not an error of torch after the weights were read."""
    if device is None:
        return
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {device!r}") from None
    if where.type == "cuda":
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (where.index or 0) >= number:
            raise ValueError(
                f"device {str(where)!r} was asked for, torch sees {number or 'no'} GPU{'' if number == 1 else 's'} here"
            )


def load_pipeline(name: str | os.PathLike[str], *, torch_dtype: torch.dtype | None = None,
                  device: str | torch.device | None = None, cpu_offload: bool = False, download: bool = False,
                  **more: Any) -> Any:
    """A diffusers pipeline by name or folder, ready to run.

    torch_dtype
        None: bfloat16 on a GPU, float32 on the CPU. Wan's VAE is kept in float32, as its makers advise.
    device
        None: the GPU if there is one.
    cpu_offload
        Parts wait in main memory and visit the GPU in turn: how the 14B model fits one GPU with the text encoder beside
        it.
    download
        Only this lets the network be used.
    more
        For diffusers' from_pretrained."""
    from diffusers import DiffusionPipeline
    if torch_dtype is not None and not isinstance(torch_dtype, (torch.dtype, dict)):
        raise TypeError(f"torch_dtype must be a torch.dtype such as torch.bfloat16, not {torch_dtype!r}")
    _check_device(device)
    folder = find_model(name, download=download)
    gpu = torch.cuda.is_available() and (device is None or str(device).startswith("cuda"))
    dtype = torch_dtype if torch_dtype is not None else torch.bfloat16 if gpu else torch.float32
    index = json.loads(read_text(os.path.join(folder, "model_index.json")))
    if index.get("_class_name") == "WanPipeline" and dtype != torch.float32 and "vae" not in more:
        from diffusers import AutoencoderKLWan
        more["vae"] = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32,
                                                       local_files_only=True)
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, local_files_only=True, **more)
    setattr(pipe, _NAME, os.fspath(name) if os.fspath(name) in MODELS else None)
    if index.get("_class_name") == "HunyuanVideoPipeline":
        pipe.vae.enable_tiling()            # 129 frames do not fit any GPU in one piece
    if cpu_offload and gpu:
        pipe.enable_model_cpu_offload(device=device if device is not None else "cuda")
    else:
        pipe.to(device if device is not None else "cuda" if gpu else "cpu")
    return pipe


def model_of(pipe: Any, name: str | None = None) -> Model:
    """What is known of a pipeline: by name, by the name it was loaded by, else by its class (Wan's table is that of
    2.1)."""
    name = name if name is not None else getattr(pipe, _NAME, None)
    if name is not None and name in MODELS:
        return MODELS[name]
    if name is not None and not os.path.isdir(name):
        raise ValueError(f"{name!r} is not one of the models {', '.join(MODELS)}, nor a folder")
    for model in MODELS.values():
        if type(pipe).__name__ == model.pipeline:
            return model
    raise ValueError(
        f"esa does not know which size {type(pipe).__name__} wants: give height, width, num_frames and "
        "num_inference_steps to the pipeline yourself")


def generate_video(pipe: Any, prompt: str, name: str | None = None, *, height: int | None = None,
                   width: int | None = None, num_frames: int | None = None, num_inference_steps: int | None = None,
                   guidance_scale: float | None = None, negative_prompt: str | None = None, seed: int = 0,
                   callback_on_step_end: Callable[..., Any] | None = None, **more: Any) -> torch.Tensor:
    """One video: uint8 [frames, height, width, 3], RGB, on the CPU.

    name
        One of the known models, whose frames, size, steps and guidance count where they are not given (81 frames of 480
        x 832 for Wan, 49 of 480 x 720 for CogVideoX, 129 of 544 x 960 for HunyuanVideo); never the pipeline's own
        defaults. None: by how it was loaded, or its class.
    seed
        Of the noise, drawn on the CPU so that it is the same on every machine.
    more
        For the pipeline (prompt_embeds, max_sequence_length, ...)."""
    model = model_of(pipe, name)
    if negative_prompt is not None:
        more["negative_prompt"] = negative_prompt
    if callback_on_step_end is not None:
        more["callback_on_step_end"] = callback_on_step_end
    if "generator" not in more:
        more["generator"] = torch.Generator("cpu").manual_seed(seed)
    output = pipe(prompt=prompt, height=model.height if height is None else height,
                  width=model.width if width is None else width,
                  num_frames=model.num_frames if num_frames is None else num_frames,
                  num_inference_steps=model.num_inference_steps if num_inference_steps is None else num_inference_steps,
                  guidance_scale=model.guidance_scale if guidance_scale is None else guidance_scale, output_type="pt",
                  **more)
    return to_frames(output.frames[0])


def to_frames(video: torch.Tensor) -> torch.Tensor:
    """diffusers' float video [frames, 3, height, width] in 0 .. 1 as uint8 [frames, height, width, 3] on the CPU."""
    return (video.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
