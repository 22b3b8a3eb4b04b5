"""Who this process is: rank, world and node, read from an environment mapping and nothing else.

    >>> world_from_env({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).node_index
    1

Launchers nest, outermost first: the SLURM *step* (never the job, whose numbers differ under `srun -N1`, `-w` and `-r`),
then MPI and its like, then torchrun (claims/ranks.py). An inner one takes over only where the outer one has a single
task a node; the same number said twice must be the same; all else is refused. Whoever starts ranks takes precedence
over those that place pods or machines, one process on each (claims/nodes.py). Without any of them it is one local
process. The batch script and the interactive shell of a job carry SLURM_PROCID=0 too, but are no tasks. A variable set
to nothing counts as unset.

Limits: names are not resolved, so MASTER_ADDR is refused only where the text alone proves it wrong. MPI does not say
which node a rank is on: it is computed there, and only equal nodes filled one after another are accepted.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from allranks.model.claims.env import MIXED, ClaimedCount, Env, Text, clash, printable, srun_line
from allranks.model.claims.launcher_table import row_of
from allranks.model.claims.nodes import GivenFlags as GivenFlags
from allranks.model.claims.nodes import claim_of_nodes
from allranks.model.claims.ranks import (
    LOCAL,
    MOST_ID,
    TORCHRUN,
    Claim,
    claim_of_ranks,
    claim_of_step,
    claim_of_torchrun,
    step_number,
)
from allranks.model.contradiction import NestedStartError, finding_of_refusals
from allranks.model.errors import IdentityError
from allranks.model.setting import Setting
from allranks.model.world import Launcher, LaunchLevel, World

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


NODE_FILES = {Launcher.PALS: "PBS_NODEFILE", Launcher.LSF: "LSB_DJOB_RANKFILE"}
"""Variables with the path of a list of hosts, a line a slot; the launchers of ranks that say no more of the hosts."""
_OF_WORKERS = {
    *TORCHRUN.values(),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
}
"""What an agent gives its workers; all else has been judged by `allranks run` when it started them."""
_NOTHING = GivenFlags()


def world_from_env(
    env: Mapping[str, str], *, given: GivenFlags = _NOTHING, files: Mapping[str, Sequence[str]] | None = None
) -> World:
    """Derives the identity of this process, or refuses an environment that contradicts itself.

    Args:
        env: the environment.
        given: what the command line says, and so no variable has to.
        files: lines of the files that NODE_FILES names, by variable.
    Raises:
        IdentityError: two variables disagree, one of a set is missing, or one is not a number in range; with a finding.
        HostlistError: SLURM_STEP_NODELIST cannot be expanded.
    """
    with finding_of_refusals(env.get("SLURMD_NODENAME")):
        return _read_world(Env((name, value) for name, value in env.items() if value), given, files or {})


def _read_world(env: Env, given: GivenFlags, files: Mapping[str, Sequence[str]]) -> World:
    step = claim_of_step(env)
    outer = claim_of_ranks(env, step) or claim_of_nodes(env, given)
    claim = LOCAL if outer is LOCAL else claim_of_torchrun(env, outer) or outer or LOCAL
    listed = {variable: tuple(dict.fromkeys(lines)) for variable, lines in files.items() if variable in env}
    claim = _with_hosts(claim, env, listed)
    notes = [*claim.notes, *_job_notes(env, claim, step, listed)]
    master = _master(env, claim, notes)
    job_id, job_source = _job_id(env, claim)
    # Not SLURM's own number, where a requeued job counts its steps on, and where an agent takes a lost one's place.
    counts_as = env.count("ALLRANKS_STEP", most=MOST_ID) or step_number(env)
    step_id = None if step is None or counts_as is None else str(counts_as.value)
    node_name, counts = env.get("SLURMD_NODENAME"), claim.numbers["local_world_size"].source
    restarts = env.count("SLURM_RESTART_COUNT") or env.count("TORCHELASTIC_RESTART_COUNT")
    numbers = {**claim.numbers, "attempt": restarts or ClaimedCount(0, "default", "not requeued, not restarted")}
    why = f"{claim.launcher} started this process"
    hosts_source = "SLURM_STEP_NODELIST" if claim.launcher is Launcher.SLURM else f"{claim.launcher}"
    leader_source = claim.leader[0].source if claim.leader and master else "MASTER_ADDR"
    texts = (
        ("job_id", job_id, "the same on all nodes", job_source),
        ("step_id", step_id, "the srun that started this process", counts_as.source if counts_as else ""),
        ("node_name", node_name, "SLURM's name of this node", "SLURMD_NODENAME"),
        ("hosts", ",".join(claim.hosts), "the step's nodes, not the job's", hosts_source),
        ("tasks_per_node", env.get(counts), why, counts),
        (
            "processes",
            claim.processes and claim.processes.value,
            why,
            claim.processes.source if claim.processes else "",
        ),
        ("master", master and ":".join(map(str, filter(None, master))), "only a hint", leader_source),
    )
    return World(
        launcher=claim.launcher,
        level=claim.level,
        **{name: count.value for name, count in numbers.items()},
        num_job_nodes=_num_job_nodes(env, claim, listed).value,
        job_id=job_id,
        step_id=step_id,
        node_name=node_name,
        hosts=claim.hosts,
        tasks_per_node=claim.tasks_per_node,
        processes=claim.processes.value if claim.processes else None,
        master=master,
        settings=tuple(Setting(name, str(n.value), n.reason or why, n.source) for name, n in numbers.items())
        + tuple(Setting(name, printable(text), why, source) for name, text, why, source in texts if text),
        notes=tuple(notes),
    )


def _with_hosts(claim: Claim, env: Env, listed: Mapping[str, tuple[str, ...]]) -> Claim:
    """Add the hosts that a file lists, for a launcher of ranks that names none; the first one may have rank 0.

    Raises:
        IdentityError: it lists fewer hosts than there are nodes.
    """
    variable = NODE_FILES.get(claim.launcher, "PBS_NODEFILE" if claim.launcher is Launcher.MPI else "")
    hosts, nodes = listed.get(variable, ()), claim.numbers["num_nodes"]
    if not hosts or claim.hosts:
        return claim
    if claim.launcher is Launcher.LSF and len(hosts) == nodes.value + 1:
        hosts = hosts[1:]  # a system with a launch node has it in the first line
    if len(hosts) < nodes.value:
        many = f"{len(hosts)} host" + "s" * (len(hosts) != 1)
        raise clash(f"{env.said(variable)} lists {many}", f"{nodes.value} nodes ({nodes.reason or nodes})", MIXED)
    leader = claim.leader or (Text(hosts[0], variable), None)
    return replace(claim, hosts=hosts if len(hosts) == nodes.value else (), leader=leader)


def _num_job_nodes(env: Env, claim: Claim, listed: Mapping[str, tuple[str, ...]]) -> ClaimedCount:
    """Return the nodes of the whole job, where its scheduler says it."""
    job = env.count("SLURM_JOB_NUM_NODES")
    if job is None and claim.launcher is Launcher.NONE:
        # LSF may list the node of the script beside those of the ranks.
        job = next(
            (ClaimedCount(max(1, len(hosts) - (v == "LSB_DJOB_RANKFILE")), v) for v, hosts in listed.items() if hosts),
            None,
        )
    return job or claim.numbers["num_nodes"]


def env_of_worker(env: Mapping[str, str]) -> dict[str, str]:
    """Return of the environment of a worker of `allranks run` what says who it is."""
    node = {"SLURMD_NODENAME": env.get("ALLRANKS_NODE", "")}
    return {name: value for name, value in env.items() if name in _OF_WORKERS} | node


def check_one_agent_per_node(world: World) -> None:
    """Refuses with IdentityError what would be a node's second agent, or a worker's agent; `allranks run` calls it."""
    with finding_of_refusals(world.node_name):
        _check_one_agent_per_node(world)


def _check_one_agent_per_node(world: World) -> None:
    if world.launcher is Launcher.TORCHRUN:
        raise IdentityError(
            f"allranks run is an agent, but RANK={world.rank} and WORLD_SIZE={world.world_size} say that it is a "
            "worker of torchrun; start it instead of torchrun, with the same flags, or, if they are left over: unset "
            + " ".join((*TORCHRUN.values(), "TORCHELASTIC_RUN_ID"))
        )
    said = next((f"{s.source}={s.value}" for s in world.settings if s.name == "tasks_per_node"), "tasks_per_node")
    if world.launcher is Launcher.MPI and world.local_world_size > 1:
        raise NestedStartError(
            f"this node has {world.local_world_size} agents ({said}), allranks needs one a node: "
            "mpirun --map-by ppr:1:node allranks run ... (Open MPI), mpiexec -ppn 1 allranks run ... (MPICH, Intel MPI)"
        )
    row = row_of(world.launcher)
    if row and world.launcher is not Launcher.SLURM and world.local_world_size > 1:
        raise NestedStartError(
            f"this node has {world.local_world_size} agents ({said}), allranks needs one a node: {row.one_a_node}"
        )
    if world.launcher is Launcher.SLURM:
        # A host stands twice in the list when two parts of one heterogeneous step share it.
        tasks = zip(world.hosts or map(str, range(world.num_nodes)), world.tasks_per_node, strict=True)
        agents = Counter(host for host, times in tasks for _ in range(times))
        name, most = agents.most_common(1)[0]
        if most > 1:
            what_to_do = f"allranks needs one a node: {srun_line(len(agents))}"
            raise NestedStartError(f"node {name} has {most} agents ({said}), {what_to_do}")


def _job_notes(env: Env, claim: Claim, step: Claim | None, listed: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Holds the claim against the job's size: a smaller step is allowed, a world of one by mistake is not."""
    notes = []
    whole = _num_job_nodes(env, claim, listed)
    if whole.source in listed and whole.value > 1:
        row = next(row_of(launcher) for launcher, variable in NODE_FILES.items() if variable == whole.source)
        start = row.one_a_node.replace("NODES", str(whole.value)) if row else ""
        notes.append(
            f"this is the job's script or shell, not a task: it runs on one node, and {env.said(whole.source)} has "
            f"{whole.value} nodes; on all nodes: {start}"
        )
    job, nodes, size = env.count("SLURM_JOB_NUM_NODES"), claim.numbers["num_nodes"], claim.numbers["world_size"]
    if job and job.value > nodes.value:
        start = srun_line(job.value)
        if claim.launcher is Launcher.NONE:
            notes.append(
                f"this is the job's script or shell, not a task: it runs on one node, and {job}; on all nodes: {start}"
            )
        elif size.value == 1 and not step:
            cure = f"unset {claim.numbers['rank'].source} {size.source} and start on all nodes: {start}"
            raise clash(size, f"{job}: a world of one on {job.value} nodes", cure)
        else:
            notes.append(f"{nodes} but {job}: other nodes of the job are not used; on all nodes: {start}")
    if "SLURM_HET_SIZE" in env:
        notes.append(f"heterogeneous job, {env.said('SLURM_HET_SIZE')}: srun starts only its first part by default")
    return notes


