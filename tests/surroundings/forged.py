"""Forged files: what a command or a job meets in a run directory, or among checkpoints, that others have prepared.

A forged file must lead to one clear line at most: no crash, no hang, no control characters on the terminal, nobody's
process signaled, and nothing changed outside the run directory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from .judge import Expect, Fall, Kind, judge, judge_command
from .stage import DEADLINE_S, Situation, Stage

RUN = "20261123-031500-4711"
ATTEMPT = f"{RUN}/attempt_0"
NODE = "node"
NOBODY = 65534
ESCAPES = "\x1b]0;title\x07\x1b[2Jred\x1b[31m\x9b5m\r\u202e"
VERBS = (
    ("list",),
    ("status", RUN),
    ("why", RUN),
    ("logs", RUN),
    ("stack", RUN),
    ("top", "--once", RUN),
    ("report", RUN),
    ("cancel", RUN),
    ("clean", "--yes", "--keep", "0"),
)
STARTED = {"event": "started", "generation": 0, "members": [NODE], "max_restarts": 0, "job": RUN, "cwd": "/"}
FINDING = {"cause": "AR590 user-code-error", "severity": "fail", "confidence": "certain", "node": NODE, "ranks": [0]}
FILES: dict[str, Any] = {
    f"{ATTEMPT}/events.jsonl": {**STARTED, "time_s": 1795858540.5, "command": ["python", "train.py"], "pid": 999_999},
    f"{ATTEMPT}/verdict.json": {"job": RUN, "attempt": 0, "exit_code": 1, "findings": [{**FINDING, "message": "x"}]},
    f"{ATTEMPT}/{NODE}/rank_0.error.json": {"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1"}}},
    f"{ATTEMPT}/{NODE}/growth": [0, 1, 2],
    f"{ATTEMPT}/{NODE}/recorder_rank_0.json": {"version": "2.3", "entries": []},
    f"{ATTEMPT}/roll_call.json": {"cards": {"0": {"host": NODE}}},
    f"{RUN}/leader.json": {"host": NODE, "port": 29500},
}


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with each scalar changed, but the kind of an event."""
    if isinstance(value, dict):
        return {name: part if name == "event" else _mapped(part, change) for name, part in value.items()}
    return [_mapped(part, change) for part in value] if isinstance(value, list) else change(value)


def _with(change: Callable[[Any], Any]) -> Callable[[Path, Any], object]:
    return lambda path, value: path.write_text(json.dumps(_mapped(value, change)) + "\n")


FORMS: dict[str, Callable[[Path, Any], object]] = {
    "fifo": lambda path, _: os.mkfifo(path),
    "zero": lambda path, _: path.symlink_to("/dev/zero"),
    "device": lambda path, _: os.mknod(path, 0o20644, os.makedev(1, 5)),
    "link": lambda path, _: path.symlink_to(path.parents[3 if path.parent.name == NODE else 1] / "victim/file"),
    "directory": lambda path, _: path.mkdir(),
    "junk": lambda path, _: path.write_bytes(random.Random(1).randbytes(50_000)),
    "deep": lambda path, _: path.write_text("[" * 200_000),
    "huge": lambda path, value: path.write_text(json.dumps(value) + "\n" + " " * (200 << 20)),
    "lists": _with(lambda _: [[]]),
    "numbers": _with(lambda _: -1.5e300),
    "nulls": _with(lambda _: None),
    "escapes": _with(lambda scalar: scalar + ESCAPES if isinstance(scalar, str) else scalar),
}


def _prepare(stage: Stage) -> None:
    """Write a run directory as a job leaves it."""
    for name, value in FILES.items():
        path = stage.runs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value) + "\n")
    (stage.runs / ATTEMPT / NODE / "rank_0.out").write_text("step 1\n")
    (stage.runs / ATTEMPT / NODE / "rank_0.err").write_text("ValueError: x\n")
    (stage.runs / "latest").symlink_to(RUN)
    for folder in (stage.scratch / "victim", stage.scratch / "victim/folder"):
        folder.mkdir()
        (folder / "file").write_text("of somebody else\n")


