"""What must hold in every life of a job. Each function is one rule, its docstring the sentence.

AFTER runs after every event of the leader (but beats that cause nothing), END when a life is over. A rule raises
nothing: it returns what broke it, or an empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from allranks.launch import events
from allranks.launch.agent import REAP_S, SWEEP_S
from allranks.launch.events import GRACE_S
from allranks.launch.lead.course import ANSWER_S, NOTICE_S, OWN_STOPPED_S, RESTART_GRACE_S, STOPPED_S
from allranks.model.finding import Confidence, Severity
from allranks.model.hostlist import expand_hosts
from allranks.wire.protocol import Beat, Exited, Failed, Goodbye, Order, Ping, Plan, Stop, Stopped

if TYPE_CHECKING:
    from .network import Process
    from .world import World

SLACK_S = 1.5
"""A few turns."""


class Violation(AssertionError):
    """An invariant fell."""


def one_verdict(world: World, event: Any, effects: Sequence[Any]) -> str:
    """A job has one verdict."""
    return "two verdicts" if len(world.verdicts) + sum(isinstance(each, events.Over) for each in effects) > 1 else ""


def other_generations_say_nothing(world: World, event: Any, effects: Sequence[Any]) -> str:
    """What a rank or an agent says of another generation changes nothing in this one."""
    message = getattr(event, "message", None)
    if not isinstance(message, Failed | Exited | Stopped) or message.generation == world.leader_generation:
        return ""
    told = [each.event for each in effects if isinstance(each, events.Record)]
    if "worker_ended" in told:
        return f"the end of a worker of generation {message.generation} counted in {world.leader_generation}"
    if isinstance(message, Stopped) and event.node in world.running_before and event.node not in world.running:
        return f"Stopped of generation {message.generation} counted in {world.leader_generation}"
    return ""


def a_generation_begins_when_the_last_has_ended(world: World, event: Any, effects: Sequence[Any]) -> str:
    """No generation begins on a node where a rank of the last one runs, unless the kernel holds it."""
    for node in [each.node for each in effects if isinstance(each, events.Send) and isinstance(each.message, Plan)]:
        for worker in world.machines[node].all_workers:
            is_lost = world.current[node].agent is None or world.lines[node].agent is not world.current[node]
            if worker.end is None and worker.held_s is None and not is_lost:
                return f"rank {worker.rank} of generation {worker.generation} still runs on n{node}"
    return ""


def waits_end(world: World, event: Any, effects: Sequence[Any]) -> str:
    """Every wait of the leader ends by its deadline."""
    phase = str(world.leader.phase)
    if phase != world.last_phase:
        world.last_phase, world.phase_since_s, world.slept_before_s = phase, world.now_s, world.slept_s
        world.noticed_s = world.now_s
        if phase == "running" and world.leader.interrupted_by is not None:
            return "a generation begins after a stop signal"
        return ""
    ran_s = world.now_s - world.phase_since_s - (world.slept_s - world.slept_before_s)
    is_early = phase == "stopping" and ran_s < GRACE_S + STOPPED_S - 2 * SLACK_S
    if is_early and any(isinstance(each, events.Disconnect) for each in effects):
        return f"but not before: an agent was disconnected after {ran_s:.1f} s"
    limits_s = {
        "stopping": RESTART_GRACE_S + STOPPED_S + OWN_STOPPED_S,
        "forming": ANSWER_S,
        "paused": 12.0 + ANSWER_S,
    }
    waited_s = world.now_s - max(world.phase_since_s, world.woke_s)
    if phase in limits_s and waited_s > limits_s[phase] + SLACK_S:
        return f"{phase} for {waited_s:.1f} s"
    has_hung = phase == "stopping" and waited_s > RESTART_GRACE_S + STOPPED_S + SLACK_S
    if has_hung and any(node for node in world.running):
        return f"stopping for {waited_s:.1f} s, and n{max(world.running)} is still waited for"
    return ""


def signals_are_heeded(world: World, event: Any, effects: Sequence[Any]) -> str:
    """A job that was told to stop ends in a pause at once, and else its ranks save or are stopped within ANSWER_S."""
    if world.leader.interrupted_by is None:
        return ""
    if world.told_s is None:
        world.told_s = world.now_s
    world.has_acted |= any(isinstance(each, events.Send) and isinstance(each.message, Order | Stop) for each in effects)
    told_s, phase = world.now_s - max(world.told_s, world.woke_s, world.phase_since_s), world.leader.phase
    if phase == "paused" and told_s > SLACK_S:
        return f"paused for {told_s:.1f} s"
    is_deaf = phase == "running" and not world.has_acted and told_s > ANSWER_S + SLACK_S
    return f"running for {told_s:.1f} s" if is_deaf else ""


def the_leader_waits_for_its_own_agent(world: World, event: Any, effects: Sequence[Any]) -> str:
    """The leader never disconnects the agent in its own process."""
    return "it did" if any(isinstance(each, events.Disconnect) and each.node == 0 for each in effects) else ""


def who_is_waited_for_is_named(world: World, event: Any, effects: Sequence[Any]) -> str:
    """A wait says whom it waits for: a paused job every NOTICE_S, and a node that is given up by its name."""
    for each in effects:
        if isinstance(each, events.Say) and each.text.startswith("paused: only"):
            world.noticed_s = world.now_s
        if isinstance(each, events.Disconnect):
            name, has_left = f"n{each.node}", any(_is_left_out(other, each.node) for other in effects)
            told = [other.fields.get("node") for other in effects if isinstance(other, events.Record)]
            if name not in told and not has_left:
                return f"{name} was disconnected without a word"
    silent_s = world.now_s - max(world.noticed_s, world.woke_s)
    if world.leader.phase == "paused" and silent_s > NOTICE_S + SLACK_S:
        return f"paused without a word for {silent_s:.1f} s"
    return ""


def _is_left_out(effect: Any, node: int) -> bool:
    return isinstance(effect, events.Send) and effect.node == node and isinstance(effect.message, Goodbye)


def restarts_are_counted(world: World, event: Any, effects: Sequence[Any]) -> str:
    """A job is restarted after faults at most as often as configured."""
    for each in effects:
        if isinstance(each, events.Record) and each.event == "save_asked":
            world.may_grow = "restarting with" in str(each.fields["why"])
        if isinstance(each, events.Record) and each.event == "restarting":
            world.restarts += 1
            world.grows += world.may_grow
            world.may_grow = False
    faults = world.restarts - world.grows
    return f"{faults} restarts of {world.life.max_restarts}" if faults > world.life.max_restarts else ""


def no_healthy_culprit(world: World, event: Any, effects: Sequence[Any]) -> str:
    """No node that was healthy, with healthy ranks, is named as the culprit."""
    for each in effects:
        for finding in each.findings if isinstance(each, events.Show) else ():
            is_claim = finding.severity is Severity.FAIL and finding.confidence is not Confidence.UNDECIDED
            if not is_claim or not finding.node:
                continue
            named = {int(name[1:]) for name in expand_hosts(finding.node) if name[1:].isdigit()}
            # Where all other nodes are lost at once, the leader's own link is as likely, and is only called likely.
            are_others_faulty = len(world.faulty - {0}) == world.life.num_nodes - 1
            is_ambiguous = finding.confidence is Confidence.LIKELY and named == {0} and are_others_faulty
            if named and not named & world.faulty and not is_ambiguous:
                return f"{finding.cause} on {finding.node}: {finding.message}"
    return ""


def enough_nodes(world: World, event: Any, effects: Sequence[Any]) -> str:
    """A generation has at least as many nodes as the user wants, and each rank once."""
    for each in effects:
        if isinstance(each, events.Send) and isinstance(each.message, Plan):
            members = each.message.members
            if len(members) < world.life.min_nodes or each.message.generation <= world.leader_generation:
                return f"generation {each.message.generation} with {len(members)} nodes"
    return ""


def left_out_for_good(world: World, event: Any, effects: Sequence[Any]) -> str:
    """A node that was here, and at fault, is not accepted again."""
    accepted = [each.node for each in effects if isinstance(each, events.Accept)]
    return f"n{accepted[0]} was" if set(accepted) & world.left_out else ""


IN_TIME: tuple[Callable[[World, Any, Sequence[Any]], str], ...] = (
    other_generations_say_nothing,
    waits_end,
    signals_are_heeded,
    who_is_waited_for_is_named,
)
"""What an event without effects can break, too."""

AFTER: tuple[Callable[[World, Any, Sequence[Any]], str], ...] = (
    one_verdict,
    other_generations_say_nothing,
    a_generation_begins_when_the_last_has_ended,
    waits_end,
    signals_are_heeded,
    the_leader_waits_for_its_own_agent,
    who_is_waited_for_is_named,
    restarts_are_counted,
    no_healthy_culprit,
    enough_nodes,
    left_out_for_good,
)


def agents_know_their_workers(world: World, process: Process) -> str:
    """A worker of this generation that runs is one that its agent knows of, and would end."""
    agent, crew = process.agent, world.machines[process.node].crew
    if agent.phase not in ("watching", "ending") or process is not world.current[process.node]:
        return ""
    unknown = [worker.rank for worker in crew if worker.end is None and worker.rank not in agent._pids]
    return f"n{process.node} does not know of ranks {unknown}" if unknown else ""


def check_agent(world: World, process: Process) -> None:
    """Hold the rules for agents against one of them."""
    if broken := agents_know_their_workers(world, process):
        raise Violation(f"{agents_know_their_workers.__doc__} Here: {broken}")


def all_is_over(world: World) -> str:
    """A job ends: no agent still waits for something, whatever has happened."""
    phases = ", ".join(f"n{each.node} {each.agent.phase if each.agent else 'joining'}" for each in world.waiting)
    return f"the leader is {world.leader.phase}; {phases}" if phases else ""


def the_leader_has_a_verdict(world: World) -> str:
    """A job whose leader lives ends with a verdict."""
    first = world.processes[0]
    return (
        "there is none" if first.exit_code is not None and not world.verdicts and not first.agent.is_leader_lost else ""
    )


def one_exit_code(world: World) -> str:
    """All agents that hear the verdict, or that were told to end, exit with its code; a node left out with 0."""
    if not world.verdicts:
        return ""
    verdict = world.verdicts[0]
    for process in world.processes:
        expected = 0 if process.was_left_out else verdict.exit_code
        is_cut_off = process.agent is not None and process.agent.is_leader_lost
        if process.exit_code is not None and process.got_goodbye and process.exit_code != expected:
            return f"n{process.node} exits with {process.exit_code}, the verdict says {expected}"
        is_lost = is_cut_off or process.was_killed or process.is_stopped or process.node in world.faulty
        if process.exit_code not in (None, expected) and not is_lost and world.life.answer_s < ANSWER_S:
            return f"n{process.node} was healthy and exits with {process.exit_code}, the verdict says {expected}"
    return ""


def a_cancelled_job_is_not_requeued(world: World) -> str:
    """A job that somebody told to stop is never requeued by an agent that knows it."""
    for process in world.requeues:
        knows = bool(process.signalled) or (process is world.processes[0] and world.leader.interrupted_by is not None)
        if knows:
            return f"n{process.node} did, after {process.signalled}"
    return ""


def requeued_once(world: World) -> str:
    """A job is requeued at most once, and only where that was asked for and SLURM can."""
    if len(world.requeues) > 1:
        return f"{len(world.requeues)} times"
    was_warned = world.leader.is_to_requeue
    if world.requeues and not world.life.max_restarts and not was_warned:
        return "without --max-restarts"
    return "it cannot be requeued" if was_warned and not world.life.can_requeue else ""


def a_warned_job_goes_back(world: World) -> str:
    """A job that saved because its time limit was near, and that nobody cancelled, goes back into the queue."""
    first, life = world.processes[0], world.life
    has_saved = any(name == "save_asked" and "goes back into the queue" in more["why"] for name, more in world.records)
    was_stopped = any(process.signalled for process in world.processes)
    if not (has_saved and first.exit_code == 0 and world.verdicts and not world.verdicts[0].findings):
        return ""
    is_finished = any(each.step >= life.num_steps for each in world.kernel.generations.values())
    return "it did not" if not (world.requeues or was_stopped or is_finished) else ""


def a_healthy_job_succeeds(world: World) -> str:
    """A job to which nothing happens ends with 0, and without a restart."""
    if world.life.faults:
        return ""
    codes = {process.exit_code for process in world.processes}
    return f"exit codes {codes}, {world.restarts} restarts" if codes != {0} or world.restarts else ""


def a_fault_is_survived(world: World) -> str:
    """One worker that crashes once is started again, where a restart is allowed, and the job succeeds."""
    faults, life = world.life.faults, world.life
    if len(faults) != 1 or faults[0].kind != "worker crashes" or not life.max_restarts or not life.is_tracked:
        return ""
    code = world.verdicts[0].exit_code if world.verdicts else None
    return f"it ends with {code}" if code and world.restarts <= life.max_restarts else ""


def no_process_left(world: World) -> str:
    """No worker outlives its agent, unless the kernel holds it."""
    for process in world.processes:
        if process.is_alive:
            continue
        for worker in world.machines[process.node].all_workers:
            is_old = process is world.current[process.node]
            if is_old and worker.end is None and worker.held_s is None and not worker.is_doomed:
                return f"rank {worker.rank} of generation {worker.generation} on n{process.node}"
    return ""


def agents_end_in_time(world: World) -> str:
    """From the first signal to the end of its workers an agent takes at most its grace, and the time to tidy up."""
    limit_s = RESTART_GRACE_S + REAP_S + SWEEP_S + SLACK_S
    longest = max(world.ending_s.values(), default=0.0)
    return f"{longest:.1f} s" if longest > max(limit_s, GRACE_S) else ""


def signals_have_their_code(world: World) -> str:
    """A job that was told to stop ends with 128 and the signal's number, and so does an agent without a verdict."""
    by = world.leader.interrupted_by
    if by is not None and world.verdicts and world.verdicts[0].exit_code != 128 + by:
        return f"signal {by}, exit code {world.verdicts[0].exit_code}"
    for process in world.processes:
        agent = process.agent
        if process.exit_code is None or agent is None or agent.interrupted_by is None or process.got_goodbye:
            continue
        if process.exit_code != 128 + agent.interrupted_by:
            # Its leader was lost before the signal came: it had its verdict.
            if agent.is_leader_lost and process.exit_code == 75 and world.lost_first.get(process.node):
                continue
            return f"n{process.node}: signal {agent.interrupted_by}, exit code {process.exit_code}"
    return ""


END: tuple[Callable[[World], str], ...] = (
    all_is_over,
    the_leader_has_a_verdict,
    one_exit_code,
    a_cancelled_job_is_not_requeued,
    requeued_once,
    a_warned_job_goes_back,
    a_healthy_job_succeeds,
    a_fault_is_survived,
    no_process_left,
    agents_end_in_time,
    signals_have_their_code,
)


def check_after(world: World, event: Any, effects: Sequence[Any]) -> None:
    """Hold all rules against what an event has done to the leader."""
    if not effects and isinstance(getattr(event, "message", None), Beat):
        return  # it has told the guard something; the next Due shows what comes of it
    effects = [each for each in effects if not isinstance(getattr(each, "message", None), Ping)]
    if effects or not isinstance(event, events.Due):
        world.running_before, world.running = world.running, set(world.leader._members.running)
    for rule in AFTER if effects else IN_TIME:
        if broken := rule(world, event, effects):
            raise Violation(f"{rule.__doc__} Here: {broken}")
    world.leader_generation = world.leader._generation


def check_end(world: World) -> None:
    """Hold all rules against a life that is over."""
    for rule in END:
        if broken := rule(world):
            raise Violation(f"{rule.__doc__} Here: {broken}")
