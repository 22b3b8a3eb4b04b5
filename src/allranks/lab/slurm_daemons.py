"""A real SLURM in the nodes of the lab: its files as text, its daemons, and whether all nodes have reported.

Compute nodes run slurmd. The controller runs munged and slurmctld: the login node, or without one the first compute
node. All daemons read LAB_DIR/slurm/slurm.conf and use the management network. Written for SLURM 20.11 to 26.05.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from allranks.lab.hosts import processes_in, run_in
from allranks.lab.node_plan import Host, bare
from allranks.model.cluster import Cluster
from allranks.model.errors import SetupError

READY_S = 30.0
"""Deadline for all nodes to report to slurmctld; with two free cores it takes a second."""
LOOK_AGAIN_S = 1.0
"""A daemon of a killed `up` may look alive and end a moment later: missing nodes are started again."""
PATIENCE_S = 15
"""SlurmdTimeout: SLURM gives a silent node up after this time (in practice up to 28 s); its default is 300 s."""
DEFAULT_PARTITION = "main"
URGENT_PARTITION = "urgent"
"""Jobs in it preempt and requeue other jobs. Hidden, so that listings show only the user's partitions."""
KILL_WAIT_S = 5
"""KillWait: time between SIGTERM and SIGKILL; SLURM's default is 30 s."""
GRACE_S = 10
"""GraceTime: time between the SIGTERM of a preemption and the end of a job that is requeued."""
TASK_PROLOG = """\
#!/bin/sh
# Applies the faults of this node to its tasks: a late start, and variables. The batch script is not a task.
# `NAME=VALUE` sets a variable, `NAME+=DIRECTORY` prepends to a list.
case "${SLURM_STEP_ID:-batch}" in batch | -5) exit 0 ;; esac
own="$(dirname "$0")/../nodes/$SLURMD_NODENAME"
for file in "$own"/delay/*; do
  [ -f "$file" ] && sleep "$(cat "$file")" >/dev/null 2>&1
done
for file in "$own"/environment/*; do
  [ -f "$file" ] || continue
  while IFS= read -r line; do
    name="${line%%=*}" value="${line#*=}"
    case "$name" in
      *+) name="${name%+}"
          eval "old=\\"\\${$name-}\\""
          value="$value${old:+:$old}" ;;
    esac
    export "$name=$value"
    printf 'export %s=%s\\n' "$name" "$value"
  done <"$file"
done
exit 0
"""
"""Runs before each task as its user, with its environment; slurmstepd reads the lines that it prints."""


def write_files(
    name: str,
    hosts: Sequence[Host],
    cluster: Cluster,
    lab_dir: Path,
    *,
    controller: Host,
    tasks_per_node: int,
    first_job: int,
    kill_wait_s: int = KILL_WAIT_S,
    grace_s: int = GRACE_S,
) -> None:
    """Write configuration and key; while the lab is up, only SlurmdTimeout changes."""
    for directory in ("slurm", "state", "gpus"):
        (lab_dir / directory).mkdir(exist_ok=True)
    cpus = max(tasks_per_node, os.cpu_count() or 1)
    text = render_slurm_conf(
        name,
        hosts,
        cluster,
        lab_dir,
        controller=controller,
        cpus=cpus,
        first_job=first_job,
        kill_wait_s=kill_wait_s,
        grace_s=grace_s,
    )
    conf_path(lab_dir).write_text(text)
    (lab_dir / "slurm" / "gres.conf").write_text(render_gres_conf(hosts, lab_dir))
    prolog = lab_dir / "slurm" / "task_prolog"
    prolog.write_text(TASK_PROLOG)
    prolog.chmod(0o755)
    for number in range(max(host.gpus for host in hosts)):
        gpu = lab_dir / "gpus" / f"gpu{number}"
        gpu.unlink(missing_ok=True)
        gpu.symlink_to(os.devnull)
    key = lab_dir / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))


