"""A watched job as it is heard: its looks, what is wrong with it, and that as rows of `allranks top` and JSON.

When it ends, `runs/watch-<job>/` stays, which is no run: `list` and `clean` pass it over. Its `verdict.json` has the
last opinion in the form of a job's own verdict, as which `allranks why` reads it; `looks.jsonl` each node's last look.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from allranks.files.folder import Folder
from allranks.guard.guard_verdict import name_fault
from allranks.launch.lead.rank_rows import MAX_SINGLE, STATE_OF_PROCESS, RowDraft, show_rows
from allranks.launch.srun import describe_missing
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Severity, Verdict
from allranks.model.hostlist import fold_hosts
from allranks.model.job_status import MAX_NODES, JobStatus, NodeRow, RankRow
from allranks.model.node_look import EndSeen, NodeLook
from allranks.report.last_files import VERDICT
from allranks.report.machine import to_json
from allranks.report.mask import mask_verdict
from allranks.report.rundir import as_file_name
from allranks.report.status_line import OVER, RUNNING
from allranks.report.text import count_of
from allranks.report.top_rows import TopView, make_view
from allranks.watch.judge import Opinion, judge
from allranks.watch.since import LookHistory, Track, is_open

SILENT_S = 10.0
UNKNOWN = ("LATE", "COST", "OUT", "IN", "RESENT", "LAST LINE")
"""Columns of `allranks top` that cannot be known from outside."""


class WatchDocument(Opinion, frozen=True, kw_only=True):
    """A line of `allranks watch --json`: the opinion on a job, and the rows of the table."""

    version: Literal[1] = 1
    job: str
    time_s: float
    is_over: bool
    rows: tuple[RankRow, ...]


class HeardJob:
    """A watched job, of whose nodes looks are expected."""

    def __init__(self, job: str, nodes: Collection[str]) -> None:
        self.job, self.is_over, self.opinion = job, False, Opinion()
        self._history, self._nodes = LookHistory(), nodes
        self._began_s = self._now_s = time.monotonic()

    def hear(self, look: NodeLook | None, now_s: float) -> None:
        """Take a look in; None: none has come. `opinion` is of now afterwards."""
        self._now_s = now_s
        if look is not None:
            self._history.hear(look, now_s)
        elif not self._silent:
            return
        opinion, workers = judge(self._history, now_s), self._history.all_workers()
        num_unknown = sum(not worker.is_alive and worker.end.code is None for worker in workers)
        limits = [fold_hosts([node for node in self._silent if node in self.unheard])]
        limits += [f"how {count_of(num_unknown, 'rank')} ended"] if num_unknown else []
        nameless = [worker.look for worker in workers if worker.look.rank is None]
        limits += [f"pid {look.pid}: {look.problem}" for look in nameless if look.problem]
        is_whole = len(workers) >= max((worker.look.world_size or 0 for worker in workers), default=1)
        is_read = any(worker.look.end is not None or not worker.look.problem for worker in workers)
        can_tell = is_whole and is_read and not num_unknown and not self._silent
        exit_code = opinion.exit_code or (Exit.OK if can_tell else Exit.UNKNOWN)
        self.opinion = replace(opinion, exit_code=exit_code, limits=(*opinion.limits, *filter(None, limits)))

    def hear_for(self, looks: Iterator[NodeLook | None], seconds: float) -> None:
        """Hear what comes in so many seconds; where nothing can come any more, the job is over."""
        until_s = time.monotonic() + seconds
        for look in looks:
            self.hear(look, time.monotonic())
            if time.monotonic() > until_s:
                return
        self.is_over = True

    @property
    def unheard(self) -> list[str]:
        """Nodes that have not answered yet."""
        return [node for node in self._nodes if node not in self._history.nodes]

    @property
    def is_heard(self) -> bool:
        """Whether a node has answered."""
        return bool(self._history.nodes)

    @property
    def looked_s(self) -> float:
        """How long nodes have been looked at since the first look came; of the one that was looked at least."""
        looked_s = [node.told_s - node.first_s for node in self._history.nodes.values()]
        return 0.0 if self.unheard else min(looked_s, default=0.0)

    @property
    def news(self) -> object:
        """What is wrong, without the times: where it is equal, there is nothing new to tell."""
        opinion = self.opinion
        states = [(state.cause, state.ranks, state.node, state.place, state.is_suspicion) for state in opinion.states]
        verdicts = [(finding.cause, finding.node, finding.ranks) for finding in opinion.verdicts]
        has_ended = bool(states) and not verdicts and not any(track.is_alive for track in self._history.all_workers())
        return verdicts, states, has_ended, [*self._silent]

    @property
    def _silent(self) -> dict[str, float]:
        """Nodes that do not answer, and for how many seconds."""
        heard_s = dict.fromkeys(self._nodes, self._began_s)
        heard_s |= {name: node.heard_s for name, node in self._history.nodes.items()}
        ages = {} if self.is_over else {node: self._now_s - at_s for node, at_s in heard_s.items()}
        return {node: age_s for node, age_s in ages.items() if age_s > SILENT_S}

    def describe_progress(self, waited_s: float) -> str:
        """Return the line for somebody who waits for an answer."""
        if self.unheard:
            return describe_missing(self.unheard, len(self._nodes), waited_s)
        return f"looking at {count_of(len(self._history.all_workers()), 'rank')} of {self.job}"

    def view(self, *said: str) -> TopView:
        """Return the table, with these lines above it."""
        now_s = time.time()
        return make_view(self.status(now_s), now_s=now_s, said=said, unknown=UNKNOWN)

    def status(self, now_s: float) -> JobStatus:
        """Return the state of the job, as old as its oldest process; `now_s` is of the calendar."""
        workers, silent, nodes = self._history.all_workers(), self._silent, self._history.nodes
        is_single = len(workers) <= MAX_SINGLE
        rows: dict[object, RowDraft] = {}
        for worker in workers:
            row = _make_row(worker, self.opinion, is_silent=worker.node in silent)
            key = (worker.node, worker.look.pid) if is_single else (row.state, row.is_culprit, row.place)
            if (known := rows.setdefault(key, row)) is not row:
                known.merge(row)
        names = sorted({*nodes, *silent}, key=lambda node: (node not in silent, node))[:MAX_NODES]
        living = [worker.node for worker in workers if worker.is_alive]
        began_s = [worker.look.start_ticks / os.sysconf("SC_CLK_TCK") for worker in workers]  # by the clock of its node
        ages_s = [nodes[worker.node].look.at_s - at_s for worker, at_s in zip(workers, began_s, strict=True)]
        return JobStatus(
            job=self.job,
            written_s=now_s,
            started_s=now_s - max(ages_s, default=0.0),
            phase=OVER if self.is_over else RUNNING,
            num_ranks=max([len(workers), *(worker.look.world_size or 0 for worker in workers)]),
            num_up=len(living),
            num_nodes=len(nodes),
            step=min((row.step for row in rows.values() if row.step is not None), default=None),
            rows=show_rows(rows.values(), is_single=is_single),
            nodes=tuple(
                NodeRow(name=name, num_ranks=living.count(name), silent_s=silent.get(name, 0.0))
                for name in (names if len(names) > 1 or silent else ())
            ),
        )

    def to_json(self) -> str:
        """Return all of it as a line of JSON."""
        told = msgspec.structs.asdict(self.opinion) | {"rows": self.status(time.time()).rows}
        return to_json(WatchDocument(job=self.job, time_s=time.time(), is_over=self.is_over, **told), indent=None)

    def save(self, log_dir: Path) -> Path:
        """Write the last look of each node and the opinion into a new directory below `log_dir`, and return it.

        Raises:
            OSError: it cannot be written.
        """
        verdict = make_verdict(self.job, self.opinion, [worker.look.end for worker in self._history.all_workers()])
        log_dir.mkdir(parents=True, exist_ok=True)
        root, name = Folder.root(log_dir), f"watch-{as_file_name(self.job)}"
        for new in itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2))):
            with contextlib.suppress(FileExistsError):  # the port of a store is soon another job's
                root.make_new(new)
                break
        root.sub(new).write_whole(VERDICT, mask_verdict(verdict).to_json())  # first: the disk may be full
        lines = (msgspec.json.encode(node.look) + b"\n" for node in self._history.nodes.values())
        root.sub(new).write_whole("looks.jsonl", b"".join(lines))
        return log_dir / new


def make_verdict(job: str, opinion: Opinion, ends: Collection[EndSeen | None]) -> Verdict:
    """Return the last opinion as a verdict; a state is a warning in it.

    Args:
        ends: of all ranks; that a job succeeded is said only if each is known to have ended with code 0.
    """
    has_succeeded = bool(ends) and all(end is not None and end.code == 0 for end in ends)
    code = opinion.exit_code or (Exit.OK if has_succeeded else Exit.UNKNOWN)
    findings = [*opinion.verdicts]
    for state in opinion.states:
        sureness = Confidence.LIKELY if state.is_suspicion else Confidence.UNDECIDED
        about: dict[str, Any] = {"severity": Severity.WARN, "confidence": sureness, "ranks": state.ranks}
        findings.append(name_fault(state.cause, state.text, node=state.node or None, fix="", **about))
    return Verdict(job=job, attempt=0, exit_code=code, findings=tuple(findings))


def _make_row(worker: Track, opinion: Opinion, *, is_silent: bool) -> RowDraft:
    look, stack = worker.look, worker.stack
    state = STATE_OF_PROCESS.get(look.state) or stack.operation or "running"
    place = stack.place if look.stack else look.problem
    is_there_to_stay = worker.place_s < worker.stack_s  # two stacks in a row show it
    is_held, since_s = look.state in STATE_OF_PROCESS, worker.place_s if is_there_to_stay else worker.told_s
    since_s, first_s = (worker.state_s, worker.began_s) if is_held else (since_s, worker.first_s)
    if is_silent:
        state, place = "silent", ""
    elif look.end is not None:
        state, place = "ended", worker.how
    return RowDraft(
        state=state,
        is_culprit=look.rank in opinion.culprits,
        is_suspect=not opinion.verdicts,
        place=place if look.rank is not None else f"pid {look.pid} {place}".rstrip(),
        ranks=[] if look.rank is None else [look.rank],
        nodes={worker.node: None},
        for_s=worker.told_s - since_s if worker.is_alive else 0.0,
        is_at_least=is_open(since_s, first_s),
        step=None if stack.counter is None else stack.counter[1],
        cpu_cores=worker.cpu_share if worker.is_alive else None,
        rss_bytes=look.rss_bytes,
    )
