# SPDX-License-Identifier: Apache-2.0
"""`esa experiment` and `esa report` with every family of the engine: the masks of an experiment keep all text, its
clips are made once, and the report shows them."""
import json

import pytest
from engine_minis import BLOCK, STEPS, families, make, run_esa
from esa.core.mask import MaskFile

BUDGET = 0.6


# CogVideoX has text in front, HunyuanVideo behind: the others take longer and have none.
@pytest.fixture(scope="module", params=families("cogvideox_5b", "hunyuan"))
def experiment(request, tmp_path_factory):
    """The family, the folder of its results, the command, and what it said."""
    root = tmp_path_factory.mktemp(request.param)
    family = make(request.param, root / "mini")
    command = ["experiment", "run", "--tag", "mini", "--results", root / "results", *family.options(), "--method",
               "cached,entropy,rf_v2,ada_bsa,error", "--budgets", BUDGET, "--num-prompts", 1, "--eval-prompts", 1,
               "--block", f"{BLOCK}x{BLOCK}", "--warmup", 0, "--dense-first-layer", 0]
    done = run_esa(*command)
    assert done.returncode == 0, done.stderr
    return family, root / "results" / "mini", command, done.stdout


def test_masks_keep_text(experiment):
    family, results, _, _ = experiment
    file = MaskFile(results / "masks.safetensors")
    assert (file.info.layout.text_front_q, file.info.layout.text_back_q) == (family.layout.text_front,
                                                                            family.layout.text_back)
    assert tuple(file.info.layout.grid_q) == family.layout.grid
    text, skipped = family.text_blocks(), 0
    for step in range(STEPS):
        for layer in range(family.layers):
            blocks = file.mask(layer, step, budget=BUDGET).blocks()
            assert blocks[..., text, :].all() and blocks[..., text].all()
            skipped += (~(blocks != 0)).sum()
    assert skipped > 0, "masks that keep everything show nothing"


def test_results(experiment):
    """Every method made its clip, sparse, and told how far it is from dense."""
    family, results, _, _ = experiment
    config = json.loads((results / "config.json").read_text())["settings"]
    assert config["config_hash"].startswith("fnv1a64:") and config["steps"] == STEPS
    assert bool(config["image"]) is bool(config["image_hash"]) is family.given
    sparse = {f"b{BUDGET:g}", *(f"{m}-b{BUDGET:g}" for m in ("entropy", "rf_v2", "ada_bsa", "error"))}
    assert {path.name for path in (results / "videos").iterdir()} == {"dense", *sparse}
    for path in (results / "videos").iterdir():
        assert (path / "000.mp4").read_bytes()[4:8] == b"ftyp"
    quality = {v["name"]: v for v in json.loads((results / "quality.json").read_text())["variants"]}
    assert set(quality) == sparse
    for name, variant in quality.items():
        assert 0.2 < variant["density"] < 0.9 and not variant["identical"], name
        assert 10 < variant["mean"]["psnr"] < 100, name         # no video is a copy, and none is noise
    speed = json.loads((results / "speed.json").read_text())
    assert speed["tokens"] == family.layout.tokens and speed["calibration"]["prompts"] == 1


def test_goes_on_and_refuses(experiment):
    """Nothing is made twice, and other settings are refused."""
    _, results, command, _ = experiment
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*.mp4")}
    done = run_esa(*command)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*.mp4")} == before
    done = run_esa(*command, "--dynamic-guidance", 1)
    assert done.returncode == 1 and "dynamic_guidance" in done.stderr, done.stderr


def test_report(experiment, tmp_path):
    _, results, _, _ = experiment
    page = tmp_path / "report.html"
    done = run_esa("report", results, "--output", page)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "video/mp4" in text and "http://" not in text.replace("http://www.w3.org", "")
    for name in ("entropy", "rf_v2", "ada_bsa", "error"):
        assert f"{name}-b{BUDGET:g}" in text
