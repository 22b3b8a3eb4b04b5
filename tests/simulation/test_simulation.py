"""The real reducers of leader and agents in short lives; `make simulate` lives many more, and finds all mutants."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from . import lives
from .known import KNOWN
from .lives import FOREVER_S, LEADER, PROFILES, Fault, Kind, Life, draw
from .mutants import load, read_mutants
from .run import live, live_block
from .shrink import as_literal, rule_of, shrink
from .world import World

TESTS = Path(__file__).parents[1]
MUTANTS = {mutant.name: mutant for mutant in read_mutants()}
NO_FAULT = Life(seed=1, num_nodes=3, num_steps=6, max_restarts=1, min_nodes=2, is_slurm=True)


def test_no_invariant_falls():
    tally = live_block(0, num_lives=100)
    assert tally.fallen == ()
    assert tally.events > 100 * 100


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_life_breaks_no_rule_and_finds_its_mutant(name: str):
    assert live(KNOWN[name])[1] == ""
    if name in MUTANTS:
        assert live(KNOWN[name], load(MUTANTS[name]))[1]


def test_a_life_that_finds_a_mutant_shrinks_to_the_faults_that_do():
    cores, found = load(MUTANTS["end-of-an-old-worker-counts"]), draw(1775)
    small, num_lives = shrink(found, lambda life: live(life, cores)[1])
    assert (len(found.faults), found.num_nodes, found.workers, found.is_slurm) == (4, 3, 2, True)
    assert [fault.kind for fault in small.faults] == [Kind.WORKER_IS_HELD, Kind.WORKER_CRASHES]
    assert all(fault.at_s == round(fault.at_s) for fault in small.faults)
    assert (small.num_nodes, small.workers, small.is_slurm) == (1, 2, False)
    assert rule_of(live(small, cores)[1]) == rule_of(live(found, cores)[1])
    assert eval(as_literal(small), vars(lives)) == small
    assert num_lives < 100


def test_a_fault_that_is_left_out_changes_no_other():
    first = Fault(at_s=1.0, kind=Kind.SIGNAL, node=2, signum=signal.SIGUSR1)
    last = Fault(at_s=1.5, kind=Kind.SIGNAL, node=1, signum=signal.SIGTERM, everywhere=True)
    alone, both = (
        [line for line in life(*faults, num_steps=20).log if "Signalled" in line and "SIGTERM" in line]
        for faults in ((last,), (first, last))
    )
    assert alone == both != []


def test_the_mutants_fit_the_source():
    mutants = read_mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants) > 0
    for mutant in mutants:
        assert load(mutant).Leader is not load(None).Leader


def log_of(seed: int) -> str:
    live(draw(seed), log=(log := []))
    return "\n".join(log)


def test_a_seed_lives_the_same_life_in_any_process():
    program = "from simulation.test_simulation import log_of\nprint(*map(log_of, range(20)))"
    told = {
        subprocess.run(
            [sys.executable, "-c", program], cwd=TESTS, env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True, text=True, check=True,
        ).stdout
        for salt in ("1", "2")
    }  # fmt: skip
    assert told == {" ".join(map(log_of, range(20))) + "\n"}


def test_every_kind_of_fault_is_in_some_life():
    kinds = {fault.kind for seed in range(30 * len(PROFILES)) for fault in draw(seed).faults}
    assert kinds == set(Kind)


def life(*faults: Fault, **more: object) -> World:
    return World(replace(NO_FAULT, faults=faults, **more), log=[]).run()


def outcome(world: World) -> tuple[int, tuple[object, ...]]:
    """Of a job with one verdict."""
    ((_, verdict),) = world.verdicts
    return verdict.exit_code, verdict.findings


def test_a_stopped_agent_is_named_and_the_end_of_all_other_ranks_ends_the_job():
    """Its workers train on; before, the job waited for it until the time limit."""
    world = life(Fault(at_s=2.0, kind=Kind.AGENT_STOPS, node=2))
    ((lead, verdict),) = world.verdicts
    (finding,) = verdict.findings
    assert (finding.cause, finding.node, verdict.exit_code) == ("AR010 process-stopped", "n2", 75)
    assert "its machine answers, and all other ranks have finished" in finding.message
    assert lead.leader.unresponsive == {2}
    assert (lead.restarts, world.requeues) == (0, [])  # all steps are made
    assert any("its machine answers, so its agent is stopped" in line for line in world.log)


def test_an_agent_that_goes_on_before_the_others_have_finished_is_no_fault():
    world = life(Fault(at_s=2.0, kind=Kind.AGENT_STOPS, node=2, for_s=3.0))
    assert outcome(world) == (0, ())


def test_a_suspended_job_goes_on():
    world = life(Fault(at_s=2.0, kind=Kind.SUSPENDED, node=0, for_s=20.0))
    assert outcome(world) == (0, ())


def test_a_lost_leader_is_succeeded_and_its_node_is_left_behind():
    world = life(Fault(at_s=2.0, kind=Kind.NODE_DIES, node=LEADER), max_restarts=2, num_steps=9)
    code, findings = outcome(world)
    assert ([each.node for each in world.leads], code) == ([0, 1], 0)
    assert [each.node for each in findings] == ["n0"]
    assert (world.trained.number, world.trained.nodes, world.requeues) == (1, (1, 2), [])


def test_a_leader_that_is_cut_off_leaves_the_job_to_the_others():
    world = life(Fault(at_s=2.0, kind=Kind.NODE_IS_CUT_OFF, node=LEADER), max_restarts=2, num_steps=9)
    assert [(each.node, each.process.heard.is_cut_off) for each in world.leads] == [(0, True), (1, False)]
    assert ([each.exit_code for each in world.processes], world.requeues) == ([0, 0, 0], [])


def test_a_leader_whose_connections_end_goes_on_with_the_same_generation():
    world = life(Fault(at_s=2.0, kind=Kind.LINE_ENDS, node=LEADER, after_s=1.0))
    assert (outcome(world), len(world.leads), world.trained.number) == ((0, ()), 1, 0)


BEGAN_S = 1000.0
"""When a world begins."""
FULL_DISK = Fault(at_s=2.0, kind=Kind.WORKER_MEETS_A_FULL_DISK, node=1, for_s=9.0)


def test_after_a_full_disk_the_ranks_begin_again_once_there_is_room():
    world = life(FULL_DISK, max_restarts=1, num_steps=9)
    code, (finding,) = outcome(world)
    assert (code, finding.cause, finding.node, world.trained.number) == (0, "AR005 disk-full", "n1", 1)
    (begun_s,) = (each.at_s for each in world.recorded if each.event == "restarting")
    assert 11.0 < begun_s - BEGAN_S < 14.0
    mutant = load(MUTANTS["restarts-on-a-full-disk"])
    assert "begins while n1 has no room" in live(replace(world.life, seed=1), mutant)[1]


def test_a_disk_that_stays_full_ends_the_job_with_its_verdict():
    world = life(replace(FULL_DISK, for_s=FOREVER_S), max_restarts=1, num_steps=9)
    code, findings = outcome(world)
    assert (code, [each.cause for each in findings], world.requeues) == (78, ["AR005 disk-full"], [])


LOSSES = tuple(kind for kind in lives.LOSSES if kind is not Kind.AGENT_STOPS)  # whose workers train on
CRASHES = (Kind.WORKER_CRASHES, Kind.WORKER_HANGS, Kind.WORKER_STOPS)


def draw_one_after_another(seed: int) -> Life:
    """Up to three faults, each after the job has recovered from the one before, that leave a majority each time."""
    rng = random.Random(seed)
    num_nodes = rng.randrange(3, 7)
    left, faults = list(range(num_nodes)), []
    for number in range(rng.randrange(1, 4)):
        kind, node = rng.choice([*LOSSES, *CRASHES]), rng.choice(left)
        if kind in LOSSES:
            if 2 * (len(left) - 1) <= len(left):
                break
            left.remove(node)
        faults.append(Fault(at_s=3.0 + 40 * number + 10 * rng.random(), kind=kind, node=node))
    return Life(seed, num_nodes, 150, tuple(faults), max_restarts=3, is_slurm=rng.random() < 0.5)


def test_faults_one_after_another_are_survived_while_each_leaves_a_majority():
    for seed in range(20):
        world, broken = live(draw_one_after_another(seed))
        codes = [int(verdict.exit_code) for _, verdict in world.verdicts]
        assert (seed, broken, codes[-1:]) == (seed, "", [0])


def test_of_a_network_in_two_the_minority_says_undecided_and_the_new_leader_names_who_is_lost():
    world, broken = live(KNOWN["a-member-follows-a-leader-that-is-cut-off"])
    assert broken == ""
    told = [[(each.cause, each.node, each.confidence) for each in verdict.findings] for _, verdict in world.verdicts]
    assert told == [
        [("AR211 partition", "n[0-1] or n[2-5]", "undecided")],
        [("AR012 node-failure", "n0", "certain"), ("AR012 node-failure", "n1", "certain")],
    ]
    assert ([each.exit_code for each in world.processes], world.requeues) == ([0] * 6, [])
