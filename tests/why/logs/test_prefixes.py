"""The table of prefixes: each row reads real lines, and what stands behind a prefix is read as if it stood alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.causes.book import all_causes
from allranks.why.logs.collect import collect
from allranks.why.logs.formats import load_formats
from allranks.why.logs.line import Line, read_line
from allranks.why.logs.log_events import Pattern, list_patterns
from allranks.why.logs.match import Matcher, PlainEngine
from allranks.why.logs.sources import Source

BARE = Source("-", None, None, None, None, None, 0)

SAMPLES = [
    # row, prefix, what it tells
    ("allranks", "[node03 r3] ", {"node": "node03", "rank": 3}),
    ("allranks", "[4711_1 node03 r3] ", {"node": "node03", "rank": 3}),
    ("record", "[record 2026-03-25T10:34:07Z node=gpu42 pod=w-1 container=main rank=3 local_rank=1 pid=77] ",
     {"node": "gpu42", "pod": "w-1", "rank": 3, "local_rank": 1, "pid": 77}),
    ("record", "[record] ", {}),
    ("color", "[0m ", {}),
    ("color", "[36m", {}),
    ("grep", "rank_604.n7.4711.log:", {"rank": 604}),
    ("grep", "logs/train.log:4711:", {}),
    ("torch", "[rank3]: ", {"rank": 3}),
    ("torch", "[rank3-group_rank0-attempt1]:", {"rank": 3}),
    ("torchrun", "[sft5]:", {"local_rank": 5}),
    ("torchrun", "[default0]:", {"local_rank": 0}),
    ("torchrun", "[trainer7]:", {"local_rank": 7}),
    ("torchrun_role", "[gpu42:1]:", {"node": "gpu42", "local_rank": 1}),
    ("torchrun_role", "[node03|6]:", {"node": "node03", "local_rank": 6}),
    ("torchrun_role", "[trainer:1]:", {"local_rank": 1}),
    ("torchx", "trainer/0 [1]:", {"node": "trainer/0", "local_rank": 1}),
    ("torchx", "trainer/3 ", {"node": "trainer/3"}),
    ("mpirun", "[1,24]<stderr>:", {"rank": 24}),
    ("prterun", "[prterun-n1-77@1,3]<stderr>: ", {"rank": 3}),
    ("mpirun", "Fri Sep 25 03:11:09 2020[2]<stderr>:", {"rank": 2}),
    ("sagemaker", "[1,mpirank:10,algo-2]<stderr>:", {"node": "algo-2", "rank": 10}),
    ("determined", "[2026-03-25T10:34:07.552162Z] 5c902731 [rank=0] || ", {"rank": 0}),
    ("determined", "[2026-03-25T10:34:07.552162Z] 5c902731 || ", {}),
    ("determined", "[rank=1] || ", {"rank": 1}),
    ("ray", "(RayTrainWorker pid=24271, ip=10.0.0.3) ", {"node": "10.0.0.3", "pid": 24271}),
    ("ray", "(VllmWorker rank=3 pid=1234) ", {"rank": 3, "pid": 1234}),
    ("kubectl", "[pod/w-1/pytorch] ", {"node": "w-1", "pod": "w-1"}),
    ("compose", "worker-3  | ", {"node": "worker-3"}),
    ("slurmstepd", "slurmstepd-master-node: ", {"node": "master-node"}),
    ("slurmstepd", "slurmstepd-node03: ", {"node": "node03"}),
    ("host", "node03: ", {"node": "node03"}),
    ("host", "10.151.80.10: ", {"node": "10.151.80.10"}),
    ("cri", "2026-03-25T10:34:07.530123456Z stdout F ", {}),
    ("cri", "2026-03-25T10:34:07.5+02:00 stderr F ", {}),
    ("loki", '2026-03-25T10:34:07Z {container="pytorch", node_name="gpu42", pod="train-worker-1"} ',
     {"node": "gpu42", "pod": "train-worker-1"}),
    ("grafana", "1774434847530\t2026-03-25T10:34:07.530Z\t", {}),
    ("journald", "Mar 25 10:34:07 gpu42 python3[8871]: ", {"node": "gpu42", "pid": 8871}),
    ("journald", "Mar 25 10:34:07.530123 gpu42 train.sh[8871]: ", {"node": "gpu42", "pid": 8871}),
    ("journald", "2026-03-25T10:34:07+0000 gpu42 python3[8871]: ", {"node": "gpu42", "pid": 8871}),
    ("journald", "2026-03-25T10:34:07.530123+00:00 gpu42 docker/train[8871]: ", {"node": "gpu42", "pid": 8871}),
    ("journald", "Wed 2026-03-25 10:34:07 UTC gpu42 python3[8871]: ", {"node": "gpu42", "pid": 8871}),
    ("timestamps", "2026-03-25T10:34:07.530123456Z ", {}),
    ("timestamps", "2026-03-25T10:34:07.5301234Z ", {}),
    ("srun", "3: ", {"rank": 3}),
    ("srun", " 12: ", {"rank": 12}),
]  # fmt: skip
WHO = ("node", "pod", "rank", "local_rank", "pid")
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/home/ml/proj/train.py", line 88, in <module>',
    "    main(cfg)",
    "    ^^^^^^^^^",
    '  File "/home/ml/proj/train.py", line 12, in main',
    "    cfg.batch = cfg.batch // 2",
    "TypeError: unsupported operand type(s) for //: 'NoneType' and 'int'",
)
_AMONG_OTHERS = {"blank": "[", "stamp": TRACEBACK[0], "time": "[rank3]: x", "name": TRACEBACK[0]}
"""Rows that need what follows, and an example of that."""


def read(raw: str, source: Source = BARE) -> Line:
    return read_line(raw.encode(), source, 1)


def test_each_row_has_a_sample() -> None:
    assert {prefix.name for prefix in load_formats().prefix} == {name for name, *_ in SAMPLES} | set(_AMONG_OTHERS)


@pytest.mark.parametrize(("row", "prefix", "who"), SAMPLES, ids=[f"{row} {prefix}" for row, prefix, _ in SAMPLES])
def test_a_prefix_is_removed_and_tells_who_wrote_the_line(row: str, prefix: str, who: dict[str, object]) -> None:
    for text in TRACEBACK:
        line = read(prefix + text)
        assert line.text == (text.strip() if row == "loki" else text)  # logcli itself strips lines
        assert {name: getattr(line, name) for name in WHO if getattr(line, name) is not None} == who
        assert (line.time is not None) == (":34:07" in prefix or ":11:09" in prefix)


@pytest.mark.parametrize(
    ("raw", "text", "who"),
    [
        ("[gpu42:1]:[rank2]: x", "x", ("gpu42", 2, 1)),
        ("2026-03-25T10:34:07.530123456Z stderr F 3: [rank3]:[E A.cpp:1] x", "[E A.cpp:1] x", (None, 3, None)),
        ("[pod/w-1/main] 2026-03-25T10:34:07.530123456Z [rank2]: x", "x", ("w-1", 2, None)),
        ("Mar 25 10:34:07 gpu42 torchrun[12]: [default1]:[rank9]: x", "x", ("gpu42", 9, 1)),
        ("gpu41: [trainer0]:[rank8]: x", "x", ("gpu41", 8, 0)),
        ("(Worker pid=2) 3: x", "3: x", (None, None, None)),  # what the program itself counts
        ("[rank1]: 3: x", "3: x", (None, 1, None)),
        ("[train.py:42]: x", "[train.py:42]: x", (None, None, None)),
        ("[step3]:x", "[step3]:x", (None, None, None)),
        ("[loss3]: x", "[loss3]: x", (None, None, None)),
        ("[trainer0:3]: x", "[trainer0:3]: x", (None, None, None)),
        ("2026-08-03T09:47:01Z [1,4]<stderr>:x", "x", (None, 4, None)),
        ("[step:3]: x", "[step:3]: x", (None, None, None)),
        ("Mar 25 10:34:07 gpu42 kernel: x", "Mar 25 10:34:07 gpu42 kernel: x", ("gpu42", None, None)),
        ("Mar 25 10:34:07 gpu42 slurmd[9]: x", "Mar 25 10:34:07 gpu42 slurmd[9]: x", ("gpu42", None, None)),
        ("[ 9312.500000] gpu42 kernel: x", "[ 9312.500000] gpu42 kernel: x", ("gpu42", None, None)),
        ("Mar 25 10:34:07 INFO train[9]: x", "Mar 25 10:34:07 INFO train[9]: x", (None, None, None)),
        ("2026-03-25T10:34:07.530Z INFO x", "2026-03-25T10:34:07.530Z INFO x", (None, None, None)),
        ('2026-03-25T10:34:07Z   File "a.py", line 1', '  File "a.py", line 1', (None, None, None)),
    ],
)  # fmt: skip
def test_prefixes_stand_before_each_other(raw: str, text: str, who: Sequence[object]) -> None:
    line = read(raw)
    assert (line.text, (line.node, line.rank, line.local_rank)) == (text, who)


# What stands behind a prefix

HITS = [line for cause in all_causes() for hit in cause.hits for line in hit.splitlines()]
PATTERNS = list_patterns(all_causes())
Read = Callable[[Sequence[str]], list[tuple[object, ...]]]


@pytest.fixture(scope="module", params=["hyperscan", "plain"])
def events_of(request: pytest.FixtureRequest, matcher: Matcher, tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Return what the lines of a log show: line, kind, text and values of each event."""
    path = tmp_path_factory.mktemp("log") / "job.log"
    engine = matcher if request.param == "hyperscan" else Matcher([pattern.scan for pattern in PATTERNS], PlainEngine)
    return lambda lines: read_all(path, lines, PATTERNS, engine)


