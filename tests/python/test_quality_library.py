# SPDX-License-Identifier: Apache-2.0
"""bench/quality/library.py, which measures the library on whole clips: its words, its tables, its loop against
WanPipeline's, and a small run from the command line that is stopped and goes on."""
import csv
import json
import os
import pathlib
import subprocess
import sys
import types

import esa
import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "quality"
sys.path.append(str(FOLDER))
import library  # noqa: E402
import library_runs as runs  # noqa: E402
import library_table as tables  # noqa: E402
from prompts import EVAL  # noqa: E402

MODEL = ROOT / "models" / "wan-tiny"
SIZE = {"frames": 5, "side": 64, "steps": 2}
TEXT_DIM = json.loads((MODEL / "transformer" / "config.json").read_text())["text_dim"]


def embeds(prompts):
    """Stand-ins for encoded prompts."""
    generator = torch.Generator().manual_seed(3)
    return {p: 0.1 * torch.randn(7, TEXT_DIM, generator=generator) for p in prompts}


# ---------------------------------------------------------------- words

def test_words():
    assert runs.values("work=0.44, block=64x32 share_branches=False order=hilbert,plan=a.json") == {
        "work": 0.44, "block": (64, 32), "share_branches": False, "order": "hilbert", "plan": "a.json"}
    first, second = runs.parse("work=0.5,block=64; two: budget=0.3 | sel=errq8m4 bud=layer")
    assert first == runs.Run("work=0.5 block=64", "work=0.5 block=64")
    assert second == runs.Run("two", "budget=0.3", "sel=errq8m4 bud=layer")
    assert first.label() is None and second.label() == "sel=errq8m4 bud=layer"
    assert first.config() == esa.EsaConfig(work=0.5, block=64)


@pytest.mark.parametrize("text", ["work", "work=", "work=0.4 work=0.5", "work=0.4 | no=1"])
def test_bad_words(text):
    with pytest.raises(ValueError):
        runs.parse(text)


@pytest.mark.parametrize("group", sorted(runs.GROUPS))
def test_groups(group):
    for run in runs.wanted(group, ""):
        config = run.config()
        assert config.spends_work == ("work" in runs.values(run.words))
        run.label()


def test_groups_keep_their_order():
    names = [r.words for r in runs.wanted("main,ideas", "budget=0.25")]
    assert len(set(names)) == len(names)
    assert names[:len(runs.MAIN)] == [r.words for r in runs.MAIN] and names[-1] == "budget=0.25"


def test_ideas_end_in_the_new_default():
    configs = [run.config() for run in runs.ideas(0.44)]
    assert len(set(map(repr, configs))) == len(configs)
    assert configs[-2] == esa.EsaConfig(work=0.44, block=64, carry="off")


# ---------------------------------------------------------------- tables

def run_of(name, words, work, psnrs, study=""):
    clip = {"ssim": 0.9, "psnr_min": 20.0, "flicker": 1.0, "seconds": 2.0, "work": work}
    return {"name": name, "words": words, "study": study, "kind": "k", "study_kind": "wan-tiny 8 steps",
            "clips": [{**clip, "prompt": i, "seed": 0, "psnr": p} for i, p in enumerate(psnrs)]}


def test_paired_error():
    a, b = run_of("a", "work=0.57", 0.57, [40.0, 42.0, 44.0]), run_of("b", "budget=0.3", 0.57, [30.0, 31.0, 35.0])
    mean, error = tables.paired(a, b)
    # differences 10, 11, 9: mean 10, deviation 1, over the root of 3
    assert mean == pytest.approx(10) and error == pytest.approx(3 ** -0.5)
    b["clips"] = b["clips"][:1]
    assert tables.paired(a, b)[0] == pytest.approx(10)
    b["clips"] = []
    assert tables.paired(a, b) is None


def test_reference_is_today_at_equal_work():
    low, high = (run_of(runs.TODAY, f"budget={b}", w, [30.0]) for b, w in ((0.1, 0.441), (0.3, 0.569)))
    free = run_of(runs.TODAY_FREE, "work=0.3 selector=entropy", 0.301, [28.0])
    everything = [low, high, free]
    for work, want in ((0.44, low), (0.57, high), (0.3, free), (0.2, None)):
        assert tables.reference(everything, run_of("new", f"work={work}", work, [40.0])) is want


