# SPDX-License-Identifier: Apache-2.0
"""What diffusers users do besides goes on working with esa applied: LoRA, fused projections, offloading, caches,
compilation."""
import esa
import minis
import pipelines
import pytest
import torch
from esa.models import load_pipeline

FAMILIES = list(minis.MAKERS)
SPARSE = esa.EsaConfig(block=minis.BLOCK, warmup_frac=0.0, dense_first_layer=False, budget=0.4)
FULL = SPARSE.replace(budget=1.0)
EXACT = 1e-5            # two summation orders in float32, values of order 1


def difference(a, b):
    return (a - b).abs().max().item()


# ---------------------------------------------------------------- LoRA


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", [True, False], ids=["lora first", "esa first"])
def test_lora(family, before):
    from peft import LoraConfig
    mini = minis.MAKERS[family]()
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    plain = mini()
    if before:
        torch.manual_seed(1)
        mini.model.add_adapter(config, "a")
    with esa.apply(mini.model, FULL) as handle:
        if not before:
            torch.manual_seed(1)
            mini.model.add_adapter(config, "a")
        got = mini()
        assert handle.stats().sparse_calls == mini.layers
        mini.model.disable_adapters()
        assert difference(mini(), plain) <= EXACT
        mini.model.enable_adapters()
    want = mini()
    assert difference(got, want) <= EXACT and difference(want, plain) > 100 * EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_scale_in_attention_kwargs(family):
    from peft import LoraConfig
    mini = minis.MAKERS[family]()
    torch.manual_seed(1)
    mini.model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False), "a")
    want = mini(attention_kwargs={"scale": 0.5})
    with esa.apply(mini.model, FULL):
        assert difference(mini(attention_kwargs={"scale": 0.5}), want) <= EXACT


# ---------------------------------------------------------------- fused projections


@pytest.mark.parametrize("family", ["wan", "cogvideox"])
def test_fused_before(family):
    mini = minis.MAKERS[family]()
    mini.model.fuse_qkv_projections()
    want = mini()
    with esa.apply(mini.model, FULL):
        assert difference(mini(), want) <= EXACT
    assert torch.equal(mini(), want)
    mini.model.unfuse_qkv_projections()
    assert difference(mini(), want) <= EXACT


@pytest.mark.parametrize("family", ["wan", "cogvideox"])
def test_fused_while_applied(family):
    """fuse_qkv_projections exchanges CogVideoX's processors: esa must come back by itself, sparse, and leave the
    right ones behind."""
    mini = minis.MAKERS[family]()
    plain = mini()
    with esa.apply(mini.model, SPARSE):
        sparse = mini()
    with esa.apply(mini.model, SPARSE) as handle:
        mini.model.fuse_qkv_projections()
        # The fused product sums in another order, which may flip blocks of nearly equal importance; in these models it
        # does not.
        assert difference(mini(), sparse) <= 1e-4
        assert handle.stats().sparse_calls == mini.layers
        mini.model.unfuse_qkv_projections()
        assert torch.equal(mini(), sparse)
        mini.model.fuse_qkv_projections()
        mini()
    assert difference(mini(), plain) <= EXACT
    mini.model.unfuse_qkv_projections()
    assert torch.equal(mini(), plain)
    assert not any("Esa" in type(p).__name__ for p in mini.model.attn_processors.values())


# ---------------------------------------------------------------- offloading


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_group_offload(family, level, monkeypatch):
    from diffusers.hooks import apply_group_offloading
    # it wants one to be there
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *a, **k: torch.device("cpu"))
    mini = minis.MAKERS[family]()
    with esa.apply(mini.model, SPARSE):
        want = mini()
    more = {"num_blocks_per_group": 1} if level == "block_level" else {}
    apply_group_offloading(mini.model, onload_device=torch.device("cpu"), offload_device=torch.device("cpu"),
                           offload_type=level, **more)
    with esa.apply(mini.model, SPARSE) as handle:
        assert torch.equal(mini(), want)
        assert handle.stats().sparse_calls == mini.layers


