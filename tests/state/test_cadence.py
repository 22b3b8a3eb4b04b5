"""The interval is Young's and Daly's, within what is reasonable, and says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.state.cadence import Interval, choose_interval


def test_before_anything_is_measured_the_prior_and_a_cautious_stall_decide() -> None:
    assert choose_interval(stall_s=None, write_s=None, num_nodes=6) == Interval(
        900.0,
        "every 15 min, the longest on several nodes: a save stalls 1 s (assumed), and a fault comes every 167 days on "
        "6 nodes (none seen)",
    )


def test_a_measured_stall_and_seen_faults_make_it_shorter() -> None:
    day_s = 86400.0
    interval = choose_interval(stall_s=0.2, write_s=5, num_nodes=100, node_s=100 * day_s, num_faults=10)
    assert interval.seconds == pytest.approx(186.17, abs=0.01)
    assert interval.reason == (
        "every 3 min, which loses the least time: a save stalls 0.2 s, and a fault comes every 24 h on 100 nodes "
        "(10 seen)"
    )


def test_the_time_that_is_left_bounds_it() -> None:
    interval = choose_interval(stall_s=0.5, write_s=5, num_nodes=2, left_s=1200)
    assert interval.seconds == 120
    assert interval.reason.startswith("every 2 min, a tenth of the 20 min that are left: a save stalls 0.5 s, ")


def test_a_slow_disk_bounds_it_from_below() -> None:
    interval = choose_interval(stall_s=0.01, write_s=400, num_nodes=2, left_s=600)
    assert interval.seconds == 800
    assert interval.reason.startswith("every 13 min, twice the 7 min that writing takes: ")


def test_one_machine_may_lose_more_than_many() -> None:
    assert choose_interval(stall_s=1, write_s=1, num_nodes=1).seconds == 1800
    assert choose_interval(stall_s=1, write_s=1, num_nodes=2).seconds == 900


@given(
    st.floats(0, 100),
    st.floats(0, 1e4),
    st.integers(1, 4096),
    st.integers(0, 1000),
    st.none() | st.floats(0, 1e6),
)
def test_more_faults_never_make_it_longer(
    stall_s: float, write_s: float, num_nodes: int, num_faults: int, left_s: float | None
) -> None:
    def interval(faults: int) -> float:
        return choose_interval(
            stall_s=stall_s, write_s=write_s, num_nodes=num_nodes, node_s=1e6, num_faults=faults, left_s=left_s
        ).seconds

    assert 10 <= interval(num_faults + 1) <= interval(num_faults)
    assert interval(num_faults) <= max(1800, 2 * write_s, 10)
