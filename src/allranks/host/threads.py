"""Start a thread where the machine still has one to give: workers may have used up all that this user may have."""

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
