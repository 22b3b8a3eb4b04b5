"""The leader's side of the handshake: accept the agents of the job, reject all other peers.

    acceptor = Acceptor(listener, job="4711", attempt=0, secret=secret)
    acceptor.attach(selector, on_peer=..., on_rejected=..., say=print)
    while ...:
        for key, mask in selector.select(0.25):
            key.data(mask)
        acceptor.turn(time.monotonic())

Nothing here blocks. A peer that has not proven that it knows the job's secret can make the leader hold one descriptor
and MAX_JOIN_BYTES for HANDSHAKE_S (with munge for LEADERS_MUNGE_S longer); all of them together, MAX_UNPROVEN_BYTES. An
address with MAX_PENDING_PER_ADDRESS connections loses its oldest for each further one: agents need some milliseconds,
so no scanner keeps them out, also not one on their own machine. Beyond MAX_PENDING, and while no descriptor is free,
peers wait in the kernel's queue. Credentials of munge are read in threads. The agent's side is `wire.seek`.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from allranks.model.card import Card
from allranks.model.errors import WireError
from allranks.model.safe_text import as_one_line, plain_address
from allranks.wire.connection import MAX_FRAME_BYTES, MAX_JOIN_BYTES, MAX_SHOWN, Connection, describe_version
from allranks.wire.protocol import HANDSHAKE_S, NONCE_BYTES, PROTOCOL, Hello, Join, Probe, Refused, Welcome
from allranks.wire.secret import LEADERS_MUNGE_S, Secret, answer_join, is_munge_proof

MAX_PENDING = 512
"""Connections at a time whose peers are not known yet; agents need some milliseconds each."""
MAX_PENDING_PER_ADDRESS = 128
"""Of one address: every rank of a node may be an agent of its own."""
FAIR_PENDING = 8
"""Of one address, where all together have MAX_PENDING: the address that has most of them loses its oldest."""
MAX_UNPROVEN_BYTES = 16 << 20
"""Of all that peers have sent that are not known yet. Beyond it, the one that has sent most is disconnected: a Join of
30 kB never waits for its rest."""
MAX_NAMED = 32
"""Hosts of one kind of rejection that are named: a port scan fills neither the terminal nor the verdict."""
ACCEPTED_AT_ONCE = 64
"""Connections in one turn of the leader, which costs as much again as one of them."""
PAUSE_S = 0.5
"""How long nothing is accepted when the process has no descriptor left. The listener stays readable all the while."""
MAX_MUNGE = 4
"""Credentials that are checked at the same time."""
EARLIER_ATTEMPT = "AR404"
FOREIGN = "AR406"
"""Causes for which a peer is rejected for good; FOREIGN: another secret or another version, or no agent. Without a
cause it may try again: it was slow, or belongs to another leader, or was a port check."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A peer that was disconnected, and why."""

    kind: str
    """A word for that."""
    cause_id: str | None
    """None: it may try again."""
    host: str
    """Its name; if it sent none, its address."""
    address: str
    reason: str

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.address} was rejected: {self.reason}"


