"""What an agent does when its job is over for it: show the rest, write and print the verdict, requeue the job, exit.

    goodbye = loop.run()
    show_rest(console, inbox, files)
    exit_code = settle(loop, goodbye)

An agent that found no leader, and all that a cut-off leader has led, must not requeue a job that others go on with, nor
decide its exit code. Whoever leads writes to events.jsonl, within seconds, which node it has lost, or that it has taken
over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from allranks.causes.book import find_cause
from allranks.guard.disk import describe_lost
from allranks.host.net import answers
from allranks.host.slurm import cancel_job
from allranks.launch.console import Console
from allranks.launch.inbox import SignalInbox
from allranks.launch.lead.summary import describe_loss, describe_output
from allranks.launch.loop import Loop
from allranks.launch.queue.ending import goes_back
from allranks.launch.succession import SEEK_S, find_end, find_events, has_ended, is_led_elsewhere
from allranks.launch.workers import kill_descendants
from allranks.model.errors import AllranksError, Exit, exit_for_signal
from allranks.model.finding import Verdict
from allranks.report.account import describe_account, describe_end
from allranks.report.refusal import print_findings
from allranks.report.rundir import REPORT, as_file_name, this_directory
from allranks.report.runs import describe_kill, name_script
from allranks.report.text import describe_size, say
from allranks.wire.protocol import Goodbye

SILENT_GRACE_S = 1.0
"""Seconds between a verdict that names a silent node and the end of the step."""
LEADER_WRITES_S = 5.0
"""Maximum seconds until a live leader has written down which node it lost."""
WAY_BACK_S = 600.0
"""Seconds for a cut-off node to reach srun's machine again: longer than SlurmdTimeout, 300 s by default."""
READER_S = 5.0
"""A reader that has read nothing for this many seconds (a paused pager, Ctrl-S) does not get the last lines."""
SHOW_S = 5.0
"""Seconds to print the rest of the output once the workers have ended; all of it is in the files."""
SHOW_INTERRUPTED_S = 2.0


def settle(loop: Loop, goodbye: Goodbye) -> int:
    """Say and write how the job ended, do what follows, and return the exit code."""
    leader, scheduler, agent = loop.leader, loop.scheduler, loop.agent
    plan, run_dir = loop.workers.job, loop.workers.run_dir
    can_restart = plan.request.max_restarts > 0
    if leader is not None and leader.has_resigned:
        return Exit.OK
    if goodbye.is_cut_off and _is_led_elsewhere(loop, plan.guard.gone_s + SEEK_S):
        say(f"the other nodes go on with the job; {loop.name} leaves it")
        return _leave(loop)
    if leader is not None and leader.verdict is not None:
        findings, exit_code = leader.verdict.findings, leader.verdict.exit_code
        whole = msgspec.structs.replace(leader.verdict, findings=(*findings, *loop.rendezvous.warnings))
        run_dir.write_verdict(whole, node=loop.name)
        run_dir.add_event("ended", exit_code=exit_code, leader=loop.name, is_cut_off=goodbye.is_cut_off)
        if not leader.is_said and leader.interrupted_by is None:
            print_findings(findings)
    _say_end(loop, goodbye)
    if agent.is_leader_lost and agent.interrupted_by is None:  # a cancelled job is never requeued
        if scheduler is not None:  # else it is said
            say(f"ended: {goodbye.summary}")
        # Without SLURM nothing is requeued: only a job that has ended already matters.
        if _is_led_elsewhere(loop, plan.guard.gone_s + LEADER_WRITES_S if scheduler is not None else 0.0):
            say(f"the job goes on without {loop.name}, or has ended; see the leader's output for its verdict")
            return _leave(loop) if can_restart or has_ended(run_dir.read_events(), exit_code=0) else goodbye.exit_code
        if _tell_loss(loop, goodbye):
            run_dir.write_exit_code(goodbye.exit_code)
        if scheduler is not None and can_restart and not loop.inbox.received:
            return scheduler.requeue([agent.leader_name], cause=find_cause("AR012").label)
    if leader is None or scheduler is None:
        return goodbye.exit_code
    stopped_by = leader.interrupted_by or next(iter(loop.inbox.received), None)
    # Another leader may have ended the job with 0, and this agent did not hear it.
    has_restarts = can_restart and not leader.is_finished and not has_ended(run_dir.read_events(), exit_code=0)
    exit_code, has_saved = goodbye.exit_code, leader.is_to_requeue
    if goes_back(exit_code, is_to_requeue=has_saved, interrupted_by=stopped_by, has_restarts=has_restarts):
        cause = leader.verdict.findings[0].cause if leader.verdict and leader.verdict.findings else ""
        exit_code = scheduler.requeue() if has_saved else scheduler.requeue(leader.culprits, cause=cause)
    elif stopped_by == signal.SIGTERM:
        scheduler.outlast_preemption()
    elif stopped_by is None and exit_code == Exit.OK:
        scheduler.stay_complete()
    if not goodbye.is_cut_off:
        run_dir.write_exit_code(exit_code)
    if leader.unresponsive:
        end_step(loop.workers.env)
    return exit_code


