# SPDX-License-Identifier: Apache-2.0
"""Few steps without guidance, as distilled models run, in every family of the engine: the warm-up is a step or two, the
work that was asked for is kept or the least one is taken, a plan measured at four steps can be spent, and `esa.apply`
does the same."""
import json

import esa as package
import pytest
from engine_minis import BLOCK, PROMPT, families, far, make, run_esa

# f32 against f32 over up to eight steps, of the largest number; 3e-6 is seen.
CLOSE = 2.5e-5
# With carry, differences are rounded to E4M3. One that lies between two numbers may be rounded to either of them, which
# are a sixteenth of it apart; 7e-5 is seen.
CLOSE_CARRIED = 5e-4
BLOCKS = ("--block", f"{BLOCK}x{BLOCK}")
WARMUP = {4: 1, 8: 2}                           # a fifth of the steps, rounded up


# Choosing blocks costs short videos more than it saves: these are long enough for the work below at four steps.
SIZES = {"cogvideox": (17, 128, 160), "hunyuan": (33, 128, 192), "wan": (17, 192, 192)}
WORK = 0.75


@pytest.fixture(scope="module", params=families("wan", "cogvideox_5b", "hunyuan"))
def family(request, tmp_path_factory):
    made = make(request.param, tmp_path_factory.mktemp(request.param) / "mini")
    made.guidance, made.branches, made.size = 1.0, 1, SIZES[request.param.split("_")[0].removesuffix("22")]
    return made


def check_work(family, less=0.02):
    """Blocks are whole, so works are a percent off. HunyuanVideo spends less: plans count its padded text."""
    realised = family.said["attention_work"]["realised"]
    assert WORK - (0.12 if family.name == "hunyuan" else less) <= realised <= WORK + 0.02
    assert family.said["sparse_calls"] > 0


def test_warmup(family):
    for steps, warmup in WARMUP.items():
        family.ours("--method", "entropy", "--budget", 0.6, *BLOCKS, steps=steps)
        said = family.said
        assert (said["steps"], said["computed_steps"], said["warmup_steps"]) == (steps, steps, warmup)
        assert said["sparse_calls"] == (steps - warmup) * (family.layers - 1)       # layer 0 is dense


@pytest.mark.parametrize(("selector", "asked"), [
    ("entropy", {"budget": 0.6}), ("error", {"work": WORK, "carry": "off"}), ("error", {"budget": 0.6}),
    ("error", {"budget": 0.6, "carry": "0,3"}), ("entropy", {"budget": 0.6, "carry": 1})], ids=str)
def test_the_package_does_the_same(family, selector, asked):
    config = package.EsaConfig(selector=selector, block=BLOCK, order="hilbert", **asked)
    with package.apply(family.pipe, config) as handle:
        want = family.theirs(steps=4)
        stats = handle.stats()
    words = [word for name, value in asked.items() for word in (f"--{name}", value)]
    got = family.ours("--method", selector, *words, *BLOCKS, "--order", "hilbert", steps=4)
    assert family.said["sparse_calls"] == stats.sparse_calls > 0
    carries = config.anchors(steps=4)
    # With carry, masks are made of inputs that differ by such roundings: a few of some ten thousand rows of means more.
    near = 1e-5 if carries else 1e-6
    assert family.said["attention_work"]["realised"] == pytest.approx(stats.work, abs=near)
    said = family.said["carry"]
    assert [said[name] for name in ("anchor_calls", "carried_calls", "bytes")] == [
        stats.anchor_calls, stats.carried_calls, stats.carry_bytes]
    # the first fifth of the steps and layer 0 are dense with entropy; the second of two transformers begins at step 2
    anchors = {1} if selector == "entropy" and carries else set(carries)
    assert said["anchors"] == sorted(anchors | ({2} if carries and family.name == "wan22" else set()))
    if "work" in asked:
        check_work(family)
    if selector == "error":
        assert family.said["warmup_steps"] == 0
    assert far(got, want) <= (CLOSE_CARRIED if carries else CLOSE), far(got, want)


@pytest.mark.parametrize("name, more, branches", (("wan", (), 2), ("cogvideox_5b", ("--dynamic-guidance", 1), 2),
                                                  ("hunyuan", (), 1)))
def test_branches_share(name, more, branches, tmp_path):
    """With guidance one branch runs dense at an anchor, and both carry its difference. HunyuanVideo has one branch."""
    made = make(name, tmp_path / "mini")
    made.ours("--method", "error", "--budget", 0.5, "--carry", 2, *BLOCKS, *more, steps=5)
    said = made.said
    carry = said["carry"]
    assert said["calls"] == 5 * branches * made.layers
    assert (len(carry["anchors"]), carry["anchor_calls"]) == (2, 2 * made.layers)
    assert carry["carried_calls"] == said["calls"] - carry["anchor_calls"]
    # at an anchor the other branch adds what was just made
    assert [carry["step_age"][step] for step in carry["anchors"]] == [0 if branches > 1 else None] * 2


@pytest.mark.slow
def test_work_and_presets(family):
    """The work that was asked for is kept. A preset that so short a run cannot reach takes the least work, and says
    so; the step cache leaves none of four steps out."""
    least = {}
    for steps in (4, 8):
        for preset in ("faithful", "fast"):
            family.ours("--preset", preset, "--carry", "off", "--cache", "auto", *BLOCKS, steps=steps)
            said = family.said
            work = said["attention_work"]
            assert said["sparse_calls"] > 0 and (steps > 4 or said["computed_steps"] == 4)
            least[steps, preset] = work["realised"]
            assert work["realised"] <= max(work["asked"], 0.72) + 0.02, "the least that four steps can take is 0.72"
        for carry in ("off", 1):
            family.ours("--method", "error", "--work", WORK, "--carry", carry, *BLOCKS, steps=steps)
            check_work(family)
    assert least[8, "fast"] <= least[8, "faithful"] + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("carry", ("off", 1))
def test_plans(family, tmp_path, carry):
    """A plan is measured at four steps and spent at four and at eight. With carry, one of the eight cells that these
    models have in four steps may be what is left over, an eighth of the work."""
    plan, prompts = tmp_path / "plan", tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\na blue box falls\n")
    done = run_esa("calibrate", *family.options(4), "--prompts", prompts, "--num-prompts", 1, "--held-out", 1, "--plan",
                   plan, "--carry", carry, "--json", tmp_path / "plan.json", *BLOCKS)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["anchors"] == (carry == 1)
    for steps in (4, 8):
        family.ours("--plan", plan, "--work", WORK, "--carry", carry, *BLOCKS, steps=steps)
        check_work(family, 0.125 if carry == 1 else 0.02)