class Rejections:
    """Tells which rejections are news: each address once for each kind, and at most MAX_NAMED of a kind."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}

    def is_news(self, rejection: Rejection) -> bool:
        """Whether this is the first of its kind from there; what a peer calls itself does not count."""
        known = self._known.setdefault(rejection.kind, set())
        if rejection.address in known or len(known) >= MAX_NAMED:
            return False
        known.add(rejection.address)
        return True


@dataclass(slots=True)
class _Pending:
    """A peer that is not known yet."""

    nonce: bytes
    deadline_s: float
    host: str
    """Its name, once it has sent one, else its address."""
    check: tuple[Join, Future[Welcome | None]] | None = None
    """Of its credential; nothing more is read."""


class Acceptor:
    """Accepts every peer that connects, and hands over those that prove to be agents of this job.

    Args:
        listener: the leader's listening socket; only `close` closes it.
        attempt: number of the job's start; an agent of another attempt is rejected.
    """

    def __init__(self, listener: socket.socket, *, job: str, attempt: int, secret: Secret) -> None:
        listener.setblocking(False)
        self._listener, self.job, self.attempt, self.secret = listener, job, attempt, secret
        self._pending: dict[Connection, _Pending] = {}
        self._crowded: set[str] = set()
        """Addresses whose connections were closed for their number; said once."""
        self._resume_s = 0.0
        """Nothing is accepted before; 0: there was always room."""
        self._munge = ThreadPoolExecutor(MAX_MUNGE)
        self._selector: selectors.BaseSelector = selectors.SelectSelector()  # not attached: nobody waits for it

    def attach(
        self,
        selector: selectors.BaseSelector,
        *,
        on_peer: Callable[[Connection, Card], None],
        on_rejected: Callable[[Rejection], None],
        say: Callable[[str], None],
        refuses: Callable[[], str] = str,
    ) -> None:
        """Have a selector watch the listener and all peers; its owner calls `key.data(...)`, and `turn` often.

        Args:
            on_peer: gets each authenticated agent; the connection is the caller's.
            on_rejected: gets each peer that was disconnected.
            say: prints one line.
            refuses: returns why nobody is accepted now, an empty text if somebody is.
        """
        self._selector, self._on_peer, self._on_rejected, self._say = selector, on_peer, on_rejected, say
        self._refuses = refuses
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def turn(self, now_s: float) -> None:
        """Answer the peers whose credential is checked, reject those that are overdue, accept again after a pause."""
        for peer, pending in list(self._pending.items()):
            if pending.check is not None and pending.check[1].done():
                self._answer(peer, pending.check[0], pending.check[1].result())
            elif pending.deadline_s < now_s:
                what = f"it did not identify itself within {HANDSHAKE_S:.0f} s"
                if pending.check is not None:
                    what = f"munge has not checked its credential within {HANDSHAKE_S + LEADERS_MUNGE_S:.0f} s"
                self._reject(peer, what, kind="slow")
        is_paused = self._listener not in self._selector.get_map()
        if is_paused and now_s >= self._resume_s and len(self._pending) < MAX_PENDING:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def detach(self) -> None:
        """Disconnect all peers that are not known yet, and let the selector go; the listener stays open."""
        for peer in list(self._pending):
            self._forget(peer)
            peer.close()
        if self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)
        self._selector = selectors.SelectSelector()

    def close(self) -> None:
        """Disconnect all peers that are not known yet, and close the listener."""
        self.detach()
        self._listener.close()

    def _accept(self, _: object) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if len(self._pending) >= MAX_PENDING:
                addresses = Counter(peer.peer for peer, pending in self._pending.items() if pending.check is None)
                self._make_room(*max(addresses.items(), key=itemgetter(1), default=("", 0)), least=FAIR_PENDING)
            if len(self._pending) >= MAX_PENDING:
                self._selector.unregister(self._listener)
                return
            try:
                sock, address = self._listener.accept()
            except OSError as exc:
                if exc.errno in _NO_ROOM:
                    self._pause(exc)
                return  # else there is none, or it left between the selector and us
            host = plain_address(address[0])
            self._make_room(host, MAX_PENDING_PER_ADDRESS)
            peer, nonce = Connection(sock, peer=host, max_frame_bytes=MAX_JOIN_BYTES), secrets.token_bytes(NONCE_BYTES)
            with contextlib.suppress(ConnectionError):  # the next receive says so
                peer.send(Hello(job=self.job, nonce=nonce))
            self._pending[peer] = _Pending(nonce, time.monotonic() + HANDSHAKE_S, host)
            self._selector.register(peer, selectors.EVENT_READ, partial(self._receive, peer))

    def _make_room(self, host: str, number: int, *, least: int = 0) -> None:
        """Close the oldest connections of an address that has so many or more, unless their peers prove to be agents.

        Args:
            least: how many it may have anyway.
        """
        own = [peer for peer, pending in self._pending.items() if peer.peer == host and pending.check is None]
        for peer in own[: max(0, len(own) + 1 - max(number, least + 1))]:
            self._receive(peer, None)  # what it has sent may wait to be read
            if self._pending.get(peer) is None or self._pending[peer].check is not None:
                continue
            self._forget(peer)
            peer.close()
            if host not in self._crowded and len(self._crowded) < MAX_NAMED:
                self._crowded.add(host)
                text = f"{host} has {len(own)} connections that did not identify themselves"
                self._say(f"{text}; the oldest are closed")

    def _pause(self, exc: OSError) -> None:
        if not self._resume_s:  # said once
            fix = "; in the batch script: ulimit -n $(ulimit -Hn)" if exc.errno == errno.EMFILE else ""
            self._say(f"the leader cannot accept agents: {exc.strerror}; it tries again every {PAUSE_S} s{fix}")
        self._resume_s = time.monotonic() + PAUSE_S
        self._selector.unregister(self._listener)

    def _receive(self, peer: Connection, _: object) -> None:
        if peer not in self._pending:
            return  # disconnected in the same turn
        try:
            messages = peer.receive(at_most=1)
        except ConnectionError as exc:
            self._reject(peer, str(exc), kind="gone")
            return
        except WireError as exc:
            self._reject(peer, f"it sent {as_one_line(str(exc))}", FOREIGN, kind="not allranks")
            return
        if not messages and sum(waiting.num_buffered for waiting in self._pending) > MAX_UNPROVEN_BYTES:
            largest = max(self._pending, key=lambda waiting: waiting.num_buffered)
            self._reject(largest, f"it sent {largest.num_buffered} bytes of an unfinished message", kind="unfinished")
        match messages:
            case [Probe()]:
                self._forget(peer)
                peer.close()
            case [Join() as join]:
                self._examine(peer, join)
            case [message]:
                self._reject(peer, f"it sent {type(message).__name__}, expected Join", FOREIGN, kind="not allranks")

    def _examine(self, peer: Connection, join: Join) -> None:
        pending = self._pending[peer]
        pending.host = as_one_line(join.card.host, at_most=MAX_SHOWN)
        check = partial(answer_join, self.secret, join, leader_nonce=pending.nonce)
        # Order matters: a newer protocol may differ in everything but its first fields.
        if join.protocol != PROTOCOL:
            self._reject(peer, f"it sent {describe_version(join)}", FOREIGN, kind="version")
        elif join.job != self.job:
            job = as_one_line(join.job, at_most=MAX_SHOWN)
            self._reject(peer, f"it belongs to job {job}, this is job {self.job}", kind="job")
        elif not is_munge_proof(join.proof):
            self._answer(peer, join, check())
        else:  # a thread checks the credential: it asks munged twice, which may hang
            self._selector.unregister(peer)
            pending.deadline_s += LEADERS_MUNGE_S
            pending.check = join, self._munge.submit(check)

    def _answer(self, peer: Connection, join: Join, welcome: Welcome | None) -> None:
        """Accept a peer that belongs to this job, or reject it."""
        if welcome is None:
            why = f"it does not know this job's secret (the leader's comes from {self.secret.source})"
            self._reject(peer, why, FOREIGN, kind="secret")
        elif join.card.attempt not in (None, self.attempt):
            why = f"it belongs to attempt {join.card.attempt}, this is attempt {self.attempt}"
            self._reject(peer, f"{why}; it is left over from an earlier one", EARLIER_ATTEMPT, kind="attempt")
        elif reason := self._refuses():
            self._reject(peer, reason, kind="refused")
        else:
            try:
                peer.send(welcome)
            except ConnectionError as exc:
                self._reject(peer, str(exc), kind="gone")
                return
            self._forget(peer)
            peer.max_frame_bytes = MAX_FRAME_BYTES
            self._on_peer(peer, join.card)

    def _reject(self, peer: Connection, reason: str, cause_id: str | None = None, *, kind: str) -> None:
        """Tell a peer why it is disconnected; without a cause it may try again."""
        host = self._forget(peer).host
        turn_away(peer, reason, is_final=cause_id is not None)
        self._on_rejected(Rejection(kind=kind, cause_id=cause_id, host=host, address=peer.peer, reason=reason))

    def _forget(self, peer: Connection) -> _Pending:
        pending = self._pending.pop(peer)
        if pending.check is None:
            self._selector.unregister(peer)
        else:
            pending.check[1].cancel()
        return pending


def turn_away(peer: Connection, reason: str, *, is_final: bool = True) -> None:
    """Disconnect a peer and tell it why; also an authenticated one, for example the second one with a node rank."""
    with contextlib.suppress(ConnectionError):
        peer.send(Refused(reason=reason, is_final=is_final))
    peer.close()
