"""The agent: one process per node that starts the node's workers, reports on them, and obeys the leader.

One thread, one selector: pidfds of the workers, the connection to the leader, signals. The workers' output is read
between two waits, and written by threads that may block (launch.screen). Only launch.lead decides what a failure means
for the others; every agent, the leader's own included, reports (Beat, Failed, Exited, Interrupted) and obeys (Order,
Try, Stop, Plan, Goodbye).

    starting -> watching -> ending -> waiting -> starting ...     a Plan begins the next generation
                                         `-----> gone            a Goodbye, or a leader that is lost: from anywhere

Ending: the signal (SIGTERM, or the user's) goes to every worker's process group, SIGKILL follows after the grace
period, and processes that the workers left running are ended, too. A second Ctrl-C kills at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from allranks.launch.crew import Crew
from allranks.launch.events import ASLEEP_S, GRACE_S
from allranks.launch.lead.outcome import describe_running
from allranks.launch.pulse import Pulse
from allranks.launch.workers import Worker, reap_orphans
from allranks.model.beat import NodeBeat
from allranks.model.errors import Exit, StoppedBySignal, WireError, exit_for_signal
from allranks.wire.connection import Connection
from allranks.wire.protocol import (
    Beat,
    Exited,
    Failed,
    Goodbye,
    Interrupted,
    Message,
    Order,
    Ping,
    Plan,
    Stop,
    Stopped,
    Try,
    WorkerEnd,
)

if TYPE_CHECKING:
    from allranks.guard.watch import Watch
    from allranks.launch.lead.driver import LeaderDriver

PEERS_GRACE_S = GRACE_S + 2.0
"""How long the leader waits for the other agents' Stopped, and an interrupted agent for its leader's Goodbye."""
PUMP_S = 0.05
"""How often new output is shown."""
LEADER_SILENT_S = 60.0
"""A leader that says nothing for so long, and whose kernel keeps the connection, is stopped or hangs: it is left. Long,
since what it does between two words may wait for a file server."""
STANDBYS_AFTER_S = 3.0
"""After the workers began: until then, the cores are theirs."""
WRITERS_S = 60.0
"""For checkpoints that are still being written when all is over."""
KEEP_S = 1.0
"""For the last calls and stacks of this node's workers, before they are ended."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SAVE_SIGNAL = signal.SIGUSR1
"""What `sbatch --signal` sends before the time limit: save, and come again."""


