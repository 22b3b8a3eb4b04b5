"""Is what allranks itself said of a job believed before its logs?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from allranks.cli.meant import Unfinished, find_unfinished
from allranks.cli.why import make_answer
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
from allranks.why.logs.collect import collect
from allranks.why.logs.log_events import Logs, Pattern
from allranks.why.logs.match import Matcher
from allranks.why.logs.sources import find_sources
from allranks.why.verdicts import join_verdict, take_verdict

PARTED = Finding(
    cause="AR211 partition",
    severity=Severity.FAIL,
    confidence=Confidence.CERTAIN,
    node="node01 | node02",
    message="nothing comes through",
    evidence=(Evidence(seen="export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345"),),
)
WARNED = Finding(cause="AR205 mtu-unequal", severity=Severity.WARN, confidence=Confidence.CERTAIN, message="unequal")
OWN = Finding(cause="AR490 collective-timeout", severity=Severity.FAIL, confidence=Confidence.LIKELY, message="waited")


def write_verdict(path: Path, *findings: Finding, exit_code: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Verdict(job="7", attempt=0, exit_code=exit_code, findings=findings).to_json())


def test_the_leaders_verdict_of_the_last_attempt_is_taken(tmp_path: Path) -> None:
    write_verdict(tmp_path / "attempt_0/verdict.json", exit_code=1)
    write_verdict(tmp_path / "attempt_1/verdict.json", PARTED, exit_code=75)
    write_verdict(tmp_path / "attempt_1/node01/verdict.json", exit_code=3)
    (tmp_path / "attempt_1/node01/rank_0.err").write_text("x\n")
    logs, verdict = take_verdict(find_sources([str(tmp_path)]))
    assert [source.shown for source in logs] == ["attempt_1/node01/rank_0.err"]
    assert verdict is not None
    assert verdict.findings == (PARTED,)


def test_a_cut_verdict_is_read_as_any_log(tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_text('{"job": "7", ')
    logs, verdict = take_verdict(find_sources([str(tmp_path)]))
    assert verdict is None
    assert len(logs) == 1


def test_its_findings_come_first_and_masked() -> None:
    verdict = Verdict(job="7", attempt=0, exit_code=75, findings=(PARTED,))
    found = join_verdict(verdict, [OWN])
    assert [each.cause for each in found] == [PARTED.cause, OWN.cause]
    assert "hf_abc" not in found[0].evidence[0].seen


def test_a_secret_in_the_message_of_a_verdict_is_masked() -> None:
    """The message of a verdict is an exception's own words."""
    said = msgspec.structs.replace(PARTED, message="OSError: 401 for hf_abcdefghijklmnopqrstuvwxyz012345", evidence=())
    (found,) = join_verdict(Verdict(job="7", attempt=0, exit_code=1, findings=(said,)), [])
    assert found.message.startswith("OSError: 401 for ")
    assert "hf_abc" not in found.message


def test_of_the_same_cause_the_logs_know_the_lines() -> None:
    line = Evidence(seen="nothing comes through", source="rank_0.err:7")
    own = Finding(
        cause=PARTED.cause, severity=Severity.FAIL, confidence=Confidence.LIKELY, message="perhaps", evidence=(line,)
    )
    (first,) = join_verdict(Verdict(job="7", attempt=0, exit_code=75, findings=(PARTED,)), [own])
    assert (first.message, first.confidence, first.evidence) == (PARTED.message, PARTED.confidence, (line,))


def test_lines_of_victims_are_no_evidence_against_the_culprit() -> None:
    theirs = Evidence(seen="Connection closed by peer", source="runs/7/attempt_0/n1/rank_0.err:17")
    mine = Evidence(seen="killed", source="runs/7/attempt_0/n1/rank_2.err:3")
    of_all = Evidence(seen="srun: error: task 2: Killed", source="slurm-7.out:9")
    tail = Evidence(seen="step 50", source="runs/7/attempt_0/n1/rank_2.err")
    dead = msgspec.structs.replace(OWN, cause="AR407 dead-rank", ranks=(2,), evidence=(tail,))
    verdict = Verdict(job="7", attempt=0, exit_code=137, findings=(dead,))
    for lines, shown in (
        ((theirs,), (tail,)),
        ((theirs, mine), (mine,)),
        ((theirs, of_all), (of_all,)),
        ((), (tail,)),
    ):
        (found,) = join_verdict(verdict, [msgspec.structs.replace(dead, evidence=lines)])
        assert found.evidence == shown


