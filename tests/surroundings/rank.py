"""What one rank does: `allranks run -m surroundings.rank NAME`. It notes on a healthy disk what became of its writes.

Each kind for the disk faults is a generator: at each `yield` it has reached a phase, and where the situation's fault
is to strike in this phase (HOLD), it waits there until it has. Other names are functions, `workers:act`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))
LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
SCRATCH = Path(os.environ.get("SURROUNDINGS", "/nonexistent"))
HOLD = os.environ.get("SURROUNDINGS_HOLD", "")
CHECKPOINTS = Path(os.environ.get("SURROUNDINGS_CHECKPOINTS", "/nonexistent"))
PHASES = ("running", "saving", "end")
KINDS: dict[str, Callable[[], Iterator[None]]] = {}
LINE = "a line of 100 bytes".ljust(99, ".")
LINES, SAVED_BYTES = 400, 3 << 20


def note(what: str, **fields: object) -> None:
    """Write one note; the descriptor is opened anew, since some ranks close all they have."""
    descriptor = os.open(SCRATCH / f"notes/{RANK}.{LIFE}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (json.dumps({"note": what, **fields}) + "\n").encode())
    os.close(descriptor)


def reach(phase: str) -> None:
    """Note the phase, and wait there if the fault is to strike now."""
    note(phase)
    deadline_s = time.monotonic() + 30
    while phase == HOLD and not (SCRATCH / "go").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)


@contextlib.contextmanager
def writing(place: str, *, is_silent: bool = False) -> Iterator[None]:
    """Note the errno of a write that fails, and let the rank die of it, silent: with exit code 1 and without a word."""
    try:
        yield
    except OSError as exc:
        note("failed", errno=errno.errorcode.get(exc.errno or 0, "?"), place=place, is_silent=is_silent)
        if is_silent:
            os._exit(1)
        raise


def _kind(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    KINDS[function.__name__] = function
    return function


@_kind
def prints() -> Iterator[None]:
    """Print much; an OSError ends it."""
    for _ in range(4):
        with writing("run"):
            for _ in range(LINES):
                print(LINE, flush=True)
        yield


@_kind
def catches() -> Iterator[None]:
    """Print much, and catch what goes wrong, as logging does."""
    for _ in range(4):
        lost = 0
        for _ in range(LINES):
            try:
                print(LINE, flush=True)
            except OSError:
                lost += 1
        if lost:
            note("lost", lines=lost)
        yield


@_kind
def quiet() -> Iterator[None]:
    """Write nothing."""
    for _ in range(4):
        time.sleep(0.1)
        yield


@_kind
def mute() -> Iterator[None]:
    """Exit with code 1 and without a word where a write fails."""
    for _ in range(4):
        with writing("run", is_silent=True):
            for _ in range(LINES):
                os.write(1, f"{LINE}\n".encode())
        yield


@_kind
def native() -> Iterator[None]:
    """Print through libc, which loses what does not fit and goes on."""
    libc = ctypes.CDLL(None)
    for _ in range(4):
        for _ in range(LINES):
            libc.puts(LINE.encode())
        if libc.fflush(None) != 0:
            note("lost", lines=1)
        yield


@_kind
def saves(*, is_silent: bool = False) -> Iterator[None]:
    """Write checkpoints: to a draft, synced, renamed."""
    for number in range(4):
        with writing("checkpoints", is_silent=is_silent):
            draft = CHECKPOINTS / f"draft_{RANK}"
            with draft.open("wb", buffering=0) as file:
                file.write(bytes(SAVED_BYTES // 2))
                yield
                written = file.write(bytes(SAVED_BYTES // 2))
                if written < SAVED_BYTES // 2:  # a short write: the next one says why
                    file.write(bytes(SAVED_BYTES // 2 - written))
                os.fsync(file.fileno())
            draft.replace(CHECKPOINTS / f"step_of_{RANK}_{number}")


@_kind
def saves_mute() -> Iterator[None]:
    """Write checkpoints, and exit with code 1 without a word where that fails."""
    return saves(is_silent=True)


@_kind
def temporary() -> Iterator[None]:
    """Write temporary files, as compilers of kernels do."""
    with contextlib.ExitStack() as files:
        for _ in range(4):
            with writing("TMPDIR"):
                file = files.enter_context(tempfile.TemporaryFile(dir=os.environ["TMPDIR"], buffering=0))
                for _ in range(8):
                    file.write(bytes(64 << 10))
            yield


@_kind
def shared() -> Iterator[None]:
    """Write files in /dev/shm, as NCCL does."""
    for number in range(4):
        with writing("shm"), Path(f"/dev/shm/of_{RANK}_{number}").open("wb", buffering=0) as file:
            for _ in range(8):
                file.write(bytes(64 << 10))
        yield


@_kind
def torch_saves() -> Iterator[None]:
    """Write checkpoints with torch.save; all but the first rank wait for it in a barrier over Gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield
    for number in range(3):
        if RANK == 0:
            try:
                torch.save({"weights": torch.zeros(SAVED_BYTES // 4)}, CHECKPOINTS / f"{number}.pt")
            except (OSError, RuntimeError):
                note("failed", errno=_errno_of(CHECKPOINTS), place="checkpoints", is_silent=False)
                raise
        dist.barrier()
        yield
    dist.destroy_process_group()


def _errno_of(place: Path) -> str:
    """What a write to this place meets now; torch's own exceptions do not always say it."""
    try:
        with (place / "probe").open("wb", buffering=0) as file:
            file.write(bytes(4 << 20))
            file.write(bytes(1 << 20))
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    return "?"


@_kind
def session() -> Iterator[None]:
    """Train in a session that saves each second step: a checkpoint that cannot be written does not end a job."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import allranks

    with allranks.session() as s:
        model = s.ddp(torch.nn.Linear(256, 256))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        num_steps = int(os.environ.get("SURROUNDINGS_STEPS", "24"))
        dataset = TensorDataset(torch.ones(8 * 24, 256))
        sampler = s.sampler(dataset, global_batch_size=8, seed=1)
        state = s.track(model=model, optimizer=optimizer, sampler=sampler)
        for step in state.steps(DataLoader(dataset, batch_sampler=sampler), total=num_steps):
            with step as (inputs,):
                model(inputs).sum().backward()
                optimizer.step()
                time.sleep(0.05)
            if step.number in (6, 10):
                yield
    yield


def main(name: str) -> None:
    """Live as this name says."""
    note("begun")
    if ":" in name:
        module, function = name.split(":")
        getattr(__import__(f"surroundings.{module}", fromlist=[function]), function)()
    else:
        for phase, _ in zip(chain(PHASES, repeat("over")), KINDS[name](), strict=False):
            reach(phase)
    note("done")


if __name__ == "__main__":
    main(sys.argv[1])
