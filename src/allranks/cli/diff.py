"""`allranks diff`: where do two runs that should be equal part?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import complete
from allranks.cli.options import json_option
from allranks.cli.progress_line import ProgressLine
from allranks.model.errors import Exit, UsageError
from allranks.report.text import count_of, printable, say

if TYPE_CHECKING:
    from allranks.launch.rerun import RerunOutcome
    from allranks.state.truth.parting import Differing, Parting, Record


@click.command(
    "diff",
    epilog="Exit codes: 0 no difference, 1 the runs differ, 2 usage error, 3 it cannot be told, 78 a replay failed.",
)
@click.argument("first", metavar="A", shell_complete=complete.jobs_or_paths)
@click.argument("second", metavar="B", shell_complete=complete.jobs_or_paths)
@click.option("--replay", "is_rerun", is_flag=True, help="Run both again, and name the first operation that differs.")
@click.option("--yes", "is_sure", is_flag=True, help="With --replay: run both scripts without a question.")
@json_option
def diff(first: str, second: str, is_rerun: bool, is_sure: bool, as_json: bool) -> int:
    """Compare two runs bit by bit: name the steps between which they part, and what differs there.

    A and B are runs below runs/, directories of runs, or directories of checkpoints. `session()` records numbers that
    stand for all bits of what it tracks, of the generators of random numbers and of the batches, beside its
    checkpoints. It runs nothing, unless --replay is given: then both commands run these steps again, and the first
    operation that differs is named.

    \b
    allranks diff 20261123-031500-4711 latest
    allranks diff runs/4711/checkpoints /scratch/ada/checkpoints
    allranks diff 4711 4712 --json
    allranks diff 4711 4712 --replay
    """
    from allranks.state.truth.parting import find_parting, find_unlike
    from allranks.state.truth.trace_file import FOLDER, read_record

    if is_sure and not is_rerun:
        raise UsageError("diff --yes: expected --replay beside it: without it nothing is run")
    try:
        places = find_place(first), find_place(second)
    except OSError as exc:  # a name that is too long, a directory that may not be read
        raise UsageError(f"{exc.filename}: {os.strerror(exc.errno or 0).lower()}") from exc
    if (places[0] / FOLDER).resolve() == (places[1] / FOLDER).resolve():
        raise UsageError(f"diff: A and B have one record, in {places[0]}: expected two runs, with a directory each")
    records = [read_record(place) for place in places]
    lacking = [str(place) for place, record in zip(places, records, strict=True) if 0 not in record]
    parting = find_parting(*records)
    unlike = find_unlike(records[0], records[1], parting.until)
    healed = [str(place) for place, record in zip(places, records, strict=True)
              if any(row.about.get("healed") for row in record.get(0, ()))]  # fmt: skip
    exit_code = Exit.USER_CODE if parting.until is not None else Exit.OK if parting.num_steps else Exit.UNKNOWN
    if not as_json:
        lines = [f"also differs  {name}: {a or 'none'} -> {b or 'none'}" for name, a, b in unlike]
        lines += [f"healed        {place}: a replica got the bits of others: not the undisturbed run"
                  for place in healed]  # fmt: skip
        click.echo("\n".join(map(printable, [*lines, *_say(parting, records, lacking)])))
    outcome: RerunOutcome | None = None
    if is_rerun and parting.until is not None:
        can_ask = not as_json and sys.stdin.isatty()
        outcome = _run_again(places, records, parting, is_sure=is_sure, can_ask=can_ask)
    if as_json:
        rows = [{"name": name, "a": a, "b": b} for name, a, b in unlike]
        document: dict[str, Any] = {"a": str(places[0]), "b": str(places[1]), **asdict(parting)}
        document |= {"also_differs": rows, "healed": healed, "lacking": lacking, "exit_code": int(exit_code)}
        document |= {"replay": outcome and asdict(outcome)} if is_rerun else {}
        click.echo(json.dumps(document, indent=2))
    elif outcome is not None:
        click.echo("\n".join(map(printable, describe_outcome(outcome, parting.num_ranks))))
    elif is_rerun and exit_code == Exit.USER_CODE:
        say("nothing was run")
    return exit_code


def find_place(text: str) -> Path:
    """Return the directory of checkpoints that is meant; also by one of them.

    Raises:
        UsageError: there is none.
    """
    from allranks.cli.export import places_of
    from allranks.state.saved.manifest import MANIFEST
    from allranks.state.saved.parts import list_checkpoints
    from allranks.state.truth.trace_file import FOLDER

    path, places = Path(text), places_of(text)
    if (path / MANIFEST).exists():
        places = [path.resolve().parent]
    for place in places:
        if (place / FOLDER).is_dir() or (place.is_dir() and list_checkpoints(place)):
            return place
    if places[0] == path and not path.exists():
        raise UsageError(f"{text}: no such directory, and no such run in runs/; allranks list --all prints them")
    raise UsageError(f"{text}: no checkpoints and no record in {places[0]}; session() with track() makes them")


def _run_again(
    places: Sequence[Path], records: Sequence[Record], parting: Parting, *, is_sure: bool, can_ask: bool
) -> RerunOutcome | None:
    """Run both again, and return what differs first; None: the user, who can be asked, would rather not.

    Raises:
        UsageError: they cannot be run again here, or not without an answer.
        SetupError: one of them failed.
    """
    from allranks.launch import rerun
    from allranks.state.truth.parting import row_at

    assert parting.until is not None
    if not is_sure and not can_ask:
        raise UsageError(
            "diff --replay runs both scripts, whatever else they do (files, uploads): to allow it, add --yes"
        )
    abouts = [row_at(record[0], parting.until).about for record in records]
    if len(sizes := {about["world_size"] for about in abouts}) > 1:
        raise UsageError("diff --replay: runs of {} and {} ranks do other operations".format(*sorted(sizes)))
    machine, line = rerun.read_machine(), ProgressLine()
    starts = rerun.find_start(places, parting.since)
    runs = list[rerun.StartedRun]()
    for letter, record in zip("AB", records, strict=True):
        if why := rerun.find_refusal(record, parting.until, machine):
            raise UsageError(f"diff --replay: run {letter} cannot be run again here: {why}")
    for letter, record, about, start in zip("AB", records, abouts, starts or (None, None), strict=True):
        words = rerun.restore_words(letter, about["arguments"], os.environ, _ask if can_ask else None)
        runs.append(rerun.StartedRun(letter=letter, words=words, record=record, about=about, checkpoint=start))
    origin = f"the checkpoints of {starts[0].name.replace('_', ' ')}" if starts else "step 0 (they share no checkpoint)"
    say(
        f"both are run again at once, twice, by {count_of(parting.num_ranks, 'rank')} each on this machine, from "
        f"{origin} up to step {parting.steps.stop}; the second time, operations are recorded where they part"
    )
    if not is_sure and not click.confirm("Run both scripts, with whatever else they do (files, uploads)?", err=True):
        return None
    try:
        return rerun.run_again(runs, parting.steps, show=lambda text: line.write(f"allranks: {text}"))
    finally:
        line.clear()


def _ask(what: str) -> str:
    return str(click.prompt(what, hide_input=True, err=True))


def _say(parting: Parting, records: Sequence[Record], lacking: Sequence[str]) -> list[str]:
    left_out = [f"not compared  {parting.left_out}"] if parting.left_out else []
    names = [differing.describe(parting.num_ranks) for differing in parting.differing]
    if lacking:
        return [f"cannot tell: no record that can be read beside the checkpoints in {place}" for place in lacking]
    if not parting.num_steps:
        spans = [f"{record[0][0].step} to {record[0][-1].step}" for record in records]
        why = parting.left_out or f"no step was recorded by both: steps {spans[0]}, and steps {spans[1]}"
        return [f"cannot tell: {why}"]
    if parting.until is None:
        end = f"no difference up to step {parting.last}; {count_of(parting.num_steps, 'recorded step')} compared"
        begun = f"without effect  stood elsewhere from the start: {', '.join(names)}"
        return [*left_out, *([begun] if names else []), end]
    begin = f"they part at step {parting.until} or before: it is the first step that both recorded"
    if parting.since is not None:
        begin = f"they part between steps {parting.since} and {parting.until}: all is equal at step {parting.since}"
    return [*left_out, f"{begin}; these differ at step {parting.until}:", *(f"  {name}" for name in names)]


def describe_outcome(outcome: RerunOutcome, num_ranks: int) -> list[str]:
    """Return what was found, in lines."""

    def say_names(differing: Sequence[Differing]) -> str:
        return ", ".join(own.describe(num_ranks) for own in differing)

    lines = []
    for letter, own in outcome.unrepeated.items():
        why = "it is not deterministic, or has compiled code, which ran eager"
        names = say_names(own.differing)
        lines.append(f"run {letter} does not repeat its own record at step {own.until}: {why}: {names}")
    if outcome.difference is not None:
        return [*lines, *outcome.difference.describe(num_ranks)]
    if outcome.parting.until is None:
        return [*lines, f"no difference between the replays; {count_of(outcome.parting.num_steps, 'step')} compared"]
    what = f"what differs at step {outcome.parting.until}, was changed outside of them"
    return [*lines, f"no operation of torch differs; {what}: {say_names(outcome.parting.differing)}"]
