"""`allranks logs`: which files does a job write, and what is in them? Printed once, or until the job ends.

Without a choice of ranks, nodes or times, that is the job's own output in SLURM: the verdict and all ranks, each line
with node and rank, in the order in which the agents printed them. Else, and where these files cannot be read from here,
it is the ranks' own files in the run directory, merged by time (launch.batch.output).
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.launch.batch.follow import LOOK_S, NO_ANSWER_S, JobReport, describe_progress, report_job
from allranks.launch.batch.output import File, OutputLine, is_noise, merge, read_bar, read_new
from allranks.model.errors import SetupError, UsageError
from allranks.model.hostlist import fold_hosts
from allranks.report.growth import read_growth
from allranks.report.rundir import as_file_name
from allranks.report.runs import Run
from allranks.report.text import cell, fold_ranks, say

POLL_S = 0.2
LAST_WORDS_S = 2.0
"""On a shared file system, the last lines appear a little after the end of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLines:
    """What of a job's output is to be printed, and how."""

    ranks: Sequence[int] = ()
    nodes: Sequence[str] = ()
    tail: int | None = None
    """The number of lines at the end; None: all."""
    since: str | None = None
    has_times: bool = False
    as_json: bool = False
    is_followed: bool = False

    @property
    def is_of_ranks(self) -> bool:
        """Whether only the ranks' own files have it."""
        return bool(self.ranks or self.nodes or self.since or self.has_times or self.as_json)


def show_logs(job: Run | str, *, log_dir: Path, wanted: WantedLines) -> None:
    """Print the output of a job so far; with `is_followed`, until the job ends.

    Raises:
        SetupError: SLURM is not there, or has not answered for NO_ANSWER_S.
        UsageError: the job is unknown, or it has printed nothing.
    """
    shown, told = dict[Path, File](), ""
    answered_s, is_over = float("-inf"), False
    while True:
        try:
            reports, answered_s = report_job(job, log_dir=log_dir), time.monotonic()
        except SetupError:
            if time.monotonic() - answered_s > NO_ANSWER_S:
                raise
        new = [file for file in find_files(reports, wanted) if file.path not in shown]
        if not shown:
            _note_order(new, wanted)
            _print(merge(new, tail=wanted.tail, since=wanted.since, is_last=not wanted.is_followed), wanted)
        shown |= {file.path: file for file in new}
        was_over, is_over = is_over, all(report.is_over for report in reports)
        if was_over or not wanted.is_followed:  # a job that has ended gets one more turn, for its last words
            break
        news = next((describe_progress(r.slurm) for r in reports if r.slurm is not None and r.slurm.is_pending), "")
        if news not in ("", told):
            told = news
            say(news)
        _follow(list(shown.values()), wanted, for_s=LAST_WORDS_S if is_over else LOOK_S)
    while lines := read_new([file for file in shown.values() if file.is_live], is_last=True):
        _print(lines, wanted)
    if not shown:
        raise UsageError(_nothing_to_show(reports, wanted))
    if not any(path.stat().st_size for path in shown if path.exists()):
        say("nothing has been printed" if is_over else "nothing has been printed so far")


def _follow(files: Sequence[File], wanted: WantedLines, *, for_s: float) -> None:
    end_s = time.monotonic() + for_s
    for file in files:
        file.is_live = True
    while time.monotonic() < end_s:
        lines = read_new(files)
        _print(lines, wanted)
        if not lines:
            time.sleep(POLL_S)
    _print(filter(None, map(read_bar, files)), wanted)


def _print(lines: Iterable[OutputLine], wanted: WantedLines) -> None:
    streams = {"out": sys.stdout.buffer, "err": sys.stderr.buffer}
    for line in lines:
        file, stream = line.file, streams["out" if wanted.as_json else line.file.stream]
        when = line.time if line.is_time_known else None
        if wanted.as_json:
            known = {"time": when, "node": file.node, "rank": file.rank, "stream": file.stream}
            stream.write(json.dumps(known | {"text": line.text.decode(errors="replace")}).encode() + b"\n")
        elif not is_noise(line):
            at = f"{when or '-'} " if wanted.has_times else ""
            stream.write(line.raw if file.is_raw else f"{at}{file.prefix}".encode() + line.text + b"\n")
        if wanted.is_followed:
            stream.flush()
    for stream in streams.values():
        stream.flush()


