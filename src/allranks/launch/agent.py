"""The agent: one process on each node that starts this node's workers, watches them, and ends them.

One thread, one selector: pidfds of the workers, connections to the other agents, signals; the workers' output is shown
between two waits. What a failure means for the others is decided in one place, by the leader's `Ledger`; every agent,
the leader's own included, only reports ends to it and obeys its Stop.

    gathering -> starting -> watching -> ending -> gone     (a Goodbye or a lost leader: ending, from anywhere)

Ending: the signal (SIGTERM, or what the user sent) goes to every worker's process group, SIGKILL after GRACE_S, and
whatever they left behind is ended with them. A second Ctrl-C kills at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence

from allranks.guard.ends import Ledger
from allranks.launch.console import Console
from allranks.launch.workers import Worker, end_left_behind, kill_descendants, reap_orphans
from allranks.model.errors import Exit, StoppedBySignal, WireError, exit_for_signal
from allranks.model.finding import Verdict
from allranks.wire.connection import Connection
from allranks.wire.protocol import (
    Exited,
    Failed,
    Goodbye,
    Interrupted,
    Message,
    Plan,
    Stop,
    Stopped,
    WorkerEnd,
)

GRACE_S = 3.0
"""Between the first signal and SIGKILL: with the time to reap, everything is gone within 5 s."""
PEERS_GRACE_S = GRACE_S + 2.0
"""How long the leader waits for the other agents' Stopped, and an agent for its leader's Goodbye."""
PUMP_S = 0.05
"""How often new output is shown."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SignalInbox:
    """Signals as something a selector can wait for. The second SIGINT calls `kill_now` and leaves at once."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.received: list[int] = []
        self.kill_now: Callable[[], None] = lambda: None
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in STOP_SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        if signum == signal.SIGINT and signal.SIGINT in self.received:
            self.kill_now()
            os._exit(exit_for_signal(signum))
        self.received.append(signum)

    def fileno(self) -> int:
        """For a selector."""
        return self._reader.fileno()

    def clear(self) -> None:
        """Make the selector wait for the next signal."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)

    def check(self) -> None:
        """Between two steps of a longer wait.

        Raises:
            StoppedBySignal: somebody told this process to stop.
        """
        if self.received:
            raise StoppedBySignal(self.received[0])


