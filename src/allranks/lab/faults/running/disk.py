"""Strikes at the disks that ranks write to, other than the checkpoints': the run directory and TMPDIR fill up.

In each of them a rank dies of the full disk, the leader waits for room, and somebody makes some.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from pathlib import Path
from typing import ClassVar

from allranks.lab.faults.fault import Expected, FaultPlace, LabScene
from allranks.lab.faults.running.checkpoint import SmallDisk, call, fill
from allranks.lab.faults.running.process import OrderStrike
from allranks.lab.faults.running.strike import Strike
from allranks.lab.faults.running.target import DrilledJob
from allranks.model.errors import SetupError

PAUSED_S = 20.0
"""How long to wait for the leader to wait for room."""
TMPDIR_SIZE = "256m"
FULL_S = 4.0
"""How long the disk stays full after the leader has begun to wait for room."""


class RunDirFull(SmallDisk, name="run-dir-full", cause="AR005"):
    """Another writer fills the disk of the run directory, and one rank prints."""

    directory = "runs"
    disk_bytes = 256 << 20
    verdict_s: ClassVar[float | None] = 5.0
    watch_s = 60.0

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Mount it outside of the nodes, too: the drill reads the run directory."""
        super().inject(scene)
        call("mount", scene.memory["device"], scene.memory["mounted"])
        scene.remember("is_mounted_outside", True)

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Unmount it."""
        if scene.memory.get("is_mounted_outside"):
            with contextlib.suppress(SetupError):  # by hand
                call("umount", "--lazy", scene.memory["mounted"])
        super().heal(scene)

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Fill it, and have a rank print."""
        fill(Path(scene.memory["mounted"]) / "other")
        return target.order(target.rank_on(scene.node.name), "print")

    @classmethod
    def follow_up(cls, scene: LabScene, target: DrilledJob) -> None:
        """Make room."""
        wait_for_pause(target)
        (Path(scene.memory["mounted"]) / "other").unlink()


class TmpdirFull(OrderStrike, name="tmpdir-full", cause="AR005"):
    """TMPDIR of one node is full when its rank writes there."""

    order: ClassVar[str] = "fill-tmpdir"
    verdict_s, watch_s = 5.0, 60.0

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Mount a small file system there; all nodes have the same TMPDIR."""
        tmpdir = scene.lab_dir / "tmpdir"
        tmpdir.mkdir(mode=0o1777, exist_ok=True)
        scene.remember("mounted", str(tmpdir))
        for node in scene.hosts:
            scene.write_environment(node, {"TMPDIR": str(tmpdir)})
        options = f"size={TMPDIR_SIZE},mode=1777"
        scene.run(scene.node.name, "mount", "-t", "tmpfs", "-o", options, "lab", str(tmpdir))

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Unset TMPDIR, unmount."""
        scene.remove_files()
        if "mounted" in scene.memory:
            script = 'mountpoint --quiet "$1" && umount --lazy "$1" || true'
            scene.run(scene.node.name, "sh", "-c", script, "sh", scene.memory["mounted"])

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Fill it, and give the order."""
        fill(cls._tmpdir(scene) / "other")
        return super().strike(scene, target)

    @classmethod
    def follow_up(cls, scene: LabScene, target: DrilledJob) -> None:
        """Make room."""
        wait_for_pause(target)
        (cls._tmpdir(scene) / "other").unlink()

    @classmethod
    def _tmpdir(cls, scene: LabScene) -> Path:
        mounted = Path(scene.memory["mounted"])
        return Path(f"/proc/{scene.inits[scene.node.name]}/root") / mounted.relative_to("/")


class TmpdirFullUnsaid(TmpdirFull, name="tmpdir-full-unsaid", cause="AR005"):
    """TMPDIR of one node is full, and its rank ends with an exit code and no words."""

    order: ClassVar[str] = "exit"


def wait_for_pause(target: DrilledJob) -> None:
    """Wait until the job waits for room, and a little longer.

    Raises:
        SetupError: it does not.
    """
    files = target.directory.joinpath("runs")
    target.wait(
        lambda: any('"paused"' in path.read_text() for path in files.glob("[0-9]*/attempt_*/events.jsonl")),
        PAUSED_S,
        "the job to pause",
    )
    time.sleep(FULL_S)


class RunDirWithoutInodes(RunDirFull, name="run-dir-without-inodes", cause="AR005"):
    """Another program uses up the inodes of the run directory's disk; training continues, and the end is written."""

    severity = Expected.SURVIVED
    verdict_s, watch_s = None, 20.0
    has_ranks = False

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Make files until none can be made."""
        directory, struck_s = Path(scene.memory["mounted"]) / "others", time.time()
        with contextlib.suppress(OSError):
            directory.mkdir()
            for number in itertools.count():
                (directory / str(number)).touch()
        return struck_s

    @classmethod
    def follow_up(cls, scene: LabScene, target: DrilledJob) -> None:
        """Nobody makes room."""


class RunDirRemoved(Strike, name="run-dir-removed", cause="AR006"):
    """Somebody removes the attempt's directory; training continues, and the verdict is there at the end."""

    place = FaultPlace.ANY
    severity = Expected.SURVIVED
    watch_s = 20.0
    has_ranks = False

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Remove it."""
        struck_s = time.time()
        for path in target.directory.joinpath("runs").glob("[0-9]*/attempt_*"):
            shutil.rmtree(path, ignore_errors=True)
        return struck_s
