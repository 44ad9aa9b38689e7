# SPDX-License-Identifier: Apache-2.0
"""MiniMax-H3 in diffusers: one packed sequence, of which the target video alone has a grid; steps that count upwards;
the modular pipeline with its VAEs, end to end. test_models.py compares the mini with masked attention."""
import types

import diffusers
import esa
import model_minis
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Blocks
from diffusers.modular_pipelines.minimax_h3 import before_denoise as layouts
from esa.diffusers.families import Geometry
from esa.diffusers.tokens import video_of_rows
from torch.overrides import TorchFunctionMode

STEPS = 8
CARRY = esa.EsaConfig(block=32, carry=[0, 3], budget=0.4, warmup_frac=0.0, dense_first_layer=False)
# A forward in float32, with sums in another order; activations are of order 1.
EXACT = 2e-5

# ---------------------------------------------------------------- where the video is


def packed(keyframes=(), text=20, size=(7, 10, 12), sound=9):
    t, h, w = size
    return layouts.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(text), t, 2 * h, 2 * w, sound, (1, 2, 2), 2, 2, 0, keyframes)


def found(places, rows):
    return video_of_rows(places, rows, "position_ids", "video_indices")


@pytest.mark.parametrize("keyframes", [(), ("first", ), ("last", ), ("first", "last")])
@pytest.mark.parametrize("sound", [0, 9])
def test_keyframes_are_not_video(keyframes, sound):
    """Not even without sound between them and the video, where their rows come right before it."""
    places, _, rows, *_ = packed(keyframes, sound=sound)
    assert found(places, rows) == Geometry((7, 10, 12), 20 + 120 * len(keyframes) + 2 * sound)


@pytest.mark.parametrize("size", [(1, 10, 12), (2, 1, 12), (2, 12, 1), (37, 3, 5)])
def test_sizes(size):
    assert found(*packed(size=size)[0:3:2]) == Geometry(size, 38)


def test_references_are_not_video():
    """A picture, a clip with its sound, and a sound of its own."""
    kinds = [types.SimpleNamespace(kind="image"), types.SimpleNamespace(kind="video", has_audio=True),
             types.SimpleNamespace(kind="audio")]
    clips = [torch.zeros(1, 4, 1, 12, 8), torch.zeros(1, 4, 7, 20, 24)]
    sounds = [torch.zeros(10, 6), torch.zeros(4, 6)]
    places, _, rows, *_ = layouts.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        torch.ones(20), kinds, clips, sounds, 7, 20, 24, 9, (1, 2, 2), 2, 2, 0)
    assert found(places, rows) == Geometry((7, 10, 12), 20 + 24 + 840 + 14 + 18)


def test_what_cannot_be_told():
    places, _, rows, *_ = packed()
    for bad in ((None, rows), (places, None), (places[:, :2], rows), (places, rows[None])):
        with pytest.raises(esa.EsaError, match=r"needs position_ids \[tokens, 3\] and video_indices"):
            found(*bad)
    with pytest.raises(esa.EsaError, match="video_indices is empty"):
        found(places, rows[:0])
    with pytest.raises(esa.EsaError, match="rows and columns only"):
        found(places, rows[:-1])


# ---------------------------------------------------------------- the transformer


@pytest.fixture(scope="module")
def mini():
    return model_minis.make("minimax_h3")


def steps_of(mini, count=STEPS, seed=0):
    """The inputs of a video's forwards: noise falls, and latents change a little from step to step."""
    noise = torch.randn(mini.inputs["hidden_states"].shape, generator=torch.Generator().manual_seed(seed))
    for step in range(count):
        yield {**mini.later(1000 - 900 * step / count), "hidden_states": mini.inputs["hidden_states"] +
               (0.02 * step + seed) * noise}


def video(mini, **more):
    return [mini(**inputs) for inputs in steps_of(mini, **more)]


