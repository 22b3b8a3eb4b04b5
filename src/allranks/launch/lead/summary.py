"""The outcome of a job, as a verdict and as printed lines (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from allranks.guard.guard_verdict import FIX_OF_LOST_AGENT, GuardVerdict, name_fault
from allranks.launch.plan import count_of
from allranks.model.finding import Confidence, Finding, Verdict
from allranks.model.fix import Reader
from allranks.model.hostlist import fold_hosts
from allranks.model.past import Crash

MOST_MISSING = 4
"""Files that are named."""


def loop_of(judged: GuardVerdict, crash: Crash) -> GuardVerdict:
    """Add the finding that a restart does not help, because this crash came back, in front of the crashes."""
    first = next((finding for finding in judged.findings if finding.ranks == crash.ranks), judged.findings[0])
    what = f"the same crash happened again at step {crash.step} after a restart: {crash.cause}: {crash.what}"
    return replace(judged, findings=(name_fault("AR509", what, node=first.node, ranks=first.ranks), *judged.findings))


def describe_restart(
    generation: int,
    nodes: Sequence[str],
    without: Sequence[str],
    checkpoint: int | None,
    *,
    num_left: int,
    is_tracked: bool = True,
) -> str:
    """`restart 1 on 5 nodes without node03, from the checkpoint of step 120; 2 more restarts left`.

    Args:
        without: the nodes that are left out.
        checkpoint: step of the newest checkpoint that allranks knows.
        num_left: restarts left after this one.
        is_tracked: whether the script reports its steps; otherwise allranks does not know what it saves.
    """
    where = f"from the checkpoint of step {checkpoint}"
    if checkpoint is None:
        where = "from the beginning" if is_tracked else "from what the script itself saved"
    left = f" without {fold_hosts(without)}" if without else ""
    more = count_of(num_left, "more restart")
    return f"restart {generation} on {count_of(len(nodes), 'node')}{left}, {where}; {more} left"


def describe_pause(missing: str, what: str, *, left_s: float, timeout_s: float) -> str:
    """`paused: only 2 of at least 3 nodes; waiting for capacity, 4:30 left (--capacity-timeout 300)`.

    Args:
        missing: what the job lacks.
        what: the same in a word.
        left_s: until it is not waited for any longer.
        timeout_s: of --capacity-timeout.
    """
    minutes, seconds = divmod(int(left_s), 60)
    return f"paused: {missing}; waiting for {what}, {minutes}:{seconds:02d} left (--capacity-timeout {timeout_s:.0f})"


def describe_kill_wait(kill_wait_s: float, *, spare_s: float) -> str:
    """Return what SLURM's KillWait leaves ranks that handle SIGTERM.

    Args:
        kill_wait_s: seconds between SLURM's SIGTERM and SIGKILL.
        spare_s: of them, that allranks keeps for itself.
    """
    left_s = max(1.0, kill_wait_s - spare_s)
    return (
        f"ranks that handle SIGTERM have {left_s:.0f} s when SLURM ends this job: KillWait is {kill_wait_s:.0f} s, of "
        f"which {spare_s:.0f} s are kept back; --signal=TERM@120 (sbatch) warns them before the time limit"
    )


def describe_loss(leader: str, reason: str, how: str | None, *, reader: Reader) -> Finding:
    """Return the finding of a job that has lost its leader, and nobody could succeed it.

    Args:
        leader: name of its node.
        reason: how this agent has noticed.
        how: how the leader's agent ended, where somebody knows.
        reader: for whom the fix is.
    """
    if how is None:
        what = "the node led the job, and its agent is gone: the machine crashed, lost its network, or somebody killed "
        what, sure = f"{what}the agent", Confidence.LIKELY
        return name_fault("AR012", what, node=leader, evidence=[reason], confidence=sure, reader=reader)
    fix = FIX_OF_LOST_AGENT.tell(reader, {"node": leader})
    what = f"the node's agent, which led the job, was {how}; no other node could lead"
    return name_fault("AR012", what, node=leader, evidence=[reason], fix=fix)


def describe_output(where: str, *, is_gone: bool, missing: Sequence[str] = ()) -> str:
    """Return where the output of the ranks is, or that it is not there.

    Args:
        where: the directory.
        is_gone: it does not lead to the directory of the job any more.
        missing: files and directories in it that are not there any more.
    """
    if is_gone:
        return f"the output is not in {where}: somebody removed or unmounted it while the job ran"
    few = ", ".join([*missing[:MOST_MISSING], *(["..."] if len(missing) > MOST_MISSING else [])])
    return f"output in {where}" + (f", except {few}: removed while the job ran" if missing else "")


def summarize(verdict: Verdict) -> str:
    """Return one line for nodes with a terminal of their own; empty if the job succeeded."""
    if not verdict.exit_code or not verdict.findings:
        return ""
    culprit = verdict.findings[0]
    ranks = ",".join(map(str, culprit.ranks))
    who = f"rank {ranks} on {culprit.node}" if ranks else culprit.node or "the job"
    return "; ".join([f"{culprit.cause}: {who}: {culprit.message}", *culprit.notes])
