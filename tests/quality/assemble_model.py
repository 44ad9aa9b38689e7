#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the whole model folder of wan-tiny-b: assemble_model.py OUT.

tests/quality/wan-tiny-b holds a transformer alone. Its autoencoder, text encoder, tokenizer and scheduler are those of
models/wan-tiny. OUT becomes a copy of models/wan-tiny with the other transformer, which `esa generate --model OUT` and
diffusers' WanPipeline load. Files that are already there are replaced; a folder that holds anything else is refused."""
import argparse
import pathlib
import shutil
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
SHARED = ("model_index.json", "scheduler", "text_encoder", "tokenizer", "vae")
OWN = ("transformer",)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="folder to make")
    parser.add_argument("--own", type=pathlib.Path, default=TOP / "tests/quality/wan-tiny-b",
                        help="folder with the transformer (default: tests/quality/wan-tiny-b)")
    parser.add_argument("--shared", type=pathlib.Path, default=TOP / "models/wan-tiny",
                        help="folder with all other parts (default: models/wan-tiny)")
    return parser.parse_args()


def assemble(own, shared, out):
    sources = [own / name for name in OWN] + [shared / name for name in SHARED]
    missing = [str(path) for path in sources if not path.exists()]
    if missing:
        sys.exit(f"not found: {', '.join(missing)}")
    if out.exists():
        strangers = sorted({path.name for path in out.iterdir()} - {path.name for path in sources})
        if strangers:
            sys.exit(f"{out} holds {strangers[0]}, which is no part of a model: give a new or empty folder")
    out.mkdir(parents=True, exist_ok=True)
    for path in sources:
        target = out / path.name
        if path.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(path, target)
        else:
            shutil.copyfile(path, target)


def main():
    args = parse_arguments()
    assemble(args.own, args.shared, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
