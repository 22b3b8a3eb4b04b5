"""Where in a file does the output of another run begin, which was appended to it? Pure.

    torchrun train.py >> train.log 2>&1       today, and again tomorrow

A run is over below torchrun's summaries of all nodes; where all tasks of srun have ended; below the scheduler's word
that it ends the job, to begin it again or not; without a launcher, below an exception that nobody caught. What begins
anew there is another run: steps with lower numbers, a launcher, or a process that ended and ends again. An agent of
torchrun that tells of a second failed worker has started its workers again, which it logs at level INFO only.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, pairwise, zip_longest
from math import inf
from typing import NamedTuple

import msgspec

from allranks.facts.survived import BEGUN_S
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs, Tail
from allranks.why.people import parse_ranks
from allranks.why.step_lines import MIN_STEPS, NUMBER, SLURM, form_of, is_of_training
from allranks.why.summaries import read_summaries
from allranks.why.times import Times
from allranks.why.writers import find_uncaught

_JOB_END = re.compile(r"JOB \d+ ON \S+ CANCELLED|CANCELLED AT \S+ DUE TO ")
"""The scheduler ends the job; it may begin it again, and the next one may write into the same file."""
_OF_LAUNCHERS = (
    "agent-failed", "begun", "closing", "failures", "launcher-failed", "launcher-kills", "launcher-names", "scope",
    "srun", "task-end",
)  # fmt: skip
BUFFER_BYTES = 8192
"""What Python collects before it writes to a file."""
FIRST_LINES = 20
"""Of a file: settings and versions, before which modules or a container may have said something."""
_SIGNALED = re.compile("SignalException: Process [0-9]{1,9} got signal")
"""How torchrun's agent ends if it is told to."""
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
    is_quiet: bool = False
    """Whether no line of it tells a step."""


class _End(msgspec.Struct):
    """An end that several lines tell: of a run, or of some of its processes."""

    line: Line
    """The last of them."""
    script: str | None = None
    processes: dict[str, object] = {}
    """Ranks and agents of torchrun, with their processes."""
    hosts: set[str] = set()
    """Of torchrun's summaries."""
    tasks: set[int] = set()
    """Of srun, which tells that they ended."""
    is_by_scheduler: bool = False
    """Whether the scheduler tells that it ends the job."""
    has_code: bool = True
    """Whether its processes ended by themselves."""

    @property
    def is_over(self) -> bool:
        """Whether all processes that may write there have ended; of tasks, several, and all that are known."""
        return not self.tasks or self.is_by_scheduler or 1 < len(self.tasks) == max(self.tasks) + 1

    def is_of_other_script(self, other: _End) -> bool:
        """Whether an end below is of another part of the same job."""
        return None not in (self.script, other.script) and self.script != other.script

    def is_of_other_run(self, other: _End) -> bool:
        """Whether an end below is another run's; another script that fails is another part of the same job."""
        if self.is_of_other_script(other):
            return False
        same = self.processes.keys() & other.processes.keys()
        return bool(self.tasks & other.tasks) or any(self.processes[name] != other.processes[name] for name in same)

    def is_one_with(self, below: _End) -> bool:
        """Whether an end below is of the same run: of another node or task, or ended by somebody as the job was."""
        if self.is_by_scheduler:
            return not (below.is_by_scheduler or below.has_code) and self.tasks.isdisjoint(below.tasks)
        are_alike = bool(self.hosts and below.hosts) or bool(self.tasks and below.tasks)
        return are_alike and self.hosts.isdisjoint(below.hosts) and self.tasks.isdisjoint(below.tasks)

    def add(self, below: _End) -> None:
        """Note that an end below is of the same run."""
        self.line, self.script = below.line, self.script or below.script
        self.processes.update(below.processes)
        self.hosts |= below.hosts
        self.tasks |= below.tasks
        self.is_by_scheduler |= below.is_by_scheduler


