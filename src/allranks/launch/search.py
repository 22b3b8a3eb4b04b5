"""Looks for an agent's leader, in a thread: at the agents that may lead (launch.succession), until one accepts it.

search = Search(contacts, card=card, job=..., attempt=0, secret=secret, deadline_s=20)
if (found := search.poll()) is not None: connection, node = found
search.stop()
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from allranks.model.card import Card
from allranks.model.errors import AllranksError, NodeFaultError
from allranks.wire.connection import Connection
from allranks.wire.leader import Hint
from allranks.wire.protocol import Contact
from allranks.wire.secret import Secret
from allranks.wire.seek import seek_leader


class Search:
    """One search. Owns its thread, which ends soon after `stop`, and the connection until `poll` returns it."""

    def __init__(
        self,
        contacts: Sequence[Contact],
        *,
        card: Card,
        job: str,
        attempt: int,
        secret: Secret,
        deadline_s: float,
    ) -> None:
        self._nodes: dict[str, int] = {}
        """By the hint that leads there."""
        self._hints: list[list[Hint]] = []
        for each in contacts:
            for address in dict.fromkeys(filter(None, (each.control_address, each.data_address))):
                hint = Hint(address, each.port, source=f"agent on {each.name}")
                self._nodes[str(hint)] = each.node
                self._hints.append([hint])
        self._card, self._job, self._attempt, self._secret, self._deadline_s = card, job, attempt, secret, deadline_s
        self._found: queue.SimpleQueue[Connection | AllranksError] = queue.SimpleQueue()
        self._is_stopped = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="allranks-search", daemon=True).start()

    def poll(self) -> tuple[Connection, int] | None:
        """Return the connection, and whose leader it is, once there is one.

        Raises:
            WireError: the leader rejects this agent.
            NodeFaultError: no leader was found by the deadline.
        """
        try:
            found = self._found.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, AllranksError):
            raise found
        return found, self._nodes[found.peer]

    def stop(self) -> None:
        """End the search, and close what it has found."""
        with self._lock:
            self._is_stopped = True
        while not self._found.empty():
            found = self._found.get_nowait()
            if isinstance(found, Connection):
                found.close()

    def _check(self) -> None:
        if self._is_stopped:
            raise NodeFaultError("the search was stopped")

    def _run(self) -> None:
        try:
            found: Connection | AllranksError = seek_leader(
                lambda: self._hints,
                job=self._job,
                attempt=self._attempt,
                secret=lambda: self._secret,
                card=self._card,
                deadline_s=self._deadline_s,
                on_wait=lambda *_: None,
                check_signals=self._check,
            )
        except AllranksError as exc:
            found = exc
        with self._lock:
            if not self._is_stopped:
                self._found.put(found)
            elif isinstance(found, Connection):
                found.close()
