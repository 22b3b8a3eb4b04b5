"""One end that several lines tell is one fact; two ends stay two."""

from __future__ import annotations

from msgspec.structs import replace

from allranks.facts.fact import Fact, FactKind, Place, Said, Who
from allranks.model.finding import Confidence
from allranks.why.unite import unite

SUMMARY = Fact(kind=FactKind.ENDED, who=Who(rank=5, node="n1", pid=3981), places=(Place("job.log", 9, "exitcode: 1"),),
               said=Said.LAUNCHER, cause="user-code-error", confidence=Confidence.UNDECIDED, code=1,
               is_first_observed=True)  # fmt: skip
AGENT = replace(SUMMARY, who=Who(rank=5), places=(Place("job.log", 2, "failed"),), is_first_observed=False)
KILL = replace(SUMMARY, cause="host-oom-kill", confidence=Confidence.CERTAIN, code=None, signal=9)
COUNTED = replace(KILL, who=Who(node="n1"), said=Said.KERNEL, places=(Place("slurm.out", 4, "oom_kill event"),))


def test_one_end_is_one_fact_however_many_lines_tell_it() -> None:
    (end,) = unite([AGENT, SUMMARY])
    assert (end.who, end.code, end.is_first_observed) == (SUMMARY.who, 1, True)
    assert {place.line for place in end.places} == {2, 9}


def test_ends_of_two_processes_or_attempts_are_two_facts() -> None:
    assert len(unite([AGENT, replace(SUMMARY, who=Who(rank=4))])) == 2
    assert len(unite([AGENT, replace(SUMMARY, attempt=1)])) == 2


def test_whose_end_the_kernel_counts_another_line_says() -> None:
    (end,) = unite([COUNTED, KILL])
    assert (end.who, end.said) == (KILL.who, Said.KERNEL)


def test_an_end_on_another_node_is_another() -> None:
    assert len(unite([replace(COUNTED, who=Who(node="n2")), KILL])) == 2
