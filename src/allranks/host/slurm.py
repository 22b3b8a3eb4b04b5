"""Asks SLURM about jobs and nodes, submits and cancels jobs. Every parser stands beside its runner.

    >>> parse_job_id("this site greets you\\n4711;north\\n")
    '4711'

Text is asked for, never `--json`: its form changed in 23.11, 24.05 and 24.11, and 22.05 lacks half of it. States and
reasons that a newer SLURM invents stay as they are. Accounting may be off, so nothing needs `sacct`. Times are SLURM's
own local ones. Every call has a deadline, and what SLURM itself said is in every error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks.host.slurm_command import DEADLINE_S, refusal_of, run_slurm, words_of
from allranks.model.errors import SetupError

ACTIVE = frozenset({
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED",
    "REQUEUE_HOLD", "RESV_DEL_HOLD", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED",
})  # fmt: skip
FINISHED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
})  # fmt: skip
_NOTHING = frozenset(("", "(null)", "None", "none", "N/A", "Unknown", "None assigned"))
NEVER_STARTS = {
    "PartitionNodeLimit": "it requests more nodes than its partition allows or has in service",
    "PartitionConfig": "its partition has no nodes that fit it",
    "PartitionTimeLimit": "its time limit is above that of its partition",
    "BadConstraints": "no node has what it requests",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "JobHeldUser": "it is held; scontrol release lets it start",
    "JobHeldAdmin": "an administrator holds it",
}
"""Reasons that time alone does not end. Source: squeue(1), JOB REASON CODES."""
_FIELD = "\x1f"  # names, comments and reasons hold any printable character
JOB_ENVIRONMENT = "--export=ALL"
"""Option of sbatch: the job gets its whole environment. A list of names would make slurmd run a login shell of the user
on the node (`--get-user-env`), and would apply to every srun of the script."""
_NOT_NOW = ("configuration is not available", "nodes are busy", "not available (down")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job, or one task of an array, as far as its source says; "" and None where it does not."""

    id: str
    """`12`, `6_1` for a task, `6_[2-9%2]` for tasks that have not begun, `20+1` for a part of a heterogeneous job."""
    number: str = ""
    """SLURM_JOB_ID in it: each task, and each part, has one of its own."""
    name: str = ""
    user: str = ""
    partition: str = ""
    state: str
    reason: str = ""
    num_nodes: int = 0
    num_tasks: int = 0
    nodes: str = ""
    """Host list, as SLURM prints it."""
    asked_nodes: str = ""
    start: str = ""
    """When it began, or is expected to."""
    eligible: str = ""
    """Since when nothing but free nodes kept it from starting; after a requeue, since then."""
    end: str = ""
    time_limit: str = ""
    elapsed: str = ""
    work_dir: str = ""
    script: str = ""
    """Path of the batch script, where SLURM tells; "" for one that came on standard input."""
    out: str = ""
    err: str = ""
    exit_code: int | None = None
    signal: int | None = None
    restarts: int = 0
    excluded_nodes: str = ""
    comment: str = ""
    """Free text of the user, or of programs such as `allranks why --epilog`."""
    is_batch: bool = False
    """Whether it has a batch script: nothing else can be put back into the queue."""
    may_requeue: bool = False
    preempted_at: str = ""
    """When SLURM told it to make room; it is put back, or ended, when its grace is over."""

    @property
    def is_finished(self) -> bool:
        """Whether it is over. A state nobody has heard of is not."""
        return self.state in FINISHED

    @property
    def is_pending(self) -> bool:
        """Whether it waits to be started."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node, and why it is not in service if it is not."""

    name: str
    state: str
    reason: str
    partitions: tuple[str, ...] = ()
    """Of those that were asked for; the default one ends with `*`."""
    num_gpus: int = 0
    """As SLURM configures them."""

    @property
    def is_available(self) -> bool:
        """Whether SLURM may start something there, now or when it is free."""
        base = self.state.lower().rstrip("*~#!%$@^-")
        return base in ("idle", "mixed", "allocated", "completing", "planned", "powered_down", "powering_up")


@dataclass(frozen=True, slots=True)
class Trial:
    """What `sbatch --test-only` said of a job: when it would start, or why nothing can run it just now."""

    start: str = ""
    nodes: str = ""
    not_now: str = ""


