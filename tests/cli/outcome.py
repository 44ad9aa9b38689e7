# SPDX-License-Identifier: Apache-2.0
"""What a command has left on disk, for the checks that kill it or let its calls fail: contents of files and folders,
what two runs share, and names that may lie there after a kill. Standard library only."""
import json
import os
import re
import shutil

OLDER = b"older\n"
# <name>.XXXXXX (text), <name>.<hex>.tmp (tensors, videos, folders of pictures), esa-report-XXXXXX (a video being
# converted)
TEMPORARY = re.compile(r"(\.[A-Za-z0-9]{6}|\.[0-9a-f]{8}\.tmp|esa-report-[A-Za-z0-9]{6})$")


def contents(path):
    """The bytes of a file, or of every file of a folder; None: nothing is there."""
    if os.path.isdir(path):
        return {name: contents(os.path.join(path, name)) for name in sorted(os.listdir(path))}
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def shape(value):
    """Structure and texts of JSON."""
    if isinstance(value, dict):
        return {key: shape(v) for key, v in value.items()}
    if isinstance(value, list):
        return [shape(v) for v in value]
    return isinstance(value, str) and value or type(value).__name__.replace("float", "int")


def without_times(data):
    """What two runs of one command share: JSON keeps its structure and texts, a table its lines and first columns."""
    if data is None or isinstance(data, dict) or data[:1] not in b"{[" and not data.startswith(b"model,"):
        return data
    if data.startswith(b"model,"):
        return [line.split(",")[:7] for line in data.decode().splitlines()], data.endswith(b"\n")
    return shape(json.loads(data))


def fill(folder, old):
    """Empties a folder and puts these contents there: name -> bytes, a dictionary for a folder, None for nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for name, data in old.items():
        path = os.path.join(folder, name)
        if isinstance(data, dict):
            fill(path, data)
        elif data is not None:
            with open(path, "wb") as file:
                file.write(data)
