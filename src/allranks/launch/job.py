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
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.guard.watch import Watch
from allranks.host.net import find_interface_of
from allranks.host.node import begin_card_facts
from allranks.launch import container, events
from allranks.launch.agent import Agent
from allranks.launch.console import Console
from allranks.launch.crew import Crew, Output
from allranks.launch.end import READER_S, End, end_step, print_findings, pronounce, show_rest
from allranks.launch.inbox import SignalInbox
from allranks.launch.loop import Loop
from allranks.launch.plan import LOOPBACK, JobPlan, Request, count_of
from allranks.launch.queue.exclusion import describe_return, read_culprits
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.rendezvous import Rendezvous, apply, take_part
from allranks.launch.screen import Screen
from allranks.launch.standby import Standby, standing_by
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
    python = container.PYTHON if request.container else sys.executable
    if request.container:
        container.find_runtime(request.container_runtime)
        if request.no_python or request.is_module:  # in the image; nobody can look from here
            return [first, *arguments] if request.no_python else [python, "-m", *request.command]
    if request.no_python:
        program = shutil.which(first)
        if program is None and Path(first).is_file():
            raise UsageError(
                f"{first}: not executable; run chmod +x on it, or remove --no-python if it is a Python script"
            )
        if program is None:
            raise UsageError(f"{first}: no such program; --no-python expects a path, or a name on PATH")
        return [program, *arguments]
    if request.is_module:
        # Where `python -m` looks: this directory first.
        if PathFinder.find_spec(first.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"-m {first}: no such module in this directory or for {sys.executable}")
        return [sys.executable, "-m", first, *arguments]
    if not Path(first).exists():
        raise UsageError(
            f"{first}: no such script; expected a Python file (for a module add -m, for another program --no-python)"
        )
    return [python, first, *arguments]


def run_job(plan: JobPlan, output: Output, env: Mapping[str, str]) -> int:
    """Run this node's part of the job and return the exit code, which is the same on all nodes.

    Raises:
        AllranksError: it could not begin.
    """
    screen = Screen()
    command = [] if _find_problem(plan.request) else worker_command(plan.request)
    with screen.as_stderr(), standing_by(plan, command, env) as standby:
        try:
            return _run_phases(plan, output, env, screen, standby)
        finally:
            screen.flush("err", patience_s=READER_S)


def _run_phases(plan: JobPlan, output: Output, env: Mapping[str, str], screen: Screen, standby: Standby | None) -> int:
    inbox = SignalInbox()
    become_subreaper()
    run_dir = RunDir(output.log_dir, plan.job)
    started_s = time.monotonic()
    applicant = apply(
        plan,
        run_dir,
        env,
        problem=plan.problem or _find_problem(plan.request),
        facts=begin_card_facts(plan.cluster.worker_env(env), names=_names(plan), script_path=_script(plan.request)),
        check_signals=inbox.check,
    )
    try:
        rendezvous = take_part(applicant, past=Past(history=_history_of(plan.request)))
    except AllranksError as exc:
        if exc.finding is None:
            raise
        run_dir.attempt = plan.attempt or run_dir.attempt
        verdict = Verdict(job=plan.job, attempt=run_dir.attempt, exit_code=exc.exit_code, findings=(exc.finding,))
        return _speak_alone(verdict, plan, run_dir, env, is_leader=applicant.leads)
    if isinstance(rendezvous, Goodbye):
        exit_code = _do_not_begin(rendezvous, plan, run_dir)
        if applicant.leads and plan.world.launcher is Launcher.SLURM:
            _end_silent_tasks(rendezvous.verdict, env)
        return exit_code
    if rendezvous.warnings:
        print("\n" + render_findings(rendezvous.warnings, Style.of(sys.stderr)) + "\n", file=sys.stderr, flush=True)
    with rendezvous.listener or contextlib.nullcontext():
        roll_call_s = time.monotonic() - started_s
        return _run_workers(plan, output, run_dir, rendezvous, inbox, env, screen, standby, roll_call_s=roll_call_s)


def _history_of(request: Request) -> History:
    return History(restarts_left=request.max_restarts, retries_errors=request.retries_errors)


def _names(plan: JobPlan) -> list[str]:
    """Hosts that all nodes must be able to look up."""
    endpoint = plan.request.endpoint
    return [*plan.node_names[:1], *([endpoint.host] if endpoint else [])]


def _script(request: Request) -> Path | None:
    """The Python file that the workers run, where it is one."""
    return Path(request.command[0]) if request.command and not (request.is_module or request.no_python) else None


def _do_not_begin(goodbye: Goodbye, plan: JobPlan, run_dir: RunDir) -> int:
    """Write the verdict, and print it unless another task prints it on the same terminal."""
    if goodbye.verdict is None or not goodbye.verdict.findings:
        if plan.world.launcher is not Launcher.SLURM or not goodbye.summary:
            say(goodbye.summary)
        return goodbye.exit_code
    # In a SLURM step all terminals are one, and the first task speaks for all.
    is_speaker = plan.world.launcher is not Launcher.SLURM or plan.node_index == 0
    return pronounce(goodbye.verdict, run_dir, node=plan.facts.host, is_spoken=is_speaker)


def _speak_alone(verdict: Verdict, plan: JobPlan, run_dir: RunDir, env: Mapping[str, str], *, is_leader: bool) -> int:
    """Print what this agent found out alone; of several agents without a leader, one prints for all."""
    is_slurm = plan.world.launcher is Launcher.SLURM
    is_first = run_dir.write_verdict(verdict, node=plan.facts.host, is_of_all=is_leader)
    if is_first or not is_slurm:
        print_findings(verdict.findings)
    if is_first and is_slurm:
        _end_silent_tasks(verdict, env)
    return verdict.exit_code


