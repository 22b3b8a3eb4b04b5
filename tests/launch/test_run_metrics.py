"""Are the metrics of a real job written while it runs, and removed when it ends?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import Allranks

SCRIPT = "until grep -q ^allranks_last_beat_timestamp_seconds m/*.prom 2>/dev/null; do sleep .1; done; cp m/*.prom seen"


def test_a_job_has_metrics_while_it_runs(tmp_path: Path, allranks: Allranks) -> None:
    pytest.importorskip("prometheus_client")
    (tmp_path / "m").mkdir()
    done = allranks(
        "run", "--standalone", "--rdzv-id", "job-7", "--metrics-dir", "m", "--no-python", "bash", "-c", SCRIPT
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "m").iterdir()) == []
    seconds = r'^allranks_rank_seconds_total{category="start",job="job-7",node="[^"]+"} '
    assert re.search(seconds, (tmp_path / "seen").read_text(), re.MULTILINE)
