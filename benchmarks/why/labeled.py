"""How often is `allranks why` right? Counted over a folder of labelled cases in the format of the corpus.

    python -m benchmarks.why.labeled DIR [--json] [--case ID]        # or FILE.jsonl, a case in each line

A case is a JSON object with `log`, `label`, `also`, `culprit_any`, `label_confidence` and `score`; only those with
`score: true` count. Top-1: the first cause is the label or one of `also`; top-3: one of the first three is. The culprit
is right when any of `culprit_any` occurs in it as whole words.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.causes.book import all_causes
from allranks.causes.cause import Family
from allranks.why.blame import conclude
from allranks.why.conclusion import Conclusion
from allranks.why.logs.collect import collect
from allranks.why.logs.log_events import Pattern, list_patterns
from allranks.why.logs.match import Matcher
from allranks.why.logs.sources import Source

SAME = {"oom-host": "host-oom-kill"}
"""Labels of the corpus -> names of causes, if they differ."""
FINER = {"straggler-rank": ("stuck-rank",)}
"""Labels that several causes cover: each of them counts."""
INNOCENT = frozenset(("healthy", "user-code-error"))
"""Labels for which the network or the hardware must not be blamed."""
_HARDWARE = frozenset((Family.GPU, Family.NETWORK, Family.FABRIC))
_NO_HARDWARE = frozenset(("cuda-oom", "cuda-illegal-access", "invalid-device", "backend-device-mismatch"))
"""Causes of the GPU's family that are errors of the program."""


@dataclass(frozen=True, slots=True)
class EvaluatedCase:
    """One case, and the conclusions from its log."""

    case: dict[str, Any]
    found: tuple[str, ...]
    """Names of causes, the first one first."""
    culprit: str
    is_false_blame: bool

    @property
    def wanted(self) -> frozenset[str]:
        """Names that count as correct."""
        labels = [self.case["label"], *(self.case.get("also") or [])]
        return frozenset(name for label in labels for name in (SAME.get(label, label), *FINER.get(label, ())))

    @property
    def is_right(self) -> bool:
        """Whether the first cause is correct."""
        return bool(self.found) and self.found[0] in self.wanted

    @property
    def is_among_three(self) -> bool:
        """Whether one of the first three is correct."""
        return bool(self.wanted & set(self.found[:3]))

    @property
    def has_culprit(self) -> bool | None:
        """Whether the culprit is correct; None: the case names none."""
        tokens = self.case.get("culprit_any")
        return any(_has_words(self.culprit, token) for token in tokens) if tokens else None


def judge(case: dict[str, Any], patterns: Sequence[Pattern], matcher: Matcher) -> EvaluatedCase:
    """Read one case's log and compare the conclusions with its label."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.log"
        path.write_text(case["log"], encoding="utf-8", errors="replace")
        source = Source(path.name, str(path), None, None, None, None, path.stat().st_size)
        logs = collect([source], patterns, matcher=matcher)
    found = conclude(logs)
    return EvaluatedCase(
        case=case,
        found=tuple(conclusion.cause.name for conclusion in found),
        culprit=found[0].culprit.words() if found else "",
        is_false_blame=case["label"] in INNOCENT and bool(found) and _blames_hardware(found[0]),
    )


def _blames_hardware(conclusion: Conclusion) -> bool:
    return conclusion.cause.family in _HARDWARE and conclusion.cause.name not in _NO_HARDWARE


def _has_words(text: str, token: str) -> bool:
    plain, words = (re.sub(r"\brank(\d)", r"rank \1", re.sub(r"[\[\]=_]", " ", said.lower())) for said in (text, token))
    return re.search(rf"(?<![\w.]){re.escape(words)}(?![\w])", plain) is not None


def score(judged: Iterable[EvaluatedCase]) -> dict[str, Any]:
    """Return the counts of the scored cases, for established and likely labels separately and together."""
    counted = [scored for scored in judged if scored.case["score"]]
    confusions = Counter(
        (scored.case["label"], scored.found[0] if scored.found else "-") for scored in counted if not scored.is_right
    )
    result: dict[str, Any] = {}
    for name in ("established", "likely", "all"):
        part = [scored for scored in counted if name in {"all", scored.case["label_confidence"]}]
        named = [scored for scored in part if scored.has_culprit is not None]
        result[name] = {
            "cases": len(part),
            "top_1": _share([scored.is_right for scored in part]),
            "top_3": _share([scored.is_among_three for scored in part]),
            "culprit_cases": len(named),
            "culprit": _share([bool(scored.has_culprit) for scored in named]),
        }
    result["false_blames"] = [scored.case["id"] for scored in judged if scored.is_false_blame]
    result["confusions"] = [
        {"label": label, "found": found, "cases": count} for (label, found), count in confusions.most_common()
    ]
    return result


def _share(rights: Sequence[bool]) -> float:
    return round(sum(rights) / len(rights), 3) if rights else 0.0


def read_cases(place: Path) -> list[dict[str, Any]]:
    """Return the cases of a folder with one JSON file each, or of a file with one case per line.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    if place.is_dir():
        return [json.loads(path.read_text()) for path in sorted(place.glob("*.json"))]
    return [json.loads(line) for line in place.read_text().splitlines() if line.strip()]


def evaluate(folder: Path, only: Sequence[str] = ()) -> list[EvaluatedCase]:
    """Evaluate all cases of a folder.

    Raises:
        OSError, ValueError: it cannot be read, or a file in it is no case.
    """
    patterns = list_patterns(all_causes())
    matcher = Matcher([pattern.scan for pattern in patterns])
    cases = read_cases(folder)
    return [judge(case, patterns, matcher) for case in cases if not only or case["id"] in only]


def main(arguments: Sequence[str]) -> int:
    """Print the scores of a folder; returns 1 if the network or hardware was blamed wrongly."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m benchmarks.why.labeled", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of cases, or a file with one case per line")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--case", action="append", default=[], metavar="ID", help="evaluate only this case")
    options = parser.parse_args(arguments)
    try:
        judged = evaluate(options.folder, options.case)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        print(f"{options.folder}: {exc!r}; expected cases in JSON, as in the corpus", file=sys.stderr)
        return 2
    if not judged:
        print(f"{options.folder}: no case found; expected files named *.json, or one case per line", file=sys.stderr)
        return 2
    figures = score(judged)
    if options.json:
        print(json.dumps(figures, indent=2))
        return int(bool(figures["false_blames"]))
    for scored in judged:
        if scored.case["score"] and not (scored.is_right and scored.has_culprit is not False):
            print(
                f"{scored.case['id']:<9} {scored.case['label']:<20} found {', '.join(scored.found[:4]) or '-'}; "
                f"culprit {scored.culprit or '-'} (wanted {scored.case.get('culprit_any')})"
            )
    for name in ("established", "likely", "all"):
        part = figures[name]
        print(
            f"{name:<12} {part['cases']:>4} cases  top-1 {part['top_1']:.1%}  top-3 {part['top_3']:.1%}  "
            f"culprit {part['culprit']:.1%} of {part['culprit_cases']}"
        )
    print(f"false blames: {', '.join(figures['false_blames']) or 'none'}")
    return int(bool(figures["false_blames"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
