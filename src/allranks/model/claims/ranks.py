"""What those that start every rank say about this process (SLURM's step, MPI, torchrun): consistent claims, or errors.

The variables are rows of the table (`launcher_table.py`); numbers of nodes that a row lacks are computed. An inner
launcher's claim is compared with the outer one's; `model/identity.py` merges them into one world.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.model.claims.env import MIXED, ClaimedCount, Env, Text, clash, srun_line
from allranks.model.claims.launcher_table import LAUNCHERS, RANK_FIELDS, WORKER, LauncherRow
from allranks.model.contradiction import NestedStartError
from allranks.model.hostlist import expand_hosts
from allranks.model.world import Launcher, LaunchLevel

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_ID = (1 << 32) - 1
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Ids from here on are no tasks: 0xfffffffa interactive, 0xfffffffb batch, 0xfffffffc extern (slurm/slurm.h)."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one launcher says about this process."""

    launcher: Launcher
    numbers: dict[str, ClaimedCount]
    """Of each of RANK_FIELDS. On level NODE a node counts as a rank."""
    tasks_per_node: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    level: LaunchLevel = LaunchLevel.RANK
    leader: tuple[Text, ClaimedCount | None] | None = None
    """Address and port of node 0."""
    processes: Text | None = None
    """On each node, as --nproc-per-node has it."""
    job_id: Text | None = None


LOCAL = Claim(
    Launcher.NONE,
    {
        field: ClaimedCount(value, "default", "one local process")
        for field, value in zip(RANK_FIELDS, (0, 1) * 3, strict=True)
    },
    tasks_per_node=(1,),
)
_ROWS = [row for row in LAUNCHERS if row.level is LaunchLevel.RANK and row.launcher is not Launcher.SLURM]
_PODS = [row for row in LAUNCHERS if "RANK" in row.marks]
_STEP = next(row.names for row in LAUNCHERS if row.launcher is Launcher.SLURM)
TORCHRUN = dict(
    zip(
        RANK_FIELDS,
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        strict=True,
    )
)
_MIXED_STEPS = "variables of two steps are mixed: start this process with srun, from a shell without SLURM_STEP_*"


def claim_of_step(env: Env) -> Claim | None:
    """SLURM's claim, None outside of a step's tasks.

    Raises:
        IdentityError: it contradicts itself.
    """
    step_id = step_number(env)
    if step_id is None or step_id.value >= _FIRST_SPECIAL_STEP or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    size, nodes = env.need(_STEP, "world_size"), env.need(_STEP, "num_nodes")
    rank, index = env.need(_STEP, "rank", below=size), env.need(_STEP, "node_index", below=nodes)
    counts = _tasks_per_node(env, size, nodes)
    here = ClaimedCount(counts[index.value], "SLURM_STEP_TASKS_PER_NODE", f"its entry for {index}")
    local_rank = env.need(_STEP, "local_rank", below=here)
    said, notes = env.said("SLURM_STEP_NODELIST"), []
    hosts = tuple(expand_hosts(env["SLURM_STEP_NODELIST"])) if "SLURM_STEP_NODELIST" in env else ()
    if hosts and len(hosts) != nodes.value:
        raise clash(f"{said} has {len(hosts)} nodes", nodes, _MIXED_STEPS)
    # slurmd and slurmstepd set SLURMD_NODENAME and SLURM_GTIDS for every process, also in a batch script that sbatch
    # gave the step variables of the job it was called in.
    node_name = env.get("SLURMD_NODENAME")
    if hosts and node_name and node_name not in hosts:
        raise clash(env.said("SLURMD_NODENAME"), f"{said} does not contain it", _MIXED_STEPS)
    if hosts and node_name and node_name != hosts[index.value]:
        notes.append(f"{index} but {said} has {env.said('SLURMD_NODENAME')} at another place: their orders differ")
    in_block = [str(rank.value - local_rank.value + i) for i in range(here.value)]
    ranks = env.get("SLURM_GTIDS", ",".join(in_block)).split(",")
    if len(ranks) != here.value or ranks[local_rank.value] != str(rank.value):
        raise clash(env.said("SLURM_GTIDS"), f"{rank}, {local_rank}, {here} here", _MIXED_STEPS)
    if ranks != in_block:
        how = f"{env.said('SLURM_GTIDS')}, {env.said('SLURM_DISTRIBUTION')}"
        notes.append(f"ranks of this node are not contiguous ({how}): rank // local_world_size is not its node")
    numbers = dict(zip(RANK_FIELDS, (rank, size, local_rank, here, index, nodes), strict=True))
    return Claim(Launcher.SLURM, numbers, counts, hosts, tuple(notes))


