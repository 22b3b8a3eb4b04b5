"""Has only the agent of a lost leader ended, or is its machine lost? Asks its port again and again, in a thread.

knocking = Knocking(contact)
knocking.poll()             # KnockReply(listens=False): the machine answers, and its agent has ended
knocking.stop()
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from allranks.host.net import listens
from allranks.host.threads import start_thread
from allranks.wire.protocol import Contact

PAUSE_S = 0.5
WITHIN_S = 1.0
"""For the machine to answer."""


@dataclass(frozen=True, slots=True)
class KnockReply:
    """What the machine answers."""

    listens: bool | None
    """Whether the agent listens; None: the machine does not answer."""


class Knocking:
    """Asks the port of an agent, at all its addresses, until it is stopped."""

    def __init__(self, contact: Contact) -> None:
        self._addresses = [*filter(None, dict.fromkeys((contact.control_address, contact.data_address)))]
        self._port = contact.port
        self._answers: queue.SimpleQueue[KnockReply] = queue.SimpleQueue()
        self._is_over = threading.Event()
        start_thread(self._run, name="allranks-knock")

    def poll(self) -> KnockReply | None:
        """Return what is new."""
        answer = None
        while not self._answers.empty():
            answer = self._answers.get()
        return answer

    def stop(self) -> None:
        """Ask no more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            found = [listens(address, self._port, within_s=WITHIN_S) for address in self._addresses]
            # One network may be cut; an agent that listens on any of them lives.
            self._answers.put(KnockReply(True if True in found else False if False in found else None))
            self._is_over.wait(PAUSE_S)
