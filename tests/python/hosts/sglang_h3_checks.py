# SPDX-License-Identifier: Apache-2.0
"""MiniMax-H3 in the released SGLang: sglang_h3_checks.py FOLDER, as sglang_checks.py.

Real: its packed layout, its loop over the steps, the hook on that loop, its attention's choice of a backend and its
attention call. Stand-ins: the transformer around them, and those of sglang_host.py."""
import sys
import types

import torch
from sglang_host import H3, prepare, prepare_h3
from stubs import fails

args = prepare(sys.argv[1])
from sglang.multimodal_gen.runtime.platforms import plugins  # noqa: E402

plugins.load_plugins()
prepare_h3(sys.argv[1])
plugins.apply_plugin_hooks()
import importlib  # noqa: E402

import esa  # noqa: E402
from esa.hosts import sglang as ours  # noqa: E402
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (  # noqa: E402
    AttentionRequirements,
)
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context  # noqa: E402
from sglang.multimodal_gen.runtime.models.dits import minimax_h3 as dit  # noqa: E402

loop = importlib.import_module(f"{H3}.denoise_loop")
packing = importlib.import_module(f"{H3}.packed_sequence")
HEADS, DIM, LAYERS, TEXT, GRID, SOUND = 2, 32, 2, 30, (7, 12, 14), 20
SIGMAS = [1.0, 0.97, 0.93, 0.87, 0.77, 0.6, 0.4, 0.2, 0.0]
STEPS = len(SIGMAS) - 1
said = []
ours.logger = types.SimpleNamespace(warning_once=lambda line: line in said or said.append(line))
# SGLang asks for packed attention, which rain_fusion_attn alone has not
assert ours.EsaBackend.supports_packed_varlen()
assert ours.EsaBackend.unsupported_requirements(AttentionRequirements(packed_varlen=True)) == ()


class Attention:
    """The parts of MiniMaxH3Attention that its backend and its attention call need."""
    head_dim, num_heads, softmax_scale, hybrid = DIM, HEADS, DIM**-0.5, None
    _cube_sparse_capable = True
    set_backend = dit.MiniMaxH3Attention._set_attention_backend

    def __init__(self, prefix):
        self.prefix = prefix
        self._attention_impl = self._attention_backend_enum = None


class Transformer:
    """Text refined, then two layers of attention over the whole sequence. `seen` has what attention got and gave."""

    def __init__(self):
        self.refiner = Attention("token_refiner.blocks.0.attn")
        self.layers = [Attention(f"blocks.{i}.attn") for i in range(LAYERS)]
        for attention in (self.refiner, *self.layers):
            attention.set_backend(ours.EsaBackend)
        self.seen = []

    def prepare_adaln_plans(self, plan):
        return None

    def attend(self, attention, params, tokens, seed):
        r = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(tokens, HEADS, DIM, generator=r) for _ in range(3))
        out = dit._minimax_h3_attention_core_impl(
            attention, q, k, v, cu_seqlens=params["cu_seqlens_q"], cu_seqlens_host=params["cu_seqlens_q_host"],
            max_seqlen=params["max_seqlen_q"], ulysses_active=False)
        return q, k, v, out

    def __call__(self, x, packed_seq_params, refiner_packed_seq_params, img_pos_for_infer_output_info, audio_pos_info,
                 **rest):
        self.seen.append([self.attend(self.refiner, refiner_packed_seq_params, TEXT, 0)]
                         + [self.attend(a, packed_seq_params, x.shape[1], i) for i, a in enumerate(self.layers)])
        rows = len(img_pos_for_infer_output_info["position_ids"]), len(audio_pos_info["position_ids"])
        return (torch.zeros(rows[0], loop.MINIMAX_H3_VIDEO_ROW_WIDTH),
                torch.zeros(rows[1], loop.MINIMAX_H3_AUDIO_ROW_WIDTH))


def video(model, keyframe=True, forward=None):
    packed = packing.minimax_h3_packed_sequence(
        text_len=TEXT, latent_t=GRID[0], latent_h=2 * GRID[1], latent_w=2 * GRID[2], audio_t=SOUND,
        include_keyframe_cond=keyframe, keyframe_frame_indices=[0] if keyframe else None, frame_count=22)
    branch = loop.MiniMaxH3DenoiseBranch(packed=packed, text_embeddings=torch.zeros(TEXT, 8),
                                         token_tags=torch.zeros(packed["seq_len"]), device=torch.device("cpu"))

    def step(transformer, kwargs, number):
        with set_forward_context(number, None, types.SimpleNamespace(num_inference_steps=STEPS + 1)):
            return transformer(**kwargs)
    given = branch.video_target_start
    loop.minimax_h3_denoise_loop(
        model=model, model_forward=forward or step, positive=branch,
        initial_video_rows=torch.zeros(len(branch.img_pos), loop.MINIMAX_H3_VIDEO_ROW_WIDTH),
        initial_audio_rows=torch.zeros(len(branch.audio_pos), loop.MINIMAX_H3_AUDIO_ROW_WIDTH),
        keyframe_cond_rows=torch.zeros(given, loop.MINIMAX_H3_VIDEO_ROW_WIDTH) if given else None, sigmas_video=SIGMAS,
        sigmas_audio=SIGMAS, device=torch.device("cpu"))
    return int(packed["cu_seqlens"][1])