def _tasks_per_node(env: Env, size: ClaimedCount, num_nodes: ClaimedCount) -> tuple[int, ...]:
    """Reads `8(x3),4` as (8, 8, 8, 4)."""
    words = env.get(_STEP["local_world_size"], "").split(",")
    runs = [re.fullmatch(r"([1-9][0-9]{0,6})(?:\(x([1-9][0-9]{0,6})\))?", word) for word in words]
    counts = [(int(run[1]), int(run[2] or 1)) for run in runs if run]
    nodes, tasks = sum(times for _, times in counts), sum(count * times for count, times in counts)
    if len(counts) != len(words) or (tasks, nodes) != (size.value, num_nodes.value):
        said = env.said(_STEP["local_world_size"])
        raise clash(f"{said} reads as {tasks} tasks on {nodes} nodes", f"{size}, {num_nodes}", _MIXED_STEPS)
    return tuple(count for count, times in counts for _ in range(times))


def step_number(env: Env) -> ClaimedCount | None:
    """Return SLURM_STEP_ID; None outside of a step. From 26.05 a batch script has -5 there, for 0xfffffffb."""
    text = env.get("SLURM_STEP_ID", "")
    if re.fullmatch("-[1-9]", text):
        return ClaimedCount(int(text) + MOST_ID + 1, "SLURM_STEP_ID")
    return env.count("SLURM_STEP_ID", most=MOST_ID)


def is_of(row: LauncherRow, env: Env) -> bool:
    """Whether this environment has the marks of a launcher."""
    return all(env.first(mark) for mark in row.marks) and not any(name in env for name in row.unless)


def claim_of_ranks(env: Env, step: Claim | None) -> Claim | None:
    """Return the claim of the innermost launcher of ranks that is not torchrun; the step's if the others say the same.

    Raises:
        IdentityError: one contradicts itself or an outer one.
    """
    claim, outer_row, of_daemons = step, None, set()
    for row in _ROWS:
        if not is_of(row, env):
            continue
        names = env.resolve(row.names)
        rank, size = env.need(names, "rank"), env.need(names, "world_size")
        if claim is None:
            claim, outer_row = _claim(env, row.launcher, names), row
            continue
        theirs = claim.numbers["rank"], claim.numbers["world_size"]
        numbers = rank.value, size.value
        if numbers == (theirs[0].value, theirs[1].value) or numbers in of_daemons:
            continue
        # mpirun starts its daemons with srun (flux run, mpiexec of PALS), one a node, and the ranks inherit a daemon's
        # variables.
        is_of_daemons = max(claim.tasks_per_node, default=2) == 1 and size.value > theirs[1].value
        if is_of_daemons and (outer_row is None or outer_row.launcher is not Launcher.MPI):
            of_daemons.add((theirs[0].value, theirs[1].value))
            claim, outer_row = _claim(env, row.launcher, names), row
        elif outer_row is None:
            cure = f"unset {rank.source} {size.source}, or start with: {srun_line(claim.numbers['num_nodes'].value)}"
            raise clash(f"{rank}, {size}", f"{theirs[0]}, {theirs[1]}", cure)
        else:
            raise clash(f"{theirs[0]}, {theirs[1]}", f"{rank}, {size}", MIXED)
    return claim


def claim_of_torchrun(env: Env, outer: Claim | None) -> Claim | None:
    """Return torchrun's claim; None if there is none, or the outer launcher says the same.

    Raises:
        IdentityError: it contradicts itself or the outer launcher, or torchrun runs in several tasks of a node.
    """
    is_worker = "TORCHELASTIC_RUN_ID" in env
    if not is_worker and not any(TORCHRUN[field] in env for field in ("rank", "world_size", "local_rank")):
        return None
    if outer is None:
        return _claim(env, Launcher.TORCHRUN, TORCHRUN)
    if outer.level is LaunchLevel.NODE:
        return _claim_in_node(env, outer)
    nodes, here = outer.numbers["num_nodes"], outer.numbers["local_world_size"]
    if not is_worker and any(is_of(row, env) for row in _PODS):
        return None  # RANK and WORLD_SIZE are the pod's, in which the step runs
    if not is_worker:
        for field, name in TORCHRUN.items():
            theirs, ours = env.count(name), outer.numbers[field]
            if theirs and theirs.value != ours.value:
                cure = f"unset {name}, which a parent job, the job script or a shell profile set"
                raise clash(theirs, f"{ours}, and {outer.launcher} started this process", cure)
        return None
    most = max(outer.tasks_per_node, default=here.value)
    if most > 1:
        raise NestedStartError(
            f"torchrun ({env.said('TORCHELASTIC_RUN_ID')}, {env.said('LOCAL_WORLD_SIZE')}) runs inside each of {most} "
            f"tasks a node ({env.said(here.source)}); start one per node: {srun_line(nodes.value, 'torchrun ...')}, "
            "or one task per GPU without torchrun"
        )
    claim = _claim(env, Launcher.TORCHRUN, TORCHRUN)
    if claim.numbers["num_nodes"].value == 1 < nodes.value:
        cure = f"every node would train alone; use {srun_line(nodes.value)}, or torchrun --nnodes={nodes.value}"
        raise clash(claim.numbers["num_nodes"], nodes, cure)
    return claim


