"""Verdicts and tables as text: culprit first, then evidence and fix; ASCII if the terminal is not UTF-8."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, NamedTuple

from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.safe_text import as_one_line
from allranks.model.setting import Setting
from allranks.report.mask import mask_finding, mask_secrets, mask_setting

EVIDENCE_LINES = 24
"""Maximum number of lines of a traceback; longer ones are cut in the middle."""
LINE_CHARS = 600
"""Maximum length of a line of evidence, and of a message; longer ones are cut in the middle."""

MAX_CELL = 300
"""Characters of one cell of a table; names are shorter."""
MAX_ROW = 2000
"""Characters of one line of a report; hundreds of folded nodes fit."""


@dataclass(frozen=True, slots=True)
class Style:
    """The characters and colors that the terminal supports."""

    is_unicode: bool
    has_colour: bool
    width: int

    @classmethod
    def of(cls, stream: IO[str] | None) -> Style:
        """Return the style of a stream, None for a closed one."""
        import os

        encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
        is_terminal = stream is not None and stream.isatty()
        has_colour = wants_colour(os.environ, is_terminal=is_terminal)
        return cls(encoding.startswith("utf"), has_colour, shutil.get_terminal_size((100, 24)).columns)

    def mark(self, unicode: str, ascii_mark: str) -> str:
        """The mark that this terminal can show."""
        return unicode if self.is_unicode else ascii_mark

    def paint(self, text: str, code: str) -> str:
        """Color the text (an SGR code, `31` is red), if the terminal supports colors."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.has_colour else text


