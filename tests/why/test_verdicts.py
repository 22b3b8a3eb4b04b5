"""Is what allranks itself said of a job believed before its logs?"""

from __future__ import annotations

from pathlib import Path

import msgspec

from allranks.model.finding import Confidence, Evidence, Finding, Severity, Verdict
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
