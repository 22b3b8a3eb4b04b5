"""Which nodes of the allocation can run Horovod's workers now? Those that SLURM gives the job, and that answer.

    with NodeWatch(["node01", "node02"], job_id="12", env=os.environ) as nodes:
        for change in nodes.changes(): ...       # Change("node02", is_lost=True, evidence="...")

Every node is asked once a second, kernel to kernel: a refused connection is an answer. SLURM itself gives a silent node
up only after SlurmdTimeout, 300 s by default; until then `srun --overlap` starts there again once the node is back.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from allranks.host.net import answers
from allranks.host.slurm import JobState, find_jobs
from allranks.model.errors import SetupError
from allranks.model.hostlist import expand_hosts

PORT = 6818
"""slurmd's own; a machine that refuses it answers, too."""
WITHIN_S = 1.5
INTERVAL_S = 1.0
MISSES = 2
"""Unanswered questions in a row after which a node is lost."""
ASK_SLURM_S = 5.0


@dataclass(frozen=True, slots=True)
class Change:
    """A node that can no longer be used, or can again."""

    host: str
    is_lost: bool
    evidence: str


@dataclass(slots=True)
class NodeMemory:
    """What is known of one node. Pure."""

    host: str
    num_misses: int = 0
    is_lost: bool = False

    def note(self, *, has_answered: bool, is_in_job: bool) -> Change | None:
        """Take what was seen now; return the change, if it is one."""
        self.num_misses = 0 if has_answered else self.num_misses + 1
        is_lost = not is_in_job or self.num_misses >= MISSES or (self.is_lost and self.num_misses > 0)
        if is_lost == self.is_lost:
            return None
        self.is_lost = is_lost
        evidence = (
            f"SLURM no longer lists {self.host} among the job's nodes"
            if not is_in_job
            else f"port {PORT} of {self.host} has not answered for {self.num_misses * WITHIN_S:.0f} s"
        )
        return Change(self.host, is_lost, evidence if is_lost else "it answers")


class NodeWatch:
    """Asks all nodes in a thread of its own.

    Args:
        hosts: the nodes of the allocation.
        job_id: SLURM's id of the job.
    """

    def __init__(self, hosts: Sequence[str], *, job_id: str) -> None:
        self._memories = [NodeMemory(host) for host in hosts]
        self._job_id = job_id
        self._changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._in_job = frozenset(hosts)
        self._ask_now = threading.Event()
        self.end_of_job: JobState | None = None
        """How the job ended, once SLURM says that it has."""
        self._threads = [
            threading.Thread(target=self._ask_nodes, daemon=True),
            threading.Thread(target=self._ask_slurm, daemon=True),
        ]

    def __enter__(self) -> NodeWatch:
        """Start to ask."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End both threads, within the deadlines of their questions."""
        self._is_closed.set()
        self._ask_now.set()

    def hurry(self) -> None:
        """Ask SLURM about the job now, not at the next interval."""
        self._ask_now.set()

    def changes(self) -> Iterator[Change]:
        """Yield what has changed since the last call."""
        while not self._changes.empty():
            yield self._changes.get()

    def _ask_nodes(self) -> None:
        with ThreadPoolExecutor(max_workers=min(64, len(self._memories))) as pool:
            while not self._is_closed.wait(INTERVAL_S):
                asked = [pool.submit(answers, other.host, PORT, within_s=WITHIN_S) for other in self._memories]
                for memory, answer in zip(self._memories, asked, strict=True):
                    change = memory.note(has_answered=answer.result(), is_in_job=memory.host in self._in_job)
                    if change is not None:
                        self._changes.put(change)

    def _ask_slurm(self) -> None:
        while not self._is_closed.is_set():
            self._ask_now.wait(ASK_SLURM_S)
            self._ask_now.clear()
            try:
                jobs = find_jobs(self._job_id)
            except SetupError:  # the controller is busy: what it said last still counts
                continue
            if jobs and jobs[0].is_finished:
                self.end_of_job = jobs[0]
            elif jobs and jobs[0].nodes:
                self._in_job = frozenset(expand_hosts(jobs[0].nodes))
