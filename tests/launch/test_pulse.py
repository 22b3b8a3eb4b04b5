"""Does a log get a line about the job now and then: soon where ranks are silent, and ever more rarely?"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from allranks.launch.lead.summary import describe_output
from allranks.launch.live import describe_silence
from allranks.launch.pulse import Pulse
from allranks.report.text import describe_time
from conftest import Allranks, allranks_command, clean_env, without_waiting


def lines(until_s: int, *, spoken_s: tuple[int, ...] = (), changed_s: tuple[int, ...] = ()) -> list[int]:
    """When something is said in so many seconds.

    Args:
        spoken_s: when the ranks print something.
        changed_s: when what the job does changes.
    """
    pulse, said = Pulse(0.0), []
    for now_s in range(until_s + 1):
        if now_s in spoken_s:
            pulse.hear(float(now_s))
        if pulse.is_due(float(now_s), sum(at_s <= now_s for at_s in changed_s)):
            said.append(now_s)
    return said


EVERY_SECOND = tuple(range(1, 4000))


def test_a_script_that_never_writes_is_spoken_of_ever_more_rarely():
    assert lines(10_000) == [10, 30, 70, 150, 310, 630, 1270, 2550, 5110, 8710]


def test_a_job_that_gets_on_silently_has_a_line_a_minute():
    assert lines(300, changed_s=EVERY_SECOND) == [10, 30, 60, 120, 180, 240, 300]


def test_a_job_that_writes_has_its_first_line_after_a_minute():
    assert lines(200, spoken_s=EVERY_SECOND, changed_s=EVERY_SECOND) == [60, 120, 180]
    assert lines(1000, spoken_s=EVERY_SECOND) == [60, 180, 420, 900]
    assert lines(130, spoken_s=(15,), changed_s=EVERY_SECOND) == [10, 70, 130]


def test_news_do_not_wait_for_a_long_pause():
    assert lines(3000, changed_s=(2000,)) == [10, 30, 70, 150, 310, 630, 1270, 2000, 2120, 2360, 2840]


@pytest.mark.parametrize(
    ("heard_s", "now_s", "text"),
    [(None, 9.0, ""), (None, 10.0, "no output yet"), (100.0, 159.0, ""), (100.0, 400.0, "no output for 5m")],
)
def test_silence_is_said_once_it_is_news(heard_s: float | None, now_s: float, text: str):
    pulse = Pulse(0.0)
    if heard_s is not None:
        pulse.hear(heard_s)
    assert describe_silence(pulse.find_silence(now_s)) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        *((0.04, "0.0 s"), (9.94, "9.9 s"), (9.95, "10 s"), (59.4, "59 s"), (59.6, "1 min"), (61.0, "1 min 1 s")),
        *((3599.4, "59 min 59 s"), (3599.6, "1 h"), (7500.0, "2 h 5 min"), (90_000.0, "25 h")),
    ],
)
def test_a_time_is_short_and_has_its_unit(time_s: float, text: str):
    assert describe_time(time_s) == text


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
            # Of a status that is up to 1 s old; on a busy machine, later.
            line = r"allranks: 0:(00:(09|[1-5]\d)|0[1-9]:\d\d) . (2/)?2 ranks . no output yet\n"
            assert re.fullmatch(line, agent.stderr.readline())
        finally:
            (tmp_path / "go").touch()
        said = without_waiting(agent.stderr.read()).splitlines()
    assert said[-1].startswith("allranks: train.py succeeded: 2 ranks, ")
    assert agent.returncode == 0


def test_success_is_one_line_on_standard_error_and_nothing_on_standard_output(allranks: Allranks, tmp_path: Path):
    (tmp_path / "train.py").write_text("print('42')\n")
    result = allranks("run", "--master-port", "0", "train.py")
    assert result.stdout == "42\n"
    head, *between, last = without_waiting(result.stderr).splitlines()
    assert all("no output yet" in line for line in between)  # a very slow machine
    assert "logs in " in head
    assert last.startswith("allranks: train.py succeeded: 1 rank, ")
    attempt = head.partition("logs in ")[2]
    assert last.endswith(f"; output in {attempt}; report in {attempt.removesuffix('attempt_0')}report.html")
