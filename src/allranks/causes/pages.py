"""The catalogue as pages of the documentation: one markdown file a cause, and a list of them.

python -m allranks.causes.pages docs/reference/causes            writes them
python -m allranks.causes.pages docs/reference/causes --check    names what is stale, missing or too much; exit code 1
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.causes.catalogue import FAMILIES, all_causes, ways_to_find
from allranks.model.errors import Exit

if TYPE_CHECKING:
    from allranks.causes.cause import Cause

_EXITS = {
    Exit.NODE_FAULT: "75: excluding the node fixes it",
    Exit.SETUP: "78: the cluster or set-up must change first",
    Exit.USAGE: "2: the flags or environment must change first",
    Exit.USER_CODE: "1: the user's code failed",
    Exit.HANG: "124: a rank hung, and no fault of a node or link is known",
    Exit.OK: "0",
}


def make_pages() -> dict[str, str]:
    """Return all pages: file name -> markdown."""
    pages = {f"{cause.id}-{cause.name}.md": _page(cause) for cause in all_causes()}
    return {"README.md": _index(), **pages}


def write_pages(folder: Path) -> list[Path]:
    """Write all pages, and remove pages of causes that are no more; returns what changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for name in find_differences(folder):
        path = folder / name
        text = make_pages().get(name)
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
        changed.append(path)
    return changed


def find_differences(folder: Path) -> dict[str, str]:
    """Return the pages that are not as the catalogue has them: file name -> stale, missing or surplus."""
    pages = make_pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")} if folder.is_dir() else {}
    found = {name: "missing" for name in pages if name not in there}
    found |= {name: "stale" for name, text in there.items() if name in pages and pages[name] != text}
    found |= {name: "surplus" for name in there if name not in pages}
    return dict(sorted(found.items()))


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m allranks.causes.pages", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page would change")
    options = parser.parse_args(arguments)
    if not options.check:
        for path in write_pages(options.folder):
            print(path)
        return Exit.OK
    differences = find_differences(options.folder)
    for name, what in differences.items():
        print(f"{options.folder / name}: {what}", file=sys.stderr)
    if differences:
        print(f"write them anew: python -m allranks.causes.pages {options.folder}", file=sys.stderr)
    return Exit.USER_CODE if differences else Exit.OK


def _page(cause: type[Cause]) -> str:
    lines = [f"# {cause.label()}", "", cause.title(), ""]
    if cause.aliases:
        lines += [f"Also called {', '.join(cause.aliases)}.", ""]
    for head, text in cause.sections().items():
        lines += [f"## {head}", "", text, ""]
    if not cause.is_outcome:
        ways = [f"- {way}" + (f": {what}" if what else "") for way, what in ways_to_find(cause).items()]
        lines += ["## How it is found", "", *(ways or ["- allranks itself, while it starts or runs the job"]), ""]
        if cause.never_on_hardware:
            lines += ["The probe was tested with recorded output only, not on real hardware.", ""]
    lines += [f"Exit code {_EXITS.get(Exit(cause.exit_code), str(int(cause.exit_code)))}.", ""]
    if cause.also:
        names = [_link(other) for other in all_causes() if other.id in cause.also]
        lines += [f"The same lines may mean {', '.join(names)}.", ""]
    lines += ["---", "", f"[All causes](README.md). In a terminal: `allranks explain {cause.id}`.", ""]
    return "\n".join(lines)


def _index() -> str:
    lines = [
        "# Causes",
        "",
        "Every fault that allranks can find as the reason why a job does not start or fails. An id always means the",
        "same cause, however it was found, and is never reused. `allranks explain ID` prints a page in the",
        "terminal. `python -m allranks.causes.pages` generates these pages from the code.",
        "",
        "Under Source, `read DATE` means that somebody read the named text on that day. It does not mean that every",
        "version of it was checked. Texts marked as from public logs were seen only there.",
        "",
    ]
    for digit, family in FAMILIES.items():
        members = [cause for cause in all_causes() if cause.id[2] == digit]
        if members:
            lines += [f"## {digit}xx {family}", "", "| cause | what it is |", "|---|---|"]
            lines += [f"| {_link(cause)}{_also_called(cause)} | {cause.title()} |" for cause in members]
            lines.append("")
    return "\n".join(lines)


def _link(cause: type[Cause]) -> str:
    return f"[{cause.label()}]({cause.id}-{cause.name}.md)"


def _also_called(cause: type[Cause]) -> str:
    return f" ({', '.join(cause.aliases)})" if cause.aliases else ""


if __name__ == "__main__":
    sys.exit(main())
