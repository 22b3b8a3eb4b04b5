"""What must hold in every life of a job. Each function is one rule, its docstring the sentence.

AFTER runs after every event of each leader (but beats that cause nothing), outcomes.py when a life is over. A rule
raises nothing: it returns what broke it, or an empty text.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from allranks.launch import events
from allranks.launch.events import GRACE_S
from allranks.launch.lead.course import (
    ANSWER_S,
    NOTICE_S,
    OWN_STOPPED_S,
    RESTART_GRACE_S,
    RETURN_S,
    SHUTDOWN_S,
    STOPPED_S,
)
from allranks.launch.succession import find_events
from allranks.model.finding import Confidence, Severity
from allranks.model.hostlist import expand_hosts
from allranks.wire.protocol import Beat, Ended, Goodbye, Order, Ping, Plan, Resign, Stop, Stopped

from .terms import TERMS

if TYPE_CHECKING:
    from .kernel import Generation, Worker
    from .leading import Lead
    from .network import Process
    from .world import World

SLACK_S = 1.5
"""A few turns."""
SAVES_S = 20.0
"""What SLURM leaves for a save, and the time in which agents hear of a signal."""


class Violation(AssertionError):
    """An invariant fell."""


def one_verdict(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A leader has one verdict."""
    return "two verdicts" if lead.verdict is not None and lead.leader.verdict is not lead.verdict else ""