class SignalInbox:
    """Signals as something a selector can wait for. The second SIGINT calls `kill_now` and leaves at once."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.received: list[int] = []
        """Stop signals, in their order."""
        self.has_to_save = False
        self.kill_now: Callable[[], None] = lambda: None
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in (*STOP_SIGNALS, SAVE_SIGNAL):
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup stays nohup
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        if signum == SAVE_SIGNAL:
            self.has_to_save = True
            return
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
    """Starts and watches one node's workers, generation after generation, until the job is over.

    Args:
        crew: starts and ends them.
        line: the connection to the leader; on the leader's own node it is a socket pair.
        inbox: signals.
        watch: makes what this node tells of its workers.
    """

    def __init__(self, crew: Crew, line: Connection, *, inbox: SignalInbox, watch: Watch) -> None:
        self._crew = crew
        self._line = line
        self._inbox = inbox
        self._watch = watch
        self._selector = selectors.DefaultSelector()
        self.plan: Plan | None = None
        """Of this generation."""
        self._goodbye: Goodbye | None = None
        self.is_leader_lost = False
        self._interrupted_by: int | None = None
        self._interrupted_s = 0.0
        self._has_asked_to_save = False
        self._stopped_at_s: float | None = None
        self._ping = (0, 0.0)
        self._heard_s = self._turned_s = time.monotonic()
        self._standbys_at_s: float | None = None
        self._pulse = Pulse(self._heard_s)
        self._silent_s: float | None = None
        """For how long the workers here have written nothing, when that is worth a line."""

    def run(self, group: Plan, driver: LeaderDriver | None) -> Goodbye:
        """Go through all generations of the job and return the leader's last word.

        Args:
            group: the first generation's plan.
            driver: on the leader's node, of the other half of this process.
        """
        selector = self._selector
        selector.register(self._inbox, selectors.EVENT_READ, lambda _: self._inbox.clear())
        selector.register(self._line, selectors.EVENT_READ, lambda _: self._listen())
        try:
            if driver is not None:
                driver.attach(selector)
            self._begin(group)
            self._listen()  # what came together with the Plan
            while not self._is_over():
                self._turn()
                if driver is not None:
                    driver.turn(time.monotonic())
                    self._tell_silence(driver.leader.progress.step)
            self._crew.wait_for_writers(WRITERS_S if self._interrupted_by is None else GRACE_S)
            assert self._goodbye is not None
            return self._goodbye
        finally:
            self._crew.close()
            self._watch.close()
            if driver is not None:
                driver.close()
            self._line.close()
            selector.close()

    # Watching

    def _begin(self, group: Plan) -> None:
        self.plan = group
        self._stopped_at_s = None
        self._crew.start(group)
        now_s = time.monotonic()
        self._watch.begin(group.generation, self._crew.watched, now_s, node_index=group.node_index)
        self._tell(self._watch.beat(now_s))  # where this node can be tried, before anything can happen to it
        self._pulse = Pulse(now_s)
        self._standbys_at_s = now_s + STANDBYS_AFTER_S if group.generation < group.max_restarts else None
        for worker in self._crew.workers:
            if worker.end is None:
                self._selector.register(worker.pidfd, selectors.EVENT_READ, self._reaper_of(worker, group.generation))
            else:
                self._report(worker.end, group.generation)

    def _reaper_of(self, worker: Worker, generation: int) -> Callable[[object], None]:
        def reap(fd: object) -> None:
            self._selector.unregister(fd)  # type: ignore[arg-type]
            self._report(worker.reap(), generation, is_finished=worker.is_finished)

        return reap

    def _turn(self) -> None:
        """Wait for something to happen, handle it, show new output, do what is due."""
        # Twice: ends that are noticed together are told to the leader in this process before it judges one of them.
        for timeout_s in (PUMP_S, 0.0):
            for key, _ in self._selector.select(timeout_s):
                key.data(key.fileobj)
        now_s = time.monotonic()
        self._heard_s += max(0.0, now_s - self._turned_s - ASLEEP_S)
        self._turned_s = now_s
        self._read_inbox()
        self._silent_s = self._pulse.turn(now_s, has_news=self._crew.console.pump())
        reap_orphans(self._crew.workers)
        if self._crew.is_ending and not self._has_stopped and self._crew.advance(now_s):
            self._settle()
        if not self._has_stopped and (node := self._watch.turn(now_s)) is not None:
            self._tell(node)
        if self._standbys_at_s is not None and now_s >= self._standbys_at_s and not self._crew.is_ending:
            self._standbys_at_s = now_s + STANDBYS_AFTER_S
            self._crew.prepare_standbys()
        if now_s - self._heard_s > LEADER_SILENT_S:
            self._lose(f"it has sent nothing for {LEADER_SILENT_S:.0f} s, although its machine answers")

    def _tell_silence(self, step: int | None) -> None:
        """Say that the workers run, where they have written nothing here for a while."""
        if self._silent_s is not None and self._crew.still_running and not self._crew.is_ending:
            assert self.plan is not None
            has_spoken = self._pulse.has_spoken
            self._crew.say(describe_running(self.plan.world_size, self._silent_s, has_spoken=has_spoken, step=step))

    def _tell(self, node: NodeBeat) -> None:
        ping_ns, came_s = self._ping
        held_ns = round((time.monotonic() - came_s) * 1e9) if ping_ns else 0
        self._send(Beat(node=node, ping_ns=ping_ns, held_ns=held_ns))

    def _report(self, end: WorkerEnd, generation: int, *, is_finished: bool = False) -> None:
        if end.exit_code and not end.ended_by_us:  # its last calls, before they are overtaken by its end
            self._tell(self._watch.beat(time.monotonic()))
        age_s = max(0.0, time.time() - end.time_s)
        if end.exit_code:
            self._send(Failed(end=end, age_s=age_s, generation=generation))
        else:
            self._send(Exited(rank=end.rank, is_finished=is_finished, generation=generation))

    def _read_inbox(self) -> None:
        """Tell the leader of signals; whatever is no request to save ends the workers here at once."""
        if self._inbox.has_to_save and not self._has_asked_to_save:
            self._has_asked_to_save = True
            self._send(Interrupted(signum=SAVE_SIGNAL))
        if not self._inbox.received:
            return
        if self._interrupted_by is None:
            self._interrupted_by, self._interrupted_s = self._inbox.received[0], time.monotonic()
            self._send(Interrupted(signum=self._interrupted_by))
        is_patient = self._inbox.received == [signal.SIGTERM]
        if not self._crew.is_ending and not (is_patient and self._crew.can_save):  # else the leader says when
            self._crew.console.mute("err")  # of a hundred KeyboardInterrupts none tells anything
            self._crew.end(self._interrupted_by, grace_s=GRACE_S)

    def _settle(self) -> None:
        """All workers have ended: sweep up behind them, and say so."""
        self._stopped_at_s = time.monotonic()
        left = self._crew.sweep(grace_s=0.5)
        if left and self._interrupted_by is None and all(w.end and w.end.exit_code == 0 for w in self._crew.workers):
            self._crew.say(f"ended processes that the workers left running: {', '.join(left)}")
        assert self.plan is not None
        self._send(Stopped(generation=self.plan.generation))

    # Talking

    def _listen(self) -> None:
        if self._line.fileno() < 0:
            return
        try:
            messages = self._line.receive()
            self._line.flush()
        except (ConnectionError, WireError) as exc:
            self._lose(str(exc))
            return
        for message in messages:
            self._heard_s = time.monotonic()
            self._obey(message)

    def _obey(self, message: Message) -> None:
        match message:
            case Ping(sent_ns=sent_ns):
                self._ping = (sent_ns, time.monotonic())
            case Try():
                self._watch.order(message, time.monotonic())
            case Order():
                self._crew.order(message)
            case Stop(signum=signum, at_once=at_once, grace_s=grace_s):
                if at_once or grace_s is not None:  # there was a fault: whoever comes later wants to know
                    self._keep_evidence()
                    self._crew.console.drop_tracebacks()
                self._crew.end(signum, grace_s=GRACE_S if grace_s is None else grace_s, at_once=at_once)
            case Plan() if self._has_stopped:
                self._begin(message)
            case Goodbye():
                self._goodbye = message
                self._crew.end(signal.SIGTERM, grace_s=GRACE_S)
            case _:
                self._lose(f"it sent {type(message).__name__}, which a leader does not send now")

    def _keep_evidence(self) -> None:
        assert self.plan is not None
        me = self.plan.members[self.plan.node_index]
        self._watch.keep(self._crew.run_dir.node_path(me.name), within_s=KEEP_S)

    def _send(self, message: Message) -> None:
        if self._line.fileno() < 0:
            return
        try:
            self._line.send(message)
        except ConnectionError as exc:
            self._lose(str(exc))

    def _lose(self, reason: str) -> None:
        """End the workers and leave, because the connection to the leader ended; after its Goodbye that is no loss."""
        if self._line.fileno() < 0:
            return  # lost already, while its messages were handled
        self._selector.unregister(self._line)
        self._line.close()
        if self._goodbye is None:
            name = self.plan.members[0].name if self.plan else "the first node"
            summary = f"the leader's agent on {name} is gone ({reason})"
            self._goodbye = Goodbye(exit_code=Exit.NODE_FAULT, summary=summary)
            self.is_leader_lost = True
        self._crew.end(signal.SIGTERM, grace_s=GRACE_S)

    @property
    def _has_stopped(self) -> bool:
        """Whether all workers of this generation have ended and the leader knows it."""
        return self._stopped_at_s is not None

    def _is_over(self) -> bool:
        if self._goodbye is not None:
            return self._has_stopped
        # The leader has a deadline for everybody's end; a Ctrl-C waits no longer than that.
        if self._interrupted_by is None or self._stopped_at_s is None:
            return False
        if time.monotonic() - max(self._stopped_at_s, self._interrupted_s) > PEERS_GRACE_S:
            summary = "the leader's agent sent no final verdict"
            self._goodbye = Goodbye(exit_code=Exit.NODE_FAULT, summary=summary)
        return self._goodbye is not None