def find_further_runs(logs: Logs, times: Times, told: Container[str]) -> Iterator[FurtherRun]:
    """Yield each further run, or start of the workers, file by file; not of files whose launcher has `told` it."""
    ends = _read_launchers(logs) or _read_last_words(logs)
    starts = [event.line for event in logs.of("started")]
    tails = [tail for tail in logs.tails if tail.source.shown in ends and tail.source.shown not in told]
    lines: dict[str, list[Line]] = {tail.source.shown: [] for tail in tails}
    for line in chain((event.line for event in logs.events if tails), *(tail.lines for tail in tails)):
        is_own = line.source.shown in lines
        if is_own and not (line.text.startswith("  ") or SLURM.search(line.text)):  # as an exception in a summary does
            lines[line.source.shown].append(line)
    for tail in tails:
        own, by_number = ends[tail.source.shown], {line.number: line for line in lines[tail.source.shown]}
        known = sorted(by_number.values(), key=_number)
        timed = [line for line in known if line.time is not None]
        all_steps = [line for line in tail.lines if is_of_training(line.text)]
        all_begun = [line for line in starts if line.source == tail.source]
        begins = {line.node: line.number for line in reversed(known)}
        for end, following in zip_longest(own, own[1:]):
            steps = _without_new_pods(all_steps, begins, end.line.number)
            begun = _without_new_pods(all_begun, begins, end.line.number)
            last = following.line.number if following is not None else tail.num_lines + 1
            if (
                (end.is_over and _is_begun(begun, steps, end, following))
                or (following is not None and end.is_of_other_run(following))
                or (end.is_over and _trains_anew(tail, steps, end, last, times))
                or (end.is_by_scheduler and not steps and _writes_anew(known, end.line, times))
            ):
                index = bisect_right(known, end.line.number, key=_number)
                if index < len(known) and not _goes_back(timed, end.line.number, times):
                    above = f"{end.script} failed" if end.hosts else end.line.text.strip()[:300]
                    is_quiet = all(line.number < end.line.number for line in steps)
                    yield FurtherRun(known[index], above, is_quiet)


def _read_launchers(logs: Logs) -> Mapping[str, list[_End]]:
    """Return by file what torchrun or srun, and the scheduler, tell of ends.

    The ends of several nodes, or tasks, are one until one of them ends again. Below the scheduler's word those are the
    job's own that somebody ended.
    """
    found: defaultdict[str, list[_End]] = defaultdict(list)
    of_job = (_End(event.line, is_by_scheduler=True) for event in logs.of("srun") if _JOB_END.search(event.line.text))
    for end in sorted([*(list(_read_torchrun(logs)) or _read_tasks(logs)), *of_job], key=lambda end: end.line.number):
        own = found[end.line.source.shown]
        if own and own[-1].is_one_with(end):
            own[-1].add(end)
        else:
            own.append(end)
    return found


def _read_torchrun(logs: Logs) -> Iterator[_End]:
    """Yield the ends that torchrun tells: summaries, failures before a restart, a signal."""
    failed = {event.values["pid"]: event.line for event in logs.of("agent-failed") if event.line.pid is not None}
    processes: dict[str, object] = {}
    for entry in read_summaries(logs):
        line, values = entry.event.line, entry.event.values
        processes[values.get("rank", "")] = values["pid"]
        if (agent := failed.pop(values["pid"], None)) is not None:
            processes[f"agent {agent.pid}"] = values["pid"]
        if entry.is_first:
            yield _End(line, entry.script, processes, {values.get("node", "")})
            processes = {}
    for pid, line in failed.items():  # without a summary it starts its workers again
        yield _End(line, processes={f"agent {line.pid}": pid})
    for event in logs.of("exception"):
        if _SIGNALED.search(event.line.text):
            yield _End(event.line, processes={event.line.text: ""}, has_code=False)


def _read_tasks(logs: Logs) -> Iterator[_End]:
    """Yield the ends of srun's tasks."""
    scripts: dict[str, str] = {}
    for event in logs.of("task-end", "frame"):
        shown = event.line.source.shown
        if event.kind == "task-end":
            tasks, has_code = set(parse_ranks(event.values["ranks"])), "code" in event.values
            yield _End(event.line, scripts.pop(shown, None), tasks=tasks, has_code=has_code)
        elif event.values.get("function") == "<module>":
            scripts[shown] = event.values["file"]


def _read_last_words(logs: Logs) -> Mapping[str, list[_End]]:
    """Return the exceptions by which processes ended, in files where neither a launcher nor several ranks write."""
    ends: defaultdict[str, list[_End]] = defaultdict(list)
    if any(logs.of(*_OF_LAUNCHERS)):
        return ends
    lines = chain((event.line for event in logs.events), *(tail.lines for tail in logs.tails))
    of_ranks = {line.source.shown for line in lines if line.rank is not None or _SEVERAL.search(line.text)}
    uncaught = find_uncaught(logs)
    script: str | None = None
    for event in logs.of("frame", "exception", "chained"):
        line, own = event.line, ends[event.line.source.shown]
        if event.kind == "frame":
            script = script or event.values["file"]
        elif event.kind == "chained" and own:
            own.pop()
        elif event.kind == "exception":
            if script is not None and line.source.shown not in of_ranks and (line.writer, line.text) in uncaught:
                own.append(_End(line, script, {"": line.text}))
            script = None
    return ends