class Exchange:
    """What accelerate does to a module between two videos of an offloaded pipeline: `forward` is put back and
    replaced anew."""

    @staticmethod
    def add(module):
        from accelerate.hooks import ModelHook, add_hook_to_module
        add_hook_to_module(module, ModelHook())

    @staticmethod
    def renew(module):
        from accelerate.hooks import remove_hook_from_module
        remove_hook_from_module(module, recurse=True)
        Exchange.add(module)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", [True, False], ids=["offload first", "esa first"])
def test_forward_exchanged_between_videos(family, before):
    mini = minis.MAKERS[family]()
    plain = mini()
    with esa.apply(mini.model, SPARSE):
        want = mini()
    if before:
        Exchange.add(mini.model)
    handle = esa.apply(mini.model, SPARSE, steps=1)
    if not before:
        Exchange.add(mini.model)
    for video in range(3):
        handle.begin()
        assert torch.equal(mini(), want) and handle.videos == video + 1
        Exchange.renew(mini.model)
    handle.remove()
    assert torch.equal(mini(), plain)


def test_model_cpu_offload_of_a_pipeline(tmp_path, monkeypatch):
    """enable_model_cpu_offload wants an accelerator; told that the CPU is one, it goes through all its motions."""
    pipe = load_pipeline(pipelines.make_wan(str(tmp_path / "wan")), device="cpu")
    pipe.set_progress_bar_config(disable=True)

    def video():
        with torch.no_grad():
            return pipe("a cat", num_frames=41, height=480, width=640, num_inference_steps=2, output_type="latent",
                        generator=torch.Generator().manual_seed(0)).frames
    config = esa.EsaConfig(block=16, budget=0.5, warmup_frac=0.0)
    with esa.apply(pipe, config):
        want = video()
    monkeypatch.setattr("diffusers.pipelines.pipeline_utils.is_accelerate_available", lambda: True)
    import accelerate
    hooks = []

    def offload(device=None):
        previous = None
        for name in pipe.model_cpu_offload_seq.split("->"):
            part = getattr(pipe, name, None)
            if isinstance(part, torch.nn.Module):
                _, hook = accelerate.cpu_offload_with_hook(part, torch.device("cpu"), prev_module_hook=previous)
                previous = hook
                hooks.append(hook)
        pipe._all_hooks = hooks
    offload()
    with esa.apply(pipe, config) as handle:
        for i in range(2):
            assert torch.equal(video(), want) and handle.videos == i + 1
            # what maybe_free_model_hooks does on a GPU
            for part in (pipe.text_encoder, pipe.transformer, pipe.vae):
                accelerate.hooks.remove_hook_from_module(part, recurse=True)
            hooks.clear()
            offload()


# ---------------------------------------------------------------- caches of diffusers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", [True, False], ids=["cache first", "esa first"])
def test_first_block_cache(family, before):
    from diffusers import FirstBlockCacheConfig
    mini = minis.MAKERS[family](**({"single_layers": 2} if family == "hunyuan" else {"layers": 3}))

    def video():
        out = []
        for t in (900, 899, 300):
            with mini.model.cache_context("cond"):
                out.append(mini.at(t))
        mini.model._reset_stateful_cache()
        return out
    if before:
        mini.model.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    handle = esa.apply(mini.model, SPARSE, steps=3)
    if not before:
        mini.model.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    got = video()
    calls = [handle.stats(step=i).calls for i in range(3)]
    # The first step computes all layers, the second (nearly the same timestep) the first layer only.
    assert calls[0] == 3 and calls[1] == 1 and handle.step == 2
    again = video()
    assert all(torch.equal(a, b) for a, b in zip(got, again)) and handle.videos == 2
    mini.model.disable_cache()
    handle.remove()
    mini()


