"""A full disk as the reason why a rank failed: an end and what its node tells of its disks in, one finding out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from allranks.guard.ends import judge_ends
from allranks.guard.guard_verdict import GuardVerdict
from allranks.guard.scene import Scene
from allranks.model.beat import NodeBeat
from allranks.model.membership import Member, Membership
from allranks.model.room import GIB, MIB, FullPlace, Room
from allranks.wire.protocol import WorkerEnd

from .scenes import FAST

MEMBERS = tuple(Member(name=f"node0{i + 1}", first_rank=i, num_workers=1, host=f"node0{i + 1}") for i in range(3))
ENOSPC = "OSError: [Errno 28] No space left on device"
QUOTA = "OSError: [Errno 122] Disk quota exceeded: '/home/u/ckpt/step_40.pt'"
TORCH = "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
IOSTREAM = "RuntimeError: basic_ios::clear: iostream error"
NO_ROOM = Room(size_bytes=100 * MIB, full_ago_s=0.0)
PLENTY = Room(free_bytes=50 * GIB, size_bytes=100 * GIB, free_inodes=10**6)
RUN_DIR_FULL: dict[str, Any] = {"room": NO_ROOM}
TMP_FULL: dict[str, Any] = {"full": (FullPlace(purpose="TMPDIR", path="/tmp", room=NO_ROOM),)}


def end(rank: int = 1, exit_code: int = 1, *, at: float = 100.0, **more: Any) -> WorkerEnd:
    path = f"runs/7/attempt_0/node0{rank + 1}/rank_{rank}.err"
    return WorkerEnd(rank=rank, node=f"node0{rank + 1}", exit_code=exit_code, time_s=at, stderr_path=path, **more)


def judge(*ends: WorkerEnd, **beat: Any) -> GuardVerdict:
    """Judge the ends of ranks, on nodes that all tell the same of their disks."""
    scene = Scene(FAST, Membership(members=MEMBERS), {}, 0.0)
    for index in range(3):
        scene.hear(NodeBeat(node_index=index, generation=0, **beat), 99.0)
    for each in ends:
        scene.end(each, each.time_s)
    return judge_ends(scene)


SURE, LIKELY = ("AR005 disk-full", "certain"), ("AR005 disk-full", "likely")
CODE = ("AR590 user-code-error", "certain")
RUN_DIR_WAS = "while its run directory (runs/7/attempt_0/node02) was full"
TRACEBACK = 'Traceback (most recent call last):\n  File "/u/t.py", line 6, in <module>\n'
NOT_BY_US = ", not by allranks"

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {
    # name: (how it ended, what its node tells of its disks) -> (cause, confidence, message)
    "ENOSPC, and no disk is seen full": (
        {"message": ENOSPC}, {"room": PLENTY}, (*SURE, ENOSPC)),
    "a quota": ({"message": QUOTA}, {}, (*SURE, QUOTA)),
    "a file that was copied": (
        {"message": f"{ENOSPC}: '/data/a' -> '/scratch/a'"}, {},
        (*SURE, f"{ENOSPC}: '/data/a' -> '/scratch/a'")),
    "an exception of the script that was raised from it": (
        {"message": "TrainError: cannot save", "before": (ENOSPC,)}, {},
        (*SURE, f"{ENOSPC}; it ended with TrainError: cannot save")),
    "sys.exit in the handling of it": (
        {"exit_code": 3, "before": (ENOSPC,)}, {},
        (*SURE, f"{ENOSPC}; it ended with exit code 3")),
    "a data loader that hands it on": (
        {"message": f"OSError: Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
         f'last):\n  File "/u/d.py", line 3, in __getitem__\n    cache(x)\n{ENOSPC}'}, {},
        (*SURE, f"{ENOSPC}; it ended with OSError: Caught OSError in DataLoader worker process "
         "0.")),
    "a traceback on stderr, without the hook": (
        {"stderr_tail": f"{TRACEBACK}    f.write(x)\n{ENOSPC}"}, {}, (*SURE, f"{ENOSPC}; it ended with exit code 1")),
    "torch hides the errno": ({"message": TORCH, "before": (IOSTREAM,)}, {}, (*LIKELY, TORCH)),
    "torch hides the errno, and a disk is full": (
        {"message": TORCH, "before": (IOSTREAM,)}, TMP_FULL, (*SURE, TORCH)),
    "iostream error": ({"message": IOSTREAM}, {}, (*CODE, IOSTREAM)),
    "iostream error, and a disk is full": ({"message": IOSTREAM}, TMP_FULL, (*LIKELY, IOSTREAM)),
    "sqlite": (
        {"message": "OperationalError: database or disk is full"}, {},
        (*SURE, "OperationalError: database or disk is full")),
    "nothing but an exit code": ({}, {"room": PLENTY}, (*CODE, "ended with exit code 1")),
    "nothing but an exit code, and the run directory is full": (
        {}, RUN_DIR_FULL,
        (*LIKELY, f"ended with exit code 1 {RUN_DIR_WAS}")),
    "nothing but an exit code, and the run directory was full 3 s ago": (
        {}, {"room": Room(free_bytes=64 * MIB, size_bytes=100 * GIB, full_ago_s=3.0)},
        (*LIKELY, f"ended with exit code 1 {RUN_DIR_WAS}")),
    "nothing but an exit code, and the run directory was full an hour ago": (
        {}, {"room": Room(free_bytes=50 * GIB, size_bytes=100 * GIB, full_ago_s=3600.0)},
        (*CODE, "ended with exit code 1")),
    "nothing but an exit code, and TMPDIR is full": (
        {"stderr_tail": "INFO step 40"}, TMP_FULL,
        (*LIKELY, "ended with exit code 1 while its TMPDIR (/tmp) was full")),
    "nothing but an exit code, and /dev/shm is full": (
        {}, {"shm_used": 1.0}, (*LIKELY, "ended with exit code 1 while its /dev/shm was full")),
    "nothing but an exit code, and /dev/shm is in use": (
        {}, {"shm_used": 0.97}, (*CODE, "ended with exit code 1")),
    "a child of mp.spawn, whose words may have been for the full disk": (
        {"message": "ProcessExitedException: process 1 terminated with exit code 1"}, TMP_FULL,
        (*LIKELY, "ProcessExitedException: process 1 terminated with exit code 1 while its TMPDIR "
         "(/tmp) was full")),
    "a child of mp.spawn, and no disk is full": (
        {"message": "ProcessExitedException: process 1 terminated with exit code 1"}, {},
        (*CODE, "ProcessExitedException: process 1 terminated with exit code 1")),
    "an error of the script while a disk is full": (
        {"message": "ValueError: bad batch"}, RUN_DIR_FULL, (*CODE, "ValueError: bad batch")),
    "an error of the script, caught, while a disk is full": (
        {"exit_code": 2, "before": ("ValueError: bad batch",)}, RUN_DIR_FULL,
        (*CODE, "ended with exit code 2")),
    "an error on stderr while a disk is full": (
        {"stderr_tail": f'{TRACEBACK}    f()\nKeyError: 3'}, RUN_DIR_FULL, (*CODE, "ended with exit code 1")),
    "killed while a disk is full": (
        {"exit_code": -9}, RUN_DIR_FULL, ("AR407 dead-rank", "certain", f"killed by SIGKILL (signal 9){NOT_BY_US}")),
    "SIGBUS": ({"exit_code": -7}, {}, ("AR407 dead-rank", "certain", f"killed by SIGBUS (signal 7){NOT_BY_US}")),
    "SIGBUS, and /dev/shm is full": (
        {"exit_code": -7}, {"shm_used": 0.97},
        ("AR002 shm-too-small", "likely", f"killed by SIGBUS (signal 7){NOT_BY_US}, while its /dev/shm was full")),
    "SIGBUS, and TMPDIR is full": (
        {"exit_code": -7}, TMP_FULL,
        (*LIKELY, f"killed by SIGBUS (signal 7){NOT_BY_US}, while its TMPDIR (/tmp) was full")),
    "ENOSPC in /dev/shm": (
        {"message": f"{ENOSPC}: '/dev/shm/torch_21_30'"}, {},
        ("AR002 shm-too-small", "certain", f"{ENOSPC}: '/dev/shm/torch_21_30'")),
    "torch's shared memory": (
        {"message": "RuntimeError: unable to write to file </torch_16_19>: No space left on device (28)"}, {},
        ("AR607 dataloader-shm", "certain",
         "RuntimeError: unable to write to file </torch_16_19>: No space left on device (28)")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_end_has_the_cause_that_its_words_and_its_disks_prove(case: str) -> None:
    how, beat, expected = CASES[case]
    judged = judge(end(**how), **beat)
    (finding,) = judged.findings
    assert (finding.cause, finding.confidence, finding.message) == expected
    is_retryable = finding.cause_id != "AR590"
    assert (finding.ranks, judged.is_retryable) == ((1,), is_retryable)
    assert judged.needs_room == (is_retryable and finding.cause_id != "AR407")
    assert judged.exit_code != 1 or not judged.needs_room


def test_an_error_of_the_script_is_told_with_the_disk_that_was_full_then() -> None:
    (finding,) = judge(end(message="ValueError: bad batch"), **TMP_FULL).findings
    assert finding.notes == ("its TMPDIR (/tmp) was full at that time",)


@pytest.mark.parametrize(
    ("room", "seen", "look"),
    [
        (NO_ROOM, "run directory runs/7/attempt_0/node02 on node02: 0 KiB of 100 MiB free", "df -h"),
        (
            Room(free_bytes=20 * GIB, size_bytes=100 * GIB, free_inodes=0, size_inodes=65536),
            "run directory runs/7/attempt_0/node02 on node02: 0 inodes free of 65536",
            "df -i",
        ),
        (
            Room(free_bytes=20 * GIB, size_bytes=100 * GIB, problem="EDQUOT: Disk quota exceeded"),
            "run directory runs/7/attempt_0/node02 on node02: a quota is used up; 20 GiB of 100 GiB free on the disk",
            "quota -s",
        ),
        (
            Room(free_bytes=30 * MIB, size_bytes=100 * GIB, freed_bytes=64 * MIB),
            "run directory runs/7/attempt_0/node02 on node02: 30 MiB of 100 GiB free since allranks, when it was full, "
            "gave back 64 MiB that it had kept there",
            "df -h",
        ),
    ],
)
def test_bytes_inodes_and_quotas_are_told_apart(room: Room, seen: str, look: str) -> None:
    (finding,) = judge(end(), room=room).findings
    assert finding.evidence[0].seen == seen
    assert re.match(rf"on node02: {look}\b.*allranks clean deletes old runs; --log-dir", finding.fix or "")


def test_where_no_directory_is_known_all_disks_are_to_be_looked_at() -> None:
    (finding,) = judge(end(message=ENOSPC), room=PLENTY).findings
    assert (finding.fix or "").startswith("on node02: df -h; ")


def test_the_evidence_names_the_disk_that_the_exception_names_and_who_fills_it() -> None:
    scratch = FullPlace(purpose="directory", path="/scratch/a", room=NO_ROOM, largest="/scratch/other (96 MiB, of eve)")
    places = (scratch, *TMP_FULL["full"])
    (finding,) = judge(end(message=f"{ENOSPC}: '/scratch/a/x.pt'"), full=places).findings
    assert [each.seen for each in finding.evidence] == [
        "directory /scratch/a on node02: 0 KiB of 100 MiB free; largest there: /scratch/other (96 MiB, of eve)"
    ]


def test_ranks_that_die_of_one_disk_are_one_finding_and_one_that_says_why_stands_for_all() -> None:
    judged = judge(end(0, at=100.0), end(1, at=100.1, message=ENOSPC), end(2, at=100.2, message=TORCH), room=NO_ROOM)
    (finding,) = judged.findings
    assert (finding.ranks, finding.message, finding.confidence) == ((0, 1, 2), ENOSPC, "certain")
    assert finding.notes == ("all 3 ranks failed alike",)


def test_an_error_of_the_script_beside_a_full_disk_is_not_retried() -> None:
    judged = judge(end(0, at=100.0, message=ENOSPC), end(1, at=100.1, message="ValueError: bad batch"))
    assert [each.is_retryable for each in judged.parts] == [True, False]


@pytest.mark.parametrize(("beat", "exit_code", "nodes"), [(TMP_FULL, 75, (1,)), (RUN_DIR_FULL, 78, ()), ({}, 78, ())])
def test_a_disk_of_one_node_is_left_with_its_node_and_one_that_may_be_shared_is_not(
    beat: dict[str, Any], exit_code: int, nodes: tuple[int, ...]
) -> None:
    judged = judge(end(message=ENOSPC), **beat)
    assert (judged.exit_code, judged.nodes, judged.cures) == (exit_code, nodes, False)