def render_slurm_conf(
    name: str,
    hosts: Sequence[Host],
    cluster: Cluster,
    lab_dir: Path,
    *,
    controller: Host,
    cpus: int,
    first_job: int = 1,
    kill_wait_s: int = KILL_WAIT_S,
    grace_s: int = GRACE_S,
) -> str:
    """Return slurm.conf.

    Args:
        name: name of the lab; SLURM refuses its saved state under another name.
        hosts: the compute nodes, in order.
        cluster: names the partition; several, separated by commas, are all created, and the first is the default.
        lab_dir: directory of keys, logs and state.
        controller: the node on which slurmctld runs.
        cpus: number of cores that each node reports, independent of the machine.
        first_job: id of the first job.
        kill_wait_s: KillWait.
        grace_s: GraceTime of the partitions.
    """
    nodes = lab_dir / "nodes"
    lines = [
        f"ClusterName={name}",
        f"SlurmctldHost={controller.name}({bare(controller.management_address)})",
        "SlurmUser=root",
        f"FirstJobId={first_job}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={lab_dir}/munge.socket",
        f"StateSaveLocation={lab_dir}/state",
        f"SlurmctldLogFile={lab_dir}/slurmctld.log",
        f"SlurmctldPidFile={lab_dir}/slurmctld.pid",
        f"SlurmdSpoolDir={nodes}/%n/spool",
        f"SlurmdLogFile={nodes}/%n/slurmd.log",
        f"SlurmdPidFile={nodes}/%n/slurmd.pid",
        # Nodes share the kernel's cgroups, so processes are tracked through /proc.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SlurmdParameters=config_overrides",
        "GresTypes=gpu",
        "MpiDefault=none",
        "MailProg=/bin/true",
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/none",
        "ReturnToService=2",
        "JobRequeue=1",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        f"SlurmdTimeout={PATIENCE_S}",
        "SlurmctldTimeout=15",
        f"KillWait={kill_wait_s}",
        "SchedulerParameters=sched_interval=5,bf_interval=5",
        # Limits are those of the node's slurmd, not of the submitting user: some faults lower them.
        "PropagateResourceLimits=NONE",
        f"TaskProlog={lab_dir}/slurm/task_prolog",
    ]
    for host in hosts:
        gres = f" Gres=gpu:{host.gpus}" if host.gpus else ""
        lines.append(
            f"NodeName={host.name} NodeAddr={bare(host.management_address)} NodeHostname={host.name} "
            f"CPUs={cpus} State=UNKNOWN{gres}"
        )
    limit = f" DefaultTime={cluster.slurm.time}" if cluster.slurm.time else ""
    for number, one in enumerate((cluster.slurm.partition or DEFAULT_PARTITION).split(",")):
        is_default = " Default=YES" if number == 0 else ""
        lines.append(f"PartitionName={one.strip()} Nodes=ALL State=UP{is_default} GraceTime={grace_s}{limit}")
    lines.append(f"PartitionName={URGENT_PARTITION} Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF Hidden=YES")
    return "\n".join(lines) + "\n"


def set_patience(patience_s: int, lab_dir: Path, *, controller: int | None) -> None:
    """Change SlurmdTimeout from PATIENCE_S to another time, while the lab is up.

    Args:
        patience_s: the new timeout; slurmctld uses it once this returns.
        lab_dir: directory of slurm.conf.
        controller: its process 1; None if it is dead, and will read the file when it is replaced.

    Raises:
        SetupError: slurmctld rejects it.
    """
    conf = conf_path(lab_dir)
    draft = conf.with_suffix(".draft")
    draft.write_text(re.sub(r"(?m)^SlurmdTimeout=.*", f"SlurmdTimeout={patience_s}", conf.read_text()))
    draft.rename(conf)
    if controller is not None:
        run_in(controller, ["scontrol", "reconfigure"])


def render_gres_conf(hosts: Sequence[Host], lab_dir: Path) -> str:
    """Return gres.conf: GPUs are regular files, because a node whose GPUs have no File becomes INVAL."""
    lines = [
        f"NodeName={host.name} Name=gpu File={lab_dir}/gpus/gpu[0-{host.gpus - 1}]\n" for host in hosts if host.gpus
    ]
    return "".join(lines)


def start_munge(controller: int, lab_dir: Path) -> None:
    """Start munged on the controller, if it does not run yet.

    Raises:
        SetupError: it does not start.
    """
    if "munged" not in processes_in(controller):
        files = [f"--{kind}-file={lab_dir}/munge.{kind}" for kind in ("key", "log", "pid", "seed")]
        # Forced: otherwise it refuses a lab below a directory that other users cannot read.
        command = ["munged", "--force", f"--socket={lab_dir}/munge.socket", "--num-threads=2", *files]
        _start(controller, command, lab_dir / "munge.log")


