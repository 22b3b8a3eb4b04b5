"""The bytes of logs: in whole lines, each once, whatever they are packed in and however they end."""

from __future__ import annotations

import gzip
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from allranks.why.logs import read
from allranks.why.logs.read import Chunk, ReadProblem, read_chunks
from allranks.why.logs.sources import Source
from conftest import HANG_S


def source_of(path: Path) -> Source:
    return Source(path.name, str(path), None, None, None, None, path.stat().st_size if path.is_file() else 0)


def write_log(tmp_path: Path, data: bytes) -> Source:
    path = tmp_path / "a.log"
    path.write_bytes(data)
    return source_of(path)


def chunks_of(tmp_path: Path, data: bytes) -> list[Chunk]:
    return list(read_chunks(write_log(tmp_path, data)))


def join(chunks: list[Chunk]) -> bytes:
    """Put chunks together; a line that was cut is told again from its last bytes."""
    whole = b""
    for chunk in chunks:
        seen = b"" if whole.endswith(b"\n") else whole[-read.OVERLAP_BYTES :]
        assert chunk.data.startswith(seen)
        assert len(seen) < len(chunk.data)
        assert chunk.first_line == whole[: len(whole) - len(seen)].count(b"\n") + 1
        whole += chunk.data[len(seen) :]
    return whole


def test_lines_are_numbered_for_places_in_any_order() -> None:
    lines = [b"x" * (length % 90) + b"\n" for length in range(900)]
    chunk = Chunk(b"".join(lines), 5)
    ends = list(itertools.accumulate(map(len, lines)))
    assert [chunk.number_at(end - 1) for end in ends] == list(range(5, 905))
    assert (chunk.number_at(ends[-1]), chunk.number_at(ends[7])) == (905, 13)


