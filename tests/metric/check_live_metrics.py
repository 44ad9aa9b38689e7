#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa evaluate` against scikit-image and lpips themselves, frame by frame: check_live_metrics.py SOURCE_DIR ESA.

LPIPS runs with the linear weights of the package and a random backbone, which goes through tools/convert_lpips.py as a downloaded one does. Exit 77
(skipped) where torch, torchvision, lpips or scikit-image is missing; $ESA_PYTHON may name an interpreter that has them."""
import json
import os
import subprocess
import sys
import tempfile

SKIP = 77
CLOSE = 1e-4            # the promise; what is seen is 1e-7, rounding of f32
SIZES = ((5, 64, 80), (2, 97, 131), (1, 40, 35))


def restart():
    """In $ESA_PYTHON, where it is set and another interpreter."""
    python = os.environ.get("ESA_PYTHON")
    if python and os.environ.get("ESA_LIVE_INNER") != "1":
        os.execve(python, [python, *sys.argv], {**os.environ, "ESA_LIVE_INNER": "1"})


def main():
    restart()
    try:
        import lpips
        import numpy as np
        import skimage
        import torch
        from skimage.metrics import peak_signal_noise_ratio, structural_similarity
    except (ImportError, RuntimeError, OSError) as error:
        print(f"{error}: skipped")
        return SKIP
    import warnings
    warnings.simplefilter("ignore")
    source, esa = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    seed = int(os.environ.get("ESA_TEST_SEED", "1"))
    print(f"lpips, torch {torch.__version__}, scikit-image {skimage.__version__}, seed {seed}")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    worst = {"psnr": 0.0, "ssim": 0.0, "alex": 0.0, "vgg": 0.0}
    with tempfile.TemporaryDirectory(prefix="esa-live-") as folder:
        at = lambda *names: os.path.join(folder, *names)
        pairs = []
        os.mkdir(at("a"))
        os.mkdir(at("b"))
        for i, (frames, height, width) in enumerate(SIZES):
            t, y, x, c = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), np.arange(3), indexing="ij")
            base = 127 + 90 * np.sin(0.13 * x + 0.3 * t + c) * np.cos(0.09 * y - c)
            pair = [np.clip(np.rint(v), 0, 255).astype(np.uint8) for v in (base, base + rng.normal(0, 5 + 20 * i, base.shape))]
            pairs.append(pair)
            for side, video in zip("ab", pair):
                np.save(at(side, f"{i}.npy"), video)
        for net in ("alex", "vgg"):
            model = lpips.LPIPS(net=net, version="0.1", pnet_rand=True, pretrained=True, verbose=False).eval()
            state = {}
            for name, value in model.net.state_dict().items():           # slice2.3.weight: position 3 of torchvision's features
                state["features." + name.split(".", 1)[1]] = value
            torch.save(state, at("backbone.pth"))
            subprocess.run([sys.executable, os.path.join(source, "tools", "convert_lpips.py"), "--net", net, "--backbone", at("backbone.pth"),
                            "--output", at("models", f"lpips-{net}.safetensors")], check=True)
            subprocess.run([esa, "evaluate", "--reference", at("a"), "--generated", at("b"), "--net", net, "--output", at("m.json")], check=True,
                           env={**os.environ, "ESA_MODELS": at("models")})
            with open(at("m.json"), encoding="utf-8") as file:
                videos = json.load(file)["videos"]
            for (a, b), video in zip(pairs, videos):
                to = lambda v: torch.from_numpy(v).permute(0, 3, 1, 2).float() / 127.5 - 1
                with torch.no_grad():
                    distance = model(to(a), to(b)).reshape(-1).numpy()
                for i in range(len(a)):
                    ssim = structural_similarity(a[i], b[i], channel_axis=-1, data_range=255, gaussian_weights=True, sigma=1.5, use_sample_covariance=False)
                    psnr = peak_signal_noise_ratio(a[i], b[i], data_range=255)
                    for key, have, want in ((net, video["each"]["lpips"][i], float(distance[i])), ("ssim", video["each"]["ssim"][i], ssim),
                                            ("psnr", video["each"]["psnr"][i], psnr)):
                        worst[key] = max(worst[key], abs(have - want))
                assert distance.min() > 10 * CLOSE, "the pictures are too alike to tell anything"
    print("largest differences:", ", ".join(f"{key} {value:.2e}" for key, value in worst.items()))
    return 0 if max(worst.values()) < CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
