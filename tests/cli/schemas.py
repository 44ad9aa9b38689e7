# SPDX-License-Identifier: Apache-2.0
"""JSON files against docs/schemas/<name>.schema.json.

    import schemas
    schemas.check("speed.json", "experiment-speed")     raises schemas.Wrong with every fault and where it is

The keywords of JSON Schema (2020-12) that our schemas use, and no others: a schema with an unknown keyword is refused,
so that nothing in it is silently not checked. Needs no packages."""
import json
import math
import os
import re

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "schemas")
REMARKS = {"$schema", "$id", "title", "description", "$defs"}
KEYWORDS = {
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
    "minimum", "maximum", "exclusiveMinimum", "pattern", "minLength", "$ref", "anyOf"
}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


class Wrong(AssertionError):
    """A file that is not as its schema says."""


def load_strict(path):
    """Strict JSON: NaN and infinities, which Python would take, and keys that stand twice are refused."""
    def constant(name):
        raise ValueError(f"{name} is no JSON")

    def pairs(entries):
        keys = [key for key, _ in entries]
        if len(set(keys)) != len(keys):
            raise ValueError(f"a key stands twice in {keys}")
        return dict(entries)
    with open(path, encoding="utf-8") as file:
        return json.load(file, parse_constant=constant, object_pairs_hook=pairs)


def names():
    return sorted(name[:-len(".schema.json")] for name in os.listdir(FOLDER) if name.endswith(".schema.json"))


def schema(name):
    return load_strict(os.path.join(FOLDER, name + ".schema.json"))


def is_type(value, name):
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if name == "integer":
        return is_type(value, "number") and value == int(value)
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def resolve(reference, root):
    """'#/$defs/x' of this document, or 'other.schema.json#/$defs/x'; the schema and the document it stands in."""
    file, _, pointer = reference.partition("#")
    if file:
        root = load_strict(os.path.join(FOLDER, file))
    found = root
    for part in pointer.strip("/").split("/"):
        found = found[part] if part else found
    return found, root


def faults(value, rule, root, where="$"):
    """Every fault of value under rule, as sentences."""
    if rule is True:
        return []
    unknown = set(rule) - KEYWORDS - REMARKS
    if unknown:
        raise ValueError(f"{where}: the schema uses {sorted(unknown)}, which this validator does not know")
    if "$ref" in rule:
        target, document = resolve(rule["$ref"], root)
        return faults(value, target, document, where)
    out = []
    if "anyOf" in rule:
        tried = [faults(value, option, root, where) for option in rule["anyOf"]]
        if all(tried):
            out.append(f"{where}: fits none of {len(tried)} forms; the nearest: {min(tried, key=len)[0]}")
    if "type" in rule:
        allowed = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        if not any(is_type(value, name) for name in allowed):
            return out + [f"{where}: {json.dumps(value)[:60]} is no {' or '.join(allowed)}"]
    if "enum" in rule and value not in rule["enum"]:
        out.append(f"{where}: {json.dumps(value)[:60]} is none of {rule['enum']}")
    if "const" in rule and value != rule["const"]:
        out.append(f"{where}: {json.dumps(value)[:60]} is not {rule['const']}")
    if is_type(value, "number"):
        for keyword, bad in (("minimum", lambda limit: value < limit), ("maximum", lambda limit: value > limit),
                             ("exclusiveMinimum", lambda limit: value <= limit)):
            if keyword in rule and bad(rule[keyword]):
                out.append(f"{where}: {value} breaks {keyword} {rule[keyword]}")
    if isinstance(value, str):
        if "pattern" in rule and not re.search(rule["pattern"], value):
            out.append(f"{where}: '{value}' does not match {rule['pattern']}")
        if len(value) < rule.get("minLength", 0):
            out.append(f"{where}: '{value}' is too short")
    if isinstance(value, list):
        if not rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", math.inf):
            out.append(
                f"{where}: {len(value)} entries, expected {rule.get('minItems', 0)} .. {rule.get('maxItems', 'any number')}"
            )
        for i, entry in enumerate(value):
            out += faults(entry, rule.get("items", True), root, f"{where}[{i}]")
    if isinstance(value, dict):
        known = rule.get("properties", {})
        out += [f"{where}: '{key}' is missing" for key in rule.get("required", []) if key not in value]
        for key, entry in value.items():
            if key in known:
                out += faults(entry, known[key], root, f"{where}.{key}")
            elif rule.get("additionalProperties", True) is False:
                out.append(f"{where}: '{key}' is not documented")
            else:
                out += faults(entry, rule.get("additionalProperties", True), root, f"{where}.{key}")
    return out


def check(path, name):
    """Raises Wrong unless the file is strict JSON of this schema; returns its contents."""
    try:
        value = load_strict(path)
    except ValueError as why:
        raise Wrong(f"{path}: {why}") from None
    root = schema(name)
    found = faults(value, root, root)
    if found:
        raise Wrong(f"{path} is not as docs/schemas/{name}.schema.json says:\n  " + "\n  ".join(found[:20]))
    return value
