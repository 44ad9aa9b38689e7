# SPDX-License-Identifier: Apache-2.0
"""Our operator and mask generator in LightX2V's registries. The registries, and the attention that composes both
parts, are written here after their contract."""
import importlib
import sys
import types

import esa
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

GRID, HEADS, DIM = (3, 8, 20), 2, 16
TOKENS = 3 * 8 * 20
CLOSE = 1e-5                # float32 sums of values of order 1 in another order


class Register(dict):
    """register("name")(part); a name can be taken once."""

    def __call__(self, name):
        def take(part):
            if name in self:
                raise Exception(f"{name} already exists.")
            self[name] = part
            return part
        return take


@pytest.fixture(scope="module")
def ours():
    registry = types.ModuleType("lightx2v.utils.registry_factory")
    registry.SPARSE_OPERATOR_REGISTER, registry.SPARSE_MASK_GENERATOR_REGISTER = Register(), Register()
    registry.ATTN_WEIGHT_REGISTER = Register()
    packages = ("lightx2v", "lightx2v.utils", "lightx2v.common", "lightx2v.common.ops", "lightx2v.common.ops.attn")
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules[registry.__name__] = registry
    template = types.ModuleType("lightx2v.common.ops.attn.template")
    template.AttnWeightTemplate = Template
    sys.modules[template.__name__] = template
    module = importlib.import_module("esa.hosts.lightx2v")
    yield module
    importlib.reload(module)                    # registering again does nothing
    for name in (*packages, registry.__name__, template.__name__, module.__name__, "esa.hosts.lightx2v_h3"):
        del sys.modules[name]


class Template:
    """Base of the host's attention parts, which have no weights."""

    def __init__(self, weight_name):
        self.weight_name, self.config = weight_name, {}


class GeneralSparse:
    """The host's composition of an operator and a mask generator."""

    def __init__(self, ours, operator, generator, setting=None, blocks=None):
        operators, generators = ours.SPARSE_OPERATOR_REGISTER, ours.SPARSE_MASK_GENERATOR_REGISTER
        self.operator = operators[operator](*(blocks or ())) if isinstance(operator, str) else operator
        sizes = self.operator.q_block_size, self.operator.k_block_size
        self.generator = generators[generator](*sizes, setting or {}, None) if isinstance(generator, str) else generator

    def apply(self, q, k, v):
        mask = self.generator(q, k)
        q, k, v = self.generator.reorg(q, k, v)
        out = self.operator(q, k, v, mask, max_seqlen_q=q.shape[0], max_seqlen_kv=k.shape[0], layer=3)
        return self.generator.restore(out)


class Given:
    """A generator that returns one tensor."""

    def __init__(self, mask):
        self.mask, self.restore = mask, lambda out: out

    def __call__(self, q, k):
        return self.mask

    def reorg(self, q, k, v):
        return q, k, v


class Plain:
    """An operator of others: expects a tensor."""
    q_block_size = k_block_size = 32

    def __call__(self, q, k, v, mask, **words):
        tokens = mask.bool().repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :q.shape[0], :k.shape[0]]
        out = sdpa(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=tokens)
        return out[0].transpose(0, 1).flatten(1)


def tensors(seed, tokens=TOKENS):
    return torch.randn(3, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).unbind()


@pytest.mark.parametrize("shape", [(1, HEADS, 15, 15), (HEADS, 15, 15)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32])
def test_operator_with_a_mask_of_others(ours, shape, dtype, seed):
    q, k, v = tensors(seed)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[..., 0] = True
    both = GeneralSparse(ours, "esa_operator", Given(mask.to(dtype)), blocks=(32, 32))
    want = Plain()(q, k, v, mask if mask.ndim == 4 else mask[None])
    for _ in range(2):
        assert (both.apply(q, k, v) - want).abs().max() < CLOSE
    made = both.operator._last[1]
    both.apply(q, k, v)
    assert both.operator._last[1] is made               # the same tensor is not converted again
    both.generator.mask[..., 1] = 1
    both.apply(q, k, v)
    assert both.operator._last[1] is not made           # but a changed one is


@pytest.mark.parametrize("setting", [{}, {"grid": GRID}, {"grid": GRID, "selector": "rf_v2", "budget": 0.4},
                                     {"grid": GRID, "order": "raster", "selector": "ada_bsa"}], ids=str)
