# SPDX-License-Identifier: Apache-2.0
"""Where a model stands is learned right: steps, layers and guidance branches, in pipelines and in loops of one's
own."""
import math

import esa
import minis
import pipelines
import pytest
import torch
from esa.diffusers.clock import Clock, Context
from esa.models import load_pipeline

STEPS = 5
SPARSE = esa.EsaConfig(block=16, budget=0.5, warmup_frac=0.3, tail="none")
WARMUP = math.ceil(0.3 * STEPS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    makers = {
        "wan": pipelines.make_wan, "wan22": pipelines.make_wan22, "cogvideox": pipelines.make_cogvideox,
        "hunyuan": pipelines.make_hunyuan
    }
    made = {}

    def folder(name):
        if name not in made:
            made[name] = makers[name](str(root / name))
        return made[name]
    return folder


@pytest.fixture
def pipe(folders, request):
    pipe = load_pipeline(folders(request.param), device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


SIZES = {"WanPipeline": {"num_frames": 41, "height": 480, "width": 640}, "CogVideoXPipeline": pipelines.COGVIDEOX_SIZE,
         "HunyuanVideoPipeline": pipelines.HUNYUAN_SIZE}


def generate(pipe, prompt="a cat", seed=0, **settings):
    settings = {**SIZES[type(pipe).__name__], "num_inference_steps": STEPS, "output_type": "latent", **settings}
    with torch.no_grad():
        return pipe(prompt, generator=torch.Generator().manual_seed(seed), **settings).frames


def log_moments(handle):
    """Every forward as (video, step, branch, transformer)."""
    moments, run = [], handle._run
    enter = run.enter

    def listening(which, *arguments):
        enter(which, *arguments)
        moments.append((run.moment.video, run.moment.step, run.moment.branch, which))
    run.enter = listening
    return moments


@pytest.mark.parametrize("pipe", ["wan"], indirect=True)
def test_wan_guidance_is_two_calls(pipe):
    with esa.apply(pipe, SPARSE) as handle:
        moments = log_moments(handle)
        generate(pipe)
        assert moments == [(0, step, branch, 0) for step in range(STEPS) for branch in (0, 1)]
        assert handle.steps == STEPS and handle.step == STEPS - 1 and handle.videos == 1
        for step in range(STEPS):
            for layer in range(handle.layers):
                cell = handle.stats(layer, step)
                dense = step < WARMUP or layer == 0
                assert (cell.calls, cell.dense_calls, cell.sparse_calls) == (2, 2 * dense, 2 * (not dense)), (layer,
                                                                                                              step)


@pytest.mark.parametrize("pipe", ["wan"], indirect=True)
def test_wan_without_guidance_is_one_call(pipe):
    with esa.apply(pipe, SPARSE) as handle:
        moments = log_moments(handle)
        generate(pipe, guidance_scale=1.0)
    assert moments == [(0, step, 0, 0) for step in range(STEPS)]


@pytest.mark.parametrize("pipe", ["cogvideox"], indirect=True)
def test_cogvideox_guidance_doubles_the_batch(pipe):
    with esa.apply(pipe, SPARSE) as handle:
        moments = log_moments(handle)
        generate(pipe)
        assert moments == [(0, step, 0, 0) for step in range(STEPS)]
        assert [handle.stats(1, step).sparse_calls for step in range(STEPS)] == [0] * WARMUP + [1] * (STEPS - WARMUP)


@pytest.mark.parametrize("pipe", ["hunyuan"], indirect=True)
def test_hunyuan_numbers_both_stacks(pipe):
    with esa.apply(pipe, SPARSE) as handle:
        moments = log_moments(handle)
        generate(pipe)
        assert moments == [(0, step, 0, 0) for step in range(STEPS)]
        assert handle.layers == 2 and handle.stats(0).sparse_calls == 0 and handle.stats(
            1).sparse_calls == STEPS - WARMUP


@pytest.mark.parametrize("pipe", ["hunyuan"], indirect=True)
def test_hunyuan_true_guidance(pipe):
    with esa.apply(pipe, SPARSE) as handle:
        moments = log_moments(handle)
        generate(pipe, true_cfg_scale=3.0, negative_prompt="a dog that is much longer than the cat was")
        assert moments == [(0, step, branch, 0) for step in range(STEPS) for branch in (0, 1)]


@pytest.mark.parametrize("pipe", ["wan22"], indirect=True)
def test_wan22_counts_through_the_boundary(pipe):
    boundary = pipe.config.boundary_ratio * pipe.scheduler.config.num_train_timesteps
    with esa.apply(pipe, SPARSE) as handle:
        moments = log_moments(handle)
        generate(pipe)
        which = [int(t < boundary) for t in pipe.scheduler.timesteps.tolist()]
        assert 0 < sum(which) < STEPS, "the boundary must lie inside the run"
        assert moments == [(0, step, branch, which[step]) for step in range(STEPS) for branch in (0, 1)]
        assert all(handle.stats(step=step).calls == 2 * handle.layers for step in range(STEPS))
        assert [handle.stats(1, step).sparse_calls for step in range(STEPS)] == [0] * WARMUP + [2] * (STEPS - WARMUP)
        assert handle.stats(0).sparse_calls == 0            # layer 0 of both transformers


@pytest.mark.parametrize("pipe", ["wan22"], indirect=True)
def test_wan22_masks_kept_between_steps_belong_to_one_transformer(pipe):
    config = SPARSE.replace(warmup_frac=0.0, refresh_every=100)
    with esa.apply(pipe, config) as handle:
        generate(pipe)
        boundary = pipe.config.boundary_ratio * pipe.scheduler.config.num_train_timesteps
        first = [t < boundary for t in pipe.scheduler.timesteps.tolist()].index(True)
        made = [handle.stats(1, step).masks_made for step in range(STEPS)]
        assert made == [2 * (step in (0, first)) for step in range(STEPS)]


@pytest.mark.parametrize("pipe", ["wan", "cogvideox", "hunyuan"], indirect=True)
def test_second_video_restarts(pipe):
    with esa.apply(pipe, SPARSE) as handle:
        first = generate(pipe)
        moments = log_moments(handle)
        second = generate(pipe)
        assert moments[0] == (1, 0, 0, 0) and moments[-1][:2] == (1, STEPS - 1)
        assert handle.videos == 2 and handle.stats(step=0).sparse_calls == 0
        assert torch.equal(first, second)
        other = generate(pipe, num_inference_steps=3)       # another number of steps: another warm-up
        assert handle.steps == 3 and handle.videos == 3 and other.shape == first.shape


@pytest.mark.parametrize("pipe", ["wan"], indirect=True)
def test_an_interrupted_video_does_not_shift_the_next(pipe):
    def stop(pipe, i, t, kwargs):
        if i == 2:
            raise KeyboardInterrupt
        return kwargs
    with esa.apply(pipe, SPARSE) as handle:
        want = generate(pipe)
        with pytest.raises(KeyboardInterrupt):
            generate(pipe, callback_on_step_end=stop)
        moments = log_moments(handle)
        assert torch.equal(generate(pipe), want)
        assert [m[1:3] for m in moments] == [(step, branch) for step in range(STEPS) for branch in (0, 1)]


@pytest.mark.parametrize("pipe", ["wan"], indirect=True)
def test_one_step_videos(pipe):
    with esa.apply(pipe, SPARSE) as handle:
        moments = log_moments(handle)
        for _ in range(3):
            generate(pipe, num_inference_steps=1)
        assert moments == [(video, 0, branch, 0) for video in range(3) for branch in (0, 1)]


# ---------------------------------------------------------------- without a pipeline


def test_bare_transformer_learns_from_timesteps():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE, steps=3) as handle:
        moments = log_moments(handle)
        for _ in range(2):
            for t in (900, 600, 300):
                for _ in range(2):
                    mini.at(t)
        assert moments == [(video, step, branch, 0) for video in range(2) for step in range(3) for branch in range(2)]
        mini.at(300)                                        # a third call at one timestep is another video
        assert handle.step == 0


def test_bare_transformer_with_named_calls():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE, steps=2) as handle:
        moments = log_moments(handle)
        for t in (900, 600, 600):
            for name in ("uncond", "cond"):                 # whichever comes first
                with mini.model.cache_context(name):
                    mini.at(t)
    assert moments == [(0, 0, 1, 0), (0, 0, 0, 0), (0, 1, 1, 0), (0, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 0)]


