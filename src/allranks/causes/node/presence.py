"""Did the node's agent join, does its host name occur only once, is its clock right?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, Symptom, failed, skipped, unknown, warned
from allranks.causes.sign import Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card, Facts
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Status


class NodeSilent(Cause, id="AR001"):
    """A node's agent did not join the roll call.

    ## What it means
    SLURM gave the node to the job, but no agent of that node contacted the leader in time.

    ## Why it breaks the job
    A group needs all its ranks. Plain PyTorch waits for the missing ones until the timeout of 10 or 30 minutes, and
    then does not say which they are.

    ## Example
    A finding of allranks:

        AR001 node-silent   node03   the node's agent did not join within 60 s; 5 of 6 nodes joined

    ## Fix
    Check whether the node is up, and whether a command starts there:

        sinfo -N -n NODE -o '%N %T %E'
        srun --overlap --jobid=JOB --nodelist=NODE hostname

    If the node is up, Python may hang on a network file system (`allranks stack JOB` shows processes without help of an
    agent), or a firewall blocks the leader's port. To start without the node, use `--exclude=NODE`. If file systems are
    slow, allow more time with `[guard] join_s` in cluster.toml.

    ## Source
    How long is waited, and why: allranks' roll call.
    """

    roll_call = "a node does not answer"
    message = "{what}"
    fix = "sinfo -N -n {node} -o '%N %T %E' shows whether it is up; start without it: --exclude={node}"
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.HEARS_NO_VERDICT, Trait.KEEPS_ITS_NODE_OUT})


class ClockSkew(Cause, id="AR007"):
    """A node's clock differs from those of the others.

    ## What it means
    The clock of the node is off by more than network delays explain: no time service sets it, or somebody set it by
    hand.

    ## Why it breaks the job
    Training itself does not use the clock, but other parts do. munge rejects SLURM's messages if clocks are minutes
    apart, certificates and tokens are "not yet valid", and file times on a shared file system are wrong. After a hang,
    the logs of two nodes cannot be compared by time.

    ## Example
    From munge 0.5 (EMUNGE_CRED_REWOUND) in slurmctld.log, where the sender's clock is ahead:

        error: Munge decode failed: Rewound credential

    ## Fix
    Show which service sets the clock, and its error:

        timedatectl; chronyc tracking

    Then, as root: `systemctl enable --now chronyd; chronyc makestep`.

    ## Source
    munge(7), credentials' time to live: https://github.com/dun/munge/wiki (0.5.16).
    chronyc(1): https://chrony-project.org/documentation.html (4.6).
    """

    message = "the clock of {culprit} differs from the others by {offset_s} s"
    told = "the clocks of two nodes differ"
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
        """Notes a clock that no time service sets; it never warns, because offsets are measured between nodes."""
        if card.facts is None:
            return unknown("this node reported no facts")
        if card.facts.is_clock_synchronised is None:
            return skipped("the kernel does not report whether the clock is synchronized")
        return PASSED if card.facts.is_clock_synchronised else Outcome(Status.PASS, "not synchronized (NTP)")


class DuplicateHost(Cause, id="AR009"):
    """Two machines of the job have the same host name.

    ## What it means
    Two nodes report the same host name. If their boot ids are equal too, they are copies of one image, or containers of
    one machine.

    ## Why it breaks the job
    NCCL identifies a machine by host name and boot id. If both are equal, it treats the ranks as if they were on one
    machine. It tries shared memory and direct GPU copies between them, and hangs or reports that a GPU is used twice.
    If only the names are equal, logs and verdicts name the wrong node, and Gloo may connect to the wrong one.

    ## Example
    From horovod/horovod#3949; NCCL prints this if two machines look like one:

        init.cc:748 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3b000

    ## Fix
    Compare the nodes:

        srun --ntasks-per-node=1 bash -c 'echo $SLURMD_NODENAME $(hostname) $(cat /proc/sys/kernel/random/boot_id)'

    Give each its own name (`hostnamectl set-hostname NAME` as root). If containers share name and boot id on purpose,
    tell NCCL their identities before the job:

        export NCCL_HOSTID=$SLURMD_NODENAME

    ## Source
    NCCL 2.30, src/misc/utils.cc, getHostHash; NCCL_HOSTID:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
    """

    message = "{count} machines have the host name {name}: {what}"
    fix = (
        "as root on one of them: hostnamectl set-hostname NAME; or for NCCL alone: export NCCL_HOSTID=$SLURMD_NODENAME"
    )
    exit_code = Exit.SETUP
    also = ("AR107",)

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails if two machines with different addresses have equal names and boot ids; warns if only names are."""
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
                outcome = failed(*evidence, count=len(same), name=name, what="NCCL treats them as one machine")
            else:
                what = "a boot id is unknown" if None in identities else "NCCL can tell them apart, logs cannot"
                outcome = warned(*evidence, count=len(same), name=name, what=what)
            found.append((hosts, outcome))
        return found


class ProcessStopped(Cause, id="AR010"):
    """A worker's process is stopped.

    ## What it means
    The process exists but does not run: it got SIGSTOP, a debugger stopped it, or its cgroup is frozen. `ps` shows
    state T, or t under a debugger.

    ## Why it breaks the job
    The connections of a stopped process stay open, so no peer notices. All other ranks wait in the next collective
    until it times out, and then each reports itself.

    ## Example
    From ps(1); the last column is the state:

        alice  21044  0.0  1.2 python3 train.py  T

    ## Fix
    If the process still exists, see whether a debugger holds it (TracerPid is not 0), and continue it:

        grep TracerPid /proc/PID/status; kill -CONT PID

    `scontrol show job JOB` shows SUSPENDED if SLURM stopped it, often by gang scheduling (`scontrol resume JOB`).
    `allranks run` ends such a job: then only what stopped the process is left to find.

    ## Source
    proc(5), /proc/PID/status, and signal(7), Linux man-pages 6.9.
    """

    message = "{what}"
    fix = "on {node}: kill -CONT PID; to see what stopped it: grep TracerPid /proc/PID/status"
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