def test_one_branch_and_steps_that_count_upwards(mini):
    """Timesteps rise to 1, and the keyframe's is the largest at every step."""
    with esa.apply(mini.model, CARRY, steps=STEPS) as handle:
        first = video(mini)
        assert (handle.videos, handle.step, handle.steps) == (1, STEPS - 1, STEPS)
        stats = [handle.stats(step=i) for i in range(STEPS)]
        assert [s.calls for s in stats] == [mini.layers] * STEPS and handle._run._branch == 0
        assert [s.anchor_calls for s in stats] == [mini.layers * (i in (0, 3)) for i in range(STEPS)]
        again = video(mini)                             # noise rises: another video
        assert handle.videos == 2 and all(map(torch.equal, first, again))
        assert handle._run.geometry == Geometry((3, 10, 12), 20 + 120 + 18)


def test_anchors(mini):
    """Anchors are dense; the other steps come closer to dense with what anchors kept."""
    with esa.apply(mini.model, esa.EsaConfig(selector="dense", order="raster"), steps=STEPS):
        dense = video(mini)
    errors = {}
    for carry in ("off", [0, 3]):
        with esa.apply(mini.model, CARRY.replace(carry=carry), steps=STEPS):
            out = video(mini)
        errors[str(carry)] = [(a - b).abs().max().item() for a, b in zip(out, dense)]
    carried, plain = errors["[0, 3]"], errors["off"]
    assert max(carried[0], carried[3]) <= EXACT and min(carried[1], carried[2]) > 0
    assert sum(carried) < 0.5 * sum(plain)


def test_one_branch_spends_what_was_asked_for():
    """No other branch shares its masks: with two, each would have half of their price."""
    large = model_minis.minimax_h3(grid=(9, 16, 18), keyframes=())
    with esa.apply(large.model, esa.EsaConfig(block=32, work=0.7), steps=STEPS) as handle:
        video(large)
        assert handle._run._step_branches() == 1
        # of blocks and rows of blocks, one more or less
        assert abs(handle.stats().work - 0.7) < 0.02


class Lengths(TorchFunctionMode):
    """Lengths of the attention calls that reach torch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.seen.append((args or list(kwargs.values()))[0].shape[2])
        return function(*args, **(kwargs or {}))


def test_the_refiner_stays_dense(mini):
    """Two lengths of attention in one forward: the text's own layers are diffusers'."""
    with esa.apply(mini.model, CARRY.replace(carry="off"), steps=1) as handle, Lengths() as torchs:
        mini()
        stats = handle.stats()
    assert torchs.seen == [20, 20] and stats.calls == stats.sparse_calls == mini.layers


def test_other_lengths_between(mini):
    """Another prompt is another geometry, in the same handle; so are no keyframes."""
    short = model_minis.minimax_h3(text=11, keyframes=())
    with esa.apply(mini.model, CARRY, steps=STEPS) as handle:
        first = video(mini)
        with torch.no_grad():
            mini.model(**short.inputs)
        assert handle._run.geometry == Geometry((3, 10, 12), 11 + 18)
        assert all(map(torch.equal, first, video(mini)))


def test_wrong_use(mini):
    with esa.apply(mini.model, CARRY, steps=STEPS):
        with pytest.raises(esa.EsaError, match=r"needs position_ids \[tokens, 3\] and video_indices"):
            mini(video_indices=None)
        with pytest.raises(esa.EsaError, match="outside of a forward|attends"):
            mini.model.transformer_blocks[0].attn(torch.randn(1, 30, 48))
    with esa.apply(mini.model), pytest.raises(esa.EsaError, match=r"number of steps is not known.*steps=50"):
        mini()
    with esa.apply(mini.model, CARRY.replace(carry="off", step_cache=0.1), steps=STEPS), pytest.raises(
            esa.EsaError, match="step_cache keeps the one tensor"):
        mini()


# ---------------------------------------------------------------- the modular pipeline


def assemble(*without, **parts):
    blocks = MiniMaxH3Blocks()
    for name in without:
        del blocks.sub_blocks[name]
    pipe = blocks.init_pipeline()
    pipe.update_components(**{name: parts[name] for name in parts if name in pipe.component_names})
    return pipe


@pytest.fixture(scope="module")
def pipe():
    """All blocks but the text encoder, whose conditioner has more than 50 layers."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=4, block_out_channels=(4, ) * 6, layers_per_block=1, norm_num_groups=2, decoder_num_layers=1,
        decoder_num_attention_heads=2, decoder_attention_head_dim=32, decoder_num_register_tokens=1,
        latents_mean=(0.0, ) * 4, latents_std=(1.0, ) * 4)
    sound = diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4, latent_dim=16, latent_channels=8, num_attention_heads=2, decoder_dim=128,
        resblock_kernel_sizes=(3, ), resblock_dilation_sizes=((1, ), ), latents_mean=[0.0] * 8, latents_std=[1.0] * 8)
    return assemble("text_encoder", transformer=model_minis.make("minimax_h3").model, vae=vae.eval(),
                    audio_vae=sound.eval(), scheduler=diffusers.MiniMaxH3Scheduler(12.0),
                    audio_scheduler=diffusers.MiniMaxH3Scheduler(3.0))


