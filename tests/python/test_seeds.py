# SPDX-License-Identifier: Apache-2.0
"""Every snippet and command line of the originals' documents, run word for word in a folder of its own
(seed_documents.py).

Python runs as it stands; `python scripts/x.py ...` lines run in this process, with --slow also everything in a shell,
the jobs on a real Slurm. $ESA_COMPAT=FILE writes the table of docs/results/compat.md:

    ESA_COMPAT=docs/results/compat.md python -m pytest tests/python/test_seeds.py --slow"""
import getpass
import json
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import time

import pipelines
import pytest
import torch
from esa.core.mask import MaskFile
from seed_documents import SNIPPETS

ROOT = pathlib.Path(__file__).resolve().parents[2]
BY_NAME = {s.name: s for s in SNIPPETS}
FAST = [s.name for s in SNIPPETS if not s.slow]
SHELL = [s.name for s in SNIPPETS if s.kind == "shell" and s.name != "setup"]
CLUSTER = ROOT / "tests" / "slurm" / "cluster.sh"
# Experiments with thousands of small steps, up to four at once on one machine that may have two cores: minutes on an
# idle one.
PATIENCE = 1800
HEAD = """# The commands of ESA and MindIE-SD

esa follows two documents, that of ESA and that of MindIE-SD. This page lists every snippet and
command line in them, in order, with the result of the last run of `tests/python/test_seeds.py`. Two
things differ from the documents. Model names are found under `$ESA_MODELS`, which holds the real
pipeline classes with a few thousand weights (`tests/python/pipelines.py`). The device `npu` is
replaced by `cpu`.

"bash on Slurm" means a real Slurm with one node and four simulated GPUs
(`tests/slurm/cluster.sh`). `$ESA` is `python -m esa.run_experiment` there;
`tests/slurm/check_slurm.py` runs the native command. `setup` runs in a clone and an environment of
its own. This command writes the page:

    ESA_COMPAT=docs/results/compat.md python -m pytest tests/python/test_seeds.py --slow

| document | snippet | as | result |
|---|---|---|---|
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder that looks like the tree to the commands: scripts/ and experiments/, models elsewhere; results land
    here."""
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
            # The native command does not run pipelines whose VAE does not do what it says; its experiments and ours
            # have the same options and files.
            "esa": '[ "$1 $2" = "experiment run" ] || exit 2\nshift 2\nexec python -m esa.run_experiment "$@"',
            # a user looks for three seconds, then presses Ctrl-C
            "tail": 'timeout 3 /usr/bin/tail "$@"\n[ $? -eq 124 ]'}.items():
        (stand_ins / name).write_text(f"#!/bin/bash\n{text}\n")
        (stand_ins / name).chmod(0o755)
    before, environment = os.getcwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(ESA_MODELS=str(folder / "models"), ESA=str(stand_ins / "esa"),
                      PATH=f"{stand_ins}:{os.environ['PATH']}", USER=getpass.getuser(),
                      PYTHONPATH=f"{ROOT / 'python'}:{ROOT / 'compat' / 'mindiesd'}")
    yield folder
    os.chdir(before)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def slurm(place, tmp_path_factory):
    """A Slurm of our own for as long as the tests of this module run; inside, the commands talk to it. Needs what
    scripts/setup.sh test installs."""
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    # Our own variables come with the jobs; those of a job that these tests may themselves be must not.
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "SRUN"))]:
        del os.environ[name]
    try:
        done = subprocess.run([CLUSTER, "start", folder, "4"], capture_output=True, text=True)
        if done.returncode == 77:
            pytest.skip(f"this machine cannot run Slurm: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield folder
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True)


ROW = re.compile(r"^\| (?:ESA|MindIE-SD) \| (.+?) \| (.+?) \| (.+?) \|$", re.M)


def page_rows(path):
    """{(snippet, how): result} of the page as it stands."""
    return {(name, how): result for name, how, result in ROW.findall(path.read_text())} if path.exists() else {}


@pytest.fixture(scope="module")
def table():
    """Rows of docs/results/compat.md, (snippet, how): result. Where $ESA_COMPAT asks for it they are written at the
    end; what did not run this time stays as it was."""
    rows = {}
    yield rows
    if os.environ.get("ESA_COMPAT"):
        path = pathlib.Path(ROOT, os.environ["ESA_COMPAT"])
        rows = {**page_rows(path), **rows}
        lines = [
            f"| {s.document} | {s.name} | {how} | {rows[name, how]} |\n" for s in SNIPPETS for name, how in rows
            if name == s.name
        ]
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
    assert [v["name"] for v in metrics["videos"]] == ["000"] and len(metrics["videos"][0]["each"]["psnr"]) == 3
    assert metrics["mean"]["psnr"] is None or 10 < metrics["mean"]["psnr"] < 100
    assert 0 < metrics["mean"]["ssim"] <= 1


