"""The terms of every simulated job. Data only."""

from __future__ import annotations

from allranks.model.cluster import GuardTable

TERMS = GuardTable(join_s=25, gone_s=3, beat_s=0.5, stopped_s=1.5, stalled_s=1.5, slow_s=8, hang_s=15)
CAPACITY_S = 12.0
LIMIT_S = 400.0
"""Longer than all deadlines of a life with all its restarts: who still runs then hangs."""
KILL_WAIT_S = 30.0
