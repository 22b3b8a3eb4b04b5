"""The screen of `allranks top`: a job's status as rows and lines. (pure)

    view = make_view(status, now_s=time.time())
    print("\\n".join(render_view(view, style)))

Whatever fills a JobStatus has this screen: `cli.top` reads status.json of a job, and draws the same rows with textual.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from allranks.model.beat import GpuSeen
from allranks.model.hostlist import fold_hosts
from allranks.model.job_status import EventSeen, JobStatus, NodeRow, RankRow
from allranks.model.safe_text import size_text
from allranks.report.status_line import status_line
from allranks.report.text import Style, cell, count_of, fold_ranks, one_row

RANKS_WIDTH = 17
OLD_S = 10.0
"""A leader writes each second; a status that is older is not of now."""
COSTLY = 0.05
"""Share of the others' time from which on a rank that comes late is marked."""
MAX_STATES = 3
"""States of waiting ranks that the line of all ranks tells."""
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


class TopRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ranks that do the same, with what is known of their nodes."""

    of: RankRow
    sent_mbit_s: float | None = None
    """Of the busiest of their nodes; None: not known."""
    received_mbit_s: float | None = None
    last_line: str = ""
    """Of the log of the first of them."""


class Tone(StrEnum):
    """How a row stands out."""

    PLAIN = "plain"
    COSTLY = "costly"
    """Others spend much of their time waiting for these ranks."""
    SUSPECT = "suspect"
    """A watch has no verdict, and others wait for these ranks."""
    CULPRIT = "culprit"
    """Others wait for these ranks now."""


class TopView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that the screen shows of a job."""

    status: JobStatus
    """Without its rows."""
    notice: str = ""
    """Why this is not the state of now."""
    said: tuple[str, ...] = ()
    """What is wrong with the job, in lines above the table."""
    unknown: tuple[str, ...] = ()
    """Titles of columns of which whoever made this knows nothing."""
    rows: tuple[TopRow, ...] = ()
    """Worst first."""


def make_view(
    status: JobStatus,
    *,
    now_s: float,
    last_lines: Mapping[int, str] | None = None,
    exit_code: int | None = None,
    said: tuple[str, ...] = (),
    unknown: tuple[str, ...] = (),
) -> TopView:
    """Return the screen of a job.

    Args:
        now_s: since the epoch, by the clock of whoever looks.
        last_lines: the last line of a rank's log, of some ranks.
        exit_code: of a run that has a verdict; its leader may have ended before it could write that into the status.
        said: lines above the table.
        unknown: titles of columns that are left out.
    """
    lines, by_name = last_lines or {}, {node.name: node for node in status.nodes}
    rows = tuple(_row(row, [by_name[name] for name in row.nodes if name in by_name], lines) for row in status.rows)
    empty = (column.title for column in COLUMNS if column.title in OPTIONAL and not any(map(column.text, rows)))
    return TopView(
        status=msgspec.structs.replace(status, rows=()),
        notice=_notice(status, now_s, status.exit_code if exit_code is None else exit_code),
        said=said,
        unknown=(*unknown, *empty),
        rows=rows,
    )


def _row(row: RankRow, nodes: Sequence[NodeRow], last_lines: Mapping[int, str]) -> TopRow:
    seen = [node.interfaces for node in nodes if node.interfaces]
    return TopRow(
        of=row,
        sent_mbit_s=max((sum(interface.sent_mbit_s for interface in node) for node in seen), default=None),
        received_mbit_s=max((sum(interface.received_mbit_s for interface in node) for node in seen), default=None),
        last_line=last_lines.get(row.ranks[0], "") if row.ranks else "",
    )


def _notice(status: JobStatus, now_s: float, exit_code: int | None) -> str:
    at = datetime.fromtimestamp(status.written_s).isoformat(" ", timespec="seconds")
    if exit_code is not None or status.phase == "over":
        ended = "" if exit_code is None else f" with exit code {exit_code}"
        return f"ended{ended}; this is the last state, of {at}"
    if (age_s := now_s - status.written_s) > OLD_S:
        return f"no news for {duration_text(age_s)}, since {at}: its leader is gone or hangs"
    return ""