def _tell_loss(loop: Loop, goodbye: Goodbye) -> bool:
    """Write and print that the leader is lost, and nobody goes on; returns whether this agent speaks for all others."""
    plan, run_dir, leader = loop.workers.job, loop.workers.run_dir, loop.agent.leader_name
    ended = find_end(run_dir.read_events(), leader)
    how = f"killed by {describe_kill(ended)}" if ended else None
    finding = describe_loss(leader, goodbye.summary, how, reader=plan.facts.reader)
    verdict = Verdict(job=plan.job, attempt=run_dir.attempt, exit_code=goodbye.exit_code, findings=(finding,))
    speaks = run_dir.write_verdict(verdict, node=loop.name, is_of_all=False)
    if speaks or not plan.is_slurm:
        print_findings(verdict.findings)
    return speaks


def _say_end(loop: Loop, goodbye: Goodbye) -> None:
    """The last lines on this terminal."""
    leader, agent, plan, run_dir = loop.leader, loop.agent, loop.workers.job, loop.workers.run_dir
    took_s, status = time.monotonic() - loop.began_s, run_dir.status_files.newest
    account = describe_account(status) if leader is not None and not goodbye.is_cut_off else []
    for line in account:
        say(line)
    has_report = leader is not None and leader.verdict is not None  # it is written when all else is done
    report = f"report in {run_dir.path / REPORT}" if has_report else ""
    if loop.inbox.received:
        signum = signal.Signals(loop.inbox.received[0]).name
        output = "; ".join(filter(None, [_find_output(loop, run_dir.node_path(loop.name)), report]))
        say(f"{signum} after {took_s:.0f} s: all workers here have ended; {output}")
    elif goodbye.summary and leader is None and not plan.is_slurm and not agent.is_leader_lost:
        say(f"ended: {goodbye.summary}; the full report is on {agent.leader_name}")
    elif leader is not None and not leader.is_leaving:
        lost = "" if goodbye.exit_code else describe_lost(leader.lost_lines)  # after a fault it has been said
        end = describe_end(
            name_script(loop.workers.command, this_directory()),
            status,
            exit_code=goodbye.exit_code,
            num_ranks=agent.plan.world_size,
            took_s=took_s,
            num_restarts=agent.plan.generation - loop.rendezvous.group.generation,
            output="; ".join(filter(None, [lost, _find_output(loop, run_dir.attempt_path), report])),
        )
        say(end)


