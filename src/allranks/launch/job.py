"""The five phases of a job, from the view of one agent.

Phase 1  who am I            identity, this machine, cluster.toml -> JobPlan             (launch.plan)
Phase 2  roll call           the leader binds the port, the others connect to it; all    (launch.rendezvous)
                             nodes are alike and reachable, or one verdict says why not  (preflight.rollcall)
Phase 3  start               environment of every worker, with reasons                   (launch.crew, .environment)
Phase 4  watch               agents report, the leader asks the guard, and restarts      (launch.agent, .lead)
                             the workers if that cures the fault
Phase 5  say                 one verdict on the leader's terminal, the same exit code everywhere
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from allranks.guard.watch import Watch
from allranks.host.net import answers, find_interface_of
from allranks.host.node import begin_card_facts
from allranks.host.slurm import cancel_job
from allranks.launch import container
from allranks.launch.agent import Agent
from allranks.launch.console import Console
from allranks.launch.crew import Crew, Output
from allranks.launch.inbox import SignalInbox
from allranks.launch.lead.outcome import describe_success
from allranks.launch.loop import Loop
from allranks.launch.plan import LOOPBACK, JobPlan, Request, count_of
from allranks.launch.queue import ending
from allranks.launch.queue.exclusion import describe_return, read_culprits
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.rendezvous import Rendezvous, apply, take_part
from allranks.launch.screen import Screen
from allranks.launch.standby import Standby, standing_by
from allranks.launch.workers import become_subreaper
from allranks.model.errors import AllranksError, Exit, UsageError, exit_for_signal
from allranks.model.finding import Finding, Verdict
from allranks.model.hostlist import fold_hosts
from allranks.model.world import Launcher
from allranks.preflight.networks import advise_network
from allranks.report.rundir import RunDir, describe_command
from allranks.report.text import Style, fold_ranks, render_findings, say
from allranks.wire.connection import Connection
from allranks.wire.protocol import Goodbye, Plan

if TYPE_CHECKING:
    from allranks.launch.lead.leader import Leader

SILENT_GRACE_S = 1.0
"""Seconds between a verdict that names a silent node and the end of the step."""
LEADER_WRITES_S = 5.0
"""Maximum seconds until a live leader has written down which node it lost."""
WAY_BACK_S = 600.0
"""Seconds for a cut-off node to reach the leader's machine again: longer than SlurmdTimeout, 300 s by default."""
READER_S = 5.0
"""A reader that has read nothing for this many seconds (a paused pager, Ctrl-S) is given up when the job has ended."""
SHOW_S = 60.0
"""Seconds to print the rest of the output, while somebody reads it."""
SHOW_INTERRUPTED_S = 2.0


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
        rendezvous = take_part(applicant, max_restarts=plan.request.max_restarts)
    except AllranksError as exc:
        if exc.finding is None:
            raise
        run_dir.attempt = plan.attempt or run_dir.attempt
        verdict = Verdict(job=plan.job, attempt=run_dir.attempt, exit_code=exc.exit_code, findings=(exc.finding,))
        return _speak_alone(verdict, plan, run_dir, env)
    if isinstance(rendezvous, Goodbye):
        exit_code = _do_not_begin(rendezvous, plan, run_dir)
        if plan.node_index == 0 and plan.world.launcher is Launcher.SLURM:
            _end_silent_tasks(rendezvous.verdict, env)
        return exit_code
    if rendezvous.warnings:
        print("\n" + render_findings(rendezvous.warnings, Style.of(sys.stderr)) + "\n", file=sys.stderr, flush=True)
    with rendezvous.listener or contextlib.nullcontext():
        roll_call_s = time.monotonic() - started_s
        return _run_workers(plan, output, run_dir, rendezvous, inbox, env, screen, standby, roll_call_s=roll_call_s)


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
    return _pronounce(goodbye.verdict, run_dir, node=plan.facts.host, is_spoken=is_speaker)


