# SPDX-License-Identifier: Apache-2.0
"""esa.sparse_attention: the documented examples as written, the golden masks, attention under the expanded mask,
what is refused."""
import re
import textwrap

import esa
import golden
import numpy as np
import pytest
import torch
from esa import sparse_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

# Outputs are averages of values of order 1; float32 sums in another order than torch's differ by a few 1e-7.
CLOSE = 1e-5
TYPES = ("rf_v2", "rf_v3", "ada_bsa", "entropy")


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(seed, heads=4, tokens=1024, dim=64, batch=1, dtype=torch.float32):
    return tuple(random(seed + i, batch, heads, tokens, dim, dtype=dtype) for i in range(3))


# ---------------------------------------------------------------- the documentation of the original

BASIC = """
from mindiesd import sparse_attention
out = sparse_attention(q, k, v, head_num=24, input_layout="BNSD", sparse_type="rf_v2", sparsity=0.8)
"""
IMAGE = """
import torch
from mindiesd import sparse_attention
q = torch.randn(2, 24, 4096, 128, device="npu", dtype=torch.float16)
k = torch.randn(2, 24, 4096, 128, device="npu", dtype=torch.float16)
v = torch.randn(2, 24, 4096, 128, device="npu", dtype=torch.float16)
out = sparse_attention(q, k, v, head_num=24, input_layout="BNSD", sparse_type="rf_v2", sparsity=0.6)
"""
VIDEO = """
out = sparse_attention(
q, k, v,
head_num=24,
input_layout="BNSD",
sparse_type="rf_v2",
sparsity=0.8,
latent_shape_q=[t, h, w],
latent_shape_k=[t, h, w],
)
"""


def test_documented_examples_run_as_written():
    names = {}
    exec(IMAGE.replace('"npu"', '"cpu"'), names)
    assert names["out"].shape == (2, 24, 4096, 128) and names["out"].dtype == torch.float16
    assert bool(torch.isfinite(names["out"]).all())
    small = {name: names[name][:1, :, :1024].contiguous() for name in "qkv"}
    names = {**small}
    exec(BASIC, names)
    assert names["out"].shape == (1, 24, 1024, 128)
    names.update(t=4, h=16, w=16)
    exec(VIDEO, names)
    assert names["out"].shape == (1, 24, 1024, 128)
    want, mask = sparse_attention(small["q"], small["k"], small["v"], sparse_type="rf_v2", sparsity=0.8,
                                  latent_shape_q=[4, 16, 16], return_mask=True)
    assert torch.equal(names["out"], want) and 0.2 <= mask.density < 0.6


# ---------------------------------------------------------------- masks

@pytest.mark.parametrize(("grid", "first", "sparsity", "protect", "want"), golden.RF)
@pytest.mark.parametrize("sparse_type", ["rf_v2", "rf_v3"])
@pytest.mark.parametrize("words", [{"mode": "compat"}, {"compat": "3.0"}, {"compat": "3.1"}], ids=str)
def test_golden_rf(sparse_type, grid, first, sparsity, protect, want, words):
    tokens = grid[0] * grid[1] * grid[2]
    q, k = golden.values(first, tokens), golden.values(first + 1, tokens)
    mask = sparse_attention(q, k, k, sparse_type=sparse_type, sparsity=sparsity, latent_shape_q=grid,
                            protect_first_frame=protect, return_mask=True, **words)[1]
    assert golden.rows(mask) == want


@pytest.mark.parametrize(("threshold", "sparsity", "causal", "mode", "want"), golden.ADA)
def test_golden_ada(threshold, sparsity, causal, mode, want):
    q, k = golden.values(1, 1536), golden.values(2, 1536)
    mask = sparse_attention(q, k, k, sparse_type="ada_bsa", sparsity=sparsity, cdf_threshold=threshold,
                            is_causal=causal, mode=mode, return_mask=True)[1]
    assert golden.rows(mask) == want


