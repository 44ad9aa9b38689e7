# SPDX-License-Identifier: Apache-2.0
"""esa inside vLLM-Omni 0.30.0 and 0.32.0rc1 from PyPI, in processes of its own (hosts/omni_checks.py,
hosts/omni_ulysses.py)."""
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from hosts import wheels

HERE = pathlib.Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "python")}


@pytest.fixture(scope="module", params=["0.30.0", "0.32.0rc1"])
def folder(request, tmp_path_factory):
    folder = wheels.unpacked(tmp_path_factory.mktemp("omni"), "vllm_omni", f"vllm-omni=={request.param}",
                             "einops==0.8.2")
    wheels.write_entry_points(folder)
    return folder


def start(program, folder, **environment):
    return subprocess.Popen([sys.executable, HERE / "hosts" / program, folder], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, env={**ENVIRONMENT, **environment})


@pytest.mark.slow
def test_inside_the_released_host(folder):
    process = start("omni_checks.py", folder)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "vLLM-Omni: ok" in output, output


@pytest.mark.slow
def test_its_ulysses(folder):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [start("omni_ulysses.py", folder, RANK=str(rank), **shared) for rank in range(2)]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0 and "Ulysses: ok" in output, output
    finally:
        for process in processes:
            process.kill()
