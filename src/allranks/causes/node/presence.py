"""Is the node there, is it one node and not two, does its clock agree?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, Symptom, failed, skipped, unknown, warned
from allranks.causes.sign import Role, Sign
from allranks.model.card import Card, Facts
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Status


class NodeSilent(Cause, id="AR001"):
    """A node's agent did not come to the roll call.

    ## What it means
    SLURM gave the node to the job, and nobody there said a word to the leader in time.

    ## Why it breaks the job
    A group needs all its ranks. Plain PyTorch waits for the missing ones until the timeout, 10 or 30 minutes, and then
    does not say which they are.

    ## Example
    From allranks' own verdict:

        AR001 node-silent   node03   its agent did not come within 60 s; 5 of 6 nodes are here

    ## Fix
    See whether it is up, and whether anything starts there:

        sinfo -N -n NODE -o '%N %T %E'
        srun --overlap --jobid=JOB --nodelist=NODE hostname

    Up and silent: Python may hang on a network file system (`allranks stack JOB` shows processes without an agent's
    help), or the leader's port is closed to it. Start without it: `--exclude=NODE`. On slow file systems give it
    longer: `[guard] join_s` in cluster.toml.

    ## Source
    How long is waited, and why: allranks' roll call.
    """

    message = "{what}"
    fix = "is it up, and can it reach the leader? Or start without it: --exclude={node}"
    exit_code = Exit.NODE_FAULT


class ClockSkew(Cause, id="AR007"):
    """A node's clock differs from the others'.

    ## What it means
    The clock of the node is wrong by more than a network explains: nothing sets it, or it was set by hand.

    ## Why it breaks the job
    Training itself does not look at the clock. What is around it does: munge refuses SLURM's messages when clocks are
    minutes apart, certificates and tokens are "not yet valid", file times on a shared file system lie, and the logs
    of two nodes cannot be laid side by side, which is where one looks first after a hang.

    ## Example
    From munge 0.5 (EMUNGE_CRED_REWOUND) in slurmctld.log: the sender's clock is ahead:

        error: Munge decode failed: Rewound credential

    ## Fix
    See who sets it, and by how much it is off:

        timedatectl; chronyc tracking

    As root: `systemctl enable --now chronyd; chronyc makestep`.

    ## Source
    munge(7), credentials' time to live: https://github.com/dun/munge/wiki (0.5.16).
    chronyc(1): https://chrony-project.org/documentation.html (4.6).
    """

    message = "{culprit}'s clock is {offset_s} s off the others'"
    told = "the clocks of two nodes disagree"
    fix = "as root on {node}: systemctl enable --now chronyd && chronyc makestep"
    exit_code = Exit.NODE_FAULT
    symptoms = (Symptom.CLOCK,)
    signs = (
        Sign(r"Munge (?:decode|encode) failed: (?:Rewound|Expired) credential"),
        Sign(r"Clock skew detected", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"certificate is not yet valid", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"System clock wrong by -?(?P<seconds>[0-9.]+) seconds", Role.LIKELY, confidence=Confidence.LIKELY),
    )
    hits = (
        "[2026-03-02T10:11:12.013] error: Munge decode failed: Rewound credential",
        "slurmd: error: Munge decode failed: Expired credential",
        "make: warning:  Clock skew detected.  Your build may be incomplete.",
        "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not "
        "yet valid (_ssl.c:1000)",
        "chronyd[812]: System clock wrong by 312.485921 seconds",
    )
    misses = ("error: Munge decode failed: Invalid credential",)

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Never an alarm on one node alone: it notes a clock that nothing sets. Offsets are measured between nodes."""
        if card.facts is None:
            return unknown("no facts of this node")
        if card.facts.is_clock_synchronised is None:
            return skipped("the kernel does not say whether the clock is synchronised")
        return PASSED if card.facts.is_clock_synchronised else Outcome(Status.PASS, "not synchronised (NTP)")


