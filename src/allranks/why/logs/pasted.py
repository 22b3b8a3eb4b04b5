"""Undoes what mails, loggers and screens did to the lines of a log: a margin. Pure.

strip = find_margin(data)           # every line begins with `> `, `| `, `[stderr] `, `INFO: `, `train | `
"""

from __future__ import annotations

import re
from collections.abc import Callable

from allranks.why.logs.formats import LineWriter, read_prefixes

_HEAD_BYTES = 1 << 13
"""All lines that begin here must have a margin."""
_MARGIN = re.compile(
    r"[ \t]{1,16}|\d?[>|#*$%-]{1,2} ?|\[[A-Za-z]{2,12}\] ?|[A-Za-z][A-Za-z.-]{1,15} ?\| "
    r"|(?:std(?:out|err)|out|err|log|DEBUG|INFO|WARN(?:ING)?|ERROR): "
)
"""No number, since that may be of a rank, a node, a process or a time; no name of a program, as in `srun: `."""


def find_margin(data: bytes) -> Callable[[bytes], bytes] | None:
    """Return what strips the margin from chunks of a log that begins with this; None: there is none.

    A margin is not known by its form alone, but because the first lines all have it. Prefixes that `formats.toml` has
    stay, since they tell who wrote a line.
    """
    lines = data[:_HEAD_BYTES].split(b"\n")
    first = next(filter(bytes.strip, lines), b"").decode("ascii", errors="replace")
    if (match := _MARGIN.match(first)) is None or read_prefixes(first, LineWriter()):
        return None
    margin = match[0].encode()
    if margin == b"ERROR: " and len({*filter(bytes.strip, lines)}) == 1:  # it is what the script says
        return None
    if not all(margin.startswith(line[: len(margin)]) for line in lines if line.strip()):  # the last one may be cut
        return None
    return lambda data: data.removeprefix(margin).replace(b"\n" + margin, b"\n")