def _goes_back(timed: Sequence[Line], end: int, times: Times) -> bool:
    """Whether time goes back below a line: the file of another node may stand behind one."""
    index = bisect_right(timed, end, key=_number)
    return 0 < index < len(timed) and times.of(timed[index]).is_before(times.of(timed[index - 1]))


def _without_new_pods(lines: Sequence[Line], begins: Mapping[str | None, int], end: int) -> list[Line]:
    """Return the lines but those of pods that begin below an end: a collector puts one's output behind another's."""
    return [line for line in lines if not line.is_of_pod or begins.get(line.node, inf) < end]


def _is_begun(begun: Sequence[Line], steps: Sequence[Line], end: _End, following: _End | None) -> bool:
    """Whether a launcher begins below an end, and below it are steps, or another end of the same script."""
    if following is not None and end.is_of_other_script(following):
        return False
    last = following.line.number if following is not None else max((line.number for line in steps), default=0)
    return any(end.line.number < line.number < last for line in begun)


def _trains_anew(tail: Tail, steps: Sequence[Line], end: _End, last: int, times: Times) -> bool:
    """Whether the training between an end and a line below begins anew.

    What goes on may be another rank's, or job's, and steps in other words an epilog's.
    """
    above = {form_of(line.text): _count(line) for line in steps if line.number < end.line.number}
    below = [line for line in steps if end.line.number < line.number < last]
    alike = [line for line in below if not above or form_of(line.text) in above]
    if len(alike) < MIN_STEPS:
        return False
    begun, ended = times.of(alike[0]), times.of(end.line)
    if begun.clock == ended.clock and (begun.earliest_s or 0.0) - (ended.earliest_s or inf) > BEGUN_S:
        return True
    if end.is_by_scheduler and (end.tasks or end.processes):  # it may go on where it had saved
        return True
    is_more_than_a_buffer = tail.lines[0].number > end.line.number
    size = sum(len(line.text) + 1 for line in tail.lines if line.number < end.line.number)
    is_unbuffered = tail.lines[0].number == 1 and size < BUFFER_BYTES  # else all of it would stand below
    if above and not ("" in end.processes and (is_more_than_a_buffer or is_unbuffered)):
        first, before = _count(alike[0]), above[form_of(alike[0].text)]
        return first < before or (first == before and NUMBER.search(alike[0].text) is not None)
    may_be_late = end.is_by_scheduler or end.tasks  # it was in a buffer, or they had some time to save
    return not may_be_late or is_more_than_a_buffer


def _writes_anew(known: Sequence[Line], end: Line, times: Times) -> bool:
    """Whether what stands below the scheduler's end of a job is another run's: after a pause, or it begins alike.

    The scheduler's clock may be of another time zone. A job that was told to end may write for some time.
    """
    above = [line for line in known if line.number < end.number]
    below = [line for line in known if line.number > end.number]
    if len(below) < MIN_STEPS:
        return False
    ended = msgspec.structs.replace(times.of(end), latest_s=times.of(end).earliest_s)
    is_one_clock = bool(above) and not ended.is_before(times.of(above[-1]))
    whens = ([ended] if is_one_clock else []) + [times.of(line) for line in below[: 1 - MIN_STEPS]]
    if any(later.after_s(when) > BEGUN_S for when, later in pairwise(whens)):
        return True
    forms = [form_of(line.text) for line in above[:FIRST_LINES]]
    begin = [form_of(line.text) for line in below[:MIN_STEPS]]
    if not above or above[0].number != 1:
        return False
    places = [at for at in range(len(forms)) if forms[at : at + MIN_STEPS] == begin]
    if len(set(begin)) == MIN_STEPS:
        return bool(places)
    texts = [line.text for line in below[:MIN_STEPS]]  # all ranks say the same; three buffered steps have new numbers
    return any([line.text for line in above[at : at + MIN_STEPS]] == texts for at in places)


def _count(line: Line) -> list[int]:
    """Return the numbers of its epoch and step, in their order."""
    return [int(number) for number in _COUNTERS.findall(line.text)]


def _number(line: Line) -> int:
    return line.number
