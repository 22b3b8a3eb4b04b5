"""Give each parser inputs that are nearly right, and find those that crash it, hang it, or eat the memory.

    python tests/mutated/run.py --each 100000 --seed 1
    python tests/mutated/run.py beats joins --each 1000 --seed 1      # these parsers only
    python tests/mutated/run.py --list

A parser gives a value, or one of its refusals with a text of one line; anything else is a fall. Falls of one kind (the
exception, and where in allranks it was raised) are one line, with the smallest input that was found. The same seed
makes the same inputs. Each parser runs in a process of its own: CPU_S of processor time and ROOM_BYTES of memory for an
input. Exits with 1 if a parser fell.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutated.mutate import mutate
from mutated.parsers import Parser, all_parsers

CPU_S = 1.0
"""Of processor time, for one input: the machine may be busy."""
WALL_S = 30.0
"""A parser that waits uses no processor time."""
ROOM_BYTES = 1 << 30
"""That one process may take beyond what it has at the start."""
SHRINK_TRIES = 400
MOST_CALLS = 20_000
"""Inputs after which a parser gets a fresh process: what it caches must not add up."""


class TooLong(BaseException):
    """An input took CPU_S, or WALL_S."""


@dataclass(slots=True)
class Fall:
    """One kind of fall."""

    what: str
    data: bytes
    times: int = 1
    trace: str = ""


@dataclass(slots=True)
class Result:
    """What came of one parser."""

    name: str
    num_inputs: int = 0
    num_values: int = 0
    num_refused: int = 0
    slowest_s: float = 0.0
    falls: dict[str, Fall] = field(default_factory=dict)

    def add(self, other: Result) -> None:
        """Add what came of more inputs."""
        self.num_inputs += other.num_inputs
        self.num_values += other.num_values
        self.num_refused += other.num_refused
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        for what, fall in other.falls.items():
            mine = self.falls.setdefault(what, fall)
            if mine is not fall:
                mine.times += fall.times
                mine.data = min(mine.data, fall.data, key=len)

    def line(self) -> str:
        """Return it as a row."""
        counts = f"{self.num_inputs:>8} inputs {self.num_values:>8} values {self.num_refused:>8} refused"
        return f"{self.name:24} {counts} slowest {1000 * self.slowest_s:6.0f} ms  {len(self.falls)} falls"


def try_parser(parser: Parser, numbers: range, seed: int, folder: Path) -> Result:
    """Give one parser the inputs of these numbers."""
    seeds, read = parser.seeds(), parser.begin(folder)
    result = Result(parser.name)
    for sound in seeds:  # what is right is read, and everything that the parser loads on demand is there
        with contextlib.suppress(*parser.refusals):
            read(sound)
    for number in numbers:
        rng = random.Random(f"{parser.name} {seed} {number}")
        data = mutate(rng, rng.choice(seeds), others=seeds, kind=parser.kind)
        began_s = time.process_time()
        fall = _fall_of(parser, read, data, result)
        result.slowest_s = max(result.slowest_s, time.process_time() - began_s)
        result.num_inputs += 1
        if fall is not None:
            if fall.what in result.falls:
                result.falls[fall.what].times += 1
            elif len(result.falls) < 50:
                fall.data = _shrink(parser, read, fall) if "TooLong" not in fall.what else fall.data
                result.falls[fall.what] = fall
    return result


def _fall_of(parser: Parser, read: Callable[[bytes], object], data: bytes, counts: Result | None = None) -> Fall | None:
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            read(data)
    except parser.refusals as exc:
        text = str(exc)
        if not text or len(text) > 3000 or any(not c.isprintable() for c in text):
            return Fall(f"a refusal that is no line: {type(exc).__name__} {_place(exc)}", data, trace=text[:2000])
        if counts is not None:
            counts.num_refused += 1
        return None
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt):
            raise
        return Fall(f"{type(exc).__name__} {_place(exc)}", data, trace="".join(traceback.format_exception(exc))[-3000:])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    if counts is not None:
        counts.num_values += 1
    return None


def _place(exc: BaseException) -> str:
    """Return where in allranks it was raised."""
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if "/allranks/" in frame.filename] or list(frames)
    return f"at {own[-1].filename.rpartition('/allranks/')[2]}:{own[-1].lineno} in {own[-1].name}" if own else ""


def _shrink(parser: Parser, read: Callable[[bytes], object], fall: Fall) -> bytes:
    """Return a smaller input that falls alike."""
    data, tries, size = fall.data, 0, max(1, len(fall.data) // 2)
    while size and tries < SHRINK_TRIES:
        at, is_smaller = 0, False
        while at < len(data) and tries < SHRINK_TRIES:
            shorter = data[:at] + data[at + size :]
            tries += 1
            found = _fall_of(parser, read, shorter)
            if found is not None and found.what == fall.what:
                data, is_smaller = shorter, True
            else:
                at += size
        size = size if is_smaller and size > 1 else size // 2
    return data


def _in_process(name: str, numbers: range, seed: int, sender: Any) -> None:
    """Try a parser, in a process of its own."""

    def too_long(signum: int, frame: object) -> None:
        raise TooLong(f"{signal.Signals(signum).name}")

    for signum in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(signum, too_long)
    folder = Path(tempfile.mkdtemp(prefix="mutated.", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        parser = all_parsers()[name]
        parser.seeds()
        (folder / "warm").mkdir()
        parser.begin(folder / "warm")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        (folder / "own").mkdir()
        faulthandler.dump_traceback_later(600, exit=True)
        sender.send(try_parser(parser, numbers, seed, folder / "own"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_all(names: Sequence[str], *, each: int, seed: int, jobs: int) -> Iterator[Result]:
    """Try parsers, several at a time."""
    context = multiprocessing.get_context("spawn")
    results = {name: Result(name) for name in names}
    left = dict.fromkeys(names, 0)
    waiting = [
        (name, range(begin, min(each, begin + MOST_CALLS))) for name in names for begin in range(0, each, MOST_CALLS)
    ]
    for name, _ in waiting:
        left[name] += 1
    running: list[tuple[Any, Any, str, range]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            name, numbers = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_in_process, args=(name, numbers, seed, sender))
            process.start()
            sender.close()
            running.append((process, receiver, name, numbers))
        for one in list(running):
            process, receiver, name, numbers = one
            if not receiver.poll(0.05):
                continue
            try:
                results[name].add(receiver.recv())
            except EOFError:
                process.join()
                what = f"the process ended with {process.exitcode} (inputs {numbers.start} to {numbers.stop})"
                results[name].falls[what] = Fall(what, b"")
            process.join()
            running.remove(one)
            left[name] -= 1
            if not left[name]:
                yield results[name]


def main() -> int:
    """Try the parsers that are named, or all."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="parsers; all, if none is named")
    options.add_argument("--each", type=int, default=1000, help="inputs for each parser")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parsers at the same time")
    options.add_argument("--list", action="store_true", help="list the parsers")
    options.add_argument("--trace", action="store_true", help="print where each fall came from")
    asked = options.parse_args()
    known = all_parsers()
    if asked.list:
        print(*known, sep="\n")
        return 0
    if unknown := [name for name in asked.names if name not in known]:
        options.error(f"no such parser: {', '.join(unknown)}; see --list")
    num_falls = num_inputs = 0
    for result in try_all(asked.names or [*known], each=asked.each, seed=asked.seed, jobs=asked.jobs):
        num_inputs += result.num_inputs
        num_falls += len(result.falls)
        print(result.line(), flush=True)
        for fall in result.falls.values():
            print(f"    {fall.times} x {fall.what}\n        {fall.data[:300]!r}", flush=True)
            if asked.trace:
                print(fall.trace)
    print(f"{num_inputs} inputs, {num_falls} kinds of falls")
    return 1 if num_falls else 0


if __name__ == "__main__":
    sys.exit(main())
