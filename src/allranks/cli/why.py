"""`allranks why`: find out from logs alone what happened to a job, and who caused it."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from allranks.cli import complete
from allranks.cli.meant import (
    RUNS,
    Unfinished,
    find_job,
    find_logs,
    find_meant,
    find_recordings,
    find_restarts,
    find_run_path,
    find_unfinished,
    read_here,
)
from allranks.cli.options import json_option
from allranks.cli.progress_line import ReadProgress
from allranks.cli.std_streams import has_input
from allranks.cli.why_fleet import answer_for_fleet, fleet_options
from allranks.model.errors import Exit, UsageError
from allranks.model.finding import Confidence, Finding, Severity, Verdict
from allranks.model.fix import ANYBODY, Reader
from allranks.report.markdown import MARKDOWN, PLAIN, Markup
from allranks.report.text import Style, one_line, say
from allranks.why.chain import Chain
from allranks.why.conclusion import TimelineRow

if TYPE_CHECKING:
    from allranks.facts.story import Story
    from allranks.recorder.calls import Dump
    from allranks.why.logs.log_events import Logs
    from allranks.why.logs.read import ReadProblem
    from allranks.why.logs.sources import Source

MAX_PROBLEMS = 8
WITHOUT_HYPERSCAN = (
    "hyperscan is not installed, so reading large logs takes many times as long; the findings are the same. "
    "To install it: pip install hyperscan"
)
NO_LOGS = "there is no output of any rank: none was started, or the disk was full"
_NOT_UNFINISHED = Unfinished()
_GC_THRESHOLDS = (1_000_000, 50, 50)
"""What is read is kept, and forms no cycles: garbage collection at its usual rate takes 10 % of the time."""


@click.command("why")
@click.option("--timeline", "with_timeline", is_flag=True, help="Also print the events of all ranks in order.")
@click.option("--all", "is_all", is_flag=True, help="Also print findings that are consequences or unlikely.")
@click.option("--since", metavar="TIME", help="Skip lines before this time: 2026-03-25T10:00, 10:00, 30m or 2h.")
@click.option("--until", metavar="TIME", help="Skip lines after this time.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write the answer as one HTML page, as `allranks report` does for a run; - for standard output.",
)
@click.option("--md", "as_markdown", is_flag=True, help="Print Markdown, for an issue or a chat.")
@fleet_options
@json_option
@click.argument("targets", nargs=-1, metavar="[JOB | RUN | DIR | FILE... | -]", shell_complete=complete.jobs_or_paths)
def why(
    targets: tuple[str, ...],
    with_timeline: bool,
    is_all: bool,
    since: str | None,
    until: str | None,
    html: Path | None,
    as_markdown: bool,
    as_json: bool,
    **fleet: Any,
) -> int:
    """Explain a failed job of any launcher from its logs, and name the rank and node that caused it.

    \b
    allranks why 4711                            a SLURM job: its output files, those of its steps, its run directory
    allranks why logs/                           all logs below a directory, including .gz and .zst
    allranks why 'out/rank_*.err' dmesg.txt
    kubectl logs job/train --prefix | allranks why -
    allranks why                                 the newest run in runs/; allranks list prints the ids of others
    allranks why --timeline --since 30m logs/    events in order, in the last 30 minutes of the logs
    allranks why --html why.html logs/           a page to send to a colleague
    allranks why --md 4711                       Markdown, for an issue or a chat
    allranks why --history runs/                 nodes that break jobs, with the commands to drain or exclude them

    30m and 2h count back from the last time in the logs. Lines without a time are kept.

    Exit codes: 0 no failure found, 1 a failure was found, 2 usage error, 3 no result, or the job is still running,
    78 SLURM is not available. With --history: 1 a node stands out, 0 none does.
    """
    if (code := answer_for_fleet(targets, as_json=as_json, **fleet)) is not None:
        return code
    if as_markdown and (as_json or html is not None):
        raise UsageError("why: --md, --json and --html are three forms of the answer; expected one of them")
    gc.set_threshold(*_GC_THRESHOLDS)
    atexit.register(gc.freeze)  # else Python looks through all of it once more when the process ends: 0.1 s
    from allranks.why.dumps import read_dumps
    from allranks.why.last import name_code
    from allranks.why.verdicts import take_verdict
    from allranks.why.window import narrow, read_bound

    if not targets and not Path(RUNS, "latest").exists():
        raise UsageError(
            f"why: there is no run in {RUNS} yet; expected a job id, a directory, files, or - for standard input"
        )
    if not targets and has_input():
        say("standard input is not read; to explain it: allranks why -")
    asked, targets = targets, tuple(map(find_meant, targets or ("latest",)))
    first, last = (read_bound(text) if text else None for text in (since, until))
    sources, verdict = take_verdict(find_logs(targets))
    recordings = find_recordings(targets, sources)
    progress = ReadProgress(
        sum(source.size for source in sources), is_packed=any(_is_packed(source) for source in sources)
    )
    logs = read_logs(sources, progress)
    problems = list(logs.problems)
    if sources and (what := name_code(logs)):
        raise UsageError(f"{sources[0].shown}: this is {what} without a line of a log; expected the logs of a job")
    logs = narrow(logs, first, last)
    dumps = read_dumps(recordings, problems)
    job = find_job(targets, sources, verdict)
    answer = make_answer(
        logs,
        dumps,
        problems,
        verdict=verdict,
        job=job,
        restarts=find_restarts(targets),
        here=read_here(),
        unfinished=find_unfinished(targets),  # an older attempt may have a verdict
        is_all=is_all or html is not None,
        with_timeline=with_timeline or html is not None,
    )
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(answer.document(sources)), indent=2))
    elif html is not None:
        from allranks.cli.report import write_page
        from allranks.cli.why_page import make_page

        write_page(make_page(answer.document(sources), asked=asked, run=find_run_path(targets)), html)
    else:
        style = Style.of(sys.stdout)
        markup = MARKDOWN if as_markdown else PLAIN
        bounds = [word for flag, text in (("--since", since), ("--until", until)) if text for word in (flag, text)]
        text = render_answer(answer, style, markup=markup, command=["allranks", "why", "--all", *bounds, *asked])
        click.echo(text if style.is_unicode else text.encode("ascii", "backslashreplace").decode())
    return answer.exit_code


def read_logs(sources: Sequence[Source], progress: ReadProgress) -> Logs:
    """Read all sources; Ctrl-C ends the process at once."""
    from allranks.causes.book import all_causes
    from allranks.why.logs.collect import collect
    from allranks.why.logs.log_events import list_patterns
    from allranks.why.logs.match import has_hyperscan

    def end(signum: int, frame: object) -> NoReturn:
        progress.clear()
        os._exit(128 + signum)  # a file system may hang; nothing is left to clean up

    if sources and not has_hyperscan():
        say(WITHOUT_HYPERSCAN)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, end) if is_main else None
    try:
        return collect(
            sources,
            list_patterns(all_causes()),
            on_progress=progress.add,
            max_workers=len(os.sched_getaffinity(0)) if is_main else 1,
        )
    finally:
        progress.clear()
        if is_main:
            signal.signal(signal.SIGINT, before)


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """One log that was read."""

    path: str
    size_bytes: int
    node: str | None
    rank: int | None


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The answer as JSON. Fields may be added; none is changed or removed within one `version`."""

    version: int = 1
    exit_code: int
    findings: tuple[Finding, ...]
    """The culprit's finding first; with --all, all findings."""
    others: int
    """Number of findings left out."""
    last_words: tuple[str, ...]
    """If no cause is known: a sentence that says which log stopped first, then its last lines."""
    problems: tuple[str, ...]
    """Logs that could not be read to the end, and why."""
    sources: tuple[Read, ...]
    lines: int
    bytes: int
    dropped: int
    """Number of matching lines that were not kept, because there were too many."""
    timeline: tuple[TimelineRow, ...] | None = None
    restarts: str = ""
    """How often the ranks of the run were started again, and why; empty for never."""
    running: str | None = None
    """Id of the run, if it is still running: then its logs prove no success."""
    chain: Chain | None = None
    """What followed from what, according to the logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer, before it is printed."""

    logs: Logs
    findings: tuple[Finding, ...]
    others: int
    last: tuple[str, ...]
    """Set if no finding says what happened."""
    problems: tuple[str, ...]
    rows: tuple[TimelineRow, ...] | None
    running: str | None = None
    restarts: str = ""
    story: Story
    """What followed from what, according to the logs."""

    @property
    def exit_code(self) -> int:
        """1 for a failure; 0 for a job that succeeded, with all logs read; 3 for no result, such as a silent hang."""
        severities = {finding.severity for finding in self.findings}
        if Severity.FAIL in severities:
            return Exit.USER_CODE
        return Exit.OK if Severity.NOTE in severities and not self.problems else Exit.UNKNOWN

    def document(self, sources: Sequence[Source]) -> Document:
        """Return the answer as JSON prints it."""
        from allranks.why.chain import make_chain

        return Document(
            exit_code=self.exit_code,
            findings=self.findings,
            others=self.others,
            last_words=self.last,
            problems=self.problems,
            sources=tuple(
                Read(path=source.shown, size_bytes=source.size, node=source.node, rank=source.rank)
                for source in sources
            ),
            lines=sum(tail.num_lines for tail in self.logs.tails),
            bytes=self.logs.num_bytes,
            dropped=self.logs.dropped,
            restarts=self.restarts,
            running=self.running,
            chain=make_chain(self.story),
            timeline=self.rows,
        )


