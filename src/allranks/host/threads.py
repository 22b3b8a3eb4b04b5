"""Starts a thread, or reports that none can be started: workers may have used up the user's limit."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_thread(target: Callable[[], object], *, name: str) -> threading.Thread | None:
    """Run a function in a thread that ends with this process; None: no thread can be started now, and it is not run."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # can't start new thread
        return None
    return thread
