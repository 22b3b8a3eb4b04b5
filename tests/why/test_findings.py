"""From conclusions to findings: folded, masked, with what is known in the fix."""

from __future__ import annotations

import json
from signal import SIGBUS, SIGSEGV, SIGTERM
from typing import Any

import pytest

from allranks.causes.book import all_causes, find_cause
from allranks.model.finding import Confidence, Evidence, Finding, Severity
from allranks.why.conclusion import Conclusion, Culprit
from allranks.why.facts_of_lines import place_of
from allranks.why.findings import (
    MAX_TEXT,
    count_first,
    fill_job,
    is_answer,
    show_line,
    tell_fix,
    tell_nodes,
    to_finding,
)
from allranks.why.logs.line import Line, read_line
from allranks.why.logs.sources import Source


def line(text: str, number: int = 1, *, path: str = "a.log") -> Line:
    return read_line(text.encode(), Source(path, path, None, None, None, None, len(text)), number)


def conclusion(cause: str = "dead-rank", **fields: Any) -> Conclusion:
    values: dict[str, Any] = {
        "cause": find_cause(cause),
        "confidence": Confidence.LIKELY,
        "culprit": Culprit(),
        "message": "it died",
        "evidence": (place_of(line("boom", 7)),),
    }
    return Conclusion(**values | fields)


def test_a_conclusion_becomes_a_finding() -> None:
    culprit = Culprit(("node02", "node10", "node01", "node03"), (4, 5), "eth0", ("GPU 0", "process 12"))
    assert to_finding(
        conclusion(
            culprit=culprit,
            victims=frozenset({3, 1}),
            ask="dmesg -T",
            evidence=(place_of(line("boom", 7, path="x y")),),
        )
    ) == Finding(
        cause="AR407 dead-rank",
        severity=Severity.FAIL,
        confidence=Confidence.LIKELY,
        node="node[01-03,10]",
        interface="eth0",
        ranks=(4, 5),
        subject="GPU 0, process 12",
        message="it died",
        evidence=(Evidence(seen="boom", source="x y:7"),),
        fix=tell_fix(find_cause("dead-rank"), culprit),
        ask="dmesg -T",
        victims=(1, 3),
    )


@pytest.mark.parametrize(
    ("cause", "severity"),
    [
        ("healthy", Severity.NOTE),
        ("silent-hang", Severity.WARN),
        ("user-code-error", Severity.FAIL),
        ("collective-timeout", Severity.FAIL),
        ("preempted", Severity.FAIL),
    ],
)
def test_only_what_is_no_failure_is_less_than_one(cause: str, severity: Severity) -> None:
    assert to_finding(conclusion(cause)).severity is severity


def test_what_is_certain_asks_for_nothing() -> None:
    assert to_finding(conclusion(confidence=Confidence.CERTAIN, ask="dmesg")).ask is None


def test_two_nodes_that_cannot_be_told_apart_are_one_or_the_other() -> None:
    two = Culprit(("b", "a"))
    assert to_finding(conclusion(confidence=Confidence.UNDECIDED, culprit=two)).node == "a or b"
    assert to_finding(conclusion(confidence=Confidence.LIKELY, culprit=two)).node == "a,b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            json.dumps({"message": {"message": 'no "x"\n\U0001f3d6 \u00e9', "extraInfo": {}}}),
            'no "x"\n\U0001f3d6 \u00e9',
        ),
        (json.dumps({"message": "SIGTERM"}), "SIGTERM"),
        ('{"message": {"message": "Connection reset by peer [127.0', "Connection reset by peer [127.0"),
        ('{"step": 3}', '{"step": 3}'),
    ],
)
def test_of_an_error_file_its_message_is_shown(text: str, shown: str) -> None:
    assert show_line(line(text)) == shown


def test_secrets_of_a_log_do_not_come_out() -> None:
    found = to_finding(
        conclusion(
            message="ValueError: HF_TOKEN=geheim",
            culprit=Culprit(things=("password=geheim",)),
            evidence=(place_of(line("login failed: api_key=geheim1")),),
            ask="https://me:geheim@host",
        )
    )
    assert "geheim" not in repr(found)


