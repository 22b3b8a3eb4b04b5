"""Looks at a job that a text tells: `tests/watch/cases/*.txt`, one short scene a case.

    == a rank is killed
    job: node01 = 0-1, node02 = 2, launcher
      0    all: train
      5    rank 1: ended by SIGKILL
      9    end
    > verdict ...

Each line after `job:` is a time in seconds, who, and what is so from then on, separated by commas:

    train                       steps of 0.4 s, talking, half a core (the opposite of `quiet`)
    in all_reduce at train.py:40, at data.py:9 in load, step 150, cpu 100, quiet, talks
    stopped, debugged, continued, blocked, ended by SIGKILL, exits 1, ended
    child killed by SIGSEGV, gpu 90, nccl 41, unreadable ptrace_scope forbids it
    unacked to 2                bytes to rank 2 are not acknowledged any more; `acked`
    window full to 2            the same, because rank 2 does not read
    no group                    it has no connection to others
    not read, read              its stack is not read any more, and is again
    bytes unknown               the kernel does not tell how many bytes were acknowledged and received
    starts again                a new process of the same rank; `timeouts 3` in a row
    unserved                    requests wait unread at the store, which the launcher has, else rank 0

Who: `all` ranks, `rank 1`, `ranks 0,2`, `launcher`, `everybody`, `watcher` (`sleeps 20`: it sees nothing for so long),
`node02` (`is not heard` any more).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from allranks.model.beat import ProcessState
from allranks.model.node_look import EndSeen, NodeLook, ProcessLook, ProcessRole, SocketSeen, StackSeen

CASES = Path(__file__).parent / "cases"
TICK_S, STACK_S, STEP_S, PORT = 0.25, 2.0, 0.4, 29500
OFFSETS = {"node01": 1000.0, "node02": 50_000.0, "node03": 3.0}
"""What each node's clock shows when the case begins."""
COLLECTIVES = "all_reduce|all_gather|broadcast|barrier|new_group|init_process_group|destroy_process_group|send|recv"
COLLECTIVES += "|backward"


@dataclass
class Actor:
    node: str
    pid: int
    rank: int | None = None
    operation: str = ""
    place: str = "train.py:30"
    step: int | None = None
    steps: bool = False
    cpu: float = 0.0
    cpu_s: float = 1.0
    talks: bool = False
    state: ProcessState = ProcessState.SLEEPING
    end: EndSeen | None = None
    unacked: dict[int | None, int] = field(default_factory=dict)
    full: set[int | None] = field(default_factory=set)
    has_group: bool = True
    unserved: bool = False
    gpu: int | None = None
    nccl: int | None = None
    problem: str = ""
    stack: StackSeen | None = None
    child_end: EndSeen | None = None
    tells_bytes: bool = True
    timeouts: int = 0
    is_read: bool = True
    past: list[ProcessLook] = field(default_factory=list)

    def do(self, words: str, now_s: float) -> None:
        at_s = now_s + OFFSETS[self.node]
        where = re.fullmatch(r"(?:in (?P<op>[\w. ]+?))?(?: ?at (?P<place>.+))?", words)
        if words in ("train", "quiet", "talks"):
            self.steps, self.talks = words == "train", words != "quiet"
            if words == "train":
                self.step, self.cpu, self.operation, self.place = self.step or 100, 50, "backward", "train.py:38"
        elif words in ("stopped", "debugged", "continued", "blocked"):
            states = {"stopped": "stopped", "debugged": "traced", "continued": "sleeping", "blocked": "blocked"}
            self.state = ProcessState(states[words])
        elif found := re.fullmatch(r"(child )?(?:ended|killed) by (SIG\w+)", words):
            end = EndSeen(at_s=at_s, code=-signal.Signals[found[2]])
            self.child_end, self.end = (end, self.end) if found[1] else (self.child_end, end)
        elif found := re.fullmatch(r"exits (\d+)|ended", words):
            self.end = EndSeen(at_s=at_s, code=int(found[1]) if found[1] else None)
        elif found := re.fullmatch(r"(step|cpu|gpu|nccl|timeouts) (\d+)", words):
            setattr(self, found[1], int(found[2]))
            self.steps &= found[1] != "step"
        elif found := re.fullmatch(r"(unacked|window full) to (\d+)", words):
            self.unacked[int(found[2])] = 2048
            self.full |= {int(found[2])} if found[1] == "window full" else set()
        elif words == "acked":
            self.unacked, self.full = {}, set()
        elif words in ("no group", "unserved", "served"):
            self.has_group, self.unserved = self.has_group and words != "no group", words == "unserved"
        elif words in ("read", "not read"):
            self.is_read = words == "read"
        elif words == "bytes unknown":
            self.tells_bytes = False
        elif words == "starts again":
            self.past += [
                ProcessLook(pid=self.pid, start_ticks=5, role=ProcessRole.WORKER, rank=self.rank, end=self.end)
            ]
            self.pid, self.end, self.stack = self.pid + 1000, None, None
        elif words.startswith("unreadable "):
            self.problem = words.partition(" ")[2]
        elif where and (where["op"] or where["place"]):
            self.operation, self.place, self.steps = where["op"] or "", where["place"] or "", False
        else:
            raise ValueError(words)


