"""Which words does a program of this version use? The files in `messages/` hold them, each with its source."""

from __future__ import annotations

import random
import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "messages"
PROGRAMS = ("torch", "nccl", "slurm")
"""Programs whose version decides about a wording; a wording without one holds for all."""


@dataclass(frozen=True, slots=True)
class Wording:
    """One way in which a program says one thing."""

    key: str
    source: str
    text: str
    versions: Mapping[str, tuple[str, ...]]
    """By program: the versions that say it so."""
    names: frozenset[str]
    """Names of the fields in the text."""

    def is_of(self, versions: Mapping[str, str]) -> bool:
        """Whether the programs of these versions say it so."""
        return all(versions[program] in allowed for program, allowed in self.versions.items())


@cache
def read_wordings(folder: Path = FOLDER) -> dict[str, tuple[Wording, ...]]:
    """Return all wordings by key."""
    found: dict[str, list[Wording]] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["line"]:
            text = entry["text"]
            wording = Wording(
                key=entry["key"],
                source=entry["source"],
                text=text,
                versions={program: tuple(entry[program]) for program in PROGRAMS if program in entry},
                names=frozenset(name for _, name, _, _ in string.Formatter().parse(text) if name),
            )
            found.setdefault(wording.key, []).append(wording)
    return {key: tuple(wordings) for key, wordings in found.items()}


def choose_wording(key: str, versions: Mapping[str, str], rng: random.Random) -> Wording:
    """Return one of the wordings that programs of these versions use.

    Raises:
        KeyError: there is none.
    """
    fitting = [wording for wording in read_wordings()[key] if wording.is_of(versions)]
    if not fitting:
        raise KeyError(f"{key}: no wording for {dict(versions)}")
    return rng.choice(fitting)
