"""Get this agent's place in the group: the roll call (preflight.entry), then the assignment of ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from allranks.launch.agent import Agent
from allranks.launch.lead.group import make_group
from allranks.launch.plan import JobPlan
from allranks.launch.queue.revival import BACK_VARIABLE
from allranks.model.card import Card, Facts
from allranks.model.claims.table import row_of
from allranks.model.errors import AllranksError, NodeFaultError
from allranks.model.finding import Finding, Verdict
from allranks.model.past import Past
from allranks.model.world import Launcher
from allranks.preflight.applicant import Applicant
from allranks.preflight.called import Called
from allranks.preflight.entry import Entry, announce_leader
from allranks.preflight.rollcall import stop
from allranks.report.rundir import RunDir
from allranks.wire.accept import Acceptor
from allranks.wire.connection import Connection
from allranks.wire.leader import Hint
from allranks.wire.protocol import Contact, Goodbye, Plan
from allranks.wire.seek import Search


@dataclass(slots=True, kw_only=True)
class Rendezvous:
    """The group as this agent found it, and its connections to the others."""

    group: Plan
    listener: socket.socket | None = None
    """The leader's: rank 0's store listens on it."""
    peers: dict[int, Connection] = field(default_factory=dict)
    """On the leader, the other agents by seat."""
    leader: Connection | None = None
    """On the others."""
    warnings: tuple[Finding, ...] = ()
    """On the leader: what the roll call found that stops nobody."""
    cards: Mapping[int, Card] = field(default_factory=dict)
    """On the leader, by seat: the node's place in the job, which it keeps."""
    acceptor: Acceptor | None = None
    """On several nodes: where agents come in while the job runs, on the leader, and on the others if it is lost."""
    own_address: str | None = None
    """This node's, on the network on which the agents found each other; None: there is no other agent."""
    card: Card | None = None
    """This node's, on the others."""
    applicant: Applicant

    def seek(self, contacts: Sequence[Contact], agent: Agent) -> Search:
        """Begin to look for a leader at these agents."""
        assert self.card is not None
        assert self.acceptor is not None
        own = self.acceptor
        card = msgspec.structs.replace(self.card, node_index=agent.node, generation=agent.plan.generation)
        hints = [
            [Hint(address, each.port, source=f"agent on {each.name}", node=each.node)]
            for each in contacts
            for address in dict.fromkeys(filter(None, (each.control_address, each.data_address)))
        ]
        return Search(lambda: hints, job=own.job, attempt=own.attempt, secret=lambda: own.secret, card=card)

    def announce(self, port: int) -> None:
        """Write down that this agent leads now, for agents that are started again; `port` is the store's."""
        assert self.card is not None
        announce_leader(self.applicant, port, side_port=self.card.agent_port)


def take_part(applicant: Applicant, *, past: Past) -> Rendezvous | Goodbye:
    """Take part in the roll call; return what came of it, or the verdict why the job does not begin.

    Args:
        past: how often workers are started again; every possible leader must know it.
    Raises:
        AllranksError: it could not begin.
    """
    with Entry(applicant) as entry:
        called = entry.take_part()
    if isinstance(called, Called):
        return _give_out_plans(called, applicant, past)
    if isinstance(called.answer, Goodbye):
        called.leader.close()
        return called.answer
    return Rendezvous(
        group=called.answer,
        leader=called.leader,
        own_address=called.leader.own_address,
        acceptor=called.acceptor,
        card=called.card,
        applicant=applicant,
    )


def apply(
    plan: JobPlan,
    run_dir: RunDir,
    env: Mapping[str, str],
    *,
    problem: AllranksError | None,
    facts: Callable[[], Facts],
    check_signals: Callable[[], None],
) -> Applicant:
    """Return what a plan means for the roll call; all else is as in Applicant.

    Args:
        run_dir: the job's run directory; the leader makes it.
        env: where $ALLRANKS_SECRET may be, and whether this agent takes the place of a lost one.
    """
    return Applicant(
        job=plan.job,
        attempt=plan.attempt,
        host=plan.facts.host,
        node_index=plan.node_index,
        is_back=BACK_VARIABLE in env,
        num_nodes=plan.num_nodes,
        min_nodes=plan.min_nodes,
        node_names=plan.node_names,
        num_workers=plan.num_workers,
        num_gpus=plan.facts.num_gpus,
        num_promised_gpus=plan.facts.num_promised_gpus,
        port=plan.port,
        endpoint=plan.request.endpoint,
        guesses=plan.guesses,
        rdzv_id=plan.request.rdzv_id,
        key_from=row.key_from if (row := row_of(plan.world.launcher)) else "",
        interfaces=plan.facts.interfaces,
        data_interface=plan.data_path.interface if plan.data_path else None,
        data_address=plan.data_path.address if plan.data_path else None,
        wanted_backend=plan.wanted_backend,
        guard=plan.cluster.guard,
        is_slurm=plan.world.launcher is Launcher.SLURM,
        shares_run_dir=plan.world.launcher is Launcher.SLURM,
        has_successors=plan.num_nodes > 1,
        ignored=frozenset(plan.request.ignored),
        run_dir=run_dir,
        env=env,
        problem=problem,
        facts=facts,
        check_signals=check_signals,
    )


def _give_out_plans(called: Called, applicant: Applicant, past: Past) -> Rendezvous | Goodbye:
    """Tell everybody who is which rank, or the verdict."""
    verdict, plans = called.verdict(applicant), {}
    try:
        if not verdict.exit_code:
            plans = make_group(
                called.cards,
                addresses=called.addresses,
                can_change_leader=_outlives_its_leader(applicant),
                past=past,
                wanted_backend=applicant.wanted_backend,
                attempt=applicant.run_dir.attempt,
                store_address=called.store_address,
                store_port=called.port,
                max_restarts=past.history.restarts_left,
            )
            for index, peer in called.peers.items():
                peer.send(plans[index])
    except ConnectionError as exc:
        verdict = _stopped(applicant, NodeFaultError(f"an agent joined, then disconnected: {exc}"))
    except AllranksError as exc:
        if applicant.is_alone:
            called.listener.close()
            raise
        verdict = _stopped(applicant, exc)
    if verdict.exit_code:
        stop(called.peers, verdict, group=called.group)
        called.listener.close()
        if called.acceptor is not None:
            called.acceptor.close()
        summary = "" if verdict.findings else "it does not begin"
        return Goodbye(exit_code=verdict.exit_code, summary=summary, verdict=verdict)
    return Rendezvous(
        group=plans[0],
        listener=called.listener,
        peers=called.peers,
        warnings=called.judgement.findings,
        cards=called.cards,
        acceptor=called.acceptor,
        own_address=next((peer.own_address for peer in called.peers.values()), None),
        applicant=applicant,
    )


def _outlives_its_leader(applicant: Applicant) -> bool:
    """Whether the job can go on without this node: not where its srun runs here, since the step ends with it."""
    own = {address for interface in applicant.interfaces for address in interface.addresses}
    return applicant.env.get("SLURM_LAUNCH_NODE_IPADDR", "") not in own


def _stopped(applicant: Applicant, why: AllranksError) -> Verdict:
    findings = (why.finding,) if why.finding else ()
    return Verdict(job=applicant.job, attempt=applicant.run_dir.attempt, exit_code=why.exit_code, findings=findings)
