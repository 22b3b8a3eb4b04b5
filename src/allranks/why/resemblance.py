"""Which known cause has sample lines with words most like those of an unknown failure? Always a guess. Pure.

Words are weighed by how few causes use them (inverse document frequency), and causes compared by the cosine of the
angle between their words' weights and the line's: Manning, Raghavan, Schuetze, Introduction to Information Retrieval,
2008, chapter 6. One line must have a rare word of the cause, and a second word of it: words that many causes use, and
words from all over a log, show nothing.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from allranks.causes.book import all_causes
from allranks.causes.cause import Cause

LEAST = 0.08
"""Below this similarity, a line is like no known one."""
RARE = 4
"""A word that at most this many causes use is rare."""
_WORD = re.compile(r"[A-Za-z][A-Za-z]{2,}")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_EVERYWHERE = frozenset((
    "the", "and", "for", "was", "with", "from", "this", "that", "has", "not", "are", "error", "warn", "info", "line",
    "file", "runtime", "value", "key", "type", "module", "exception",
))  # fmt: skip
_PATH = re.compile(r"""["'(]?/\S+""")
"""The names of directories are nobody's words."""


def resembling(texts: Sequence[str], *, most: int = 3) -> Iterator[tuple[Cause, int]]:
    """Return the causes whose sample lines use the words of these texts, the most similar first.

    Each comes with the index of the text that has most of its words.
    """
    weights, samples = _samples()
    spoken = [[word for word in _words(text) if word in weights] for text in texts]
    words = Counter(word for one in spoken for word in one)
    asked = _unit({word: (1 + math.log(count)) * weights[word] for word, count in words.items()})
    scored = [
        (sum(value * asked.get(word, 0.0) for word, value in vector.items()), cause.id, cause, vector)
        for cause, vector in samples
    ]
    least = math.log(len(samples) / RARE)
    for score, _, cause, vector in sorted(scored, key=lambda entry: (-entry[0], entry[1]))[:most]:
        shared = [set(one) & vector.keys() for one in spoken]
        proofs = [
            i for i, common in enumerate(shared) if len(common) > 1 and any(weights[word] >= least for word in common)
        ]
        if score >= LEAST and proofs:
            yield cause, max(proofs, key=lambda i: math.fsum(vector[word] for word in shared[i]))


@functools.cache
def _samples() -> tuple[Mapping[str, float], tuple[tuple[Cause, Mapping[str, float]], ...]]:
    lines = {
        cause: [hit for sign in cause.signs if "log" in sign.where for hit in sign.hits]
        for cause in all_causes()
        if not cause.is_outcome
    }
    causes = [cause for cause, hits in lines.items() if hits]
    counts = {cause: Counter(word for hit in (*lines[cause], cause.title) for word in _words(hit)) for cause in causes}
    users = Counter(word for words in counts.values() for word in words)
    weights = {word: math.log(len(causes) / count) for word, count in users.items()}
    vectors = tuple(
        (cause, _unit({word: (1 + math.log(count)) * weights[word] for word, count in words.items()}))
        for cause, words in counts.items()
    )
    return weights, vectors


def _words(text: str) -> list[str]:
    found = [word.lower() for part in _CAMEL.sub(" ", _PATH.sub(" ", text)).split() for word in _WORD.findall(part)]
    return [word for word in found if word not in _EVERYWHERE]


def _unit(vector: Mapping[str, float]) -> dict[str, float]:
    length = math.sqrt(sum(value * value for value in vector.values()))
    return {word: value / length for word, value in vector.items()} if length else {}
