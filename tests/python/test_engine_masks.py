# SPDX-License-Identifier: Apache-2.0
"""Every selector in every family of the engine: density 1 is dense, sparse attention is SDPA under the expanded mask,
text is always kept, and mask files go both ways between the engine and `esa.apply`."""
import re

import esa as package
import minis
import pytest
import torch
from engine_minis import BLOCK, PROMPT, SEED, STEPS, Attention, families, far, make, run_esa
from esa.core.mask import MaskFile, build_mask_file
from esa.programs import calibrate, program

# f32 against f32 with attention in f64, of the largest number; 3e-6 is seen.
CLOSE = 2.5e-5
# Each selector, with an order that all of them take; density 1 has the default order (error: adaptive).
ORDERS = {"entropy": "hilbert", "rf_v2": "tile", "ada_bsa": "raster", "error": "hilbert"}
# Text is half of the blocks in some minis: the budget leaves as many for the video.
BUDGET = 0.6
BLOCKS = ("--block", f"{BLOCK}x{BLOCK}")
SPARSE = ("--warmup", 0, "--dense-first-layer", 0)      # every call
PLAIN = {"error": ("--carry", "off")}                   # the others do not carry by themselves


@pytest.fixture(scope="module", params=families("wan", "cogvideox_5b", "hunyuan"))
def family(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp(request.param) / "mini")


@pytest.fixture(scope="module")
def dense(family):
    ours, theirs = family.ours("--method", "dense"), family.theirs()
    assert far(ours, theirs) <= CLOSE
    return theirs


def calls_of(family):
    """Attention calls of the engine, which runs the guidance branches one after the other."""
    return STEPS * family.layers * family.branches


