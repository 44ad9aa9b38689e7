# SPDX-License-Identifier: Apache-2.0
"""ESA's own modules: processor, cached_processor, models; its torch mask files; FlashAttention-4 as the kernel."""
import importlib
import math
import os
import pathlib
import sys
import types

import esa
import minis
import numpy
import pipelines
import pytest
import torch
from esa import models
from esa.cached_processor import cached_processor_mode
from esa.compat.original_masks import OriginalMasks, is_original
from esa.processor import K_BLOCK, Q_BLOCK, _make_step_callback, sparse_processor_mode

STEPS = 5

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory):
    return pipelines.make_wan(str(tmp_path_factory.mktemp("models") / "wan-t2v-1.3b"))


@pytest.fixture
def wan_pipe(wan_folder):
    pipe = models.load_pipeline(wan_folder, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe, **settings):
    settings = {
        "num_frames": 81, "height": 480, "width": 832, "num_inference_steps": STEPS, "output_type": "latent", **settings
    }
    with torch.no_grad():
        return pipe("a cat", generator=torch.Generator().manual_seed(0), **settings).frames


# ---------------------------------------------------------------- esa.processor


def test_block_sizes():
    assert (Q_BLOCK, K_BLOCK) == (256, 128)


def test_sparse_processor_mode(wan_pipe):
    dense = latents(wan_pipe)
    with sparse_processor_mode(wan_pipe, mean_budget=0.5, block=16) as state:
        sparse = latents(wan_pipe)
        config = state.config
        assert (config.selector, config.density, config.tail, config.warmup_frac,
                config.dense_first_layer) == ("entropy", 0.5, "none", 0.2, True)
        assert state.stats().sparse_calls == 2 * (STEPS - 1) * (state.layers - 1)
    assert not torch.equal(sparse, dense)
    assert torch.equal(latents(wan_pipe), dense)
    with sparse_processor_mode(wan_pipe) as state:
        assert state.config.blocks == (Q_BLOCK, K_BLOCK)


def test_settings_that_are_wrong(wan_pipe):
    for settings, message in (({"budget": 0.3}, "calls the budget mean_budget"),
                               ({"mean_budgt": 0.3}, "unexpected keyword argument 'mean_budgt'")):
        with pytest.raises(TypeError, match=message), sparse_processor_mode(wan_pipe, **settings):
            pass
    with pytest.raises(ValueError,
                       match="budget must lie between 0 and 1, not 50"), sparse_processor_mode(wan_pipe, 50):
        pass
    assert not hasattr(wan_pipe.transformer, "_esa_handle")


def test_step_callback_counts_nothing_twice(wan_pipe):
    with sparse_processor_mode(wan_pipe, 0.5, block=16) as state:
        without = latents(wan_pipe)
        cb = _make_step_callback(state)
        seen = []

        def watching(pipe, i, t, kwargs):
            result = cb(pipe, i, t, kwargs)
            assert result is kwargs
            seen.append((i, state.step, state.steps_done))
            return result
        with_callback = latents(wan_pipe, callback_on_step_end=watching)
    assert torch.equal(without, with_callback)
    assert seen == [(i, i, i + 1) for i in range(STEPS)] and state.videos == 2


def test_leaving_by_an_exception_restores(wan_pipe):
    before = dict(wan_pipe.transformer.attn_processors)
    with pytest.raises(ZeroDivisionError), sparse_processor_mode(wan_pipe):
        raise ZeroDivisionError
    assert dict(wan_pipe.transformer.attn_processors) == before


# ---------------------------------------------------------------- esa.cached_processor


def calibrate(pipe, path, **settings):
    with esa.apply(pipe, esa.EsaConfig(**{"selector": "entropy", "block": 16, **settings}), record=True) as handle:
        latents(pipe)
        assert handle.stats().dense_calls == handle.stats().calls > 0
        handle.save_recording(str(path) + ".recording")
    esa.build_mask_file(path, [str(path) + ".recording"], budgets=(0.5,))


