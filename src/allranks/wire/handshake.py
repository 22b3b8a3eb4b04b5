"""The handshake, both sides: how an agent is let into the group of a job, and how it knows its leader.

The leader's side is `Door`, driven by the leader's selector and never blocking on a slow or silent guest. The agent's
side is `seek_leader`, which tries every hint in turn until one of them proves to be the leader.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allranks import __version__
from allranks.model.card import Card
from allranks.model.errors import NodeFaultError, WireError
from allranks.wire.leader import Hint
from allranks.wire.protocol import (
    HANDSHAKE_S,
    PROTOCOL,
    Connection,
    Hello,
    Join,
    Message,
    Refused,
    Welcome,
    decode_frames,
    encode_frame,
    plain_address,
)
from allranks.wire.secret import Secret, fresh_nonce, is_same_proof, join_proof, welcome_proof

CONNECT_S = 1.0
"""How long one hint may take to accept a connection before the next is tried."""


@dataclass(slots=True)
class _Guest:
    nonce: bytes
    deadline_s: float


class Door:
    """The leader's side: greets whoever connects, and tells members from strangers.

    Args:
        listener: the leader's listening socket; the door does not own it.
        job: name of the job.
        attempt: which start of the job this is; an agent that knows of another one is refused.
        secret: the job's key.
    """

    def __init__(self, listener: socket.socket, *, job: str, attempt: int, secret: Secret) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._job = job
        self._attempt = attempt
        self._secret = secret
        self._guests: dict[Connection, _Guest] = {}

    def fileno(self) -> int:
        """The listener's, for a selector."""
        return self._listener.fileno()

    def greet(self, now_s: float) -> Connection | None:
        """Accept one connection and say Hello; the caller watches it and hands it to `hear`."""
        try:
            sock, address = self._listener.accept()
        except OSError:
            return None  # it left between the selector and us
        guest = Connection(sock, peer=plain_address(address[0]))
        nonce = fresh_nonce()
        try:
            guest.send(Hello(protocol=PROTOCOL, version=__version__, job=self._job, nonce=nonce))
        except ConnectionError:
            guest.close()
            return None
        self._guests[guest] = _Guest(nonce, now_s + HANDSHAKE_S)
        return guest

    def hear(self, guest: Connection) -> Card | None:
        """Return the card of a guest that proved itself; None while it has said nothing yet.

        Raises:
            WireError: it was refused; the connection is closed, the text says who and why.
        """
        expected = self._guests[guest]
        try:
            messages = guest.receive()
            if not messages:
                return None
            join = messages[0]
            reason = self._objection(join, expected.nonce)
            if reason is None and isinstance(join, Join):
                proof = welcome_proof(self._secret, leader_nonce=expected.nonce, nonce=join.nonce)
                guest.send(Welcome(proof=proof))
                del self._guests[guest]
                return join.card
            other_job = isinstance(join, Join) and join.job != self._job
            guest.send(Refused(reason=reason or "that is no Join", is_final=not other_job))
        except ConnectionError as exc:
            reason = str(exc)
        except WireError as exc:
            reason = f"it sent {exc}"
            with contextlib.suppress(ConnectionError):
                guest.send(Refused(reason=reason, is_final=True))
        self.dismiss(guest)
        raise WireError(f"{guest.peer} was refused: {reason}")

    def refuse(self, guest: Connection, reason: str) -> None:
        """Send a member away again that had proven itself, for example the second one with the same node rank."""
        with contextlib.suppress(ConnectionError):
            guest.send(Refused(reason=reason, is_final=True))
        guest.close()

    def overdue(self, now_s: float) -> list[Connection]:
        """Guests that connected and then said nothing for HANDSHAKE_S."""
        return [guest for guest, expected in self._guests.items() if expected.deadline_s < now_s]

    def dismiss(self, guest: Connection) -> None:
        """Close a guest's connection."""
        self._guests.pop(guest, None)
        guest.close()

    def close(self) -> list[Connection]:
        """Send all guests away; the listener stays open. Returns them."""
        guests = list(self._guests)
        for guest in guests:
            self.dismiss(guest)
        return guests

    def _objection(self, join: Message, nonce: bytes) -> str | None:
        # Order matters: a newer protocol may differ in everything but its first fields.
        if not isinstance(join, Join):
            return f"it said {type(join).__name__} where Join was expected"
        if join.protocol != PROTOCOL:
            return (
                f"it runs allranks {join.version} (protocol {join.protocol}), the leader {__version__} "
                f"(protocol {PROTOCOL}); install the same version on all nodes"
            )
        if join.job != self._job:
            return f"it is of job {join.job}, this is job {self._job}"
        if join.attempt is not None and join.attempt != self._attempt:
            return f"it is of attempt {join.attempt}, this is attempt {self._attempt}; a left-over of an earlier start"
        expected = join_proof(self._secret, leader_nonce=nonce, nonce=join.nonce, job=join.job, card=join.card)
        if not is_same_proof(expected, join.proof):
            return f"it does not know this job's secret (the leader's comes from {self._secret.source})"
        return None


