#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which room of the tree may include which, and which rooms may ask for the device.

    check_rooms.py SOURCE            checks the tree, then plants violations in a copy and expects each to be found

ROOMS lists the rooms from bottom to top. A room includes itself, public headers and the rooms named beside it, which
must stand above it in the list: so the table cannot contain a cycle. The same permission is needed to use a function, a
type or a variable that a header of another room declares, whichever header brings it. `struct name` needs none, for it
tells nothing about the struct. The table is exact: a permission that nothing uses is an error, too. Between files there
is no cycle either."""
import functools
import pathlib
import re
import shutil
import sys
import tempfile

# Room, and the rooms that it includes or uses. Every room of src/ may also include src/base. "src/cuda" is
# cuda/cuda.h, the plugin's interface; the plugin itself has four rooms.
ROOMS = [
    ("src/base", ""),
    ("src/rules", ""),
    ("src/cpu", "src/rules"),
    ("src/cuda", ""),
    ("src/cuda/runtime", "src/cuda"),
    ("src/cuda/attention", "src/rules src/cuda src/cuda/runtime"),
    ("src/cuda/selection", "src/rules src/cuda src/cuda/runtime src/cuda/attention"),
    ("src/cuda/engine", "src/cuda src/cuda/runtime"),
    ("src/ctx", "src/cpu"),
    ("src/mask", "src/rules src/ctx"),
    ("src/select", "src/rules src/cpu src/mask"),
    ("src/io", "src/ctx"),
    ("src/backend", "src/cpu src/cuda src/ctx src/mask src/select"),
    ("src/attn", "src/rules src/ctx src/mask src/select src/backend"),
    ("src/workplan", "src/rules src/ctx src/io"),
    ("src/maskfile", "src/rules src/ctx src/mask src/select src/io src/workplan"),
    ("src/session", "src/rules src/ctx src/mask src/io src/backend src/attn src/workplan src/maskfile"),
    ("src/nn", "src/cpu src/ctx src/backend"),
    ("src/media", "src/ctx src/io"),
    ("src/metric", "src/ctx src/io src/nn src/media"),
    ("src/model/config", "src/ctx src/io"),
    ("src/model/weights", "src/ctx src/io src/backend src/nn src/model/config"),
    ("src/model/part", "src/ctx src/nn src/model/weights"),
    ("src/model/sched", "src/ctx src/nn src/model/config"),
    ("src/model/text", "src/ctx src/io src/nn src/model/config src/model/weights src/model/part"),
    ("src/model/vision", "src/ctx src/io src/nn src/model/config src/model/weights src/model/part"),
    ("src/model/vae", "src/ctx src/nn src/model/config src/model/weights src/model/part"),
    ("src/model/dit", "src/ctx src/mask src/io src/backend src/attn src/session src/nn src/model/config "
                      "src/model/weights src/model/part"),
    ("src/model/family", "src/ctx src/io src/nn src/media src/model/config src/model/weights src/model/part "
                         "src/model/sched src/model/text src/model/vision src/model/vae src/model/dit"),
    ("src/model/run", "src/rules src/ctx src/io src/backend src/attn src/workplan src/maskfile src/session src/nn "
                      "src/media src/model/config src/model/weights src/model/part src/model/sched src/model/text "
                      "src/model/vae src/model/dit src/model/family"),
    ("tests/cases", ""),
    ("cli/core", "tests/cases"),
    ("cli/clip", "cli/core"),
    ("cli/experiment", "cli/core cli/clip"),
    ("cli/report", "cli/core cli/clip"),
    ("cli/serve", "cli/core cli/clip"),
    ("cli", "cli/core cli/clip cli/experiment cli/report cli/serve"),
    ("examples", ""),
    ("tests/api", "tests/common"),
]

# A header that the build writes, and the list of shapes, which is data.
GENERATED = {"esa_build.h", "esa_commit.h", "shapes.def"}

# The device is asked for in src/backend (and below it in src/cpu and src/cuda), not in the rooms above.
DEVICE = re.compile(r"ESA_DEVICE_(?:CPU|CUDA)|\besa_cuda_\w*|->cuda\b|\.cuda\b|\bon_gpu\b")
DEVICE_ROOMS = ("attn", "maskfile", "session", "nn", "media", "metric", "model")
# file: (so many lines, why)
DEVICE_ALLOWED = {
    "src/attn/bind.c": (2, "esa_tensor_bnsd and _bsnd make views of host memory, as esa.h says"),
    "src/nn/nn.c": (1, "operations run on the CPU unless another device is asked for"),
    "src/attn/check.c": (1, "the message about an unknown device names the known ones"),
}

SOURCES = (".c", ".h", ".cu", ".cuh")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^">]+)[">]', re.M)
# Names that a header declares at the left margin: functions, types, and variables behind extern.
FUNCTION = re.compile(r"^(?!typedef)[A-Za-z][\w \t*]*?\b(esa_\w+)\(", re.M)
TYPE = re.compile(r"^\}\s*(esa_\w+);|^typedef [^;{]*?\b(esa_\w+)(?:\)\([^;]*|);", re.M)
VARIABLES = re.compile(r"^extern ([^;(]*);", re.M)
USE = re.compile(r"(?<!struct )\b(esa_\w+)")


def files_of(top):
    folders = sorted({name.split("/")[0] if not name.startswith("tests") else name for name, _ in ROOMS})
    for folder in [*folders, "tests/common"]:
        for path in sorted((top / folder).glob("*" if folder.startswith("tests") else "**/*")):
            if path.suffix in SOURCES:
                yield path


def room_of(name):
    """The longest listed room that holds the file, or its folder if none does."""
    rooms = [room for room, _ in ROOMS if name.startswith(room + "/")]
    folder = name.rsplit("/", 1)[0]
    best = max(rooms, key=len, default=folder)
    return folder if best == "cli" else best


def find(top, path, bracket, target):
    """The file of the tree that an include means: a path below the top, "" for a system or generated header, None if
    there is no such file."""
    if target.startswith("esa/"):
        return f"include/{target}" if (top / "include" / target).exists() else None
    if bracket == "<" or target in GENERATED:
        return ""
    for base in (path.parent, top / "src", top / "cli", top / "tests", top / "include/esa"):
        if (base / target).exists():
            return str((base / target).resolve().relative_to(top))
    return None


@functools.cache
def strip_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)


def check_table(errors):
    seen = set()
    for room, allowed in ROOMS:
        for other in allowed.split():
            if other not in seen and other != "tests/common":
                errors.append(f"the table lets {room} include {other}, which does not stand below it")
        seen.add(room)


@functools.cache
def declared(text):
    names = {one or two for one, two in TYPE.findall(text)}
    for line in VARIABLES.findall(text):
        names |= set(re.findall(r"\b(esa_\w+)\s*(?=,|$)", line))
    return frozenset(names | set(FUNCTION.findall(text)))


@functools.cache
def used(text):
    return frozenset(USE.findall(text))


def check_names(top, allowed, unused, errors):
    """Whether each room may use the names that it uses: {name: rooms whose headers declare it}."""
    texts = {str(path.relative_to(top)): strip_comments(path.read_text()) for path in files_of(top)}
    public = set().union(*(declared(strip_comments(p.read_text())) for p in (top / "include/esa").glob("*.h")))
    owners = {}
    for name, text in texts.items():
        if name.startswith("src/") and name.endswith((".h", ".cuh")):
            for symbol in declared(text) - public:
                owners.setdefault(symbol, set()).add(room_of(name))
    if len(owners) < 500:
        errors.append(f"only {len(owners)} names were found in the headers of src")
    for name, text in texts.items():
        room = room_of(name)
        for symbol in sorted(used(text) & owners.keys()):
            if room == "tests/common" or room not in allowed or room in owners[symbol]:
                continue
            unused -= {(room, other) for other in owners[symbol]}
            if not owners[symbol] & allowed[room]:
                errors.append(f"{name}: {room} must not use {symbol} of {min(owners[symbol])}")


def check_includes(top, errors):
    allowed = {room: set(names.split()) for room, names in ROOMS}
    unused = {(room, other) for room in allowed for other in allowed[room]}
    for room in allowed:
        if room.startswith("src/"):
            allowed[room].add("src/base")
    graph = {}
    for path in files_of(top):
        name = str(path.relative_to(top))
        room = room_of(name)
        graph[name] = []
        if room not in allowed and room != "tests/common":
            errors.append(f"{name}: {room} is not in the table of rooms")
            continue
        for bracket, target in INCLUDE.findall(path.read_text()):
            found = find(top, path, bracket, target)
            if found is None:
                errors.append(f"{name} includes {target}, which does not exist")
                continue
            graph[name].append(found)
            other = room_of(found) if found else ""
            unused.discard((room, other))
            if not found or found.startswith("include/") or room == "tests/common":
                continue
            if other != room and other not in allowed[room]:
                errors.append(f"{name}: {room} must not include {other} ({target})")
    check_names(top, allowed, unused, errors)
    for room, other in sorted(unused):
        errors.append(f"the table lets {room} include and use {other}, and no file does: shorten the table")
    check_cycles(graph, errors)


def check_cycles(graph, errors):
    state, trail = {}, []

    def visit(name):
        if state.get(name) == "done" or name not in graph:
            return
        if state.get(name) == "open":
            errors.append("files include one another: " + " -> ".join([*trail[trail.index(name):], name]))
            return
        state[name] = "open"
        trail.append(name)
        for other in graph[name]:
            visit(other)
        trail.pop()
        state[name] = "done"

    for name in graph:
        visit(name)


def check_devices(top, errors):
    total = 0
    for room in DEVICE_ROOMS:
        for path in sorted((top / "src" / room).rglob("*")):
            if path.suffix not in SOURCES:
                continue
            name = str(path.relative_to(top))
            lines = [line for line in strip_comments(path.read_text()).splitlines() if DEVICE.search(line)]
            most, _ = DEVICE_ALLOWED.get(name, (0, ""))
            total += len(lines)
            if len(lines) != most:
                errors.append(f"{name} asks for the device in {len(lines)} lines, {most} are allowed: " +
                              "; ".join(line.strip() for line in lines[:5]))
    return total


def check(top):
    errors = []
    check_table(errors)
    check_includes(top, errors)
    total = check_devices(top, errors)
    return errors, total


def append(top, name, text):
    with open(top / name, "a") as f:
        f.write(text)


def new_room(top):
    (top / "src/attic").mkdir()
    (top / "src/attic/attic.c").write_text('#include "base/args.h"\n')


# what is planted, how, and the words of the error that must be found
PLANTED = [
    ("a room below includes one above", lambda top: append(top, "src/base/memory.c", '#include "attn/attn.h"\n'),
     "src/base must not include src/attn"),
    ("CUDA includes the ctx", lambda top: append(top, "src/cuda/cuda.h", '#include "ctx/ctx.h"\n'),
     "src/cuda must not include src/ctx"),
    ("the plugin's runtime includes its selection",
     lambda top: append(top, "src/cuda/runtime/" + first(top, "src/cuda/runtime"),
                        f'#include "cuda/selection/{first(top, "src/cuda/selection")}"\n'),
     "src/cuda/runtime must not include src/cuda/selection"),
    ("the command includes a private header",
     lambda top: append(top, "cli/main.c", '#include "../src/ctx/ctx.h"\n'), "cli must not include src/ctx"),
    ("an example includes a private header",
     lambda top: append(top, "examples/00_one_call.c", '#include "../src/ctx/ctx.h"\n'),
     "examples must not include src/ctx"),
    ("a test of the API includes a private header",
     lambda top: append(top, "tests/api/test_plan.c", '#include "attn/attn.h"\n'),
     "tests/api must not include src/attn"),
    ("two headers of one room include one another",
     lambda top: (append(top, "src/base/half.h", '#include "base/pool.h"\n'),
                  append(top, "src/base/pool.h", '#include "base/half.h"\n')), "files include one another"),
    ("the transformer includes the decoder",
     lambda top: append(top, "src/model/dit/" + first(top, "src/model/dit"),
                        f'#include "model/vae/{first(top, "src/model/vae")}"\n'),
     "src/model/dit must not include src/model/vae"),
    ("a room that is not in the table", new_room, "src/attic is not in the table"),
    ("a header that does not exist", lambda top: append(top, "src/io/json.c", '#include "io/nothing.h"\n'),
     "which does not exist"),
    ("a function of a room that others include",
     lambda top: append(top, "src/io/json.c", "void plant(void) { esa_order_build(0, 0, 0, 0, 0); }\n"),
     "src/io must not use esa_order_build of src/mask"),
    ("a type of a room that others include",
     lambda top: append(top, "src/media/" + first(top, "src/media"), "static inline void plant(esa_backend *b) {}\n"),
     "src/media must not use esa_backend of src/backend"),
    ("a variable of a room above",
     lambda top: append(top, "src/select/" + first(top, "src/select"), "static void *plant = &esa_backend_cpu;\n"),
     "src/select must not use esa_backend_cpu of src/backend"),
    ("the command calls a private function of the library",
     lambda top: append(top, "cli/main.c", "void plant(void) { esa_fail(0, 0, 0); }\n"),
     "cli must not use esa_fail of src/ctx"),
    ("a test for the device in a session",
     lambda top: append(top, "src/session/session.c", "int32_t a = ESA_DEVICE_CUDA;\n"), "asks for the device"),
]


def first(top, folder):
    return min(path.name for path in (top / folder).glob("*.*h"))


def check_planted(top, errors):
    with tempfile.TemporaryDirectory() as scratch:
        for i, (what, plant, words) in enumerate(PLANTED):
            copy = pathlib.Path(scratch).resolve() / str(i)
            for folder in ("src", "cli", "examples", "include", "tests/api", "tests/common"):
                shutil.copytree(top / folder, copy / folder)
            plant(copy)
            found = check(copy)[0]
            if not any(words in error for error in found):
                errors.append(f"planted: {what}; expected an error with '{words}', found {found}")
            shutil.rmtree(copy)


def main():
    top = pathlib.Path(sys.argv[1]).resolve()
    errors, total = check(top)
    check_planted(top, errors)
    for error in errors:
        print(error)
    print(f"{len(ROOMS)} rooms, {sum(1 for _ in files_of(top))} files, {total} lines outside the backends ask for the "
          f"device, {len(PLANTED)} planted violations: {len(errors)} error(s)")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
