"""Is it known what a signal would do, before it is sent?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from allranks.host.signals import catches

PROGRAM = "import signal, time; signal.signal(signal.SIGUSR1, {}); print('ready', flush=True); time.sleep(60)"


@contextmanager
def running(action: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(action)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("action", "expected"), [("signal.SIG_DFL", False), ("signal.SIG_IGN", False), ("print", True)]
)
def test_a_process_of_its_own_mind(action: str, expected: bool) -> None:
    with running(action) as pid:
        assert catches(pid, signal.SIGUSR1) is expected
        assert not catches(pid, signal.SIGUSR2)


def test_a_process_with_a_name_that_is_no_text_is_read() -> None:
    """prctl(PR_SET_NAME): any bytes."""
    named = "(__import__('ctypes').CDLL(None).prctl(15, b'\\xff) R 1', 0, 0, 0), print)[1]"
    with running(named) as pid:
        assert catches(pid, signal.SIGUSR1)


def test_a_process_that_is_gone_catches_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert not catches(process.pid, signal.SIGUSR1)
    assert catches(os.getpid(), signal.SIGINT)
