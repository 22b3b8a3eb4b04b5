"""What the guard comes to: a proven fault, whose it is, and what that means for the job. Data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.model.finding import Finding


@dataclass(frozen=True, slots=True)
class Judged:
    """One verdict on a running job."""

    findings: tuple[Finding, ...]
    """The culprit's first."""
    exit_code: int
    """Of the job, where nobody starts it again."""
    ranks: tuple[int, ...] = ()
    """Culprits; none where a link or nobody is."""
    nodes: tuple[int, ...] = ()
    """Indices of the culprits' nodes in the Plan; several where nodes fell together, none where no node is named."""
    cures: bool = False
    """Leaving out `nodes` cures it: the node or its link is at fault, and not what runs there."""
    is_retryable: bool = True
    """Starting again from a checkpoint may help; False for an error of the user's code, which comes back."""
    blocked: tuple[int, ...] = ()
    """Ranks that no SIGTERM reaches in time: stopped, or deep in a collective. For `Stop.at_once`."""
    is_final: bool = True
    """Nothing that workers say while they are ended can change it; False: ask again when they have ended."""
