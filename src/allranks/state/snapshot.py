"""How is the state copied out of the training's way, as fast as memory goes?  Into shared memory, allocated once.

The memory (a memfd) holds exactly the bytes of the part that the writer's process is to write. It is as large as the
largest state so far and stays mapped and populated: faulting pages in costs ten times what copying to them does, so the
first save is slow and all others are not. Nothing of it is left when trainer and writer are gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from allranks.state.pack import HEADER, Piece

SLICE_BYTES = 16 << 20
MOST_THREADS = 4
"""More do not make memory faster."""


class Snapshot:
    """Shared memory with room for one part."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("allranks-checkpoint")
        """The writer inherits it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def fill(self, pieces: Sequence[Piece], tail: bytes, tail_at: int) -> None:
        """Copy a part: header, pieces, tail. Returns when all is there, also from GPUs.

        Args:
            pieces: tensors and their places.
            tail: what follows them.
            tail_at: where.
        Raises:
            OSError: there is not that much memory.
        """
        self._reserve(tail_at + len(tail))
        devices = {piece.source.device for piece in pieces if piece.source.device.type == "cuda"}
        if devices and not self._is_pinned:
            self._pin()
        _run([job for piece in pieces for job in self._jobs(piece)])
        self._put(0, HEADER)
        self._put(tail_at, tail)
        for device in devices:
            torch.cuda.synchronize(device)

    def _jobs(self, piece: Piece) -> list[Callable[[], object]]:
        source, offset = piece
        size_bytes = source.numel() * source.element_size()
        target = self._bytes[offset : offset + size_bytes]
        if source.device.type != "cpu" or not source.is_contiguous() or source.is_conj() or source.is_neg():
            shaped = target.view(source.dtype).view(source.shape)
            return [lambda: shaped.copy_(source, non_blocking=True)]
        flat = source.view(-1).view(torch.uint8)
        slices = [slice(start, start + SLICE_BYTES) for start in range(0, size_bytes, SLICE_BYTES)]
        return [lambda part=part: target[part].copy_(flat[part]) for part in slices]  # type: ignore[misc]

    def _put(self, offset: int, data: bytes) -> None:
        self._bytes[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _reserve(self, size_bytes: int) -> None:
        if size_bytes <= self._bytes.numel():
            return
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)  # lets go of the old mapping
        os.posix_fallocate(self.descriptor, 0, size_bytes)  # says when there is no room; a page fault would kill
        memory = mmap.mmap(self.descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    # GPUs copy to pinned memory without the CPU; where it cannot be pinned they copy all the same.

    def _pin(self) -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0)
            self._is_pinned = True

    def _unpin(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False

    def close(self) -> None:
        """Let go of the memory; a writer may still hold it."""
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)


def _run(jobs: Sequence[Callable[[], object]]) -> None:
    """In order where torch copies with several threads itself, else with some of our own: copying frees the GIL."""
    num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    if torch.get_num_threads() > 1 or num_threads == 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
