"""The roll call without agents: the ranks of `srun python train.py` take part themselves, each as one applicant.

It is the roll call of preflight.entry with ranks in the place of nodes, several of them on a host. What it says of them
is said again in the words of ranks (preflight.ranks), and what the leader gives out are places in the group. The leader
keeps its socket: rank 0's store listens on it.

    answer = take_place(apply_rank(world, loaded, facts, ...))      # the group, or the Goodbye with the verdict
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from allranks.config.file import LoadedCluster
from allranks.host.node import NodeFacts, begin_card_facts
from allranks.host.script import find_main_script
from allranks.model.errors import AllranksError, UsageError
from allranks.model.membership import Member
from allranks.model.world import Launcher, World
from allranks.preflight.applicant import Applicant, NodePlan
from allranks.preflight.called import Called, Rendezvous
from allranks.preflight.datapath import DataPath, data_path_alone, data_path_of_cluster
from allranks.preflight.judge import name_nodes
from allranks.preflight.node_entry import Entry
from allranks.preflight.ranks_as_nodes import choose_backend, hosts_of_ranks, in_ranks, job_name, name_absent
from allranks.report.rundir import RunDir
from allranks.wire.leader_port import Hint
from allranks.wire.protocol import Goodbye, Plan


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
    path: DataPath | None = None
    try:
        is_alone = world.num_nodes == 1
        path = data_path_alone(facts) if is_alone else data_path_of_cluster(loaded.cluster, facts, loaded.origins)
    except AllranksError as exc:
        problem = problem or exc  # the others must hear it, or they would wait for this one
    is_slurm = world.launcher is Launcher.SLURM
    endpoint = None if is_slurm else _meeting_point(world, loaded.cluster.network.port)
    port = endpoint.port if endpoint else loaded.cluster.network.port
    plan = NodePlan(
        job=job_name(world),
        launcher=world.launcher,
        attempt=world.attempt if is_slurm else None,
        # SLURM promises GPUs to the node; a task may have been given some of them.
        facts=facts if world.local_world_size == 1 else replace(facts, num_promised_gpus=None),
        node_index=world.rank,
        num_nodes=world.world_size,
        min_nodes=world.world_size,
        node_names=name_absent(hosts_of_ranks(world, env)),
        port=port,
        endpoint=endpoint,
        guesses=(Hint(world.hosts[0], port, "first node of the step"),) if is_slurm and world.hosts else (),
        data_path=path,
        second_network=loaded.cluster.network.second,
        wanted_backend=wanted_backend,
        guard=loaded.cluster.guard,
        is_of_a_rank=True,
        problem=problem,
    )
    return Applicant(
        plan=plan,
        shares_run_dir=is_slurm,
        run_dir=run_dir,
        env=env,
        card_facts=begin_card_facts(
            loaded.cluster.worker_env(env), names=world.hosts[:1], script_path=find_main_script()
        ),
        check_signals=lambda: None,  # a rank is the user's process: Ctrl-C is its KeyboardInterrupt
    )


def take_place(applicant: Applicant) -> Rendezvous | Goodbye:
    """Take part in the roll call; return this rank's place in the group, or the verdict why it does not begin.

    The connections are closed: the group's own are all that a rank needs from here.

    Raises:
        AllranksError: it could not begin.
    """
    with Entry(applicant) as entry:
        called = entry.take_part()
    if isinstance(called, Called):
        plan = applicant.plan
        places: dict[str, tuple[str | None, int]] = {f"node rank {i}": (None, i) for i in range(plan.num_nodes)}
        places |= {name: (name.removesuffix(f"-rank{rank}"), rank) for rank, name in enumerate(plan.node_names)}
        places |= {name: (called.cards[rank].host, rank) for rank, name in name_nodes(called.cards).items()}
        # Who comes later is too late: a session has no restarts of its own.
        return called.give_out(_make_plans, name=lambda one: in_ranks(one, places), lets_go=True)
    if isinstance(called, Rendezvous) and called.leader is not None:
        called.leader.close()
    return called


def _make_plans(called: Called) -> dict[int, Plan]:
    applicant = called.applicant
    backend, reason = choose_backend(applicant.plan.wanted_backend, called.cards)
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
        network=called.network,
    )
    return {rank: msgspec.structs.replace(first, node_index=rank) for rank in called.cards}


def _meeting_point(world: World, port: int) -> Hint | None:
    if world.world_size == 1:
        return None
    if world.master is None:
        raise UsageError(
            f"{world.launcher} does not say where the ranks meet: set MASTER_ADDR to the host of rank 0 on all of them"
        )
    return Hint(world.master[0], world.master[1] or port, world.source_of("master"))
