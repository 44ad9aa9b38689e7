# SPDX-License-Identifier: Apache-2.0
"""Programs of bench/ with tiny models. diffusers_run.py: works are met, every kind of step is found and counted.
together.py and together_clips.py: caches leave calls out, and esa counts the others. beside.py: every turn counts.
versions.py: every tree runs its own package and library, on the same tensors."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
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
    former, new, *unreached = shape["rows"]
    assert (former["rule"], new["rule"]) == ("former default", "default")
    # whole blocks of 16 of 600 tokens
    assert all(abs(row["work"] - 0.9) < 0.02 and row["fallback_calls"] == 0 for row in (former, new))
    # a fifth of 8 steps is dense, the others have masks of their own; with carry the anchors make masks: 0, 2 and 4
    assert former["steps"] == {"dense": 2, "new masks": 6} and new["steps"] == {"new masks": 3, "kept masks": 5}
    for row in (former, new):
        forwards = {f"{kind}, branch {b}" for kind in row["steps"] for b in (0, 1)}
        assert set(row["forward_s"]) == forwards and all(x > 0 for x in row["forward_s"].values())
        total = sum(row["forward_s"][f"{kind}, branch {b}"] * n for kind, n in row["steps"].items() for b in (0, 1))
        assert row["run_s"] == pytest.approx(total)
    assert [row["error"][:12] for row in unreached] == ["work is 0.05"] * 2
    assert "work 0.05, default: work is 0.05" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--works", "x"], ["--works", "1.5"], ["--steps", "1"], ["--shapes", "wan-tiny"]])
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