def _harm(stage: Stage, bystanders: Sequence[subprocess.Popen[bytes]] = ()) -> list[str]:
    """What was done to files and processes of others."""
    victim = stage.scratch / "victim"
    there = sorted(str(path.relative_to(victim)) for path in victim.rglob("*"))
    harmed = [f"process {each.pid} of somebody else was ended" for each in bystanders if each.poll() is not None]
    if there != ["file", "folder", "folder/file"]:
        harmed.append(f"the victim's directory has {there}")
    if any((victim / name).read_text() != "of somebody else\n" for name in there if name.endswith("file")):
        harmed.append("the victim's file was changed")
    return harmed


def _run_verbs(stage: Stage, bystanders: Sequence[subprocess.Popen[bytes]] = ()) -> tuple[list[Fall], float]:
    falls = []
    for verb in VERBS:
        ran = stage.command(*verb, harmed=partial(_harm, stage, bystanders))
        falls += [fall for fall in judge_command(ran) if (fall.kind, verb[0]) != (Kind.CONTROL, "logs")]  # ranks' own
    return falls, 0.0  # there is no agent


def play_file(stage: Stage, *, name: str, form: str) -> tuple[list[Fall], float]:
    """Forge one file, and run all commands."""
    _prepare(stage)
    path = stage.runs / name
    path.unlink()
    FORMS[form](path, FILES[name])
    if "verdict" not in name:
        (stage.runs / ATTEMPT / "verdict.json").unlink(missing_ok=True)  # so that the run may still be running
    return _run_verbs(stage)


PIDS: dict[str, Any] = {
    "minus one": -1, "zero": 0, "one": 1, "text": "x", "fraction": 1.5, "huge": 1 << 70, "true": True, "null": None,
    "list": [1], "older": "older", "younger": "younger", "alike": "alike", "group": "group",
}  # fmt: skip


def play_pid(stage: Stage, *, pid: Any) -> tuple[list[Fall], float]:
    """Let a run that seems to be running name somebody's process."""
    _prepare(stage)
    (stage.runs / ATTEMPT / "verdict.json").unlink()
    older = subprocess.Popen(["sleep", "300"])
    time.sleep(1.1)
    began_s = time.time()
    younger = subprocess.Popen(["sleep", "300"])
    agent_of_another = f"exec -a '{sys.executable} allranks run --job {RUN}' sleep 300"
    alike = subprocess.Popen(["bash", "-c", agent_of_another], user=NOBODY, cwd="/")
    ids = {"older": older.pid, "younger": younger.pid, "alike": alike.pid, "group": -older.pid}
    event = {**STARTED, "members": [socket.gethostname()], "time_s": began_s, "command": ["python", "train.py"]}
    event["pid"] = ids.get(pid, pid) if isinstance(pid, str) else pid
    (stage.runs / ATTEMPT / "events.jsonl").write_text(json.dumps(event) + "\n")
    bystanders = [older, younger, alike]
    try:
        return _run_verbs(stage, bystanders)
    finally:
        for each in bystanders:
            each.kill()


def _many_runs(runs: Path) -> None:
    for number in range(2000):
        (runs / f"2026{number:04}-000000-1/attempt_0").mkdir(parents=True)
        (runs / f"2026{number:04}-000000-1/attempt_0/events.jsonl").touch()


TREES: dict[str, Callable[[Path], object]] = {
    "a run's name with escapes": lambda runs: shutil.copytree(runs / RUN, runs / f"7{ESCAPES}"),
    "a node's name with escapes": lambda runs: (runs / ATTEMPT / NODE).rename(runs / ATTEMPT / f"n{ESCAPES}"),
    "an attempt of many digits": lambda runs: (runs / RUN / f"attempt_{'9' * 200}").mkdir(),
    "an attempt that is a file": lambda runs: (runs / RUN / "attempt_1").touch(),
    "an attempt that is a link": lambda runs: (runs / RUN / "attempt_1").symlink_to("../../victim/folder"),
    "checkpoints that are a link": lambda runs: (runs / RUN / "checkpoints").symlink_to("../../victim/folder"),
    "a run that is a link": lambda runs: (runs / "20261124-031500-4711").symlink_to("../victim/folder"),
    "latest that leaves runs": lambda runs: (runs / "latest").unlink() or (runs / "latest").symlink_to("../victim"),
    "latest that is itself": lambda runs: (runs / "latest").unlink() or (runs / "latest").symlink_to("latest"),
    "latest that is a directory": lambda runs: (runs / "latest").unlink() or (runs / "latest").mkdir(),
    "a report that is a link": lambda runs: (runs / RUN / "report.html").symlink_to("../../victim/file"),
    "a report that is a fifo": lambda runs: os.mkfifo(runs / RUN / "report.html"),
    "output that is a fifo": lambda runs: (
        (runs / ATTEMPT / NODE / "rank_0.out").unlink() or os.mkfifo(runs / ATTEMPT / NODE / "rank_0.out")
    ),
    "output that is a device": lambda runs: (
        (runs / ATTEMPT / NODE / "rank_0.err").unlink()
        or (runs / ATTEMPT / NODE / "rank_0.err").symlink_to("/dev/zero")
    ),
    "output that is sparse": lambda runs: os.truncate(runs / ATTEMPT / NODE / "rank_0.err", 1 << 36),
    "a directory that holds itself": lambda runs: (runs / ATTEMPT / NODE / "loop").symlink_to(".."),
    "many runs": _many_runs,
}


