"""Two runs in one directory of checkpoints: who has it, who is refused, and what becomes of a dead owner's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.state.saved import holding as module
from allranks.state.saved.holding import DRAFT, NEXT, Holding
from allranks.state.saved.owner import (
    LARGEST_BYTES,
    OWNER,
    Owner,
    Ruling,
    describe,
    find_other,
    identify,
    judge,
    parse,
    read,
    to_bytes,
)
from conftest import wait_until

ME = Owner(host="n1", boot="b1", pid_namespace="p", pid=20, started=2)


def owner(**fields: Any) -> Owner:
    return replace(Owner(host="n2", boot="b2", pid_namespace="p", pid=10, started=1), **fields)


OWN, FREE, TAKEN, UNSURE = Ruling.OWN, Ruling.FREE, Ruling.TAKEN, Ruling.UNSURE
HERE = {"host": "n1", "boot": "b1"}
IN_17 = {"slurm_job": "17", "slurm_cluster": "c"}
IN_18 = {"slurm_job": "18", "slurm_cluster": "c"}

CASES: list[tuple[str, Ruling, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # what it is                                           it comes to  the owner  this run                what is seen
    ("this process", OWN, HERE | {"pid": 20, "started": 2}, {}, {"lives": True}),
    ("an earlier process with its pid", FREE, HERE | {"pid": 20}, {}, {"lives": False}),
    ("the agent of this worker", OWN, HERE, {"agent_pid": 10}, {"lives": True}),
    ("a worker of this agent", OWN, HERE | {"agent_pid": 20}, {}, {"lives": True}),
    ("another worker of its agent", OWN, HERE | {"agent_pid": 5}, {"agent_pid": 5}, {"lives": True}),
    ("a worker of an agent with this pid elsewhere", UNSURE, {"agent_pid": 20}, {}, {}),
    ("another run that lives here", TAKEN, HERE, {}, {"lives": True, "unrenewed_s": 1e6}),
    ("another run that died here", FREE, HERE, {}, {"lives": False}),
    ("elsewhere, renewed", UNSURE, {}, {}, {"unrenewed_s": 59.9}),
    ("elsewhere, not renewed", FREE, {}, {}, {"unrenewed_s": 60.0}),
    ("elsewhere, by a clock that is ahead", UNSURE, {}, {}, {"unrenewed_s": -500.0}),
    ("elsewhere, where no clock is known", UNSURE, {}, {}, {"unrenewed_s": None}),
    ("this host before its last boot, or one of its name", UNSURE, {"host": "n1"}, {}, {"unrenewed_s": 24.9}),
    ("this host before its last boot", FREE, {"host": "n1"}, {}, {"unrenewed_s": 25.0}),
    ("a container here, renewed", UNSURE, HERE | {"pid_namespace": "q"}, {}, {"unrenewed_s": 30.0}),
    ("a job that runs", TAKEN, IN_17, IN_18, {"running": True}),
    ("a job that has ended", FREE, IN_17, IN_18, {"running": False}),
    ("a job that runs, and was not renewed", FREE, IN_17, IN_18, {"running": True, "unrenewed_s": 60.0}),
    ("a job that SLURM says nothing of", UNSURE, IN_17, IN_18, {}),
    ("a job of another cluster", UNSURE, IN_17, IN_18 | {"slurm_cluster": "d"}, {"running": False}),
    ("a job, seen from outside of SLURM", UNSURE, IN_17, {}, {"running": False}),
    ("another process of this job", UNSURE, IN_17, IN_17, {"running": True}),
    ("before the requeue", FREE, {"names": {"slurm c 17": 0}}, {"names": {"slurm c 17": 1}}, {"lives": True}),
    ("after the requeue", TAKEN, {"names": {"slurm c 17": 1}}, {"names": {"slurm c 17": 0}}, {"lives": True}),
    ("the same attempt", TAKEN, {"names": {"slurm c 17": 0}}, {"names": {"slurm c 17": 0}}, {"lives": True}),
    ("the leader before", FREE, {"names": {"allranks /r/0": 0}}, {"names": {"allranks /r/0": 1}}, {"unrenewed_s": 1.0}),
    ("another attempt by hand", UNSURE, {"names": {"allranks /r/0": 0}}, {"names": {"allranks /r/1": 0}}, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_whose_a_directory_is(case: tuple[str, Ruling, dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    _, ruling, found, me, seen = case
    seen = {"lives": None, "running": None, "unrenewed_s": 0.0} | seen
    running = seen.pop("running")
    assert judge(owner(**found), replace(ME, **me), is_running=lambda: running, **seen) is ruling


ENVIRONMENTS: list[tuple[dict[str, str], dict[str, int]]] = [
    ({}, {}),
    ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, {}),  # torchrun's own default
    ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, {"torchrun a": 1}),
    ({"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "c"}, {"slurm c 17": 0}),
    ({"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "c", "SLURM_RESTART_COUNT": "2"}, {"slurm c 17": 2}),
    (
        {"ALLRANKS_ATTEMPT_DIR": "/r/0", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "3"},
        {"allranks /r/0": 3},
    ),
]


@pytest.mark.parametrize(("env", "names"), ENVIRONMENTS)
def test_a_run_is_known_again_by_those_who_begin_it_again(env: dict[str, str], names: dict[str, int]) -> None:
    assert identify(env).names == names


FORGED = [
    b"", b"{", b"[]", b"\xff\x00", b"[" * 100_000, b"null", b"{}", b"1" * 5000,
    *(
        json.dumps(json.loads(to_bytes(ME)) | changed).encode()
        for changed in (
            {"pid": "20"}, {"pid": -1}, {"pid": 0}, {"pid": 1.5}, {"pid": True}, {"pid": 2**63}, {"host": ["n"]},
            {"host": "n" * 5000}, {"names": []}, {"names": {"a": "1"}}, {"since_s": "now"}, {"since_s": 1e300},
            {"since_s": float("nan")}, {"started": None},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("data", FORGED)
def test_a_forged_owner_is_nobody(data: bytes) -> None:
    assert parse(data) is None


def test_what_an_owner_file_says_moves_no_terminal() -> None:
    forged = parse(to_bytes(replace(ME, job="\x1b[2Jx\n", run_directory="/a\x07")))
    assert forged is not None
    assert describe(forged).startswith("job ?[2Jx? (pid 20 on n1, since 1970-01-01 ")
    assert describe(forged).endswith(", run directory /a?)")
    assert parse(to_bytes(ME)) == ME


# Real files


@pytest.fixture
def other() -> Iterator[Owner]:
    """Another living process of this machine."""
    with subprocess.Popen(["sleep", "60"]) as process:
        mine = identify({})
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        yield replace(mine, pid=process.pid, started=int(stat[19]), job="17", run_directory="/scratch/runs/17")
        process.kill()


def put(directory: Path, found: Owner | bytes, *, age_s: float = 0.0, name: str = OWNER) -> None:
    path = directory / name
    path.write_bytes(found if isinstance(found, bytes) else to_bytes(found))
    os.utime(path, (time.time() - age_s,) * 2)


@contextlib.contextmanager
def held(directory: Path, me: Owner | None = None, **told: Any) -> Iterator[tuple[Owner | None, list[str]]]:
    said: list[str] = []
    asked = {"find_running": lambda _: None, "say": said.append} | told
    holding = Holding(directory, me or identify({}), **asked)
    try:
        yield holding.begin(), said
    finally:
        holding.end()


def owner_of(directory: Path) -> int:
    found = read(directory)
    assert found is not None
    assert found.owner is not None
    return found.owner.pid


def test_a_directory_is_held_while_its_run_lives_and_left_as_it_was(tmp_path: Path) -> None:
    with held(tmp_path / "a/checkpoints") as (taken, said):
        assert (taken, said) == (None, [])
        assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == [OWNER]
        assert owner_of(tmp_path / "a/checkpoints") == os.getpid()
    assert not (tmp_path / "a/checkpoints").exists()


def test_a_second_living_run_is_refused_and_told_of_the_first(tmp_path: Path, other: Owner) -> None:
    put(tmp_path, other, age_s=9000)  # a stopped process is not renewed, and may go on
    with held(tmp_path) as (taken, _):
        assert taken == other
    assert owner_of(tmp_path) == other.pid
    assert [path.name for path in tmp_path.iterdir()] == [OWNER]


DEAD: dict[str, tuple[Any, float]] = {
    # the owner file                                                     how old it is
    "a process that has ended": (lambda me: replace(me, started=1), 0),
    "its leader before": (lambda me: replace(me, boot="b", host="n", names={"torchrun a": 0}), 0),
    "a machine that is silent": (lambda me: replace(me, boot="b", host="n"), 61),
    "bytes of somebody else": (lambda _: b"hello", 61),
    "a larger file": (lambda _: b"x" * 2 * LARGEST_BYTES, 61),
    "nothing": (lambda _: b"", 61),
}


@pytest.mark.parametrize("dead", DEAD)
def test_a_dead_owners_directory_is_taken_over_without_a_question(tmp_path: Path, dead: str) -> None:
    me = replace(identify({}), names={"torchrun a": 1})
    put(tmp_path, DEAD[dead][0](me), age_s=DEAD[dead][1])
    with held(tmp_path, me) as (taken, said):
        assert (taken, said) == (None, [])
        assert owner_of(tmp_path) == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_one_of_another_machine_is_watched_until_it_is_seen_alive_or_silent_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    elsewhere = replace(identify({}), host="n9", boot="b9", job="9")
    put(tmp_path, elsewhere, age_s=-3000)  # its clock is ahead: only a change counts
    renews = threading.Timer(0.3, lambda: os.utime(tmp_path / OWNER))
    renews.start()
    with held(tmp_path) as (taken, said):
        assert taken == elsewhere
    assert [line.partition(" (")[0] for line in said] == [f"{tmp_path}: waiting up to 60 s to see whether job 9"]
    put(tmp_path, elsewhere, age_s=59.6)
    with held(tmp_path) as (taken, _):
        assert taken is None


@pytest.mark.parametrize(("running", "is_taken"), [(True, True), (False, False)])
def test_of_a_job_elsewhere_slurm_is_asked(tmp_path: Path, running: bool, is_taken: bool) -> None:
    put(tmp_path, replace(identify({}), host="n9", boot="b9", slurm_job="9"))
    with held(tmp_path, find_running={"9": running}.get) as (taken, said):
        assert (taken is not None, said) == (is_taken, [])


def test_an_agent_takes_over_from_its_worker_and_leaves_nothing_of_it(tmp_path: Path, other: Owner) -> None:
    put(tmp_path, replace(other, agent_pid=os.getpid()))
    with held(tmp_path) as (taken, _):
        assert taken is None
        assert owner_of(tmp_path) == os.getpid()
        with held(tmp_path, replace(other, agent_pid=os.getpid())) as (taken, _):
            assert (taken, owner_of(tmp_path)) == (None, os.getpid())  # what its agent holds is its own
        assert owner_of(tmp_path) == os.getpid()
    put(tmp_path, replace(other, agent_pid=os.getpid(), started=1))  # a worker that died, in a directory of its own
    holding = Holding(tmp_path, identify({}), find_running=lambda _: None, say=print)
    holding._let_go()
    assert list(tmp_path.iterdir()) == []


def test_a_decision_of_yesterday_replaces_nobody_today(tmp_path: Path, other: Owner) -> None:
    put(tmp_path, replace(other, started=1))
    dead = read(tmp_path)
    assert dead is not None
    put(tmp_path, other)  # meanwhile another one has taken the dead one's place
    put(tmp_path, identify({}), name="draft")
    holding = Holding(tmp_path, identify({}), find_running=lambda _: None, say=print)
    assert not holding._replace(dead, tmp_path / "draft")
    assert not module._publish(tmp_path / "draft", tmp_path / OWNER)  # nor where there seemed to be nobody
    assert owner_of(tmp_path) == other.pid
    assert not (tmp_path / NEXT).exists()


@pytest.mark.parametrize("left", ["dead", "garbage"])
def test_who_is_killed_while_it_takes_over_locks_nobody_out(tmp_path: Path, left: str) -> None:
    dead = replace(identify({}), started=1)
    put(tmp_path, dead)
    put(tmp_path, dead if left == "dead" else b"{", age_s=6, name=NEXT)
    put(tmp_path, b"", age_s=90, name=f"{DRAFT}n.1.1")
    with held(tmp_path) as (taken, said):
        assert (taken, said) == (None, [])
        assert [path.name for path in tmp_path.iterdir()] == [OWNER]


def test_where_there_are_no_links_a_file_is_made_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Owner
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "link", refuse)
    with held(tmp_path) as (taken, _):
        assert (taken, owner_of(tmp_path)) == (None, os.getpid())
        with held(tmp_path, other) as (taken, _):
            assert taken is not None
    put(tmp_path, replace(other, started=1))
    with held(tmp_path) as (taken, _):
        assert (taken, owner_of(tmp_path)) == (None, os.getpid())


def test_a_file_system_that_hangs_delays_a_start_by_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(module, "read", lambda *_: released.wait(30) and None)
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    monkeypatch.setattr(module, "END_S", 0.1)
    with held(tmp_path) as (taken, said):
        assert taken is None
        assert said == [f"{tmp_path} does not answer; whether another run writes there is not known"]
    released.set()


def test_a_run_whose_directory_another_one_has_taken_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Owner
) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.05)
    with held(tmp_path) as (_, said):
        put(tmp_path, other)
        wait_until(lambda: said, "the loss of the directory")
        time.sleep(0.4)  # and so does no later look
    assert [line.partition(" (")[0] for line in said] == [f"{tmp_path} is job 17"]
    assert owner_of(tmp_path) == other.pid


def test_an_owner_file_that_was_deleted_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.05)
    with held(tmp_path):
        (tmp_path / OWNER).unlink()
        wait_until((tmp_path / OWNER).exists, "another file")
        assert owner_of(tmp_path) == os.getpid()


def test_a_directory_that_nobody_named_is_held_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.05)
    with held(tmp_path / "a", is_made=False):
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "a").mkdir()
        wait_until((tmp_path / "a" / OWNER).exists, "its file")
        assert owner_of(tmp_path / "a") == os.getpid()


def test_a_save_looks_for_another_living_owner_only(tmp_path: Path, other: Owner) -> None:
    fresh = tmp_path / "fresh"
    fresh.touch()
    elsewhere = replace(other, boot="b9", host="n9")
    for found, age_s, expected in (
        (other, 9000, other),
        (replace(other, started=1), 0, None),
        (elsewhere, 59, elsewhere),
        (elsewhere, 61, None),
        (replace(elsewhere, names={"slurm c 17": 3}), 0, None),  # a writer finishes what its requeued job begins with
        (b"hello", 0, None),
    ):
        put(tmp_path, found, age_s=age_s)
        assert find_other(tmp_path, replace(identify({}), names={"slurm c 17": 2}), fresh=fresh) == expected
    (tmp_path / OWNER).unlink()
    assert find_other(tmp_path, identify({}), fresh=fresh) is None


RIVAL = """
import os, sys, time
from pathlib import Path
from allranks.state.saved.holding import Holding
from allranks.state.saved.owner import identify
holding = Holding(Path(sys.argv[1]), identify({}), find_running=lambda _: None, say=print)
print("ready", flush=True)
sys.stdin.readline()
other = holding.begin()
print(os.getpid(), other.pid if other else 0, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("before", ["nothing", "a dead owner"])
def test_of_several_that_begin_at_once_exactly_one_gets_it(tmp_path: Path, before: str) -> None:
    if before == "a dead owner":
        put(tmp_path, replace(identify({}), started=1))
    command = [sys.executable, "-c", RIVAL, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    rivals = [subprocess.Popen(command, text=True, **pipes) for _ in range(4)]
    try:
        assert {rival.stdout.readline() for rival in rivals if rival.stdout} == {"ready\n"}
        for rival in rivals:
            assert rival.stdin is not None
            rival.stdin.write("\n")
            rival.stdin.flush()
        told = [tuple(map(int, rival.stdout.readline().split())) for rival in rivals if rival.stdout]
        [winner] = [pid for pid, other in told if not other]
        assert {other for _, other in told if other} == {winner} == {owner_of(tmp_path)}
    finally:
        for rival in rivals:
            rival.send_signal(signal.SIGKILL)
            rival.communicate()
    with held(tmp_path) as (taken, said):  # the winner was killed
        assert (taken, said) == (None, [])