def call(pipe, height=96, width=128, **more):
    """A video of 5 s, the shortest: 37 frames of 3 x 4 tokens."""
    random = torch.Generator().manual_seed(3)
    if "decode" in pipe.blocks.sub_blocks:
        more["output_type"] = "pt"
    return pipe(prompt_embeds=torch.randn(1, 20, 16, generator=random), text_token_tags=torch.ones(20).long(),
                height=height, width=width, num_frames=124, generator=random, **more)


def picture():
    from PIL import Image
    return Image.new("RGB", (320, 192), (90, 140, 60))


def test_the_pipeline(pipe):
    """The scheduler takes one step less than it is asked for, and esa counts those that run. At density 1 the sound and
    the video stay as they are."""
    want = call(pipe, num_inference_steps=5)
    with esa.apply(pipe, CARRY.replace(budget=1.0, carry="off")) as handle:
        for number in (1, 2):
            got = call(pipe, num_inference_steps=5)
            assert (handle.steps, handle.videos, handle.family) == (4, number, "MiniMax-H3")
            assert handle.stats().sparse_calls == handle.stats().calls == 4 * handle.layers
        assert handle._run.geometry == Geometry((37, 3, 4), 20 + 2 * 207)
    # decoders see differences of EXACT in the latents
    assert (got.videos - want.videos).abs().max() < 1e-3 and (got.audio - want.audio).abs().max() < 1e-3
    assert want.videos.shape == (1, 124, 3, 96, 128)


def test_anchors_in_the_pipeline(pipe):
    """Keyframes at both ends. 2,220 video tokens beside 554 others leave room for anchors."""
    pipe = assemble("text_encoder", "decode", **pipe.components)
    assert esa.EsaConfig().anchors(8, branches=1) == ()         # short runs without guidance carry if asked
    with esa.apply(pipe, esa.EsaConfig(block=32, work=0.9, carry=3)) as handle:
        call(pipe, 192, 320, num_inference_steps=9, image=picture(), last_image=picture())
        assert (handle.steps, handle.videos) == (8, 1)
        steps = [handle.stats(step=i) for i in range(8)]
        assert [s.calls for s in steps] == [handle.layers] * 8
        anchors = handle.config.anchors(8)
        assert len(anchors) > 1
        assert [s.anchor_calls for s in steps] == [handle.layers * (i in anchors) for i in range(8)]
        assert handle._run.geometry == Geometry((37, 6, 10), 20 + 2 * 60 + 2 * 207)
        # noise levels of the video's schedule, not of the sound's
        assert handle._run._sigma(8) == [float(x) for x in pipe.scheduler.sigmas[:8]]


def test_references_have_a_transformer_of_their_own(pipe):
    """transformer_ref alone, and both."""
    other = model_minis.make("minimax_h3", seed=1).model
    both = types.SimpleNamespace(transformer=pipe.transformer, transformer_ref=other)
    for target, count in ((types.SimpleNamespace(transformer_ref=other, transformer=None), 1), (both, 2)):
        with esa.apply(target, CARRY, steps=STEPS) as handle:
            assert len(handle._run.transformers) == count
    with pytest.raises(TypeError, match=r"without its transformer.*load_components\(\) first"):
        esa.apply(MiniMaxH3Blocks().init_pipeline())
