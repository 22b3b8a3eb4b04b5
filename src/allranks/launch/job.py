"""The five phases of a job, from the view of one agent.

Phase 1  who am I            identity, this machine, cluster.toml -> JobPlan             (launch.plan)
Phase 2  roll call           the leader binds the port, the others connect to it; all    (launch.rendezvous)
                             nodes are alike and reachable, or one verdict says why not  (preflight.rollcall)
Phase 3  start               environment of every worker, with reasons                   (launch.crew, .environment)
Phase 4  watch               agents report, the leader asks the guard, and restarts      (launch.agent, .lead)
                             the workers if that cures the fault
Phase 5  say                 one verdict on the leader's terminal, the same exit code everywhere (launch.end)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.guard.watch import Watch
from allranks.host.net import find_interface_of
from allranks.host.node import begin_card_facts
from allranks.host.slurm_job import own_job
from allranks.launch import container, events
from allranks.launch.agent import Agent
from allranks.launch.crew import Crew
from allranks.launch.end import READER_S, End, end_step, print_findings, pronounce, show_rest
from allranks.launch.inbox import SignalInbox
from allranks.launch.loop import Loop
from allranks.launch.plan import LOOPBACK, JobPlan, Request, count_of
from allranks.launch.queue.scheduler import Scheduler, describe_return, read_culprits
from allranks.launch.rendezvous import Rendezvous, apply, take_part
from allranks.launch.workers import become_subreaper
from allranks.model.errors import AllranksError, UsageError
from allranks.model.finding import Verdict
from allranks.model.hostlist import fold_hosts
from allranks.model.past import History, Past
from allranks.model.world import Launcher
from allranks.preflight.networks import advise_network
from allranks.report.rundir import RunDir, describe_command
from allranks.report.text import Style, fold_ranks, render_findings, say
from allranks.wire.connection import Connection
from allranks.wire.leader import bind_port
from allranks.wire.protocol import Goodbye, Plan

if TYPE_CHECKING:
    from allranks.launch.lead.driver import LeaderDriver


def worker_command(request: Request) -> list[str]:
    """Return the command of each worker.

    Raises:
        UsageError: the script, module or program does not exist.
    """
    first, *arguments = request.command
    is_here = request.container is None  # nobody can look into an image from here
    python = sys.executable if is_here else container.PYTHON
    if not is_here:
        container.find_runtime(request.container_runtime)
    if request.no_python:
        program = shutil.which(first) if is_here else first
        if program is None and Path(first).is_file():
            raise UsageError(
                f"{first}: not executable; run chmod +x on it, or remove --no-python if it is a Python script"
            )
        if program is None:
            raise UsageError(f"{first}: no such program; --no-python expects a path, or a name on PATH")
        return [program, *arguments]
    if request.is_module:
        # Where `python -m` looks: this directory first.
        if is_here and PathFinder.find_spec(first.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"-m {first}: no such module in this directory or for {sys.executable}")
        return [python, "-m", first, *arguments]
    if not Path(first).exists():
        raise UsageError(
            f"{first}: no such script; expected a Python file (for a module add -m, for another program --no-python)"
        )
    return [python, first, *arguments]


def run_job(plan: JobPlan, env: Mapping[str, str], *, log_dir: Path, hidden: Collection[tuple[int, str]]) -> int:
    """Run this node's part of the job and return the exit code, which is the same on all nodes.

    Args:
        log_dir: where run directories are.
        hidden: local ranks and streams (`out`, `err`) that the terminal does not show.
    Raises:
        AllranksError: it could not begin.
    """
    command: list[str] = []
    try:
        command = worker_command(plan.request)
    except AllranksError as exc:
        plan = replace(plan, problem=plan.problem or exc)
    crew = Crew(job=plan, command=command, run_dir=RunDir(log_dir, plan.job), hidden=hidden, env=env, say=say)
    err = crew.console.screen["err"]
    with contextlib.redirect_stderr(err.as_text()):
        try:
            crew.begin_standby()
            return _run_phases(plan, crew)
        finally:
            crew.end_standby()
            err.drain(patience_s=READER_S)


def _run_phases(plan: JobPlan, crew: Crew) -> int:
    inbox, env, request, started_s = SignalInbox(), crew.env, plan.request, time.monotonic()
    become_subreaper()
    is_script = request.command and not (request.is_module or request.no_python)
    facts = begin_card_facts(
        plan.cluster.worker_env(env),
        names=[*plan.node_names[:1], *([request.endpoint.host] if request.endpoint else [])],
        script_path=Path(request.command[0]) if is_script else None,
    )
    applicant = apply(plan, crew.run_dir, env, problem=plan.problem, facts=facts, check_signals=inbox.check)
    history = History(restarts_left=request.max_restarts, retries_errors=request.retries_errors)
    try:
        rendezvous = take_part(applicant, past=Past(history=history))
    except AllranksError as exc:
        if exc.finding is None:
            raise
        return _do_not_begin(exc, plan, crew, is_leader=applicant.leads)
    if isinstance(rendezvous, Goodbye):
        return _do_not_begin(rendezvous, plan, crew, is_leader=applicant.leads)
    if rendezvous.warnings:
        print("\n" + render_findings(rendezvous.warnings, Style.of(sys.stderr)) + "\n", file=sys.stderr, flush=True)
    with rendezvous.listener or contextlib.nullcontext():
        return _run_workers(plan, crew, rendezvous, inbox, roll_call_s=time.monotonic() - started_s)


def _do_not_begin(why: Goodbye | AllranksError, plan: JobPlan, crew: Crew, *, is_leader: bool) -> int:
    """Write and print why the job does not begin: the verdict of all, or what this agent found out alone."""
    run_dir, is_slurm = crew.run_dir, plan.world.launcher is Launcher.SLURM
    if isinstance(why, Goodbye):
        if why.verdict is None or not why.verdict.findings:
            if not is_slurm or not why.summary:
                say(why.summary)
            return why.exit_code
        verdict, is_in_charge = why.verdict, is_leader
        # In a SLURM step all terminals are one, and the first task speaks for all.
        pronounce(verdict, run_dir, node=plan.facts.host, is_spoken=not is_slurm or plan.node_index == 0)
    else:
        assert why.finding is not None
        run_dir.attempt = plan.attempt or run_dir.attempt
        verdict = Verdict(job=plan.job, attempt=run_dir.attempt, exit_code=why.exit_code, findings=(why.finding,))
        # Of several agents without a leader, one prints for all.
        is_in_charge = run_dir.write_verdict(verdict, node=plan.facts.host, is_of_all=is_leader)
        if is_in_charge or not is_slurm:
            print_findings(verdict.findings)
    has_silent_task = any(finding.cause.startswith("AR001 ") for finding in verdict.findings)
    if is_in_charge and is_slurm and has_silent_task:  # it hangs, and never joined
        end_step(crew.env)
    return verdict.exit_code


def _run_workers(plan: JobPlan, crew: Crew, rendezvous: Rendezvous, inbox: SignalInbox, *, roll_call_s: float) -> int:
    run_dir, env, group = crew.run_dir, crew.env, rendezvous.group
    me, listener = group.members[group.node_index], rendezvous.listener
    # Without a path of its own, data takes the interface of the agents' connection: it works.
    own_address = rendezvous.own_address
    nic = find_interface_of(own_address, plan.facts.interfaces) if own_address is not None else None
    crew.interface = plan.data_path.interface if plan.data_path else nic.name if nic else None
    if rendezvous.leader is None:
        run_dir.add_event(
            "started",
            generation=0,
            job=plan.job,
            command=describe_command(crew.command, env),
            members=[m.name for m in group.members],
            pid=os.getpid(),
        )
        for note in plan.world.notes:
            say(f"note: {note}")
        if plan.data_path is None and (advice := advise_network([*rendezvous.cards.values()], own_address)):
            say(f"note: {advice}")
        say(_headline(group, crew.interface, plan, run_dir, roll_call_s))
        if group.attempt and (words := describe_return(read_culprits(run_dir.path), attempt=group.attempt)):
            say(words)
    elif plan.world.launcher is Launcher.NONE:  # started by hand, on a terminal of its own
        ranks = fold_ranks(range(me.first_rank, me.first_rank + me.num_workers))
        leads = f"{group.members[0].name} leads and prints the report"
        say(f"{ranks} of {group.world_size} on {me.name}; {leads}; logs in {run_dir.node_path(me.name)}")

    def keep_port(listener: socket.socket) -> None:
        if env.get("ALLRANKS_HOOK") != "0" and plan.request.container is None:
            crew.store_fd = listener.fileno()
        else:
            listener.close()  # rank 0 binds the port itself; between here and there it is free for anybody

    if listener is not None:
        keep_port(listener)
    job = own_job(env) if plan.world.launcher is Launcher.SLURM else None
    scheduler = Scheduler(job, env, run_dir, min_nodes=plan.min_nodes, say=say) if job else None

    def lead(effect: events.Lead | None, connections: Mapping[int, Connection]) -> LeaderDriver:
        # Here, since only a leader's node needs all that the leader needs.
        from allranks.launch.lead.driver import appoint_leader

        if effect is None:
            return appoint_leader(plan, rendezvous, connections, run_dir, scheduler, env, own=agent.node)
        listener = stack.enter_context(bind_port(plan.port))
        port = int(listener.getsockname()[1])
        keep_port(listener)
        rendezvous.announce(port)
        return appoint_leader(
            plan, rendezvous, connections, run_dir, scheduler, env, takes_over=effect, own=agent.node, store_port=port
        )

    control_address = own_address or LOOPBACK
    data_address = plan.data_path.address if plan.data_path else control_address
    watch = Watch(plan.guard, data_address=data_address, control_address=control_address)
    agent = Agent(group, now_s=time.monotonic())
    loop = Loop(agent, crew, rendezvous, inbox=inbox, watch=watch, gone_s=plan.guard.gone_s, lead=lead)
    end = End(agent, loop, plan, rendezvous, run_dir, scheduler, inbox, env)
    inbox.kill_now = end.kill_now
    with contextlib.ExitStack() as stack:
        try:
            goodbye = loop.run()
        finally:
            show_rest(crew.console, inbox, run_dir.node_path(me.name))
        return end.settle(goodbye)


def _headline(group: Plan, interface: str | None, plan: JobPlan, run_dir: RunDir, roll_call_s: float) -> str:
    names = [member.name for member in group.members]
    where = names[0] if len(names) == 1 else f"{len(names)} nodes ({fold_hosts(names)})"
    # Nodes may call the same network by other names.
    network = interface if plan.num_nodes == 1 else plan.cluster.network.data or interface
    over = f" over {network}" if network else ""
    called = "" if plan.num_nodes == 1 else f"; roll call {roll_call_s:.1f} s"
    ranks = count_of(group.world_size, "rank")
    return f"{ranks} on {where}, {group.backend}{over}{called}; logs in {run_dir.attempt_path}"