def describe_states(rows: Sequence[RankRow]) -> str:
    """Return what all ranks do, in a line: `1,021 in all_reduce, 3 late: 17,512-513`."""
    by_state: dict[str, int] = {}
    for row in rows:
        if not row.is_culprit:
            by_state[row.state] = by_state.get(row.state, 0) + row.num_ranks
    most = sorted(by_state.items(), key=lambda item: -item[1])[:MAX_STATES]
    parts = [
        f"{number:,} {state if state in _ADJECTIVES else f'in {state}'}" for state, number in most if state and number
    ]
    late = [row for row in rows if row.is_culprit]
    if late:
        word = late[0].state if late[0].state in ("stopped", "ended") else "late"
        parts.append(f"{sum(row.num_ranks for row in late):,} {word}: {_ranks_text(late, at_most=60)}")
    return ", ".join(parts)


_ADJECTIVES = ("running", "stopped", "ended", "lost", "silent")


def _ranks_text(rows: Sequence[RankRow], *, at_most: int) -> str:
    known = [rank for row in rows for rank in row.ranks]
    if not known:  # a process without a rank
        return ""
    text, is_whole = fold_ranks(known).rpartition(" ")[2], len(known) >= sum(row.num_ranks for row in rows)
    if is_whole and len(text) <= at_most:
        return text
    first, *more = text.split(",")
    for part in more:
        if len(first) + len(part) + len(",,...") > at_most:
            break
        first += f",{part}"
    return f"{first},..."


def duration_text(seconds: float) -> str:
    """Return a time as a cell has it.

    >>> [duration_text(seconds) for seconds in (0.0351, 2.5, 41.2, 579, 8047, 200000)]
    ['35 ms', '2.5 s', '41 s', '9:39', '2:14:07', '2d 7:33']
    """
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


class Column(NamedTuple):
    """One column of the ranks' table."""

    title: str
    width: int
    """Characters; one more is left free behind it."""
    text: Callable[[TopRow], str]
    """What a row has in it; without a value, nothing."""
    is_number: bool = False


