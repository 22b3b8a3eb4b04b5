"""Runs an elastic Horovod job: starts the driver, gives it the hosts that work, and explains what its log leaves out.

    exit_code = run_horovod(request, run_dir, say=say, show=print)

One loop: the driver's events and output, the nodes' changes and the stacks (threads) go to watch.py, and what it says
goes to the user. A lost node leaves the list of hosts, and its workers are ended: Horovod then sees a failure, after
which all ranks synchronize, and not a host that left, after which only the new ones do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from ipaddress import ip_network
from pathlib import Path
from typing import IO, Any

import msgspec

from allranks.causes.book import find_cause
from allranks.horovod import elastic_driver
from allranks.horovod.usable_nodes import NodeWatch
from allranks.horovod.watch import HorovodWatch, Said, StackRequest
from allranks.host.net import find_interface_in, read_interfaces
from allranks.host.process import read_boot_id, read_start_ticks
from allranks.host.signals import die_with_parent
from allranks.launch.look.stack_step import probe_job
from allranks.model.errors import AllranksError, Exit, SetupError, UsageError, exit_for_signal
from allranks.model.finding import Finding, Severity, Verdict
from allranks.report.mask import mask_command
from allranks.report.rundir import RunDir

EVENTS, HOSTS, LOST = "driver.jsonl", "hosts", "lost_hosts"
"""Files that the driver shares with this process, in the directory of the attempt."""
TICK_S = 0.1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_S = 10.0
"""For the driver to end its workers after a signal, before it is killed."""
STACKS_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HorovodRequest:
    """What the user asked for."""

    job_id: str
    hosts: tuple[str, ...]
    slots: int
    min_np: int
    max_np: int | None
    start_np: int
    timeout_s: int
    cooldown_s: tuple[int, int]
    subnet: str
    discovery_script: str | None
    command: tuple[str, ...]


def run_horovod(
    request: HorovodRequest, run_dir: RunDir, *, say: Callable[[str], None], show: Callable[[Finding | str], None]
) -> int:
    """Run the job and return its exit code; verdict.json has the findings.

    Args:
        request: what to run.
        run_dir: with its attempt; gets driver.jsonl, horovod.log and verdict.json.
        say: gets one-line messages.
        show: gets findings, and the lines that Horovod and the workers print.
    Raises:
        SetupError: Horovod is not installed here, or this node is not on the data network.
    """
    if importlib.util.find_spec("horovod") is None:
        raise SetupError(
            f"{sys.executable} has no Horovod; install it there (docs/how-to/horovod.md), or use allranks.session()"
        )
    job = _Job(request, run_dir, say, show)
    with job.started(), NodeWatch(request.hosts, job_id=request.job_id) as nodes:
        exit_code = job.follow(nodes)
    findings = tuple(
        finding if exit_code else msgspec.structs.replace(finding, severity=Severity.WARN)
        for finding in job.watch.findings
    )
    if exit_code not in (0, *map(exit_for_signal, ENDING)) and findings:
        exit_code = int(find_cause(findings[-1].cause_id).exit_code)
    verdict = Verdict(job=run_dir.path.name, attempt=run_dir.attempt, exit_code=exit_code, findings=findings)
    run_dir.write_verdict(verdict, node=os.uname().nodename)
    if lost := run_dir.last_files.close():
        say(lost)
    return exit_code


class _Job:
    """The driver's process, its files, and the watch."""

    def __init__(
        self,
        request: HorovodRequest,
        run_dir: RunDir,
        say: Callable[[str], None],
        show: Callable[[Finding | str], None],
    ) -> None:
        self._request, self._run_dir, self._say, self._show = request, run_dir, say, show
        self._folder = run_dir.hold_attempt()
        self._unreachable: set[str] = set()
        self._stacks: queue.SimpleQueue[tuple[Mapping[str, list[list[str]]], str]] = queue.SimpleQueue()
        self._signum: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.watch = HorovodWatch(
            min_np=request.min_np, start_np=request.start_np, timeout_s=request.timeout_s, now_s=time.time()
        )

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Start the driver, and end it when the block is left."""
        self._write_hosts()
        self._folder.append(EVENTS, mode=0o600).close()  # what Horovod logs may quote the command
        handlers = {signum: signal.signal(signum, self._note_signal) for signum in ENDING}
        self._process = subprocess.Popen(
            driver_command(self._request, Path(f"/proc/self/fd/{self._folder.fd}")),
            pass_fds=[self._folder.fd],
            env=os.environ
            | {
                "ALLRANKS_HOROVOD_PLACE": place_words(self._request.subnet),
                "ALLRANKS_CHECKPOINT_DIR": str(self._run_dir.checkpoints_path(None)),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        self._run_dir.add_event(
            "started",
            command=mask_command(self._request.command, os.environ),
            members=list(self._request.hosts),
            pid=os.getpid(),
            start_ticks=read_start_ticks(os.getpid()),
            boot_id=read_boot_id(),
        )
        try:
            yield
        finally:
            self._end()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def follow(self, nodes: NodeWatch) -> int:
        """Follow the driver until it has ended; return the exit code."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with (
            TextIOWrapper(self._folder.open_read(EVENTS)) as events,
            TextIOWrapper(self._folder.append("horovod.log")) as log,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(process.stdout, selectors.EVENT_READ)
            rest, is_open = b"", True
            while True:
                has_ended = process.poll() is not None
                said = [event for line in _whole_lines(events) for event in self._decode(line)]
                if is_open and selector.select(TICK_S):
                    data = os.read(process.stdout.fileno(), 1 << 16)
                    is_open = bool(data)
                    *lines, rest = (rest + (data or b"\n" * bool(rest))).split(b"\n")
                    for line in lines:
                        self._take_output(line.decode(errors="replace"), log)
                for event in said:
                    if event["event"] == "ended":
                        nodes.hurry()
                    self._tell(self.watch.feed(event))
                self._follow_nodes(nodes)
                while not self._stacks.empty():
                    self._tell(self.watch.judge(*self._stacks.get()))
                self._tell(self.watch.turn(time.time()))
                if self._signum is not None:
                    self._say(f"{signal.Signals(self._signum).name}: ending all workers")
                    return exit_for_signal(self._signum)
                if nodes.end_of_job is not None:
                    self._tell(self.watch.cancel(nodes.end_of_job.state))
                    return exit_for_signal(signal.SIGTERM)
                if has_ended and not said and not is_open:
                    return Exit.OK if process.returncode == 0 else Exit.UNKNOWN
                if not is_open:
                    time.sleep(TICK_S)

    def _take_output(self, line: str, log: IO[str]) -> None:
        self.watch.feed_output(line)
        self._show(line)
        print(line, file=log, flush=True)

    def _follow_nodes(self, nodes: NodeWatch) -> None:
        for change in nodes.changes():
            if change.is_lost:
                self._unreachable.add(change.host)
                self._tell(self.watch.lose(change.host, change.evidence))
            else:
                self._unreachable.discard(change.host)
                self._tell(self.watch.regain(change.host))
            self._folder.write_whole(LOST, "\n".join(sorted(self._unreachable)).encode())
            self._write_hosts()

    def _tell(self, said: list[Said]) -> None:
        for word in said:
            if isinstance(word, StackRequest):
                threading.Thread(target=self._look, daemon=True).start()
            elif isinstance(word, Finding):
                self._show(word)
            else:
                self._say(word)

    def _look(self) -> None:
        """Read the stacks of all nodes, in a thread of its own."""
        found: dict[str, list[list[str]]] = {}
        problem = ""
        try:
            report = probe_job(self._request.job_id, silence_s=STACKS_S, env=os.environ, say=lambda _: None)
            for document in report.documents:
                mains = [thread for process in document.processes for thread in process.threads if thread.is_main]
                if mains:
                    found[document.node] = [
                        [frame.function for frame in main.frames]
                        for main in mains
                        if any("/horovod/" in frame.file for frame in main.frames)
                    ]
                problem = problem or next((process.problem for process in document.processes if process.problem), "")
        except AllranksError as exc:
            problem = str(exc)
        self._run_dir.add_event("stacks", stacks=found, problem=problem)
        self._stacks.put((found, problem))

    def _write_hosts(self) -> None:
        """Write the hosts that can be used, in one rename: the driver reads at any time."""
        usable = [host for host in self._request.hosts if host not in self._unreachable]
        self._folder.write_whole(HOSTS, "".join(f"{host}:{self._request.slots}\n" for host in usable).encode())

    def _decode(self, line: str) -> list[dict[str, Any]]:
        try:
            return [json.loads(line)]
        except ValueError:  # cut by a full disk
            return []

    def _note_signal(self, signum: int, _: object) -> None:
        self._signum = self._signum or signum

    def _end(self) -> None:
        """End the driver; it ends its workers when it gets SIGTERM, and when it is gone."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        if process.poll() is None:
            self._say(f"Horovod's driver (pid {process.pid}) has not ended {END_S:.0f} s after SIGTERM: SIGKILL")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def driver_command(request: HorovodRequest, directory: Path) -> list[str]:
    """Return the command line of the driver.

    Args:
        directory: where it finds the files that it shares with this process.
    Raises:
        SetupError: this node is not on the data network.
    """
    found = find_interface_in(ip_network(request.subnet), read_interfaces())
    if found is None:
        raise SetupError(f"this node has no interface in {request.subnet}; expected one of the data network")
    options = ["-np", request.start_np, "--min-np", request.min_np, "--network-interfaces", found[0].name]
    options += ["--max-np", request.max_np] if request.max_np else []
    options += ["--slots-per-host", request.slots, "--elastic-timeout", request.timeout_s]
    options += ["--blacklist-cooldown-range", *request.cooldown_s]
    options += ["--host-discovery-script", request.discovery_script or "allranks"]
    words = [
        elastic_driver.__file__,
        *(directory / name for name in (EVENTS, HOSTS, LOST)),
        "--",
        *options,
        *request.command,
    ]
    return [sys.executable, "-u", *map(str, words)]


def place_words(subnet: str) -> str:
    """Return what stands before each worker's command (start_worker.py)."""
    return f"{sys.executable} -m allranks.horovod.start_worker {subnet} --"


def choose_slots(env: Mapping[str, str]) -> int:
    """Return the workers per node: the GPUs that SLURM gives the job on a node, else its tasks per node, else 1.

    Raises:
        UsageError: a variable is no number.
    """
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE"):
        text = env.get(name, "").partition("(")[0]
        if text.isdigit() and int(text):
            return int(text)
        if text and not text.isdigit():
            raise UsageError(f"{name}={text}: expected a number; name the workers per node with --slots-per-host")
    return 1


def _whole_lines(file: Any) -> Iterator[str]:
    """Yield the lines that are whole; the rest of a line that is being written is read again later."""
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(at)
            return
        yield line
