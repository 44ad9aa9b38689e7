# SPDX-License-Identifier: Apache-2.0
"""The examples in docs/python.md, in docs/tutorial.md and in the package's docstrings, run."""
import doctest
import importlib
import pathlib
import pkgutil
import re

import esa
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Their hosts import these, and are not installed here (test_hosts.py).
HOSTED = ("esa.hosts.lightx2v", "esa.hosts.lightx2v_h3", "esa.hosts.sglang", "esa.hosts.vllm_omni")
MODULES = [m.name for m in pkgutil.walk_packages(esa.__path__, "esa.") if m.name not in HOSTED]


def test_the_guide_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert len(blocks) >= 8
    names = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "<esa.Mask 1x8x16x16 of 128x128 blocks, rf_v2, density" in printed
    assert "q has 8 heads and k has 3: query heads must be a multiple of key heads" in printed


def test_the_tutorial_compares_with_dense(capsys):
    """The block of docs/tutorial.md, with the model where it is and fewer frames and steps."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    block, = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for old, new in {"esa/models/wan-tiny": str(ROOT / "models" / "wan-tiny"), "num_frames=17": "num_frames=5",
                     "num_inference_steps=8": "num_inference_steps=2"}.items():
        assert old in block
        block = block.replace(old, new)
    exec(compile(block, "docs/tutorial.md", "exec"), {})
    printed = re.findall(r"(\w+): work (0\.\d\d), PSNR (\d+\.\d) dB", capsys.readouterr().out)
    assert [preset for preset, _, _ in printed] == ["faithful", "balanced", "fast"]
    works = [float(work) for _, work, _ in printed]
    assert works == sorted(works, reverse=True) and works[-1] < works[0]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_docstrings_have_examples():
    """The finder finds them: a count that would not go down unnoticed."""
    finder = doctest.DocTestFinder()
    examples = {name: sum(len(t.examples) for t in finder.find(importlib.import_module(name))) for name in MODULES}
    for name in ("config", "layout", "mask", "session", "functional", "sparse"):
        assert examples[f"esa.core.{name}"] > 0, name


def test_first_example_is_the_readme_s():
    """What help(esa) shows first is the call that the README recommends."""
    import esa
    first = next(line for line in esa.__doc__.splitlines() if line.startswith("    esa."))
    call = first.split("#")[0].strip()
    readme = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text()
    assert call == "esa.apply(pipe)" and f"\n{call} " in readme
