"""Decide what happens after a fault: end the job, or restart it (pure).

A restart does not cure a fault that comes back. So an error of the user's code ends the job (unless
`--restart-on-error` is set), the same crash ends it the second time, and a failure of the same rank the third time, if
there was no progress in between. A full disk is no error of the code: the leader waits for room before it restarts
(launch.lead.leader). Where several ranks broke by themselves, the job restarts only if each of these failures may be
retried. A node at fault is left out if enough nodes remain (over all runs of the job:
launch.queue.scheduler). A fault that may stay (a flipped bit) is retried once with its node, where that cannot be left
out; the same one at the same step, on whichever rank, ends the job. The leader's own node cannot be left out where
nobody else may lead, since the store and the verdict are there; nor can a lost machine on which srun ran, since SLURM
learns the job's end from srun. The job then ends with the exit code that asks for a requeue.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from allranks.guard.guard_verdict import GuardVerdict
from allranks.model.errors import Exit
from allranks.model.past import Crash, History

MOST_FAULTS_OF_ONE = 3
"""The third failure of the same rank without progress ends the job; two may be chance."""
PROGRESS_S = 600.0
"""A generation that ran this long counts as progress, even without a known checkpoint."""
_ALL_USED = "not restarted: all restarts are used (--max-restarts)"
_NOT_RETRIED = "not restarted: a restart does not cure an error of the script; --restart-on-error restarts anyway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next move, with the reason if it is not obvious."""

    restarts: bool = False
    """False: the job ends."""
    exit_code: int = Exit.OK
    without: frozenset[int] = frozenset()
    """Nodes that are excluded from now on."""
    again: Crash | None = None
    """The crash that came back after a restart, which ends the job."""
    note: str = ""
    """One line for people."""


def decide(
    judged: GuardVerdict,
    *,
    steps: Mapping[int, int],
    history: History,
    culprits: Collection[int],
    leader: int,
    leader_name: str,
    can_resign: bool,
    can_spare: bool = True,
    lost_srun: str = "",
    checkpoint: int | None = None,
    ran_s: float = 0.0,
) -> Decision:
    """Return the next move, and write the fault into the history.

    Args:
        steps: the last one of each rank.
        history: the job's faults so far.
        culprits: the nodes at fault, if nodes are at fault; they and the leader's node by their index in the job.
        can_resign: whether the nodes that are not at fault may go on under another leader.
        can_spare: whether enough nodes remain without the culprits.
        lost_srun: name of the node on which srun ran, if its machine does not answer.
        checkpoint: step of the newest checkpoint.
        ran_s: how long this generation of workers has run, in seconds.
    """
    crashes = [_crash_of(part, steps) for part in judged.parts]
    known = {(crash.cause, crash.what, crash.step) for crash in history.crashes}
    has_stayed = any((crashes[0].cause, crashes[0].ranks) == (crash.cause, crash.ranks) for crash in history.crashes)
    # Of a node that is left out, the ranks are others' now.
    again = next((crash for crash in crashes if crash in history.crashes and not judged.cures), None)
    if judged.comes_back_as and (crashes[0].cause, crashes[0].what, crashes[0].step) in known:
        again = crashes[0]
    history.crashes += crashes
    if checkpoint != history.checkpoint or ran_s >= PROGRESS_S:
        history.faults.clear()
        history.checkpoint = checkpoint
    ranks = [rank for part in judged.parts for rank in part.ranks]
    for rank in ranks:
        history.faults[rank] = history.faults.get(rank, 0) + 1
    if judged.is_over:
        return Decision(exit_code=judged.exit_code)
    errors = [part for part in judged.parts if not part.is_retryable]
    is_error = bool(errors)
    if is_error and not (history.retries_errors and all(error.exit_code == Exit.USER_CODE for error in errors)):
        says_why = history.restarts_left > 0 and not judged.comes_back_as
        return Decision(exit_code=judged.exit_code, note=_why_not_retried(errors) if says_why else "")
    if again is not None and not is_error and again.step is not None:
        return Decision(exit_code=Exit.SETUP if judged.comes_back_as else judged.exit_code, again=again)
    if history.restarts_left <= 0:
        has_used = len(history.crashes) > len(crashes)  # each fault before this one cost a restart
        return Decision(exit_code=judged.exit_code, note=_ALL_USED if has_used else "")
    worn = next((rank for rank in ranks if history.faults[rank] >= MOST_FAULTS_OF_ONE), None)
    if worn is not None and not judged.cures and not is_error:
        note = f"rank {worn} failed {history.faults[worn]} times without progress; a restart does not cure it"
        return Decision(exit_code=Exit.SETUP, note=note)
    if lost_srun:
        note = f"{lost_srun} is lost, and with it srun, which SLURM learns the job's end from: the job must start again"
        return Decision(exit_code=Exit.NODE_FAULT, note=note)
    without = frozenset(culprits) if judged.cures else frozenset()
    if judged.may_stay and without and (not can_spare or (leader in without and not can_resign)):
        if has_stayed:
            who = ", ".join(map(str, judged.ranks))
            note = f"not restarted: rank {who} had this fault before, and its node cannot be left out"
            return Decision(exit_code=judged.exit_code, note=note)
        without = frozenset()
    if leader in without and not can_resign:
        note = f"{leader_name} runs the leader, and the other nodes are no majority without it: the job must "
        note += "start again on other nodes"
        return Decision(exit_code=Exit.NODE_FAULT, note=note)
    history.restarts_left -= 1
    return Decision(restarts=True, without=without)


def _why_not_retried(errors: Sequence[GuardVerdict]) -> str:
    """Return why the ranks are not started again; what is no error of the script is called by its cause's name."""
    other = next((error for error in errors if error.exit_code != Exit.USER_CODE and error.findings), None)
    return _NOT_RETRIED if other is None else f"not restarted: a restart does not cure {other.findings[0].cause}"


def _crash_of(judged: GuardVerdict, steps: Mapping[int, int]) -> Crash:
    if judged.comes_back_as:
        what, _, step = judged.comes_back_as.rpartition(" at step ")
        return Crash(cause=judged.findings[0].cause, ranks=judged.ranks, step=int(step), what=what)
    cause, what = (judged.findings[0].cause, judged.findings[0].message) if judged.findings else ("", "")
    at = min((steps[rank] for rank in judged.ranks if rank in steps), default=None)
    return Crash(cause=cause, ranks=judged.ranks, step=at, what=what)
