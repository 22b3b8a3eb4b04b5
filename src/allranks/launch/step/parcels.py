"""How does a document come through srun's mixed output? In short lines that say whose and which part they are.

srun mixes the output of its tasks in pieces of 1 KiB, and site wrappers print banners around it.

    >>> unpacker = Unpacker()
    >>> [parcel.read(dict) for line in pack("node03", "card", {}).splitlines() if (parcel := unpacker.feed(line))]
    [{}]
"""

from __future__ import annotations

import base64
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec

LINE_BYTES = 600
MARK = "%allranks-parcel"
_LINE = re.compile(rf"{MARK} (\S{{1,300}}) ([a-z]{{1,16}}) (\d{{1,7}})/(\d{{1,7}}) ([A-Za-z0-9+/=]+)%")


def encode(document: Any) -> str:
    """Return a document as a short text without blanks, also for an environment variable."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(document))).decode()


def decode(text: str, kind: Any) -> Any:
    """Read what `encode` wrote.

    Raises:
        ValueError: it is not of this kind, for example from another version of allranks.
    """
    try:
        return msgspec.json.decode(zlib.decompress(base64.b64decode(text)), type=kind)
    except (msgspec.DecodeError, zlib.error) as exc:
        raise ValueError(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class Parcel:
    """One document of one node."""

    sender: str
    kind: str
    text: str

    def read(self, kind: Any) -> Any:
        """Return the document; raises ValueError as `decode` does."""
        return decode(self.text, kind)


def send(sender: str, kind: str, document: Any = None) -> None:
    """Print a document for the process that started the step."""
    print(pack(sender, kind, document), end="", flush=True)


def pack(sender: str, kind: str, document: Any = None) -> str:
    """Return the lines that carry a document.

    Args:
        sender: whose it is, without blanks.
        kind: small letters; a sender's second document of a kind replaces the first.
    """
    text = encode(document)
    parts = [text[start : start + LINE_BYTES] for start in range(0, len(text), LINE_BYTES)]
    return "".join(f"{MARK} {sender} {kind} {n}/{len(parts)} {part}%\n" for n, part in enumerate(parts, start=1))


@dataclass(slots=True)
class Unpacker:
    """Takes lines in any order, gives documents."""

    _parts: dict[tuple[str, str], dict[int, str]] = field(default_factory=lambda: defaultdict(dict))

    def feed(self, line: str) -> Parcel | None:
        """Take a line; return the document that it completes. What is none of ours is passed over."""
        found = _LINE.search(line)
        if found is None:
            return None
        sender, kind, number, count, part = found.groups()
        parts = self._parts[sender, kind]
        parts[int(number)] = part
        if len(parts) < int(count):
            return None
        return Parcel(sender, kind, "".join(part for _, part in sorted(self._parts.pop((sender, kind)).items())))
