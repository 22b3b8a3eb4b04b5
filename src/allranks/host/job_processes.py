"""Which processes of this machine belong to a job now, whoever started it, and what is each: rank, child, launcher?

    find_processes(WantedStacks(job="4711"))[0].rank

    1. Every Python process and its environment as it is now (host.live_environment): job and rank.
    2. Where that tells no rank of its own, `rank` and `world_size` among the variables of the stack (py-spy):
       `mp.spawn` hands them over as arguments.
    3. From the ranks up to the Python process that started them, and down to their children.
    4. Who owns the port of the job's store, and who else is connected to it.

Nothing is stopped, signalled or written to.

Limits: a process is found by its environment, its stack, its parent, or its connection to the store; one that has
none of these is not. A launcher that is no Python (srun, mpirun, Ray's raylet) is not listed.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from allranks.host.live_environment import read_live_environment
from allranks.host.process import STANDBY, read_environment, read_file
from allranks.host.py_spy import ask_for_ranks
from allranks.host.sockets import TcpConnection, read_proc
from allranks.host.traffic import find_sockets
from allranks.model.node_look import ProcessRole

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from here on are no tasks but batch scripts and shells (slurm/slurm.h)."""
_PF_KTHREAD = 0x00200000  # include/linux/sched.h


@dataclass(frozen=True, slots=True)
class WantedStacks:
    """Whose processes: a job's (SLURM's id, or as `name_job` says), these, or those of every job with ranks."""

    job: str = ""
    pids: tuple[int, ...] = ()


@dataclass(slots=True)
class ProcStat:
    """The part of /proc/PID/stat that counts here."""

    name: str
    state: str
    parent: int
    cpu_s: float
    start_ticks: int


