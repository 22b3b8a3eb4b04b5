"""What the tests of `why` share: one compiled matcher, and a way from a text to what it comes to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from allranks.causes.book import all_causes
from allranks.why.blame import conclude
from allranks.why.conclusion import Conclusion
from allranks.why.logs.collect import collect
from allranks.why.logs.log_events import Logs, Pattern, list_patterns
from allranks.why.logs.match import Matcher
from allranks.why.logs.sources import find_sources


@pytest.fixture(scope="session")
def patterns() -> tuple[Pattern, ...]:
    return list_patterns(all_causes())


@pytest.fixture(scope="session")
def matcher(patterns: tuple[Pattern, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matcher]:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))  # not the developer's own
    try:
        yield Matcher([pattern.scan for pattern in patterns])
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def read(tmp_path: Path, patterns: tuple[Pattern, ...], matcher: Matcher) -> Callable[[str | Mapping[str, str]], Logs]:
    """Return the logs that a text is, or several texts by their file names."""

    def read(text: str | Mapping[str, str]) -> Logs:
        files = {"job.log": text} if isinstance(text, str) else text
        for name, content in files.items():
            path = tmp_path / "logs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return collect(find_sources([str(tmp_path / "logs")]), patterns, matcher=matcher)

    return read


@pytest.fixture
def why(read: Callable[[str | Mapping[str, str]], Logs]) -> Callable[[str | Mapping[str, str]], list[Conclusion]]:
    """Return what such a text comes to."""
    return lambda text: conclude(read(text))
