"""How long do ranks wait now, and for whom? The last half to whole minute of their accounts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from allranks.guard.goodput.rank_account import Account
from allranks.guard.goodput.stragglers import Straggler

MIN_SHARE = 0.01
"""Of the others' time, that a rank costs which is said to be waited for."""


@dataclass(frozen=True, slots=True)
class Lately:
    """How ranks were lately, from their first step on."""

    wait_share: float | None
    """`wait` and `transfer` of all ranks' time; None: not known."""
    wait_shares: Mapping[int, float]
    """The same of each rank, as far as they are known. A rank that is late makes the others wait, and itself waits
    only for the transfer: what the network costs is the share of the rank that waits least."""
    waits_for: int | None
    """The rank that costs the others most; None: nobody in particular."""
    late: Mapping[int, Straggler]
    """Ranks that were late in collectives, whether that is much or not."""
    step_s: float | None
    """Time of one step, median over the ranks."""
    steps: int | None
    """That the rank which is furthest has made since its process began; None: none is seen."""


def see_lately(accounts: Iterable[Account], late: Mapping[int, Straggler]) -> Lately:
    """Return how ranks were lately.

    Args:
        late: by rank, of the last collectives.
    """
    steps, shares, steps_s = 0, dict[int, float](), list[float]()
    for account in accounts:
        steps = max(steps, account.steps)
        if not account.is_async and (recent := account.blocked.recent()) is not None:
            shares[account.rank] = recent.wait_share
            if recent.steps > 0:
                steps_s.append(recent.passed_s / recent.steps)
    worst = max(late.values(), key=lambda straggler: straggler.share, default=None)
    return Lately(
        wait_share=fmean(shares.values()) if shares else None,
        wait_shares=shares,
        waits_for=worst.rank if worst is not None and worst.share >= MIN_SHARE else None,
        late=late,
        step_s=median(steps_s) if steps_s else None,
        steps=steps or None,
    )