def wants_colour(env: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Whether output is colored: that decide NO_COLOR, else FORCE_COLOR and CLICOLOR_FORCE, else CLICOLOR=0, else
    TERM=dumb, else whether it goes to a terminal (no-color.org, force-color.org, bixense.com/clicolors)."""
    if env.get("NO_COLOR"):
        return False
    if is_colour_forced(env):
        return True
    return is_terminal and env.get("CLICOLOR") != "0" and env.get("TERM") != "dumb"


def is_colour_forced(env: Mapping[str, str]) -> bool:
    """Whether output is to be colored wherever it goes, unless NO_COLOR is set."""
    forces = (env.get(name, "") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    return any(value not in ("", "0") for value in forces)


def render_findings(findings: Sequence[Finding], style: Style) -> str:
    """Return the text of all findings, without a final newline; empty for none."""
    return "\n\n".join(render_finding(finding, style) for finding in findings)


def render_finding(finding: Finding, style: Style) -> str:
    """Return the text of one finding: culprit, message, evidence, fix, who else failed, victims.

    A note has only its first line, with the message. Secrets are hidden.
    """
    finding = mask_finding(finding)
    who = tell_culprit(finding, style)
    mark, colour = _MARKS[finding.severity]
    if finding.confidence is Confidence.UNDECIDED and finding.severity is Severity.FAIL:
        colour = _MARKS[Severity.WARN][1]
    is_note = finding.severity is Severity.NOTE
    head = f"{style.mark(*mark)} {one_line(finding.cause)}   {one_line(finding.message) if is_note else who}".rstrip()
    confidence = tell_confidence(finding)
    gap = max(3, min(style.width, 100) - len(head) - len(confidence))
    first = style.paint(head, colour) + " " * gap + style.paint(confidence, "2")
    if is_note:
        return first
    lines = [first, f"  {tell_message(finding, style)}"]
    for part in tell_parts(finding, style):
        lines += _hang(part.label, part.lines, style) if part.label else [f"  {line}" for line in part.lines]
    return "\n".join(lines)


class FindingPart(NamedTuple):
    """A part of a finding below its message, however it is printed."""

    label: str
    """`seen`, `log`, `fix`, `next`, `more`; empty for what else is known of who failed."""
    lines: Sequence[str]


def tell_culprit(finding: Finding, style: Style) -> str:
    """`node17 · eth0 · ranks 2-3 · GPU 0`; empty if nobody is named."""
    parts = [one_line(finding.node or ""), one_line(finding.interface or ""), fold_ranks(finding.ranks)]
    parts.append(one_line(finding.subject or ""))
    return style.mark(" · ", " - ").join(filter(None, parts))


def tell_message(finding: Finding, style: Style) -> str:
    """Return what happened, on one line of at most about LINE_CHARS."""
    return _shorten(one_line(finding.message), style)


def tell_parts(finding: Finding, style: Style) -> Iterator[FindingPart]:
    """Yield what follows the message, in order: evidence with its places, fix, what would tell more, victims."""
    for evidence in finding.evidence:
        seen = [line for line in printable(evidence.seen).splitlines() if line.strip(" ^~")]
        yield FindingPart("seen", [_shorten(line, style) for line in _cut(seen, style)])
        if evidence.source:
            yield FindingPart("log", [one_line(evidence.source)])
    if finding.fix:
        yield FindingPart("fix", [one_line(finding.fix)])
    if finding.ask:
        yield FindingPart("next", [one_line(finding.ask)])
    yield FindingPart("more", [f"allranks explain {one_line(finding.cause_id)}"])
    rest = [one_line(note) for note in finding.notes]
    if finding.waiting:
        rest.append(f"waited for it: {one_line(finding.waiting)}")
    if finding.victims:
        rest.append(f"others waited for it or were ended: {fold_ranks(finding.victims)}")
    if rest:
        yield FindingPart("", rest)


def render_settings(settings: Sequence[Setting], style: Style) -> str:
    """Return settings as an aligned table: name, value, reason, source; secrets are hidden."""
    shown = map(mask_setting, settings)
    rows = [
        [
            as_one_line(text, at_most=MAX_ROW)
            for text in (setting.name, setting.value, setting.reason, f"({setting.source})")
        ]
        for setting in shown
    ]
    widths = [min(40, max((len(row[column]) for row in rows), default=0)) for column in range(3)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {style.paint(f'{row[1]:<{widths[1]}}', '1')}  {row[2]:<{widths[2]}}  "
        f"{style.paint(row[3], '2')}".rstrip()
        for row in rows
    )


def say(text: str) -> None:
    """Print one line with the prefix `allranks:` on standard error."""
    print_error(f"allranks: {one_line(mask_secrets(text))}")


def print_error(text: str) -> None:
    """Print on standard error; where that is closed, or nobody reads it, or its disk is full, the job goes on."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def describe_size(num_bytes: int) -> str:
    """`812 bytes`, `1.4 MB`, `23 GB`."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return count_of(num_bytes, "byte")


def describe_time(time_s: float) -> str:
    """`3.2 s`, `45 s`, `3 min 20 s`, `2 h 5 min`."""
    if time_s < 9.95:
        return f"{time_s:.1f} s"
    minutes, seconds = divmod(round(time_s), 60)
    hours, of_hour = divmod(minutes, 60)
    parts = [(hours, "h"), (of_hour, "min")] if hours else [(minutes, "min"), (seconds, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def count_of(number: int, noun: str) -> str:
    """`1 rank`, `6 ranks`, `2 processes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def fold_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2,4-5`; empty for none."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    is_many = len(runs) > 1 or (runs and runs[0][0] != runs[0][1])
    return f"rank{'s' if is_many else ''} {text}" if text else ""


_MARKS = {
    Severity.FAIL: (("✗", "x"), "31;1"),
    Severity.WARN: (("⚠", "!"), "33;1"),
    Severity.NOTE: (("✓", "+"), "32;1"),
}
"""Severity -> mark with and without UTF-8, and color."""


def tell_confidence(finding: Finding) -> str:
    """Return the confidence; if undecided between two culprits, both of them."""
    if finding.confidence is Confidence.UNDECIDED:
        between = [f"rank {rank}" for rank in finding.ranks] or one_line(finding.node or "").split(" or ")
        if len(between) == 2:
            return f"undecided between {between[0]} and {between[1]}"
    return str(finding.confidence)


def cell(text: str) -> str:
    """Return a name or a text as one cell of a table: one line, printable, without secrets, at most MAX_CELL long."""
    return as_one_line(mask_secrets(text[: 2 * MAX_CELL]), at_most=MAX_CELL)


def one_row(text: str) -> str:
    """Return a line of a report, with its blanks: whatever a name has in it, it is one line, and without secrets."""
    return as_one_line(mask_secrets(text[: 2 * MAX_ROW]), at_most=MAX_ROW)


def render_rows(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of equal length as an aligned table; whatever a name has in it, its row is one line."""
    shown = [[cell(text) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in shown)
    return "\n".join(line.rstrip() for line in lines)


def one_line(text: str) -> str:
    """Return the text on one line, printable, with single blanks."""
    return " ".join(printable(text).split())


def _hang(label: str, lines: Sequence[str], style: Style) -> list[str]:
    first, *rest = lines or [""]
    return [f"  {style.paint(f'{label:<5}', '2')}{first}", *(f"       {line}".rstrip() for line in rest)]


def _cut(lines: list[str], style: Style) -> list[str]:
    if len(lines) <= EVIDENCE_LINES:
        return lines
    dots = f"{style.mark('…', '...')} {len(lines) - EVIDENCE_LINES + 1} lines"
    return [*lines[:4], dots, *lines[-(EVIDENCE_LINES - 5) :]]


def _shorten(line: str, style: Style) -> str:
    if len(line) <= LINE_CHARS:
        return line
    dots = style.mark("…", "...")
    cut = f" {dots} {len(line) - LINE_CHARS} characters {dots} "
    return line[: LINE_CHARS // 2] + cut + line[-LINE_CHARS // 2 :]


def printable(text: str) -> str:
    """Return the text without control characters, which a log could send to the terminal; newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
