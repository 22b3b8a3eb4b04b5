"""What is wrong with a running job now, as far as looks from outside show it? Pure.

    opinion = judge(history, now_s)
    print("\\n".join(describe(opinion, style)))

A verdict is only what the kernel proves; the first of these that is found:

    a process ended badly     who was first, as the solver of facts elects it, unless the job was stopped
    the store is not served   requests wait at its socket, and its owner is stopped, or never runs
    a process is stopped      for STOPPED_S; where all of the job are, it is suspended, and nobody is at fault
    a link is dead            bytes are not acknowledged for DEAD_S, although the peer has read all that came
    a rank exited             with 0, while all others wait in a collective

Everything else is a state (standstill.py): true, and perhaps as it should be.

A job was stopped from outside where several processes, the only rank or the launcher end with SIGTERM, SIGINT or SIGHUP
within STOP_S, or one rank does and the launcher is gone. Other ranks may end in any way after that.

Limits: if one rank of torchrun's gets SIGTERM, torchrun ends the others so at once, and the job looks stopped. To TCP a
peer that does not read looks like a dead link (zero window); such a rank is told as being elsewhere. That a rank exited
with 0 too early is known once others have waited since, or failed. Until a victim of Gloo's error has ended, for which
Python needs seconds, the job looks from outside like one that ends well, rank by rank.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from allranks.facts.fact import Fact, FactKind, Said, Who
from allranks.facts.solve import solve
from allranks.facts.story import RootPart
from allranks.guard.failure import describe as describe_end
from allranks.guard.guard_verdict import name_fault
from allranks.guard.origin import CRASHES
from allranks.model.beat import ProcessState
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Finding
from allranks.model.hostlist import fold_hosts
from allranks.model.node_look import ProcessRole
from allranks.report.text import Style, count_of, describe_time, fold_ranks, one_row, render_finding
from allranks.watch.since import MAIN, LookHistory, Track, say_for
from allranks.watch.standstill import STALE_S, RanksNow, WatchState, make_state
from allranks.wire.protocol import WorkerEnd

STOPPED_S, STORE_S, DEAD_S, EXITED_S = 1.0, 1.0, 2.0, 2.5
"""How long each of these holds before it counts."""
MIN_TIMEOUTS = 2
"""Of TCP in a row, where the kernel tells no bytes (another network namespace): a full queue looks the same, always."""
SETTLE_S, SILENT_S = 0.4, 3.0
"""A rank of another node may have ended first: looks are waited for so long, and for a silent node so long at most."""
LOOK_S = 0.3
"""Ends that are no further apart may have been in any order."""
STOP_S, BEFORE_S = 5.0, 10.0
"""Whoever stops a job sends a signal to all of its processes: the second one has ended by then, and nobody is blamed
before. Whom ranks waited for is told if that was at most BEFORE_S before the first end."""
LOADER_S, LEFT_S = 10.0, 15.0
"""A rank that fails so shortly after a child of its own was killed, or in a collective after another rank exited with
0, failed because of that: Python needs seconds to end after an error of Gloo."""
_ASKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals by which people, launchers and schedulers end jobs."""


class Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong now."""

    verdicts: tuple[Finding, ...] = ()
    """The culprit's first."""
    states: tuple[WatchState, ...] = ()
    culprits: tuple[int, ...] = ()
    """Ranks of the verdicts; where there is none, ranks that the states are about."""
    exit_code: int = 0
    """1 a verdict, 3 only states or an undecided one, 0 nothing is wrong."""
    summary: str = ""
    """How far the job is, in one line."""
    limits: tuple[str, ...] = ()
    """What could not be seen."""

    @property
    def is_wrong(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.verdicts or self.states)