def test_a_long_line_is_cut_after_it_is_masked() -> None:
    text = "x" * (MAX_TEXT - 10) + " TOKEN=abcdefghijklmnop " + "y" * 500
    shown = show_line(line(text))
    assert len(shown) <= MAX_TEXT
    assert shown.endswith(" ...")
    assert "abc" not in shown


def test_what_several_lines_say_alike_is_shown_once() -> None:
    lines = (line("boom", 7), line("other", 8), line("boom", 9), line("boom", 2, path="b.log"))
    assert to_finding(conclusion(evidence=tuple(map(place_of, lines)))).evidence == (
        Evidence(seen="boom", source="a.log:7, a.log:9, b.log:2"),
        Evidence(seen="other", source="a.log:8"),
    )


def test_a_fix_has_the_culprit_and_says_what_it_does_not_know() -> None:
    assert "node03" in str(tell_fix(find_cause("gpu-hardware"), Culprit(("node03",))))
    assert "that node" in str(tell_fix(find_cause("gpu-hardware"), Culprit()))
    assert "of node03 to its interface's MTU, or" in str(tell_fix(find_cause("mtu-blackhole"), Culprit(("node03",))))
    in_use = str(tell_fix(find_cause("port-in-use"), Culprit(things=("process 12", "port 29500"))))
    assert "ss -ltnp 'sport = :29500' shows" in in_use
    assert "ss -ltnp shows" in str(tell_fix(find_cause("port-in-use"), Culprit(things=("port 1", "port 2"))))
    assert tell_fix(find_cause("healthy"), Culprit()) is None
    died = find_cause("dead-rank")
    assert str(tell_fix(died, Culprit(("n1",)), signum=SIGBUS)).startswith("on n1: df -h /dev/shm;")
    assert "PYTHONFAULTHANDLER=1" in str(tell_fix(died, Culprit(), signum=SIGSEGV))
    assert tell_fix(died, Culprit(), signum=SIGTERM) == tell_fix(died, Culprit())


def test_any_name_of_a_node_can_be_told() -> None:
    assert tell_nodes(()) is None
    assert tell_nodes(("worker/0", "[::1]", "n1", "n2", "n1")) == "[::1],n[1-2],worker/0"


def test_no_fix_needs_more_than_the_logs_have() -> None:
    assert [cause.id for cause in all_causes() if "{" in str(tell_fix(cause, Culprit()))] == []


def test_the_answer_is_the_first_and_where_that_is_undecided_the_next() -> None:
    sure, open_ = to_finding(conclusion()), to_finding(conclusion(confidence=Confidence.UNDECIDED))
    assert [count_first(found) for found in ([], [open_], [sure, sure], [open_, sure, sure])] == [0, 1, 1, 2]


def test_that_nothing_speaks_of_anything_is_no_answer() -> None:
    nothing = to_finding(conclusion("healthy", confidence=Confidence.UNDECIDED))
    well = to_finding(conclusion("healthy", confidence=Confidence.LIKELY))
    assert [is_answer(found) for found in ([], [nothing], [well], [to_finding(conclusion())])] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("job", "stack"),
    [
        ("4711_3", "look: allranks stack 4711_3 while it hangs"),
        ("20261123-031500-4711", "look: allranks stack 20261123-031500-4711 while it hangs"),
        (None, "look: allranks stack while it hangs"),
    ],
    ids=["SLURM", "run", "unknown"],
)
def test_commands_name_the_job(job: str | None, stack: str) -> None:
    finding = Finding(
        cause="AR408 stuck-rank",
        severity=Severity.FAIL,
        confidence=Confidence.LIKELY,
        message="JOB",
        ask="look: allranks stack JOB while it hangs",
    )
    found = fill_job(finding, job)
    assert (found.ask, found.message) == (stack, "JOB")


def test_no_fix_advises_to_run_why() -> None:
    assert [cause.id for cause in all_causes() if "allranks why" in str(cause.fix)] == []