# --- Submitting -------------------------------------------------------------------------------------------------------


def try_script(script: str, *, env: Mapping[str, str]) -> Trial:
    """Ask whether SLURM would take the script; nothing is submitted.

    With a node down SLURM says the same as of a job that is too large for the cluster: `Trial.not_now`. Only a real
    submission tells the two apart: the first is queued, the second is refused.

    Args:
        script: its text.
        env: the environment of sbatch, which the job gets.
    Raises:
        UsageError: an option has a wrong value.
        SetupError: SLURM is not there, does not answer, or refuses.
    """
    answer = run_slurm("sbatch", "--test-only", JOB_ENVIRONMENT, env=env, stdin=script)
    if answer.returncode == 0:
        return parse_trial(answer.stderr)
    words = words_of(answer)
    if any(part in words.lower() for part in _NOT_NOW):
        return Trial(not_now=words)
    raise refusal_of("sbatch", words)


def submit_script(script: str, *, env: Mapping[str, str]) -> str:
    """Submit a script and return the job's id; the arguments and errors are those of `try_script`."""
    answer = run_slurm("sbatch", "--parsable", JOB_ENVIRONMENT, env=env, stdin=script)
    if answer.returncode != 0:
        raise refusal_of("sbatch", words_of(answer))
    return parse_job_id(answer.stdout)


def fill_pattern(pattern: str, known: Mapping[str, str]) -> str:
    """Return the name of a file that a pattern of `--output` means, with `*` for each part that is not known.

    >>> fill_pattern("%x-%5j%%.out", {"j": "12"})
    '*-00012%.out'

    Source: sbatch(1) and srun(1), "filename pattern", SLURM 25.05.
    """

    def fill(found: re.Match[str]) -> str:
        value = "%" if found[2] == "%" else known.get(found[2]) or "*"
        return value.zfill(int(found[1] or 0)) if value.isdecimal() else value

    return re.sub(r"%(\d*)(.?)", fill, pattern)


def parse_trial(text: str) -> Trial:
    """`Job 1 to start at 2026-11-21T03:16:17 using 2 processors on nodes node[01-02] in partition main`."""
    match = re.search(r"Job \S+ to start at (\S+)(?:.* on (?:nodes )?(\S+))?", text)
    return Trial(start=match[1], nodes=match[2] or "") if match else Trial()


def parse_job_id(text: str) -> str:
    """Return the id that `sbatch --parsable` printed, the last line that looks like one: sites print banners.

    Raises:
        SetupError: there is none.
    """
    found = re.findall(r"^\s*(\d+)(?:;\S+)?\s*$", text, re.MULTILINE)
    if not found:
        raise SetupError(f"sbatch: expected a job id, got {text[:200]!r}; see squeue for the job")
    return str(found[-1])


# --- Jobs -------------------------------------------------------------------------------------------------------------


def find_jobs(job_id: str, *, deadline_s: float = DEADLINE_S) -> tuple[JobState, ...]:
    """Return what the controller knows of a job: one entry, one a task of an array, none after MinJobAge (300 s).

    Args:
        job_id: `12`, `12_4`.
        deadline_s: how long to wait for the controller.
    Raises:
        SetupError: SLURM is not there, or does not answer.
    """
    answer = run_slurm("scontrol", "--all", "show", "job", job_id, deadline_s=deadline_s)
    if answer.returncode == 0:
        return parse_show_job(answer.stdout)
    words = words_of(answer)
    if "invalid job id" in words.lower() or "no job" in words.lower():
        return ()
    raise refusal_of("scontrol", words)


def find_old_jobs(job_id: str) -> tuple[JobState, ...]:
    """Return what accounting knows of a job; none where it is off, late or unreachable."""
    fields = ",".join(_SACCT)
    try:
        answer = run_slurm("sacct", "-X", "-n", "-P", f"--delimiter={_FIELD}", "-o", fields, "-j", job_id)
    except SetupError:
        return ()
    return parse_sacct(answer.stdout) if answer.returncode == 0 else ()


