# SPDX-License-Identifier: Apache-2.0
"""Exact rows from Python: attention, sessions and their work."""
import esa
import numpy as np
import pytest
from esa import EsaConfig
from esa.core.session import Session

BLOCK, TOKENS, ROWS = 32, 150, (4, 12, 20, 28)
LAST = (2, 8, 13, 19)        # of the 22 rows of the last block


@pytest.fixture(scope="module")
def qkv():
    return np.random.default_rng(3).standard_normal((3, 1, 2, TOKENS, 40), dtype=np.float32)


def mended(sparse, dense):
    """The rule in float64."""
    out = sparse.astype(np.float64)
    for h in range(2):
        for first in range(0, TOKENS, BLOCK):
            block, exact = out[0, h, first:first + BLOCK], dense[0, h, first:first + BLOCK].astype(np.float64)
            rows = list(ROWS if len(block) == BLOCK else LAST)
            x = exact[rows] - block[rows]
            mean = x.mean(0)
            noise = ((x - mean) ** 2).sum() / 12
            block += max(0.0, 1 - noise / (mean ** 2).sum()) * mean
            block[rows] = exact[rows]
    return out


def test_attention(qkv):
    q, k, v = qkv
    mask = esa.select(q, k, EsaConfig(budget=0.4, block=BLOCK))
    sparse, lse = esa.attention(q, k, v, mask, tail="pooled", return_lse=True)
    dense, exact_lse = esa.attention(q, k, v, return_lse=True)
    got, got_lse = esa.attention(q, k, v, mask, tail="pooled", return_lse=True, exact_rows=4)
    np.testing.assert_allclose(got, mended(sparse, dense), atol=1e-5)   # f32 sums of 150 terms below 4
    rows = [first + r for first in range(0, TOKENS, BLOCK) for r in (ROWS if first + BLOCK <= TOKENS else LAST)]
    others = np.setdiff1d(np.arange(TOKENS), rows)
    np.testing.assert_allclose(got_lse[:, :, rows], exact_lse[:, :, rows], atol=1e-5)
    np.testing.assert_array_equal(got_lse[:, :, others], lse[:, :, others])
    assert np.abs(got - dense).mean() < np.abs(sparse - dense).mean()


def test_refused(qkv):
    q, k, v = qkv
    mask = esa.select(q, k, EsaConfig(budget=0.4, block=BLOCK))
    for bad in (-1, 17, 2.0, True):
        with pytest.raises(ValueError, match="exact_rows must be an integer of 0 to 16"):
            esa.attention(q, k, v, mask, exact_rows=bad)
    with pytest.raises(esa.EsaError, match="exact_rows is 4 and causal is 1"):
        esa.attention(q, k, v, mask, exact_rows=4, causal=True)


def test_session(qkv):
    q, k, v = qkv
    config = EsaConfig(selector="random", budget=0.4, block=BLOCK, exact_rows=4, warmup_frac=0, dense_first_layer=False)
    plain = EsaConfig(selector="random", budget=0.4, block=BLOCK, warmup_frac=0, dense_first_layer=False)
    work = []
    for c in (config, plain):
        session = Session(c, layers=1, steps=1)
        session.begin()
        session.step(0)
        out = session.attention(0, q, k, v)
        want = esa.attention(q, k, v, esa.select(q, k, c), tail=c.tail, exact_rows=c.exact_rows or 0)
        np.testing.assert_array_equal(out, want)
        work.append(session.stats().work)
    assert work[0] - work[1] == pytest.approx(5 * 4 / TOKENS)       # five blocks
