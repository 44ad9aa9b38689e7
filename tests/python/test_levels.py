# SPDX-License-Identifier: Apache-2.0
"""The error selector, the fine level of masks and orders per head, from Python."""
import esa
import numpy as np
import pytest
from esa.core.layout import Layout
from esa.core.mask import Mask

BLOCK, FINE, HEADS, KV_HEADS, GRID, TEXT = (32, 16), 4, 4, 2, (3, 6, 8), 5
TOKENS = 3 * 6 * 8 + TEXT
SHAPE = (1, HEADS, -(-TOKENS // 32), -(-TOKENS // 16))
LAYOUT = Layout(grid=GRID, text_back=TEXT, order="adaptive")


@pytest.fixture(scope="module")
def qkv():
    """Keys and values in 30 clusters: their means say much, so that every level is worth its cost somewhere."""
    r = np.random.default_rng(7)
    q = r.standard_normal((1, HEADS, TOKENS, 40), dtype=np.float32)
    of = r.integers(0, 30, TOKENS)
    k, v = (r.standard_normal((1, KV_HEADS, 30, 40), dtype=np.float32)[:, :, of] for _ in range(2))
    noise = r.standard_normal((2, *k.shape), dtype=np.float32)
    return 2 * q, k + noise[0] / 8, v + noise[1] / 8


CONFIG = {"selector": "error", "budget": 0.6, "block": BLOCK, "order": "adaptive", "tail": "levels"}


def naive(q, k, v, levels, orders):
    """Attention over exact blocks, fine means and block means, in float64, head by head."""
    out = np.zeros(q.shape)
    for h in range(HEADS):
        pq, pk = orders[0][0, h], orders[1][0, h // (HEADS // KV_HEADS)]
        keys, values = (x[0, h // (HEADS // KV_HEADS)][pk].astype(np.float64) for x in (k, v))
        for i, row in enumerate(levels[0, h]):
            columns = []                    # (first, tokens) of every column
            for j, level in enumerate(row):
                first, end = j * BLOCK[1], min(TOKENS, (j + 1) * BLOCK[1])
                size = (1, BLOCK[1] // FINE, BLOCK[1])[level]
                columns += [(at, min(size, end - at)) for at in range(first, end, size)]
            mean_k, mean_v = (np.stack([x[at:at + n].mean(0) for at, n in columns]) for x in (keys, values))
            tokens = pq[i * BLOCK[0]:(i + 1) * BLOCK[0]]
            s = q[0, h, tokens] @ mean_k.T / np.sqrt(40) + np.log([n for _, n in columns])
            p = np.exp(s - s.max(-1, keepdims=True))
            out[0, h, tokens] = p @ mean_v / p.sum(-1, keepdims=True)
    return out


def test_the_error_selector_end_to_end(qkv):
    q, k, v = qkv
    mask = esa.select(q, k, esa.EsaConfig(**CONFIG), v=v, layout=LAYOUT)
    assert (mask.selector, mask.fine, mask.shape) == ("error", FINE, SHAPE)
    levels, orders = mask.levels(), mask.orders()
    assert set(np.unique(levels)) == {0, 1, 2} and (levels == 0).any(-1).all()
    assert orders[0].shape == (1, HEADS, TOKENS) and orders[1].shape == (1, KV_HEADS, TOKENS)
    for perm in (*orders[0][0], *orders[1][0]):
        assert sorted(perm) == list(range(TOKENS)) and (perm[-TEXT:] == np.arange(TOKENS - TEXT, TOKENS)).all()
    got = esa.attention(q, k, v, mask, tail="levels")
    # float32 sums of at most TOKENS terms of size 1, in scores up to 10
    np.testing.assert_allclose(got, naive(q, k, v, levels, orders), atol=2e-5)


def test_tokens_follow_the_orders(qkv):
    q, k, v = qkv
    mask = esa.select(q, k, esa.EsaConfig(**CONFIG), v=v, layout=LAYOUT)
    tokens, blocks, (perm_q, perm_k) = mask.tokens(), mask.blocks(), mask.orders()
    for h in range(HEADS):
        ordered = tokens[0, h][perm_q[0, h]][:, perm_k[0, h // 2]]
        assert (ordered == blocks[0, h].repeat(BLOCK[0], 0)[:TOKENS].repeat(BLOCK[1], 1)[:, :TOKENS]).all()


def test_levels_and_orders_round_trip(qkv):
    q, k, v = qkv
    mask = esa.select(q, k, esa.EsaConfig(**CONFIG), v=v, layout=LAYOUT)
    again = Mask.from_levels(mask.levels(), TOKENS, TOKENS, fine=FINE, block=BLOCK, layout=LAYOUT, orders=mask.orders())
    assert (again.levels() == mask.levels()).all()
    assert all((a == b).all() for a, b in zip(again.orders(), mask.orders(), strict=True))
    same = [esa.attention(q, k, v, m, tail="levels") for m in (mask, again)]
    assert (same[0] == same[1]).all()
    assert Mask.from_blocks(np.ones(SHAPE, bool), TOKENS, TOKENS, block=BLOCK).orders() is None


def test_bad_input_is_named(qkv):
    q, k, v = qkv
    with pytest.raises(ValueError, match="reads v"):
        esa.select(q, k, esa.EsaConfig(**CONFIG), layout=LAYOUT)
    with pytest.raises(ValueError, match="needs the error selector"):
        esa.select(q, k, esa.EsaConfig(selector="entropy"), layout=LAYOUT)
    with pytest.raises(ValueError, match=r"levels must have the shape \(B, H, 5, 10\)"):
        Mask.from_levels(np.zeros((1, HEADS, 4, 10)), TOKENS, TOKENS, block=BLOCK)
    with pytest.raises(ValueError, match="info.fine is 3"):
        Mask.from_levels(np.zeros(SHAPE), TOKENS, TOKENS, fine=3, block=BLOCK)
    unordered = Mask.from_levels(np.zeros(SHAPE), TOKENS, TOKENS, block=BLOCK, layout=LAYOUT)
    with pytest.raises(esa.EsaError, match="no adaptive order yet"):
        esa.attention(q, k, v, unordered, tail="levels")
    with pytest.raises(ValueError, match="orders must have the shapes"):
        Mask.from_levels(np.zeros(SHAPE), TOKENS, TOKENS, block=BLOCK, layout=LAYOUT, orders=(np.zeros(3), np.zeros(3)))