@dataclass
class Case:
    name: str
    text: str
    actors: list[Actor]
    launcher: Actor | None
    events: list[tuple[float, str, str]]
    until_s: float
    expected: list[str]

    def looks(self) -> Iterator[tuple[float, list[NodeLook]]]:
        """The looks of all nodes at each tick."""
        events, asleep_s, tick = list(self.events), -1.0, 0
        silent: set[str] = set()
        while (now_s := tick * TICK_S) <= self.until_s:
            while events and events[0][0] <= now_s:
                _, who, words = events.pop(0)
                if who in OFFSETS:
                    silent.add(who)
                if who == "watcher":
                    asleep_s = now_s + float(words.removeprefix("sleeps "))
                for actor in self._who(who):
                    actor.do(words, now_s)
            self._pass(tick)
            if now_s >= asleep_s:
                nodes = dict.fromkeys(actor.node for actor in self.actors if actor.node not in silent)
                yield now_s, [self._look(node, now_s) for node in nodes]
            tick += 1

    def _everybody(self) -> list[Actor]:
        return [*self.actors, *([self.launcher] if self.launcher else [])]

    def _who(self, who: str) -> list[Actor]:
        if who in ("all", "watcher", *OFFSETS):
            return self.actors if who == "all" else []
        if who in ("launcher", "everybody"):
            return [actor for actor in self._everybody() if who == "everybody" or actor is self.launcher]
        ranks = ranks_of(who.partition(" ")[2])
        return [actor for actor in self.actors if actor.rank in ranks]

    def _pass(self, tick: int) -> None:
        for actor in self._everybody():
            if actor.end is not None or actor.state in (ProcessState.STOPPED, ProcessState.TRACED):
                continue
            actor.cpu_s += TICK_S * actor.cpu / 100
            if actor.steps and actor.step is not None and tick and (tick * TICK_S) % STEP_S < TICK_S:
                actor.step += 1
        for index, actor in enumerate(self.actors):
            if (
                actor.end is None
                and actor.is_read
                and not actor.problem
                and (tick + index) % round(STACK_S / TICK_S) == 0
            ):
                counters = () if actor.step is None else (("step", actor.step),)
                actor.stack = StackSeen(
                    at_s=tick * TICK_S + OFFSETS[actor.node],
                    operation=actor.operation,
                    place=actor.place,
                    is_collective=bool(re.fullmatch(COLLECTIVES, actor.operation)),
                    counters=counters,
                )

    def _look(self, node: str, now_s: float) -> NodeLook:
        processes = [self._process(actor, now_s) for actor in self._everybody() if actor.node == node]
        processes += [past for actor in self.actors if actor.node == node for past in actor.past]
        for actor in self.actors:
            if actor.node == node and actor.child_end is not None:
                child = {"role": ProcessRole.CHILD, "rank": actor.rank, "end": actor.child_end}
                processes.append(ProcessLook(pid=actor.pid + 1, **child))
        return NodeLook(
            node=node,
            at_s=now_s + OFFSETS[node],
            processes=tuple(processes),
            store=(address(self._store().node), PORT),
        )

    def _store(self) -> Actor:
        return self.launcher or self.actors[0]

    def _process(self, actor: Actor, now_s: float) -> ProcessLook:
        moved = 1000 * round(now_s / TICK_S)
        sockets = []
        for other in self.actors if actor.rank is not None and actor.end is None else ():
            if other is actor or not (actor.has_group and other.has_group) or other.end is not None:
                continue
            stuck = actor.unacked.get(other.rank, 0)
            are_talking = actor.talks and other.talks and not stuck and not other.unacked.get(actor.rank)
            done = actor.pid * 7 + (moved if are_talking else 0)
            sockets.append(
                SocketSeen(
                    own_address=address(actor.node),
                    own_port=port_of(actor, other),
                    peer_address=address(other.node),
                    peer_port=port_of(other, actor),
                    unacked_bytes=stuck,
                    unread_bytes=4096 if actor.rank in other.full else 0,
                    acked_bytes=done if actor.tells_bytes else None,
                    received_bytes=done if actor.tells_bytes else None,
                    retransmits=actor.timeouts if stuck else 0,
                )
            )
        store = self._store()
        if actor is store and actor.end is None:
            sockets.append(SocketSeen(own_address="0.0.0.0", own_port=PORT))
        for other in self.actors if actor.end is None and store.end is None else ():
            ends = [(address(store.node), PORT), (address(other.node), 30000 + other.pid)]
            if actor in (store, other):  # heartbeats go to the store all the time
                (own, own_port), (peer, peer_port) = ends if actor is store else reversed(ends)
                sockets.append(
                    SocketSeen(
                        own_address=own,
                        own_port=own_port,
                        peer_address=peer,
                        peer_port=peer_port,
                        unread_bytes=40 if actor.unserved and actor is store else 0,
                        acked_bytes=moved,
                        received_bytes=moved,
                    )
                )
        return ProcessLook(
            pid=actor.pid,
            role=ProcessRole.WORKER if actor.rank is not None else ProcessRole.LAUNCHER,
            start_ticks=5,
            rank=actor.rank,
            world_size=len(self.actors) if actor.rank is not None else None,
            state=actor.state,
            cpu_s=actor.cpu_s,
            end=actor.end,
            sockets=tuple(sockets),
            stack=actor.stack,
            problem=actor.problem,
            gpu_percent=actor.gpu,
            nccl_ops=actor.nccl,
        )


