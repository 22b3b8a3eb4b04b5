"""What must hold when a life of a job is over. Each function is one rule, its docstring the sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from allranks.launch.agent import SWEEP_S
from allranks.launch.events import GRACE_S
from allranks.launch.grace import REAP_S
from allranks.launch.lead.course import ANSWER_S, RESTART_GRACE_S, SHUTDOWN_S

from .invariants import SLACK_S, Violation
from .lives import LOSSES, WORDS, Kind

if TYPE_CHECKING:
    from .network import Process
    from .world import World


def all_is_over(world: World) -> str:
    """A job ends: no agent still waits for something, whatever has happened."""
    phases = ", ".join(f"n{each.node} {each.agent.phase if each.agent else 'joining'}" for each in world.waiting)
    leaders = ", ".join(f"n{each.node} is {each.leader.phase}" for each in world.leads)
    return f"of the leaders, {leaders}; {phases}" if phases else ""


def a_leader_has_a_verdict(world: World) -> str:
    """A leader that lives to its end has a verdict."""
    for lead in world.leads:
        if lead.process.exit_code is not None and lead.verdict is None and not lead.process.agent.is_leader_lost:
            return f"n{lead.node} has none"
    return ""


def one_exit_code(world: World) -> str:
    """All agents that hear a verdict exit with its code, but one that is left out, or cut off while others go on."""
    for process in world.processes:
        if process.exit_code is None or process.heard is None:
            continue
        expected = 0 if _has_left(process) else process.heard.exit_code
        if process.exit_code != expected:
            return f"n{process.node} exits with {process.exit_code}, the verdict says {expected}"
    return ""


def _has_left(process: Process) -> bool:
    """Whether an agent left a job that others go on with: left out, or its leader was cut off, or it has resigned."""
    has_resigned = process.lead is not None and process.lead.leader.has_resigned
    is_cut_off = process.heard is not None and process.heard.is_cut_off
    return process.exit_code == 0 and (has_resigned or is_cut_off or process.was_left_out)


def the_healthy_hear_the_verdict(world: World) -> str:
    """Where no agent and no link is at fault, all agents exit with the code of the verdict."""
    kinds = {fault.kind for fault in world.life.faults}
    if len(world.verdicts) != 1 or world.is_network_faulty or world.life.answer_s >= ANSWER_S:
        return ""
    if kinds & {*LOSSES, Kind.PREEMPTED} or any(process.was_killed for process in world.processes):
        return ""
    (_, verdict), *_ = world.verdicts
    for process in world.processes:
        is_lost = process.is_stopped or process.was_left_out or process.node in world.faulty
        if process.exit_code not in (None, verdict.exit_code) and not is_lost:
            return f"n{process.node} was healthy and exits with {process.exit_code}, not with {verdict.exit_code}"
    return ""


def one_verdict(world: World) -> str:
    """All agents that hear a verdict hear the same one, whoever led."""
    members = [each for each in world.processes if each.lead is None and not _has_left(each)]
    heard = [each for each in members if each.heard and not (each.heard.is_cut_off and _knows_no_better(each, world))]
    heard = [each for each in heard if not each.was_killed]  # nobody hears it from these
    codes = {process.heard.exit_code for process in heard if process.agent and process.agent.goodbye is process.heard}
    return f"exit codes {codes}" if len(codes) > 1 and not _has_ended_unseen(world) else ""


def _knows_no_better(process: Process, world: World) -> bool:
    """Whether one whose leader was cut off cannot see that others go on, or was told to stop, and does not look."""
    return bool(world.blind) or (process.agent is not None and process.agent.interrupted_by is not None)


def _has_ended_unseen(world: World) -> bool:
    """Whether somebody led on when the job had ended, and could not know: the last word and the line did not arrive."""
    ends = [each for each in world.recorded if each.event == "ended" and not each.fields["is_cut_off"]]
    if not ends:
        return False
    first, *later = sorted(ends, key=lambda end: end.at_s)
    seen_s, others = first.at_s + world.life.seen_s, {end.node for end in later} - {first.node}
    led = [lead for lead in world.leads if lead.node in others]
    return any(world.were_blind & {first.node, lead.node} or lead.begun_s < seen_s for lead in led)


def requeued_once(world: World) -> str:
    """A job is requeued only where that was asked for and SLURM can."""
    was_warned = any(lead.leader.is_to_requeue for lead in world.leads)
    if world.requeues and not world.life.max_restarts and not was_warned:
        return "without --max-restarts"
    return "it cannot be requeued" if was_warned and not world.life.can_requeue else ""


def a_warned_job_goes_back(world: World) -> str:
    """A job that saved because its time limit was near, and that nobody cancelled, goes back into the queue."""
    life = world.life
    asked = [each for each in world.recorded if each.event == "save_asked"]
    has_saved = any("goes back into the queue" in each.fields["why"] for each in asked)
    was_stopped = any(process.signalled for process in world.processes)
    codes = [(lead.process.exit_code, verdict.findings) for lead, verdict in world.verdicts]
    if not has_saved or codes != [(0, ())]:
        return ""
    is_finished = any(each.step >= life.num_steps for each in world.kernel.generations.values())
    return "it did not" if not (world.requeues or was_stopped or is_finished) else ""


def a_healthy_job_succeeds(world: World) -> str:
    """A job to which nothing happens, or to connections alone, ends with 0, and without a restart."""
    if any(fault.kind is not Kind.LINE_ENDS for fault in world.life.faults):
        return ""
    codes, restarts = {process.exit_code for process in world.processes}, _restarts(world)
    return f"exit codes {codes}, {restarts} restarts" if codes != {0} or restarts or len(world.leads) > 1 else ""


def a_fault_is_survived(world: World) -> str:
    """One worker that crashes once is started again, where a restart is allowed, and the job succeeds."""
    faults, life = world.life.faults, world.life
    crashes = [fault for fault in faults if fault.kind is Kind.WORKER_CRASHES]
    if len(crashes) != 1 or not life.max_restarts or not life.is_tracked:
        return ""
    if any(fault.kind not in (Kind.WORKER_CRASHES, Kind.LINE_ENDS) for fault in faults):
        return ""
    code = world.verdicts[0][1].exit_code if world.verdicts else None
    return f"it ends with {code}" if code else ""


def a_lost_leader_is_succeeded(world: World) -> str:
    """Where only the leader is lost, the others are a majority, and restarts are left, one of them ends the job."""
    life = world.life
    faults = [fault for fault in life.faults if fault.kind is not Kind.WORKER_CRASHES]
    if len(faults) != 1 or faults[0].kind not in LOSSES or faults[0].on in WORDS:
        return ""
    if life.num_nodes < 3 or life.max_restarts < len(life.faults):
        return ""
    if life.is_batch and faults[0].kind is not Kind.AGENT_DIES:  # srun may be lost with it
        return ""
    lost = [each for each in world.processes if each.agent is not None and each.agent.is_leader_lost]
    # The last word may be lost with its connection.
    healthy = [each for each in lost if each.node not in world.faulty and not each.was_told_goodbye]
    return f"n{healthy[0].node} found no leader" if healthy else "" if world.verdicts else "there is no verdict"


def _restarts(world: World) -> int:
    return sum(lead.restarts for lead in world.leads)


def no_process_left(world: World) -> str:
    """No worker outlives its agent, unless the kernel holds it."""
    for process in world.processes:
        if process.is_alive:
            continue
        for worker in world.machines[process.node].all_workers:
            is_newest = process is world.current[process.node]
            if is_newest and worker.end is None and worker.held_s is None and not worker.is_doomed:
                return f"rank {worker.rank} of generation {worker.generation} on n{process.node}"
    return ""


def agents_end_in_time(world: World) -> str:
    """From the first signal to the end of its workers an agent takes at most its grace, and the time to tidy up.

    Where nobody told the job to stop, that a rank could save on a signal changes nothing.
    """
    is_told = any(lead.leader.interrupted_by is not None for lead in world.leads)
    is_told |= any(process.agent and process.agent.interrupted_by is not None for process in world.processes)
    limit_s = RESTART_GRACE_S + REAP_S + SWEEP_S + SLACK_S + (SHUTDOWN_S if world.life.saves_s and is_told else 0.0)
    longest = max(world.ending_s.values(), default=0.0)
    return f"{longest:.1f} s" if longest > max(limit_s, GRACE_S) else ""


def signals_have_their_code(world: World) -> str:
    """A job that was told to stop ends with 128 and the signal's number, and so does an agent without a verdict."""
    for lead in world.leads:
        by = lead.leader.interrupted_by
        if by is not None and lead.verdict is not None and lead.verdict.exit_code != 128 + by:
            return f"signal {by}, exit code {lead.verdict.exit_code}"
    for process in world.processes:
        agent = process.agent
        if process.exit_code is None or agent is None or agent.interrupted_by is None or process.heard is not None:
            continue
        # Its leader was lost before the signal came: it had its verdict; or others go on with the job.
        is_excused = agent.is_leader_lost and process.exit_code in (0, 75)
        if process.exit_code != 128 + agent.interrupted_by and not (is_excused and world.lost_first.get(process.node)):
            return f"n{process.node}: signal {agent.interrupted_by}, exit code {process.exit_code}"
    return ""


END: tuple[Callable[[World], str], ...] = (
    all_is_over,
    a_leader_has_a_verdict,
    one_exit_code,
    the_healthy_hear_the_verdict,
    one_verdict,
    requeued_once,
    a_warned_job_goes_back,
    a_healthy_job_succeeds,
    a_fault_is_survived,
    a_lost_leader_is_succeeded,
    no_process_left,
    agents_end_in_time,
    signals_have_their_code,
)


def check_end(world: World) -> None:
    """Hold all rules against a life that is over."""
    for rule in END:
        if broken := rule(world):
            raise Violation(f"{rule.__doc__} Here: {broken}")
