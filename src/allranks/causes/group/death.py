"""Which process died by a signal while the job ran, as launchers, MPI, SLURM and the kernel report it."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NOBODY = Blames.NOBODY
_NAMED = Blames.NAMED

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_CRASH_WORDS = r"(?:Segmentation fault|Bus error|Illegal instruction|Floating point exception)"

# Exit codes, as subprocess (-11) and shells (139) give them; the signal's number; its name; what srun calls it.
_CRASHED = (r"(?:-(?:4|5|7|8|11)|13[2356]|139)", "(?:4|5|7|8|11)", "(?:ILL|TRAP|BUS|FPE|SEGV)", _CRASH_WORDS)
_KILLED = ("(?:-9|137)", "9", "KILL", "Killed")
_ENDED = ("(?:-6|-15|134|143)", "(?:6|15)", "(?:ABRT|TERM)", "Aborted")


def _forms(code: str, number: str, name: str, words: str) -> Iterator[str]:
    """Yield how each launcher says that a process ended so."""
    # torchrun: while it runs, and in its summary
    yield (
        rf"exitcode *: (?P<code>{code})\b(?:\) local_rank: (?P<local_rank>[0-9]+))?"
        r"(?: \(pid: (?P<pid>[0-9]+)\))?"
    )
    yield rf"Signal (?P<signal>{number}) \(SIG[A-Z]+\) received by PID (?P<pid>[0-9]+)"
    yield rf"exits with return code = (?P<code>{code})\b"  # DeepSpeed
    yield rf"Child process with PID (?P<pid>[0-9]+) terminated with code (?P<code>{code})\b"  # Lightning
    yield rf"process (?P<rank>[0-9]+) terminated with signal SIG(?P<signal>{name})\b"  # torch.multiprocessing
    yield (
        rf"noticed that process rank (?P<rank>[0-9]+) with PID (?:(?P<pid>[1-9][0-9]*)|[^ ]{{1,20}}) "
        rf"on node (?P<node>{_NAME}) exited on signal "
        rf"(?P<signal>{number})\b"
    )
    yield rf"KILLED BY SIGNAL: (?P<signal>{number})\b"  # Intel MPI
    yield rf"THE EXIT STRING: [A-Za-z ]{{4,40}} \(signal (?P<signal>{number})\)"  # MPICH
    yield rf"= {{1,8}}EXIT CODE: (?P<signal>{number})\b"  # MPICH, where the next line is cut
    yield rf"Process (?P<rank>[0-9]+) exit with status code (?P<code>{code})\b"  # horovodrun
    yield rf"error: (?P<node>{_NAME}): (?P<thing>tasks? [0-9,-]+): {words}"  # srun
    # srun, of a shell or a container that passes it on
    yield rf"error: (?P<node>{_NAME}): (?P<thing>tasks? [0-9,-]+): Exited with exit code (?P<code>{code})\b"
    yield rf"Container rank (?P<rank>[0-9]+) status failed cmd .+ code (?P<code>{code}) log "  # Paddle
    # Composer, older and newer.
    yield rf"Rank (?P<rank>[0-9]+) crashed with exit code (?P<code>{code})\b"
    yield rf"Global rank (?P<rank>[0-9]+) \(PID (?P<pid>[0-9]+)\) exited with code (?P<code>{code})\b"
    yield rf"(?P<node>{_NAME}): rank (?P<rank>[0-9]+) died from signal (?P<signal>{number})\b"  # PALS, HPE's
    yield rf"get_exit_code task (?P<rank>[0-9]+) died by signal:? (?P<signal>{number})\b"  # slurmstepd
    # SGLang's watcher of its children.
    yield rf"Child process unexpectedly failed with exitcode=(?P<code>{code})\b\. pid=(?P<pid>[0-9]+)"
    # glog, in the process itself: Paddle, wav2letter.
    yield rf"\*\*\* SIG(?P<signal>{name}) \(@0x[0-9a-f]+\) received by PID (?P<pid>[0-9]+)"
    # Python's subprocess: torch.distributed.launch of torch before 1.9, accelerate, DeepSpeed.
    yield rf"died with <Signals\.SIG(?P<signal>{name}): [0-9]+>"


class DeadRank(Cause, id="AR407"):
    """A rank died or exited, and the others lost it in a collective.

    ## What it means
    A signal that allranks did not send killed the process, or the process exited before the others had finished. If a
    worker of its `DataLoader` is killed, the rank fails too, and the message names that worker. The errors of the other
    ranks (connection closed, timeout) are consequences.

    ## Why it breaks the job
    A collective needs every rank. With NCCL, the surviving ranks wait until the watchdog's timeout, 10 minutes by
    default. Then each reports its own timeout: hundreds of ranks, none of them at fault. The dead process reports
    nothing. With Gloo, the error appears at once and names a neighbor.

    ## Example
    From hpcaitech/ColossalAI#3514, torchrun on the node of the dead rank; -9 is SIGKILL, most often out of memory:

        ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 812917) of binary: /opt/conda/bin/python

    The same from mpirun (openai/glow#18) and srun:

        mpirun noticed that process rank 0 with PID 19474 on node lhx-910 exited on signal 11 (Segmentation fault).
        srun: error: node03: task 3: Segmentation fault (core dumped)

    ## Fix
    Find out on its node how it ended:

        dmesg -T | grep -iE 'killed process|segfault'; sacct -j JOB --format=JobID,NodeList,State,ExitCode,MaxRSS

    - SIGKILL: usually memory. Use fewer data loader workers, a smaller batch, or more `--mem`.
    - SIGSEGV, SIGABRT: a crash in native code. Under `allranks run`, the report has the Python stack of the crash; under
      other launchers, run with PYTHONFAULTHANDLER=1.
    - SIGBUS: /dev/shm is full.
    - Exit code 0: the rank finished before the others. Every rank must run the same number of steps.

    ## Source
    signal(7). PyTorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, kProcessGroupNCCLDefaultTimeout (2.13);
    torch/distributed/elastic/multiprocessing, errors and api.py (2.13), torch/multiprocessing/spawn.py. Lightning,
    strategies/launchers (2.5). DeepSpeed, launcher/launch.py (0.18). Open MPI, mpirun's help texts.
    SLURM, srun's launch.c, once launch_slurm.c. All read 2026-11-21.
    https://github.com/openai/glow/issues/18, https://github.com/horovod/horovod/issues/585 (read 2026-11-21).
    https://github.com/hpcaitech/ColossalAI/issues/3514 (read 2026-11-21).
    """  # noqa: E501  (a real line)

    aliases = ("MN3",)
    message = "{what}"
    told = "a process of the job died, and the others lost their connection to it"
    fix = "on {node}: dmesg -T | grep -iE 'killed process|segfault', and read the end of the rank's .err"
    exit_code = Exit.USER_CODE
    traits = frozenset({Trait.ENDS_BY_ITSELF, Trait.EXPLAINS_A_KILL, Trait.REPORTED_BY_WATCHERS})
    also = ("AR008", "AR508")
    signs = (
        # A crash is its own doing.
        *(Sign(form, blames=_NAMED) for form in _forms(*_CRASHED)),
        # SIGKILL is somebody else's: the kernel out of memory, an admin, a scheduler.
        *(Sign(form, Role.LIKELY, _NAMED, Confidence.UNDECIDED) for form in _forms(*_KILLED)),
        # SIGABRT is how a watchdog and an uncaught exception end a process; SIGTERM is how the others are ended.
        *(Sign(form, Role.VICTIM, _NAMED, Confidence.UNDECIDED) for form in _forms(*_ENDED)),
        # The signal stands on the next line, where a mail or a terminal has cut it.
        Sign(
            rf"noticed that process rank (?P<rank>[0-9]+) with PID (?P<pid>[0-9]+) on node (?P<node>{_NAME})"
            r"(?: exited(?: +on)?)?$",
            Role.LIKELY,
            _NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(rf"(?P<node>{_NAME}): shepherd died from signal [0-9]", Role.LIKELY, _NAMED, Confidence.UNDECIDED),
        Sign(rf"Fatal Python error: {_CRASH_WORDS}"),
        Sign(rf"\[(?P<node>{_NAME}):(?P<pid>[0-9]+)\] Signal: {_CRASH_WORDS} \(", blames=_NAMED),
        Sign(
            rf"\[(?P<node>{_NAME}):(?P<pid>[0-9]+) ?(?::[0-9]+){{1,2}}\] Caught signal (?:4|7|8|11) \(", blames=_NAMED
        ),
        Sign(r"\[(?P<pid>[0-9]+)\]: segfault at [0-9a-f]+ ip ", blames=_NAMED),
        # The shell, of what its script ran.
        Sign(r"line [0-9]+: +(?P<pid>[0-9]+) Segmentation fault", blames=_NAMED),
        Sign(r"line [0-9]+: +(?P<pid>[0-9]+) Bus error ", blames=_NAMED),
        Sign(r"line [0-9]+: +(?P<pid>[0-9]+) Killed +", Role.LIKELY, _NAMED, Confidence.UNDECIDED),
        Sign(r"line [0-9]+: +(?P<pid>[0-9]+) Aborted +", Role.VICTIM, _NAMED, Confidence.UNDECIDED),
        Sign(r"Segmentation fault \(core dumped\)", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Aborted +\(core dumped\)", Role.VICTIM, confidence=Confidence.UNDECIDED),
        Sign(r"terminate called (?:after throwing|without an active)", Role.VICTIM, confidence=Confidence.UNDECIDED),
        Sign(
            r"(?:Worker IP address: (?P<address>[0-9.]+) Worker port: [0-9]+ )?Worker PID: (?P<pid>[0-9]+) "
            r"Worker exit type: (?:SYSTEM_ERROR|NODE_DIED)",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"Worker exit type: SYSTEM_ERROR", Role.LIKELY, _NOBODY, Confidence.LIKELY),
        # NCCL's RAS, of processes that its own network lost, and of ranks that did not answer.
        Sign(
            r"job process(?:es are| is) considered dead \(unreachable via the RAS network\)",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"Process (?P<pid>[0-9]+) on node (?P<node>[^ ]{1,200}) managing GPU",
            Role.CONTEXT,
            _NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"Missing communicator data from [0-9]+ rank", Role.LIKELY, _NOBODY, Confidence.UNDECIDED),
        # A data loader's process that crashed takes its rank along; Killed is AR008's, Bus error AR607's.
        Sign(
            r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[0-9]+)\) is killed by signal: "
            r"(?:Segmentation fault|Aborted|Illegal instruction|Floating point exception)",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # JAX's coordination service.
        Sign(
            r"Task /job:[a-z_]{1,40}/replica:[0-9]+/task:(?P<rank>[0-9]+) heartbeat timeout",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
        ),
        # vLLM's executors about their workers.
        Sign(
            r"Worker (?P<thing>[A-Za-z][\w-]*) pid (?P<pid>[0-9]+) died, exit code: (?P<code>-(?:4|5|7|8|9|11))\b",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"Worker (?P<thing>[A-Za-z][\w-]*) pid (?P<pid>[0-9]+) died, exit code: ",
            Role.VICTIM,
            _NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"Worker proc (?P<thing>[A-Za-z][\w-]*) died unexpectedly, shutting down executor",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
        ),
        Sign(
            r"Worker ?[Pp]roc rank=?\[?(?P<ranks>[0-9, ]+)\]? died unexpectedly",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
        ),
        # Who is sent a signal still lives: the one that is missing among them died first.
        Sign(r"Sending process (?P<pid>[0-9]+) closing signal SIGTERM", Role.VICTIM, _NOBODY, Confidence.UNDECIDED),
        Sign(
            r"Horovod has been shut down\. This (?:was|has been) caused by an exception on one of the rank",
            Role.VICTIM,
            _NOBODY,
            Confidence.LIKELY,
        ),
        # The summaries of torchrun and MPICH, around the line that says how it ended.
        Sign(
            r"rank *: (?P<rank>[0-9]+) \(local_rank: (?P<local_rank>[0-9]+)\)",
            Role.CONTEXT,
            _NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(rf"host      : (?P<node>{_NAME})", Role.CONTEXT, _NAMED, Confidence.UNDECIDED),
        Sign(
            rf"(?:RANK (?P<rank>[0-9]+) )?PID (?P<pid>[0-9]+) RUNNING AT (?:[a-z_][a-z0-9_-]*@)?(?P<node>{_NAME})",
            Role.CONTEXT,
            _NAMED,
            Confidence.UNDECIDED,
        ),
    )
    hits = (
        "coordination_service.cc:954] /job:jax_worker/replica:0/task:37 has been set to ERROR in coordination service: "
        "UNAVAILABLE: Task /job:jax_worker/replica:0/task:37 heartbeat timeout. This indicates that the remote task "
        "has failed, got preempted, or crashed unexpectedly.",
        "  2 job processes are considered dead (unreachable via the RAS network)",
        "  1 job process is considered dead (unreachable via the RAS network)",
        "  Process 3487984 on node 172.16.64.213 managing GPU 5",
        "  Missing communicator data from 1 rank",
        "RuntimeError: DataLoader worker (pid 190781) is killed by signal: Segmentation fault. ",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 812917) of "
        "binary: /data/chenhao/anaconda3/envs/ColossalAI-Chat/bin/python",
        "E1223 05:18:02.971000 3304089 site-packages/torch/distributed/elastic/multiprocessing/api.py:882] failed "
        "(exitcode: -11) local_rank: 0 (pid: 3304209) of binary: /root/miniconda3/envs/qat-env/bin/python3.12",
        "  exitcode  : -6 (pid: 3309)",
        *(
            line.format(code)
            for code in (-6, -9, -11)
            for line in (
                "Container rank 0 status failed cmd ['python', '-u', 'train.py'] code {} log ./log/workerlog.0",
                "ERROR:composer.cli.launcher:Rank 2 crashed with exit code {}.",
                "ERROR:composer.cli.launcher:Global rank 0 (PID 208865) exited with code {}",
                "[2025-07-28 11:07:56] Child process unexpectedly failed with exitcode={}. pid=1926765",
            )
        ),
        *(
            f"subprocess.CalledProcessError: Command '['python3', '-u', 'train.py']' died with <Signals.{signal}>."
            for signal in ("SIGSEGV: 11", "SIGKILL: 9", "SIGABRT: 6")
        ),
        "  [SignalInfo: *** SIGSEGV (@0x7ffff0) received by PID 12415 (TID 0x7f1e317fa700) from PID 8388592 ***]",
        "*** SIGKILL (@0x3e8) received by PID 12415 (TID 0x7f1e317fa700) from PID 1000; stack trace: ***",
        "*** SIGABRT (@0x3e800000a1f) received by PID 12415 (TID 0x7f1e317fa700) from PID 1000; stack trace: ***",
        "  traceback : Signal 9 (SIGKILL) received by PID 3309",
        '  msg: "Signal 11 (SIGSEGV) received by PID 1234"',
        "  traceback : Signal 6 (SIGABRT) received by PID 77",
        "[2023-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py', "
        "'--local_rank=0'] exits with return code = -9",
        "[2023-07-20 15:45:13,982] [ERROR] [launch.py:321:sigkill_handler] ['python3'] exits with return code = -7",
        "[2023-07-20 15:45:13,982] [ERROR] [launch.py:321:sigkill_handler] ['python3'] exits with return code = -6",
        "mpiexec noticed that process rank 0 with PID 19474 on node lhx-910 exited on signal 11 (Segmentation fault).",
        "mpirun noticed that process rank 0 with PID 77967 on node n342 exited on",
        "x3001c0s1b0n0: rank 7 died from signal 11",
        "x3001c0s1b0n0: rank 7 died from signal 9",
        "x3001c0s1b0n0: rank 7 died from signal 15",
        "slurmstepd: error: get_exit_code task 0 died by signal: 11",
        "slurmstepd: error: get_exit_code task 0 died by signal: 9",
        "slurmstepd: error: get_exit_code task 0 died by signal: 6",
        "x3001c0s1b0n0: shepherd died from signal 9",
        "mpirun noticed that process rank 1 with PID 0 on node fv-az1542-52 exited on signal 6 (Aborted).",
        "prterun noticed that process rank 2 with PID 4123 on node n3 exited on signal 9 (Killed).",
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGSEGV",
        "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGABRT",
        "Child process with PID 4123 terminated with code -9. Forcefully terminating all other processes",
        "Child process with PID 4123 terminated with code -11. Forcefully terminating all other processes",
        "Child process with PID 4123 terminated with code -6. Forcefully terminating all other processes",
        "srun: error: node03: task 3: Segmentation fault (core dumped)",
        "srun: error: n07: tasks 0-3: Killed",
        "srun: error: n12: tasks 4-7: Exited with exit code 134",
        "srun: error: n12: task 4: Exited with exit code 137",
        "srun: error: n12: task 4: Exited with exit code 139",
        "srun: error: n07: tasks 0,2: Aborted (core dumped)",
        "=   KILLED BY SIGNAL: 11 (Segmentation fault)",
        "Process 3 exit with status code 139.",
        "Process 0 exit with status code 137.",
        "Process 2 exit with status code 134.",
        "Aborted (core dumped)",
        "terminate called after throwing an instance of 'std::runtime_error'",
        "=   KILLED BY SIGNAL: 9 (Killed)",
        "=   KILLED BY SIGNAL: 6 (Aborted)",
        "=   RANK 0 PID 5490 RUNNING AT gn59",
        "=   EXIT CODE: 9",
        "=   EXIT CODE: 11",
        "=   EXIT CODE: 6",
        "=   PID 2671 RUNNING AT master-node00",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Aborted (signal 6)",
        "Fatal Python error: Segmentation fault",
        "[1,12]<stderr>:[n-profile-16:17086] Signal: Segmentation fault (11)",
        "[nmyjs-202-75:40360:0] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x56539)",
        "python3[4123]: segfault at 8 ip 00007f2b533921f7 sp 00007ffd5 error 4 in libc-2.27.so[7f2b5335c000+1e7000]",
        "/var/spool/slurmd/job123/slurm_script: line 31:  4123 Segmentation fault      (core dumped) python train.py",
        "train.sh: line 12:  4123 Bus error               (core dumped) python train.py",
        "train.sh: line 12:  4123 Killed                  python train.py",
        "train.sh: line 12:  4123 Aborted                 (core dumped) python train.py",
        "(raylet) Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error",
        "Worker IP address: 10.0.7.57 Worker port: 10046 Worker PID: 89513 Worker exit type: SYSTEM_ERROR Worker exit "
        "detail: Worker unexpectedly exits with a connection error code 2. End of file.",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 812914 closing signal SIGTERM",
        "AbortedError (see above for traceback): Horovod has been shut down. This was caused by an exception on one of "
        "the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished",
        "ERROR 07-26 14:50:35 multiproc_worker_utils.py:120] Worker VllmWorkerProcess pid 214281 died, exit code: -11",
        "ERROR 07-26 14:50:35 multiproc_worker_utils.py:120] Worker VllmWorkerProcess pid 214281 died, exit code: -15",
        "RayWorkerProc rank=[0] died unexpectedly, shutting down executor.",
        "ERROR 07-04 17:35:16 [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly, shutting down "
        "executor.",
        "  rank      : 7 (local_rank: 7)",
        "  host      : f5735d9ffd4f",
    )
    misses = (
        "E0213 12:07:20.086000 870572 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) "
        "local_rank: 0 (pid: 876053) of binary: /usr/bin/python3.11",
        "  exitcode  : 1 (pid: 3309)",
        "  exitcode  : 9 (pid: 3309)",
        "srun: error: nid006900: task 1: Terminated",
        "srun: error: nid006024: task 0: Out Of Memory",
        "srun: error: node03: task 3: Exited with exit code 1",
        "[2024-03-20 20:31:29,269] [ERROR] [launch.py:321:sigkill_handler] ['python'] exits with return code = 1",
        "[2025-12-18 20:27:22,783] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 748089",
    )
