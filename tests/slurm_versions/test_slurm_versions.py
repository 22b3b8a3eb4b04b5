"""Is the page about releases of SLURM made of all results, also of those that are missing?"""

from __future__ import annotations

import pytest

from allranks.lab.faults.catalogue import FAULTS
from allranks.lab.faults.running.strike_catalogue import STRIKES
from slurm_versions.table import (
    RUNNING,
    STATIC,
    TESTS,
    Tried,
    add_second,
    choose_again,
    read_drills,
    read_junit,
    render_page,
)

JUNIT = """\
<testsuites><testsuite>
<testcase classname="tests.lab.test_jobs" name="test_cancel_ends_a_job" />
<testcase classname="tests.lab.test_kinds" name="test_salloc"><failure message="assert 1&#10; here">...</failure>
</testcase>
<testcase classname="tests.lab.test_kinds" name="test_cores[2]"><skipped message="one core">...</skipped></testcase>
</testsuite></testsuites>
"""


def tried(**parts: dict[str, str]) -> Tried:
    return Tried(release="24.11", suite="trixie", version="24.11.5", **parts)


def test_a_drill_that_did_not_run_is_not_left_out() -> None:
    done = [{"faults": ["mtu-blackhole"], "wrong": []}, {"faults": ["partition"], "wrong": ["exit code 0"]}]
    assert read_drills(done, ["partition", "mtu-blackhole", "cable-pulled"], key="faults") == {
        "partition": "no: exit code 0",
        "mtu-blackhole": "yes",
        "cable-pulled": "did not run",
    }
    assert read_drills([{"fault": "requeued", "wrong": []}], ["requeued"], key="fault") == {"requeued": "yes"}


def test_tests_that_failed_or_were_skipped_say_why() -> None:
    assert read_junit(JUNIT) == {
        "test_jobs: cancel_ends_a_job": "yes",
        "test_kinds: salloc": "failure: assert 1 here",
        "test_kinds: cores[2]": "skipped: one core",
    }


@pytest.mark.parametrize(
    ("parts", "is_right"),
    [
        ({"static": {"a": "yes"}, "running": {"b": "yes"}, "tests": {"c": "yes"}}, True),
        ({"static": {"a": "yes"}, "running": {"b": "did not run"}, "tests": {"c": "yes"}}, False),
        ({"static": {"a": "yes"}, "running": {"b": "yes"}, "tests": {}}, False),
    ],
)
def test_a_release_is_right_only_if_all_of_it_ran(parts: dict[str, dict[str, str]], is_right: bool) -> None:
    assert tried(**parts).is_right is is_right


def test_a_second_try_keeps_the_words_of_the_first_and_repeats_nothing_that_was_right() -> None:
    first = {"a": "yes", "b": "no: too late", "c": "no: wrong node", "d": "did not run"}
    second = {"a": "no: worse", "b": "yes", "c": "no: wrong node again", "d": "yes"}
    both = add_second(first, second)
    assert both == {
        "a": "yes",
        "b": "yes at the second try; at the first: too late",
        "c": "no: wrong node again",
        "d": "yes at the second try; at the first: did not run",
    }
    assert tried(static=both, running={"b": both["b"]}, tests={"c": "yes"}).is_right is False
    assert tried(static={"b": both["b"]}, running={"d": both["d"]}, tests={"c": "yes"}).is_right is True


def test_again_are_tests_that_failed_and_files_that_did_not_run() -> None:
    results = {"test_kinds: a": "yes", "test_kinds: b[1]": "failure: x", "test_stack: c": "yes at the second try; ..."}
    assert choose_again(results) == ["tests/lab/test_kinds.py::test_b[1]", "tests/lab/test_jobs.py"]
    assert choose_again({}) == list(TESTS)


def test_the_page_has_a_column_for_each_release() -> None:
    one = tried(static={"mtu-blackhole": "yes"}, running={"requeued": "no: a | b"}, tests={"test_jobs: x_y": "yes"})
    two = Tried(release="26.05", suite="forky", version="26.05.5", static={"mtu-blackhole": "yes"})
    page = render_page([one, two], date="2026-11-23")
    assert "Last run: 2026-11-23." in page
    assert page.splitlines()[12:] == [
        "| | SLURM 24.11.5 (trixie) | SLURM 26.05.5 (forky) |",
        "|---|---|---|",
        "| **faults at start** | 1 of 1 | 1 of 1 |",
        "| mtu-blackhole | yes | yes |",
        "| **faults in a running job** | 0 of 1 | not run |",
        "| requeued | no: a \\| b |  |",
        "| **tests of jobs and verbs** | 1 of 1 | not run |",
        "| test jobs: x y | yes |  |",
    ]


def test_what_is_tried_exists() -> None:
    assert len(STATIC) == len(RUNNING) == 10
    assert set(STATIC) <= set(FAULTS)
    assert set(RUNNING) <= set(STRIKES)
    assert TESTS == ("tests/lab/test_jobs.py", "tests/lab/test_stack.py", "tests/lab/test_kinds.py")