def test_a_job_that_ended_well_is_healthy_whatever_its_logs_say() -> None:
    found = join_verdict(Verdict(job="7", attempt=0, exit_code=0, findings=(WARNED,)), [OWN])
    assert [each.cause for each in found] == ["AR599 healthy", WARNED.cause]


def test_a_failure_that_the_verdict_does_not_name_is_the_logs() -> None:
    found = join_verdict(Verdict(job="7", attempt=0, exit_code=1, findings=(WARNED,)), [OWN])
    assert [each.cause for each in found] == [OWN.cause, WARNED.cause]


REPORT = """
✗ AR210 link-down   node03 · ens1f1                                             certain
  ens1f1 has no carrier
  seen carrier 0 in /sys/class/net/ens1f1
  fix  check the cable
  more allranks explain AR210
"""
VICTIM = '  File "/home/ada/train.py", line 7, in <module>\nRuntimeError: rank 4 lost its peers\n'
BEGUN = "allranks: 6 ranks on 3 nodes (node[01-03]), gloo over ens1f1; roll call 1.2 s; logs in runs/7/attempt_0\n"
RESTARTED = "allranks: restart 1 on 2 nodes without node03, from the checkpoint of step 120; 2 more restarts left\n"
SUCCEEDED = "allranks: train.py succeeded: 4 ranks, 3 min 20 s, 1 restart; output in runs/7/attempt_0\n"

Why = Callable[[str | Mapping[str, str]], list[Finding]]


@pytest.fixture
def findings(read: Callable[[str | Mapping[str, str]], Logs]) -> Why:
    """What `why` answers to such logs."""

    def explain(text: str | Mapping[str, str]) -> list[Finding]:
        answer = make_answer(read(text), (), (), is_all=True, with_timeline=False)
        return list(answer.findings)

    return explain


def test_a_printed_verdict_comes_before_what_its_victims_say(findings: Why) -> None:
    first, *others = findings(BEGUN + VICTIM + REPORT + "srun: error: node04: task 4: Exited with exit code 1\n")
    assert (first.cause, first.node, first.interface, first.ranks) == ("AR210 link-down", "node03", "ens1f1", ())
    assert (first.confidence, first.severity) == (Confidence.CERTAIN, Severity.FAIL)
    assert (first.message, first.fix) == ("ens1f1 has no carrier", "check the cable")
    assert [each.source for each in first.evidence] == [None, "job.log:5"]
    assert "AR590 user-code-error" in [each.cause for each in others]


def test_the_last_printed_verdict_counts(findings: Why) -> None:
    later = REPORT.replace("AR210 link-down", "AR407 dead-rank").replace("node03 · ens1f1", "node02 · rank 3")
    found = findings(BEGUN + REPORT + RESTARTED + later)
    assert [(each.cause, each.severity) for each in found] == [
        ("AR407 dead-rank", Severity.FAIL),
        ("AR210 link-down", Severity.WARN),
    ]
    assert findings(BEGUN + REPORT + BEGUN + later)[0].cause == "AR407 dead-rank"
    found = findings(BEGUN + REPORT + "\n\n\n" + later)
    assert [each.cause for each in found[:2]] == ["AR407 dead-rank", "AR210 link-down"]


def test_two_that_broke_at_once_of_one_cause_are_both_told(findings: Why) -> None:
    one, other = (
        REPORT.replace("AR210 link-down", "AR407 dead-rank").replace("node03 · ens1f1", f"node02 · rank {rank}")
        for rank in (3, 4)
    )
    assert [each.ranks for each in findings(BEGUN + one + "\n" + other)[:2]] == [(3,), (4,)]


