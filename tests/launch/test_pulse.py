"""Is a script that writes nothing spoken of, and ever more rarely?"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from allranks.launch.lead.summary import describe_output, describe_running, describe_success, describe_time
from allranks.launch.pulse import Pulse
from conftest import Allranks, allranks_command, clean_env


def lines(until_s: float, *, spoken_s: tuple[float, ...] = ()) -> list[tuple[float, float]]:
    """When something is said in so many seconds, and how long the silence then is."""
    pulse, said = Pulse(0.0), []
    for now_s in range(int(until_s) + 1):
        silent_s = pulse.turn(float(now_s), has_news=now_s in spoken_s)
        if silent_s is not None:
            said.append((now_s, silent_s))
    return said


def test_a_script_that_never_writes_is_spoken_of_ever_more_rarely():
    assert lines(7_000) == [(10, 10), (70, 70), (430, 430), (2590, 2590), (6190, 6190)]


def test_a_script_that_writes_now_and_then_is_left_alone():
    assert lines(3_600, spoken_s=tuple(range(0, 3_600, 120))) == []


def test_a_script_that_falls_silent_is_spoken_of_by_how_long_it_is():
    assert lines(1_000, spoken_s=(5, 100)) == [(400, 300)]


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        *((0.04, "0.0 s"), (9.94, "9.9 s"), (9.95, "10 s"), (59.4, "59 s"), (59.6, "1 min"), (61.0, "1 min 1 s")),
        *((3599.4, "59 min 59 s"), (3599.6, "1 h"), (7500.0, "2 h 5 min"), (90_000.0, "25 h")),
    ],
)
def test_a_time_is_short_and_has_its_unit(time_s: float, text: str):
    assert describe_time(time_s) == text


def test_the_line_says_what_runs_and_how_far_it_is():
    running = describe_running(1, 10.2, has_spoken=False, step=None)
    assert running == "1 rank is running; no output yet, 10 s after the start"
    assert describe_running(4, 300.0, has_spoken=True, step=7) == "4 ranks are running, step 7; no output for 5 min"


def test_the_last_line_says_what_how_long_and_where():
    output = describe_output("runs/9/attempt_0", is_gone=False)
    said = describe_success("train.py", 2, 200.0, 0, output=output)
    assert said == "train.py succeeded: 2 ranks, 3 min 20 s; output in runs/9/attempt_0"
    assert describe_success("t", 1, 1.0, 2, output="...") == "t succeeded: 1 rank, 1.0 s, 2 restarts; ..."


@pytest.mark.parametrize(
    ("is_gone", "missing", "said"),
    [
        (False, ["a/rank_0.out"], "output in runs/9, except a/rank_0.out: removed while the job ran"),
        (False, list("abcdef"), "output in runs/9, except a, b, c, d, ...: removed while the job ran"),
        (True, ["a"], "the output is not in runs/9: somebody removed or unmounted it while the job ran"),
    ],
)
def test_output_that_is_not_there_is_not_promised(is_gone: bool, missing: list[str], said: str):
    assert describe_output("runs/9", is_gone=is_gone, missing=missing) == said


def test_a_silent_job_is_spoken_of_once_it_is_silent_for_long(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import time\nfrom pathlib import Path\nwhile not Path('go').exists():\n    time.sleep(0.01)\n"
    )
    with subprocess.Popen(
        allranks_command("run", "--ignore", "AR011", "--master-port", "0", "--nproc-per-node", "2", "train.py"),
        cwd=tmp_path,
        env=clean_env(os.environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        try:
            assert agent.stderr is not None
            assert "logs in" in agent.stderr.readline()
            line = r"allranks: 2 ranks are running; no output yet, 1\d s after the start\n"
            assert re.fullmatch(line, agent.stderr.readline())
        finally:
            (tmp_path / "go").touch()
        said = agent.stderr.read().splitlines()
    assert said[-1].startswith("allranks: train.py succeeded: 2 ranks, ")
    assert agent.returncode == 0


def test_success_is_one_line_on_standard_error_and_nothing_on_standard_output(allranks: Allranks, tmp_path: Path):
    (tmp_path / "train.py").write_text("print('42')\n")
    result = allranks("run", "--master-port", "0", "train.py")
    assert result.stdout == "42\n"
    head, *between, last = result.stderr.splitlines()
    assert all(" running; no output yet, " in line for line in between)  # a very slow machine
    assert "logs in " in head
    assert last.startswith("allranks: train.py succeeded: 1 rank, ")
    assert last.endswith("; output in " + head.partition("logs in ")[2])
