#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is delivered says what it holds of others: check_notices.py SOURCE FOLDER.

Somewhere below FOLDER lie LICENSE, THIRD-PARTY.txt and esa.cdx.json, once each. Every linked file of esa there is
compared with them: each library that it needs or opens is listed as linked dynamically; jansson and the runtimes of
CUDA and C++, where a file needs no library for them, are listed as linked statically, with their notices. Nothing else
is listed, and every licence is that of licenses/components.json."""
import json
import pathlib
import re
import subprocess
import sys

from check_elf import OWN, linked_files


def one(folder, name):
    found = [p for p in folder.rglob(name) if p.is_file()]
    if len(found) != 1:
        sys.exit(f"check_notices: expected one {name} below {folder}, found {found}")
    return found[0]


def expected(files, known):
    """{(component, how)} by the linked files themselves, and what they need that no component explains."""
    wanted, strange = set(), []
    for path in files:
        text = subprocess.run(["readelf", "-W", "-d", path], capture_output=True, text=True, check=True).stdout
        here = set()
        for soname in re.findall(r"\(NEEDED\).*\[(.*)\]", text):
            if OWN.fullmatch(soname):
                continue
            match = [c["id"] for c in known if c["soname"] and re.match(c["soname"], soname)]
            here |= set(match)
            strange += [f"{path.name} needs {soname}, which licenses/components.json does not list"] * (not match)
        wanted |= {(name, "dynamic") for name in here}
        data = path.read_bytes()
        marks = {"jansson": b"unable to decode byte 0x%x", "cudart": b"cudaErrorInsufficientDriver"}
        for name, mark in marks.items():        # texts that the code of these libraries carries
            if mark in data and name not in here:
                wanted.add((name, "static"))
        for name, mark in {"libmicrohttpd": b"libmicrohttpd.so.12"}.items():    # what is opened at run time
            if mark in data:
                wanted.add((name, "dynamic"))
    return wanted, strange


def main(source, folder):
    known = json.loads((source / "licenses" / "components.json").read_text())
    by_name = {c["name"]: c for c in known}
    errors = []
    if one(folder, "LICENSE").read_bytes() != (source / "LICENSE").read_bytes():
        errors.append("LICENSE is not that of the source")
    text = one(folder, "THIRD-PARTY.txt").read_text()
    bill = json.loads(one(folder, "esa.cdx.json").read_text())
    if (bill["bomFormat"], bill["specVersion"]) != ("CycloneDX", "1.5"):
        errors.append(f"esa.cdx.json is {bill['bomFormat']} {bill['specVersion']}")
    files = [p for p in linked_files(folder) if OWN.fullmatch(p.name)]
    if len(files) < 2:
        errors.append(f"only these files of esa were found: {files}")
    wanted, strange = expected(files, known)
    errors += strange
    listed = set()
    for part in bill["components"]:
        about = {p["name"]: p["value"] for p in part["properties"]}
        component = by_name.get(part["name"])
        if component is None:
            errors.append(f"esa.cdx.json lists {part['name']}, which licenses/components.json does not")
            continue
        listed.add((component["id"], about["esa:linked"]))
        if component["licence"] not in json.dumps(part["licenses"]):
            errors.append(f"{part['name']}: {part['licenses']}, expected {component['licence']}")
        title = f"{part['name']} {part.get('version', '')}".strip()
        if title not in text:
            errors.append(f"THIRD-PARTY.txt does not name {title}")
        unknown = set(about["esa:files"].split(", ")) - {p.name for p in linked_files(folder)}
        linked = {p.name.split(".so")[0] for p in files}
        errors += [f"{title}: there is no {name}" for name in unknown if name.split(".so")[0] not in linked]
        if about["esa:linked"] == "static":
            if not component["notice"] or (source / "licenses" / component["notice"]).read_text() not in text:
                errors.append(f"THIRD-PARTY.txt lacks the notice of {title}")
    # The runtime of the compiler is in every file, and its code has no mark.
    runtimes = {(name, "static") for name in ("libgcc", "zig", "llvm", "libstdc++")}
    if len(listed & {("libgcc", "static"), ("zig", "static")}) != 1:
        errors.append("expected one compiler runtime, of GCC or of Zig")
    if listed - runtimes != wanted:
        errors.append(f"listed but not found in the files: {sorted(listed - runtimes - wanted)}; "
                      f"found but not listed: {sorted(wanted - listed)}")
    for error in errors:
        print(f"check_notices: {error}", file=sys.stderr)
    print(f"{len(listed)} components in {len(files)} files")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
