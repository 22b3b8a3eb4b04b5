"""What came of a roll call, for the node that led it and for the others. Data, with the connections that stay open."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from allranks.model.card import Card
from allranks.model.finding import Verdict
from allranks.preflight.applicant import Applicant
from allranks.preflight.judge import Judgement, Observations
from allranks.wire.accept import Acceptor
from allranks.wire.connection import Connection
from allranks.wire.protocol import Goodbye, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A roll call that was held, as its leader has it. The connections and the listener are the caller's."""

    judgement: Judgement
    observations: Observations
    cards: Mapping[int, Card]
    peers: dict[int, Connection]
    listener: socket.socket
    store_address: str
    """Where the other nodes find this one on the data network."""
    group: str
    """What the job is called on the wire."""
    acceptor: Acceptor | None = None
    """Accepts agents while the job runs, at the side port; None for one machine. The caller's, with its listener."""

    @property
    def port(self) -> int:
        """That the leader holds."""
        return int(self.listener.getsockname()[1])

    @property
    def addresses(self) -> dict[int, str]:
        """Where each node is reached by the others, on the network on which the agents found each other."""
        own = next((peer.own_address for peer in self.peers.values()), "")
        return {0: own} | {index: peer.peer_address for index, peer in self.peers.items()}

    def verdict(self, applicant: Applicant) -> Verdict:
        """What the roll call came to."""
        return Verdict(
            job=applicant.job,
            attempt=applicant.run_dir.attempt,
            exit_code=self.judgement.exit_code,
            findings=self.judgement.findings,
        )


@dataclass(frozen=True, slots=True)
class Followed:
    """A roll call that the leader ended with an answer; the connection and the acceptor are the caller's."""

    answer: Plan | Goodbye
    leader: Connection
    card: Card
    acceptor: Acceptor | None = None
    """Accepts agents that have lost the leader; not attached yet. None: nobody can succeed it."""
