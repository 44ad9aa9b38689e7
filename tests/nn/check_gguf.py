# SPDX-License-Identifier: Apache-2.0
"""The engine's types with blocks against the gguf package: new random blocks of every type, the same bits. `make
test-all` runs it, in an environment of its own (requirements-gguf.txt).

    ESA_LIB=build/libesa.so python -m pytest tests/nn/check_gguf.py

tests/nn/test_blocks.c compares; it is in the folder tests/ beside the library."""
import os
import pathlib
import random
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ["ESA_LIB"]).resolve().parent / "tests" / "test_blocks"
SEED = int(os.environ.get("ESA_TEST_SEED") or random.randrange(10**6))


@pytest.mark.parametrize("blocks", (2, 33, 257))
def test_same_bits_as_the_package(tmp_path, blocks):
    print(f"ESA_TEST_SEED={SEED}")
    maker = [sys.executable, SOURCE / "tools/golden/gguf_blocks.py", "--out", tmp_path / "gguf_blocks.safetensors"]
    subprocess.run([*maker, "--blocks", str(blocks), "--seed", str(SEED + blocks)], check=True)
    ran = subprocess.run([PROGRAM], env=dict(os.environ, ESA_TEST_GOLDEN=str(tmp_path)), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_wrong_bit_is_seen(tmp_path):
    """The same numbers with one bit of one value changed do not pass."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(SOURCE / "tests" / "golden" / "gguf_blocks.safetensors")
    for name in ("Q8_0", "Q4_K", "Q5_K", "Q6_K"):
        wrong = {key: value.copy() for key, value in tensors.items()}
        wrong[name + ".values"].view("uint32")[17] ^= 1
        save_file(wrong, tmp_path / "gguf_blocks.safetensors")
        ran = subprocess.run([PROGRAM], env=dict(os.environ, ESA_TEST_GOLDEN=str(tmp_path)), capture_output=True,
                             text=True)
        assert ran.returncode != 0 and f"{name}: element 17" in ran.stdout + ran.stderr
