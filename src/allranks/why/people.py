"""Who is who in the logs: ranks, processes, nodes and addresses that mean the same, and the number of ranks. Pure.

    people = People(logs)
    people.know(Who(pid=3981, node="gpu-b10"))     Who(rank=5, node="gpu-b10", local_rank=5, pid=3981)

Several lines name one process in different ways: the launcher by pid and local rank, its summary by rank and pid, srun
by task and node, NCCL by node and pid, a peer by address. What any of them tells is known of all.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from ipaddress import ip_address

from msgspec.structs import replace

from allranks.facts.fact import NOBODY, Who
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.logs.sources import list_jobs

MAX_RANKS = 1 << 20
FEW = 4
"""Number of sources whose ends are searched for names."""
_NAMES_PROCESSES = frozenset(("agent-failed", "placed", "scope"))
SCOPE_LINES = 4
"""Number of lines of one announcement: Ray writes a dead actor's process and address on separate lines."""
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
_SUFFIX = re.compile(r"\.[a-z]{1,6}$")
_PID_IN_PATH = re.compile(r"worker-[0-9a-f]{40,60}(?:-[0-9a-f]{8}-|_)(\d{1,7})\.(?:err|log|out)$")
"""Ray's logs of a session: worker-WORKER-JOB-PID.err, python-core-worker-WORKER_PID.log."""
_PATH_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")


class People:
    """The job's ranks, processes and nodes, from the logs."""

    def __init__(self, logs: Logs, ends: Iterable[Who] = ()) -> None:
        """Collect them; `ends` are processes as launchers name them when they end."""
        worlds = [world for event in logs.of("comm", "world") if (world := event.number("world"))]
        largest = max(worlds, default=0)  # groups within the job are smaller, and number their ranks from 0
        self.world = largest if 0 < largest <= MAX_RANKS else None
        """World size, if a line says it."""
        ranks = [tail.source.rank for tail in logs.tails if tail.source.rank is not None]
        self.size = self.world if self.world is not None else max(ranks) + 1 if ranks else None
        """Number of ranks; if no line says it, as many as have a file of their own, which may not be all."""
        nodes, self._aliases = _find_nodes(logs)
        """A node's name in paths -> its name in the lines of those files."""
        self.nodes = tuple(dict.fromkeys(self._aliases.get(node, node) for node in nodes))
        """All nodes that wrote something."""
        self.endpoint = next((event.values["endpoint"].rstrip(".,:") for event in logs.of("endpoint")), None)
        """The rendezvous address, as written: `node01:29500`."""
        bound = (event for event in logs.of("bootstrap") if event.line.node)
        self._node_of_address: dict[str | None, str | None]
        self._node_of_address = {event.values["address"]: event.line.node for event in bound}
        self.are_tasks_agents = any(event.line.is_of_task for event in logs.of("failure-host", *_NAMES_PROCESSES))
        """Whether srun started agents of several ranks each: the number of a task is no rank then."""
        names = [tail.source.shown for tail in logs.tails]
        nodeless = [tail.source.shown for tail in logs.tails if tail.source.node is None]
        self._node_of_file = {name: word for name in nodeless for word in _PATH_WORD.findall(name) if word in nodes}
        """Of files that are named after a node which lines name."""
        self._pid_of_file = {name: int(match[1]) for name in names if (match := _PID_IN_PATH.search(name))}
        self.rank_of_file = {} if self.are_tasks_agents else _find_file_ranks(logs)
        """Of files whose names have only a number."""
        self._scopes: defaultdict[str, list[tuple[Line, Who]]] = defaultdict(list)
        """By source: from that line on, another process's error follows, announced by mp.spawn or Ray."""
        for event in logs.of("scope"):
            rank, *more = parse_ranks(event.values.get("ranks", "")) or (None,)
            scope = Who(rank=None if more else rank, address=event.values.get("address")) | event.who
            self._scopes[event.line.source.shown].append((event.line, scope))
        named = (*_by_prefix(logs, self), *ends, *_by_message(logs, largest))
        told = [replace(who, node=self._aliases.get(who.node, who.node)) for who in named]
        self._found = _index(told, is_one_node=len(self.nodes) <= 1 and _is_of_one_agent(logs))
        """What is known of a process, by each of its handles."""
        self._known: dict[Who, Who] = {}
        """What is known of those that were asked for."""

    def know(self, who: Who) -> Who:
        """Return a process with all that is known of it."""
        if (full := self._known.get(who)) is not None:
            return full
        asked = who
        if who.node in self._aliases:
            who = replace(who, node=self._aliases[who.node])
        if who.node is None and who.pod in self.nodes:  # a pod's host has its name
            who = replace(who, node=who.pod)
        known = next((self._found[handle] for handle in _handles(who) if handle in self._found), None)
        node = who.node or self._node_of_address.get(who.address)
        full = replace(who, node=node)
        if known is not None and not differ(full, known):
            full |= known
        self._known[asked] = full
        return full

    def speaker(self, line: Line) -> Who:
        """Return the writer of a line."""
        node, pod = (None, line.node) if line.is_of_pod else (self.node_of(line), None)
        pid = self._pid_of_file.get(line.source.shown) if line.pid is None else line.pid
        return self.know(Who(self.rank_of(line), node, line.local_rank, pid, pod=pod))

    def rank_of(self, line: Line) -> int | None:
        """Return the rank that wrote a line, as far as it or its file tells."""
        if line.is_of_task and self.are_tasks_agents:
            return None
        return self.rank_of_file.get(line.source.shown) if line.rank is None else line.rank

    def node_of(self, line: Line) -> str | None:
        """Return the node on which a line was written; if nothing else tells, a file may have a node's name."""
        return line.node or self._node_of_file.get(line.source.shown)

    def may_be_node(self, ranks: Collection[int]) -> bool:
        """Whether these are all ranks of a node, or may be those of one without a word: as many as each other has."""
        node_of = {number: who.node for (word, number, *_), who in self._found.items() if word == "rank" and who.node}
        named, others = [node_of.get(rank) for rank in ranks], [node_of[rank] for rank in node_of if rank not in ranks]
        if len(ranks) < 2 or len(set(named)) != 1 or named[0] in others:
            return False
        are_alike = set(Counter(others).values()) == {len(ranks)}
        return named[0] is not None or are_alike or self.world == len(ranks) * (len(set(others)) + 1)

    def announced(self, line: Line, *, is_caller: bool = True) -> Who:
        """Return whose error a line belongs to, according to mp.spawn, Ray or another parent; of several, the last.

        Args:
            line: the line.
            is_caller: it may be the process that called the one which failed; if not, Ray's lines about a dead actor,
                which names no rank, may also stand below.
        """
        below = 0 if is_caller else 2 * SCOPE_LINES
        parts = [
            (above.number, part)
            for above, part in self._scopes.get(line.source.shown, ())
            if above.number <= line.number + below * (part.rank is None)
            if is_caller or part.local_rank is None
        ]
        near = [(number, part) for number, part in reversed(parts) if number >= parts[-1][0] - SCOPE_LINES]
        who = NOBODY
        for number, part in near:
            if differ(who, part):
                return NOBODY if number == line.number else who  # the lines of one JSON object have no order
            who |= part
        return who


