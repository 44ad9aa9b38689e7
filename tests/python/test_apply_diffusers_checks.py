# SPDX-License-Identifier: Apache-2.0
"""diffusers' own offline checks of models, hooks and caches, with esa applied at density 1.

diffusers' tests are not in its package, so these are theirs written anew: the tiny configurations of its model tests
(head dimensions of 8 to 12, sequences below one block) and the properties its test mixins demand, with their
tolerances."""
import os

import diffusers
import esa
import pytest
import torch

NEUTRAL = esa.EsaConfig(budget=1.0, warmup_frac=0.0, dense_first_layer=False, tail="none")


def tiny_wan():
    from diffusers import WanTransformer3DModel
    model = WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
                                  out_channels=4, text_dim=16, freq_dim=256, ffn_dim=32, num_layers=2,
                                  cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32)
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 16, 16), "encoder_hidden_states": torch.randn(1, 12, 16),
        "timestep": torch.tensor([7])
    }


def tiny_cogvideox(patch_size_t=None):
    from diffusers import CogVideoXTransformer3DModel
    more = {} if patch_size_t is None else {"patch_size_t": patch_size_t, "use_rotary_positional_embeddings": True}
    model = CogVideoXTransformer3DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4,
                                        time_embed_dim=2, text_embed_dim=8, num_layers=2, sample_width=8,
                                        sample_height=8, sample_frames=8, patch_size=2, temporal_compression_ratio=4,
                                        max_text_seq_length=8, **more)
    frames = 1 if patch_size_t is None else 2
    return model, {
        "hidden_states": torch.randn(2, frames, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 8, 8),
        "timestep": torch.tensor([7, 7])
    }


def tiny_cogvideox15():
    return tiny_cogvideox(patch_size_t=2)


def tiny_hunyuan(image=None):
    from diffusers import HunyuanVideoTransformer3DModel
    model = HunyuanVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10,
                                           num_layers=1, num_single_layers=1, num_refiner_layers=1, patch_size=1,
                                           patch_size_t=1, guidance_embeds=True, text_embed_dim=16,
                                           pooled_projection_dim=8, rope_axes_dim=(2, 4, 4), image_condition_type=image)
    return model, {
        "hidden_states": torch.randn(1, 4, 1 if image is None else 2, 16, 16),
        "encoder_hidden_states": torch.randn(1, 12, 16), "pooled_projections": torch.randn(1, 8),
        "encoder_attention_mask": torch.ones(1, 12), "guidance": torch.tensor([6000.0]), "timestep": torch.tensor([7])
    }


def tiny_hunyuan_image():
    return tiny_hunyuan("token_replace")


TINY = [tiny_wan, tiny_cogvideox, tiny_cogvideox15, tiny_hunyuan, tiny_hunyuan_image]


@pytest.fixture(params=TINY, ids=lambda f: f.__name__)
def tiny(request):
    torch.manual_seed(0)
    model, inputs = request.param()
    return model.eval(), inputs


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def difference(a, b):
    return (a - b).abs().max().item()


def test_output_is_what_it_was(tiny):
    model, inputs = tiny
    want = run(model, inputs)
    with esa.apply(model, NEUTRAL):
        assert difference(run(model, inputs), want) <= 1e-5


def test_determinism(tiny):
    model, inputs = tiny
    with esa.apply(model, NEUTRAL):
        assert difference(run(model, inputs), run(model, inputs)) <= 1e-5


def test_tuple_and_dict_outputs_agree(tiny):
    model, inputs = tiny
    with esa.apply(model, NEUTRAL), torch.no_grad():
        assert difference(model(**inputs, return_dict=True).sample, model(**inputs, return_dict=False)[0]) <= 1e-5


@pytest.mark.parametrize("sharded", [False, True])
def test_save_and_load(tiny, tmp_path, sharded):
    model, inputs = tiny
    with esa.apply(model, NEUTRAL):
        want = run(model, inputs)
        model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if sharded else {}))
    assert not sharded or len([n for n in os.listdir(tmp_path) if n.endswith(".safetensors")]) > 1
    again = type(model).from_pretrained(tmp_path).eval()
    with esa.apply(again, NEUTRAL):
        assert difference(run(again, inputs), want) <= 5e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layerwise_casting(tiny, dtype):
    """Weights rest in a smaller dtype and are cast when used: a hook on every layer."""
    model, inputs = tiny
    model.enable_layerwise_casting(storage_dtype=dtype, compute_dtype=torch.float32)
    want = run(model, inputs)
    with esa.apply(model, NEUTRAL):
        assert difference(run(model, inputs), want) <= 1e-5


