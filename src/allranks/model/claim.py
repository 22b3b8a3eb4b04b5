"""What each launcher (SLURM's step, MPI, torchrun) says about this process: consistent claims, or errors.

A launcher's variables are a table with the six numbers of _FIELDS; MPI and others lack those of the nodes, which are
computed. An inner launcher's claim is compared with the outer one's; `model/identity.py` merges them into one world.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.model.contradiction import NestedStartError
from allranks.model.errors import IdentityError
from allranks.model.hostlist import expand_hosts
from allranks.model.world import Launcher

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_RANKS = 1 << 20
"""Larger than any real world; a limit against broken numbers."""
MOST_ID = (1 << 32) - 1
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Ids from here on are no tasks: 0xfffffffa interactive, 0xfffffffb batch, 0xfffffffc extern (slurm/slurm.h)."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number and the variable that it comes from."""

    value: int
    source: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.source}={self.value}"


class Env(dict[str, str]):
    """The environment without empty variables."""

    def count(self, name: str, *, least: int = 0, most: int = _MOST_RANKS) -> Count | None:
        """Read a number, None where there is none.

        Raises:
            IdentityError: it is no number, or not in range.
        """
        text = self.get(name)
        if text is None:
            return None
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
            raise IdentityError(f"{self.said(name)}: expected an integer from {least} to {most}; correct or unset it")
        return Count(int(text), name)

    def need(
        self, names: Mapping[str, str], field: str, *, below: Count | None = None, most: int = _MOST_RANKS
    ) -> Count:
        """Read one of a set of variables that must all be set.

        Args:
            names: the set, by field.
            field: which of them.
            below: the count that an index must be smaller than.
            most: as for `count`.
        Raises:
            IdentityError: it is missing, or out of range.
        """
        count = self.count(names[field], most=most)
        if count is None:
            beside = next(name for name in (*names.values(), "TORCHELASTIC_RUN_ID") if name in self)
            raise IdentityError(f"{names[field]} is missing beside {self.said(beside)}; set both, or unset {beside}")
        if below and count.value >= below.value:
            raise clash(count, f"{below}, expected a larger value", _MIXED)
        return count

    def said(self, name: str) -> str:
        """`NAME=value`, as messages have it."""
        return f"{name}={printable(self.get(name, ''))}"


def clash(one: object, other: object, what_to_do: str) -> IdentityError:
    """Return the error for two contradicting statements."""
    return IdentityError(f"{one} but {other}; {what_to_do}")


@dataclass(frozen=True, slots=True)
class Claim:
    """What one launcher says about this process."""

    launcher: Launcher
    numbers: dict[str, Count]
    """Of each of _FIELDS."""
    tasks_per_node: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node_index", "num_nodes")
LOCAL = Claim(
    Launcher.NONE,
    {field: Count(value, "default", "one local process") for field, value in zip(_FIELDS, (0, 1) * 3, strict=True)},
    tasks_per_node=(1,),
)


def _names(text: str) -> dict[str, str]:
    return dict(zip(_FIELDS, text.split(), strict=False))


