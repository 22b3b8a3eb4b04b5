"""Where in a file does the output of another run begin, which was appended to it? Pure.

    torchrun train.py >> train.log 2>&1       today, and again tomorrow

Below torchrun's summary no worker of its node is left: a second one for the same rank, of another process, is another
run's, and so are steps that begin anew, if only one node writes there. An agent that tells of a failed worker, and
gives no summary, has started its workers again, which it logs at level INFO only. Under srun, another run begins where
all tasks have ended, and the scheduler or the script tells that the job is requeued: without that word, what follows is
the next step of the same script, and a step that failed stays a failure. Without a launcher, an exception that nobody
caught is a process's last word: another one below is the next process's, and so are steps that begin anew, if none of
the lines tells of several ranks. Another script that fails at once is another part of the same job.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import msgspec

from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs, Tail
from allranks.why.people import parse_ranks
from allranks.why.step_lines import MIN_STEPS, NUMBER, SLURM, is_of_training
from allranks.why.summaries import read_summaries

REQUEUE = re.compile(r"DUE TO (?:JOB REQUEUE|PREEMPTION|NODE FAILURE)")
"""The scheduler begins the same script again, if it may."""
_SAYS_AGAIN = re.compile(r"(?i)\bre-?queu")
"""How a batch script tells that it begins the job again."""
_OF_LAUNCHERS = (
    "agent-failed", "begun", "closing", "failures", "launcher-failed", "launcher-kills", "launcher-names", "scope",
    "srun", "task-end",
)  # fmt: skip
_SIGNALED = re.compile(r"SignalException: Process (\d{1,9}) got signal")
"""How torchrun's agent ends if it is told to."""
_OUTERMOST = frozenset((None, "<module>", "_run_module_as_main"))
"""The function in which a traceback begins that nobody caught."""
_NO_WORDS = re.compile(r"[^A-Za-z]+")
_COUNTERS = re.compile(r"(?i)\b(?:epoch|global[_ ]?step|step|iteration|iter|batch)s?\b[^\w\n]{1,12}(\d{1,12})")
_SEVERAL = re.compile(
    r"(?i)(?<![a-z])(?:ranks?|local_rank|world[ _]size|ddp|fsdp|deepspeed|horovod|gloo|mpi(?:run|exec)?)(?![a-z])"
    r"|nccl|process ?groups?|torch[/.]distributed|APPLICATION PROCESSES"
)
"""A file with such a line may be of several ranks, of which none ends the others' run."""


class FurtherRun(NamedTuple):
    """A further run of a file."""

    first: Line
    above: str
    """How the one above ended, in words."""
    is_sure: bool
    """Whether it is another one: no line names ranks, but two may write."""


class _End(msgspec.Struct, frozen=True):
    """How a run ended."""

    line: Line
    """Its last one that is known."""
    script: str | None = None
    pids: Mapping[str, str] = {}
    """Of the workers that torchrun's summary names, by rank."""
    hosts: frozenset[str] = frozenset()
    agent: int | None = None
    """Process of torchrun's agent that told it."""
    tasks: frozenset[int] = frozenset()
    """Of srun, which tells that they ended."""
    is_requeue: bool = False
    """Whether the scheduler tells that it begins the job again."""

    @property
    def is_lone(self) -> bool:
        """Whether no launcher tells it."""
        return not (self.pids or self.tasks or self.is_requeue) and self.agent is None

    @property
    def is_over(self) -> bool:
        """Whether the step is: the scheduler ended its tasks, or all that are known ended; one may be one of many."""
        return bool(self.tasks) and (self.is_requeue or 1 < len(self.tasks) == max(self.tasks) + 1)

    def __or__(self, other: _End) -> _End:
        """Return what both tell of one step."""
        hosts, tasks = self.hosts | other.hosts, self.tasks | other.tasks
        is_requeue = self.is_requeue or other.is_requeue
        return _End(other.line, self.script or other.script, hosts=hosts, tasks=tasks, is_requeue=is_requeue)

    def is_of_other_run(self, other: _End) -> bool:
        """Whether an end below is another run's."""
        if None not in (self.script, other.script) and self.script != other.script:
            return False
        if self.tasks or self.is_requeue:
            is_again = self.script is not None and (self.script, self.tasks) == (other.script, other.tasks)
            return (self.is_requeue and bool(self.tasks)) or is_again
        if not self.pids:
            return self.line.text != other.line.text if self.is_lone else self.agent == other.agent
        return any(self.pids[rank] != other.pids[rank] for rank in self.pids.keys() & other.pids.keys())


