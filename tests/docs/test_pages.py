"""Does the documentation hold together: generated pages, links, the site's contents, the README's length?"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allranks.launch.succession import AGENT_ENDED
from allranks.model.ledger import Category
from allranks.report.event_table import EVENTS
from conftest import HANG_S
from docs import tree

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OF_CAUSES = "reference/causes/README.md"
"""Made when the site is built."""
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/**/*.md")])


def test_the_references_are_what_the_code_says() -> None:
    """In a process of its own: click keeps a command's first help option, and other tests ask commands directly."""
    command = [sys.executable, "-m", "allranks.cli.pages", str(DOCS / "reference"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stderr


def test_the_tree_of_the_architecture_is_what_the_modules_say() -> None:
    page = tree.PAGE.read_text()
    assert tree.make_page(page) == page, "a module is new, gone, or has another first line: make pages"


def test_links_lead_to_a_file_and_its_heading() -> None:
    dead = []
    for page in DOCUMENTS:
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            there = page.parent / target if target else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                dead.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert dead == []


def test_links_by_a_name_have_an_address_and_every_address_a_link() -> None:
    for page in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        used = set(re.findall(r"\]\[([\w-]+)\]", text))
        assert used == set(re.findall(r"^\[([\w-]+)\]: https://\S+$", text, re.MULTILINE)), page


def test_no_page_ends_nowhere() -> None:
    """Each page that teaches or explains ends with links to what is next; generated pages and evidence do not."""
    folders = ("concepts", "how-to", "reference", "tutorials")
    pages = [page for folder in folders for page in sorted((DOCS / folder).glob("*.md"))]
    ends = {page.name: page.read_text().rstrip().splitlines()[-8:] for page in pages if not is_generated(page)}
    assert [
        name for name, lines in ends.items() if not any(re.match(r"Next: .*\]\(|## Next$", line) for line in lines)
    ] == []


def is_generated(page: Path) -> bool:
    return page.name in ("command-line.md", "cluster-toml.md")


def test_commands_in_tables_are_copied_without_a_backslash() -> None:
    """Markdown's tables want `\\|` for a bar; within code the site shows the backslash."""
    found = [page.name for page in DOCUMENTS for code in re.findall(r"`[^`\n]*`", page.read_text()) if "\\|" in code]
    assert found == []


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_category_of_the_ledger_has_a_row_a_text_and_a_color() -> None:
    html = ROOT / "src/allranks/report/html"
    texts, css = tomllib.loads((html / "categories.toml").read_text()), (html / "page.css").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "how-to/ledger.md").read_text(), re.MULTILINE)
    categories = [str(category) for category in Category]
    assert set(rows) == texts.keys() == set(categories)
    assert [category for category in categories if f".c-{category}" not in css or f"--{category}:" not in css] == []


def test_every_page_is_in_the_site_s_navigation() -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    in_navigation = set(pages_of(config["project"]["nav"]))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert in_navigation == written | {OF_CAUSES}


def test_a_page_is_headed_as_the_navigation_calls_it() -> None:
    """They share a word, so that a reader who clicks on "Faults at start" sees that this is it."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    heads = {
        page: re.search(r"^# (.*)$", (DOCS / page).read_text(), re.MULTILINE)[1]
        for page in pages_of(config["project"]["nav"])
        if page != OF_CAUSES
    }  # type: ignore[index]
    small = {"a", "at", "in", "of", "on", "the", "and", "what"}
    strange = {
        called: heads[page]
        for called, page in labels_of(config["project"]["nav"])
        if page not in ("index.md", OF_CAUSES) and not words_of(called) & words_of(heads[page]) - small
    }
    assert strange == {}


def words_of(title: str) -> set[str]:
    return set(re.findall(r"[\w.]+", title.lower()))


def labels_of(nav: Any) -> Iterator[tuple[str, str]]:
    for each in nav:
        for called, target in each.items():
            yield from [(called, target)] if isinstance(target, str) else labels_of(target)


def test_the_table_of_events_has_every_event_that_is_written_and_its_fields() -> None:
    written: dict[str, set[str]] = {}
    for event, fields in events_in_source():
        written[event] = written.get(event, set()) | fields
    table = {name: {field.name for field in event.fields} for name, event in EVENTS.items()}
    assert written.keys() == table.keys()
    assert {name: fields - table[name] for name, fields in written.items() if fields - table[name]} == {}


WRITERS = ("_record", "add_event", "_on_event")


def events_in_source() -> Iterator[tuple[str, set[str]]]:
    """Calls that write an event, with the names of their fields, except those that they pass as a dict."""
    for path in (ROOT / "src/allranks").rglob("*.py"):
        if "join" in path.parts:
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            called = getattr(call.func, "attr", getattr(call.func, "id", ""))
            given = [keyword.value for keyword in call.keywords if keyword.arg == "event"]
            first = call.args[0] if called in WRITERS and call.args else given[0] if called == "Record" else None
            names = [part.value for part in ast.walk(first) if isinstance(part, ast.Constant)] if first else []
            for name in filter(None, names):
                fields = {keyword.arg for keyword in call.keywords if keyword.arg} - {"event", "fields"}
                yield str(name), fields
            if called == "event_line" and call.args and getattr(call.args[0], "id", "") == "AGENT_ENDED":
                yield AGENT_ENDED, set()


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(each)]


def test_each_promise_of_safety_names_a_test() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "reference/safety.md").read_text())
    assert named
    assert [each for each in named if f"def {each[1]}(" not in (ROOT / each[0]).read_text()] == []


def test_the_readme_is_read_in_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
