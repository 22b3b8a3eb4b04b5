"""`allranks diff`: where do two runs that should be equal part?"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli import complete
from allranks.cli.options import json_option, timeout_option
from allranks.model.errors import Exit, UsageError
from allranks.report.text import count_of, printable, say

if TYPE_CHECKING:
    from allranks.launch.rerun import RerunOutcome
    from allranks.state.truth.parting import Parting, Record


@click.command("diff", epilog="Exit codes: 0 no difference, 1 the runs differ, 2 usage error, 3 it cannot be told.")
@click.argument("first", metavar="A", shell_complete=complete.jobs_or_paths)
@click.argument("second", metavar="B", shell_complete=complete.jobs_or_paths)
@click.option("--replay", "is_rerun", is_flag=True, help="Run both again, and name the first operation that differs.")
@click.option("--yes", "is_sure", is_flag=True, help="With --replay: run both scripts without a question.")
@timeout_option("--timeout", "timeout_s", waits_for="for the next step of a run, with --replay", default=600.0)
@json_option
def diff(first: str, second: str, is_rerun: bool, is_sure: bool, timeout_s: float, as_json: bool) -> int:
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

    if is_sure and not is_rerun:
        raise UsageError("diff --yes: expected --replay beside it: without it nothing is run")
    places = find_place(first), find_place(second)
    records = [_read(place) for place in places]
    lacking = [str(place) for place, record in zip(places, records, strict=True) if 0 not in record]
    parting = find_parting(*records)
    unlike = _compare_manifests(*places) if lacking else find_unlike(records[0], records[1], parting.until)
    healed = [str(place) for place in places if any(own.healed for own in _manifests(place))]
    exit_code = Exit.USER_CODE if parting.until is not None else Exit.OK if parting.num_steps else Exit.UNKNOWN
    lines = [f"also differs  {name}: {a or 'none'} -> {b or 'none'}" for name, a, b in unlike]
    lines += [f"healed        {place}: a replica got the bits of others: not the undisturbed run" for place in healed]
    for line in [] if as_json else lines + _say(parting, records, lacking):
        click.echo(printable(line))
    outcome: RerunOutcome | None = None
    if is_rerun and parting.until is not None and not lacking:
        from allranks.cli.rerun import describe_outcome, rerun

        can_ask = not as_json and sys.stdin.isatty()
        outcome = rerun(places, records, parting, env=os.environ, is_sure=is_sure, can_ask=can_ask, timeout_s=timeout_s)
    if as_json:
        rows = [{"name": name, "a": a, "b": b} for name, a, b in unlike]
        document: dict[str, Any] = {"a": str(places[0]), "b": str(places[1]), **asdict(parting)}
        document |= {"also_differs": rows, "healed": healed, "lacking": lacking, "exit_code": int(exit_code)}
        document |= {"replay": outcome and asdict(outcome)} if is_rerun else {}
        click.echo(json.dumps(document, indent=2))
    elif outcome is None and is_rerun and exit_code == Exit.USER_CODE:
        say("nothing was run")
    elif outcome is not None:
        for line in describe_outcome(outcome, parting.num_ranks[0]):
            click.echo(printable(line))
    return exit_code


def find_place(text: str) -> Path:
    """Return the directory of checkpoints that is meant.

    Args:
        text: its path, that of one of its checkpoints or of a run's directory, a run's id, or `latest`.
    Raises:
        UsageError: there is none.
    """
    from allranks.report.runs import find_run, is_run, read_run
    from allranks.state.saved.manifest import MANIFEST
    from allranks.state.saved.parts import list_checkpoints
    from allranks.state.truth.trace_file import FOLDER

    path = Path(text)
    run = read_run(path) if path.is_dir() and is_run(path) else None
    places = [path.resolve().parent] if (path / MANIFEST).exists() else [path, path / "checkpoints"]
    if run is not None or (not path.exists() and (run := find_run(text, Path("runs"))) is not None):
        places = [*_named_in(run.attempt_path), run.path / "checkpoints"]
    for place in places:
        if place.is_dir() and ((place / FOLDER).is_dir() or list_checkpoints(place)):
            return place
    if run is not None:
        raise UsageError(f"{run.path}: no checkpoints and no record in {places[0]}; session() with track() makes them")
    raise UsageError(f"{text}: {'no checkpoints and no record in it' if path.is_dir() else 'no such run or directory'}")


def _named_in(attempt: Path) -> list[Path]:
    """Where the workers of a run had their checkpoints, as its env.json says."""
    from allranks.files.regular import find_regular
    from allranks.report.readback import MAX_BYTES, parse_environment

    told = [parse_environment(find_regular(path, at_most=MAX_BYTES) or b"") for path in attempt.glob("*/env.json")]
    names = {own["ALLRANKS_CHECKPOINT_DIR"] for own in told if "ALLRANKS_CHECKPOINT_DIR" in own}
    return sorted(map(Path, names))


def _read(place: Path) -> Record:
    from allranks.state.truth.trace_file import OtherFormatError, read_record

    try:
        return read_record(place)
    except OtherFormatError as exc:
        raise UsageError(f"{place}: the record is of another version: {exc}") from exc
    except OSError as exc:
        raise UsageError(f"{place}: the record cannot be read: {exc.strerror or exc}") from exc


def _manifests(place: Path) -> list[Any]:
    from allranks.state.saved.manifest import Damaged
    from allranks.state.saved.parts import list_checkpoints, read_manifest

    found = []
    for checkpoint in list_checkpoints(place):
        try:
            found.append(read_manifest(checkpoint))
        except (Damaged, OSError):
            continue
    return sorted(found, key=lambda manifest: manifest.step)


def _compare_manifests(first: Path, second: Path) -> list[tuple[str, str, str]]:
    """What the newest checkpoints say where a run has no record."""
    manifests = [_manifests(place)[-1:] for place in (first, second)]
    if not all(manifests):
        return []
    told = [(name, *(str(getattr(own, name)) for (own,) in manifests)) for name in ("torch", "world_size")]
    return [(name, a, b) for name, a, b in told if a != b]


def _say(parting: Parting, records: list[Record], lacking: list[str]) -> list[str]:
    left_out = [f"not compared  {parting.left_out}"] if parting.left_out else []
    if lacking:
        return [f"cannot tell: no record beside the checkpoints in {place}" for place in lacking]
    if not parting.num_steps:
        spans = [f"{record[0][0].step} to {record[0][-1].step}" for record in records]
        why = parting.left_out or f"no step was recorded by both: steps {spans[0]}, and steps {spans[1]}"
        return [f"cannot tell: {why}"]
    if parting.until is None:
        end = f"no difference up to step {parting.last}; {count_of(parting.num_steps, 'recorded step')} compared"
        names = [differing.describe(parting.num_ranks[0]) for differing in parting.elsewhere]
        begun = f"without effect  stood elsewhere from the start: {', '.join(names)}"
        return [*left_out, *([begun] if names else []), end]
    begin = f"they part at step {parting.until} or before: it is the first step that both recorded"
    if parting.since is not None:
        begin = f"they part between steps {parting.since} and {parting.until}: all is equal at step {parting.since}"
    names = [differing.describe(parting.num_ranks[0]) for differing in parting.differing]
    return [*left_out, f"{begin}; these differ at step {parting.until}:", *(f"  {name}" for name in names)]
