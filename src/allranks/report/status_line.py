"""What does a job do now, in one line? For the row of `allranks run`, its lines in a log, and `allranks status`. Pure.

    > 2:14:07 - 16/16 ranks - step 1,840/10,000 - 5.4 it/s - ETA 25m - waiting 6 %, most for r5 - restarts 1/3
    > 0:21:40 - 7/8 wait 41 s in all_reduce for r3 evaluate.py:88 - ends in 9:19 - allranks stack latest
    > 0:00:12 - 3/4 nodes - waiting for node03, at most 48 s more

What is not known is left out. A line that is too long loses its least important parts first, and then its middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from allranks.model.job_status import MAX_NODES, JobStatus, Stuck
from allranks.model.safe_text import width_of
from allranks.report.text import Style, count_of, fold_ranks, one_line

FORMING, RUNNING, PAUSED, OVER = "forming", "running", "paused", "over"
"""Phases of launch.lead.course; a roll call is `forming`, too."""
SHOWN_RANKS = 24
"""Characters of the ranks that are waited for."""
MIN_WAIT_SHARE = 0.005
"""Less waiting is not shown."""
_PHASES = {"stopping": "stopping", FORMING: "restarting"}
_VITAL = 100
"""Parts of this weight are never left out."""


class _Part(NamedTuple):
    text: str
    weight: int
    """Of a line that is too long, the part of the least weight goes first."""
    is_clause: bool = False
    """It belongs to the part before it, from which a comma separates it; its weight is less than that one's."""


def status_line(
    status: JobStatus,
    style: Style,
    *,
    columns: int | None = None,
    spare: int = 0,
    job: str = "latest",
    silence: str = "",
) -> str:
    """Return the line about a job.

    Args:
        columns: how wide it may be; None: as wide as it is.
        spare: how many of these a progress bar beside it needs; the bar tells steps, rate and time left better.
        job: what `allranks stack` is to be asked for.
        silence: that the ranks print nothing, where that is so.
    """
    parts = [_Part(clock(status.age_s), _VITAL)]
    if status.stuck is not None and status.phase == RUNNING:
        parts += _describe_stuck(status, status.stuck, job)
    else:
        parts += _describe_work(status, has_bar=spare > 0)
    parts += [_Part(silence, 1)] if silence else []
    return _join(parts, style, columns, spare, colour=_colour_of(status))


