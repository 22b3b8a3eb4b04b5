"""What an epilog does for one job, and what it writes about it. Pure: environment and SLURM's answers in, texts out.

    >>> choose_duty({"SLURM_JOB_ID": "12", "SLURM_JOB_UID": "7", "SLURMD_NODENAME": "n2", "SLURM_NODELIST": "n[1-4]"})
    Duty(number='12', uid=7, gid=None, user='', node='n2', nodes=('n1', 'n2', 'n3', 'n4'))

SLURM runs Epilog as root on every node of a job, and EpilogSlurmctld as SlurmUser on the controller, once.
Source: slurm.conf(5), "Prolog and Epilog Scripts"; SLURM_NODELIST is in slurmd's environment of an Epilog, although no
page names it (seen with 22.05).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from allranks.host.slurm import JobState
from allranks.model.errors import HostlistError
from allranks.model.finding import Finding, Severity
from allranks.model.hostlist import expand_hosts
from allranks.report.mask import mask_finding
from allranks.report.text import fold_ranks, one_line
from allranks.why.fleet.job_end import VERSION, JobEnd, NodeFault, find_faults

MARK = "allranks: "
"""How our comment of a job begins: another one is the user's, and stays."""
MAX_COMMENT = 240
"""Characters; SLURM takes 1024."""
FAILED_STATES = frozenset({"BOOT_FAIL", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"})
"""States that are failures, whatever the logs say; a time limit, a cancellation and a preemption need not be."""


@dataclass(frozen=True, slots=True)
class Duty:
    """What is to be done on this node for one job."""

    number: str
    """SLURM_JOB_ID; a task of an array has its own."""
    uid: int
    gid: int | None
    user: str
    node: str
    """This node, as SLURM names it; empty on the controller."""
    nodes: tuple[str, ...]
    """Nodes of the job; empty if the environment does not tell."""

    def turn(self, nodes: Sequence[str]) -> int | None:
        """Return whose turn it is among the nodes of the job: 0 explains it, 1 stands in for a node that is down.

        None: others do it. The job's nodes may be thousands, and each of them runs the epilog.
        """
        if not self.node:
            return 0
        first = [*nodes[:2]]
        return first.index(self.node) if self.node in first else None


def choose_duty(env: Mapping[str, str]) -> Duty | str | None:
    """Return what to do in an epilog with this environment.

    None: another node does it. A text: why nothing can be done.
    """
    number, uid = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_UID", "")
    if not _is_number(number) or not _is_number(uid):
        return "expected SLURM_JOB_ID and SLURM_JOB_UID in the environment, as SLURM's epilogs have them"
    gid = env.get("SLURM_JOB_GID", "")
    node = "" if env.get("SLURM_SCRIPT_CONTEXT") == "epilog_slurmctld" else env.get("SLURMD_NODENAME", "")
    try:
        nodes = tuple(expand_hosts(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""))
    except HostlistError:
        nodes = ()
    duty = Duty(number, int(uid), int(gid) if _is_number(gid) else None, env.get("SLURM_JOB_USER", ""), node, nodes)
    return None if nodes and duty.turn(nodes) is None else duty


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of the job's user has found in the logs: from another user, so it is only data."""

    is_failed: bool = False
    faults: tuple[NodeFault, ...] = ()
    comment: str = ""
    """One line for people; empty if no cause is known."""
    problem: str = ""
    """Why the logs could not be read."""


def sum_up(findings: tuple[Finding, ...], *, job: str, is_failed: bool) -> Explained:
    """Return in short what `allranks why` has found; a job without a failure gets no comment."""
    first = next((finding for finding in findings if finding.severity is Severity.FAIL), None)
    comment = tell_comment(first, job=job) if first is not None else ""
    return Explained(is_failed=is_failed, faults=find_faults(findings), comment=comment)


def tell_comment(finding: Finding, *, job: str) -> str:
    """`allranks: AR105 gpu-hardware, node17 rank 3 (certain): Xid 79 ...; allranks why 12`, cut at MAX_COMMENT."""
    finding = mask_finding(finding)
    who = " ".join(filter(None, [finding.node or "", fold_ranks(finding.ranks), finding.subject or ""]))
    head = MARK + ", ".join(filter(None, [finding.cause, who])) + f" ({finding.confidence}): "
    end = f"; allranks why {job}"
    said = one_line(head + finding.message)
    room = MAX_COMMENT - len(end)
    return (said if len(said) <= room else said[: room - 3].rstrip() + "...") + end


def may_comment(comment: str) -> bool:
    """Whether a job's comment may be replaced: there is none, or it is ours, of the run before a requeue."""
    return not comment or comment.startswith(MARK)


def is_well(state: JobState) -> bool:
    """Whether SLURM's word is enough: the job has ended with exit code 0, and no log needs to be read."""
    return state.state == "COMPLETED" and state.exit_code == 0 and state.signal is None


def end_of(state: JobState, explained: Explained, *, nodes: str, time_s: float | None = None) -> JobEnd:
    """Return the line of the file.

    Args:
        state: what SLURM says of the job.
        explained: what its logs say; what it says of other nodes than the job's own is left out later (suspects.py).
        nodes: host list of the nodes that it had.
        time_s: Unix time, the clock's if None.
    """
    return JobEnd(
        version=VERSION,
        time_s=time.time() if time_s is None else time_s,
        job=state.id,
        restarts=state.restarts,
        user=state.user,
        state=state.state,
        nodes=nodes,
        is_failed=explained.is_failed or state.state in FAILED_STATES,
        faults=explained.faults,
        unexplained=one_line(explained.problem)[:300],
    )