def _claim_in_node(env: Env, outer: Claim) -> Claim | None:
    """Return the claim of a worker below a launcher of nodes; None if RANK and WORLD_SIZE count nodes, or are unset.

    Workers are not compared with it: torchrun may run on fewer nodes, and inside each node alone.
    """
    if any(name in env for name in WORKER):
        return _claim(env, Launcher.TORCHRUN, TORCHRUN)
    rank, index = env.count("RANK"), outer.numbers["rank"]
    if rank and rank.value != index.value:
        raise clash(rank, f"{index}, and {outer.launcher} started this process", MIXED)
    size, nodes = env.count("WORLD_SIZE"), outer.numbers["world_size"]
    if size and size.value % nodes.value:
        raise clash(size, f"{nodes}: it is no multiple", MIXED)
    return None


def _claim(env: Env, launcher: Launcher, names: Mapping[str, str]) -> Claim:
    """Read a table of variable names; compute the numbers that it lacks."""
    size = env.need(names, "world_size")
    rank = env.need(names, "rank", below=size)
    is_alone = size.value == 1 and not {names["local_rank"], names.get("local_world_size")} & env.keys()
    here = ClaimedCount(1, size.source, "a world of one") if is_alone else _local_world_size(env, size, names)
    local_rank = (
        ClaimedCount(0, size.source, "a world of one") if is_alone else env.need(names, "local_rank", below=here)
    )
    if names.get("node_index") in env and names.get("num_nodes") in env:
        nodes = env.need(names, "num_nodes")
        index = env.need(names, "node_index", below=nodes)
    elif names.get("node_index") in env and size.value % here.value == 0:
        nodes = ClaimedCount(size.value // here.value, size.source, f"{size} by {here}")
        index = env.need(names, "node_index", below=nodes)
    else:  # In another order than block some rank does not fit and is refused here, so none trains with a wrong node.
        if size.value % here.value or rank.value % here.value != local_rank.value:
            cure = "start with srun or torchrun, which tell the node, or with equal ranks per node in block order"
            raise clash(f"{rank}, {size}, {local_rank}, {here}", "equal nodes in block order cannot have these", cure)
        nodes = ClaimedCount(size.value // here.value, size.source, f"{size} by {here}")
        index = ClaimedCount(rank.value // here.value, rank.source, "ranks fill node after node")
    # Every other node has at least one rank.
    if here.value + nodes.value - 1 > size.value or (nodes.value == 1 and here.value != size.value):
        raise clash(size, f"{here}, {nodes}", MIXED)
    numbers = dict(zip(RANK_FIELDS, (rank, size, local_rank, here, index, nodes), strict=True))
    job_id = names.get("job_id", "")
    return Claim(
        launcher,
        numbers,
        (here.value,) * nodes.value if here.value * nodes.value == size.value else (),
        job_id=Text(env[job_id], job_id) if job_id in env else None,
    )


def _local_world_size(env: Env, size: ClaimedCount, names: Mapping[str, str]) -> ClaimedCount:
    """Return the ranks on this node, computed where only the number of nodes is known."""
    if "local_world_size" in names or "num_nodes" not in names:
        return env.need(names, "local_world_size")
    nodes = env.need(names, "num_nodes")
    if nodes.value == 0 or size.value % nodes.value:
        raise clash(size, f"{nodes}: not the same number on each node", "start equally many tasks on each node")
    return ClaimedCount(size.value // nodes.value, nodes.source, f"{size} by {nodes}")
