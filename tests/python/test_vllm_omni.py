# SPDX-License-Identifier: Apache-2.0
"""esa inside vLLM-Omni 0.30.0 from PyPI, in a process of its own (hosts/omni_checks.py)."""
import os
import pathlib
import subprocess
import sys

import pytest
from hosts import wheels

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.slow
def test_inside_the_released_host(tmp_path):
    folder = wheels.unpacked(tmp_path, "vllm_omni", "vllm-omni==0.30.0", "einops==0.8.2")
    wheels.write_entry_points(folder)
    done = subprocess.run([sys.executable, HERE / "hosts" / "omni_checks.py", folder], capture_output=True, text=True,
                          timeout=600, env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "python")})
    assert done.returncode == 0 and "vLLM-Omni: ok" in done.stdout, done.stdout + done.stderr
