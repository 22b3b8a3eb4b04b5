"""Hours of healthy training without a word, and each fault named in time, in simulated time."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from allranks.model.beat import ProcessState
from allranks.model.cluster import GuardTable
from allranks.model.finding import Confidence

from .simulation import ABORTED, FAST, LOST, Call, Compute, Program, World


def training(rank: int, *, seed: int = 0, steps: int = 10**9, step_s: float = 0.3, extra_s: float = 0.0) -> Program:
    """Steps with two collectives; every so often rank 0 evaluates, all save, one is slow."""
    rng = random.Random(seed * 1000 + rank)
    together = random.Random(seed)
    yield Compute(rng.uniform(0.1, 3.0), "train.py:3 in <module>", phase="init")
    yield Call(op="barrier", size=0, place="train.py:5 in <module>")
    for _ in range(steps):
        event = together.random()
        slow = together.randrange(64)
        factor = rng.lognormvariate(0.0, 0.2) * (10 if event < 0.01 and slow % 6 == rank % 6 else 1)
        yield Compute(step_s * factor + extra_s)
        yield Call()
        yield Call(size=1, place="train.py:20 in log")
        if 0.02 < event < 0.02 + 0.02 * step_s:
            if rank == 0:
                yield Compute(together.uniform(5, 110), "evaluate.py:88 in run", holds_gil=event < 0.021)
            else:
                together.uniform(5, 110)
            yield Call(op="broadcast", size=4, place="train.py:31 in evaluate")
        elif event > 1 - 0.02 * step_s:
            yield Compute(rng.uniform(1, 40), "save.py:7 in save", phase="saving")
            yield Call(op="barrier", size=0, place="save.py:9 in save")
    yield Compute(rng.uniform(0.0, 40.0), "train.py:90 in <module>", phase="leaving")


class Checked(World):
    """Holds every `slow` against the truth at its time."""

    def _ask(self) -> None:
        before = len(self.lines)
        super()._ask()
        for _, line in self.lines[before:]:
            if line.startswith("slow"):
                named = re.findall(r"rank (\d+) ", line)
                assert named, line
                for rank in (self.ranks[int(number)] for number in named):
                    here_s = self.now_s - rank.since_s if isinstance(rank.doing, Call) else 0.0
                    assert here_s <= max(1.5, 2.5 * self.settings.beat_s) + 1.0, (self.now_s, line)
            assert not line.startswith("straggler"), line


HEALTHY = GuardTable(join_s=60, gone_s=20, beat_s=5, stopped_s=15, stalled_s=15, slow_s=30, hang_s=600)


@pytest.mark.parametrize(
    ("seed", "hours"), [(0, 3), *(pytest.param(seed, 12, marks=pytest.mark.by_hand) for seed in range(3))]
)
def test_hours_of_healthy_training_have_no_verdict_and_no_wrong_name(seed, hours):
    world = Checked(
        [training(rank, seed=seed, step_s=8.0) for rank in range(6)],
        ranks_per_node=2,
        settings=HEALTHY,
        seed=seed,
        late_beats=0.01,
        long_pauses=0.001,
        start_s=30.0,
        ask_every_s=1.0,
    )
    world.run(hours * 3600)
    assert world.judged is None, world.judged
    assert any(line.startswith("slow: rank 0 ") for _, line in world.lines)


@pytest.mark.parametrize(
    ("seed", "minutes"), [(0, 10), *(pytest.param(seed, 30, marks=pytest.mark.by_hand) for seed in range(3))]
)
def test_minutes_with_the_fast_profile_have_no_verdict_and_no_wrong_name(seed, minutes):
    world = Checked(
        [training(rank, seed=seed) for rank in range(6)], seed=seed, late_beats=0.01, long_pauses=0.002, start_s=10.0
    )
    world.run(minutes * 60)
    assert world.judged is None, world.judged


def test_runs_that_end_at_different_times_have_no_verdict():
    for seed in range(3):
        world = Checked([training(rank, seed=seed, steps=50) for rank in range(6)], seed=seed, start_s=10.0)
        world.run(900)
        assert world.judged is None, world.judged
        assert world.guard.is_all_well


def mesh(rank: int, *, seed: int, away: dict[int, float] | None = None) -> Program:
    """Two data-parallel groups of three, three tensor-parallel pairs."""
    rng = random.Random(seed * 100 + rank)
    for step in itertools.count():
        for _ in range(3):
            yield Compute(rng.uniform(0.01, 0.2))
            yield Call(group=f"tp{rank // 2}", place="layer.py:7 in forward")
        if away and step in away:
            yield Compute(away[step], "evaluate.py:88 in run")
        yield Call(group=f"dp{rank % 2}", place="ddp.py:9 in reduce")
        if step % 20 == 0:
            yield Call(op="barrier", size=0)


MESH = {"tp0": (0, 1), "tp1": (2, 3), "tp2": (4, 5), "dp0": (0, 2, 4), "dp1": (1, 3, 5)}


def test_a_mesh_of_groups_is_healthy_and_its_sink_is_named():
    world = Checked([mesh(rank, seed=1) for rank in range(6)], groups=MESH, long_pauses=0.002, late_beats=0.01)
    assert world.run(300).judged is None
    away = {200: 41.0}
    world = Checked([mesh(rank, seed=2, away=away if rank == 3 else None) for rank in range(6)], groups=MESH)
    assert world.run(300).judged is None
    slow = [line for _, line in world.lines if line.startswith("slow")]
    assert len(slow) == 1
    assert re.match(r"slow: rank 3 has been in user code for 3\d s: evaluate.py:88 in run; 5 ranks wait", slow[0])


def run_with(
    fault, *, settings=FAST, after_s: float = 20.0, programs=None, seed: int = 0, num: int = 6, **more
) -> tuple:
    world = World(
        programs or [training(rank, seed=seed + 17) for rank in range(num)],
        seed=seed,
    )
    world.run(after_s)
    assert world.judged is None
    began_s = world.now_s
    fault(world)
    world.run(400)
    assert world.judged is not None
    return world.judged, world.judged_s - began_s, world


SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_process_is_named_within_a_second(seed):
    def kill(world: World) -> None:
        world.end(3, -9)
        world.break_others(3)

    judged, took_s, _ = run_with(kill, seed=seed)
    assert judged.findings[0].cause == "AR407 dead-rank"
    assert (judged.ranks, judged.cures, judged.is_retryable, judged.exit_code) == ((3,), False, True, 137)
    assert took_s <= 1.0


def test_a_process_that_the_kernel_killed_for_memory_is_called_that():
    def kill(world: World) -> None:
        world.oom_kills[3] += 1
        world.end(3, -9)
        world.break_others(3)

    judged, took_s, _ = run_with(kill)
    assert (judged.findings[0].cause, judged.ranks, judged.exit_code) == ("AR008 host-oom-kill", (3,), 137)
    assert took_s <= 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stopped_process_is_named_within_three_seconds(seed):
    def stop(world: World) -> None:
        world.ranks[2].stopped_s = world.now_s

    judged, took_s, _ = run_with(stop, seed=seed)
    assert (judged.findings[0].cause, judged.ranks) == ("AR010 process-stopped", (2,))
    assert 2 in judged.blocked
    assert took_s <= 3.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gone", [(4,), (2, 5)])
def test_a_lost_node_is_named_within_five_seconds(seed, gone):
    def lose(world: World) -> None:
        for node in gone:
            world.silent_nodes.add(node)
            world.network.cut(node, range(6), networks=("data", "control"))
            world.stick([(other, node) for other in range(6) if other not in gone])

    judged, took_s, _ = run_with(lose, seed=seed)
    assert [finding.cause for finding in judged.findings] == ["AR012 node-failure"] * len(gone)
    assert (judged.nodes, judged.ranks, judged.cures, judged.exit_code) == (gone, gone, True, 75)
    assert took_s <= 5.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("workers_first", [False, True])
def test_a_killed_agent_is_named_though_its_workers_die_with_it(seed, workers_first):
    def lose(world: World) -> None:
        if workers_first:
            world.end(4, -9)
        world.silent_nodes.add(4)
        world.network.refused.add(4)
        world.at(0.05, lambda: world.guard.lost(4, "it closed the connection", world.now_s))
        world.break_others(4)

    judged, took_s, _ = run_with(lose, seed=seed)
    assert (judged.findings[0].cause, judged.nodes, judged.cures) == ("AR012 node-failure", (4,), True)
    assert "the machine answers" in judged.findings[0].message
    assert took_s <= 5.0


def test_an_agent_that_is_starved_while_its_workers_train_is_not_judged():
    def starve(world: World) -> None:
        world.silent_nodes.add(4)
        world.at(12.0, lambda: world.silent_nodes.discard(4))

    world = World([training(rank, seed=3) for rank in range(6)])
    world.run(20)
    starve(world)
    world.run(60)
    assert world.judged is None, world.judged
    assert any("no word from node05" in line for _, line in world.lines)


def odd_one(rank: int, odd: Call | None, *, at: int = 30, skips: bool = False) -> Program:
    rng = random.Random(rank)
    for step in itertools.count():
        yield Compute(rng.uniform(0.1, 0.4))
        if step == at and (odd or skips):
            if odd:
                yield odd
        else:
            yield Call()
        yield Call(size=1, place="train.py:20 in log")


@pytest.mark.parametrize(
    ("odd", "skips"),
    [
        (Call(op="broadcast"), False),
        (Call(size=999), False),
        (Call(dtype="Double"), False),
        (None, True),
    ],
)
def test_the_rank_in_another_collective_is_named_within_five_seconds(odd, skips):
    programs = [odd_one(rank, odd if rank == 2 else None, skips=skips and rank == 2) for rank in range(6)]
    world = World(programs).run(400)
    assert world.judged is not None
    finding = world.judged.findings[0]
    assert (finding.cause, finding.ranks, finding.confidence) == ("AR410 collective-mismatch", (2,), Confidence.CERTAIN)
    assert (world.judged.is_retryable, world.judged.exit_code) == (False, 1)
    last_in_s = max(rank.since_s for rank in world.ranks)
    assert world.judged_s - last_in_s <= 5.0


EVERYBODY = {"a": tuple(range(6)), "b": tuple(range(6))}


def two_groups(rank: int, odd: tuple[int, ...], *, at: int = 30, stops: int | None = None) -> Program:
    """Two collectives a step, one of each group; the odd ranks call them the other way round in one step."""
    rng = random.Random(rank)
    for step in itertools.count():
        yield Compute(rng.uniform(0.1, 0.4))
        if step == at and rank == stops:
            yield Compute(1e9, "evaluate.py:88 in run")
        groups = ("b", "a") if rank in odd and step == at else ("a", "b")
        for group in groups:
            yield Call(group=group, place=f"train.py:{20 + (group == 'b')} in step")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("odd", "stops", "named", "confidence"),
    [
        ((1,), None, (1,), Confidence.CERTAIN),
        ((0, 2, 3, 4), None, (1, 5), Confidence.CERTAIN),
        ((3, 4, 5), None, tuple(range(6)), Confidence.UNDECIDED),
        ((1,), 4, (1,), Confidence.CERTAIN),
    ],
    ids=["one", "most", "half", "one, and another one is late"],
)
def test_ranks_that_call_their_groups_in_another_order_are_named_within_five_seconds(
    odd, stops, named, confidence, seed
):
    programs = [two_groups(rank, odd, stops=stops) for rank in range(6)]
    world = Checked(programs, groups=EVERYBODY, seed=seed, late_beats=0.01).run(400)
    assert world.judged is not None
    finding = world.judged.findings[0]
    assert (finding.cause, finding.ranks, finding.confidence) == ("AR410 collective-mismatch", named, confidence)
    assert (world.judged.is_retryable, world.judged.exit_code) == (False, 1)
    assert world.judged_s - max(rank.since_s for rank in world.ranks) <= 5.0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.by_hand) for seed in range(1, 300))])
def test_groups_that_are_called_in_one_order_make_no_circle(seed):
    def program(rank: int) -> Program:
        rng, together = random.Random(seed * 100 + rank), random.Random(seed)
        for _ in itertools.count():
            yield Compute(rng.uniform(0.0, 0.1))
            order = together.sample(sorted(groups), len(groups))
            for group in order:
                if rank in groups[group]:
                    yield Compute(rng.uniform(0.0, 4.0) if rng.random() < 0.05 else rng.uniform(0.0, 0.1))
                    yield Call(group=group)

    groups = {name: random.Random(f"{seed} {name}").sample(range(6), 2 + ord(name) % 4) for name in "abcdef"}
    world = World([program(rank) for rank in range(6)], groups=groups, seed=seed, late_beats=0.03, long_pauses=0.003)
    assert world.run(120).judged is None, world.judged
    assert not any("each other" in line for _, line in world.lines)


def test_the_innocent_rank_that_gloo_aborts_is_not_blamed():
    programs = [odd_one(rank, Call(dtype="Double") if rank == 2 else None) for rank in range(6)]
    world = World(programs)
    while not all(isinstance(rank.doing, Call) and rank.seqs.get("0") == 61 for rank in world.ranks):
        world.run(0.05)
    world.end(1, -6, stderr=ABORTED)
    world.break_others(1)
    began_s = world.now_s
    world.run(60)
    assert world.judged is not None
    assert (world.judged.findings[0].cause, world.judged.ranks) == ("AR410 collective-mismatch", (2,))
    assert world.judged_s - began_s <= 2.0


def all_pairs(node: int, num: int = 6) -> list[tuple[int, int]]:
    return [pair for other in range(num) if other != node for pair in ((node, other), (other, node))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["silent", "large_lost"])
def test_a_node_without_its_data_link_is_named_within_five_seconds(seed, kind):
    def cut(world: World) -> None:
        getattr(world.network, kind).update((a, b, "data") for a, b in all_pairs(3))
        world.stick([(2, 3), (3, 4), (3, 2)])

    judged, took_s, _ = run_with(cut, seed=seed)
    cause = {"silent": "AR210 link-down", "large_lost": "AR204 mtu-blackhole"}[kind]
    assert (judged.findings[0].cause, judged.findings[0].node, judged.nodes) == (cause, "node04", (3,))
    assert (judged.cures, judged.exit_code, judged.findings[0].confidence) == (True, 75, "certain")
    assert took_s <= 5.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cut_between_two_nodes_is_told_as_one(seed):
    def cut(world: World) -> None:
        world.network.cut(1, [4])
        world.stick([(1, 4), (4, 1)])

    judged, took_s, _ = run_with(cut, seed=seed)
    finding = judged.findings[0]
    assert (finding.cause, finding.node, finding.confidence) == ("AR211 partition", "node02 or node05", "undecided")
    assert judged.nodes == (4,)
    assert took_s <= 5.0


def test_a_cut_between_two_halves_leaves_the_half_with_the_leader():
    def cut(world: World) -> None:
        for node in (1, 3, 5):
            world.network.cut(node, [0, 2, 4])
        world.stick([(0, 1), (1, 2), (3, 2), (4, 5)])

    judged, took_s, _ = run_with(cut)
    assert (judged.findings[0].cause, judged.nodes) == ("AR211 partition", (1, 3, 5))
    assert judged.findings[0].node == "node[01,03,05] or node[02,04,06]"
    assert took_s <= 5.0


def test_of_two_nodes_neither_is_named_alone():
    def cut(world: World) -> None:
        world.network.cut(0, [1])
        world.stick([(0, 1), (1, 0)])

    judged, took_s, _ = run_with(cut, num=2)
    finding = judged.findings[0]
    assert (finding.cause, finding.node, finding.confidence) == ("AR210 link-down", "node01 or node02", "undecided")
    assert (judged.nodes, took_s <= 5.0) == ((1,), True)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_loses_packets_is_named(seed):
    def lose(world: World) -> None:
        world.network.lossy[3] = 0.4
        world.stick([(2, 3), (3, 4)])

    judged, took_s, _ = run_with(lose, seed=seed)
    assert (judged.findings[0].cause, judged.nodes) == ("AR212 packet-loss", (3,))
    assert took_s <= 15.0


def test_one_connection_that_is_dropped_while_others_pass_is_a_filter():
    judged, took_s, _ = run_with(lambda world: world.stick([(2, 3)]))
    finding = judged.findings[0]
    assert (finding.cause, finding.node, finding.confidence) == ("AR206 firewall-port", "node03 or node04", "undecided")
    assert took_s <= 15.0


def test_a_short_outage_of_the_data_network_is_no_fault():
    world = World([training(rank, seed=4) for rank in range(6)]).run(20)
    world.stick(all_pairs(3))
    world.run(1.4)
    world.network.stuck_since_s.clear()
    assert world.run(60).judged is None


def stuck(rank: int, *, holds_gil: bool = False) -> Program:
    for step in itertools.count():
        yield Compute(0.3 if step != 40 else 1e9, "data.py:7 in load" if step == 40 else "train.py:10", holds_gil)
        yield Call()


@pytest.mark.parametrize("holds_gil", [False, True])
def test_a_rank_that_never_comes_is_named_at_slow_s_and_ended_at_hang_s(holds_gil):
    world = World([stuck(rank, holds_gil=holds_gil) if rank == 4 else training_calls() for rank in range(6)])
    world.run(400)
    assert world.judged is not None
    finding = world.judged.findings[0]
    assert (finding.cause, finding.ranks, world.judged.exit_code) == ("AR408 stuck-rank", (4,), 124)
    slow = [(at_s, line) for at_s, line in world.lines if line.startswith("slow")]
    assert [line.startswith("slow: rank 4 ") for _, line in slow] == [True, True]
    assert [round(at_s - world.ranks[4].since_s) // 5 for at_s, _ in slow] == [6, 12]
    assert ("GIL" in slow[0][1]) is holds_gil
    assert 119 <= world.judged_s - world.ranks[4].since_s <= 125


def training_calls() -> Program:
    for _ in itertools.count():
        yield Compute(0.3)
        yield Call()


def test_a_rank_that_the_kernel_holds_is_a_file_system():
    def block(world: World) -> None:
        world.ranks[4].blocked_s = world.now_s

    programs = [stuck(rank) if rank == 4 else training_calls() for rank in range(6)]
    judged, _, _ = run_with(block, programs=programs)
    assert (judged.findings[0].cause, judged.ranks, judged.nodes) == ("AR606 filesystem-hang", (4,), (4,))
    assert judged.cures


def test_a_rank_that_left_while_others_wait_for_it_is_named():
    def short() -> Program:
        for _ in range(40):
            yield Compute(0.3)
            yield Call()

    world = World([short() if rank == 4 else training_calls() for rank in range(6)]).run(100)
    assert world.judged is not None
    finding = world.judged.findings[0]
    assert (finding.cause, finding.ranks) == ("AR407 dead-rank", (4,))
    assert finding.message.startswith("it exited with code 0, and ranks 0-3,5 waited for it")


@pytest.mark.parametrize("skew_s", [0.0, 5.0])
def test_a_straggler_is_named_with_its_share_whatever_the_clocks_say(skew_s):
    world = World(
        [training(rank, seed=5, extra_s=0.15 if rank == 4 else 0.0) for rank in range(6)],
        skews_s=[0.0, skew_s, -skew_s, 0.3, -1.0, 2.0],
    )
    world.run(120)
    assert world.judged is None
    named = [line for _, line in world.lines if line.startswith("straggler")]
    (warning,) = world.guard.warnings
    assert named == [f"straggler: rank 4 on node05 {warning.message}"]
    assert re.fullmatch(r"calls collectives \d+ ms \(median\) after .* wait for it \d+ % of the time", warning.message)
    assert warning.cause == "AR409 straggler-rank"
    assert "rank 4" in warning.fix
    assert "JOB" not in warning.fix
    assert "timeout" not in warning.fix


def test_a_clock_that_is_set_back_makes_no_straggler():
    world = Checked([training(rank, seed=6) for rank in range(6)])
    for _ in range(5):
        world.run(40)
        world.skews_s[2] -= 0.7
    assert world.run(60).judged is None


def test_a_leader_that_slept_blames_nobody():
    world = World([training(rank, seed=7) for rank in range(6)]).run(30)
    world.now_s += 300  # a suspended job: nothing was told, nothing was asked
    world._events = [(at_s + 300, number, do) for at_s, number, do in world._events]
    assert world.run(60).judged is None, world.judged


def test_victims_alone_stay_undecided():
    def lose(world: World) -> None:
        world.end(1, 1, message=LOST)
        world.break_others(1)

    judged, took_s, _ = run_with(lose)
    assert (judged.findings[0].cause, judged.findings[0].confidence) == ("AR490 collective-timeout", "undecided")
    assert took_s <= 3.0


def test_a_process_in_a_debugger_for_a_moment_is_left_alone():
    world = World([training(rank, seed=8) for rank in range(6)]).run(30)
    world.ranks[2].stopped_s = world.now_s
    world.run(1.2)
    world.ranks[2].stopped_s = None
    world._advance(world.ranks[2]) if isinstance(world.ranks[2].doing, Compute) else None
    assert world.run(60).judged is None
    assert ProcessState.STOPPED.value == "stopped"
