"""A diagnosable `init_process_group`, with a timeout and the names of missing ranks.

`wrap` is called with torch's freshly imported `distributed_c10d`. What changes for the script:

1. The store. Rank 0's store listens on the socket that the agent holds (its number is in ALLRANKS_STORE_FD), so the
   port cannot be lost between choosing and using it.
2. The arrival. Before torch forms the group, every rank writes `allranks/<n>/here/<rank>` and counts itself; the last
   one opens the gate. Who waits longer than 3 s says for whom, and who waits to the end of the timeout raises an error
   with the names. n counts the groups this process has formed.
3. The timeout. Where the script gives none, it is ALLRANKS_TIMEOUT_S instead of torch's 10 or 30 minutes.
4. Errors. Where torch only says which store key it waited for, the rank and node behind that key are named.
5. The end. A rank that ends as soon as the group is formed waits until the others have come out of forming it: else
   they die of lost connections, beside the rank whose error it was.
6. What cannot work is refused at once (join/refused.py).

Runs in the worker's Python: standard library and torch only. `wrap` raises where torch has become another than any in
TESTED, and the worker then runs as without us. launch/worker_environment.py says what the torches in TESTED lack.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

TESTED = (2, 4), (2, 15)
"""Oldest and newest torch of docs/evidence/versions.md."""

NOTICE_AFTER_S = (3, 10, 30, 60, 120, 300, 600, 1200)
"""When a waiting rank says for whom it waits."""

LAST_WORK_S = 0.1
"""How long a worker's end waits for Gloo's threads to let go of their last collective. One that comes to it when the
interpreter is already going aborts the process: `terminate called without an active exception`, seen with torch 2.13
and Python 3.11 in 1 of 5 workers that end right after a backward of DDP, with torchrun as with us."""
FORM_S = 5.0
"""Within this time after it has formed the group, a rank that ends waits for others that still form it. It takes them
milliseconds, on a machine that is not overloaded."""
_POLL_S = 0.02
_groups_formed = 0
_arrival: _Arrival | None = None
"""Of this process in the last group that it formed with all ranks."""
_kept: tuple[int, Any] | None = None
"""Process id and store of the first group. Later groups use the same store, each under its own prefix: the old server
may live on in a subgroup, and ranks that meet its keys form half a group with the past."""


def wrap(c10d: Any, refused: ModuleType) -> None:
    """Replace `init_process_group` and the store it makes by ours, once.

    Args:
        c10d: torch.distributed.distributed_c10d.
        refused: join/refused.py.
    Raises:
        AttributeError: this torch does not have what we hold on to.
    """
    if getattr(c10d, "_allranks_watches", False):
        return
    _name_recorder_size()
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    create_store = rendezvous._create_c10d_store
    init_process_group = c10d.init_process_group

    @functools.wraps(create_store)
    def create_store_with_arrival(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Any:
        if not _is_our_store(port):
            return create_store(hostname, port, rank, world_size, timeout, use_libuv)
        return _open_store(rendezvous, hostname, port, rank, world_size, timeout, use_libuv)

    @functools.wraps(init_process_group)
    def init_process_group_with_names(
        backend: Any = None, init_method: str | None = None, timeout: timedelta | None = None, *args: Any, **kwargs: Any
    ) -> None:
        global _groups_formed
        if _groups_formed == 0:
            _say_untested()
        refused.refuse(str(backend or ""), init_method, *args, **kwargs)
        if backend is None:
            backend = os.environ.get("ALLRANKS_BACKEND_CHOSEN")
        if timeout is None and (seconds := os.environ.get("ALLRANKS_TIMEOUT_S")):
            timeout = timedelta(seconds=float(seconds))
        try:
            init_process_group(backend, init_method, timeout, *args, **kwargs)
        except Exception as exc:
            explanation = _explain(str(exc))
            if explanation is None or not isinstance(exc, RuntimeError):
                exc.__traceback__ = exc.__traceback__ and exc.__traceback__.tb_next  # without this frame
                raise
            raise type(exc)(f"allranks: {explanation}\n{exc}") from exc
        _groups_formed += 1
        if _arrival:
            _arrival.note_formed()
        if _groups_formed == 1:
            atexit.register(time.sleep, LAST_WORK_S)
            atexit.register(let_all_form)
            _say_all_up(c10d)

    rendezvous._create_c10d_store = create_store_with_arrival
    c10d.init_process_group = init_process_group_with_names
    c10d._allranks_watches = let_all_form
    refused.note_place()


def let_all_form() -> None:
    """Wait until all ranks have come out of forming the group, for a rank that is about to leave it."""
    if _arrival:
        _arrival.wait_for_all()


def _name_recorder_size() -> None:
    """Before torch 2.8, which brought this function, TORCH_FR_BUFFER_SIZE had another name."""
    if not hasattr(sys.modules["torch"]._C._distributed_c10d, "_dump_fr_trace_json"):
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", os.environ.get("TORCH_FR_BUFFER_SIZE", "0"))


def name_ranks(ranks: list[int], members: list[tuple[str, int, int]]) -> str:
    """Name ranks with their nodes: `rank 3 (node03), ranks 5-7 (node05)`.

    Args:
        ranks: ascending.
        members: per node its name, first rank and number of ranks, as in ALLRANKS_MEMBERS.
    """
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        node = next((name for name, first, count in members if first <= rank < first + count), "?")
        by_node.setdefault(node, []).append(rank)
    parts = []
    for node, own in by_node.items():
        is_run = len(own) > 1 and own == list(range(own[0], own[-1] + 1))
        numbers = f"{own[0]}-{own[-1]}" if is_run else ",".join(map(str, own))
        parts.append(f"rank{'s' if len(own) > 1 else ''} {numbers} ({node})")
    shown = 8
    return ", ".join(parts[:shown]) + (f" and {len(parts) - shown} more nodes" if len(parts) > shown else "")


def _is_our_store(port: int) -> bool:
    return os.environ.get("ALLRANKS_STORE_PORT") == str(port)


def _open_store(
    rendezvous: Any, hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool
) -> Any:
    global _arrival, _kept
    deadline_s = time.monotonic() + timeout.total_seconds()
    is_whole_world = world_size == _env_int("WORLD_SIZE")
    is_again = is_whole_world and _kept is not None and _kept[0] == os.getpid()
    if is_whole_world:
        _tell_phase("arriving")
    store: Any
    if is_again and _kept is not None:
        store = _kept[1]
        store.set_timeout(timeout)
    else:

        def connect(**more: Any) -> Any:
            options: dict[str, Any] = {"timeout": timeout, "multi_tenant": True, "wait_for_workers": False}
            return rendezvous.TCPStore(hostname, port, world_size, rank == 0, **options, **more)

        if rank == 0:
            store = _serve(connect, port, use_libuv)
        elif is_whole_world:
            # The agent's socket accepts before rank 0 is there to answer, and torch waits for that answer for ever: so
            # it waits in a thread, and this one keeps the time (and Ctrl-C).
            store = _wait_for_leader(connect, rank, deadline_s)
        else:
            store = connect()
    if not is_whole_world:
        return store
    _kept = (os.getpid(), store)
    _arrival = _Arrival(store, rank, world_size)
    _arrival.wait(deadline_s)
    _tell_phase("init")
    if not is_again:
        return store
    from torch.distributed import PrefixStore

    return PrefixStore(f"allranks/group/{_groups_formed}", store)


def _tell_phase(name: str) -> None:
    """Have the agent know it, where the guard's half is in this process."""
    if entry := sys.modules.get("_allranks_inside.entry"):
        entry.enter(name)