def list_jobs(user: str, *, deadline_s: float = DEADLINE_S) -> tuple[JobState, ...]:
    """Return the jobs of a user that wait or run.

    Args:
        user: whose.
        deadline_s: how long to wait for the controller.
    Raises:
        SetupError: SLURM is not there, or does not answer.
    """
    answer = run_slurm("squeue", "-h", "-u", user, "-o", _FIELD.join(_SQUEUE.values()), deadline_s=deadline_s)
    if answer.returncode != 0:
        raise refusal_of("squeue", words_of(answer))
    return parse_squeue(answer.stdout)


def cancel_job(job_id: str) -> None:
    """End a job, or take it out of the queue.

    Raises:
        SetupError: SLURM is not there, or refuses.
    """
    answer = run_slurm("scancel", job_id)
    if answer.returncode != 0 or "error:" in answer.stderr:  # 22.05 returns 0 for a job it does not know
        raise refusal_of("scancel", words_of(answer))


def list_nodes(*, nodes: str = "", partition: str = "") -> tuple[NodeState, ...]:
    """Return the state of nodes: those of a host list, else those of a partition, else all.

    Raises:
        SetupError: SLURM is not there, or does not answer.
    """
    which = ("-n", nodes) if nodes else ("-p", partition) if partition else ()
    answer = run_slurm("sinfo", "-h", "-N", "-o", _FIELD.join(("%N", "%T", "%E", "%P", "%G")), *which)
    if answer.returncode != 0:
        raise refusal_of("sinfo", words_of(answer))
    return parse_sinfo(answer.stdout)


_SQUEUE = {
    "id": "%i", "state": "%T", "reason": "%r", "num_nodes": "%D", "nodes": "%N", "partition": "%P", "user": "%u",
    "start": "%S", "end": "%e", "time_limit": "%l", "elapsed": "%M", "work_dir": "%Z", "name": "%j",
}  # fmt: skip


def parse_squeue(text: str) -> tuple[JobState, ...]:
    """Read lines of `list_jobs`; a line with another number of fields (a site's banner) is no job."""
    return tuple(_job(dict(zip(_SQUEUE, row, strict=True))) for row in _rows(text, len(_SQUEUE)))


_SACCT = {
    "JobID": "id", "State": "state", "ExitCode": "exit", "NNodes": "num_nodes", "NodeList": "nodes", "Start": "start",
    "End": "end", "Elapsed": "elapsed", "Timelimit": "time_limit", "Partition": "partition", "User": "user",
    "WorkDir": "work_dir", "JobName": "name",
}  # fmt: skip


def parse_sacct(text: str) -> tuple[JobState, ...]:
    """Read lines of `find_old_jobs`. States may be cut (`OUT_OF_ME+`) or say more (`CANCELLED by 1000`)."""
    jobs = []
    for row in _rows(text, len(_SACCT)):
        fields = dict(zip(_SACCT.values(), row, strict=True))
        state, _, fields["reason"] = fields["state"].partition(" ")
        if state.endswith("+"):
            whole = sorted(name for name in FINISHED | ACTIVE if name.startswith(state[:-1]))
            state = whole[0] if whole else state
        jobs.append(_job(fields | {"state": state}))
    return tuple(jobs)


# Free text of the user, which may look like `Key=value`: the whole line belongs to it.
_WHOLE_LINES = frozenset(
    ("Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment")
)


