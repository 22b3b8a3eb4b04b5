"""Who this process is: rank, world and node, read from an environment mapping and nothing else.

    >>> world_from_env({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).node_index
    1

Launchers nest, outermost first: the SLURM *step* (never the job, whose numbers differ under `srun -N1`, `-w` and `-r`),
then MPI, then torchrun. An inner one takes over only where the outer one has a single task a node; the same number said
twice must be the same; all else is refused. Without any of them it is one local process. The batch script and the
interactive shell of a job carry SLURM_PROCID=0 too, but are no tasks. A variable set to nothing counts as unset.

Limits: names are not resolved, so MASTER_ADDR is refused only where the text alone proves it wrong. MPI does not say
which node a rank is on: it is computed there, and only equal nodes filled one after another are accepted.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from allranks.model.contradiction import NestedStartError, finding_of_refusals
from allranks.model.errors import IdentityError
from allranks.model.hostlist import expand_hosts
from allranks.model.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping


class Launcher(StrEnum):
    """What started this process, and so whose variables were believed."""

    SLURM = "slurm"
    TORCHRUN = "torchrun"
    MPI = "mpi"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Place of one process among all that were started with it: agents under `allranks run`, else workers."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this node; other nodes may have another number."""
    node_index: int
    """SLURM_NODEID, GROUP_RANK, or computed for MPI. Torchrun's order of nodes is not SLURM's."""
    num_nodes: int
    num_job_nodes: int
    """Nodes that the scheduler gave to the whole job; a step may use fewer, a batch script runs on one."""
    job_id: str | None
    """SLURM's, `<array job>_<task>` in an array, the leader's in a heterogeneous job; else torchrun's run id."""
    step_id: str | None
    attempt: int
    """How often the job was requeued, or torchrun's workers restarted; 0 the first time."""
    node_name: str | None  # SLURM's, need not be the hostname
    hosts: tuple[str, ...]
    """Nodes in the step's order; () where the launcher does not say."""
    tasks_per_node: tuple[int, ...]
    """Ranks of each node, by node_index; () where the launcher does not say."""
    master: tuple[str, int | None] | None
    """What MASTER_ADDR and MASTER_PORT say: a hint, since the leader announces itself."""
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    """Warnings, a line each."""


def world_from_env(env: Mapping[str, str]) -> World:
    """Derives the identity of this process, or refuses an environment that contradicts itself.

    Raises:
        IdentityError: two variables disagree, one of a set is missing, or one is not a number in range; with a finding.
        HostlistError: SLURM_STEP_NODELIST cannot be expanded.
    """
    with finding_of_refusals(env.get("SLURMD_NODENAME")):
        return _read_world(_Env((name, value) for name, value in env.items() if value))


def _read_world(env: _Env) -> World:
    step = _step_claim(env)
    outer = _mpi_claim(env, step)
    claim = _torchrun_claim(env, outer) or outer or _LOCAL
    notes = [*claim.notes, *_job_notes(env, claim, step)]
    master = _master(env, claim, notes)
    job_id, job_source = _job_id(env)
    # Not SLURM's own number, where a requeued job counts its steps on, and where an agent takes a lost one's place.
    counts_as = env.count("ALLRANKS_STEP", most=_MOST_ID) or env.count("SLURM_STEP_ID", most=_MOST_ID)
    step_id = None if step is None or counts_as is None else str(counts_as.value)
    node_name, counts = env.get("SLURMD_NODENAME"), claim.numbers["local_world_size"].source
    restarts = env.count("SLURM_RESTART_COUNT") or env.count("TORCHELASTIC_RESTART_COUNT")
    numbers = {**claim.numbers, "attempt": restarts or _Count(0, "default", "not requeued, not restarted")}
    why = f"{claim.launcher} started this process"
    texts = (
        ("job_id", job_id, "the same on all nodes", job_source),
        ("step_id", step_id, "the srun that started this process", counts_as.source if counts_as else ""),
        ("node_name", node_name, "SLURM's name of this node", "SLURMD_NODENAME"),
        ("hosts", ",".join(claim.hosts), "the step's nodes, not the job's", "SLURM_STEP_NODELIST"),
        ("tasks_per_node", env.get(counts), why, counts),
        ("master", master and ":".join(map(str, filter(None, master))), "a hint, no more", "MASTER_ADDR"),
    )
    return World(
        launcher=claim.launcher,
        **{name: count.value for name, count in numbers.items()},
        num_job_nodes=(env.count("SLURM_JOB_NUM_NODES") or claim.numbers["num_nodes"]).value,
        job_id=job_id,
        step_id=step_id,
        node_name=node_name,
        hosts=claim.hosts,
        tasks_per_node=claim.tasks_per_node,
        master=master,
        settings=tuple(Setting(name, str(n.value), n.reason or why, n.source) for name, n in numbers.items())
        + tuple(Setting(name, _printable(text), why, source) for name, text, why, source in texts if text),
        notes=tuple(notes),
    )