def the_end_is_told(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """When the job is over, every connected agent hears so, or is disconnected to look for the others."""
    if lead.verdict is not None or lead.leader.verdict is None or lead.leader.has_resigned:
        return ""
    told = {
        each.node
        for each in effects
        if isinstance(each, events.Disconnect) or isinstance(getattr(each, "message", None), Goodbye)
    }
    untold = lead.leader._members.nodes.keys() - told
    return f"n{min(untold)} is not told" if untold else ""


def who_resigns_is_succeeded(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A leader resigns only where another node can lead, and srun does not run on its own."""
    has_resigned = any(isinstance(getattr(each, "message", None), Resign) for each in effects)
    is_alone = len(lead.leader._generation.plan.successors) < 2 or (lead.world.life.is_batch and lead.node == 0)
    return f"n{lead.node} did" if has_resigned and is_alone else ""


def other_generations_say_nothing(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """What a rank or an agent says of another generation changes nothing in this one."""
    message = getattr(event, "message", None)
    if not isinstance(message, Ended | Stopped) or message.generation == lead.generation:
        return ""
    told = [each.event for each in effects if isinstance(each, events.Record)]
    if "worker_ended" in told:
        return f"the end of a worker of generation {message.generation} counted in {lead.generation}"
    if isinstance(message, Stopped) and event.node in lead.running_before and event.node not in lead.running:
        return f"Stopped of generation {message.generation} counted in {lead.generation}"
    return ""


def a_generation_begins_when_the_last_has_ended(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """No generation begins on a member where a rank of the last one runs, unless the kernel holds it."""
    for node in _new_plans(lead, effects):
        for worker in lead.world.machines[node].all_workers:
            is_member = node in lead.members_before and lead.lines[node].agent is lead.world.current[node]
            if worker.end is None and worker.held_s is None and is_member:
                return f"rank {worker.rank} of generation {worker.generation} still runs on n{node}"
    return ""


def a_minority_begins_nothing(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A leader begins a generation only with the majority of the last one connected, or where nobody succeeds it."""
    if not (plans := _new_plans(lead, effects)):
        return ""
    *_, plan = plans.values()
    here = [node for node in lead.nodes if node in plan.nodes and node in lead.members_before]
    told = f"generation {plan.generation} on {plan.nodes} after one on {lead.nodes}"
    lead.was_alone |= not _are_majority(here, lead.nodes)
    may_be_alone = lead.node == 0 and lead.world.life.is_batch and len(plan.successors) == 1
    return told if lead.was_alone and not may_be_alone else ""


def _are_majority(here: Collection[int], nodes: Sequence[int]) -> bool:
    """Whether these are more than half of a generation, whose leader is worth half a node more."""
    return 2 * len(set(here) & set(nodes)) + (nodes[0] in here) > len(nodes)


def _new_plans(lead: Lead, effects: Sequence[Any]) -> dict[int, Plan]:
    """By node: of a generation that begins now."""
    sent = {each.node: each.message for each in effects if isinstance(each, events.Send)}
    return {node: plan for node, plan in sent.items() if isinstance(plan, Plan) and plan.generation > lead.generation}


def the_majority_goes_on(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A leader that has the majority of a generation, of which it knows that all have begun it, is not cut off."""
    is_cut_off = any(isinstance(each, events.Send) and _is_cut_off(each.message) for each in effects)
    plan, here = lead.leader._generation.plan, lead.leader._members.here.keys()
    if not is_cut_off or lead.process.agent._confirmed < plan.generation:
        return ""
    return f"it is, with {sorted(here)} of {plan.nodes}" if _are_majority(here, plan.nodes) else ""


def _is_cut_off(message: Any) -> bool:
    return isinstance(message, Goodbye) and message.is_cut_off


def waits_end(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """Every wait of the leader ends by its deadline."""
    phase = str(lead.leader.phase)
    if phase != lead.last_phase:
        lead.last_phase, lead.phase_since_s, lead.slept_before_s = phase, lead.world.now_s, lead.slept_s
        lead.noticed_s = lead.world.now_s
        if phase == "running" and lead.leader.interrupted_by is not None:
            return "a generation begins after a stop signal"
        return ""
    ran_s = lead.world.now_s - lead.phase_since_s - (lead.slept_s - lead.slept_before_s)
    is_early = phase == "stopping" and ran_s < GRACE_S + STOPPED_S - 2 * SLACK_S
    if is_early and any(isinstance(each, events.Disconnect) for each in effects):
        return f"but not before: an agent was disconnected after {ran_s:.1f} s"
    saving_s = SHUTDOWN_S if lead.world.life.saves_s and lead.leader.interrupted_by is not None else 0.0
    limits_s = {
        "stopping": RESTART_GRACE_S + saving_s + STOPPED_S + OWN_STOPPED_S,
        "forming": ANSWER_S,
        "paused": 12.0 + ANSWER_S,
    }
    waited_s = lead.world.now_s - max(lead.phase_since_s, lead.woke_s)
    if phase in limits_s and waited_s > limits_s[phase] + SLACK_S:
        return f"{phase} for {waited_s:.1f} s"
    has_hung = phase == "stopping" and waited_s > RESTART_GRACE_S + saving_s + STOPPED_S + SLACK_S
    if has_hung and (others := lead.running - {lead.node}):
        return f"stopping for {waited_s:.1f} s, and n{max(others)} is still waited for"
    return ""


def signals_are_heeded(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A job that was told to stop ends in a pause at once, and else its ranks save or are stopped within ANSWER_S."""
    if lead.leader.interrupted_by is None:
        return ""
    if lead.told_s is None:
        lead.told_s = lead.world.now_s
    lead.has_acted |= any(isinstance(each, events.Send) and isinstance(each.message, Order | Stop) for each in effects)
    told_s, phase = lead.world.now_s - max(lead.told_s, lead.woke_s, lead.phase_since_s), lead.leader.phase
    if phase == "paused" and told_s > SLACK_S:
        return f"paused for {told_s:.1f} s"
    is_deaf = phase == "running" and not lead.has_acted and told_s > ANSWER_S + SLACK_S
    return f"running for {told_s:.1f} s" if is_deaf else ""


def the_leader_waits_for_its_own_agent(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """The leader never disconnects the agent in its own process."""
    return "it did" if any(isinstance(each, events.Disconnect) and each.node == lead.node for each in effects) else ""


def who_saves_is_waited_for(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """An agent whose ranks save on a signal to the job is not given up within SAVES_S."""
    world = lead.world
    if lead.leader.interrupted_by is None or world.life.is_tracked:
        return ""
    for node in [each.node for each in effects if isinstance(each, events.Disconnect)]:
        for worker in world.machines[node].workers:
            if worker.end is None and worker.saves_until_s is not None and not world.current[node].is_stopped:
                saved_s = world.now_s - worker.saves_until_s + world.life.saves_s
                if saved_s < min(SAVES_S, world.life.saves_s) and worker.begun_s < world.now_s - SAVES_S:
                    return f"n{node} was, while rank {worker.rank} has saved for {saved_s:.1f} s"
    return ""


def who_is_waited_for_is_named(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A wait says whom it waits for: a paused job every NOTICE_S, and a node that is given up by its name."""
    for each in effects:
        if isinstance(each, events.Say) and each.text.startswith("paused: "):
            lead.noticed_s = lead.world.now_s
        if isinstance(each, events.Disconnect) and lead.leader.verdict is None:
            name, has_left = f"n{each.node}", any(_is_left_out(other, each.node) for other in effects)
            told = [other.fields.get("node") for other in effects if isinstance(other, events.Record)]
            if name not in told and not has_left:
                return f"{name} was disconnected without a word"
    silent_s = lead.world.now_s - max(lead.noticed_s, lead.woke_s)
    if lead.leader.phase == "paused" and silent_s > NOTICE_S + SLACK_S:
        return f"paused without a word for {silent_s:.1f} s"
    return ""


def _is_left_out(effect: Any, node: int) -> bool:
    return isinstance(effect, events.Send) and effect.node == node and isinstance(effect.message, Goodbye)


def restarts_are_counted(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A job is restarted after faults at most as often as configured."""
    for each in effects:
        if isinstance(each, events.Record) and each.event == "save_asked":
            lead.may_grow = "restarting with" in str(each.fields["why"])
        if isinstance(each, events.Record) and each.event == "restarting":
            lead.restarts += 1
            lead.grows += lead.may_grow
            lead.may_grow = False
    faults = lead.restarts - lead.grows
    return f"{faults} restarts of {lead.restarts_left}" if faults > lead.restarts_left else ""


def no_healthy_culprit(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """No node that was healthy, with healthy ranks, is named as the culprit."""
    for each in effects:
        for finding in each.findings if isinstance(each, events.Show) else ():
            is_claim = finding.severity is Severity.FAIL and finding.confidence is not Confidence.UNDECIDED
            if not is_claim or not finding.node:
                continue
            named = {int(name[1:]) for name in expand_hosts(finding.node) if name[1:].isdigit()}
            # Where all other nodes are lost at once, the leader's own link is as likely, and is only called likely.
            are_others_faulty = len(lead.world.faulty - {lead.node}) == lead.world.life.num_nodes - 1
            is_ambiguous = finding.confidence is Confidence.LIKELY and named == {lead.node} and are_others_faulty
            core, nodes = lead.world.cut_off_core, lead.leader._generation.plan.nodes
            is_out_of_reach = lead.node not in core and named <= core and 2 * len(core & set(nodes)) <= len(nodes)
            if named and not named & lead.world.faulty and not is_ambiguous and not is_out_of_reach:
                return f"{finding.cause} on {finding.node}: {finding.message}"
    return ""


def who_broke_is_named(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A verdict on ranks that broke by themselves names all that did, as far as their leader heard, and nobody else."""
    shown = [finding for each in effects if isinstance(each, events.Show) for finding in each.findings]
    causes = ("AR407", "AR590", "AR005")
    shown = [each for each in shown if each.cause_id in causes and each.confidence is Confidence.CERTAIN]
    if not shown:
        return ""
    plan, heard = lead.leader._generation.plan, lead.leader._guard._scene.ends
    workers = lead.world.kernel.generations[plan.store_port, plan.generation].workers
    broke = {
        rank for rank, worker in workers.items() if rank in heard and (worker.has_raised or worker.broke_by_itself)
    }
    named = {rank for each in shown for rank in each.ranks}
    return f"{sorted(named)} are named, {sorted(broke)} broke" if named != broke else ""


def enough_nodes(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A generation has at least as many nodes as the user wants, and a number of its own."""
    for node, plan in _new_plans(lead, effects).items():
        if len(plan.members) < lead.world.life.min_nodes or plan.nodes[0] != lead.node or node not in plan.nodes:
            return f"generation {plan.generation} with {len(plan.members)} nodes"
    if isinstance(event, events.Joined) or not lead.has_begun:  # told again to those that may have missed it
        return ""
    old = [each.message for each in effects if isinstance(each, events.Send) and isinstance(each.message, Plan)]
    return next((f"generation {plan.generation} again" for plan in old if plan.generation <= lead.generation), "")


def room_is_waited_for(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """After a verdict of a full disk, no generation begins while the disk of a healthy node is full."""
    world = lead.world
    for each in effects:
        if isinstance(each, events.Show):
            lead.lacks_room = any(finding.cause_id == "AR005" for finding in each.findings)
    new_plans = _new_plans(lead, effects)
    if not new_plans or not lead.lacks_room or world.is_network_faulty or world.were_blind:
        return ""
    lead.lacks_room = False
    full = [
        node
        for node in new_plans
        if world.machines[node].full_since_s < world.now_s - 1.0
        and world.machines[node].full_until_s > world.now_s
        and world.machines[node].woke_s < world.now_s - 3.0
        and not world.current[node].is_stopped
        and node not in world.slow
    ]
    return f"generation {lead.generation + 1} begins while n{full[0]} has no room" if full else ""


def the_books_close(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """Whenever something is written down, all rank-seconds of the job are booked, each once."""
    if not any(isinstance(each, events.Record) for each in effects):
        return ""
    ledger = lead.leader._guard.books.snapshot(lead.world.now_s)
    booked_s, plan = sum(ledger.seconds.values()), lead.leader._generation.plan
    least_s = plan.world_size * (lead.world.now_s - lead.leader._generation.began_s)
    if abs(booked_s - ledger.rank_s) > 0.01 + 1e-3 * ledger.rank_s:
        return f"{booked_s:.1f} s of {ledger.rank_s:.1f} s"
    return f"{ledger.rank_s:.1f} s, of at least {least_s:.1f} s" if ledger.rank_s < least_s - 0.01 else ""


def left_out_for_good(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """A node that was here, and at fault, is not accepted again."""
    accepted = [each.node for each in effects if isinstance(each, events.Accept)]
    return f"n{accepted[0]} was" if set(accepted) & lead.left_out else ""


def the_step_has_srun(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """No generation begins without the machine of srun where that has died, with its agent, in the one before."""
    plans = _new_plans(lead, effects).values()
    if not lead.world.life.is_batch or lead.node == 0 or 0 not in lead.nodes or not plans:
        return ""
    if any(0 in plan.nodes for plan in plans):  # its connection has not ended yet: it is lost in the next generation
        return ""
    return "" if lead.world.machines[0].is_up or not lead.world.machines[0].had_agent else "n0 is down"


def a_status_is_of_now(lead: Lead, event: Any, effects: Sequence[Any]) -> str:
    """Each second a leader writes down what the job does, and at the end how it ended, unless others go on with it."""
    told = [each.status for each in effects if isinstance(each, events.WriteStatus)]
    over, phase = lead.leader.verdict is not None, str(lead.leader.phase)
    goodbye = lead.leader._goodbye
    is_elsewhere = lead.leader.has_resigned or (goodbye is not None and goodbye.is_cut_off)
    silent_s = lead.world.now_s - max(lead.status_s, lead.woke_s)
    if told:
        lead.status_s = lead.world.now_s
        status = told[-1]
        exit_code = lead.leader.verdict.exit_code if over and lead.leader.verdict is not None else None
        is_of_now = (status.phase, status.exit_code, status.written_s) == (phase, exit_code, lead.world.now_s)
        return "" if is_of_now and not is_elsewhere else f"{status.phase} with {status.exit_code} is not {phase}"
    if over and lead.verdict is None and not is_elsewhere:
        return "the end is not written down"
    return f"none for {silent_s:.1f} s" if not over and silent_s > 1.0 + SLACK_S else ""


IN_TIME: tuple[Callable[[Lead, Any, Sequence[Any]], str], ...] = (
    other_generations_say_nothing,
    waits_end,
    signals_are_heeded,
    who_is_waited_for_is_named,
    a_status_is_of_now,
)
"""What an event without effects can break, too."""

AFTER: tuple[Callable[[Lead, Any, Sequence[Any]], str], ...] = (
    one_verdict,
    the_end_is_told,
    who_resigns_is_succeeded,
    other_generations_say_nothing,
    a_generation_begins_when_the_last_has_ended,
    a_minority_begins_nothing,
    the_majority_goes_on,
    waits_end,
    signals_are_heeded,
    the_leader_waits_for_its_own_agent,
    who_saves_is_waited_for,
    who_is_waited_for_is_named,
    restarts_are_counted,
    no_healthy_culprit,
    who_broke_is_named,
    enough_nodes,
    room_is_waited_for,
    the_books_close,
    left_out_for_good,
    the_step_has_srun,
    a_status_is_of_now,
)


def agents_know_their_workers(world: World, process: Process) -> str:
    """A worker of this generation that runs is one that its agent knows of, and would end."""
    agent, workers = process.agent, world.machines[process.node].workers
    if agent.phase not in ("watching", "ending") or process is not world.current[process.node]:
        return ""
    unknown = [worker.rank for worker in workers if worker.end is None and worker.rank not in agent._pids]
    return f"n{process.node} does not know of ranks {unknown}" if unknown else ""


def check_agent(world: World, process: Process) -> None:
    """Hold the rules for agents against one of them."""
    if broken := agents_know_their_workers(world, process):
        raise Violation(f"{agents_know_their_workers.__doc__} Here: {broken}")


def check_start(world: World, process: Process, plan: Plan) -> None:
    """No agent starts workers while older ones run there, unless the kernel holds them."""
    for worker in world.machines[process.node].all_workers:
        if worker.end is None and worker.held_s is None and not worker.is_doomed:
            text = f"rank {worker.rank} of generation {worker.generation} on n{process.node}, generation"
            raise Violation(f"{check_start.__doc__} Here: {text} {plan.generation}")


def check_step(world: World, generation: Generation) -> None:
    """No generation makes a step after a later or a rival one has made one."""
    before, world.trained = world.trained, generation
    if before is not None and before is not generation and generation.number <= before.number:
        who = f"{generation.number} of n{generation.nodes[0]} after {before.number} of n{before.nodes[0]}"
        raise Violation(f"{check_step.__doc__} Here: {who}")


def check_kill(world: World, process: Process, worker: Worker, signum: int) -> None:
    """A rank that saves on a signal to the job is not killed within SAVES_S, unless it is blocked."""
    ending = process.agent.ending
    if signum != signal.SIGKILL or worker.saves_until_s is None or ending is None or worker.rank in ending.at_once:
        return
    saved_s = world.now_s - worker.saves_until_s + world.life.saves_s
    if not ending.is_fault and not world.life.is_tracked and saved_s < min(SAVES_S, world.life.saves_s):
        raise Violation(f"{check_kill.__doc__} Here: rank {worker.rank}, after {saved_s:.1f} s")


def check_save(world: World, generation: Generation) -> None:
    """No generation writes a checkpoint after a later or a rival one has written one."""
    before, world.saved = world.saved, generation
    if before is not None and before is not generation and generation.number <= before.number:
        who = f"{generation.number} of n{generation.nodes[0]} after {before.number} of n{before.nodes[0]}"
        raise Violation(f"{check_save.__doc__} Here: {who}")


def check_take_over(world: World, lead: Lead, plan: Plan) -> None:
    """Who takes over has the majority of its generation, and of each before it until all members have begun one.

    None of those that it leads has begun a newer one.
    """
    here, number, begun = sorted(lead.lines), plan.generation, world.kernel.generations
    generation = begun.get((plan.store_port, number))
    while generation is not None:
        nodes, has_begun = generation.nodes, {each.node for each in generation.workers.values()}
        if not _are_majority(here, nodes):
            raise Violation(f"{check_take_over.__doc__} Here: n{lead.node} with {here} of {number} on {nodes}")
        before = [each for each in begun.values() if each.number == number - 1]
        generation, number = None if has_begun >= set(nodes) or len(before) != 1 else before[0], number - 1
    newer = [node for node in here if world.current[node].agent.plan.generation > plan.generation]
    if newer:
        raise Violation(f"{check_take_over.__doc__} Here: n{lead.node} in {plan.generation}, with n{newer[0]}")


def check_succession(world: World, process: Process, takes_over: events.Lead) -> None:
    """A leader is succeeded only when it has resigned, or has been silent for RETURN_S.

    One beside srun is succeeded only when its process has ended, and its machine answers.
    """
    silent_s, lost = world.now_s - process.heard_s, takes_over.lost[0]
    if silent_s < RETURN_S and not takes_over.has_resigned:
        raise Violation(f"{check_succession.__doc__} Here: n{process.node} leads after {silent_s:.1f} s")
    if not world.life.is_batch or lost != 0:
        return
    ended = [lead for lead in world.leads if lead.node == lost and not lead.process.is_alive]
    if not ended or not world.machines[lost].is_up or not world.reaches(process.node, lost):
        raise Violation(f"{check_succession.__doc__} Here: n{process.node} succeeds n{lost}")


def check_requeue(world: World, process: Process) -> None:
    """A job is requeued only where no leader goes on with it, or has ended it, as far as the run directory can tell."""
    if process.signalled or (process.lead is not None and process.lead.leader.interrupted_by is not None):
        raise Violation(f"A job that was cancelled is never requeued. Here: n{process.node}, {process.signalled}")
    if process.node in world.blind:
        return
    ends = find_events(world.read_events(process.node), "ended", exit_code=0, is_cut_off=False)
    if any(each["leader"] != f"n{process.node}" for each in ends):
        raise Violation(f"{check_requeue.__doc__} Here: n{process.node} does, and it has ended with 0")
    for lead in world.leads:
        is_known = lead.node not in world.blind and world.now_s - lead.begun_s > world.life.seen_s
        if lead.process is process or not is_known:
            continue
        has_told = world.now_s - lead.woke_s > TERMS.gone_s + RETURN_S + SLACK_S + world.life.seen_s
        if lead.goes_on and has_told and not _has_saved_all(world, process):
            raise Violation(f"{check_requeue.__doc__} Here: n{process.node} does, while n{lead.node} leads")


def _has_saved_all(world: World, process: Process) -> bool:
    """Whether all ranks have saved and ended because this process, as the leader, wanted it, and none trains since."""
    lead = process.lead
    has_ended = lead is not None and lead.leader._guard.is_all_well
    return has_ended and (world.trained is None or world.trained.number <= lead.generation)


def check_after(lead: Lead, event: Any, effects: Sequence[Any]) -> None:
    """Hold all rules against what an event has done to a leader."""
    if not effects and isinstance(getattr(event, "message", None), Beat):
        return  # it has told the guard something; the next Due shows what comes of it
    effects = [each for each in effects if not isinstance(getattr(each, "message", None), Ping)]
    if effects or not isinstance(event, events.Due):
        lead.running_before, lead.running = lead.running, set(lead.leader._members.running)
    for rule in AFTER if effects else IN_TIME:
        if broken := rule(lead, event, effects):
            raise Violation(f"{rule.__doc__} Here: {broken}")
    lead.generation, lead.nodes = lead.leader._generation.number, lead.leader._generation.plan.nodes
    lead.members_before, lead.has_begun = set(lead.leader._members.here), True
