"""An expression of `re`, rewritten so that it can be searched for in many lines at once. Pure.

to_hyperscan(r"error:\\s(?P<what>.+)")     # error:[ \\t\\x0b\\f](?P<what>[^\\r\\n])
list_literals(r"error: (?:one|two)!")      # {"error: "}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

LITERAL = 6
"""Length of a literal that is rare enough to search for alone; all signs have one."""


def to_hyperscan(pattern: str) -> str:
    """Rewrite an expression of `re` so that hyperscan finds in many lines at once what `re` finds in one.

    No class matches a newline or a carriage return, which also ends a line: hyperscan knows only the newline, and
    replacing the others costs a third of the matching time. Python's own notations are translated to PCRE. Two changes
    may find more: a repetition at the end is shortened (hyperscan calls back for every possible end of a match, so
    `error: (.+)` would call for each character), and an unbounded beginning is dropped if a literal follows
    (`: +[0-9]+ Bus error` would run on every byte, and two such patterns halve the total rate).

    >>> print(to_hyperscan(r"error:\\s(?P<what>[^;]+)"))
    error:[ \\t\\x0b\\f](?P<what>[^\\r\\n;])
    """
    parts = [_rewrite(part) for part in _PART.findall(pattern)]
    parts = parts[_unbounded_beginning(parts) :]
    closing = 0
    while len(parts) > closing + 1:
        if parts[-1 - closing] == ")":
            closing += 1
            continue
        place = len(parts) - 1 - closing
        if not _QUANTIFIER.fullmatch(parts[place]) or not _is_class(parts[place - 1]):
            break
        least = _least(parts[place])
        parts[place - (least == 0) : place + 1] = [f"{{{least}}}"] if least > 1 else []
        if least:
            break
    return "".join(parts)


_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\}|\{,[0-9]*\})[?+]?")
_PART = re.compile(rf"(?s)\\.|\[\^?\]?(?:\\.|[^]\\])*\]|{_QUANTIFIER.pattern}|.")
_BEGIN, _END = r"(?:^|\r)", r"(?:\r|$)"
_IN_PCRE = {
    ".": r"[^\r\n]",
    r"\s": r"[ \t\x0b\f]",
    r"\D": r"[^\d\r\n]",
    r"\W": r"[^\w\r\n]",
    "^": _BEGIN,
    r"\A": _BEGIN,
    "$": _END,
    r"\Z": _END,
    r"\v": r"\x0b",
}
_IN_PCRE_CLASS = {r"\s": r" \t\x0b\f", r"\v": r"\x0b"}


def _rewrite(part: str) -> str:
    if part.startswith("{,"):
        return "{0" + part[1:]
    if not part.startswith("["):
        return _IN_PCRE.get(part, part)
    inside = re.sub(r"(?s)\\.", lambda escape: _IN_PCRE_CLASS.get(escape[0], escape[0]), part[1:-1])
    if not inside.startswith("^"):
        return f"[{inside}]"
    # A bracket or dash in the first position is literal, but not after other characters.
    escaped = re.sub(r"^[]-]", lambda first: "\\" + first[0], inside[1:])
    return rf"[^\r\n{escaped}]"


def _unbounded_beginning(parts: Sequence[str]) -> int:
    """Return the number of parts before the first literal, if they may match any length; else 0."""
    if re.match(r"\(\?[a-zA-Z]+\)", "".join(parts)):  # flags, which apply to all of it
        return 0
    depth = run = start = 0
    for index, part in enumerate(parts):
        depth += (part == "(") - (part == ")")
        if depth == 0 and part == "|":
            return 0
        is_last = index + 1 == len(parts)
        is_repeated = not is_last and _QUANTIFIER.fullmatch(parts[index + 1])
        is_plain = re.fullmatch(r"[^\\()|.^$*+?]|\\[^A-Za-z0-9]", part)
        run = run + 1 if depth == 0 and is_plain and not is_repeated else 0
        if run == LITERAL and not start:
            start = index + 1 - LITERAL
            if not any(before[0] in "*+" or re.match(r"\{[0-9]+,\}", before) for before in parts[:start]):
                return 0
    return start


def _is_class(part: str) -> bool:
    return part == "." or len(part) > 2 or part in {r"\S", r"\w", r"\d"}


def _least(quantifier: str) -> int:
    """Return the minimum number of repetitions: 0 for `*?`, 1 for `+`, 3 for `{3,80}`."""
    if quantifier[0] == "{":
        return int(re.split("[{,}]", quantifier)[1] or 0)
    return int(quantifier[0] == "+")


def list_literals(expression: str) -> frozenset[str]:
    """Return texts, in lower case, of which every match contains at least one; none if nothing is certain.

    Of the possible answers, the one whose shortest text is longest.

    >>> sorted(list_literals(r"\\d+ (?:Bus error|(?i:SegFault)\\b)[^\\r\\n]{0,9}"))
    ['bus error', 'segfault']
    """
    parts = [part for part in _GROUP_OR_PART.findall(expression) if not _FLAGS.fullmatch(part)]
    return _literals(iter([*parts, ")"])) or frozenset()


_FLAGS = re.compile(r"\(\?[a-zA-Z]+\)")
_GROUP_OR_PART = re.compile(
    rf"(?s){_FLAGS.pattern}|\((?:\?(?:P<\w+>|[a-zA-Z]*:))?|\\x[0-9a-fA-F]{{2}}|{_PART.pattern[4:]}"
)


def _literals(parts: Iterator[str]) -> frozenset[str] | None:
    """Read up to the closing bracket of a group; None: it may match without any text of our choice."""
    branches: list[frozenset[str] | None] = []
    found: list[frozenset[str]] = []
    """What each match of this branch contains: one text of each of these sets."""
    run = ""
    last: frozenset[str] | None = None
    """What the group just read contains, until it is known how often it is repeated."""
    for part in parts:
        is_quantifier = _QUANTIFIER.fullmatch(part) is not None
        if last is not None and not (is_quantifier and _least(part) == 0):
            found.append(last)
        last = None
        if is_quantifier and run and _least(part) == 0:
            run = run[:-1]
        if not is_quantifier and (text := _text_of(part)):
            run += text
            continue
        if run:
            found.append(frozenset([run]))
            run = ""
        if part.startswith("("):
            last = _literals(parts)
        if part in {"|", ")"}:
            branches.append(max(found, key=_worth, default=None))
            found = []
        if part == ")":
            break
    if any(branch is None for branch in branches):
        return None
    return frozenset().union(*(branch for branch in branches if branch is not None))


def _text_of(part: str) -> str:
    """Return the character that a part matches, in lower case; empty if it may match several, or none."""
    if re.fullmatch(r"\\[^A-Za-z0-9]", part):
        return part[1]
    return part.lower() if len(part) == 1 and part not in r"^$.|()" else ""


def _worth(literals: frozenset[str]) -> tuple[int, int]:
    return min(map(len, literals)), -len(literals)