def play_tree(stage: Stage, *, tree: str) -> tuple[list[Fall], float]:
    """Forge the directory itself, and run all commands."""
    _prepare(stage)
    TREES[tree](stage.runs)
    return _run_verbs(stage)


def _in_run(name: str, forge: Callable[[Path], object]) -> Callable[[Path], object]:
    """Make the run directory that the job will have, and in it one forged file."""
    return lambda runs: (runs / "x").mkdir() or forge(runs / "x" / name)


STARTS: dict[str, Callable[[Path], object]] = {
    "its run directory is a link": lambda runs: (runs / "x").symlink_to("../victim/folder"),
    "its run directory is a file": lambda runs: (runs / "x").touch(),
    "runs is a file": lambda runs: shutil.rmtree(runs) or runs.touch(),
    "latest is a directory": lambda runs: (runs / "latest").unlink() or (runs / "latest").mkdir(),
    "leader.json is a fifo": _in_run("leader.json", os.mkfifo),
    "leader.json is a link": _in_run("leader.json", lambda path: path.symlink_to("../../victim/file")),
    "leader.json is junk": _in_run("leader.json", lambda path: path.write_text('{"host": "\\u001b[2J", "port": "x"}')),
    "secret is a fifo": _in_run("secret", os.mkfifo),
    "secret is a link": _in_run("secret", lambda path: path.symlink_to("../../victim/file")),
    "culprits.json is a fifo": _in_run("culprits.json", os.mkfifo),
    "culprits.json is deep": _in_run("culprits.json", lambda path: path.write_text("[" * 200_000)),
    "attempt_0 is a file": _in_run("attempt_0", Path.touch),
    "attempt_0 is a link": _in_run("attempt_0", lambda path: path.symlink_to("../../victim/folder")),
}


def play_start(stage: Stage, *, start: str) -> tuple[list[Fall], float]:
    """Start a job in a run directory that somebody has prepared: it runs, or is refused."""
    _prepare(stage)
    STARTS[start](stage.runs)
    job = stage.start("quiet", "--rdzv-id", "x")
    facts = stage.end(job, has_struck=True)
    falls = judge(facts, Expect(may_refuse=True, needs_file=False))
    return falls + [Fall(Kind.HARMED, what) for what in _harm(stage)], job.peak_mb


SWAPS = ("at once", "while it runs", "never")


