"""How is the state copied without delaying the training? Into shared memory, allocated once.

The memory (a memfd) holds exactly the bytes of the part that the writer's process is to write. It is as large as the
largest state so far and stays mapped and populated: faulting pages in costs ten times what copying to them does, so the
first save is slow and all others are not. Nothing of it is left when trainer and writer are gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from allranks.state.saved.pack import Piece, is_plain

NUM_THREADS = 4
"""Copying frees the interpreter. More do not make memory faster; fewer, or torch's own with a fixed share each, wait
for the one that has to share its core."""
SLICE_BYTES = 8 << 20
SMALL_BYTES = 1 << 20
"""What is smaller is copied before a thread has heard of it."""


class Snapshot:
    """Shared memory with room for one part."""

    def __init__(self, *, say: Callable[[str], None]) -> None:
        self.descriptor = os.memfd_create("allranks-checkpoint")
        """The writer inherits it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self._may_pin = True
        self._say = say

    def fill(self, header: bytes, pieces: Sequence[Piece]) -> None:
        """Copy a part, its header first, into the room that it has; returns when all is there, also from GPUs."""
        devices = {piece.source.device for piece in pieces if piece.source.device.type == "cuda"}
        if devices and not self._is_pinned and self._may_pin:
            self._pin(next(iter(devices)))
        plain = {at for at, (source, _) in enumerate(pieces) if source.device.type == "cpu" and is_plain(source)}
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            slices = [job for at in plain for job in self._slices(pieces[at])]
            waiting = [pool.submit(ctypes.memmove, *job) for job in slices if job[2] >= SMALL_BYTES]
            for job in slices:
                if job[2] < SMALL_BYTES:
                    ctypes.memmove(*job)
            for at, (source, offset) in enumerate(pieces):
                if at not in plain:
                    target = self._bytes[offset : offset + source.nbytes]
                    target.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
            self._bytes[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for done in waiting:
                done.result()
        for device in devices:
            torch.cuda.synchronize(device)

    def _slices(self, piece: Piece) -> Iterator[tuple[int, int, int]]:
        """To, from and how much: addresses of a contiguous tensor's slices."""
        source, offset = piece
        to, where = self._bytes.data_ptr() + offset, source.data_ptr()
        for start in range(0, source.nbytes, SLICE_BYTES):
            yield to + start, where + start, min(SLICE_BYTES, source.nbytes - start)

    def reserve(self, size_bytes: int) -> None:
        """Allocate shared memory for a part of this size; raises OSError where there is not that much."""
        if size_bytes <= self._bytes.numel():
            return
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)  # lets go of the old mapping
        os.posix_fallocate(self.descriptor, 0, size_bytes)  # says when there is no room; a page fault would kill
        memory = mmap.mmap(self.descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    # GPUs copy to pinned memory without the CPU; where it cannot be pinned they copy all the same.

    def _pin(self, device: torch.device) -> None:
        def register() -> int:
            with torch.cuda.device(device):
                return int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))

        # What CUDA refuses stays the calling thread's last error, and torch's next look at it would raise that.
        with ThreadPoolExecutor(1) as own_thread:
            code = own_thread.submit(register).result()
        self._is_pinned = self._may_pin = code == 0
        if code:
            self._say(
                f"checkpoints: {self._bytes.numel() / 1e6:.0f} MB of memory could not be pinned, so copies from "
                f"{device} are slower: cudaHostRegister failed with CUDA error {code}; see ulimit -l"
            )

    def _unpin(self) -> None:
        if self._is_pinned:
            with ThreadPoolExecutor(1) as own_thread:
                own_thread.submit(torch.cuda.cudart().cudaHostUnregister, self._bytes.data_ptr()).result()
            self._is_pinned = False

    def close(self) -> None:
        """Let go of the memory; a writer may still hold it."""
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)
