"""The simulated processes of agents, the connections between them, and the walls that nothing passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from allranks.launch import events
from allranks.wire.protocol import Goodbye, Message, Plan, Refused, Resign

from .lives import Stream

if TYPE_CHECKING:
    from .dialing import Search
    from .leading import Lead

GONE_S = 3.0
"""After so long, TCP gives up a connection that nothing gets across."""
RETRY_S = 0.2


@dataclass(eq=False)
class Line:
    """A connection between two processes; what is said on it arrives in its order."""

    agent: Process
    """Who follows, or wants to."""
    host: Process
    """Who leads, or may lead soon."""
    number: int = 0
    host_open: bool = True
    agent_open: bool = True
    lead: Lead | None = None
    """The leader that reads what the agent says; until there is one, it waits."""
    unread: list[Message] = field(default_factory=list)
    arrives_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    queues: tuple[deque[Callable[[], None]], ...] = field(default_factory=lambda: (deque(), deque()))
    due: list[int] = field(default_factory=lambda: [0, 0])
    """How many of each queue would have arrived by now."""
    is_held: list[bool] = field(default_factory=lambda: [False, False])
    has_timed_out: bool = False
    """Whether one side's kernel has given it up."""

    @property
    def node(self) -> int:
        """The agent's."""
        return self.agent.node

    def ends(self, direction: int) -> tuple[int, int]:
        """From which node to which one: 0 is what the host says."""
        return (self.host.node, self.node) if direction == 0 else (self.node, self.host.node)


@dataclass(eq=False)
class Process:
    """One agent's process; it may lead, too."""

    node: int
    incarnation: int
    agent: Any = None
    """None while it waits for its first Plan."""
    lead: Lead | None = None
    feed: Callable[[Any], None] | None = None
    turn: Callable[[], None] = lambda: None
    """What it does several times a second."""
    line: Line | None = None
    search: Search | None = None
    joined: dict[int, Line] = field(default_factory=dict)
    """Agents that have lost the leader, too, by number."""
    is_alive: bool = True
    is_through: bool = False
    """Its job is over for it: it only does what launch.end does."""
    is_stopped: bool = False
    stopped_s: float = 0.0
    goes_on: bool = False
    """Somebody will continue it."""
    backlog: list[Callable[[], None]] = field(default_factory=list)
    due_s: float = 0.0
    """When it gets its next Due, while its workers run."""
    told: object = None
    """What its last beat told of its workers."""
    tells_s: float = 0.0
    """When it tells of them again, if nothing changes."""
    exit_code: int | None = None
    was_killed: bool = False
    was_left_out: bool = False
    was_told_goodbye: bool = False
    heard_s: float = 0.0
    """When a leader last said something to it."""
    heard: Goodbye | None = None
    """The leader's last word, or another one's."""
    was_refused: bool = False
    signalled: list[int] = field(default_factory=list)
    """Stop signals that it got."""
    times_lost: int = 0
    """How often the run directory said that this node is lost, when this process began."""

    @property
    def runs(self) -> bool:
        """Whether it does anything, now or later."""
        return self.is_alive and (self.goes_on or not self.is_stopped)


@dataclass(frozen=True, eq=False)
class Wall:
    """Nothing gets from one set of nodes to another."""

    sources: frozenset[int]
    targets: frozenset[int]


