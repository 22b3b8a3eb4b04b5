"""Does a running job stay up in a real SLURM? One strike of each class; and how drills of running jobs are judged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allranks.causes.book import all_causes, find_cause
from allranks.lab import slurm_daemons
from allranks.lab.faults.catalogue import FAULTS
from allranks.lab.faults.fault import Expected, TrueCulprit
from allranks.lab.faults.injected import heal, inject
from allranks.lab.faults.running.strike import NextLeader, Strike
from allranks.lab.faults.running.strike_catalogue import STRIKES
from allranks.lab.faults.running.target import DrilledJob, Saved, StepDone
from allranks.lab.running.drills_page import describe_times, render_table
from allranks.lab.running.healthy import Busy, judge_slow
from allranks.lab.running.seen import JobSeen, StrikeBaseline, judge
from allranks.lab.running.strike_drill import StrikeResult
from allranks.lab.running.terminal import Terminal
from allranks.model.errors import SetupError
from allranks.model.ledger import Ledger, RankLedger
from allranks.state.saved.manifest import MANIFEST, Manifest
from allranks.wire.leader_port import ANNOUNCEMENT, Announcement

from .conftest import TestLab

IN_CI = ["--plain", "worker-killed", "link-cut-running"]
BY_HAND = ["--plain", "node-killed", "shapes-differ"]
TRACKED = ["node-back"]
"""A job that reports its steps can take a node back between two of them."""


@pytest.mark.lab
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [IN_CI, pytest.param(BY_HAND, marks=pytest.mark.by_hand), pytest.param(TRACKED, marks=pytest.mark.by_hand)],
    ids=["plain", "more", "tracked"],
)
def test_a_running_job_names_who_was_struck_and_goes_on(names: list[str], six_nodes: TestLab, tmp_path: Path) -> None:
    wrong, said = six_nodes.drill_running(names, tmp_path)
    assert wrong == {name: [] for name in names if not name.startswith("--")}, said


@pytest.mark.lab
def test_what_strikes_need_beforehand_is_healed_without_a_trace(six_nodes: TestLab, tmp_path: Path) -> None:
    before = _traces(six_nodes)
    for name in STRIKES:
        inject(six_nodes.lab, name, seed=5, run_dir=tmp_path)
        heal(six_nodes.lab)
    assert _traces(six_nodes) == before


@pytest.mark.lab
def test_slurm_waits_longer_for_a_node_that_comes_back_and_no_longer_than_that(
    six_nodes: TestLab, tmp_path: Path
) -> None:
    inject(six_nodes.lab, "node-back", seed=5, run_dir=tmp_path)
    assert _patience(six_nodes) == ["SlurmdTimeout", "=", "45", "sec"]
    heal(six_nodes.lab)
    assert _patience(six_nodes) == ["SlurmdTimeout", "=", "15", "sec"]


def _patience(lab: TestLab) -> list[str]:
    """How long SLURM waits for a silent node, as its controller has it."""
    return next(line.split() for line in lab.ask("scontrol", "show", "config").splitlines() if "SlurmdTimeout" in line)


def _traces(lab: TestLab) -> list[str]:
    """What the strikes change: links, devices, mounts, cgroups, SLURM's daemons and its configuration."""
    show_links = "ip -oneline link | awk '{print $2, $3, $5}'"
    links = [lab.on(node, "sh", "-c", show_links) for node in ("master-node", "node03")]
    mounts = lab.on("node03", "sh", "-c", "grep -c . /proc/mounts; losetup --all; nft list ruleset")
    cgroups = [str(path) for path in Path("/sys/fs/cgroup").rglob(f"allranks-{lab.name}-*")]
    daemons = [str(node["daemon_pids"]) for node in json.loads(lab.run("status", "--json").stdout)["nodes"]]
    return [*links, mounts, *cgroups, *daemons, slurm_daemons.conf_path(lab.lab.dir).read_text()]


@pytest.mark.lab
def test_what_strikes_a_running_job_is_not_put_in_before_it(six_nodes: TestLab) -> None:
    done = six_nodes.run("inject", "node-killed", must_work=False)
    assert done.returncode == 2
    assert done.stderr == "error: node-killed needs a running job: allranks lab drill --running node-killed\n"


