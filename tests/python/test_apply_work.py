# SPDX-License-Identifier: Apache-2.0
"""esa.apply with a work: what is spent, what is shared, and what a plan and a pipeline's noise levels change."""
import esa
import minis
import pytest
import torch

WORK = esa.EsaConfig(work=0.7, block=minis.BLOCK)
TIMES = (900, 700, 500, 300)


def run(mini, names=("cond", "uncond")):
    """All forwards of a video: each step, each guidance branch."""
    out = []
    for t in TIMES:
        for name in names:
            with mini.model.cache_context(name):
                out.append(mini.at(t))
    return out


@pytest.mark.parametrize("family", sorted(minis.MAKERS))
@pytest.mark.parametrize("config", [WORK, WORK.replace(selector="entropy"), WORK.replace(preset="faithful")],
                         ids=["error", "entropy", "preset"])
def test_work_is_spent(family, config):
    mini = minis.MAKERS[family]()
    dense = mini()
    with esa.apply(mini.model, config, steps=len(TIMES)) as handle:
        results = run(mini)
        stats = handle.stats()
        # A dozen blocks a row: a row's share is a multiple of about 0.08, rounded per head or layer, and text rows and
        # columns are always kept.
        assert abs(stats.work - config.work_asked) < 0.08
        assert stats.work_asked == config.work_asked
        assert "attention work" in handle.report()
    assert all(torch.isfinite(x).all() for x in results)
    assert torch.equal(mini(), dense)


def test_branches_share_masks():
    mini = minis.wan()
    config = WORK.replace(refresh_every=2, order_every=0)
    made = {}
    for share in (False, True):
        with esa.apply(mini.model, config.replace(share_branches=share), steps=len(TIMES)) as handle:
            results = run(mini)
            made[share] = handle.stats().masks_made
        # both branches have the same inputs here
        assert all(torch.equal(a, b) for a, b in zip(results[::2], results[1::2]))
    assert made[False] == 2 * made[True]


def test_masks_of_the_first_step():
    """refresh_every=0: the video makes its own masks, once."""
    mini = minis.wan()
    with esa.apply(mini.model, WORK.replace(refresh_every=0, order_every=0), steps=len(TIMES)) as handle:
        run(mini, names=("cond",))
        stats = [handle.stats(step=i) for i in range(len(TIMES))]
    assert [s.masks_made for s in stats] == [mini.layers, 0, 0, 0]
    assert stats[0].work > stats[1].work


def test_steps_must_be_known():
    mini = minis.wan()
    with esa.apply(mini.model, WORK), pytest.raises(esa.EsaError, match="number of steps is not known"):
        mini()


def test_missing_plan():
    mini = minis.wan()
    with esa.apply(mini.model, WORK.replace(work=0.5, plan="/no/such.plan"), steps=2):
        with pytest.raises(esa.EsaError, match="such.plan"):
            mini()