def clock(seconds: float) -> str:
    """Return a time as `0:21:40`, with hours also where there are none, so that its width is steady."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    return f"{hours}:{of_hour:02}:{rest_s:02}"


def seconds_or_clock(seconds: float) -> str:
    """Return a time that passes: `41 s`, `9:19`, `1:00:00`."""
    minutes, rest_s = divmod(int(seconds), 60)
    if not minutes:
        return f"{rest_s} s"
    return clock(seconds) if minutes >= 60 else f"{minutes}:{rest_s:02}"


def short_time(seconds: float) -> str:
    """Return a time in its largest units: `45s`, `25m`, `2h05m`, `3d4h`."""
    minutes = int(seconds) // 60
    hours, of_hour = divmod(minutes, 60)
    if not minutes:
        return f"{int(seconds)}s"
    if not hours:
        return f"{minutes}m"
    return f"{hours}h{of_hour:02}m" if hours < 24 else f"{hours // 24}d{hours % 24}h"


def describe_rate(steps_per_s: float) -> str:
    """Return a rate as progress bars have it: `120 it/s`, `5.4 it/s`, `2.3 s/it`."""
    if 0 < steps_per_s < 0.95:
        return f"{1 / steps_per_s:.1f} s/it"
    return f"{steps_per_s:.{1 if 0 < steps_per_s < 99.95 else 0}f} it/s"


def describe_step(status: JobStatus) -> str:
    """Return `step 1,840/10,000`; without a session `step 40 since the restart`; empty if no step is known."""
    if status.step is None:
        return ""
    since = " since the restart" if status.generation and not status.is_step_of_session else ""
    return f"step {status.step:,}" + (f"/{status.total_steps:,}" if status.total_steps else since)


def _describe_work(status: JobStatus, *, has_bar: bool) -> list[_Part]:
    parts = list[_Part]()
    is_running = status.phase == RUNNING
    is_roll_call = status.phase == FORMING and not status.rows and not status.generation
    if status.num_ranks and not is_roll_call and status.phase != OVER:
        is_untold = is_running and not status.num_up  # they start, or have no torch and tell nothing
        up = "" if is_untold else f"{status.num_up}/"
        is_short = not is_untold and status.num_up < status.num_ranks
        parts.append(_Part(up + count_of(status.num_ranks, "rank"), _VITAL if is_short else 6))
    if is_roll_call and len(status.nodes) < MAX_NODES:
        parts.append(_Part(f"{len(status.nodes)}/{status.num_nodes} nodes", 30))
    if status.phase == OVER:
        code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
        parts.append(_Part(f"ended{code}", _VITAL))
    elif status.missing:
        missing = one_line(status.missing)
        parts.append(_Part(f"paused: {missing}" if status.phase == PAUSED else f"waiting for {missing}", _VITAL))
        if status.gives_up_in_s is not None:
            parts.append(_Part(f"at most {seconds_or_clock(status.gives_up_in_s)} more", 40, is_clause=True))
    elif not is_running:
        words = "testing the network" if is_roll_call else _PHASES.get(status.phase, one_line(status.phase))
        parts.append(_Part(words, _VITAL))
    elif status.step is None and status.rows and all(row.state == "start" for row in status.rows):
        parts.append(_Part("starting" if status.num_up < status.num_ranks else "no step yet", 50))
    if (step := describe_step(status)) and not has_bar:
        parts.append(_Part(step, 50))
    if is_running and not has_bar and status.steps_per_s is not None:
        parts.append(_Part(describe_rate(status.steps_per_s), 14))
    if is_running and not has_bar and status.eta_s is not None:
        parts.append(_Part(f"ETA {short_time(status.eta_s)}", 16))
    if is_running and status.wait_share is not None and status.wait_share >= MIN_WAIT_SHARE:
        parts.append(_Part(f"waiting {100 * status.wait_share:.0f} %", 8))
        if status.waits_for is not None:
            parts.append(_Part(f"most for r{status.waits_for}", 7, is_clause=True))
    if status.checkpoint is not None:
        at_s = status.checkpoint_s
        age = "" if at_s is None else f" {short_time(max(0.0, status.written_s - at_s))} ago"
        parts.append(_Part(f"ckpt {status.checkpoint:,}{age}", 4))
    if status.num_restarts:
        parts.append(_Part(f"restarts {status.num_restarts}/{status.max_restarts}", 5))
    return parts


def _describe_stuck(status: JobStatus, stuck: Stuck, job: str) -> list[_Part]:
    waits = "waits" if stuck.num_waiting == 1 else "wait"
    text = f"{stuck.num_waiting}/{status.num_ranks} {waits} {seconds_or_clock(stuck.for_s)} in {one_line(stuck.op)}"
    if stuck.ranks:
        place = one_line(stuck.place).partition(" in ")[0].rpartition("/")[2]
        text = f"{text} for {short_ranks(stuck.ranks)} {place}".rstrip()
    parts = [_Part(text, _VITAL)]
    if stuck.ends_in_s is not None:
        parts.append(_Part(f"ends in {seconds_or_clock(stuck.ends_in_s)}", 20))
    return [*parts, _Part(f"allranks stack {job}", 10)]


def short_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as `r3`, `r0-2,5`, or `r0,2,4,6,8,10,12 and 20 more`."""
    text = fold_ranks(ranks).partition(" ")[2]
    if len(text) <= SHOWN_RANKS:
        return f"r{text}"
    kept = text[: text.rfind(",", 0, SHOWN_RANKS)]
    num_kept = sum(
        int(last or first) - int(first) + 1 for first, _, last in (run.partition("-") for run in kept.split(","))
    )
    return f"r{kept} and {len(set(ranks)) - num_kept} more"


def _colour_of(status: JobStatus) -> str:
    if status.phase == OVER:
        return "31" if status.exit_code else "32"
    return "32" if status.phase == RUNNING and status.stuck is None else "33"


def _join(parts: list[_Part], style: Style, columns: int | None, spare: int, *, colour: str) -> str:
    mark, separator = style.mark("▸ ", "> "), style.mark(" · ", " - ")

    def joined() -> str:
        words = [
            f"{', ' if part.is_clause else separator if number else ''}{part.text}" for number, part in enumerate(parts)
        ]
        return mark + "".join(words)

    text = joined()
    if columns is not None:
        while width_of(text) > columns - spare and (least := min(parts, key=lambda part: part.weight)).weight < _VITAL:
            parts.remove(least)
            text = joined()
        text = cut_middle(text, columns, style)
    return style.paint(text[:1], colour) + text[1:] if colour == "32" else style.paint(text, colour)


def cut_middle(text: str, columns: int, style: Style) -> str:
    """Return a text that has at most this width; of a longer one, begin and end."""
    if width_of(text) <= columns:
        return text
    dots = style.mark("…", "...")
    left = right = ""
    rest, room = list(text), columns - width_of(dots)
    while rest:
        is_left = width_of(left) <= width_of(right)
        char = rest.pop(0 if is_left else -1)
        if width_of(left) + width_of(right) + width_of(char) > room:
            break
        left, right = (left + char, right) if is_left else (left, char + right)
    return left + dots + right
