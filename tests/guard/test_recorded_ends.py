"""What the guard and the session say of a rank that ended, by the words of its end: recorded_ends.toml."""

from __future__ import annotations

import builtins
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.causes.book import all_causes
from allranks.guard.ends import judge_ends
from allranks.guard.origin import origin_of
from allranks.guard.scene import Scene
from allranks.model.membership import Member, Membership
from allranks.state.resumed.steps import StepLost, is_collective_failure
from allranks.wire.protocol import WorkerEnd

from .scenes import FAST

ENDS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("recorded_ends.toml").read_text("utf-8"))["end"]
MEMBERS = (Member(name="node01", first_rank=0, num_workers=2, host="node01"),)
NOBODY = "AR490 collective-timeout: it was the first rank to lose a connection; no rank reports why"
MORE = {"code", "before", "stderr"}
"""What an end has that is more than an exception."""
TYPES = {**vars(builtins), **vars(dist), **vars(torch), "StepLost": StepLost}


def end_of(recorded: dict[str, Any]) -> WorkerEnd:
    return WorkerEnd(
        rank=0,
        node="node01",
        exit_code=recorded.get("code", 1),
        time_s=100.0,
        message=recorded.get("message"),
        before=tuple(recorded.get("before", ())),
        stderr_tail=recorded.get("stderr"),
    )


def told_of(end: WorkerEnd) -> str:
    scene = Scene(FAST, Membership(members=MEMBERS), {}, 0.0)
    scene.end(end, end.time_s)
    finding = judge_ends(scene).findings[0]
    return f"{finding.cause}: {finding.message}"


def exception_of(message: str) -> BaseException:
    """The exception that a traceback shows so: `torch.distributed.DistStoreError: Socket Timeout`."""
    name, _, words = message.partition(": ")
    name = name.rpartition(".")[2]
    return TYPES.get(name, type(name, (Exception,), {}))(words)


@pytest.mark.parametrize("recorded", ENDS, ids=[f"{recorded['source']}: {recorded['what']}" for recorded in ENDS])
def test_each_recorded_end_is_told_as_recorded(recorded: dict[str, Any]) -> None:
    end = end_of(recorded)
    told = {"guard": str(origin_of(end)), "told": told_of(end)}
    if "message" in recorded:
        told["session"] = "lost" if is_collective_failure(exception_of(recorded["message"])) else "own"
    assert told == {"told": NOBODY} | {key: recorded[key] for key in ("guard", "told", "session") if key in recorded}


@pytest.mark.parametrize("message", [recorded["message"] for recorded in ENDS if recorded.keys().isdisjoint(MORE)])
def test_an_exception_that_the_script_printed_says_the_same(message: str) -> None:
    printed = WorkerEnd(rank=0, node="node01", exit_code=1, time_s=100.0, stderr_tail=f"step 3 failed\n{message}\n")
    assert origin_of(printed) == origin_of(end_of({"message": message}))


def test_each_sign_of_an_end_is_in_a_recorded_one() -> None:
    said = [text for end in ENDS for text in (end.get("message", ""), end.get("stderr", ""), *end.get("before", ()))]
    signs = [sign for cause in all_causes() for sign in cause.signs if "end" in sign.where]
    assert [sign for sign in signs if not any(re.search(sign.pattern, text, re.MULTILINE) for text in said)] == []
