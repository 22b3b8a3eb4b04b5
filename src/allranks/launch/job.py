"""The five phases of a job, from the view of one agent.

Phase 1  who am I            identity, this machine, cluster.toml -> JobPlan             (launch.plan)
Phase 2  roll call           the leader binds the port, the others connect to it; all    (preflight.entry)
                             nodes are alike and reachable, or one verdict says why not  (preflight.rollcall)
Phase 3  start               environment of every worker, with reasons                   (launch.worker_group)
Phase 4  watch               agents report, the leader asks the guard, and restarts      (launch.agent, .lead)
                             the workers if that cures the fault
Phase 5  say                 one verdict on the leader's terminal, the same exit code everywhere (launch.end)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import msgspec

from allranks.causes.book import find_cause, traits_of
from allranks.causes.cause import Trait
from allranks.causes.outcome import failed
from allranks.host.node import NodeFacts, begin_card_facts
from allranks.host.process import read_boot_id, read_start_ticks
from allranks.host.slurm_job import own_job
from allranks.launch import container
from allranks.launch.end import READER_S, end_step, kill_now, settle, show_rest, srun_address
from allranks.launch.inbox import SignalInbox
from allranks.launch.last_report import leave_report
from allranks.launch.lead.assignment import make_group
from allranks.launch.lead.course import Phase
from allranks.launch.lead.network import ask_topology, describe_network, read_bench
from allranks.launch.live import Shows
from allranks.launch.loop import Loop
from allranks.launch.plan import JobPlan, Request, no_script
from allranks.launch.queue.revival import BACK_VARIABLE
from allranks.launch.queue.scheduler import Scheduler, describe_return, read_culprits
from allranks.launch.sweeper import Sweeper
from allranks.launch.worker_environment import wire_variables
from allranks.launch.worker_group import WorkerGroup
from allranks.launch.workers import become_subreaper
from allranks.model.errors import AllranksError, SetupError, UsageError
from allranks.model.finding import Verdict
from allranks.model.past import History, Past
from allranks.model.world import Launcher
from allranks.preflight.applicant import Applicant
from allranks.preflight.called import Called, Rendezvous
from allranks.preflight.node_entry import Entry
from allranks.preflight.ranks_as_nodes import describe_group
from allranks.report.mask import mask_command
from allranks.report.refusal import print_findings
from allranks.report.rundir import RunDir, this_directory
from allranks.report.text import fold_ranks, say
from allranks.state.saved.owner import refuse
from allranks.wire.protocol import Goodbye, Plan, Srun


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
        if is_here:
            _refuse_unstartable(Path(program))
        return [program, *arguments]
    if request.is_module:
        # Where `python -m` looks: this directory first.
        if is_here and PathFinder.find_spec(first.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"-m {first}: no such module in this directory or for {sys.executable}")
        return [python, "-m", first, *arguments]
    if not Path(first).exists():
        raise no_script(first)
    if Path(first).is_dir() and not Path(first, "__main__.py").exists():
        raise UsageError(f"{first}: this directory has no __main__.py, which Python would run; name the script in it")
    if first.endswith(".sh"):
        raise UsageError(f"{first}: a shell script, not a Python file; add --no-python")
    # Python takes what begins with a dash for an option of its own.
    return [python, f"./{first}" if first.startswith("-") else first, *arguments]


def _refuse_unstartable(program: Path) -> None:
    """Refuse a text file that no kernel can start; whether its interpreter is there is a question to each node.

    Raises:
        UsageError: what its first line lacks.
    """
    try:
        with program.open("rb") as file:
            head = file.read(256)
    except OSError:  # it may be started even so
        return
    first = head.split(b"\n")[0]
    if head.startswith(b"#!") and first.endswith(b"\r"):
        raise UsageError(f"{program}: its lines end with CR LF, as on Windows, and so does the name in its #! line")
    if not (head.startswith((b"#!", b"\x7fELF")) or b"\0" in head):
        what = "has no #! line, so the kernel cannot start it" if head else "is empty"
        raise UsageError(f"{program}: it {what}; begin it with #!/bin/bash, or another interpreter's path")


def run_job(
    plan: JobPlan,
    env: Mapping[str, str],
    *,
    log_dir: Path,
    hidden: Collection[tuple[int, str]],
    shows: Shows | None = None,
) -> int:
    """Run this node's part of the job and return the exit code, which is the same on all nodes.

    Args:
        log_dir: where run directories are.
        hidden: local ranks and streams (`out`, `err`) that the terminal does not show.
        shows: what it shows of the job; None: a row on a terminal, else lines.
    Raises:
        AllranksError: it could not begin.
    """
    command: list[str] = []
    try:
        command = worker_command(plan.request)
    except AllranksError as exc:
        plan = replace(plan, problem=plan.problem or exc)
    sweeper = Sweeper.start()
    try:
        run_dir = RunDir(log_dir, plan.job)
        workers = WorkerGroup(
            job=plan, command=command, run_dir=run_dir, hidden=hidden, env=env, sweeper=sweeper, shows=shows
        )
        workers.live.stop_tidily()
        err = workers.console.screen["err"]
        with contextlib.redirect_stderr(err.as_text()):
            try:
                workers.begin_standby()
                return _run_phases(workers)
            finally:
                workers.live.end()
                workers.end_standby()
                run_dir.status_files.close()
                if words := run_dir.last_files.close():
                    say(words)
                if workers.owner is not None:
                    workers.owner.end()
                err.drain(patience_s=READER_S)
    finally:
        sweeper.dismiss()


def _run_phases(workers: WorkerGroup) -> int:
    inbox, plan, env, started_s = SignalInbox(), workers.job, workers.env, time.monotonic()
    request = plan.request
    become_subreaper()
    is_script = request.command and not (request.is_module or request.no_python)
    facts = begin_card_facts(
        {**plan.cluster.worker_env(env), **wire_variables(request)},
        names=[*plan.node_names[:1], *([request.endpoint.host] if request.endpoint else [])],
        script_path=Path(request.command[0]) if is_script else None,
    )
    applicant = Applicant(
        plan=plan,
        is_back=BACK_VARIABLE in env,
        shares_run_dir=plan.is_slurm,
        has_successors=True,
        run_dir=workers.run_dir,
        env=env,
        card_facts=facts,
        check_signals=partial(_check, inbox, workers),
    )
    try:
        with Entry(applicant) as entry:
            rendezvous = entry.take_part()
        if isinstance(rendezvous, Called):
            rendezvous = rendezvous.give_out(partial(_make_plans, workers=workers, check_signals=inbox.check))
    except AllranksError as exc:
        if exc.finding is None:
            raise
        return _do_not_begin(exc, applicant)
    if isinstance(rendezvous, Goodbye):
        return _do_not_begin(rendezvous, applicant)
    print_findings(rendezvous.warnings, after="\n")
    return _run_workers(workers, rendezvous, inbox, roll_call_s=time.monotonic() - started_s)


def _check(inbox: SignalInbox, workers: WorkerGroup) -> None:
    """Several times a second during the roll call: raise StoppedBySignal, or show who is missing."""
    inbox.check()
    workers.live.tell(workers.run_dir.status_files.newest)
    workers.console.draw()


def _no_place(kind: type[AllranksError], what: str, fix: str, *, facts: NodeFacts) -> AllranksError:
    """Return the error of a job that would find no place for its checkpoints."""
    finding = failed(what=what).to_finding(find_cause("AR512"), node=facts.host, reader=facts.reader)
    return kind(f"{what}; {fix}", finding=msgspec.structs.replace(finding, fix=fix))


def _make_plans(called: Called, *, workers: WorkerGroup, check_signals: Callable[[], None]) -> dict[int, Plan]:
    if other := workers.make_owner(generation=0).begin(check_signals):
        raise _no_place(SetupError, *refuse(workers.checkpoints, other), facts=workers.job.facts)
    if workers.owner is not None and (why := workers.owner.unmade):
        what, fix = f"{workers.checkpoints} cannot be made: {why}", "name another directory"
        raise _no_place(UsageError, what, f"{fix} (--checkpoint-dir, ALLRANKS_CHECKPOINT_DIR)", facts=workers.job.facts)
    applicant, request = called.applicant, workers.job.request
    max_restarts = request.max_restarts
    can_order = request.node_rank is None and len(called.cards) > 2
    network = describe_network(
        called.network,
        {index: card.host for index, card in sorted(called.cards.items())},
        called.interfaces,
        table=read_bench(workers.run_dir.root),
        topology=ask_topology() if applicant.plan.is_slurm and can_order else "",
        can_order=can_order,
    )
    own = {address for interface in applicant.plan.facts.interfaces for address in interface.addresses}
    address, port = srun_address(applicant.env)
    return make_group(
        called.cards,
        srun=Srun(node=0, address=address, port=port) if address in own else None,
        addresses=called.addresses,
        wanted_backend=applicant.plan.wanted_backend,
        network=network,
        past=Past(history=History(restarts_left=max_restarts, retries_errors=request.retries_errors)),
        attempt=applicant.run_dir.attempt,
        store_address=called.store_address,
        store_port=called.port,
        max_restarts=max_restarts,
    )


def _describe_ring(group: Plan) -> str | None:
    why = group.network.ring_reason
    return f"ranks are in the order {', '.join(member.name for member in group.members)}: {why}" if why else None


def _do_not_begin(why: Goodbye | AllranksError, applicant: Applicant) -> int:
    """Write and print why the job does not begin: the verdict of all, or what this agent found out alone."""
    plan, run_dir = applicant.plan, applicant.run_dir
    if (seen := run_dir.status_files.newest) is not None:  # of the roll call that this agent has held
        over: dict[str, Any] = {"phase": Phase.OVER, "exit_code": why.exit_code, "written_s": round(time.time(), 3)}
        run_dir.status_files.show(msgspec.structs.replace(seen, gives_up_in_s=None, **over))
    node, is_slurm = plan.facts.host, plan.is_slurm
    if isinstance(why, Goodbye):
        if why.verdict is None or not why.verdict.findings:
            if why.summary and not is_slurm:  # in a SLURM step the leader has the same terminal
                say(why.summary)
            return why.exit_code
        verdict, is_in_charge = why.verdict, applicant.leads
        run_dir.write_verdict(verdict, node=node)
        # In a SLURM step all terminals are one, and the first task speaks for all.
        if not is_slurm or plan.node_index == 0:
            run_dir.add_event("ended", exit_code=verdict.exit_code, leader=node, is_cut_off=False)
            print_findings(verdict.findings)
    else:
        assert why.finding is not None
        run_dir.attempt = plan.attempt or run_dir.attempt
        verdict = Verdict(job=plan.job, attempt=run_dir.attempt, exit_code=why.exit_code, findings=(why.finding,))
        # Of several agents without a leader, one prints for all.
        is_in_charge = run_dir.write_verdict(verdict, node=node, is_of_all=applicant.leads)
        if is_in_charge or not is_slurm:
            print_findings(verdict.findings)
    if is_in_charge:
        leave_report(run_dir)
    has_silent_task = any(Trait.HEARS_NO_VERDICT in traits_of(finding.cause_id) for finding in verdict.findings)
    if is_in_charge and is_slurm and has_silent_task:
        end_step(applicant.env)
    return verdict.exit_code


def _run_workers(workers: WorkerGroup, rendezvous: Rendezvous, inbox: SignalInbox, *, roll_call_s: float) -> int:
    plan, run_dir, group = workers.job, workers.run_dir, rendezvous.group
    me, interface = group.members[group.node_index], rendezvous.interface
    names = [member.name for member in group.members]
    with contextlib.suppress(OSError):
        workers.sweeper.tell(run_dir.hold_attempt(), me.name)
    if rendezvous.leader is None:
        command = mask_command(workers.command, workers.env)
        about = {"job": plan.job, "command": command, "cwd": this_directory(), "pid": os.getpid()}
        about |= {"start_ticks": read_start_ticks(os.getpid()), "boot_id": read_boot_id()}  # a pid is given again
        run_dir.add_event("started", generation=0, members=names, max_restarts=plan.request.max_restarts, **about)
        for note in (*plan.world.notes, *filter(None, [rendezvous.advice, _describe_ring(group)])):
            say(f"note: {note}")
        # Nodes may call the same network by other names.
        network = interface if plan.num_nodes == 1 else plan.cluster.network.data or interface
        called = "" if plan.num_nodes == 1 else f"; roll call {roll_call_s:.1f} s"
        say(f"{describe_group(group, names, network)}{called}; logs in {run_dir.attempt_path}")
        if group.attempt and (words := describe_return(read_culprits(run_dir), attempt=group.attempt)):
            say(words)
    elif plan.launcher is Launcher.NONE:  # started by hand, on a terminal of its own
        ranks = fold_ranks(range(me.first_rank, me.first_rank + me.num_workers))
        leads = f"{names[0]} leads and prints the report"
        say(f"{ranks} of {group.world_size} on {me.name}; {leads}; logs in {run_dir.node_path(me.name)}")
    job = own_job(workers.env) if plan.is_slurm else None  # another launcher's is not requeued
    scheduler = Scheduler(job, workers.env, run_dir, min_nodes=plan.min_nodes, say=say) if job else None
    loop = Loop(workers, rendezvous, inbox=inbox, scheduler=scheduler)
    inbox.kill_now = partial(kill_now, loop)
    with loop.rooms:
        try:
            goodbye = loop.run()
        finally:
            show_rest(workers.console, inbox, run_dir.node_path(me.name))
        exit_code = settle(loop, goodbye)
    if loop.leader is not None and loop.leader.verdict is not None:
        leave_report(run_dir)
    return exit_code