def make_answer(
    logs: Logs,
    dumps: Sequence[Dump],
    problems: Sequence[ReadProblem],
    *,
    verdict: Verdict | None = None,
    job: str | None = None,
    restarts: str = "",
    unfinished: Unfinished = _NOT_UNFINISHED,
    here: Reader = ANYBODY,
    is_all: bool,
    with_timeline: bool,
) -> Answer:
    """Return the findings, or the last lines if there are none; `here` is the reader by what this machine shows."""
    from allranks.why.blame import explain
    from allranks.why.findings import count_first, fill_job, find_reader, is_answer, to_finding
    from allranks.why.last import last_words, tell_line
    from allranks.why.timeline import make_timeline
    from allranks.why.verdicts import join_lost, join_verdict, read_printed_verdict

    conclusions, story = explain(logs, dumps)
    reader = find_reader(logs, job=job, here=here)
    own = [to_finding(conclusion, reader) for conclusion in conclusions]
    running = unfinished.running
    said = verdict or read_printed_verdict(logs)
    findings = join_verdict(said, own, is_printed=verdict is None, restarts=restarts, reader=reader)
    findings = join_lost(unfinished.lost, findings)
    last: tuple[str, ...] = ()
    if running is not None:  # it has not succeeded, and what its logs lack now may come
        proven = (finding for finding in findings if finding.severity is not Severity.NOTE)
        findings = [finding for finding in proven if finding.confidence is not Confidence.UNDECIDED]
    if not is_answer(findings):
        is_quiet = bool(findings) and running is None  # neither failure nor progress: the last lines may tell
        findings = findings[:1] if is_quiet else []
        clause, lines = last_words(logs)
        last = (clause, *map(tell_line, lines)) if lines else ("these logs are empty" if logs.tails else NO_LOGS,)
    count = len(findings) if is_all else count_first(findings)
    return Answer(
        logs=logs,
        findings=tuple(fill_job(finding, job) for finding in findings[:count]),
        others=len(findings) - count,
        last=last,
        problems=tuple(f"{problem.source.shown}: {problem.message}" for problem in problems),
        rows=tuple(make_timeline(logs, conclusions[0] if conclusions else None)) if with_timeline else None,
        running=running,
        restarts=restarts,
        story=story,
    )


