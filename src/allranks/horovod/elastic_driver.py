"""Horovod's own elastic driver, with its log, the start and the end of each worker written down as events.

    python elastic_driver.py EVENTS HOSTS LOST -- -np 4 --min-np 4 --network-interface ens1f1 python train.py

It imports the standard library and Horovod only. Four places of Horovod 0.28.1 are replaced, and nothing else:

- `gloo_run.get_remote_command`: `srun --overlap -w HOST` in place of `ssh HOST`,
- `gloo_run._exec_command_fn`: each worker gets its node's own interface (start_worker.py), its start and end become
  events, and the workers of a lost host are ended: srun would wait for them until SLURM gives the node up,
- `HostDiscoveryScript.find_available_hosts_and_slots`: reads the file HOSTS, unless the user has a discovery script,
- `ElasticDriver._update_host_assignments`: Horovod takes the worker of a host that failed and is back in the same reset
  for running, and does not start it: the others wait for it until Gloo aborts them.

Events are lines of JSON: `log` (a record of the driver's log), `started`, `ended`, `discovered`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

POLL_S = 0.2
SRUN = "srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --mem=0 --mpi=none --input=none --unbuffered"
"""--overlap: beside other steps, with their CPUs and GPUs. No --exact and no --cpus-per-task: the step has them all."""


class EventFile:
    """The file that `allranks horovod` reads."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115  (until this process ends)
        self._lock = threading.Lock()

    def tell(self, event: str, **more: object) -> None:
        """Append an event."""
        with self._lock:
            self._file.write(json.dumps({"time_s": time.time(), "event": event, **more}) + "\n")


class LogEvents(logging.Handler):
    """Makes each record of the driver's log an event."""

    def __init__(self, events: EventFile) -> None:
        super().__init__(logging.DEBUG)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with the last line of its traceback."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self._events.tell("log", level=record.levelname, text=text)


class LostHosts:
    """Which hosts are lost: whoever runs a worker there is told to end it.

    Args:
        path: names of hosts, a line each; written by `allranks horovod`.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._waiting: list[tuple[str, threading.Event]] = []
        threading.Thread(target=self._poll, daemon=True).start()

    def expect(self, host: str) -> threading.Event:
        """Return an event that is set when the host is lost."""
        event = threading.Event()
        self._waiting.append((host, event))
        return event

    def _poll(self) -> None:
        while True:
            lost = set(read_words(self._path))
            for host, event in self._waiting:
                if host in lost:
                    event.set()
            self._waiting = [waiting for waiting in self._waiting if not waiting[1].is_set()]
            time.sleep(POLL_S)


def read_words(path: Path) -> list[str]:
    """Return the words of a file; none if it is not there."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def remote_command(local_command: str, host: str, **_: object) -> str:
    """Return what starts a worker on another host; the command is quoted for a shell already."""
    return f"{SRUN} --nodelist={quote(host)} sh -c {local_command}"


def wrap_exec(
    exec_fn: Callable[[Any], Callable[..., tuple[int, float]]],
    events: EventFile,
    lost: LostHosts,
    ended: set[tuple[str, int]],
    place: str,
) -> Callable[[Any], Callable[..., tuple[int, float]]]:
    """Return Horovod's `_exec_command_fn`, with events.

    Args:
        exec_fn: Horovod's.
        events: where they go.
        lost: the lost hosts.
        ended: gets host and slot of each worker that has ended.
        place: words that are put before the worker's command, on its node.
    """

    def wrapped(settings: Any) -> Callable[..., tuple[int, float]]:
        execute = exec_fn(settings)

        def run(command: str, slot: Any, ends: list[Any]) -> tuple[int, float]:
            who = {"rank": slot.rank, "host": slot.hostname, "slot": slot.local_rank}
            ended.discard((slot.hostname, slot.local_rank))
            events.tell("started", **who)
            exit_code, time_s = execute(f"{place} {command}", slot, [*(ends or []), lost.expect(slot.hostname)])
            ended.add((slot.hostname, slot.local_rank))
            events.tell("ended", **who, exit_code=exit_code)
            return exit_code, time_s

        return run

    return wrapped


def wrap_assign(assign: Callable[[Any, Any], Any], ended: set[tuple[str, int]]) -> Callable[[Any, Any], Any]:
    """Return what takes the place of Horovod's `_update_host_assignments`: it forgets workers that have ended.

    Args:
        assign: Horovod's.
        ended: host and slot of workers that have ended.
    """

    def wrapped(elastic_driver: Any, current_hosts: Any) -> Any:
        left = {
            host: [slot for slot in slots if (host, slot.local_rank) not in ended]
            for host, slots in elastic_driver._host_assignments.items()
        }
        elastic_driver._host_assignments = {host: slots for host, slots in left.items() if slots}
        return assign(elastic_driver, current_hosts)

    return wrapped


def wrap_discovery(
    find: Callable[[Any], Mapping[str, int]], hosts: Path, events: EventFile
) -> Callable[[Any], Mapping[str, int]]:
    """Return what takes the place of Horovod's `find_available_hosts_and_slots`.

    Args:
        find: Horovod's.
        hosts: the file to read where the discovery script is `allranks`: `HOST:SLOTS` in each line.
        events: get every change.
    """
    last: list[Mapping[str, int]] = []

    def wrapped(script: Any) -> Mapping[str, int]:
        if script._discovery_script == "allranks":
            lines = [line.rpartition(":") for line in read_words(hosts)]
            found: Mapping[str, int] = {host: int(slots) for host, _, slots in lines}
        else:
            found = find(script)
        if [found] != last:
            last[:] = [found]
            events.tell("discovered", hosts=found)
        return found

    return wrapped


def main() -> None:
    """Run the driver; exits as `horovodrun` does."""
    sys.path.pop(0)  # this directory: none of its modules is meant by its name alone
    mine, theirs = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    events, hosts, lost = EventFile(mine[0]), Path(mine[1]), LostHosts(mine[2])
    from horovod.runner import gloo_run, launch
    from horovod.runner.elastic.driver import ElasticDriver

    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger().addHandler(LogEvents(events))
    place = os.environ.pop("ALLRANKS_HOROVOD_PLACE")
    gloo_run.get_remote_command = remote_command
    ended: set[tuple[str, int]] = set()
    gloo_run._exec_command_fn = wrap_exec(gloo_run._exec_command_fn, events, lost, ended, place)
    ElasticDriver._update_host_assignments = wrap_assign(ElasticDriver._update_host_assignments, ended)
    script = launch.discovery.HostDiscoveryScript
    script.find_available_hosts_and_slots = wrap_discovery(script.find_available_hosts_and_slots, hosts, events)
    sys.argv = ["horovodrun", *theirs]
    try:
        launch.run_commandline()
    except (RuntimeError, ValueError) as exc:
        text = re.sub(r"\s+", " ", str(exc))
        events.tell("failed", text=text)
        sys.exit(f"horovodrun: {text}")


if __name__ == "__main__":
    main()