def test_entropy_budgets_follow_the_entropy(seed):
    """A head that looks everywhere gets more blocks than one that looks at a few keys; the mean over heads is the
    asked budget."""
    q, k, v = qkv(seed, heads=2, tokens=2048)
    q[:, 0] *= 0.01
    q[:, 1] *= 6
    mask = sparse_attention(q, k, v, sparse_type="entropy", sparsity=0.5, return_mask=True)[1]
    kept = mask.blocks()[0].sum(axis=(1, 2))
    assert kept[0] > kept[1]
    assert mask.block == (256, 128) and mask.density == 0.5 == mask.density_asked


# ---------------------------------------------------------------- outputs

@pytest.mark.parametrize("sparse_type", TYPES)
@pytest.mark.parametrize("words", [{}, {"txt_len": 100, "latent_shape_q": [3, 14, 22]},
                                   {"latent_shape_q": [4, 16, 16], "order": "hilbert"},
                                   {"latent_shape_q": [4, 16, 16], "order": "tile3d", "window": [2, 4, 8]},
                                   {"latent_shape_q": [4, 16, 16], "order": "raster", "is_causal": True}], ids=str)
def test_equals_dense_attention_under_the_mask(sparse_type, words, seed):
    q, k, v = qkv(seed)
    out, mask = sparse_attention(q, k, v, sparse_type=sparse_type, sparsity=0.6, cdf_threshold=0.9, return_mask=True,
                                 **words)
    tokens = torch.from_numpy(mask.tokens())
    if words.get("is_causal"):
        tokens &= torch.ones(1024, 1024, dtype=torch.bool).tril()
    assert mask.density < 1
    assert (out - sdpa(q, k, v, attn_mask=tokens)).abs().max() < CLOSE
    assert torch.equal(out, sparse_attention(q, k, v, sparse_type=sparse_type, sparsity=0.6, cdf_threshold=0.9,
                                             **words))


def test_text_is_kept_and_dense(seed):
    q, k, v = qkv(seed, tokens=1124)
    for sparse_type in ("rf_v2", "entropy"):
        mask = sparse_attention(q, k, v, sparse_type=sparse_type, sparsity=0.9, txt_len=100, latent_shape_q=[4, 16, 16],
                                return_mask=True)[1]
        tokens = mask.tokens()
        assert tokens[:, :, :100].all() and tokens[:, :, :, :100].all() and not tokens.all()


@pytest.mark.parametrize("sparse_type", TYPES)
@pytest.mark.parametrize("words", [{"sparsity": 0.0}, {"sparsity": 0.0, "latent_shape_q": [4, 16, 16]}], ids=str)
def test_sparsity_0_is_dense(sparse_type, words, seed):
    q, k, v = qkv(seed)
    assert (sparse_attention(q, k, v, sparse_type=sparse_type, **words) - sdpa(q, k, v)).abs().max() < CLOSE


def test_none_is_dense_and_honours_causal_scale_and_layout(seed):
    q, k, v = qkv(seed, batch=2, tokens=300)
    assert (sparse_attention(q, k, v) - sdpa(q, k, v)).abs().max() < CLOSE
    assert (sparse_attention(q, k, v, is_causal=True) - sdpa(q, k, v, is_causal=True)).abs().max() < CLOSE
    assert (sparse_attention(q, k, v, scale=0.3) - sdpa(q, k, v, scale=0.3)).abs().max() < CLOSE
    turned = sparse_attention(*(x.transpose(1, 2) for x in (q, k, v)), input_layout="BSND", head_num=4)
    assert turned.shape == (2, 300, 4, 64) and (turned.transpose(1, 2) - sdpa(q, k, v)).abs().max() < CLOSE


