"""What an agent does when its job is over for it: show the rest, write and print the verdict, requeue the job, exit.

    end = End(loop)
    ...
    exit_code = end.settle(goodbye)

An agent that found no leader, and all that a cut-off leader has led, must not requeue a job that others go on with, nor
decide its exit code. Whoever leads writes to events.jsonl, within seconds, which node it has lost, or that it has taken
over.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from allranks.host.net import answers
from allranks.host.slurm import cancel_job
from allranks.launch.console import Console
from allranks.launch.inbox import SignalInbox
from allranks.launch.lead.outcome import describe_success
from allranks.launch.loop import Loop
from allranks.launch.plan import count_of
from allranks.launch.queue.ending import goes_back
from allranks.launch.queue.scheduler import Scheduler
from allranks.launch.succession import SEEK_S, find_events, has_ended, is_led_elsewhere
from allranks.launch.workers import kill_descendants
from allranks.model.errors import AllranksError, Exit, exit_for_signal
from allranks.model.finding import Finding, Verdict
from allranks.model.world import Launcher
from allranks.report.refusal import print_findings
from allranks.report.rundir import RunDir
from allranks.report.text import say
from allranks.wire.protocol import Goodbye

if TYPE_CHECKING:
    from allranks.launch.lead.leader import Leader

SILENT_GRACE_S = 1.0
"""Seconds between a verdict that names a silent node and the end of the step."""
LEADER_WRITES_S = 5.0
"""Maximum seconds until a live leader has written down which node it lost."""
WAY_BACK_S = 600.0
"""Seconds for a cut-off node to reach srun's machine again: longer than SlurmdTimeout, 300 s by default."""
READER_S = 5.0
"""A reader that has read nothing for this many seconds (a paused pager, Ctrl-S) is given up when the job has ended."""
SHOW_S = 60.0
"""Seconds to print the rest of the output, while somebody reads it."""
SHOW_INTERRUPTED_S = 2.0


