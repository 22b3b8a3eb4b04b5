"""Traits: what an engine may ask of a cause, so that no engine knows causes by id or name."""

from __future__ import annotations

from enum import StrEnum


class Trait(StrEnum):
    """A property of a cause that an engine asks for; each with what it means and who asks."""

    ENDS_FROM_OUTSIDE = "ends_from_outside"
    """The scheduler or a person ended the job."""
    ENDS_RANKS = "ends_ranks"
    """TEMP"""
