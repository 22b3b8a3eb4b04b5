"""What the tests of a real Horovod need."""

from __future__ import annotations

import importlib.util

import pytest

NEEDS_HOROVOD = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="no Horovod here; make horovod builds it"
)
