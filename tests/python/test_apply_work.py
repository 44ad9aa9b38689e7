# SPDX-License-Identifier: Apache-2.0
"""esa.apply with a work: what is spent, what is shared, and what a plan and a pipeline's noise levels change."""
import dataclasses
import functools
import types
import warnings

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
@pytest.mark.parametrize("config", [WORK, WORK.replace(selector="entropy", work=0.8), WORK.replace(preset="faithful")],
                         ids=["error", "entropy", "preset"])
def test_work_is_spent(family, config):
    mini = minis.MAKERS[family]()
    dense = mini()
    with esa.apply(mini.model, config, steps=len(TIMES)) as handle:
        results = run(mini)
        stats = handle.stats()
        # A dozen blocks a row: a row's share is a multiple of about 0.08, rounded per head or layer, and text rows and
        # columns are always kept.
        assert abs(stats.work - config.work_for(len(TIMES))) < 0.08
        assert stats.work_asked == config.work_for(len(TIMES))
        assert "attention work" in handle.report()
    assert all(torch.isfinite(x).all() for x in results)
    assert torch.equal(mini(), dense)


@pytest.mark.parametrize("family", sorted(minis.MAKERS))
def test_recorded_errors(family, tmp_path):
    """Error scores of one video, masks built for a work, and a run that only loads them."""
    mini = minis.MAKERS[family]()
    dense = mini()
    steps = len(TIMES)
    with esa.apply(mini.model, esa.EsaConfig(selector="error", block=minis.BLOCK), steps=steps, record=True) as handle:
        assert all(torch.isfinite(x).all() for x in run(mini))
        handle.save_recording(str(tmp_path / "rec"))
    esa.build_mask_file(tmp_path / "masks", [tmp_path / "rec"], works=(0.85, 0.75))
    file = esa.MaskFile(tmp_path / "masks")
    assert file.info.layout.order == 3 and file.info.fine == 4            # Hilbert
    with esa.apply(mini.model, esa.EsaConfig(masks=tmp_path / "masks", work=0.8), steps=steps) as handle:
        results = run(mini)
        stats = handle.stats()
        # a few blocks a row and two layers: whole blocks meet the work only so closely
        assert abs(file.work(0.75) - 0.75) < 0.01 and stats.work_asked == 0.8
        if family == "hunyuan":                     # its text is shorter than the tokens it has: fewer keys
            assert file.work(0.75) - 0.05 < stats.work < file.work(0.75)
        else:
            assert stats.work == pytest.approx(file.work(0.75), abs=1e-9)
        assert stats.masks_made == stats.fallback_calls == 0 and stats.masks_loaded == stats.sparse_calls > 0
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


def test_more_work_than_asked():
    """A video that takes more than was asked for says so once."""
    mini = minis.MAKERS["wan"]()
    with esa.apply(mini.model, WORK, steps=len(TIMES)) as handle:
        run(mini)
        stats, of = handle._run.stats(), handle._run.stats
        short = dataclasses.replace(stats, work_asked=stats.work / 1.03)
        handle._run.stats = lambda layer=-1, step=-1: short if step < 0 else of(layer, step)
        with pytest.warns(UserWarning, match=rf"work {short.work_asked:.3f} was asked for, but {short.work:.3f} was"):
            handle.stats()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert handle.stats() is short
            assert f"(asked {short.work_asked:.3f})" in handle.report()
            # a cache that leaves calls out leaves out cheap ones: that is not worth a word
            handle._told, fewer = False, dataclasses.replace(short, calls=short.calls - 1)
            handle._run.stats = lambda layer=-1, step=-1: fewer if step < 0 else of(layer, step)
            assert handle.stats() is fewer


def test_branches_of_a_step():
    """What a pipeline says of its guidance decides how many calls share masks; one that is not of diffusers and says
    nothing leaves it to the library."""
    from esa.diffusers.run import Run

    class DiffusionPipeline:
        pass

    def branches(pipe, batched=False, work=0.5, half=0, known=True):
        config = esa.EsaConfig(work=work) if work else esa.EsaConfig(budget=0.5)
        clock, family = types.SimpleNamespace(pipe=pipe), types.SimpleNamespace(batched=batched, guided=known)
        run = types.SimpleNamespace(config=config, record=None, clock=clock, family=family, _guided=half)
        for name in ("_guides", "_passes", "_guidance"):
            setattr(run, name, functools.partial(getattr(Run, name), run))
        return Run._step_branches(run)
    guided, alone = (types.SimpleNamespace(do_classifier_free_guidance=x) for x in (True, False))
    assert branches(guided) == 2 and branches(guided, batched=True) == 1 and branches(alone) == 1
    assert branches(guided, batched=True, half=1) == 2          # a batch that is split
    scaled = types.SimpleNamespace(guidance_scale=6.0)          # CogVideoX; elsewhere it need not mean two branches
    assert branches(scaled, batched=True, half=1) == 2 and branches(scaled) == 0
    assert branches(DiffusionPipeline()) == 1
    assert branches(types.SimpleNamespace()) == 0 and branches(None) == 0
    assert branches(types.SimpleNamespace(guider=types.SimpleNamespace(num_conditions=3))) == 3     # modular pipelines
    assert branches(guided, known=False) == branches(None, known=False) == 1   # a family that never guides
    assert branches(guided, work=None) == 0
