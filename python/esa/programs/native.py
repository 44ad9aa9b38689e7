# SPDX-License-Identifier: Apache-2.0
"""The native `esa` command, as the programs call it: metrics, conversion of videos and the results of experiments are
its work. It lies beside libesa in a build folder and in esa/bin of the installed package."""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from ..core.context import get_num_threads
from ..core.library import load, package_folders, tree_folders
from .program import Stop


def find_command() -> pathlib.Path:
    """The file of the command; beside the opened libesa first, because both must come from one build."""
    library = load().path.parent
    folders = [library, library.parent / "bin", *(folder / "bin" for folder in package_folders()), *tree_folders()]
    places = [folder / "esa" for folder in folders]
    for place in places:
        if place.is_file():
            return place
    raise ImportError(f"the esa command was not found (looked at {', '.join(map(str, places))}): reinstall the "
                      "package, or build it (make)")


def call(*words: str) -> int:
    """Runs `esa WORDS` on this terminal and returns its exit status. Ctrl-C reaches the command as well, which then
    ends by itself."""
    child = subprocess.Popen([str(find_command()), *words])
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


def run(*words: str) -> None:
    """Runs `esa WORDS`; a failure ends this program with the same status. The command has said why."""
    status = call(*words)
    if status:
        raise Stop("", status if status > 0 else 1)


def about_machine() -> dict[str, Any]:
    """"machine" and "commit" as the command writes them into its JSON files (docs/schemas), for those written here."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "doctor.json")
        done = subprocess.run([str(find_command()), "doctor", "--json", str(path)], capture_output=True, text=True)
        if not path.exists():
            raise Stop(f"`esa doctor` failed: {done.stderr.strip()}")
        found = json.loads(path.read_text(encoding="utf-8"))
    return {"machine": {**found["machine"], "threads": get_num_threads()}, "commit": found["commit"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """The `esa` command of an installed package."""
    return call(*(sys.argv[1:] if arguments is None else arguments))
