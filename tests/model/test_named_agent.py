"""Which process may a run's file name, and which of them gets a signal? As a table: no process is touched here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.model.named_agent import LiveProcess, NamedAgent, why_another, why_no_signal

AGENT = NamedAgent(pid=4711, start_ticks=100, boot_id="b1", began_by_s=1000.0, owner=1000)
OLDER = replace(AGENT, start_ticks=None, boot_id="")
"""Of a version that did not record when its agent began."""
LIVE = LiveProcess(
    start_ticks=100, start_s=990.0, boot_id="b1", owner=1000, command=("/v/bin/python", "-m", "allranks", "run", "a.py")
)
INIT = LiveProcess(start_ticks=1, start_s=10.0, boot_id="b1", owner=0, command=("/sbin/init", "splash"))
LATER = "it began later than the run"


@pytest.mark.parametrize(
    ("agent", "process", "why"),
    [
        (AGENT, LIVE, None),
        (AGENT, replace(LIVE, command=("/usr/bin/python3", "/v/bin/allranks", "run")), None),
        (AGENT, replace(LIVE, start_ticks=101), "it began at another time"),
        (AGENT, replace(LIVE, boot_id="b2"), "the machine was restarted since"),
        (replace(AGENT, boot_id=""), LIVE, "the machine was restarted since"),
        (AGENT, replace(LIVE, command=("python", "train.py")), "it runs python train.py"),
        (AGENT, replace(LIVE, command=("",)), "it runs another program"),
        (AGENT, INIT, "it began at another time"),
        (replace(AGENT, start_ticks=1), INIT, "it runs /sbin/init splash"),
        (OLDER, LIVE, None),
        (OLDER, replace(LIVE, start_s=1003.0), LATER),
        (OLDER, INIT, "it runs /sbin/init splash"),
        (replace(OLDER, began_by_s=None), LIVE, LATER),
        (NamedAgent(), INIT, LATER),
    ],
)
def test_a_process_is_the_agent_if_its_start_its_boot_and_its_command_say_so(
    agent: NamedAgent, process: LiveProcess, why: str | None
) -> None:
    assert why_another(agent, process) == why
    assert (why_no_signal(agent, process) is None) == (why is None)


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (LIVE, None),
        (replace(LIVE, owner=0), "it belongs to user id 0, and the run's files to 1000"),
        (replace(LIVE, owner=0, has_file_of_run=True), None),  # root squash
        (replace(LIVE, start_ticks=1, has_file_of_run=True), "it began at another time"),
    ],
)
def test_a_users_files_name_only_the_processes_of_that_user(process: LiveProcess, why: str | None) -> None:
    """Whoever writes the files knows the right start of each process, and root would end any of them."""
    assert why_no_signal(AGENT, process) == why


def test_files_that_nobody_owns_name_no_process() -> None:
    assert why_no_signal(replace(AGENT, owner=None), LIVE) == "it belongs to user id 1000, and the run's files to None"
