# SPDX-License-Identifier: Apache-2.0
"""wan-tiny as GGUF files in the names of Wan's authors (tools/convert_gguf.py): `esa generate` makes the same video
from them, up to what the type loses."""
import pathlib
import subprocess
import sys

import pytest
from esa.metrics import psnr
from esa.programs.native import find_command

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "wan-tiny"
SMALL = ("--frames", 5, "--height", 64, "--width", 64, "--steps", 4)
LARGE = ("--frames", 5, "--height", 128, "--width", 128, "--steps", 6)
# PSNR in dB against the model's own weights, at least. Measured: 29.7 for SMALL, 47.7 and 28.6 for LARGE; with another
# seed 15.2 and 16.0. In bf16 it is 50.1 and 53.7. Clips of few steps differ more than others do (docs/files.md).
LEAST_SMALL, LEAST_LARGE, OTHER = 25, {"Q8_0": 42, "Q4_K": 24}, 20


def esa(*words):
    return subprocess.run([str(find_command()), "generate", "--threads", "2", *map(str, words)], capture_output=True,
                          text=True)


def video(folder, name, *words, size=SMALL):
    path = folder / f"{name}.y4m"
    made = esa("--method", "dense", *size, "--out", path, *words)
    assert made.returncode == 0, made.stderr
    return path


def convert(folder, kind):
    path = folder / f"{kind}.gguf"
    if path.exists():
        return path
    subprocess.run([sys.executable, ROOT / "tools/convert_gguf.py", "--model", TINY, "--type", kind, "--out", path],
                   check=True)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def own(folder):
    return video(folder, "own")


def test_sixteen_bits_give_the_same_video(folder, own):
    """wan-tiny's own weights are f16, so nothing is lost, and names and shapes are all that differs."""
    assert video(folder, "f16", "--transformer", convert(folder, "F16")).read_bytes() == own.read_bytes()


@pytest.mark.parametrize("kind", ("Q8_0", "Q4_K"))
def test_blocks_are_the_same_held_or_expanded(folder, own, kind):
    file = convert(folder, kind)
    held = video(folder, kind, "--transformer", file, "--hold", "file")
    assert held.read_bytes() == video(folder, kind + "-f32", "--transformer", file, "--hold", "f32").read_bytes()
    assert held.read_bytes() != own.read_bytes()


def test_blocks_give_a_similar_video(folder, own):
    assert psnr(own, video(folder, "q8", "--transformer", convert(folder, "Q8_0"))) >= LEAST_SMALL
    assert psnr(own, video(folder, "seed", "--seed", 1)) < OTHER


@pytest.mark.slow
def test_larger_videos(folder):
    own = video(folder, "large", size=LARGE)
    found = {kind: psnr(own, video(folder, "large-" + kind, "--transformer", convert(folder, kind), size=LARGE))
             for kind in LEAST_LARGE}
    bf16 = psnr(own, video(folder, "large-bf16", "--hold", "bf16", size=LARGE))
    print(found, "bf16", bf16)
    assert bf16 > found["Q8_0"] > found["Q4_K"]
    assert all(found[kind] >= least for kind, least in LEAST_LARGE.items())
    assert psnr(own, video(folder, "large-seed", "--seed", 1, size=LARGE)) < OTHER


def test_check_says_what_a_file_is(folder):
    file = convert(folder, "Q4_K")
    said = esa("--check", "--transformer", file)
    assert said.returncode == 0, said.stderr
    assert "is GGUF (architecture wan): 151 F32, 80 Q4_K; names of the original Wan" in said.stdout
    cut = folder / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-1000])
    said = esa("--check", "--transformer", cut)
    assert said.returncode == 1 and "cut.gguf" in said.stderr and "bytes of data" in said.stderr
    said = esa("--check", "--transformer", TINY / "vae/diffusion_pytorch_model.safetensors")
    assert said.returncode == 1 and "missing (" in said.stderr and "not expected (" in said.stderr
    said = esa("--check", "--transformer", folder / "none.gguf")
    assert said.returncode == 1 and "none.gguf" in said.stderr