def _is_of_one_agent(logs: Logs) -> bool:
    """Whether one agent's output and one folder of its files name local ranks: those of two may be of two nodes."""
    events = [event for event in logs.events if event.line.local_rank is not None or "local_rank" in event.values]
    sources = {event.line.source for event in events}
    outputs = {_SUFFIX.sub("", source.shown) for source in sources if source.local_rank is None}
    folders = {_NUMBER.sub("", source.shown.rpartition("/")[0]) for source in sources if source.local_rank is not None}
    agents = {event.line.pid for event in logs.of("agent-failed", "closing") if event.line.pid is not None}
    return max(len(outputs), len(folders), len(agents)) <= 1


def _find_nodes(logs: Logs) -> tuple[dict[str, None], dict[str | None, str]]:
    """Return the nodes that wrote something, in the order of their lines, and what those that paths name are called.

    A folder may have any name, `gpt2-node-16/`; what the lines say is right, if they say one node, and no other
    folder's do.
    """
    nodes: dict[str, None] = {}
    hosts: defaultdict[str, set[str]] = defaultdict(set)
    for event in logs.events:
        if host := event.values["node"] if event.kind == "failure-host" else event.line.node:
            nodes[host] = None
            if (in_path := event.line.source.node) not in {None, host}:
                hosts[str(in_path)].add(host)
    if not nodes and len(logs.tails) <= FEW:  # a fragment: lines without events may tell where it ran
        nodes = dict.fromkeys(line.node for tail in logs.tails for line in tail.lines if line.node)
    claims = Counter(name for names in hosts.values() for name in names)
    return nodes, {node: name for node, names in hosts.items() for name in names if len(names) == claims[name] == 1}


def _by_prefix(logs: Logs, people: People) -> Iterator[Who]:
    """Return where each rank runs, by the first line that tells both of its writer."""
    found: dict[int, Who] = {}
    for line in (event.line for event in logs.events):
        if line.node and not line.is_of_pod and (rank := people.rank_of(line)) is not None:
            found.setdefault(rank, Who(rank=rank, node=line.node))
    yield from found.values()


def _by_message(logs: Logs, world: int) -> Iterator[Who]:
    """Return the processes that agents and parents name, and those that say their place in the group of all ranks."""
    for event in logs.of(*_NAMES_PROCESSES):
        if "pid" in event.values:
            yield event.who | Who(node=event.line.node)
    for event in logs.of("comm"):
        line = event.line
        if line.node and line.pid is not None and (event.number("world") or 0) == world:
            yield Who(rank=event.number("rank"), node=line.node, pid=line.pid)


