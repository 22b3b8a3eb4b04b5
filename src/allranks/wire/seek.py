"""The agent's side of the handshake: find the leader and authenticate it. The leader's side is `wire.accept`.

    search = Search(lambda: [[Hint("node01", 29500, "SLURM")]], job="4711", secret=..., card=card)
    connection = search.wait(deadline_s=60, on_wait=..., check_signals=...)  # or poll, until it returns something

Hosts are tried in threads of their own, STAGGER_S apart in the order of the hints, so that a path that drops packets, a
silent program or a slow name service (glibc waits 5 s for a DNS server, and asks twice) delays nothing. Each address of
a name counts as a host; the ports of one host are tried one after another. One Join is said at a time, since the leader
accepts an agent once. All threads end soon after the search.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import msgspec

from allranks.model.card import Card
from allranks.model.errors import NodeFaultError, WireError
from allranks.model.safe_text import as_one_line
from allranks.wire.connection import Connection
from allranks.wire.leader_port import Hint
from allranks.wire.protocol import HANDSHAKE_S, NONCE_BYTES, Hello, Join, Message, Refused, own_age_s
from allranks.wire.secret import LEADERS_MUNGE_S, Secret, is_welcome, prove_join

CONNECT_S = 1.0
"""Seconds for a hint to accept a connection before its host is given up for this time."""
STAGGER_S = 0.2
"""Seconds without an answer after which the next host is tried in parallel."""
BETTER_S = 0.5
"""Seconds that a leader's answer waits for a better address that has accepted a connection, too: on a busy machine,
threads do not come in the order of their hints, and the agent speaks over this network as long as the job runs."""
SILENT_S = 0.5
"""Seconds without an answer after which the silence is what people are told of."""
LOOKUP_S = 5.0
"""Deadline of a name lookup; then it is given up, and a new one begins."""
MAX_LOOKUPS = 4
"""Lookups of one name at the same time; those that were given up count as long as they run."""
PAUSE_S = 0.1
"""Seconds between two rounds, each of which tries all hosts that are not being tried."""
TICK_S = 0.05
"""Seconds after the end of the search in which a thread that waits for a socket notices it."""
_Address = tuple[int, tuple[Any, ...]]
"""Its family, and what connect(2) wants."""


class Search:
    """Tries all hints until one leads to the leader. Owns its threads, and the connection until `poll` returns it.

    Args:
        hints: called in each round, since an announcement may appear; a group is one host, its ports in order.
        secret: called when a leader has sent Hello; returns None while the key does not exist.
        card: the report of this node; with names and proof, at most MAX_JOIN_BYTES.
    """

    def __init__(
        self,
        hints: Callable[[], Sequence[Sequence[Hint]]],
        *,
        job: str,
        secret: Callable[[], Secret | None],
        card: Card,
    ) -> None:
        self._hints, self._job, self._secret, self._card = hints, job, secret, card
        self._found: Future[tuple[Connection, Hint]] = Future()
        """Done: the search is over."""
        self._groups: list[tuple[Hint, ...]] = []
        """Of the last round, best first."""
        self._accepted: set[tuple[Hint, ...]] = set()
        """Those of which a port has accepted a connection whose try goes on."""
        self._obstacle = ""
        self._unresolved: dict[str, str] = {}
        """Host names without an address so far, and why."""
        self._addresses: dict[str, list[_Address]] = {}
        """Of host names, from the last lookup that has answered."""
        self._asked_s: dict[str, float] = {}
        """Host names whose lookup has not answered, and since when."""
        self._calls: dict[tuple[Any, ...], threading.Thread] = {}
        """A function with its arguments, and the thread that makes this call, or has made it."""
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
                        f"no leader of job {self._job} within {deadline_s:.0f} s; last try: {self.describe()}; "
                        "check that the first node is up and that its port is open from here"
                    )
                if waited_s - last_told_s >= 1:
                    last_told_s = waited_s
                    on_wait(waited_s, self.describe())
        except BaseException:
            self.stop()
            raise
        return found[0]

    def stop(self) -> None:
        """End the search, and close what it has found, unless `poll` has returned it."""
        if not self._found.cancel() and self._found.exception() is None:
            self._found.result()[0].close()

    def describe(self) -> str:
        """The last obstacle, and the names that do not resolve."""
        return "; ".join(filter(None, [self._obstacle, *self._unresolved.values()])) or "no leader has announced itself"

    def is_nowhere(self, host: str) -> bool:
        """Whether the name service has said that it knows no address of this host, or has not answered."""
        return host in self._unresolved and host not in self._addresses

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

    def _try(self, *call: Any) -> None:
        """Make a call in a thread, unless it is being made, and give it STAGGER_S before the next one."""
        with self._handshake:  # nothing is tried beside a leader that has answered
            if call in self._calls and self._calls[call].is_alive():
                return
            thread = self._calls[call] = self._begin(*call)
        thread.join(STAGGER_S)

    def _go_round(self) -> None:
        while not self._found.done():
            self._groups = [*map(tuple, self._hints())]
            for group in self._groups:
                addresses = self._look_up(group[0]) if group else []
                for family, address in addresses:
                    at = f" at {address[0]}" if len(addresses) > 1 else ""
                    self._try(self._try_ports, group, family, address, at)
            time.sleep(PAUSE_S)

    def _look_up(self, hint: Hint) -> list[_Address]:
        """Return the addresses of a host in the order of preference (RFC 6724), as far as they are known; ask again."""
        now_s = time.monotonic()
        waited_s = now_s - self._asked_s.setdefault(hint.host, now_s)
        if waited_s >= SILENT_S:
            why = f"the name lookup of {hint.host} has not answered for {waited_s:.0f} s"
            advice = "; check DNS on this node" if waited_s > LOOKUP_S else ""
            self._unresolved[hint.host] = f"{hint} ({hint.source}): {why}{advice}"
        # Another call where the last one is given up.
        self._try(self._ask, hint, min(waited_s // LOOKUP_S, MAX_LOOKUPS - 1))
        return self._addresses.get(hint.host, [])

    def _ask(self, hint: Hint, _: float) -> None:
        """Ask the name service."""
        try:
            found = socket.getaddrinfo(hint.host, 0, type=socket.SOCK_STREAM)
            self._addresses[hint.host] = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
            self._unresolved.pop(hint.host, None)
        except (OSError, UnicodeError) as exc:  # UnicodeError: no host name at all
            why = f"{hint.host} does not resolve on this node: {getattr(exc, 'strerror', None) or exc}"
            self._unresolved[hint.host] = f"{hint} ({hint.source}): {why}"
        finally:
            self._asked_s.pop(hint.host, None)

    def _try_ports(self, group: tuple[Hint, ...], family: int, address: tuple[Any, ...], at: str) -> None:
        """Try the ports of one address, until one leads to the leader or none answers."""
        for hint in group:
            path = f"{hint}{at} ({hint.source})"
            with contextlib.ExitStack() as on_failure:
                try:
                    connection = Connection(socket.socket(family, socket.SOCK_STREAM), peer="it")
                    on_failure.callback(connection.close)
                    self._connect(connection, (address[0], hint.port, *address[2:]), path)
                    self._accepted.add(group)
                    on_failure.callback(self._accepted.discard, group)
                    hello = self._hear(connection, path)  # the leader speaks first
                    self._wait_for_better(group)
                    with self._handshake:
                        if not self._found.done():
                            self._join(connection, hello, hint, path)
                            self._found.set_result((connection, hint))
                            on_failure.pop_all()
                    return
                except OSError as exc:
                    if hint is group[0] or not isinstance(exc, ConnectionRefusedError):  # the one that was named
                        self._obstacle = f"{path}: {exc.strerror.lower() if exc.strerror else exc}"
                    # A refusal is an answer: other ports of the host are worth a try. Silence is not.
                    if self._found.done() or not isinstance(exc, ConnectionError):
                        return

    def _wait_for_better(self, group: tuple[Hint, ...]) -> None:
        """Let a better address go first, if it answers in time."""
        better = set(itertools.takewhile(lambda other: other != group, self._groups))
        until_s = time.monotonic() + BETTER_S
        while better & self._accepted and not self._found.done() and time.monotonic() < until_s:
            time.sleep(TICK_S)

    def _connect(self, connection: Connection, address: tuple[Any, ...], path: str) -> None:
        """Connect; a ConnectionError is an answer of the host, another OSError is none."""
        with contextlib.suppress(BlockingIOError):
            connection.sock.connect(address)
        self._await(connection, select.POLLOUT, CONNECT_S, path, TimeoutError("no answer"))
        if error := connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))

    def _join(self, connection: Connection, hello: Message, hint: Hint, path: str) -> None:
        """Let both sides prove that they belong to this job.

        Raises:
            WireError: the leader refused this agent.
            ConnectionError: it is another one, or none.
        """
        if not isinstance(hello, Hello):
            raise ConnectionError("the program there is not an allranks leader")
        if hello.job != self._job:
            raise ConnectionError(f"leader of another job, {as_one_line(hello.job)}")
        key = self._secret()  # only now: the leader wrote it before it said Hello
        if key is None:
            raise ConnectionError("the run directory does not have the job's secret yet")
        card = msgspec.structs.replace(self._card, came_by=str(hint), age_s=own_age_s())
        join = Join(job=self._job, nonce=secrets.token_bytes(NONCE_BYTES), card=card)
        connection.send(prove_join(key, join, leader_nonce=hello.nonce))
        answer = self._hear(connection, path, munge_s=0.0 if key.key else LEADERS_MUNGE_S)
        if isinstance(answer, Refused):
            reason = as_one_line(answer.reason)
            if answer.is_final:
                raise WireError(f"the leader at {hint} rejected this node: {reason}")
            raise ConnectionError(reason)
        if not is_welcome(key, answer, join, leader_nonce=hello.nonce):
            raise ConnectionError("it does not know this job's secret")
        connection.peer = str(hint)

    def _hear(self, connection: Connection, path: str, *, munge_s: float = 0.0) -> Message:
        until_s = time.monotonic() + HANDSHAKE_S + munge_s
        silent = ConnectionError("a program listens there but sends nothing")
        while True:
            events = select.POLLIN | (select.POLLOUT if connection.flush() else 0)
            try:
                if messages := connection.receive(at_most=1):
                    return messages[0]
            except WireError as exc:
                raise ConnectionError(as_one_line(str(exc))) from exc
            self._await(connection, events, until_s - time.monotonic(), path, silent)

    def _await(self, connection: Connection, events: int, within_s: float, path: str, silent: OSError) -> None:
        """Wait for a socket.

        Raises:
            OSError: `silent`; it was not ready within the time, or the search is over.
        """
        poll = select.poll()
        poll.register(connection, events)
        began_s = time.monotonic()
        while not poll.poll(1000 * TICK_S):
            waited_s = time.monotonic() - began_s
            if waited_s >= SILENT_S:
                self._obstacle = f"{path}: {silent}"
            if self._found.done() or waited_s >= within_s:
                raise silent
