# SPDX-License-Identifier: Apache-2.0
"""JSON files against docs/schemas/<name>.schema.json.

    import schemas
    schemas.check("speed.json", "experiment-speed")     raises schemas.Wrong, which names every fault and its place"""
import functools
import json
import os

import packages

packages.need("requirements-cli.txt", "jsonschema")
import jsonschema  # noqa: E402
import referencing  # noqa: E402

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "schemas")


class Wrong(AssertionError):
    """A file that does not follow its schema."""


def load_strict(path):
    """Strict JSON: refuses NaN and infinities, which Python would take, and duplicate keys."""
    def constant(name):
        raise ValueError(f"{name} is not JSON")

    def pairs(entries):
        keys = [key for key, _ in entries]
        if len(set(keys)) != len(keys):
            raise ValueError(f"a duplicate key in {keys}")
        return dict(entries)
    with open(path, encoding="utf-8") as file:
        return json.load(file, parse_constant=constant, object_pairs_hook=pairs)


def names():
    return sorted(name[:-len(".schema.json")] for name in os.listdir(FOLDER) if name.endswith(".schema.json"))


def schema(name):
    return load_strict(os.path.join(FOLDER, name + ".schema.json"))


@functools.cache
def validator(name):
    """Schemas refer to one another by file name."""
    files = referencing.Registry().with_resources(
        (other + ".schema.json", referencing.Resource.from_contents(schema(other))) for other in names())
    return jsonschema.Draft202012Validator(schema(name), registry=files)


def check(path, name):
    """Raises Wrong unless the file is strict JSON of this schema; returns its contents."""
    try:
        value = load_strict(path)
    except ValueError as why:
        raise Wrong(f"{path}: {why}") from None
    found = [f"{fault.json_path}: {fault.message[:200]}" for fault in validator(name).iter_errors(value)]
    if found:
        raise Wrong(f"{path} does not follow docs/schemas/{name}.schema.json:\n  " + "\n  ".join(found[:20]))
    return value