class Agent:
    """Watches one node's workers until the job is over.

    Args:
        group: who is which rank.
        workers: this node's, already started.
        console: follows their output.
        inbox: signals.
        say: one line for people.
        on_event: for events.jsonl; the leader writes it, elsewhere it does nothing.
        leader: the connection to the leader's agent; None on the leader.
        peers: on the leader, the connections to the others by node index.
    """

    def __init__(
        self,
        group: Plan,
        workers: Sequence[Worker],
        *,
        console: Console,
        inbox: SignalInbox,
        say: Callable[[str], None],
        on_event: Callable[..., None],
        leader: Connection | None,
        peers: dict[int, Connection],
    ) -> None:
        self._group = group
        self._workers = workers
        self._console = console
        self._inbox = inbox
        self._say = say
        self._on_event = on_event
        self._leader = leader
        self._peers = peers
        self._ledger = Ledger(group.members)
        self._selector = selectors.DefaultSelector()
        self._goodbye: Goodbye | None = None
        self._interrupted_by: int | None = None
        self._stop_signal: int | None = None
        self._running_peers = set(peers)
        inbox.kill_now = self._kill_all

    def run(self, *, job: str) -> tuple[int, Verdict | None, str]:
        """Watch until all is over.

        Returns:
            The exit code, the verdict (on the leader only), and the leader's one line about it (elsewhere).
        """
        self._selector.register(self._inbox, selectors.EVENT_READ)
        for connection in (*self._peers.values(), *([self._leader] if self._leader else [])):
            self._selector.register(connection, selectors.EVENT_READ)
        if self._leader:
            self._receive(self._leader)  # what came together with the Plan
        for worker in self._workers:
            if worker.end is None:
                self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
            else:
                self._report(worker.end)
        try:
            self._watch()
            self._end_workers()
            return self._conclude(job)
        finally:
            self._kill_all()
            self._console.close()
            for connection in self._peers.values():
                connection.close()
            if self._leader is not None:
                self._leader.close()
            self._selector.close()

    # Watching

    def _watch(self) -> None:
        while self._stop_signal is None:
            settles_at_s = self._ledger.settles_at_s()
            self._turn(PUMP_S if settles_at_s is None else max(0.0, min(PUMP_S, settles_at_s - time.time())))
            if self._leader is None and self._stop_signal is None and self._ledger.should_stop(time.time()):
                self._stop_signal = signal.SIGTERM

    def _turn(self, timeout_s: float) -> None:
        """Wait for something to happen, handle it, show new output."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Worker):
                self._selector.unregister(key.fd)
                self._report(key.data.reap())
            elif key.fileobj is self._inbox:
                self._inbox.clear()
            elif isinstance(key.fileobj, Connection):
                self._receive(key.fileobj)
        if self._inbox.received and self._interrupted_by is None:
            self._interrupt(self._inbox.received[0])
        self._console.pump()
        reap_orphans(self._workers)

    def _report(self, end: WorkerEnd) -> None:
        if self._leader is None:
            self._record(end)
            return
        age_s = max(0.0, time.time() - end.time_s)
        self._send(self._leader, Failed(end=end, age_s=age_s) if end.exit_code else Exited(rank=end.rank))

    def _record(self, end: WorkerEnd) -> None:
        now_s = time.time()
        self._on_event("worker_ended", rank=end.rank, node=end.node, exit_code=end.exit_code, told=end.ended_by_us)
        if end.exit_code:
            self._ledger.add_failure(end, now_s)
        else:
            self._ledger.add_exit(end.rank, now_s)

    def _interrupt(self, signum: int) -> None:
        self._interrupted_by = signum
        self._stop_signal = self._stop_signal or signum
        self._console.mute("err")  # of a hundred KeyboardInterrupts none tells anything
        self._on_event("interrupted", signum=signum)
        if self._leader is not None:
            self._send(self._leader, Interrupted(signum=signum))

    # Talking

    def _receive(self, connection: Connection) -> None:
        try:
            messages = connection.receive()
        except (ConnectionError, WireError) as exc:
            self._lose(connection, str(exc))
            return
        for message in messages:
            self._obey(message) if connection is self._leader else self._hear(connection, message)

    def _hear(self, peer: Connection, message: Message) -> None:
        """On the leader: what another agent reports."""
        index = self._index_of(peer)
        match message:
            case Failed(end=end, age_s=age_s):
                self._record(_at(end, time.time() - age_s))
            case Exited(rank=rank):
                self._ledger.add_exit(rank, time.time())
            case Interrupted(signum=signum):
                self._interrupted_by = self._interrupted_by or signum
                self._stop_signal = self._stop_signal or signum
                self._on_event("interrupted", signum=signum, node=self._group.members[index].name)
            case Stopped():
                self._running_peers.discard(index)
            case _:
                self._lose(peer, f"it said {type(message).__name__}, which an agent never does")

    def _obey(self, message: Message) -> None:
        """On the other agents: what the leader orders."""
        match message:
            case Stop(signum=signum):
                self._stop_signal = self._stop_signal or signum
            case Goodbye():
                self._goodbye = message
                self._stop_signal = self._stop_signal or signal.SIGTERM
            case _ if self._leader is not None:
                self._lose(self._leader, f"it said {type(message).__name__}, which a leader never does now")

    def _send(self, connection: Connection, message: Message) -> None:
        try:
            connection.send(message)
        except ConnectionError as exc:
            self._lose(connection, str(exc))

    def _lose(self, connection: Connection, reason: str) -> None:
        if connection.fileno() < 0:
            return  # lost already, while its messages were handled
        self._selector.unregister(connection)
        connection.close()
        if connection is self._leader:
            name = self._group.members[0].name
            self._goodbye = self._goodbye or Goodbye(
                exit_code=Exit.NODE_FAULT, summary=f"the leader's agent on {name} is gone ({reason})"
            )
            self._stop_signal = self._stop_signal or signal.SIGTERM
            return
        index = self._index_of(connection)
        del self._peers[index]
        if index in self._running_peers:
            self._running_peers.discard(index)
            self._ledger.add_lost_node(self._group.members[index].name, reason)
            self._on_event("node_lost", node=self._group.members[index].name, reason=reason)

    def _index_of(self, peer: Connection) -> int:
        return next(index for index, known in self._peers.items() if known is peer)

    # Ending

    def _end_workers(self) -> None:
        """Signal, wait, kill; on the leader the same on all nodes at once."""
        assert self._stop_signal is not None
        for peer in list(self._peers.values()):
            self._send(peer, Stop(signum=self._stop_signal))
        for worker in self._workers:
            worker.signal_tree(self._stop_signal)
        kill_at_s = time.monotonic() + GRACE_S
        notice_at_s: float | None = time.monotonic() + 1.0
        while (stubborn := self._still_running()) and time.monotonic() < kill_at_s:
            self._turn(PUMP_S)
            if notice_at_s is not None and time.monotonic() >= notice_at_s:
                notice_at_s = None
                name = signal.Signals(self._stop_signal).name
                ranks = ", ".join(str(worker.rank) for worker in stubborn)
                self._say(f"rank {ranks} did not end on {name}; SIGKILL in {kill_at_s - time.monotonic():.0f} s")
        for worker in stubborn:
            worker.signal_tree(signal.SIGKILL)
        give_up_at_s = time.monotonic() + 1.0
        while self._still_running() and time.monotonic() < give_up_at_s:
            self._turn(PUMP_S)
        for worker in self._still_running():
            self._say(f"rank {worker.rank} (pid {worker.pid}) cannot be ended: the kernel holds it (state D in ps)")
        left = end_left_behind(grace_s=0.5)
        if left and self._interrupted_by is None and self._ledger.is_all_well:
            self._say(f"ended what the workers left running: {', '.join(left)}")

    def _conclude(self, job: str) -> tuple[int, Verdict | None, str]:
        if self._leader is not None:
            self._send(self._leader, Stopped())
            self._turn_until(lambda: self._goodbye is not None, PEERS_GRACE_S)
            goodbye = self._goodbye or Goodbye(
                exit_code=Exit.NODE_FAULT, summary="the leader's agent did not say how it ended"
            )
            return goodbye.exit_code, None, goodbye.summary
        self._turn_until(lambda: not self._running_peers, PEERS_GRACE_S)
        verdict = self._ledger.verdict(job, self._group.attempt)
        if self._interrupted_by is not None:
            verdict = Verdict(job=job, attempt=verdict.attempt, exit_code=exit_for_signal(self._interrupted_by))
        for peer in list(self._peers.values()):
            self._send(peer, Goodbye(exit_code=verdict.exit_code, summary=_summary(verdict)))
        return verdict.exit_code, verdict, ""

    def _turn_until(self, is_done: Callable[[], bool], patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while not is_done() and time.monotonic() < deadline_s:
            self._turn(PUMP_S)

    def _still_running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.end is None]

    def _kill_all(self) -> None:
        if self._still_running():
            kill_descendants()


def _at(end: WorkerEnd, time_s: float) -> WorkerEnd:
    import msgspec

    return msgspec.structs.replace(end, time_s=time_s)


def _summary(verdict: Verdict) -> str:
    if not verdict.findings:
        return ""
    culprit = verdict.findings[0]
    ranks = ",".join(map(str, culprit.ranks))
    return f"{culprit.cause}: rank {ranks} on {culprit.node}: {culprit.message}"
