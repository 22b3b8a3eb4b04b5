"""The roll call where there is no agent: the ranks of `srun python train.py` hold it themselves, one applicant a rank.

It is the roll call of preflight.entry with ranks in the place of nodes, several of them on a host. What it says of them
is said again in the words of ranks (preflight.ranks), and what the leader gives out are places in the group. The leader
keeps its socket: rank 0's store listens on it.

    answer = take_place(apply_rank(world, loaded, facts, ...))      # a Place, or the Goodbye with the verdict
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from allranks.causes.catalogue import find_cause
from allranks.causes.cause import failed
from allranks.config.file import LoadedCluster
from allranks.host.net import find_interface_of
from allranks.host.node import NodeFacts, begin_card_facts
from allranks.host.script import find_main_script
from allranks.model.card import Interface
from allranks.model.claims.table import row_of
from allranks.model.errors import AllranksError, NodeFaultError, UsageError
from allranks.model.finding import Finding, Verdict
from allranks.model.membership import Member
from allranks.model.world import Launcher, World
from allranks.preflight.applicant import Applicant
from allranks.preflight.called import Called
from allranks.preflight.datapath import data_path_of_cluster
from allranks.preflight.entry import LOOPBACK, Entry
from allranks.preflight.judge import name_nodes
from allranks.preflight.networks import advise_network
from allranks.preflight.ranks import choose_backend, hosts_of_ranks, in_ranks, job_name, name_absent
from allranks.preflight.rollcall import stop
from allranks.report.rundir import RunDir
from allranks.report.text import say
from allranks.wire.connection import Connection
from allranks.wire.leader import Hint
from allranks.wire.protocol import Goodbye, Plan

HAND_OVER_S = 5.0
"""How long the plans may take to leave for slow ranks."""
SHARED_ON_PURPOSE = frozenset({"AR107"})
"""Causes that several ranks on a machine are no sign of: each sees all its GPUs and takes the one of its local rank.
Whether there is one for each is looked at in `choose_backend`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank's place in the group."""

    group: Plan
    """A member for each rank; `node_index` is the rank."""
    interface: str | None
    """Carries gradients here; None where it could not be found out."""
    listener: socket.socket | None = None
    """Rank 0's: its store listens on it."""
    warnings: tuple[Finding, ...] = ()
    """On rank 0: what the roll call found that stops nobody."""


def apply_rank(
    world: World,
    loaded: LoadedCluster,
    facts: NodeFacts,
    *,
    wanted_backend: str,
    run_dir: RunDir,
    env: Mapping[str, str],
    problem: AllranksError | None,
) -> Applicant:
    """Return what this rank takes part with.

    Args:
        world: who this process is.
        loaded: cluster.toml.
        facts: this machine.
        wanted_backend: auto, nccl or gloo.
        run_dir: the job's run directory.
        env: where $ALLRANKS_SECRET may be.
        problem: why this rank cannot take part, if so; the others hear it.
    Raises:
        UsageError: nobody says where the ranks meet.
    """
    interface: str | None = None
    address: str | None = None
    if world.num_nodes == 1:
        nic = find_interface_of(LOOPBACK, facts.interfaces)
        interface, address = (nic.name, LOOPBACK) if nic else (None, None)
    else:
        try:
            path = data_path_of_cluster(loaded.cluster, facts, loaded.origins)
            interface, address = (path.interface, path.address) if path else (None, None)
        except AllranksError as exc:
            problem = problem or exc  # the others must hear it, or they would wait for this one
    is_slurm = world.launcher is Launcher.SLURM
    endpoint = None if is_slurm else _meeting_point(world, loaded.cluster.network.port)
    port = endpoint.port if endpoint else loaded.cluster.network.port
    return Applicant(
        job=job_name(world),
        attempt=world.attempt if is_slurm else None,
        host=facts.host,
        node_index=world.rank,
        num_nodes=world.world_size,
        min_nodes=world.world_size,
        node_names=name_absent(hosts_of_ranks(world, env)),
        num_gpus=facts.num_gpus,
        # SLURM promises them to the node; a task may have been given some of them.
        num_promised_gpus=facts.num_promised_gpus if world.local_world_size == 1 else None,
        port=port,
        endpoint=endpoint,
        key_from=row.key_from if (row := row_of(world.launcher)) else "",
        guesses=(Hint(world.hosts[0], port, "first node of the step"),) if is_slurm and world.hosts else (),
        interfaces=facts.interfaces,
        data_interface=interface,
        data_address=address,
        wanted_backend=wanted_backend,
        guard=loaded.cluster.guard,
        is_slurm=is_slurm,
        shares_run_dir=is_slurm,
        ignored=SHARED_ON_PURPOSE,
        run_dir=run_dir,
        env=env,
        problem=problem,
        facts=begin_card_facts(loaded.cluster.worker_env(env), names=world.hosts[:1], script_path=find_main_script()),
        check_signals=lambda: None,  # a rank is the user's process: Ctrl-C is its KeyboardInterrupt
    )


