"""Jobs on a disk that fills up while they run: a tmpfs of their own, and workers without torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from allranks.report.readback import parse_job_status
from conftest import allranks_command, clean_env, write

SHELL = """
mount -t tmpfs -o size=80m,mode=1777 none disk && touch said || exit
eval "$MEANWHILE" &
"$@" 2> said
code=$?
cp -r disk/runs/latest/attempt_0 kept
cp disk/runs/latest/status.json kept
exit $code
"""
FILL = """
    import os, sys, time

    def fill():
        with open("disk/other", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
"""


class Ran(NamedTuple):
    """What a job did."""

    code: int
    said: str
    verdict: dict[str, Any]
    events: list[dict[str, Any]]


def run(tmp_path: Path, script: str, *flags: str, meanwhile: str = "true") -> Ran:
    """Run a script with its run directory on a small disk, and copy that off the disk.

    Args:
        meanwhile: of the shell, beside the job; what the job says is in the file `said`.
    """
    (tmp_path / "disk").mkdir()
    write(tmp_path / "train.py", FILL + script)
    job = allranks_command("run", *flags, "--no-standby", "--log-dir", "disk/runs", "train.py")
    shell = ["unshare", "--map-root-user", "--mount", "sh", "-c", SHELL, "sh", *job]
    env = clean_env(os.environ, ALLRANKS_LAB_DIR="/nowhere", MEANWHILE=meanwhile)
    done = subprocess.run(shell, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(f"no mounts of our own here: {done.stderr}")
    kept = tmp_path / "kept"
    events = [json.loads(line) for line in (kept / "events.jsonl").read_text().splitlines()]
    said = (tmp_path / "said").read_text()
    return Ran(done.returncode, said, json.loads((kept / "verdict.json").read_text()), events)


def test_ranks_that_a_full_disk_ends_are_started_again_once_there_is_room(tmp_path: Path) -> None:
    script = """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
        try:
            fill()
        except OSError:
            sys.exit(3)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(60)
    print("trained")
    """
    meanwhile = "until grep -q 'waiting for room' said; do sleep 0.1; done; rm disk/other"
    ran = run(tmp_path, script, "--nproc-per-node", "2", "--max-restarts", "1", meanwhile=meanwhile)
    assert ran.code == 0, ran.said
    told = {each["event"]: each for each in ran.events}
    assert (told["verdict"]["cause"], told["verdict"]["ranks"]) == ("AR005 disk-full", [0])
    assert told["verdict"]["message"] == "OSError: [Errno 28] No space left on device; it ended with exit code 3"
    assert told["paused"]["missing"].startswith("too little room: ")
    assert told["restarting"]["time_s"] > told["paused"]["time_s"]
    assert "largest there: " in ran.said
    assert "disk/other (" in ran.said
    assert "1 restart; output in disk/runs/" in ran.said
    status = parse_job_status((tmp_path / "kept/status.json").read_bytes())
    assert (status.phase, status.exit_code, status.generation, status.num_restarts) == ("over", 0, 1, 1)
    assert {"verdict", "paused", "restarting"} <= {event.event for event in status.events}


def test_a_job_whose_lines_are_lost_says_how_many(tmp_path: Path) -> None:
    script = """
    try:
        fill()
    except OSError:
        pass
    more = open("disk/more", "wb", buffering=0)
    for number in range(2000):  # more than Python's buffer keeps until there is room
        try:
            while True:  # what the agent has given back, too
                more.write(bytes(1 << 16))
        except OSError:
            pass
        try:
            print("line", number)
        except OSError:
            pass
    os.unlink("disk/other")
    os.unlink("disk/more")
    """
    ran = run(tmp_path, script)
    (out,) = (tmp_path / "kept").glob("*/rank_0.out")
    num_lost = 2000 - len(out.read_text().splitlines())
    lines = f"{num_lost} lines of rank 0 could not be written: the disk was full"
    assert num_lost > 0
    assert (ran.code, f"; {lines}; output in " in ran.said) == (0, True), ran.said
    finding = ran.verdict["findings"][0]
    assert (finding["cause"], finding["severity"], finding["message"]) == ("AR005 disk-full", "warn", lines)
