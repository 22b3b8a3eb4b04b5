"""Lines that name no cause by themselves, and that the readings of a whole log are made of.

A mark is a pattern as a sign is (causes/sign.py), without a cause: a frame of a traceback, a line of torchrun's summary,
how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """One kind of line."""

    name: str
    scan: str
    """What hyperscan looks for: as a sign's pattern, it has a literal of six bytes or more."""
    exact: str = ""
    """What the cleaned line must match; empty: the same."""

    @property
    def pattern(self) -> str:
        """The exact pattern."""
        return self.exact or self.scan


MARKS = (
    # Tracebacks of Python; the exception is at the line's beginning, or an interleaved writer broke it.
    Mark("traceback", r"Traceback \(most recent call last\)"),
    Mark(
        "frame",
        r'File "[^"]{1,400}", line [0-9]',
        r'File "(?P<file>[^"]{1,400})", line (?P<line>[0-9]+)(?:, in (?P<function>.{1,200}))?',
    ),
    Mark(
        "exception",
        r"(?:Error|Exception|Interrupt|Iteration|SystemExit|Exit)(?::|$|\r)",
        r"^(?:E\s+)?(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Iteration))(?:: ?(?P<text>.*))?$",
    ),
    Mark("chained", r"(?:During handling of|The) (?:the )?above exception"),
    # torchrun's summary of who failed (torch/distributed/elastic/multiprocessing/errors/__init__.py, 1.9 to 2.13).
    Mark("failures", r"Root Cause \(first observed failure\):"),
    Mark("failure-time", r"time      : [0-9]{4}-", r"time      : (?P<when>\S+)"),
    Mark("failure-host", r"host      : [A-Za-z0-9]", r"host      : (?P<node>\S+)"),
    Mark(
        "failure-rank",
        r"rank      : [0-9]",
        r"rank      : (?P<rank>[0-9]+) \(local_rank: (?P<local_rank>[0-9]+)\)",
    ),
    Mark("failure-code", r"exitcode  : -?[0-9]", r"exitcode  : (?P<code>-?[0-9]+) \(pid: (?P<pid>[0-9]+)\)"),
    Mark("failure-text", r"traceback : [^ ]", r"traceback : (?P<text>.+)"),
    # The agent (torch/distributed/elastic/multiprocessing/api.py).
    Mark(
        "agent-failed",
        r"failed \(exitcode: -?[0-9]+\) local_rank: [0-9]",
        r"failed \(exitcode: (?P<code>-?[0-9]+)\) local_rank: (?P<local_rank>[0-9]+) \(pid: (?P<pid>[0-9]+)\)",
    ),
    Mark("closing", r"Sending process [0-9]+ closing signal", r"Sending process (?P<pid>[0-9]+) closing signal (?P<signal>\w+)"),
    # SLURM and MPI about their tasks.
    Mark(
        "task-end",
        r"srun: error: .{1,200}tasks? [0-9]",
        r"srun: error: (?P<node>[^\s:]+): tasks? (?P<ranks>[0-9,\-\[\]]+): (?P<how>.+)",
    ),
    # How many there are, and which process is which.
    Mark(
        "comm",
        r"NCCL INFO comm 0x.{1,200}rank [0-9]+ n[rR]anks [0-9]",
        r"NCCL INFO comm 0x\w+ rank (?P<rank>[0-9]+) n[rR]anks (?P<world>[0-9]+)",
    ),
    Mark(
        "bootstrap",
        r"NCCL INFO Bootstrap : Using ",
        r"NCCL INFO Bootstrap : Using (?:\[0\])?(?P<interface>[^\s:]+):(?P<address>[0-9a-fA-F.:]+)",
    ),
    Mark("world", r"world_size[=:] ?[0-9]", r"world_size[=:] ?(?P<world>[0-9]+)"),
    Mark("scope", r"-- Process [0-9]+ terminated with the following error", r"-- Process (?P<local_rank>[0-9]+) terminated"),
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
    Mark("srun", r"srun -{1,2}[a-zA-Z]|SLURM_[A-Z]|slurmstepd: "),
    # py-spy, and ps.
    Mark("thread", r"Thread (?:0x[0-9A-Fa-f]+|[0-9]+) \((?:active|idle)", r"Thread (?P<thread>0x[0-9A-Fa-f]+|[0-9]+) \((?P<state>[a-z+]+)\)(?:: \"(?P<name>[^\"]*)\")?"),
    Mark(
        "stack",
        r"\.py:[0-9]{1,6}\)$",
        r"^\s+(?P<function>[\w<>.\[\] ]{1,200}) \((?P<file>[^()]{1,300}\.py):(?P<line>[0-9]+)\)$",
    ),
    Mark("process", r"Process [0-9]+: ", r"^Process (?P<pid>[0-9]+): (?P<command>.*)"),
)  # fmt: skip
"""All marks; names are what the readings ask for."""
