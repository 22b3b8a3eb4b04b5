"""Stacks saved while the job hung (py-spy): which ranks wait in a collective, and which are elsewhere? Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.why.conclusion import Conclusion
from allranks.why.logs.log_events import LogEvent, Logs
from allranks.why.people import Culprit, People

_WAITS = re.compile(
    r"^(?:all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|all_?to_?all|reduce|gather|scatter|send|recv|wait"
    r"|monitored_barrier)\w*$"
)
_DISTRIBUTED = re.compile(r"torch/distributed/|torch/nn/parallel/distributed|deepspeed/comm|horovod/")
_FRAMES_LOOKED_AT = 4


@dataclass(slots=True)
class Stack:
    """One stack, and the main threads with it."""

    threads: list[LogEvent]
    frames: list[LogEvent] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        """Whether it is inside a collective."""
        return any(
            _WAITS.match(frame.values["function"]) and _DISTRIBUTED.search(frame.values["file"])
            for frame in self.frames[:_FRAMES_LOOKED_AT]
        )


def read_stacks(logs: Logs) -> list[Stack]:
    """Return the stacks of main threads; consecutive headings share the stack below them."""
    stacks: list[Stack] = []
    last_line: LogEvent | None = None
    is_main = False
    for event in logs.of("thread", "stack"):
        if event.kind == "thread":
            is_main = event.values.get("name", "MainThread") == "MainThread"
            if is_main and stacks and not stacks[-1].frames and last_line is not None and last_line.kind == "thread":
                stacks[-1].threads.append(event)
            elif is_main:
                stacks.append(Stack([event]))
        elif is_main and stacks:
            stacks[-1].frames.append(event)
        last_line = event
    return [stack for stack in stacks if stack.frames]


def conclude_stacks(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the ranks that are elsewhere while the others wait in a collective."""
    stacks = read_stacks(logs)
    waiting = [stack for stack in stacks if stack.is_waiting]
    others = [stack for stack in stacks if not stack.is_waiting]
    if not waiting or not others or sum(len(s.threads) for s in others) > sum(len(s.threads) for s in waiting):
        return
    threads = [thread for stack in others for thread in stack.threads]
    where = others[0].frames[0]
    culprit = Culprit(things=tuple(f"process {thread.values['thread']}" for thread in threads))
    for thread in threads:
        line = people.know(thread.line)
        culprit |= Culprit((line.node,) if line.node else (), () if line.rank is None else (line.rank,))
    yield Conclusion(
        cause=find_cause("straggler-rank"),
        role=Role.LIKELY,
        confidence=Confidence.CERTAIN,
        culprit=culprit,
        message=f"it is in {where.values['function']} ({where.values['file']}:{where.values['line']}) while "
        f"{sum(len(stack.threads) for stack in waiting)} others wait in a collective",
        evidence=(threads[0].line, where.line, waiting[0].frames[0].line),
        weight=1,
    )
