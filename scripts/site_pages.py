# SPDX-License-Identifier: Apache-2.0
"""What mkdocs cannot do by itself with docs/ (a hook of mkdocs.yml): pages of the Python package and of the C headers,
made from their sources without importing them, and links to files outside docs/, which become plain text."""
import ast
import pathlib
import re

from mkdocs.structure.files import File

TOP = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]*)(?:#[^)]*)?\)")


def python_names():
    """{public name of esa: where it is defined}, in the order of __all__."""
    tree = ast.parse((TOP / "python/esa/__init__.py").read_text())
    where, listed = {}, []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            where.update({name.name: f"esa.{node.module}.{name.name}" for name in node.names})
        elif isinstance(node, ast.Assign) and node.targets[0].id == "_LATER":
            later = ast.literal_eval(node.value)
            where.update({name: f"esa.{module}.{name}" for name, module in later.items()})
        elif isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            listed = [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
    return {name: where[name] for name in [*listed, *later] if not name.startswith("__")}


def python_page():
    blocks = [f"## esa.{name}\n\n::: {place}\n    options:\n      show_root_heading: false\n"
              for name, place in python_names().items()]
    return "\n".join(["# The Python package\n", "The guide is [python.md](../python.md).\n", *blocks])


def headers_page():
    headers = sorted((TOP / "include/esa").glob("*.h"), key=lambda path: (path.name != "esa.h", path.name))
    blocks = [f"## {path.name}\n\n```c\n{path.read_text()}```\n" for path in headers]
    intro = "The headers are the manual: who owns what, units, ranges, defaults.\n"
    return "\n".join(["# The C headers\n", intro, *blocks])


def on_files(files, config):
    for name, text in (("python", python_page()), ("headers", headers_page())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown, page, **_):
    folder = (TOP / "docs" / page.file.src_uri).parent

    def inside(link):
        return link[0] if (folder / link[2]).resolve().is_relative_to(TOP / "docs") else link[1]
    return LINK.sub(inside, markdown)
