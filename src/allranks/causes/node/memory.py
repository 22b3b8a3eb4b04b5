"""Did a process end because the node, or its cgroup, ran out of memory?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class HostOomKill(Cause, id="AR008"):
    """A process was killed because the node ran out of memory.

    ## What it means
    The memory of the machine, or the job's share of it, was used up, and the kernel killed a process with SIGKILL. This
    is host memory, not GPU memory.

    ## Why it breaks the job
    The killed process prints nothing: its log just stops. The other ranks wait for it or lose their connection, and
    report themselves. It usually happens late: when one rank gathers a checkpoint, when data loaders have touched all
    their data, or at the end of an epoch. An exit code of -9 or 137 alone is no proof, because anybody may have sent
    the signal.

    ## Example
    From a job on an HPE cluster; the lines are from slurmstepd, srun and the kernel:

        slurmstepd: error: Detected 1 oom_kill event in StepId=8538204.0. Some of the step tasks have been OOM Killed.
        srun: error: nid006024: task 0: Out Of Memory
        Memory cgroup out of memory: Killed process 21044 (python3) total-vm:812345678kB, anon-rss:263456789kB

    ## Fix
    Check whether the kernel killed it, and how much memory was used:

        ssh NODE 'dmesg -T | grep -i -e oom -e "out of memory"'
        sacct -j JOB --format=JobID,State,ReqMem,MaxRSS,NodeList

    Request all memory of the node: `#SBATCH --mem=0`; in Kubernetes raise `resources.limits.memory`. Or use less: fewer
    data loader workers, sharded checkpoints instead of the whole state on one rank, `low_cpu_mem_usage=True`, and
    memory-mapped data.

    ## Source
    Linux, mm/oom_kill.c; SLURM, its cgroup plugin, its accounting of memory, and srun's launch of tasks; Kubernetes,
    pkg/kubelet/eviction; MPICH, mpiexec of Hydra; PyTorch 2.13, torch/distributed/elastic/multiprocessing (read
    2026-11-21). What LSF, systemd, Intel MPI and Ray say is from public logs. Ray, "Out-Of-Memory Prevention":
    https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html.
    """

    message = "the kernel killed a process: the node, or the job's share of it, ran out of memory"
    fix = (
        "request more (sbatch --mem=0 is all of the node), or use less: fewer data loader workers, sharded checkpoints"
    )
    told = "a process was killed, most probably by the kernel: the host ran out of memory"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.EXPLAINS_A_KILL, Trait.REPORTED_BY_WATCHERS})
    also = ("AR407",)
    signs = (
        # SLURM and other schedulers say so
        Sign(r"Detected [0-9]+ oom[-_]kill event"),
        Sign(
            r"srun: error: (?P<node>[A-Za-z0-9_.,\[\]-]+): (?P<thing>tasks? [0-9,\[\]-]+): Out Of Memory",
            blames=Blames.NAMED,
        ),
        Sign(r"exceeded memory limit \([0-9]+ > [0-9]+\)"),
        Sign(r"Exceeded (?:job|step) memory limit", role=Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"[ |=:(]OUT_OF_ME(?:MORY|\+)", blames=Blames.NOBODY, confidence=Confidence.LIKELY),
        Sign(r"PBS: job killed: [pv]{0,2}mem [0-9]+kb exceeded limit"),
        Sign(r"TERM_MEMLIMIT: job killed after reaching LSF memory usage limit"),
        # The kernel, systemd, Kubernetes
        Sign(r"ut of memory: Kill(?:ed)? process (?P<pid>[0-9]+) \("),
        Sign(r"Killed process (?P<pid>[0-9]+) \([^)]{1,40}\),? (?:UID [0-9]+, )?total-vm:"),
        Sign(r"oom-kill:constraint=[A-Z_]{4,40},.{0,400}task=[^,]{1,40},pid=(?P<pid>[0-9]+)"),
        Sign(r" invoked oom-killer: ", role=Role.LIKELY),
        Sign(r"has been killed by the OOM killer"),
        Sign(r"OOMKilled(?:$|[^A-Za-z\"])"),
        Sign(r"\"OOMKilled\": ?true"),
        Sign(r"The node was low on resource: memory"),  # Kubernetes evicts
        Sign(r"The node had condition: \[MemoryPressure\]", blames=Blames.NOBODY),
        Sign(r"Pod The node had condition: \[MemoryPressure\]"),
        # Who lost it knows
        Sign(
            r"[1-9][0-9]* Workers \(tasks / actors\) killed due to memory pressure \(OOM\)"
            r"(?:.{0,160}IP: (?P<node>[0-9.]+)\))?",
            blames=Blames.NAMED,
        ),
        Sign(r"Task was killed due to the node running low on memory"),
        Sign(
            r"Memory on the node \(IP: (?P<node>[0-9a-f.:]{3,45}), .{1,300}pid=(?P<pid>[0-9]+), memory used=.{1,200} "
            r"exceeds the memory usage threshold",
            blames=Blames.NAMED,
        ),
        Sign(r"The worker may have exceeded K8s pod memory limits", confidence=Confidence.LIKELY),
        Sign(
            r"The process is killed by SIGKILL by OOM killer due to high memory usage",
            Role.VICTIM,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[0-9]+)\) (?:is|was) killed by signal: Killed",
            confidence=Confidence.LIKELY,
        ),
        Sign(r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)", confidence=Confidence.LIKELY),
        Sign(r"MemoryError: Unable to allocate ", role=Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"\[Errno 12\] Cannot allocate memory", role=Role.LIKELY, confidence=Confidence.LIKELY),
        # SIGKILL, and nobody says whose
        Sign(r"Signal 9 \(SIGKILL\) received by PID (?P<pid>[0-9]+)", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"exitcode {0,4}: -9\b(?: \(pid: (?P<pid>[0-9]+)\))?",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"Container rank (?P<rank>[0-9]+) status failed cmd .+ code -9 log ",  # Paddle
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"lobal rank (?P<rank>[0-9]+) \(PID (?P<pid>[0-9]+)\) exited with code -9\b",  # Composer
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"failed \(exitcode: -9\) local_rank: (?P<local_rank>[0-9]+) \(pid: (?P<pid>[0-9]+)\)",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"process (?P<local_rank>[0-9]+) terminated with signal SIGKILL", Role.LIKELY, confidence=Confidence.LIKELY
        ),
        Sign(r"exits with return code = -9\b", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"died with <Signals\.SIGKILL: 9>", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"process rank (?P<rank>[0-9]+) with PID (?:(?P<pid>[1-9][0-9]*)|[^ ]{1,20}) on node (?P<node>[^ ]{1,120}) "
            r"exited on signal 9 ",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"KILLED BY SIGNAL: 9 \(Killed\)", Role.LIKELY, Blames.NOBODY, Confidence.LIKELY),
        Sign(r"THE EXIT STRING: Killed \(signal 9\)", Role.LIKELY, Blames.NOBODY, Confidence.LIKELY),
        Sign(
            r"PID (?P<pid>[0-9]+) RUNNING AT (?:[a-z_][a-z0-9_-]*@)?(?P<node>[A-Za-z0-9_][A-Za-z0-9_.-]*)",
            Role.CONTEXT,
            Blames.NAMED,
        ),
        Sign(
            r"srun: error: (?P<node>[A-Za-z0-9_.,\[\]-]+): (?P<thing>tasks? [0-9,\[\]-]+): Killed",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(r"line [0-9]+: +(?P<pid>[0-9]+) Killed ", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"(?:Process (?P<rank>[0-9]+) exit with )?status code 137\b",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"exit code:? 137\b", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Exit Code: +137\b", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Exit code: +137\b", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"(?:^|>:|(?:it/s|s/it).{0,200}\])Killed\s*$", Role.LIKELY, confidence=Confidence.LIKELY
        ),  # the shell, of what it waited for
        # `worker:0 python process exited with code 137`: a task of TensorFlow's cluster.
        Sign(
            r"(?:(?P<thing>(?:worker|chief|ps|evaluator):[0-9]+) .{0,60})?exited with code 137\b",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"(?:^|[^A-Za-z.])MemoryError$", role=Role.LIKELY, confidence=Confidence.LIKELY),
    )
    hits = (
        "MemoryError",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=8538204.0. Some of the step tasks have been OOM "
        "Killed.",
        "  6%|###  | 3787/62565 [04:47<1:10:53, 13.82it/s]Killed",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.batch. Some of your processes may have been "
        "killed by the cgroup out-of-memory handler.",
        "srun: error: nid006024: task 0: Out Of Memory",
        "=>> PBS: job killed: mem 2097152kb exceeded limit 1048576kb",
        "slurmstepd: error: StepId=7.batch exceeded memory limit (734003200 > 52428800), being killed",
        "slurmstepd: error: Exceeded step memory limit at some point.",
        "6959634.0    omp_mem_t+              rc_admin          2 OUT_OF_ME+    0:125 ",
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
        "[98123.4] Out of memory: Kill process 21044 (python) score 912 or sacrifice child",
        "kernel: Memory cgroup out of memory: Killed process 21044 (python3) total-vm:812345678kB, anon-rss:1024kB",
        "kernel: Killed process 21044 (python3), UID 1001, total-vm:812345678kB, anon-rss:263456789kB, file-rss:0kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_0,mems_allowed=0-1,oom_memcg=/slurm/uid_1001/"
        "job_7,task_memcg=/slurm/uid_1001/job_7/step_0/task_0,task=python3,pid=21044,uid=1001",
        "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "user@1001.service: A process of this unit has been killed by the OOM killer.",
        "      Reason:       OOMKilled",
        '            "OOMKilled": true,',
        "2m  Warning  Evicted  pod/egg-0  The node had condition: [MemoryPressure].",
        "Warning  Evicted  2m  kubelet  The node was low on resource: memory. Container pytorch was using 61Gi",
        "Message:  Pod The node had condition: [MemoryPressure].",
        "(raylet) node_manager.cc:3040: 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers "
        "crashed "
        "due to other reasons at node (ID: 2c82620270df6b9dd7ae, IP: 172.31.183.172) over the last time period.",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "Memory on the node (IP: 10.0.0.7, ID: 2c0ca846c8a9) where the task (task ID: 76b2551f1683, name=fit, pid=812, "
        "memory used=0.05GB) was running was 219.41GB / 230.40GB (0.952289), which exceeds the memory usage threshold "
        "of 0.95. Ray killed this worker (ID: ba8468428945)",
        "Worker exits unexpectedly. Worker exits with an exit code None. The worker may have exceeded K8s pod memory "
        "limits.",
        "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory "
        "usage. (2) ray stop --force is called.",
        "RuntimeError: DataLoader worker (pid 3867) is killed by signal: Killed. ",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
        "numpy.core._exceptions.MemoryError: Unable to allocate 74.5 GiB for an array with shape (100000, 100000)",
        "OSError: [Errno 12] Cannot allocate memory",
        "  traceback : Signal 9 (SIGKILL) received by PID 79468",
        "  exitcode  : -9 (pid: 79468)",
        "Container rank 0 status failed cmd ['/usr/bin/python3', '-u', 'train.py'] code -9 log ./log/workerlog.0",
        "ERROR:composer.cli.launcher:Global rank 0 (PID 208865) exited with code -9",
        "exitcode: -9",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 79468) of "
        "binary: /usr/bin/python3",
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
        "[2025-12-18 20:27:22,783] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python3', 'train.py'] exits with "
        "return code = -9",
        "subprocess.CalledProcessError: Command '['python3', 'train.py']' died with <Signals.SIGKILL: 9>.",
        "mpirun noticed that process rank 3 with PID 2144 on node gpu-node-2 exited on signal 9 (Killed).",
        "=   KILLED BY SIGNAL: 9 (Killed)",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
        "=   PID 2671 RUNNING AT master-node00",
        "srun: error: node03: task 3: Killed",
        "/var/spool/slurmd/job18835145/slurm_script: line 46: 2113061 Killed                  python3 train.py",
        "Process 0 exit with status code 137.",
        "command terminated with exit code 137",
        "      Exit Code:    137",
        "Exit code: 137",
        "Killed",
        "worker-0 exited with code 137",
    )
    misses = (
        "srun: error: nid006900: task 1: Terminated",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 3494 closing signal SIGTERM",
        "(raylet) node_manager.cc:3040: 0 Workers (tasks / actors) killed due to memory pressure (OOM), 3 Workers "
        "crashed",
        "  exitcode  : -11 (pid: 3309)",
        '            "OOMKilled": false,',
    )
