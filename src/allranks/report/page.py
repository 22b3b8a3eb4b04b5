"""Make a report of a run: one HTML file without anything outside of it, that a browser opens from a disk.

    write_report(run_dir.hold())                 # runs/4711/report.html, at the end of a run
    render(read_page(run.path))                  # its text

The texts of logs, names and commands are foreign: every one of them is escaped (jinja2's autoescape), its control
characters are written out, and the page's policy (CSP) allows no script but its own, by its digest. jinja2 is imported
when a report is made: no other part of a job needs it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from allranks.files.folder import Folder
from allranks.model.ledger import PRODUCTIVE
from allranks.model.time_book import LaneState
from allranks.report.history import describe_clock
from allranks.report.page_cards import Links
from allranks.report.page_charts import HEIGHT, WIDTH, BudgetPart, draw, show_number, show_percent, split_budget
from allranks.report.page_data import Page, read_page
from allranks.report.rundir import REPORT
from allranks.report.text import count_of, fold_ranks, printable

FILE = REPORT
SHOWN_ROWS = 16
"""Of the tables of ranks and nodes; the others are folded."""
MAX_LOSSES, WORTH_TELLING = 3, 0.005
"""Of the first sentence: how many losses, and from which share on."""
_FOLDER = Path(__file__).parent / "html"


def render(page: Page) -> str:
    """Return the report as HTML."""
    from markupsafe import Markup

    budget = split_budget(page.ledger, job=page.job) if page.ledger else []
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rendered: str = _load_template().render(
        page=page,
        budget=budget,
        losses=find_losses(budget),
        charts=[draw(curve) for curve in page.curves],
        lanes=pack_lanes(page),
        heat=pack_links(page.links) if page.links and not page.links.rows else None,
        shown_rows=SHOWN_ROWS,
        width=WIDTH,
        height=HEIGHT,
        css=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        digest=digest,
    )
    return rendered


@functools.cache
def _load_template() -> Any:
    """Return the template; compiling it takes 60 ms."""
    import jinja2
    from markupsafe import Markup

    def harmless(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=harmless,
        undefined=jinja2.StrictUndefined,
        optimized=False,  # a page is rendered once: to look for its constants costs more than they do
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        clock=show_time, ranks=fold_ranks, count=count_of, number=show_number, percent=show_percent,
        micro=show_micro, when=show_when, code=lambda text: mark_code(text, Markup),
    )  # fmt: skip
    return environment.get_template("page.html.j2")


def write_report(folder: Folder) -> None:
    """Write the report of a run into its directory, which a job holds.

    Raises:
        OSError: it cannot be written.
        ImportError: jinja2 is missing.
    """
    folder.write_whole(FILE, render(read_page(folder.path)).encode("utf-8", "replace"))


def pack_lanes(page: Page) -> dict[str, Any] | None:
    """Return what the script draws: the columns of all lanes, packed, and whose they are; None without lanes."""
    lanes = page.lanes
    if lanes is None:
        return None
    restarts = page.ledger.restarts if page.ledger else ()
    return {
        "columns": lanes.num_columns,
        "column_s": lanes.column_s,
        "states": [state.name.lower() for state in LaneState],
        "rows": [[lane.rank, printable(lane.nodes[-1] if lane.nodes else "")] for lane in lanes.lanes],
        "marks": [[restart.at_s - lanes.begun_s, printable(f"restart {number}: {restart.cause}")]
                  for number, restart in enumerate(restarts, 1) if restart.at_s >= lanes.begun_s],
        "data": pack(lane.columns for lane in lanes.lanes),
    }  # fmt: skip


def pack_links(links: Links) -> dict[str, Any]:
    """Return what the script draws of the links of many nodes."""
    return {"nodes": [printable(name) for name in links.nodes], "data": pack([links.levels])}


def pack(parts: Iterable[bytes]) -> str:
    """Return bytes as DecompressionStream("deflate") reads them, in base64."""
    return base64.b64encode(zlib.compress(b"".join(parts), 6)).decode()


def find_losses(budget: Iterable[BudgetPart]) -> list[BudgetPart]:
    """Return the largest parts that are no work, at most MAX_LOSSES of them."""
    lost = [part for part in budget if part.key not in map(str, PRODUCTIVE) and part.share >= WORTH_TELLING]
    return sorted(lost, key=lambda part: -part.share)[:MAX_LOSSES]


def mark_code(text: str, markup: Any) -> Any:
    """Return a text of categories.toml as HTML: what stands between backticks is code."""
    pieces = text.split("`")
    return markup("").join(
        markup("<code>{}</code>" if at % 2 else "{}").format(piece) for at, piece in enumerate(pieces)
    )


def show_micro(seconds: float | None) -> str:
    """Return a round trip with its unit.

    >>> show_micro(1.2e-05), show_micro(0.0042), show_micro(None)
    ('12 us', '4.2 ms', '')
    """
    if seconds is None:
        return ""
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"


def show_time(seconds: float) -> str:
    """Return a time that passed: short ones with a decimal place, since `0:00` looks like nothing.

    >>> show_time(0.0), show_time(0.02), show_time(4.24), show_time(72.4)
    ('0 s', '< 0.1 s', '4.2 s', '1:12')
    """
    if seconds >= 9.95:
        return describe_clock(seconds)
    return "0 s" if seconds <= 0 else "< 0.1 s" if seconds < 0.05 else f"{seconds:.1f} s"


def show_when(time_s: float | None) -> str:
    """Return a time of the wall clock, with its zone."""
    with contextlib.suppress(OverflowError, ValueError, OSError):  # no time that anybody has lived in
        return "" if time_s is None else time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time_s))
    return "?"