def close(a, b):
    return (a - b).abs().max() < 1e-5           # float32 sums of values of order 1 in another order


def check(model, used, sparse):
    """Text is dense, padding is zero, and the rest is what `sparse` gives."""
    for number, calls in enumerate(model.seen):
        q, k, v, out = calls[0]
        assert close(out, esa.attention(q[None], k[None], v[None], input_layout="BSND")[0])
        for layer, (q, k, v, out) in enumerate(calls[1:]):
            assert not out[used:].any() and len(out) > used
            q, k, v = (x[None, :used] for x in (q, k, v))
            assert close(out[None, :used], sparse(number, layer, q, k, v)), (number, layer)
    model.seen.clear()


def session(config, used, keyframe=True):
    front = TEXT + (GRID[1] * GRID[2] if keyframe else 0) + 2 * SOUND
    run = esa.Session(config, layers=LAYERS, steps=STEPS, sigma=SIGMAS[:-1], step_branches=1, device="cpu",
                      layout=ours.Layout(grid=GRID, text_front=front, order="adaptive"))
    assert run.layout.tokens == used
    run.begin()
    return run


def as_session(run):
    def sparse(number, layer, q, k, v):
        run.step(number)
        return run.attention(layer, q, k, v, input_layout="BSND")
    return sparse


# ---- settings of esa: the loop's own number of steps and noise levels, one branch
args.attention_backend_config["esa"] = {"work": 0.7, "carry": [0, 3]}
model = Transformer()
for keyframe in (True, False):
    used = video(model, keyframe)
    run = session(esa.EsaConfig(work=0.7, carry=[0, 3]), used, keyframe)
    check(model, used, as_session(run))
    assert run.stats().anchor_calls == 2 * LAYERS and run.stats().sparse_calls == LAYERS * STEPS
impl = model.layers[0]._attention_impl
assert impl.model.layers == LAYERS and impl.model.run(impl.own).videos == 2
assert impl.model.run(impl.own).stats().density < 0.9
# ---- the host's settings: rf_v2, the first steps dense
args.attention_backend_config.clear()
args.attention_backend_config.update(sparsity=0.5, skip_first_steps=2)
model = Transformer()
used = video(model)
rf = esa.EsaConfig(selector="rf_v2", sparsity=0.5, tail="none", warmup_frac=0, dense_first_layer=False)
run = esa.Session(rf, layers=LAYERS, steps=STEPS, device="cpu",
                  layout=ours.Layout(grid=GRID, text_front=used - 7 * 12 * 14, order="tile"))
run.begin()
check(model, used, lambda number, layer, q, k, v: esa.attention(q, k, v, input_layout="BSND") if number < 2 else
      as_session(run)(number, layer, q, k, v))
assert run.stats().density < 0.9 and not said
# ---- a loop that is not SGLang's: dense, with one line, or an error
impl = model.layers[0]._attention_impl
q, k, v = torch.randn(3, 40, HEADS, DIM)
params = {"cu_seqlens": torch.tensor([0, 30, 40]), "cu_seqlens_host": None, "max_seqlen": 30}
for _ in range(2):
    out = impl.forward_varlen(q, k, v, **params)
    assert close(out[:30], esa.attention(*(x[None, :30] for x in (q, k, v)), input_layout="BSND")[0])
assert len(said) == 1 and "a loop of its own" in said[0]
args.attention_backend_config["esa"] = {"strict": True}
strict = Transformer().layers[0]
fails("is strict, but this call would be dense", lambda: strict._attention_impl.forward_varlen(q, k, v, **params))
# two documents and no padding: each attends to itself
params = {"cu_seqlens": torch.tensor([0, 15, 40]), "cu_seqlens_host": (0, 15, 40), "max_seqlen": 25}
out = impl.forward_varlen(q, k, v, **params)
for part in (slice(0, 15), slice(15, 40)):
    assert close(out[part], esa.attention(*(x[None, part] for x in (q, k, v)), input_layout="BSND")[0])
print("SGLang, MiniMax-H3: ok")
