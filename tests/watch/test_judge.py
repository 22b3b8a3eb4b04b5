"""What is wrong now, told case by case: `cases/*.txt` are made to be read."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.model.node_look import EndSeen, NodeLook, ProcessLook, ProcessRole, SocketSeen
from allranks.report.text import Style, fold_ranks
from allranks.watch.judge import Opinion, describe, judge
from allranks.watch.since import Flow, LookHistory

from .told import CASES, TICK_S, Case, read_case, read_cases

PLAIN = Style(is_unicode=False, has_colour=False, width=100)
ALL = [(path.stem, case) for path in sorted(CASES.glob("*.txt")) for case in read_cases(path)]
FAULTS = {case.name: case.text for kind, case in ALL if kind == "faults" and "node02" in case.text}


def opinions(case: Case, delays: Sequence[float] = (0.01,)) -> Iterator[tuple[float, Opinion]]:
    """The opinion after each tick; each look comes after a delay, those of several nodes in the order of theirs."""
    history, coming, late = LookHistory(), [], itertools.cycle(delays)
    for now_s, looks in case.looks():
        coming += [(now_s + next(late), look) for look in looks]
        coming.sort(key=lambda pair: pair[0])
        while coming and coming[0][0] < now_s + TICK_S:
            heard_s, look = coming.pop(0)
            history.hear(look, heard_s)
        yield now_s, judge(history, now_s + TICK_S)


def tell(case: Case) -> list[str]:
    """What is said at the end, and when a verdict or a state was given first."""
    opinion = Opinion()
    first: dict[str, float] = {}
    for now_s, now in opinions(case):
        is_kept = now.verdicts or not opinion.verdicts or "the job goes on" in case.name
        assert is_kept, f"{now_s} s: a verdict was taken back"
        opinion = now
        if opinion.verdicts or opinion.states:
            first.setdefault("verdict" if opinion.verdicts else "state", now_s)
    lines = []
    for finding in opinion.verdicts:
        who = ", ".join(filter(None, (fold_ranks(finding.ranks), finding.subject)))
        lines.append(f"verdict, {finding.confidence}: {finding.cause}, {who} on {finding.node}: {finding.message}")
        lines += [f"  {note}" for note in finding.notes]
    lines += [f"{'suspicion' if state.is_suspicion else 'state'}: {state.text}" for state in opinion.states]
    lines += [f"not seen: {limit}" for limit in opinion.limits]
    culprits = fold_ranks(opinion.culprits) or "nobody"
    when = "".join(f", first {what} at {at_s:g} s" for what, at_s in first.items())
    return [*lines, f"exit {opinion.exit_code}, {culprits}{when}"]


@pytest.mark.parametrize("case", [case for _, case in ALL], ids=lambda case: case.name)
def test_what_is_said_of_a_job(case: Case) -> None:
    assert tell(case) == case.expected


def test_no_healthy_job_gets_a_verdict_at_any_time() -> None:
    said = [line for kind, case in ALL if kind == "healthy" for line in case.expected]  # with when a verdict was first
    assert len(said) > 25
    assert not [line for line in said if "verdict" in line]


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(FAULTS)), delays=st.lists(st.floats(0.0, 0.24), min_size=7, max_size=7))
def test_late_looks_in_any_order_of_nodes_blame_nobody_else(name: str, delays: list[float]) -> None:
    *_, (_, wanted) = opinions(read_case(FAULTS[name]))
    found = {opinion.culprits for _, opinion in opinions(read_case(FAULTS[name]), delays)}
    assert found == {(), wanted.culprits}


def test_the_lines_have_the_culprit_first_and_then_who_waits() -> None:
    case = read_case(
        "a rank is killed\njob: node01 = 0-1; node02 = 2; launcher\n 0 all: train\n 0 all: at a.py:3 in main\n"
        " 5 rank 2: ended by SIGKILL\n 5.5 ranks 0-1: exits 1\n 7 end"
    )
    *_, (_, opinion) = opinions(case)
    assert describe(opinion, PLAIN) == [
        "x AR407 dead-rank   node02 - rank 2" + " " * 58 + "certain",
        "  killed by SIGKILL (signal 9)",
        "  seen 1.5 s before, it was at a.py:3 in main",
        "  fix  on node02: dmesg -T | grep -i 'killed process'; if that lists it, memory ran out: request more, or "
        "use less",
        "  more allranks explain AR407",
        "  others waited for it or were ended: ranks 0-1",
    ]


def test_where_nothing_is_wrong_one_line_tells_how_far_the_job_is() -> None:
    case = read_case("training\njob: node01 = 0-2\n 0 all: train\n 20 end")
    *_, (_, opinion) = opinions(case)
    assert describe(opinion, PLAIN) == ["+ nothing is wrong: 3 ranks run, step 148; looked at for 20 s"]


def test_a_state_is_one_line_and_so_is_what_could_not_be_seen() -> None:
    text = next(case.text for _, case in ALL if case.name.startswith("a rank of several cannot be read"))
    *_, (_, opinion) = opinions(read_case(text))
    assert describe(opinion, PLAIN) == [
        "! where rank 2 is cannot be seen (ptrace_scope is 1: run it as root); 2 ranks wait in all_reduce at "
        "train.py:40",
        "  not seen: where rank 2 is: ptrace_scope is 1: run it as root",
    ]


def test_what_a_debugger_holds_is_not_continued_by_a_signal() -> None:
    text = next(case.text for _, case in ALL if case.name == "a rank is held by a debugger")
    *_, (_, opinion) = opinions(read_case(text))
    assert (
        describe(opinion, PLAIN)[3] == "  fix  on node01: TracerPid in /proc/110/status is the debugger; let it detach"
    )


def test_a_node_whose_looks_come_late_for_long_keeps_its_clock() -> None:
    history, coming = LookHistory(), list[tuple[float, NodeLook]]()
    for node, failed_s in (("a", 60.0), ("b", 60.8)):  # one rank each; those of node a come late from 48 s on
        for tick in range(4 * 80):
            at_s = tick / 4
            end = EndSeen(at_s=at_s, code=1) if at_s >= failed_s else None
            rank = ProcessLook(pid=7, role=ProcessRole.WORKER, rank="ab".index(node), world_size=2, end=end)
            late_s = 2.0 if node == "a" and at_s >= 48 else 0.05
            coming.append((at_s + late_s, NodeLook(node=node, at_s=at_s, processes=(rank,))))
    for heard_s, look in sorted(coming, key=lambda pair: pair[0]):
        history.hear(look, heard_s)
        opinion = judge(history, heard_s)
    assert [finding.ranks for finding in opinion.verdicts] == [(0,)]


def test_a_queue_that_gets_shorter_is_not_stuck_where_the_kernel_tells_no_bytes() -> None:
    full, less = (SocketSeen(own_address="a", own_port=1, unacked_bytes=num) for num in (4096, 2048))
    flow = Flow(full, 0.0, 0.0, 0.0)
    for seen, told_s in ((full, 1.0), (less, 2.0), (less, 3.0), (full, 4.0)):
        flow.hear(seen, told_s)
    assert flow.stuck_s == 2.0


if __name__ == "__main__":  # python -m tests.watch.test_judge: writes what is said now into the cases, to be read
    for path in sorted(CASES.glob("*.txt")):
        parts = []
        for case in read_cases(path):
            kept = [line for line in case.text.rstrip().splitlines() if not line.startswith("> ")]
            parts.append("\n".join(["== " + kept[0], *kept[1:], *(f"> {line}" for line in tell(case))]))
        path.write_text("\n\n".join(parts) + "\n")
        print(path, len(parts), file=sys.stderr)
