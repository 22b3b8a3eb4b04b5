"""The leader's side of the handshake: accept the agents of the job, refuse all others.

The leader's selector drives `Door`, which never blocks on a slow or silent peer. The agent's side is `wire.seek`.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from enum import StrEnum

from allranks import __version__
from allranks.model.card import Card
from allranks.model.errors import WireError
from allranks.wire.connection import Connection
from allranks.wire.protocol import (
    HANDSHAKE_S,
    PROTOCOL,
    Hello,
    Join,
    Knock,
    Message,
    Refused,
    Welcome,
    as_one_line,
    plain_address,
)
from allranks.wire.secret import Secret, fresh_nonce, is_join_proof, is_munge_proof, welcome_proof

MAX_SHOWN = 64
"""Maximum number of characters printed of a foreign peer's name, job and version."""


class Intrusion(StrEnum):
    """Why a peer was refused."""

    LEFT = "left"
    """It disconnected before it identified itself, as a port check or an agent of another job does."""
    OTHER_JOB = "other-job"
    EARLIER_ATTEMPT = "earlier-attempt"
    OTHER_SECRET = "other-secret"  # noqa: S105
    OTHER_VERSION = "other-version"
    GARBAGE = "garbage"


class StrangerError(WireError):
    """A peer that does not belong to this job was refused."""

    def __init__(self, message: str, *, intrusion: Intrusion, host: str) -> None:
        super().__init__(message)
        self.intrusion = intrusion
        self.host = host
        """The peer's host name, if it sent one, else its address."""


@dataclass(slots=True)
class _Guest:
    nonce: bytes
    deadline_s: float


class Door:
    """Greets every peer that connects, and accepts only agents of this job.

    Args:
        listener: the leader's listening socket; the door does not own it.
        job: name of the job.
        attempt: number of the job's start; an agent of another attempt is refused.
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
        """Accept one connection and send Hello; the caller watches the connection and passes it to `hear`."""
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
        """Return the card of an authenticated peer; None if it has sent nothing yet, or only checks the port (Knock).

        Raises:
            StrangerError: the peer was refused and disconnected; the text says who and why.
        """
        expected = self._guests[guest]
        host, intrusion = guest.peer, Intrusion.LEFT
        try:
            messages = guest.receive()
            if not messages:
                return None
            join = messages[0]
            if isinstance(join, Knock):
                self.dismiss(guest)
                return None
            objection = self._objection(join, expected.nonce)
            if objection is None and isinstance(join, Join):
                proof = welcome_proof(
                    self._secret, leader_nonce=expected.nonce, nonce=join.nonce, is_munge=is_munge_proof(join.proof)
                )
                guest.send(Welcome(proof=proof))
                del self._guests[guest]
                return join.card
            intrusion, reason = objection or (Intrusion.GARBAGE, "expected a Join message")
            host = as_one_line(join.card.host, at_most=MAX_SHOWN) if isinstance(join, Join) else host
            guest.send(Refused(reason=reason, is_final=intrusion is not Intrusion.OTHER_JOB))
        except ConnectionError as exc:
            reason = str(exc)
        except WireError as exc:
            intrusion, reason = Intrusion.GARBAGE, f"it sent {as_one_line(str(exc))}"
            with contextlib.suppress(ConnectionError):
                guest.send(Refused(reason=reason, is_final=True))
        self.dismiss(guest)
        raise StrangerError(f"{guest.peer} was rejected: {reason}", intrusion=intrusion, host=host)

    def refuse(self, guest: Connection, reason: str) -> None:
        """Refuse an authenticated agent, for example the second one with the same node rank."""
        with contextlib.suppress(ConnectionError):
            guest.send(Refused(reason=reason, is_final=True))
        guest.close()

    def overdue(self, now_s: float) -> list[Connection]:
        """Return the peers that have sent nothing for HANDSHAKE_S since they connected."""
        return [guest for guest, expected in self._guests.items() if expected.deadline_s < now_s]

    def dismiss(self, guest: Connection) -> None:
        """Close a guest's connection."""
        self._guests.pop(guest, None)
        guest.close()

    def close(self) -> list[Connection]:
        """Disconnect all peers and return them; the listener stays open."""
        guests = list(self._guests)
        for guest in guests:
            self.dismiss(guest)
        return guests

    def shut(self) -> None:
        """Disconnect all peers and close the listener."""
        self.close()
        self._listener.close()

    def _objection(self, join: Message, nonce: bytes) -> tuple[Intrusion, str] | None:
        # Order matters: a newer protocol may differ in everything but its first fields.
        if not isinstance(join, Join):
            return Intrusion.GARBAGE, f"it sent {type(join).__name__}, expected Join"
        if join.protocol != PROTOCOL:
            version = as_one_line(join.version, at_most=MAX_SHOWN)
            return Intrusion.OTHER_VERSION, (
                f"it runs allranks {version} (protocol {join.protocol}), the leader {__version__} "
                f"(protocol {PROTOCOL}); install the same version on all nodes"
            )
        if join.job != self._job:
            job = as_one_line(join.job, at_most=MAX_SHOWN)
            return Intrusion.OTHER_JOB, f"it belongs to job {job}, this is job {self._job}"
        if not is_join_proof(
            self._secret, join.proof, leader_nonce=nonce, nonce=join.nonce, job=join.job, card=join.card
        ):
            return Intrusion.OTHER_SECRET, (
                f"it does not know this job's secret (the leader's comes from {self._secret.source})"
            )
        if join.attempt is not None and join.attempt != self._attempt:
            return Intrusion.EARLIER_ATTEMPT, (
                f"it belongs to attempt {join.attempt}, this is attempt {self._attempt}; "
                "it is left over from an earlier one"
            )
        return None
