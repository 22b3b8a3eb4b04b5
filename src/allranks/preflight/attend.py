"""The roll call, the agent's side: answer what the leader asks until it says go or stop.

The leader asks with Test: try these nodes, look at the run directory. The answer is a Tested, at the latest when the
Test's own time is up, with what there is by then. The leader has a deadline for every phase, and the kernel one for a
leader that is gone (`Connection.expect_alive_within`); `patience_s` is for one that is there and says nothing.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import threading
import time
from collections.abc import Callable

from allranks.model.card import Card, JobDirectory
from allranks.model.errors import NodeFaultError, WireError
from allranks.preflight.mesh.tester import Mesh
from allranks.preflight.roster import mtu_of
from allranks.wire.connection import Connection
from allranks.wire.protocol import Goodbye, Plan, Refused, Test, Tested

TICK_S = 0.25


class Attendance:
    """One agent in the roll call.

    Args:
        connection: to the leader.
        card: what this node said of itself.
        mesh: its end of the pair tests.
        look_at_run_dir: how this node sees the run directory; called in a thread, since it may lie on a file system
            that does not answer.
        patience_s: how long a leader may say nothing: it may be stopped while its kernel keeps the connection.
        check_signals: raises StoppedBySignal when somebody told this agent to stop.
    """

    def __init__(
        self,
        connection: Connection,
        card: Card,
        *,
        mesh: Mesh | None,
        look_at_run_dir: Callable[[], JobDirectory | None],
        patience_s: float,
        check_signals: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._card = card
        self._mesh = mesh
        self._look = look_at_run_dir
        self._patience_s = patience_s
        self._heard_s = time.monotonic()
        self._check_signals = check_signals
        self._test: Test | None = None
        self._due_s = 0.0
        self._place: JobDirectory | None = None
        self._looked: queue.SimpleQueue[JobDirectory | None] | None = None

    def wait(self) -> Plan | Goodbye:
        """Return the leader's word: who is which rank, or why it does not begin.

        Raises:
            NodeFaultError: the leader is gone.
            WireError: the leader refuses this node after all.
            StoppedBySignal: check_signals raised it.
        """
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as on_failure:
            on_failure.callback(self._connection.close)
            self.attach(selector)
            while True:
                self._check_signals()
                answer, next_s = self.step()
                if answer is not None:
                    on_failure.pop_all()
                    return answer
                for key, mask in selector.select(min(TICK_S, next_s)):
                    key.data(mask)

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have a selector watch the connection and the mesh; whoever owns it calls `key.data(mask)`, then `step`."""
        selector.register(self._connection, selectors.EVENT_READ, lambda mask: None)
        if self._mesh is not None:
            self._mesh.attach(selector)

    def step(self) -> tuple[Plan | Goodbye | None, float]:
        """Do what is to be done now; return the leader's word, once it is there, and when to come again, in seconds.

        Raises:
            NodeFaultError, WireError: as `wait` does.
        """
        answer = self._listen()
        next_s = self._mesh.advance(time.monotonic()) if self._mesh else None
        if answer is None:
            self._answer()
        return answer, TICK_S if next_s is None else next_s

    def _listen(self) -> Plan | Goodbye | None:
        while True:
            try:
                messages = self._connection.receive(at_most=1)  # what follows the Plan is the agent's
                self._connection.flush()
            except (ConnectionError, WireError) as exc:
                raise NodeFaultError(f"the leader disconnected before the job started: {exc}") from exc
            now_s = time.monotonic()
            if messages:
                self._heard_s = now_s
            elif now_s - self._heard_s > self._patience_s:
                who, silent_s = self._connection.peer, self._patience_s
                raise NodeFaultError(f"the leader at {who} sent nothing for {silent_s:.0f} s; it may be stopped")
            match messages:
                case []:
                    return None
                case [Refused(reason=reason)]:
                    raise WireError(f"the leader rejected this node: {reason}")
                case [Plan() | Goodbye() as answer]:
                    return answer
                case [Test() as test]:
                    self._begin(test)

    def _begin(self, test: Test) -> None:
        self._test, self._due_s = test, time.monotonic() + test.within_s
        self._place = None
        if self._mesh is not None:
            self._mesh.admit(test.token)
            self._mesh.start(
                test,
                own_index=test.own_index,
                own_address=test.own_address,
                mtu=mtu_of(self._card),
                now_s=time.monotonic(),
            )
        if test.run_dir_nonce is not None:
            looked: queue.SimpleQueue[JobDirectory | None] = queue.SimpleQueue()
            self._looked = looked
            threading.Thread(target=lambda: looked.put(self._look()), daemon=True).start()

    def _answer(self) -> None:
        """Report, once everything is there or the time is up."""
        test = self._test
        if test is None:
            return
        if self._looked is not None:
            with contextlib.suppress(queue.Empty):
                self._place = self._looked.get_nowait()
                self._looked = None
        results = self._mesh.results if self._mesh is not None else ()
        is_done = results is not None and self._looked is None
        if not is_done and time.monotonic() < self._due_s:
            return
        if self._looked is not None:
            self._place = JobDirectory(purpose="run directory", path="", problem="no answer before the test's deadline")
            self._looked = None
        self._test = None
        with contextlib.suppress(ConnectionError):  # the next receive says so
            self._connection.send(Tested(results=results or (), round=test.round, run_dir=self._place))