def check_experiment(tag="1.3b-720p-b05", budget=0.5):
    speed, quality = (json.loads(pathlib.Path(f"results/{tag}/{name}.json").read_text())
                      for name in ("speed", "quality"))
    assert [v["name"] for v in speed["variants"]] == ["dense", f"b{budget:g}"]
    assert [v["name"] for v in quality["variants"]] == [f"b{budget:g}"]
    assert speed["variants"][1]["speedup"] > 0 and speed["calibration"]["prompts"] == 5
    assert len(quality["variants"][0]["videos"]) == 3 and 0 < quality["variants"][0]["mean"]["ssim"] <= 1
    assert all(
        os.path.getsize(f"results/{tag}/{v['file']}") > 100 for variant in speed["variants"] for v in variant["videos"])


def check_attention(space, shape):
    assert space["out"].shape == shape and torch.isfinite(space["out"]).all() and space["out"].dtype == space["q"].dtype


CHECKS = {
    "online mode": check_online,
    "cached mode": check_cached,
    "calibrate": lambda _: check_calibrated("masks/wan-1.3b-720p.pt", (0.7, 0.5, 0.3), (3, 9, 16)),
    "calibrate, 480p": lambda _: check_calibrated("masks/wan-1.3b.pt", (0.7, 0.5, 0.3), (3, 6, 10)),
    "calibrate, 720p": lambda _: check_calibrated("masks/wan-1.3b-720p.pt", (0.5, ), (3, 9, 16)),
    "generate, dense": lambda _: os.path.getsize("results/dense/000.safetensors") > 2160,  # 3 x 12 x 20 x 3 bytes
    "evaluate": lambda _: check_metrics(),
    "experiment": lambda _: check_experiment(),
    "srun, one": lambda _: check_experiment(),
    "batch script": lambda _: check_experiment(),
    "export": lambda _: os.path.getsize("results/dense/000.mp4") > 500,
    "basic usage": lambda s: check_attention(s, (1, 24, 1024, 128)),
    "image model": lambda s: check_attention(s, (2, 24, 4096, 128)),
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
    """Until every job has left the queue. An srun in the background needs a moment to get there."""
    begin, seen = time.monotonic(), False
    while time.monotonic() - begin < (PATIENCE if seen else 60):
        waiting = bool(
            subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout.strip())
        seen = seen or waiting
        if not waiting and (seen or all(os.path.exists(f"results/{tag}/quality.json") for tag in tags)):
            break
        time.sleep(0.5)


def logs():
    return "\n".join(f"{path}:\n{path.read_text()[-2000:]}"
                     for path in sorted(pathlib.Path("experiments/logs").iterdir()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHELL)
def test_in_a_shell(name, place, table, request):
    text = BY_NAME[name].text
    cluster = any(word in text for word in ("srun", "sbatch", "SBATCH", "squeue", "launch_all"))
    if cluster:
        request.getfixturevalue("slurm")
    command = ["bash", "-c", text]
    if text.startswith("#!"):                       # not a line but a script for sbatch
        pathlib.Path("experiments/seed.sbatch").write_text(text + "\n")
        command = ["sbatch", "--wait", "experiments/seed.sbatch"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + logs()
    tags = {
        "srun, several": {"1.3b-720p-b07": 0.7, "14b-480p-b05": 0.5},
        "submit": {f"1.3b-720p-b{b}": b
                   for b in (0.7, 0.5, 0.3)}
    }.get(name, {})
    if tags:
        wait_for_jobs(tags)
    for tag, budget in tags.items():
        assert os.path.exists(f"results/{tag}/quality.json"), logs()
        check_experiment(tag, budget)
    if name.startswith("launch"):
        assert all(
            os.path.exists(f"results/{tag}/quality.json") for tag in ("1.3b-480p", "1.3b-720p", "14b-480p", "14b-720p"))
    CHECKS.get(name, lambda _: True)({})
    note(table, name, "bash on Slurm" if cluster else "bash")


@pytest.mark.slow
def test_setup_lines(tmp_path, table):
    """In a clone and an environment of its own."""
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "tree"], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = dict(os.environ, PATH=f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}")
    environment.pop("PYTHONPATH", None)
    environment["SKBUILD_CMAKE_DEFINE"] = "ESA_CUDA=OFF"        # minutes of nvcc, where there is one
    done = subprocess.run(["bash", "-ec", BY_NAME["setup"].text], cwd=tmp_path / "tree", env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    said = subprocess.run(["python", "-c", "import esa; print(esa.EsaConfig(), esa.__file__)"], cwd=tmp_path,
                          env=environment, capture_output=True, text=True)
    assert said.returncode == 0 and str(tmp_path / "tree") in said.stdout, said.stdout + said.stderr
    note(table, "setup", "bash")


def test_page_names_every_snippet():
    """docs/results/compat.md shows the last runs: every snippet of the documents, none failed, and nothing is there
    that the documents have not."""
    rows = page_rows(ROOT / "docs" / "results" / "compat.md")
    assert {name for name, _ in rows} == set(BY_NAME)
    assert set(rows.values()) == {"ok"}
