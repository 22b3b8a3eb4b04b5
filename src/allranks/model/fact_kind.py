"""What a line can state, and who decided it: the words that the book of causes and the facts (facts/fact.py) share."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class FactKind(StrEnum):
    """What a fact states of `who`."""

    words: str
    """The same for people, of a line: "It says that a process ended"."""

    ENDED = "ended", "a process ended"
    """A process ended: with `code`, or by `signal`."""
    RAISED = "raised", "a process failed by an error of its own"
    """It failed by an error of its own: an exception, a refused call, a wrong setting that it complains about."""
    WAITED = "waited", "a process waits for others, or gave up"
    """It waited for others until it gave up, or still waits: in `seq` of `group`, or at the rendezvous."""
    ENQUEUED = "enqueued", "how far a process came"
    """How far it came: it called `seq` of `group` last. Its cause is that of a rank which is behind the others."""
    PEER_LOST = "peer_lost", "a process lost its connection to another one"
    """Its connection to `peer` broke."""
    STORE_GONE = "store_gone", "a process does not reach the store or the rendezvous"
    """It lost the store or the rendezvous, never reached it, or found it closed."""
    DEVICE_FAULT = "device_fault", "a device failed"
    """A GPU or another device failed."""
    LINK_FAULT = "link_fault", "a network interface or a way between nodes does not carry what it should"
    """A network interface, a cable or a way between nodes carries nothing, or too little."""
    NODE_LOST = "node_lost", "a node is gone"
    """A machine is gone."""
    SCHEDULER_END = "scheduler_end", "the scheduler or a person ended the job"
    """The scheduler, or a person, ended the job or this process: cancelled, preempted, out of time."""
    LAUNCHER_KILL = "launcher_kill", "a launcher ended a process"
    """Its launcher ended it: for a reason that is said (the fact has a cause: no heartbeat), or after another one's
    failure (it has none)."""
    RECOVERED = "recovered", "what came before was overcome"
    """It overcame what came before: a retry that worked, a restart."""
    STEP = "step", "the training made progress"
    """It made progress in its training: step `seq` where that is known."""
    FINISHED = "finished", "a process finished"
    """It ended well."""
    MISSING = "missing", "a process is missing"
    """It is not there: it never joined, never called, never answered. Said by itself (it could not join), by others, or
    inferred; without `who`, only a number of missing ones is told (by `speaker`)."""
    SETTING = "setting", "something unsuitable is set"
    """Something unsuitable was chosen or differs between nodes; nothing failed by that line alone."""

    def __new__(cls, value: str, words: str) -> FactKind:
        """Keep the words beside the value."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.words = words
        return member


class Said(IntEnum):
    """Who decided it; the lower, the more it is worth of another process."""

    SELF = 1
    """The process itself."""
    KERNEL = 2
    SCHEDULER = 3
    LAUNCHER = 4
    """Who started it and saw it end."""
    OBSERVER = 5
    """Another process, which only reports."""
    INFERRED = 6
    """Nobody: it follows from several lines."""
