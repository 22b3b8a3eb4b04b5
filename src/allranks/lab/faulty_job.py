"""How does a job run in a lab with faults? Under `allranks run`, and under plain torchrun.

Both run the same program, which forms a group, runs one all-reduce and ends, through the lab's own SLURM.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_interface
from pathlib import Path
from threading import Event, Thread

import msgspec

from allranks.lab import hosts as machines
from allranks.lab.faults.fault import PROGRAMS, JobStart
from allranks.lab.faults.injected import Injected
from allranks.lab.hosts import SWITCH
from allranks.lab.lab import Lab
from allranks.lab.node_plan import Host
from allranks.lab.slurm_daemons import conf_path
from allranks.model.finding import Verdict

PROGRAM = PROGRAMS / "form_group.py"
NOTHING = PROGRAMS / "nothing.py"
"""Used for healthy starts: there are a hundred of them."""
JOIN_S = 25
"""Deadline of the roll call in drills: a node that comes 15 s late must not fail it."""
JOB_S = 110.0
"""Deadline of one job; without allranks, it is silent for much longer."""
BASELINE_S = 120.0
LEFT_S = 5.0
"""How long processes of a job may remain after its end."""
DAEMONS = ("init.py", "munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmscriptd", "slurmstepd")


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """How plain torchrun behaved with the same faults."""

    silent_s: float
    """Until its first line about the fault; BASELINE_S if there was none."""
    said: str
    """That line, shortened."""
    exit_code: int | None
    """None: it was cut off."""


class Job(msgspec.Struct, kw_only=True):
    """Results of one job."""

    exit_code: int | None
    output: str
    verdict: Verdict | None = None
    node_verdicts: dict[str, bytes] = {}
    seconds: float | None = None
    has_started: bool = False


def run_job(lab: Lab, injected: Sequence[Injected], run_dir: Path) -> Job:
    """Start the job on all nodes under `allranks run`, and return its results."""
    start = _merge([one.fault.start(one.scene) for one in injected])
    hosts = lab.planned_hosts()
    cluster = write_cluster(lab, run_dir.parent / f"{lab.name}.toml", guard={"join_s": JOIN_S})
    command = [
        "srun",
        *(start.srun_flags or (f"--nodes={len(hosts)}", "--ntasks-per-node=1")),
        *start.prefix,
        *("allranks", "run", "--cluster", str(cluster), "--log-dir", str(run_dir / "runs")),
        *start.run_flags,
        str(start.program or (PROGRAM if injected else NOTHING)),
    ]
    began_s = time.time()
    exit_code, output = _execute(lab, lab.controller().name, command, run_dir / "output.txt", JOB_S)
    return _read_job(run_dir, exit_code, output, began_s)


def _merge(starts: Sequence[JobStart]) -> JobStart:
    return JobStart(
        srun_flags=tuple(flag for start in starts for flag in start.srun_flags),
        run_flags=tuple(flag for start in starts for flag in start.run_flags),
        program=next((start.program for start in starts if start.program), None),
        extra_agents=tuple(extra for start in starts for extra in start.extra_agents),
    )


def write_cluster(lab: Lab, path: Path, *, guard: Mapping[str, float]) -> Path:
    """Write the lab's own cluster.toml with the [guard] values of a drill, and return its path."""
    cluster = json.loads((lab.dir / "lab.json").read_text())["cluster"]
    lines = ["[network]", f'data = "{cluster["network"]["data"]}"', "[guard]"]
    lines += [f"{name} = {value}" for name, value in guard.items()]
    for node in cluster["node"]:
        lines += ["[[node]]", *(f'{key} = "{node[key]}"' for key in ("name", "address", "interface") if node.get(key))]
    path.write_text("\n".join(lines) + "\n")
    return path


def start_on(lab: Lab, node: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command on a node, in its own session, with its output in a file."""
    outer = [sys.executable, "-m", "allranks", "lab", "exec", "--name", lab.name, node, "--", *command]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "ALLRANKS_"))}
    env |= {"ALLRANKS_LAB_DIR": str(lab.dir.parent), "SLURM_CONF": str(conf_path(lab.dir))}
    with log.open("wb") as file:
        return subprocess.Popen(
            outer, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def cut_off(process: subprocess.Popen[bytes]) -> None:
    """End what `start_on` started, if it still runs."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _execute(lab: Lab, node: str, command: Sequence[str], log: Path, deadline_s: float) -> tuple[int | None, str]:
    """Run a command on a node; the exit code is None if it was cut off."""
    process = start_on(lab, node, command, log)
    try:
        exit_code: int | None = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        exit_code = None
    finally:
        cut_off(process)
    return exit_code, log.read_text(errors="replace")


def _read_job(run_dir: Path, exit_code: int | None, output: str, began_s: float) -> Job:
    job = Job(exit_code=exit_code, output=output)
    attempt = max((run_dir / "runs").glob("[0-9]*/attempt_*"), key=lambda path: path.stat().st_mtime, default=None)
    if attempt is None:
        return job
    with contextlib.suppress(OSError, msgspec.DecodeError):
        job.verdict = Verdict.from_json((attempt / "verdict.json").read_bytes())
    job.node_verdicts = {path.parent.name: path.read_bytes() for path in attempt.glob("*/verdict.json")}
    events = [json.loads(line) for line in _lines(attempt / "events.jsonl")]
    starts = [event["time_s"] - event["age_s"] for event in events if "age_s" in event]
    said = next((event for event in events if event["event"] in ("started", "ended")), None)
    if said is not None:
        job.seconds = said["time_s"] - max(starts, default=began_s)
        job.has_started = said["event"] == "started"
    elif job.verdict is not None:  # written by a node that is not the leader
        job.seconds = (attempt / "verdict.json").stat().st_mtime - began_s
    return job


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def wait_until_gone(lab: Lab) -> list[str]:
    """Return the processes in the nodes that remain LEFT_S after the job's end, except daemons and those of faults."""
    deadline_s = time.monotonic() + LEFT_S
    while True:
        left = _left(lab)
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.1)


