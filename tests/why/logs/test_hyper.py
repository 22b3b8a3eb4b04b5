"""Hyperscan's databases: what it refuses, and what is cached."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from allranks.why.logs import hyper
from allranks.why.logs.hyper import HyperscanEngine
from allranks.why.logs.match import Hit, Matcher
from allranks.why.logs.read import Chunk


def scan(patterns: Sequence[str], data: bytes) -> list[Hit]:
    return Matcher(patterns, HyperscanEngine).scan(Chunk(data, 1, 0))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("needle(?!s)", "Zero-width"), (r"(needle)\1", "Back-references"), ("a*", "empty"), ("needle[", "class")],
)
def test_a_pattern_that_cannot_be_is_named(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        Matcher(["fine", pattern, "fine, too"])
    assert f"refuses the pattern {pattern!r}: " in str(caught.value)


# The cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(hyper, "CACHED_FROM_S", 0)
    return tmp_path / "a cache" / "allranks"


def test_a_compiled_database_is_loaded_the_next_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]
    (kept,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    monkeypatch.setattr(hyper, "_compile", lambda *_: pytest.fail("compiled again"))
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]
    assert list(cache.iterdir()) == [kept]


def test_other_patterns_are_another_database(cache: Path) -> None:
    scan(["needle"], b"")
    assert scan(["thread"], b"a needle\na thread") == [Hit(2, b"a thread", (0,))]
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"no database", None])
def test_a_damaged_database_is_compiled_anew(cache: Path, damage: bytes | None) -> None:
    scan(["needle"], b"")
    (kept,) = cache.iterdir()
    good = kept.read_bytes()
    kept.write_bytes(damage if damage is not None else good[:100] + bytes(10) + good[110:])
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]
    assert kept.read_bytes() == good


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyper, "CACHED_FROM_S", 0)
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert scan(["needle"], b"a needle") == [Hit(1, b"a needle", (0,))]


def test_old_databases_go(cache: Path) -> None:
    for number in range(hyper.CACHED_DATABASES + 3):
        scan([f"needle {number}"], b"")
    assert len(list(cache.iterdir())) == hyper.CACHED_DATABASES


def test_a_database_that_compiles_fast_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hyper, "CACHED_FROM_S", 60)
    scan(["needle"], b"")
    assert not list(tmp_path.iterdir())