def take_place(applicant: Applicant) -> Place | Goodbye:
    """Take part in the roll call; return this rank's place in the group, or the verdict why it does not begin.

    Raises:
        AllranksError: it could not begin.
    """
    with Entry(applicant) as entry:
        called = entry.take_part()
    if isinstance(called, Called):
        if called.acceptor is not None:
            called.acceptor.close()  # who comes later is too late: a session has no restarts of its own
        return _give_out_places(called, applicant)
    with contextlib.closing(called.leader):
        if isinstance(called.answer, Goodbye):
            return called.answer
        return Place(
            group=called.answer,
            interface=applicant.data_interface or _interface_to(called.leader, applicant.interfaces),
        )


def _give_out_places(called: Called, applicant: Applicant) -> Place | Goodbye:
    """Tell everybody its place, or the verdict."""
    verdict, plans = called.verdict(applicant), {}
    any_peer = next(iter(called.peers.values()), None)
    interface = applicant.data_interface
    if interface is None and any_peer is not None:
        interface = _interface_to(any_peer, applicant.interfaces)
        if advice := advise_network([*called.cards.values()], any_peer.own_address):
            say(f"note: {advice}")
    try:
        if not verdict.exit_code:
            plans = _make_plans(called, applicant)
            _hand_over(called.peers, plans)
    except ConnectionError as exc:
        verdict = _stopped(applicant, NodeFaultError(f"a rank joined, then disconnected: {exc}"))
    except AllranksError as exc:
        verdict = _stopped(applicant, exc)
    places: dict[str, tuple[str | None, int]] = {f"node rank {i}": (None, i) for i in range(applicant.num_nodes)}
    places |= {name: (name.removesuffix(f"-rank{rank}"), rank) for rank, name in enumerate(applicant.node_names)}
    places |= {name: (called.cards[rank].host, rank) for rank, name in name_nodes(called.cards).items()}
    findings = tuple(in_ranks(finding, places) for finding in verdict.findings)
    verdict = msgspec.structs.replace(verdict, findings=findings)
    if verdict.exit_code:
        stop(called.peers, verdict, group=called.group)
        called.listener.close()
        return Goodbye(exit_code=verdict.exit_code, summary="the job does not start", verdict=verdict)
    return Place(group=plans[0], interface=interface, listener=called.listener, warnings=findings)


def _make_plans(called: Called, applicant: Applicant) -> dict[int, Plan]:
    backend, reason = choose_backend(applicant.wanted_backend, called.cards)
    members = tuple(
        Member(name=name, first_rank=rank, num_workers=1, host=called.cards[rank].host)
        for rank, name in name_nodes(called.cards).items()
    )
    first = Plan(
        members=members,
        node_index=0,
        attempt=applicant.run_dir.attempt,
        store_address=called.store_address,
        store_port=called.port,
        backend=backend,
        backend_reason=reason,
    )
    return {rank: msgspec.structs.replace(first, node_index=rank) for rank in called.cards}


def _hand_over(peers: Mapping[int, Connection], plans: Mapping[int, Plan]) -> None:
    """Send every rank its plan, and let it go: the group's own connections are all it needs from here.

    Raises:
        ConnectionError: a rank is gone, or does not read.
    """
    for rank, peer in peers.items():
        peer.send(plans[rank])
    deadline_s = time.monotonic() + HAND_OVER_S
    while any(peer.has_unsent for peer in peers.values()):
        for peer in peers.values():
            peer.flush()
        if time.monotonic() > deadline_s:
            raise ConnectionError("it did not join in time")
        time.sleep(0.001)
    for peer in peers.values():
        peer.close()


def _stopped(applicant: Applicant, why: AllranksError) -> Verdict:
    finding = why.finding or find_cause("AR512").find(failed(what=str(why)), node=applicant.host)
    return Verdict(job=applicant.job, attempt=applicant.run_dir.attempt, exit_code=why.exit_code, findings=(finding,))


def _meeting_point(world: World, port: int) -> Hint | None:
    if world.world_size == 1:
        return None
    if world.master is None:
        raise UsageError(
            f"{world.launcher} does not say where the ranks meet: set MASTER_ADDR to the host of rank 0 on all of them"
        )
    return Hint(world.master[0], world.master[1] or port, world.source_of("master"))


def _interface_to(connection: Connection, interfaces: Sequence[Interface]) -> str | None:
    nic = find_interface_of(connection.own_address, interfaces)
    return nic.name if nic else None