def start_daemons(hosts: Sequence[Host], inits: Mapping[str, int], lab_dir: Path, *, controller: int) -> None:
    """Start the daemons that do not run yet: munged and slurmctld on the controller, slurmd on the compute nodes.

    Args:
        hosts: the compute nodes.
        inits: process 1 of each node.
        lab_dir: directory of the lab.
        controller: process 1 of the controller.

    Raises:
        SetupError: a daemon does not start.
    """
    start_munge(controller, lab_dir)
    conf = str(conf_path(lab_dir))
    running = {host.name: processes_in(inits[host.name]) for host in hosts}
    if "slurmctld" not in processes_in(controller):
        _start(controller, ["slurmctld", "-f", conf], lab_dir / "slurmctld.log")

    def start_slurmd(host: Host) -> None:
        if "slurmd" not in running[host.name]:
            log = lab_dir / "nodes" / host.name / "slurmd.log"
            _start(inits[host.name], ["slurmd", "-f", conf, "-N", host.name], log)

    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(start_slurmd, hosts))


def _start(init_pid: int, command: Sequence[str], log: Path) -> None:
    try:
        run_in(init_pid, command)
    except SetupError as exc:
        raise SetupError(f"{exc}; the last lines of {log}: {_last_words(log)}") from exc


def wait_until_idle(
    hosts: Sequence[Host],
    inits: Mapping[str, int],
    lab_dir: Path,
    *,
    controller: int,
    progress: Callable[[str], None],
) -> None:
    """Wait until every node has reported to slurmctld; a drained node counts as reported.

    A node that was too busy to answer within SlurmdTimeout stays down although its slurmd runs: it is resumed.

    Raises:
        SetupError: a node has not reported after READY_S; the message has the end of its log.
    """
    began = time.monotonic()
    next_look_s = LOOK_AGAIN_S
    while True:
        states = read_states(controller)
        missing = [host.name for host in hosts if not is_in_service(states.get(host.name, "unknown"))]
        if not missing:
            return
        waited_s = time.monotonic() - began
        if waited_s > next_look_s:
            next_look_s = waited_s + LOOK_AGAIN_S
            start_daemons(hosts, inits, lab_dir, controller=controller)
            down = [name for name in missing if states.get(name, "").startswith("down")]
            if down:
                resume = ["scontrol", "update", f"NodeName={','.join(down)}", "State=RESUME"]
                run_in(controller, resume, must_work=False)
        if waited_s > READY_S:
            log = lab_dir / "slurmctld.log" if not states else lab_dir / "nodes" / missing[0] / "slurmd.log"
            seen = states.get(missing[0], "slurmctld does not answer")
            raise SetupError(
                f"lab: {', '.join(missing)}: not ready after {READY_S:.0f} s ({seen}); "
                f"the last lines of {log}: {_last_words(log)}"
            )
        progress(f"waiting for {', '.join(missing)} to report to slurmctld")
        time.sleep(0.1)


def read_states(controller: int) -> dict[str, str]:
    """Return the states from sinfo, `idle`, `down*`; empty if slurmctld does not answer."""
    done = run_in(controller, ["sinfo", "--noheader", "--Node", "--format=%N %T"], must_work=False)
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)


def read_version(controller: int) -> str:
    """Return the version of SLURM's commands in the lab, `22.05.8`; empty if they do not answer."""
    said = run_in(controller, ["sinfo", "--version"], must_work=False).stdout.split()
    return said[-1] if said else ""


def is_in_service(state: str) -> bool:
    """Whether slurmctld hears from the node, and has not given it up.

    >>> is_in_service("idle"), is_in_service("idle*"), is_in_service("unknown")
    (True, False, False)
    """
    return not state.endswith("*") and state.rstrip("~#!%$@^-+") not in ("unknown", "down", "inval", "future", "error")


def conf_path(lab_dir: Path) -> Path:
    """Return the path of slurm.conf in this lab."""
    return lab_dir / "slurm" / "slurm.conf"


def _last_words(log: Path) -> str:
    try:
        return " | ".join(log.read_text(errors="replace").splitlines()[-3:]) or "(empty)"
    except OSError as exc:
        return f"({str(exc.strerror).lower()})"
