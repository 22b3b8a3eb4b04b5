"""Which ranks had one more batch when the next stage began, and then all output stopped? Pure.

    [rank 0] batch 7 - entered
    [rank 1] batch 7 - entered
    [rank 0] batch 8 - entered
    Start of validation

Only a complete log that ends where the stage begins counts: otherwise, lines of ranks that continue may be missing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from allranks.causes.book import find_cause
from allranks.causes.cause import Role
from allranks.model.finding import Confidence
from allranks.report.text import fold_ranks
from allranks.why.conclusion import Conclusion
from allranks.why.logs.line import Line
from allranks.why.logs.log_events import Logs
from allranks.why.people import Culprit, People

_STAGE = re.compile(
    r"(?i)\b(?:(?:start|begin|run)\w* (?:of |the )?(?:validation|evaluation|eval|testing)|validating)\b"
)
_RANK = re.compile(r"(?i)\[?\brank\W{0,2}(\d{1,6})\]?")
_ROUND = re.compile(r"(?i)\b(?:batch|step|iter(?:ation)?)\b")
_COUNT = re.compile(r"\([^()]{0,40}\)|\d+(?:\.\d+)?")
_AFTER = 2
"""Maximum number of lines after the beginning of the stage."""


def conclude_rounds(logs: Logs, people: People) -> Iterator[Conclusion]:
    """Return the ranks that had more batches than the others."""
    for tail in logs.tails:
        if not tail.is_whole:
            continue
        lines = tail.lines
        stage = next((index for index, line in enumerate(lines) if _STAGE.search(line.text)), None)
        if stage is None or len(lines) - stage - 1 > _AFTER:
            continue
        counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        last: dict[tuple[str, int], Line] = {}
        for line in lines[:stage]:
            rank = line.rank if line.rank is not None else _rank(line.text)
            if rank is not None and _ROUND.search(line.text):
                print_ = " ".join(_COUNT.sub("#", _RANK.sub("", line.text)).split())
                counts[print_][rank] += 1
                last[print_, rank] = line
        everybody = {rank for by_rank in counts.values() for rank in by_rank}
        for print_, by_rank in counts.items():
            if len(everybody) < 2 or set(by_rank) != everybody or len(set(by_rank.values())) == 1:
                continue
            most = max(by_rank.values())
            more = tuple(sorted(rank for rank, count in by_rank.items() if count == most))
            fewest = min(by_rank, key=lambda rank: by_rank[rank])
            yield Conclusion(
                cause=find_cause("uneven-inputs"),
                role=Role.LIKELY,
                confidence=Confidence.UNDECIDED,
                culprit=Culprit(ranks=more),
                message=f"{fold_ranks(more)} had {most} batches before the next stage, "
                f"{fold_ranks([fewest])} had {by_rank[fewest]}; then all output stopped",
                evidence=(last[print_, more[0]], last[print_, fewest], lines[stage]),
                ask="print how many batches each rank has: len(dataloader), or a count at the end of the epoch",
            )
            return


def _rank(text: str) -> int | None:
    match = _RANK.search(text)
    return int(match[1]) if match else None