class End:
    """The end of one agent's part of a job."""

    def __init__(self, loop: Loop) -> None:
        workers, self.agent, self.loop, self.inbox = loop.workers, loop.agent, loop, loop.inbox
        self.plan, self.run_dir, self.env = workers.job, workers.run_dir, workers.env
        self.started_s = time.monotonic()
        group = loop.rendezvous.group  # of a later generation: it may be back from a loss
        losses = find_events(self.run_dir.read_events(), "node_lost", node=loop.name)
        self._times_lost = len(losses) if group.generation else 0

    @property
    def leader(self) -> Leader | None:
        """The one in this process."""
        return self.loop.driver.leader if self.loop.driver is not None else None

    def kill_now(self) -> None:
        """A second Ctrl-C: end everything at once, and say how the job ended; nobody else could later."""
        kill_descendants()
        if self.leader is not None:
            exit_code = exit_for_signal(signal.SIGINT)
            interrupted = Verdict(job=self.plan.job, attempt=self.run_dir.attempt, exit_code=exit_code)
            self.run_dir.write_verdict(interrupted, node=self.loop.name)

    def settle(self, goodbye: Goodbye) -> int:
        """Say and write how the job ended, do what follows, and return the exit code."""
        leader, scheduler = self.leader, self.loop.scheduler
        if leader is not None and leader.has_resigned:
            return Exit.OK
        if goodbye.is_cut_off and self._is_led_elsewhere(SEEK_S):
            say(f"the other nodes go on with the job; {self.loop.name} leaves it")
            return self._leave()
        if leader is not None and leader.verdict is not None:
            findings = leader.verdict.findings
            whole = msgspec.structs.replace(leader.verdict, findings=(*findings, *self.loop.rendezvous.warnings))
            is_quiet = leader.is_said or leader.interrupted_by is not None
            shown, is_cut_off = () if is_quiet else findings, goodbye.is_cut_off
            pronounce(whole, self.run_dir, node=self.loop.name, shown=shown, is_cut_off=is_cut_off)
        self._say(goodbye)
        if self.agent.is_leader_lost and self.agent.interrupted_by is None:  # a cancelled job is never requeued
            can_restart = self.plan.request.max_restarts > 0
            if scheduler is not None:  # else it is said
                say(f"ended: {goodbye.summary}")
            # Without SLURM nothing is requeued: only a job that has ended already matters.
            if self._is_led_elsewhere(LEADER_WRITES_S if scheduler is not None else None):
                say(f"the job goes on without {self.loop.name}, or has ended; see the leader's output for its verdict")
                return self._leave() if can_restart or self._has_ended_well() else goodbye.exit_code
            if scheduler is not None and can_restart and not self.inbox.received:
                return scheduler.requeue([self.agent.leader_name], cause="AR012 node-failure")
        if leader is None or scheduler is None:
            return goodbye.exit_code
        exit_code = self._queue_again(goodbye, leader, scheduler)
        if leader.unresponsive:
            end_step(self.env)
        return exit_code

    def _say(self, goodbye: Goodbye) -> None:
        """The last line on this terminal."""
        leader, files = self.leader, self.run_dir.node_path(self.loop.name)
        took_s = time.monotonic() - self.started_s
        if self.inbox.received:
            signum = signal.Signals(self.inbox.received[0]).name
            say(f"{signum} after {took_s:.0f} s: all workers here have ended; output in {files}")
        elif goodbye.summary and leader is None and self.plan.world.launcher is not Launcher.SLURM:
            say(f"ended: {goodbye.summary}; the full report is on {self.agent.leader_name}")
        elif leader is not None and goodbye.exit_code == Exit.OK and not leader.is_leaving:
            script, where = Path(self.plan.request.command[0]).name, str(self.run_dir.attempt_path)
            num_restarts = self.agent.plan.generation - self.loop.rendezvous.group.generation
            say(describe_success(script, self.agent.plan.world_size, took_s, num_restarts, where=where))

    def _has_ended_well(self) -> bool:
        """Whether another leader has ended the job with 0; this agent did not hear it."""
        return has_ended(self.run_dir.read_events(), exit_code=0)

    def _is_led_elsewhere(self, more_s: float | None) -> bool:
        """Whether the run directory says that others go on with the job, or have ended it.

        Args:
            more_s: seconds to wait for that, beyond those in which a lost node is noticed; None: it says so now.
        """
        agent = self.agent
        deadline_s = time.monotonic() + (0.0 if more_s is None else self.plan.guard.gone_s + more_s)
        while not self.inbox.received:
            told = self.run_dir.read_events()
            times_lost = len(find_events(told, "node_lost", node=self.loop.name))
            is_given_up = self.leader is None and times_lost > self._times_lost
            if is_given_up or is_led_elsewhere(told, agent.plan.generation, agent.leader_name):
                return True
            if time.monotonic() >= deadline_s:  # after a last look
                break
            time.sleep(0.2)
        return False

    def _leave(self) -> int:
        """Wait until srun can learn that this task ends, and return the exit code.

        slurmstepd reports a task's end to srun for about 16 s, then gives up, and srun would wait until the job's time
        limit (SLURM 22.05: `Failed to send MESSAGE_TASK_EXIT: No route to host`). Both variables: srun(1).
        """
        host, port = self.env.get("SLURM_LAUNCH_NODE_IPADDR", ""), self.env.get("SLURM_STEP_LAUNCHER_PORT", "")
        if self.loop.scheduler is None or not host or not port.isdecimal() or answers(host, int(port), within_s=1.0):
            return Exit.OK
        say(f"waiting at most {WAY_BACK_S:.0f} s until {host} can be reached: srun runs there, and would wait forever")
        deadline_s = time.monotonic() + WAY_BACK_S
        while not self.inbox.received and time.monotonic() < deadline_s and not answers(host, int(port), within_s=1.0):
            time.sleep(0.2)
        return Exit.OK

    def _queue_again(self, goodbye: Goodbye, leader: Leader, scheduler: Scheduler) -> int:
        """Requeue the job if that is the outcome; return the exit code."""
        exit_code, stopped_by = goodbye.exit_code, leader.interrupted_by or next(iter(self.inbox.received), None)
        has_saved = leader.is_to_requeue
        may_restart = self.plan.request.max_restarts > 0
        has_restarts = may_restart and not leader.is_finished and not self._has_ended_well()
        if goes_back(exit_code, is_to_requeue=has_saved, interrupted_by=stopped_by, has_restarts=has_restarts):
            findings = leader.verdict.findings if leader.verdict else ()
            cause = findings[0].cause if findings else ""
            return scheduler.requeue() if has_saved else scheduler.requeue(leader.culprits, cause=cause)
        if stopped_by == signal.SIGTERM:
            scheduler.outlast_preemption()
        elif stopped_by is None and exit_code == Exit.OK:
            scheduler.stay_complete()
        return goodbye.exit_code


def show_rest(console: Console, inbox: SignalInbox, files: Path) -> None:
    """Print the workers' last output, as long as somebody reads it and no further signal arrives."""
    num_signals = len(inbox.received)
    end_s = time.monotonic() + (SHOW_INTERRUPTED_S if num_signals else SHOW_S)
    num_lost = console.close(
        patience_s=READER_S, is_over=lambda: len(inbox.received) > num_signals or time.monotonic() > end_s
    )
    if num_lost:
        say(f"{count_of(num_lost, 'line')} of output not shown, the terminal was too slow; all are in {files}")


def end_step(env: Mapping[str, str]) -> None:
    """End what is left of this step: srun would wait for a task that hangs until the job's time limit."""
    time.sleep(SILENT_GRACE_S)  # the other agents are leaving by themselves, each with the right exit code
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(AllranksError, KeyError):
        cancel_job(f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}")


def pronounce(
    verdict: Verdict,
    run_dir: RunDir,
    *,
    node: str,
    is_spoken: bool = True,
    shown: Sequence[Finding] | None = None,
    is_cut_off: bool = False,
) -> None:
    """Write the verdict, and print these findings, or all."""
    run_dir.attempt = verdict.attempt
    run_dir.write_verdict(verdict, node=node)
    if is_spoken:
        run_dir.add_event("ended", exit_code=verdict.exit_code, leader=node, is_cut_off=is_cut_off)
        print_findings(verdict.findings if shown is None else shown)
