#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the weights that `esa evaluate` needs for LPIPS, once: one safetensors file from the checkpoints of `lpips` and
torchvision.

    pip install torch torchvision lpips safetensors
    python3 tools/convert_lpips.py --net alex --output $ESA_MODELS/lpips-alex.safetensors
    python3 tools/convert_lpips.py --net vgg  --output $ESA_MODELS/lpips-vgg.safetensors

torchvision downloads the backbone (233 MB AlexNet, 528 MB VGG16) into its cache. Without a network give the files:
--backbone alexnet-owt-7be5be79.pth or vgg16-397923af.pth, and --linear alex.pth or vgg.pth (weights/v0.1/ of the lpips
package, which has them in it).

The file: metadata format = esa-lpips-1, net, version; conv.I.weight [out, in, k, k] and conv.I.bias [out] of the
convolutions in the order of the network, lin.J.weight [C] of the five layers that are compared. F32."""
import argparse
import importlib.util
import os
import sys
import tempfile

# Positions of the convolutions in `features` of torchvision's networks.
CONVS = {"alex": (0, 3, 6, 8, 10), "vgg": (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)}
CHANNELS = {"alex": (64, 192, 384, 256, 256), "vgg": (64, 128, 256, 512, 512)}


def fail(message):
    sys.exit(f"convert_lpips.py: {message}")


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
        fail(f"torchvision could not download the backbone ({error}): give --backbone FILE")
    return model.state_dict()


def linear(torch, net, path):
    if not path:
        found = importlib.util.find_spec("lpips")                       # not imported: only its files are needed
        if not found or not found.submodule_search_locations:
            fail("the package lpips is not installed: pip install lpips, or give --linear FILE")
        path = os.path.join(found.submodule_search_locations[0], "weights", "v0.1", net + ".pth")
    return load_state(torch, path)


def take(state, name, shape, source):
    if name not in state:
        fail(f"{source} holds no {name}: it belongs to another network")
    tensor = state[name].detach().float().contiguous()
    if shape and tuple(tensor.shape) != shape:
        fail(f"{source}: {name} is {list(tensor.shape)}, expected {list(shape)}")
    return tensor


def main():
    parser = argparse.ArgumentParser(
        description="LPIPS weights for esa evaluate, from the checkpoints of lpips and torchvision")
    parser.add_argument("--net", choices=("alex", "vgg"), default="alex")
    parser.add_argument("--output", required=True, help="x.safetensors")
    parser.add_argument("--backbone", help="checkpoint of the backbone (torchvision's, downloaded)")
    parser.add_argument("--linear", help="linear weights (those in the package lpips)")
    options = parser.parse_args()
    try:
        import torch
        from safetensors.torch import save_file
    except ImportError as error:
        fail(f"{error}: pip install torch safetensors")
    features = backbone(torch, options.net, options.backbone)
    heads = linear(torch, options.net, options.linear)
    tensors = {}
    for i, position in enumerate(CONVS[options.net]):
        source = options.backbone or "the backbone"
        weight = take(features, f"features.{position}.weight", None, source)
        if weight.dim() != 4:
            fail(f"{source}: features.{position}.weight is no convolution")
        tensors[f"conv.{i}.weight"] = weight
        tensors[f"conv.{i}.bias"] = take(features, f"features.{position}.bias", (weight.shape[0],), source)
    for j, channels in enumerate(CHANNELS[options.net]):
        head = take(heads, f"lin{j}.model.1.weight", (1, channels, 1, 1), options.linear or "lpips")
        tensors[f"lin.{j}.weight"] = head.reshape(channels).contiguous()
    folder = os.path.dirname(os.path.abspath(options.output))
    try:
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        os.close(handle)
        try:
            save_file(tensors, temporary, {"format": "esa-lpips-1", "net": options.net, "version": "0.1"})
            os.chmod(temporary, 0o644)
            os.replace(temporary, options.output)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        fail(f"{options.output} cannot be written: {error}")
    print(f"{options.output}: {len(tensors)} tensors of {options.net}, {os.path.getsize(options.output) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
