"""Starts a thread, or reports that none can be started: workers may have used up the user's limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


def start_thread(target: Callable[[], object], *, name: str) -> threading.Thread | None:
    """Run a function in a thread that ends with this process; None: no thread can be started now, and it is not run."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # can't start new thread
        return None
    return thread


class ThreadQuestion(Generic[T]):
    """A question that is asked again and again, each time in a thread, so that nobody waits; at most one is open."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: Future[T] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was asked, and the answer not taken."""
        return self._open is not None

    def ask(self, question: Callable[[], T]) -> None:
        """Have a thread answer, which ends with this process; if none can be started, answer at once."""
        answer = self._open = Future[T]()

        def run() -> None:
            try:
                answer.set_result(question())
            except BaseException as exc:  # whoever takes the answer gets it
                answer.set_exception(exc)

        if start_thread(run, name=self._name) is None:
            run()

    def take(self, *, waits: bool = False) -> T | None:
        """Return the answer, once; None: there is none yet. What was raised instead is raised here."""
        if self._open is None or not (waits or self._open.done()):
            return None
        answer, self._open = self._open, None
        return answer.result()
