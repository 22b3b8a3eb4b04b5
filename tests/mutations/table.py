"""The mutations of mutations.toml: which line is changed, which rule that breaks, and which tests must fail then."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = HERE / "mutations.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change of the source that breaks one rule."""

    name: str
    rule: str
    """What the product promises, in one sentence."""
    file: str
    """Below src/allranks."""
    before: str
    after: str
    tests: tuple[str, ...]
    """Ids as pytest takes them: a file, or `file::function`."""
    times: int = 1
    """How often `before` occurs in the file; all of them are replaced."""
    was_missed: bool = False
    """No test caught it when the suite was measured first."""

    def apply(self, source: str) -> str:
        """Return the changed text of the file.

        Raises:
            ValueError: `before` does not occur `times` times.
        """
        if (found := source.count(self.before)) != self.times:
            raise ValueError(f"expected {self.before!r} {self.times} times in {self.file}, found {found}")
        return source.replace(self.before, self.after)


def read_table(path: Path = TABLE) -> list[Mutation]:
    """Return all mutations, in the order of the file."""
    rows = tomllib.loads(path.read_text())["mutation"]
    return [Mutation(**{**row, "tests": tuple(f"tests/{each}" for each in row["tests"])}) for row in rows]