def test_generator_with_any_operator(ours, setting, seed):
    q, k, v = tensors(seed, TOKENS + 40)
    one = GeneralSparse(ours, "esa_operator", "esa_mask_generator", {"esa": setting}, (32, 32))
    other = GeneralSparse(ours, Plain(), "esa_mask_generator", {"esa": setting})
    out = one.apply(q, k, v)
    assert out.shape == (TOKENS + 40, HEADS * DIM)
    assert (out - other.apply(q, k, v)).abs().max() < CLOSE
    # the mask is that of esa.select, the output that of the mask
    words = {"selector": "entropy", "block": 32, **{k: v for k, v in setting.items() if k != "grid"}}
    orders = {"entropy": "hilbert", "rf_v2": "tile"}
    layout = esa.Layout(grid=setting["grid"], text_back=40, order=setting.get("order") or orders[words["selector"]],
                        protect_first_frame=words["selector"] == "rf_v2") if "grid" in setting else esa.Layout()
    mask = esa.select(q[None], k[None], esa.EsaConfig(**words), layout=layout, input_layout="BSND")
    want = esa.attention(q[None], k[None], v[None], mask, input_layout="BSND")[0].flatten(1)
    assert (out - want).abs().max() < CLOSE and mask.density < 0.9


def test_a_mask_of_ours_is_a_tensor_to_others(ours, seed):
    q, k, _ = tensors(seed)
    mask = ours.EsaMaskGenerator(32, 32, {"esa": {"budget": 0.3}})(q, k)
    want = torch.from_numpy(mask.mask.blocks())
    assert torch.equal(mask.squeeze(0).int(), want[0].int()) and mask.shape == want.shape
    assert torch.equal(torch.nonzero(mask), torch.nonzero(want)) and torch.equal(mask[0, 1], want[0, 1])
    assert torch.equal(torch.logical_not(input=mask), ~want)


def test_pooled_operator(ours, seed):
    q, k, v = tensors(seed)
    setting = {"esa": {"budget": 0.3}}
    plain = GeneralSparse(ours, "esa_operator", "esa_mask_generator", setting, (32, 32)).apply(q, k, v)
    pooled = GeneralSparse(ours, "esa_pooled_operator", "esa_mask_generator", setting, (32, 32)).apply(q, k, v)
    dense = sdpa(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1).flatten(1)
    assert (pooled - dense).pow(2).mean() < (plain - dense).pow(2).mean() / 2


def test_refused(ours):
    for setting, message in (
            ({"selector": "error"}, "a mask generator sees q and k only, so selector must be .*, not 'error'"),
            ({"budgets": 0.2}, "sparse_setting.esa has no setting 'budgets'; it takes grid, selector, budget,"),
            ({"preset": "fast"}, "has no setting 'preset'"), ({"dense_layers": [0]}, "has no setting 'dense_layers'"),
            ({"carry": 6}, "knows neither layers nor steps, so carry must be 'off', not 6"),
            ("fast", "sparse_setting.esa must hold settings by name"),
            ({"grid": [3, 8]}, r"grid must be three numbers t, h, w of at least 1, not \[3, 8\]"),
            ({"grid": "3x8x20"}, "grid must be three numbers t, h, w of at least 1, not '3x8x20'")):
        with pytest.raises(ValueError, match=message):
            ours.EsaMaskGenerator(sparse_setting={"esa": setting})
    assert ours.EsaMaskGenerator(sparse_setting={"esa": {"carry": "off"}}).config.carry == "off"
    q, k, v = tensors(0)
    with pytest.raises(ValueError, match="takes one sequence, but cu_seqlens_q names 2"):
        ours.EsaOperator()(q, k, v, None, cu_seqlens_q=torch.tensor([0, 240, 480]))
    with pytest.raises(ValueError, match=r"grid is \(9, 9, 9\), but there are 480 tokens"):
        ours.EsaMaskGenerator(sparse_setting={"esa": {"grid": [9, 9, 9]}})(*tensors(0)[:2])


# ---------------------------------------------------------------- MiniMax-H3


