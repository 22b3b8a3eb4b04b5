"""The simulated processes of agents, and the connections between them and their leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allranks.launch import events
from allranks.wire.protocol import Goodbye, Message, Plan

from .lives import Stream


@dataclass(eq=False)
class Line:
    """A connection between the leader and one agent; what is said on it arrives in its order."""

    node: int
    agent: Process | None
    leader_open: bool = True
    agent_open: bool = True
    arrives_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    number: int = 0
    """Of a line that asks to be accepted."""


@dataclass(eq=False)
class Process:
    """One agent's process; on node 0 the first one has the leader, too."""

    node: int
    agent: Any = None
    """None while it waits for its first Plan."""
    feed: Callable[[Any], None] | None = None
    turn: Callable[[], None] = lambda: None
    """What it does several times a second."""
    draw: Callable[[], float] = lambda: 0.0
    """When it does so."""
    line: Line | None = None
    is_alive: bool = True
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
    got_goodbye: bool = False
    signalled: list[int] = field(default_factory=list)
    """Stop signals that it got."""


class Network:
    """What messages and ends of connections go through; the world that has the processes extends it."""

    now_s: float
    processes: list[Process]
    lines: dict[int, Line]
    slow: dict[int, float]
    cut: set[int]
    lost_first: dict[int, bool]
    rng: Callable[[str], Stream]
    at: Callable[[float, Callable[[], None]], None]
    _on: Callable[[Process, Callable[[], None]], None]
    _feed_agent: Callable[[Process, Any], None]
    _feed_leader: Callable[[Any], None]
    _begin_agent: Callable[[Process, Plan], None]

    def _delay_s(self, node: int) -> float:
        draw, slow_s = self.rng(f"line {node}").random(), self.slow.get(node, 0.0)
        return (0.0 if node == 0 else 0.001 + 0.01 * draw + (0.6 * draw if draw > 0.97 else 0.0)) + slow_s

    def _carry(self, line: Line, direction: int, arrive: Callable[[], None]) -> None:
        """Have something arrive at the other end, after all that was sent before."""
        arrives_s = line.arrives_s[direction] = max(self.now_s + self._delay_s(line.node), line.arrives_s[direction])

        def try_again() -> None:
            if line.node in self.cut:
                self.at(0.2, try_again)
            else:
                arrive()

        self.at(arrives_s - self.now_s, try_again)

    def _tell_agent(self, line: Line, message: Message) -> None:
        self._carry(
            line, 0, lambda: self._on(line.agent, lambda: self._hear_agent(line, message)) if line.agent else None
        )

    def _hear_agent(self, line: Line, message: Message) -> None:
        process = line.agent
        if process is None or not line.agent_open:
            return
        if process.agent is not None:
            process.got_goodbye |= isinstance(message, Goodbye)
            self._feed_agent(process, events.Heard(now_s=self.now_s, message=message))
        elif isinstance(message, Plan):
            self._begin_agent(process, message)
        elif isinstance(message, Goodbye):
            process.is_alive, process.exit_code, process.got_goodbye = False, message.exit_code, True

    def _tell_leader(self, line: Line, message: Message) -> None:
        def hear() -> None:
            if line.leader_open and self.lines.get(line.node) is line:
                self._feed_leader(events.Heard(now_s=self.now_s, node=line.node, message=message))

        self._carry(line, 1, lambda: self._on(self.processes[0], hear))

    def _end_line(self, line: Line, *, by_leader: bool) -> None:
        """One side closes a line: the other one learns of it after all that was sent before."""
        if by_leader and line.leader_open:
            line.leader_open = False
            self._carry(line, 0, lambda: self._on(line.agent, lambda: self._lose_agent(line, "closed")))
        elif not by_leader and line.agent_open:
            line.agent_open = False
            self._carry(line, 1, lambda: self._on(self.processes[0], lambda: self._lose_leader(line, "closed")))

    def _break_line(self, line: Line) -> None:
        """Both sides find that a line is gone."""
        self._on(line.agent, lambda: self._lose_agent(line, "reset")) if line.agent else None
        self._on(self.processes[0], lambda: self._lose_leader(line, "reset"))

    def _lose_agent(self, line: Line, reason: str) -> None:
        if line.agent_open and line.agent is not None:
            line.agent_open = False
            if line.agent.agent is None:
                line.agent.is_alive = False
            else:
                self.lost_first[line.node] = line.agent.agent.interrupted_by is None
                self._feed_agent(line.agent, events.Lost(now_s=self.now_s, reason=reason))

    def _lose_leader(self, line: Line, reason: str) -> None:
        if line.leader_open:
            line.leader_open = False
            if self.lines.get(line.node) is line:
                del self.lines[line.node]
                self._feed_leader(events.Lost(now_s=self.now_s, node=line.node, reason=reason))
