"""What does the agent do where its user may start no thread any more?"""

from __future__ import annotations

import threading

import pytest

from allranks.host.glance import Glance
from allranks.host.threads import start_thread


def test_where_no_thread_can_be_started_nothing_is_found_and_nobody_waits(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert start_thread(print, name="x") is None
    glance = Glance(1)
    glance.wait(60.0)
    assert (glance.found, glance.place) == ([], "")