def judge(history: LookHistory, now_s: float) -> Opinion:
    """Return what is wrong now. A verdict stays, as what came later may follow from it, until the job goes on."""
    ranks = RanksNow(history, now_s)
    court = _Court(ranks)
    found = court.find()
    history.keep(found, now_s)
    verdicts = tuple(history.proven) or found
    if history.proven and now_s - history.held_s > STALE_S:
        note = f"this was so until {describe_time(now_s - history.held_s)} ago"
        verdicts = (*verdicts[:-1], replace(verdicts[-1], notes=(*verdicts[-1].notes, note)))
    named = [rank for finding in verdicts for rank in finding.ranks]
    standing = tuple(ranks.states(named, is_explained=bool(verdicts or court.ended)))
    if court.ended:
        standing = tuple(court.stood()) or standing
    elif standing:
        history.stood = now_s, standing
    states = (*court.states(is_judged=bool(found)), *standing)
    is_sure = any(finding.confidence is not Confidence.UNDECIDED for finding in verdicts)
    exit_code = 1 if is_sure else 3 if verdicts or states else 0
    return Opinion(
        verdicts=verdicts,
        states=states,
        culprits=tuple(sorted({*(named or [rank for state in states for rank in state.ranks])})),
        exit_code=exit_code,
        summary=ranks.summary(),
        limits=tuple(ranks.limits()),
    )


def describe(opinion: Opinion, style: Style) -> list[str]:
    """Return an opinion as lines: the verdicts, culprit first, then states and limits; else that nothing is wrong."""
    lines = "\n\n".join(render_finding(finding, style) for finding in opinion.verdicts).splitlines()
    if not opinion.is_wrong:
        is_known = opinion.exit_code == Exit.OK
        mark = style.mark("✓", "+") if is_known else "?"
        told = "nothing is wrong" if is_known else "not enough could be seen to tell whether something is wrong"
        lines.append(style.paint(f"{mark} {told}: {one_row(opinion.summary)}", "32" if is_known else "33"))
    lines += [style.paint(f"{style.mark('⚠', '!')} {one_row(state.text)}", "33") for state in opinion.states]
    return [*lines, *(style.paint(f"  not seen: {one_row(limit)}", "2") for limit in opinion.limits)]