def read_all(
    path: Path, lines: Sequence[str], patterns: Sequence[Pattern], matcher: Matcher
) -> list[tuple[object, ...]]:
    path.write_text("".join(f"{line}\n" for line in lines))
    source = Source(path.name, str(path), None, None, None, None, path.stat().st_size)
    logs = collect([source], patterns, matcher=matcher)
    return [(event.line.number, event.kind, event.line.text, dict(event.values)) for event in logs.events]


@given(
    lines=st.lists(st.sampled_from(HITS), max_size=8),
    prefix=st.sampled_from([prefix for row, prefix, _ in SAMPLES if row not in {"color", "loki"}]),
)
def test_a_prefix_changes_nothing_in_what_a_log_shows(events_of: Read, lines: list[str], prefix: str) -> None:
    """Not of copied colors and of logcli, which change blanks at the beginning."""
    lines = [*TRACEBACK, *lines]
    alone = events_of(lines)
    assert events_of([prefix + line for line in lines]) == alone
    assert {kind for _, kind, *_ in alone} >= {"traceback", "frame", "exception"}


@pytest.mark.parametrize("prefix", ["gpu-node-42: ", "2026-03-25T10:34:07.530123456Z stderr F "])
def test_all_lines_of_the_book_show_the_same_behind_a_prefix(matcher: Matcher, tmp_path: Path, prefix: str) -> None:
    """Also those that are only looked for at the beginning of a line."""
    alone, behind = (
        read_all(tmp_path / "job.log", [before + line for line in HITS], PATTERNS, matcher) for before in ("", prefix)
    )
    assert behind == alone