# Loopback and any-address: never the way to another node.
_OWN_MACHINE = re.compile(r"localhost[46]?(\..*)?|127\..*|\[?::1?\]?|0\.0\.0\.0", re.IGNORECASE)


def _master(env: Env, claim: Claim, notes: list[str]) -> tuple[str, int | None] | None:
    """The leader hint; what is odd about it goes to `notes`."""
    host, port = env.get("MASTER_ADDR"), env.count("MASTER_PORT", least=1, most=65535)
    said, nodes = env.said("MASTER_ADDR"), claim.numbers["num_nodes"]
    if claim.leader and (claim.level is LaunchLevel.NODE or host is None):
        host, port = claim.leader[0].value, claim.leader[1] or port
        said = f"{claim.leader[0]}"
    if host is None or not re.fullmatch(r"[!-~]+", host):
        if host or (port and claim.launcher is Launcher.SLURM):
            notes.append(
                f"{said if host else port} is not a single address and is ignored; the leader announces itself"
            )
        return None
    is_leader = claim.level is LaunchLevel.NODE and claim.numbers["rank"].value == 0  # its own machine is the right one
    if nodes.value > 1 and not is_leader and _OWN_MACHINE.fullmatch(host):
        if claim.launcher is not Launcher.TORCHRUN:
            cure = "unset MASTER_ADDR MASTER_PORT, the leader announces itself"
            raise clash(f"{said} means each node itself", nodes, cure)
        notes.append(f"{said} but {nodes}: correct only if all of them are one machine")
    elif nodes.value > 1 and claim.launcher is Launcher.SLURM:
        odd = "" if {host, host.split(".")[0]} & set(claim.hosts) else "no name in SLURM_STEP_NODELIST and "
        notes.append(f"{said} is {odd}only a hint; the leader announces itself")
    return host, port.value if port else None


def _job_id(env: Env, claim: Claim) -> tuple[str | None, str]:
    if claim.job_id:
        return claim.job_id.value, claim.job_id.source
    array = {"job": "SLURM_ARRAY_JOB_ID", "task": "SLURM_ARRAY_TASK_ID"}
    if any(name in env for name in array.values()):
        return "_".join(str(env.need(array, part, most=MOST_ID).value) for part in array), array["job"]
    # Order matters: the leader's id first.
    name = next((n for n in ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID") if n in env), None)
    if name:
        return str(env.need({"job": name}, "job", most=MOST_ID).value), name
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")  # "none" is torchrun's default
    return (None, "default") if run_id == "none" else (run_id, "TORCHELASTIC_RUN_ID")
