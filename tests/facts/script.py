"""Cases of the solver as prose: facts above, the story below.

    # the watchdog's rank only waited
    ranks 0-2 waited in dp#7 at 10:00:00
    rank 3 called dp#6 [straggler-rank]
    => culprit: rank 3 [straggler-rank] likely
    => victims: 0-2

A line of facts is `WHO WHAT`, then in any order what else is known: `[cause]` or `[cause or other]`, `likely`,
`undecided`, `at TIME` or `at TIME to TIME` (`by another clock`), `line N of FILE`, `says the kernel`, `speaker rank N`,
`seen first`, `told "WORDS"`, `generic`, `fatal`, `own` (of the job), `on mlx5_0`, `attempt N`; `world 8` alone
in a line is the number of ranks. Below, `=>` lines are the whole story: `=> hangs` if it did not fail, each root with
its part, the victims, and `=> chain: ...` where a case asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from allranks.facts.fact import NEVER_SAID, NOBODY, Fact, FactKind, Place, Said, When, Who
from allranks.facts.solve import solve
from allranks.facts.story import Story, StoryEnd
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks

WHO = (
    r"(?P<who>ranks? [\d,-]+(?: on \S+)?|local rank \d+(?: on \S+)?(?: as \d+)?|process \d+(?: on \S+)?|node \S+"
    r"|address \S+|somebody)"
)
WHATS = (
    (r"ended by (?P<signal>[A-Z]+)\b", FactKind.ENDED),
    (r"ended with (?P<code>-?\d+)", FactKind.ENDED),
    (r"ended\b", FactKind.ENDED),
    (r"raised\b", FactKind.RAISED),
    (r"waited in (?P<group>[\w.-]*)#(?P<seq>\d+)(?: \((?P<op>\w+)\))?", FactKind.WAITED),
    (r"waited for (?P<peer>rank \d+)", FactKind.WAITED),
    (r"waited\b", FactKind.WAITED),
    (r"lost the store\b", FactKind.STORE_GONE),
    (r"lost (?P<peer>rank \d+|node \S+|address \S+|somebody)", FactKind.PEER_LOST),
    (r"is missing in (?P<group>[\w.-]*)#(?P<seq>\d+)", FactKind.MISSING),
    (r"(?:is|are) missing\b", FactKind.MISSING),
    (r"has a broken device\b", FactKind.DEVICE_FAULT),
    (r"has a broken link\b", FactKind.LINK_FAULT),
    (r"has an odd setting\b", FactKind.SETTING),
    (r"is gone\b", FactKind.NODE_LOST),
    (r"was ended by the scheduler\b", FactKind.SCHEDULER_END),
    (r"was killed by its launcher(?: with (?P<signal>[A-Z]+))?", FactKind.LAUNCHER_KILL),
    (r"recovered\b", FactKind.RECOVERED),
    (r"made a step\b", FactKind.STEP),
    (r"finished\b", FactKind.FINISHED),
)


@dataclass(frozen=True)
class Case:
    title: str
    facts: tuple[Fact, ...]
    world: int | None
    told: tuple[str, ...]

    def story(self) -> Story:
        return solve(self.facts, world=self.world)


def read_cases(path: Path) -> Iterator[Case]:
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line.strip()]
        titles = [line[2:] for line in lines if line.startswith("# ")]
        facts = [line for line in lines if not line.startswith(("# ", "=> "))]
        if not facts:
            continue
        worlds = [int(line.split()[1]) for line in facts if line.startswith("world ")]
        yield Case(
            title=f"{path.stem}: {titles[0]}",
            facts=tuple(fact for line in facts if not line.startswith("world ") for fact in parse(line)),
            world=worlds[0] if worlds else None,
            told=tuple(line for line in lines if line.startswith("=> ")),
        )


def parse(line: str) -> list[Fact]:
    """Return the facts of one line: one for each rank that it names."""
    match = re.match(WHO + " ", line)
    assert match is not None, line
    rest = line[match.end() :]
    what, kind = next((what, kind) for pattern, kind in WHATS if (what := re.match(pattern, rest)))
    groups = what.groupdict()
    rest = rest[what.end() :]
    text = line

    def take(pattern: str) -> re.Match[str] | None:
        nonlocal rest
        found = re.search(pattern, rest)
        if found is not None:
            rest = rest[: found.start()] + rest[found.end() :]
        return found

    causes = take(r"\[([^]]+)\]")
    names = causes[1].split(" or ") if causes else [""]
    time = take(r"at ([\d:.]+)(?: to ([\d:.]+))?( by another clock)?")
    place = take(r"line (\d+) of (\S+)")
    said = take(r"says the (\w+)")
    speaker = take(r"speaker (rank \d+)")
    attempt = take(r"attempt (\d+)")
    told = take(r'told "([^"]+)"')
    interface = take(r"on (mlx\S+)")
    words = set(rest.replace(",", " ").split())
    assert words <= {"likely", "undecided", "generic", "seen", "first", "certain", "fatal", "own"}, line
    confidence = next((one for one in Confidence if one.value in words), Confidence.CERTAIN)
    when = NEVER_SAID
    if time:
        when = When(_seconds(time[1]), _seconds(time[2] or time[1]), "another" if time[3] else "utc")
    return [
        Fact(
            kind=kind,
            who=who,
            when=when,
            said=Said[said[1].upper()] if said else Said.SELF,
            places=(Place(place[2], int(place[1]), text),) if place else (),
            cause=names[0],
            alternatives=tuple(names[1:]),
            confidence=confidence,
            attempt=int(attempt[1]) if attempt else 0,
            speaker=_people(speaker[1])[0] if speaker else NOBODY,
            peer=_people(groups["peer"])[0] if groups.get("peer") else NOBODY,
            group=groups.get("group") or None,
            seq=int(groups["seq"]) if groups.get("seq") else None,
            op=groups.get("op"),
            signal=Signals[f"SIG{groups['signal']}"] if groups.get("signal") else None,
            code=int(groups["code"]) if groups.get("code") else None,
            is_generic="generic" in words,
            is_fatal="fatal" in words,
            is_first_observed="first" in words,
            is_of_job="own" in words,
            told=told[1] if told else "",
            interface=interface[1] if interface else None,
        )
        for who in _people(match["who"])
    ]


def _seconds(text: str) -> float:
    hours, minutes, seconds = text.split(":")
    return 3600.0 * int(hours) + 60.0 * int(minutes) + float(seconds)


def _people(text: str) -> list[Who]:
    words = text.split()
    on = words[words.index("on") + 1] if "on" in words else None
    if words[0] in {"rank", "ranks"}:
        return [Who(rank=rank, node=on) for rank in _ranks(words[1])]
    if words[0] == "local":
        pid = int(words[words.index("as") + 1]) if "as" in words else None
        return [Who(local_rank=int(words[2]), node=on, pid=pid)]
    if words[0] == "process":
        return [Who(pid=int(words[1]), node=on)]
    return [{"node": Who(node=words[-1]), "address": Who(address=words[-1]), "somebody": NOBODY}[words[0]]]


def _ranks(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def tell(story: Story) -> tuple[str, ...]:
    """Return the story in the words of the cases."""
    lines = [] if story.outcome is StoryEnd.FAILED else [f"=> {story.outcome.value}"]
    for root in story.roots:
        cause = " or ".join(filter(None, (root.fact.cause, *root.fact.alternatives)))
        what = f"[{cause}]" if cause else root.fact.kind.value
        lines.append(f"=> {root.part.value}: {_names(root.blamed)} {what} {root.confidence.value}")
    if story.victims:
        lines.append(f"=> victims: {fold_ranks(story.victims).partition(' ')[2]}")
    return tuple(lines)


def _names(blamed: Sequence[Who]) -> str:
    if not blamed:
        return "nobody"
    ranks = sorted(who.rank for who in blamed if who.rank is not None)
    words = [fold_ranks(ranks)] if ranks else []
    for who in blamed:
        if who.rank is None:
            parts = [f"local rank {who.local_rank}"] if who.local_rank is not None else []
            parts += [f"process {who.pid}"] if who.pid is not None and not parts else []
            parts += [f"{'on ' if parts else 'node '}{who.node}"] if who.node else []
            parts += [f"address {who.address}"] if who.address else []
            words.append(" ".join(parts))
    return ", ".join(words)


def tell_chain(story: Story) -> str:
    return "=> chain: " + " -> ".join(f"{len(link)} {link[0].kind.value}" for link in story.chain)
