"""What those that start one process a node say about it (Kubernetes, SkyPilot, SageMaker ...): a claim, or one line.

    JOB_COMPLETION_INDEX=2, PET_NNODES=4, PET_MASTER_ADDR=train-0.train  ->  node 2 of 4, node 0 is train-0.train

Several rows of the table may speak for one process: Trainer's pods are JobSet's, too. The first one gives its name;
each number comes from the first row that has it, and numbers that differ are refused. A number that no row has is
requested in one line: a world of one that nobody asked for would train alone, and end with code 0.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from allranks.model.claims.env import MIXED, ClaimedCount, Env, Text, clash
from allranks.model.claims.launcher_table import LAUNCHERS, RANK_FIELDS, LauncherRow
from allranks.model.claims.ranks import LOCAL, Claim, is_of
from allranks.model.errors import IdentityError
from allranks.model.world import Launcher, LaunchLevel

_ROWS = [row for row in LAUNCHERS if row.level is LaunchLevel.NODE]
_PODS = (Launcher.AIHC, Launcher.PAI, Launcher.PYTORCHJOB)
"""Their WORLD_SIZE is the number of nodes, or of nodes times processes."""
_MEANING = {
    "node_index": "the index of this node",
    "num_nodes": "the number of nodes",
    "leader": "the address of node 0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFlags:
    """What the command line says, and so no variable has to."""

    node_index: int | None = None
    num_nodes: int | None = None
    has_leader: bool = False
    is_alone: bool = False
    """The caller looks at this node only, whatever its place among others."""


@dataclass(slots=True)
class _Said:
    """What one row's variables say."""

    row: LauncherRow
    index: ClaimedCount | None = None
    count: ClaimedCount | None = None
    leader: Text | None = None
    port: ClaimedCount | None = None
    processes: Text | None = None
    job_id: Text | None = None
    hosts: tuple[str, ...] = ()
    source: str = ""
    """The variable with the hosts."""
    notes: tuple[str, ...] = field(default=())


def claim_of_nodes(env: Env, given: GivenFlags) -> Claim | None:
    """Return the claim of the launcher that starts one process a node, None where there is none.

    Raises:
        IdentityError: two launchers differ, a number is missing, or a list of nodes does not fit.
    """
    if given.is_alone:
        return LOCAL if any(is_of(row, env) for row in _ROWS) else None
    all_said = [_read(row, env) for row in _ROWS if is_of(row, env)]
    if not all_said:
        return None
    said = all_said[0]
    for other in all_said[1:]:
        for mine, theirs in ((said.index, other.index), (said.count, other.count)):
            if mine and theirs and mine.value != theirs.value:
                raise clash(mine, f"{theirs}, and both say which node this is, and of how many", MIXED)
        said.index, said.count = said.index or other.index, said.count or other.count
        said.leader, said.port = said.leader or other.leader, said.port or other.port
        said.processes, said.job_id = said.processes or other.processes, said.job_id or other.job_id
    if said.count is None and given.num_nodes is not None:
        said.count = ClaimedCount(given.num_nodes, "--nnodes")
    if said.index is None and (given.node_index is not None or (said.count and said.count.value == 1)):
        said.index = ClaimedCount(given.node_index or 0, "--node-rank" if given.node_index is not None else "default")
    has_leader = said.leader or given.has_leader or (said.count and said.count.value == 1)
    present = {"node_index": said.index, "num_nodes": said.count, "leader": has_leader}
    missing = [name for name, value in present.items() if not value]
    if said.index is None or said.count is None or not has_leader:
        raise _missing(said.row, env, missing)
    if said.index.value >= said.count.value:
        raise clash(said.index, f"{said.count}, expected a larger value", MIXED)
    one = ClaimedCount(1, "default", "one process a node")
    numbers = (said.index, said.count, ClaimedCount(0, "default", "one process a node"), one, said.index, said.count)
    return Claim(
        said.row.launcher,
        dict(zip(RANK_FIELDS, numbers, strict=True)),
        (1,) * said.count.value,
        said.hosts if len(said.hosts) == said.count.value else (),
        said.notes,
        LaunchLevel.NODE,
        (said.leader, said.port) if said.leader else None,
        said.processes,
        said.job_id,
    )


def _read(row: LauncherRow, env: Env) -> _Said:
    names = env.resolve(row.names)
    said = _Said(row)
    for name in ("processes", "job_id", "leader"):
        if variable := env.first(row.names.get(name, "")):
            setattr(said, name, Text(env[variable].strip(), variable))
    said.port = env.count(names.get("port", ""), least=1, most=65535)
    said.leader = _split_port(said, said.leader)
    if row.launcher is Launcher.VOLCANO:
        _read_volcano(said, env)
    else:
        said.index = env.count(names.get("node_index", ""))
        said.count = _count_of_pods(said, env) if row.launcher in _PODS else _number(env, names.get("num_nodes", ""))
        said.source = names.get("hosts", "")
        said.hosts = _list(env, said.source)
    if "host" in names and said.hosts:
        said.index = _position(Text(env.get(names["host"], ""), names["host"]), said)
    if said.hosts:
        listed = ClaimedCount(len(said.hosts), said.source, "its length")
        if said.count and said.count.value != listed.value:
            raise clash(f"{env.said(said.source)} has {len(said.hosts)} nodes", said.count, MIXED)
        said.count = said.count or listed
        said.leader = said.leader or Text(said.hosts[0], said.source)
    return said


