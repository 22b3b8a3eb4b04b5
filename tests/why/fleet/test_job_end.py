"""The file of the epilog: what is written is read back, and whatever else stands in it is skipped and counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.model.finding import Confidence, Finding, Severity
from allranks.why.fleet import job_end
from allranks.why.fleet.job_end import JobEnd, NodeFault, encode_end, find_faults, parse_ends

FAULT = NodeFault(cause="AR105 gpu-hardware", node="node17", confidence=Confidence.CERTAIN)
WELL = JobEnd(version=1, time_s=1_795_858_874.0, job="12", user="ada", state="COMPLETED", nodes="node[01-06]")
FAILED = JobEnd(version=1, time_s=1_795_858_875.5, job="13_4", nodes="node17", is_failed=True, faults=(FAULT,))
NAMES = st.text(max_size=40)
FAULTS = st.builds(NodeFault, cause=NAMES, node=NAMES, confidence=st.sampled_from(Confidence))
ENDS = st.builds(
    JobEnd,
    version=st.just(1),
    time_s=st.floats(0, 4e9),
    job=NAMES,
    restarts=st.integers(0, 9),
    user=NAMES,
    state=NAMES,
    nodes=st.sampled_from(["", "n1", "n[01-17]", "a-1,b[1,3-4]"]),
    is_failed=st.booleans(),
    faults=st.lists(FAULTS, max_size=3).map(tuple),
    unexplained=NAMES,
)
DAMAGED = st.one_of(
    st.binary(min_size=1, max_size=80).map(lambda data: data.replace(b"\n", b"")),
    st.sampled_from([
        b"{}", b"[]", b"null", b'"node17"', b'{"version":2,"time_s":1.0,"job":"12"}', b'{"version":1,"job":"12"}',
        b'{"version":1,"time_s":-1,"job":"12"}', b'{"version":1,"time_s":1,"job":12}', encode_end(FAILED)[:-9],
        b'{"version":1,"time_s":1,"job":"12","nodes":"n[1-"}',
        b'{"version":1,"time_s":1,"job":"12","nodes":"n[1-9999999]"}',
    ]),
)  # fmt: skip


def test_a_healthy_job_has_a_short_line() -> None:
    assert encode_end(WELL) == (
        b'{"version":1,"time_s":1795858874.0,"job":"12","user":"ada","state":"COMPLETED","nodes":"node[01-06]"}\n'
    )


@given(st.lists(ENDS, max_size=8))
def test_what_is_written_is_read_back(ends: list[JobEnd]) -> None:
    told = parse_ends(b"".join(map(encode_end, ends)))
    assert (told.ends, told.num_damaged) == (tuple(ends), 0)


@given(st.lists(st.one_of(ENDS, DAMAGED), max_size=12))
def test_damaged_and_foreign_lines_are_skipped_and_counted(lines: list[JobEnd | bytes]) -> None:
    data = b"".join(encode_end(line) if isinstance(line, JobEnd) else line + b"\n" for line in lines)
    told = parse_ends(data)
    assert told.ends == tuple(line for line in lines if isinstance(line, JobEnd))
    assert told.num_damaged == sum(isinstance(line, bytes) and bool(line.strip()) for line in lines)


@given(st.lists(ENDS, min_size=1, max_size=4), st.data())
def test_a_file_that_is_cut_anywhere_loses_its_last_line_only(ends: list[JobEnd], data: st.DataObject) -> None:
    lines = [*map(encode_end, ends)]
    cut = data.draw(st.integers(0, len(lines[-1]) - 2))
    told = parse_ends(b"".join(lines[:-1]) + lines[-1][:cut])
    assert told.ends == tuple(ends[:-1])
    assert told.num_damaged == (cut > 0)


@given(st.binary(max_size=300))
def test_any_bytes_are_read(data: bytes) -> None:
    parse_ends(data)


def test_a_line_that_is_too_long_is_one_damaged_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_end, "MAX_LINE_BYTES", 300)
    told = parse_ends(encode_end(WELL) + b"x" * 1000 + b"\n" + encode_end(FAILED))
    assert (told.ends, told.num_damaged) == ((WELL, FAILED), 1)


def finding(node: str | None, **more: object) -> Finding:
    values = {"cause": "AR105 gpu-hardware", "severity": Severity.FAIL, "confidence": Confidence.CERTAIN, "message": ""}
    return Finding(**(values | more), node=node)  # type: ignore[arg-type]


def test_faults_name_single_nodes_that_are_not_in_doubt() -> None:
    findings = (
        finding("node17"),
        finding("node17", cause="AR210 link-down"),
        finding("node03", severity=Severity.WARN, confidence=Confidence.LIKELY),
        finding("node01 or node02", confidence=Confidence.UNDECIDED),
        finding("node04", confidence=Confidence.UNDECIDED),
        finding("node[05-06]"),
        finding("node07", severity=Severity.NOTE),
        finding(None),
    )
    assert [(fault.node, fault.cause) for fault in find_faults(findings)] == [
        ("node17", "AR105 gpu-hardware"),
        ("node03", "AR105 gpu-hardware"),
    ]
