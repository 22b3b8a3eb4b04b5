"""Is this process the agent that a run names? Decided from what the run wrote, and from what the kernel says now. Pure.

    >>> agent = NamedAgent(pid=4711, start_ticks=100, boot_id="b", owner=1000)
    >>> why_another(agent, LiveProcess(start_ticks=999, boot_id="b", owner=1000, command=("bash",)))
    'it began at another time'

A run's files are what anybody may have written who could write there: they say which process to look at, and the
kernel says what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

CLOCK_S = 2.0
"""Largest difference between the kernel's start time of a process and the clock."""
MAX_COMMAND = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAgent:
    """The process that a run's files name."""

    pid: int | None = None
    start_ticks: int | None = None
    """When it began, in the kernel's ticks since the boot (proc(5), starttime); None in runs of older versions."""
    boot_id: str = ""
    """/proc/sys/kernel/random/boot_id of its machine."""
    began_by_s: float | None = None
    """Unix time of the line that names it: it had begun by then."""
    owner: int | None = None
    """User id of the file that names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProcess:
    """A process, as the kernel describes it."""

    start_ticks: int
    start_s: float = 0.0
    """The same as Unix time."""
    boot_id: str
    owner: int
    command: tuple[str, ...]
    is_dead: bool = False
    """It has ended, and nobody has collected it yet."""
    has_file_of_run: bool = False
    """Whether it has a file of the run directory open."""


def why_another(agent: NamedAgent, process: LiveProcess) -> str | None:
    """Return why a process is not the agent of a run, in a clause; None if it is."""
    if agent.start_ticks is not None:
        if agent.boot_id != process.boot_id:
            return "the machine was restarted since"
        if agent.start_ticks != process.start_ticks:
            return "it began at another time"
    elif agent.began_by_s is None or process.start_s > agent.began_by_s + CLOCK_S:
        return "it began later than the run"
    if not any("allranks" in word for word in process.command[:8]):
        return f"it runs {' '.join(process.command)[:MAX_COMMAND] or 'another program'}"
    return None


def why_no_signal(agent: NamedAgent, process: LiveProcess) -> str | None:
    """Return why the agent of a run must not be signalled, in a clause; None: it may be.

    Who can write a run's files can name any process in them, with its right start. A user's files may only name the
    processes of that user. Where a file server changes owners (root squash), the agent has a file of the run open.
    """
    if why := why_another(agent, process):
        return why
    if process.owner != agent.owner and not process.has_file_of_run:
        return f"it belongs to user id {process.owner}, and the run's files to {agent.owner}"
    return None
