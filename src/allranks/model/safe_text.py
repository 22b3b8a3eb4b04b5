"""Makes text from other machines and programs safe to send and to print."""

from __future__ import annotations

import math
import unicodedata

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def as_utf8(text: str) -> str:
    """Return a text that can be encoded: bytes of a file name that are no UTF-8 become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_one_line(text: str, *, at_most: int = 300) -> str:
    """Return what somebody else said as one short line that a terminal bears: control characters become escapes."""
    shown = text[:at_most]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return shown if max(len(shown), len(text)) <= at_most else f"{shown[: at_most - 3]}..."


def width_of(text: str) -> int:
    """Return how many columns of a terminal a text without control sequences takes.

    >>> width_of("abc"), width_of("\u65e5\u672c"), width_of("e\u0301")
    (3, 4, 1)
    """
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def plain_address(address: str) -> str:
    """Return an address as people write it: IPv4 out of its IPv6 clothes, without a scope."""
    return address.removeprefix("::ffff:").partition("%")[0]


def size_text(size_bytes: float) -> str:
    """Return a size as people write it.

    >>> size_text(64 * MIB), size_text(1.5 * GIB), size_text(math.inf)
    ('64 MiB', '1.5 GiB', 'unlimited')
    """
    if size_bytes == math.inf:
        return "unlimited"
    unit, name = next(((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB")) if size_bytes >= unit), (KIB, "KiB"))
    return f"{size_bytes / unit:.1f}".removesuffix(".0") + f" {name}"