def _find_output(loop: Loop, where: Path) -> str:
    """Say where the output of the ranks is, as far as it is there: of this node's, and of all that share the place."""
    folder, names = loop.workers.folder, [as_file_name(member.name) for member in loop.agent.plan.members]
    if folder is None:
        return describe_output(str(where), is_gone=False)
    files = [worker.file_name(stream) for worker in loop.workers.processes for stream in worker.starts]
    own, others = folder.path.name, folder.path.parent
    if folder.is_in_place:
        missing = [f"{own}/{name}" for name in files if not folder.has(name)]
    elif len(names) == 1 or not others.is_dir():
        return describe_output(str(where), is_gone=True)
    else:
        missing = [own]
    room = loop.rooms.seen()
    if room is not None and room.is_shared:
        with contextlib.suppress(OSError):
            there = {path.name for path in others.iterdir()}
            missing += [name for name in names if name not in there and name != own]
    return describe_output(str(where), is_gone=False, missing=missing)


def _is_led_elsewhere(loop: Loop, within_s: float) -> bool:
    """Whether the run directory says in this time that others go on with the job, or have ended it; it is read once
    at least."""
    agent, deadline_s = loop.agent, time.monotonic() + within_s
    while not loop.inbox.received:
        told = loop.workers.run_dir.read_events()
        is_given_up = loop.leader is None and len(find_events(told, "node_lost", node=loop.name)) > loop.times_lost
        if is_given_up or is_led_elsewhere(told, agent.plan.generation, agent.leader_name):
            return True
        if time.monotonic() >= deadline_s:  # after a last look
            break
        time.sleep(0.2)
    return False


def _leave(loop: Loop) -> int:
    """Wait until srun can learn that this task ends, and return the exit code.

    slurmstepd reports a task's end to srun for about 16 s, then gives up, and srun would wait until the job's time
    limit (SLURM 22.05: `Failed to send MESSAGE_TASK_EXIT: No route to host`). Both variables: srun(1).
    """
    host, port = srun_address(loop.workers.env)
    if loop.scheduler is None or not host or not port or answers(host, port, within_s=1.0):
        return Exit.OK
    say(f"waiting at most {WAY_BACK_S:.0f} s until {host} can be reached: srun runs there, and would wait forever")
    deadline_s = time.monotonic() + WAY_BACK_S
    while not loop.inbox.received and time.monotonic() < deadline_s and not answers(host, port, within_s=1.0):
        time.sleep(0.2)
    return Exit.OK


def srun_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Return where the srun of this task listens; empty and 0 where nobody says so."""
    port = env.get("SLURM_STEP_LAUNCHER_PORT", "")
    return env.get("SLURM_LAUNCH_NODE_IPADDR", ""), int(port) if port.isdecimal() else 0


def kill_now(loop: Loop) -> None:
    """A second Ctrl-C: end everything at once, and say how the job ended; nobody else could later."""
    kill_descendants()
    loop.workers.console.leave_line()
    with contextlib.suppress(OSError):  # nobody reads
        os.write(2, f"allranks: second Ctrl-C: all workers on {loop.name} were killed\n".encode())
    if loop.leader is not None:
        job, run_dir = loop.workers.job.job, loop.workers.run_dir
        interrupted = Verdict(job=job, attempt=run_dir.attempt, exit_code=exit_for_signal(signal.SIGINT))
        run_dir.write_verdict(interrupted, node=loop.name)


def show_rest(console: Console, inbox: SignalInbox, files: Path) -> None:
    """Print the workers' last output, within SHOW_S and as long as no further signal arrives."""
    num_signals = len(inbox.received)
    end_s = time.monotonic() + (SHOW_INTERRUPTED_S if num_signals else SHOW_S)
    num_left = console.close(is_over=lambda: len(inbox.received) > num_signals or time.monotonic() > end_s)
    if num_left:
        say(f"{describe_size(num_left)} of output not shown; all of it is in {files}")


def end_step(env: Mapping[str, str]) -> None:
    """End what is left of this step: srun would wait for a task that hangs until the job's time limit."""
    time.sleep(SILENT_GRACE_S)  # the other agents are leaving by themselves, each with the right exit code
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(AllranksError, KeyError):
        cancel_job(f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}")