def test_pinned_steps():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE, steps=4) as handle:
        moments = log_moments(handle)
        for step, branch in ((2, 1), (3, 0), (1, 0)):
            handle.pin(step, branch)
            mini()
        handle.begin()
        mini()
    assert moments == [(0, 2, 1, 0), (0, 3, 0, 0), (1, 1, 0, 0), (2, 0, 0, 0)]


def test_unknown_number_of_steps_is_an_error_only_where_it_matters():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE), pytest.raises(esa.EsaError, match="number of steps is not known"):
        mini()
    with esa.apply(mini.model, SPARSE.replace(warmup_frac=0.0)) as handle:
        mini()
        assert handle.stats().sparse_calls == 1


def test_too_many_guidance_passes():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE, steps=2), pytest.raises(esa.EsaError, match="guidance passes"):
        for name in ("cond", "uncond", "a", "b", "c"):
            with mini.model.cache_context(name):
                mini()


class FakeScheduler:
    num_inference_steps = 4

    def __init__(self, timesteps):
        self.timesteps = timesteps


class FakePipe:
    _num_timesteps = 4
    _current_timestep = None

    def __init__(self, timesteps):
        self.scheduler = FakeScheduler(timesteps)


def test_clock_reads_no_values_from_pipelines():
    """The step is the place of the current timestep in the scheduler's, found by address."""
    class Unreadable(torch.Tensor):
        def item(self):
            raise AssertionError("read")
    timesteps = torch.tensor([900, 900, 500, 100])          # even equal values are told apart
    pipe = FakePipe(timesteps)
    clock = Clock(pipe)
    seen = []
    for i in range(4):
        pipe._current_timestep = timesteps[i]
        for name in ("cond", "uncond"):
            clock.context = Context(name)
            moment = clock.tick(timesteps[i].as_subclass(Unreadable))
            seen.append((moment.step, moment.branch, moment.steps))
    assert seen == [(i, b, 4) for i in range(4) for b in (0, 1)]