@pytest.mark.lab
def test_an_unknown_strike_is_one_line(six_nodes: TestLab) -> None:
    done = six_nodes.run("drill", "--running", "node-kiled", must_work=False)
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1]
        == "error: lab drill --running node-kiled: unknown strike: did you mean node-killed?"
    )


def test_no_strike_has_the_name_of_a_fault() -> None:
    assert STRIKES.keys() & FAULTS.keys() == set()


def test_every_strike_names_causes_of_the_catalogue() -> None:
    ids = {cause.id for cause in all_causes()}
    assert {cause for strike in STRIKES.values() for cause in (*strike.cause, *strike.also)} <= ids


# How a drill is judged


class Killed(Strike, name="killed", cause="AR407"):
    """One worker dies."""

    verdict_s, next_step_s = 1.0, 12.0


class Late(Strike, name="late", cause="AR409"):
    """One rank is late."""

    severity = Expected.SURVIVED


class Raised(Strike, name="raised", cause="AR590"):
    """One rank raises."""

    severity = Expected.FAIL
    exit_codes = (1,)


STRUCK_S = 1000.0


def verdict(time_s: float = 1000.5, *, cause: str = "AR407 dead-rank", **fields: Any) -> Mapping[str, Any]:
    named = {"cause": cause, "cause_id": find_cause(cause).id}
    return {"time_s": time_s, "event": "verdict", **named, "node": "node03", "ranks": [3]} | fields


def step(time_s: float, *, generation: int = 1, number: int = 8, world: int = 6) -> StepDone:
    return StepDone(
        step=number, time_s=time_s, attempt=0, generation=generation, rank=0, world=world, node="n", pid=7
    )  # fmt: skip


def seen(**changes: Any) -> JobSeen:
    whole = {
        "struck_s": STRUCK_S,
        "printed": ((1000.6, "AR407"),),
        "events": (verdict(),),
        "steps": (step(999.9, generation=0), step(1006.0)),
        "has_ended": True,
        "exit_code": 0,
    }
    return JobSeen(**(whole | changes))


def wrong(strike: type[Strike] = Killed, **changes: Any) -> list[str]:
    return judge(strike, seen(**changes), TrueCulprit(nodes=("node03",)), (3,))


def test_a_drill_that_went_as_it_must_has_nothing_against_it() -> None:
    assert wrong() == []


def test_a_slow_machine_has_more_time_for_the_imports() -> None:
    late = seen(steps=(step(1030.0),))
    assert judge(Killed, late, TrueCulprit(nodes=("node03",)), (3,), slowness=2.5) == []
    (found,) = judge(Killed, late, TrueCulprit(nodes=("node03",)), (3,), slowness=2.0)
    assert found == "the next step took 30.0 s, expected at most 24 s"


def test_two_that_are_named_in_one_moment_are_one_verdict() -> None:
    both, truth = (verdict(), verdict(node="node05", ranks=[5])), TrueCulprit(nodes=("node03", "node05"))
    assert judge(Killed, seen(events=both), truth, (3, 5)) == []
    assert wrong(events=both) == ["verdict AR407 dead-rank node03, node05 (3, 5); the truth is node03"]
    later = (verdict(), verdict(1003.0, node="node05", ranks=[5]))
    assert wrong(events=later) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"events": (), "printed": ()}, "no verdict; the truth is AR407 node03"),
        ({"events": (verdict(node="node04"),)}, "verdict AR407 dead-rank node04 (3,); the truth is node03"),
        ({"events": (verdict(ranks=[4]),)}, "verdict AR407 dead-rank node03 (4,); the truth is rank 3"),
        (
            {"events": (verdict(cause="AR215 peer-connection-lost"),)},
            "verdict AR215 peer-connection-lost node03 (3,); the truth is AR407 node03",
        ),
        ({"events": (verdict(990.0), verdict())}, "false alarm before the strike: AR407 dead-rank"),
        ({"printed": ((1002.0, "AR407"),)}, "the verdict took 2.0 s, expected at most 1 s"),
        ({"steps": (step(999.9, generation=0),)}, "no further step"),
        (
            {"checkpoint": 5, "steps": (step(1006.0, number=1),)},
            "the job started from the beginning, although there was a checkpoint at step 5",
        ),
        ({"steps": (step(1013.0),)}, "the next step took 13.0 s, expected at most 12 s"),
        ({"has_ended": False, "exit_code": None}, "the job did not end"),
        ({"exit_code": 75}, "exit code 75, expected 0"),
        ({"left": ("node03: python (pid 7)",)}, "left running: node03: python (pid 7)"),
        ({"more": ("resumed at step 1",)}, "resumed at step 1"),
    ],
)
def test_what_is_not_as_it_must_be_is_said(changes: dict[str, Any], said: str) -> None:
    assert wrong(**changes) == [said]


