"""What is an elastic Horovod job doing, and who broke it? From the events of its driver (elastic_driver.py). Pure.

    watch = HorovodWatch(min_np=4, start_np=6, timeout_s=600)
    for said in watch.feed(event): ...          # a line for the user, a Finding, or StackRequest
    for said in watch.turn(now_s): ...          # what is due: the time left of a pause, a look at the stacks

A reset of Horovod, as its driver sees it:

1. A worker ends, or the discovery adds or removes a host. Survivors meet the driver again: `record state: HOST[SLOT]`.
2. When all workers are recorded, hosts with a failed one are blacklisted, and the driver waits for `--min-np` slots:
   `wait for available slots: 4`, `current available slots: 3`. Horovod shows neither of them; this is the pause.
3. `reset workers: 5`, the new workers are started, and all ranks get their new numbers: `rank and size: 0 5`.

After a reset that only removed hosts, none of which failed, the surviving ranks skip `state.sync()`. If a new worker is
started in the same reset, it waits in `state.sync()` forever (horovod/horovod#3494).
"""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.causes.book import find_cause
from allranks.model.finding import Confidence, Evidence, Finding, Severity
from allranks.model.fix import ANYBODY
from allranks.model.hostlist import fold_hosts
from allranks.report.text import count_of, fold_ranks

REMIND_S = 60.0
"""Interval of the lines that say how much of a pause is left; a quarter of a shorter timeout."""
LOOK_EVERY_S = 1.5
"""Interval of the looks at the stacks, from the moment at which the survivors have met again."""
LOOK_FOR_S = 120.0
"""A new worker that has not reached `state.sync()` by then is not looked for any longer."""
TAIL_LINES = 40
SYNC, TRAINING = "state.sync()", "training"
COUNT_S = 1.0
"""A driver that tells its workers of a lost host says only afterwards how many slots it has: in the lab, 20 s later.
Until then the last discovery counts."""
HELD_S = 4.0
"""A worker that SIGTERM ended is not named for so long: SLURM may be ending the whole job."""

_NEED = re.compile(r"wait for available slots: (\d+)")
_HAVE = re.compile(r"current available slots: (\d+)")
_BLACKLISTED = re.compile(r"blacklist failing host: (\S+)")
_RESET = re.compile(r"reset workers: (\d+)")
_MET = re.compile(r"rank and size: (\d+) (\d+)")
_TIMEOUT = re.compile(r"Timed out waiting for .* enough resources to run at least \d+ Horovod processes")
"""0.28.1 prints `Timed out waiting for {activity}`: the name in braces is never filled in."""
_NOT_MET = re.compile(r"Wait timeout after (\d+) seconds for key")
"""Gloo, in a survivor that waits for a new worker; it aborts the process."""
_OUTPUT = re.compile(r"\[(\d+)\]<(?:stdout|stderr)>:(.*)")
_EXCEPTION = re.compile(r"(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)(?::|$)")


@dataclass(frozen=True, slots=True)
class StackRequest:
    """A request for the stacks of all workers: `HorovodWatch.judge` takes them."""


Said = str | Finding | StackRequest


@dataclass(slots=True)
class _Wait:
    """The driver waits for slots."""

    since_s: float
    need: int
    have: int = -1
    told_s: float | None = None


