"""What is wrong with the running job, and whose fault is it? Pure: the leader feeds it, asks it, and obeys it.

    guard = Guard(cluster.guard)
    guard.begin(plan, now_s)                 each generation of workers
    guard.hear(beat, now_s)                  each node's Beat, the leader's own node too
    guard.ended(end, now_s)                  a worker's end, whichever
    guard.lost(node_index, reason, now_s)    an agent's connection is gone
    guard.wants(now_s)                       which tries to order from which node
    guard.lines(now_s)                       what to say aloud: slow ranks, stragglers
    guard.judge(now_s)                       a proven fault, or None

`now_s` is one clock of the leader's, which never steps back (time.monotonic()). `Ping.sent_ns` must be of that clock,
too, and `WorkerEnd.time_s` be translated to it: the end's age counts back from now.
"""

from __future__ import annotations

from collections.abc import Mapping

from allranks.guard.ends import Ledger
from allranks.guard.judged import Judged
from allranks.model.cluster import GuardTable
from allranks.model.errors import Exit
from allranks.wire.protocol import Beat, Plan, Try, WorkerEnd


class Guard:
    """Everything that is known of the running workers, and the verdict that follows.

    Args:
        settings: how long to wait before what is called a fault.
    """

    def __init__(self, settings: GuardTable) -> None:
        self._settings = settings
        self._plan: Plan | None = None
        self._ledger = Ledger(())
        self._judged: Judged | None = None

    def begin(self, plan: Plan, now_s: float) -> None:
        """New workers start; what was known of the last generation's is forgotten.

        Args:
            plan: of any node; who is which rank.
            now_s: the leader's clock.
        """
        self._plan = plan
        self._ledger = Ledger(plan.members)
        self._judged = None

    def hear(self, beat: Beat, now_s: float) -> None:
        """A node told of its workers. A beat of another generation, or one that makes no sense, is not believed."""

    def ended(self, end: WorkerEnd, now_s: float) -> None:
        """A worker ended, well or badly; `end.time_s` is on the same clock as `now_s`."""
        if end.exit_code == 0:
            self._ledger.add_exit(end.rank, now_s)
        else:
            self._ledger.add_failure(end, now_s)

    def lost(self, node_index: int, reason: str, now_s: float) -> None:
        """The connection to a node's agent is gone: the first of the two signs that a node is."""
        assert self._plan is not None
        self._ledger.add_lost_node(self._plan.members[node_index].name, reason)

    @property
    def is_all_well(self) -> bool:
        """Whether every worker ended with 0."""
        return self._ledger.is_all_well

    @property
    def are_all_ended(self) -> bool:
        """Whether nobody runs any more, however it ended."""
        return self._ledger.are_all_ended

    def judge(self, now_s: float) -> Judged | None:
        """Return the proven fault, None while there is none.

        Once there is one it stays, and may only get better: where it is not `is_final`, the end of a worker that came
        late can still name the culprit.
        """
        if self._ledger.is_all_well or not self._ledger.should_stop(now_s):
            return self._judged
        verdict = self._ledger.verdict("", 0)
        self._judged = Judged(
            findings=verdict.findings,
            exit_code=verdict.exit_code,
            ranks=verdict.findings[0].ranks if verdict.findings else (),
            is_retryable=verdict.exit_code not in (Exit.USER_CODE, Exit.SETUP),
            is_final=False,
        )
        return self._judged

    def lines(self, now_s: float) -> list[str]:
        """Return what to say aloud now; each line once."""
        return []

    def wants(self, now_s: float) -> Mapping[int, Try]:
        """Return the tries to order now, by the index of the node that is to make them; each once."""
        return {}

    def next_s(self, now_s: float) -> float | None:
        """Return when `judge`, `lines` or `wants` may change without a word from anybody; None: they do not."""
        return self._ledger.settles_at_s()