_STEP = _names(
    "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_NODEID SLURM_STEP_NUM_NODES"
)
TORCHRUN = _names("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE")
# Order matters: MVAPICH2 started by hydra has hydra's variables too, Open MPI under PMI has PMI's.
_MPI = (
    _names("OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"),
    _names("MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE"),
    _names("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),  # MPICH, Intel MPI, MVAPICH 3
)
_MIXED = "variables of two launches are mixed: unset those left over from a parent job or a shell profile, and restart"
_MIXED_STEPS = "variables of two steps are mixed: start this process with srun, from a shell without SLURM_STEP_*"


def claim_of_step(env: Env) -> Claim | None:
    """SLURM's claim, None outside of a step's tasks.

    Raises:
        IdentityError: it contradicts itself.
    """
    step_id = env.count("SLURM_STEP_ID", most=MOST_ID)
    if step_id is None or step_id.value >= _FIRST_SPECIAL_STEP or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    size, nodes = env.need(_STEP, "world_size"), env.need(_STEP, "num_nodes")
    rank, index = env.need(_STEP, "rank", below=size), env.need(_STEP, "node_index", below=nodes)
    counts = _tasks_per_node(env, size, nodes)
    here = Count(counts[index.value], "SLURM_STEP_TASKS_PER_NODE", f"its entry for {index}")
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
    numbers = dict(zip(_FIELDS, (rank, size, local_rank, here, index, nodes), strict=True))
    return Claim(Launcher.SLURM, numbers, counts, hosts, tuple(notes))


def _tasks_per_node(env: Env, size: Count, num_nodes: Count) -> tuple[int, ...]:
    """Reads `8(x3),4` as (8, 8, 8, 4)."""
    words = env.get(_STEP["local_world_size"], "").split(",")
    runs = [re.fullmatch(r"([1-9][0-9]{0,6})(?:\(x([1-9][0-9]{0,6})\))?", word) for word in words]
    counts = [(int(run[1]), int(run[2] or 1)) for run in runs if run]
    nodes, tasks = sum(times for _, times in counts), sum(count * times for count, times in counts)
    if len(counts) != len(words) or (tasks, nodes) != (size.value, num_nodes.value):
        said = env.said(_STEP["local_world_size"])
        raise clash(f"{said} reads as {tasks} tasks on {nodes} nodes", f"{size}, {num_nodes}", _MIXED_STEPS)
    return tuple(count for count, times in counts for _ in range(times))


def claim_of_mpi(env: Env, step: Claim | None) -> Claim | None:
    """Return MPI's claim, or the step's if MPI says the same or nothing.

    Raises:
        IdentityError: it contradicts itself or the step.
    """
    tables = [names for names in _MPI if names["rank"] in env or names["world_size"] in env]
    if not tables:
        return step
    rank, size = env.need(tables[0], "rank"), env.need(tables[0], "world_size")
    for names in tables[1:]:
        other = env.need(names, "rank"), env.need(names, "world_size")
        if (rank.value, size.value) != (other[0].value, other[1].value):
            raise clash(f"{rank}, {size}", f"{other[0]}, {other[1]}", _MIXED)
    if step is None:
        return _claim(env, Launcher.MPI, tables[0])
    ours = step.numbers["rank"], step.numbers["world_size"]
    if (rank.value, size.value) == (ours[0].value, ours[1].value):
        return step
    # mpirun starts its daemons with srun, one a node, and the ranks inherit a daemon's step variables.
    if max(step.tasks_per_node) == 1 and size.value > ours[1].value:
        return _claim(env, Launcher.MPI, tables[0])
    cure = f"unset {rank.source} {size.source}, or start with: {srun_line(step.numbers['num_nodes'].value)}"
    raise clash(f"{rank}, {size}", f"{ours[0]}, {ours[1]}", cure)


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
    nodes, here = outer.numbers["num_nodes"], outer.numbers["local_world_size"]
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


def _claim(env: Env, launcher: Launcher, names: Mapping[str, str]) -> Claim:
    """Read a table of variable names; compute the nodes' numbers that it lacks."""
    size = env.need(names, "world_size")
    rank = env.need(names, "rank", below=size)
    is_alone = size.value == 1 and names["local_rank"] not in env and names["local_world_size"] not in env
    here = Count(1, size.source, "a world of one") if is_alone else env.need(names, "local_world_size")
    local_rank = Count(0, size.source, "a world of one") if is_alone else env.need(names, "local_rank", below=here)
    if names.get("node_index") in env and names.get("num_nodes") in env:
        nodes = env.need(names, "num_nodes")
        index = env.need(names, "node_index", below=nodes)
    else:  # In another order than block some rank does not fit and is refused here, so none trains with a wrong node.
        if size.value % here.value or rank.value % here.value != local_rank.value:
            cure = "start with srun or torchrun, which tell the node, or with equal ranks per node in block order"
            raise clash(f"{rank}, {size}, {local_rank}, {here}", "equal nodes in block order cannot have these", cure)
        nodes = Count(size.value // here.value, size.source, f"{size} by {here}")
        index = Count(rank.value // here.value, rank.source, "ranks fill node after node")
    # Every other node has at least one rank.
    if here.value + nodes.value - 1 > size.value or (nodes.value == 1 and here.value != size.value):
        raise clash(size, f"{here}, {nodes}", _MIXED)
    numbers = dict(zip(_FIELDS, (rank, size, local_rank, here, index, nodes), strict=True))
    return Claim(launcher, numbers, (here.value,) * nodes.value if here.value * nodes.value == size.value else ())


def printable(text: str) -> str:
    """Return the value of a variable as one short line."""
    return text.encode("unicode_escape").decode("ascii")[:200]


def srun_line(num_nodes: int, command: str = "allranks run ...") -> str:
    """Return the command that starts one task on each of this many nodes."""
    # All three: srun also takes SLURM_NTASKS of the script for its --ntasks, which overrules --ntasks-per-node.
    return f"srun --ntasks-per-node=1 --nodes={num_nodes} --ntasks={num_nodes} {command}"
