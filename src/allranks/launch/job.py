"""One job, as one agent goes through it: who am I, gather, start the workers, watch them, say what it came to.

Phase 1  who am I            identity, this machine, cluster.toml -> JobPlan             (launch.plan)
Phase 2  who leads           the leader binds the port, the others look for it           (launch.gather)
Phase 3  start               environment of every worker, with reasons                   (launch.environment)
Phase 4  watch, end          until all ended well, or the first failure                  (launch.agent)
Phase 5  say                 one verdict on the leader's terminal, the same exit code everywhere
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from allranks.host.net import find_interface_of
from allranks.launch import container
from allranks.launch.agent import Agent, SignalInbox
from allranks.launch.console import Console
from allranks.launch.environment import HOOK_PATH, node_settings, rank_settings
from allranks.launch.membership import Membership, find_membership
from allranks.launch.plan import JobPlan, Request, count_of
from allranks.launch.rundir import RunDir, describe_command
from allranks.launch.workers import Worker, become_subreaper
from allranks.model.errors import AllranksError, UsageError
from allranks.model.finding import Verdict
from allranks.model.hostlist import fold_hosts
from allranks.model.identity import Launcher
from allranks.report.text import Style, render_verdict, say
from allranks.wire.protocol import Goodbye, Plan
from allranks.wire.secret import SECRET_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where the workers' output goes; the files of the run directory get it in any case.

    `hidden` names local ranks and streams (`out`, `err`) that the terminal does not show.
    """

    log_dir: Path
    hidden: frozenset[tuple[int, str]] = frozenset()


def worker_command(request: Request) -> list[str]:
    """Return what is executed for each worker.

    Raises:
        UsageError: the script, module or program is not there.
    """
    first, *arguments = request.command
    python = container.PYTHON if request.container else sys.executable
    if request.container:
        container.find_runtime(request.container_runtime)
        if request.no_python or request.is_module:  # in the image; nobody can look from here
            return [first, *arguments] if request.no_python else [python, "-m", *request.command]
    if request.no_python:
        program = shutil.which(first)
        if program is None and Path(first).is_file():
            raise UsageError(f"{first}: not executable; chmod +x it, or leave --no-python out if it is a Python script")
        if program is None:
            raise UsageError(f"{first}: no such program; --no-python runs it as it is, give a path or one on PATH")
        return [program, *arguments]
    if request.is_module:
        # Where `python -m` looks: this directory first.
        if PathFinder.find_spec(first.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"-m {first}: no such module in {sys.executable} or this directory")
        return [sys.executable, "-m", first, *arguments]
    if not Path(first).exists():
        raise UsageError(f"{first}: no such script; expected a Python file (a module takes -m, a program --no-python)")
    return [python, first, *arguments]


def run_job(plan: JobPlan, output: Output, env: Mapping[str, str]) -> int:
    """Run this node's part of the job and return the exit code, which is the same on all nodes.

    Raises:
        AllranksError: it could not begin.
    """
    inbox = SignalInbox()
    become_subreaper()
    run_dir = RunDir(output.log_dir, plan.job)
    try:
        membership = find_membership(
            plan, run_dir, env, problem=plan.problem or _find_problem(plan.request), check_signals=inbox.check
        )
    except AllranksError as exc:
        if exc.finding is None:
            raise
        verdict = Verdict(job=plan.job, attempt=run_dir.attempt, exit_code=exc.exit_code, findings=(exc.finding,))
        return _pronounce(verdict, run_dir)
    if isinstance(membership, Goodbye):
        if plan.world.launcher is not Launcher.SLURM:  # there, the leader's words are in the same file
            say(membership.summary)
        return membership.exit_code
    with membership.listener or contextlib.nullcontext():
        return _run_workers(plan, output, run_dir, membership, inbox, env)


def _find_problem(request: Request) -> AllranksError | None:
    try:
        worker_command(request)
    except AllranksError as exc:
        return exc
    return None


