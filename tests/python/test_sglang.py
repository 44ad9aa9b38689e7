# SPDX-License-Identifier: Apache-2.0
"""esa inside SGLang 0.5.23 from PyPI, in a process of its own (hosts/sglang_checks.py)."""
import os
import pathlib
import subprocess
import sys

import pytest
from hosts import wheels

HERE = pathlib.Path(__file__).resolve().parent
PLATFORM = ("--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--only-binary", ":all:")


@pytest.mark.slow
def test_inside_the_released_host(tmp_path):
    folder = wheels.unpacked(tmp_path, "sglang", "sglang==0.5.23", platform=PLATFORM)
    wheels.write_entry_points(folder)
    done = subprocess.run([sys.executable, HERE / "hosts" / "sglang_checks.py", folder], capture_output=True, text=True,
                          timeout=600, env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "python")})
    assert done.returncode == 0 and "SGLang: ok" in done.stdout, done.stdout + done.stderr