def _speak_alone(verdict: Verdict, plan: JobPlan, run_dir: RunDir, env: Mapping[str, str]) -> int:
    """Print what this agent found out alone; of several agents without a leader, one prints for all."""
    is_leader, is_slurm = plan.node_index == 0, plan.world.launcher is Launcher.SLURM
    is_first = run_dir.write_verdict(verdict, node=plan.facts.host, is_of_all=is_leader)
    if is_first or not is_slurm:
        _print_findings(verdict.findings)
    if is_first and is_slurm:
        _end_silent_tasks(verdict, env)
    return verdict.exit_code


def _end_silent_tasks(verdict: Verdict | None, env: Mapping[str, str]) -> None:
    """End this step if one of its tasks hangs and never joined."""
    findings = verdict.findings if verdict else ()
    if any(finding.cause.startswith("AR001 ") for finding in findings):
        _end_step(env)


def _end_step(env: Mapping[str, str]) -> None:
    """End what is left of this step: srun would wait for a task that hangs until the job's time limit."""
    time.sleep(SILENT_GRACE_S)  # the other agents are leaving by themselves, each with the right exit code
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(AllranksError, KeyError):
        cancel_job(f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}")


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
    leader_address = rendezvous.leader_address or group.store_address
    data_address = plan.data_path.address if plan.data_path else control_address
    driver = None
    if line is None:
        here, there = socket.socketpair()
        line = Connection(here, peer=me.name)
        # Here, since only the first node needs all that the leader needs.
        from allranks.launch.lead.appoint import appoint_leader

        appointed = driver = appoint_leader(
            plan, rendezvous, Connection(there, peer=me.name), run_dir, scheduler, env, show=_print_findings
        )
        crew.spared = lambda: appointed.started_pids
    leader = driver.leader if driver is not None else None
    watch = Watch(plan.guard, data_address=data_address, control_address=control_address)
    started_s = time.monotonic()
    times_lost = run_dir.count_events("node_lost", node=me.name) if group.generation else 0  # it may be back from that
    agent = Agent(group, now_s=started_s)
    loop = Loop(agent, crew, line, inbox=inbox, watch=watch)

    def kill_now() -> None:
        crew.kill()
        if is_leader:  # else nobody could tell later how the job ended
            interrupted = Verdict(job=plan.job, attempt=run_dir.attempt, exit_code=exit_for_signal(signal.SIGINT))
            run_dir.write_verdict(interrupted, node=me.name)

    inbox.kill_now = kill_now
    try:
        goodbye = loop.run(driver)
    finally:
        _show_rest(crew.console, inbox, run_dir.node_path(me.name))
    if leader is not None and leader.verdict is not None:
        verdict = leader.verdict
        whole = msgspec.structs.replace(verdict, findings=(*verdict.findings, *rendezvous.warnings))
        is_quiet = leader.is_said or leader.interrupted_by is not None
        _pronounce(
            whole, run_dir, node=me.name, already_said=len(whole.findings) if is_quiet else len(rendezvous.warnings)
        )
    if inbox.received:
        name = signal.Signals(inbox.received[0]).name
        waited_s = time.monotonic() - started_s
        say(f"{name} after {waited_s:.0f} s: all workers here have ended; output in {run_dir.node_path(me.name)}")
    elif goodbye.summary and leader is None and plan.world.launcher is not Launcher.SLURM:
        say(f"ended: {goodbye.summary}; the full report is on {group.members[0].name}")
    elif leader is not None and goodbye.exit_code == Exit.OK and not leader.is_leaving:
        script, took_s = Path(plan.request.command[0]).name, time.monotonic() - started_s
        num_restarts = agent.plan.generation - group.generation
        say(describe_success(script, agent.plan.world_size, took_s, num_restarts, where=str(run_dir.attempt_path)))
    if scheduler is None:
        return goodbye.exit_code
    if agent.is_leader_lost and not inbox.received:  # a cancelled job is never requeued
        say(f"ended: {goodbye.summary}")
        if _has_lost(me.name, run_dir, times_before=times_lost, patience_s=plan.guard.gone_s + LEADER_WRITES_S):
            say(f"the leader is alive and reports that it lost {me.name}; see its output for the job's verdict")
            _wait_for_way_back(leader_address, group.store_port, inbox)
            return Exit.OK if plan.request.max_restarts else goodbye.exit_code
        if plan.request.max_restarts:
            return scheduler.requeue([group.members[0].name], cause="AR012 node-failure")
    if leader is None:
        return goodbye.exit_code
    exit_code = _queue_again(goodbye, leader, scheduler, plan, inbox)
    if leader.unresponsive:
        _end_step(env)
    return exit_code