def play_owner(stage: Stage, *, swaps: str) -> tuple[list[Fall], float]:
    """Another user owns `runs`, in a sticky folder, and puts a link where root's new run directory was."""
    _prepare(stage)
    for path in (stage.runs, *stage.runs.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    stage.runs.chmod(0o1777)
    swapper = multiprocessing.get_context("fork").Process(target=_swap, args=(stage.runs,), daemon=True)
    if swaps == "at once":
        swapper.start()
    job = stage.start("prints", hold="running" if swaps == "while it runs" else "")
    if swaps == "while it runs":
        stage.reached("running", job)
        swapper.run()
        stage.let_go()
    job.wait(DEADLINE_S)
    if swapper.pid:
        swapper.kill()
        swapper.join()
    is_hostile = swaps != "never"
    expect = Expect(may_refuse=is_hostile, needs_file=not is_hostile)
    facts = stage.end(job, has_struck=not is_hostile or (stage.runs / "moved").exists())
    return judge(facts, expect) + [Fall(Kind.HARMED, what) for what in _harm(stage)], job.peak_mb


def _swap(runs: Path) -> None:
    """As another user: wait for a new run directory of root, and put a link to the victim's there."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        while True:
            for path in runs.glob("2*"):
                if path.name != RUN and not path.is_symlink():
                    path.rename(runs / "moved")
                    path.symlink_to(runs.parent / "victim/folder")
                    return
    finally:
        os.seteuid(0)
        os.setegid(0)


LEFTOVERS: dict[str, Callable[[Path], object]] = {
    "a draft that is a file": lambda folder: (folder / "step_8.tmp.17").touch(),
    "a draft of a process named x": lambda folder: (folder / "step_8.tmp.x").mkdir(),
    "a draft that is a fifo": lambda folder: os.mkfifo(folder / "step_8.tmp.1.2"),
    "a draft that is a link": lambda folder: (folder / "step_8.tmp.99999").symlink_to("../victim/folder"),
    "a step that is a file": lambda folder: (folder / "step_999").touch(),
    "a step that is a link": lambda folder: (folder / "step_999").symlink_to("../victim/folder"),
    "manifests that are fifos": lambda folder: [
        path.unlink() or os.mkfifo(path) for path in folder.glob("step_*/manifest*.json")
    ],
}


def play_leftover(stage: Stage, *, leftover: str) -> tuple[list[Fall], float]:
    """Train, forge something among the checkpoints, and train on."""
    _prepare(stage)
    folder = stage.scratch / "checkpoints"
    flags = ["--checkpoint-dir", str(folder), "--checkpoint-every", "8"]
    falls = judge(stage.end(stage.start("session", *flags, ranks=1)), Expect())
    LEFTOVERS[leftover](folder)
    stage.env["SURROUNDINGS_STEPS"] = "48"
    job = stage.start("session", *flags, ranks=1)
    falls += judge(stage.end(job), Expect())
    return falls + [Fall(Kind.HARMED, what) for what in _harm(stage)], job.peak_mb


def play_two_runs(stage: Stage, *, second_after: str) -> tuple[list[Fall], float]:
    """Start a second run in the checkpoint directory of one that trains: it is refused, and the first goes on."""
    flags = ["--checkpoint-dir", str(stage.scratch / "checkpoints"), "--checkpoint-every", "2"]
    first = stage.start("session", *flags, hold=second_after)
    stage.reached(second_after, first)
    second = stage.start("session", *flags, "--log-dir", str(stage.scratch / "second"))
    second_code = second.wait(40)
    said = second.read_terminal()
    stage.let_go()
    falls = judge(stage.end(first), Expect())
    if second_code in (0, None) or "Traceback" in said or str(stage.runs) not in said:
        falls.append(Fall(Kind.HARMED, f"the second run was not refused: exit code {second_code}: {said[-300:]}"))
    return falls, max(first.peak_mb, second.peak_mb)


def situations() -> Iterator[Situation]:
    """All of them."""
    refused = "commands end well, and harm nobody"
    for name, form in product(FILES, FORMS):
        file = name.removeprefix(f"{RUN}/").removeprefix("attempt_0/").replace("/", " ")
        yield Situation(name=f"forged/{file}/{form}", expected=refused, play=partial(play_file, name=name, form=form))
    for name, pid in PIDS.items():
        yield Situation(name=f"forged/pid/{name}", expected="nobody is signaled", play=partial(play_pid, pid=pid))
    for tree in TREES:
        yield Situation(name=f"forged/tree/{tree}", expected=refused, play=partial(play_tree, tree=tree))
    runs_or_not = "the job runs or is refused; nobody is harmed"
    for start in STARTS:
        yield Situation(name=f"forged/start/{start}", expected=runs_or_not, play=partial(play_start, start=start))
    for swaps in SWAPS:
        yield Situation(
            name=f"forged/owner/swaps it {swaps}", expected=runs_or_not, play=partial(play_owner, swaps=swaps)
        )
    for leftover in LEFTOVERS:
        yield Situation(
            name=f"forged/checkpoints/{leftover}",
            expected="the training goes on from its newest whole checkpoint",
            play=partial(play_leftover, leftover=leftover),
        )
    for phase in ("running", "end"):
        yield Situation(
            name=f"forged/checkpoints/two runs, {phase}",
            expected="the second run is refused, the first goes on",
            play=partial(play_two_runs, second_after=phase),
        )