def _serve(connect: Callable[..., Any], port: int, use_libuv: bool) -> Any:
    """Return rank 0's store, on the agent's socket where there is one."""
    if "ALLRANKS_STORE_FD" not in os.environ:
        return connect(use_libuv=use_libuv)
    try:
        return connect(use_libuv=use_libuv, master_listen_fd=_listening_socket(port))
    except NotImplementedError:  # libuv before torch 2.8 takes no socket; its clients speak with the other server, too
        return connect(use_libuv=False, master_listen_fd=_listening_socket(port))


def _listening_socket(port: int) -> int:
    """A duplicate of the agent's socket, for torch to own."""
    number = _env_int("ALLRANKS_STORE_FD")
    try:
        if number is None:
            raise OSError("ALLRANKS_STORE_FD is not a number")
        copy = os.dup(number)
        with socket.socket(fileno=os.dup(copy)) as sock:
            if sock.getsockname()[1] != port:
                raise OSError(f"it listens on port {sock.getsockname()[1]}")
        return copy
    except OSError as exc:
        raise RuntimeError(
            f"allranks: rank 0 did not inherit its agent's socket on port {port} ({exc}): a program between "
            "allranks and this process closes file descriptors; set ALLRANKS_HOOK=0 to run without the hook"
        ) from exc