def _number(env: Env, name: str) -> ClaimedCount | None:
    """Read a number, or the larger one of torchrun's MIN:MAX."""
    if span := re.fullmatch("[0-9]{1,7}:([0-9]{1,7})", env.get(name, "")):
        return ClaimedCount(int(span[1]), name) if int(span[1]) else None
    return env.count(name, least=1)


def _list(env: Env, name: str) -> tuple[str, ...]:
    """Read a list: JSON, or words apart by newlines, commas or blanks."""
    text = env.get(name, "").strip()
    if not text.startswith("["):
        return tuple(re.split(r"[\s,]+", text)) if text else ()
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise IdentityError(f"{env.said(name)}: expected a JSON list of host names; correct or unset it")
    return tuple(words)


def _position(host: Text, said: _Said) -> ClaimedCount:
    if host.value not in said.hosts:
        raise clash(host, f"{said.source} does not contain it", MIXED)
    return ClaimedCount(said.hosts.index(host.value), host.source, f"its place in {said.source}")


def _count_of_pods(said: _Said, env: Env) -> ClaimedCount | None:
    """Return the number of nodes where RANK counts pods.

    WORLD_SIZE counts pods before training-operator 1.7, in PAI and in AIHC's documentation; later it is pods times
    processes, and PET_NNODES has the pods.
    """
    size, nodes = env.count("WORLD_SIZE", least=1), _number(env, "PET_NNODES")
    if size is None or nodes is None:
        return size
    per_pod = int(said.processes.value) if said.processes and said.processes.value.isdecimal() else 1
    if size.value not in (nodes.value, nodes.value * per_pod) and ":" not in env["PET_NNODES"]:
        by = f" and {said.processes}" if said.processes else ""
        raise clash(size, f"{nodes}{by}", "WORLD_SIZE counts nodes, or nodes times processes; unset the one left over")
    return nodes


def _read_volcano(said: _Said, env: Env) -> None:
    """Read the lists of hosts of Volcano's tasks: `master` first, the others by name; this pod is found by HOSTNAME."""
    tasks = sorted(
        (match[1] for name in env if (match := re.fullmatch("VC_(.+)_HOSTS", name))),
        key=lambda task: (task != "MASTER", task),
    )
    index, hosts = (
        env.count(env.resolve(said.row.names)["node_index"]),
        [_list(env, f"VC_{task}_HOSTS") for task in tasks],
    )
    if len(tasks) == 1:
        said.index, said.hosts, said.source = index, hosts[0], f"VC_{tasks[0]}_HOSTS"
        said.count = env.count(f"VC_{tasks[0]}_NUM", least=1)
    elif "MASTER" in tasks:
        said.hosts, said.source = tuple(host for listed in hosts for host in listed), "VC_MASTER_HOSTS"
        own = env.get("HOSTNAME", "").split(".")[0]
        places = [place for place, host in enumerate(said.hosts) if host.split(".")[0] == own]
        said.index = ClaimedCount(places[0], "HOSTNAME", "its place in VC_*_HOSTS") if len(places) == 1 else None
    elif not tasks:
        said.index = index


def _split_port(said: _Said, leader: Text | None) -> Text | None:
    """Take the port out of HOST:PORT; an IPv6 address alone has none."""
    if leader is None:
        return None
    match = re.fullmatch(r"\[(.+)\]:([0-9]{1,5})|([^:]+):([0-9]{1,5})", leader.value)
    if match is None:
        return leader
    port = int(match[2] or match[4])
    said.port = said.port or (ClaimedCount(port, leader.source) if 0 < port < 65536 else None)
    return Text(match[1] or match[3], leader.source)


def _missing(row: LauncherRow, env: Env, missing: list[str]) -> IdentityError:
    """Name what is missing, and the lines that give it."""
    mark = next(name for marks in row.marks if (name := env.first(marks)))
    what = " and ".join(filter(None, (", ".join(_MEANING[name] for name in missing[:-1]), _MEANING[missing[-1]])))
    pod = re.fullmatch(r"(?P<job>[A-Za-z0-9.-]{1,200})-[0-9]+", env.get("HOSTNAME", ""))
    lines = [
        row.lines.get(name, row.names.get(name, row.names.get("hosts", "")).split("|")[0]).replace(
            "{job}", pod["job"] if pod else "JOB"
        )
        for name in missing
    ]
    return IdentityError(
        f"{env.said(mark)} ({row.title}) but nothing says {what}; {row.where}: {', '.join(dict.fromkeys(lines))}; "
        "to run on this node only: allranks run --standalone"
    )
