#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the documents name must exist: check_documents.py SOURCE [ESA], where ESA is the built command.

In every Markdown file of the tree:
  [text](path#heading)          the file and the heading exist
  `src/attn/plan.c`             the file exists; so does a bare `plan.c`
  `plan.c: esa_plan_create`     the file defines or declares that name
  `esa_plan_create`             some source file contains the name; so for every name with an underscore
  `esa bench attention --shape` the command and its options are in its --help; also in code blocks
  `make test`                   the Makefile has the target
Public headers name no file below src. CONTRIBUTING.md's table of rooms has the rooms of tests/tree/check_rooms.py, in
the same order. Every page of docs/ has a link in docs/README.md and a line in mkdocs.yml.
Then wrong documents are planted, one per kind, and each must be found."""
import fnmatch
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tree"))
from check_rooms import ROOMS  # noqa: E402

SKIPPED = {".git", ".venv", "third_party", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
CODE = (".c", ".h", ".cu", ".cuh", ".py", ".sh", ".cmake", ".def")
# Names that stand for a file of the reader.
READERS = {"my_engine.c", "script.py", "run.sh"}
# Places that a build or a run makes, and places of other projects.
MADE = ("build", "bundle", "demo", "results", "masks", "/", "~", "$", "http")


def walk(top):
    for folder, names, files in os.walk(top):
        names[:] = sorted(n for n in names if n not in SKIPPED and not n.startswith("build"))
        for name in sorted(files):
            yield pathlib.Path(folder) / name


class Tree:
    """What the documents may name."""

    def __init__(self, top, esa):
        self.top, self.esa, self.helps = top, esa, {}
        self.files = [str(p.relative_to(top)) for p in walk(top)]
        self.names = {f.rsplit("/", 1)[-1] for f in self.files}
        self.folders = {str(p) for f in self.files for p in pathlib.PurePath(f).parents}
        self.text = "\n".join((top / f).read_text(errors="replace") for f in self.files
                              if f.endswith(CODE) and not f.startswith("tests/docs/"))
        self.words = set(re.findall(r"\w+", self.text))
        self.targets = set(re.findall(r"^([a-z][\w-]*):", (top / "Makefile").read_text(), re.M))

    def find(self, name):
        """Files that a path or a bare name in a document may mean."""
        name = name.rstrip("/")
        if "*" in name or "{" in name:
            parts = braces(name)
            return [f for f in [*self.files, *self.folders] if any(fnmatch.fnmatch("/" + f, "*/" + p) for p in parts)]
        if name in self.files or name in self.folders:
            return [name]
        return [f for f in [*self.files, *self.folders] if f.endswith("/" + name)]

    def help(self, *words):
        """What `esa words --help` prints, or None if there is no such command."""
        if words not in self.helps:
            done = subprocess.run([self.esa, *words, "--help"], capture_output=True, text=True)
            self.helps[words] = done.stdout if done.returncode == 0 else None
        return self.helps[words]

    def defines(self, file, name):
        """Whether a line that starts at the left margin names it: a definition or a declaration, not a call."""
        text = (self.top / file).read_text(errors="replace")
        if file.endswith(".py"):
            return re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b", text, re.M)
        return re.search(rf"^[A-Za-z_#}}].*\b{name}\b", text, re.M)


def braces(name):
    """a/{b,c}.h -> a/b.h, a/c.h"""
    match = re.search(r"\{([^}]*)\}", name)
    if not match:
        return [name]
    return [other for part in match[1].split(",") for other in braces(name[:match.start()] + part + name[match.end():])]


def slug(heading):
    """The anchor GitHub makes of a heading."""
    text = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def split(text):
    """The prose without code blocks, and the lines of the code blocks, each with its line number."""
    prose, code, inside = [], [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside or line.startswith("    "):
            code.append((number, line.strip()))
        if inside or line.startswith("    ") or line.lstrip().startswith("```"):
            prose.append("")
        else:
            prose.append(line)
    return "\n".join(prose), code


def check_links(tree, path, prose):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+\s+(.*)$", file.read_text(), re.M)
            if anchor not in {slug(h) for h in headings}:
                yield f"the link {target} names a heading that does not exist"


def check_path(tree, name):
    if name.startswith(MADE) or name in READERS or "..." in name or "<" in name:
        return None
    return None if tree.find(name) else f"`{name}`: there is no such file"


def check_token(tree, token):
    """One `token` of prose."""
    match = re.fullmatch(r"([\w./-]+\.(?:c|h|cu|cuh|py|sh)): ?([A-Za-z_]\w*)(?:\(\))?", token)
    if match:
        files = tree.find(match[1])
        if not files:
            return f"`{token}`: there is no file {match[1]}"
        if not any(tree.defines(f, match[2]) for f in files):
            return f"`{token}`: {match[1]} does not define {match[2]}"
        return None
    if re.fullmatch(r"[\w.{},*/-]+", token):
        known = token.split("/")[0] in {f.split("/")[0] for f in tree.files if "/" in f}
        if token.endswith((*CODE, ".md")) or ("/" in token and known and not token.startswith("-")):
            return check_path(tree, token)
    match = re.fullmatch(r"([A-Za-z]\w*_\w+)(?:\(.*\))?", token)
    if match and match[1] not in tree.words:
        return f"`{token}`: no source file contains {match[1]}"
    return check_command(tree, token)


def check_command(tree, line):
    """A line that runs make or esa."""
    line = re.sub(r"^\$ ", "", line)
    match = re.match(r"make((?: [a-z][\w-]*)+)(?=$|\s|[;&|])", line)
    if match:
        missing = [word for word in match[1].split() if word not in tree.targets]
        return f"`{line}`: the Makefile has no target {missing[0]}" if missing else None
    match = re.match(r"(?:build/|\./)?esa ([a-z][\w-]*)(.*)", line)
    if not match or not tree.esa:
        return None
    words, rest = [match[1]], match[2]
    text = tree.help(*words)
    if text is None:
        return f"`{line}`: the command has no `esa {match[1]}`"
    inner = re.match(r" ([a-z][\w-]*)", rest)
    if "<command>" in text.split("\n\n")[1]:
        if not inner:
            return None
        words.append(inner[1])
        text = tree.help(*words)
        if text is None:
            return f"`{line}`: the command has no `esa {' '.join(words)}`"
    for option in re.findall(r"(?<=\s)--[a-z][\w-]*", re.split(r"[|;&#]|  +", rest)[0]):
        if not re.search(rf"{option}(?![\w-])", text) and option not in ("--help", "--version"):
            return f"`{line}`: `esa {' '.join(words)} --help` does not know {option}"
    return None


def check_document(tree, path):
    prose, code = split(path.read_text())
    yield from check_links(tree, path, prose)
    for token in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose):
        yield check_token(tree, token.strip())
    for _, line in code:
        yield check_command(tree, line)


def check_rooms(text):
    """The table of rooms in CONTRIBUTING.md. A row lists rooms that stand side by side."""
    rows = re.findall(r"^\| ((?:`[\w/]+`(?:, )?)+) \| (.*) \|$", text, re.M)
    names = [name for cell, _ in rows for name in re.findall(r"[\w/]+", cell)]
    parts = {cell: re.findall(r"`(\w+)`", held) for cell, held in rows}
    rooms = [room.removeprefix("src/") for room, _ in ROOMS if room.startswith("src/")]
    expected = [room for room in rooms if not room.startswith("cuda/")]
    if names != expected:
        yield f"the table of rooms lists {' '.join(names)}; tests/tree/check_rooms.py has {' '.join(expected)}"
    inner = [room.removeprefix("cuda/") for room in rooms if room.startswith("cuda/")]
    if ["cuda", *inner] not in parts.values():
        yield f"the table of rooms does not say that cuda has {' '.join(inner)}"


def check_index(pages, index, site):
    """Every page below docs/ is in the index for readers and in the navigation of the site."""
    linked = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", index)}
    listed = re.findall(r"^\s*- (?:[^:\n]+: )?(\S+\.md)$", site.split("\nnav:\n")[1], re.M)
    for page in sorted(pages):
        if page != "README.md" and page not in linked and not page.startswith("results/"):
            yield f"docs/README.md has no link to {page}"
        if listed.count(page) != 1:
            yield f"mkdocs.yml lists {page} {listed.count(page)} times"
    for name in sorted(set(listed) - set(pages)):
        if not name.startswith("reference/"):
            yield f"mkdocs.yml lists {name}, which does not exist"


def check_header(text):
    """A public header is installed without the sources."""
    return [f"names a private file: {name}" for name in re.findall(r"\bsrc/[\w/.]+", text)]


def check(tree, documents):
    errors = []
    for path in documents:
        errors += [f"{os.path.relpath(path, tree.top)}: {e}" for e in check_document(tree, path) if e]
    return errors


PLANTED = [
    ("See [this](nowhere.md).", "leads nowhere"),
    ("See [this](#no-such-heading).", "heading that does not exist"),
    ("The file `src/attn/nothing.c` does it.", "there is no such file"),
    ("The file `nothing_at_all.h` does it.", "there is no such file"),
    ("`src/mask/mask.c: esa_mask_fry` does it.", "does not define esa_mask_fry"),
    ("`mask_fryer.c: esa_mask_free` does it.", "there is no file mask_fryer.c"),
    ("`esa_mask_fry(mask)` does it.", "no source file contains esa_mask_fry"),
    ("The field `fries_per_block` says it.", "no source file contains fries_per_block"),
    ("Run `esa fry` now.", "has no `esa fry`"),
    ("```\nesa bench frying --shape x\n```", "has no `esa bench frying`"),
    ("```\nesa bench attention --fry 3\n```", "does not know --fry"),
    ("Run `make fries`.", "no target fries"),
]
# What is replaced in CONTRIBUTING.md, by what, and words of the error.
PLANTED_ROOMS = [
    ("`workplan`, ", "", "the table of rooms lists base rules cpu cuda ctx mask select io backend attn maskfile"),
    ("`cpu`, `cuda`", "`cuda`, `cpu`", "the table of rooms lists base rules cuda cpu"),
    (" and `engine`", "", "does not say that cuda has runtime attention selection engine"),
]
# Pages, where the index and the site have a.md, and words of an error.
PLANTED_PAGES = [(["a.md", "b.md"], "no link to b.md"), (["a.md", "b.md"], "lists b.md 0 times"),
                 ([], "lists a.md, which does not exist")]
SOUND = """# A title

See [this](#a-title), `src/mask/mask.c: esa_mask_free`, `include/esa/*.h`, `esa_mask_free(mask)`, `make test` and
`esa bench attention --shape wan-1.3b-480p`.
"""


def check_planted(tree):
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder).resolve() / "planted.md"
        for text, words in PLANTED:
            if not tree.esa and ("has no `esa" in words or "does not know" in words):
                continue
            path.write_text(f"# A title\n\n{text}\n")
            found = [e for e in check_document(tree, path) if e]
            if len(found) != 1 or words not in found[0]:
                errors.append(f"planted {text!r}: expected one error with {words!r}, found {found}")
        path.write_text(SOUND)
        errors += [f"a sound document was refused: {e}" for e in check_document(tree, path) if e]
    if check_header("/* as src/rules/work_plan.h says */") != ["names a private file: src/rules/work_plan.h"]:
        errors.append("planted: a public header that names a private file was not found")
    errors += [f"planted {pages}: expected an error with {words!r}" for pages, words in PLANTED_PAGES
               if not any(words in error for error in check_index(pages, "[a](a.md)", "x\nnav:\n  - a.md\n"))]
    rooms = (tree.top / "CONTRIBUTING.md").read_text()
    for old, new, words in PLANTED_ROOMS:
        found = list(check_rooms(rooms.replace(old, new)))
        if len(found) != 1 or words not in found[0]:
            errors.append(f"planted {new!r} for {old!r}: expected one error with {words!r}, found {found}")
    return errors


def main():
    top = pathlib.Path(sys.argv[1]).resolve()
    tree = Tree(top, os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else None)
    documents = [top / f for f in tree.files if f.endswith(".md") and f != "CHANGELOG.md"]
    errors = check(tree, documents) + check_planted(tree)
    for path in sorted((top / "include/esa").iterdir()):
        errors += [f"include/esa/{path.name}: {e}" for e in check_header(path.read_text())]
    pages = [str(path.relative_to(top / "docs")) for path in documents if path.is_relative_to(top / "docs")]
    errors += check_index(pages, (top / "docs/README.md").read_text(), (top / "mkdocs.yml").read_text())
    errors += [f"CONTRIBUTING.md: {e}" for e in check_rooms((top / "CONTRIBUTING.md").read_text())]
    print("\n".join(errors))
    planted = len(PLANTED + PLANTED_ROOMS + PLANTED_PAGES) + 1
    print(f"{len(documents)} documents, {planted} planted errors: {len(errors)} error(s)")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
