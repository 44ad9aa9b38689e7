# SPDX-License-Identifier: Apache-2.0
"""ruff and mypy are clean (settings in pyproject.toml); every file says its licence."""
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", [("ruff", "check"), ("mypy",)], ids=lambda t: t[0])
def test_clean(tool):
    done = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_layout_of_every_file():
    """clang-format, line lengths, ends of lines."""
    done = subprocess.run([sys.executable, ROOT / "tests/tree/check_style.py", ROOT], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_says_its_licence():
    files = [
        *ROOT.glob("python/**/*.py"), *ROOT.glob("tests/python/*.py"), *ROOT.glob("scripts/*.py"),
        *ROOT.glob("compat/**/*.py")
    ]
    assert len(files) > 20
    missing = [
        str(f.relative_to(ROOT)) for f in files
        if "SPDX-License-Identifier: Apache-2.0" not in f.read_text().split("\n\n")[0][:200]
    ]
    assert not missing


def test_every_public_name_is_documented():
    import inspect

    import esa
    for name in esa.__all__:
        if name == "__version__":
            continue
        value = getattr(esa, name)
        assert inspect.getdoc(value), name
        assert all(
            inspect.getdoc(m) for n, m in inspect.getmembers(value, inspect.isfunction)
            if inspect.isclass(value) and not n.startswith("_")), name
