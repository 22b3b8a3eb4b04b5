"""Was a node lost while the job ran?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class NodeFailure(Cause, id="AR012"):
    """A node was lost while the job ran.

    ## What it means
    The agent of the node disconnected without an exit message. The machine crashed, lost its network, or somebody
    killed the agent.

    ## Why it breaks the job
    The ranks of the node are gone too. The ranks of the other nodes wait for them in the next collective.

    ## Example
    From a public training log; the first line is from srun, the second from slurmstepd:

        srun: error: Node failure on jean-zay-iam37
        slurmstepd: error: *** STEP 1943824.0 ON jean-zay-iam17 CANCELLED AT 2023-03-06T03:17:51 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***

    ## Fix
    Check whether the node is up, and read its kernel log:

        sinfo -N -n NODE -o '%N %T %E'
        ssh NODE 'uptime; dmesg -T | tail -50'

    If only the agent is gone, `dmesg` shows an out-of-memory kill, or the end of its SLURM log shows a signal. Start
    again without the node (`--exclude=NODE`); the job resumes from its last checkpoint.

    ## Source
    SLURM, ping_nodes.c, node_mgr.c and job_mgr.c in src/slurmctld, src/api/step_launch.c, src/slurmd/slurmstepd/req.c;
    Ray, its raylet and GCS; Flux's shell; Kubernetes, the kubelet's node shutdown; Open MPI, the older words of
    orte/mca/errmgr/base/help-errmgr-base.txt (read 2026-11-21). Open MPI's newer words and NodeNotReady are from public
    logs. Moab's, Torque's and the kernel's words were not checked against
    the source. slurm.conf(5), SlurmdTimeout: https://slurm.schedmd.com/slurm.conf.html.
    """  # noqa: E501  (real lines)

    roll_call = "a node answers, then disconnects"
    message = "{what}"
    also = ("AR215",)
    fix = (
        "sinfo -N -n {node} -o '%N %T %E'; read dmesg and the end of its SLURM log; start again without it: "
        "--exclude={node}"
    )
    exit_code = Exit.NODE_FAULT
    traits = frozenset({Trait.KEEPS_ITS_NODE_OUT, Trait.REPORTED_BY_WATCHERS})
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
        Sign(
            r"^Node unexpectedly re(?:booted)? +[a-z_][a-z0-9_-]* +[0-9-]{10}T[0-9:]{8} "
            r"(?P<node>[A-Za-z0-9_.,\[\]-]+)",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        # scontrol show node; the lines above it say whose.
        Sign(r"Reason=Not responding", Role.LIKELY, Blames.NOBODY, Confidence.LIKELY),
        Sign(r"Reason=Node unexpectedly rebooted", Role.LIKELY, Blames.NOBODY, Confidence.LIKELY),
        Sign(r"^NodeName=(?P<node>[A-Za-z0-9_.-]+) ", Role.CONTEXT, Blames.NOBODY),
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
        "Node unexpectedly re slurm     2022-07-23T15:27:10 c015",
        "   Reason=Not responding [slurm@2016-06-09T22:22:36]",
        "   Reason=Node unexpectedly rebooted [slurm@2022-07-23T15:27:10]",
        "NodeName=c015 Arch=x86_64 CoresPerSocket=28",
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
