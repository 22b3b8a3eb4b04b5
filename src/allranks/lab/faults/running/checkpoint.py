"""Strikes at checkpoints: during a save, after a save, and at the disk below."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import ClassVar

from allranks.lab.faults.fault import Expected, FaultPlace, LabScene
from allranks.lab.faults.running.process import DEAD_S, NEXT_STEP_S
from allranks.lab.faults.running.strike import Strike
from allranks.lab.faults.running.target import DrilledJob
from allranks.model.errors import SetupError
from allranks.state.saved.manifest import MANIFEST, parse_final, parse_temp
from allranks.state.saved.parts import list_checkpoints

SAVED_S = 60.0
"""How long to wait for the next checkpoint."""
WINDOW_S = 0.15
"""About as long as a save, so that the kill comes at any time during it."""
DISK_BYTES = 96 << 20


class CheckpointStrike(Strike):
    """A checkpoint is damaged and a worker is killed, so that a checkpoint must be loaded."""

    place = FaultPlace.ANY
    verdict_s, next_step_s = DEAD_S, NEXT_STEP_S

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Wait for a new checkpoint that is not the first, damage it, kill a worker."""
        known = list_checkpoints(target.checkpoints)[:1]
        target.wait(
            lambda: len(there := list_checkpoints(target.checkpoints)) >= 2 and there[:1] != known,
            SAVED_S,
            "a new checkpoint",
        )
        newest, before = list_checkpoints(target.checkpoints)[:2]
        scene.remember("spoiled", step_of(newest))
        scene.remember("before", step_of(before))
        cls.spoil(newest)
        pid = target.worker_pid(scene, scene.node.name)
        struck_s = time.time()
        os.kill(pid, signal.SIGKILL)
        return struck_s

    @classmethod
    def spoil(cls, newest: Path) -> None:
        """Damage the newest complete checkpoint."""

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Check that the damaged checkpoint was not loaded, and the one before it was."""
        began = min((step.step for step in target.steps() if step.start > (0, 0)), default=0)
        spoiled, before = scene.memory["spoiled"], scene.memory["before"]
        if began != before + 1:
            return [f"resumed with step {began}; step {spoiled} was spoiled, that of step {before} was whole"]
        return []


class BitFlipped(CheckpointStrike, name="checkpoint-bit-flipped", cause="AR407"):
    """One bit in the largest file of the newest checkpoint is flipped; then a worker is killed."""

    also: ClassVar = ("AR601",)

    @classmethod
    def spoil(cls, newest: Path) -> None:
        """Flip a bit in the middle."""
        with _largest(newest).open("r+b") as file:
            file.seek(_largest(newest).stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


class FileTruncated(CheckpointStrike, name="checkpoint-truncated", cause="AR407"):
    """The largest file of the newest checkpoint loses its last half; then a worker is killed."""

    also: ClassVar = ("AR601",)

    @classmethod
    def spoil(cls, newest: Path) -> None:
        """Cut it."""
        os.truncate(_largest(newest), _largest(newest).stat().st_size // 2)


class ManifestMissing(CheckpointStrike, name="checkpoint-manifest-missing", cause="AR407"):
    """The manifest of the newest checkpoint is deleted; then a worker is killed."""

    also: ClassVar = ("AR601",)

    @classmethod
    def spoil(cls, newest: Path) -> None:
        """Remove it."""
        (newest / MANIFEST).unlink()


class KilledWhileSaving(Strike, name="killed-while-saving", cause="AR407"):
    """SIGKILL to one worker at a random instant of a save."""

    place = FaultPlace.ANY
    verdict_s, next_step_s = DEAD_S, NEXT_STEP_S

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Wait for a new entry among the checkpoints, and a little longer."""
        target.wait(lambda: bool(list_checkpoints(target.checkpoints)), SAVED_S, "the first checkpoint")
        pid = target.worker_pid(scene, scene.node.name)
        target.wait(lambda: _is_saving(target.checkpoints), SAVED_S, "a save to begin")
        time.sleep(scene.make_chance().uniform(0.0, WINDOW_S))
        struck_s = time.time()
        os.kill(pid, signal.SIGKILL)
        return struck_s