def test_processors_can_be_read_and_set(tiny):
    model, inputs = tiny
    with esa.apply(model, NEUTRAL) as handle:
        want = run(model, inputs)
        processors = model.attn_processors
        model.set_attn_processor(dict(processors))
        assert all(a is b for a, b in zip(model.attn_processors.values(), processors.values()))
        assert difference(run(model, inputs), want) == 0
        assert handle.stats().fallback_calls == 0


def test_hooks_run_in_order(tiny):
    """A hook of diffusers' registry on the transformer and one on a block, before and after esa's."""
    from diffusers.hooks import HookRegistry, ModelHook
    model, inputs = tiny
    log = []

    class Note(ModelHook):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def pre_forward(self, module, *args, **kwargs):
            log.append(f"{self.name} in")
            return args, kwargs

        def post_forward(self, module, output):
            log.append(f"{self.name} out")
            return output
    block = next(m for n, m in model.named_modules() if n.endswith("blocks.0"))
    HookRegistry.check_if_exists_or_initialize(model).register_hook(Note("early"), "early")
    want = run(model, inputs)
    log.clear()
    handle = esa.apply(model, NEUTRAL)
    HookRegistry.check_if_exists_or_initialize(model).register_hook(Note("late"), "late")
    HookRegistry.check_if_exists_or_initialize(block).register_hook(Note("block"), "block")
    assert difference(run(model, inputs), want) <= 1e-5
    assert log == ["late in", "early in", "block in", "block out", "early out", "late out"]
    HookRegistry.check_if_exists_or_initialize(model).remove_hook("early")
    log.clear()
    run(model, inputs)
    assert log == ["late in", "block in", "block out", "late out"]
    handle.remove()
    log.clear()
    assert difference(run(model, inputs), want) <= 1e-5 and log == ["late in", "block in", "block out", "late out"]


CACHES = ["FirstBlockCacheConfig", "FasterCacheConfig", "PyramidAttentionBroadcastConfig"]
# came with 0.36 and 0.37
CACHES += [name for name in ("TaylorSeerCacheConfig", "MagCacheConfig") if hasattr(diffusers, name)]


@pytest.mark.parametrize("name", CACHES)
def test_caches_can_be_switched(tiny, name):
    """Enable, enable again (an error), disable, disable again; the cached output stays within what diffusers allows
    its caches (0.1, PAB 0.2)."""
    model, inputs = tiny
    now = {"t": 950}                    # what pipelines would say; the first step lies outside of every range
    config = getattr(diffusers, name)
    settings = {
        "FirstBlockCacheConfig": {"threshold": 1.0}, "FasterCacheConfig": {
            "spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (-1, 901),
            "unconditional_batch_skip_range": 2, "attention_weight_callback": lambda _: 0.5,
            "is_guidance_distilled": True, "current_timestep_callback": lambda: now["t"],
            "spatial_attention_block_identifiers": ("blocks", )
        }, "TaylorSeerCacheConfig": {"cache_interval": 2, "disable_cache_before_step": 1},
        "MagCacheConfig": {"num_inference_steps": 3, "mag_ratios": torch.ones(3)}, "PyramidAttentionBroadcastConfig": {
            "spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (1, 900),
            "spatial_attention_block_identifiers": ("blocks.*attn", ), "current_timestep_callback": lambda: now["t"]
        }
    }[name]
    with esa.apply(model, NEUTRAL):
        want = run(model, inputs)
        model.enable_cache(config(**settings))
        with pytest.raises(ValueError, match="already been enabled"):
            model.enable_cache(config(**settings))
        with model.cache_context("cond"):
            first = run(model, inputs)
            now["t"] = 7
            second = run(model, inputs)
        allowed = 0.2 if name.startswith("Pyramid") else 0.1
        assert difference(first, want) <= allowed and difference(second, want) <= allowed
        model._reset_stateful_cache()
        model.disable_cache()
        assert difference(run(model, inputs), want) <= 1e-5
        model.disable_cache()
