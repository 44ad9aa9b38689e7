#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A wheel of `make wheel`, as a stranger gets it: check_wheel.py WHEEL [pip arguments].

The files need nothing but glibc 2.28. The three lines at the top of docs/install.md run in a new virtual environment.
There, with numpy alone, sparse attention runs, so does the esa command, and what needs torch or the video engine says
so in one message. Extra arguments go to `pip install`, for example --no-index."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import venv
import zipfile

TOP = pathlib.Path(__file__).resolve().parents[2]
GUIDE = TOP / "docs" / "install.md"
API = re.search(r"ESA_API_VERSION (\d+)", (TOP / "include" / "esa" / "version.h").read_text())[1]
LARGEST = 40_000_000
GLIBC = (2, 28)
SYSTEM = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d+|ld-linux-x86-64\.so\.2|libesa\.so\.\d+")
PROBE = """
import sys
import numpy as np
import esa
assert "torch" not in sys.modules
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 1024, 64), dtype=np.float32)
grid = dict(latent_shape_q=[4, 16, 16], latent_shape_k=[4, 16, 16])
out = esa.sparse_attention(q, k, v, head_num=4, sparse_type="rf_v2", sparsity=0.8, **grid)
scores = q @ k.swapaxes(-1, -2) / 8
weights = np.exp(scores - scores.max(-1, keepdims=True))
dense = weights / weights.sum(-1, keepdims=True) @ v
full = esa.attention(q, k, v)
assert np.abs(full - dense).max() < 1e-5 and np.isfinite(out).all() and np.abs(out - dense).max() > 1e-3
config = esa.EsaConfig(selector="error", budget=0.5)
mask = esa.select(q, k, config, v=v)
assert 0 < mask.density < 1, mask
try:
    esa.apply
except ImportError as error:
    print(error)
"""


def readelf(path, *words):
    return subprocess.run(["readelf", "-W", *words, path], capture_output=True, text=True, check=True).stdout


def check_files(folder, errors):
    """The shared objects and the command."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.read_bytes()[:4] == b"\x7fELF"]
    names = {p.relative_to(folder).as_posix() for p in files}
    for wanted in (f"esa/lib/libesa.so.{API}", "esa/bin/esa"):
        if wanted not in names:
            errors.append(f"{wanted} is missing")
    for path in files:
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf(path, "-d"))
        errors += [f"{path.name} needs {name}" for name in needed if not SYSTEM.fullmatch(name)]
        versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", readelf(path, "-V"))}
        newest = max(versions, default=(0,))
        if newest > GLIBC:
            errors.append(f"{path.name} needs glibc {'.'.join(map(str, newest))}")
        foreign = re.findall(r"\b(?:GLIBCXX|CXXABI|GCC)_[\d.]+", readelf(path, "-V"))
        if foreign:
            errors.append(f"{path.name} needs {foreign[0]}")
        print(f"{path.relative_to(folder)}: {path.stat().st_size} bytes, glibc {'.'.join(map(str, newest))}")


def check_environment(folder, wheel, arguments, errors):
    """A new environment with numpy and nothing else."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "ESA_LIB", "ESA_CUDA_LIB")}
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"

    def run(*words):
        return subprocess.run([str(w) for w in words], cwd=folder, env=environment, capture_output=True, text=True)

    lines = re.search(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1].splitlines()
    assert len(lines) == 3 and lines[0].startswith("pip install esa_attention-"), lines
    lines[0] = " ".join(["pip install --disable-pip-version-check", *arguments, str(wheel)])
    for line in lines:
        done = run("bash", "-c", line)
        print(f"$ {line}\n{done.stdout}", end="")
        if done.returncode:
            errors.append(f"{line}: {done.stderr[-2000:]}")
            return
    installed = run(python, "-m", "pip", "list", "--format=freeze").stdout.split()
    extra = {line.split("==")[0] for line in installed} - {"esa-attention", "numpy", "pip", "setuptools"}
    if extra:
        errors.append(f"the wheel brought {sorted(extra)}")
    done = run(python, "-c", PROBE)
    wanted = "esa.apply needs torch, which is not installed: pip install 'esa-attention[diffusers]'\n"
    if done.returncode or done.stdout != wanted:
        errors.append(f"the probe: {done.stdout}{done.stderr}")
    for command in ([folder / "bin" / "esa"], [python, "-m", "esa"]):
        if not run(*command, "--version").stdout.startswith("esa "):
            errors.append(f"{command} --version does not run")
    done = run(folder / "bin" / "esa", "generate", "--prompt", "a cat")
    if not done.returncode or "without the video engine" not in done.stderr:
        errors.append(f"esa generate: {done.stdout[-500:]}{done.stderr[-500:]}")


def main(wheel, arguments):
    errors = []
    if not re.fullmatch(r"esa_attention-[\d.]+-py3-none-manylinux_2_28_x86_64\.whl", wheel.name):
        errors.append(f"the wheel is called {wheel.name}")
    print(f"{wheel.name}: {wheel.stat().st_size} bytes")
    if wheel.stat().st_size >= LARGEST:
        errors.append(f"more than {LARGEST} bytes")
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch / "files")
        check_files(scratch / "files", errors)
        install = TOP / "tests" / "install"
        for words in (["check_elf.py", "--packed"], ["check_notices.py", TOP]):
            if subprocess.run([sys.executable, install / words[0], *words[1:], scratch / "files"]).returncode:
                errors.append(f"{words[0]} refuses its files")
        check_environment(scratch / "environment", wheel, arguments, errors)
    for error in errors:
        print(f"check_wheel: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]))