class SmallDisk(Strike):
    """A directory of the drill is on a small disk that all nodes share."""

    place = FaultPlace.ANY
    directory: ClassVar[str]
    disk_bytes: ClassVar[int] = DISK_BYTES

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Create an ext4 in a file, and mount it on all nodes: one device, so one file system."""
        directory, image = scene.run_dir / cls.directory, scene.lab_dir / f"{cls.directory}.ext4"
        directory.mkdir(exist_ok=True)
        with image.open("wb") as file:
            file.truncate(cls.disk_bytes)
        call("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        scene.remember("image", str(image))
        device = call("losetup", "--find", "--show", str(image))
        scene.remember("device", device)
        scene.remember("mounted", str(directory))
        for node in scene.hosts:
            scene.run(node, "mount", device, str(directory))

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Unmount it, and free the device."""
        if "mounted" in scene.memory:
            script = 'mountpoint --quiet "$1" && umount --lazy "$1" || true'
            for node in scene.hosts:
                scene.run(node, "sh", "-c", script, "sh", scene.memory["mounted"])
        if "device" in scene.memory:
            with contextlib.suppress(SetupError):
                call("losetup", "--detach", scene.memory["device"])
        if "image" in scene.memory:
            Path(scene.memory["image"]).unlink(missing_ok=True)

    @classmethod
    def outside(cls, scene: LabScene) -> Path:
        """Path of its root on this machine: outside of the nodes, nothing is mounted there."""
        directory = Path(scene.memory["mounted"])
        return Path(f"/proc/{scene.inits[scene.first.name]}/root") / directory.relative_to("/")


class DiskStrike(SmallDisk):
    """The checkpoints are on a small disk that all nodes share; training continues without saving."""

    directory = "checkpoints"
    severity = Expected.SURVIVED
    watch_s = 20.0
    has_ranks = False

    @classmethod
    def find_checkpoints(cls, scene: LabScene, directory: Path) -> Path:
        """Directory of the disk image."""
        return cls.outside(scene)

    @classmethod
    def strike(cls, scene: LabScene, target: DrilledJob) -> float:
        """Break the disk."""
        scene.remember("whole", [path.name for path in list_checkpoints(target.checkpoints)])
        struck_s = time.time()
        cls.spoil(scene, target.checkpoints)
        return struck_s

    @classmethod
    def spoil(cls, scene: LabScene, directory: Path) -> None:
        """Do it."""

    @classmethod
    def check(cls, scene: LabScene, target: DrilledJob) -> list[str]:
        """Check that one of the whole checkpoints still exists."""
        there = {path.name for path in list_checkpoints(target.checkpoints)}
        whole = scene.memory["whole"]
        return [] if there & set(whole) else [f"{', '.join(whole)}: whole before, gone now"]


class CheckpointDiskFull(DiskStrike, name="checkpoint-disk-full", cause="AR005"):
    """The disk of the checkpoints is full."""

    @classmethod
    def spoil(cls, scene: LabScene, directory: Path) -> None:
        """Fill it to the last block."""
        fill(directory / "ballast")


class CheckpointReadOnly(DiskStrike, name="checkpoint-read-only", cause="AR606"):
    """The file system of the checkpoints goes read-only, as after an error of its disk."""

    @classmethod
    def spoil(cls, scene: LabScene, directory: Path) -> None:
        """Remount it: one file system, so on all nodes at once."""
        scene.run(scene.first.name, "mount", "-o", "remount,ro", scene.memory["mounted"])


def fill(path: Path) -> None:
    """Write into a file until its disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    place = parse_final(checkpoint.name)
    assert place is not None
    return place[0]


def _is_saving(directory: Path) -> bool:
    return any(parse_temp(path.name) for path in directory.iterdir())


def _largest(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def call(*command: str) -> str:
    """Run a program on this machine, and return what it prints.

    Raises:
        SetupError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"lab: {' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout.strip()