@dataclass(slots=True)
class _Round:
    """One reset: who stays, who is new."""

    size: int
    survivors: frozenset[str]
    has_skipped: bool
    """Whether the survivors skip `state.sync()`."""
    new: set[str] = field(default_factory=set)
    num_met: int = 0
    met_s: float | None = None
    """When the survivors had met; a new worker has its rank from the start, and says nothing."""
    looked_s: float | None = None
    is_judged: bool = False
    has_timed_out: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether survivors and new workers may wait for each other."""
        return self.has_skipped and bool(self.new and self.survivors)


class HorovodWatch:
    """One job.

    Args:
        min_np: fewest workers with which it trains.
        start_np: workers with which it starts.
        timeout_s: HOROVOD_ELASTIC_TIMEOUT; anew for each wait.
        now_s: when it started, as `time.time()`.
    """

    def __init__(self, *, min_np: int, start_np: int, timeout_s: float, now_s: float) -> None:
        self._min_np, self._timeout_s = min_np, timeout_s
        self._wait: _Wait | None = _Wait(now_s, start_np)
        self._live: dict[tuple[str, int], int] = {}  # (host, slot) -> rank at its start
        self._hosts: dict[str, int] = {}
        self._blacklisted: set[str] = set()
        """Since the last reset."""
        self._lost: set[str] = set()
        self._changes: set[str] = set()
        """What the discovery has done since the last reset: `removed`, `added`."""
        self._has_failed = False
        self._round: _Round | None = None
        self._tails: dict[int, deque[str]] = {}
        self._is_over = False
        self._held: list[tuple[float, Finding]] = []
        self.findings: list[Finding] = []
        """All of them, in the order in which they were said."""

    # What comes in

    def feed(self, event: Mapping[str, Any]) -> list[Said]:
        """Take an event of the driver."""
        now_s = float(event["time_s"])
        match event["event"]:
            case "started":
                return self._on_started(str(event["host"]), int(event["slot"]), int(event["rank"]))
            case "ended":
                return self._on_ended(str(event["host"]), int(event["slot"]), int(event["exit_code"]), now_s)
            case "discovered":
                self._on_discovered({str(host): int(slots) for host, slots in event["hosts"].items()})
            case "log":
                return self._on_log(str(event["text"]), now_s)
            case "failed":
                return self._on_failed(str(event["text"]))
        return []

    def feed_output(self, line: str) -> None:
        """Take a line that the driver printed: a rank's, with its prefix, or its own."""
        if found := _OUTPUT.match(line):
            self._tails.setdefault(int(found[1]), deque(maxlen=TAIL_LINES)).append(found[2])

    def lose(self, host: str, evidence: str) -> list[Said]:
        """Note that a host no longer answers."""
        if host in self._lost:
            return []
        self._lost.add(host)
        ranks = tuple(sorted(rank for (name, _), rank in self._live.items() if name == host))
        if not ranks:
            return [f"{host} is lost, none of this job's workers ran there: {evidence}"]
        words = f"the node no longer answers; {fold_ranks(ranks)} ran there"
        found = self._find("node-failure", words, evidence, Confidence.LIKELY, node=host, ranks=ranks)
        return [self._note(found)]

    def regain(self, host: str) -> list[Said]:
        """Note that a lost host answers again."""
        if host not in self._lost:
            return []
        self._lost.remove(host)
        return [f"{host} answers again; Horovod may use it"]

    def cancel(self, state: str) -> list[Said]:
        """Note that SLURM has ended the job: whoever ends now is not at fault.

        Args:
            state: the job's, as SLURM calls it.
        """
        self._is_over, self._held = True, []
        name = {"TIMEOUT": "time-limit", "PREEMPTED": "preempted", "NODE_FAIL": "node-failure"}.get(state, "cancelled")
        return [self._note(self._find(name, f"SLURM has ended the job: {state}", f"JobState={state}"))]

    def turn(self, now_s: float) -> list[Said]:
        """Return what is due."""
        said: list[Said] = [self._note(finding) for until_s, finding in self._held if until_s <= now_s]
        self._held = [held for held in self._held if held[0] > now_s]
        wait, current = self._wait, self._round
        every_s = min(REMIND_S, self._timeout_s / 4)
        if wait is not None and current is not None and wait.have < 0 and wait.since_s + COUNT_S <= now_s:
            said += self._count(wait, sum(self._hosts[host] for host in self._hosts.keys() - self._blacklisted), now_s)
        if wait is not None and wait.told_s is not None and wait.told_s + every_s <= now_s and not self._is_over:
            wait.told_s = now_s
            said.append(f"still paused: {self._describe(wait, now_s)}")
        if current is not None and current.met_s is not None and current.is_suspect and not current.is_judged:
            is_due = now_s >= max(current.met_s, current.looked_s or 0.0) + LOOK_EVERY_S
            if is_due and now_s <= current.met_s + LOOK_FOR_S:
                current.looked_s = now_s
                said.append(StackRequest())
        return said

    def judge(self, stacks: Mapping[str, Sequence[Sequence[str]]], problem: str = "") -> list[Said]:
        """Tell whether survivors and new workers wait for each other, from the functions on their stacks.

        Args:
            stacks: by host, for each Python process, the functions of its main thread, innermost first.
            problem: why there are none.
        """
        current = self._round
        if current is None or not current.is_suspect or current.is_judged:
            return []
        new = {_place(stack) for host in current.new for stack in stacks.get(host, ())} - {""}
        old = {_place(stack) for host in current.survivors for stack in stacks.get(host, ())} - {""}
        if not stacks:
            current.is_judged = True
            return [f"no stack can be read ({problem}); if the job stands still now, see horovod/horovod#3494"]
        if new != {SYNC} or old != {TRAINING}:
            current.is_judged = TRAINING in new or SYNC in old  # they synchronize, or have done so
            return []
        current.is_judged = True
        hosts = fold_hosts(sorted(current.new))
        words = (
            f"the new worker waits in state.sync(), and the workers on {fold_hosts(sorted(current.survivors))} have "
            "skipped it: neither goes on"
        )
        seen = "a Horovod collective is innermost on all stacks, state.sync() only on those of the new workers"
        fix = (
            "end the worker there: then all ranks synchronize; use allranks.horovod.state.TorchState, which never "
            "skips, in place of hvd.elastic.TorchState (horovod/horovod#3494)"
        )
        return [self._note(self._find("collective-mismatch", words, seen, node=hosts, fix=fix))]

    # What it means

    def _on_started(self, host: str, slot: int, rank: int) -> list[Said]:
        if self._round is not None and host not in self._round.survivors:
            self._round.new.add(host)
        self._live[host, slot] = rank
        self._tails.pop(rank, None)
        return []

    def _on_ended(self, host: str, slot: int, exit_code: int, now_s: float) -> list[Said]:
        rank = self._live.pop((host, slot), None)
        if exit_code == 0 or rank is None or self._is_over:
            return []
        if host not in self._lost and self._hosts and host not in self._hosts:
            return []  # it left the discovery, and Horovod ends its worker
        self._has_failed = True
        if host in self._lost:
            return []
        name = _signal_name(exit_code)
        where = f"exit code {exit_code} of slot {slot} on {host}"
        not_met = _NOT_MET.search("\n".join(self._tails.get(rank, ())))
        if not_met is not None and self._round is not None:
            return self._on_not_met(self._round, not_met[1])
        if name is not None:
            found = self._find("dead-rank", f"the worker was ended by {name}", where, node=host, ranks=(rank,))
        else:
            lines = list(self._tails.get(rank, ()))
            words = next((line for line in reversed(lines) if _EXCEPTION.match(line)), "")
            place = next((line.strip() for line in reversed(lines) if line.startswith("  File ")), "")
            words = words or f"the worker ended with exit code {exit_code}"
            found = self._find("user-code-error", words, place or where, node=host, ranks=(rank,))
        if name == "SIGTERM":
            self._held.append((now_s + HELD_S, found))
            return []
        return [self._note(found)]

    def _on_not_met(self, current: _Round, seconds: str) -> list[Said]:
        """Take the end of a survivor that a new worker kept waiting; only the first is told."""
        if current.has_timed_out:
            return []
        current.has_timed_out = True
        new = fold_hosts(sorted(current.new))
        words = f"{new or 'a worker'} did not join within {seconds} s, and the workers that waited aborted"
        fix = f"if the worker there was only slow to start, raise HOROVOD_GLOO_TIMEOUT_SECONDS above {seconds}"
        seen = f"Wait timeout after {seconds} seconds for key"
        return [self._note(self._find("rendezvous-timeout", words, seen, Confidence.LIKELY, node=new, fix=fix))]

    def _on_discovered(self, hosts: Mapping[str, int]) -> None:
        with_workers = {host for host, _ in self._live}
        if self._wait is None:
            if any(hosts.get(host, 0) < self._hosts.get(host, 0) for host in with_workers if host in self._hosts):
                self._changes.add("removed")
            if any(slots > self._hosts.get(host, 0) for host, slots in hosts.items()):
                self._changes.add("added")
        self._hosts = dict(hosts)

    def _on_log(self, text: str, now_s: float) -> list[Said]:
        if found := _NEED.search(text):
            since_s = self._wait.since_s if self._wait is not None and self._round is None else now_s
            self._wait = _Wait(since_s, int(found[1]))
        elif (found := _HAVE.search(text)) and self._wait is not None:
            return self._count(self._wait, int(found[1]), now_s)
        elif found := _BLACKLISTED.search(text):
            self._blacklisted.add(found[1])
        elif found := _RESET.search(text):
            return self._on_reset(int(found[1]), now_s)
        elif _MET.search(text) and self._round is not None:
            self._round.num_met += 1
            if self._round.num_met >= len(self._round.survivors) and self._round.met_s is None:
                self._round.met_s = now_s
        elif "success count ==" in text:
            self._is_over = True
        elif _TIMEOUT.search(text):
            return self._on_timeout()
        elif text.startswith("Failed to execute discovery script"):
            return [f"the discovery script failed; Horovod tries it again: {text}"]
        return []

    def _count(self, wait: _Wait, have: int, now_s: float) -> list[Said]:
        """Take the number of slots that there are; the first time that they are too few is said."""
        wait.have = have
        if have >= wait.need or wait.told_s is not None:
            return []
        wait.told_s = now_s
        return [f"paused: {self._describe(wait, now_s)}"]

    def _on_reset(self, size: int, now_s: float) -> list[Said]:
        wait, self._wait = self._wait, None
        survivors = frozenset(host for host, _ in self._live if host in self._hosts and host not in self._lost)
        skips = self._changes == {"removed"} and not self._has_failed
        is_first = self._round is None
        self._round = _Round(size, survivors, has_skipped=skips and not is_first)
        self._changes, self._has_failed, self._blacklisted = set(), False, set()
        if wait is not None and wait.told_s is not None:
            return [f"goes on with {count_of(size, 'worker')} after a pause of {now_s - wait.since_s:.0f} s"]
        return [] if is_first else [f"goes on with {count_of(size, 'worker')}"]

    def _on_failed(self, text: str) -> list[Said]:
        """Take the driver's last words."""
        if _TIMEOUT.search(text) and not self._is_over:
            return self._on_timeout()
        return []

    def _on_timeout(self) -> list[Said]:
        self._is_over = True
        have = self._wait.have if self._wait is not None else 0
        need = self._wait.need if self._wait is not None else self._min_np
        words = (
            f"only {have} of {count_of(need, 'slot')} came back within {self._timeout_s:.0f} s; Horovod ended the job"
        )
        seen = f"Please check that you have enough resources to run at least {need} Horovod processes."
        return [self._note(self._find("horovod-elastic-timeout", words, seen, node=self._name_lost()))]

    def _describe(self, wait: _Wait, now_s: float) -> str:
        left_s = max(0.0, wait.since_s + self._timeout_s - now_s)
        lost = self._name_lost()
        return (
            f"Horovod has {wait.have} of the {count_of(wait.need, 'slot')} that it needs"
            + (f", without {lost}" if lost else "")
            + f"; in {left_s:.0f} s (HOROVOD_ELASTIC_TIMEOUT) it ends the job"
        )

    def _name_lost(self) -> str:
        """Return the lost hosts, and those whose workers failed last, folded."""
        failed = {finding.node for finding in self.findings if finding.node and "[" not in finding.node}
        back = {host for host, _ in self._live}
        return fold_hosts(sorted({*self._lost, *failed} - back))

    def _find(
        self,
        name: str,
        words: str,
        seen: str,
        confidence: Confidence = Confidence.CERTAIN,
        *,
        node: str = "",
        ranks: tuple[int, ...] = (),
        fix: str | None = None,
    ) -> Finding:
        cause = find_cause(name)
        return Finding(
            cause=cause.label,
            severity=Severity.FAIL,
            confidence=confidence,
            node=node or None,
            ranks=ranks,
            message=words,
            evidence=(Evidence(seen=seen),),
            fix=fix or cause.fix.tell(ANYBODY, {"node": node} if node else {}),
        )

    def _note(self, finding: Finding) -> Finding:
        self.findings.append(finding)
        return finding


def _place(functions: Sequence[str]) -> str:
    """Return where a worker waits: SYNC, TRAINING, or "" if no Horovod collective is innermost."""
    if not functions or functions[0].rpartition(".")[2] not in ("synchronize", "_wait_and_clear"):
        return ""
    return SYNC if any(name.rpartition(".")[2] == "sync" for name in functions) else TRAINING


def _signal_name(exit_code: int) -> str | None:
    try:
        return signal.Signals(exit_code - 128).name if exit_code > 128 else None
    except ValueError:
        return None