@pytest.mark.parametrize("sparse_type", TYPES)
def test_layouts_give_the_same_bits(sparse_type, seed):
    q, k, v = qkv(seed, batch=2)
    words = {"sparse_type": sparse_type, "sparsity": 0.7, "latent_shape_q": [4, 16, 16]}
    one = sparse_attention(q, k, v, **words)
    other = sparse_attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), input_layout="BSND", **words)
    assert torch.equal(one, other.transpose(1, 2))
    single = sparse_attention(q[1:], k[1:], v[1:], **words)      # each batch entry has its own mask
    assert torch.equal(one[1:], single)


@pytest.mark.parametrize("sparse_type", TYPES)
def test_other_lengths_and_shared_key_heads(sparse_type, seed):
    q, k, v = random(seed, 1, 4, 512, 64), random(seed + 1, 1, 2, 1280, 64), random(seed + 2, 1, 2, 1280, 64)
    out, mask = sparse_attention(q, k, v, sparse_type=sparse_type, sparsity=0.5, latent_shape_q=[2, 16, 16],
                                 latent_shape_k=[5, 16, 16], return_mask=True)
    want = sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=torch.from_numpy(mask.tokens()))
    assert (out - want).abs().max() < CLOSE


@pytest.mark.parametrize("tail", ["pooled", "centroid"])
def test_tail_stands_in_for_equal_keys(tail, seed):
    """Where all keys and queries of a block are equal the tail is exact (spec of the pooled tail): sparse equals
    dense."""
    q, k, v = (random(seed + i, 1, 2, 8, 64).repeat_interleave(128, 2) for i in range(3))
    out = sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.75, tail=tail)
    # A block's mean is a float32 sum of 128 terms, off by 128 * 2^-24 at most; keys and values are below 4, scores too.
    assert (out - sdpa(q, k, v)).abs().max() < 8 * 128 * 2**-24
    assert (sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.75) - sdpa(q, k, v)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, seed):
    """Against float32 attention over the same values and mask: not worse than twice what rounding the exact result to
    the dtype costs, plus one rounding of a probability (the softmax weights enter the second product in that dtype)."""
    q, k, v = qkv(seed, dtype=dtype)
    out, mask = sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.5, return_mask=True)
    exact = sdpa(q.float(), k.float(), v.float(), attn_mask=torch.from_numpy(mask.tokens()))
    rounding = (exact.to(dtype).float() - exact).abs().max()
    assert out.dtype == dtype
    assert (out.float() - exact).abs().max() <= 2 * rounding + torch.finfo(dtype).eps * v.abs().max().float() / 8


def test_numpy_arrays_are_torch_tensors_bit_for_bit(seed):
    q, k, v = qkv(seed)
    for sparse_type in TYPES:
        words = {"sparse_type": sparse_type, "sparsity": 0.5, "latent_shape_q": [4, 16, 16]}
        out = sparse_attention(*(x.numpy() for x in (q, k, v)), **words)
        assert isinstance(out, np.ndarray)
        assert np.array_equal(out, sparse_attention(q, k, v, **words).numpy())


# ---------------------------------------------------------------- masks in and out

def test_cached_masks(seed):
    q, k, v = qkv(seed)
    words = {"sparse_type": "rf_v3", "latent_shape_q": [4, 16, 16]}
    out, mask = sparse_attention(q, k, v, sparsity=0.8, return_mask=True, **words)
    assert torch.equal(out, sparse_attention(q, k, v, cached_mask=mask, **words))
    again, same = sparse_attention(q, k, v, cached_mask=mask, return_mask=True, **words)
    assert same is mask and torch.equal(again, out)
    blocks = mask.blocks().astype(np.int8)                       # what rf_v3's cached_mask is
    assert torch.equal(out, sparse_attention(q, k, v, cached_mask=blocks, **words))
    assert torch.equal(out, sparse_attention(q, k, v, cached_mask=torch.from_numpy(blocks), **words))
    with pytest.raises(ValueError, match="mask was made for"):
        sparse_attention(q[:, :2], k[:, :2], v[:, :2], cached_mask=mask, **words)
    with pytest.raises(ValueError, match="blocks must have the shape"):
        sparse_attention(q, k, v, cached_mask=blocks[:, :, :4], **words)


