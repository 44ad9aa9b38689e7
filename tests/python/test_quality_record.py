# SPDX-License-Identifier: Apache-2.0
"""bench/quality/record.py: recordings of several groups and numbers of prompts, their mask files, and a clip that runs
from one of them."""
import json
import pathlib
import sys

import esa
import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench" / "quality"))
import library  # noqa: E402
import record  # noqa: E402
from prompts import OTHERS  # noqa: E402

MODEL = ROOT / "models" / "wan-tiny"
TEXT_DIM = json.loads((MODEL / "transformer" / "config.json").read_text())["text_dim"]


@pytest.fixture
def own_torch():
    """record.py sets the threads and turns gradients off."""
    before = torch.is_grad_enabled(), torch.get_num_threads()
    yield
    torch.set_grad_enabled(before[0])
    torch.set_num_threads(before[1])


def test_recordings_and_masks(tmp_path, own_torch, capsys):
    generator = torch.Generator().manual_seed(3)
    torch.save({p: 0.1 * torch.randn(7, TEXT_DIM, generator=generator) for p in [*OTHERS[:2], ""]}, tmp_path / "e.pt")
    words = ["--model", str(MODEL), "--embeds", str(tmp_path / "e.pt"), "--device", "cpu", "--threads", "1", "--frames",
             "5", "--side", "64", "--steps", "2", "--guidance", "1", "--block", "16", "--works", "0.8,0.7", "--out",
             str(tmp_path / "out")]
    record.main([*words, "--groups", "default,4x2", "--prompts", "2,1", "--rows", "0,1"])
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == sorted(f"{g}-p{n}{end}" for g in ("default", "4x2") for n in (1, 2)
                           for end in (".recording", "-rows0.safetensors", "-rows1.safetensors"))
    for name, groups in (("default", (1, 1)), ("4x2", (4, 2))):
        for rows in (0, 1):
            file = esa.MaskFile(tmp_path / "out" / f"{name}-p2-rows{rows}.safetensors")
            assert (file.info.group_q, file.info.group_k, file.exact_rows, file.info.block_q) == (*groups, rows, 16)
            assert file.budgets == [0.7, 0.8]
            # a block more or less is 1 / 144 of a call here
            assert all(abs(file.work(b) - b) < 0.02 for b in file.budgets)
    out = tmp_path / "out"
    assert (out / "4x2-p1.recording").read_bytes() != (out / "4x2-p2.recording").read_bytes()

    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    capsys.readouterr()
    record.main([*words, "--groups", "4x2", "--prompts", "2", "--rows", "0,2"])
    made = {p.name for p in out.iterdir() if p.stat().st_mtime_ns != before.get(p.name)}
    assert made == {"4x2-p2-rows2.safetensors"} and "4x2-p2-rows2" in capsys.readouterr().out

    pipe = library.Pipe(record.options(words), torch.load(tmp_path / "e.pt", weights_only=True))
    with torch.no_grad(), esa.apply(pipe, esa.EsaConfig(masks=out / "4x2-p2-rows2.safetensors", work=0.8)) as handle:
        last = pipe.denoise(OTHERS[0], 1)
    assert torch.isfinite(last).all() and abs(handle.stats().work - 0.8) < 0.02


@pytest.mark.parametrize(("words", "message"), [
    (["--groups", "8"], "groups are default or query x key tokens such as 8x4, not '8'"),
    (["--prompts", "33"], "there are 32 other prompts, not 33"),
    (["--prompts", "0,4"], "there are 32 other prompts"),
    (["--rows", ","], "names nothing")])
def test_wrong_words(words, message, capsys):
    with pytest.raises(SystemExit):
        record.options([*words, "--out", "x"])
    assert message in capsys.readouterr().err