def _note_order(files: Sequence[File], wanted: WantedLines) -> None:
    """Say where lines cannot be in the order of their times."""
    filled = [file for file in files if file.rank is not None and file.changed_s and file.path.stat().st_size]
    without = [file for file in filled if not file.growth.sizes]
    if without and (len(filled) > 1 or wanted.has_times or wanted.since):
        ranks = fold_ranks({file.rank for file in without if file.rank is not None})
        say(f"the times of the lines of {ranks} were not recorded; each of these files is printed as a whole")


def _nothing_to_show(reports: Sequence[JobReport], wanted: WantedLines) -> str:
    report = reports[0]
    if report.is_unknown:
        return f"{report.title}: SLURM does not know it, and it has no run directory here; give --log-dir"
    if report.slurm is not None and report.slurm.is_pending:
        return f"{report.title} has not started ({report.slurm.reason or report.slurm.state}); -f waits for it"
    where = report.run_dir or "its run directory"
    here = find_files(reports, WantedLines(has_times=True))
    if wanted.nodes and (names := sorted({file.node for file in here if file.node})):
        return f"--node {', '.join(wanted.nodes)}: {where} has files of {fold_hosts(names)}"
    if wanted.ranks and (known := {file.rank for file in here if file.rank is not None}):
        return f"{report.title}: {where} has no files of rank {wanted.ranks[0]}; it has those of {fold_ranks(known)}"
    if wanted.ranks:
        return f"{report.title}: {where} has no files of rank {wanted.ranks[0]}"
    return f"{report.title} has no output yet, or its files are not readable from this machine"


def find_files(reports: Sequence[JobReport], wanted: WantedLines) -> list[File]:
    """Return the files to print, in the order that lines of one time get."""
    found: list[File] = []
    for report in reports:
        task = f"{report.job} " if len(reports) > 1 else ""
        own = {} if wanted.is_of_ranks or report.local else _own_files(report)
        prefix = f"[{report.job}] " if task else ""
        found += [File(path=path, stream=own[path], prefix=prefix) for path in sorted(own)]
        if not own and report.attempt is not None:
            found += _rank_files(report, wanted, task=task)
    for file in found:
        file.is_raw = not (file.prefix or wanted.has_times or wanted.as_json)
    return found


def _rank_files(report: JobReport, wanted: WantedLines, *, task: str) -> list[File]:
    """Return the files of the wanted ranks of a job's newest attempt."""
    nodes = {as_file_name(node) for node in wanted.nodes}
    found = []
    for folder in sorted(Path(report.run_dir, f"attempt_{report.attempt}").glob("*/")):
        if nodes and folder.name not in nodes:
            continue
        growth = read_growth(folder)
        for path in folder.glob("rank_*.*"):
            name = re.fullmatch(r"rank_([0-9]{1,8})\.(out|err)", path.name)
            if name is None or (wanted.ranks and int(name[1]) not in wanted.ranks):
                continue
            prefix = "" if len(wanted.ranks) == 1 and not task else f"[{task}{cell(folder.name)} r{name[1]}] "
            file = File(path=path, stream=name[2], prefix=prefix, node=folder.name, rank=int(name[1]))
            file.growth = growth.get(path.name, file.growth)
            found.append(file)
    return sorted(found, key=lambda file: (file.rank or 0, file.stream != "out", str(file.path)))


def _own_files(report: JobReport) -> dict[Path, str]:
    """Return the job's output files that are here, with their streams."""
    job = report.slurm
    if job is not None and job.out:
        files = {Path(job.err): "err", Path(job.out): "out"}  # they may be one
    else:  # no file names, as from accounting: take the usual ones, in the job's directory
        places = [Path(job.work_dir)] if job and job.work_dir else [Path(report.run_dir, "../.."), Path()]
        usual = (path for place in places for path in place.glob(f"*[-_]{report.job}.*"))
        files = {path.resolve(): path.suffix[1:] for path in usual if path.suffix in (".out", ".err")}
    return {path: stream for path, stream in files.items() if path.is_file()}