def _find_file_ranks(logs: Logs) -> dict[str, int]:
    """Return the ranks of files whose names differ in one number, if lines in several of them say it is the rank.

    A number in a name may be anything: a node, a part, a day, a run. So none of these files may say another rank.
    """
    told: dict[str, set[int]] = {tail.source.shown: set() for tail in logs.tails if not list_jobs([tail.source])}
    for line in (*(event.line for event in logs.events), *(line for tail in logs.tails for line in tail.lines)):
        if line.rank is not None and line.source.shown in told:
            told[line.source.shown].add(line.rank)
    for event in logs.of("sets-up"):
        told.get(event.line.source.shown, set()).add(int(event.values["rank"]))
    families: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for path in told:
        name = _SUFFIX.sub("", path)
        for number in _NUMBER.finditer(name):
            families[name[: number.start()], name[number.end() :]][path] = int(number[0])
    found: dict[str, int] = {}
    for family in families.values():
        numbers = {number for path, number in family.items() if told[path]}
        if len(numbers) > 1 and all(told[path] <= {number} for path, number in family.items()):
            found |= family
    return found


def _index(named: Sequence[Who], *, is_one_node: bool) -> dict[tuple[object, ...], Who]:
    """Unite what names the same process; on the only node of a job, the local rank alone names it."""
    places = [(who.rank, who.local_rank) for who in named if None not in (who.rank, who.local_rank)]
    is_one_node = is_one_node and all(rank == local_rank for rank, local_rank in places)
    nodes: defaultdict[int | None, set[str | None]] = defaultdict(set)
    for who in named:
        nodes[who.pid].add(who.node)
    sure = []
    for who in named:
        is_lone = who.node is None or len(nodes[who.pid] - {None}) <= 1
        unsure = {"local rank": is_one_node, "pid": is_lone}
        sure.append((who, [handle for handle in _handles(who) if handle[1] is not None or unsure[str(handle[0])]]))
    found: dict[tuple[object, ...], Who] = {}
    for who, handles in [*sure, *sure]:  # twice: what a later line tells of a process is known of an earlier one
        for handle in handles:
            if (known := found.get(handle)) is not None and not differ(who, known):
                who |= known
        found |= dict.fromkeys(handles, who)
    return found


def _handles(who: Who) -> Iterator[tuple[object, ...]]:
    """Yield what a process is found by, the surest first."""
    if who.rank is not None:
        yield "rank", who.rank
    if who.pid is not None:
        yield from dict.fromkeys((("pid", who.node, who.pid), ("pid", None, who.pid)))
    if who.local_rank is not None:
        yield from dict.fromkeys((("local rank", who.node, who.local_rank), ("local rank", None, who.local_rank)))


def differ(first: Who | Line, second: Who | Line) -> bool:
    """Whether two descriptions, or writers, contradict each other; a process that was started again has another pid."""
    pairs = ((first.rank, second.rank), (first.node, second.node), (first.local_rank, second.local_rank))
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


# --- What a line names ----------------------------------------------------------------------------------------------

_SPAN = re.compile(r"(?<![\w.])([0-9]{1,7})(?:-([0-9]{1,7}))?(?![\w.-])")
_WORDS = {"gpu": "GPU", "hca": "HCA", "port": "port", "address": "address", "thing": ""}


def named(event: LogEvent) -> tuple[list[Who], tuple[str, ...]]:
    """Return the processes or machines that a line names, and what else it names, in words."""
    values = event.values
    is_garbage = "address" in values and _is_garbage(values["address"])
    things = []
    for group, word in _WORDS.items():
        if group in values and not (is_garbage and group in {"address", "port"}):
            things.append(f"{word} {values[group].strip()}".strip())
    ranks = [rank for group in ("rank", "ranks") if group in values for rank in parse_ranks(values[group])]
    who = event.who
    whos = [who if rank == who.rank else replace(who, rank=rank) for rank in ranks or (None,)]
    return list(filter(None, whos)), tuple(things)


def own_rank(event: LogEvent) -> int | None:
    """Return the global rank that a line gives as its writer's; a subgroup numbers its ranks from 0."""
    return event.number("rank") if event.values.get("group", "0") == "0" else None


def peer_of(event: LogEvent, people: People) -> Who:
    """Return the peer that a line complains about."""
    peer = event.values.get("peer", "").strip("[]<>")
    if not peer:
        return NOBODY
    if peer.isdecimal():
        return people.know(Who(rank=int(peer))) if len(peer) < 8 else NOBODY
    if peer in people.nodes:
        return Who(node=peer)
    return people.know(Who(address=peer))


def _is_garbage(address: str) -> bool:
    """Whether torch 2.13 printed this for a socket that it had closed: uninitialized memory, read as an address."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return found.is_reserved or (found.version == 4 and str(found).endswith(".0.0"))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse `4, 5, 6` and `[0-3]`; skip what is not a number.

    >>> parse_ranks("[0-2],5")
    (0, 1, 2, 5)
    """
    spans = [(int(first), int(last or first)) for first, last in _SPAN.findall(text)]
    return tuple(dict.fromkeys(rank for first, last in spans for rank in range(first, min(last, first + 4096) + 1)))


def missing_of(present: Iterable[int], world: int | None) -> tuple[int, ...]:
    """Return the missing ranks; without a world size, those below the largest known rank."""
    there = frozenset(present)
    if not there:
        return ()
    end = world if world is not None else max(there) + 1
    return tuple(rank for rank in range(min(end, MAX_RANKS)) if rank not in there)
