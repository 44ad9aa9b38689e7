# SPDX-License-Identifier: Apache-2.0
"""Ulysses on two processes (gloo, CPU) against one process."""
import os
import pathlib
import subprocess
import sys

import esa
import minis
import parallel_worker
import pytest
import torch
from esa.core import mask
from esa.diffusers import parallel
from esa.diffusers.run import Recording

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(outputs of one process, of rank 0, of rank 1), each by name."""
    folder = tmp_path_factory.mktemp("parallel")
    mini = minis.wan(seed=3, layers=3, heads=parallel_worker.HEADS)
    with esa.apply(mini.model, esa.EsaConfig(block=32), steps=parallel_worker.STEPS, record=Recording()) as handle:
        for t in (900, 400):
            mini.at(t)
        handle.save_recording(str(folder / "recording"))
    masks = str(folder / "masks.pt")
    mask.build_mask_file(masks, [folder / "recording"], budgets=(0.4,), warmup_frac=0.0)
    environment = dict(
        os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(parallel._free_port()),
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(filter(None, (str(HERE.parents[1] / "python"), os.environ.get("PYTHONPATH")))))
    ranks = [
        subprocess.Popen([sys.executable, HERE / "parallel_worker.py", masks, folder / "out"],
                         env=dict(environment, RANK=str(i),
                                  LOCAL_RANK=str(i)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(2)
    ]
    alone = {"masks": masks}
    for name, config in parallel_worker.configs(masks).items():
        outputs, stats = parallel_worker.run(mini, config)
        alone.update({
            name: outputs, name + ".density": torch.tensor(stats.density),
            name + ".sparse_calls": torch.tensor(stats.sparse_calls),
            name + ".carry": torch.tensor([stats.anchor_calls, stats.carried_calls, stats.carry_bytes])
        })
    for rank in ranks:
        text = rank.communicate(timeout=600)[0]
        assert rank.returncode == 0, text
    return alone, torch.load(f"{folder / 'out'}.0"), torch.load(f"{folder / 'out'}.1")


@pytest.mark.parametrize("name", ["dense", "rf_v2", "ada_bsa", "cached"])
def test_two_processes_equal_one(results, name):
    alone, *ranks = results
    for rank in ranks:
        # The same blocks in the same order; matrix products of half the tokens may be summed differently.
        torch.testing.assert_close(rank[name], alone[name], rtol=1e-5, atol=1e-5)
        assert rank[name + ".sparse_calls"] == alone[name + ".sparse_calls"]
    if name != "dense":
        assert alone[name + ".sparse_calls"] > 0
        both = (ranks[0][name + ".density"] + ranks[1][name + ".density"]) / 2          # each has half of the heads
        torch.testing.assert_close(both, alone[name + ".density"], rtol=0, atol=1e-6)


def test_masks_belong_to_heads(results):
    """The two halves of the heads have other masks: using the first half's on both ranks would not have been seen
    otherwise."""
    blocks = mask.MaskFile(results[0]["masks"]).mask(1, 1, budget=0.4).blocks()
    assert (blocks[:, :2] != blocks[:, 2:]).any()


def test_each_rank_carries_its_heads(results):
    alone, *ranks = results
    anchors, carried, held = alone["carry.carry"].tolist()
    assert anchors == carried == 2 and held > 0             # two steps; layer 0 is dense
    for rank in ranks:
        assert rank["carry.carry"].tolist() == [anchors, carried, held // 2]
        # a difference that lies between two numbers of bf16 may be rounded to the other one, 2**-8 of it away
        torch.testing.assert_close(rank["carry"], alone["carry"], rtol=2 ** -8, atol=1e-3)
        assert not torch.equal(rank["carry"][1], rank["rf_v2"][1])


def test_entropy_shares_the_budget_within_a_rank(results):
    alone, *ranks = results
    for rank in ranks:
        # 12 key blocks x 2 heads: rounding to whole blocks
        assert abs(float(rank["entropy.density"]) - 0.4) < 0.02
        assert torch.isfinite(rank["entropy"]).all() and rank["entropy.sparse_calls"] == alone["entropy.sparse_calls"]


def test_refusals():
    import types
    ring = types.SimpleNamespace(context_parallel_config=types.SimpleNamespace(ring_degree=2, ulysses_degree=1))
    with pytest.raises(ValueError, match="Ulysses only"):
        parallel.heads_of(ring, 4)
    anything = types.SimpleNamespace(
        context_parallel_config=types.SimpleNamespace(ring_degree=1, ulysses_degree=2, ulysses_anything=True))
    with pytest.raises(ValueError, match="ulysses_anything"):
        parallel.heads_of(anything, 4)
    assert parallel.heads_of(None, 4) == (0, 0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--gpus 2 was asked for, this machine has 0"):
            parallel.launch(2, None, "esa.generate", [])


def test_a_failing_process_ends_the_others():
    children = [
        subprocess.Popen([sys.executable, "-c", f"import time, sys; time.sleep({t}); sys.exit({code})"])
        for t, code in ((0, 3), (60, 0))
    ]
    try:
        assert parallel._wait(children) == 3
    finally:
        for child in children:
            child.kill()
            child.wait()
