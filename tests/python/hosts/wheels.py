# SPDX-License-Identifier: Apache-2.0
"""Hosts from PyPI, unpacked without what they depend on. $ESA_HOST_WHEELS may name a folder with their wheels."""
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

try:
    import tomllib
except ImportError:                     # Python 3.10
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parents[3]


def unpacked(folder, name, *requirements, platform=()):
    """A folder with the unpacked wheels; skips the test if they cannot be fetched."""
    given = os.environ.get("ESA_HOST_WHEELS")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-d", str(folder),
               *(("--no-index", "--find-links", given) if given else ()), *platform, *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(requirements)} could not be fetched: {done.stderr.strip()[-200:]}")
    target = folder / name
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [n for n in archive.namelist() if n.endswith((".py", ".txt", "METADATA"))])
    return target


def write_entry_points(folder):
    """Our entry points as pip would write them, taken from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "esa_attention-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: esa-attention\nVersion: 0\n")
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text("\n".join(
        f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in names.items()) for group, names in groups))