@dataclass(slots=True, eq=False)
class FoundProcess:
    """A Python process before its stack was read."""

    pid: int
    stat: ProcStat
    env: Mapping[str, str]
    command: Sequence[str]
    above: FoundProcess | None
    """The nearest Python process above it; None also where that is one of allranks."""
    role: ProcessRole = ProcessRole.WORKER
    serves: str = ""
    """Address and port of the job's store, if it owns that port."""
    rank: int | None = field(init=False)
    local_rank: int | None = field(init=False)
    world_size: int | None = field(init=False)
    job: str = field(init=False)
    has_own_rank: bool = field(init=False)
    """By RANK or its stack; a number of SLURM or MPI is inherited by all that a task starts."""

    def __post_init__(self) -> None:
        self.job = name_job(self.env)
        step = _count(self.env, "SLURM_STEP_ID")  # from 26.05 -5 in a batch script
        slurm = "SLURM_" if step is not None and step < FIRST_SPECIAL_STEP else ""
        # Order matters: the innermost launcher first.
        self.rank = _count(self.env, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", slurm and f"{slurm}PROCID")
        self.local_rank = _count(self.env, "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", slurm and f"{slurm}LOCALID")
        if self.is_lightning:
            self.rank = self.local_rank
        self.has_own_rank = ("RANK" in self.env or self.is_lightning) and self.rank is not None
        self.world_size = None if self.rank is None else _count(self.env, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

    @property
    def is_lightning(self) -> bool:
        """Whether Lightning's own launcher gave it its rank: rank 0 starts the others, and no RANK is set."""
        return "RANK" not in self.env and self.env.get("NODE_RANK") == "0" and "LOCAL_RANK" in self.env

    @property
    def is_launcher(self) -> bool:
        """Whether its interpreter runs a launcher, and no rank."""
        return not self.has_own_rank and _LAUNCHER.match("\0".join(self.command)) is not None

    def started(self, rank: FoundProcess) -> bool:
        """Whether it started this rank below it, and is none itself, or only seems to be one.

        A script that sets RANK before it starts each of its ranks has the last one's itself, as has a loop over ranks.
        """
        return not self.is_lightning and (not self.has_own_rank or self.rank != rank.rank)


def name_job(env: Mapping[str, str]) -> str:
    """Return what tells a process's job from others on this machine: the id of its run, else SLURM's, else its store.

    >>> name_job({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node01", "MASTER_PORT": "29500"})
    'node01:29500'
    """
    run = env.get("TORCHELASTIC_RUN_ID", "none")  # "none" is torchrun's default
    store = ":".join(env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if env.get(name))
    return run if run not in ("", "none") else env.get("SLURM_JOB_ID") or store


def find_processes(wanted: WantedStacks, *, root: Path = Path("/")) -> list[FoundProcess]:
    """Return the wanted Python processes, workers first.

    allranks' own agents, probes and standbys are left out, as are Python's helpers without a stack of interest.
    """
    seen, mine = _read_all(wanted, root)
    is_open = wanted == WantedStacks()
    asked = [process.pid for process in (seen if is_open else mine).values() if _may_tell(process, mine, root)]
    for pid, told in ask_for_ranks(asked, root=root).items():
        mine[pid] = process = seen[pid]
        process.rank, process.local_rank, process.world_size = told.rank, told.local_rank, told.world_size
        process.has_own_rank = True
    jobs = {process.job for process in mine.values() if process.has_own_rank}
    for process in mine.values():  # where ranks say RANK, a number of SLURM is none: of a step that serves the store
        if process.job in jobs and not process.has_own_rank:
            process.rank = process.local_rank = process.world_size = None
    _assign_roles(seen, mine)
    for job in {process.job for process in mine.values()}:
        _add_store(job, seen, mine, root)
    found = [process for process in mine.values() if not wanted.pids or process.pid in wanted.pids]
    order = list(ProcessRole)
    found.sort(key=lambda process: (order.index(process.role), process.rank is None, process.rank, process.pid))
    return found


_Processes = dict[int, FoundProcess]


def _read_all(wanted: WantedStacks, root: Path) -> tuple[_Processes, _Processes]:
    """Return all Python processes, and those that are wanted by their environment; by pid, parents before children."""
    pids = [int(name) for name in os.listdir(root / "proc") if name.isdigit()]  # noqa: PTH208
    stats = {pid: stat for pid in pids if (stat := read_stat(pid, root=root)) and stat.name != _STEP}
    seen, mine, ours = _Processes(), _Processes(), set[int]()
    for pid, stat in sorted(stats.items(), key=lambda item: (item[1].start_ticks, item[0])):
        is_python = _is_named_python(root, pid, stat.name)
        env = (read_live_environment(pid, root=root) if is_python else None) or read_environment(pid, root=root)
        is_wanted = _is_wanted(wanted, pid, env, root)
        if is_wanted and not (is_python or pid in wanted.pids):
            is_python = "/libpython3" in read_file(root / f"proc/{pid}/maps")
        if not (is_python or pid in wanted.pids):
            continue
        command = read_file(root / f"proc/{pid}/cmdline").rstrip("\0").split("\0")
        if STANDBY in env or pid == os.getpid() or _is_ours(command):
            ours.add(pid)
        elif not _is_helper(command, read_file(root / f"proc/{stat.parent}/cmdline")):
            above = stat.parent
            for _ in stats:  # each was read at another moment, and pids are used again: there may be a circle
                if above not in stats or above in seen or above in ours:
                    break
                above = stats[above].parent
            seen[pid] = process = FoundProcess(pid, stat, env, command, seen.get(above))
            # Without a job: what SLURM or MPI numbered counts if it has a store.
            is_wanted |= wanted == WantedStacks() and process.rank is not None and "MASTER_PORT" in env
            mine |= {pid: process} if is_wanted else {}
    return seen, mine


def _may_tell(process: FoundProcess, mine: _Processes, root: Path) -> bool:
    """Whether the stack may tell a rank that the environment does not: none, or one that came from the parent."""
    if process.rank is None:
        is_open = not process.is_launcher and (process.above is None or not process.above.has_own_rank)
    else:
        is_spawned = re.search(r"multiprocessing\.(spawn|forkserver)", str(process.command)) is not None
        is_open = is_spawned and process.above is not None and process.above.rank == process.rank
    if not is_open or process.stat.state == "Z":
        return False
    return (
        process.pid in mine
        or "MASTER_PORT" in process.env
        or "/libtorch" in read_file(root / f"proc/{process.pid}/maps")
    )


def _assign_roles(seen: _Processes, mine: _Processes) -> None:
    """Say who started ranks, and who is a child of one; add both."""
    launchers = {process.pid for process in seen.values() if process.is_launcher}
    ranks = [process for process in mine.values() if process.has_own_rank]
    launchers |= {rank.above.pid for rank in ranks if rank.above and rank.above.started(rank)}
    for rank in ranks:
        above = rank.above
        while above and above.pid in launchers:
            mine[above.pid] = above
            above.job = rank.job = rank.job or above.job or f"pid {above.pid}"
            above = above.above
    for pid, process in seen.items():  # parents come first: a child's child has the rank, too
        parent = process.above
        while parent and parent.pid not in mine:
            parent = parent.above
        if parent and pid not in mine:
            # The dead have no environment any more: their parent says whose they were.
            is_dead = process.stat.state == "Z" and process.stat.parent == parent.pid
            if is_dead or (parent.rank is not None and process.job in ("", parent.job)):
                mine[pid], process.job = process, parent.job
        if pid in mine and pid in launchers:
            process.role = ProcessRole.LAUNCHER  # SLURM's number of it is a node's, not a rank
            process.rank = process.local_rank = process.world_size = None
        elif pid in mine and parent and (process.rank is None or process.rank == parent.rank):
            process.role = ProcessRole.CHILD
            process.rank, process.local_rank, process.world_size = parent.rank, parent.local_rank, parent.world_size


def find_store(processes: Iterable[FoundProcess], *, root: Path = Path("/")) -> tuple[str, int] | None:
    """Return address and port of a job's store, as its ranks' environments or connections tell; None: not known.

    Without MASTER_PORT it is the port that all ranks are connected to, also the rank that owns it: no rank of Gloo's
    connects to itself.
    """
    ranks = [process for process in processes if process.role is ProcessRole.WORKER and process.rank is not None]
    told = Counter(
        (process.env["MASTER_ADDR"], port)
        for process in ranks
        if process.env.get("MASTER_ADDR") and (port := _count(process.env, "MASTER_PORT"))
    )
    if told:
        return told.most_common(1)[0][0]
    if len(ranks) < 2:
        return None
    table = read_proc(root=root, of=str(ranks[0].pid))
    common = set.intersection(*(_reached(find_sockets(rank.pid, root=root), table) for rank in ranks))
    return common.pop() if len(common) == 1 else None


def _reached(sockets: Set[int], table: Iterable[TcpConnection]) -> set[tuple[str, int]]:
    return {(entry.peer_address, entry.peer_port) for entry in table if entry.inode in sockets}


def _add_store(job: str, seen: _Processes, mine: _Processes, root: Path) -> None:
    """Mark who owns the port of the job's store; add the owner, and clients of which nothing else is known."""
    own = [process for process in mine.values() if process.job == job]
    store = find_store(own, root=root)
    if store is None:
        return
    others = [process for process in seen.values() if process.pid not in mine and not process.has_own_rank]
    sockets = {process.pid: find_sockets(process.pid, root=root) for process in (*own, *others)}
    pid = next(process.pid for process in own if process.rank is not None)  # the launcher may be in another namespace
    table = read_proc(root=root, of=str(pid), with_listening=True)
    reached = {end for process in own for end in _reached(sockets[process.pid], table) if end[1] == store[1]}
    # A port with this number on another node is another matter: one end of these connections must be here.
    is_here = any((entry.own_address, entry.own_port) in reached for entry in table)
    listening = {entry.inode for entry in table if is_here and entry.is_listening and entry.own_port == store[1]}
    for process in (*own, *others):
        if listening & sockets[process.pid]:
            process.serves = f"{store[0]}:{store[1]}"
        if process in others and (process.serves or reached & _reached(sockets[process.pid], table)):
            process.job, mine[process.pid] = job, process
        if process.serves and process.rank is None and process.role is ProcessRole.WORKER:
            process.role = ProcessRole.STORE


_STEP = "slurmstepd"
"""It starts tasks: what is above it (a container's first process may be a Python) has not."""
_PYTHON = re.compile(r"(python|pypy)[\d.]*[td]?(-dbg)?$")
_LAUNCHER = re.compile(
    r"[^\0]*(?:\0-[XW]\0[^\0]*|\0-(?![XW]\0)[^\0]*)*\0(?:[^\0]*/)?(?:torchrun|accelerate|deepspeed"
    r"|(?:torch[./]distributed|deepspeed[./]launcher|accelerate[./]commands)[./](?:run|launch|runner)(?:\.py)?)(?:\0|$)"
)
"""An interpreter, its options, and the program or the module that it runs. Each option matches in one way only."""


def _is_named_python(root: Path, pid: int, name: str) -> bool:
    try:
        exe = (root / f"proc/{pid}/exe").readlink().name.removesuffix(" (deleted)")
    except OSError:
        exe = name
    return bool(_PYTHON.match(exe))


def _is_ours(command: Sequence[str]) -> bool:
    return "allranks" in [Path(word).name for word in command[:2]] or "-m allranks " in " ".join(command[1:5]) + " "


def _is_helper(command: Sequence[str], above: str) -> bool:
    """Whether it is one of multiprocessing; what a fork server starts has the server's command line, too."""
    is_server = "multiprocessing.forkserver" in str(command) and "multiprocessing.forkserver" not in above
    return is_server or "multiprocessing.resource_tracker" in str(command)


def _is_wanted(wanted: WantedStacks, pid: int, env: Mapping[str, str], root: Path) -> bool:
    if wanted.pids:
        return pid in wanted.pids
    if not wanted.job:
        return ("RANK" in env or "LOCAL_RANK" in env) and "WORLD_SIZE" in env
    names = {value for name, value in env.items() if re.fullmatch(r"SLURM_JOB_ID(_HET_GROUP_\d+)?", name)}
    names |= {f"{env.get('SLURM_ARRAY_JOB_ID')}_{env.get('SLURM_ARRAY_TASK_ID')}", name_job(env)}
    if not env:  # another user's, or one that forbids to be read: SLURM's cgroup still says whose it is
        names |= set(re.findall(r"/job_(\d+)/", read_file(root / f"proc/{pid}/cgroup")))
    return wanted.job in names


def read_stat(pid: int, *, root: Path = Path("/")) -> ProcStat | None:
    """Return what the kernel says of a process; None: it is gone, or one of the kernel's own threads."""
    head, _, rest = read_file(root / f"proc/{pid}/stat").rpartition(")")
    fields = rest.split()
    if len(fields) < 20 or int(fields[6]) & _PF_KTHREAD:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ProcStat(head.partition("(")[2], fields[0], int(fields[1]), cpu_s, int(fields[19]))


def _count(env: Mapping[str, str], *names: str) -> int | None:
    value = next((env[name] for name in names if env.get(name)), "")
    return int(value) if value.isascii() and value.isdigit() else None