def find_further_runs(logs: Logs, told: Container[str]) -> Iterator[FurtherRun]:
    """Yield each further run, or start of the workers, file by file.

    Args:
        told: files in which the launcher tells that it starts its workers again.
    """
    ends = _read_summaries(logs, told) or _read_tasks(logs) or _read_last_words(logs)
    hosts = {host for own in ends.values() for end in own for host in end.hosts}
    is_one_node = len(hosts) < 2 and not any(logs.of("task-end"))  # srun's lines of several nodes are mixed
    tails = [tail for tail in logs.tails if tail.source.shown in ends]
    lines: defaultdict[str, list[Line]] = defaultdict(list)
    for line in chain((event.line for event in logs.events if ends), *(tail.lines for tail in tails)):
        if line.source.shown in ends and not line.text.startswith("  "):  # as an exception in a summary is
            lines[line.source.shown].append(line)
    for tail in tails:
        own, known = ends[tail.source.shown], sorted(lines[tail.source.shown], key=_number)
        if all(end.is_lone for end in own) and any(_SEVERAL.search(line.text) for line in known):
            continue
        steps = [line for line in tail.lines if is_of_training(line.text)]
        again = max((line.number for line in tail.lines if _SAYS_AGAIN.search(line.text)), default=0)
        for end, following in zip_longest(own, own[1:]):
            is_again = end.is_requeue or end.line.number < again
            is_over = end.is_over and is_again if end.tasks or end.is_requeue else is_one_node
            begins = _begins_anew(tail, steps, end, following) if is_over else None
            is_told = following is not None and end.is_of_other_run(following) and (is_again or not end.tasks)
            if is_told or begins or (end.is_lone and begins is not None):
                below = known[bisect_right(known, end.line.number, key=_number) :]
                above = f"{end.script} failed" if end.pids else end.line.text.strip()[:300]
                is_elsewhere = end.tasks and following is not None and end.hosts != following.hosts
                is_sure = begins is True or not (end.is_lone or is_elsewhere)
                first = next((line for line in below if not SLURM.search(line.text)), None)
                yield from () if first is None else (FurtherRun(first, above, is_sure),)


def _read_summaries(logs: Logs, told: Container[str]) -> Mapping[str, list[_End]]:
    """Return by file the ends that torchrun tells: summaries, failures before a restart, a signal."""
    ends: defaultdict[str, list[_End]] = defaultdict(list)
    failed = [event for event in logs.of("agent-failed") if event.line.pid is not None and "pid" in event.values]
    agents = {event.values["pid"]: event for event in failed}
    pids: dict[str, str] = {}
    hosts: set[str] = set()
    for entry in read_summaries(logs):
        line, values = entry.event.line, entry.event.values
        pids[values.get("rank", "")] = values["pid"]
        hosts.add(values.get("node", ""))
        if entry.is_first:
            told_by = [agents.pop(pid).line.pid for pid in pids.values() if pid in agents]
            agent = told_by[0] if told_by else None
            ends[line.source.shown].append(_End(line, entry.script, pids, frozenset(hosts), agent))
            pids, hosts = {}, set()
    for event in agents.values():
        if (shown := event.line.source.shown) not in told:
            ends[shown].append(_End(event.line, agent=event.line.pid))
    told_to_end = ((_SIGNALED.search(event.line.text), event.line) for event in logs.of("exception"))
    for pid, line in {int(match[1]): line for match, line in told_to_end if match}.items():  # of each the last
        ends[line.source.shown].append(_End(line, agent=pid))
    return {shown: sorted(own, key=lambda end: end.line.number) for shown, own in ends.items()}


