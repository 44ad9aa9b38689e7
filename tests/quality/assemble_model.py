#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the whole model folder of the judge: assemble_model.py OUT.

tests/quality/judge holds a transformer alone, in 8 bits. Its autoencoder, text encoder, tokenizer and scheduler are
those of models/wan-tiny. OUT becomes a copy of models/wan-tiny with the judge's transformer in f16, which
`esa generate --model OUT` and diffusers' WanPipeline load. Files that are already there are replaced; a folder that
holds anything else is refused."""
import argparse
import array
import json
import pathlib
import shutil
import struct
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
SHARED = ("model_index.json", "scheduler", "text_encoder", "tokenizer", "vae")
WEIGHTS = "diffusion_pytorch_model.safetensors"
SCALE = ".scale"        # "name" in I8 [rows][...] times "name.scale" in F16 [rows]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="folder to make")
    parser.add_argument("--own", type=pathlib.Path, default=TOP / "tests/quality/judge",
                        help="folder with the transformer (default: tests/quality/judge)")
    parser.add_argument("--shared", type=pathlib.Path, default=TOP / "models/wan-tiny",
                        help="folder with all other parts (default: models/wan-tiny)")
    return parser.parse_args()


def read_tensors(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    with open(path, "rb") as file:
        head = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    return {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in head.items() if name != "__metadata__"}


def write_tensors(path, tensors):
    head, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def widen(codes, scales):
    """I8 rows times their scales, as F16."""
    codes, scales = array.array("b", codes), struct.unpack(f"<{len(scales) // 2}e", scales)
    columns = len(codes) // len(scales)
    rows = ([code * scale for code in codes[i * columns:(i + 1) * columns]] for i, scale in enumerate(scales))
    return b"".join(struct.pack(f"<{columns}e", *row) for row in rows)


def widened(tensors):
    out = {}
    for name, (dtype, shape, data) in tensors.items():
        if name + SCALE in tensors:
            out[name] = ("F16", shape, widen(data, tensors[name + SCALE][2]))
        elif not name.endswith(SCALE):
            out[name] = (dtype, shape, data)
    return out


def assemble(own, shared, out):
    source = own / "transformer"
    needed = [source / "config.json", source / WEIGHTS, *(shared / name for name in SHARED)]
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        sys.exit(f"not found: {', '.join(missing)}")
    if out.exists():
        strangers = sorted({path.name for path in out.iterdir()} - {"transformer", *SHARED})
        if strangers:
            sys.exit(f"{out} holds {strangers[0]}, which is no part of a model: give a new or empty folder")
    out.mkdir(parents=True, exist_ok=True)
    for name in SHARED:
        path, target = shared / name, out / name
        if path.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(path, target)
        else:
            shutil.copyfile(path, target)
    shutil.rmtree(out / "transformer", ignore_errors=True)
    (out / "transformer").mkdir()
    shutil.copyfile(source / "config.json", out / "transformer/config.json")
    write_tensors(out / "transformer" / WEIGHTS, widened(read_tensors(source / WEIGHTS)))


def main():
    args = parse_arguments()
    assemble(args.own, args.shared, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