def address(node: str) -> str:
    return f"10.0.0.{int(node[-2:])}"


def port_of(actor: Actor, other: Actor) -> int:
    return 40000 + 100 * (actor.rank or 0) + (other.rank or 0)


def ranks_of(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def read_cases(path: Path) -> list[Case]:
    return [read_case(text) for text in re.split(r"^== ", path.read_text(), flags=re.MULTILINE)[1:]]


def read_case(text: str) -> Case:
    name, job, *lines = [line for line in text.splitlines() if line.strip()]
    actors, launcher = [], None
    for part in job.partition("job: ")[2].split("; "):
        if part == "launcher":
            launcher = Actor("node01", 900)
        else:
            node, _, ranks = part.partition(" = ")
            actors += [Actor(node, 100 + 10 * rank, rank) for rank in sorted(ranks_of(ranks))]
    expected = [line.removeprefix("> ") for line in lines if line.startswith("> ")]
    events, until_s = [], 0.0
    for line in lines:
        if line.startswith("> "):
            continue
        time, _, rest = line.strip().partition(" ")
        who, _, what = rest.strip().partition(": ")
        until_s = float(time)
        events += [(until_s, who, words) for words in what.split(", ") if what]
    return Case(name, text, sorted(actors, key=lambda actor: actor.rank or 0), launcher, events, until_s, expected)