def test_cached_processor_mode(wan_pipe, tmp_path):
    masks = tmp_path / "masks.pt"              # the original's ending; the content counts
    calibrate(wan_pipe, masks)
    dense = latents(wan_pipe)
    with cached_processor_mode(wan_pipe, masks, budget=0.5) as state:
        cached = latents(wan_pipe)
        stats = state.stats()
        assert stats.masks_loaded == stats.sparse_calls == 2 * (STEPS - 1) * (state.layers -
                                                                              1) and stats.masks_made == 0
        assert abs(stats.density - 0.5) < 0.02
    with cached_processor_mode(wan_pipe, masks, budget=0.3) as state:       # derived from the stored importance
        latents(wan_pipe)
        assert abs(state.stats().density - 0.3) < 0.02
    assert not torch.equal(cached, dense) and torch.isfinite(cached).all()


def test_masks_for_something_else_are_refused(wan_pipe, tmp_path):
    masks = tmp_path / "masks"
    calibrate(wan_pipe, masks)
    with cached_processor_mode(wan_pipe, masks), pytest.raises(esa.EsaError, match="was made for"):
        latents(wan_pipe, height=640)
    with cached_processor_mode(wan_pipe, masks), pytest.raises(esa.EsaError, match="steps"):
        latents(wan_pipe, num_inference_steps=7)
    with cached_processor_mode(wan_pipe, masks, step_map="nearest") as state:
        latents(wan_pipe, num_inference_steps=7)
        assert state.stats().masks_loaded > 0
    mini = minis.wan(layers=3)
    with pytest.raises(ValueError,
                       match="made for a model of 2 layers, this one has 3"), cached_processor_mode(mini.model, masks):
        pass


# ---------------------------------------------------------------- the original's torch files


GRID = (4, 10, 13)          # 520 tokens: 3 x 5 blocks of 256 x 128, neither complete at the end


def original_file(path, budgets=(0.5,), importance=True, nested=True, steps=2):
    """A file as its README describes it, with masks made here: [L, T, H, nq, nk]."""
    torch.manual_seed(0)
    L, H, nq, nk = 2, 2, 3, 5
    scores = torch.rand(L, steps, H, nq, nk)
    scores = scores / scores.sum(-1, keepdim=True)
    content = {"metadata": {"model": "wan", "num_steps": steps}, "masks": {}}
    if importance:
        content["importance"] = scores.half()
    for budget in budgets:
        keep = max(1, round(budget * nk))
        order = scores.argsort(-1, descending=True)[..., :keep].sort(-1).values
        index = torch.zeros(L, steps, H, nq, nk, dtype=torch.int32)
        index[..., :keep] = order
        content["masks"][budget] = {
            "full_block_cnt": torch.full((L, steps, H, nq), keep, dtype=torch.int32), "full_block_idx": index
        }
    if not nested:
        content.update(content.pop("masks").popitem()[1])
    torch.save(content, path)
    return content


def run_original(path, budget, **settings):
    mini = minis.wan(grid=GRID)
    with cached_processor_mode(mini.model, path, budget=budget, warmup_frac=0.0, dense_first_layer=False,
                               **settings) as state:
        state._run.clock.given_steps = 2
        for t in (900, 100):
            mini.at(t)
        stats = state.stats()
        masks = state._run.session.masks
        caught = [[masks.mask(layer, step, budget=masks.budgets[0]).blocks()[0] for step in range(2)]
                  for layer in range(2)]
    return stats, torch.from_numpy(numpy.asarray(caught))


@pytest.mark.parametrize("nested", [True, False])
def test_original_lists(tmp_path, nested):
    path = tmp_path / "wan-1.3b.pt"
    content = original_file(path, budgets=(0.4,), importance=False, nested=nested)
    lists = content["masks"][0.4] if nested else content
    stats, blocks = run_original(path, 0.4)
    assert stats.masks_loaded == 4 and abs(stats.density - 0.4) < 1e-9
    want = torch.zeros(blocks.shape, dtype=torch.bool).scatter_(-1, lists["full_block_idx"][..., :2].long(), True)
    assert torch.equal(blocks, want)


def test_original_importance_serves_other_budgets(tmp_path):
    path = tmp_path / "wan-1.3b.pt"
    content = original_file(path, budgets=(0.4,))
    stats, blocks = run_original(path, 0.6)
    assert abs(stats.density - 0.6) < 0.05
    # The best block of a row is kept whatever the budgets of the heads are.
    best = content["importance"].float().argmax(-1, keepdim=True)
    assert blocks.gather(-1, best).all()