class _Court:
    """The verdicts of one moment, one method for each kind."""

    def __init__(self, ranks: RanksNow) -> None:
        self._ranks, self._history, self._now_s = ranks, ranks.history, ranks.now_s
        workers = ranks.workers.values()
        left = [track for track in workers if not (track.is_alive or track.end.code)]
        self._left = sorted(left, key=lambda track: track.ended_s)
        """Ranks that exited with 0, or nobody knows how."""
        self.ended = sorted(self._find_ended(), key=lambda track: track.ended_s)
        """What ended badly: ranks, their killed children, and launchers that a signal ended; the first one first."""
        self._was_stopped = bool(self.ended) and self._was_stopped_from_outside()
        self._settle_s = STOP_S if self.ended and _is_asked(self.ended[0]) else SETTLE_S
        told_s = max((node.told_s for node in self._history.nodes.values()), default=0.0)
        self._is_suspended = bool(ranks.living) and self._history.suspended_s >= told_s

    def find(self) -> tuple[Finding, ...]:
        """Return the verdicts that hold now, of the first kind that there is."""
        if self.ended:
            return self._judge_ended()
        if self._is_suspended:
            return ()
        return self._judge_store() or self._judge_stopped() or self._judge_links() or self._judge_exited()

    def stood(self) -> Iterator[WatchState]:
        """Yield what ranks waited for shortly before the first of them ended."""
        at_s, states = self._history.stood
        for state in states if self.ended and self.ended[0].ended_s - at_s <= BEFORE_S else ():
            yield dataclasses.replace(state, text=f"before that: {state.text}")

    def states(self, *, is_judged: bool) -> Iterator[WatchState]:
        """Yield what is so with processes and need not be wrong."""
        if self._was_stopped:
            yield WatchState(f"{self._say_ends()}: the job was stopped from outside", cause="cancelled")
        elif self.ended and not is_judged and not self._history.proven:
            when = f"within {self._settle_s:.0f} s" if self._settle_s >= 1 else "at once"
            text = f"whether that is all, or the job is being stopped, shows {when}"
            yield WatchState(f"{self._say_ends()}; {text}", cause="dead-rank")
        if self._is_suspended:
            text = "the job is suspended: all of its processes are stopped (scontrol suspend, a frozen cgroup, ^Z)"
            yield WatchState(text, cause="process-stopped")
        named = {finding.subject for finding in self._history.proven}
        launchers = [track for track in self._held(ProcessRole.LAUNCHER) if _say_subject(track) not in named]
        if launchers and self._ranks.living:
            first, who = launchers[0], " and ".join(map(_name, launchers[:4]))
            text = f"{who} {'has' if len(launchers) == 1 else 'have'} been {_say_held(first)}"
            yield make_state(text, (), first, first.state_s, cause="process-stopped")

    # Ends

    def _find_ended(self) -> Iterator[Track]:
        ranks = [track for track in self._ranks.workers.values() if track.end.code]
        failed_s = {track.look.rank: track.ended_s for track in ranks}
        yield from ranks
        for track in self._history.tracks(ProcessRole.CHILD):
            later_s = failed_s.get(track.look.rank, -1.0) - track.ended_s
            if track.end.signal in {*CRASHES, signal.SIGKILL} and 0 <= later_s <= LOADER_S:
                yield track
        for track in self._history.tracks(ProcessRole.LAUNCHER, ProcessRole.STORE):
            if track.end.signal and (ranks or self._ranks.living):
                yield track

    def _was_stopped_from_outside(self) -> bool:
        """Whether somebody ended the job by a signal: to several processes, to all there are, or to its launcher."""
        first, first_s = self.ended[0], self.ended[0].ended_s
        are_asked = all(_is_asked(track) for track in self.ended if not first.ended.is_before(track.ended))
        if not are_asked or any(track.end.code is None for track in self._left_before(first_s)):
            return False
        asked = [track for track in self.ended if _is_asked(track) and track.ended_s <= first_s + STOP_S]
        last_s = max(track.ended_s or math.inf for track in self._ranks.workers.values())
        launchers = [track for track in self._history.tracks(ProcessRole.LAUNCHER) if not track.is_alive]
        # One that outlives its ranks ends because of them.
        is_gone = any(track.ended_s < last_s and abs(track.ended_s - first_s) <= STOP_S for track in launchers)
        return len(asked) > 1 or len(self._ranks.workers) == 1 or is_gone

    def _say_ends(self) -> str:
        """`all 3 ranks ended (2 with SIGTERM, 1 with SIGKILL)`; before it, which launcher was ended by a signal."""
        ranks = [track for track in self.ended if track.look.role is ProcessRole.WORKER]
        others = [track for track in self.ended if track.look.role in (ProcessRole.LAUNCHER, ProcessRole.STORE)]
        parts = [f"{_name(track)} ended with {track.how}" for track in others]
        hows = [f"{num} with {how}" for how, num in Counter(track.how for track in ranks).items()]
        how = f"({', '.join(hows)})" if len(hows) > 1 else "".join(hows).partition(" ")[2]
        is_all = len(ranks) == len(self._ranks.workers) > 1
        who = f"all {len(ranks)} ranks" if is_all else fold_ranks(track.look.rank or 0 for track in ranks)
        return ", ".join([*parts, *([f"{who} ended {how}"] if ranks else [])])

    def _left_before(self, first_s: float) -> list[Track]:
        return [track for track in self._left if -LOOK_S <= first_s - track.ended_s <= LEFT_S]

    def _judge_ended(self) -> tuple[Finding, ...]:
        """Return the verdict on who ended first."""
        first_s, nodes = self.ended[0].ended_s, {track.node for track in self._ranks.living.values()}
        settled_s = first_s + self._settle_s
        are_heard = all(self._history.nodes[node].told_s >= settled_s for node in nodes)
        silent_s = first_s + max(SILENT_S, 2 * self._settle_s)
        waits = self._now_s < settled_s or not (are_heard or self._now_s > silent_s)
        if self._was_stopped or (waits and nodes):  # where nobody lives, no look will tell more
            return ()
        facts = dict(self._state_facts(first_s))
        roots = solve(list(facts)).culprits
        unsure = [facts[fact] for root in roots for fact in root.facts if root.part is RootPart.UNDECIDED]
        if not unsure:
            return tuple(self._name_ended([facts[fact] for fact in root.facts]) for root in roots)
        hows = ["was killed by" if track.end.signal else "ended with" for track in unsure]
        ways = [f"{_name(track)} {how} {track.how}" for track, how in zip(unsure, hows, strict=True)]
        what = f"one of these ended first, within one look: {'; '.join(ways)}"
        return (self._fault("AR407", what, unsure, confidence=Confidence.UNDECIDED),)

    def _state_facts(self, first_s: float) -> Iterator[tuple[Fact, Track]]:
        """State the ends as facts for the solver, and the ranks that had left before as missing."""
        kills = [track for track in self.ended if track.end.signal == signal.SIGKILL]
        # No loss of a peer sends SIGKILL; but a launcher may, to all others.
        sure = kills if sum(track.ended_s <= first_s + LOOK_S for track in kills) == 1 else []
        left, is_lost = self._left_before(first_s), False
        for track in (*self.ended, *left):
            end, rank = track.end, track.look.rank
            who = Who(node=track.node, pid=track.look.pid) if rank is None else Who(rank=rank)
            about: dict[str, Any] = {"who": who, "when": track.ended, "cause": "dead-rank"}
            if track in left:
                if is_lost or end.code is None:
                    yield Fact(kind=FactKind.MISSING if is_lost else FactKind.ENDED, said=Said.LAUNCHER, **about), track
                continue
            is_first_asked = end.signal in _ASKED and track is self.ended[0]  # somebody ended just this one
            kind = FactKind.LAUNCHER_KILL if is_first_asked else FactKind.ENDED
            said = Said.KERNEL if track in sure else Said.LAUNCHER
            code = None if end.signal else end.code
            yield Fact(kind=kind, said=said, signal=end.signal or None, code=code, **about), track
            if (
                left
                and (code or end.signal == signal.SIGABRT)
                and (track.stack_s < left[0].ended_s or track.stack.is_collective)
            ):
                is_lost = True
                yield Fact(kind=FactKind.PEER_LOST, said=Said.OBSERVER, **about), track

    def _name_ended(self, tracks: Sequence[Track]) -> Finding:
        """Return the finding on a process that ended first, or on several that ended alike at the same time."""
        track, end, was_waiting = tracks[0], tracks[0].end, tracks[0].stack.is_collective
        if not end.code:
            may_be_stop = end.code is None and all(map(_is_asked, self.ended))  # it may have got the same signal
            sureness = Confidence.UNDECIDED if may_be_stop else Confidence.LIKELY
            return self._name_left(tracks, sureness, "the others failed or were ended after it")
        message = None
        if track.look.role is ProcessRole.CHILD:
            message = f"DataLoader worker (pid {track.look.pid}) is killed by signal: {signal.strsignal(end.signal)}. "
        told = WorkerEnd(rank=track.look.rank or 0, node=track.node, exit_code=end.code, time_s=0.0, message=message)
        cause_id, what, fix = describe_end(told)
        what = what.replace(", not by allranks", "")  # which has not started this job
        notes = [f"{len(tracks)} ranks ended alike"] if len(tracks) > 1 else []
        # Gloo and NCCL's watchdog abort a rank for what another one did, also between two looks at its stack.
        was_hit = end.signal == signal.SIGABRT or (end.code > 0 and was_waiting)
        may_be_victim = len(self._ranks.workers) > 1 and was_hit
        if may_be_victim:
            notes.append("it was the first to die, and may be a victim: read the last lines of its log")
        before = describe_time(track.ended_s - track.stack_s) if math.isfinite(track.stack_s) else ""
        return self._fault(
            cause_id,
            what,
            tracks,
            evidence=[f"{before} before, it was {track.stack.where}"] if before else [],
            fix=fix,
            confidence=Confidence.LIKELY if may_be_victim else Confidence.CERTAIN,
            notes=tuple(notes),
        )

    def _name_left(self, tracks: Sequence[Track], confidence: Confidence, why: str) -> Finding:
        fix = "every rank must run the same number of steps: check how the data is divided, and read its log"
        return self._fault("AR407", f"it ended with {tracks[0].how}; {why}", tracks, fix=fix, confidence=confidence)

    # What lives

    def _held(self, *roles: ProcessRole) -> list[Track]:
        """Processes of these roles that have been stopped for long enough, and not with the whole job."""
        held, began_s = filter(lambda track: track.is_held, self._history.tracks(*roles)), self._history.suspended_s
        return [track for track in held if track.told_s - max(track.state_s, began_s) >= STOPPED_S]

    def _judge_stopped(self) -> tuple[Finding, ...]:
        if not (tracks := self._held(ProcessRole.WORKER)):
            return ()
        seen = [f"{_name(track)}, pid {track.look.pid}: {track.look.state} in /proc" for track in tracks[:8]]
        what = f"the process has been {_say_held(tracks[0])}: it exists, but does not run"
        return (self._fault("AR010", what, tracks, evidence=seen, fix=_say_continue(tracks)),)

    def _judge_store(self) -> tuple[Finding, ...]:
        """Requests stand at the store's socket, and its owner does not take them."""
        held, port = self._held(*MAIN), self._history.store_port
        for track in self._history.tracks(*MAIN):
            is_held = track in held
            never_runs = track.is_alive and track.cpu_share == 0 and track.look.state is not ProcessState.RUNNING
            unread = track.unread_at(port)
            for_s = track.told_s - min((flow.unread_s for flow in unread), default=track.told_s)
            if (is_held or never_runs) and for_s >= (STORE_S if is_held else 3 * STORE_S):
                how = "is stopped" if is_held else "does not run"
                what = f"{_name(track)} serves the job's store, and {how}: ranks wait for its answer"
                unread_for = say_for(track.told_s - for_s, track.told_s, track.began_s)
                seen = f"{count_of(len(unread), 'connection')} to the store (port {port}) unread {unread_for}"
                fix = _say_continue([track]) if is_held else None
                return (self._fault("AR010" if is_held else "AR414", what, [track], evidence=[seen], fix=fix),)
        return ()

    def _judge_links(self) -> tuple[Finding, ...]:
        """Bytes between two ranks are not acknowledged, although nothing keeps the other kernel from it."""
        living, dead = self._ranks.living, {}
        for rank, flow, peer, other in self._history.links:
            may_be_full = bool(other.seen.unread_bytes)  # then the window may be zero
            is_known = flow.seen.acked_bytes is not None or flow.seen.retransmits >= MIN_TIMEOUTS
            for_s = living[rank].told_s - flow.stuck_s
            if for_s >= DEAD_S and is_known and not (may_be_full or living[rank].is_held or living[peer].is_held):
                dead[min(rank, peer), max(rank, peer)] = for_s
        if not dead:
            return ()
        tracks = [living[rank] for rank in sorted({rank for pair in dead for rank in pair})]
        common = set.intersection(*({living[rank].node for rank in pair} for pair in dead))
        is_one_cut_off = len(dead) > 1 and len(common) == 1 and any(track.node not in common for track in tracks)
        tracks = [track for track in tracks if track.node in common or not is_one_cut_off]
        sureness = Confidence.LIKELY if is_one_cut_off else Confidence.CERTAIN
        pairs = [" and ".join(f"rank {rank} ({living[rank].node})" for rank in pair) for pair in sorted(dead)]
        first_s = max(track.began_s for track in tracks)
        unacked = f"bytes have been unacknowledged {say_for(self._now_s - max(dead.values()), self._now_s, first_s)}"
        what = f"nothing gets through between {'; between '.join(pairs[:4])}: {unacked}"
        ask = "looks from outside do not show which end drops them: nft list ruleset and ip -s link on both"
        node = " or ".join(dict.fromkeys(track.node for track in tracks))
        return (self._fault("AR211", what, tracks, node=node, ask=ask, confidence=sureness),)

    def _judge_exited(self) -> tuple[Finding, ...]:
        """All others wait in a collective since a rank left; those that take down their groups do not."""
        waiting, last_s = self._ranks.waiting, max((track.ended_s for track in self._left), default=0.0)
        is_closing = any("destroy" in track.stack.operation for track in waiting.values())
        if not self._left or not waiting or len(waiting) < len(self._ranks.living) or is_closing:
            return ()
        if self._now_s - last_s < EXITED_S or any(track.stack_s < last_s for track in waiting.values()):
            return ()
        have = f"{fold_ranks(waiting)} {'has' if len(waiting) == 1 else 'have'}"
        confidence = Confidence.CERTAIN if len(self._left) <= len(waiting) else Confidence.LIKELY
        why = f"{have} waited {next(iter(waiting.values())).stack.where} since"
        return (self._name_left(self._left, confidence, why),)

    # Words

    def _fault(self, cause_id: str, what: str, tracks: Sequence[Track], **about: Any) -> Finding:
        ranks = tuple(sorted({track.look.rank for track in tracks if track.look.rank is not None}))
        spared = {*ranks, *(track.look.rank for track in self._left)}
        about["victims"] = tuple(rank for rank in self._ranks.workers if rank not in spared)
        about["subject"] = None if ranks else _say_subject(tracks[0])
        about = {"node": fold_hosts(sorted({track.node for track in tracks}))} | about
        values = {"rank": ranks[0]} if ranks else {}
        return name_fault(cause_id, what, ranks=ranks, values=values, **about)