def _run_workers(
    plan: JobPlan,
    output: Output,
    run_dir: RunDir,
    membership: Membership,
    inbox: SignalInbox,
    env: Mapping[str, str],
) -> int:
    group = membership.group
    me = group.members[group.node_index]
    is_leader = membership.leader is None
    node_path = run_dir.create_node(me.name)
    interface = plan.data_path.interface if plan.data_path else _interface_to_leader(plan, membership)
    is_port_held = env.get("ALLRANKS_HOOK") != "0" and plan.request.container is None
    listener = membership.listener
    store_fd = listener.fileno() if listener is not None and is_port_held else None
    settings = node_settings(plan, group, interface=interface, store_fd=store_fd, env=env, hook_path=HOOK_PATH)
    run_dir.write_settings(me.name, settings)
    command = worker_command(plan.request)
    if is_leader:
        run_dir.add_event(
            "started", job=plan.job, command=describe_command(command, env), members=[m.name for m in group.members]
        )
        for note in plan.world.notes:
            say(f"note: {note}")
        say(_headline(group, interface, plan, run_dir))
    if listener is not None and not is_port_held:
        listener.close()  # rank 0 binds the port itself; between here and there it is free for anybody

    base = {name: value for name, value in env.items() if name != SECRET_VARIABLE}
    base |= {setting.name: setting.value for setting in settings} | {
        "ALLRANKS_AGENT_PID": str(os.getpid()),
        "ALLRANKS_STARTED_S": str(time.time()),
    }
    console = Console()
    workers = []
    for local_rank in range(me.num_workers):
        rank = me.first_rank + local_rank
        worker = Worker(
            rank=rank,
            local_rank=local_rank,
            node=me.name,
            out_path=node_path / f"rank_{rank}.out",
            err_path=node_path / f"rank_{rank}.err",
            error_file=node_path / f"rank_{rank}.error.json",
        )
        own = rank_settings(group, local_rank, error_file=worker.error_file.absolute())
        values = base | {setting.name: setting.value for setting in own}
        local_command = [word.replace("${local_rank}", str(local_rank)) for word in command]
        if plan.request.container:
            handed = [setting.name for setting in (*settings, *own)]
            local_command, values = _in_container(plan, local_command, values, handed)
        worker.start(
            local_command,
            values,
            pass_fds=(store_fd,) if store_fd is not None and rank == 0 else (),
        )
        prefix = f"[{me.name} r{rank}] " if group.world_size > 1 else ""
        for stream, path, start in (
            ("err", worker.err_path, worker.err_start),
            ("out", worker.out_path, worker.out_start),
        ):
            if (local_rank, stream) not in output.hidden:
                console.follow(path, start=start, stream=stream, prefix=prefix)
        workers.append(worker)

    agent = Agent(
        group,
        workers,
        console=console,
        inbox=inbox,
        say=say,
        on_event=run_dir.add_event if is_leader else lambda *_, **__: None,
        leader=membership.leader,
        peers=membership.peers,
    )
    started_s = time.monotonic()
    exit_code, verdict, summary = agent.run(job=plan.job)
    if verdict is not None:
        _pronounce(verdict, run_dir)
    if inbox.received:
        name = signal.Signals(inbox.received[0]).name
        say(f"{name} after {time.monotonic() - started_s:.0f} s: all workers here have ended; output in {node_path}")
    elif summary and plan.world.launcher is not Launcher.SLURM:
        say(f"ended: {summary}; the whole report is on {group.members[0].name}")
    return exit_code


def _in_container(
    plan: JobPlan, command: list[str], values: dict[str, str], names: list[str]
) -> tuple[list[str], dict[str, str]]:
    assert plan.request.container is not None
    runtime = container.find_runtime(plan.request.container_runtime)
    wrapped = container.wrap_command(
        runtime,
        plan.request.container,
        command,
        names=names,
        hook_root=HOOK_PATH.parent,
        cwd=Path.cwd(),
        has_gpus=plan.facts.num_gpus > 0,
    )
    return wrapped, values | container.handed_in(runtime, {name: values[name] for name in names})


def _pronounce(verdict: Verdict, run_dir: RunDir) -> int:
    """Write the verdict, print it if there is something to say, and return its exit code."""
    run_dir.write_verdict(verdict)
    run_dir.add_event("ended", exit_code=verdict.exit_code)
    if verdict.findings:
        print("\n" + render_verdict(verdict, Style.of(sys.stderr)), file=sys.stderr, flush=True)
    return verdict.exit_code


def _headline(group: Plan, interface: str | None, plan: JobPlan, run_dir: RunDir) -> str:
    names = [member.name for member in group.members]
    where = names[0] if len(names) == 1 else f"{len(names)} nodes ({fold_hosts(names)})"
    # Nodes may call the same network by other names.
    network = interface if plan.is_one_machine else plan.cluster.network.data or interface
    over = f" over {network}" if network else ""
    return f"{count_of(group.world_size, 'rank')} on {where}, {group.backend}{over}; logs in {run_dir.attempt_path}"


def _interface_to_leader(plan: JobPlan, membership: Membership) -> str | None:
    """The interface that the agents' own connection uses: it works."""
    connection = membership.leader or next(iter(membership.peers.values()), None)
    nic = find_interface_of(connection.own_address, plan.facts.interfaces) if connection else None
    return nic.name if nic else None
