# SPDX-License-Identifier: Apache-2.0
"""esa inside SGLang 0.5.23 from PyPI, in a process of its own (hosts/sglang_checks.py,
hosts/sglang_h3_checks.py)."""
import os
import pathlib
import subprocess
import sys

import pytest
from hosts import wheels

HERE = pathlib.Path(__file__).resolve().parent
PLATFORM = ("--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--only-binary", ":all:")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = wheels.unpacked(tmp_path_factory.mktemp("sglang"), "sglang", "sglang==0.5.23", "msgspec==0.22.0",
                             platform=PLATFORM)
    wheels.write_entry_points(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("program,words", [("sglang_checks.py", "SGLang: ok"),
                                           ("sglang_h3_checks.py", "SGLang, MiniMax-H3: ok")])
def test_inside_the_released_host(folder, program, words):
    done = subprocess.run([sys.executable, HERE / "hosts" / program, folder], capture_output=True, text=True,
                          timeout=600, env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "python")})
    assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr
