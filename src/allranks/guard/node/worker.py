"""The state of one worker, from its cell and from /proc, as one RankBeat. Runs in the agent.

    watched = WatchedWorker(rank=3, pid=process.pid, cell=cell)
    watched.look()    # several times a second; never waits for the worker

The cell says what the worker told last; /proc says whether it can tell anything: stopped, in a disk wait, gone, or
running with the GIL held (it uses its core and yet its beat is silent). Then the ages of what was told grow on, and
py-spy is asked, in a thread and not often, where the main thread is now.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from allranks.guard.inside.cell import Cell, Written
from allranks.guard.inside.pace_words import ASYNC, BACK, BEGAN, DATA_MOVED, LEFT, STATE, STEP_MOVED, STEPS, TOTALS
from allranks.guard.node.activity import Activity
from allranks.host.glance import Glance
from allranks.host.process import ProcessSeen, is_below, read_process
from allranks.host.signals import handled, read_caught
from allranks.model.beat import (
    HELD_STATES,
    MAX_CALLS,
    MAX_GROUPS,
    POINT_TO_POINT,
    CallSeen,
    GroupSeen,
    LoadSeen,
    Number,
    Parts,
    ProcessState,
    RankBeat,
    Whole,
    Word,
    drop_unsound,
)
from allranks.model.foreign import Unreadable, decode_json
from allranks.model.pace import PACE_STATES, Pace, PaceState
from allranks.model.safe_text import as_one_line, as_utf8

SILENT_S = 1.0
"""Five beats: whoever told nothing for so long is looked at from outside."""
SPY_EVERY_S = 5.0
EARLY_NS, SLACK_NS = 60_000_000_000, 1_000_000_000
"""A book that begins so long before its process was watched, or ends so long after now, is none."""
MOST_STEPS = 10**15


_Group = tuple[Word, tuple[Whole, ...], Number, Number, Whole]
_Lag = tuple[Word, Whole, Whole]


class _Told(msgspec.Struct):
    """What guard/inside/beat_thread.py wrote; after an exception also the calls alone, see entry.py there."""

    at: str = ""
    groups: list[_Group] = []
    calls: list[CallSeen] = []
    lags: list[_Lag] = []
    blind: list[Word] = []


_PARTS: Parts = {
    _Told: {
        "groups": (_Group, MAX_GROUPS),
        "calls": (CallSeen, MAX_CALLS),
        "lags": (_Lag, MAX_CALLS),
        "blind": (Word, MAX_CALLS),
    },
}
_Kind = TypeVar("_Kind", _Told, CallSeen)
BEGUN_TOLD_S = 60.0
"""For so long, beats say when a worker began to book: some of them may be lost."""
_START, _STEP, _DATA, _EVAL = map(PACE_STATES.index, (PaceState.START, PaceState.STEP, PaceState.DATA, PaceState.EVAL))


class WatchedWorker:
    """One worker of this node, in one start of it."""

    def __init__(
        self, *, rank: int, pid: int, cell: Cell, activity: Activity | None = None, root: Path = Path("/")
    ) -> None:
        self.rank = rank
        self._activity = activity
        self._started_pid = pid
        self._cell = cell
        self._root = root
        self._seen: object = None
        self._since_s = time.monotonic()
        self._told: tuple[int, _Told] = (0, _Told())
        self._told_lags: object = None
        self._started_ns = time.monotonic_ns()
        self._ended_ns: int | None = None
        self._spy: Glance | None = None
        self._spied = ""
        """Where py-spy saw the main thread last."""

    def note_end(self) -> None:
        """Say that the process has ended just now: nothing is booked after that."""
        self._ended_ns = self._ended_ns or time.monotonic_ns()

    def look(self) -> RankBeat:
        """Return how it is now."""
        now_ns = time.monotonic_ns()
        read = self._cell.read()
        told = self._decode_told(read.told)
        seen = self._look_outside(read.pid)
        silent_s = _age_s(read.told.written_ns, now_ns) if read.told else None
        if seen.state is ProcessState.GONE:
            self.note_end()
        else:  # also where another process has taken the place of one that ended
            self._ended_ns = None
        at = told.at
        is_silent = silent_s > SILENT_S if silent_s is not None else read.raised is not None
        if is_silent and seen.state is not ProcessState.GONE:
            at = self._spy_on(seen.pid) or at
        called = _decode(read.call, CallSeen)  # what Python code called last
        is_done = read.is_call_done
        call = called and msgspec.structs.replace(called, is_done=is_done, blocks=called.blocks and not is_done)
        called_ns = read.call.written_ns if read.call else 0
        groups = _groups(told, call, called_ns, now_ns)
        pace = to_pace(read.pace, started_ns=self._started_ns, now_ns=self._ended_ns or time.monotonic_ns())
        activity, calls = self._activity, _calls(told, _decode(read.words, _Told), call, groups)
        if activity is not None and seen.state is not ProcessState.GONE:
            marks = read.step, read.saved, read.phase, called_ns, read.is_call_done, told.groups
            activity.look(seen.pid, marks, now_ns / 1e9)
        return RankBeat(
            rank=self.rank,
            pid=seen.pid,
            state=seen.state,
            state_for_s=time.monotonic() - self._since_s,
            cpu_s=seen.cpu_s,
            silent_s=silent_s,
            main_at=as_one_line(at),
            step=read.step,
            checkpoint=read.saved,
            total_steps=read.total,
            write_s=None if read.write_ms is None else read.write_ms / 1e3,
            phase=as_one_line(read.phase),
            handles=tuple(sorted(self._handled(seen.pid))),
            is_saving=self._cell.is_saving,
            groups=groups,
            calls=calls,
            lags=self._new_lags(told),
            blind=tuple(told.blind),
            idle_s=activity.idle_s if activity else 0.0,
            reads_terminal=activity is not None and activity.reads_terminal,
            printed=as_utf8(activity.printed) if activity else "",
            pace=pace,
            begun_ago_s=_begun_ago_s(read.pace, now_ns) if pace is not None else None,
            load=LoadSeen(rss_mib=seen.rss_bytes >> 20),
        )

    def _handled(self, pid: int) -> frozenset[int]:
        """Return the signals that its script handles."""
        told = self._cell.handlers()
        if told.pid and is_below(told.pid, pid, root=self._root):
            pid = told.pid
        caught = read_caught(pid, proc=self._root / "proc")
        return handled(caught, script=told.handled, own=told.own)

    def _look_outside(self, claimed_pid: int) -> ProcessSeen:
        pid = self._started_pid
        if claimed_pid not in (0, pid) and is_below(claimed_pid, pid, root=self._root):
            pid = claimed_pid  # a shell or a wrapper stands between
        seen = read_process(pid, root=self._root)
        # A held process that moved has gone out of the state and in again.
        moves = (seen.num_switches, seen.cpu_s) if seen.state in HELD_STATES else ()
        before, self._seen = self._seen, (pid, seen.state, moves)
        if before != self._seen:
            self._since_s = time.monotonic()
        return seen

    def _spy_on(self, pid: int) -> str:
        """Return what the last look at this process came to, and look again where that is old."""
        if self._spy is None or self._spy.pids != (pid,):
            self._spy, self._spied = Glance(pid), ""
        self._spied = self._spy.place or self._spied
        if time.monotonic() - self._spy.began_s > SPY_EVERY_S:
            self._spy = Glance(pid)
        return self._spied

    def _decode_told(self, written: Written | None) -> _Told:
        if written is not None and written.number != self._told[0]:
            self._told = written.number, _decode(written, _Told) or self._told[1]
        return self._told[1]

    def _new_lags(self, told: _Told) -> tuple[tuple[str, int, int], ...]:
        if told.lags == self._told_lags:
            return ()
        self._told_lags = told.lags
        return tuple(told.lags)


def to_pace(words: tuple[int, ...] | None, *, started_ns: int, now_ns: int) -> Pace | None:
    """Return what a training thread has booked, with the time in its present state up to now; None: nothing sound.

    Args:
        words: of the cell (guard.inside.pace_words), where anything may stand.
        started_ns: when the agent had started the process: what came before its book is `start`.
        now_ns: or when it ended.
    """
    if words is None:
        return None
    state, began_ns, num_states = words[STATE] - 1, words[BEGAN], len(PACE_STATES)
    totals = list(words[TOTALS : TOTALS + num_states])
    since_ns = began_ns + sum(totals)
    now_ns = min(now_ns, words[LEFT] or now_ns)
    is_sound = state < num_states and state != _EVAL and not totals[_EVAL]
    is_sound &= started_ns - EARLY_NS <= began_ns and since_ns <= now_ns + SLACK_NS
    totals[_STEP] -= words[STEP_MOVED]
    totals[_DATA] -= words[DATA_MOVED]
    totals[_EVAL] = words[STEP_MOVED] + words[DATA_MOVED]
    if not is_sound or min(totals) < 0 or words[STEPS] > MOST_STEPS or words[BACK] > 1001:
        return None
    totals[state] += max(0, now_ns - since_ns)
    totals[_START] += max(0, began_ns - started_ns)
    return Pace(
        state=state,
        state_us=(totals[_START] if state == _START else max(0, now_ns - since_ns)) // 1000,
        steps=words[STEPS],
        totals_us=tuple(total // 1000 for total in totals),  # type: ignore[arg-type]  # as many as the cell has
        back_blocked_permille=words[BACK] - 1,
        is_async=words[ASYNC] == 1,
        has_left=words[LEFT] > 0,
    )


def _begun_ago_s(words: tuple[int, ...] | None, now_ns: int) -> float | None:
    """Return how long ago the book was begun, as long as that is news."""
    ago_s = _age_s(words[BEGAN], now_ns) if words is not None else BEGUN_TOLD_S
    return ago_s if ago_s < BEGUN_TOLD_S else None


def _groups(told: _Told, call: CallSeen | None, called_ns: int, now_ns: int) -> tuple[GroupSeen, ...]:
    found = []
    for name, ranks, enqueued, counted, open_since_ns in told.groups:
        completed = _completed(told, name, counted)
        waiting_s = _age_s(open_since_ns, now_ns) if open_since_ns and enqueued > completed else 0.0
        if call is not None and call.group == name and not call.is_done:
            waiting_s = waiting_s or _age_s(called_ns, now_ns)
            enqueued = enqueued if call.op in POINT_TO_POINT else max(enqueued, call.seq)
        found.append(GroupSeen(name=name, ranks=ranks, enqueued=enqueued, completed=completed, waiting_s=waiting_s))
    return tuple(found)


def _completed(told: _Told, name: str, completed: int) -> int:
    """The last number that is done: Gloo's threads count as they end, so its count may lag behind its own entries."""
    calls = [call for call in told.calls if call.group == name and call.peer is None]
    done = {call.seq for call in calls if call.is_done} - {call.seq for call in calls if not call.is_done}
    while completed + 1 in done:
        completed += 1
    return completed


