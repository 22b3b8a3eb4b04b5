"""What must hold for a job in broken surroundings, and what fell. Pure.

What a job should have come to is not written down for each situation: the ranks note on a healthy disk which of their
writes failed, and this file derives the rest.

    the ranks noted                                 the job must
    all are done, each write of theirs succeeded    succeed, and blame nobody
    a write failed with ENOSPC or EDQUOT            end with AR005 (/dev/shm: also AR002, AR607), and name such a rank
    so, silently, in the checkpoint directory       as above, or AR590: nobody else knows that its disk was full
    a write failed with another errno               end, name such a rank and that errno's text, and not be AR005
    nothing, since no rank was started              be refused with an error or a finding on the terminal

Odd workers and floods say themselves what is expected (`Expect.rank`, `Expect.words`).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

MAX_AGENT_MB = 150
MAX_COMMAND_MB = 300
"""Of a command that reads a forged file of 200 MB: it may hold a part of it."""
FULL = ("ENOSPC", "EDQUOT")
_AGENTS_OWN = re.compile(
    r"^(Traceback \(most recent call last\)|Exception (ignored )?in |Fatal Python error)", re.MULTILINE
)
_SAID = re.compile(r"^\s*(?:✗ AR\d+|allranks: .{0,300}? (?:succeeded|was stopped|ended)|error: )", re.MULTILINE)
_LOSS = re.compile(r"\b(?:lines?|output)\b.{0,200}\b(?:not|cut|gone|removed|unwritten)\b|\b(?:lost|missing)\b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
PREFIXED = re.compile(r"^\[[^\]\n]{1,80} r\d+\].*\n?", re.MULTILINE)
"""A line of a rank."""


class Kind(StrEnum):
    """What fell. The first four are the counters of the report."""

    ENDED = "ended though all its own writes succeeded"
    CULPRIT = "wrong culprit"
    NO_VERDICT = "no verdict"
    MEMORY = "more memory than allowed"
    TRACEBACK = "traceback of allranks"
    HUNG = "not over at its deadline"
    LEFT = "processes left"
    SILENT_LOSS = "lost output not reported"
    FALSE_PATH = "names files that are not there"
    HARMED = "changed what it must not touch"
    CONTROL = "printed control characters from a file"
    VOID = "the situation did not come about"


@dataclass(frozen=True)
class Fall:
    """One thing that did not hold."""

    kind: Kind
    what: str


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What a situation adds to the rules above."""

    rank: int | None = None
    """This rank fails by itself and must be named, among others; None: derived from the notes."""
    words: str = ""
    """A pattern that must be in the culprit's message, notes or evidence."""
    causes: tuple[str, ...] = ()
    """Ids that the culprit may have; none: any."""
    needs_file: bool = True
    """verdict.json must be there; False: the terminal is enough, since the run directory is gone or read-only."""
    may_refuse: bool = False
    """It is fine if no rank starts, for example where the disk was full before."""
    recovers: bool = False
    """A rank fails, and the job goes on: its verdict may tell of that failure."""
    is_terminal_gone: bool = False
    """Nobody reads the terminal to its end."""
    may_fail: bool = False
    """Both are fine, a job that succeeds and one that fails: its end is judged, and not its culprit."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one job did."""

    exit_code: int | None
    """None: it was still there at its deadline."""
    terminal: str
    notes: Mapping[int, Sequence[Mapping[str, Any]]]
    """Of each rank's last life."""
    verdict: Mapping[str, Any] | None
    peak_mb: float
    left: Sequence[str] = ()
    """Processes that were there some seconds after the job."""
    missing: Sequence[str] = ()
    """Directories that the terminal calls the output's, without it in them."""
    has_struck: bool = True
    harmed: Sequence[str] = field(default_factory=tuple)


def judge(facts: Facts, expect: Expect) -> list[Fall]:
    """Return what did not hold of a job."""
    return list(_judge_job(facts, expect))


def _judge_job(facts: Facts, expect: Expect) -> Iterator[Fall]:
    agents_own = PREFIXED.sub("", facts.terminal)
    if not facts.has_struck:
        yield Fall(Kind.VOID, "the job was over before the fault struck")
    if facts.exit_code is None:
        yield Fall(Kind.HUNG, "its agent was killed by this test")
        return
    if traceback := _AGENTS_OWN.search(agents_own):
        yield Fall(Kind.TRACEBACK, agents_own[traceback.start() :][-400:])
    if facts.exit_code < 0:
        yield Fall(Kind.TRACEBACK, f"the agent died of signal {-facts.exit_code}")
    if facts.peak_mb > MAX_AGENT_MB:
        yield Fall(Kind.MEMORY, f"{facts.peak_mb:.0f} MB")
    if facts.left:
        yield Fall(Kind.LEFT, ", ".join(facts.left))
    if facts.harmed:
        yield Fall(Kind.HARMED, ", ".join(facts.harmed))
    if not any(facts.notes.values()) and expect.may_refuse:
        if facts.exit_code == 0 or not _SAID.search(agents_own):
            yield Fall(Kind.NO_VERDICT, f"no rank was started, exit code {facts.exit_code}, without a reason")
        return
    yield from _judge_verdict(facts, expect, agents_own)
    lost = sum(note.get("lines", 0) for notes in facts.notes.values() for note in notes if note["note"] == "lost")
    if lost and not expect.is_terminal_gone and not _LOSS.search(agents_own):
        yield Fall(Kind.SILENT_LOSS, f"{lost} lines could not be written")
    if facts.missing:
        yield Fall(Kind.FALSE_PATH, ", ".join(facts.missing))


