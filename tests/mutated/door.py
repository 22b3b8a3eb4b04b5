"""How a parser is called: a row of the table, and what its rows share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE.parent / "host/recorded"
SEEDS = HERE / "seeds"
Door = Callable[[Path], Callable[[bytes], object]]
"""Returns what reads one input; the directory is its own, in memory."""


@dataclass(frozen=True, slots=True)
class Parser:
    """One row of the table."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    """Inputs that are right."""
    begin: Door
    refusals: tuple[type[Exception], ...] = ()
    """What it may raise."""
    kind: str = "text"
    """How its inputs are changed (mutate.mutate)."""


def plain(read: Callable[[str], object]) -> Door:
    """Return how a function of a text is called."""
    return lambda _: lambda data: read(data.decode(errors="replace"))


def of_bytes(read: Callable[[bytes], object]) -> Door:
    """Return how a function of bytes is called."""
    return lambda _: read


def recorded(*names: str) -> Callable[[], list[bytes]]:
    """Return how recorded answers are read."""
    return lambda: [(RECORDED / name).read_bytes() for name in names]


def seeds(*names: str) -> Callable[[], list[bytes]]:
    """Return how samples of this directory are read."""
    return lambda: [(SEEDS / name).read_bytes() for name in names]


CONTROLS = frozenset(map(chr, [*range(9), *range(11, 32), *range(0x7F, 0xA0)]))


def assert_harmless(text: str) -> None:
    """What is printed has no control characters but line ends and tabs."""
    assert not CONTROLS & set(text)
    text.encode()