def test_a_run_that_succeeded_after_a_restart_is_healthy(findings: Why) -> None:
    first, *others = findings(BEGUN + VICTIM + REPORT + RESTARTED + "step 130 loss 0.1\n" + SUCCEEDED)
    assert (first.cause, first.confidence) == ("AR599 healthy", Confidence.CERTAIN)
    assert [(each.cause, each.severity) for each in others] == [
        ("AR590 user-code-error", Severity.WARN),  # what the victim raised
        ("AR210 link-down", Severity.WARN),
    ]


LIVE = """\
allranks: 0:21:40 · 7/8 wait 41 s in all_reduce for r3 evaluate.py:88 · ends in 9:19 · allranks stack latest
allranks: goodput 71 % in 2 h 14 min; lost: 24 % waiting, most for rank 5 on node03; 2.6 % restarting
allranks: 1 restart cost 1 min 12 s (AR407 dead-rank on node03): 35 s until the first new step, 50 steps again in 37 s
"""
FAILED = (
    "allranks: train.py failed (exit 137): 4 ranks, 2 h 14 min, 12 restarts, step 60/100, 4.1 it/s; output in runs/7\n"
)


def test_what_a_run_says_of_itself_is_no_fault(findings: Why) -> None:
    healthy = FAILED.replace("failed (exit 137)", "succeeded")
    assert [each.cause for each in findings(BEGUN + LIVE + healthy)] == ["AR599 healthy"]
    first, *others = findings(BEGUN + LIVE + REPORT + FAILED)
    assert (first.cause, others) == ("AR210 link-down", [])


def test_what_fails_after_a_run_that_succeeded_is_the_failure(findings: Why) -> None:
    found = findings(BEGUN + SUCCEEDED + "Traceback (most recent call last):\n" + VICTIM)
    assert found[0].cause == "AR590 user-code-error"
    found = findings({"job.log": BEGUN + SUCCEEDED, "b.log": "srun: error: Node failure on node07\n"})
    assert found[0].cause == "AR012 node-failure"


def test_a_restart_that_ends_without_a_verdict_is_no_verdict(findings: Why) -> None:
    found = findings(BEGUN + REPORT + RESTARTED + "srun: error: Node failure on node07\n")
    assert (found[0].cause, found[-1].cause) == ("AR012 node-failure", "AR210 link-down")


def test_the_verdict_of_the_run_directory_comes_before_a_printed_one(read: Callable[[str], Logs]) -> None:
    verdict = Verdict(job="7", attempt=0, exit_code=75, findings=(PARTED,))
    answer = make_answer(read(BEGUN + REPORT), (), (), verdict=verdict, is_all=True, with_timeline=False)
    assert [each.cause for each in answer.findings] == [PARTED.cause]


def test_a_secret_in_a_printed_verdict_is_masked(findings: Why) -> None:
    (found,) = findings(REPORT.replace("carrier 0", "HF_TOKEN=geheim").replace("the cable", "password=geheim"))
    assert "geheim" not in str(found)


STARTED = '{"time_s": 1795457466.8, "event": "started", "generation": 0, "members": ["vm"], "pid": 4194305}\n'
INTERRUPTED = '{"time_s": 1795457472.878, "event": "interrupted", "signum": 2, "node": "vm"}\n'
KILLED_BY_HAND = (
    'Traceback (most recent call last):\n  File "/home/ada/train.py", line 7, in <module>\nKeyboardInterrupt\n'
)


def write_interrupted(folder: Path, *, events: str, exit_code: int | None) -> None:
    """Write the run directory of two ranks that Ctrl-C ended, and of an agent that was killed if it has no code."""
    for rank in range(2):
        (folder / "attempt_0/vm").mkdir(parents=True, exist_ok=True)
        (folder / f"attempt_0/vm/rank_{rank}.err").write_text(KILLED_BY_HAND)
        (folder / f"attempt_0/vm/rank_{rank}.out").write_text("step 3\n")
    (folder / "attempt_0/events.jsonl").write_text(events)
    if exit_code is not None:
        write_verdict(folder / "attempt_0/verdict.json", exit_code=exit_code)