def _judge_verdict(facts: Facts, expect: Expect, agents_own: str) -> Iterator[Fall]:
    is_said = expect.is_terminal_gone or bool(_SAID.search(agents_own))
    if facts.verdict is None and (expect.needs_file or not is_said):
        yield Fall(Kind.NO_VERDICT, "no verdict.json" + ("" if is_said else ", and nothing on the terminal"))
    failed = failed_writes(facts.notes)
    culprit = _culprit(facts, agents_own)
    if expect.may_fail:
        return
    if expect.rank is None and not failed:
        not_done = [rank for rank, notes in facts.notes.items() if not any(note["note"] == "done" for note in notes)]
        if facts.exit_code != 0 or not_done or (culprit and not expect.recovers):
            yield Fall(Kind.ENDED, f"exit code {facts.exit_code}; ranks not done: {not_done}; blamed: {culprit[:300]}")
        return
    if not culprit:
        yield Fall(Kind.CULPRIT, f"nobody was blamed, exit code {facts.exit_code}; failed: {failed or expect.rank}")
        return
    ranks, causes, words = _wanted(failed, expect)
    blamed = _blamed_ranks(facts, culprit)
    if not blamed & ranks:
        yield Fall(Kind.CULPRIT, f"blamed ranks {sorted(blamed)}, expected one of {sorted(ranks)}: {culprit[:300]}")
    cause = found[0] if (found := re.findall(r"AR\d{3}", culprit)) else ""
    if (causes and cause not in causes) or (not causes and cause == "AR005" and "AR005" not in words):
        yield Fall(Kind.CULPRIT, f"cause {cause}, expected {' or '.join(causes) or 'any but AR005'}: {culprit[:300]}")
    if not re.search(words, culprit):
        yield Fall(Kind.CULPRIT, f"{words!r} is not in: {culprit[:300]}")


class Failed(NamedTuple):
    """A write whose failure ended a rank."""

    rank: int
    errno: str
    place: str
    is_silent: bool


def failed_writes(notes: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Failed]:
    """Return them all."""
    return [
        Failed(rank, note["errno"], note["place"], note["is_silent"])
        for rank, told in notes.items()
        for note in told
        if note["note"] == "failed"
    ]


def _wanted(failed: Sequence[Failed], expect: Expect) -> tuple[set[int], tuple[str, ...], str]:
    """Ranks of which one must be named, causes of which one must be given, and what must be in the text."""
    if expect.rank is not None:
        return {expect.rank}, expect.causes, expect.words
    ranks = {each.rank for each in failed}
    if any(each.errno in FULL for each in failed):
        is_unknown = all(each.is_silent and each.place != "run" for each in failed)
        of_shm = ("AR002", "AR607") if any(each.place == "shm" for each in failed) else ()
        return ranks, ("AR005", *of_shm, *(("AR590",) if is_unknown else ())), ""
    if any(each.is_silent for each in failed):
        return ranks, expect.causes, "exit code"
    texts = {re.escape(os.strerror(getattr(errno, each.errno))) for each in failed} | {each.errno for each in failed}
    return ranks, expect.causes, "|".join(sorted(texts))


def _culprit(facts: Facts, agents_own: str) -> str:
    """All that is said of the first failing finding, from verdict.json, else from the terminal; empty: nobody."""
    if facts.verdict is not None:
        failing = [each for each in facts.verdict["findings"] if each["severity"] == "fail"]
        return str(failing[0]) if failing else ""
    block = re.search(r"^✗ AR\d+.*\n(?:  .*\n)*", agents_own, re.MULTILINE)
    return block[0] if block else ""


def _blamed_ranks(facts: Facts, culprit: str) -> set[int]:
    if facts.verdict is not None:
        return set(next(each for each in facts.verdict["findings"] if each["severity"] == "fail")["ranks"])
    line = re.search(r"\branks? ([\d, -]+)", culprit)
    bounds = [part.split("-") for part in line[1].replace(" ", "").split(",") if part] if line else []
    return {rank for bound in bounds for rank in range(int(bound[0]), int(bound[-1]) + 1)}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command that reads run files did."""

    command: str
    exit_code: int | None
    text: str
    peak_mb: float
    harmed: Sequence[str] = ()


def judge_command(ran: Ran) -> list[Fall]:
    """Return what did not hold of a command that reads what others wrote."""
    falls = []
    if ran.exit_code is None:
        falls.append(Fall(Kind.HUNG, ran.command))
    elif ran.exit_code not in (0, 1, 2, 3, 78):
        falls.append(Fall(Kind.TRACEBACK, f"{ran.command}: exit code {ran.exit_code}"))
    if traceback := _AGENTS_OWN.search(ran.text):
        falls.append(Fall(Kind.TRACEBACK, f"{ran.command}: {ran.text[traceback.start() :][-300:]}"))
    if ran.peak_mb > MAX_COMMAND_MB:
        falls.append(Fall(Kind.MEMORY, f"{ran.command}: {ran.peak_mb:.0f} MB"))
    if control := _CONTROL.search(ran.text):
        falls.append(Fall(Kind.CONTROL, f"{ran.command}: {ran.text[max(0, control.start() - 60) :][:140]!r}"))
    if ran.harmed:
        falls.append(Fall(Kind.HARMED, f"{ran.command}: {', '.join(ran.harmed)}"))
    return falls