def check_one_agent_per_node(world: World) -> None:
    """Refuses with IdentityError what would be a node's second agent, or a worker's agent; `allranks run` calls it."""
    with finding_of_refusals(world.node_name):
        _check_one_agent_per_node(world)


def _check_one_agent_per_node(world: World) -> None:
    if world.launcher is Launcher.TORCHRUN:
        raise IdentityError(
            f"allranks run is an agent, but RANK={world.rank} and WORLD_SIZE={world.world_size} say it is a worker of "
            "torchrun; start it in torchrun's place with the same flags, or, if they were left over: unset "
            + " ".join((*_TORCHRUN.values(), "TORCHELASTIC_RUN_ID"))
        )
    said = next((f"{s.source}={s.value}" for s in world.settings if s.name == "tasks_per_node"), "tasks_per_node")
    if world.launcher is Launcher.MPI and world.local_world_size > 1:
        raise NestedStartError(
            f"this node has {world.local_world_size} agents ({said}), allranks needs one a node: "
            "mpirun --map-by ppr:1:node allranks run ... (Open MPI), mpiexec -ppn 1 allranks run ... (MPICH, Intel MPI)"
        )
    if world.launcher is Launcher.SLURM:
        # A host stands twice in the list when two parts of one heterogeneous step share it.
        tasks = zip(world.hosts or map(str, range(world.num_nodes)), world.tasks_per_node, strict=True)
        agents = Counter(host for host, times in tasks for _ in range(times))
        name, most = agents.most_common(1)[0]
        if most > 1:
            what_to_do = f"allranks needs one a node: {_srun_line(len(agents))}"
            raise NestedStartError(f"node {name} has {most} agents ({said}), {what_to_do}")


