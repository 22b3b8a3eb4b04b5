"""What did a strike do to a job, and was that correct? Pure: from times and events to a list of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from allranks.lab.faults.fault import Expected, TrueCulprit
from allranks.lab.faults.running.strike import NextLeader, Strike
from allranks.lab.faults.running.target import Saved, StepDone
from allranks.lab.running.rivals import find_rivals
from allranks.lab.start_drill import is_named
from allranks.model.finding import Confidence, Finding, Severity
from allranks.model.ledger import MAX_RANKS, Ledger

ACCOUNT_ERROR = 0.001
"""Part of the whole time, by which the sums of a job's account may differ from it."""
EARLY_S = 0.2
"""An order is logged a moment before it is executed, a signal after it was sent."""


class StrikeBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """How plain torchrun behaved after the same strike."""

    silent_s: float | None
    """From the strike to its first line about a failure; None: there was none."""
    said: str
    next_step_s: float | None
    """From the strike to the next optimizer step; None: there was none."""
    exit_code: int | None
    """None: it was cut off."""


class JobSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one job."""

    struck_s: float
    began_s: float = 0.0
    """Since when nothing but the strike has happened to the job."""
    printed: tuple[tuple[float, str], ...] = ()
    """(when, id) of the causes on the terminal since the strike."""
    events: tuple[Mapping[str, Any], ...] = ()
    steps: tuple[StepDone, ...] = ()
    saved: tuple[Saved, ...] = ()
    start: tuple[int, int] = (0, 0)
    """Ranks of the workers that were struck."""
    checkpoint: int | None = None
    """Step of the newest intact checkpoint at the time of the strike."""
    has_ended: bool = False
    exit_code: int | None = None
    num_requeues: int = 0
    left: tuple[str, ...] = ()
    """Processes that outlived the job."""
    more: tuple[str, ...] = ()
    """Errors from the strike's own check."""
    ledger: Ledger | None = None
    """Where the job says that its time went; None: it left nothing that can be read."""

    def verdicts(self, succession: NextLeader | None = None) -> list[Mapping[str, Any]]:
        """Return the finding events since the strike; after the loss of a leader, those of its successor only."""
        since_s = self._since_s(succession)
        return [event for event in self.events if event["event"] == "verdict" and float(event["time_s"]) >= since_s]

    def verdict_s(self, succession: NextLeader | None = None) -> float | None:
        """Return the seconds from the strike to the first verdict, as printed, or as logged if nothing was printed."""
        since_s = self._since_s(succession)
        printed = [time_s for time_s, _ in self.printed if time_s >= since_s]
        times = printed or [float(verdict["time_s"]) for verdict in self.verdicts(succession)]
        return max(0.0, min(times) - self.struck_s) if times else None

    def takeovers(self) -> list[Mapping[str, Any]]:
        """Return the events since the strike by which another node took over the lead."""
        return [event for event in self.events if event["event"] == "took_over" and self._is_after(event)]

    def successors(self) -> tuple[str, ...]:
        """Return the nodes that took over the lead, in this order."""
        return tuple(dict.fromkeys(str(takeover["leader"]) for takeover in self.takeovers()))

    def next_step(self) -> StepDone | None:
        """Return the first optimizer step of the next start of the workers."""
        return min((step for step in self.steps if step.start > self.start), key=lambda step: step.time_s, default=None)

    def next_step_s(self) -> float | None:
        """Seconds from the strike to that step."""
        step = self.next_step()
        return step.time_s - self.struck_s if step else None

    def phases_s(self) -> dict[str, float]:
        """Return the seconds from the strike to each event before that step."""
        after = [event for event in self.events if self._is_after(event)]
        names = ("took_over", "verdict", "restarting", "started")
        found = {name: next((event for event in after if event["event"] == name), None) for name in names}
        return {name: round(float(event["time_s"]) - self.struck_s, 2) for name, event in found.items() if event}

    def _since_s(self, succession: NextLeader | None) -> float:
        taken = self.takeovers() if succession is NextLeader.LOST else []
        return (float(taken[0]["time_s"]) if taken else self.struck_s) - EARLY_S

    def _is_after(self, event: Mapping[str, Any]) -> bool:
        return float(event["time_s"]) >= self.struck_s - EARLY_S


def judge(
    strike: type[Strike], seen: JobSeen, truth: TrueCulprit, ranks: Sequence[int], *, slowness: float = 1.0
) -> list[str]:
    """Return what differs from the expected outcome; empty if it is correct.

    Args:
        strike: the strike.
        seen: measurements of the job.
        truth: the culprit.
        ranks: the culprit's ranks; empty if a verdict need not name them.
        slowness: of this machine; the next step, most of which is imports, may take so many times its limit.
    """
    wrong = [f"false alarm before the strike: {event['cause']}" for event in seen.events if _is_early(event, seen)]
    verdicts = seen.verdicts(strike.succession)
    is_survived = strike.severity is Expected.SURVIVED
    if is_survived or not strike.cause:
        allowed = {*strike.cause, *strike.also}
        accused = [verdict for verdict in verdicts if verdict["cause_id"] not in allowed]
        wrong += [f"accused: {verdict['cause']} {verdict.get('node') or ''}".rstrip() for verdict in accused]
    else:
        wrong += _judge_verdict(strike, seen, verdicts, truth, ranks)
    if is_survived and seen.next_step() is not None:
        wrong.append("the job was restarted")
    if strike.severity is Expected.RESUMED:
        wrong += _judge_next_step(strike, seen, slowness)
    if bool(seen.num_requeues) != strike.is_requeued:
        wrong.append("the job was requeued" if seen.num_requeues else "the job was not requeued")
    wrong += [*_judge_leaders(strike, seen, truth), *_judge_end(strike, seen)]
    wrong += find_rivals(seen.steps, seen.saved)
    wrong += [] if seen.ledger is None else judge_account(seen.ledger, attempts=1 + seen.num_requeues)
    return [*wrong, *seen.more, *(f"left running: {process}" for process in seen.left)]


