"""Lines that show no cause by themselves, but that the readings of whole logs use.

A mark is a pattern like a sign (causes/cause.py) without a cause: a frame of a traceback, a line of torchrun's summary,
the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """One kind of line."""

    name: str
    scan: str
    """Pattern for hyperscan: like a sign's pattern, it contains a literal of six bytes or more."""
    exact: str = ""
    """Pattern that the cleaned line must match; empty: the same."""

    @property
    def pattern(self) -> str:
        """The exact pattern."""
        return self.exact or self.scan


MARKS = (
    # Python's tracebacks; the exception starts the line, unless another process wrote into it.
    Mark("traceback", r"Traceback \(most recent call last\)"),
    Mark(
        "frame",
        r'File "[^"]{1,400}", line [0-9]',
        r'File "(?P<file>[^"]{1,400})", line (?P<line>[0-9]+)(?:, in (?P<function>.{1,200}))?',
    ),
    Mark(
        "exception",
        r"(?:Error|Exception|Interrupt|Iteration|SystemExit|Exit)(?::|$|\r)",
        r"^(?:E\s+)?(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Iteration)"
        r"|Exception(?=: \S))"  # without a message, it is mp.spawn's, which only passes one on
        r"(?:: ?(?P<text>.*))?$",
    ),
    Mark("chained", r"(?:During handling of|The) (?:the )?above exception"),
    # An exception that ends nothing: in __del__, at exit, in a logger (Lib/logging/__init__.py, Python/errors.c).
    Mark("ignored", r"Exception ignored (?:in|on|while)\b|^--- Logging error ---"),
    # torchrun's summary of failures (torch/distributed/elastic/multiprocessing/errors/__init__.py, 1.9 to 2.13).
    Mark("failures", r"Root Cause \(first observed failure\):"),
    Mark("failure-time", r"time      : [0-9]{4}-", r"time      : (?P<when>\S+)"),
    Mark("failure-host", r"host      : [A-Za-z0-9]", r"host      : (?P<node>\S+)"),
    Mark(
        "failure-rank",
        r"rank      : [0-9]",
        r"rank      : (?P<rank>[0-9]+) \(local_rank: (?P<local_rank>[0-9]+)\)",
    ),
    Mark("failure-code", r"exitcode  : -?[0-9]", r"exitcode  : (?P<code>-?[0-9]+) \(pid: (?P<pid>[0-9]+)\)"),
    # Ranks that joined the store's barrier (torch/distributed/distributed_c10d.py, 1.9 to 2.0).
    Mark(
        "added-key",
        r"Added key: store_based_barrier_key:[0-9]",
        r"Added key: (?P<key>store_based_barrier_key:[0-9]+) to store for rank: (?P<rank>[0-9]+)",
    ),
    # The agent (torch/distributed/elastic/multiprocessing/api.py).
    Mark(
        "agent-failed",
        r"failed \(exitcode: -?[0-9]+\) local_rank: [0-9]",
        r"failed \(exitcode: (?P<code>-?[0-9]+)\) local_rank: (?P<local_rank>[0-9]+) \(pid: (?P<pid>[0-9]+)\)",
    ),
    # DeepSpeed, which names the command of the last worker whichever failed; torch.multiprocessing; Lightning.
    Mark("launcher-kills", r"Killing subprocess [0-9]", r"Killing subprocess (?P<pid>[0-9]+)"),
    Mark("launcher-failed", r"exits with return code = -?[0-9]", r"exits with return code = (?P<code>-?[0-9]+)"),
    # mpirun and horovodrun name it on the line before its exit code.
    Mark("launcher-names", r"Process name: \[\[[0-9]+,", r"Process name: \[\[[0-9]+,[0-9]+\],(?P<rank>[0-9]+)\]"),
    Mark(
        "launcher-names",
        r"Process name: [A-Za-z0-9]",
        r"Process name: (?P<node>[A-Za-z0-9_.-]+)\[(?P<local_rank>[0-9]+)\]",
    ),
    Mark(
        "launcher-failed",
        r": rank [0-9]+ exited with code [0-9]",
        r"(?P<node>[^\s:]+): rank (?P<rank>[0-9]+) exited with code (?P<code>[0-9]+)",
    ),
    Mark(
        "launcher-failed",
        r"MPI_ABORT was invoked on rank [0-9]",
        r"MPI_ABORT was invoked on rank (?P<rank>[0-9]+) in communicator",
    ),
    Mark("launcher-failed", r"Exit (?:code|status): +[0-9]", r"Exit (?:code|status): +(?P<code>[0-9]+)"),
    Mark("launcher-failed", r"returned non-zero exit status [0-9]", r"returned non-zero exit status (?P<code>[0-9]+)"),
    Mark(
        "launcher-failed",
        r"Process [0-9]+ exit with status code [0-9]",
        r"Process (?P<rank>[0-9]+) exit with status code (?P<code>[0-9]+)",
    ),
    Mark("launcher-failed", r"terminated with exit code [0-9]", r"command terminated with exit code (?P<code>[0-9]+)"),
    Mark(
        "launcher-failed",
        r"srun: error: .{1,200}Exited with exit code [0-9]",
        r"srun: error: (?P<node>[^\s:]+): tasks? (?P<ranks>[0-9,\-\[\]]+): Exited with exit code (?P<code>[0-9]+)",
    ),
    Mark("launcher-failed", r"Unhandled exception <class '", r"Unhandled exception <class '(?P<type>\w+)"),
    Mark(
        "launcher-failed",
        r"process [0-9]+ terminated with exit code [0-9]",
        r"process (?P<local_rank>[0-9]+) terminated with exit code (?P<code>[0-9]+)",
    ),
    Mark(
        "launcher-failed",
        r"Child process with PID [0-9]+ terminated with code -?[0-9]",
        r"Child process with PID (?P<pid>[0-9]+) terminated with code (?P<code>-?[0-9]+)",
    ),
    Mark(
        "agent-failed",
        r"Child process [0-9]+ \(local_rank [0-9]",
        r"Child process (?P<pid>[0-9]+) \(local_rank (?P<local_rank>[0-9]+)\) FAILED \(exitcode (?P<code>-?[0-9]+)\)",
    ),
    Mark(
        "agent-failed",
        r"torchelastic\.worker\.status\.FAILED",
        r"\"global_rank\": (?P<rank>[0-9]+), .{1,40}\"worker_id\": \"(?P<pid>[0-9]+)\", .{1,60}"
        r"\"hostname\": \"(?P<node>[^\"]{1,200})\"",
    ),
    # Paddle's launcher: Container.__str__.
    Mark(
        "agent-failed",
        r"Container rank [0-9]+ status failed cmd ",
        r"Container rank (?P<rank>[0-9]+) status failed cmd .+ code (?P<code>-?[0-9]+) log ",
    ),
    # Composer's launcher, older and newer.
    Mark(
        "agent-failed",
        r"Rank [0-9]+ crashed with exit code ",
        r"Rank (?P<rank>[0-9]+) crashed with exit code (?P<code>-?[0-9]+)",
    ),
    Mark(
        "agent-failed",
        r"Global rank [0-9]+ \(PID [0-9]+\) exited with code -?[1-9]",
        r"Global rank (?P<rank>[0-9]+) \(PID (?P<pid>[0-9]+)\) exited with code (?P<code>-?[0-9]+)",
    ),
    Mark(
        "closing",
        r"Sending process [0-9]+ closing signal",
        r"Sending process (?P<pid>[0-9]+) closing signal (?P<signal>\w+)",
    ),
    # Workers that ignored it (torch/distributed/elastic/multiprocessing/api.py; "exitting" up to 2.0).
    Mark(
        "killed-by-agent",
        r"Unable to shutdown process [0-9]+ via ",
        r"Unable to shutdown process (?P<pid>[0-9]+) via \S+, forcefully exitt?ing via (?:Signals\.SIGKILL|SIGKILL|9)",
    ),
    # In a traceback of a torchrun agent: functions that it calls only while its workers run.
    Mark("agent-runs", r"num_nodes_waiting|_keep_alive_weak"),
    # SLURM and MPI on their tasks.
    Mark(
        "task-end",
        r"srun: error: .{1,200}tasks? [0-9]",
        r"srun: error: (?P<node>[^\s:]+): tasks? (?P<ranks>[0-9,\-\[\]]+): (?P<how>.+)",
    ),
    # The calls to NCCL (NCCL_DEBUG_SUBSYS=COLL; src/enqueue.cc, 2.4 to 2.30).
    Mark(
        "collective",
        r": opCount [0-9a-f]",  # most lines of such a log: parsing their prefixes costs as much as all patterns
        r"NCCL INFO (?P<op>[A-Z][A-Za-z]+): opCount (?P<number>[0-9a-f]+) .*count (?P<count>[0-9]+) "
        r"datatype (?P<datatype>[0-9]+) .*comm (?P<comm>\w+) \[nranks=(?P<size>[0-9]+)\]",
    ),
    # Progress of a communicator's ranks, from NCCL's RAS (src/ras/client_support.cc, 2.24 to 2.30).
    Mark(
        "launched",
        r"ha(?:s|ve) (?:launched up to operation [0-9]|not launched any operations)",
        r"(?:[0-9]+ ranks have|Rank (?P<rank>[0-9]+) has) (?:launched up to operation (?P<count>[0-9]+)"
        r"|not launched any operations)(?: -- GPU \S+(?: \(NVML \S+\))? managed by process (?P<pid>[0-9]+) on node "
        r"(?P<node>\S+))?",
    ),
    Mark(
        "launched-rank",
        r"Rank [0-9]+ -- (?:GPU |\[process information not found\])",
        r"Rank (?P<rank>[0-9]+) -- "
        r"(?:GPU \S+(?: \(NVML \S+\))? managed by process (?P<pid>[0-9]+) on node (?P<node>\S+))?",
    ),
    # allranks itself: what it printed before belongs to an earlier start (launch/job.py, launch/lead/summary.py).
    Mark("begun", r"allranks: [0-9]+ ranks? on .{1,300}; logs in "),
    Mark("begun", r"allranks: restart [0-9]+ on [0-9]+ nodes?"),
    # The number of ranks, and which process is which rank.
    Mark(
        "comm",
        r"NCCL INFO comm 0x.{1,200}rank [0-9]+ n[rR]anks [0-9]",
        r"NCCL INFO comm 0x\w+ rank (?P<rank>[0-9]+) n[rR]anks (?P<world>[0-9]+)",
    ),
    # The rendezvous address: torchrun's launch configuration, its options, the variables.
    Mark(
        "endpoint",
        r"rdzv_endpoint +: [A-Za-z0-9<]|--(?:rdzv[_-]endpoint|master[_-]addr|main_process_ip)[ =][A-Za-z0-9<]"
        r"|MASTER_ADDR[:=] ?[A-Za-z0-9<]|master_addr[:=] ?[A-Za-z0-9<]",
        r"(?:rdzv_endpoint +: |--(?:rdzv[_-]endpoint|master[_-]addr|main_process_ip)[ =]|MASTER_ADDR[:=] ?"
        r"|master_addr[:=] ?)(?P<endpoint>[A-Za-z0-9<][A-Za-z0-9_.:<>-]{0,120})",
    ),
    # As fairseq, detectron2 and many scripts pass it to init_process_group.
    Mark(
        "endpoint",
        r"(?:init[_-]method|dist[_-]url|distributed init \(rank [0-9]+\))['\": =]{1,4}tcp://",
        r"(?:init[_-]method|dist[_-]url|distributed init \(rank [0-9]+\))['\": =]{1,4}"
        r"tcp://(?P<endpoint>[A-Za-z0-9<][A-Za-z0-9_.:<>-]{0,120})",
    ),
    # The address that each rank could not reach at first, from its warnings: torch 1.12 to 2.3.
    Mark(
        "endpoint",
        r"client socket (?:cannot be initialized|has failed) to connect to \[?[A-Za-z0-9]",
        r"client socket (?:cannot be initialized|has failed) to connect to "
        r"\[?(?P<endpoint>[A-Za-z0-9][A-Za-z0-9_.-]{0,120})\]?:[0-9]+",
    ),
    Mark(
        "bootstrap",
        r"NCCL INFO Bootstrap ?: Using ",  # up to 2.23 with a blank; a device's port is no address
        r"NCCL INFO Bootstrap ?: Using (?:\[0\])?(?P<interface>[^\s:]+):(?P<address>[0-9a-fA-F.:]{3,45})",
    ),
    # Lightning, once all ranks have joined (strategies/ddp.py, utilities/distributed.py, 1.0 to 2.6).
    Mark("all-came", r"All distributed processes registered\."),
    Mark("world", r"world_size[=:] ?[0-9]", r"world_size[=:] ?(?P<world>[0-9]+)"),
    Mark(
        "scope",
        r"-- Process [0-9]+ terminated with the following error",
        r"-- Process (?P<local_rank>[0-9]+) terminated",
    ),
    Mark("scope", r"TP[0-9]+\] Scheduler hit an exception", r"\bTP(?P<local_rank>[0-9]+)\] Scheduler hit an exception"),
    Mark("scope", r"(?:\tpid: |    pid: )[0-9]", r"^\s+pid: (?P<pid>[0-9]+)$"),
    Mark("scope", r"(?:    ip: |\tip: [0-9])[0-9]", r"^\s+ip: (?P<address>[0-9.]{7,15})$"),
    Mark("scope", r"RayTaskError\(.{1,200}pid=[0-9]", r"\(pid=(?P<pid>[0-9]+)(?:, ip=(?P<address>[0-9.]+))?"),
    Mark(
        "scope",
        r"failed \(exitcode: [0-9-]+\) local_rank: [0-9]",
        r"local_rank: (?P<local_rank>[0-9]+) \(pid: (?P<pid>[0-9]+)\)",
    ),
    Mark(
        "took",
        r"(?:after|took|elapsed|waited) [0-9]{3,}(?:\.[0-9]+)? ?s",
        r"(?:after|took|elapsed|waited) (?P<seconds>[0-9]{3,}(?:\.[0-9]+)?) ?s",
    ),
    # From SLURM 25.05 on, the line about a step that was ended begins with a time instead of slurmstepd.
    Mark("srun", r"srun -{1,2}[a-zA-Z]|SLURM_[A-Z]|slurmstepd: |error: \*\*\* (?:JOB|STEP) [0-9]"),
    # For whom is a fix? (why/log_reader.py)
    Mark("pod", r"KUBERNETES_[A-Z]|kubelet|kubectl |kubernetes\.io/|\.svc\.cluster\.local"),
    Mark("rocm", r"RCCL version|HIP error: |hipError[A-Z]|\+rocm[0-9]|librccl\.so|/opt/rocm"),
    # Gloo's connections (gloo/transport/tcp/debug_logger.cc).
    Mark(
        "dial",
        r"failed to connect, willRetry=",
        r"rank=(?P<dialler>[0-9]+), size=(?P<world>[0-9]+), local=\[(?P<local>[0-9a-fA-F.:]+)\][^ ]*, "
        r"remote=\[(?P<remote>[0-9a-fA-F.:]+)\](?:[^ ]*, error=(?:SO_ERROR: )?(?P<error>[A-Za-z ]+))?",
    ),
    # py-spy, and ps.
    Mark(
        "thread",
        r"Thread (?:0x[0-9A-Fa-f]+|[0-9]+) \((?:active|idle)",
        r"Thread (?P<thread>0x[0-9A-Fa-f]+|[0-9]+) \((?P<state>[a-z+]+)\)(?:: \"(?P<name>[^\"]*)\")?",
    ),
    Mark(
        "stack",
        r"\.py:[0-9]{1,6}\)$",
        r"^\s+(?P<function>[\w<>.\[\] ]{1,200}) \((?P<file>[^()]{1,300}\.py):(?P<line>[0-9]+)\)$",
    ),
    Mark("process", r"Process [0-9]+: ", r"^Process (?P<pid>[0-9]+): (?P<command>.*)"),
)  # fmt: skip
"""All marks; the readings use their names."""