# ---------------------------------------------------------------- without effect, and refused

def test_parameters_of_other_types_have_no_effect(seed):
    q, k, v = qkv(seed)
    plain = sparse_attention(q, k, v, sparse_type="ada_bsa", sparsity=0.5)
    assert torch.equal(
        plain,
        sparse_attention(q, k, v, sparse_type="ada_bsa", sparsity=0.5, txt_len=77, latent_shape_q=[1, 2, 3],
                         latent_shape_k=[9, 9, 9]))
    for sparse_type in ("rf_v2", "entropy"):
        plain = sparse_attention(q, k, v, sparse_type=sparse_type, sparsity=0.5)
        assert torch.equal(
            plain,
            sparse_attention(q, k, v, sparse_type=sparse_type, sparsity=0.5, cdf_threshold=0.1, keep_sink=False,
                             keep_recent=False))
    dense = sparse_attention(q, k, v)
    assert torch.equal(
        dense,
        sparse_attention(q, k, v, sparsity=0.9, txt_len=5, latent_shape_q=[1, 1, 1], cdf_threshold=0.2,
                         inner_precise=4))


REFUSED = [({"attn_mask": torch.ones(256, 256, dtype=torch.bool)}, "attn_mask is not supported"),
           ({"block_size": 100}, "block_size is 100; kernels exist"),
           ({"block_size": 512}, "block_size is 512; kernels exist"),
           ({"input_layout": "TND"}, "input_layout must be 'BNSD' or 'BSND', not 'TND'"),
           ({"sparse_type": "rf_v1"},
            "sparse_type must be one of None, 'rf_v2', 'rf_v3', 'ada_bsa', 'entropy', not 'rf_v1'"),
           ({"sparsity": 1.5}, "sparsity must lie between 0 and 1, not 1.5"),
           ({"sparsity": -0.1}, "sparsity must lie between 0 and 1"),
           ({"sparsity": "0.5"}, "sparsity must lie between 0 and 1"),
           ({"head_num": 24}, "head_num is 24, but q has 2 heads in layout BNSD"),
           ({"head_num": "2"}, "head_num is '2', but q has 2 heads"),
           ({"inner_precise": 2}, "inner_precise must be 0, 1 or 4, not 2"),
           ({"scale": 0}, "scale must be a positive number"),
           ({"scale": float("nan")}, "scale must be a positive number"),
           ({"sparse_type": "rf_v2",
             "latent_shape_q": [3, 9, 9]}, "latent_shape_q [3, 9, 9] and txt_len 0 make 243 tokens, but q has 256"),
           ({"sparse_type": "rf_v2", "latent_shape_q": [3, 9]}, "latent_shape_q must be [t, h, w]"),
           ({"sparse_type": "rf_v2", "latent_shape_q": [0, 9,
                                                        9]}, "latent_shape_q must be [t, h, w] of at least 1 each"),
           ({"sparse_type": "rf_v2", "latent_shape_k": [4, 8, 8]}, "latent_shape_k was given without latent_shape_q"),
           ({"sparse_type": "rf_v2", "txt_len": -1}, "txt_len must be an integer of at least 0"),
           ({"sparse_type": "entropy", "sparsity": 0.5,
             "txt_len": 300}, "txt_len is 300, but there are 256 query and 256 key tokens"),
           ({"sparse_type": "rf_v2", "order": "zigzag"},
            "order must be one of 'raster', 'tile', 'tile3d', 'hilbert', 'adaptive', not 'zigzag'"),
           ({"sparse_type": "rf_v2", "window": [1, 8, 8]}, "window belongs to order='tile3d'"),
           ({"sparse_type": "rf_v2", "sparsity": 0.5, "order": "hilbert"}, "order hilbert needs a grid"),
           ({"sparse_type": "rf_v2", "sparsity": 0.5, "order": "tile", "latent_shape_q": [4, 8, 8],
             "is_causal": True}, "causal attention needs"),
           ({"sparse_type": "rf_v2", "tail": "mean"},
            "tail must be one of 'none', 'pooled', 'centroid', 'levels', not 'mean'"),
           ({"sparse_type": "rf_v2",
             "mode": "original"}, "mode must be one of 'fixed', 'compat', 'compat-round', not 'original'"),
           ({"sparse_type": "rf_v2", "sparsity": 0.5, "mode": "compat"}, "rf_v2 in compat mode needs"),
           ({"sparse_type": "ada_bsa", "cdf_threshold": float("nan")}, "cdf_threshold must be a number"),
           ({"return_mask": True}, "cached_mask and return_mask need a sparse_type"),
           ({"sparse_type": "rf_v2", "cached_mask": "masks.pt"}, "cached_mask must be an esa.Mask"), ]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[s for _, s in REFUSED])
