"""The agent's side of the handshake: find the leader and authenticate it.

`seek_leader` tries all hints until one leads to the leader. The leader's side is `wire.accept`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import msgspec

from allranks import __version__
from allranks.model.card import Card
from allranks.model.errors import Exit, NodeFaultError, WireError
from allranks.wire.connection import Connection
from allranks.wire.frames import MAX_JOIN_BYTES, decode_frames, encode_frame
from allranks.wire.leader import Hint
from allranks.wire.names import Address, Names
from allranks.wire.protocol import HANDSHAKE_S, PROTOCOL, Hello, Join, Message, Refused, Welcome, as_one_line, own_age_s
from allranks.wire.secret import LEADERS_MUNGE_S, Secret, fresh_nonce, is_welcome_proof, join_proof

CONNECT_S = 1.0
"""Seconds for a hint to accept a connection before its host is given up for this round."""
STAGGER_S = 0.2
"""Seconds without an answer after which the next host is tried in parallel."""
SPARE_BYTES = 8 << 10
"""Of a Join, beside the card: names, version, proof."""
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
    unresolved: dict[str, str] = field(default_factory=dict)
    """Host names without an address so far, and why."""

    def describe(self) -> str:
        """The last obstacle, and the names that do not resolve."""
        return "; ".join([self.obstacle, *(why for why in self.unresolved.values() if why not in self.obstacle)])


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

    Hosts are tried in parallel, STAGGER_S apart in the order of the hints, so that a path that drops packets, a silent
    program or a slow name service delays nothing. Each address of a name counts as a host; the ports of one host are
    tried one after another. The card lists silent paths.

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
                f"no leader of job {job} within {deadline_s:.0f} s; last try: {search.describe()}; "
                "check that the first node is up and that its port is open from here"
            )
        if waited_s - last_told_s >= 1:
            last_told_s = waited_s
            on_wait(waited_s, search.describe())

    with contextlib.closing(Names()) as names:
        while True:
            keep_time()
            with _Race(hints(), search, names) as race:
                for sock, hint in race.connections(keep_time):
                    silent = tuple(f"{at} ({why})" for at, why in search.silent.items())
                    own = msgspec.structs.replace(card, came_by=str(hint), silent_hints=silent)
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
class _Chain:
    """The ports of one host that are still to be tried, at one of its addresses once its name is looked up."""

    hints: list[Hint]
    address: Address | None = None
    has_siblings: bool = False
    """Whether the host has further addresses."""

    def __str__(self) -> str:
        """`node01:29500`, with the address where the host has several."""
        at = f" at {self.address.host}" if self.address is not None and self.has_siblings else ""
        return f"{self.hints[0]}{at}"

    @property
    def rest(self) -> _Chain | None:
        """The further ports."""
        return replace(self, hints=self.hints[1:]) if len(self.hints) > 1 else None


@dataclass(slots=True)
class _Try:
    """One connection, until the other side has sent something."""

    chain: _Chain
    began_s: float
    is_connected: bool = False


class _Race:
    """Connects to several hosts in parallel, and to the ports of each host one after another."""

    def __init__(self, groups: Sequence[Sequence[Hint]], search: _Search, names: Names) -> None:
        self._waiting = [_Chain(list(group)) for group in groups if group]
        self._unnamed: list[_Chain] = []
        """Their turn has come, but the name lookup has not answered."""
        self._running: dict[socket.socket, _Try] = {}
        self._search = search
        self._names = names
        self._selector = selectors.DefaultSelector()
        self._selector.register(names, selectors.EVENT_READ)
        for chain in self._waiting:
            names.begin(chain.hints[0].host)

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
        while self._waiting or self._running or self._unnamed:
            keep_time()
            now_s = time.monotonic()
            if not self._waiting and self._are_all_silent(now_s):
                return  # a new round may know better hints
            if self._waiting and (now_s >= next_start_s or not (self._running or self._unnamed)):
                self._start(self._waiting.pop(0))
                next_start_s = now_s + STAGGER_S
            for key, _ in self._selector.select(STAGGER_S / 4 if self._running or self._unnamed else 0):
                if key.fileobj is self._names:
                    self._names.note_answers()
                    continue
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if not self._has_answered(sock):
                    continue
                each = self._running.pop(sock)
                self._selector.unregister(sock)
                yield sock, each.chain.hints[0]
                sock.close()
                if each.chain.rest is not None:
                    self._start(each.chain.rest)
            unnamed, self._unnamed = self._unnamed, []
            for chain in unnamed:
                self._start(chain)
            for sock, each in list(self._running.items()):
                self._keep_waiting(sock, each, time.monotonic() - each.began_s)

    def _are_all_silent(self, now_s: float) -> bool:
        tries_s = [now_s - each.began_s for each in self._running.values() if not each.is_connected]
        names_s = [self._names.waited_s(chain.hints[0].host, now_s) for chain in self._unnamed]
        return len(tries_s) == len(self._running) and all(waited_s >= SILENT_S for waited_s in tries_s + names_s)

    def _has_answered(self, sock: socket.socket) -> bool:
        """Whether the other side has sent something; notes that it has accepted the connection, or refused it."""
        each = self._running[sock]
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            rest = each.chain.rest if error == errno.ECONNREFUSED else None
            self._leave(sock, each, os.strerror(error).lower(), rest)
            return False
        if each.is_connected:
            return True
        if time.monotonic() - each.began_s < CONNECT_S / 2:
            self._search.silent.pop(str(each.chain), None)
        each.is_connected, each.began_s = True, time.monotonic()
        self._selector.modify(sock, selectors.EVENT_READ)  # the leader speaks first
        return False

    def _keep_waiting(self, sock: socket.socket, each: _Try, waited_s: float) -> None:
        """Record silent hosts, and drop those that are silent for too long."""
        if waited_s < SILENT_S:
            return
        source = each.chain.hints[0].source
        if each.is_connected:
            reason = "a program listens there but sends nothing"
            self._search.obstacle = f"{each.chain} ({source}): {reason}"
            if waited_s >= HANDSHAKE_S:
                self._leave(sock, each, reason, each.chain.rest)
            return
        self._search.silent[str(each.chain)] = f"{source}: no answer"
        self._search.obstacle = f"{each.chain} ({source}): no answer"
        if waited_s >= CONNECT_S:
            self._leave(sock, each, f"no answer within {CONNECT_S:.1f} s", None)

    def _leave(self, sock: socket.socket, each: _Try, reason: str, rest: _Chain | None) -> None:
        self._selector.unregister(sock)
        del self._running[sock]
        sock.close()
        self._fail(each.chain, reason, rest)

    def _start(self, chain: _Chain) -> None:
        """Connect, or wait for the addresses of the host; further addresses come next, as hosts of their own."""
        if chain.address is None:
            host = chain.hints[0].host
            try:
                addresses = self._names.find(host)
            except (OSError, UnicodeError) as exc:  # UnicodeError: no host name at all
                reason = f"{host} does not resolve on this node: {getattr(exc, 'strerror', None) or exc}"
                self._search.unresolved[host] = reason
                self._fail(chain, reason, None)
                return
            if addresses is None:
                waited_s = self._names.waited_s(host, time.monotonic())
                if waited_s >= SILENT_S:
                    self._search.unresolved[host] = f"the name lookup of {host} has not answered for {waited_s:.0f} s"
                    self._search.obstacle = f"{chain} ({chain.hints[0].source}): {self._search.unresolved[host]}"
                self._unnamed.append(chain)
                return
            self._search.unresolved.pop(host, None)
            has_siblings = len(addresses) > 1
            chain, *others = (_Chain(chain.hints, each, has_siblings) for each in addresses)
            self._waiting[:0] = others
        assert chain.address is not None
        try:
            sock = socket.socket(chain.address.family, socket.SOCK_STREAM)
        except OSError as exc:
            self._fail(chain, str(exc.strerror), None)
            return
        sock.setblocking(False)
        error = sock.connect_ex(chain.address.at(chain.hints[0].port))
        if error not in (0, errno.EINPROGRESS):
            sock.close()
            self._fail(chain, os.strerror(error).lower(), chain.rest if error == errno.ECONNREFUSED else None)
            return
        self._running[sock] = _Try(chain, time.monotonic())
        self._selector.register(sock, selectors.EVENT_WRITE)

    def _fail(self, chain: _Chain, reason: str, rest: _Chain | None) -> None:
        # A refusal is an answer: other ports of the host are worth a try. Silence is not.
        self._search.obstacle = f"{chain} ({chain.hints[0].source}): {reason}"
        if rest is not None:
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
    card = _bounded(msgspec.structs.replace(card, age_s=own_age_s()))
    proof = join_proof(key, leader_nonce=hello.nonce, nonce=nonce, job=job, card=card)
    join = Join(protocol=PROTOCOL, version=__version__, job=job, attempt=attempt, nonce=nonce, card=card, proof=proof)
    sock.sendall(encode_frame(join))
    if not key.key:
        deadline_s = time.monotonic() + HANDSHAKE_S + LEADERS_MUNGE_S
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


def _bounded(card: Card) -> Card:
    """Return a report that the leader can read: one that is too long becomes a problem of the node."""
    num_bytes = len(msgspec.msgpack.encode(card))
    if num_bytes <= MAX_JOIN_BYTES - SPARE_BYTES:
        return card
    problem = f"the node's report has {num_bytes} bytes, more than {MAX_JOIN_BYTES}"
    return Card(
        host=card.host,
        pid=card.pid,
        node_index=card.node_index,
        num_workers=card.num_workers,
        num_gpus=card.num_gpus,
        attempt=card.attempt,
        age_s=card.age_s,
        problem=problem,
        problem_exit=Exit.SETUP,
    )


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
