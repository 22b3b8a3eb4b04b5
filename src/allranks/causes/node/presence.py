"""Is the node there, is it one node and not two, does its clock agree, does it stay?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from allranks.causes.cause import PASSED, Cause, Outcome, Symptom, failed, skipped, unknown, warned
from allranks.causes.sign import Blames, Role, Sign
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
    no_fault_yet = "it takes a running job: the strike worker-stopped stops one of its workers"


class NodeFailure(Cause, id="AR012"):
    """A node was lost while the job ran.

    ## What it means
    The agent of the node is gone without a goodbye: the machine crashed or lost its network, or somebody killed the
    agent there.

    ## Why it breaks the job
    Its ranks are gone, too. The ranks of the other nodes wait for them in the next collective.

    ## Example
    From a public training log; the first line is srun's, the second slurmstepd's:

        srun: error: Node failure on jean-zay-iam37
        slurmstepd: error: *** STEP 1943824.0 ON jean-zay-iam17 CANCELLED AT 2023-03-06T03:17:51 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***

    ## Fix
    Is it up, and what does it say for itself?

        sinfo -N -n NODE -o '%N %T %E'
        ssh NODE 'uptime; dmesg -T | tail -50'

    An agent alone is gone: `dmesg` shows an out-of-memory kill, the end of its SLURM log shows a signal. Start again
    without the node (`--exclude=NODE`); from a checkpoint the job goes on where it was.

    ## Source
    SLURM, ping_nodes.c, node_mgr.c and job_mgr.c in src/slurmctld, src/api/step_launch.c, src/slurmd/slurmstepd/req.c;
    Ray, its raylet and GCS; Flux's shell; Kubernetes, the kubelet's node shutdown; Open MPI, the older words of
    orte/mca/errmgr/base/help-errmgr-base.txt (read 2026-11-21). Open MPI's newer words and NodeNotReady are from public
    logs. Moab's, Torque's and the kernel's words were not checked against
    the source. slurm.conf(5), SlurmdTimeout: https://slurm.schedmd.com/slurm.conf.html.
    """  # noqa: E501  (real lines)

    message = "{what}"
    also = ("AR215",)
    fix = "look at {node} (is it up? dmesg, the end of its SLURM log) and start again without it"
    exit_code = Exit.NODE_FAULT
    told = "a node was lost while the job ran"
    signs = (
        Sign(r"error: Node failure on (?P<node>[A-Za-z0-9_.,\[\]-]+)", blames=Blames.NAMED),
        # `ON node` is where slurmstepd ran, not the node that was lost; it is the only one that a short log knows.
        Sign(
            r"(?:ON (?P<ran_on>[A-Za-z0-9_.-]+) CANCELLED AT [^ ]{1,40} )?DUE TO NODE (?:[A-Za-z0-9_.-]+ )?FAILURE",
            blames=Blames.NOBODY,
        ),
        Sign(r"Nodes? (?P<node>[A-Za-z0-9_.,\[\]-]+) not responding", blames=Blames.NAMED),
        Sign(r"Killing (?:JobId=|job_id |job )[0-9_()]+ on failed node (?P<node>[A-Za-z0-9_.-]+)", blames=Blames.NAMED),
        Sign(r"due to failure of node (?P<node>[A-Za-z0-9_.-]+)", blames=Blames.NAMED),
        Sign(r"removing failed node (?P<node>[A-Za-z0-9_.-]+) from ", blames=Blames.NAMED),
        Sign(r"Node (?P<node>[A-Za-z0-9_.-]+) unexpectedly rebooted", blames=Blames.NAMED),
        Sign(r"[ |=:(]NODE_FAIL\b", blames=Blames.NOBODY),
        # slurmctld, of a node that a health check or somebody takes out; a reason of maintenance is no failure.
        Sign(
            r"update_node: node (?P<node>[A-Za-z0-9_.,\[\]-]+) reason set to: "
            r".{0,120}(?i:fail|not respond|unexpected|hung)",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"job preempted \(node failure\)", blames=Blames.NOBODY),  # Moab
        Sign(r"Exec host:  (?P<node>[A-Za-z0-9_.-]+)/", Role.CONTEXT, Blames.NAMED),
        Sign(r"missing from batch node (?P<node>[A-Za-z0-9_.-]+)", blames=Blames.NAMED),
        Sign(
            r"Task launch for (?:StepId=)?[0-9.+_a-z]{1,40} failed on node (?P<node>[A-Za-z0-9_.-]+): ",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"[Aa]borting, io error (?:and missing step|with slurmstepd) on node [0-9]+", blames=Blames.NOBODY),
        Sign(
            r"(?:srun|slurm[a-z]{0,6}): error: .{0,160}Transport endpoint is not connected",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        # Other launchers
        Sign(
            r"lost communication with (?:a remote daemon|its daemon located on node)",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"Remote daemon: \[[^ ]{1,120}\] on node (?P<node>[A-Za-z0-9_.-]+)",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"[Tt]he actor (?:died|is dead) because its node has died(?:\. Node Id: (?P<thing>[0-9a-f]{8,64}))?",
            blames=Blames.NAMED,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"The node with (?:node id|client ID):? ?[0-9a-f]{8,64}(?: and (?:address|ip): (?P<node>[0-9.]+))?.{0,80} "
            r"has been marked dead",
            blames=Blames.NAMED,
        ),
        # The node itself, when it hears of it ("beem" up to Ray 1.13).
        Sign(r"This node has bee[nm] (?:been )?marked as dead"),
        Sign(r"this node manager has mistakenly been marked (?:as )?dead"),
        Sign(r"node failure on (?P<node>[A-Za-z0-9_.-]+) \(shell rank", blames=Blames.NAMED),
        Sign(r"Prolog (?:failure|hung) on node (?P<node>[A-Za-z0-9_.-]+)", blames=Blames.NAMED),
        Sign(r"Node (?P<node>[A-Za-z0-9_.-]+) status is now: NodeNotReady", blames=Blames.NAMED),
        Sign(r"NodeNotReady", Role.LIKELY, confidence=Confidence.LIKELY),
        # sinfo --Node --long: the star says that slurmctld hears nothing of the node.
        Sign(
            r"^(?P<node>[A-Za-z0-9_.-]+) +[0-9]+ .{1,120} Not responding",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        # sinfo --list-reasons
        Sign(
            r"^Not responding +[a-z_][a-z0-9_-]* +[0-9-]{10}T[0-9:]{8} (?P<node>[A-Za-z0-9_.,\[\]-]+)",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"Reason=Not responding", Role.LIKELY, Blames.NOBODY, Confidence.LIKELY),
        Sign(r"System is (?:powering down|rebooting)\.?$", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Pod was terminated in response to imminent node shutdown"),
        # The machine itself
        Sign(r"Kernel panic - not syncing"),
        Sign(r"BUG: soft lockup - CPU#[0-9]+ stuck for", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Watchdog detected hard LOCKUP on cpu"),
        Sign(
            r"\[Hardware Error\]: .{0,80}(?:Fatal|fatal|Uncorrected|panic)", Role.LIKELY, confidence=Confidence.LIKELY
        ),
        Sign(
            r"error: task (?P<rank>[0-9]+) launch failed: (?P<why>[A-Z][A-Za-z ]{3,80})",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"timeout waiting for task launch, started (?P<present>[0-9]+) of (?P<wanted>[0-9]+) tasks",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"slurm_receive_msgs: \[\[(?P<node>[^\]]{1,80})\]:[0-9]+\] failed: Socket timed out",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"mce: \[Hardware Error\]: ", Role.LIKELY, confidence=Confidence.LIKELY),
    )
    hits = (
        "compute001      1     main*       down*   12   12:1:1  64267        0      1   (null) Not responding",
        "Not responding       slurm     2022-07-10T02:00:55 c016",
        "   Reason=Not responding [slurm@2016-06-09T22:22:36]",
        "Jan 30 10:33:09 gpu-4 systemd-logind[612]: System is powering down.",
        "node07 kernel: mce: [Hardware Error]: Machine check events logged",
        "srun: error: slurm_receive_msgs: [[node07]:6818] failed: Socket timed out on send/recv operation",
        "srun: error: timeout waiting for task launch, started 7 of 8 tasks",
        "srun: error: task 3 launch failed: Slurmd could not execve job",
        "salloc: Prolog failure on node k003-006",
        "srun: error: Node failure on jean-zay-iam37",
        "job preempted (node failure)",
        "[2025-07-04T00:54:23.932] update_node: node od-16-gb-8 reason set to: Scheduler health check failed",
        "Exec host:  gpu-2-17/5",
        "salloc: error: Node failure on worker-1",
        "slurmctld: error: Nodes node[03,07] not responding, setting DOWN",
        "slurmctld: Killing JobId=48 on failed node node03",
        "slurmctld: Killing JobId=12210_17(12308) on failed node node03",
        "slurmctld: Killing job_id 48 on failed node node03",
        "[2024-01-05T11:01:13.120] requeue job JobId=4411 due to failure of node gpu03",
        "slurmctld: removing failed node node03 from JobId=48",
        "slurmd[n12]: error: *** JOB 77 CANCELLED AT 2013-06-30T04:08:07 DUE TO NODE n12 FAILURE ***",
        "slurmctld: error: Node node03 unexpectedly rebooted boot_time=1690000000 last response=1689990000",
        "48             nodefail    NODE_FAIL   00:06:51          node03",
        "slurmctld: Batch JobId=48 missing from batch node node03 (not found BatchStartTime after startup), Requeuing "
        "job",
        "srun: error: Task launch for StepId=48.0 failed on node node03: Communication connection failure",
        "srun: error: Aborting, io error and missing step on node 3",
        "srun: error: slurm_receive_msgs: [[node03]:6818] failed: Transport endpoint is not connected",
        "PRTE has lost communication with a remote daemon.",
        "ORTE has lost communication with its daemon located on node:",
        "  Remote daemon: [[16919,0],3] on node anode127",
        "  Remote daemon: [prterun-master-0-34@0,1] on node worker-1",
        "ray.exceptions.ActorDiedError: The actor died because its node has died.",
        "The node with node id: 5f1c2a7b9e8d and address: 10.0.0.7 and node name: 10.0.0.7 has been marked dead "
        "because the detector has missed too many heartbeats from it.",
        "The node with client ID 581656f84659be9bba58da993729644cfb554836 has been marked dead because the monitor has "
        "missed too many heartbeats from it.",
        "The node with node id: 75b2eec8a61cdafd and ip: 10.4.4.107 has been marked dead because the detector has "
        "missed too many heartbeats from it.",
        "[2022-02-16 12:46:52,789 C 149 149] node_manager.cc:170: This node has beem marked as dead.",
        "Exiting because this node manager has mistakenly been marked as dead by the GCS: GCS didn't receive "
        "heartbeats within timeout",
        "job.exception type=node-failure severity=0 node failure on host7 (shell rank 7)",
        "Normal   NodeNotReady   node/ip-10-0-0-7   Node ip-10-0-0-7 status is now: NodeNotReady",
        "Status: Failed, Message: Pod was terminated in response to imminent node shutdown.",
        "kernel: Kernel panic - not syncing: Fatal exception",
        "kernel: watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python3:21044]",
        "kernel: NMI watchdog: Watchdog detected hard LOCKUP on cpu 12",
        "kernel: mce: [Hardware Error]: Machine check: Processor context corrupt, Fatal Machine check",
        "slurmstepd: error: *** STEP 1943824.0 ON jean-zay-iam17 CANCELLED AT 2023-03-06T03:17:51 DUE TO NODE FAILURE, "
        "SEE SLURMCTLD LOG FOR DETAILS ***",
    )
    misses = ("slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-09-21T10:00:00 DUE TO TIME LIMIT ***",)
    no_fault_yet = "it needs a running job to be lost from; the tests of the lab kill a node's agent by hand"


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