def test_who_is_honest_and_slow_must_neither_be_accused_nor_started_again() -> None:
    calm = {"events": (), "printed": (), "steps": (step(999.9, generation=0), step(1001.0, generation=0))}
    assert wrong(Late, **calm) == []
    assert wrong(Late, **calm | {"events": (verdict(),)}) == ["accused: AR407 dead-rank node03"]
    assert wrong(Late, **calm | {"steps": (step(1001.0),)}) == ["the job was restarted"]


# How the loss of a leader is judged


class LeaderLost(Strike, name="leader-lost", cause="AR012"):
    """The leader is lost, and another node leads on."""

    succession, num_lost = NextLeader.LOST, 1


class LeaderResigned(LeaderLost, name="leader-resigned", cause="AR012"):
    """The leader names its own node, and hands over."""

    succession = NextLeader.RESIGNED


def took_over(time_s: float = 1003.0, leader: str = "node01") -> Mapping[str, Any]:
    return {"time_s": time_s, "event": "took_over", "leader": leader, "generation": 1}


LOST = verdict(1003.2, cause="AR012 node-failure")
LED_ON = {
    "events": (took_over(), LOST),
    "printed": ((1003.3, "AR012"),),
    "steps": (step(999.9, generation=0), step(1006.0, world=5)),
}


RANK_LEDGERS = tuple(RankLedger(rank=rank, seconds={"step": 80.0, "wait": 20.0}) for rank in range(3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"seconds": {"step": 240.0, "wait": 60.2}}, []),  # 0.1 % are allowed
        ({"seconds": {"step": 220.0, "wait": 60.0}}, ["the categories of the account sum to 280.0 s of 300.0 s"]),
        ({"ranks": RANK_LEDGERS[:1]}, ["the ranks of the account sum to 100.0 s of 300.0 s"]),
        ({"attempts": 2}, ["the account has 2 attempts of 1"]),
    ],
)
def test_the_account_of_a_drilled_job_must_close(changes: dict[str, Any], said: list[str]) -> None:
    whole = {"begun_s": 900.0, "until_s": 1000.0, "rank_s": 300.0, "seconds": {"step": 240.0, "wait": 60.0}}
    assert wrong(ledger=Ledger(**(whole | {"ranks": RANK_LEDGERS} | changes))) == said


def test_a_job_that_goes_on_under_another_leader_is_right() -> None:
    assert wrong(LeaderLost, **LED_ON) == []
    assert seen(**LED_ON).successors() == ("node01",)
    assert seen(**LED_ON).verdict_s(NextLeader.LOST) == pytest.approx(3.3)


def test_a_lost_leader_is_not_believed_and_one_that_resigns_is() -> None:
    own = verdict(1002.0, cause="AR210 link-down", node="node05")
    with_own = LED_ON | {"events": (own, took_over(), LOST), "printed": ((1002.1, "AR210"), (1003.3, "AR012"))}
    assert wrong(LeaderLost, **with_own) == []
    assert seen(**with_own).verdict_s(NextLeader.LOST) == pytest.approx(3.3)
    assert wrong(LeaderResigned, **with_own) == ["verdict AR210 link-down node05 (3,); the truth is AR012 node03"]
    resigned = LED_ON | {"events": (verdict(1002.0, cause="AR012 node-failure"), took_over())}
    assert wrong(LeaderResigned, **resigned) == []


