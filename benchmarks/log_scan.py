"""At what rate do the signs of all causes go through logs, on one core?

    python benchmarks/log_scan.py                     # 1 GB of training log, 1 GB with NCCL_DEBUG=INFO, 5 rounds
    python benchmarks/log_scan.py --size 2e8 --rounds 3
    python benchmarks/log_scan.py --slowest 5         # which signs cost the most, each left out in turn

In each round everyone reads the same file once, one after another in changing order, pinned to one core; the files are
in the page cache. ours: `Matcher.scan` over `read_chunks`. reading: `read_chunks` alone. hyperscan: `Matcher.scan` over
chunks that are in memory. rg: `rg -c -f patterns`, start to exit, bytes as everyone's unit. plain: `Matcher.scan` as it
is without hyperscan. re: one alternation of all patterns. Both get the first `--re-size` bytes only. Compiling the
patterns is not in the rates, but for rg's, and what plain compiles when it first needs it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from synthetic_logs import HIT_EVERY, write_log

from allranks.causes.book import all_causes
from allranks.why.logs.log_events import list_patterns
from allranks.why.logs.match import Matcher, PlainEngine
from allranks.why.logs.read import CHUNK_BYTES, Chunk, read_chunks
from allranks.why.logs.sources import find_sources

KINDS = {
    "training": f"ordinary training log, a hit about every {HIT_EVERY} lines",
    "nccl-info": "NCCL_DEBUG=INFO, nothing wrong",
}
SAMPLE_BYTES = 32 << 20
DEADLINE_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1e9, help="bytes of each log")
    parser.add_argument("--re-size", type=float, default=2e7, help="bytes that Python's re gets")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path(), help="where the logs are written, for a while")
    parser.add_argument("--slowest", type=int, metavar="N", help="only print the signs that cost the most")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    patterns = [pattern.scan for pattern in list_patterns(all_causes())]  # all signs, and the marks
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        first_s, second_s = timed(lambda: Matcher(patterns)), timed(lambda: Matcher(patterns))
        print(f"{len(patterns)} patterns: compiled in {first_s:.3f} s, loaded from the cache in {second_s:.3f} s")
        print(f"core {options.core}")
        for kind, what in KINDS.items():
            path = Path(folder, f"{kind}.log")
            write_log(path, kind, size_bytes=int(options.size if not options.slowest else SAMPLE_BYTES))
            print(f"\n{path.stat().st_size / 1e9:.2f} GB of {kind}: {what}")
            if options.slowest:
                print_slowest(list(chunks_of(path)), patterns, count=options.slowest)
            else:
                compare(path, patterns, rounds=options.rounds, re_bytes=int(options.re_size))
            path.unlink()


def nameless(pattern: str) -> str:
    """Return it without the names of its groups: two of one name are refused."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


def write_patterns(path: Path, patterns: Sequence[str]) -> Path:
    """Write them as `rg -f` reads them: it refuses to escape what needs none."""
    lines = [re.sub(r"""\\([ "'`,:;/=<>@!%_-])""", r"\1", nameless(pattern)) for pattern in patterns]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def timed(do: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s


def chunks_of(path: Path) -> Iterator[Chunk]:
    (source,) = find_sources([str(path)])
    return read_chunks(source)


def compare(path: Path, patterns: Sequence[str], *, rounds: int, re_bytes: int) -> None:
    matcher, plain = Matcher(patterns), Matcher(patterns, PlainEngine)
    size = path.stat().st_size
    sample = list(itertools.islice(chunks_of(path), SAMPLE_BYTES // CHUNK_BYTES))
    sample_bytes = sum(len(chunk.data) for chunk in sample)
    with path.open("rb") as file:
        head = file.read(re_bytes)
    alternation = re.compile("|".join(map(nameless, patterns)).encode())
    pattern_file = write_patterns(path.with_suffix(".patterns"), patterns)

    def scan_file() -> int:
        return sum(len(matcher.scan(chunk)) for chunk in chunks_of(path))

    def scan_with_rg() -> int:
        command = ["rg", "-c", "-a", "-j1", "--no-unicode", "-f", str(pattern_file), str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        if said.stderr:
            sys.exit(f"rg: ...{said.stderr[-300:].strip()}")
        return int(said.stdout or 0)

    readers: dict[str, tuple[int, Callable[[], int]]] = {
        "ours": (size, scan_file),
        "reading": (size, lambda: sum(1 for _ in chunks_of(path)) * 0),
        "hyperscan": (sample_bytes, lambda: sum(len(matcher.scan(chunk)) for chunk in sample)),
        "plain": (len(head), lambda: len(plain.scan(Chunk(head, 1)))),
        "re": (len(head), lambda: sum(alternation.search(line) is not None for line in re.split(rb"[\r\n]", head))),
    }
    if shutil.which("rg"):
        readers["rg"] = (size, scan_with_rg)
    else:
        print("  rg is not on PATH: left out")
    counts = {name: read() for name, (_, read) in readers.items()}  # warms the caches, too
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(rounds):
        order = list(readers) if turn % 2 == 0 else list(reversed(readers))
        for name in order:
            num_bytes, read = readers[name]
            rates[name].append(num_bytes / timed(read) / 1e9)
    num_lines = sum(chunk.data.count(b"\n") for chunk in chunks_of(path))
    print(f"  {counts['ours']} segments hit in {num_lines} lines: {counts['ours'] / num_lines:.4%}")
    print(f"  {rounds} alternating rounds; GB/s, median (least to most), lines or segments hit")
    for name, values in rates.items():
        spread = f"{statistics.median(values):7.3f} ({min(values):.3f} to {max(values):.3f})"
        print(f"  {name:<10} {spread}  {counts[name]:9} in {readers[name][0] / 1e9:.2f} GB", flush=True)


def print_slowest(sample: Sequence[Chunk], patterns: Sequence[str], *, count: int) -> None:
    """Print the patterns that take the longest alone, and by how much the rate grows when each is left out.

    Compiling all but one takes a second, so only these are left out in turn.
    """
    first = sample[:1]
    alone = sorted((best_rate(first, [pattern]), pattern) for pattern in dict.fromkeys(patterns))[:count]
    everything = best_rate(sample, patterns)
    print(f"  all: {everything:.2f} GB/s in memory, best of 5; noise is some percent")
    for rate, pattern in alone:
        gain = best_rate(sample, [other for other in patterns if other != pattern]) / everything - 1
        print(f"  alone {rate:6.2f} GB/s, {gain:+6.1%} without it: {pattern}", flush=True)
    slow = {pattern for _, pattern in alone}
    print(f"  all but these: {best_rate(sample, [other for other in patterns if other not in slow]):.2f} GB/s")


def best_rate(sample: Sequence[Chunk], patterns: Sequence[str]) -> float:
    matcher = Matcher(patterns)
    times = [timed(lambda: [matcher.scan(chunk) for chunk in sample]) for _ in range(5)]
    return sum(len(chunk.data) for chunk in sample) / min(times) / 1e9


if __name__ == "__main__":
    main()