def copied(message: Any) -> Any:
    """Return a message as it arrives: nothing in it is shared with who sent it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


class Network:
    """What messages and ends of connections go through; the world that has the processes extends it."""

    now_s: float
    slow: dict[int, float]
    walls: list[Wall]
    lost_first: dict[int, bool]
    rng: Callable[[str], Stream]
    at: Callable[[float, Callable[[], None]], None]
    _on: Callable[[Process, Callable[[], None]], None]
    _feed_agent: Callable[[Process, Any], None]
    _begin_agent: Callable[[Process, Plan], None]

    def open_line(self, agent: Process, host: Process, number: int = 0) -> Line:
        line = Line(agent, host, number)
        self.open_lines = [each for each in self.open_lines if each.host_open or each.agent_open]
        self.open_lines.append(line)
        return line

    open_lines: list[Line]

    # Walls

    def passes(self, source: int, target: int) -> bool:
        """Whether anything gets from one node to another one."""
        return not any(source in wall.sources and target in wall.targets for wall in self.walls)

    def reaches(self, one: int, other: int) -> bool:
        """Whether two nodes can talk."""
        return not self.walls or (self.passes(one, other) and self.passes(other, one))

    def is_split(self, nodes: Collection[int]) -> bool:
        """Whether some of these nodes cannot talk."""
        return any(not wall.sources.isdisjoint(nodes) and not wall.targets.isdisjoint(nodes) for wall in self.walls)

    def raise_wall(self, sources: Collection[int], targets: Collection[int], for_s: float) -> None:
        """Let nothing through for a while; connections end where nothing gets across for GONE_S."""
        wall = Wall(frozenset(sources) - frozenset(targets), frozenset(targets))
        self.walls.append(wall)
        self.at(for_s, lambda: self.walls.remove(wall) if wall in self.walls else None)
        for line in self.open_lines:
            one, other = line.ends(0)
            if self.reaches(one, other):
                continue
            for lose in (self._lose_agent, self._lose_host):
                after_s = GONE_S + 0.5 * self.rng("walls").random()
                self.at(after_s, lambda line=line, lose=lose: self._time_out(line, lose))

    def _time_out(self, line: Line, lose: Callable[[Line, str], None]) -> None:
        # Where the other side's kernel has given it up, what this one says is answered with a reset as soon as it gets
        # there, also while that side's process is stopped.
        if line.has_timed_out or line.agent_open != line.host_open or not self.reaches(*line.ends(0)):
            line.has_timed_out = True
            process = line.agent if lose == self._lose_agent else line.host
            self._on(process, lambda: lose(line, "timed out"))

    # What is said

    def _delay_s(self, line: Line) -> float:
        if line.agent is line.host:
            return 0.0
        draw, slow_s = self.rng(f"line {line.node}").random(), self.slow.get(line.node, 0.0)
        return 0.001 + 0.01 * draw + (0.6 * draw if draw > 0.97 else 0.0) + slow_s

    def _carry(self, line: Line, direction: int, arrive: Callable[[], None]) -> None:
        """Have something arrive at the other end, after all that was sent before."""
        arrives_s = line.arrives_s[direction] = max(self.now_s + self._delay_s(line), line.arrives_s[direction])
        line.queues[direction].append(arrive)
        self.at(arrives_s - self.now_s, lambda: self._arrive(line, direction))

    def _arrive(self, line: Line, direction: int) -> None:
        line.due[direction] += 1
        if not line.is_held[direction]:
            self._flow(line, direction)

    def _flow(self, line: Line, direction: int) -> None:
        line.is_held[direction] = bool(self.walls) and not self.passes(*line.ends(direction))
        if line.is_held[direction]:
            if line.agent_open if direction == 0 else line.host_open:
                self.at(RETRY_S, lambda: self._flow(line, direction))
            return
        queue = line.queues[direction]
        while line.due[direction]:
            line.due[direction] -= 1
            queue.popleft()()

    def _tell_agent(self, line: Line, message: Message) -> None:
        if isinstance(message, Plan | Resign):
            message = copied(message)
        self._carry(line, 0, lambda: self._on(line.agent, lambda: self._hear_agent(line, message)))

    def _hear_agent(self, line: Line, message: Message) -> None:
        process = line.agent
        if not line.agent_open or process.line is not line:
            return
        process.heard_s = self.now_s
        if process.agent is not None:
            if isinstance(message, Goodbye) and process.agent.goodbye is None:
                process.heard = message
            process.was_refused |= isinstance(message, Refused)
            self._feed_agent(process, events.Heard(now_s=self.now_s, message=message))
        elif isinstance(message, Plan):
            self._begin_agent(process, message)
        elif isinstance(message, Goodbye):
            process.is_alive, process.exit_code, process.heard = False, message.exit_code, message

    def _tell_host(self, line: Line, message: Message) -> None:
        self._carry(line, 1, lambda: self._on(line.host, lambda: self._hear_host(line, message)))

    def _hear_host(self, line: Line, message: Message) -> None:
        if not line.host_open:
            return
        if line.lead is None:
            line.unread.append(message)
        elif line.lead.lines.get(line.node) is line:
            line.lead.feed(events.Heard(now_s=self.now_s, node=line.node, message=message))

    # The ends of lines

    def _end_line(self, line: Line, *, by_host: bool) -> None:
        """One side closes a line: the other one learns of it after all that was sent before."""
        if by_host and line.host_open:
            line.host_open = False
            self._carry(line, 0, lambda: self._on(line.agent, lambda: self._lose_agent(line, "closed")))
        elif not by_host and line.agent_open:
            line.agent_open = False
            self._carry(line, 1, lambda: self._on(line.host, lambda: self._lose_host(line, "closed")))

    def break_line(self, line: Line, *, agent_s: float = 0.0, host_s: float = 0.0) -> None:
        """Both sides find, each at its time, that a line is gone; what was under way is lost."""
        self.at(agent_s, lambda: self._on(line.agent, lambda: self._lose_agent(line, "reset")))
        self.at(host_s, lambda: self._on(line.host, lambda: self._lose_host(line, "reset")))

    def _lose_agent(self, line: Line, reason: str) -> None:
        process = line.agent
        if not line.agent_open or not process.is_alive:
            return
        line.agent_open = False
        if process.agent is None:
            process.is_alive = False
        elif process.line is line:
            self.lost_first[line.node] = process.agent.interrupted_by is None
            self._feed_agent(process, events.Lost(now_s=self.now_s, reason=reason))

    def _lose_host(self, line: Line, reason: str) -> None:
        if not line.host_open or not line.host.is_alive:
            return
        line.host_open = False
        if line.lead is not None:
            if line.lead.lines.get(line.node) is line:
                del line.lead.lines[line.node]
                line.lead.feed(events.Lost(now_s=self.now_s, node=line.node, reason=reason))
        elif line.host.joined.pop(line.number, None) is not None:
            self._feed_agent(line.host, events.Withdrew(now_s=self.now_s, connection=line.number))