def _read_tasks(logs: Logs) -> Mapping[str, list[_End]]:
    """Return the ends of SLURM's steps: srun tells those of their tasks, and the scheduler that it requeues the job.

    No task ends twice in a step. Below that word, an exit code may be of either one.
    """
    ends: defaultdict[str, list[_End]] = defaultdict(list)
    scripts: dict[str, str] = {}
    for event in logs.of("task-end", "frame", "srun"):
        line, values = event.line, event.values
        shown = line.source.shown
        if event.kind == "frame" and values.get("function") in _OUTERMOST:
            scripts[shown] = values["file"]
        elif event.kind == "task-end" or REQUEUE.search(line.text):
            tasks = frozenset(parse_ranks(values.get("ranks", "")))
            hosts = frozenset({values["node"]} if tasks else ())
            told = _End(line, scripts.pop(shown, None), hosts=hosts, tasks=tasks, is_requeue=not tasks)
            own = ends[shown]
            if not own or own[-1].tasks & tasks:
                own.append(told)
            elif not (own[-1].is_requeue and "code" in values):
                own[-1] |= told
    return ends


def _read_last_words(logs: Logs) -> Mapping[str, list[_End]]:
    """Return the exceptions by which processes ended, where neither a launcher nor several ranks write."""
    ends: defaultdict[str, list[_End]] = defaultdict(list)
    if any(logs.of(*_OF_LAUNCHERS)) or any(event.is_loss or event.line.rank is not None for event in logs.events):
        return ends
    above, is_outermost = "", False
    last, script = 0, None
    for event in logs.of("traceback", "shortened", "frame", "exception", "chained"):
        own = ends[event.line.source.shown]
        match event.kind:
            case "traceback" | "shortened":
                is_outermost = "shortened" in {event.kind, above}  # Hydra leaves the script's own frame out
            case "frame" if above == "traceback":
                is_outermost |= event.values.get("function") in _OUTERMOST
                script = event.values["file"]
            case "exception" if is_outermost:
                own.append(_End(event.line, script))
                is_outermost = False
            case "chained" if above == "exception" and own and own[-1].line.number == last:
                own.pop()
        above, last = event.kind, event.line.number
    return ends


def _begins_anew(tail: Tail, steps: Sequence[Line], end: _End, following: _End | None) -> bool | None:
    """Return whether the training below an end, and above the next one, begins anew; None: there is none.

    What goes on may be another rank's, or job's, and steps in other words an epilog's. Below a lone process's last word
    another rank may still make some, but not more than a tail has.
    """
    last = following.line.number if following is not None else tail.num_lines + 1
    above = {_form(line): _count(line, end) for line in steps if line.number < end.line.number}
    below = [line for line in steps if end.line.number < line.number < last]
    alike = [line for line in below if not above or _form(line) in above]
    if len(alike) < MIN_STEPS:
        return None
    if end.is_requeue:  # it may go on where the run above had ended
        return True
    first, before = _count(alike[0], end), above.get(_form(alike[0]))
    if first and before:
        return first < before or (first == before and NUMBER.search(alike[0].text) is not None)
    if end.tasks:  # what a task has in its buffer may be written when it ends
        return False
    return not end.is_lone or tail.lines[0].number > end.line.number


def _count(line: Line, end: _End) -> list[int]:
    """Return the number of its step; below the ends of tasks, which leave nobody there, also that of its epoch."""
    counters = _COUNTERS if end.tasks else NUMBER
    return [int(number) for number in counters.findall(line.text)[: None if end.tasks else 1]]


def _form(line: Line) -> str:
    """Its words without numbers: the same for all steps of one loop."""
    return _NO_WORDS.sub("", line.text)


def _number(line: Line) -> int:
    return line.number
