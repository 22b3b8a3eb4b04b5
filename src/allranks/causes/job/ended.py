"""Who ended the job from outside: the scheduler (preemption, time limit), a person, or too many restarts."""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NOBODY = Blames.NOBODY


class Preempted(Cause, id="AR506"):
    """The scheduler preempted the job.

    ## What it means
    A job of higher priority, or the owner of the nodes, needed them. SLURM preempted the job, a cloud took its spot
    instance back, or Kubernetes evicted the pod. Nothing is wrong with the job or its nodes.

    ## Why it breaks the job
    All ranks get SIGTERM and, after a grace period, SIGKILL. Later log lines are consequences: a SignalException of
    torchrun, broken connections, a CUDA driver that shuts down.

    ## Example
    From SLURM; older versions write `JOB 11509447 CANCELLED AT ... DUE TO PREEMPTION on nodeau01`:

        slurmstepd: error: *** JOB 11509447 ON nodeau01 CANCELLED AT 2026-03-25T10:34:07 DUE TO PREEMPTION ***

    ## Fix
    Let SLURM requeue the job, and write a checkpoint when SLURM sends a warning:

        #SBATCH --requeue --signal=B:USR1@120 --open-mode=append

    The script must find its last complete checkpoint by itself, and must accept a directory that already exists. These
    commands show how much time the warning leaves: `scontrol show partition` (GraceTime), `scontrol show config | grep
    -i preempt`.

    ## Source
    SLURM, "Preemption": https://slurm.schedmd.com/preempt.html; its words: src/slurmd/slurmstepd/req.c,
    _handle_signal_container, with `ON NODE` and without (read 2026-11-21). Kubernetes, the preemption of the scheduler
    and pkg/kubelet/preemption (read 2026-11-21). EC2's event: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/
    spot-instance-termination-notices.html (read 2026-11-21); Compute Engine's is from public code that handles it.
    """

    message = "the scheduler preempted the job"
    told = "the scheduler preempted the job and gave its nodes to other work"
    fix = "submit with sbatch --requeue, and save a checkpoint on the warning signal: #SBATCH --signal=B:USR1@120"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.ENDS_FROM_OUTSIDE, Trait.REPORTED_BY_WATCHERS})
    signs = (
        Sign(r"DUE TO PREEMPTION", blames=_NOBODY),
        Sign(r"DUE TO JOB REQUEUE", Role.LIKELY, _NOBODY, Confidence.LIKELY),
        Sign(r"this job is preempted", blames=_NOBODY),
        Sign(r"JobState=PREEMPTED", blames=_NOBODY),
        Sign(r"\bPREEMPTED\b", Role.LIKELY, _NOBODY, Confidence.LIKELY),
        # Kubernetes: the scheduler, pkg/kubelet/preemption.
        Sign(r"[Pp]reempted (?:by|in order to admit) ", Role.LIKELY, _NOBODY, Confidence.LIKELY),
        Sign(r"preempting to accommodate a higher priority (?:pod|workload)", blames=_NOBODY),
        Sign(r"[Ii]nstance (?:was|has been|is being|got) preempted", blames=_NOBODY),
        Sign(r"(?i:spot instance interruption (?:warning|notice))", blames=_NOBODY),
        Sign(r"compute\.instances\.preempted", blames=_NOBODY),
        # Clouds stop a machine as if its power key were pressed (ACPI); nobody stands before it.
        Sign(r"systemd-logind(?:\[[0-9]+\])?:? Power key pressed", Role.LIKELY, confidence=Confidence.UNDECIDED),
    )
    hits = (
        "slurmstepd: error: *** JOB 11509447 ON nodeau01 CANCELLED AT 2026-03-25T10:34:07 DUE TO PREEMPTION ***",
        "   r002 CANCELLED AT 2026-09-25T10:25:59 DUE TO PREEMPTION ***",
        "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2023-01-05T07:00:11 DUE TO JOB REQUEUE ***",
        "submitit WARNING (2023-04-01 10:00:00,000) - Caught signal SIGTERM on node03: this job is preempted.",
        "   JobState=PREEMPTED Reason=None Dependency=(null)",
        "636782       train    gpu   PREEMPTED      0:0",
        "Warning  Preempted  3m  default-scheduler  Preempted by ml/big-0 on node gpu-pool-1",
        "default-scheduler: preempting to accommodate a higher priority pod",
        "default-scheduler: preempting to accommodate a higher priority workload",
        "Instance was preempted.",
        '"detail-type": "EC2 Spot Instance Interruption Warning",',
        'protoPayload.methodName="compute.instances.preempted"',
        "Jan 30 10:33:08 gpu-4 systemd-logind[612]: Power key pressed short.",
    )
    misses = (
        "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2023-01-05T07:00:11 DUE TO TIME LIMIT ***",
        "Kernel is configured with CONFIG_PREEMPT=y; preemption timer calibrated",
    )
    no_fault_yet = "the strike preempted lets SLURM take nodes away: the job resumes, and nobody is at fault"