def check_text(family, mask):
    """Every key of text is seen by every query, and every query of text sees every key that exists. True if some other
    block is skipped."""
    blocks, text = torch.from_numpy(mask.blocks()), family.text_blocks()
    assert bool(text) == bool(family.layout.text_front + family.layout.text_back)
    exist = blocks.shape[-1] if family.kv_len is None else -(-int(family.kv_len[0]) // BLOCK)
    assert blocks[..., text, :exist].all() and blocks[..., [t for t in text if t < exist]].all()
    return not blocks[..., :exist].all()


def test_no_selector_is_left_out():
    said = run_esa("generate", "--help").stdout
    listed = re.search(r"--method (\S+)", said).group(1).split("|")
    assert sorted(listed) == sorted([*ORDERS, "dense", "cached"])


def test_density_one_is_dense(family, dense):
    for selector in ORDERS:
        got = family.ours("--method", selector, "--budget", 1, *BLOCKS, *SPARSE)
        assert far(got, dense) <= CLOSE, selector
        assert (family.said["sparse_calls"], family.said["density"]) == (calls_of(family), 1.0)


@pytest.mark.parametrize("selector", ORDERS)
def test_sparse_is_sdpa_under_the_mask(family, dense, selector):
    """Masks come from the library's one call, made from the queries and keys of diffusers; attention is torch's."""
    protect = selector == "rf_v2" or (family.given and selector != "error")
    config = package.EsaConfig(selector=selector, budget=BUDGET, block=BLOCK, order=ORDERS[selector], tail="none",
                               protect_first_frame=protect)
    kept = []

    def attention(q, k, v):
        mask = minis.make_mask(q, k, config, family.layout, family.kv_len, v if selector == "error" else None)
        assert check_text(family, mask)
        kept.append(mask.density)
        return minis.masked_attention(q, k, v, mask, "none", family.kv_len)

    with Attention(family.layout.tokens, attention) as mode:
        want = family.theirs()
    assert mode.calls in (calls_of(family), calls_of(family) // 2)      # CogVideoX: both branches are one batch
    got = family.ours("--method", selector, "--budget", BUDGET, *BLOCKS, *SPARSE, "--order", ORDERS[selector], "--tail",
                      "none", "--exact-rows", 0, "--refresh", 1, "--share-branches", 0, *PLAIN.get(selector, ()))
    assert family.said["sparse_calls"] == calls_of(family)
    assert family.said["density"] == pytest.approx(sum(kept) / len(kept), abs=1e-6)
    assert far(got, want) <= CLOSE, far(got, want)
    assert far(want, dense) > 100 * CLOSE, "the masks must matter, or this test shows nothing"


# ---------------------------------------------------------------- mask files


def record(family, folder, method):
    """The same video recorded by the engine and by the package: two files."""
    paths = {"engine": folder / "engine.masks", "package": folder / "package.masks"}
    prompts = folder / "prompts.txt"
    prompts.write_text(PROMPT + "\n")
    words = ["--prompts", prompts, "--method", method, *(("--work", family.work) if method == "error" else
                                                         ("--budgets", BUDGET)), *BLOCKS, "--output"]
    done = run_esa("calibrate", *family.options(), *SPARSE, *words, paths["engine"])
    assert done.returncode == 0, done.stderr
    if family.given:
        record_with_picture(family, folder / "raw", paths["package"], method)
        return paths
    frames, height, width = family.size
    size = ["--model", family.folder, "--frames", frames, "--height", height, "--width", width, "--steps", STEPS,
            "--seed", SEED, *(["--guidance", family.guidance] if family.guidance else []), "--warmup-frac", 0,
            "--no-dense-first-layer", "--order", "hilbert"]
    assert program.run("calibrate", calibrate.main, list(map(str, [*size, *words, paths["package"]]))) == 0
    return paths


def record_with_picture(family, raw, path, method):
    """`python -m esa.calibrate` takes no picture: its parts do."""
    name, config_hash = program.identity(family.pipe, str(family.folder))
    config = package.EsaConfig(selector=method, block=BLOCK)
    with package.apply(family.pipe, config, record=True, model=name, config_hash=config_hash) as handle:
        family.theirs()
        handle.save_recording(str(raw))
    amount = {"works": (family.work, )} if method == "error" else {"budgets": (BUDGET, )}
    build_mask_file(path, [raw], warmup_frac=0.0, dense_first_layer=False, **amount)


def masks_of(family, file, amount):
    """[step, layer] masks of a file."""
    return [[file.mask(layer, step, budget=amount) for layer in range(family.layers)] for step in range(STEPS)]


def under_masks(family, masks):
    """diffusers with SDPA under the masks of a file."""
    calls = 0

    def attention(q, k, v):
        nonlocal calls
        forward, layer = divmod(calls, family.layers)
        calls += 1
        mask = masks[forward // (1 if q.shape[0] == family.branches else family.branches)][layer]
        return minis.masked_attention(q, k, v, mask, "none", family.kv_len)

    with Attention(family.layout.tokens, attention):
        want = family.theirs()
    assert calls in (calls_of(family), calls_of(family) // 2)
    return want


@pytest.mark.parametrize("method", ("entropy", "error"))
def test_masks_go_both_ways(family, dense, tmp_path, method):
    files = {name: MaskFile(path) for name, path in record(family, tmp_path, method).items()}
    amount = family.work if method == "error" else BUDGET
    masks = {name: masks_of(family, file, amount) for name, file in files.items()}
    layouts = [file.info.layout for file in files.values()]
    for layout in layouts:
        assert tuple(layout.grid_q) == family.layout.grid
        assert (layout.text_front_q, layout.text_back_q) == (family.layout.text_front, family.layout.text_back)
        assert layout.protect_first_frame == int(family.given and method != "error")
    assert files["engine"].info.config_hash == files["package"].info.config_hash != b""
    same = torch.stack([torch.from_numpy(a.blocks() == b.blocks()) for x, y in zip(*masks.values())
                        for a, b in zip(x, y)]).double().mean().item()
    assert same > 0.98, "blocks whose scores nearly agree may fall either way, no others"
    asked = {"work": family.work} if method == "error" else {"budget": BUDGET, "tail": "none"}
    for name, file in files.items():
        assert any([check_text(family, mask) for mask in sum(masks[name], [])])
        with package.apply(family.pipe, package.EsaConfig(masks=file.path, warmup_frac=0.0, dense_first_layer=False,
                                                          **asked)) as handle:
            want = family.theirs()
            stats = handle.stats()
        got = family.ours("--method", "cached", "--masks", file.path, *SPARSE,
                          *(("--work", family.work) if method == "error" else ("--budget", BUDGET, "--tail", "none")))
        assert far(got, want) <= CLOSE, (name, far(got, want))
        assert stats.density == pytest.approx(family.said["density"], abs=1e-6)
        assert stats.sparse_calls in (family.said["sparse_calls"], family.said["sparse_calls"] // family.branches)
        if method == "entropy":
            assert far(got, under_masks(family, masks[name])) <= CLOSE
        assert far(want, dense) > 100 * CLOSE, "the masks must matter, or this test shows nothing"