def test_original_files_that_do_not_fit(tmp_path):
    path = tmp_path / "masks.pt"
    original_file(path, budgets=(0.4,), importance=False)
    with pytest.raises(ValueError, match=r"no importance, and masks for budget 0\.4 only, not 0\.7"):
        run_original(path, 0.7)
    mini = minis.wan()
    with pytest.raises(ValueError, match="made for 3 x 5 blocks of 256 x 128 tokens, this video has 360 tokens"):
        with cached_processor_mode(mini.model, path, budget=0.4, warmup_frac=0.0) as state:
            state._run.clock.given_steps = 2
            mini()
    torch.save({"weights": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="a torch file without masks"):
        OriginalMasks(path)
    torch.save({"x": types.SimpleNamespace(a=1)}, path)
    with pytest.raises(ValueError, match="cannot be read without executing code"):
        OriginalMasks(path)
    path.write_bytes(b"PK\x03\x04 and then nothing of use")
    assert is_original(path)
    with pytest.raises(ValueError, match="masks.pt"):
        OriginalMasks(path)
    path.write_text("no masks at all")
    assert not is_original(path)
    with pytest.raises(esa.EsaError), cached_processor_mode(mini.model, path):
        pass


# ---------------------------------------------------------------- FlashAttention-4


@pytest.fixture
def fa4(monkeypatch):
    """A stub of flash_attn.cute that records its calls and computes what FA4 would."""
    calls = []

    class BlockSparseTensorsTorch(tuple):
        def __new__(cls, mask_block_cnt, mask_block_idx, full_block_cnt=None, full_block_idx=None, block_size=None):
            self = super().__new__(cls, (mask_block_cnt, mask_block_idx, full_block_cnt, full_block_idx))
            self.full_block_cnt, self.full_block_idx = full_block_cnt, full_block_idx
            self.mask_block_cnt, self.block_size = mask_block_cnt, block_size
            return self

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, block_sparse_tensors=None):
        calls.append({"q": q, "k": k, "v": v, "sparse": block_sparse_tensors})
        mask = None
        if block_sparse_tensors is not None:
            count, index = block_sparse_tensors.full_block_cnt, block_sparse_tensors.full_block_idx
            # what lies behind the count says nothing
            listed = torch.arange(index.shape[-1]) < count[..., None]
            kept = torch.zeros(index.shape, dtype=torch.int32).scatter_add_(-1, index.long(), listed.int()) > 0
            bq, bk = block_sparse_tensors.block_size
            n = torch.arange(q.shape[1])
            mask = kept[:, :, n // bq][:, :, :, n // bk]
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
        return out.transpose(1, 2), None
    interface = types.ModuleType("flash_attn.cute.interface")
    interface.flash_attn_func = flash_attn_func
    sparsity = types.ModuleType("flash_attn.cute.block_sparsity")
    sparsity.BlockSparseTensorsTorch = BlockSparseTensorsTorch
    for name, module in (("flash_attn", types.ModuleType("flash_attn")), ("flash_attn.cute",
                                                                          types.ModuleType("flash_attn.cute")),
                         ("flash_attn.cute.interface", interface), ("flash_attn.cute.block_sparsity", sparsity)):
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.fixture
def fa4_run(fa4):
    """Two steps of three layers with FA4, the first step and layer dense: (model, its outputs, statistics, calls)."""
    mini = minis.wan(grid=GRID, layers=3, batch=2)
    with esa.apply(mini.model, FA4_CONFIG, steps=2) as handle:
        got = [mini.at(t) for t in (900, 100)]
        stats = {"all": handle.stats(), "layer 0": handle.stats(0), "step 0": handle.stats(step=0),
                 "step 1": handle.stats(step=1)}
    return mini, got, stats, fa4


FA4_CONFIG = esa.EsaConfig(budget=0.5, tail="none", warmup_frac=0.4, kernel="fa4")


def test_fa4_computes_what_our_kernels_do(fa4_run):
    """FA4 does not reorder, so ours is asked not to."""
    mini, got, _, _ = fa4_run
    with esa.apply(mini.model, FA4_CONFIG.replace(kernel="auto", order="raster"), steps=2):
        want = [mini.at(t) for t in (900, 100)]
    assert max((a - b).abs().max().item() for a, b in zip(got, want)) <= 1e-5


def test_fa4_statistics(fa4_run):
    _, _, stats, _ = fa4_run
    total = stats["all"]
    assert (total.calls, total.dense_calls, total.sparse_calls, total.kernel) == (6, 4, 2, "fa4")
    assert stats["layer 0"].sparse_calls == 0 and stats["step 1"].sparse_calls == 2
    assert math.isnan(stats["step 0"].density)


def test_fa4_is_called_dense_by_policy(fa4_run):
    _, _, _, calls = fa4_run
    assert [call["sparse"] is not None for call in calls] == [False] * 4 + [True] * 2


def test_fa4_gets_the_lists(fa4_run):
    call = fa4_run[3][-1]
    assert call["q"].shape == call["k"].shape == call["v"].shape == (2, 520, 2, 32)            # B, N, H, D
    lists = call["sparse"]
    assert lists.full_block_cnt.shape == (2, 2, 3) and lists.full_block_cnt.dtype == torch.int32
    assert lists.full_block_idx.shape == (2, 2, 3, 5) and lists.full_block_idx.dtype == torch.int32
    assert lists.block_size == (256, 128) and not lists.mask_block_cnt.any()
    assert int(lists.full_block_cnt.sum()) == 30        # half of 2 x 2 x 3 x 5


def test_fa4_with_cached_masks(fa4, tmp_path):
    path = tmp_path / "masks.pt"
    original_file(path, budgets=(0.4,), importance=False)
    mini = minis.wan(grid=GRID)
    with cached_processor_mode(mini.model, path, budget=0.4, warmup_frac=0.0, dense_first_layer=False,
                               kernel="fa4") as state:
        state._run.clock.given_steps = 2
        mini()
        stats = state.stats()
    assert stats.masks_loaded == 2 and all((call["sparse"].full_block_cnt == 2).all() for call in fa4)


@pytest.mark.parametrize("changes, text", [({"tail": "pooled"}, "knows no tail"),
                                           ({"order": "hilbert"}, "does not reorder"),
                                           ({"refresh_every": 2}, "refresh_every"),
                                           ({"mode": "compat"}, "mode 'fixed'")],
                         ids=["tail", "order", "refresh", "mode"])
def test_fa4_refuses_what_it_cannot_do(fa4, changes, text):
    with pytest.raises(ValueError, match=text):
        esa.apply(minis.wan().model, esa.EsaConfig(**{"kernel": "fa4", "tail": "none", **changes}))


def test_fa4_refuses_key_lengths(fa4):
    hunyuan = minis.hunyuan()
    with esa.apply(hunyuan.model, esa.EsaConfig(kernel="fa4", tail="none",
                                                warmup_frac=0.0)), pytest.raises(esa.EsaError, match="key lengths"):
        hunyuan()


def test_fa4_not_installed():
    with pytest.raises(esa.EsaError, match="needs FlashAttention-4"):
        esa.apply(minis.wan().model, esa.EsaConfig(kernel="fa4", tail="none"))


# ---------------------------------------------------------------- the modules' names

@pytest.mark.parametrize("name, home", [("processor", "compat.processor"), ("metrics", "compat.metrics"),
                                        ("cached_processor", "compat.cached_processor"), ("models", "diffusers.models"),
                                        ("sparse_attention_processor", "diffusers.autoregressive")])
def test_module_names_of_the_original(name, home):
    """Each holds the public names of the module where the code is, and the same objects."""
    stub, module = (importlib.import_module(f"esa.{n}") for n in (name, home))
    assert stub.__all__ and all(getattr(stub, n) is getattr(module, n) for n in stub.__all__)
    assert set(getattr(module, "__all__", ())) <= set(stub.__all__)


@pytest.mark.parametrize("name", ["benchmark", "benchmark_cached", "calibrate", "evaluate", "export_mp4", "generate",
                                  "run_experiment"])
def test_programs_are_modules_and_scripts(name):
    """`python -m esa.NAME` and the script at the original's place are the same program."""
    assert importlib.import_module(f"esa.{name}").main is importlib.import_module(f"esa.programs.{name}").main
    script = ROOT / ("experiments" if name == "run_experiment" else "scripts") / f"{name}.py"
    assert script.resolve().is_relative_to(ROOT / "compat") and f"{name}.main" in script.read_text()


# ---------------------------------------------------------------- esa.models


def test_names_are_looked_up_locally(tmp_path, monkeypatch, wan_folder):
    monkeypatch.setenv("ESA_MODELS", os.path.dirname(wan_folder))
    assert models.find_model("wan-t2v-1.3b") == wan_folder
    monkeypatch.delenv("ESA_MODELS")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="hf download Wan-AI/Wan2.1-T2V-1.3B-Diffusers"):
        models.find_model("wan-t2v-1.3b")
    place = tmp_path / "models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc123\n")
    (place / "snapshots").mkdir()
    os.symlink(wan_folder, place / "snapshots" / "abc123")
    assert models.find_model("wan-t2v-1.3b") == str(place / "snapshots" / "abc123")
    with pytest.raises(FileNotFoundError,
                       match="not one of the models wan-t2v-1.3b, wan-t2v-14b, cogvideox-5b, hunyuan-video"):
        models.find_model("wan-t3v")
    with pytest.raises(FileNotFoundError, match="without a model_index.json"):
        models.find_model(tmp_path)
    assert models.find_model("wan-tiny").endswith("wan-tiny")


