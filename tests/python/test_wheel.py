# SPDX-License-Identifier: Apache-2.0
"""`make wheel`, with the CUDA plugin where nvcc is found, and the wheel in a new environment with numpy alone. What the
package says without torch is tested in every run."""
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_wheel():
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ESA_LIB")}
    done = subprocess.run(["make", "wheel"], cwd=ROOT, capture_output=True, text=True, timeout=3600, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert '"manylinux_2_' in done.stdout
    wheels = list((ROOT / "dist").glob("*.whl"))
    assert len(wheels) == 1
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "install" / "check_wheel.py"), str(wheels[0])],
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_without_torch_one_sentence_says_what_is_missing():
    code = """
import sys
sys.modules["torch"] = None
import esa
for name in ("apply", "register_backend"):
    try:
        getattr(esa, name)
    except ImportError as error:
        print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"esa.{name} needs torch, which is not installed: pip install 'esa-attention[diffusers]'"
        for name in ("apply", "register_backend")
    ]


def test_the_command_runs_as_a_module():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-m", "esa", "--version"], capture_output=True, text=True, timeout=60,
                          env=environment)
    assert done.returncode == 0 and done.stdout.startswith("esa "), done.stderr
