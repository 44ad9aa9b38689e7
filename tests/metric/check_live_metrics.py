#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa evaluate` against scikit-image and lpips themselves, frame by frame: check_live_metrics.py SOURCE_DIR ESA.

LPIPS runs with the linear weights of the package and a random backbone, which goes through tools/convert_lpips.py as a
downloaded one does. Exit 77 (skipped) where torch or scikit-image is missing; $ESA_PYTHON may name an interpreter that
has them. In such an environment lpips is fetched for the test alone, without torchvision, which it asks for: only
the shapes of two networks are needed of that, and they are written down below."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
import warnings

SKIP = 77
LPIPS = "lpips==0.1.4"
CLOSE = 1e-4            # the promise; what is seen is 1e-7, rounding of f32
SIZES = ((5, 64, 80), (2, 97, 131), (1, 40, 35))


def restart():
    """In $ESA_PYTHON, where it is set and another interpreter."""
    python = os.environ.get("ESA_PYTHON")
    if python and os.environ.get("ESA_LIVE_INNER") != "1":
        os.execve(python, [python, *sys.argv], {**os.environ, "ESA_LIVE_INNER": "1"})


def need_lpips(folder):
    """1 if lpips can be imported, if need be from a folder of its own."""
    if importlib.util.find_spec("lpips"):
        return 1
    if "ESA_PYTHON" not in os.environ:                                    # nobody's own Python is installed into
        return 0
    done = subprocess.run([
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target",
        folder, LPIPS
    ])
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder                                     # for the converter
    return done.returncode == 0


def features(net):
    """The convolutional part of torchvision's alexnet or vgg16, not trained."""
    from torch import nn

    def conv(*a, **k):
        return [nn.Conv2d(*a, **k), nn.ReLU(inplace=True)]

    if net == "alex":
        layers = [
            *conv(3, 64, 11, stride=4, padding=2),
            nn.MaxPool2d(3, 2), *conv(64, 192, 5, padding=2),
            nn.MaxPool2d(3, 2), *conv(192, 384, 3, padding=1), *conv(384, 256, 3, padding=1),
            *conv(256, 256, 3, padding=1),
            nn.MaxPool2d(3, 2)
        ]
    else:
        layers, width = [], 3
        for out, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                layers += conv(width, out, 3, padding=1)
                width = out
            layers.append(nn.MaxPool2d(2, 2))
    return types.SimpleNamespace(features=nn.Sequential(*layers))


def need_torchvision():
    try:
        import torchvision
        return f"torchvision {torchvision.__version__}"
    except (ImportError, RuntimeError, OSError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
    models = types.ModuleType("torchvision.models")
    models.alexnet = lambda **_: features("alex")
    models.vgg16 = lambda **_: features("vgg")
    package = types.ModuleType("torchvision")
    package.models = models
    sys.modules.update({"torchvision": package, "torchvision.models": models})
    return "the shapes of torchvision"


def main():
    restart()
    try:
        import numpy as np
        import skimage
        import torch
    except (ImportError, RuntimeError, OSError) as error:
        print(f"{error}: skipped")
        return SKIP
    with tempfile.TemporaryDirectory(prefix="esa-live-") as folder:
        if not need_lpips(os.path.join(folder, "packages")):
            print("there is no lpips, and it could not be fetched: skipped")
            return SKIP
        return check(folder, np, skimage, torch)


def check(folder, np, skimage, torch):
    vision = need_torchvision()
    import lpips
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity
    warnings.simplefilter("ignore")
    source, esa = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    seed = int(os.environ.get("ESA_TEST_SEED", "1"))
    print(f"lpips with {vision}, torch {torch.__version__}, scikit-image {skimage.__version__}, seed {seed}")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    worst = {"psnr": 0.0, "ssim": 0.0, "alex": 0.0, "vgg": 0.0}

    def at(*names):
        return os.path.join(folder, *names)

    pairs = []
    os.mkdir(at("a"))
    os.mkdir(at("b"))
    for i, (frames, height, width) in enumerate(SIZES):
        t, y, x, c = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), np.arange(3), indexing="ij")
        base = 127 + 90 * np.sin(0.13 * x + 0.3 * t + c) * np.cos(0.09 * y - c)
        pair = [
            np.clip(np.rint(v), 0, 255).astype(np.uint8) for v in (base, base + rng.normal(0, 5 + 20 * i, base.shape))
        ]
        pairs.append(pair)
        for side, video in zip("ab", pair):
            np.save(at(side, f"{i}.npy"), video)
    for net in ("alex", "vgg"):
        model = lpips.LPIPS(net=net, version="0.1", pnet_rand=True, pretrained=True, verbose=False).eval()
        state = {}
        # slice2.3.weight: position 3 of torchvision's features
        for name, value in model.net.state_dict().items():
            state["features." + name.split(".", 1)[1]] = value
        torch.save(state, at("backbone.pth"))
        subprocess.run([
            sys.executable,
            os.path.join(source, "tools", "convert_lpips.py"), "--net", net, "--backbone",
            at("backbone.pth"), "--output",
            at("models", f"lpips-{net}.safetensors")
        ], check=True)
        subprocess.run(
            [esa, "evaluate", "--reference",
             at("a"), "--generated",
             at("b"), "--net", net, "--output",
             at("m.json")], check=True, env={**os.environ, "ESA_MODELS": at("models")})
        with open(at("m.json"), encoding="utf-8") as file:
            videos = json.load(file)["videos"]
        for (a, b), video in zip(pairs, videos):
            frames = [torch.from_numpy(v).permute(0, 3, 1, 2).float() / 127.5 - 1 for v in (a, b)]
            with torch.no_grad():
                distance = model(*frames).reshape(-1).numpy()
            for i in range(len(a)):
                ssim = structural_similarity(a[i], b[i], channel_axis=-1, data_range=255, gaussian_weights=True,
                                             sigma=1.5, use_sample_covariance=False)
                psnr = peak_signal_noise_ratio(a[i], b[i], data_range=255)
                for key, have, want in ((net, video["each"]["lpips"][i], float(distance[i])),
                                        ("ssim", video["each"]["ssim"][i], ssim), ("psnr", video["each"]["psnr"][i],
                                                                                   psnr)):
                    worst[key] = max(worst[key], abs(have - want))
            assert distance.max() > 5 * CLOSE, "the pictures are too alike to tell anything"
    print("largest differences:", ", ".join(f"{key} {value:.2e}" for key, value in worst.items()))
    return 0 if max(worst.values()) < CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