def test_devices_and_dtypes_are_checked_before_weights_are_read(monkeypatch):
    monkeypatch.setattr("esa.diffusers.models.find_model", lambda *a, **k: pytest.fail("the model was looked for"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("gpu", "cuda:x", 1.5):
        with pytest.raises(ValueError, match="device must be 'cpu', 'cuda' or 'cuda:N', not "):
            models.load_pipeline("wan-tiny", device=device)
    with pytest.raises(ValueError, match="device 'cuda' was asked for, torch sees no GPUs here"):
        models.load_pipeline("wan-tiny", device="cuda")
    with pytest.raises(TypeError, match="torch_dtype must be a torch.dtype such as torch.bfloat16, not 'bfloat16'"):
        models.load_pipeline("wan-tiny", torch_dtype="bfloat16")


@pytest.mark.parametrize("name,frames,height,width", [("wan-t2v-1.3b", 81, 480, 832), ("wan-t2v-14b", 81, 480, 832),
                                                      ("cogvideox-5b", 49, 480, 720), ("hunyuan-video", 129, 544, 960)])
def test_sizes_come_from_the_table(name, frames, height, width):
    asked = {}

    class Pipe:
        def __call__(self, **settings):
            asked.update(settings)
            return types.SimpleNamespace(frames=torch.rand(1, 2, 3, 4, 5))
    video = models.generate_video(Pipe(), "a cat", name)
    assert (asked["num_frames"], asked["height"], asked["width"], asked["num_inference_steps"]) == (frames, height,
                                                                                                    width, 50)
    assert video.shape == (2, 4, 5, 3) and video.dtype == torch.uint8
    models.generate_video(Pipe(), "a cat", name, height=64, width=96, num_frames=5, num_inference_steps=2,
                          guidance_scale=1.5, negative_prompt="dog", callback_on_step_end=len)
    assert (asked["num_frames"], asked["height"], asked["width"], asked["num_inference_steps"],
            asked["guidance_scale"]) == (5, 64, 96, 2, 1.5)
    assert asked["negative_prompt"] == "dog" and asked["callback_on_step_end"] is len
    with pytest.raises(ValueError, match="'wan-3' is not one of the models"):
        models.generate_video(Pipe(), "a cat", "wan-3")
    with pytest.raises(ValueError, match="does not know which size Pipe wants"):
        models.generate_video(Pipe(), "a cat")


def test_generate_video(wan_pipe):
    first = models.generate_video(wan_pipe, "a cat", "wan-t2v-1.3b", num_inference_steps=2, seed=3)
    assert first.dtype == torch.uint8 and first.ndim == 4 and first.shape[-1] == 3 and first.is_contiguous()
    assert torch.equal(first, models.generate_video(wan_pipe, "a cat", num_inference_steps=2, seed=3))
    assert not torch.equal(first, models.generate_video(wan_pipe, "a cat", num_inference_steps=2, seed=4))
