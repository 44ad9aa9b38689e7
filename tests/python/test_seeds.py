# SPDX-License-Identifier: Apache-2.0
"""Every snippet and command line of the originals' documents, run word for word in a folder of its own (seed_documents.py).

Python runs as it stands; `python scripts/x.py ...` lines run in this process, with --slow also everything in a shell. $ESA_COMPAT=FILE writes the
table of docs/compat.md:   ESA_COMPAT=docs/compat.md python -m pytest tests/python/test_seeds.py --slow"""
import json
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import time

import pytest
import torch

import pipelines
from esa.mask import MaskFile
from seed_documents import SNIPPETS

ROOT = pathlib.Path(__file__).resolve().parents[2]
BY_NAME = {s.name: s for s in SNIPPETS}
FAST = [s.name for s in SNIPPETS if not s.slow]
SHELL = [s.name for s in SNIPPETS if s.kind == "shell" and s.name != "setup"]
HEAD = """# The originals' own lines

Every snippet and command line of the two documents esa was made from, in their order, as `tests/python/test_seeds.py` ran them last. Model names were
found under `$ESA_MODELS` (pipelines with every part the real class, a few thousand weights, `tests/python/pipelines.py`), the device `npu` was `cpu`;
nothing else was changed. `srun`, `sbatch` and `squeue` were stand-ins that run the job in place, with `$ESA` set to `python -m esa.run_experiment`;
`tests/slurm` has the real ones and the native command. This page is written by

    ESA_COMPAT=docs/compat.md python -m pytest tests/python/test_seeds.py --slow

| document | snippet | as | result |
|---|---|---|---|
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder that looks like the tree to the commands: scripts/ and experiments/, models elsewhere; results land here."""
    folder = tmp_path_factory.mktemp("seeds")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "experiments" / "logs").mkdir(parents=True)
    for path in (ROOT / "experiments").iterdir():
        if path.name != "logs":
            (folder / "experiments" / path.name).symlink_to(path)
    pipelines.make_wan(str(folder / "models" / "wan-t2v-1.3b"))
    pipelines.make_wan(str(folder / "models" / "wan-t2v-14b"), heads=3, layers=3, seed=5)
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    for name, text in {
            "python": f'exec "{sys.executable}" "$@"',
            # The native command does not run pipelines whose VAE does not do what it says; its experiments and ours have the same options and files.
            "esa": '[ "$1 $2" = "experiment run" ] || exit 2\nshift 2\nexec python -m esa.run_experiment "$@"',
            "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
            # What follows the script's name are the script's own arguments, as with the real one.
            "sbatch": 'while [ "${1#--}" != "$1" ]; do case "$1" in --job-name=*) export SLURM_JOB_NAME="${1#*=}" ;; esac; shift; done\n'
                      'export SLURM_JOB_ID=$$\necho "Submitted batch job $$"\nbash "$@" >"experiments/logs/$SLURM_JOB_NAME-$$.log" 2>&1 &',
            "squeue": 'echo "JOBID PARTITION NAME USER ST TIME NODES NODELIST(REASON)"',
            "tail": 'timeout 3 /usr/bin/tail "$@"\n[ $? -eq 124 ]'}.items():          # somebody looks for three seconds, then presses Ctrl-C
        (stand_ins / name).write_text(f"#!/bin/bash\n{text}\n")
        (stand_ins / name).chmod(0o755)
    before, environment = os.getcwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(ESA_MODELS=str(folder / "models"), ESA=str(stand_ins / "esa"), PATH=f"{stand_ins}:{os.environ['PATH']}",
                      USER=os.environ.get("USER", "user"), PYTHONPATH=f"{ROOT / 'python'}:{ROOT / 'python' / 'mindiesd'}")
    yield folder
    os.chdir(before)
    os.environ.clear()
    os.environ.update(environment)


ROW = re.compile(r"^\| (?:ESA|MindIE-SD) \| (.+?) \| (.+?) \| (.+?) \|$", re.M)