LOG = b"".join(b"[rank%d]: step %d loss 0.1234\n" % (i % 8, i) for i in range(300_000))
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": lambda data: gzip.compress(data, 1),
    "zstd": zstandard.compress,
    "joined gzip": lambda data: gzip.compress(data[:1000], 1) + gzip.compress(data[1000:], 1) + bytes(512),
    "joined zstd": lambda data: zstandard.compress(data[:1000]) + zstandard.compress(data[1000:]),
    "zstd without its size": lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
}


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize(
    "data", [LOG, LOG[:-1], b"x", b"\n", b"\n\n", b"a\nb"], ids=["long", "cut", "x", "n", "nn", "ab"]
)
def test_whole_lines_each_once(tmp_path: Path, pack: Callable[[bytes], bytes], data: bytes) -> None:
    problems: list[ReadProblem] = []
    chunks = list(read_chunks(write_log(tmp_path, pack(data)), problems=problems))
    assert join(chunks) == data
    assert all(chunk.data.endswith(b"\n") for chunk in chunks[:-1])
    assert max(len(chunk.data) for chunk in chunks) <= read.CHUNK_BYTES + 100
    assert not problems


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_an_empty_source_has_no_chunk(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    assert chunks_of(tmp_path, pack(b"")) == []


@pytest.mark.parametrize("pack", [bytes, PACKERS["gzip"], PACKERS["zstd"]], ids=["plain", "gzip", "zstd"])
def test_a_line_of_10_mb_is_cut_with_an_overlap(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    data = b"before\n" + os.urandom(5_000_000).hex().encode() + b"\nafter\n"
    chunks = chunks_of(tmp_path, pack(data))
    assert join(chunks) == data
    assert [chunk.first_line for chunk in chunks] == [1, 2, 2, 2, 2]
    assert {len(chunk.data) for chunk in chunks[1:-1]} == {read.CHUNK_BYTES + read._BLOCK_BYTES + read.OVERLAP_BYTES}
    assert chunks[-1].data.endswith(b"\nafter\n")


@pytest.mark.parametrize("size", [(2 << 20) - 1, 2 << 20, (2 << 20) + 1, (9 << 18) - 1, 9 << 18, (9 << 18) + 1])
def test_lines_that_just_fit_a_chunk(tmp_path: Path, size: int) -> None:
    for data in (b"x" * size, b"x" * (size - 1) + b"\n", b"x" * size + b"\nend"):
        assert join(chunks_of(tmp_path, data)) == data


@pytest.mark.parametrize(("name", "word"), [("gzip", "gzip"), ("zstd", "zstd"), ("zstd without its size", "zstd")])
def test_what_was_cut_gives_what_can_be_read_and_a_word(tmp_path: Path, name: str, word: str) -> None:
    packed = PACKERS[name](LOG)
    problems: list[ReadProblem] = []
    got = join(list(read_chunks(write_log(tmp_path, packed[: len(packed) * 2 // 3]), problems=problems)))
    assert LOG.startswith(got)
    assert len(got) > len(LOG) // 2
    assert [problem.message for problem in problems] == [
        f"its {word} data ends too early: it was truncated, or is still being written"
    ]
    assert problems[0].source.shown == "a.log"


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_what_is_damaged_gives_what_comes_before(tmp_path: Path, name: str) -> None:
    packed = PACKERS[name](LOG[:3000])
    problems: list[ReadProblem] = []
    got = join(list(read_chunks(write_log(tmp_path, packed + b"no longer packed"), problems=problems)))
    assert got == LOG[:3000]
    assert [f"its {name} data is damaged" in problem.message for problem in problems] == [True]


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
def test_utf16_is_read_as_utf8(tmp_path: Path, codec: str, pack: Callable[[bytes], bytes]) -> None:
    text = "\ufeffl\u00f6ss \U0001f600\r\n" * 100_000
    data = text.encode(codec)
    got = join(chunks_of(tmp_path, pack(data)))
    assert got == text[1:].encode()
    assert join(chunks_of(tmp_path, pack(data[:-1]))).startswith(got[:-2])


def test_standard_input() -> None:
    code = (
        "from allranks.why.logs.sources import find_sources\n"
        "from allranks.why.logs.read import read_chunks\n"
        "chunks = list(read_chunks(*find_sources(['-'])))\n"
        "print([len(c.data) for c in chunks], chunks[-1].first_line)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input=gzip.compress(LOG), capture_output=True, check=True, timeout=60
    )
    assert result.stdout.split()[-1] == b"257571"


def test_a_pipe_that_gives_little_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def feed() -> None:
        with path.open("wb", buffering=0) as file:
            for i in range(0, 1000, 7):
                file.write(LOG[i : min(i + 7, 1000)])

    thread = threading.Thread(target=feed)
    thread.start()
    assert join(list(read_chunks(source_of(path)))) == LOG[:1000]
    thread.join()


def test_a_file_that_has_gone_is_a_problem_that_names_it(tmp_path: Path) -> None:
    problems: list[ReadProblem] = []
    gone, folder = source_of(tmp_path / "a.log"), source_of(tmp_path)
    assert [*read_chunks(gone, problems=problems), *read_chunks(folder, problems=problems)] == []
    assert problems == [
        ReadProblem(gone, "cannot be read: No such file or directory"),
        ReadProblem(folder, "cannot list this directory"),
    ]


READS_ALL = """
import resource, sys
from allranks.why.logs.read import read_chunks
from allranks.why.logs.sources import find_sources
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(source,) = find_sources(sys.argv[1:])
print(sum(len(chunk.data) - 4096 for chunk in read_chunks(source)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_constant(tmp_path: Path) -> None:
    path = tmp_path / "zeros.log.zst"
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        for _ in range(5):
            writer.write(bytes(16 << 20))
    done = subprocess.run(
        [sys.executable, "-c", READS_ALL, path], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    num_bytes, grown_kib = map(int, done.stdout.split())
    assert num_bytes >= (80 << 20) - 4096
    assert grown_kib < 50 << 10


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that a few bytes show what gigabytes would."""
    sizes = {"CHUNK_BYTES": 48, "OVERLAP_BYTES": 8, "_BLOCK_BYTES": 12}
    for name, size in sizes.items():
        monkeypatch.setattr(read, name, size)
    monkeypatch.setattr(read, "_PACKINGS", tuple((*packing[:3], 5) for packing in read._PACKINGS))


LINES = st.lists(st.binary(max_size=200) | st.just(b"") | st.just(b"\xe2\x82\xac" * 30), max_size=8).map(b"\n".join)


MARKS = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xfe", b"\xfe\xff")
PACKED = (gzip.compress(LOG[:99]), zstandard.compress(LOG[:99]))


PLAIN = LINES.filter(lambda data: not data.startswith(MARKS))


@given(data=PLAIN, pack=st.sampled_from(list(PACKERS.values())))
def test_any_bytes_are_seen_once(small: None, tmp_path: Path, data: bytes, pack: Callable[[bytes], bytes]) -> None:
    if pack is PACKERS["joined gzip"] and not data[1000:]:
        pack = gzip.compress
    chunks = chunks_of(tmp_path, pack(data))
    assert join(chunks) == data


@given(head=st.sampled_from(MARKS + PACKED), tail=st.binary(max_size=300), cut=st.integers(0, 300))
def test_any_damage_is_survived(small: None, tmp_path: Path, head: bytes, tail: bytes, cut: int) -> None:
    join(list(read_chunks(write_log(tmp_path, (head + tail)[:cut]))))
