"""The agent's side of the handshake: find the leader and authenticate it. The leader's side is `wire.accept`.

    search = Search(lambda: [[Hint("node01", 29500, "SLURM")]], job="4711", attempt=0, secret=..., card=card)
    connection = search.wait(deadline_s=60, on_wait=..., check_signals=...)  # or poll, until it returns something

Hosts are tried in threads of their own, STAGGER_S apart in the order of the hints, so that a path that drops packets, a
silent program or a slow name service (glibc waits 5 s for a DNS server, and asks twice) delays nothing. Each address of
a name counts as a host; the ports of one host are tried one after another. Handshakes are made one at a time, since the
leader accepts an agent once. All threads end soon after the search.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import msgspec

from allranks import __version__
from allranks.model.card import Card
from allranks.model.errors import Exit, NodeFaultError, WireError
from allranks.wire.connection import Connection
from allranks.wire.frames import MAX_JOIN_BYTES
from allranks.wire.leader import Hint
from allranks.wire.protocol import HANDSHAKE_S, PROTOCOL, Hello, Join, Message, Refused, as_one_line, own_age_s
from allranks.wire.secret import LEADERS_MUNGE_S, Secret, fresh_nonce, is_welcome, prove_join

CONNECT_S = 1.0
"""Seconds for a hint to accept a connection before its host is given up for this time."""
STAGGER_S = 0.2
"""Seconds without an answer after which the next host is tried in parallel."""
SPARE_BYTES = 8 << 10
"""Of a Join, beside the card: names, version, proof."""
SILENT_S = 0.5
"""Seconds without an answer after which a path is reported to the leader as silent."""
LOOKUP_S = 5.0
"""Deadline of a name lookup; then it is given up, and a new one begins."""
MAX_LOOKUPS = 4
"""Lookups at the same time; those that were given up count as long as they run."""
PAUSE_S = 0.1
"""Seconds between two rounds, each of which tries all hosts that are not being tried."""
TICK_S = 0.05
"""Seconds after the end of the search in which a thread that waits for a socket notices it."""
SAYS_NOTHING = "a program listens there but sends nothing"
_Address = tuple[int, tuple[Any, ...]]
"""Its family, and what connect(2) wants."""


class Search:
    """Tries all hints until one leads to the leader. Owns its threads, and the connection until `poll` returns it.

    Args:
        hints: called in each round, since an announcement may appear; a group is one host, its ports in order.
        attempt: number of the job's start, if the agent knows it.
        secret: called when a leader has sent Hello; returns None while the key does not exist.
        card: the report of this node; silent paths are added to it.
    """

    def __init__(
        self,
        hints: Callable[[], Sequence[Sequence[Hint]]],
        *,
        job: str,
        attempt: int | None,
        secret: Callable[[], Secret | None],
        card: Card,
    ) -> None:
        self._hints, self._job, self._attempt, self._secret, self._card = hints, job, attempt, secret, card
        self._found: Future[tuple[Connection, Hint]] = Future()
        """Done: the search is over."""
        self._obstacle = ""
        self._silent: dict[str, str] = {}
        self._unresolved: dict[str, str] = {}
        """Host names without an address so far, and why."""
        self._running: set[tuple[Hint, ...]] = set()
        """Hosts that are being tried."""
        self._free_lookups = threading.BoundedSemaphore(MAX_LOOKUPS)
        self._handshake = threading.Lock()
        self._begin(self._go_round)

    def poll(self, *, within_s: float = 0.0) -> tuple[Connection, Hint] | None:
        """Return the connection to the leader, and what led there, once there is one; then the search is over.

        Raises:
            WireError: the leader refused this agent.
            SetupError: `secret` raised it.
        """
        try:
            return self._found.result(within_s)
        except TimeoutError:
            return None

    def wait(
        self, *, deadline_s: float, on_wait: Callable[[float, str], None], check_signals: Callable[[], None]
    ) -> Connection:
        """Return the connection to the leader.

        Args:
            deadline_s: seconds from now.
            on_wait: gets the seconds so far and the last obstacle, at most once a second.
            check_signals: raises StoppedBySignal if this agent was told to stop.
        Raises:
            WireError, SetupError: as `poll` does.
            NodeFaultError: no leader was found by the deadline.
            StoppedBySignal: check_signals raised it.
        """
        began_s, last_told_s = time.monotonic(), 0.0
        try:
            while (found := self.poll(within_s=TICK_S)) is None:
                check_signals()
                waited_s = time.monotonic() - began_s
                if waited_s > deadline_s:
                    raise NodeFaultError(
                        f"no leader of job {self._job} within {deadline_s:.0f} s; last try: {self._describe()}; "
                        "check that the first node is up and that its port is open from here"
                    )
                if waited_s - last_told_s >= 1:
                    last_told_s = waited_s
                    on_wait(waited_s, self._describe())
        except BaseException:
            self.stop()
            raise
        return found[0]

    def stop(self) -> None:
        """End the search, and close what it has found, unless `poll` has returned it."""
        if not self._found.cancel() and self._found.exception() is None:
            self._found.result()[0].close()

    def _describe(self) -> str:
        """The last obstacle, and the names that do not resolve."""
        return "; ".join(filter(None, [self._obstacle, *self._unresolved.values()])) or "no leader has announced itself"

    def _begin(self, function: Callable[..., None], *arguments: Any) -> threading.Thread:
        """Call a function in a thread; what it raises ends the search."""

        def run() -> None:
            try:
                function(*arguments)
            except Exception as exc:
                with contextlib.suppress(InvalidStateError):
                    self._found.set_exception(exc)

        thread = threading.Thread(target=run, name="allranks-seek", daemon=True)
        thread.start()
        return thread

    def _go_round(self) -> None:
        while not self._found.done():
            for group in map(tuple, self._hints()):
                if group and group not in self._running:
                    with self._handshake:  # nothing is tried beside a leader that has answered
                        self._running.add(group)
                    self._begin(self._try_host, group).join(STAGGER_S)
            time.sleep(PAUSE_S)

    def _try_host(self, group: tuple[Hint, ...]) -> None:
        """Try all addresses of a host."""
        host = group[0].host
        addresses: list[_Address] = []
        try:
            addresses = self._look_up(group[0])
            self._unresolved.pop(host, None)
        except (OSError, UnicodeError) as exc:  # UnicodeError: no host name at all
            why = getattr(exc, "strerror", None) or exc
            self._unresolved[host] = f"{group[0]} ({group[0].source}): {host} does not resolve on this node: {why}"
        threads = []
        for family, address in addresses:
            at = f" at {address[0]}" if len(addresses) > 1 else ""
            threads.append(self._begin(self._try_ports, group, family, address, at))
            threads[-1].join(STAGGER_S)
        for thread in threads:
            thread.join()
        self._running.discard(group)

    def _look_up(self, hint: Hint) -> list[_Address]:
        """Return all addresses of a host in the order of preference (RFC 6724); none while other lookups hang."""
        host, answer, began_s = hint.host, Future[list[_Address]](), time.monotonic()
        with contextlib.suppress(OSError, UnicodeError):
            return _addresses(host, socket.AI_NUMERICHOST)
        if not self._free_lookups.acquire(blocking=False):
            return []

        def look() -> None:
            try:
                answer.set_result(_addresses(host))
            except Exception as exc:
                answer.set_exception(exc)
            finally:
                self._free_lookups.release()

        self._begin(look)
        while not self._found.done() and (waited_s := time.monotonic() - began_s) < LOOKUP_S:
            if waited_s >= SILENT_S:
                why = f"the name lookup of {host} has not answered for {waited_s:.0f} s"
                self._unresolved[host] = f"{hint} ({hint.source}): {why}"
            with contextlib.suppress(TimeoutError):
                return answer.result(SILENT_S)
        raise TimeoutError(f"the name lookup has not answered within {LOOKUP_S:.0f} s; check DNS on this node")

    def _try_ports(self, group: tuple[Hint, ...], family: int, address: tuple[Any, ...], at: str) -> None:
        """Try the ports of one address, until one leads to the leader or none answers."""
        for hint in group:
            if self._found.done():
                return
            with contextlib.ExitStack() as on_failure:
                try:
                    sock = on_failure.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    self._connect(sock, (address[0], hint.port, *address[2:]), hint, at)
                    with self._handshake:
                        if not self._found.done():
                            self._found.set_result((self._shake_hands(sock, hint), hint))
                            on_failure.pop_all()
                    return
                except OSError as exc:
                    self._note(hint, exc.strerror.lower() if exc.strerror else str(exc), at)
                    # A refusal is an answer: other ports of the host are worth a try. Silence is not.
                    if not isinstance(exc, ConnectionError):
                        return

    def _connect(self, sock: socket.socket, address: tuple[Any, ...], hint: Hint, at: str) -> None:
        """Connect, and wait until the other side has sent something.

        Raises:
            ConnectionError: the host answers, but no leader does.
            OSError: the host does not answer.
        """
        who = f"{hint}{at}"
        sock.setblocking(False)
        error = sock.connect_ex(address)
        if error == errno.EINPROGRESS:
            if self._is_ready(sock, select.POLLOUT, SILENT_S):
                self._silent.pop(who, None)
            else:
                self._silent[who] = f"{who} ({hint.source}: no answer)"
                self._note(hint, "no answer", at)
                if not self._is_ready(sock, select.POLLOUT, CONNECT_S - SILENT_S):
                    raise TimeoutError(f"no answer within {CONNECT_S:.1f} s")
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        if not self._is_ready(sock, select.POLLIN, SILENT_S):  # the leader speaks first
            self._note(hint, SAYS_NOTHING, at)
            if not self._is_ready(sock, select.POLLIN, HANDSHAKE_S - SILENT_S):
                raise ConnectionError(SAYS_NOTHING)

    def _shake_hands(self, sock: socket.socket, hint: Hint) -> Connection:
        """Return the connection to the leader of this job.

        Raises:
            WireError: it refused this agent.
            ConnectionError: it is another one, or none.
        """
        connection = Connection(sock, peer="it")
        hello = self._hear(connection, HANDSHAKE_S)
        if not isinstance(hello, Hello):
            raise ConnectionError("the program there is not an allranks leader")
        if hello.job != self._job:
            raise ConnectionError(f"leader of another job, {as_one_line(hello.job)}")
        key = self._secret()  # only now: the leader wrote it before it said Hello
        if key is None:
            raise ConnectionError("the run directory does not have the job's secret yet")
        card = msgspec.structs.replace(
            self._card, came_by=str(hint), silent_hints=tuple(self._silent.values()), age_s=own_age_s()
        )
        join = Join(
            protocol=PROTOCOL,
            version=__version__,
            job=self._job,
            attempt=self._attempt,
            nonce=fresh_nonce(),
            card=_bounded(card),
        )
        connection.send(prove_join(key, join, leader_nonce=hello.nonce))
        answer = self._hear(connection, HANDSHAKE_S + (0.0 if key.key else LEADERS_MUNGE_S))
        if isinstance(answer, Refused):
            reason = as_one_line(answer.reason)
            if answer.is_final:
                raise WireError(f"the leader at {hint} rejected this node: {reason}")
            raise ConnectionError(reason)
        if not is_welcome(key, answer, join, leader_nonce=hello.nonce):
            raise ConnectionError("it does not know this job's secret")
        connection.peer = str(hint)
        return connection

    def _hear(self, connection: Connection, within_s: float) -> Message:
        until_s = time.monotonic() + within_s
        while True:
            connection.flush()
            try:
                if messages := connection.receive(at_most=1):
                    return messages[0]
            except WireError as exc:
                raise ConnectionError(as_one_line(str(exc))) from exc
            events = select.POLLIN | (select.POLLOUT if connection.has_unsent else 0)
            if not self._is_ready(connection.sock, events, until_s - time.monotonic()):
                raise ConnectionError(SAYS_NOTHING)

    def _is_ready(self, sock: socket.socket, events: int, within_s: float) -> bool:
        """Wait for a socket; False: it was not ready within the time, or the search is over."""
        poll = select.poll()
        poll.register(sock, events)
        until_s = time.monotonic() + within_s
        while not poll.poll(1000 * TICK_S):
            if self._found.done() or time.monotonic() >= until_s:
                return False
        return True

    def _note(self, hint: Hint, obstacle: str, at: str = "") -> None:
        self._obstacle = f"{hint}{at} ({hint.source}): {obstacle}"


def _bounded(card: Card) -> Card:
    """Return a report that the leader can read: one that is too long becomes a problem of the node."""
    num_bytes = len(msgspec.msgpack.encode(card))
    if num_bytes <= MAX_JOIN_BYTES - SPARE_BYTES:
        return card
    problem = f"the node's report has {num_bytes} bytes, more than {MAX_JOIN_BYTES}"
    kept = ("host", "pid", "node_index", "num_workers", "num_gpus", "attempt", "age_s")
    return Card(**{name: getattr(card, name) for name in kept}, problem=problem, problem_exit=Exit.SETUP)


def _addresses(host: str, flags: int = 0) -> list[_Address]:
    answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in answers))
