# SPDX-License-Identifier: Apache-2.0
"""Programs of bench/ with tiny models. diffusers_run.py: works are met, every kind of step is found and counted.
engine_run.py: the command gets the settings of each row. gpu_stream.py: nothing is measured without a GPU.
together.py and together_clips.py: caches leave calls out, and esa counts the others. beside.py: every turn counts.
versions.py: every tree runs its own package and library, on the same tensors."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import esa
from esa.programs.native import find_command

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))
import diffusers_run  # noqa: E402
import together  # noqa: E402
import together_clips  # noqa: E402

STEPS = 8


def test_run_at_equal_work(tmp_path, capsys):
    path = tmp_path / "run.json"
    diffusers_run.main(["--mini", "--device", "cpu", "--steps", str(STEPS), "--works", "0.9,0.05", "--rounds", "1",
                        "--json", str(path)])
    shape, = json.loads(path.read_text())["shapes"]
    former, plain, new, *unreached = shape["rows"]
    assert [r["rule"] for r in shape["rows"][:3]] == ["former default", "default without carry", "default"]
    # whole blocks of 16 of 600 tokens
    assert all(abs(row["work"] - 0.9) < 0.02 and row["fallback_calls"] == 0 for row in (former, plain, new))
    # a fifth of 8 steps is dense, the others have masks of their own; without carry masks are made at steps 0, 1, 2 and
    # 4, with carry at the anchors: 0, 2 and 4
    assert former["steps"] == {"dense": 2, "new masks": 6} and new["steps"] == {"new masks": 3, "kept masks": 5}
    assert plain["steps"] == {"new masks": 4, "kept masks": 4}
    assert new["carry_bytes"] > 0 == plain["carry_bytes"] == former["carry_bytes"]
    for row in (former, plain, new):
        forwards = {f"{kind}, branch {b}" for kind in row["steps"] for b in (0, 1)}
        assert set(row["forward_s"]) == forwards and all(x > 0 for x in row["forward_s"].values())
        total = sum(row["forward_s"][f"{kind}, branch {b}"] * n for kind, n in row["steps"].items() for b in (0, 1))
        assert row["run_s"] == pytest.approx(total)
    assert [row["error"][:12] for row in unreached] == ["work is 0.05"] * 3
    assert "work 0.05, default: work is 0.05" in capsys.readouterr().out


def test_run_at_presets(tmp_path):
    path = tmp_path / "run.json"
    diffusers_run.main(["--mini", "--device", "cpu", "--steps", str(STEPS), "--presets", "faithful,balanced",
                        "--rounds", "1", "--json", str(path)])
    shape, = json.loads(path.read_text())["shapes"]
    assert [(r["preset"], r["rule"]) for r in shape["rows"]] == [
        (p, rule) for p in ("faithful", "balanced") for rule in ("default without carry", "default")]
    for row in shape["rows"]:
        asked = esa.EsaConfig(preset=row["preset"], **({"carry": "off"} if "without" in row["rule"] else {}))
        assert row["asked"] == asked.work_for(STEPS) and abs(row["work"] - row["asked"]) < 0.03     # whole blocks
        assert row["speedup"] == pytest.approx(shape["dense_run_s"] / row["run_s"])


FAKE = """#!/usr/bin/env python3
import json, sys
words = sys.argv[1:]
if words == ["--version"]:
    print("esa 1 (abc)")
    sys.exit()
