"""An expression of `re`, rewritten so that it can be searched for in many lines at once. Pure.

to_hyperscan(r"error:\\s(?P<what>.+)")     # error:[ \\t\\x0b\\f](?P<what>[^\\r\\n])
find_literal(r"error: (?:one|two)!")       # "error: "
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LITERAL = 6
"""Length of a literal that is rare enough to search for alone; all signs have one."""


def to_hyperscan(pattern: str) -> str:
    """Rewrite an expression of `re` so that hyperscan finds in many lines at once what `re` finds in one.

    No class matches a newline or a carriage return, which also ends a line: hyperscan knows only the newline, and
    replacing the others costs a third of the matching time. Python's own notations are translated to PCRE. Three
    changes may find more. The beginning of a line (`^`) is dropped, since a prefix may stand before it. A repetition at
    the end is shortened, and an optional group there is dropped (hyperscan calls back for every possible end of a
    match, so `error: (.+)` would call for each character). An unbounded beginning is dropped if a literal follows
    (`: +[0-9]+ Bus error` would run on every byte, and two such patterns halve the total rate).

    >>> print(to_hyperscan(r"error:\\s(?P<what>[^;]+)"))
    error:[ \\t\\x0b\\f](?P<what>[^\\r\\n;])
    """
    parts = [rewritten for part in _PART.findall(pattern) if (rewritten := _rewrite(part))]
    parts = parts[_unbounded_beginning(parts) :]
    while len(parts) > 1 and parts[-2] == ")" and _QUANTIFIER.fullmatch(parts[-1]) and not _least(parts[-1]):
        place, depth = len(parts) - 2, 1
        while depth:
            place -= 1
            depth += (parts[place] == ")") - (parts[place] == "(")
        del parts[place:]
    place = len(parts) - 1
    while place > 0 and (parts[place] == ")" or (_QUANTIFIER.fullmatch(parts[place]) and _is_class(parts[place - 1]))):
        if parts[place] == ")":
            place -= 1
            continue
        least = _least(parts[place])
        parts[place - (least == 0) : place + 1] = [f"{{{least}}}"] if least > 1 else []
        place = 0 if least else place - 2
    return "".join(parts)


_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})[?+]?")
_PART = re.compile(rf"(?s)\\.|\[\^?\]?(?:\\.|[^]\\])*\]|{_QUANTIFIER.pattern}|.")
_SPACE = r" \t\x0b\f"
_IN_PCRE = {".": r"[^\r\n]", r"\s": f"[{_SPACE}]", "^": "", "$": r"(?:\r|$)"}
UNKNOWN = re.compile(r"\\[DWAZvx]|\{,|\[\^[]-]")
"""What this module does not translate: no pattern of a cause or mark may contain it (a test asks all)."""


def _rewrite(part: str) -> str:
    if not part.startswith("["):
        return _IN_PCRE.get(part, part)
    inside = part[1:].replace(r"\s", _SPACE)
    return r"[^\r\n" + inside[1:] if inside.startswith("^") else "[" + inside


def _unbounded_beginning(parts: Sequence[str]) -> int:
    """Return the number of parts before the first literal, if they may match any length; else 0."""
    start = next((place for place, text in _literals(parts) if len(text) >= LITERAL), 0)
    is_unbounded = any(part[0] in "*+" or re.match(r"\{[0-9]+,\}", part) for part in parts[:start])
    return start if is_unbounded else 0


def find_literal(expression: str) -> str:
    """Return a text that every match contains, the longest outside of groups; empty if there is none."""
    return max((text for _, text in _literals(_PART.findall(expression))), key=len, default="")


def _literals(parts: Sequence[str]) -> list[tuple[int, str]]:
    """Return the texts outside of groups, each after the number of parts before it; none if not all are in a match."""
    if re.match(r"\(\?[a-zA-Z]+\)", "".join(parts)):  # flags, which apply to all of it
        return []
    depth = 0
    found: list[tuple[int, str]] = []
    is_open = False
    for place, (part, following) in enumerate(zip(parts, [*parts[1:], ""], strict=True)):
        depth += (part == "(") - (part == ")")
        if depth == 0 and part == "|":
            return []
        is_plain = re.fullmatch(r"[^\\()|.^$*+?]|\\[^A-Za-z0-9]", part) and not _QUANTIFIER.fullmatch(following)
        if depth == 0 and is_plain:
            place, text = found.pop() if is_open else (place, "")
            found.append((place, text + part[-1]))
        is_open = depth == 0 and bool(is_plain)
    return found


def _is_class(part: str) -> bool:
    return part == "." or len(part) > 2 or part in {r"\S", r"\w", r"\d"}


def _least(quantifier: str) -> int:
    """Return the minimum number of repetitions: 0 for `*?`, 1 for `+`, 3 for `{3,80}`."""
    if quantifier[0] == "{":
        return int(re.split("[{,}]", quantifier)[1] or 0)
    return int(quantifier[0] == "+")