def page_rows(path):
    """{(snippet, how): result} of the page as it stands."""
    return {(name, how): result for name, how, result in ROW.findall(path.read_text())} if path.exists() else {}


@pytest.fixture(scope="module")
def table():
    """Rows of docs/compat.md, (snippet, how): result. Where $ESA_COMPAT asks for it they are written at the end; what did not run this time
    stays as it was."""
    rows = {}
    yield rows
    if os.environ.get("ESA_COMPAT"):
        path = pathlib.Path(ROOT, os.environ["ESA_COMPAT"])
        rows = {**page_rows(path), **rows}
        lines = [f"| {s.document} | {s.name} | {how} | {rows[name, how]} |\n" for s in SNIPPETS for name, how in rows if name == s.name]
        path.write_text(HEAD + "".join(lines))


def commands(text):
    """The command lines of a shell snippet: comments left out, continued lines joined."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def run_inline(line):
    """`python FILE ARGUMENTS` in this process."""
    words = shlex.split(line)
    assert words[0] == "python", line
    before = sys.argv
    sys.argv = words[1:]
    try:
        with pytest.raises(SystemExit) as end:
            runpy.run_path(words[1], run_name="__main__")
    finally:
        sys.argv = before
    assert end.value.code == 0, f"{line}: exit status {end.value.code}"


def note(table, name, how):
    """It ran, and did what it should."""
    table[name, how] = "ok"


# ---------------------------------------------------------------- what each must have done

def check_online(space):
    stats = space["state"].stats()
    # 50 steps of which 10 are warm-up, two guidance branches, two layers of which the first is dense.
    assert (stats.calls, stats.sparse_calls, stats.fallback_calls) == (200, 80, 0)
    assert space["video"].dtype == torch.uint8 and space["video"].shape == (3, 12, 20, 3)
    assert space["state"].steps_done == 50 and not space["state"].applied


def check_cached(space):
    stats = space["state"].stats()
    assert stats.masks_loaded == stats.sparse_calls == 80 and stats.masks_made == 0
    assert space["video"].shape == (3, 18, 32, 3)


def check_calibrated(path, budgets, grid):
    file = MaskFile(path)
    assert sorted(file.budgets) == sorted(budgets) and file.info.prompts == 5 and file.info.steps == 50
    assert tuple(file.info.layout.grid_q) == grid and (file.info.block_q, file.info.block_k) == (256, 128)
    assert not [p for p in os.listdir("masks") if "recording" in p or "resume" in p or p.endswith(".tmp")]


def check_metrics():
    metrics = json.loads(pathlib.Path("results/sparse-0.5/metrics.json").read_text())
    assert [v["name"] for v in metrics["videos"]] == ["000"] and len(metrics["videos"][0]["each"]) == 3
    assert metrics["mean"]["psnr"] is None or 10 < metrics["mean"]["psnr"] < 100
    assert 0 < metrics["mean"]["ssim"] <= 1


def check_experiment(tag="1.3b-720p-b05", budget=0.5):
    speed, quality = (json.loads(pathlib.Path(f"results/{tag}/{name}.json").read_text()) for name in ("speed", "quality"))
    assert [v["name"] for v in speed["variants"]] == [v["name"] for v in quality["variants"]] == ["dense", f"b{budget:g}"]
    assert speed["variants"][1]["speedup"] > 0 and speed["calibration"]["prompts"] == 5
    assert quality["variants"][0]["identical"] == 3 and 0 < quality["variants"][1]["mean"]["ssim"] <= 1
    assert all(os.path.getsize(f"results/{tag}/{v['file']}") > 100 for variant in speed["variants"] for v in variant["videos"])


def check_attention(space, shape):
    assert space["out"].shape == shape and torch.isfinite(space["out"]).all() and space["out"].dtype == space["q"].dtype


CHECKS = {
    "online mode": check_online, "cached mode": check_cached,
    "calibrate": lambda _: check_calibrated("masks/wan-1.3b-720p.pt", (0.7, 0.5, 0.3), (3, 9, 16)),
    "calibrate, 480p": lambda _: check_calibrated("masks/wan-1.3b.pt", (0.7, 0.5, 0.3), (3, 6, 10)),
    "calibrate, 720p": lambda _: check_calibrated("masks/wan-1.3b-720p.pt", (0.5,), (3, 9, 16)),
    "generate, dense": lambda _: os.path.getsize("results/dense/000.safetensors") > 2160,        # 3 x 12 x 20 x 3 bytes
    "evaluate": lambda _: check_metrics(), "experiment": lambda _: check_experiment(), "srun, one": lambda _: check_experiment(),
    "export": lambda _: os.path.getsize("results/dense/000.mp4") > 500,
    "basic usage": lambda s: check_attention(s, (1, 24, 1024, 128)), "image model": lambda s: check_attention(s, (2, 24, 4096, 128)),
    "video model": lambda s: check_attention(s, (1, 24, 1536, 128)),
}


# ---------------------------------------------------------------- the tests

@pytest.mark.parametrize("name", FAST)
def test_word_for_word(name, place, table):
    """In the order of the documents: later lines use what earlier ones wrote."""
    snippet, space = BY_NAME[name], {}
    if snippet.kind == "python":
        exec(snippet.needs, space)
        exec(snippet.text.replace('device="npu"', 'device="cpu"'), space)
    else:
        for line in commands(snippet.text):
            run_inline(line)
    CHECKS.get(name, lambda _: True)(space)
    note(table, name, "Python" if snippet.kind == "python" else "in process")


def wait_for_jobs(tags):
    for tag in tags:
        for _ in range(1200):
            if os.path.exists(f"results/{tag}/quality.json"):
                break
            time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHELL)
def test_in_a_shell(name, place, table):
    done = subprocess.run(["bash", "-c", BY_NAME[name].text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout
    if name == "srun, several":
        wait_for_jobs(("1.3b-720p-b07", "14b-480p-b05"))
        check_experiment("1.3b-720p-b07", 0.7)
        check_experiment("14b-480p-b05")
    if name == "submit":
        wait_for_jobs([f"1.3b-720p-b{budget}" for budget in (0.7, 0.5, 0.3)])
        for budget in (0.7, 0.5, 0.3):
            check_experiment(f"1.3b-720p-b{budget}", budget)
    if name.startswith("launch"):
        assert all(os.path.exists(f"results/{tag}/quality.json") for tag in ("1.3b-480p", "1.3b-720p", "14b-480p", "14b-720p"))
    CHECKS.get(name, lambda _: True)({})
    note(table, name, "bash")


@pytest.mark.slow
def test_setup_lines(tmp_path, table):
    """In a clone and an environment of its own."""
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "tree"], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = dict(os.environ, PATH=f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}")
    environment.pop("PYTHONPATH", None)
    environment["SKBUILD_CMAKE_DEFINE"] = "ESA_CUDA=OFF"        # minutes of nvcc, where there is one
    done = subprocess.run(["bash", "-ec", BY_NAME["setup"].text], cwd=tmp_path / "tree", env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    said = subprocess.run(["python", "-c", "import esa; print(esa.EsaConfig(), esa.__file__)"], cwd=tmp_path, env=environment, capture_output=True,
                          text=True)
    assert said.returncode == 0 and str(tmp_path / "tree") in said.stdout, said.stdout + said.stderr
    note(table, "setup", "bash")


def test_page_names_every_snippet():
    """docs/compat.md shows the last runs: none failed, nothing that the short run does is missing, and nothing is there that the documents have not."""
    rows = page_rows(ROOT / "docs" / "compat.md")
    assert set(FAST) <= {name for name, _ in rows} <= set(BY_NAME)
    assert set(rows.values()) == {"ok"}