with open({log!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
if "0.300000" in words:
    sys.exit("esa: no such density")
one = {{"step_seconds": [4, 1, 2, 3], "peak_bytes": 5, "kernel": "k"}}
with open(words[words.index("--json") + 1], "w") as file:
    json.dump({{"rows": [{{"round": [one]}}]}}, file)
"""


def engine_run(tmp_path, *rows):
    """The program with rows of diffusers_run.py, and a command that writes down how it was called."""
    command, source, out, log = (tmp_path / name for name in ("esa", "run.json", "out.json", "log"))
    command.write_text(FAKE.format(log=str(log)))
    command.chmod(0o755)
    source.write_text(json.dumps({"machine": "m", "steps": 10, "shapes": [{"shape": "wan-1.3b-480p", "rows": rows}]}))
    done = subprocess.run([sys.executable, ROOT / "bench" / "engine_run.py", "--esa", command, "--from", source,
                           "--json", out], capture_output=True, text=True, timeout=60)
    return done, [json.loads(line) for line in log.read_text().splitlines()], out


def test_engine_run(tmp_path):
    def row(**more):
        return {"asked": 0.3, "density_asked": 0.2, "steps": {"new masks": 2, "kept masks": 8}, **more}
    done, calls, out = engine_run(tmp_path, row(rule="former default", steps={"dense": 2, "new masks": 8}),
                                  row(rule="default without carry", preset="fast"), row(rule="default", preset="fast"),
                                  {"rule": "default", "asked": 0.05, "error": "too little"})
    assert done.returncode == 0, done.stderr
    assert ["--mode", "dense"] == calls[0][-2:] and len(calls) == 3
    off, on = (" ".join(words[words.index("--skip-dense"):]) for words in calls[1:])
    assert off == ("--skip-dense --mode online --budgets 0.200000 --method error --carry off --refresh 0 "
                   "--order-every 0")
    assert on == "--skip-dense --mode online --budgets 0.200000 --method error --carry 1"
    shape, = json.loads(out.read_text())["shapes"]
    dense, first, second = shape["rows"]
    assert dense["run_s"] == 10 * 2.5                       # the median of the four steps
    assert first["run_s"] == second["run_s"] == 2 * 4 + 8 * 2 and second["speedup"] == 25 / 24
    assert "fast 0.3, default: run 24.0 s, 1.04x" in done.stdout and json.loads(out.read_text())["commit"].startswith(
        "esa 1")


def test_engine_run_that_fails(tmp_path):
    done, _, _ = engine_run(tmp_path, {"rule": "default", "asked": 0.3, "density_asked": 0.3,
                                       "steps": {"new masks": 1, "kept masks": 1}})
    assert done.returncode == 1 and done.stderr.strip().endswith("esa: no such density")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_stream_without_a_gpu():
    def stream(*words):
        return subprocess.run([sys.executable, ROOT / "bench" / "gpu_stream.py", *words], capture_output=True,
                              text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
    done = stream()
    assert done.returncode == 1 and "nothing was measured" in done.stderr
    for words in (["--shapes", "x"], ["--densities", "x"], ["--layers", "1"]):
        assert stream(*words).returncode == 2


@pytest.mark.parametrize("words", [["--works", "x"], ["--works", "1.5"], ["--steps", "1"], ["--shapes", "wan-tiny"],
                                   ["--presets", "best"]])
def test_wrong_words(words):
    with pytest.raises(SystemExit) as stop:
        diffusers_run.main(["--mini", "--device", "cpu", *words])
    assert stop.value.code == 2


def test_seconds_together(tmp_path):
    path = tmp_path / "together.json"
    together.main(["--mini", "--device", "cpu", "--steps", str(STEPS), "--esa", "balanced", "--policy", "fast",
                   "--json", str(path)])
    shape, = json.loads(path.read_text())["shapes"]
    assert [row["row"] for row in shape["rows"]] == ["dense", "cache-dit F1", "esa balanced",
                                                     "esa balanced + cache-dit F1"]
    dense, cached, sparse, both = shape["rows"]
    # the first of three layers runs at every step
    assert cached["computed_steps"] == both["computed_steps"] < STEPS
    assert cached["computed"] == both["computed"] == pytest.approx((2 * cached["computed_steps"] / STEPS + 1) / 3)
    assert dense["computed"] == sparse["computed"] == 1 and 0.4 < sparse["work"] < 0.5 < dense["speedup"] == 1
    with pytest.raises(SystemExit):
        together.main(["--mini", "--device", "cpu", "--first", "0"])


@pytest.mark.slow
def test_clips_together(tmp_path):
    path = tmp_path / "clips.json"
    together_clips.main(["--frames", "5", "--steps", "10", "--clips", "1", "--rows", "cache-dit,TaylorSeer,MagCache",
                         "--json", str(path)])
    rows = {row["row"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["dense"]["calls"] == rows["esa"]["calls"] == 1 and rows["esa"]["psnr"] > 20
    for name in ("TaylorSeer", "MagCache"):
        assert rows[name]["calls"] == rows[f"esa + {name}"]["calls"] < 0.9
    assert rows["esa + cache-dit"]["calls"] < 1


@pytest.mark.slow                               # compiles blocks for two kinds of forwards
def test_beside(tmp_path):
    path = tmp_path / "beside.json"
    words = [sys.executable, ROOT / "bench" / "beside.py", "--mini", "--device", "cpu", "--shapes", "mini-wan",
             "--rounds", "2", "--steps", "2", "--linear", "bf16", "--json", path, "--esa", find_command()]
    small = f"--model {ROOT / 'models' / 'wan-tiny'} --device cpu --frames 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([*words, "--engine", small], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    seconds = json.loads(path.read_text())["results"][0]["seconds"]
    assert list(seconds) == ["diffusers dense", "dense bf16", "diffusers esa", "sparse bf16"]
    assert all(len(turns) == 2 and min(turns) > 0 for turns in seconds.values())
    assert "sparse bf16" in done.stdout and "of diffusers esa" in done.stdout
    done = subprocess.run([*words, "--engine", "--model none"], capture_output=True, text=True, timeout=600,
                          env=environment)
    assert done.returncode == 1 and "beside.py" in done.stderr and "none" in done.stderr


def versions(*words):
    return subprocess.run([sys.executable, ROOT / "bench" / "versions.py", "--device", "cpu", "--shapes", "small",
                           "--rounds", "2", *map(str, words)], capture_output=True, text=True, timeout=300)


def a_tree(folder):
    """A tree of links to the package, the benchmarks and the library under test."""
    (folder / "build").mkdir(parents=True)
    (folder / "build" / "libesa.so").symlink_to(pathlib.Path(esa.load().path).resolve())
    for name in ("bench", "python"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def other_package(tree, text):
    """Gives a tree a package of its own: the modules of ours behind an __init__.py with this text."""
    (tree / "python").unlink()
    package = tree / "python" / "esa"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__ = [{str(ROOT / 'python' / 'esa')!r}]\n{text}")


def test_versions(tmp_path):
    trees, path = {name: a_tree(tmp_path / name) for name in "abc"}, tmp_path / "versions.json"
    # version b is wrong: all outputs are a tenth too large. It must run with the library of its tree.
    other_package(trees["b"], "from esa.core.functional import attention as right\n"
                              "from esa.core.library import load\nfrom esa.core.mask import Mask\n"
                              f"assert str(load().path) == {str(trees['b'] / 'build' / 'libesa.so')!r}\n"
                              "def attention(*tensors):\n    return right(*tensors) * 1.1\n")
    run = versions(*(w for n, tree in trees.items() for w in ("--tree", f"{n}={tree}")), "--densities", "1,0.3",
                   "--json", path)
    assert run.returncode == 0, run.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(r["tree"], r["way"], r["density"]) for r in rows] == [
        (name, "call", d) for d in (1.0, 0.3) for name in "abc"]
    for r in rows:
        assert 0 < r["least"] <= r["ms"] <= r["most"]
        first = next(x for x in rows if x["tree"] == "a" and x["density"] == r["density"])
        assert r["ratio"] == pytest.approx(first["ms"] / r["ms"])
        # f32 against f64: 1000 keys round at 2^-24 each; b is off by exactly a tenth. The same tensors, masks and
        # library give the same error.
        assert first["error"] < 1e-5
        assert abs(r["error"] - 0.1) < 1e-5 if r["tree"] == "b" else r["error"] == first["error"]
    assert "small, call: ms (ratio) error" in run.stdout


def test_versions_too_old(tmp_path):
    trees = [a_tree(tmp_path / "a"), a_tree(tmp_path / "b")]
    other_package(trees[1], "raise ImportError('too old')\n")
    run = versions("--tree", f"a={trees[0]}", "--tree", f"b={trees[1]}")
    assert run.returncode == 1 and "ImportError: too old" in run.stderr
    assert "versions.py: the process of tree 'b' ended with status 1" in run.stderr
    assert "BrokenPipeError" not in run.stderr


@pytest.mark.parametrize("words, message", [
    ([], "--tree NAME=FOLDER is needed"),
    (["--tree", "a=/no/such/tree"], "/no/such/tree has neither build-cuda/libesa.so nor build/libesa.so"),
    (["--tree", "a=.", "--densities", "0.5,x"], "--densities takes numbers"),
    (["--tree", "a=.", "--densities", "0"], "densities are above 0"),
    (["--tree", "a=.", "--densities", "0.5,0.50"], "given twice"),
    (["--tree", "a=.", "--shapes", "none"], "unknown shape in 'none'"),
    (["--tree", "=."], "--tree NAME=FOLDER is needed"),
    (["--tree", "a=.", "--json", "/no/such/folder/x.json"], "a folder that does not exist"),
])
def test_versions_wrong_words(words, message):
    run = versions(*words)
    assert run.returncode != 0 and message in run.stderr
