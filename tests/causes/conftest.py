"""A text that cannot be read is named in one line, and not by each module of tests that reads the book."""

from __future__ import annotations

import pytest

from allranks.causes.book import BookError, all_causes


def pytest_configure() -> None:
    try:
        all_causes()
    except BookError as exc:
        raise pytest.UsageError(str(exc)) from exc
