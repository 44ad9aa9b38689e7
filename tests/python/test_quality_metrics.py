# SPDX-License-Identifier: Apache-2.0
"""bench/quality/metrics.py, which measures clips in torch, against the metrics of the library; its weights of LPIPS,
and the tables with and without them."""
import json
import pathlib
import struct
import sys

import pytest
import torch
from safetensors.torch import save_file

from esa.metrics import compare

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "quality"))
import library_table  # noqa: E402
import metrics  # noqa: E402
import table  # noqa: E402

# Both compute in f32 with sums in other orders: 1e-7 on distances of about 0.1. A wrong border, pooling or
# normalisation changes them by 1e-3 or more.
CLOSE = 1e-6


def weights(net):
    """Random layers that keep the size of their input, as trained ones do."""
    generator = torch.Generator().manual_seed(2)
    out, taps = {}, 0
    for i, (n, m, k, _, tap) in enumerate(metrics.NETS[net]):
        out[f"conv.{i}.weight"] = torch.randn(m, n, k, k, generator=generator) * (2 / (n * k * k)) ** 0.5
        out[f"conv.{i}.bias"] = 0.1 * torch.randn(m, generator=generator)
        if tap:
            out[f"lin.{taps}.weight"] = torch.rand(m, generator=generator)
            taps += 1
    return out


def save(path, net, tensors=None, about=()):
    save_file(tensors or weights(net), str(path), {"format": "esa-lpips-1", "net": net, **dict(about)})
    return path


@pytest.mark.parametrize("net, size", [("alex", (3, 40, 53)), ("alex", (11, 64, 47)), ("vgg", (2, 33, 40))])
def test_metrics_are_the_librarys(net, size, tmp_path, seed):
    frames, height, width = size
    generator = torch.Generator().manual_seed(seed)
    path = save(tmp_path / "w.safetensors", net)
    a = torch.randint(256, (1, 3, frames, height, width), dtype=torch.uint8, generator=generator)
    b = (a.int() + torch.randint(-40, 41, a.shape, generator=generator)).clamp(0, 255).to(torch.uint8)
    got = {name: x[0] for name, x in metrics.compare(a, b, metrics.Lpips(str(path), "cpu")).items()}
    want = compare(*(x[0].permute(1, 2, 3, 0).contiguous().numpy() for x in (a, b)), weights=path)
    assert got["lpips"] > 0.01                              # far above CLOSE, or nothing would be told apart
    assert got["lpips"] == pytest.approx(want.lpips, abs=CLOSE)
    assert got["psnr"] == pytest.approx(want.psnr, abs=1e-9) and got["ssim"] == pytest.approx(want.ssim, abs=1e-9)
    assert got["psnr_min"] == pytest.approx(want.psnr_min, abs=1e-9)
    assert got["flicker"] == pytest.approx(want.flicker, abs=1e-9)


def test_lpips_takes_no_part_of_other_frames(tmp_path, seed):
    """More frames than are computed at once; every frame alone has the same distance."""
    generator = torch.Generator().manual_seed(seed)
    lpips = metrics.Lpips(str(save(tmp_path / "w.safetensors", "alex")), "cpu")
    a, b = (torch.randint(256, (3, metrics.FRAMES + 3, 35, 31), dtype=torch.uint8, generator=generator)
            for _ in range(2))
    whole = lpips.frames(a, b)
    assert whole.shape == (metrics.FRAMES + 3,) and bool((whole > 0).all())
    for i in range(whole.shape[0]):
        alone = lpips.frames(a[:, i:i + 1], b[:, i:i + 1])
        assert float(alone) == pytest.approx(float(whole[i]), abs=CLOSE)
    assert float(lpips.frames(a, a).abs().max()) == 0


def test_without_weights_nothing_is_invented():
    a = torch.zeros(2, 3, 2, 16, 16, dtype=torch.uint8)
    found = metrics.compare(a, a)
    assert found["lpips"] == [None, None] and found["psnr"] == [100.0, 100.0]
    assert metrics.Lpips.open("", "cpu") is None
    assert table.mean([0.5, None]) is None and table.mean([0.25, 0.75]) == 0.5
    assert table.distance([{"lpips": 0.5}, {}]) == "-" and table.distance([{"lpips": 0.12345}]) == "0.1235"


@pytest.mark.parametrize("fault, says", [
    ("missing", "conv.3.bias is missing"), ("shape", "lin.2.weight is (383,), expected (384,)"),
    ("format", "does not hold LPIPS weights"), ("net", "does not hold LPIPS weights"),
    ("short", "does not hold LPIPS weights"), ("text", "does not hold LPIPS weights"),
    ("huge", "does not hold LPIPS weights"), ("absent", "cannot be read: No such file")])
def test_bad_weights(fault, says, tmp_path):
    path = tmp_path / "w.safetensors"
    tensors, about = weights("alex"), {}
    if fault == "missing":
        del tensors["conv.3.bias"]
    if fault == "shape":
        tensors["lin.2.weight"] = tensors["lin.2.weight"][1:].clone()
    if fault in ("format", "net"):
        about[fault] = "squeeze"
    save(path, "alex", tensors, about)
    if fault == "short":
        path.write_bytes(path.read_bytes()[:-100])
    if fault == "text":
        path.write_bytes(b"no weights")
    if fault == "huge":                                     # a header of 2^60 bytes
        path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    if fault == "absent":
        path.unlink()
    with pytest.raises(SystemExit) as end:
        metrics.Lpips.open(str(path), "cpu")
    assert says in str(end.value) and str(path) in str(end.value)


def test_tables_have_lpips(tmp_path):
    """library.py's table and rows, also of results from before LPIPS was measured."""
    clip = {"prompt": 0, "seed": 0, "psnr": 30.0, "ssim": 0.9, "psnr_min": 20.0, "flicker": 1.0, "seconds": 2.0,
            "work": 0.44}
    clip |= {name: 0 for name in library_table.COLUMNS if name not in clip and name != "lpips"}
    runs = [{"name": name, "words": f"work=0.44 seed={i}", "study": "", "kind": "k", "study_kind": "s", "clips": clips}
            for i, (name, clips) in enumerate((("with", [clip | {"lpips": 0.0625}, clip | {"lpips": 0.03125}]),
                                               ("half", [clip | {"lpips": 0.0625}, clip]), ("without", [clip])))]
    lines = {line.split()[0]: line for line in library_table.table(runs).splitlines() if line.split()}
    assert "LPIPS" in lines["run"] and "0.0469" in lines["with"]
    assert " - " in lines["half"] and " - " in lines["without"] and "0.0625" not in lines["half"]
    library_table.write_csv(tmp_path / "t.csv", runs)
    rows = (tmp_path / "t.csv").read_text().splitlines()
    at = rows[0].split(",").index("lpips")
    assert [row.split(",")[at] for row in rows[1:]] == ["0.0625", "0.03125", "0.0625", "", ""]
    run = {"label": "s", "asked": 0.44, "work": 0.44, "psnr": 30.0, "ssim": 0.9, "psnr_min": 20.0, "flicker": 1.0,
           "psnrs": [30.0], "parts": dict.fromkeys(("exact", "tail", "scores", "order"), 0.1)}
    text = table.table([run, json.loads(json.dumps(run | {"label": "t", "lpips": 0.25}))])
    assert "LPIPS" in text and text.count(" - ") == 1 and "0.2500" in text