_MOST_RANKS = 1 << 20
"""More than any world so far; keeps a broken number from filling the memory."""
_MOST_ID = (1 << 32) - 1
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Ids from here on are no tasks: 0xfffffffa interactive, 0xfffffffb batch, 0xfffffffc extern (slurm/slurm.h)."""


@dataclass(frozen=True, slots=True)
class _Count:
    """A number and the variable that said it."""

    value: int
    source: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.source}={self.value}"


class _Env(dict[str, str]):
    """The environment without the variables that are set to nothing."""

    def count(self, name: str, *, least: int = 0, most: int = _MOST_RANKS) -> _Count | None:
        text = self.get(name)
        if text is None:
            return None
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
            raise IdentityError(f"{self.said(name)}: expected an integer from {least} to {most}; correct or unset it")
        return _Count(int(text), name)

    def need(
        self, names: Mapping[str, str], field: str, *, below: _Count | None = None, most: int = _MOST_RANKS
    ) -> _Count:
        """One of a set of variables; below: the count that an index must be smaller than."""
        count = self.count(names[field], most=most)
        if count is None:
            beside = next(name for name in (*names.values(), "TORCHELASTIC_RUN_ID") if name in self)
            raise IdentityError(f"{names[field]} is missing beside {self.said(beside)}; set both, or unset {beside}")
        if below and count.value >= below.value:
            raise _clash(count, f"{below}, which is to be larger", _MIXED)
        return count

    def said(self, name: str) -> str:
        return f"{name}={_printable(self.get(name, ''))}"


def _clash(one: object, other: object, what_to_do: str) -> IdentityError:
    return IdentityError(f"{one} but {other}; {what_to_do}")


@dataclass(frozen=True, slots=True)
class _Claim:
    """What one launcher says of this process; `numbers` has a count for each of _FIELDS."""

    launcher: Launcher
    numbers: dict[str, _Count]
    tasks_per_node: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node_index", "num_nodes")
_LOCAL = _Claim(
    Launcher.NONE,
    {field: _Count(value, "default", "one local process") for field, value in zip(_FIELDS, (0, 1) * 3, strict=True)},
    tasks_per_node=(1,),
)


def _names(text: str) -> dict[str, str]:
    return dict(zip(_FIELDS, text.split(), strict=False))


_STEP = _names(
    "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_NODEID SLURM_STEP_NUM_NODES"
)
_TORCHRUN = _names("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE")
# Order matters: MVAPICH2 started by hydra has hydra's variables too, Open MPI under PMI has PMI's.
_MPI = (
    _names("OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"),
    _names("MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE"),
    _names("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),  # MPICH, Intel MPI, MVAPICH 3
)
_MIXED = "variables of two launches are mixed: unset those left over by a parent job or a shell profile, and start anew"
_MIXED_STEPS = "variables of two steps are mixed: start this process with srun, from a shell without SLURM_STEP_*"


def _step_claim(env: _Env) -> _Claim | None:
    step_id = env.count("SLURM_STEP_ID", most=_MOST_ID)
    if step_id is None or step_id.value >= _FIRST_SPECIAL_STEP or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    size, nodes = env.need(_STEP, "world_size"), env.need(_STEP, "num_nodes")
    rank, index = env.need(_STEP, "rank", below=size), env.need(_STEP, "node_index", below=nodes)
    counts = _tasks_per_node(env, size, nodes)
    here = _Count(counts[index.value], "SLURM_STEP_TASKS_PER_NODE", f"its entry for {index}")
    local_rank = env.need(_STEP, "local_rank", below=here)
    said, notes = env.said("SLURM_STEP_NODELIST"), []
    hosts = tuple(expand_hosts(env["SLURM_STEP_NODELIST"])) if "SLURM_STEP_NODELIST" in env else ()
    if hosts and len(hosts) != nodes.value:
        raise _clash(f"{said} has {len(hosts)} nodes", nodes, _MIXED_STEPS)
    # slurmd and slurmstepd set SLURMD_NODENAME and SLURM_GTIDS for every process, also in a batch script that sbatch
    # gave the step variables of the job it was called in.
    node_name = env.get("SLURMD_NODENAME")
    if hosts and node_name and node_name not in hosts:
        raise _clash(env.said("SLURMD_NODENAME"), f"{said} does not have it", _MIXED_STEPS)
    if hosts and node_name and node_name != hosts[index.value]:
        notes.append(f"{index} but {said} has {env.said('SLURMD_NODENAME')} elsewhere: it is in another order")
    in_block = [str(rank.value - local_rank.value + i) for i in range(here.value)]
    ranks = env.get("SLURM_GTIDS", ",".join(in_block)).split(",")
    if len(ranks) != here.value or ranks[local_rank.value] != str(rank.value):
        raise _clash(env.said("SLURM_GTIDS"), f"{rank}, {local_rank}, {here} here", _MIXED_STEPS)
    if ranks != in_block:
        how = f"{env.said('SLURM_GTIDS')}, {env.said('SLURM_DISTRIBUTION')}"
        notes.append(f"ranks of this node are not contiguous ({how}): rank // local_world_size is not its node")
    numbers = dict(zip(_FIELDS, (rank, size, local_rank, here, index, nodes), strict=True))
    return _Claim(Launcher.SLURM, numbers, counts, hosts, tuple(notes))


def _tasks_per_node(env: _Env, size: _Count, num_nodes: _Count) -> tuple[int, ...]:
    """Reads `8(x3),4` as (8, 8, 8, 4)."""
    words = env.get(_STEP["local_world_size"], "").split(",")
    runs = [re.fullmatch(r"([1-9][0-9]{0,6})(?:\(x([1-9][0-9]{0,6})\))?", word) for word in words]
    counts = [(int(run[1]), int(run[2] or 1)) for run in runs if run]
    nodes, tasks = sum(times for _, times in counts), sum(count * times for count, times in counts)
    if len(counts) != len(words) or (tasks, nodes) != (size.value, num_nodes.value):
        said = env.said(_STEP["local_world_size"])
        raise _clash(f"{said} reads as {tasks} tasks on {nodes} nodes", f"{size}, {num_nodes}", _MIXED_STEPS)
    return tuple(count for count, times in counts for _ in range(times))


def _mpi_claim(env: _Env, step: _Claim | None) -> _Claim | None:
    """MPI's claim, or the step's where MPI says the same or nothing."""
    tables = [names for names in _MPI if names["rank"] in env or names["world_size"] in env]
    if not tables:
        return step
    rank, size = env.need(tables[0], "rank"), env.need(tables[0], "world_size")
    for names in tables[1:]:
        other = env.need(names, "rank"), env.need(names, "world_size")
        if (rank.value, size.value) != (other[0].value, other[1].value):
            raise _clash(f"{rank}, {size}", f"{other[0]}, {other[1]}", _MIXED)
    if step is None:
        return _claim(env, Launcher.MPI, tables[0])
    ours = step.numbers["rank"], step.numbers["world_size"]
    if (rank.value, size.value) == (ours[0].value, ours[1].value):
        return step
    # mpirun starts its daemons with srun, one a node, and the ranks inherit a daemon's step variables.
    if max(step.tasks_per_node) == 1 and size.value > ours[1].value:
        return _claim(env, Launcher.MPI, tables[0])
    cure = f"unset {rank.source} {size.source}, or start with: {_srun_line(step.numbers['num_nodes'].value)}"
    raise _clash(f"{rank}, {size}", f"{ours[0]}, {ours[1]}", cure)


def _torchrun_claim(env: _Env, outer: _Claim | None) -> _Claim | None:
    """Torchrun's claim, or None where there is none or the outer launcher already says all of it."""
    is_worker = "TORCHELASTIC_RUN_ID" in env
    if not is_worker and not any(_TORCHRUN[field] in env for field in ("rank", "world_size", "local_rank")):
        return None
    if outer is None:
        return _claim(env, Launcher.TORCHRUN, _TORCHRUN)
    nodes, here = outer.numbers["num_nodes"], outer.numbers["local_world_size"]
    if not is_worker:
        for field, name in _TORCHRUN.items():
            theirs, ours = env.count(name), outer.numbers[field]
            if theirs and theirs.value != ours.value:
                cure = f"unset {name}, which a parent job, the job script or a shell profile has set"
                raise _clash(theirs, f"{ours}, and {outer.launcher} started this process", cure)
        return None
    most = max(outer.tasks_per_node, default=here.value)
    if most > 1:
        raise NestedStartError(
            f"torchrun ({env.said('TORCHELASTIC_RUN_ID')}, {env.said('LOCAL_WORLD_SIZE')}) runs inside each of {most} "
            f"tasks a node ({env.said(here.source)}); start one a node: {_srun_line(nodes.value, 'torchrun ...')}, "
            "or one task a GPU without torchrun"
        )
    claim = _claim(env, Launcher.TORCHRUN, _TORCHRUN)
    if claim.numbers["num_nodes"].value == 1 < nodes.value:
        cure = f"every node would train alone: {_srun_line(nodes.value)}, or torchrun --nnodes={nodes.value}"
        raise _clash(claim.numbers["num_nodes"], nodes, cure)
    return claim


