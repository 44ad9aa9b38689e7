# SPDX-License-Identifier: Apache-2.0
"""Hosts from PyPI, unpacked without what they depend on. $ESA_HOST_WHEELS may name a folder with their wheels."""
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

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
            kept = (".py", ".txt", "METADATA") + ((".so", ) if wheel.name.startswith("msgspec") else ())
            archive.extractall(target, [n for n in archive.namelist() if n.endswith(kept)])
    return target


def write_entry_points(folder):
    """Our entry points as pip would write them, taken from pyproject.toml."""
    info = folder / "esa_attention-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: esa-attention\nVersion: 0\n")
    text = (ROOT / "pyproject.toml").read_text()
    groups = re.findall(r'^\[project\.entry-points\."(.+)"\]\n((?:\w+ = ".+"\n)+)', text, re.M)
    assert len(groups) == 2
    lines = (f"[{group}]\n" + names.replace('"', "") for group, names in groups)
    (info / "entry_points.txt").write_text("\n".join(lines))
