"""Make the plan of `allranks run`: every choice, with its reason, as pure functions.

    request (flags) + World (who am I) + Cluster (cluster.toml) + NodeFacts (this machine)  ->  JobPlan

The leader decides what depends on other nodes: ranks (launch.lead.group), and the backend, with `choose_backend`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from allranks.host.net import find_interface_of
from allranks.host.node import NodeFacts
from allranks.launch.lead.course import SHUTDOWN_S
from allranks.model.claims.launcher_table import row_of
from allranks.model.cluster import Backend, Cluster
from allranks.model.errors import AllranksError, ConfigError, IdentityError, SetupError, UsageError
from allranks.model.setting import Setting
from allranks.model.world import Launcher, LaunchLevel, World
from allranks.preflight.applicant import NodePlan
from allranks.preflight.datapath import DataPath, data_path_alone, data_path_of_cluster, list_nics
from allranks.preflight.vet import MAX_WORKERS
from allranks.report.text import count_of as count_of
from allranks.wire.leader_port import Hint

REPLACED = frozenset(("accelerate", "deepspeed", "ft_launcher", "mpiexec", "mpirun", "python", "python3", "torchrun"))
"""Commands with which others begin a command line that starts ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of the command line; None if not given."""

    command: tuple[str, ...] = ()
    """Script (or module, or program) and its arguments."""
    is_module: bool = False
    no_python: bool = False
    num_workers: str | None = None
    """`--nproc-per-node`: a number, auto, gpu or cpu."""
    min_nodes: int | None = None
    max_nodes: int | None = None
    node_rank: int | None = None
    endpoint: Hint | None = None
    """`--rdzv-endpoint`, or `--master-addr` and `--master-port`."""
    port: int | None = None
    rdzv_id: str | None = None
    standalone: bool = False
    backend: str | None = None
    container: str | None = None
    """Image that the workers run in."""
    container_runtime: str | None = None
    role: str = "default"
    local_address: str | None = None
    ignored: tuple[str, ...] = ()
    """Ids of causes that do not stop the job (`--ignore`)."""
    max_restarts: int = 0
    """Maximum number of restarts after faults that a restart can cure."""
    retries_errors: bool = False
    """Whether errors of the script are restarted, too (`--restart-on-error`)."""
    has_standby: bool = True
    """Whether workers are forked from a process of their node that has torch imported."""
    capacity_s: float = 600.0
    """Seconds that a job below its minimum of nodes waits for more."""
    hang_s: float | None = None
    """Seconds after which a hanging rank is ended; None: as in cluster.toml."""
    shutdown_s: float = SHUTDOWN_S
    """Seconds between a signal and SIGKILL for ranks that handle it, or save."""
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: computed from their cost and the failure rate."""
    compress: str | None = None
    """Format of gradients on the wire; None: as they are."""
    bucket_mb: str | None = None
    """MiB of a bucket of gradients, or auto; None: torch's."""
    metrics_dir: Path | None = None
    """Where the leader writes metrics; None: as in cluster.toml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan(NodePlan):
    """What this agent will do, and what that was decided from."""

    request: Request
    world: World
    cluster: Cluster
    settings: tuple[Setting, ...]

    @property
    def metrics_dir(self) -> Path | None:
        """Where the leader writes metrics of this job; None: nowhere."""
        named = self.request.metrics_dir or self.cluster.report.metrics_dir
        return Path(named) if named else None


def plan_job(
    request: Request, world: World, cluster: Cluster, facts: NodeFacts, *, job: str, origin: Mapping[str, str]
) -> JobPlan:
    """Decide everything that one node can decide alone.

    Args:
        job: name for a job that has none (no scheduler, no --rdzv-id).
        origin: where the keys of the cluster come from, `network.port` -> `cluster.toml:5`.
    Raises:
        UsageError: flags contradict each other.
        IdentityError: flags contradict the scheduler.
        ConfigError: cluster.toml does not fit this machine, and the job runs on it alone.
        SetupError: what is asked for cannot work on this machine, and the job runs on it alone.
    """
    # What is decided here stands for what the environment said of it: there, a process is an agent, and here a rank.
    decided = ("num_nodes", "local_world_size", "world_size")
    settings = [setting for setting in world.settings if setting.name not in decided]
    min_nodes, num_nodes, source = _num_nodes(request, world)
    settings.append(Setting("num_nodes", str(num_nodes), "one agent on each", source))
    node_index = _node_index(request, world, num_nodes)
    problem: AllranksError | None = None
    num_workers, path = 1, None
    try:
        num_workers, reason, source = _num_workers(request, world, facts)
        settings.append(Setting("num_workers", str(num_workers), reason, source))
        size = f"{count_of(num_nodes, 'node')} with {count_of(num_workers, 'rank')}{' each' if num_nodes > 1 else ''}"
        settings.append(Setting("world_size", str(num_nodes * num_workers), size, "num_nodes, num_workers"))
        path = _data_path(request, cluster, facts, num_nodes, origin)
    except (ConfigError, SetupError) as exc:
        if num_nodes == 1:
            raise
        problem = exc  # the other nodes must hear it, or they would wait for this one
    if path is not None:
        settings.append(Setting("data_interface", path.interface, path.reason, path.source))

    wanted_backend = request.backend or cluster.train.backend
    if num_nodes == 1:  # with several, the leader sees them all
        choose_backend(wanted_backend, [(facts.host, num_workers, facts.num_gpus)])

    master = world.master if world.is_placed else None
    point = (request.endpoint.host, request.endpoint.port) if request.endpoint else master
    port, source = _port(request, world, cluster, origin)
    settings.append(Setting("port", str(port), "preferred; the leader takes the next free one if it is in use", source))
    return JobPlan(
        request=request,
        world=world,
        cluster=cluster,
        settings=tuple(settings),
        job=world.name_job(request.rdzv_id, point=point if num_nodes > 1 else None, otherwise=job),
        launcher=world.launcher,
        attempt=world.attempt if world.launcher is Launcher.SLURM else None,
        facts=facts,
        node_index=node_index,
        num_nodes=num_nodes,
        min_nodes=min_nodes,
        node_names=world.hosts if len(world.hosts) == num_nodes else (),
        num_workers=num_workers,
        port=port,
        endpoint=request.endpoint,
        guesses=_guesses(world, cluster, port),
        rdzv_id=request.rdzv_id,
        data_path=path,
        second_network=cluster.network.second,
        wanted_backend=wanted_backend,
        guard=msgspec.structs.replace(cluster.guard, hang_s=request.hang_s or cluster.guard.hang_s),
        ignored=frozenset(request.ignored),
        problem=problem,
    )


def refuse_world_of_one(plan: JobPlan) -> None:
    """Refuse to run one agent of a job that has more nodes, where nobody asked for just this machine.

    Raises:
        IdentityError: the number of nodes, and how to start on all of them.
    """
    alone = plan.num_nodes == 1 and not plan.request.standalone and plan.request.max_nodes is None
    if alone and plan.world.launcher is Launcher.NONE and plan.world.num_job_nodes > 1:
        raise IdentityError(f"{plan.world.notes[0]}; to run on this machine only: --standalone")


def no_script(name: str) -> UsageError:
    """Return what is wrong where the script does not exist; it may be the launcher that allranks takes the place of."""
    if name in REPLACED:
        return UsageError(f"{name}: allranks starts the ranks itself, in place of it: allranks run train.py")
    return UsageError(
        f"{name}: no such script; expected a Python file (for a module add -m, for another program --no-python)"
    )


def choose_backend(wanted: str, nodes: Sequence[tuple[str, int, int]]) -> tuple[str, str]:
    """Choose nccl where every rank of every node has a GPU of its own, else gloo; return it with the reason.

    Args:
        wanted: auto, nccl or gloo.
        nodes: per node its name, number of workers, number of GPUs.
    Raises:
        SetupError: nccl is asked for and cannot work; the text names the node and the numbers.
    """
    if wanted == Backend.GLOO:
        return "gloo", "given by --backend or cluster.toml"
    for name, num_workers, num_gpus in nodes:
        if num_gpus < num_workers:
            what = f"{name} has {count_of(num_gpus, 'GPU')} for {count_of(num_workers, 'rank')}"
            if wanted == Backend.AUTO:
                return "gloo", what
            advice = f"--nproc-per-node {num_gpus} or --backend gloo" if num_gpus else "--backend gloo"
            raise SetupError(f"backend nccl needs a GPU for each rank, but {what}; use {advice}")
    return "nccl", "every rank has a GPU of its own"


def _num_nodes(request: Request, world: World) -> tuple[int, int, str]:
    if request.standalone:
        return 1, 1, "--standalone"
    asked = request.max_nodes
    at_least = request.min_nodes or asked
    if not world.is_placed:
        return at_least or 1, asked or 1, "--nnodes" if asked else "default"
    if asked and at_least and not at_least <= world.num_nodes <= asked:
        raise IdentityError(
            f"--nnodes {asked}, but {world.launcher} started this on {world.num_nodes} nodes; remove the flag, "
            "or request that number from the scheduler"
        )
    return at_least or world.num_nodes, world.num_nodes, str(world.launcher)


def _node_index(request: Request, world: World, num_nodes: int) -> int | None:
    given = request.node_rank
    if num_nodes == 1:
        if given and world.launcher is Launcher.NONE:
            raise UsageError(f"--node-rank {given}, but the job has one node; add --nnodes with the number of nodes")
        return 0
    if not world.is_placed:
        if given is not None and given >= num_nodes:
            raise UsageError(f"--node-rank {given}: expected 0 to {num_nodes - 1} for --nnodes {num_nodes}")
        if request.endpoint is None:
            raise UsageError(
                f"--nnodes {num_nodes}: the address of the first node is missing; add the same "
                "--rdzv-endpoint HOST:PORT on all nodes"
            )
        return given
    # One agent a node: its rank among the agents decides, also under an arbitrary distribution.
    is_slurm = world.launcher is Launcher.SLURM
    if given not in (None, world.rank):
        seen, cure = f"{world.source_of('rank')}={world.rank}", ", or unset the variable"
        if is_slurm:
            seen = f"this is task {world.rank} of the step"
            cure = " ($SLURM_PROCID in a batch script is 0 on every node: the shell expands it before srun starts)"
        raise IdentityError(f"--node-rank {given}, but {seen}; remove the flag{cure}")
    if not is_slurm and world.master is None and request.endpoint is None:
        row = row_of(world.launcher)
        lines = f"; {row.where}: {row.lines['leader']}" if row and "leader" in row.lines else ""
        name = "MPI" if world.launcher is Launcher.MPI else row.title if row else world.launcher
        raise UsageError(
            f"{name} does not tell the address of the first node; give it with --rdzv-endpoint HOST:PORT or "
            f"MASTER_ADDR{lines}"
        )
    return world.rank


def _num_workers(request: Request, world: World, facts: NodeFacts) -> tuple[int, str, str]:
    flag, asked, given = "--nproc-per-node", request.num_workers, "given on the command line"
    if asked is None and world.processes is not None and not request.standalone:
        flag, asked, given = world.source_of("processes"), world.processes, f"{world.launcher} asks for it"
    match asked:
        case None if world.is_placed and facts.num_gpus:
            return facts.num_gpus, "one rank per GPU", "driver"
        case None:
            return 1, "one rank by default", "default"
        case "gpu" if not facts.num_gpus:
            raise SetupError(f"{flag} gpu: the driver shows no GPU on {facts.host}; give a number")
        case "gpu" | "auto" if facts.num_gpus:
            return facts.num_gpus, "one rank per GPU", flag
        case "auto" | "cpu":
            return facts.num_cpus, "one rank per core", flag
        case text if re.fullmatch(r"0*[1-9][0-9]{0,4}", text) and int(text) <= MAX_WORKERS:
            return int(text), given, flag
        case text:
            raise UsageError(f"{flag} {text!r}: expected a number from 1 to {MAX_WORKERS}, auto, gpu or cpu")


def _data_path(
    request: Request, cluster: Cluster, facts: NodeFacts, num_nodes: int, origin: Mapping[str, str]
) -> DataPath | None:
    """Choose the interface that carries gradients; None: the path on which the agents find each other decides."""
    # cluster.toml must fit this machine also where it is not needed, on one machine alone.
    of_cluster = None if request.standalone else data_path_of_cluster(cluster, facts, origin)
    if num_nodes == 1:
        return data_path_alone(facts)
    if not (address := request.local_address):
        return of_cluster
    try:
        nic = find_interface_of(address, facts.interfaces)
    except ValueError:
        raise UsageError(f"--local-addr {address}: expected an IP address of this machine") from None
    if nic is None:
        raise UsageError(f"--local-addr {address}: {facts.host} has {list_nics(facts.interfaces)}")
    return DataPath(nic.name, address, "it has the address that --local-addr gives", "--local-addr")


def _port(request: Request, world: World, cluster: Cluster, origin: Mapping[str, str]) -> tuple[int, str]:
    if request.port is not None:
        return request.port, "flag"
    if world.level is LaunchLevel.NODE and world.master and world.master[1]:
        return world.master[1], world.source_of("master")
    return cluster.network.port, origin.get("network.port", "default")


def _guesses(world: World, cluster: Cluster, port: int) -> tuple[Hint, ...]:
    hints = []
    if world.is_placed and world.launcher is not Launcher.SLURM and world.master and world.num_nodes > 1:
        hints.append(Hint(world.master[0], world.master[1] or port, world.source_of("master")))
    if world.launcher is Launcher.SLURM and world.hosts:
        # Names usually lead to the management network, which stands when the data network does not.
        hints.append(Hint(world.hosts[0], port, "first node of the step"))
        first = cluster.find_node(world.hosts[0])
        if first is not None and first.address:
            hints.append(Hint(first.address, port, "cluster.toml"))
    return tuple(hints)
