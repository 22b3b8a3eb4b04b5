"""From sources to what they say: in parts, side by side, and the same as one after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from allranks.why.logs import collect as collecting
from allranks.why.logs.collect import cut, read_part
from allranks.why.logs.log_events import Logs, Pattern
from allranks.why.logs.match import Matcher
from allranks.why.logs.sources import Source, find_sources
from conftest import is_alive, wait_until

# The processes are forked: a test runner with threads is warned of that from Python 3.12 on.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
FILES = 24
FAILED = "RuntimeError: CUDA error: an illegal memory access was encountered\n"


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Source, ...]:
    """Many logs, one of them packed and cut short."""
    for rank in range(FILES):
        steps = "".join(f"step {step} loss 0.{step}\n" for step in range(50 * rank))
        (tmp_path / f"rank_{rank}.log").write_text(f"{steps}[rank{rank}]: {FAILED}the end of rank {rank}")
    (tmp_path / f"rank_{FILES}.log").write_bytes(b"\x1f\x8b\x08\x00 no gzip")
    return find_sources([str(tmp_path)])


@pytest.fixture
def read(
    patterns: tuple[Pattern, ...], matcher: Matcher, sources: Sequence[Source], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], tuple[Logs, int]]:
    """Read them in parts of one kilobyte with so many processes: what they say, and how many bytes were told."""
    monkeypatch.setattr(collecting, "PART_BYTES", 1000)

    def read(workers: int) -> tuple[Logs, int]:
        counts: list[int] = []
        logs = collecting.collect(sources, patterns, matcher=matcher, on_progress=counts.append, max_workers=workers)
        return logs, sum(counts)

    return read


def test_several_processes_say_the_same_as_one(read: Callable[[int], tuple[Logs, int]]) -> None:
    logs, num_bytes = alone = read(1)
    assert {event.line.rank for event in logs.of("cuda-illegal-access")} == set(range(FILES))
    assert [tail.lines[-1].text for tail in logs.tails if tail.lines] == [f"the end of rank {n}" for n in range(FILES)]
    assert [tail.num_lines for tail in logs.tails[:FILES]] == [50 * rank + 2 for rank in range(FILES)]
    assert [problem.source.rank for problem in logs.problems] == [FILES]
    assert num_bytes == logs.num_bytes > 10_000
    assert read(3) == alone


def test_what_a_killed_process_leaves_over_is_read_all_the_same(
    read: Callable[[int], tuple[Logs, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = read(1)
    parent = os.getpid()

    def read_or_die(
        patterns: Sequence[Pattern],
        matcher: Matcher,
        tail_bytes: int,
        part: Sequence[Source],
        on_progress: Callable[[int], None],
    ) -> Logs:
        logs = read_part(patterns, matcher, tail_bytes, part, on_progress)
        if os.getpid() != parent and any(source.rank == FILES // 2 for source in part):
            os.kill(os.getpid(), signal.SIGKILL)
        return logs

    monkeypatch.setattr(collecting, "read_part", read_or_die)
    assert read(3) == alone


def test_a_reading_process_can_be_ended_where_its_parent_handles_sigterm() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        collecting._begin(lambda: None, lambda *_: Logs((), ()))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_end_of_a_source_has_the_last_state_of_a_progress_bar(
    patterns: tuple[Pattern, ...], matcher: Matcher, tmp_path: Path
) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * 9000 + b"\n\n  1%\r  2%\r\r100%\r\n \r\nthe end")
    (tail,) = collecting.collect(find_sources([str(tmp_path)]), patterns, matcher=matcher).tails
    assert [(line.number, line.text) for line in tail.lines[1:]] == [(3, "100%"), (5, "the end")]
    assert tail.num_lines == 5


def source_of(size: int) -> Source:
    return Source(str(size), None, None, None, None, None, size)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([0], [[0]], id="a pipe"),
        pytest.param([40, 40, 40], [[40, 40, 40]], id="little"),
        pytest.param([90, 20, 30, 70, 10], [[90, 20], [30, 70], [10]], id="in their order"),
        pytest.param([5, 500, 5], [[5, 500], [5]], id="a large one"),
        pytest.param(
            [100] * 48,
            [[100] * 3] * 6 + [[100] * 2] * 7 + [[100]] * 16,
            id="the last are the smallest",
        ),
    ],
)
def test_parts_follow_from_the_sources_alone(
    sizes: list[int], parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "PART_BYTES", 100)
    assert [[source.size for source in part] for part in cut(list(map(source_of, sizes)))] == parts


READS_PIPES = """
import sys
from allranks.why.logs import collect as collecting
from allranks.why.logs.match import Matcher
from allranks.why.logs.sources import Source
collecting.PART_BYTES = 1
sources = [Source(name, name, None, None, None, None, 1) for name in sys.argv[1:]]
collecting.collect(sources, (), matcher=Matcher(["never said"]), max_workers=2)
"""


def test_processes_that_read_end_with_the_one_that_waits_for_them(tmp_path: Path) -> None:
    pipes = [tmp_path / name for name in ("a", "b")]
    for pipe in pipes:
        os.mkfifo(pipe)
    reader = subprocess.Popen([sys.executable, "-c", READS_PIPES, *map(str, pipes)])
    children = Path(f"/proc/{reader.pid}/task/{reader.pid}/children")
    try:
        wait_until(lambda: len(children.read_text().split()) == 2, "two readers")
        readers = [int(pid) for pid in children.read_text().split()]
    finally:
        reader.kill()
        reader.wait()
    wait_until(lambda: not any(map(is_alive, readers)), "the readers' end")