def parse_show_job(text: str) -> tuple[JobState, ...]:
    """Read `scontrol show job`, of one job or of all tasks of an array, in the order of the tasks."""
    jobs = []
    for record in re.split(r"\n(?=JobId=)", "\n" + text)[1:]:
        fields: dict[str, str] = {}
        for line in map(str.strip, record.splitlines()):
            key, _, value = line.partition("=")
            if key in _WHOLE_LINES:
                fields.setdefault(key, value)
                continue
            line, _, name = line.partition(" JobName=") if key == "JobId" else (line, "", "")
            pairs = re.finditer(r"(?<!\S)([^\s=]+)=(.*?)(?=\s+[^\s=]+=|$)", line)
            fields = {pair[1]: pair[2].strip() for pair in pairs} | ({"JobName": name} if name else {}) | fields
        jobs.append(
            _job(
                {
                    "id": _full_id(fields),
                    "number": fields["JobId"],
                    "name": fields.get("JobName", ""),
                    "user": fields.get("UserId", "").partition("(")[0],
                    "partition": fields.get("Partition", ""),
                    "state": fields.get("JobState", "UNKNOWN"),
                    "reason": _spaced(fields.get("Reason", "")),
                    "num_nodes": fields.get("NumNodes", ""),
                    "num_tasks": fields.get("NumTasks", ""),
                    "nodes": fields.get("NodeList", ""),
                    "asked_nodes": fields.get("ReqNodeList", ""),
                    "start": fields.get("StartTime", ""),
                    "eligible": fields.get("EligibleTime", ""),
                    "end": fields.get("EndTime", ""),
                    "time_limit": fields.get("TimeLimit", ""),
                    "elapsed": fields.get("RunTime", ""),
                    "work_dir": fields.get("WorkDir", ""),
                    "script": fields.get("Command", "").removesuffix("(null)"),
                    "out": fields.get("StdOut", ""),
                    "err": fields.get("StdErr", ""),
                    "exit": fields.get("ExitCode", ""),
                    "restarts": fields.get("Restarts", ""),
                    "excluded_nodes": fields.get("ExcNodeList", ""),
                    "comment": fields.get("Comment", ""),
                    "is_batch": fields.get("BatchFlag", ""),
                    "may_requeue": fields.get("Requeue", ""),
                    "preempted_at": fields.get("PreemptTime", ""),
                }
            )
        )
    return tuple(sorted(jobs, key=lambda job: [int(number) for number in re.findall(r"[0-9]{1,18}", job.id)]))


def parse_sinfo(text: str) -> tuple[NodeState, ...]:
    """Read lines of `list_nodes`, a node in several partitions once; GPUs have types, sockets: `gpu:a100:4(S:0-1)`."""
    nodes: dict[str, NodeState] = {}
    for name, state, reason, partition, resources in _rows(text, 5):
        partitions = (*nodes[name].partitions, partition) if name in nodes else (partition,)
        counts = re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:([0-9]{1,9})(?![0-9])", resources)
        nodes[name] = NodeState(name, state, _said(reason), partitions, sum(map(int, counts)))
    return tuple(nodes.values())


def _full_id(fields: Mapping[str, str]) -> str:
    if (task := fields.get("ArrayTaskId")) is not None:
        array = fields.get("ArrayJobId", fields["JobId"])
        return f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"
    if (part := fields.get("HetJobOffset")) is not None:
        return f"{fields.get('HetJobId', fields['JobId'])}+{part}"
    return fields["JobId"]


def _job(fields: Mapping[str, str]) -> JobState:
    others = ("num_nodes", "num_tasks", "exit", "restarts", "is_batch", "may_requeue")
    texts = {name: _said(value) for name, value in fields.items() if name not in others}
    code = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", fields.get("exit", ""))
    return JobState(
        **texts,
        num_nodes=_number(fields.get("num_nodes", "")),
        num_tasks=_number(fields.get("num_tasks", "")),
        restarts=_number(fields.get("restarts", "")),
        is_batch=_number(fields.get("is_batch", "")) > 0,
        may_requeue=_number(fields.get("may_requeue", "")) > 0,
        exit_code=int(code[1]) if code else None,
        signal=int(code[2]) or None if code else None,
    )


def _rows(text: str, width: int) -> Iterator[list[str]]:
    for line in text.split("\n"):
        row = [field.strip() for field in line.split(_FIELD)]
        if len(row) == width:
            yield row


def _spaced(reason: str) -> str:
    """A sentence of which scontrol made one word; names with `_` in a reason stay as they are."""
    return reason.replace("_", " ") if reason.startswith("Nodes_required") else reason.replace(",_", ", ")


def _said(value: str) -> str:
    return "" if value in _NOTHING else value


def _number(text: str) -> int:
    match = re.match(r"[0-9]{1,18}(?![0-9])", text)  # `6-6` nodes while it waits
    return int(match[0]) if match else 0


def read_munge_socket(env: Mapping[str, str]) -> str | None:
    """Return where slurm.conf says that munged listens; None where it says nothing, or cannot be read here.

    Source: slurm.conf(5), AuthInfo.
    """
    try:
        text = Path(env.get("SLURM_CONF") or "/etc/slurm/slurm.conf").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^\s*AuthInfo\s*=.*?\bsocket=([^,\s]+)", text, re.MULTILINE | re.IGNORECASE)
    return found[1] if found else None
