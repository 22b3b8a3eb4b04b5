"""The answer of `allranks why` as a page: that of the run, where there is one, else what the logs alone tell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from allranks.model.errors import Exit
from allranks.report.mask import mask_finding, mask_secrets
from allranks.report.page_data import Happened, Page, RunOutcome, read_page
from allranks.report.text import one_line

if TYPE_CHECKING:
    from allranks.cli.why import Document
    from allranks.why.conclusion import TimelineRow

AROUND = 200
"""Lines of the timeline before and after the culprit's first one."""
MAX_SOURCES = 1000


def make_page(document: Document, *, asked: Sequence[str], run: Path | None) -> Page:
    """Return the page.

    Args:
        document: the answer, with its timeline.
        asked: what the user has named.
        run: the run directory that was asked about; None: the logs are of something else.
    """
    findings = tuple(map(mask_finding, document.findings))
    page = read_page(run) if run is not None else _page_of_logs(document, asked)
    events = tuple(_cut(document.timeline or ())) or page.events
    return msgspec.structs.replace(
        page,
        findings=findings,
        last_words=tuple(map(mask_secrets, document.last_words)),
        events=events,
        sources=tuple(source.path for source in document.sources[:MAX_SOURCES]),
    )


def _page_of_logs(document: Document, asked: Sequence[str]) -> Page:
    outcome = {Exit.OK: RunOutcome.SUCCEEDED, Exit.USER_CODE: RunOutcome.FAILED}.get(
        Exit(document.exit_code), RunOutcome.UNKNOWN
    )
    return Page(
        title=one_line(" ".join(asked)) or "logs",
        outcome=RunOutcome.RUNNING if document.running else outcome,
        written_s=time.time(),
        missing=("what only `allranks run` knows: time budget, lanes, links, environment", *document.problems),
    )


def _cut(timeline: Sequence[TimelineRow]) -> list[Happened]:
    first = next((number for number, line in enumerate(timeline) if line.is_culprit), len(timeline))
    return [
        Happened(
            time=line.time,
            who=one_line(line.who),
            text=one_line(mask_secrets(line.text)) + (f" ({line.lines} lines)" if line.lines > 1 else ""),
            is_culprit=line.is_culprit,
        )
        for line in timeline[max(0, first - AROUND) : first + AROUND]
    ]