def _end_silent_tasks(verdict: Verdict | None, env: Mapping[str, str]) -> None:
    """End this step if one of its tasks hangs and never joined."""
    findings = verdict.findings if verdict else ()
    if any(finding.cause.startswith("AR001 ") for finding in findings):
        end_step(env)


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
    rendezvous: Rendezvous,
    inbox: SignalInbox,
    env: Mapping[str, str],
    screen: Screen,
    standby: Standby | None,
    *,
    roll_call_s: float,
) -> int:
    group = rendezvous.group
    me = group.members[group.node_index]
    is_leader = rendezvous.leader is None
    interface = plan.data_path.interface if plan.data_path else _interface_to_leader(plan, rendezvous)
    is_port_held = env.get("ALLRANKS_HOOK") != "0" and plan.request.container is None
    listener = rendezvous.listener
    command = worker_command(plan.request)
    if is_leader:
        run_dir.add_event(
            "started",
            generation=0,
            job=plan.job,
            command=describe_command(command, env),
            members=[m.name for m in group.members],
            pid=os.getpid(),
        )
        for note in plan.world.notes:
            say(f"note: {note}")
        if plan.data_path is None and (advice := advise_network([*rendezvous.cards.values()], rendezvous.own_address)):
            say(f"note: {advice}")
        say(_headline(group, interface, plan, run_dir, roll_call_s))
        if group.attempt and (words := describe_return(read_culprits(run_dir.path), attempt=group.attempt)):
            say(words)
    elif plan.world.launcher is Launcher.NONE:  # started by hand, on a terminal of its own
        ranks = fold_ranks(range(me.first_rank, me.first_rank + me.num_workers))
        leads = f"{group.members[0].name} leads and prints the report"
        say(f"{ranks} of {group.world_size} on {me.name}; {leads}; logs in {run_dir.node_path(me.name)}")
    if listener is not None and not is_port_held:
        listener.close()  # rank 0 binds the port itself; between here and there it is free for anybody
    crew = Crew(
        job=plan,
        command=command,
        run_dir=run_dir,
        output=output,
        env=env,
        interface=interface,
        store_fd=listener.fileno() if listener is not None and is_port_held else None,
        say=say,
        standby=standby,
        console=Console(screen),
    )
    scheduler = None
    if plan.world.launcher is Launcher.SLURM:
        scheduler = Scheduler.of(env, run_dir=run_dir.path, attempt=group.attempt, min_nodes=plan.min_nodes, say=say)
    line = rendezvous.leader
    control_address = rendezvous.own_address or LOOPBACK
    data_address = plan.data_path.address if plan.data_path else control_address
    driver = None
    if line is None:
        here, there = socket.socketpair()
        line = Connection(here, peer=me.name)
        # Here, since only a leader's node needs all that the leader needs.
        from allranks.launch.lead.appoint import appoint_leader

        driver = appoint_leader(
            plan, rendezvous, Connection(there, peer=me.name), run_dir, scheduler, env, show=print_findings
        )

    def lead(effect: events.Lead, connections: Mapping[int, Connection]) -> LeaderDriver:
        from allranks.launch.lead.appoint import appoint_successor

        listener = stack.enter_context(bind_port(plan.port))
        port = int(listener.getsockname()[1])
        if is_port_held:
            crew.store_fd = listener.fileno()
        else:
            listener.close()
        rendezvous.announce(port)
        return appoint_successor(
            effect, connections, plan, rendezvous, run_dir, scheduler, env, node=agent.node, store_port=port,
            show=print_findings,
        )  # fmt: skip

    agent = Agent(group, now_s=time.monotonic())
    loop = Loop(
        agent,
        crew,
        line,
        inbox=inbox,
        watch=Watch(plan.guard, data_address=data_address, control_address=control_address),
        gone_s=plan.guard.gone_s,
        acceptor=rendezvous.acceptor,
        seek=rendezvous.seek,
        lead=lead,
    )
    crew.spared = lambda: loop.driver.started_pids if loop.driver is not None else []
    end = End(agent, loop, plan, rendezvous, run_dir, scheduler, inbox, env)
    inbox.kill_now = lambda: end.kill_now(crew)
    with contextlib.ExitStack() as stack:
        try:
            goodbye = loop.run(driver)
        finally:
            show_rest(crew.console, inbox, run_dir.node_path(me.name))
        return end.settle(goodbye)


def _headline(group: Plan, interface: str | None, plan: JobPlan, run_dir: RunDir, roll_call_s: float) -> str:
    names = [member.name for member in group.members]
    where = names[0] if len(names) == 1 else f"{len(names)} nodes ({fold_hosts(names)})"
    # Nodes may call the same network by other names.
    network = interface if plan.is_one_machine else plan.cluster.network.data or interface
    over = f" over {network}" if network else ""
    called = "" if plan.is_one_machine else f"; roll call {roll_call_s:.1f} s"
    ranks = count_of(group.world_size, "rank")
    return f"{ranks} on {where}, {group.backend}{over}{called}; logs in {run_dir.attempt_path}"


def _interface_to_leader(plan: JobPlan, rendezvous: Rendezvous) -> str | None:
    """The interface that the agents' own connection uses: it works."""
    address = rendezvous.own_address
    nic = find_interface_of(address, plan.facts.interfaces) if address is not None else None
    return nic.name if nic else None