def test_clock_counts_copies_of_timesteps():
    """A pipeline whose current timestep is no element of the scheduler's tensor: another object is another step."""
    pipe = FakePipe(torch.tensor([9.0, 5.0]))
    clock, seen = Clock(pipe), []
    for t in (torch.tensor(9.0), torch.tensor(5.0)):
        pipe._current_timestep = t
        for name in ("cond", "uncond"):
            clock.context = Context(name)
            seen.append(clock.tick(t).step)
    assert seen == [0, 0, 1, 1]


def test_clock_of_a_video_that_starts_late():
    """Video-to-video runs the last of the scheduler's steps: they are counted from 0."""
    timesteps = torch.tensor([900, 700, 500, 300, 200, 100])
    pipe = FakePipe(timesteps)
    clock = Clock(pipe)
    steps = []
    for i in range(2, 6):
        pipe._current_timestep = timesteps[i]
        steps.append(clock.tick().step)
    assert steps == [0, 1, 2, 3]


def test_clock_follows_a_context_that_knows_its_step():
    clock = Clock()
    seen = []
    for index, name in [(0, "cond"), (0, "uncond"), (1, "cond"), (1, "uncond"), (0, "cond"), (0, "cond")]:
        clock.context = Context(name, index, 7)
        moment = clock.tick(None)
        seen.append((moment.video, moment.step, moment.branch, moment.steps))
    assert seen == [(0, 0, 0, 7), (0, 0, 1, 7), (0, 1, 0, 7), (0, 1, 1, 7), (1, 0, 0, 7), (2, 0, 0, 7)]
