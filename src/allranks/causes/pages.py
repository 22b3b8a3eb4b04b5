"""The documentation as the site's generator reads it: the pages in `docs`, and one page a cause with a list of them.

    python -m allranks.causes.pages docs .site-docs tests/why      copies docs, and adds reference/causes/

The logs below the last folder (*.jsonl) are those that are known: a page says which signs of its cause they show.
On GitHub the text files of the causes are their pages, so links in `docs` lead there; the site's lead to its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

from allranks.causes.book import FAMILIES, TEXT, all_causes
from allranks.causes.cause import UNCHECKED, Cause
from allranks.causes.probes import ways_to_find
from allranks.model.errors import Exit

FOLDER = "reference/causes"
_TO_TEXT = re.compile(r"\]\((?:\.\./)+src/allranks/causes/text/([^)]+)\)")
_EXITS = {
    Exit.NODE_FAULT: "75: excluding the node fixes it",
    Exit.SETUP: "78: the cluster or set-up must change first",
    Exit.USAGE: "2: the flags or environment must change first",
    Exit.USER_CODE: "1: the user's code failed",
    Exit.HANG: "124: a rank hung, and no fault of a node or link is known",
    Exit.OK: "0",
}


def make_pages(known: str) -> dict[str, str]:
    """Return the pages of all causes: file name -> markdown; `known` are all known logs."""
    return {"README.md": _index(), **{f"{cause.id}-{cause.name}.md": _page(cause, known) for cause in all_causes()}}


def write_site(docs: Path, out: Path, logs: Path) -> None:
    """Write what the site is built from; whatever was at `out` goes."""
    cases = [case for file in sorted(logs.glob("*.jsonl")) for case in file.read_text(encoding="utf-8").splitlines()]
    known = "\n".join(json.loads(case)["log"] for case in cases)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(docs, out)
    for page in out.rglob("*.md"):
        to_causes = os.path.relpath(out / FOLDER, page.parent)
        text = page.read_text(encoding="utf-8")
        page.write_text(_TO_TEXT.sub(rf"]({to_causes}/\1)", text), encoding="utf-8")
    (out / FOLDER).mkdir(parents=True)
    for name, text in make_pages(known).items():
        (out / FOLDER / name).write_text(text, encoding="utf-8")


def _page(cause: Cause, known: str) -> str:
    lines = [f"# {cause.label}", "", cause.title, ""]
    if cause.aliases:
        lines += [f"Also called {', '.join(cause.aliases)}.", ""]
    for head, text in cause.sections.items():
        lines += [f"## {head}", "", text, ""]
    if not cause.is_outcome:
        ways = [f"- {way}" + (f": {what}" if what else "") for way, what in ways_to_find(cause).items()]
        lines += ["## How it is found", "", *(ways or ["- allranks itself, while it starts or runs the job"]), ""]
        if cause.never_on_hardware:
            lines += ["The probe was tested with recorded output only, not on real hardware.", ""]
    if cause.signs:
        lines += ["## Lines in logs", "", "Lines of this kind show the cause.", ""]
    for sign in cause.signs:
        seen = "; seen in real logs" if re.search(sign.pattern, known, re.MULTILINE) else ""
        where = "source not checked" if sign.source == UNCHECKED else sign.source
        says = f"it says that {sign.fact.words}" if sign.fact else "it proves nothing alone"
        lines += [f"{where}{seen}; {says}:", "", *(f"    {line}" for hit in sign.hits for line in hit.splitlines()), ""]
    lines += [f"Exit code {_EXITS.get(cause.exit_code, str(int(cause.exit_code)))}.", ""]
    if cause.also:
        names = [_link(other) for other in all_causes() if other.id in cause.also]
        lines += [f"The same lines may mean {', '.join(names)}.", ""]
    lines += ["---", "", f"[All causes](README.md). In a terminal: `allranks explain {cause.id}`.", ""]
    return "\n".join(lines)


def _index() -> str:
    signs = [sign for cause in all_causes() for sign in cause.signs]
    unchecked = sum(sign.source == UNCHECKED for sign in signs)
    lines = [(TEXT / "README.md").read_text(encoding="utf-8")]
    lines += [f"Of {len(signs)} patterns of lines, {unchecked} could not be checked against the program's source.", ""]
    for family, subject in FAMILIES.items():
        members = [cause for cause in all_causes() if cause.family == family]
        lines += [f"## {family}xx {subject}", "", "| cause | what it is |", "|---|---|"]
        lines += [f"| {_link(cause)}{_also_called(cause)} | {cause.title} |" for cause in members] + [""]
    return "\n".join(lines)


def _link(cause: Cause) -> str:
    return f"[{cause.label}]({cause.id}-{cause.name}.md)"


def _also_called(cause: Cause) -> str:
    return f" ({', '.join(cause.aliases)})" if cause.aliases else ""


if __name__ == "__main__":
    write_site(*map(Path, sys.argv[1:4]))