@pytest.mark.parametrize(
    ("events", "exit_code", "confidence"),
    [
        (STARTED + INTERRUPTED, 130, Confidence.CERTAIN),
        (STARTED + INTERRUPTED, None, Confidence.CERTAIN),
        (STARTED, 130, Confidence.CERTAIN),
        (STARTED + INTERRUPTED.replace(" 2,", " 15,"), 143, Confidence.LIKELY),
        (STARTED + INTERRUPTED.replace(" 2,", " 15,"), None, Confidence.LIKELY),
    ],
    ids=["Ctrl-C", "Ctrl-C, then killed", "no events", "SIGTERM", "SIGTERM, then killed"],
)
def test_an_interrupted_run_blames_nobody(
    tmp_path: Path,
    patterns: tuple[Pattern, ...],
    matcher: Matcher,
    events: str,
    exit_code: int | None,
    confidence: Confidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "vm")
    run = tmp_path / "runs/20261123-031500-7"
    write_interrupted(run, events=events, exit_code=exit_code)
    sources, verdict = take_verdict(find_sources([str(run)]))
    logs = collect(sources, patterns, matcher=matcher)
    unfinished = Unfinished() if verdict else find_unfinished([str(run)])
    answer = make_answer(logs, (), (), verdict=verdict, unfinished=unfinished, is_all=True, with_timeline=False)
    (found,) = answer.findings
    assert (found.cause, found.confidence) == ("AR508 cancelled", confidence)
    assert (found.node, found.ranks, found.subject) == (None, (), None)


def test_an_interrupted_run_is_known_by_its_last_line(findings: Why) -> None:
    found = findings(BEGUN + "allranks: SIGINT after 7 s: all workers here have ended; output in runs/7/attempt_0/vm\n")
    assert [each.cause for each in found] == ["AR508 cancelled"]


def test_what_ended_the_job_from_outside_is_named_as_the_logs_know_it() -> None:
    limit = msgspec.structs.replace(OWN, cause="AR507 time-limit")
    guess = msgspec.structs.replace(OWN, cause="AR409 straggler-rank", confidence=Confidence.UNDECIDED)
    found = join_verdict(Verdict(job="7", attempt=0, exit_code=143), [OWN, guess, limit])
    assert [each.cause for each in found] == [limit.cause, OWN.cause]


def test_a_traceback_reads_as_in_the_verdict() -> None:
    """`run` prints it whole; the logs have the exception and its frame as two lines."""
    whole = Evidence(seen='Traceback:\n  File "a.py", line 7\nValueError: x', source="runs/7/attempt_0/n1/rank_2.err")
    lines = (
        Evidence(seen="ValueError: x", source="attempt_0/n1/rank_2.err:4"),
        Evidence(seen='File "a.py", line 7', source="attempt_0/n1/rank_2.err:2"),
    )
    raised = msgspec.structs.replace(OWN, cause="AR590 user-code-error", ranks=(2,), evidence=(whole,))
    own = msgspec.structs.replace(raised, evidence=lines)
    (found,) = join_verdict(Verdict(job="7", attempt=0, exit_code=1, findings=(raised,)), [own])
    assert found.evidence == (Evidence(seen=whole.seen, source="attempt_0/n1/rank_2.err:4"),)


def test_a_sure_verdict_needs_no_guesses() -> None:
    guess = msgspec.structs.replace(OWN, cause="AR504 nccl-version-mismatch", confidence=Confidence.UNDECIDED)
    found = join_verdict(Verdict(job="7", attempt=0, exit_code=75, findings=(PARTED,)), [OWN, guess])
    assert [each.cause for each in found] == [PARTED.cause, OWN.cause]
    unsure = msgspec.structs.replace(PARTED, confidence=Confidence.UNDECIDED)
    found = join_verdict(Verdict(job="7", attempt=0, exit_code=75, findings=(unsure,)), [guess])
    assert [each.cause for each in found] == [PARTED.cause, guess.cause]
