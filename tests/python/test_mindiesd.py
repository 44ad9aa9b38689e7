# SPDX-License-Identifier: Apache-2.0
"""esa-mindiesd: provides mindiesd.sparse_attention, and never beside or over the real MindIE-SD."""
import os
import pathlib
import subprocess
import sys
import venv
import zipfile

import esa
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "compat" / "mindiesd"


@pytest.fixture
def environment(tmp_path):
    """An empty virtual environment: (its python, its folder of packages)."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    done = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True,
                          text=True, check=True)
    return python, pathlib.Path(done.stdout.strip())


def pip(python, *arguments):
    """This environment's pip at work in another one, without any index: the distribution needs nothing to be built."""
    return subprocess.run(
        [sys.executable, "-m", "pip", "--python",
         str(python), "--disable-pip-version-check", *map(str, arguments)], capture_output=True, text=True, timeout=300)


def run(python, code):
    return subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "python")})


def pretend(packages, name="mindiesd", version="3.0.0"):
    """Something that looks like the real package."""
    (packages / "mindiesd").mkdir(exist_ok=True)
    (packages / "mindiesd" / "__init__.py").write_text("real = True\n")
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("mindiesd/__init__.py,,\n")


def test_installs_and_provides_the_call(environment):
    python, packages = environment
    done = pip(python, "install", "--no-index", "--no-deps", SOURCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (packages / "mindiesd" / "__init__.py").exists()
    shown = run(
        python,
        "from importlib.metadata import distribution as d; print(d('esa-mindiesd').version, d('esa-mindiesd').requires)"
    )
    assert shown.stdout == f"{esa.__version__} ['esa-attention']\n", shown.stderr
    # over itself is fine
    assert pip(python, "install", "--no-index", "--no-deps", "--force-reinstall", SOURCE).returncode == 0
    assert pip(python, "uninstall", "-y", "esa-mindiesd").returncode == 0
    assert not (packages / "mindiesd").exists()


@pytest.mark.parametrize("name", ["mindiesd", "MindIE_SD"])
def test_does_not_install_over_the_real_one(environment, name):
    python, packages = environment
    pretend(packages, name)
    done = pip(python, "install", "--no-index", "--no-deps", SOURCE)
    assert done.returncode != 0
    refusal = f"already holds MindIE-SD ({name}-3.0.0.dist-info): esa-mindiesd does not install over it"
    assert refusal in done.stdout + done.stderr
    assert (packages / "mindiesd" / "__init__.py").read_text() == "real = True\n"


@pytest.mark.slow
def test_does_not_install_over_a_copied_one(environment):
    python, packages = environment
    (packages / "mindiesd").mkdir()
    (packages / "mindiesd" / "__init__.py").write_text("real = True\n")
    done = pip(python, "install", "--no-index", "--no-deps", SOURCE)
    assert done.returncode != 0 and "already holds MindIE-SD (mindiesd/)" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_wheel_that_got_over_the_real_one_says_so(environment, tmp_path):
    """A ready wheel cannot look around before it is installed; the import does."""
    python, packages = environment
    assert pip(python, "wheel", "--no-index", "--no-deps", "-w", tmp_path, SOURCE).returncode == 0
    wheel = next(tmp_path.glob("esa_mindiesd-*-py3-none-any.whl"))
    pretend(packages)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    done = run(python, "import mindiesd")
    advice = "MindIE-SD 3.0.0 is installed, and esa-mindiesd has taken its place: pip uninstall esa-mindiesd"
    assert done.returncode == 1 and advice in done.stderr
