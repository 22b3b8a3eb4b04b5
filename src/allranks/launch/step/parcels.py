"""How does a document come through srun's mixed output? In short lines that say whose and which part they are.

srun mixes the output of its tasks in pieces of 1 KiB, and site wrappers print banners around it.

    >>> unpacker = Unpacker()
    >>> [unpacker.feed(line) for line in pack("node03", "card", b"{}").splitlines()]
    [Parcel(sender='node03', kind='card', content=b'{}')]
"""

from __future__ import annotations

import base64
import re
import zlib
from dataclasses import dataclass, field

LINE_BYTES = 600
MARK = "%allranks-parcel"
_LINE = re.compile(rf"{MARK} (\S{{1,300}}) ([a-z]{{1,16}}) (\d{{1,7}})/(\d{{1,7}}) ([A-Za-z0-9+/=]+)%")


@dataclass(frozen=True, slots=True)
class Parcel:
    """One document of one node."""

    sender: str
    kind: str
    content: bytes


def pack(sender: str, kind: str, content: bytes) -> str:
    """Return the lines that carry a document.

    Args:
        sender: whose it is, without blanks.
        kind: small letters; a sender's second document of a kind replaces the first.
        content: any bytes.
    """
    text = base64.b64encode(zlib.compress(content)).decode()
    parts = [text[start : start + LINE_BYTES] for start in range(0, len(text), LINE_BYTES)]
    return "".join(
        f"{MARK} {sender} {kind} {number}/{len(parts)} {part}%\n" for number, part in enumerate(parts, start=1)
    )


@dataclass(slots=True)
class Unpacker:
    """Takes lines in any order, gives documents."""

    _parts: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)

    def feed(self, line: str) -> Parcel | None:
        """Take a line; return the document that it completes. What is none of ours is passed over."""
        found = _LINE.search(line)
        if found is None:
            return None
        key, number, count = (found[1], found[2]), int(found[3]), int(found[4])
        parts = self._parts.setdefault(key, {})
        parts[number] = found[5]
        if len(parts) < count:
            return None
        text = "".join(part for _, part in sorted(self._parts.pop(key).items()))
        try:
            return Parcel(*key, zlib.decompress(base64.b64decode(text)))
        except (ValueError, zlib.error):
            return None