def _wait_for_leader(connect: Callable[[], Any], rank: int, deadline_s: float) -> Any:
    outcome: list[Any] = []

    def try_to_connect() -> None:
        try:
            outcome.append(connect())
        except BaseException as exc:
            outcome.append(exc)

    whom = f"{name_ranks([0], _members())} to open the store"
    thread = threading.Thread(target=try_to_connect, name="allranks-store", daemon=True)
    thread.start()
    notices = _Notices(is_speaker=rank == 1 or _env_int("LOCAL_RANK") == 0)
    while thread.is_alive():
        thread.join(0.2)
        if not outcome and time.monotonic() > deadline_s:
            raise _timeout_error(notices.waited_s, whom)
        notices.tell(lambda: whom, first=rank == 1)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


class _Arrival:
    """The gate in front of the group: opens when all ranks have come."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = f"allranks/{_groups_formed}/"
        self._formed_s: float | None = None

    def wait(self, deadline_s: float) -> None:
        store, prefix = self._store, self._prefix
        store.set(f"{prefix}here/{self._rank}", str(os.getpid()))
        if store.add(f"{prefix}arrived", 1) == self._world_size:
            store.set(f"{prefix}gate", "open")
        notices = _Notices(is_speaker=self._rank <= 1 or _env_int("LOCAL_RANK") == 0)
        pause_s = 0.001
        while not store.check([f"{prefix}gate"]):
            if time.monotonic() > deadline_s:
                raise _timeout_error(notices.waited_s, self._describe(self._agree_on_missing()))
            notices.tell(lambda: self._describe(self._missing()), first=self._rank == 0)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)

    def note_formed(self) -> None:
        """Count this rank among those that have come out of forming the group."""
        if self._formed_s is None:
            self._formed_s = time.monotonic()
            with contextlib.suppress(RuntimeError):  # rank 0 has ended: the first collective will say so
                if self._store.add(f"{self._prefix}formed", 1) == self._world_size:
                    self._store.set(f"{self._prefix}all formed", "")

    def wait_for_all(self) -> None:
        """Wait until all have, FORM_S after this one did at most."""
        if self._formed_s is None or _kept is None or _kept[0] != os.getpid():
            return
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < self._formed_s + FORM_S and not self._store.check([f"{self._prefix}all formed"]):
                time.sleep(_POLL_S / 10)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([f"{self._prefix}here/{rank}"])]

    def _describe(self, missing: list[int]) -> str:
        here = self._world_size - len(missing)
        who = name_ranks(missing, _members()) if missing else "the last rank, which arrived too late"
        return f"{who}; {here} of {self._world_size} ranks have joined"

    def _agree_on_missing(self) -> list[int]:
        # One rank asks the store for every name, the others read its answer: n questions, not n squared.
        store, prefix = self._store, self._prefix
        if store.add(f"{prefix}judges", 1) == 1:
            missing = self._missing()
            store.set(f"{prefix}missing", ",".join(map(str, missing)))
            return missing
        for _ in range(100):
            if store.check([f"{prefix}missing"]):
                text = store.get(f"{prefix}missing").decode()
                return [int(number) for number in text.split(",") if number]
            time.sleep(0.1)
        return self._missing()


class _Notices:
    """Says for whom this rank waits, ever more rarely; one rank speaks first, the others only when it stays silent."""

    def __init__(self, *, is_speaker: bool) -> None:
        self._started_s = time.monotonic()
        self._is_speaker = is_speaker
        self._told = 0

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._started_s

    def tell(self, whom: Callable[[], str], *, first: bool) -> None:
        delay_s = 0 if first else 27
        if not self._is_speaker or self._told >= len(NOTICE_AFTER_S):
            return
        if self.waited_s >= NOTICE_AFTER_S[self._told] + delay_s:
            self._told += 1
            _say(f"still waiting in init_process_group after {self.waited_s:.0f} s for {whom()}")


def _timeout_error(waited_s: float, whom: str) -> Exception:
    from torch.distributed import DistStoreError

    text = f"allranks: init_process_group waited {waited_s:.0f} s for {whom}; look at their .err and .out files, "
    error: type[Exception] = DistStoreError
    return error(f"{text}or allow more time with its timeout argument")


def _explain(text: str) -> str | None:
    """Name the rank behind the store key that torch waited for in vain.

    Source: torch 2.13 with Gloo, seen: `wait timeout after 15000ms, keys: /default_pg/0//cpu//0/1`: the last element is
    the rank that did not publish its address.
    """
    found = re.search(r"wait timeout after (\d+)ms, keys: \S*default_pg/\S*?/(\d+)\s*$", text.strip().splitlines()[0])
    if found is None:
        return None
    who = name_ranks([int(found[2])], _members())
    return f"{who} called init_process_group but did not publish its address within {int(found[1]) / 1000:.0f} s"


def _say_all_up(c10d: Any) -> None:
    if _env_int("RANK") == 0 and (_env_int("WORLD_SIZE") or 1) > 1:
        backend = c10d.get_backend()
        if backend == "undefined":  # the script left it open: torch then has one for each device
            backend = os.environ.get("ALLRANKS_BACKEND", "")
        took_s = time.time() - float(os.environ.get("ALLRANKS_STARTED_S") or time.time())
        _say(f"all {os.environ['WORLD_SIZE']} ranks are up ({backend}), {took_s:.1f} s after the start")
        for unseen in entry.unseen() if (entry := sys.modules.get("_allranks_inside.entry")) else ():
            _say(f"the guard sees less: {unseen}")


def is_tested(version: str) -> bool:
    """Whether a version of torch (`2.8.0+cu128`) is in the range that was tried; a nightly of its end is not."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    is_nightly = re.search(r"\d(a0|\.dev)", version) is not None
    return numbers is not None and TESTED[0] <= (int(numbers[1]), int(numbers[2])) <= TESTED[1] and not is_nightly


def _say_untested() -> None:
    """Say it once a job: on rank 0, at the first start."""
    version = str(sys.modules["torch"].__version__)
    if _env_int("RANK") == 0 and not _env_int("TORCHELASTIC_RESTART_COUNT") and not is_tested(version):
        tested = " to ".join(f"{major}.{minor}" for major, minor in TESTED)
        _say(f"torch {version} was not tested with allranks ({tested} were): the job runs, but the guard may see less")


def _members() -> list[tuple[str, int, int]]:
    members, text = [], os.environ.get("ALLRANKS_MEMBERS", "")
    if text.startswith("@"):  # thousands of nodes: in a file
        path, text = Path(text[1:]), ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = path.read_text()
    for entry in text.split(","):
        name, _, numbers = entry.rpartition("=")
        first, _, count = numbers.partition("+")
        if name and first.isdigit() and count.isdigit():
            members.append((name, int(first), int(count)))
    return members


def _env_int(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to end
        print(f"allranks: {text}", file=sys.stderr, flush=True)
