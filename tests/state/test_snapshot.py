"""Is memory pinned for copies from a GPU, and are they made all the same where CUDA refuses?"""

from __future__ import annotations

import contextlib
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from allranks.state.saved.pack import Piece
from allranks.state.saved.snapshot import Snapshot

pytestmark = pytest.mark.torch
NUM = 1000


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What CUDA was asked, and whether by a thread of its own."""
    made: list[tuple[str, bool]] = []

    def ask(name: str, code: int) -> int:
        made.append((name, threading.current_thread() is not threading.main_thread()))
        return code

    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: ask("register", 0 if size < 50_000 else 2),
        cudaHostUnregister=lambda address: ask("unregister", 0),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return made


def fill(snapshot: Snapshot, num: int) -> bytes:
    """Copy so many numbers; return what the writer finds."""
    source = torch.arange(num, dtype=torch.float32)
    snapshot.reserve(64 + 4 * num)
    snapshot.fill(b"header", [Piece(source.as_subclass(OnGpu), 64)])
    found = os.pread(snapshot.descriptor, 4 * num, 64)
    assert found == source.numpy().tobytes()
    return found


def test_memory_is_pinned_once_for_as_long_as_it_suffices(calls: list[tuple[str, bool]]) -> None:
    said: list[str] = []
    snapshot = Snapshot(say=said.append)
    for num in (NUM, NUM, 2 * NUM):
        fill(snapshot, num)
    snapshot.close()
    assert calls == [("register", True), ("unregister", True), ("register", True), ("unregister", True)]
    assert said == []


def test_memory_that_cannot_be_pinned_is_said_once_and_copied_to_all_the_same(calls: list[tuple[str, bool]]) -> None:
    said: list[str] = []
    snapshot = Snapshot(say=said.append)
    for num in (20 * NUM, 20 * NUM, 30 * NUM):
        fill(snapshot, num)
    snapshot.close()
    assert calls == [("register", True)]  # and nothing that was not pinned is unpinned
    assert said == [
        "checkpoints: 0 MB of memory could not be pinned, so copies from cuda:1 are slower: cudaHostRegister failed "
        "with CUDA error 2; see ulimit -l"
    ]
