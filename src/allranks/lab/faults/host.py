"""Faults of a single node: its name, limits, directories, clock, and the environment of its workers."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import ClassVar

from allranks.lab.faults.fault import PROGRAMS, EnvironmentFault, Expected, Fault, JobStart, LabScene, TrueCulprit
from allranks.lab.hosts import processes_in
from allranks.model.errors import SetupError

OTHER_TORCH = "2.4.0"
FAKETIME_LIBRARIES = ("usr/lib/*/faketime/libfaketime.so.1", "usr/lib*/faketime/libfaketime.so.1")
CLOCK_OFF_S = 5
SHM = "/dev/shm"  # noqa: S108


class DuplicateHostname(Fault, name="duplicate-hostname", cause="AR009"):
    """The node has the host name of another node, as after cloning a machine; SLURM still knows it by its own."""

    severity = Expected.WARN
    min_nodes = 2

    @classmethod
    def culprit(cls, scene: LabScene) -> TrueCulprit:
        """Both nodes: nothing shows which of them is the copy."""
        return TrueCulprit(nodes=scene.pair)

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Take the other node's name."""
        scene.run(scene.node.name, "hostname", scene.peer.name)

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Take its own name again."""
        scene.run(scene.node.name, "hostname", scene.node.name)


# Limits


class ShmSmall(Fault, name="shm-small", cause="AR002"):
    """The node's /dev/shm has 64 MiB, as in a container without --shm-size."""

    severity = Expected.WARN

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Remount it."""
        blocks, size = scene.run(scene.node.name, "stat", "--file-system", "--format=%b %S", SHM).split()
        scene.remember("size_bytes", int(blocks) * int(size))
        scene.run(scene.node.name, "mount", "-o", "remount,size=64m", SHM)

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Remount it with the size it had."""
        if "size_bytes" in scene.memory:
            size = f"remount,size={scene.memory['size_bytes']}"
            scene.run(scene.node.name, "mount", "-o", size, SHM)


class LimitFault(Fault):
    """A limit of the node's slurmd, which its tasks inherit.

    The soft limit: a process that cannot raise a hard limit again (root in a container) could not heal it.
    """

    limit: ClassVar[int]
    value: ClassVar[int]

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Lower it."""
        pids = _slurmds(scene)
        soft, hard = resource.prlimit(pids[0], cls.limit)
        scene.remember("limit", soft)
        for pid in pids:
            resource.prlimit(pid, cls.limit, (cls.value, hard))

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Restore the old limit."""
        if "limit" in scene.memory and scene.is_same_life(scene.node.name):
            for pid in _slurmds(scene):
                resource.prlimit(pid, cls.limit, (scene.memory["limit"], resource.prlimit(pid, cls.limit)[1]))


class MemlockLow(LimitFault, name="memlock-low", cause="AR003"):
    """Tasks on the node may lock 64 KiB of memory, the default of old systems; RDMA needs it unlimited."""

    severity = Expected.WARN
    limit, value = resource.RLIMIT_MEMLOCK, 64 * 1024


class NofileLow(LimitFault, name="nofile-low", cause="AR004"):
    """Tasks on the node may open 256 files."""

    limit, value = resource.RLIMIT_NOFILE, 256


# Directories


class MountFault(Fault):
    """Something is mounted on the node over a directory."""

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Unmount it."""
        if "mounted" in scene.memory:
            script = 'mountpoint --quiet "$1" && umount --lazy "$1" || true'
            scene.run(scene.node.name, "sh", "-c", script, "sh", scene.memory["mounted"])
        for made in scene.memory.get("made", []):
            with contextlib.suppress(OSError):  # jobs have written there
                Path(made).rmdir()


class RunDirNotShared(MountFault, name="run-dir-not-shared", cause="AR006"):
    """The others share the run directory; the node has a local directory at that path."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Mount a tmpfs over it."""
        _remember_run_dir(scene)
        scene.run(scene.node.name, "mount", "-t", "tmpfs", "-o", "size=8g", "lab", str(scene.run_dir))


