"""One situation, in namespaces of its own, so that nothing of it remains: what it needs to start a job and see its end.

    run.py -> unshare --mount -> this file (`watch`: deadline, thaws)
                                  -> unshare --pid -> this file (`play`: process 1 of the situation)

All processes of a situation are below its process 1, so it can count those that a job leaves, a `cancel` that trusts a
forged process id can reach nobody else, and the kernel ends them all with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .disks import Disk, mount, thaw
from .judge import PREFIXED, Facts, Fall, Kind, Ran

TESTS = Path(__file__).resolve().parents[1]
ALLRANKS = [str(Path(sys.executable).with_name("allranks"))]
DEADLINE_S = 40.0
MAX_MB = 1000
"""An agent that takes more is killed: it has fallen, and the machine shall not."""
LEFT_S = 5.0
"""Processes that a job leaves must be gone so long after it."""
KEPT_CHARACTERS = 300_000
"""Of what stood on a terminal, from each of its ends."""


class Job:
    """One `allranks run`, and what is seen of it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], terminal: Path, **options: Any) -> None:
        self._terminal, self._peak_kb = terminal, 0
        with terminal.open("wb") as file:
            options = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL, **options}
            self.process = subprocess.Popen(list(command), env=dict(env), start_new_session=True, **options)
        threading.Thread(target=self._measure, daemon=True).start()

    def _measure(self) -> None:
        with contextlib.suppress(OSError):
            while self.process.returncode is None:
                status = Path(f"/proc/{self.process.pid}/status").read_text()
                if peak := re.search(r"^VmHWM:\s*(\d+)", status, re.MULTILINE):
                    self._peak_kb = int(peak[1])
                if self.peak_mb > MAX_MB:
                    self.process.kill()
                time.sleep(0.02)

    @property
    def peak_mb(self) -> float:
        """The agent's most memory so far, children not counted."""
        return self._peak_kb / 1024

    def wait(self, deadline_s: float) -> int | None:
        """Wait for its end; where it has none, kill it and return None."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            return None

    def read_terminal(self) -> str:
        """What stood on the terminal; its middle is left out where it is very long."""
        with self._terminal.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            text = file.read(KEPT_CHARACTERS)
            if size > 2 * KEPT_CHARACTERS:
                file.seek(size - KEPT_CHARACTERS)
                text += b"\n"
            text += file.read()
        return text.decode(errors="replace")


class Stage:
    """What a situation has: a scratch directory on a healthy disk, and, if it wants, small disks and a job."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.terminals: list[Path] = []
        self.signals: list[str] = []
        """That processes of the situation sent to its process 1: a forged process id was believed."""
        signal.signal(signal.SIGTERM, lambda *_: self.signals.append("process 1 got SIGTERM"))
        for name in ("notes", "images", "checkpoints", "tmp", "home"):
            (scratch / name).mkdir()
        self.runs = scratch / "runs"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "ALLRANKS_"))},
            "SURROUNDINGS": str(scratch),
            "SURROUNDINGS_CHECKPOINTS": str(scratch / "checkpoints"),
            "TMPDIR": str(scratch / "tmp"),
            "HOME": str(scratch / "home"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def mount(self, place: str, file_system: str) -> Disk:
        """Put a small disk where the run directory, the checkpoints, TMPDIR or /dev/shm is."""
        path = Path("/dev/shm") if place == "shm" else self.scratch / place
        return mount(path, file_system, images=self.scratch / "images")

    def start(self, name: str, *flags: str, hold: str = "", ranks: int = 2, **options: Any) -> Job:
        """Start a job whose ranks do what rank.py says of this name."""
        self.env["SURROUNDINGS_HOLD"] = hold
        self.terminals.append(self.scratch / f"terminal_{len(self.terminals)}")
        command = [*ALLRANKS, "run", "--log-dir", str(self.runs), "--nproc-per-node", str(ranks), "--standalone"]
        command += ["--no-standby", *flags, "-m", "surroundings.rank", name]
        return Job(command, self.env, self.terminals[-1], **{"cwd": self.scratch, **options})

    def reached(self, phase: str, job: Job, *, ranks: int = 2) -> bool:
        """Wait until so many ranks have noted this; False: the job was over before, or it took too long."""
        deadline_s = time.monotonic() + DEADLINE_S
        while job.process.poll() is None and time.monotonic() < deadline_s:
            if sum(any(note["note"] == phase for note in notes) for notes in self.read_notes().values()) >= ranks:
                return True
            time.sleep(0.02)
        return False

    def let_go(self) -> None:
        """Let the ranks go on that wait in their phase."""
        (self.scratch / "go").touch()

    def read_notes(self) -> dict[int, list[dict[str, Any]]]:
        """Return what the ranks noted, each in its last life."""
        notes: dict[int, list[dict[str, Any]]] = {}
        for path in sorted((self.scratch / "notes").iterdir(), key=lambda path: int(path.suffix[1:])):
            notes[int(path.stem)] = [json.loads(line) for line in path.read_text().splitlines()]
        return notes

    def end(self, job: Job, *, deadline_s: float = DEADLINE_S, **more: Any) -> Facts:
        """Wait for the job's end, and collect what can be seen of it."""
        exit_code = job.wait(deadline_s)
        left = self._await_no_processes()
        terminal = job.read_terminal()
        named = {Path(path) for path in re.findall(r"\boutput in (/[^\s;]+)", terminal)}
        return Facts(
            exit_code=exit_code,
            terminal=terminal,
            notes=self.read_notes(),
            verdict=self._read_verdict(),
            peak_mb=job.peak_mb,
            left=left,
            missing=[str(path) for path in named if not next(path.glob("*/rank_*.out"), None)],
            harmed=self.signals,
            **more,
        )

    def _read_verdict(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            text = max(self.runs.glob("*/attempt_*/verdict.json")).read_text()
            verdict: dict[str, Any] = json.loads(text)
            return verdict if "exit_code" in verdict and "findings" in verdict else None
        return None

    def _await_no_processes(self) -> list[str]:
        deadline_s = time.monotonic() + LEFT_S
        while (left := _processes()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return left

    def command(self, *words: str, deadline_s: float = 30, harmed: Callable[[], Sequence[str]] = list) -> Ran:
        """Run another verb of allranks to its end; its answer to a question is no."""
        self.terminals.append(self.scratch / f"terminal_{len(self.terminals)}")
        job = Job([*ALLRANKS, *words], self.env, self.terminals[-1], cwd=self.scratch)
        exit_code = job.wait(deadline_s)
        return Ran(
            command=f"allranks {words[0]}",
            exit_code=exit_code,
            text=job.read_terminal(),
            peak_mb=job.peak_mb,
            harmed=[*harmed(), *self.signals],
        )


def _processes() -> list[str]:
    """All processes of this namespace but this one, which is process 1: so it takes in those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if pid != os.getpid():
                found.append(b" ".join(words).decode(errors="replace")[-60:])
    return found


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Something that a job, or a command, is put into."""

    name: str
    """Its group comes first: `disk/runs/full/running/prints`."""
    expected: str
    """For people: what must come of it."""
    play: Callable[[Stage], tuple[list[Fall], float]]
    """Returns what fell, and the most memory of an agent, in MB; 0: there was none."""
    file_system: str = "tmpfs"
    """That it needs."""

    @property
    def group(self) -> str:
        """The row of the report that counts it."""
        return "/".join(self.name.split("/")[: 3 if self.name.startswith("disk/") else 2])


def play(name: str, scratch: Path) -> None:
    """Be process 1 of a situation: play it, and write its outcome."""
    from .situations import SITUATIONS

    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    stage, began_s = Stage(scratch), time.monotonic()
    peak_mb = 0.0
    try:
        falls, peak_mb = SITUATIONS[name].play(stage)
    except Exception:
        falls = [Fall(Kind.VOID, traceback.format_exc()[-1500:])]
    evidence = "\n".join(_show(path) for path in stage.terminals if falls)
    outcome = {"falls": [[fall.kind, fall.what] for fall in falls], "peak_mb": peak_mb, "evidence": evidence}
    (scratch / "outcome.json").write_text(json.dumps({**outcome, "seconds": time.monotonic() - began_s}))


def _show(terminal: Path) -> str:
    """What the agent itself said at the end, and the last lines of the ranks."""
    text = terminal.read_bytes()[-2_000_000:].decode(errors="replace")
    return PREFIXED.sub("", text)[-2500:] + "\n...\n" + "".join(PREFIXED.findall(text)[-4:])[-1000:]


def watch(name: str, scratch: Path, deadline_s: float) -> None:
    """Play a situation in another process, which is killed at its deadline, and thaw what it has frozen."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "surroundings.stage", "play"]
    inner = subprocess.Popen([*command, name, str(scratch)])
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            inner.wait(deadline_s)
    finally:
        for disk in scratch.iterdir():
            thaw(disk)
        inner.kill()
        inner.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if sys.argv[1] == "play":
        play(sys.argv[2], Path(sys.argv[3]))
    else:
        watch(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
