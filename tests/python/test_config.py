# SPDX-License-Identifier: Apache-2.0
"""EsaConfig: presets, what it says, what it refuses; Layout."""
import dataclasses

import numpy
import pytest
from esa import EsaConfig, Layout, Session, select
from esa.core.config import protects_first_frame
from esa.core.layout import order
from esa.core.structs import size


def test_presets_are_mindie_sds():
    assert EsaConfig.image() == EsaConfig(selector="rf_v2", sparsity=0.6)
    assert EsaConfig.video() == EsaConfig(selector="rf_v2", sparsity=0.8)
    assert EsaConfig.video(tail="none", budget=0.3) == EsaConfig(selector="rf_v2", budget=0.3, tail="none")
    assert EsaConfig(selector="rf_v3").selector == "rf_v2"


def test_defaults():
    c = EsaConfig()
    assert (c.selector, c.spends_work, c.tail, c.warmup_frac, c.dense_first_layer, c.refresh_every, c.carry,
            c.strict) == ("error", True, "levels", 0.0, False, "early", "auto", True)
    c = EsaConfig(selector="entropy")
    assert (c.work_for(50), c.density, c.tail, c.warmup_frac, c.dense_first_layer, c.refresh_every, c.carry,
            c.strict) == (0, 0.5, "pooled", 0.2, True, 1, "off", True)
    for words in ({"budget": 0.3}, {"sparsity": 0.8}, {"masks": "m"}, {"masks": "m", "work": 0.44}, {"mode": "compat"},
                  {"kernel": "fa4", "tail": "none"}):
        assert EsaConfig(**words).selector == "entropy"
    assert EsaConfig().replace(budget=0.3) == EsaConfig(selector="error", budget=0.3)
    c = EsaConfig()
    assert c.blocks == (0, 0) and EsaConfig(block=64).blocks == (64, 64) and EsaConfig(block=(256, 128)).blocks == (256,
                                                                                                                    128)
    assert repr(c) == "EsaConfig()" and eval(repr(EsaConfig.video(masks="m"))) == EsaConfig.video(masks="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.budget = 0.3
    assert hash(c) == hash(EsaConfig())


@pytest.mark.parametrize(("words", "message"), [
    ({"selector": "magic"},
     "selector must be one of 'error', 'entropy', 'rf_v2', 'ada_bsa', 'random', 'full', 'dense', not 'magic'"),
    ({"budget": 0.5, "sparsity": 0.5}, "budget (0.5) and sparsity (0.5) say the same thing"),
    ({"budget": -0.1}, "budget must lie between 0 and 1"),
    ({"sparsity": "0.5"}, "sparsity must lie between 0 and 1"), ({"budget": True}, "budget must lie between 0 and 1"),
    ({"warmup_frac": 2}, "warmup_frac must lie between 0 and 1"),
    ({"block": 100}, "block must be one or two multiples of 16"),
    ({"block": (128, 128, 128)}, "block must be one or two"),
    ({"order": "spiral"}, "order must be one of"),
    ({"window": (1, 2, 3)}, "window belongs to"),
    ({"order": "adaptive", "selector": "entropy"}, "order 'adaptive' is for selector 'error', not for 'entropy'"),
    ({"selector": "error", "tail": "centroid"}, "selector 'error' takes tail 'none', 'pooled' or 'levels'"),
    ({"order": "tile3d", "window": (1, 2)}, "window must be three"),
    ({"tail": "long"}, "tail must be"),
    ({"exact_rows": 17}, "exact_rows must be an integer of 0 to 16, not 17"),
    ({"exact_rows": 1.5}, "exact_rows must be"),
    ({"groups": 4}, "groups must be two of 1, 2, 4, 8, 16 (queries and keys of a mean), not 4"),
    ({"groups": (8,)}, "groups must be two"), ({"groups": (8, 3)}, "groups must be two"),
    ({"groups": "8x4"}, "groups must be two"), ({"groups": (8, 4.0)}, "groups must be two"),
    ({"groups": (8, 4), "selector": "entropy"}, "groups is for scores of selector 'error', not for 'entropy'"),
    ({"groups": (8, 4), "masks": "m"}, "groups is for scores of selector 'error', not for masks of a file"),
    ({"mode": "strange"}, "mode must be"),
    ({"kernel": "fa5"}, "kernel must be one of 'auto', 'fa4'"),
    ({"refresh_every": -1}, "refresh_every must be 'early' or an integer of at least 0, not -1"),
    ({"order_every": "late"}, "order_every must be 'early' or an integer of at least 0, not 'late'"),
    ({"refresh_every": True}, "refresh_every must be 'early' or"), ({"order_every": 1.5}, "order_every must be"),
    ({"samples": 0}, "samples must be"),
    ({"min_tokens": -1}, "min_tokens must be"),
    ({"step_map": "maybe"}, "step_map must be"),
    ({"cdf_threshold": float("nan")}, "cdf_threshold must be a number"),
    # Wrong types: the message names the setting, whatever Python would have said further down.
    ({"selector": ["entropy"]}, "selector must be one of"),
    ({"order": ["tile"]}, "order must be one of"),
    ({"warmup_frac": "0.2"}, "warmup_frac must lie"),
    ({"dense_layers": 3}, "dense_layers must be a list of layer numbers, not 3"),
    ({"dense_layers": "12"}, "dense_layers must be a list"),
    ({"dense_layers": (1.5,)}, "dense_layers must be a list"),
    ({"block": "128"}, "between 16 and 256, not '128'"),
    ({"block": 128.0}, "block must be one"),
    ({"block": True}, "block must be one"),
    ({"order": "tile3d", "window": 5}, "window must be three numbers"),
    ({"samples": True}, "samples must be"),
    ({"dense_first_layer": "False"}, "dense_first_layer must be True or False, not 'False'"),
    ({"strict": None}, "strict must be True or False"),
    ({"protect_first_frame": 2}, "protect_first_frame must be True or False"),
    ({"masks": 5}, "masks must be the path of a mask file, not 5"),
    *(({"carry": bad}, "carry must be 'auto', 'off', a number of anchors, or their steps, ascending, not ")
      for bad in ("yes", "", "-1", "1.5", "3,", 0, -1, 1.5, True, [], [1, 1], [2, 1], [-1], [0.5], ["0"], "5,1", b"6")),
    ({"carry": 6, "selector": "dense"}, "selector 'dense' leaves nothing out: say carry='off'"),
    ({"carry": 6, "refresh_every": 2}, "refresh_every (2) has no meaning: leave it out, or say carry='off'"),
    ({"carry": "auto", "order_every": 0}, "order_every (0) has no meaning"),
    ({"carry_format": "int8"}, "carry_format must be one of 'e4m3', 'bf16', not 'int8'"),
    *(({"carry_memory": bad}, "carry_memory must be a number of bytes, or a size such as '16G' or '800M', not ")
      for bad in (-1, "16 GB", "G", 1.5, True, "1e3"))])
def test_refused(words, message):
    with pytest.raises(ValueError) as caught:
        EsaConfig(**words)
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    c = EsaConfig(budget=numpy.float32(0.5), samples=numpy.int64(2), dense_layers=numpy.arange(2),
                  block=numpy.int32(64))
    assert c == EsaConfig(budget=0.5, samples=2, dense_layers=(0, 1), block=64) and type(c.budget) is float


def test_typos_are_named():
    for make in (EsaConfig, EsaConfig.video, EsaConfig().replace):
        with pytest.raises(TypeError, match="unexpected keyword argument 'budgt'"):
            make(budgt=0.3)


def test_configs_that_are_none():
    x = numpy.zeros((1, 1, 64, 16), numpy.float32)
    for use in (lambda c: select(x, x, c), lambda c: Session(c, layers=1, steps=1)):
        with pytest.raises(TypeError, match="config must be an EsaConfig, not str"):
            use("entropy")
        with pytest.raises(TypeError, match="not the class itself"):
            use(EsaConfig)


def test_one_call_takes_no_work():
    x = numpy.zeros((1, 1, 64, 16), numpy.float32)
    for words in ({"preset": "fast"}, {"work": 0.3}, {"masks": "masks.safetensors"}):
        with pytest.raises(ValueError, match=f"{next(iter(words))} is for a whole video .*esa.select takes a budget"):
            select(x, x, EsaConfig(selector="entropy", **words))


def test_layouts():
    assert Layout(grid=(2, 3, 4), text_front=5).tokens == 29 and Layout().tokens == 0
    for name in ("raster", "tile", "tile3d", "hilbert"):
        perm = order(Layout(grid=(3, 9, 10), text_front=4, text_back=6, order=name), 280)
        assert sorted(perm) == list(range(280)) and list(perm[:4]) == [0, 1, 2, 3] and list(perm[-6:]) == list(
            range(274, 280))
    with pytest.raises(ValueError, match="grid must be three numbers"):
        Layout(grid=(2, 3)).struct()
    for grid in (5, "2x3", (2.5, 3, 4)):
        with pytest.raises(ValueError, match="grid must be three numbers t, h, w of at least 1, not "):
            Layout(grid=grid).struct()
    with pytest.raises(ValueError, match="text_front must be an integer"):
        Layout(text_front=-1).struct()
    with pytest.raises(ValueError, match="does not make Nq = 7 tokens"):
        order(Layout(grid=(2, 2, 2), order="raster"), 7)


def test_selector_decides():
    """What a selector recommends follows the selector, unless it was chosen."""
    plain, error = EsaConfig(selector="entropy"), EsaConfig(selector="error")
    assert (plain.warmup_frac, plain.dense_first_layer, plain.tail, plain.refresh_every) == (0.2, True, "pooled", 1)
    assert (error.warmup_frac, error.dense_first_layer, error.tail) == (0.0, False, "levels")
    assert error.refresh_every == error.order_every == "early" and error.share_branches
    assert plain.exact_rows is error.exact_rows is None         # the session knows
    assert EsaConfig(selector="entropy", refresh_every="early").replace(selector="error") == error.replace(carry="off")
    assert repr(EsaConfig(budget=0.5, refresh_every="early")) == "EsaConfig(budget=0.5, refresh_every='early')"
    assert plain.replace(selector="error") == error
    assert error.replace(selector="entropy") == plain
    assert EsaConfig(selector="entropy", warmup_frac=0.1).replace(selector="error").warmup_frac == 0.1
    assert repr(error) == "EsaConfig()" and repr(plain) == "EsaConfig(selector='entropy')"
    for words in ({}, {"budget": 0.3}, {"masks": "m"}, {"selector": "error", "budget": 0.3}, {"mode": "compat"}):
        assert eval(repr(EsaConfig(**words))) == EsaConfig(**words)


def test_carry():
    """What the settings say, and what follows them."""
    assert EsaConfig(carry="6") == EsaConfig(carry=6) == EsaConfig(carry=numpy.int64(6)) != EsaConfig(carry=[6])
    assert EsaConfig(carry="0, 6,12") == EsaConfig(carry=[0, 6, 12]) == EsaConfig(carry=numpy.array([0, 6, 12]))
    assert repr(EsaConfig(carry=(0, 6))) == "EsaConfig(carry=(0, 6))" and hash(EsaConfig(carry=[0, 6]))
    # a schedule of one's own turns carry off, unless both are asked for, which is an error
    for words in ({"refresh_every": 2}, {"order_every": 0}, {"refresh_every": "early"}):
        assert EsaConfig(**words).carry == EsaConfig().replace(**words).carry == "off"
        assert eval(repr(EsaConfig(**words))) == EsaConfig(**words)
    with pytest.raises(ValueError, match="refresh_every .2. has no meaning"):
        EsaConfig(carry=6).replace(refresh_every=2)
    with pytest.raises(ValueError, match="refresh_every .2. has no meaning"):
        EsaConfig(refresh_every=2).replace(carry="auto")
    assert EsaConfig(carry=6).replace(refresh_every=2, carry="off").refresh_every == 2
    # selectors: only error carries by itself, masks of a file never do
    assert EsaConfig(carry=6).replace(selector="entropy").carry == EsaConfig(masks="m", carry=6).carry == 6
    for words in ({"selector": "entropy"}, {"selector": "rf_v2"}, {"budget": 0.3}, {"masks": "m"}, {"mode": "compat"},
                  {"masks": "m", "work": 0.3}, {"masks": "m", "selector": "error"}, {"selector": "dense"}):
        assert EsaConfig(**words).carry == "off", words
    assert EsaConfig().replace(masks="m").carry == "off" and EsaConfig.video().replace(selector="error").carry == "auto"
    assert EsaConfig(carry_memory=0).carry_memory == 0
    assert [size(x, "x") for x in (7, "7", "1.5K", "800M", "16G")] == [7, 7, 1536, 800 << 20, 16 << 30]


def test_anchors():
    """The library places them."""
    for steps in (1, 3):
        assert EsaConfig().anchors(steps) == ()
    six = EsaConfig(carry=6).anchors(50)
    assert len(six) == 6 and six[0] == 0 and list(six) == sorted(set(six)) and six[-1] < 50
    assert EsaConfig().anchors(50) and EsaConfig(carry=[3, 9]).anchors(50) == (3, 9)
    assert EsaConfig(carry="off").anchors(50) == EsaConfig(selector="entropy").anchors(50) == ()


def test_the_library_knows_which_frame_is_protected():
    for mode, selector, alone, given in (("online", "rf_v2", True, True), ("online", "entropy", False, True),
                                         ("online", "ada_bsa", False, True), ("online", "error", False, False),
                                         ("record", "error", False, False), ("record", "entropy", False, True),
                                         ("record", "rf_v2", False, True), ("dense", "dense", False, True)):
        assert protects_first_frame(mode, selector) is alone, (mode, selector)
        assert protects_first_frame(mode, selector, given=True) is given, (mode, selector)


def test_groups():
    """Groups reach the selector: the default by name changes nothing, finer ones change the choice."""
    config = EsaConfig(selector="error", budget=0.3, block=64)
    assert config.groups is None and EsaConfig(groups=[4, 2]).groups == (4, 2)
    assert repr(EsaConfig(groups=(4, 2))) == "EsaConfig(groups=(4, 2))"
    q, k, v = numpy.random.default_rng(5).standard_normal((3, 1, 2, 300, 16), dtype=numpy.float32)
    levels = {g: select(q, k, config.replace(groups=g), v=v).levels() for g in (None, (8, 4), (1, 1))}
    assert (levels[None] == levels[8, 4]).all() and (levels[None] != levels[1, 1]).any()
    with pytest.raises(ValueError, match="group_k is 16, but a fine mean stands for 16 tokens"):
        select(q, k, config.replace(groups=(16, 16)), v=v)


def test_work():
    """One amount replaces another; presets are the library's."""
    assert EsaConfig(work=0.44).selector == "error" and EsaConfig(work=0.44, selector="entropy").selector == "entropy"
    presets = [EsaConfig(preset=name) for name in ("faithful", "balanced", "fast")]
    for off in ({"carry": "off"}, {"refresh_every": "early"}, {"selector": "entropy"}):
        assert [c.replace(**off).work_for(steps=50) for c in presets] == [0.57, 0.44, 0.3]
    works = [[c.work_for(steps=steps) for c in presets] for steps in (1, 8, 50)]
    assert works[0] == [0.57, 0.44, 0.3]                        # too short to carry
    assert all(few > many for few, many in zip(works[1], works[2]))
    assert [EsaConfig(preset=c.preset, carry=6).work_for(steps=50) for c in presets] == works[2]
    assert EsaConfig(work=0.37).work_for(steps=1) == EsaConfig(work=0.37).work_for(steps=50) == 0.37
    assert EsaConfig(work=0.44).replace(preset="fast") == EsaConfig(preset="fast")
    assert EsaConfig(budget=0.3).replace(work=0.5).budget is None
    assert EsaConfig(work=0.5).spends_work and EsaConfig().spends_work
    assert EsaConfig().work_for(steps=50) == EsaConfig(preset="balanced").work_for(steps=50)
    assert not EsaConfig(budget=0.5).spends_work and not EsaConfig(selector="entropy").spends_work
    assert repr(EsaConfig(work=0.5)) == "EsaConfig(work=0.5)"
