# SPDX-License-Identifier: Apache-2.0
"""Masks of rf_v2 and rf_v3 as MindIE-SD 3.1.0 makes them: committed vectors, and with --slow its own Python code."""
import inspect
import json
import os
import pathlib
import random
import subprocess
import sys

import esa
import numpy as np
import pytest
import torch
from esa.core.layout import order
from torch.nn.functional import scaled_dot_product_attention as sdpa

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools" / "golden"))
import mindiesd_masks as original  # noqa: E402

CASES = json.loads((ROOT / "tests" / "golden" / "mindiesd_masks.json").read_text())


def name(case):
    where = f"{len(case['spans'])} clips" if case["spans"] else f"{case['grid']} text {case['text']}"
    return f"{where} blocks {case['block']}x{case['block_kv'] or case['block']} sparsity {case['sparsity']}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_golden_masks_of_release_3_1(case):
    assert original.hexadecimal(original.our_mask(case)) == case["rows"]


def test_the_vectors_cover_the_changes():
    assert any(c["text"] and c["text"] % c["block"] for c in CASES) and any(c["block_kv"] for c in CASES)
    assert {len(c["spans"]) for c in CASES if c["spans"]} >= {1, 2, 3}


def test_mode_compat_is_the_newest_release():
    case = next(c for c in CASES if c["text"])
    newest = original.our_mask(case, compat=None, mode="compat")
    assert np.array_equal(newest, original.our_mask(case))


def test_release_3_0_pools_text_apart():
    """72 video and 24 text tokens in blocks of 64: apart these are two and one blocks, together two."""
    case = {"seed": 5, "heads": 1, "dim": 16, "sparsity": 0.5, "block": 64, "block_kv": None, "text": 24,
            "grid": [2, 4, 9], "spans": None, "tokens": 96}
    assert original.our_mask(case).shape == (1, 2, 2)
    with pytest.raises(ValueError, match=r"3 x 3 blocks, but kernels need 2 x 2 .*rf_v2 3.0 pools text"):
        original.our_mask(case, compat="3.0")
    # 128 + 64 tokens: the borders are the same, and so are the masks of both releases
    case = {**case, "text": 64, "grid": [2, 8, 8], "tokens": 192}
    assert np.array_equal(original.our_mask(case), original.our_mask(case, compat="3.0"))


# ---------------------------------------------------------------- several clips

SPANS = [{"start": 30, "latent_shape": [2, 10, 12]}, {"start": 290, "latent_shape": [3, 8, 16]}]
TOKENS = 760                                    # 30 + 240 + 20 + 384 + 86


@pytest.mark.parametrize("words", [{}, {"compat": "3.1"}, {"order": "hilbert"}, {"order": "raster"},
                                   {"order": "tile3d", "window": [2, 4, 4]}, {"sparse_type": "entropy"}], ids=str)
def test_clips(words, seed):
    """Blocks never cross a clip, context and first frames are kept whole, and the output is that of the mask."""
    q, k, v = torch.randn(3, 1, 2, TOKENS, 32, generator=torch.Generator().manual_seed(seed))
    words = {"sparse_type": "rf_v2", "sparsity": 0.8, "block_size": 32, **words}
    out, mask = esa.sparse_attention(q, k, v, video_spans=SPANS, return_mask=True, **words)
    tokens = mask.tokens()[0]
    assert mask.density < 0.9
    assert (out - sdpa(q, k, v, attn_mask=torch.from_numpy(mask.tokens()))).abs().max() < 1e-5
    assert torch.equal(out, esa.sparse_attention(q, k, v, video_spans=SPANS, **words))
    video = np.zeros(TOKENS, bool)
    video[30:270] = video[290:674] = True
    kept = ~video
    if words["sparse_type"] != "entropy":       # only rf_v2 protects first frames
        kept[30:150] = kept[290:418] = True
    assert tokens[:, kept].all() and tokens[:, :, kept].all()


@pytest.mark.parametrize("name", ["raster", "tile", "hilbert"])
def test_the_order_of_clips(name):
    layout = esa.Layout(spans=[(s["start"], s["latent_shape"]) for s in SPANS], order=name, protect_first_frame=True)
    perm = order(layout, TOKENS)
    assert sorted(perm.tolist()) == list(range(TOKENS))
    clip = np.where((perm >= 30) & (perm < 270), 1, np.where((perm >= 290) & (perm < 674), 2, 0))
    # clip 0, context up to a multiple of 128, clip 1, the remaining context in its order
    assert clip.tolist() == [1] * 240 + [0] * 16 + [2] * 384 + [0] * 120
    assert perm[240:256].tolist() == list(range(16))
    assert perm[640:].tolist() == [*range(16, 30), *range(270, 290), *range(674, 760)]


