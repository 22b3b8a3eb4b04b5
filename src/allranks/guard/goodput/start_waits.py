"""For which rank did the others wait before their first steps? Pure.

waits.add(sample, wait_s)      a rank waited so long in a collective before its first step
waits.find(accounts)           seconds by the rank that was last: in these, and in init_process_group
"""

from __future__ import annotations

from collections.abc import Mapping

from allranks.guard.goodput.rank_account import Account
from allranks.guard.goodput.waited import WaitSample


class StartWaits:
    """Those of one generation."""

    def __init__(self) -> None:
        self._waits_s: dict[int, float] = {}

    def add(self, sample: WaitSample, wait_s: float) -> None:
        """A rank waited for the last one of a collective; where that is undecided, it waited for nobody."""
        if sample.is_decided:
            self._waits_s[sample.rank] = self._waits_s.get(sample.rank, 0.0) + wait_s

    def find(self, accounts: Mapping[int, Account]) -> dict[int, float]:
        """Return the seconds of all ranks; those in init_process_group once all have arrived there."""
        found = dict(self._waits_s)
        arrived = {rank: at_s for rank, account in accounts.items() if (at_s := account.arrived_s) is not None}
        if len(arrived) == len(accounts) > 0:
            last = max(arrived, key=arrived.__getitem__)
            waits_s = (min(arrived[last], accounts[rank].first_s) - at_s for rank, at_s in arrived.items())
            found[last] = found.get(last, 0.0) + sum(max(0.0, wait_s) for wait_s in waits_s)
        return found