class DuplicateHost(Cause, id="AR009"):
    """Two machines of the job have the same identity.

    ## What it means
    Two nodes say the same host name. If they have the same boot id, too, they are copies of one image or containers
    of one machine.

    ## Why it breaks the job
    NCCL takes host name and boot id for the machine. Where both are equal it believes that the ranks are on one
    machine, tries shared memory and direct GPU copies between them, and hangs, or says that a GPU is used twice. Where
    only the names are equal, logs and verdicts name the wrong node, and Gloo may connect to the wrong one.

    ## Example
    From horovod/horovod#3949; NCCL says so when two machines look like one:

        init.cc:748 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3b000

    ## Fix
    Compare:

        srun --ntasks-per-node=1 bash -c 'echo $SLURMD_NODENAME $(hostname) $(cat /proc/sys/kernel/random/boot_id)'

    Give each its own name (`hostnamectl set-hostname NAME` as root). For containers that share boot id and name on
    purpose, tell NCCL who is who, before the job:

        export NCCL_HOSTID=$SLURMD_NODENAME

    ## Source
    NCCL 2.30, src/misc/utils.cc, getHostHash; NCCL_HOSTID:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
    """

    message = "{count} machines say that they are {name}: {what}"
    fix = "as root: hostnamectl set-hostname NAME; or for NCCL alone: export NCCL_HOSTID=$SLURMD_NODENAME"
    exit_code = Exit.SETUP
    also = ("AR107",)

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails where NCCL takes two machines for one (name and boot id equal, addresses not), warns of equal names."""
        by_name: dict[str, list[Card]] = defaultdict(list)
        for card in cards:
            if card.facts and card.facts.host_name:
                others = by_name[card.facts.host_name]
                if not any(other.facts and is_same_machine(card.facts, other.facts) for other in others):
                    others.append(card)
        found: list[tuple[tuple[str, ...], Outcome]] = []
        for name, same in by_name.items():
            if len(same) < 2:
                continue
            hosts = tuple(card.host for card in same)
            evidence = [f"{card.host}: boot id {card.facts.boot_id or 'unknown'}" for card in same if card.facts]
            identities = [_nccl_identity(card.facts) for card in same if card.facts]
            if None not in identities and len(set(identities)) < len(identities):
                outcome = failed(*evidence, count=len(same), name=name, what="NCCL takes them for one")
            else:
                what = "a boot id is not known" if None in identities else "NCCL can tell them apart, logs cannot"
                outcome = warned(*evidence, count=len(same), name=name, what=what)
            found.append((hosts, outcome))
        return found


class ProcessStopped(Cause, id="AR010"):
    """A worker's process is stopped.

    ## What it means
    The process exists and does not run: somebody or something sent it SIGSTOP, a debugger holds it, or its cgroup is
    frozen. `ps` shows state T, or t under a debugger.

    ## Why it breaks the job
    The connections of a stopped process stay open, so nobody notices. All other ranks wait in the next collective until
    it times out, and each of them then names itself.

    ## Example
    From ps(1), state column:

        alice  21044  0.0  1.2 python3 train.py  T

    ## Fix
    Let it go on:

        kill -CONT PID

    and find out who stopped it: `grep TracerPid /proc/PID/status` names a debugger; `scontrol show job JOB` says
    SUSPENDED where SLURM did it (`scontrol resume JOB`), often by gang scheduling.

    ## Source
    proc(5), /proc/PID/status, and signal(7), Linux man-pages 6.9.
    """

    message = "{what}"
    fix = "on {node}: kill -CONT PID; see who stopped it: grep TracerPid /proc/PID/status"
    told = "a process is stopped (SIGSTOP, a debugger, a suspended job)"
    exit_code = Exit.NODE_FAULT
    signs = (
        Sign(r"State:\s{1,8}T \(stopped\)"),
        Sign(r"State:\s{1,8}t \(tracing stop\)"),
        Sign(r"\[[0-9]+\][+-]? {1,4}Stopped {2,40}", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"JobState=SUSPENDED", Role.LIKELY, confidence=Confidence.LIKELY),
    )
    hits = (
        "State:\tT (stopped)",
        "State:  t (tracing stop)",
        "[1]+  Stopped                 python3 train.py",
        "   JobState=SUSPENDED Reason=None Dependency=(null)",
    )
    misses = ("State:\tS (sleeping)", "srun: Job step aborted: Waiting up to 62 seconds for job step to finish.")


def is_same_machine(one: Facts, other: Facts) -> bool:
    """Whether two cards are of one machine: two agents on it, which is fine."""
    if one.boot_id is None or one.boot_id != other.boot_id or one.host_name != other.host_name:
        return False
    return _addresses(one) == _addresses(other)


def _addresses(facts: Facts) -> set[str]:
    return {address for interface in facts.interfaces for address in interface.addresses}


def _nccl_identity(facts: Facts) -> str | None:
    """What NCCL hashes to tell machines apart; None where it is not known."""
    if hostid := facts.environment.get("NCCL_HOSTID"):
        return hostid
    return facts.host_name + facts.boot_id if facts.boot_id else None