@dataclass(frozen=True, slots=True)
class _NotTheLeader(Exception):
    """This hint leads nowhere; another may."""

    reason: str
    is_host_silent: bool = False


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
    """Try all hints until one proves to be the leader of this job, and return the connection to it.

    Args:
        hints: asked anew each round, since an announcement may appear.
        job: name of the job.
        attempt: which start of the job, where the agent knows.
        secret: asked anew each round; None while the key is not there yet.
        card: what this node says of itself.
        deadline_s: seconds from now.
        on_wait: told the seconds so far and the last obstacle, once a second at the most.
        check_signals: raises StoppedBySignal when somebody told this agent to stop.
    Raises:
        WireError: the leader refused this agent.
        NodeFaultError: nobody was there by the deadline.
        StoppedBySignal: check_signals raised it.
    """
    started_s = time.monotonic()
    obstacle = "nobody has announced a leader"
    last_told_s = 0.0

    def keep_time() -> None:
        nonlocal last_told_s
        check_signals()
        waited_s = time.monotonic() - started_s
        if waited_s > deadline_s:
            raise NodeFaultError(
                f"no leader of job {job} within {deadline_s:.0f} s; last try: {obstacle}; is the first node "
                "up, and is its port open from here?"
            )
        if waited_s - last_told_s >= 1:
            last_told_s = waited_s
            on_wait(waited_s, obstacle)

    while True:
        for group in hints():
            for hint in group:
                keep_time()
                key = secret()
                if key is None:
                    obstacle = "the job's secret is not in the run directory yet"
                    break
                try:
                    return _join(hint, job=job, attempt=attempt, secret=key, card=card)
                except _NotTheLeader as exc:
                    obstacle = exc.reason
                    if exc.is_host_silent:
                        break
        keep_time()
        time.sleep(0.1)


def _join(hint: Hint, *, job: str, attempt: int | None, secret: Secret, card: Card) -> Connection:
    try:
        sock = socket.create_connection((hint.host, hint.port), timeout=CONNECT_S)
    except (OSError, UnicodeError) as exc:  # UnicodeError: no host name at all
        # A refusal is an answer: other ports of the host are worth a try. Silence is not.
        reason = f"{hint} ({hint.source}): {getattr(exc, 'strerror', None) or exc}"
        raise _NotTheLeader(reason, is_host_silent=not isinstance(exc, ConnectionRefusedError)) from exc
    try:
        return _shake_hands(sock, hint, job=job, attempt=attempt, secret=secret, card=card)
    except (_NotTheLeader, WireError):
        sock.close()
        raise
    except OSError as exc:
        sock.close()
        raise _NotTheLeader(f"{hint} ({hint.source}): {exc.strerror or exc}") from exc


def _shake_hands(
    sock: socket.socket, hint: Hint, *, job: str, attempt: int | None, secret: Secret, card: Card
) -> Connection:
    deadline_s = time.monotonic() + HANDSHAKE_S
    buffer = bytearray()
    hello = _read(sock, buffer, deadline_s, hint)
    if not isinstance(hello, Hello):
        raise _NotTheLeader(f"{hint} ({hint.source}): no leader of ours")
    if hello.job != job:
        raise _NotTheLeader(f"{hint} ({hint.source}): leader of another job, {hello.job}")
    nonce = fresh_nonce()
    proof = join_proof(secret, leader_nonce=hello.nonce, nonce=nonce, job=job, card=card)
    join = Join(protocol=PROTOCOL, version=__version__, job=job, attempt=attempt, nonce=nonce, card=card, proof=proof)
    sock.sendall(encode_frame(join))
    answer = _read(sock, buffer, deadline_s, hint)
    if isinstance(answer, Refused):
        if answer.is_final:
            raise WireError(f"the leader at {hint} refused this node: {answer.reason}")
        raise _NotTheLeader(f"{hint} ({hint.source}): {answer.reason}")
    if not isinstance(answer, Welcome) or not is_same_proof(
        answer.proof, welcome_proof(secret, leader_nonce=hello.nonce, nonce=nonce)
    ):
        raise _NotTheLeader(f"{hint} ({hint.source}): it does not know this job's secret")
    return Connection(sock, peer=str(hint), received=bytes(buffer))


def _read(sock: socket.socket, buffer: bytearray, deadline_s: float, hint: Hint) -> Message:
    # Frames may come together; what is left in the buffer is the next message.
    while True:
        try:
            messages = decode_frames(buffer, at_most=1)
        except WireError as exc:
            raise _NotTheLeader(f"{hint} ({hint.source}): {exc}") from exc
        if messages:
            return messages[0]
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise _NotTheLeader(f"{hint} ({hint.source}): something listens there and says nothing")
        sock.settimeout(left_s)
        try:
            data = sock.recv(1 << 16)
        except TimeoutError:
            continue
        if not data:
            raise _NotTheLeader(f"{hint} ({hint.source}): it closed the connection")
        buffer += data