def judge_account(ledger: Ledger, *, attempts: int) -> list[str]:
    """Return what does not close in a job's account: by category, by rank, and by attempt."""
    by_rank = sum(sum(rank.seconds.values()) for rank in ledger.ranks)
    sums = {"the categories": sum(ledger.seconds.values())}
    if 0 < len(ledger.ranks) < MAX_RANKS:
        sums["the ranks"] = by_rank
    wrong = [
        f"{name} of the account sum to {sum_s:.1f} s of {ledger.rank_s:.1f} s"
        for name, sum_s in sums.items()
        if abs(sum_s - ledger.rank_s) > ACCOUNT_ERROR * ledger.rank_s
    ]
    if ledger.attempts != attempts:
        wrong.append(f"the account has {ledger.attempts} attempts of {attempts}")
    return wrong


def _judge_verdict(
    strike: type[Strike], seen: JobSeen, verdicts: Sequence[Mapping[str, Any]], truth: TrueCulprit, ranks: Sequence[int]
) -> list[str]:
    if not verdicts:
        return [f"no verdict; the truth is {' or '.join(strike.cause)} {truth}".rstrip()]
    wrong = []
    first = _merge(verdicts, strike.together_s)
    named = f"{first['cause']} {first['node']} {tuple(first['ranks'])}"
    if first["cause_id"] not in strike.cause:
        wrong.append(f"verdict {named}; the truth is {' or '.join(strike.cause)} {truth}".rstrip())
    elif truth.nodes and not is_named(_as_finding(first), truth):
        wrong.append(f"verdict {named}; the truth is {truth}")
    elif ranks and first["ranks"] != sorted(ranks):
        wrong.append(f"verdict {named}; the truth is rank {', '.join(map(str, ranks))}")
    taken_s = seen.verdict_s(strike.succession)
    if strike.verdict_s is not None and taken_s is not None and taken_s > strike.verdict_s:
        wrong.append(f"the verdict took {taken_s:.1f} s, expected at most {strike.verdict_s:.0f} s")
    return wrong


def _judge_next_step(strike: type[Strike], seen: JobSeen, slowness: float) -> list[str]:
    taken_s, next_step = seen.next_step_s(), seen.next_step()
    if taken_s is None or next_step is None:
        return ["no further step"]
    if seen.checkpoint is not None and next_step.step == 1:
        return [f"the job started from the beginning, although there was a checkpoint at step {seen.checkpoint}"]
    before = max((step.world for step in seen.steps if step.start == seen.start), default=0)
    if strike.num_lost is not None and next_step.world != before - strike.num_lost:
        return [f"the next step was on {next_step.world} ranks, expected {before - strike.num_lost} of {before}"]
    limit_s = None if strike.next_step_s is None else strike.next_step_s * slowness
    if limit_s is not None and taken_s > limit_s:
        return [f"the next step took {taken_s:.1f} s, expected at most {limit_s:.0f} s"]
    return []


def _judge_leaders(strike: type[Strike], seen: JobSeen, truth: TrueCulprit) -> list[str]:
    successors = seen.successors()
    if strike.succession is None:
        return []
    if strike.succession is NextLeader.NONE:
        return [f"{node} leads now, although the leader was not lost" for node in successors]
    if not successors:
        return ["no other node leads now"]
    return [f"{node} leads now, although it was struck" for node in successors if node in truth.nodes]


def _judge_end(strike: type[Strike], seen: JobSeen) -> list[str]:
    if not seen.has_ended:
        return ["the job did not end"]
    if strike.severity is not Expected.FAIL:
        return [] if seen.exit_code == 0 else [f"exit code {seen.exit_code}, expected 0"]
    if seen.exit_code == 0 or (strike.exit_codes and seen.exit_code not in strike.exit_codes):
        return [f"exit code {seen.exit_code}, expected {' or '.join(map(str, strike.exit_codes)) or 'another'}"]
    return []


def _is_early(event: Mapping[str, Any], seen: JobSeen) -> bool:
    return event["event"] == "verdict" and seen.began_s < float(event["time_s"]) < seen.struck_s - EARLY_S


def _merge(verdicts: Sequence[Mapping[str, Any]], together_s: float) -> dict[str, Any]:
    """Return the first verdict, with the nodes and ranks of verdicts on the same cause at the same time."""
    first = verdicts[0]
    until_s = float(first["time_s"]) + together_s
    same = [
        verdict for verdict in verdicts if verdict["cause"] == first["cause"] and float(verdict["time_s"]) <= until_s
    ]
    nodes = ", ".join(dict.fromkeys(verdict["node"] for verdict in same if verdict.get("node")))
    return {**first, "node": nodes, "ranks": sorted(rank for verdict in same for rank in verdict.get("ranks") or ())}


def _as_finding(verdict: Mapping[str, Any]) -> Finding:
    return Finding(
        cause=str(verdict["cause"]),
        severity=Severity.FAIL,
        confidence=Confidence.CERTAIN,
        node=verdict["node"] or None,
        interface=verdict.get("interface"),
        message=str(verdict.get("message", "")),
    )