def test_study_and_engine_are_shown():
    r = run_of("new default", "work=0.44 block=64", 0.4395, [40.0, 41.0], runs.new(0.44).study)
    label = runs.new(0.44).label()
    study = [{"label": label, "asked": 0.57, "psnr": 46.3, "clips": "models/wan-tiny 8 steps guidance 2.5"},
             {"label": label, "asked": 0.44, "psnr": 40.9, "clips": "models/other 8 steps guidance 2.5"},
             {"label": label, "asked": 0.44, "psnr": 40.1, "clips": "models/wan-tiny 8 steps guidance 2.5"}]
    rows = {(0, 0, "error", "work 0.44", "levels", "adaptive"): 39.9}
    assert tables.simulated(r, study) == 40.1
    difference, clips = tables.engine(r, rows)
    assert difference == pytest.approx(0.1) and clips == 1
    text = tables.table([r], study, rows)
    assert "40.10" in text and "+0.10 (1)" in text


# ---------------------------------------------------------------- clips

def test_loop_is_the_pipelines():
    """Same latents as WanPipeline from the same embeddings and seed."""
    from esa.models import load_pipeline
    pipe = load_pipeline("wan-tiny", device="cpu", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    text = embeds(["a", ""])
    a = types.SimpleNamespace(device="cpu", dtype="f32", model=str(MODEL), transformer="", diffusers="", guidance=2.5,
                              **SIZE)
    with torch.no_grad():
        ours = library.Pipe(a, text)
        want = pipe(prompt_embeds=ours.text("a"), negative_prompt_embeds=ours.text(""), num_frames=SIZE["frames"],
                    height=SIZE["side"], width=SIZE["side"], num_inference_steps=SIZE["steps"], guidance_scale=2.5,
                    generator=torch.Generator().manual_seed(1), output_type="latent").frames
        got = ours.denoise("a", 1)
    # the same operations on the same weights; a thread count decides the order of sums
    assert torch.allclose(got, want, atol=1e-4 * float(want.abs().max()))


def test_command_goes_on(tmp_path, monkeypatch):
    """Once as a command; the run that goes on is in this process, which has imported everything already."""
    torch.save(embeds([EVAL[0], ""]), tmp_path / "embeds.pt")
    out = tmp_path / "out.json"

    def line(*words):
        sizes = (x for name, value in SIZE.items() for x in (f"--{name}", str(value)))
        return [str(word) for word in (FOLDER / "library.py", "--model", MODEL, "--embeds", tmp_path / "embeds.pt",
                                       "--device", "cpu", "--threads", "1", "--keep", tmp_path / "keep", "--out", out,
                                       *sizes, *words)]
    subprocess.run([sys.executable, *line("--runs", "selector=dense", "--clips", "1")], check=True, capture_output=True,
                   text=True, env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1] / "python")})
    one, = json.loads(out.read_text())["runs"]
    # dense through the library: rounding alone, less than a grey level anywhere
    assert one["clips"][0]["psnr"] > 60 and one["clips"][0]["work"] == 1.0
    # masks and orders made once, because a clip as short as this one cannot pay for more
    some = "some: work=0.8 block=16 exact_rows=0 refresh_every=0 order_every=0"
    monkeypatch.setattr(sys, "argv", line("--runs", f"selector=dense; {some}", "--clips", "2"))
    with torch.no_grad():                                   # main turns gradients off, and here they come back
        library.main()
    both = json.loads(out.read_text())["runs"]
    assert [len(r["clips"]) for r in both] == [2, 2]
    assert both[0]["clips"][0] == one["clips"][0]           # not made again
    some = both[1]["clips"]
    assert all(c["work_asked"] == 0.8 and abs(c["work"] - 0.8) < 0.1 for c in some)
    assert all(c["dense_calls"] < c["calls"] and c["kernel"] and c["fallback_calls"] == 0 for c in some)
    assert all(10 < c["psnr"] < 60 and c["psnr_min"] <= c["psnr"] and 0 < c["ssim"] < 1 for c in some)
    with open(tmp_path / "out.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [(r["name"], r["prompt"], r["seed"]) for r in rows] == [
        (n, "0", s) for n in ("selector=dense", "some") for s in "01"]
    assert len(list((tmp_path / "keep").glob("*/*.npy"))) == 6
