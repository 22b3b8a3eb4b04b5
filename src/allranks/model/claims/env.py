"""Numbers and texts of an environment, each with the variable that it comes from; one way to say what is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.model.errors import IdentityError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_RANKS = 1 << 20
"""Larger than any real world; a limit against broken numbers."""
MIXED = "variables of two launches are mixed: unset those left over from a parent job or a shell profile, and restart"


@dataclass(frozen=True, slots=True)
class ClaimedCount:
    """A number and the variable that it comes from."""

    value: int
    source: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.source}={self.value}"


@dataclass(frozen=True, slots=True)
class Text:
    """A text and the variable that it comes from."""

    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.source}={printable(self.value)}"


class Env(dict[str, str]):
    """The environment without empty variables."""

    def count(self, name: str, *, least: int = 0, most: int = _MOST_RANKS) -> ClaimedCount | None:
        """Read a number, None where there is none.

        Raises:
            IdentityError: it is no number, or not in range.
        """
        text = self.get(name)
        if text is None:
            return None
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
            raise IdentityError(f"{self.said(name)}: expected an integer from {least} to {most}; correct or unset it")
        return ClaimedCount(int(text), name)

    def need(
        self, names: Mapping[str, str], field: str, *, below: ClaimedCount | None = None, most: int = _MOST_RANKS
    ) -> ClaimedCount:
        """Read one of a set of variables that must all be set.

        Args:
            names: the set, by field.
            field: which of them.
            below: the count that an index must be smaller than.
            most: as for `count`.
        Raises:
            IdentityError: it is missing, or out of range.
        """
        count = self.count(names[field], most=most)
        if count is None:
            # All of them: whoever unsets one after the other learns of each by an error of its own.
            beside = [name for name in (*names.values(), "TORCHELASTIC_RUN_ID") if name in self]
            raise IdentityError(
                f"{names[field]} is missing beside {self.said(beside[0])}; "
                f"unset {' '.join(beside)} if left over, or set {names[field]}, too"
            )
        if below and count.value >= below.value:
            raise clash(count, f"{below}, expected a larger value", MIXED)
        return count

    def said(self, name: str) -> str:
        """`NAME=value`, as messages have it."""
        return f"{name}={printable(self.get(name, ''))}"

    def first(self, names: str) -> str | None:
        """Return the first of these variables that is set (`A|B`), None where none is."""
        return next((name for name in names.split("|") if name in self), None)

    def resolve(self, names: Mapping[str, str]) -> dict[str, str]:
        """Replace alternatives (`A|B`) by the one that is set, or by the first one."""
        return {field: self.first(any_of) or any_of.split("|")[0] for field, any_of in names.items()}


def clash(one: object, other: object, what_to_do: str) -> IdentityError:
    """Return the error for two contradicting statements."""
    return IdentityError(f"{one} but {other}; {what_to_do}")


def printable(text: str) -> str:
    """Return the value of a variable as one short line."""
    return text.encode("unicode_escape").decode("ascii")[:200]


def srun_line(num_nodes: int, command: str = "allranks run ...") -> str:
    """Return the command that starts one task on each of this many nodes."""
    # All three: srun also takes SLURM_NTASKS of the script for its --ntasks, which overrules --ntasks-per-node.
    return f"srun --ntasks-per-node=1 --nodes={num_nodes} --ntasks={num_nodes} {command}"
