"""Ask `allranks why` about files as its command line does, in one process, and read the answer as a person would."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from allranks.cli.why import make_answer
from allranks.model.errors import HostlistError
from allranks.model.finding import Finding
from allranks.model.hostlist import expand_hosts
from allranks.why.dumps import find_dumps, is_dump, read_dumps
from allranks.why.findings import count_first
from allranks.why.logs.collect import collect
from allranks.why.logs.log_events import Pattern
from allranks.why.logs.match import Matcher
from allranks.why.logs.sources import find_sources

HERE = Path(__file__).parent
PROBES = HERE / "probes"


@dataclass(frozen=True, slots=True)
class Told:
    """One answer: all findings, as `--all` prints them."""

    all: tuple[Finding, ...]
    exit_code: int

    @property
    def printed(self) -> tuple[Finding, ...]:
        """What `why` prints without `--all`."""
        return self.all[: count_first(self.all)]

    @property
    def cause(self) -> str | None:
        """The id of the first cause; None if the answer has no finding."""
        return self.printed[0].cause_id if self.printed else None

    @property
    def confidence(self) -> str:
        """How sure the answer is; an answer without a finding is undecided."""
        return str(self.printed[0].confidence) if self.printed else "undecided"

    @property
    def culprits(self) -> str:
        """Whom the answer names; of an undecided one, all that it puts up for choice."""
        return "; ".join(map(name_culprit, self.printed))

    @property
    def beside(self) -> str:
        """Who is named beside the first: in its notes, or by a finding of its own."""
        first = [" ".join(self.printed[0].notes), self.printed[0].message] if self.printed else []
        return "; ".join([*first, *map(name_culprit, self.all[1:])])

    @property
    def verdict(self) -> tuple[str | None, str, str]:
        """Cause, culprit and confidence: what must not depend on how the logs were collected."""
        return self.cause, name_culprit(self.printed[0]) if self.printed else "", self.confidence


def name_culprit(finding: Finding) -> str:
    """Return the culprit word by word: `node gpu-b17; rank 72; process 3976`."""
    names = [name for part in (finding.node or "").split(" or ") if part for name in _expand(part)]
    words = [f"node {name}" for name in sorted(set(names))]
    words += [f"rank {rank}" for rank in sorted(finding.ranks)]
    words += [finding.interface] if finding.interface else []
    words += sorted((finding.subject or "").split(", ")) if finding.subject else []
    return "; ".join(words)


def _expand(nodes: str) -> Sequence[str]:
    try:
        return expand_hosts(nodes)
    except HostlistError:
        return [nodes]


def has_word(word: str, text: str) -> bool:
    """Whether a text has this word whole: `rank 2` is neither in `local rank 2` nor in `rank 21`."""
    return re.search(rf"(?<![\w.-])(?<!local ){re.escape(word)}(?!\w)", text) is not None


def has_one_of(words: str, text: str) -> bool:
    """Whether a text has one of `rank 2 or rank 9`."""
    return any(has_word(word, text) for word in words.split(" or "))


def ask(targets: Sequence[Path], patterns: tuple[Pattern, ...], matcher: Matcher) -> Told:
    """Return what `why` tells of files or directories, in this order."""
    names = [str(target) for target in targets]
    sources = find_sources([name for name in names if not is_dump(Path(name))])
    logs = collect(sources, patterns, matcher=matcher, max_workers=1)
    dumps = read_dumps(find_dumps(names), [])
    answer = make_answer(logs, dumps, (), is_all=True, with_timeline=False)
    return Told(answer.findings, answer.exit_code)


def list_wrong(told: Told, case: Mapping[str, str]) -> list[str]:
    """Return what of an answer is not as the table says."""
    wrong = []
    exits = case.get("exit", "1").split(" or ")
    if str(told.exit_code) not in exits:
        wrong.append(f"exit code {told.exit_code}")
    is_choice = told.confidence == "undecided" and "undecided" in case
    if is_choice and not has_one_of(case["undecided"], told.culprits):
        wrong.append(f"undecided without {case['undecided']}")
    if not is_choice:
        if "cause" in case and told.cause not in case["cause"].split(" or "):
            wrong.append(f"cause {told.cause}")
        wrong += [
            f"no {word}"
            for word in filter(None, case.get("culprit", "").split(", "))
            if not has_one_of(word, told.culprits)
        ]
        if "confidence" in case and told.confidence not in case["confidence"].split(" or "):
            wrong.append(told.confidence)
    causes = {finding.cause_id for finding in told.printed}
    choices = case.get("undecided", "").split(" or ") if is_choice else ()
    wrong += [
        f"names {word}"
        for word in filter(None, case.get("never", "").split(", "))
        if word not in choices and (word in causes or has_word(word, told.culprits))
    ]
    if not is_choice and "beside" in case and not has_one_of(case["beside"], told.beside):
        wrong.append(f"not beside it: {case['beside']}")
    return wrong


@cache
def read_table(name: str) -> Mapping[str, Mapping[str, str]]:
    """Return the expected answers by log (probes.toml, baselines.toml)."""
    return tomllib.loads((HERE / name).read_text())