def _show_rest(console: Console, inbox: SignalInbox, files: Path) -> None:
    """Print the workers' last output, as long as somebody reads it and no further signal arrives."""
    num_signals = len(inbox.received)
    end_s = time.monotonic() + (SHOW_INTERRUPTED_S if num_signals else SHOW_S)
    num_lost = console.close(
        patience_s=READER_S, is_over=lambda: len(inbox.received) > num_signals or time.monotonic() > end_s
    )
    if num_lost:
        say(f"{count_of(num_lost, 'line')} of output not shown, the terminal was too slow; all are in {files}")


def _has_lost(node: str, run_dir: RunDir, *, times_before: int, patience_s: float) -> bool:
    """Whether the leader reports this node as lost: it is alive then, and the job continues without this node."""
    deadline_s = time.monotonic() + patience_s
    while run_dir.count_events("node_lost", node=node) <= times_before:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.2)
    return True


def _wait_for_way_back(address: str, port: int, inbox: SignalInbox) -> None:
    """Wait until srun can learn that this task ends.

    slurmstepd reports a task's end to srun for about 16 s, then gives up, and srun would wait until the job's time
    limit (SLURM 22.05: `Failed to send MESSAGE_TASK_EXIT: No route to host`).
    """
    if answers(address, port, within_s=1.0):
        return
    say(f"waiting at most {WAY_BACK_S:.0f} s until {address} is reachable: else srun would never see this agent end")
    deadline_s = time.monotonic() + WAY_BACK_S
    while not inbox.received and time.monotonic() < deadline_s and not answers(address, port, within_s=1.0):
        time.sleep(0.2)


def _queue_again(goodbye: Goodbye, leader: Leader, scheduler: Scheduler, plan: JobPlan, inbox: SignalInbox) -> int:
    """Requeue the job if that is the outcome; return the exit code."""
    sequel = ending.decide_sequel(
        goodbye.exit_code,
        is_to_requeue=leader.is_to_requeue,
        interrupted_by=leader.interrupted_by or next(iter(inbox.received), None),
        has_restarts=bool(plan.request.max_restarts) and not leader.is_finished,
    )
    match sequel:
        case ending.Sequel.REQUEUE if leader.is_to_requeue:
            return scheduler.requeue()
        case ending.Sequel.REQUEUE:
            findings = leader.verdict.findings if leader.verdict else ()
            return scheduler.requeue(leader.culprits, cause=findings[0].cause if findings else "")
        case ending.Sequel.OUTLAST:
            scheduler.outlast_preemption()
        case ending.Sequel.STAY_COMPLETE:
            scheduler.stay_complete()
    return goodbye.exit_code


def _pronounce(verdict: Verdict, run_dir: RunDir, *, node: str, is_spoken: bool = True, already_said: int = 0) -> int:
    """Write the verdict, print the findings not yet printed, and return its exit code."""
    run_dir.attempt = verdict.attempt
    run_dir.write_verdict(verdict, node=node)
    if is_spoken:
        run_dir.add_event("ended", exit_code=verdict.exit_code)
        _print_findings(verdict.findings[: len(verdict.findings) - already_said])
    return verdict.exit_code


def _print_findings(findings: Sequence[Finding]) -> None:
    if findings:
        print("\n" + render_findings(findings, Style.of(sys.stderr)), file=sys.stderr, flush=True)


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