def _name(track: Track) -> str:
    rank, pid = track.look.rank, track.look.pid
    if track.look.role is ProcessRole.CHILD:
        return f"a child of {'a rank' if rank is None else f'rank {rank}'} (pid {pid})"
    return f"the {track.look.role} on {track.node} (pid {pid})" if rank is None else f"rank {rank}"


def _say_held(track: Track) -> str:
    """`held by a debugger for 41 s`."""
    how = "held by a debugger" if track.look.state is ProcessState.TRACED else "stopped (SIGSTOP, or a frozen cgroup)"
    return f"{how} {say_for(track.state_s, track.told_s, track.began_s)}"


def _say_continue(tracks: Sequence[Track]) -> str:
    """What to do about processes that are stopped; one that a debugger holds is not continued by SIGCONT."""
    node, pids = tracks[0].node, " ".join(str(track.look.pid) for track in tracks if track.node == tracks[0].node)
    if tracks[0].look.state is ProcessState.TRACED:
        return f"on {node}: TracerPid in /proc/{tracks[0].look.pid}/status is the debugger; let it detach"
    return f"on {node}: kill -CONT {pids} continues it; look for who stopped it (kill -STOP, a frozen cgroup)"


def _say_subject(track: Track) -> str:
    return f"{track.look.role} (pid {track.look.pid})"


def _is_asked(track: Track) -> bool:
    """Whether it ended as people, launchers and schedulers end processes: by such a signal, or as shells tell it."""
    return (track.end.signal or (track.end.code or 0) - 128) in _ASKED