def test_refused_with_a_message(words, message):
    q, k, v = qkv(1, heads=2, tokens=256, dim=16)
    with pytest.raises(ValueError, match=re.escape(message)):
        sparse_attention(q, k, v, **words)


def test_tensors_that_do_not_fit_are_refused():
    q, k, v = qkv(1, heads=2, tokens=256, dim=16)
    for given, message in [
        ((q[0], k, v), "q must have four dimensions"), ((q, k.half(), v), "q has dtype float32 and k float16"),
        ((q.double(), k.double(), v.double()), "q has dtype float64; float32, float16 and bfloat16 are supported"),
        ((q, k.numpy(), v), "q and k must both be"),
        ((q, [1], v), "k must be a torch tensor or a numpy array, not list"),
        ((q, k, v[:, :, :9]), "k and v differ in tokens: 256 and 9"),
        ((q, k[..., :8], v), "q and k differ in head dim: 16 and 8"),
        ((q, k.repeat(1, 2, 1, 1)[:, :3], v.repeat(1, 2, 1, 1)[:, :3]), "query heads must be a multiple of key heads")
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            sparse_attention(*given)


def test_unknown_keywords_are_an_error():
    q, k, v = qkv(1, heads=2, tokens=256, dim=16)
    with pytest.raises(
            TypeError,
            match="unexpected keyword argument 'cache_mask'; beside MindIE-SD's arguments it takes order, window, tail"
    ):
        sparse_attention(q, k, v, cache_mask=None)


def test_gradients_are_refused():
    q, k, v = qkv(1, heads=2, tokens=256, dim=16)
    with pytest.raises(ValueError, match="forward only, but an input requires gradients: call it under torch.no_grad"):
        sparse_attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        sparse_attention(q, k, v)
    with pytest.raises(ValueError, match="forward only"):
        esa.attention(q, k, v)


def test_sparsity_1_keeps_the_best_block(seed):
    q, k, v = qkv(seed)
    out, mask = sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=1.0, return_mask=True)
    assert (mask.blocks().sum(-1) == 1).all() and bool(torch.isfinite(out).all())


def test_an_image_is_not_all_first_frame(seed):
    q, k, v = qkv(seed)
    for shape in ([1, 32, 32], None):
        mask = sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.6, latent_shape_q=shape, return_mask=True)[1]
        assert mask.density == 0.5       # 4 = ceil(8 * 0.4) of 8 blocks


def test_signature_is_the_originals():
    import inspect
    want = """q, k, v, attn_mask=None, scale=None, is_causal=False, head_num=1, input_layout='BNSD', inner_precise=0,
    sparse_type=None, txt_len=0, block_size=128, latent_shape_q=None, latent_shape_k=None, video_spans=None,
    keep_sink=True, keep_recent=True, cdf_threshold=1.0, sparsity=0.0, precision='bf16', **kwargs"""
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(sparse_attention).parameters.values()
    ]
    assert ", ".join(map(str, parameters)) == " ".join(textwrap.dedent(want).split())
