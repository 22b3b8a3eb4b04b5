"""Starts a thread, or reports that none can be started: workers may have used up the user's limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_thread(target: Callable[[], object], *, name: str) -> threading.Thread | None:
    """Run a function in a thread that ends with this process; None: no thread can be started now, and it is not run."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # can't start new thread
        return None
    return thread


def ask_in_thread(question: Callable[[], T], *, name: str) -> Future[T]:
    """Have a thread of its own answer, which ends with this process; if none can be started, answer at once."""
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(question())
        except BaseException as exc:  # whoever asks for the result gets it
            answer.set_exception(exc)

    if start_thread(run, name=name) is None:
        run()
    return answer
