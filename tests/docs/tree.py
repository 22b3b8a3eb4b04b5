"""The lists of folders and modules in docs/explanation/architecture.md, made from the modules' first lines.

python tests/docs/tree.py        writes them between their markers in the page; `make pages` runs it
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/allranks"
PAGE = ROOT / "docs/explanation/architecture.md"


def make_page(page: str) -> str:
    """Return the page's text with its two lists as they are now."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    floors = [floor.split(" | ") for floor in layers if floor != "__main__"]
    return _fill(_fill(page, "floors", _floors(floors)), "modules", _modules(floors))


def first_sentence(text: str) -> str:
    """Return the first sentence of a module's first line, and whether the line says that the module is pure.

    >>> first_sentence('Which nodes explain `a.py`, and why? Pure.')
    'Which nodes explain `a.py`, and why? (pure)'
    """
    line = text.partition("\n")[0]
    sentence = re.match(r"(.+?[.?])(?:\s|$)", line)
    assert sentence, f"no whole sentence in a module's first line: {line}"
    return sentence[1] + (" (pure)" if re.search(r"\bPure\b", line) else "")


def _fill(page: str, name: str, lines: Iterator[str]) -> str:
    before, begin, rest = page.partition(f"<!-- {name}, written by `make pages` -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    assert end, f"{PAGE}: no markers of {name}"
    return before + begin + "\n" + "".join(f"{line}\n" for line in lines) + "\n" + end + after


def _floors(floors: list[list[str]]) -> Iterator[str]:
    yield "```"
    for number, floor in enumerate(floors):
        yield from [""] if number else []
        for name in floor:
            file = SOURCE / f"{name}.py"
            shown, path = (file.name, file) if file.exists() else (f"{name}/", SOURCE / name / "__init__.py")
            yield f"{shown:<11} {_line(path)}"
    yield "```"


def _modules(floors: list[list[str]]) -> Iterator[str]:
    folders = [SOURCE / name for floor in floors for name in floor if (SOURCE / name).is_dir()]
    for number, folder in enumerate(folders):
        yield from [*([""] if number else []), f"### {folder.name}/", "", *_below(folder)]


def _below(folder: Path, indent: str = "") -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{indent}- `{path.name}`: {first_sentence(_line(path))}"
    for inner in sorted(path for path in folder.iterdir() if any(path.rglob("*.py"))):
        line = _line(inner / "__init__.py") if (inner / "__init__.py").exists() else ""
        yield f"{indent}- `{inner.name}/`{': ' if line else ''}{line}"
        yield from _below(inner, indent + "    ")


def _line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text()))