class Scheduler:
    """What the host's scheduler of MiniMax-H3 holds. The packed sequence is [text][keyframe][sound][video]."""

    def __init__(self, setting, steps=8, keyframe=True, layers=2, **config):
        self.config = {"num_layers": layers, "num_attention_heads": HEADS, "esa_attn_setting": setting, **config}
        self.video_sigmas = torch.linspace(1, 0, steps + 1)
        self.infer_steps, self.step_index = steps, 0
        t, h, w = GRID
        front = 30 + h * w * keyframe + 24
        frame = torch.cartesian_prod(torch.arange(h), torch.arange(w)).double()
        places = torch.zeros(front + t * h * w, 3, dtype=torch.float64)
        places[:30, 0] = torch.arange(30)
        if keyframe:
            places[30:30 + h * w, 0], places[30:30 + h * w, 1:] = 30, frame
        for i in range(t):
            rows = slice(front + i * h * w, front + (i + 1) * h * w)
            places[rows, 0], places[rows, 1:] = 30 + 5 * i / 3, frame
        video = torch.arange(front, len(places))
        self.layout_cpu = self.layout = types.SimpleNamespace(
            position_ids=places, sequence_length=len(places),
            video_indices=torch.cat([torch.arange(30, 30 + h * w * keyframe), video]))
        self.front = front


def h3(seed, scheduler):
    return tensors(seed, scheduler.layout.sequence_length)


@pytest.mark.parametrize("keyframe", [True, False])
def test_minimax_h3_equals_a_session(ours, keyframe, seed):
    """Text, keyframe and sound are kept whole; blocks of the model share one part when they are streamed from disk."""
    setting = {"work": 0.95, "carry": 1, "block": 16}
    scheduler, part = Scheduler(setting, keyframe=keyframe), ours.ATTN_WEIGHT_REGISTER["esa_attn"]()
    session = esa.Session(esa.EsaConfig(**setting), layers=2, steps=8, step_branches=1, device="cpu",
                          sigma=[1 - i / 8 for i in range(8)],
                          layout=esa.Layout(grid=GRID, text_front=scheduler.front, order="adaptive"))
    for _ in range(2):                                      # the second video begins anew
        session.begin()
        for step in range(8):
            scheduler.step_index = step
            session.step(step)
            for block in range(2):
                q, k, v = h3(seed + step, scheduler)
                ends = torch.tensor((0, len(q)))
                out = part.apply(q=q, k=k, v=v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=len(q),
                                 max_seqlen_kv=len(q), causal=False, scheduler=scheduler, block_idx=block)
                want = session.attention(block, q[None], k[None], v[None], input_layout="BSND")
                assert torch.equal(out, want[0].flatten(1))
    stats = session.stats()
    assert stats.sparse_calls == 16 and stats.anchor_calls == 2 and stats.density < 0.95


def test_minimax_h3_where_it_stays_dense(ours, seed, caplog):
    part = ours.ATTN_WEIGHT_REGISTER["esa_attn"]()

    def dense(q, k, v):
        return sdpa(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1).flatten(1)
    text = tensors(seed, 30)                                # the refiner: neither scheduler nor block
    with caplog.at_level("WARNING", "esa"):
        assert (part.apply(*text, causal=False, softmax_scale=DIM**-0.5) - dense(*text)).abs().max() < CLOSE
        assert not caplog.records
        scheduler = Scheduler({"budget": 0.5})
        for _ in range(2):
            out = part.apply(*text, scheduler=scheduler, block_idx=0)
            assert (out - dense(*text)).abs().max() < CLOSE
    assert len(caplog.records) == 1 and "the packed sequence has" in caplog.text
    strict = Scheduler({"budget": 0.5, "strict": True})
    with pytest.raises(esa.EsaError, match="esa_attn is strict, but this call would be dense: the packed sequence"):
        part.apply(*text, scheduler=strict, block_idx=0)
    with pytest.raises(ValueError, match="esa_attn_setting has no setting 'budgets'"):
        part.apply(*text, scheduler=Scheduler({"budgets": 0.5}), block_idx=0)
    with pytest.raises(ValueError, match="esa_attn takes one sequence, but cu_seqlens_q names 2"):
        part.apply(*text, cu_seqlens_q=torch.tensor((0, 10, 30)))