def render_answer(answer: Answer, style: Style, *, command: Sequence[str], markup: Markup = PLAIN) -> str:
    """Return the answer as text.

    Args:
        answer: findings, last lines and timeline.
        style: colors and characters that the terminal supports.
        command: the command that prints the other findings.
        markup: of findings, and of what follows them.
    """
    from allranks.why.timeline import render_timeline, tell_clocks

    first, blocks = list[str](), list[str]()
    if answer.running:
        first.append(f"{answer.running} is still RUNNING; to see where its ranks are: allranks stack {answer.running}")
    told = [markup.findings(answer.findings, style)] if answer.findings else []
    if answer.restarts and answer.exit_code != Exit.OK:  # else the finding has them
        blocks.append(f"restarts: {answer.restarts}")
    if answer.last:
        clause, *lines = map(one_line, answer.last)
        head = "its logs show no failure so far; " if answer.running else "no known cause; "
        blocks.append("\n".join([f"{'' if answer.findings else head}{clause}", *(f"  {line}" for line in lines)]))
    if answer.others:
        noun = "finding" if answer.others == 1 else "findings"
        blocks.append(f"{answer.others} more {noun}: {one_line(shlex.join(command))}")
    if answer.rows is not None and not answer.rows:
        blocks.append("no timeline: these logs have no events")
    if answer.rows:
        text = render_timeline(answer.rows, mark=style.mark("▸", ">"), dots=style.mark("…", "..."))
        blocks.append("\n".join([text, *tell_clocks(answer.logs)]))
    if answer.problems:
        shown = [f"not fully read: {one_line(text)}" for text in answer.problems[:MAX_PROBLEMS]]
        if more := len(answer.problems) - len(shown):
            shown.append(f"{more} more were not fully read; --json lists them")
        blocks.append("\n".join(shown))
    return "\n\n".join([*map(markup.block, first), *told, *map(markup.block, blocks)])


def _is_packed(source: Source) -> bool:
    return source.shown.endswith((".gz", ".zst"))
