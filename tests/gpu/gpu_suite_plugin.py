"""What run.py asks of pytest: which tests there are, and for each of them what it expects. Loaded with -p."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down all tests, and which of them must run alone."""
    if listing := os.environ.get("GPU_SUITE_LISTING"):
        ends = [(item, item.nodeid.partition("::")[2]) for item in session.items]
        tests = [(f"{item.path}::{end}", item.get_closest_marker("alone") is not None) for item, end in ends]
        Path(listing).write_text(json.dumps(tests))


@pytest.fixture(autouse=True)
def expected(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Keep the test's docstring for the report."""
    record_property("expected", " ".join((inspect.getdoc(request.function) or "").split()))