def _claim(env: _Env, launcher: Launcher, names: Mapping[str, str]) -> _Claim:
    """Reads a table of variable names; what it lacks of the nodes is computed."""
    size = env.need(names, "world_size")
    rank = env.need(names, "rank", below=size)
    is_alone = size.value == 1 and names["local_rank"] not in env and names["local_world_size"] not in env
    here = _Count(1, size.source, "a world of one") if is_alone else env.need(names, "local_world_size")
    local_rank = _Count(0, size.source, "a world of one") if is_alone else env.need(names, "local_rank", below=here)
    if names.get("node_index") in env and names.get("num_nodes") in env:
        nodes = env.need(names, "num_nodes")
        index = env.need(names, "node_index", below=nodes)
    else:  # In another order than block some rank does not fit and is refused here, so none trains with a wrong node.
        if size.value % here.value or rank.value % here.value != local_rank.value:
            cure = "start with srun or torchrun, which say the node, or with as many ranks on each node, in block order"
            raise _clash(f"{rank}, {size}, {local_rank}, {here}", "no equal nodes in block order give these", cure)
        nodes = _Count(size.value // here.value, size.source, f"{size} by {here}")
        index = _Count(rank.value // here.value, rank.source, "ranks fill node after node")
    # Every other node has at least one rank.
    if here.value + nodes.value - 1 > size.value or (nodes.value == 1 and here.value != size.value):
        raise _clash(size, f"{here}, {nodes}", _MIXED)
    numbers = dict(zip(_FIELDS, (rank, size, local_rank, here, index, nodes), strict=True))
    return _Claim(launcher, numbers, (here.value,) * nodes.value if here.value * nodes.value == size.value else ())


def _job_notes(env: _Env, claim: _Claim, step: _Claim | None) -> list[str]:
    """Holds the claim against the job's size: a smaller step is allowed, a world of one by mistake is not."""
    notes = []
    job, nodes, size = env.count("SLURM_JOB_NUM_NODES"), claim.numbers["num_nodes"], claim.numbers["world_size"]
    if job and job.value > nodes.value:
        start = _srun_line(job.value)
        if claim.launcher is Launcher.NONE:
            notes.append(f"this is the job's script or shell, not a task: one node of {job}; on all nodes: {start}")
        elif size.value == 1 and not step:
            cure = f"unset {claim.numbers['rank'].source} {size.source} and start on all nodes: {start}"
            raise _clash(size, f"{job}: a world of one on {job.value} nodes", cure)
        else:
            notes.append(f"{nodes} but {job}: other nodes of the job are not used; on all nodes: {start}")
    if "SLURM_HET_SIZE" in env:
        notes.append(f"heterogeneous job, {env.said('SLURM_HET_SIZE')}: srun starts only its first part by default")
    return notes


# Loopback and any-address: never the way to another node.
_OWN_MACHINE = re.compile(r"localhost[46]?(\..*)?|127\..*|\[?::1?\]?|0\.0\.0\.0", re.IGNORECASE)


def _master(env: _Env, claim: _Claim, notes: list[str]) -> tuple[str, int | None] | None:
    """The leader hint; what is odd about it goes to `notes`."""
    host, port = env.get("MASTER_ADDR"), env.count("MASTER_PORT", least=1, most=65535)
    said, nodes = env.said("MASTER_ADDR"), claim.numbers["num_nodes"]
    if host is None or not re.fullmatch(r"[!-~]+", host):
        if host or (port and claim.launcher is Launcher.SLURM):
            notes.append(f"{said if host else port} is not one address and not used; the leader announces itself")
        return None
    if nodes.value > 1 and _OWN_MACHINE.fullmatch(host):
        if claim.launcher is not Launcher.TORCHRUN:
            cure = "unset MASTER_ADDR MASTER_PORT, the leader announces itself"
            raise _clash(f"{said} is every node's own", nodes, cure)
        notes.append(f"{said} but {nodes}: right only if they are one machine")
    elif nodes.value > 1 and claim.launcher is Launcher.SLURM:
        odd = "" if {host, host.split(".")[0]} & set(claim.hosts) else "no name in SLURM_STEP_NODELIST and "
        notes.append(f"{said} is {odd}only a hint; the leader announces itself")
    return host, port.value if port else None


def _job_id(env: _Env) -> tuple[str | None, str]:
    array = {"job": "SLURM_ARRAY_JOB_ID", "task": "SLURM_ARRAY_TASK_ID"}
    if any(name in env for name in array.values()):
        return "_".join(str(env.need(array, part, most=_MOST_ID).value) for part in array), array["job"]
    # Order matters: the leader's id first.
    name = next((n for n in ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID") if n in env), None)
    if name:
        return str(env.need({"job": name}, "job", most=_MOST_ID).value), name
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")  # "none" is torchrun's default
    return (None, "default") if run_id == "none" else (run_id, "TORCHELASTIC_RUN_ID")


def _printable(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")[:200]


def _srun_line(num_nodes: int, command: str = "allranks run ...") -> str:
    # All three: srun also takes SLURM_NTASKS of the script for its --ntasks, which overrules --ntasks-per-node.
    return f"srun --ntasks-per-node=1 --nodes={num_nodes} --ntasks={num_nodes} {command}"