@pytest.mark.parametrize(
    ("strike", "changes", "said"),
    [
        (LeaderLost, {"events": (LOST,)}, "no other node leads now"),
        (LeaderLost, {"events": (took_over(leader="node03"), LOST)}, "node03 leads now, although it was struck"),
        (
            LeaderLost,
            {"steps": (step(999.9, generation=0), step(1006.0, world=4))},
            "the next step was on 4 ranks, expected 5 of 6",
        ),
        (LeaderLost, {"num_requeues": 1}, "the job was requeued"),
        (
            LeaderLost,
            {"steps": (step(999.9, generation=0), step(1006.0, world=5), step(1007.0, generation=0))},
            "n did step 8 1.00 s after the first of later workers",
        ),
    ],
)
def test_what_is_wrong_with_a_succession_is_said(strike: type[Strike], changes: dict[str, Any], said: str) -> None:
    assert judge(strike, seen(**LED_ON | changes), TrueCulprit(nodes=("node03",)), ()) == [said]


def test_nobody_takes_over_from_a_leader_that_is_there() -> None:
    assert wrong(events=(verdict(), took_over())) == ["node01 leads now, although the leader was not lost"]


def test_a_verdict_before_the_drill_s_own_beginning_is_no_false_alarm() -> None:
    twice = {"events": (verdict(990.0), verdict())}
    assert wrong(**twice, began_s=995.0) == []
    assert wrong(**twice, began_s=985.0) == ["false alarm before the strike: AR407 dead-rank"]


def test_parts_of_one_verdict_may_come_later_where_the_strike_says_so() -> None:
    class HalfLost(LeaderLost, name="half-lost", cause="AR012"):
        """Two nodes are lost."""

        together_s = 2.0

    both = (took_over(), LOST, verdict(1004.5, cause="AR012 node-failure", node="node05"))
    truth = TrueCulprit(nodes=("node03", "node05"))
    assert judge(HalfLost, seen(**LED_ON | {"events": both}), truth, ()) == []
    assert judge(LeaderLost, seen(**LED_ON | {"events": both}), truth, ()) != []


def test_a_job_that_must_end_ends_with_its_code() -> None:
    raised = {"events": (verdict(cause="AR590 user-code-error"),), "exit_code": 1, "steps": ()}
    assert wrong(Raised, **raised) == []
    assert wrong(Raised, **raised | {"exit_code": 0}) == ["exit code 0, expected 1"]


def test_seconds_count_from_the_strike() -> None:
    whole = seen(events=(verdict(), {"time_s": 1001.0, "event": "restarting", "generation": 1}))
    assert (whole.verdict_s(), whole.next_step_s()) == (pytest.approx(0.6), pytest.approx(6.0))
    assert whole.phases_s() == {"verdict": 0.5, "restarting": 1.0}


def test_who_is_called_slow_must_have_been_at_something() -> None:
    busy = [Busy(rank=3, from_s=100.0, to_s=140.0, step=7)]
    assert judge_slow([(131.0, 3), (141.0, 3)], busy) == []
    assert judge_slow([(131.0, 2), (99.0, 3)], busy) == [
        "rank 2 was reported as slow, but was not",
        "rank 3 was reported as slow, but was not",
    ]


# What is read of a job


def write_steps(directory: Path, rank: int, numbers: range, *, generation: int = 0, torn: str = "") -> None:
    lines = [
        json.dumps(
            {
                "step": number, "time_s": float(number), "attempt": 0, "generation": generation,
                "rank": rank, "world": 2, "node": f"node0{rank}", "pid": 40 + rank,
            }
        )
        + "\n"
        for number in numbers
    ]  # fmt: skip
    with (directory / f"steps_{rank}.jsonl").open("a") as file:
        file.write("".join(lines) + torn)


def test_steps_are_read_as_they_are_written_and_half_lines_later(tmp_path: Path) -> None:
    target = DrilledJob(tmp_path)
    assert target.newest() == {}
    write_steps(tmp_path, 0, range(1, 4), torn='{"step"')
    assert {rank: done.step for rank, done in target.newest().items()} == {0: 3}
    assert not target.is_stepping(2)
    (tmp_path / "steps_0.jsonl").write_text((tmp_path / "steps_0.jsonl").read_text().removesuffix('{"step"'))
    write_steps(tmp_path, 0, range(4, 5))
    write_steps(tmp_path, 1, range(1, 5))
    assert target.is_stepping(2)
    assert (target.ranks_on("node01"), target.rank_on("node00")) == ((1,), 0)


