# SPDX-License-Identifier: Apache-2.0
"""Views of torch tensors and numpy arrays: where they lie, without a copy; what cannot be a view."""
import esa
import numpy as np
import pytest
import torch
from esa.core import tensor as X


def test_a_view_is_the_memory_itself():
    t = torch.arange(2 * 3 * 5 * 8, dtype=torch.float32).reshape(2, 5, 3, 8)
    for array in (t, t.numpy()):
        view = X.view(array, "BSND")
        assert view.data == t.data_ptr() and list(view.dim) == [2, 3, 5, 8] and list(view.stride) == [120, 8, 24, 1]
        assert X.dense(array) is array
    part = t.transpose(1, 2)[:, 1:, ::2]
    view = X.view(part)
    assert view.data == part.data_ptr() and list(view.dim) == [2, 2, 3, 8] and list(view.stride) == [120, 8, 48, 1]
    expanded = torch.zeros(1, 1, 4, 8).expand(3, 2, 4, 8)
    assert list(X.view(expanded).stride) == [0, 0, 8, 1]


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 2)])
def test_dtypes(dtype, number):
    assert X.view(torch.zeros(1, 1, 4, 8, dtype=dtype)).dtype == number
    if dtype != torch.bfloat16:
        assert X.view(torch.zeros(1, 1, 4, 8, dtype=dtype).numpy()).dtype == number


def test_numpy_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal((1, 2, 64, 16)).astype(ml_dtypes.bfloat16)
    assert X.view(x).dtype == 2
    assert esa.attention(x, x, x).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("make", [lambda: torch.zeros(1, 1, 8, 4).transpose(2, 3),
                                  lambda: np.zeros((1, 1, 8, 4), np.float32).swapaxes(2, 3),
                                  lambda: np.zeros((1, 1, 4, 8), np.float32)[:, :, ::-1],
                                  lambda: np.zeros((1, 1, 4, 9), np.dtype([("a", "f4"), ("b", "u1")]))["a"]])
def test_what_cannot_be_a_view_is_copied_by_the_calls(make):
    array = make()
    with pytest.raises(ValueError, match=r"needs its last dimension dense"):
        X.view(array, name="q")
    assert not X.viewable(array) and X.viewable(X.dense(array))
    assert esa.attention(array, array, array).shape == tuple(array.shape)


def test_strides_change_nothing(seed):
    """Each of q, k, v lying differently, the same bits come out."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 4, 300, 64, generator=g) for _ in range(3))
    want = esa.sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.5)
    wide = torch.zeros(2, 4, 300, 3, 64)
    wide[:, :, :, 1] = q
    got = esa.sparse_attention(wide[:, :, :, 1],
                               k.transpose(1, 2).contiguous().transpose(1, 2),
                               v.transpose(2, 3).contiguous().transpose(2, 3), sparse_type="rf_v2", sparsity=0.5)
    assert torch.equal(want, got)


@pytest.mark.parametrize(("array", "message"), [
    (torch.zeros(2, 3), "q must have four dimensions"), (np.zeros((1, 1, 2, 2)), "q has dtype float64"),
    (np.zeros((1, 1, 2, 2), ">f4"), "q has dtype >f4"),
    (torch.zeros(1, 1, 2, 2, dtype=torch.int32), "q has dtype int32"),
    ([[1.0]], "q must be a torch tensor or a numpy array, not list"),
    (torch.zeros(1, 1, 2, 2, device="meta"), "tensors on device meta cannot be used")])
def test_refused(array, message):
    with pytest.raises(ValueError, match=message):
        X.view(array, name="q")


def test_key_lengths(seed):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, 200, 32, generator=g) for _ in range(3))
    for given in ([200, 77], torch.tensor([200, 77]), np.array([200, 77], np.int64)):
        out, lse = esa.attention(q, k, v, kv_len=given, return_lse=True)
        short = torch.nn.functional.scaled_dot_product_attention(q[1:], k[1:, :, :77], v[1:, :, :77])
        assert (out[1:] - short).abs().max() < 1e-5      # float32 sums in another order
        scores = (q[1:] @ k[1:, :, :77].transpose(2, 3)) * 32 ** -0.5
        assert (lse[1:] - scores.logsumexp(-1)).abs().max() < 1e-5
    with pytest.raises(ValueError, match=r"kv_len must hold one length per batch entry \(2\)"):
        esa.attention(q, k, v, kv_len=[200])
    with pytest.raises(ValueError, match=r"kv_len\[0\] is 201, expected 0 .. 200"):
        esa.attention(q, k, v, kv_len=[201, 3])
