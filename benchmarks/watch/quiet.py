"""Does a watched job notice anything? strace of its ranks and of the watcher tells.

    python -m benchmarks.watch strace

Ranks: `strace --follow-forks --attach` prints a line for each signal and each stop; there must be none. Watcher: calls
that signal, trace or write to a process of the job, and connections, must not be made.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .jobs import NUM_RANKS, DrillError, LocalJob
from .stage import answer, run_apart

SECONDS = 20.0
STARTS_S = 30.0
DISTURBING = "kill,tkill,tgkill,pidfd_send_signal,ptrace,process_vm_writev,connect"
_STOP = re.compile(r"--- (?P<what>SIG\w+|stopped by \w+)")
_CALL = re.compile(r"^(?:\d+ +)?(?P<call>\w+)\((?P<words>.*)")


def check(scratch: Path) -> dict[str, Any]:
    """Watch a job while both are traced, in namespaces of its own."""
    found: dict[str, Any] = run_apart(
        ["benchmarks.watch.quiet", str(scratch / "strace")], scratch / "strace", timeout_s=200
    )
    return found


def count_stops(lines: list[str]) -> list[str]:
    """Return the signals and stops in strace's lines.

    >>> count_stops(["7 --- SIGSTOP {si_signo=SIGSTOP} ---", "7 --- stopped by SIGSTOP ---", "7 futex()"])
    ['SIGSTOP', 'stopped by SIGSTOP']
    """
    return [found["what"] for line in lines if (found := _STOP.search(line))]


def list_disturbing(lines: list[str], pids: set[int]) -> list[str]:
    """Return the watcher's calls that could disturb these processes: aimed at one of them, or a connection by TCP.

    >>> list_disturbing(["9 kill(7, SIGSTOP) = 0", "9 kill(10, SIGKILL) = 0", "9 ptrace(PTRACE_SEIZE, 7) = 0",
    ...                  "9 connect(3, {sa_family=AF_UNIX}, 110)", "9 connect(3, {sa_family=AF_INET})"], {7})
    ['kill(7, SIGSTOP) = 0', 'ptrace(PTRACE_SEIZE, 7) = 0', 'connect(3, {sa_family=AF_INET})']
    """
    found = []
    for line in lines:
        call = _CALL.match(line)
        if call is None:
            continue
        is_aimed = any(int(number) in pids for number in re.findall(r"\b\d+\b", call["words"].partition(" = ")[0]))
        if ("AF_INET" in line) if call["call"] == "connect" else is_aimed:
            found.append(f"{call['call']}({call['words']}")
    return found


def _trace(directory: Path) -> dict[str, Any]:
    job = LocalJob("torchrun", directory / "job")
    ranks, calls = directory / "ranks.strace", directory / "watcher.strace"
    tracer = watcher = None
    try:
        job.start()
        job.wait_until_stepping()
        pids = [job.pid_of(rank) for rank in range(NUM_RANKS)]
        attach = [word for pid in pids for word in ("--attach", str(pid))]
        tracer = subprocess.Popen(  # -I1: with -o it would not end when it is told to
            ["strace", "-f", "-qq", "-I1", "--trace=none", "--signal=all", "-o", str(ranks), *attach],
            stdin=subprocess.DEVNULL,
        )
        job.wait_until_stepping()
        watch = [sys.executable, "-m", "allranks", "watch", "--here", "--json"]
        with (directory / "watch.jsonl").open("wb") as documents:
            watcher = subprocess.Popen(
                ["strace", "-f", "-qq", "-I1", f"--trace={DISTURBING}", "--signal=none", "-o", str(calls), *watch],
                stdout=documents, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        deadline_s = time.monotonic() + STARTS_S
        while not (directory / "watch.jsonl").stat().st_size:
            if watcher.poll() is not None or time.monotonic() > deadline_s:
                raise DrillError(f"allranks watch says nothing: {watcher.communicate()[1][-1000:].decode()}")
            time.sleep(0.1)
        time.sleep(SECONDS)
        job.wait_until_stepping()
    finally:
        for process in (watcher, tracer):
            if process is not None:
                process.terminate()
                process.wait()
        job.end()
    stops = count_stops(ranks.read_text().splitlines())
    disturbing = list_disturbing(calls.read_text().splitlines(), {*pids, job.store_pid})
    looks = len((directory / "watch.jsonl").read_text().splitlines())
    return {
        "seconds": SECONDS, "num_processes": NUM_RANKS, "num_stops": len(stops) + len(disturbing),
        "stops": stops, "disturbing": disturbing, "num_documents": looks,
    }  # fmt: skip


if __name__ == "__main__":
    where = Path(sys.argv[1])
    sys.exit(answer(where, lambda: _trace(where)))