def _share(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.005 else ""


def _mbit(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 999.5 else f"{value / 1000:.3g}G"


def _for(row: RankRow) -> str:
    return f"{'>' * row.is_at_least}{duration_text(row.for_s)}" if row.for_s else ""


def _gpu_use(gpu: GpuSeen | None) -> str:
    return "" if gpu is None or gpu.percent is None else f"{gpu.percent} %"


def _gpu_memory(gpu: GpuSeen | None) -> str:
    """Return the memory in use of all, in GiB: `61.2/79.6 G`."""
    if gpu is None:
        return ""
    used, total = (f"{mib / 1024:.{0 if gpu.total_mib >= 102_400 else 1}f}" for mib in (gpu.used_mib, gpu.total_mib))
    return f"{used}/{total} G"


def _retransmits(row: RankRow) -> str:
    return f"{100 * row.retransmits / row.segments:.2g} %" if row.segments and row.retransmits else ""


# Order matters: a narrow terminal has the first ones.
COLUMNS = (
    Column("RANKS", RANKS_WIDTH, lambda row: _ranks_cell(row.of)),
    Column("STATE", 14, lambda row: row.of.state),
    Column("FOR", 7, lambda row: _for(row.of), is_number=True),
    Column("WHERE", 22, lambda row: row.of.place),
    Column("LATE", 7, lambda row: duration_text(row.of.late_s) if row.of.late_s else "", is_number=True),
    Column("COST", 5, lambda row: _share(row.of.cost_share), is_number=True),
    Column("CPU", 6, lambda row: "" if row.of.cpu_cores is None else f"{100 * row.of.cpu_cores:.0f} %", is_number=True),
    Column("RSS", 9, lambda row: "" if row.of.rss_bytes is None else size_text(row.of.rss_bytes), is_number=True),
    Column("GPU", 5, lambda row: _gpu_use(row.of.gpu), is_number=True),
    Column("GPU MEM", 11, lambda row: _gpu_memory(row.of.gpu), is_number=True),
    Column("NODE", 14, lambda row: _nodes_cell(row.of)),
    Column("STEP", 9, lambda row: "" if row.of.step is None else f"{row.of.step:,}", is_number=True),
    Column("OUT", 6, lambda row: _mbit(row.sent_mbit_s), is_number=True),
    Column("IN", 6, lambda row: _mbit(row.received_mbit_s), is_number=True),
    Column("RESENT", 7, lambda row: _retransmits(row.of), is_number=True),
    Column("LAST LINE", 20, lambda row: row.last_line),
)
OPTIONAL = ("GPU", "GPU MEM")
"""Columns that are shown only where some row has a value."""
WIDEST = ("LAST LINE", "WHERE")
"""Which column gets the room that is left: the first of these that is shown."""


def _ranks_cell(row: RankRow) -> str:
    number = f"{row.num_ranks:,}: " if row.num_ranks > 1 else ""
    return number + _ranks_text([row], at_most=RANKS_WIDTH - len(number) - 2)


def _nodes_cell(row: RankRow) -> str:
    return fold_hosts(row.nodes) if row.nodes else ""


def tone_of(row: TopRow) -> Tone:
    """Return how a row stands out."""
    if row.of.is_culprit:
        return Tone.SUSPECT if row.of.is_suspect else Tone.CULPRIT
    return Tone.COSTLY if row.of.cost_share >= COSTLY else Tone.PLAIN


_MARKS = {
    Tone.PLAIN: (" ", " "),
    Tone.COSTLY: ("!", "!"),
    Tone.SUSPECT: ("⚠", "!"),
    Tone.CULPRIT: ("✗", "x"),
}
_SGR = {Tone.COSTLY: "33", Tone.SUSPECT: "33;1", Tone.CULPRIT: "31;1"}


def choose_columns(width: int, unknown: Sequence[str] = ()) -> list[Column]:
    """Return the columns that a terminal of this width has, with the room that is left given to one of them.

    Args:
        unknown: titles of columns that are left out.
    """
    chosen: list[Column] = []
    for column in COLUMNS:
        if column.title in unknown:
            continue
        if chosen and sum(known.width + 1 for known in chosen) + column.width > width:
            break
        chosen.append(column)
    spare = width - sum(column.width + 1 for column in chosen) + 1
    widest = next((name for name in WIDEST if any(column.title == name for column in chosen)), "")
    return [
        column._replace(width=column.width + max(0, spare)) if column.title == widest else column for column in chosen
    ]


def cells_of(row: TopRow, columns: Sequence[Column], style: Style) -> list[str]:
    """Return a row's cells, each as wide as its column: harmless, cut, without secrets; a culprit is marked."""
    texts = []
    for column in columns:
        text = cell(column.text(row))
        if column.title == "RANKS":
            text = f"{style.mark(*_MARKS[tone_of(row)])} {text}"
        if len(text) > column.width:
            text = text[: column.width - 1] + style.mark("…", "~")
        texts.append(f"{text:>{column.width}}" if column.is_number else f"{text:<{column.width}}")
    return texts


ORDERS: dict[str, Callable[[TopRow], Any] | None] = {
    "worst": None,
    "rank": lambda row: row.of.ranks[:1],
    "late": lambda row: -row.of.late_s,
    "cost": lambda row: -row.of.cost_share,
    "cpu": lambda row: -(row.of.cpu_cores or 0.0),
    "gpu": lambda row: 101 if row.of.gpu is None or row.of.gpu.percent is None else row.of.gpu.percent,
    "rss": lambda row: -(row.of.rss_bytes or 0),
    "out": lambda row: -(row.sent_mbit_s or 0.0),
}
"""What rows can be sorted by, in the order of the key `o`."""


def pick_rows(rows: Sequence[TopRow], *, order: str = "worst", wanted: str = "") -> list[TopRow]:
    """Return the rows that have a text in one of their cells, in an order of ORDERS."""
    words = wanted.lower()
    found = [row for row in rows if any(words in column.text(row).lower() for column in COLUMNS)]
    key = ORDERS[order]
    return found if key is None else sorted(found, key=key)


def sparkline(rates: Sequence[float], style: Style, *, at_most: int = 60) -> str:
    """Return the newest rates as bars, from zero to the highest of them, and the last one as a number."""
    shown = rates[-at_most:]
    if not shown:
        return ""
    bars, highest = style.mark(BARS, ASCII_BARS), max(shown) or 1.0
    drawn = "".join(bars[min(len(bars) - 1, int(rate / highest * len(bars)))] for rate in shown)
    return f"{drawn} {shown[-1]:.3g} it/s, at most {max(shown):.3g}"


def node_lines(nodes: Sequence[NodeRow], style: Style) -> list[str]:
    """Return a line a node: ranks, silence, rates of its interfaces, segments sent again, /dev/shm."""
    return [_node_line(node, style) for node in nodes]


def _node_line(node: NodeRow, style: Style) -> str:
    parts = [count_of(node.num_ranks, "rank")]
    parts += ["lost"] if node.is_lost else []
    parts += [f"silent for {duration_text(node.silent_s)}"] if node.silent_s > OLD_S / 2 else []
    parts += [
        f"{interface.name} {_mbit(interface.sent_mbit_s)} out {_mbit(interface.received_mbit_s)} in Mbit/s"
        for interface in node.interfaces
    ]
    if node.segments and node.retransmits:
        parts.append(f"{100 * node.retransmits / node.segments:.2g} % sent again")
    parts += [f"shared memory {100 * node.shm_used:.0f} % full"] if node.shm_used >= 0.5 else []
    mark = style.mark("✗", "x") if node.is_lost else " "
    return cell(f"{mark} {node.name:<15} " + ", ".join(parts))


def event_lines(events: Sequence[EventSeen]) -> list[str]:
    """Return the events, newest first."""
    return [
        cell(f"  {datetime.fromtimestamp(event.time_s):%H:%M:%S} {event.event} {event.text}".rstrip())
        for event in reversed(events)
    ]


def head_lines(view: TopView, style: Style) -> list[str]:
    """Return the lines above the table."""
    rates = view.status.rates if any(view.status.rates) else ()
    head = [
        status_line(view.status, replace(style, has_colour=False), columns=style.width, job=view.status.job),
        view.notice,
        describe_states([row.of for row in view.rows]),
        sparkline(rates, style, at_most=min(60, style.width - 26)),
    ]
    said = (part for line in view.said for part in textwrap.wrap(one_row(line), style.width, subsequent_indent="  "))
    return [*said, *(cell(line) for line in head if line)]


def render_view(view: TopView, style: Style) -> list[str]:
    """Return the screen as lines, for `--once`."""
    columns = choose_columns(style.width, view.unknown)
    titles = (f"{column.title:{'>' if column.is_number else '<'}{column.width}}" for column in columns)
    lines = [line[: style.width] for line in head_lines(view, style)]
    lines.append(style.paint(" ".join(titles).rstrip(), "2"))
    for row in view.rows:
        text = " ".join(cells_of(row, columns, style)).rstrip()
        tone = tone_of(row)
        lines.append(style.paint(text, _SGR[tone]) if tone in _SGR else text)
    for title, more in (("NODES", node_lines(view.status.nodes, style)), ("EVENTS", event_lines(view.status.events))):
        lines += [style.paint(title, "2"), *(line[: style.width] for line in more)] if more else []
    return lines