class RunDirReadOnly(MountFault, name="run-dir-read-only", cause="AR006"):
    """The node sees the shared run directory and cannot write to it."""

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Mount it over itself, read-only."""
        _remember_run_dir(scene)
        here = str(scene.run_dir)
        scene.run(scene.node.name, "mount", "--bind", here, here)
        scene.run(scene.node.name, "mount", "-o", "remount,bind,ro", here)


class DiskFull(MountFault, name="disk-full", cause="AR005"):
    """TMPDIR of the node's tasks is a file system of 1 MiB that is full."""

    also = ("AR503",)  # TMPDIR

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Mount a tmpfs, fill it, and set TMPDIR."""
        full = scene.own_dir(scene.node.name, "full")
        full.mkdir(exist_ok=True)
        scene.remember("made", [str(full)])
        scene.remember("mounted", str(full))
        scene.run(scene.node.name, "mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "lab", str(full))
        fill = 'dd if=/dev/zero of="$1/ballast" bs=64k 2>/dev/null; test -s "$1/ballast"'
        scene.run(scene.node.name, "sh", "-c", fill, "sh", str(full))
        scene.write_environment(scene.node.name, {"TMPDIR": str(full)})

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Unset TMPDIR, unmount."""
        scene.remove_files()
        super().heal(scene)


class CodeDiffers(MountFault, name="code-differs", cause="AR513"):
    """The node has an older copy of the job's script: another file is mounted over it."""

    program: ClassVar = PROGRAMS / "form_group.py"

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Mount a copy with one line more over it."""
        copy = scene.own_dir(scene.node.name, cls.program.name)
        copy.write_text(cls.program.read_text() + "# an older version\n")
        scene.remember("mounted", str(cls.program))
        scene.run(scene.node.name, "mount", "--bind", str(copy), str(cls.program))

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Unmount it."""
        super().heal(scene)
        scene.own_dir(scene.node.name, cls.program.name).unlink(missing_ok=True)

    @classmethod
    def start(cls, scene: LabScene) -> JobStart:
        """Start that script, even if the drill would start another one."""
        return JobStart(program=cls.program)


# Clock and environment


class ClockOff(EnvironmentFault, name="clock-off", cause="AR007"):
    """The clock of the node's tasks is 5 s fast (libfaketime)."""

    severity = Expected.WARN
    also = ("AR503",)  # LD_PRELOAD

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Preload libfaketime into the tasks."""
        found = [path for pattern in FAKETIME_LIBRARIES for path in sorted(Path("/").glob(pattern))]
        if not found:
            raise SetupError("lab: clock-off: not installed: libfaketime: apt-get install faketime")
        variables = {
            "LD_PRELOAD+": str(found[0]),
            "FAKETIME": f"+{CLOCK_OFF_S}s",
            "FAKETIME_DISABLE_SHM": "1",  # do not put it into /dev/shm
        }
        scene.write_environment(scene.node.name, variables)


class EnvDriftNcclAlgo(EnvironmentFault, name="env-drift-nccl-algo", cause="AR503"):
    """NCCL_ALGO=Ring is set only on this node."""

    variables: ClassVar = {"NCCL_ALGO": "Ring"}


class EnvDriftLibraryPath(EnvironmentFault, name="env-drift-library-path", cause="AR503"):
    """LD_LIBRARY_PATH of the node begins with a directory that the others do not have."""

    severity = Expected.WARN
    variables: ClassVar = {"LD_LIBRARY_PATH+": "/opt/old-cuda/lib64"}


class TorchVersionDiffers(EnvironmentFault, name="torch-version-differs", cause="AR505"):
    """The first torch on the node's path is version 2.4.0.

    Only its metadata (a dist-info directory in front of PYTHONPATH): `import torch` imports the real one, so workers of
    a job that continues do not fail for another reason.
    """

    also = ("AR503",)  # PYTHONPATH

    @classmethod
    def inject(cls, scene: LabScene) -> None:
        """Prepend the metadata."""
        site = _site(scene)
        info = site / f"torch-{OTHER_TORCH}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {OTHER_TORCH}\n")
        scene.write_environment(scene.node.name, {"PYTHONPATH+": str(site)})

    @classmethod
    def heal(cls, scene: LabScene) -> None:
        """Remove it."""
        super().heal(scene)
        info = _site(scene) / f"torch-{OTHER_TORCH}.dist-info"
        (info / "METADATA").unlink(missing_ok=True)
        for directory in (info, info.parent):
            with contextlib.suppress(FileNotFoundError):
                directory.rmdir()


def _site(scene: LabScene) -> Path:
    return scene.own_dir(scene.node.name, "site")


def _slurmds(scene: LabScene) -> list[int]:
    pids = processes_in(scene.inits[scene.node.name]).get("slurmd", [])
    if not pids:
        raise SetupError(f"lab: {scene.node.name} has no slurmd; allranks lab up starts it")
    return pids


def _remember_run_dir(scene: LabScene) -> None:
    if not scene.run_dir.is_dir():
        scene.run_dir.mkdir(parents=True)
        scene.remember("made", [str(scene.run_dir)])
    scene.remember("mounted", str(scene.run_dir))
