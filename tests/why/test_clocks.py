"""How far the clocks of nodes are off: tables of lines, planted offsets, and what it costs."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.causes.book import all_causes
from allranks.why.blame import conclude
from allranks.why.logs.line import read_line
from allranks.why.logs.log_events import Logs, list_patterns, read_events
from allranks.why.logs.sources import Source
from allranks.why.times import Times, clock_of, estimate_offsets, measure_clocks, read_moments

PATTERNS = list_patterns(all_causes())
START_S = 1_790_000_000.0


def read(*lines: tuple[str, float, str]) -> Logs:
    """(node, seconds by its clock, words) -> events, one source a node."""
    events = []
    for number, (node, at_s, words) in enumerate(lines, start=1):
        source = Source(f"{node}.log", None, node, None, None, None, 0)
        stamp = datetime.fromtimestamp(START_S + at_s, UTC).strftime("%Y-%m-%d %H:%M:%S,%f")
        events += read_events(read_line(f"{stamp} {words}".encode(), source, number), PATTERNS)
    return Logs(tuple(sorted(events, key=lambda event: event.line.source.shown)), ())


def offsets_s(logs: Logs) -> dict[str, float]:
    return {clock: offset.seconds for clock, offset in estimate_offsets(logs).items()}


def timeout(rank: int, seq: int) -> str:
    return (
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, "
        "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    )


def complete(node: str, rank: int, comm: str = "0x8e2") -> str:
    return (
        f"{node}:12:33 [0] NCCL INFO comm 0x5581 rank {rank} nranks 3 cudaDev 0 nvmlDev 0 busId 7000 commId {comm} "
        "- Init COMPLETE"
    )


# name, lines, offsets
CASES: list[tuple[str, list[tuple[str, float, str]], dict[str, float]]] = [
    ("nothing", [], {}),
    ("one clock", [("n1", 0, timeout(0, 4)), ("n1", 1, timeout(1, 4))], {}),
    ("clocks agree", [("n1", 0, timeout(0, 4)), ("n2", 0.3, timeout(1, 4)), ("n3", 0.1, timeout(2, 4))], {}),
    (
        "one is an hour ahead",
        [("n1", 0, timeout(0, 4)), ("n2", 3600, timeout(1, 4)), ("n3", 0, timeout(2, 4))],
        {"n2": 3600.0},
    ),
    (
        "one is behind, by communicators",
        [("n1", 50, complete("n1", 0)), ("n2", 20, complete("n2", 1)), ("n3", 50, complete("n3", 2))],
        {"n2": -30.0},
    ),
    (
        "through a third",
        [
            ("n1", 0, complete("n1", 0, "0x1")), ("n2", 0, complete("n2", 1, "0x1")),
            ("n2", 10, complete("n2", 0, "0x2")), ("n3", 70, complete("n3", 1, "0x2")),
            ("n1", 20, complete("n1", 0, "0x3")), ("n2", 20, complete("n2", 1, "0x3")),
        ],
        {"n3": 60.0},
    ),
    (
        "moments that differ as much as the offset are no offset",
        [(node, at_s, timeout(rank, seq)) for seq, times in ((1, (0, 40, 0)), (2, (0, -30, 0)), (3, (0, 5, 0)))
         for rank, (node, at_s) in enumerate(zip(("n1", "n2", "n3"), times, strict=True))],
        {},
    ),
    ("other collectives", [("n1", 0, timeout(0, 4)), ("n2", 3600, timeout(1, 5))], {}),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "offsets"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_offsets_come_from_what_all_saw_at_once(lines: list[tuple[str, float, str]], offsets: dict[str, float]) -> None:
    assert offsets_s(read(*lines)) == pytest.approx(offsets)


def test_times_without_a_year_are_not_compared_with_others() -> None:
    sources = [Source(f"{name}.log", None, name, None, None, None, 0) for name in ("n1", "n2")]
    lines = [f"2026-03-25 10:00:00 {timeout(0, 4)}", f"I0325 10:00:00.000000 12 {timeout(1, 4)}"]
    events = [
        event
        for source, line in zip(sources, lines, strict=True)
        for event in read_events(read_line(line.encode(), source, 1), PATTERNS)
    ]
    assert read_moments(Logs(tuple(events), ())) == {}


def test_what_came_first_is_asked_by_corrected_clocks() -> None:
    """n2 is an hour behind: its error looks earlier and came later."""
    shared = [
        (node, at_s, complete(node, rank)) for rank, (node, at_s) in enumerate((("n1", 0), ("n2", -3600), ("n3", 0)))
    ]
    logs = read(
        *shared,
        ("n1", 100, "RuntimeError: NCCL error: unhandled system error, Too many open files"),
        ("n1", 100, "OSError: [Errno 24] Too many open files"),
        ("n2", -3490, "OSError: [Errno 28] No space left on device"),
    )
    assert offsets_s(logs) == {"n2": -3600.0}
    assert [each.cause.name for each in conclude(logs)][:2] == ["too-many-open-files", "disk-full"]


@given(
    offsets=st.lists(st.floats(-10_000, 10_000), min_size=3, max_size=12),
    jitters=st.lists(st.floats(-0.5, 0.5), min_size=36, max_size=36),
    seen=st.lists(st.integers(1, 11), min_size=3, max_size=3),
)
def test_planted_offsets_are_found_within_the_jitter(
    offsets: list[float], jitters: list[float], seen: list[int]
) -> None:
    """Clock 0 sees every moment, the others some or all: differences are right up to the jitter of both sides."""
    clocks = [f"n{index}" for index in range(len(offsets))]
    moments: dict[tuple[object, ...], dict[str, float]] = {}
    rest = iter(jitters)
    for number, step in enumerate([1, *seen]):
        moments["all" if number == 0 else "some", number] = {
            clock: 1000.0 * number + offsets[index] + next(rest, 0.0)
            for index, clock in enumerate(clocks)
            if index % step == 0
        }
    moments = {name: times for name, times in moments.items() if len(times) > 1}
    found = measure_clocks(moments)
    assert found.keys() == set(clocks)
    differences = [found[clock].seconds - offset for clock, offset in zip(clocks, offsets, strict=True)]
    assert max(differences) - min(differences) <= 4 * 0.5


def test_4096_sources_and_200000_events_are_bounded() -> None:
    event = read(("n1", 0, timeout(0, 4))).events[0]
    assert clock_of(event.line) == "n1"
    moments = {
        ("timeout", seq): {f"n{index}": seq * 10.0 + index % 7 * 100 for index in range(4096)} for seq in range(49)
    }
    start = time.process_time()
    found = measure_clocks(moments)
    assert time.process_time() - start < 30
    assert found["n3"].seconds - found["n0"].seconds == pytest.approx(300)


@pytest.mark.parametrize(
    ("second_s", "earliest_s", "latest_s"),
    [(-1.0, -1.0, 0.0), (-8.0, None, None), (5.0, 0.0, 5.0)],
    ids=["two writers", "two clocks", "one writer"],
)
def test_a_line_without_a_time_has_that_of_the_lines_around_it_unless_their_clocks_differ(
    second_s: float, earliest_s: float | None, latest_s: float | None
) -> None:
    source = Source("job.log", None, None, None, None, None, 0)
    first, second = (f"{datetime.fromtimestamp(START_S + at_s, UTC):%F %T,%f} " for at_s in (0.5, second_s + 0.5))
    stamps = enumerate((first, "", second), start=1)
    lines = [read_line(f"{stamp}{timeout(0, 4)}".encode(), source, number) for number, stamp in stamps]
    when = Times(Logs(tuple(event for line in lines for event in read_events(line, PATTERNS)), ())).of(lines[1])
    known = [None if at_s is None else at_s - START_S - 0.5 for at_s in (when.earliest_s, when.latest_s)]
    assert known == [pytest.approx(earliest_s), pytest.approx(latest_s)]
