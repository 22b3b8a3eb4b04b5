"""Does the documentation hold together: generated pages, links, the site's contents, the README's length?"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from conftest import HANG_S

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/**/*.md")])


def test_the_references_are_what_the_code_says() -> None:
    """In a process of its own: click keeps a command's first help option, and other tests ask commands directly."""
    command = [sys.executable, "-m", "allranks.cli.pages", str(DOCS / "reference"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stderr


def test_links_lead_to_a_file_and_its_heading() -> None:
    dead = []
    for page in DOCUMENTS:
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            there = page.parent / target if target else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                dead.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert dead == []


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_page_is_in_the_site_s_navigation() -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    in_navigation = set(pages_of(config["project"]["nav"]))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    causes = {path for path in written if path.startswith("reference/causes/AR")}
    assert in_navigation == written - causes


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(each)]


def test_the_readme_is_read_in_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
