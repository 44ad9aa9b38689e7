# SPDX-License-Identifier: Apache-2.0
"""The torch operator esa::attention: torch's own checks of operators, one graph without recompilation, autocast,
gradients refused, opaque to fakes."""
import esa
import esa.core.torch_op
import pytest
import torch
from esa import sparse_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as sdpa

WORDS = {"sparse_type": "rf_v2", "sparsity": 0.5, "latent_shape_q": [2, 8, 16]}


def qkv(seed, dtype=torch.float32, tokens=256):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, tokens, 32, generator=g).to(dtype) for _ in range(3))


def numbers(**words):
    """The operator's list for the words of a call."""
    seen = []
    original = esa.core.torch_op.attention
    esa.core.torch_op.attention = lambda q, k, v, settings, layout: (seen.append(settings),
                                                                original(q, k, v, settings, layout))[1]
    try:
        sparse_attention(*qkv(0), **words)
    finally:
        esa.core.torch_op.attention = original
    return seen[0]


class Model(torch.nn.Module):
    """A few layers whose attention is the call itself."""

    def __init__(self, layers=3, **words):
        super().__init__()
        torch.manual_seed(0)
        self.words = words
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, dim=-1)
            x = x + sparse_attention(q, k, v, head_num=3, **self.words)
        return x


def test_torchs_own_checks(seed):
    """Schema, fake and autograd registration, and tracing under aot_autograd, as torch.library.opcheck sees them."""
    settings = numbers(**WORDS)
    torch.library.opcheck(torch.ops.esa.attention.default, (*qkv(seed), settings, "BNSD"))
    turned = (x.transpose(1, 2) for x in qkv(seed, torch.bfloat16))
    torch.library.opcheck(torch.ops.esa.attention.default, (*turned, settings, "BSND"))


def test_one_graph_for_all_steps(seed):
    """fullgraph, and not compiled again from step to step; the same numbers as without compilation."""
    model = Model(**WORDS).eval()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(4):
            x = qkv(seed + step)[0]
            assert torch.equal(compiled(x), model(x))
    assert len(graphs) == 1
    calls = [n for n in graphs[0].graph.nodes if n.op == "call_function" and "esa" in str(n.target)]
    assert len(calls) == 3


def test_one_compiled_layer_serves_all_layers(seed):
    """Regional compilation: one code object for all layers and steps (what diffusers' compile_repeated_blocks does)."""
    frames = []

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return x + sparse_attention(q, k, v, **WORDS)

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward
    torch._dynamo.reset()
    blocks = [Block().eval() for _ in range(4)]
    for b in blocks:
        b.compile(fullgraph=True, backend=backend)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        x = qkv(seed)[0]
        for _ in range(2):
            y = x
            for b in blocks:
                y = b(y)
    assert len(frames) == 1


@pytest.mark.slow
def test_inductor(seed):
    """The default back end, with code it writes around the operator."""
    model = Model(layers=1, **WORDS).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        x = qkv(seed)[0]
        # Fused float32 arithmetic around the operator may round differently, which the selection can see; the values
        # are of order 1.
        assert (torch.compile(model, fullgraph=True)(x) - model(x)).abs().max() < 1e-5


def test_dynamic_shapes(seed):
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: sparse_attention(q, k, v, sparse_type="entropy", sparsity=0.5),
                             fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (256, 300, 513):
        q, k, v = qkv(seed, tokens=tokens)
        assert torch.equal(compiled(q, k, v), sparse_attention(q, k, v, sparse_type="entropy", sparsity=0.5))


def test_fake_tensors():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 5, 4096, 128, dtype=torch.bfloat16) for _ in range(3))
        out = sparse_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), input_layout="BSND",
                               sparse_type="rf_v2", sparsity=0.8)
        assert out.shape == (2, 4096, 5, 128) and out.dtype == torch.bfloat16 and out.is_contiguous()


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled, seed):
    """float32 projections under autocast meet normalised float32 queries: all become bfloat16, as for torch's own
    attention."""
    def call(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sparse_attention(q, k, v, **WORDS), sdpa(q.bfloat16(), k.bfloat16(), v)
    torch._dynamo.reset()
    q, k, v = qkv(seed)
    out, torchs = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(q, k, v.bfloat16())
    assert out.dtype == torchs.dtype == torch.bfloat16
    assert torch.equal(out, sparse_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **WORDS))
    settings = numbers(**WORDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):            # by the operator's own name
        assert torch.equal(out, torch.ops.esa.attention(q, k, v, settings, "BNSD"))
    with torch.autocast("cpu", enabled=False):
        assert sparse_attention(q, k, v, **WORDS).dtype == torch.float32


def test_gradients_are_refused(seed):
    q, k, v = qkv(seed)
    q.requires_grad_()
    out = torch.ops.esa.attention(q, k, v, numbers(**WORDS), "BNSD")
    with pytest.raises(RuntimeError, match="forward only: gradients are not available"):
        out.sum().backward()
    torch._dynamo.reset()
    # torch 2.5 says where the refusal came from and keeps its words to itself.
    old = tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 6)
    with pytest.raises(Exception, match="refuse_gradients" if old else "forward only, but an input requires gradients"):
        torch.compile(sparse_attention, fullgraph=True, backend="aot_eager")(q, k, v, **WORDS)
    with torch.inference_mode():
        sparse_attention(q, k, v, **WORDS)


@pytest.mark.slow
def test_masks_break_the_graph_but_work(seed):
    q, k, v = qkv(seed)

    def call(q, k, v):
        out, mask = sparse_attention(q + 1, k, v, return_mask=True, **WORDS)
        return sparse_attention(q + 1, k, v, cached_mask=mask, **WORDS) - out
    torch._dynamo.reset()
    assert not torch.compile(call, backend="aot_eager")(q, k, v).any()


def test_tagged_against_cuda_graphs():
    assert not hasattr(torch.Tag,
                       "cudagraph_unsafe") or torch.Tag.cudagraph_unsafe in torch.ops.esa.attention.default.tags