def _calls(
    told: _Told, words: _Told | None, call: CallSeen | None, groups: tuple[GroupSeen, ...]
) -> tuple[CallSeen, ...]:
    """The recorder's calls, later words over earlier ones, and the one that Python made where no recorder has it."""
    known = {(seen.group, seen.seq, seen.peer): seen for seen in (*told.calls, *(words.calls if words else ()))}
    if call is not None and call.op not in POINT_TO_POINT:
        if recorded := known.get(key := (call.group, call.seq, None)):
            known[key], call = msgspec.structs.replace(recorded, place=call.place, blocks=call.blocks), None
        else:
            own = [group for group in groups if group.name == call.group]
            # Without a recorder no number is known, and a call is over when it returns.
            is_over = any(group.completed >= call.seq or group.enqueued < 0 for group in own)
            call = msgspec.structs.replace(call, is_done=call.is_done and is_over)
    calls = sorted(known.values(), key=lambda seen: seen.created_ns)
    return tuple(calls) if call is None else (*calls, call)


def _decode(written: Written | None, kind: type[_Kind]) -> _Kind | None:
    """Return what a worker wrote, without the items that make no sense; None: nothing, or nothing that can be read."""
    if written is None:
        return None
    with contextlib.suppress(Unreadable, msgspec.ValidationError):
        try:
            return decode_json(written.data, kind)
        except Unreadable:
            return msgspec.convert(drop_unsound(decode_json(written.data, Any), kind, _PARTS), kind)
    return None


def _age_s(then_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - then_ns) / 1e9)
