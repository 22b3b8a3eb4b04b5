"""The agent's side of the handshake: find the leader and authenticate it.

`seek_leader` tries all hints until one leads to the leader. The leader's side is `wire.door`.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec

from allranks import __version__
from allranks.model.card import Card
from allranks.model.errors import NodeFaultError, WireError
from allranks.wire.connection import Connection
from allranks.wire.leader import Hint
from allranks.wire.protocol import (
    HANDSHAKE_S,
    PROTOCOL,
    Hello,
    Join,
    Message,
    Refused,
    Welcome,
    as_one_line,
    decode_frames,
    encode_frame,
    own_age_s,
)
from allranks.wire.secret import Secret, fresh_nonce, is_welcome_proof, join_proof

CONNECT_S = 1.0
"""Seconds for a hint to accept a connection before its host is given up for this round."""
STAGGER_S = 0.2
"""Seconds without an answer after which the next host is tried in parallel."""
SILENT_S = 0.5
"""Seconds without an answer after which a path is reported to the leader as silent."""


@dataclass(frozen=True, slots=True)
class _NotTheLeader(Exception):
    """This hint does not lead to the leader; another one may."""

    reason: str


@dataclass(slots=True)
class _Search:
    """The results of all hints so far."""

    obstacle: str = "no leader has announced itself"
    silent: dict[str, str] = field(default_factory=dict)


def seek_leader(
    hints: Callable[[], Sequence[Sequence[Hint]]],
    *,
    job: str,
    attempt: int | None,
    secret: Callable[[], Secret | None],
    card: Card,
    deadline_s: float,
    on_wait: Callable[[float, str], None],
    check_signals: Callable[[], None],
) -> Connection:
    """Try all hints until one leads to the leader of this job, and return the connection to it.

    Hosts are tried in parallel, STAGGER_S apart in the order of the hints, so that a path that drops packets or a
    silent program delays nothing; the ports of one host are tried one after another. The card lists silent paths.

    Args:
        hints: called in each round, since an announcement may appear; a group is one host, its ports in order.
        job: name of the job.
        attempt: number of the job's start, if the agent knows it.
        secret: called when a leader has sent Hello; returns None while the key does not exist.
        card: the report of this node.
        deadline_s: seconds from now.
        on_wait: gets the seconds so far and the last obstacle, at most once a second.
        check_signals: raises StoppedBySignal if this agent was told to stop.
    Raises:
        WireError: the leader refused this agent.
        NodeFaultError: no leader was found by the deadline.
        StoppedBySignal: check_signals raised it.
    """
    started_s = time.monotonic()
    search = _Search()
    last_told_s = 0.0

    def keep_time() -> None:
        nonlocal last_told_s
        check_signals()
        waited_s = time.monotonic() - started_s
        if waited_s > deadline_s:
            raise NodeFaultError(
                f"no leader of job {job} within {deadline_s:.0f} s; last try: {search.obstacle}; check that the first "
                "node is up and that its port is open from here"
            )
        if waited_s - last_told_s >= 1:
            last_told_s = waited_s
            on_wait(waited_s, search.obstacle)

    while True:
        keep_time()
        with _Race(hints(), search) as race:
            for sock, hint in race.connections(keep_time):
                own = msgspec.structs.replace(
                    card, came_by=str(hint), silent_hints=tuple(f"{at} ({why})" for at, why in search.silent.items())
                )
                try:
                    return _shake_hands(sock, hint, job=job, attempt=attempt, secret=secret, card=own)
                except _NotTheLeader as exc:
                    search.obstacle = exc.reason
                except OSError as exc:
                    search.obstacle = f"{hint} ({hint.source}): {exc.strerror or exc}"
                except BaseException:
                    sock.close()
                    raise
        time.sleep(0.1)


@dataclass(slots=True)
class _Try:
    """One connection, until the other side has sent something."""

    hint: Hint
    rest: list[Hint]
    """Further ports of the same host."""
    began_s: float
    is_connected: bool = False


class _Race:
    """Connects to several hosts in parallel, and to the ports of each host one after another."""

    def __init__(self, groups: Sequence[Sequence[Hint]], search: _Search) -> None:
        self._waiting = [list(group) for group in groups if group]
        self._running: dict[socket.socket, _Try] = {}
        self._search = search
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._running:
            sock.close()
        self._selector.close()

    def connections(self, keep_time: Callable[[], None]) -> Iterator[tuple[socket.socket, Hint]]:
        """Yield each connection that answers, until all hosts have been tried; hosts that stay silent are dropped.

        Each connection is closed when the caller asks for the next one. The last one belongs to the caller.
        """
        next_start_s = 0.0
        while self._waiting or self._running:
            keep_time()
            now_s = time.monotonic()
            if not self._waiting and all(
                not each.is_connected and now_s - each.began_s >= SILENT_S for each in self._running.values()
            ):
                return  # a new round may know better hints
            if self._waiting and (now_s >= next_start_s or not self._running):
                self._start(self._waiting.pop(0))
                next_start_s = now_s + STAGGER_S
            for key, _ in self._selector.select(STAGGER_S / 4 if self._running else 0):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                each = self._running[sock]
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    reason = os.strerror(error).lower()
                    self._leave(sock, each, reason, each.rest if error == errno.ECONNREFUSED else [])
                    continue
                if not each.is_connected:
                    if time.monotonic() - each.began_s < CONNECT_S / 2:
                        self._search.silent.pop(str(each.hint), None)
                    each.is_connected, each.began_s = True, time.monotonic()
                    self._selector.modify(sock, selectors.EVENT_READ)  # the leader speaks first
                    continue
                del self._running[sock]
                self._selector.unregister(sock)
                yield sock, each.hint
                sock.close()
                if each.rest:
                    self._start(each.rest)
            for sock, each in list(self._running.items()):
                self._keep_waiting(sock, each, time.monotonic() - each.began_s)

    def _keep_waiting(self, sock: socket.socket, each: _Try, waited_s: float) -> None:
        """Record silent hosts, and drop those that are silent for too long."""
        if waited_s < SILENT_S:
            return
        if each.is_connected:
            reason = "a program listens there but sends nothing"
            self._search.obstacle = f"{each.hint} ({each.hint.source}): {reason}"
            if waited_s >= HANDSHAKE_S:
                self._leave(sock, each, reason, each.rest)
            return
        self._search.silent[str(each.hint)] = f"{each.hint.source}: no answer"
        self._search.obstacle = f"{each.hint} ({each.hint.source}): no answer"
        if waited_s >= CONNECT_S:
            self._leave(sock, each, f"no answer within {CONNECT_S:.1f} s", [])

    def _leave(self, sock: socket.socket, each: _Try, reason: str, rest: list[Hint]) -> None:
        self._selector.unregister(sock)
        del self._running[sock]
        sock.close()
        self._fail(each.hint, reason, rest)

    def _start(self, chain: list[Hint]) -> None:
        hint, *rest = chain
        try:
            answers = socket.getaddrinfo(hint.host, hint.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = answers[0]
            sock = socket.socket(family, kind, protocol)
        except (OSError, UnicodeError) as exc:  # UnicodeError: no host name at all
            self._fail(hint, str(getattr(exc, "strerror", None) or exc), [])
            return
        sock.setblocking(False)
        error = sock.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):
            sock.close()
            self._fail(hint, os.strerror(error).lower(), rest if error == errno.ECONNREFUSED else [])
            return
        self._running[sock] = _Try(hint, rest, time.monotonic())
        self._selector.register(sock, selectors.EVENT_WRITE)

    def _fail(self, hint: Hint, reason: str, rest: list[Hint]) -> None:
        # A refusal is an answer: other ports of the host are worth a try. Silence is not.
        self._search.obstacle = f"{hint} ({hint.source}): {reason}"
        if rest:
            self._start(rest)


def _shake_hands(
    sock: socket.socket, hint: Hint, *, job: str, attempt: int | None, secret: Callable[[], Secret | None], card: Card
) -> Connection:
    deadline_s = time.monotonic() + HANDSHAKE_S
    buffer = bytearray()
    hello = _read(sock, buffer, deadline_s, hint)
    if not isinstance(hello, Hello):
        raise _NotTheLeader(f"{hint} ({hint.source}): the program there is not an allranks leader")
    if hello.job != job:
        raise _NotTheLeader(f"{hint} ({hint.source}): leader of another job, {as_one_line(hello.job)}")
    key = secret()  # only now: the leader wrote it before it said Hello
    if key is None:
        raise _NotTheLeader("the run directory does not have the job's secret yet")
    nonce = fresh_nonce()
    card = msgspec.structs.replace(card, age_s=own_age_s())
    proof = join_proof(key, leader_nonce=hello.nonce, nonce=nonce, job=job, card=card)
    join = Join(protocol=PROTOCOL, version=__version__, job=job, attempt=attempt, nonce=nonce, card=card, proof=proof)
    sock.sendall(encode_frame(join))
    answer = _read(sock, buffer, deadline_s, hint)
    if isinstance(answer, Refused):
        if answer.is_final:
            raise WireError(f"the leader at {hint} rejected this node: {as_one_line(answer.reason)}")
        raise _NotTheLeader(f"{hint} ({hint.source}): {as_one_line(answer.reason)}")
    if not isinstance(answer, Welcome) or not is_welcome_proof(
        key, answer.proof, leader_nonce=hello.nonce, nonce=nonce
    ):
        raise _NotTheLeader(f"{hint} ({hint.source}): it does not know this job's secret")
    return Connection(sock, peer=str(hint), received=bytes(buffer))


def _read(sock: socket.socket, buffer: bytearray, deadline_s: float, hint: Hint) -> Message:
    # Frames may come together; what is left in the buffer is the next message.
    while True:
        try:
            messages = decode_frames(buffer, at_most=1)
        except WireError as exc:
            raise _NotTheLeader(f"{hint} ({hint.source}): {as_one_line(str(exc))}") from exc
        if messages:
            return messages[0]
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise _NotTheLeader(f"{hint} ({hint.source}): a program listens there but sends nothing")
        sock.settimeout(left_s)
        try:
            data = sock.recv(1 << 16)
        except TimeoutError:
            continue
        if not data:
            raise _NotTheLeader(f"{hint} ({hint.source}): it closed the connection")
        buffer += data
