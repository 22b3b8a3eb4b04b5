"""Do causes with a trait get what the trait promises? Each cause that has it, by a line of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from allranks.causes.book import all_causes, all_marks, find_cause
from allranks.causes.cause import Cause, Trait
from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import Logs
from allranks.why.readings.tracebacks import read_tracebacks
from allranks.why.verdicts import join_verdict

Why = Callable[[str | Mapping[str, str]], list[Conclusion]]
Read = Callable[[str | Mapping[str, str]], Logs]

STEPS = "step 10 loss: 0.5\nstep 20 loss: 0.4\n"
DONE = "E1121 14:03:24.123000 909 torch/distributed/elastic/agent/server/api.py:1008] Error waiting on exit barrier.\n"
RAISED = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: no label\n'
KILLED = "srun: error: node02: task 3: Killed\n"


def having(trait: Trait) -> list[Cause]:
    return [cause for cause in all_causes() if trait in cause.traits]


def named(found: list[Conclusion]) -> set[str]:
    return {conclusion.cause.name for conclusion in found if conclusion.is_failure}


def lines_of(cause: Cause, why: Why) -> Iterator[str]:
    """Yield the lines that show this cause, alone."""
    return (f"{hit}\n" for hit in cause.hits if cause.name in named(why(f"{hit}\n")))


def line_of(cause: Cause, why: Why) -> str:
    return next(lines_of(cause, why))


@pytest.mark.parametrize("cause", having(Trait.REPORTED_BY_WATCHERS), ids=lambda cause: cause.name)
def test_what_watchers_report_below_an_exception_does_not_explain_it(cause: Cause, why: Why, read: Read) -> None:
    assert not read_tracebacks(read(RAISED + line_of(cause, why)))[0].is_explained


def test_another_line_below_an_exception_explains_it(why: Why, read: Read) -> None:
    assert read_tracebacks(read(RAISED + line_of(find_cause("cuda-oom"), why)))[0].is_explained


@pytest.mark.parametrize("cause", having(Trait.ENDS_FROM_OUTSIDE), ids=lambda cause: cause.name)
def test_tasks_that_srun_ends_after_an_end_from_outside_are_no_culprits(cause: Cause, why: Why) -> None:
    assert "host-oom-kill" in named(why(KILLED))
    assert "host-oom-kill" not in named(why(line_of(cause, why) + KILLED))


def test_events_are_asked_for_by_trait_and_come_in_their_order(why: Why, read: Read) -> None:
    lines = [line_of(cause, why) for cause in having(Trait.ENDS_FROM_OUTSIDE)]
    logs = read("".join([RAISED, *reversed(lines)]))
    asked = [event.line.number for event in logs.of(Trait.ENDS_FROM_OUTSIDE, "traceback")]
    assert asked == [1, 4, 5, 6]


def test_no_mark_is_called_as_a_cause_or_a_trait_is() -> None:
    assert not {mark.name for mark in all_marks()} & {*Trait, *(cause.name for cause in all_causes())}


@pytest.mark.parametrize(("confidence", "keeps"), [(Confidence.LIKELY, False), (Confidence.CERTAIN, True)])
@pytest.mark.parametrize("first", ["AR590 user-code-error", "AR999 of-a-later-version"])
def test_beside_a_verdict_a_connection_that_broke_with_its_peer_is_left_out_unless_it_is_certain(
    first: str, confidence: Confidence, *, keeps: bool
) -> None:
    culprit = Finding(cause=first, severity=Severity.FAIL, confidence=Confidence.CERTAIN, message="it failed")
    broke = Finding(
        cause="AR215 peer-connection-lost", severity=Severity.FAIL, confidence=confidence, message="it broke"
    )
    verdict = Verdict(job="7", attempt=0, exit_code=1, findings=(culprit,))
    assert join_verdict(verdict, [broke]) == [culprit, *([broke] if keeps else [])]


def test_a_connection_that_broke_after_an_error_is_told_by_the_chain_alone(why: Why) -> None:
    lost = "[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5231\n"
    first, *others = why("".join(f"[rank1]: {line}\n" for line in RAISED.splitlines()) + lost)
    assert (first.cause.name, first.culprit.ranks, others) == ("user-code-error", (1,), [])
    assert "rank 0 lost a peer" in " ".join(first.notes)