class TimeLimit(Cause, id="AR507"):
    """The job reached its time limit.

    ## What it means
    The requested wall time (`--time`, or the partition's default) ran out while the job was running. The earlier log
    lines show whether it was slow, hung, or just long.

    ## Why it breaks the job
    SLURM sends SIGTERM to all tasks, and SIGKILL after KillWait (30 s). Everything since the last checkpoint is lost.

    ## Example
    From a job of 2022:

        slurmstepd: error: *** JOB 42221 ON clr1247 CANCELLED AT 2022-04-14T16:20:46 DUE TO TIME LIMIT ***

    ## Fix
    Request a longer `--time`, or save checkpoints and chain jobs (`--dependency=singleton`). This gives five minutes of
    warning:

        #SBATCH --signal=B:USR1@300

    If the last log lines are much older than the end, the job hung before: look for that hang.

    ## Source
    SLURM, src/slurmd/slurmstepd/req.c, and salloc's "has exceeded its time limit" (read 2026-11-21). sbatch(1), --time,
    --signal: https://slurm.schedmd.com/sbatch.html. What PBS, LSF and Kubernetes say is from public logs.
    """

    message = "the job reached its time limit"
    told = "the job reached its time limit, and SLURM ended it"
    fix = "request a longer #SBATCH --time, or save a checkpoint before the end: #SBATCH --signal=B:USR1@300"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.ENDS_FROM_OUTSIDE, Trait.REPORTED_BY_WATCHERS})
    signs = (
        Sign(r"DUE TO TIME LIMIT", blames=_NOBODY),
        Sign(r"exceeded its time limit and its allocation has been revoked", blames=_NOBODY),
        Sign(r"this job is timed-out", blames=_NOBODY),
        Sign(r"Job not requeued because: timed-out", blames=_NOBODY),
        Sign(r"JobState=TIMEOUT", blames=_NOBODY),
        Sign(r"\bTIMEOUT +(?:[0-9]+-)?[0-9]+:[0-9]", Role.LIKELY, _NOBODY, Confidence.LIKELY),
        Sign(r"PBS: job killed: walltime [0-9]+ exceeded limit (?P<seconds>[0-9]+)", blames=_NOBODY),
        Sign(r"[Jj]ob exceeded (?:its )?wall(?:time|clock) limit", blames=_NOBODY),  # Torque, Moab
        Sign(r"TERM_RUNLIMIT: job killed", blames=_NOBODY),
        Sign(r"Job was active longer than specified deadline", blames=_NOBODY),
        Sign(r"[Hh]andling auto-requeue signal: ", Role.LIKELY, _NOBODY, Confidence.UNDECIDED),
    )
    hits = (
        "[rank: 0] Handling auto-requeue signal: 10",
        "slurmstepd: error: *** JOB 42221 ON clr1247 CANCELLED AT 2022-04-14T16:20:46 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** JOB 14309850 CANCELLED AT 2015-06-30T04:08:07 DUE TO TIME LIMIT on compute-b1-051 ***",
        "slurmd[n12]: error: *** STEP 4.0 CANCELLED AT 2014-06-30T04:08:07 DUE TO TIME LIMIT ***",
        "salloc: Job 1567397 has exceeded its time limit and its allocation has been revoked.",
        "submitit WARNING (2023-04-01 10:00:00,000) - Caught signal SIGUSR1 on node03: this job is timed-out.",
        "submitit.core.utils.UncompletedJobError: Job not requeued because: timed-out and not checkpointable.",
        "   JobState=TIMEOUT Reason=TimeLimit Dependency=(null)",
        "10763635_1     w2-persample-timeout    TIMEOUT   00:02:11          8      0:0",
        "=>> PBS: job killed: walltime 3632 exceeded limit 3600",
        "Job exceeded its walltime limit. Job was aborted",
        "MOAB_INFO:  job exceeded wallclock limit",
        "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
        "Warning  DeadlineExceeded  2m  job-controller  Job was active longer than specified deadline",
    )
    misses = (
        "RuntimeError: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
        "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2023-01-05T07:00:11 ***",
    )
    no_fault_yet = "the strike time-limit lets one pass: the job saves and exits, and nobody is at fault"


