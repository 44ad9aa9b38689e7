# SPDX-License-Identifier: Apache-2.0
"""Distilled models run few steps without guidance, with noise levels of their own. wan-tiny is none, but everything
around the model must behave: lists of steps, and work, warm-up and step cache of so few steps."""
import json

import pytest
import torch
from safetensors.torch import load_file
from test_single_files import esa

LIST = ("--guidance", 1, "--flow-shift", 5, "--scheduler", "euler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("few")


def test_lists_of_steps(folder):
    def made(*words):
        path = folder / "a.safetensors"
        said = esa("--frames", 1, "--height", 32, "--width", 32, "--method", "dense", "--threads", 1, *LIST, *words,
                   "--save-latents", path, "--out", folder / "a.y4m", "--json", folder / "a.json")
        assert said.returncode == 0, said.stderr
        return load_file(path)["latents"], json.loads((folder / "a.json").read_text())["videos"][0]["steps"]

    timesteps, steps = made("--timesteps", "1000,750,500,250")
    assert steps == 4
    sigmas, _ = made("--sigmas", "1,0.75,0.5,0.25", "--steps", 4)
    other, _ = made("--steps", 4)
    assert torch.equal(timesteps, sigmas) and not torch.equal(timesteps, other)


@pytest.mark.parametrize("words, status, says", (
    (("--sigmas", "1,0.5", "--timesteps", "1000,500"), 2, "give one"),
    (("--sigmas", "0.5,0.75"), 1, "sigma 1 is 0.75"),
    (("--sigmas", "1,0.5,0.5"), 1, "sigma 2 is 0.5"),
    (("--sigmas", "1,0.5,0"), 1, "sigma 2 is 0"),
    (("--sigmas", "1,0.5", "--steps", 3), 1, "2 sigmas for 3 steps")))
def test_bad_lists(folder, words, status, says):
    said = esa(*words, "--out", folder / "b.y4m")
    assert said.returncode == status and says in said.stderr, said.stderr


@pytest.mark.parametrize("method, carry, warmup", (("error", "off", 0), ("error", 1, 0), ("entropy", "off", 1)))
def test_four_sparse_steps(folder, method, carry, warmup):
    """The work that was asked for is kept, the warm-up is one step at most, and the cache leaves no step out."""
    asked = ("--work", 0.6, "--carry", carry) if method == "error" else ("--budget", 0.5)
    said = esa("--frames", 17, "--height", 128, "--width", 128, "--threads", 2, "--method", method, "--cache", "auto",
               *asked, *LIST, "--timesteps", "1000,750,500,250", "--out", folder / "c.y4m", "--json", folder / "c.json")
    assert said.returncode == 0, said.stderr
    video = json.loads((folder / "c.json").read_text())["videos"][0]
    assert (video["steps"], video["computed_steps"], video["warmup_steps"]) == (4, 4, warmup)
    assert video["sparse_calls"] >= 0.6 * video["calls"] > 0
    if method == "error":
        assert abs(video["attention_work"]["realised"] - 0.6) <= 0.02
