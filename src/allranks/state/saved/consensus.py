"""How do all ranks agree on one answer? Rank 0 collects the answers, decides, and tells all, over torch's store.

No collective: a rank that fails to read would leave the others in it. Every wait has a deadline and says for whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from allranks.model.errors import NodeFaultError
from allranks.model.membership import Membership

DEADLINE_S = 1800.0
"""Reading a large state from a slow file server takes its time."""
NOTICE_S = 10.0
"""A wait is said after so long."""


class Consensus:
    """The ranks of one run; with one rank, all is agreed.

    Raises:
        NodeFaultError: a rank does not give its word within DEADLINE_S.
    """

    def __init__(self, store: Store | None, membership: Membership, *, prefix: str, say: Callable[[str], None]) -> None:
        self._store = store
        self._own = membership
        self._prefix = prefix
        self._say = say

    def tell_all(self, key: str, word: str) -> str:
        """Return rank 0's word, which the others wait for. Each time has a key of its own."""
        if not self._own.is_leader:
            return self._hear([0], key, [f"{self._prefix}/{key}"])[0]
        if self._store is not None:
            self._store.set(f"{self._prefix}/{key}", word)
        return word

    def collect(self, key: str, word: str) -> Sequence[str]:
        """Give this rank's word; rank 0 returns all of them by rank, the others nothing."""
        if self._store is None:
            return [word]
        keys = self._keys(key)
        self._store.set(keys[self._own.rank], word)
        return self._hear(range(self._own.world_size), key, keys) if self._own.is_leader else ()

    def meet(self, key: str, word: str, within_s: float) -> str:
        """Return "" where all ranks come with one word within the time, else who did not; the same on all ranks."""
        if self._store is None:
            return ""
        keys = self._keys(key)
        self._store.set(keys[self._own.rank], word)
        try:
            self._store.wait(keys, timedelta(seconds=within_s))
            words = [said.decode() for said in self._store.multi_get(keys)]
            odd = next((rank for rank, said in enumerate(words) if said != words[0]), 0)
            found = f"the ranks are not at one step (rank 0: {words[0]}, rank {odd}: {words[odd]})" if odd else "all"
        except RuntimeError:
            missing = [str(rank) for rank, name in enumerate(keys) if not self._store.check([name])]
            found = f"rank {', '.join(missing[:8])} did not leave within {within_s:g} s"
        first = self._store.compare_set(f"{self._prefix}/{key}", "", found).decode()  # else two ranks might differ
        return "" if first == "all" else first

    def _keys(self, key: str) -> list[str]:
        return [f"{self._prefix}/{key}/{rank}" for rank in range(self._own.world_size)]

    def _hear(self, ranks: Sequence[int], key: str, keys: list[str]) -> list[str]:
        assert self._store is not None
        began_s = time.monotonic()
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=NOTICE_S))
                return [self._store.get(name).decode() for name in keys]
            except RuntimeError:
                missing = [rank for rank, name in zip(ranks, keys, strict=True) if not self._store.check([name])]
                waited_s = time.monotonic() - began_s
                if waited_s > DEADLINE_S:
                    raise NodeFaultError(
                        f"checkpoint: rank {missing} said nothing of {key} in {waited_s:.0f} s; is it stuck in the "
                        f"file system?"
                    ) from None
                self._say(f"checkpoint: waiting {waited_s:.0f} s for {key} of rank {', '.join(map(str, missing[:8]))}")
