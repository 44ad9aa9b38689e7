# SPDX-License-Identifier: Apache-2.0
"""tools/train_wan_tiny: how the judge begins, the file of real clips, and one step of training."""
import importlib.util
import io
import json
import pathlib
import random
import subprocess
import sys
import zipfile

import numpy
import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "train_wan_tiny"
MODEL = ROOT / "models" / "wan-tiny"


def load(name, folder=TOOL):
    """A module of the tool, under a name of its own: the tool's names are too plain for sys.path."""
    spec = importlib.util.spec_from_file_location(f"train_wan_tiny_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


adopt, pack, real = load("adopt"), load("pack"), load("real")
assemble = load("assemble_model", ROOT / "tests" / "quality")


def transformer(heads, head_dim, layers=2):
    torch.manual_seed(4)
    return WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=head_dim,
                                 in_channels=16, out_channels=16, text_dim=192, freq_dim=256, ffn_dim=64,
                                 num_layers=layers, qk_norm="rms_norm_across_heads", rope_max_seq_len=64)


# ---------------------------------------------------------------- adopt

def test_each_pair_moves_to_a_speed_close_to_its_own():
    """Wan's rotary embedding has 22, 21 and 21 speeds in a head of 128, and 12, 10 and 10 in one of 64."""
    old, new = (sum(adopt.rotation_speeds(d), []) for d in (64, 128))
    assert (len(old), len(new)) == (32, 64)
    found = adopt.places(64)
    assert len({target for _, _, target in found}) == len(found) == 62  # two of 24 pairs of time find no place
    assert len({(which, pair) for which, pair, _ in found}) == 62
    ratios = [new[target] / old[pair] for which, pair, target in found if which == 0]
    # The new speeds lie a factor of 1.55 apart, so none that comes first is further than its root from the nearest.
    assert all(0.6 < ratio < 1.7 for ratio in ratios)


def test_adopted_weights_are_those_of_two_heads():
    donor, net = transformer(4, 64), transformer(2, 128)
    torch.nn.init.normal_(donor.blocks[1].attn1.norm_q.weight)
    old = {name: value.clone() for name, value in donor.state_dict().items()}
    new = adopt.adopt(net, donor).state_dict()
    source = adopt.channel_map(4, 64)
    assert (source[:128] < 128).all() and (source[128:][source[128:] >= 0] >= 128).all()
    assert (source < 0).sum() == 2 * 2 * 2  # two heads, two pairs left free in each
    name = "blocks.1.attn1.to_q.weight"
    channel = 37
    assert source[channel] >= 0
    torch.testing.assert_close(new[name][channel], old[name][source[channel]], rtol=0, atol=0)
    norm = "blocks.1.attn1.norm_q.weight"
    torch.testing.assert_close(new[norm][channel], old[norm][source[channel]] * 2**0.25)
    assert (new[name][source < 0] == 0).all()
    moved = ("attn1.to_q", "attn1.to_k", "attn1.norm_q", "attn1.norm_k")
    for name, value in old.items():  # all the rest is the donor's
        if not any(part in name for part in moved):
            torch.testing.assert_close(new[name], value, rtol=0, atol=0)


def test_a_donor_of_another_shape_is_refused():
    with pytest.raises(SystemExit, match="2 heads of 64, this one has 4 of 64"):
        adopt.adopt(transformer(1, 128), transformer(4, 64))


# ---------------------------------------------------------------- real clips

def package(path, clips, frames=12):
    """A zip with one animated picture a clip: clip i is a plain grey of 40 + 10 i that gets brighter by 12 a frame."""
    with zipfile.ZipFile(path, "w") as target:
        for i in range(clips):
            pictures = [Image.new("RGB", (48, 32), (40 + 10 * i + 12 * f,) * 3) for f in range(frames)]
            buffer = io.BytesIO()
            pictures[0].save(buffer, "WEBP", save_all=True, append_images=pictures[1:], lossless=True)
            target.writestr(f"some/folder/c{i}.webp", buffer.getvalue())
    return path


def listed(clips, first=0, step=1):
    return [{"file": f"c{i}.webp", "first": str(first), "step": str(step), "caption": f"real {i}"}
            for i in range(clips)]


def test_real_clips(tmp_path):
    real.gather([package(tmp_path / "p.whl", 3)], listed(3, first=1, step=2), tmp_path / "real.zip", size=32, frames=5)
    clips = real.RealClips(tmp_path / "real.zip", 16)
    assert clips.captions == ["real 1", "real 2"]  # clip 0 is held out
    assert [c.shape for c in clips.clips] == [(5, 16, 16, 3)] * 2
    # Frames 1, 3, 5, 7 and 9 of clip 1: 62, 86, ... AVIF changes a plain grey by a step or two.
    means = clips.clips[0].mean((1, 2, 3))
    assert numpy.abs(means - (62 + 24 * numpy.arange(5))).max() < 4, means
    assert real.RealClips(tmp_path / "real.zip", 16, held_out=True).captions == ["real 0"]
    batches = list(clips.batches(seed=1, count=5, frames=3, batch=2))
    assert [len(captions) for _, captions in batches] == [2, 2, 1]
    assert batches[0][0].shape == (2, 3, 3, 16, 16)
    assert all(video.abs().max() <= 1 for video, _ in batches)
    assert sum((captions for _, captions in batches), []) == ["real 1", "real 2", "real 1", "real 2", "real 1"]
    again = list(clips.batches(seed=1, count=5, frames=3, batch=2))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, again))


