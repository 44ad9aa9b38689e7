# SPDX-License-Identifier: Apache-2.0
"""pip install . and pip install -e . in fresh virtual environments, as a user types them (without the CUDA plugin,
which takes minutes)."""
import os
import pathlib
import re
import subprocess
import venv

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROBE = """
import pathlib, sys
import numpy as np
import esa
from esa.core import library
from esa.programs import prompts
assert "torch" not in sys.modules
assert prompts.built_in(2, tiny=True)[1]
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 1024, 64), dtype=np.float32)
out = esa.sparse_attention(q, k, v, head_num=4, sparse_type="rf_v2", sparsity=0.8, latent_shape_q=[4, 16, 16],
                           latent_shape_k=[4, 16, 16])
assert np.isfinite(out).all()
print(esa.__version__, pathlib.Path(esa.__file__).parent, library.load().path)
"""


def install(folder, *arguments):
    """A fresh environment with the package; returns what the probe printed, run far from the source tree."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ESA_LIB")}
    done = subprocess.run([python, "-m", "pip", "install", "-Ccmake.define.ESA_CUDA=OFF", *arguments], cwd=ROOT,
                          capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    done = subprocess.run([python, "-c", PROBE], cwd=folder, capture_output=True, text=True, timeout=300,
                          env=environment)
    assert done.returncode == 0, done.stderr
    version, package, library = done.stdout.split()
    return version, pathlib.Path(package), pathlib.Path(library), python


def check_command(python, folder):
    """The esa command of the environment runs, and finds libesa_video where that was built."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ESA_LIB")}
    def run(*words):
        return subprocess.run([python.parent / "esa", *words], cwd=folder, capture_output=True, text=True, timeout=300,
                              env=environment)
    assert run("--version").stdout.startswith("esa ")
    done = run("export", "nothing.npy")
    assert done.returncode == 1 and "nothing.npy" in done.stderr, done.stderr
    assert run("masks", "info", "nothing").returncode == 1


@pytest.mark.slow
def test_install(tmp_path):
    version, package, library, python = install(tmp_path / "env", ".")
    words = dict(re.findall(r"#define ESA_VERSION_(\w+) (\d+)", (ROOT / "include" / "esa" / "version.h").read_text()))
    assert version == f"{words['MAJOR']}.{words['MINOR']}.{words['PATCH']}"
    assert package.is_relative_to(tmp_path) and library.parent == package / "lib"
    info = next(package.parent.glob("esa_attention-*.dist-info"))
    assert "Tag: py3-none-linux_" in (info / "WHEEL").read_text() and "Root-Is-Purelib: false" in (info /
                                                                                                   "WHEEL").read_text()
    # No compiled Python: the shared objects are the C libraries alone.
    assert {p.name.split(".")[0] for p in package.rglob("*.so*")} <= {"libesa", "libesa_video", "libesa_cuda"}
    assert not [p for p in (package / "lib").iterdir() if p.is_symlink()]
    check_command(python, tmp_path)


@pytest.mark.slow
def test_editable(tmp_path):
    _, package, library, python = install(tmp_path / "env", "-e", ".")
    assert package == ROOT / "python" / "esa" and library.is_relative_to(tmp_path)
    check_command(python, tmp_path)


def test_the_source_distribution_holds_what_it_needs(tmp_path):
    """Sources and build files, and nothing of build folders, environments or models."""
    import sys
    import tarfile
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("esa_attention-*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        "CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "include/esa/esa.h", "cmake/EsaInstall.cmake",
        "src/attn/plan.c", "src/cuda/cuda.h", "python/esa/core/sparse.py", "python/esa/programs/prompts_tiny.txt",
        "bench/shapes.def", "tests/cases/attention.def"     # the command's
    } <= names
    others = ("build", "build-python", ".venv", "models", "tests", "docs", "lab", "tools", "compat", "experiments",
              "third_party", "scripts")
    assert not [n for n in names if n.split("/")[0] in others and not n.startswith("tests/cases")]
