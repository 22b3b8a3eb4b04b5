"""Whom does an exception name that all ranks raise with the same words? Read with the signs of its cause; pure.

Replicas are compared by all ranks together (state/truth), so each of them raises what was found, and the rank at fault
is in the words. They say, too, whether the job may start again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from allranks.causes.book import find_cause
from allranks.causes.cause import Trait
from allranks.guard.origin import parse_ranks
from allranks.model.finding import Confidence

NOT_RETRIED = "; not retried: "


@dataclass(frozen=True, slots=True)
class NamedRanks:
    """What such an exception says."""

    ranks: tuple[int, ...]
    confidence: Confidence
    """Undecided: one of these ranks is at fault."""
    is_retryable: bool
    comes_back_as: str
    """What is the same where it comes back after a restart: `model/w at step 512`."""


def read_named(cause_id: str, message: str) -> NamedRanks | None:
    """Return whom a message of this cause names; None: its words mean whoever raises it."""
    cause = find_cause(cause_id)
    if Trait.NAMES_ITS_CULPRIT not in cause.traits:
        return None
    for sign in cause.signs:
        if found := re.search(sign.pattern, message):
            said = found.groupdict()
            ranks = parse_ranks(said.get("rank") or said.get("ranks") or "")
            what = f"{said.get('tensor')} at step {said.get('at')}"
            return NamedRanks(ranks, sign.confidence, NOT_RETRIED not in message, what)
    return None