def test_the_newest_announcement_says_who_leads(tmp_path: Path) -> None:
    target = DrilledJob(tmp_path)
    with pytest.raises(SetupError, match="no leader"):
        target.leader()
    for number, host in enumerate(("node04", "node02")):
        directory = tmp_path / "runs" / f"{7 + number}"
        directory.mkdir(parents=True)
        there = Announcement(job="7", attempt=0, host=host, addresses=("10.77.0.1",), port=29500)
        (directory / ANNOUNCEMENT).write_bytes(msgspec.json.encode(there))
        os.utime(directory / ANNOUNCEMENT, (1000 + number, 1000 + number))
        assert target.leader() == host


def test_a_checkpoint_that_was_seen_counts_after_its_deletion(tmp_path: Path) -> None:
    target = DrilledJob(tmp_path)
    for number, attempt in ((50, "ab12-1"), (100, "cd34-1")):
        directory = target.checkpoints / f"step_{number}"
        directory.mkdir(parents=True)
        manifest = Manifest(number, 0, attempt, "2.13", float(number), ())
        (directory / MANIFEST).write_bytes(manifest.to_bytes())
        assert target.saved()[-1] == Saved(number, attempt.partition("-")[0], float(number))
        shutil.rmtree(directory)
    assert [each.run for each in target.saved()] == ["ab12", "cd34"]


def test_only_the_newest_start_counts(tmp_path: Path) -> None:
    target = DrilledJob(tmp_path)
    for rank in (0, 1):
        write_steps(tmp_path, rank, range(1, 9))
    write_steps(tmp_path, 0, range(5, 6), generation=1)
    assert {rank: done.step for rank, done in target.newest().items()} == {0: 5}
    assert not target.is_stepping(2, after=(0, 0))


def test_lines_of_the_terminal_have_the_time_at_which_they_came(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    with Terminal(path) as terminal:
        path.write_text("0: allranks: 6 ranks\n0: x AR407 dead-rank   node03\nhalf")
    assert [line for _, line in terminal.lines] == ["0: allranks: 6 ranks", "0: x AR407 dead-rank   node03"]
    (said,) = terminal.causes(since_s=0.0)
    assert said[1] == "AR407"
    assert terminal.causes(since_s=said[0] + 1.0) == []


def test_the_table_has_a_row_for_each_drill() -> None:
    done = StrikeResult(
        fault="worker-killed", seed=1, program="train.py", truth="AR407 node03 (rank 3)", expected="resumed",
        verdict="AR407 dead-rank node03", verdict_s=0.21, next_step_s=6.04, phases_s={}, resumed_at=41, exit_code=0,
        num_requeues=0, leader="", wrong=(),
        baseline=StrikeBaseline(silent_s=0.1, said="`[rank0]` | closed", next_step_s=None, exit_code=None),
    )  # fmt: skip
    assert render_table([done], seed=1).splitlines()[-1] == (
        "| worker-killed | AR407 node03 (rank 3) | AR407 dead-rank node03 | 0.2 s | 6.0 s | 0 | yes "
        "| after 0.1 s ` [rank0]  \\| closed`; no further step; cut off |"
    )


def test_several_drills_of_a_fault_are_one_row_and_three_lines() -> None:
    done = [
        StrikeResult(
            fault="leader-agent-killed", seed=number, program="train.py", truth="AR012 master-node", expected="resumed",
            verdict="AR012 node-failure master-node", verdict_s=verdict_s, next_step_s=5.0 + number, phases_s={},
            resumed_at=41, exit_code=0, num_requeues=0, leader="node01", wrong=wrong,
        )
        for number, (verdict_s, wrong) in enumerate([(0.3, ()), (0.1, ()), (None, ("no verdict",))])
    ]  # fmt: skip
    assert render_table(done, seed=1).splitlines()[-1] == (
        "| leader-agent-killed | AR012 master-node | AR012 node-failure master-node; node01 takes over "
        "| 0.1 / 0.2 / 0.3 s | 5.0 / 6.0 / 7.0 s | 0 | no: 2 of 3; no verdict |  |"
    )
    assert describe_times(done) == [
        "leader-agent-killed, 3 times: minimum / median / maximum",
        "    from the fault to the verdict        0.1 / 0.2 / 0.3 s",
        "    from the verdict to the next step    4.7 / 5.3 / 5.9 s",
        "    from the fault to the next step      5.0 / 6.0 / 7.0 s",
    ]
