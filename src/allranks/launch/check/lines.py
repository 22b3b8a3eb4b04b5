"""How does a document come through srun's mixed output? In short lines that say whose and which part they are.

srun mixes the output of its tasks in pieces of 1 KiB, and site wrappers print banners around it.

    >>> unpacker = Unpacker()
    >>> [unpacker.feed(line) for line in pack(3, "card", b"{}").splitlines()]
    [Parcel(node_index=3, kind='card', content=b'{}')]
"""

from __future__ import annotations

import base64
import re
import zlib
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from allranks.model.errors import UsageError

LINE_BYTES = 600
MARK = "%allranks-check"
_LINE = re.compile(rf"{MARK} (\d{{1,7}}) ([a-z]{{1,16}}) (\d{{1,7}})/(\d{{1,7}}) ([A-Za-z0-9+/=]+)%")

AnyOrder = TypeVar("AnyOrder", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Parcel:
    """One document of one node."""

    node_index: int
    kind: str
    content: bytes


def pack(node_index: int, kind: str, content: bytes) -> str:
    """Return the lines that carry a document.

    Args:
        node_index: whose it is.
        kind: small letters; a node's second document of a kind replaces the first.
        content: any bytes.
    """
    text = base64.b64encode(zlib.compress(content)).decode()
    parts = [text[start : start + LINE_BYTES] for start in range(0, len(text), LINE_BYTES)]
    return "".join(
        f"{MARK} {node_index} {kind} {number}/{len(parts)} {part}%\n" for number, part in enumerate(parts, start=1)
    )


@dataclass(slots=True)
class Unpacker:
    """Takes lines in any order, gives documents."""

    _parts: dict[tuple[int, str], dict[int, str]] = field(default_factory=dict)

    def feed(self, line: str) -> Parcel | None:
        """Take a line; return the document that it completes. What is none of ours is passed over."""
        found = _LINE.search(line)
        if found is None:
            return None
        key, number, count = (int(found[1]), found[2]), int(found[3]), int(found[4])
        parts = self._parts.setdefault(key, {})
        parts[number] = found[5]
        if len(parts) < count:
            return None
        text = "".join(part for _, part in sorted(self._parts.pop(key).items()))
        try:
            return Parcel(*key, zlib.decompress(base64.b64decode(text)))
        except (ValueError, zlib.error):
            return None


def to_variable(order: msgspec.Struct) -> str:
    """Return an order as the value of an environment variable."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(order))).decode()


def from_variable(text: str, kind: type[AnyOrder], *, name: str) -> AnyOrder:
    """Read what `to_variable` wrote.

    Args:
        text: the variable's value.
        kind: what it must be.
        name: of the variable.
    Raises:
        UsageError: it is something else.
    """
    try:
        return msgspec.json.decode(zlib.decompress(base64.b64decode(text)), type=kind)
    except (ValueError, zlib.error) as exc:
        raise UsageError(f"{name} is no order of this version of allranks; unset it") from exc
