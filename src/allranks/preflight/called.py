"""The result of a roll call: each rank's place in the group, or the verdict why the job does not start."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from allranks.causes.book import find_cause
from allranks.causes.outcome import failed
from allranks.host.net import find_interface_of
from allranks.model.card import Card
from allranks.model.data_network import DataNetwork
from allranks.model.errors import AllranksError, NodeFaultError
from allranks.model.finding import Finding, Verdict
from allranks.preflight.applicant import Applicant
from allranks.preflight.judge import Judgement, Observations, name_nodes
from allranks.preflight.lanes import measured_link, nic_of
from allranks.preflight.networks import advise_network
from allranks.preflight.rollcall import stop
from allranks.wire.accept import Acceptor
from allranks.wire.connection import Connection
from allranks.wire.protocol import Goodbye, Plan

HAND_OVER_S = 5.0
"""How long the plans may take to leave for slow ranks."""


@dataclass(slots=True, kw_only=True)
class Rendezvous:
    """The group as this node found it, and its connections to the others, which are the caller's."""

    group: Plan
    applicant: Applicant
    card: Card
    """This node's."""
    own_address: str | None
    """This node's, on the network on which the nodes found each other; None: there is no other node."""
    leader: Connection | None = None
    """None: this node leads."""
    peers: dict[int, Connection] = field(default_factory=dict)
    """On the leader, the others by their index in the job."""
    cards: Mapping[int, Card] = field(default_factory=dict)
    """On the leader, by the node's index in the job, which it keeps."""
    listener: socket.socket | None = None
    """The leader's: rank 0's store listens on it."""
    acceptor: Acceptor | None = None
    """On several nodes: where agents come in while the job runs, on the leader, and on the others if it is lost."""
    warnings: tuple[Finding, ...] = ()
    """On the leader: what the roll call found that stops nobody."""

    @property
    def interface(self) -> str | None:
        """Carries gradients here: without a path of its own, data takes the one of this connection, which works."""
        plan, address = self.applicant.plan, self.own_address
        if plan.data_path is not None:
            return plan.data_path.interface
        nic = find_interface_of(address, plan.facts.interfaces) if address is not None else None
        return nic.name if nic else None

    @property
    def advice(self) -> str | None:
        """On the leader: which network data should take, where nobody chose one."""
        taken, cards = self.own_address, list(self.cards.values())
        return advise_network(cards, taken) if taken is not None and self.applicant.plan.data_path is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A roll call that was held, as its leader has it. The connections and the listener are the caller's."""

    applicant: Applicant
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
        return {0: self._own_address or ""} | {index: peer.peer for index, peer in self.peers.items()}

    @property
    def interfaces(self) -> dict[str, str]:
        """The data interface of each host, as far as it is known."""
        nics = {card.host: nic_of(card, self._data_addresses.get(index)) for index, card in self.cards.items()}
        return {host: nic.name for host, nic in nics.items() if nic is not None}

    @property
    def network(self) -> DataNetwork:
        """The data network, as far as a roll call can know it."""
        seen = self.observations
        mbit_s, reason = measured_link((*seen.results, *seen.quiet), self.cards, self._data_addresses)
        return DataNetwork(link_mbit_s=mbit_s, link_reason=reason, link_source="roll call", interfaces=seen.interfaces)

    @property
    def verdict(self) -> Verdict:
        """What the roll call came to."""
        attempt, judged = self.applicant.run_dir.attempt, self.judgement
        return Verdict(
            job=self.applicant.plan.job, attempt=attempt, exit_code=judged.exit_code, findings=judged.findings
        )

    def give_out(
        self,
        make_plans: Callable[[Called], Mapping[int, Plan]],
        *,
        name: Callable[[Finding], Finding] = lambda finding: finding,
        lets_go: bool = False,
    ) -> Rendezvous | Goodbye:
        """Tell everybody its place in the group, or the verdict.

        Args:
            make_plans: returns everybody's place, by node index.
            name: says a finding in the caller's words for those that take part.
            lets_go: whether nobody needs these connections from here, or may come late.
        """
        verdict, own_address, index = self.verdict, self._own_address, 0
        plans: Mapping[int, Plan] = {}
        why: AllranksError | None = None
        try:
            if not verdict.exit_code:
                plans = make_plans(self)
                for index, peer in self.peers.items():
                    peer.send(plans[index])
                deadline_s = time.monotonic() + HAND_OVER_S
                for index in self.peers if lets_go else ():
                    peer = self.peers[index]
                    while peer.flush():
                        if time.monotonic() > deadline_s:
                            raise ConnectionError("it does not read")
                        time.sleep(0.001)
                    peer.close()
        except ConnectionError as exc:
            why = NodeFaultError(f"it joined, then disconnected: {exc}")
        except AllranksError as exc:
            why, index = exc, 0
        if why is not None:
            at = name_nodes(self.cards)[index]
            finding = why.finding or failed(what=str(why)).to_finding(
                find_cause("AR512"), node=at, reader=self.cards[index].reader
            )
            verdict = msgspec.structs.replace(verdict, exit_code=why.exit_code, findings=(finding,))
        verdict = msgspec.structs.replace(verdict, findings=tuple(map(name, verdict.findings)))
        if self.acceptor is not None and (lets_go or verdict.exit_code):
            self.acceptor.close()
        if verdict.exit_code:
            stop(self.peers, verdict, group=self.group)
            self.listener.close()
            return Goodbye(exit_code=verdict.exit_code, summary="the job does not start", verdict=verdict)
        return Rendezvous(
            group=plans[0],
            applicant=self.applicant,
            card=self.cards[0],
            own_address=own_address,
            peers=self.peers,
            cards=self.cards,
            listener=self.listener,
            acceptor=self.acceptor,
            warnings=verdict.findings,
        )

    @property
    def _data_addresses(self) -> dict[int, str]:
        return {index: card.data_address or self.addresses.get(index, "") for index, card in self.cards.items()}

    @property
    def _own_address(self) -> str | None:
        return next((peer.own_address for peer in self.peers.values()), None)