@pytest.mark.parametrize(("spans", "message"), [
    ([], "video_spans must be a list of"), ("x", "video_spans must be a list of"),
    ([{"start": 0}], "latent_shape of video_spans"), ([{"start": -1, "latent_shape": [2, 8, 8]}], "entry 0 is"),
    ([{"start": 700, "latent_shape": [2, 8, 8]}], "the last of video_spans ends at token 828"),
    ([{"start": 0, "latent_shape": [2, 8, 8]}, {"start": 100, "latent_shape": [2, 8, 8]}],
     "clip 1 starts at 100 with 2x8x8 tokens, expected a start of at least 128"),
    ([{"start": 0, "latent_shape": [5, 9, 9]}, {"start": 405, "latent_shape": [1, 5, 71]}],
     "2 clips need 11 tokens of context to end at multiples of 32, but the sequence has 0"),
    ([{"start": 9 * i, "latent_shape": [1, 3, 3]} for i in range(9)], "spans has 9 clips, at most 8")])
def test_clips_that_do_not_fit(spans, message):
    q = torch.zeros(1, 1, TOKENS, 16)
    with pytest.raises(ValueError, match=message):
        esa.sparse_attention(q, q, q, sparse_type="rf_v2", sparsity=0.5, block_size=32, video_spans=spans)


REFUSED = [({"video_spans": SPANS, "txt_len": 5}, "video_spans says where everything is"),
           ({"video_spans": SPANS, "sparse_type": "ada_bsa"}, "video_spans is for sparse_type 'rf_v2', 'rf_v3'"),
           ({"video_spans": SPANS, "compat": "3.0"}, "release 3.0 of rf_v2 knows one video"),
           ({"video_spans": SPANS, "is_causal": True}, "neither the adaptive order nor causal"),
           ({"compat": "2.9"}, "compat must be one of '3.0', '3.1', not '2.9'"),
           ({"compat": "3.1", "mode": "fixed"}, "mode 'fixed' follows no release"),
           ({"precision": "int4"}, "precision must be one of 'bf16', 'fp8', 'mix', not 'int4'"),
           ({"block_size_kv": 300}, "block_size_kv is 300; kernels exist")]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(words, message):
    q = torch.zeros(1, 1, TOKENS, 16)
    with pytest.raises(ValueError, match=message):
        esa.sparse_attention(q, q, q, **{"sparse_type": "rf_v2", "sparsity": 0.5, **words})


def test_longer_key_blocks_and_cached_masks(seed):
    q, k, v = torch.randn(3, 1, 2, 1000, 32, generator=torch.Generator().manual_seed(seed))
    words = {"sparse_type": "rf_v3", "block_size": 64, "latent_shape_q": [5, 10, 20]}
    square = esa.sparse_attention(q, k, v, sparsity=0.7, return_mask=True, **words)[1].blocks()
    out, mask = esa.sparse_attention(q, k, v, cached_mask=square, block_size_kv=128, return_mask=True, **words)
    assert mask.block == (64, 128)
    assert np.array_equal(mask.blocks(), square.reshape(1, 2, 16, 8, 2).any(-1))
    own = esa.sparse_attention(q, k, v, sparsity=0.7, block_size_kv=128, return_mask=True, **words)[1]
    assert own.block == (64, 128) and own.blocks().shape == (1, 2, 16, 8)


def test_hosts_see_the_new_parameters():
    """vLLM-Omni asks inspect.signature which of them there are."""
    parameters = inspect.signature(esa.sparse_attention).parameters
    assert parameters["video_spans"].default is None and parameters["precision"].default == "bf16"


# ---------------------------------------------------------------- the original itself

@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The original's modules. $ESA_MINDIESD may name a folder with the wheels."""
    folder = os.environ.get("ESA_MINDIESD")
    if folder is None:
        folder = tmp_path_factory.mktemp("mindiesd")
        done = subprocess.run(original.fetch_command(sys.executable, folder), capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"MindIE-SD {original.VERSION} could not be fetched: {done.stderr.strip()[-200:]}")
    return original.load(folder)


@pytest.mark.slow
def test_masks_equal_the_originals(wheel, seed):
    """300 random cases. A row whose decision hangs on less than float32 resolves is not compared; these are few."""
    r, rows, near, kinds = random.Random(seed), 0, 0, set()
    for _ in range(300):
        case = original.random_case(r)
        want, gap = original.original_mask(wheel, case)
        got = original.our_mask(case)
        clear = gap > original.NEAR
        differ = (want != got).any(-1) & clear
        assert not differ.any(), (case, np.argwhere(differ)[:3])
        rows, near = rows + gap.size, near + int((~clear).sum())
        kinds.add((bool(case["spans"]), bool(case["text"]), bool(case["block_kv"])))
    print(f"{rows} rows, {near} of them too near to call")
    assert len(kinds) == 5 and near < rows / 500