@pytest.mark.parametrize("family", FAMILIES)
def test_first_block_cache_at_density_one(family):
    from diffusers import FirstBlockCacheConfig
    mini = minis.MAKERS[family]()

    def video():
        out = []
        for t in (900, 890, 300):
            with mini.model.cache_context("cond"):
                out.append(mini.at(t))
        mini.model._reset_stateful_cache()
        return out
    mini.model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    want = video()
    with esa.apply(mini.model, FULL, steps=3):
        got = video()
    assert max(difference(a, b) for a, b in zip(got, want)) <= EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_pyramid_attention_broadcast(family):
    from diffusers import PyramidAttentionBroadcastConfig
    mini = minis.MAKERS[family]()
    now = {"t": 900}
    pab = PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2,
                                          spatial_attention_timestep_skip_range=(100, 950),
                                          spatial_attention_block_identifiers=["blocks.*attn"],
                                          current_timestep_callback=lambda: now["t"])

    def video():
        out = []
        for t in (940, 800, 700, 600):
            now["t"] = t
            out.append(mini.at(t))
        mini.model._reset_stateful_cache()
        return out
    mini.model.enable_cache(pab)
    want = video()
    with esa.apply(mini.model, FULL, steps=4) as handle:
        got = video()
        assert max(difference(a, b) for a, b in zip(got, want)) <= EXACT
        calls = [handle.stats(step=i).calls for i in range(4)]
        assert sum(calls) < 4 * mini.layers and calls[0] == mini.layers, "some steps reuse what an earlier one computed"
    mini.model.disable_cache()


# ---------------------------------------------------------------- saving, dtype, gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_saved_as_ever(family, tmp_path):
    mini = minis.MAKERS[family]()
    keys = list(mini.model.state_dict())
    with esa.apply(mini.model, SPARSE):
        assert list(mini.model.state_dict()) == keys
        mini.model.save_pretrained(tmp_path)
    again = type(mini.model).from_pretrained(tmp_path)
    for name, weight in mini.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    # Reloaded weights start at other addresses, and torch's products depend on alignment in their last bits.
    with torch.no_grad():
        assert difference(again(**mini.inputs, return_dict=False)[0], mini()) <= EXACT


def test_gradients_are_refused():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE):
        out = mini.model(**mini.inputs, return_dict=False)[0]
        with pytest.raises(RuntimeError, match="forward only"):
            out.sum().backward()


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_compiled_blocks(family):
    """compile_repeated_blocks with fullgraph: as many graphs as without esa (Wan: one for all layers; HunyuanVideo's
    single blocks get their input with two different strides), and none more for further steps. HunyuanVideo's patch
    embedding is compiled too; the hook behind it, which orders the tokens, is a graph of one operator."""
    from torch._dynamo.testing import CompileCounter

    def forwards(config):
        torch._dynamo.reset()
        mini = minis.MAKERS[family](**({"layers": 2, "single_layers": 3} if family == "hunyuan" else {"layers": 3}))
        counter = CompileCounter()
        mini.model.compile_repeated_blocks(fullgraph=True, backend=counter)
        handle = esa.apply(mini.model, config, steps=3) if config is not None else None
        out = [mini.at(900)]
        graphs = counter.frame_count
        out += [mini.at(t) for t in (500, 100)]
        assert counter.frame_count == graphs
        assert handle is None or handle.stats().calls == 3 * mini.layers
        return out, graphs, mini
    want, graphs, _ = forwards(None)
    for order, more in (("raster", 0), (None, family == "hunyuan")):
        got, graphs_esa, _ = forwards(FULL.replace(order=order))
        assert graphs_esa == graphs + more and (family != "wan" or graphs == 1)
        assert max(difference(a, b) for a, b in zip(got, want)) <= EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_transformer(family):
    """The whole transformer in one graph, root hook included; steps and layers are still told apart."""
    torch._dynamo.reset()
    mini = minis.MAKERS[family]()
    with esa.apply(mini.model, SPARSE, steps=3) as handle:
        want = [mini.at(t) for t in (900, 500, 100)]
        handle.begin()
        compiled = torch.compile(mini.model, fullgraph=True, backend="eager")
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            got = [
                compiled(**{**mini.inputs, "timestep": torch.full_like(mini.inputs["timestep"], t)},
                         return_dict=False)[0] for t in (900, 500, 100)
            ]
        assert handle.videos == 2 and handle.step == 2 and handle.stats().calls == 3 * mini.layers
    assert max(difference(a, b) for a, b in zip(got, want)) <= EXACT


def test_apply_to_a_compiled_transformer():
    torch._dynamo.reset()
    mini = minis.wan()
    compiled = torch.compile(mini.model, backend="eager")
    with esa.apply(compiled, SPARSE) as handle, torch.no_grad():
        compiled(**mini.inputs, return_dict=False)
        assert handle.stats().sparse_calls == mini.layers
