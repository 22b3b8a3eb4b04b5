"""After a disk was full: the leader waits for room before it starts the ranks again; and what it says of lost lines."""

from __future__ import annotations

import msgspec
import pytest
from test_lead_interrupted import Job

from allranks.guard.disk import describe_lost, find_lost
from allranks.launch.events import Record
from allranks.launch.lead.course import Phase
from allranks.model.room import GIB, MIB, FullPlace, Room
from allranks.wire.protocol import Ended, Goodbye, Plan, WorkerEnd

ENOSPC = WorkerEnd(rank=1, node="n1", exit_code=1, time_s=0.0, message="OSError: [Errno 28] No space left on device")
FULL = FullPlace(purpose="checkpoint directory", path="/ckpt", room=Room(size_bytes=100 * GIB))
SCARCE = msgspec.structs.replace(FULL, room=Room(free_bytes=200 * MIB, size_bytes=100 * GIB))
PAUSED = (
    "paused: too little room: checkpoint directory /ckpt on n0: 0 KiB of 100 GiB free (and 1 more directory on other "
    "disks or nodes); delete old checkpoints, keep fewer (track(keep=2)), or use another disk (--checkpoint-dir); "
    "waiting for room, 9:59 left (--capacity-timeout 600)"
)


def stopped(*full: FullPlace, end: WorkerEnd = ENOSPC) -> Job:
    """A job of which a rank has failed, and all workers have ended; each node tells which places are full."""
    job = Job(end=end, full=full)
    job.stop(is_one_lost=False)
    return job


def tell_room(job: Job, *full: FullPlace) -> None:
    job.full = full
    for index in (0, 1):
        job.beat(index)


def test_the_next_generation_begins_at_once_where_there_is_room() -> None:
    job = stopped()
    assert (job.leader.phase, job.sent(Plan, to=0).generation) == (Phase.RUNNING, 1)


def test_it_waits_until_there_is_room_and_says_what_for_and_how_to_make_some() -> None:
    job = stopped(FULL)
    assert job.leader.phase is Phase.PAUSED
    job.wait(0.5)
    assert job.lines[-1] == PAUSED
    (event,) = (each.fields for each in job.effects if isinstance(each, Record) and each.event == "paused")
    assert event["missing"].startswith("too little room: checkpoint directory /ckpt on n0")
    tell_room(job, SCARCE)
    job.wait(20.0)
    assert job.leader.phase is Phase.PAUSED
    tell_room(job)
    job.wait(1.0)
    assert (job.leader.phase, job.sent(Plan, to=0).generation) == (Phase.RUNNING, 1)
    assert job.lines[-1] == "restart 1 on 2 nodes, from the beginning; 0 more restarts left"


def test_without_room_the_job_ends_with_the_first_verdict() -> None:
    job = stopped(FULL)
    job.wait(601.0)
    assert job.sent(Goodbye, to=0).exit_code == 78
    assert [each.cause for each in job.leader.verdict.findings] == ["AR005 disk-full"]
    assert not job.goes_back
    assert job.lines[-1].startswith("not restarted: too little room: checkpoint directory /ckpt on n0: 0 KiB of 100")


def test_with_a_little_room_it_is_tried_in_the_end() -> None:
    job = stopped(SCARCE)
    job.wait(590.0)
    assert job.leader.phase is Phase.PAUSED
    job.wait(20.0)
    assert job.leader.phase is Phase.RUNNING


def test_a_fault_of_another_kind_waits_for_no_room() -> None:
    job = Job(full=(FULL,))
    job.stop(is_one_lost=False)
    assert job.leader.phase is Phase.RUNNING


@pytest.mark.parametrize(("freed_bytes", "phase"), [(0, Phase.RUNNING), (64 * MIB, Phase.PAUSED)])
def test_what_was_kept_back_for_a_full_disk_is_no_room_to_go_on(freed_bytes: int, phase: Phase) -> None:
    job = Job(end=ENOSPC, room=Room(free_bytes=500 * MIB, size_bytes=100 * GIB, freed_bytes=freed_bytes))
    job.stop(is_one_lost=False)
    assert job.leader.phase is phase


def test_lines_that_were_lost_are_in_the_verdict_of_a_job_that_succeeded() -> None:
    job = Job(is_well=True)
    for rank, lines in ((0, 0), (1, 516)):
        why = "No space left on device" if lines else ""
        end = WorkerEnd(rank=rank, node=f"n{rank}", exit_code=0, time_s=0.0, lost_lines=lines, lost_why=why)
        job.tell(rank, Ended(end=end, age_s=0.0))
    job.wait(1.0)
    job.stop(is_one_lost=False)
    verdict = job.leader.verdict
    (finding,) = verdict.findings
    assert (verdict.exit_code, finding.cause, finding.severity) == (0, "AR005 disk-full", "warn")
    assert (finding.node, finding.ranks) == ("n1", (1,))
    assert finding.message == "516 lines of rank 1 could not be written: the disk was full"
    (event,) = (each.fields for each in job.effects if isinstance(each, Record) and each.event == "lines_lost")
    assert event == {"rank": 1, "node": "n1", "lines": 516, "why": "No space left on device"}


@pytest.mark.parametrize(
    ("lost", "text", "num_findings"),
    [
        ({}, "", 0),
        ({3: (1, "No space left on device")}, "1 line of rank 3 could not be written: the disk was full", 1),
        (
            {0: (5, "Disk quota exceeded"), 1: (6, "Disk quota exceeded")},
            "11 lines of ranks 0-1 could not be written: the quota was used up",
            1,
        ),
        ({3: (2, "Input/output error")}, "2 lines of rank 3 could not be written: Input/output error", 0),
    ],
)
def test_lost_lines_are_told_with_their_number_and_why(
    lost: dict[int, tuple[int, str]], text: str, num_findings: int
) -> None:
    assert describe_lost(lost) == text
    assert len(find_lost(lost, ["n1"])) == num_findings