def _left(lab: Lab) -> list[str]:
    left = []
    for node, init in machines.find_inits(lab.dir).items():
        if node == SWITCH:
            continue
        for pids in machines.processes_in(init).values():
            for pid in pids:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
                    text = " ".join(words).strip()
                    if text and not any(daemon in text for daemon in DAEMONS) and str(PROGRAMS) not in text:
                        left.append(f"{node}: {text[:80]} (pid {pid})")
    return left


# The baseline: plain torchrun.


def data_interface_of(first: Host) -> str:
    """Return a shell expression that finds a node's data interface: the one on the first node's data network."""
    return f"$(ip -oneline address show to {ip_interface(first.data_address).network} | awk '{{print $2; exit}}')"


def run_baseline(lab: Lab, injected: Sequence[Injected], run_dir: Path, *, say: Callable[[str], None]) -> Baseline:
    """Start the same program under plain torchrun, and note when it prints the first line about a failure."""
    hosts = lab.planned_hosts()
    first = hosts[0]
    # By name: torchrun would not recognize an address that its own name does not resolve to, and all nodes would wait.
    endpoint = f"{first.name}:29500"
    start = _merge([one.fault.start(one.scene) for one in injected])
    if "--master-addr" in start.run_flags:
        endpoint = f"{start.run_flags[start.run_flags.index('--master-addr') + 1]}:29500"
    torchrun = [
        *("torchrun", f"--nnodes={len(hosts)}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=drill"),
        f"--rdzv-endpoint={endpoint}",
        str(start.program or PROGRAM),
    ]
    tasks = start.srun_flags or (f"--nodes={len(hosts)}", "--ntasks-per-node=1")
    # As a careful user sets it: each node's own data interface. A fault's own variables take precedence, as in a shell.
    names = f'export GLOO_SOCKET_IFNAME="${{GLOO_SOCKET_IFNAME:-{data_interface_of(first)}}}"'
    command = ["srun", "--label", *tasks, *start.prefix, "sh", "-c", f'{names}; exec "$@"', "sh", *torchrun]
    label = ", ".join(one.fault.name for one in injected)
    say(f"{label}: the same under plain torchrun, stopped after {BASELINE_S:.0f} s")
    log = run_dir / "torchrun.txt"
    began_s = time.monotonic()
    watch = _FirstWords(log)
    exit_code = _execute_watched(lab, lab.controller().name, command, log, watch)
    wait_until_gone(lab)
    silent_s = watch.first_s - began_s if watch.first_s else min(time.monotonic() - began_s, BASELINE_S)
    said = watch.said or "nothing"
    if exit_code == 0:  # its complaints were no failure
        said = "nothing: the job succeeded"
    return Baseline(silent_s=round(silent_s, 1), said=said, exit_code=exit_code)


_WORDS = re.compile(r"Error|error:|Exception|[Tt]imed? ?out|refused|unreachable|[Ff]ailed|aborted|No route", re.ASCII)
_NOISE = re.compile(
    r"srun: |slurmstepd|error: \*\*\* (?:JOB|STEP) \d|^(?:\d+: )?\[W\d|hostname of the client socket|OMP_NUM_THREADS"
    r"|^\*+$|Traceback \(most recent"
)


class _FirstWords:
    """Return when a log first reports a failure, and the line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.first_s: float | None = None
        self.said = ""

    def look(self) -> None:
        if self.first_s is not None or not self._path.exists():
            return
        with self._path.open(errors="replace") as file:
            file.seek(self._read)
            text = file.read()
            self._read = file.tell()
        for line in text.splitlines():
            if complains(line):
                self.first_s, self.said = time.monotonic(), words_of(line)
                return


def complains(line: str) -> bool:
    """Whether a line reports a failure."""
    return bool(_WORDS.search(line)) and not _NOISE.search(line)


def words_of(line: str) -> str:
    """Return a line without the task number that srun --label prepends."""
    return re.sub(r"^\d+: ", "", " ".join(line.split()))[:160]


def _execute_watched(lab: Lab, node: str, command: Sequence[str], log: Path, watch: _FirstWords) -> int | None:
    is_over = Event()

    def keep_looking() -> None:
        while not is_over.wait(0.1):
            watch.look()

    watcher = Thread(target=keep_looking, daemon=True)
    watcher.start()
    try:
        return _execute(lab, node, command, log, BASELINE_S)[0]
    finally:
        is_over.set()
        watcher.join()
        watch.look()
