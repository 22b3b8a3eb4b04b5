"""`allranks diff --replay`: may the two runs be run again, and what was found? Asks, refuses, and says."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from allranks.cli.progress_line import ProgressLine
from allranks.launch.rerun import HIDDEN_VARIABLE, Rerun, RerunOutcome, StartedRun
from allranks.model.errors import SetupError, UsageError
from allranks.report.mask import HIDDEN
from allranks.report.text import count_of, say
from allranks.state.saved.manifest import parse_final
from allranks.state.saved.parts import list_checkpoints
from allranks.state.truth.op_file import SETUP
from allranks.state.truth.parting import Parting, Record, row_at

PROBE_S = 120.0
_PROBE = """
import json, torch
from allranks.state.truth.trace import describe_machine
names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps({**describe_machine(), "torch": str(torch.__version__), "gpus": names}))
"""


def rerun(
    places: Sequence[Path],
    records: Sequence[Record],
    parting: Parting,
    *,
    env: Mapping[str, str],
    is_sure: bool,
    can_ask: bool,
    timeout_s: float,
) -> RerunOutcome | None:
    """Run both again, and return what differs first; None: the user would rather not.

    Args:
        places: the directories of checkpoints.
        parting: where their records part.
        can_ask: somebody is at the terminal.
    Raises:
        UsageError: they cannot be run again here, or not without an answer.
        SetupError: one of them failed.
    """
    assert parting.until is not None
    letters, abouts = "AB", [row_at(record[0], parting.until).about for record in records]
    if parting.num_ranks[0] != parting.num_ranks[1]:
        raise UsageError("diff --replay: runs of {} and {} ranks do other operations".format(*parting.num_ranks))
    if not is_sure and not can_ask:
        raise UsageError(
            "diff --replay runs both scripts, whatever else they do (files, uploads): to allow it, add --yes"
        )
    line = ProgressLine()
    line.write("allranks: asking torch for its version and hardware")
    machine = read_machine()
    line.clear()
    for letter, record in zip(letters, records, strict=True):
        if why := find_refusal(record, parting.until, machine):
            raise UsageError(f"diff --replay: run {letter} cannot be run again here: {why}")
    starts = find_start(places, parting.since)
    begin, _ = (starts and parse_final(starts[0].name)) or (0, 0)
    first = SETUP if parting.since is None else parting.since
    is_in_batch = any(differing.column == "batch" for differing in parting.differing)
    until = parting.until + is_in_batch  # the batch of a step is recorded beside what is there before it
    say(describe_plan(begin, first, until, num_ranks=parting.num_ranks[0], has_checkpoint=bool(starts)))
    if not is_sure and not click.confirm("Run both scripts, with whatever else they do (files, uploads)?", err=True):
        return None
    words = [restore_words(letter, about["arguments"], env=env, ask=_ask if can_ask else None)
             for letter, about in zip(letters, abouts, strict=True)]  # fmt: skip
    runs = [
        StartedRun(letter=letter, words=tuple(own), about=about, record=record, checkpoint=start)
        for letter, own, about, record, start in zip(
            letters, words, abouts, records, starts or (None, None), strict=True
        )
    ]
    try:
        both = Rerun(runs, num_ranks=parting.num_ranks[0], first=first, until=until, timeout_s=timeout_s)
        return both.watch(lambda text: line.write(f"allranks: {text}"))
    finally:
        line.clear()


def find_refusal(record: Record, step: int, here: Mapping[str, Any]) -> str | None:
    """Return why a run cannot be run again on this machine; None: it can.

    Args:
        step: at which rank 0 has a row: another process of the run may have written the others.
        here: what `read_machine` returned.
    """
    about = row_at(record[0], step).about
    if "directory" not in about:
        return "its record does not say where it was started (an older version of allranks wrote it)"
    if about.get("call"):
        return "its record is of a later track() in its script; only the first one can be run again"
    for name in ("torch", "python"):
        if about[name] != here[name]:
            return f"it had {name} {about[name]}, here is {here[name]}"
    ranks = [rank for rank in sorted(record) if rank < about["world_size"]]
    hardware = [row_at(record[rank], step).about["hardware"] for rank in ranks]
    if lacking := {*hardware} - {here["hardware"], *here["gpus"]}:
        return f"it ran on {', '.join(sorted(lacking))}, here is {', '.join({*here['gpus']} or {here['hardware']})}"
    if hardware[0] in here["gpus"] and len(here["gpus"]) < about["world_size"]:
        return f"it had {count_of(about['world_size'], 'GPU')}, here is {count_of(len(here['gpus']), 'GPU')}"
    script = Path(about["script"])
    if not script.is_file():
        return f"its script {script} is not there"
    if about["text"] != hashlib.blake2b(script.read_bytes(), digest_size=16).hexdigest():
        return f"its script {script} was edited since"
    if not Path(about["directory"]).is_dir():
        return f"its working directory {about['directory']} is not there"
    return None


def find_start(places: Sequence[Path], since: int | None) -> list[Path]:
    """Return the newest checkpoints of one step that both runs have, at `since` or before; empty: there are none."""
    by_step = [{at[0]: path for path in reversed(list_checkpoints(place))
                if (at := parse_final(path.name)) and at[0] <= (since or 0)} for place in places]  # fmt: skip
    common = by_step[0].keys() & by_step[1].keys() if since is not None else set()
    return [own[max(common)] for own in by_step] if common else []


def restore_words(
    letter: str, arguments: str, *, env: Mapping[str, str], ask: Callable[[str], str] | None
) -> list[str]:
    """Return the arguments of a run with what is hidden in its record.

    Args:
        ask: returns the value of what it is given; None: nobody can be asked.
    Raises:
        UsageError: a value is missing.

    >>> restore_words("A", "--lr 1 --hf-token '(hidden)'", env={"ALLRANKS_HIDDEN_A1": "hf_1"}, ask=None)
    ['--lr', '1', '--hf-token', 'hf_1']
    """
    words, count = shlex.split(arguments), 0
    masked = [*words]
    for place, word in enumerate(masked):
        while HIDDEN in word:
            count += 1
            name = f"{HIDDEN_VARIABLE}{letter}{count}"
            what = " ".join(masked[max(0, place - 1) : place + 1])
            if name not in env and ask is None:
                raise UsageError(f"diff --replay: run {letter} had a hidden argument, {what}: set {name} to its value")
            word = word.replace(HIDDEN, env[name] if name in env or ask is None else ask(f"{what} of run {letter}"), 1)
        words[place] = word
    return words


def describe_plan(begin: int, first: int, until: int, *, num_ranks: int, has_checkpoint: bool) -> str:
    """Return what is going to be run, in a line.

    >>> describe_plan(64, 96, 128, num_ranks=3, has_checkpoint=True)
    'both are run again at once, by 3 ranks each on this machine, from the checkpoints of step 64 up to step 128; \
operations are recorded from step 96 on, up to 20 times slower'
    """
    origin = f"the checkpoints of step {begin}" if has_checkpoint else "step 0 (no earlier checkpoint is common)"
    since = "the beginning" if first == SETUP else f"step {first}"
    return (
        f"both are run again at once, by {count_of(num_ranks, 'rank')} each on this machine, from {origin} up to step "
        f"{until}; operations are recorded from {since} on, up to 20 times slower"
    )


def describe_outcome(outcome: RerunOutcome, num_ranks: int) -> list[str]:
    """Return what was found, in lines."""
    lines = []
    for letter, own in outcome.unrepeated.items():
        names = ", ".join(differing.describe(num_ranks) for differing in own.differing)
        why = "its compiled code ran eager here" if letter in outcome.eager else "it is not deterministic"
        lines.append(f"run {letter} does not repeat its own record at step {own.until}: {why}: {names}")
    if outcome.difference is not None:
        at = "before step 0" if outcome.step == SETUP else f"in step {outcome.step}"
        first, *more = outcome.difference.describe(num_ranks)
        return [*lines, f"first difference {at}: {first}", *more]
    if outcome.at_end.until is not None:
        names = ", ".join(differing.describe(num_ranks) for differing in outcome.at_end.differing)
        lines.append(f"no operation of torch differs; what differs at step {outcome.at_end.until}, was changed outside "
                     f"of them: {names}")  # fmt: skip
    else:
        lines.append(f"no difference between the replays; {count_of(outcome.num_steps, 'step')} compared")
    if outcome.num_left_out:
        lines.append(f"{count_of(outcome.num_left_out, 'operation')} not compared: a step had too many")
    return lines


def read_machine() -> dict[str, Any]:
    """Return torch, Python and hardware of a process here; torch is imported in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as exc:
        raise SetupError(f"diff --replay: torch cannot be asked for its version and hardware: {exc}") from exc


def _ask(what: str) -> str:
    return str(click.prompt(what, hide_input=True, err=True))
