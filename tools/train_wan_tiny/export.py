"""Put the trained parts together as one model folder.

    python export.py --stage stage --out ../../models/wan-tiny
    python export.py --model judge --stage stage-judge --out ../../tests/quality/judge

wan-tiny becomes a folder that diffusers' WanPipeline loads. The judge is the transformer alone, in 8 bits;
tests/quality/assemble_model.py makes one folder of it and the parts it shares with wan-tiny.

Checks what a release must keep: every part there and the transformer of the model's shape, each weight file at
most 16 MB, all files together under 25 MB, and the autoencoder's compression factors in agreement with its layers.
"""
import argparse
import json
import shutil
from pathlib import Path

from diffusers import UniPCMultistepScheduler
from diffusers import __version__ as diffusers_version

from common import need_part
from models import MODELS
from pack import pack

MAX_FILE, MAX_ALL = 16_000_000, 25_000_000
# Wan2.1 has 3. These clips are few facts in many pixels: where, what and how it moves is settled while the picture is
# still nine tenths noise, so most of the eight steps belong there, and the last stage is trained with this shift too.
FLOW_SHIFT = 8.0
# What transformers notes about where a tokenizer was loaded from is no property of the tokenizer.
LOCAL_KEYS = ("is_local", "local_files_only", "name_or_path")


def copy_part(stages, name, out):
    """The newest stage that has the part wins; stages are given oldest first."""
    found = need_part(stages, name)
    target = out / name
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.safetensors*"):
        old.unlink()  # a change of sharding must not leave old shards behind
    for path in sorted(found.iterdir()):
        shutil.copyfile(path, target / path.name)
    return target


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def clean_config(path, drop):
    config = json.loads(path.read_text())
    for key in drop:
        config.pop(key, None)
    write_json(path, config)
    return config


def check_transformer(out, name):
    config = json.loads((out / "transformer/config.json").read_text())
    for key, value in MODELS[name].transformer.items():
        value = list(value) if isinstance(value, tuple) else value
        if config[key] != value:
            raise SystemExit(f"transformer: {key} is {config[key]}, {name} has {value}")


def check_vae(out):
    vae = json.loads((out / "vae/config.json").read_text())
    temporal = 2 ** sum(vae["temperal_downsample"])
    spatial = 2 ** len(vae["temperal_downsample"])
    if (vae["scale_factor_temporal"], vae["scale_factor_spatial"]) != (temporal, spatial):
        raise SystemExit(f"vae: scale factors in config.json are not {temporal} and {spatial}")


def check_sizes(out, files):
    total = 0
    for path in files:
        size = path.stat().st_size
        total += size
        print(f"{size:>10}  {path.relative_to(out)}")
        if size > MAX_FILE:
            raise SystemExit(f"{path} is larger than {MAX_FILE} bytes")
    print(f"{total:>10}  in all")
    if total >= MAX_ALL:
        raise SystemExit(f"all files together must stay under {MAX_ALL} bytes")


def write_pipeline(out):
    """What makes the parts one pipeline: the scheduler, as Wan2.1's own folders have it, and the index."""
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT,
                                        num_train_timesteps=1000, solver_order=2, solver_type="bh2")
    scheduler.save_pretrained(out / "scheduler")
    write_json(out / "model_index.json", {
        "_class_name": "WanPipeline",
        "_diffusers_version": diffusers_version,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    })


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="wan-tiny")
    parser.add_argument("--stage", required=True, nargs="+", help="stage folders, oldest first")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    out, parts = Path(args.out), MODELS[args.model].exports
    for name in parts:
        copy_part(args.stage, name, out)
    for name in {"vae", "transformer"} & set(parts):
        clean_config(out / name / "config.json", ["_name_or_path"])
    check_transformer(out, args.model)
    if parts == ("transformer",):
        for path in (out / "transformer").glob("*.safetensors"):
            pack(path)
    # The model's own files; a model card or pictures beside them are not counted against the release size.
    files = [p for part in parts for p in sorted((out / part).iterdir())]
    if "vae" in parts:
        clean_config(out / "tokenizer/tokenizer_config.json", LOCAL_KEYS)
        check_vae(out)
        write_pipeline(out)
        files += [*sorted((out / "scheduler").iterdir()), out / "model_index.json"]
    check_sizes(out, files)


if __name__ == "__main__":
    main()