class Cancelled(Cause, id="AR508"):
    """Somebody cancelled the job.

    ## What it means
    A signal came from outside: `allranks cancel`, `scancel`, Ctrl-C, a terminal that was closed, or a script that
    stops jobs. No time limit, preemption or lost node is reported as its reason.

    ## Why it breaks the job
    All ranks are told to exit. A line `*** STEP ... CANCELLED AT ... ***` alone proves less: `srun --kill-on-bad-exit`
    ends a step with the same words after one of its tasks failed (`srun: error: node03: task 5: Exited with exit code
    1`). Then that task is the cause.

    ## Example
    From a job that its owner cancelled:

        slurmstepd: error: *** JOB 524547 ON ault43 CANCELLED AT 2024-10-09T23:20:53 ***

    ## Fix
    Find out who cancelled it. After `allranks cancel`, cancel.log in the run directory has the name; sacct shows the
    uid ("CANCELLED by 1001").

        sacct -j JOB -X --format=JobID,State%30,End,Elapsed,ExitCode

    If the run ended when a terminal closed, start it with sbatch or in tmux. `nohup` alone does not keep torchrun
    alive, because torchrun handles SIGHUP itself.

    ## Source
    SLURM, src/slurmd/slurmstepd/req.c, src/srun and src/salloc; PyTorch 2.13,
    torch/distributed/elastic/agent/server/api.py (read 2026-11-21). `DUE to SIGNAL`, and what LSF and mpirun say, is
    from public logs. sacct(1), "Job state codes": https://slurm.schedmd.com/sacct.html (not checked again).
    """

    message = "somebody cancelled the job"
    told = "the job was ended from outside: by allranks cancel, scancel, Ctrl-C, or a closed terminal"
    fix = (
        "if nobody cancelled it, look at what failed before it; sacct -j JOB -X --format=JobID,State%30,End shows who "
        "cancelled it, if the cluster keeps accounting"
    )
    exit_code = Exit.SETUP
    traits = frozenset({Trait.ENDS_FROM_OUTSIDE, Trait.REPORTED_BY_WATCHERS})
    signs = (
        Sign(
            r"\bJOB [0-9_+]+(?: ON [^ ]{1,80})? CANCELLED AT [0-9T:-]+ \*\*\*", Role.LIKELY, _NOBODY, Confidence.LIKELY
        ),
        Sign(
            r"\bSTEP [0-9_+.]+(?: ON [^ ]{1,80})? CANCELLED AT [0-9T:-]+ \*\*\*",
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
        Sign(r"CANCELLED AT [0-9T:-]+ DUE to SIGNAL ", Role.LIKELY, _NOBODY, Confidence.LIKELY),
        # Of `allranks cancel`, which leaves cancel.log in the run directory.
        Sign(r"allranks cancel: (?P<who>[^ ]{1,80} on [^ ]{1,80}) cancelled the job", blames=_NOBODY),
        # The last line of `allranks run` (launch/end.py).
        Sign(
            r"allranks: (?P<signal>SIGINT|SIGHUP|SIGQUIT) after [0-9]+ s: all workers here have ended", blames=_NOBODY
        ),
        Sign(
            r"allranks: (?P<signal>SIGTERM) after [0-9]+ s: all workers here have ended",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
        Sign(r"CANCELLED by (?P<uid>[0-9]+)", blames=_NOBODY),
        Sign(r"JobState=CANCELLED", blames=_NOBODY),
        Sign(r"srun: sending Ctrl-C to ", blames=_NOBODY),
        Sign(r"(?:srun|salloc): Force Terminated ", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        Sign(r"srun: forcing job termination", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        Sign(r"Job allocation [0-9]+ has been revoked", Role.LIKELY, _NOBODY, Confidence.LIKELY),
        Sign(
            r"Received Signals\.(?P<signal>SIGHUP|SIGINT|SIGQUIT) death signal, shutting down workers",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"Received (?P<signal>1|2|3) death signal, shutting down workers", Role.LIKELY, _NOBODY, Confidence.LIKELY
        ),
        Sign(
            r"Received (?:Signals\.SIGTERM|15|SIGTERM) death signal, shutting down workers",
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"SignalException: Process .{1,20} got signal: (?P<signal>1|2|3)\b", Role.LIKELY, _NOBODY, Confidence.LIKELY
        ),
        Sign(r"SignalException: Process .{1,20} got signal: 15\b", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        Sign(r"\[rank: [0-9]+\] Received SIGTERM: 15", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        Sign(r"mpirun: killing job\.\.\.", Role.LIKELY, _NOBODY, Confidence.LIKELY),
        Sign(r"KILLED AT [0-9T:-]+ WITH SIGNAL (?P<signal>[0-9]+)", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        Sign(r"TERM_OWNER: job killed by owner", blames=_NOBODY),
    )
    hits = (
        "slurmstepd: error: *** JOB 524547 ON ault43 CANCELLED AT 2024-10-09T23:20:53 ***",
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2023-01-05T07:00:11 DUE to SIGNAL Terminated ***",
        "2026-11-23T15:26:05 allranks cancel: ada on login1 cancelled the job",
        "slurmd[n3]: error: *** JOB 9 CANCELLED AT 2013-10-09T23:20:53 ***",
        "slurmstepd: error: *** STEP 524547.1 ON ault43 CANCELLED AT 2024-10-09T23:20:53 ***",
        "allranks: SIGINT after 7 s: all workers here have ended; output in runs/3/attempt_0/vm",
        "allranks: SIGTERM after 8 s: all workers here have ended; output in runs/3/attempt_0/vm",
        "712854             train        gpu CANCELLED by 1001  00:10:02",
        "   JobState=CANCELLED Reason=None Dependency=(null)",
        "srun: sending Ctrl-C to StepId=712854.0",
        "srun: Force Terminated job 32779",
        "srun: forcing job termination",
        "salloc: Job allocation 225 has been revoked.",
        "WARNING:torch.distributed.elastic.agent.server.api:Received Signals.SIGHUP death signal, shutting down "
        "workers",
        "WARNING:torch.distributed.elastic.agent.server.api:Received 2 death signal, shutting down workers",
        "W0325 10:34:07.5 304 torch/distributed/elastic/agent/server/api.py:739] Received Signals.SIGTERM death "
        "signal, "
        "shutting down workers",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 3045566 got signal: 2",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 3045566 got signal: 15",
        "[rank: 0] Received SIGTERM: 15",
        "mpirun: killing job...",
        "slurmd[node1-130-06]: *** STEP 657040.1 KILLED AT 2014-08-12T12:59:07 WITH SIGNAL 9 ***",
        "TERM_OWNER: job killed by owner.",
    )
    misses = (
        "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2023-01-05T07:00:11 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2023-01-05T07:00:11 DUE TO PREEMPTION ***",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 3494 closing signal SIGTERM",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    )
    no_fault_yet = "the strike cancelled ends a job on purpose, which is no fault"


class CrashLoop(Cause, id="AR509"):
    """The job was restarted again and again, and failed each time.

    ## What it means
    torchrun, SLURM or Kubernetes restarted the workers after a failure until no attempt was left. The restarts are not
    the cause: the same failure returned, and it appears in the first attempt as well as in the last.

    ## Why it breaks the job
    Each attempt costs the time from its start to the failure. Errors of later attempts (a port still in use, a
    half-written checkpoint) hide the first error.

    ## Example
    From torch 2.13, the last of three restarts:

        INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 1/3 attempts left; will restart worker group

    ## Fix
    Read the first attempt (`attempt_0/RANK/stderr.log` of torchrun), and run without restarts until it is fixed:

        torchrun --max-restarts=0 --log-dir=logs --tee=3 train.py

    If SLURM holds the job, `scontrol show job JOB` prints JobHoldMaxRequeue. Run `scontrol release JOB` after the fix.

    ## Source
    PyTorch 2.13, torch/distributed/elastic/agent/server/api.py, _invoke_run; SLURM, the names of a job's reasons (read
    2026-11-21). MaxBatchRequeue: https://slurm.schedmd.com/slurm.conf.html. Kubernetes, "Pod lifecycle":
    https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/. These two pages were not checked again.
    """  # noqa: E501  (a real line)

    message = "the job was restarted until no attempt was left"
    told = "the job was restarted until no attempt was left; the first attempt's error is the one to read"
    fix = "read the error of the first attempt, and run without restarts until it is fixed: --max-restarts=0"
    also = ("AR602",)
    exit_code = Exit.SETUP
    traits = frozenset({Trait.REPORTED_BY_WATCHERS})
    signs = (
        Sign(
            r"Worker group (?:FAILED|UNHEALTHY)\. 1/(?:[2-9]|[1-9][0-9]+) attempts left",
            Role.VICTIM,
            _NOBODY,
            Confidence.UNDECIDED,
        ),
        Sign(r"Job not requeued because: preempted too many times", blames=_NOBODY),
        Sign(r"JobHoldMaxRequeue", blames=_NOBODY),
        Sign(r"launch failed requeued held", blames=_NOBODY),
        Sign(r"CrashLoopBackOff", blames=_NOBODY),
        Sign(r"Back-off restarting failed container", blames=_NOBODY),
        Sign(r"Job has reached the specified backoff limit", Role.VICTIM, _NOBODY, Confidence.LIKELY),
        Sign(r"[Rr]eached max restarts", Role.VICTIM, _NOBODY),
    )
    hits = (
        "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 1/3 attempts left; will "
        "restart "
        "worker group",
        "submitit.core.utils.UncompletedJobError: Job not requeued because: preempted too many times.",
        "   JobState=PENDING Reason=JobHoldMaxRequeue Dependency=(null)",
        "  77  gpu  train  alice  PD  0:00  2 (launch failed requeued held)",
        "worker-3   0/1     CrashLoopBackOff   7 (2m ago)   19m",
        "Warning  BackOff  3m  kubelet  Back-off restarting failed container pytorch in pod worker-3",
        "Warning  BackoffLimitExceeded  2m  job-controller  Job has reached the specified backoff limit",
        "[Tue Mar  4 03:12:44 2025] Reached max restarts (5), stopping",
    )
    misses = (
        "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 3/3 attempts left; will "
        "restart "
        "worker group",
        "  max_restarts     : 3",
    )
    no_fault_yet = "every fault that returns after a restart produces one"