def test_a_clip_that_is_too_short_runs_back(tmp_path):
    real.gather([package(tmp_path / "p.whl", 2, frames=3)], listed(2), tmp_path / "real.zip", size=16)
    clips = real.RealClips(tmp_path / "real.zip", 16)
    brightness = clips.window(random.Random(1), 0, 6).float().mean((0, 2, 3))
    assert brightness[0] < brightness[1] < brightness[2] > brightness[3] > brightness[4] < brightness[5]


def test_real_clips_that_are_not_there(tmp_path):
    source = package(tmp_path / "p.whl", 1)
    with pytest.raises(SystemExit, match=r"1 of the listed videos are in none of the packages, such as c1\.webp"):
        real.gather([source], listed(2), tmp_path / "real.zip")
    with pytest.raises(SystemExit, match=r"c0\.webp has no frame 90"):
        real.gather([source], listed(1, first=90), tmp_path / "real.zip")
    real.gather([source], listed(1), tmp_path / "real.zip", size=16)
    with pytest.raises(SystemExit, match="holds 1 clips: too few"):
        real.RealClips(tmp_path / "real.zip", 16)


def test_the_list_of_real_clips():
    rows = (TOOL / "real_clips.csv").read_text().splitlines()
    assert rows[0] == "file,first,step,caption"
    captions = [row.split(",")[3] for row in rows[1:]]
    assert len(captions) == len(set(captions)) == 79
    assert all(caption.startswith("real ") for caption in captions)


# ---------------------------------------------------------------- the packed judge

def test_packed_weights_come_back(tmp_path):
    """Codes are rounded, so a weight is wrong by half of its row's scale, and F16 rounds the scale and the weight."""
    own, name = tmp_path / "own" / "transformer", "diffusion_pytorch_model.safetensors"
    net = transformer(2, 128).half()
    net.blocks[0].attn1.to_q.weight.data[3] = 0
    net.save_pretrained(own)
    old = load_file(own / name)
    pack.pack(own / name)
    assert (own / name).stat().st_size < 0.6 * sum(2 * value.numel() for value in old.values())
    assemble.assemble(tmp_path / "own", MODEL, tmp_path / "whole")
    new = load_file(tmp_path / "whole" / "transformer" / name)
    assert set(new) == set(old)
    for key, value in old.items():
        assert new[key].dtype == torch.float16 and new[key].shape == value.shape
        if value.ndim < 2:
            assert torch.equal(new[key], value)
            continue
        rows, found = value.float().flatten(1), new[key].float().flatten(1)
        largest = rows.abs().amax(1, keepdim=True)
        assert ((rows - found).abs() <= largest * (0.5 / 127 + 3 * 2**-11)).all(), key
    WanTransformer3DModel.from_pretrained(tmp_path / "whole" / "transformer")


def test_the_judge_has_its_shape(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "tests/quality/assemble_model.py", tmp_path / "judge"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    net = WanTransformer3DModel.from_pretrained(tmp_path / "judge" / "transformer")
    assert (net.config.num_attention_heads, net.config.attention_head_dim, net.config.num_layers) == (2, 128, 8)
    assert all(torch.isfinite(value).all() for value in net.state_dict().values())
    (tmp_path / "judge" / "strange").write_text("")
    done = subprocess.run([sys.executable, ROOT / "tests/quality/assemble_model.py", tmp_path / "judge"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "strange" in done.stderr


# ---------------------------------------------------------------- training

def dit(*arguments):
    return subprocess.run([sys.executable, "dit.py", "--model", "judge", "--init", MODEL, *arguments], cwd=TOOL,
                          capture_output=True, text=True, timeout=600)


@pytest.mark.slow                               # a step of training, twice: a minute
def test_the_judge_trains_from_the_command_line(tmp_path):
    real.gather([package(tmp_path / "p.whl", 3)], listed(3), tmp_path / "real.zip", size=32)
    done = dit("--adopt", MODEL / "transformer", "--out", tmp_path, "--real", tmp_path / "real.zip",
               "--real-clips", "2", "--clips", "2", "--held-out", "2", "--size", "32", "--frames", "5", "--batch", "2",
               "--steps", "1", "--no-compile", "--prompts", "1", "--real-prompts", "1", "--sheet-steps", "1",
               "--log-every", "1")
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "dit_log.jsonl").read_text().splitlines()]
    assert log[0]["transformer"] == "adopted" and log[0]["latents"] == [4, 16, 3, 8, 8]
    assert {"step", "loss"} <= set(log[1]) and 0 < log[1]["loss"] < 10
    assert [entry["event"] for entry in log[2:]] == ["held out", "real clips", "end"]
    state = load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert (config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]) == (2, 128, 8)
    assert all(torch.isfinite(value).all() for value in state.values())
    assert Image.open(tmp_path / "sheets" / "dit_32_shift3_guidance2.5.png").width == 6 * 32


@pytest.mark.slow
def test_what_cannot_be_continued_is_refused(tmp_path):
    done = dit("--out", tmp_path)
    assert done.returncode != 0 and "is no judge: it has {'num_attention_heads': 4" in done.stderr
