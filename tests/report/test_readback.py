"""Whatever stands in the files of a run directory: it has the right types, or it is left out and counted."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allranks.files.regular import find_regular, open_regular
from allranks.launch.queue.scheduler import parse_culprits
from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.report import readback
from allranks.report.growth import parse_growth
from allranks.report.history import list_restarts
from allranks.report.readback import parse_environment, parse_events, parse_hosts, parse_verdict
from allranks.report.rundir import event_line
from allranks.report.runs import describe_kill, read_run
from allranks.wire.leader_port import decode_announcement

STARTED = {
    "time_s": 1795847021.253, "event": "started", "generation": 0, "members": ["node01", "node02"], "max_restarts": 3,
    "job": "7", "command": ["python", "train.py"], "cwd": "/home/ada", "pid": 4711, "start_ticks": 123456,
    "boot_id": "b2f0",
}  # fmt: skip
TOLD = (
    STARTED,
    {"time_s": 2.0, "event": "verdict", "generation": 0, "cause": "AR407 dead-rank", "node": "node01", "ranks": [2]},
    {"time_s": 3.0, "event": "restarting", "generation": 1, "leader": "node01", "lost_s": 72.4, "is_tracked": True},
    {"time_s": 4.0, "event": "took_over", "leader": "node02", "generation": 1, "after": "node01"},
    {"time_s": 5.0, "event": "agent_ended", "node": "node01", "pid": 4711, "signal": 9, "oom_kills": 1, "is_oom": True},
    {"time_s": 6.0, "event": "interrupted", "signum": 15, "node": "node01"},
    {"time_s": 7.0, "event": "node_lost", "node": "node01"},
    {"time_s": 8.0, "event": "paused", "leader": "node02", "generation": 1},
    {"time_s": 9.0, "event": "minority", "leader": "node02", "generation": 1},
    {"time_s": 9.5, "event": "checkpoint", "step": 120, "write_s": 3.25},
    {
        "time_s": 9.55,
        "event": "checkpoint",
        "optimizer_steps": 40,
        "save_s": 0.2,
        "is_verified": False,
    },
    {"time_s": 9.6, "event": "straggler", "rank": 3, "node": "node02", "message": "calls collectives 20 ms late"},
    {"time_s": 9.7, "event": "hang", "op": "all_reduce", "for_s": 30.5, "num_waiting": 2, "ranks": [1]},
    {"time_s": 10.0, "event": "ended", "exit_code": 75, "leader": "node02", "is_cut_off": False},
)

NETWORK = {
    "time_s": 11.0, "event": "network", "iteration": 100, "step_s": 0.4, "wait_share": 0.63, "least_wait_share": 0.6,
    "num_nodes": 2, "nodes": [{"node": "node01", "wait_share": 0.6, "segments": 1000, "retransmits": 3}],
}  # fmt: skip


def lines(*told: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in told)


def test_what_agents_write_is_read_back_as_it_was_written() -> None:
    found = parse_events(lines({**NETWORK, "wait_share": 0.1}, *TOLD, NETWORK))
    assert json.loads(msgspec.json.encode(found.network)) | {"event": "network"} == NETWORK
    assert [json.loads(json.dumps(each)) for each in found.lines] == list(TOLD)
    assert (found.num_damaged, found.num_unknown) == (0, 0)


def test_a_run_of_an_older_version_is_read_back() -> None:
    """Its events lack fields; what this version does not know of them, and a null, is left out."""
    told = {"event": "started", "members": ["node01"], "pid": 7, "max_restarts": None, "colour": "red"}
    assert parse_events(lines(told)).lines == ({"event": "started", "members": ("node01",), "pid": 7},)


def test_names_that_are_no_utf8_are_read_back() -> None:
    line = event_line("started", command=["train.py", os.fsdecode(b"data\xff")], members=["n"])
    assert parse_events(line.encode()).lines[0]["command"] == ("train.py", "data\\udcff")


@pytest.mark.parametrize(
    ("event", "field", "value"),
    [
        *(("started", "pid", value) for value in (-1, 0, "x", 1.5, 2**31, 2**80, True, [], {}, "4711")),
        *(("started", "members", value) for value in ("node01", [1], [None], {"a": 1}, ["n" * 513])),
        *(("started", "command", value) for value in ("train.py", [["train.py"]], 7)),
        *(("started", "time_s", value) for value in (-1.0, 1e300, "now", [])),
        *(("started", "start_ticks", value) for value in (-1, 2**63, "1", 0.5)),
        *(("restarting", "generation", value) for value in (-1, "1", None, 2**63)),
        *(("verdict", "ranks", value) for value in ([-1], ["a"], [2**30], 7, "12")),
        *(("agent_ended", "signal", value) for value in (0, 65, -9, "KILL")),
        *(("agent_ended", "oom_kills", value) for value in (-1, "many")),
        *(("interrupted", "signum", value) for value in (0, 65, None)),
        *(("ended", "exit_code", value) for value in (-1, 256, None, "0")),
        *(("took_over", "leader", value) for value in (None, 7, [], "n" * 513)),
    ],
)
def test_an_event_with_an_impossible_field_is_skipped_and_counted(event: str, field: str, value: object) -> None:
    told = next(each for each in TOLD if each["event"] == event)
    found = parse_events(lines({**told, field: value}, {"event": "node_lost", "node": "n"}))
    assert [each["event"] for each in found.lines] == ["node_lost"]
    assert found.num_damaged == 1


@pytest.mark.parametrize(
    ("data", "num_damaged", "num_unknown"),
    [
        (b"", 0, 0),
        (b"\n\n \n", 0, 0),
        (b"\xff\xfe\n", 1, 0),
        (b"[1, 2]\n7\nnull\n{}\n", 4, 0),
        (b'{"event": 7}\n{"event": "joined", "node": "n"}\n', 1, 1),
        (b'{"event": "took_over"}\n', 1, 0),
        (b"[" * 100_000 + b"\n", 1, 0),
        (b'{"event": "node_lost", "node": ' + b"[" * 100_000, 0, 0),  # half written
        (b'{"event": "node_lost"', 0, 0),
        (b"x\n" * 20_000, readback.MAX_DAMAGED, 0),
    ],
)
def test_lines_that_are_no_events_are_counted(data: bytes, num_damaged: int, num_unknown: int) -> None:
    found = parse_events(data)
    assert (found.lines, found.num_damaged, found.num_unknown) == ((), num_damaged, num_unknown)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for told in TOLD for name in told} - {"event"})


@given(
    st.lists(
        st.tuples(
            st.sampled_from([each["event"] for each in TOLD]), st.dictionaries(st.sampled_from(FIELDS), ANYTHING)
        ),
        max_size=6,
    )
)
def test_whatever_events_say_their_readers_bear_it(told: list[tuple[str, dict[str, object]]]) -> None:
    found = parse_events(lines(*({**fields, "event": event} for event, fields in told)))
    assert len(found.lines) + found.num_damaged == len(told)
    list_restarts(found.lines)
    for event in found.lines:
        if event["event"] == "agent_ended":
            assert describe_kill(event)
        assert event.get("pid") is None or 0 < event["pid"] < 2**31


VERDICT = Verdict(
    job="7",
    attempt=0,
    exit_code=75,
    findings=(
        Finding(
            cause="AR012 node-failure",
            severity=Severity.FAIL,
            confidence=Confidence.CERTAIN,
            node="node03",
            ranks=(4, 5),
            message="node03 is gone",
        ),
    ),
)
FILES = {
    "verdict": (parse_verdict, VERDICT.to_json(), None),
    "hosts": (parse_hosts, b'{"cards": {"1": {"host": "b"}, "0": {"host": "a", "x": [1]}}, "pairs": []}', None),
    "environment": (parse_environment, b'[{"name": "LR", "value": "1", "reason": "", "source": ""}]', {}),
    "culprits": (parse_culprits, b'[{"node": "n", "cause": "AR012", "attempts": [0]}]', ()),
    "announcement": (
        decode_announcement,
        b'{"job": "7", "attempt": 0, "host": "n", "addresses": ["10.0.0.1"], "port": 29500}',
        None,
    ),
    "growth": (parse_growth, b"1795847021.253 rank_0.out=120 rank_1.err=88\n", {}),
    "events": (parse_events, lines(*TOLD), readback.RunEvents()),
}


def test_what_an_earlier_version_wrote_has_the_id_of_its_cause_too() -> None:
    verdict = parse_verdict(VERDICT.to_json().replace(b'"cause_id": "AR012",', b""))
    assert verdict == VERDICT
    assert b'"cause": "AR012 node-failure",\n      "cause_id": "AR012",' in verdict.to_json()
    (culprit,) = parse_culprits(b'[{"node": "n", "cause": "AR012 node-failure", "attempts": [0]}]')
    assert culprit.cause_id == "AR012"


def test_the_id_of_a_finding_is_always_that_of_its_cause() -> None:
    forged = parse_verdict(VERDICT.to_json().replace(b'"cause_id": "AR012"', b'"cause_id": "AR590"'))
    assert forged == VERDICT
    (finding,) = VERDICT.findings
    assert msgspec.structs.replace(finding, cause="AR407 dead-rank").cause_id == "AR407"


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
@example(data=None)
def test_a_parser_raises_nothing_whatever_the_file_holds(name: str, data: st.DataObject | None) -> None:
    parse, good, empty = FILES[name]
    assert parse(good) != empty
    assert parse(b"") == empty
    if data is None:
        return
    at, end = sorted(data.draw(st.tuples(st.integers(0, len(good)), st.integers(0, len(good)))))
    parse(good[:at] + data.draw(st.binary(max_size=12)) + good[end:])
    parse(json.dumps(data.draw(ANYTHING)).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [("exit_code", -1), ("exit_code", 256), ("exit_code", 10**30), ("attempt", -1), ("findings", 7), ("job", None)],
)
def test_a_verdict_with_impossible_figures_is_none(field: str, value: object) -> None:
    assert parse_verdict(json.dumps({**json.loads(VERDICT.to_json()), field: value}).encode()) is None


def test_the_texts_of_a_verdict_are_cut() -> None:
    document = json.loads(VERDICT.to_json())
    document["findings"][0] |= {"message": "m" * 1_000_000, "evidence": [{"seen": "s" * 70_000}] * 70}
    found = parse_verdict(json.dumps(document).encode())
    assert found is not None
    assert (len(found.findings[0].message), len(found.findings[0].evidence)) == (65_536, 64)
    assert {len(each.seen) for each in found.findings[0].evidence} == {65_536}
    assert parse_verdict(VERDICT.to_json()) == VERDICT


@pytest.mark.parametrize(("field", "ranks"), [("ranks", [-1]), ("victims", [2**24]), ("ranks", ["0"])])
def test_a_verdict_on_impossible_ranks_is_none(field: str, ranks: list[object]) -> None:
    document = json.loads(VERDICT.to_json())
    document["findings"][0][field] = ranks
    assert parse_verdict(json.dumps(document).encode()) is None


def put(path: Path, kind: str) -> None:
    """What somebody else may put in the place of a file."""
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "device":
            path.symlink_to("/dev/tty")
        case "loop":
            path.symlink_to(path.name)
        case "directory":
            path.mkdir()
        case "other":
            (path.parent / "other").write_text("of somebody else")
            path.symlink_to("other")
        case "hole":
            with path.open("wb") as file:
                file.truncate(1 << 40)


KINDS = ("fifo", "zero", "device", "loop", "directory", "other", "hole")


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_regular_file_is_read_and_no_more_than_is_bounded(kind: str, tmp_path: Path) -> None:
    put(tmp_path / "file", kind)
    began_s = time.thread_time()
    assert find_regular(tmp_path / "file", at_most=1000) is None
    assert time.thread_time() - began_s < 2.0


def test_a_link_that_a_user_named_is_followed_but_to_no_pipe(tmp_path: Path) -> None:
    put(tmp_path / "file", "other")
    with open_regular(tmp_path / "file", follows_links=True) as file:
        assert file.read() == b"of somebody else"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "link", follows_links=True)


_OF_RUN = (
    "attempt_0/events.jsonl", "attempt_0/verdict.json", "attempt_0/roll_call.json", "submission.sh",
    "attempt_0/n/rank_0.out", "attempt_0/n/env.json", "attempt_0/n/growth", "leader.json", "culprits.json",
    "status.json", "goodput.json", "attempt_0/curves.jsonl",
)  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hole"])
def test_a_run_is_read_whatever_stands_in_the_place_of_its_files(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "7"
    for name in _OF_RUN:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        put(run / name, kind)
        (run / name).parent.joinpath("other").unlink(missing_ok=True)
    found = read_run(run)
    assert (found.attempt, found.verdict, found.pid, found.command) == (0, None, None, ())
    assert "n" in found.nodes


def test_the_types_of_events_and_those_who_write_them_agree() -> None:
    """A name in the table without a field of the writer would skip each of its events silently."""
    assert {each["event"] for each in (*TOLD, NETWORK)} == readback._EVENTS.keys()
    for told in (*TOLD, NETWORK):
        fields = {field.name for field in msgspec.structs.fields(readback._EVENTS[str(told["event"])])}
        assert told.keys() - {"event"} <= fields
