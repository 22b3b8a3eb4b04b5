"""All situations, by name: the disk faults as a cross product, and what workers.py and forged.py add."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import product

from . import disks, forged, workers
from .disks import FAULTS
from .judge import Expect, Fall, judge
from .stage import Situation, Stage

EXPECTED = "as the table says"
BEFORE = "start"
PHASES = (BEFORE, "running", "saving", "end")
PRINTING = ("prints", "catches", "quiet", "mute", "native")
HARD = ("full", "kept-full", "full-ext4", "quota", "no-inodes", "read-only")
# Where the disk is, what strikes it, in which phases, and what the ranks do meanwhile.
DISKS = (
    ("runs", tuple(FAULTS), (BEFORE, "running", "end"), PRINTING),
    ("runs", tuple(FAULTS), ("saving",), ("saves", "prints")),
    ("runs", ("kept-full", "removed"), ("running",), ("session",)),
    ("checkpoints", tuple(FAULTS), PHASES, ("saves", "saves_mute")),
    ("checkpoints", tuple(FAULTS), ("running",), ("session",)),
    ("checkpoints", HARD, ("saving",), ("torch_saves",)),
    ("checkpoints", tuple(FAULTS), ("running",), ("prints",)),
    ("tmp", tuple(FAULTS), (BEFORE, "running", "end"), ("temporary",)),
    ("tmp", tuple(FAULTS), ("running",), ("prints",)),
    ("shm", (*HARD, "removed"), (BEFORE, "running"), ("shared",)),
    ("shm", HARD, ("running",), ("prints",)),
)


def play_disk(stage: Stage, *, place: str, fault: str, phase: str, kind: str) -> tuple[list[Fall], float]:
    """Break a disk in one phase of a job."""
    disk = stage.mount(place, FAULTS[fault].file_system)
    if phase == BEFORE:
        FAULTS[fault].strike(disk)
    flags = ["--checkpoint-dir", str(stage.scratch / "checkpoints"), "--checkpoint-every", "2"]
    job = stage.start(kind, *flags, hold=phase)
    has_struck = phase == BEFORE or stage.reached(phase, job)
    if has_struck and phase != BEFORE:
        FAULTS[fault].strike(disk)
    stage.let_go()
    is_runs_at_start = place == "runs" and phase == BEFORE
    expect = Expect(
        needs_file=place != "runs" or (FAULTS[fault].has_verdict and not (is_runs_at_start and fault != "frozen")),
        may_refuse=phase == BEFORE,
    )
    return judge(stage.end(job, has_struck=has_struck), expect), job.peak_mb


def play_retry(stage: Stage, *, place: str, fault: str, kind: str) -> tuple[list[Fall], float]:
    """Let a full disk end a job that may restart, and make room: it must restart, and succeed."""
    disk = stage.mount(place, FAULTS[fault].file_system)
    flags = ["--checkpoint-dir", str(stage.scratch / "checkpoints"), "--max-restarts", "1"]
    job = stage.start(kind, *flags, hold="running")
    has_struck = stage.reached("running", job)
    FAULTS[fault].strike(disk)
    stage.let_go()
    has_failed = stage.reached("failed", job, ranks=1)
    time.sleep(1)
    disks.make_room(disk)
    facts = stage.end(job, has_struck=has_struck and has_failed)
    return judge(facts, Expect(recovers=True)), job.peak_mb


def _of_disks() -> Iterator[Situation]:
    for place, faults, phases, kinds in DISKS:
        for fault, phase, kind in product(faults, phases, kinds):
            if phase == BEFORE and fault in ("removed", "unmounted"):
                continue  # there is nothing yet
            yield Situation(
                name=f"disk/{place}/{fault}/{phase}/{kind}",
                expected=EXPECTED,
                play=partial(play_disk, place=place, fault=fault, phase=phase, kind=kind),
                file_system=FAULTS[fault].file_system,
            )


def _of_retries() -> Iterator[Situation]:
    for (place, kind), fault in product(
        (("runs", "prints"), ("checkpoints", "saves"), ("tmp", "temporary")), ("full", "quota", "no-inodes")
    ):
        if (place, fault) != ("runs", "no-inodes"):  # files that are open can grow
            yield Situation(
                name=f"disk/retry/{place}/{fault}",
                expected="the job restarts when there is room again, and succeeds",
                play=partial(play_retry, place=place, fault=fault, kind=kind),
                file_system=FAULTS[fault].file_system,
            )


SITUATIONS = {
    situation.name: situation
    for situation in (*_of_disks(), *_of_retries(), *workers.situations(), *forged.situations())
}
