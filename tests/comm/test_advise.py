"""What does `allranks advise` predict, and what does it offer?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.comm import methods
from allranks.comm.advise import MIB, Advice, BucketTimes, Model, StepProfile, advise, end_s
from allranks.comm.bench_table import BenchRow, BenchTable
from allranks.comm.curves import Curve, NetworkCurves
from allranks.comm.methods import Method
from comm.tables import EXCHANGE_S, bench_of

ROOT = Path(__file__).parents[2]
MEASURED = """
ms a step at                 500 Mbit/s   100 Mbit/s
plain, torch's buckets       488          2134
plain, 1 MB buckets          433          1927
bf16                         258           980
PowerSGD rank 4              345           476
8 micro-batches a step       195           406
averaged every 8 steps       201           397
DiLoCo every 10              198           411
DiLoCo every 25              178           307
"""
"""Six nodes whose links were shaped with tbf, Gloo, torch 2.13, buckets of 1 MB where nothing else is said: a model of
13.1 MB in eight layers, whose computing was a sleep of 50 ms forward and 100 ms backward (2026-11-28)."""
AS_MEASURED = {
    "plain, torch's buckets": methods.TORCH,
    "plain, 1 MB buckets": methods.EQUAL,
    "bf16": replace(methods.BF16, bucket_mb=1.0),
    "PowerSGD rank 4": replace(methods.POWERSGD, bucket_mb=1.0),
    "8 micro-batches a step": methods.ACCUMULATE,
    "averaged every 8 steps": methods.LOCAL[0],
    "DiLoCo every 10": methods.LOCAL[1],
    "DiLoCo every 25": methods.LOCAL[2],
}
STEP = StepProfile(tensor_bytes=(640 * 640 * 4,) * 8, forward_s=0.050, backward_s=0.100, other_s=0.005)


def measured(mbit: int) -> dict[str, float]:
    """Milliseconds a step of each method."""
    lines = (line.rsplit(None, 2) for line in MEASURED.strip().splitlines()[1:])
    return {name: float(slow if mbit == 500 else fast) for name, slow, fast in lines}


def predicted(mbit: int) -> dict[str, float]:
    table = bench_of(mbit)
    model = Model(STEP, NetworkCurves.of(table), table)
    return {name: model.predict(method).step_s * 1e3 for name, method in AS_MEASURED.items()}


@pytest.mark.parametrize("mbit", [500, 100])
def test_a_step_is_predicted_within_a_tenth_of_what_six_nodes_measured(mbit: int) -> None:
    found = predicted(mbit)
    off = {name: found[name] / ms for name, ms in measured(mbit).items()}
    assert off.keys() == AS_MEASURED.keys()
    assert {name: ratio for name, ratio in off.items() if not 0.9 < ratio < 1.1} == {}


@pytest.mark.parametrize("mbit", [500, 100])
def test_methods_that_are_a_tenth_apart_come_in_the_measured_order(mbit: int) -> None:
    found, truth = predicted(mbit), measured(mbit)
    apart = [(a, b) for a, a_ms in truth.items() for b, b_ms in truth.items() if 1.1 * a_ms <= b_ms]
    assert len(apart) > 20
    assert [(a, b) for a, b in apart if found[a] >= found[b]] == []


def test_losses_are_quoted_from_the_evidence() -> None:
    told = json.loads((ROOT / "docs/evidence/compression_loss.json").read_text())["methods"]
    measured = {
        name: (
            round(told[name]["difference_percent"]["mean"], 1),
            round(told[name]["samples_to_equal_loss"]["mean"], 2),
        )
        for name in methods.LOSSES
    }
    assert measured == methods.LOSSES


OFFERS = """
Mbit/s  ranks  steps left  noise scale   offered beside plain buckets, best first
   500      6       20000            -   int8, bf16, powersgd
   100      6           -            -   powersgd, int8, bf16
   100      6         300            -   powersgd, int8, bf16
   100      6         400            -   powersgd, int8, local SGD 8, bf16
   100      6        1000            -   powersgd, int8, DiLoCo 10, local SGD 8, bf16
   100      6       20000            -   powersgd, DiLoCo 25, int8, DiLoCo 10, local SGD 8, bf16
   500      6           -          0.1   int8, bf16, powersgd
   100      6           -            5   powersgd, int8, accumulate 8, bf16
  1000      6       20000            -   bf16, int8, powersgd
   100      2         300            -   powersgd, int8, bf16
"""
"""Local steps need twice the speed to equal loss, and 40 synchronizations. Without the noise scale nobody can say
whether a larger batch pays; where it is small, eight times the batch needs almost eight times the samples."""


def offers(text: str) -> list[str]:
    return text.strip().splitlines()[1:]


def advice_of(mbit: int, ranks: int = 6, **more: float | None) -> Advice:
    return advise(bench_of(mbit, ranks), STEP, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", offers(OFFERS))
def test_a_method_is_offered_if_it_pays(line: str) -> None:
    mbit, ranks, steps, noise, *words = line.split(None, 4)
    advice = advice_of(
        int(mbit),
        int(ranks),
        steps_left=None if steps == "-" else int(steps),
        noise_scale=None if noise == "-" else float(noise),
    )
    names = [one.method.name for one in advice.offered if one.method.wire or one.method.every > 1]
    assert ", ".join(names) == words[0]
    assert all(one.refusal for one in advice.refused)


def test_what_is_not_offered_says_why() -> None:
    def why(name: str, **more: float | None) -> str | None:
        return next(one.refusal for one in advice_of(**more).refused if one.method.name == name)  # type: ignore[arg-type]

    assert why("DiLoCo 25", mbit=100, steps_left=1000) == (
        "it changes the result, and pays only if at least 1111 steps are left, not 1000"
    )
    assert why("local SGD 8", mbit=100) == (
        "it changes the result, and pays only if at least 320 steps are left: give --steps"
    )
    assert "gains 1.6 x to equal loss over plain DDP, not 2 x" in (why("DiLoCo 25", mbit=500, steps_left=20000) or "")
    assert "give --noise-scale" in (why("accumulate 8", mbit=100) or "")
    assert why("accumulate 2", mbit=500, noise_scale=0.1) == (
        "its steps are 1.7 x as fast, but it needs 1.9 x the samples to equal loss"
    )


def test_gradients_of_two_bytes_gain_nothing_as_bf16() -> None:
    found = advise(bench_of(100), replace(STEP, element_bytes=2))
    assert "bf16" not in [one.method.name for one in (*found.offered, *found.refused)]


def test_diloco_names_the_steps_of_its_warm_up() -> None:
    found = next(one for one in advice_of(100, steps_left=5000).offered if one.method.name == "DiLoCo 25")
    assert found.method.line == "optimizer = s.local_sgd(model, optimizer, every=25, plain_steps=500, outer_lr=0.9)"


def test_a_loss_below_that_of_plain_ddp_is_chance_and_no_gain() -> None:
    lucky = replace(methods.INT8, loss=methods.Loss(-0.4, 0.98))
    assert lucky.samples == 1.0
    assert methods.POWERSGD.samples == methods.POWERSGD.loss.samples > 1


def test_now_is_what_the_script_has_and_the_gain_is_over_that() -> None:
    equal = replace(STEP, bucket_bytes=(640 * 640 * 4,) * 8)
    found = advise(bench_of(100), equal)
    one = next(one for one in (*found.offered, *found.refused) if one.method is methods.EQUAL)
    assert found.now.step_s == one.step_s
    assert one.gain == 1.0


# Buckets: bytes; backward pass 4 s; a byte takes 1 s among others, 2 s alone.
SCHEDULES = """
buckets   the last one is reduced after
1         6    ready after 4, and alone
1 1       6    ready after 2 and 4; the first one is alone up to 4, the second one from then on
1 3      10    ready after 1 and 4; alone from 1 to 3, and from 4 to 10
2 2       8    ready after 2 and 4; the first one is alone up to 6, so the second one is in flight beside it: 4, then 4
"""


@pytest.mark.parametrize("line", SCHEDULES.strip().splitlines()[1:])
def test_buckets_go_one_after_the_other_and_none_before_its_gradients_are_ready(line: str) -> None:
    words = line[:12].split()
    *buckets, end = (int(word) for word in words)
    assert end_s(buckets, 4.0, lambda size: BucketTimes([(2 * size, size)])) == end


def test_a_backward_pass_that_hides_all_buckets_is_what_a_step_waits_for() -> None:
    assert end_s([1, 1], 4.0, lambda size: BucketTimes([(0.0, 0.0)])) == 4.0


def test_a_bucket_is_sent_while_the_code_of_another_one_runs() -> None:
    """Two collectives a bucket, of 4 s alone and 3 s among others; 1 s of code before, between and after them."""
    way = BucketTimes([(4.0, 3.0), (4.0, 3.0)], pack_s=1.0, between_s=1.0, unpack_s=1.0)
    assert end_s([1, 1], 0.0, lambda size: way) == 1 + 3 + 3 + 3 + 4 + 1
    assert end_s([1, 1], 20.0, lambda size: way) == 20 + 2 + 4 + 1 + 4 + 1
    assert end_s([1], 0.0, lambda size: way) == 1 + 4 + 1 + 4 + 1


def test_a_curve_goes_through_what_was_measured_and_is_straight_between() -> None:
    curve = Curve.through([(100, 3.0), (300, 5.0), (200, 4.0)])
    assert [curve.time_s(size) for size in (100, 150, 300)] == [3.0, 3.5, 5.0]
    assert curve.time_s(0) == pytest.approx(2.0)  # the hops
    assert curve.time_s(600) == 10.0  # the bandwidth of the largest size holds


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(100, 3.0)], (0.0, 0.03)),
        ([(100, 1.0), (200, 4.0)], (0.0, 0.012)),  # no hops can take less than no time
        ([(100, 4.0), (200, 2.0)], (2.4, 0.0)),
    ],
)
def test_neither_part_of_a_curve_is_negative(points: list[tuple[int, float]], line: tuple[float, float]) -> None:
    curve = Curve.through(points)
    assert (curve.fixed_s, curve.per_byte_s) == pytest.approx(line)


@pytest.mark.parametrize("ranks", [2, 3, 4, 12])
def test_a_table_of_six_nodes_is_scaled_to_what_other_numbers_would_measure(ranks: int) -> None:
    scaled, truth = NetworkCurves.of(bench_of(500)).among(ranks), NetworkCurves.of(bench_of(500, ranks))
    for size in (MIB, 3 * MIB, 20 * MIB):
        assert scaled.time_s("all_reduce", size, in_flight=8) == pytest.approx(
            truth.time_s("all_reduce", size, in_flight=8), rel=0.03
        )


@pytest.mark.parametrize(("ranks", "time_s"), [(2, 0.002 + 0.008), (6, 0.010 + 0.0133333), (11, 0.020 + 0.0145454)])
def test_hops_and_bytes_of_a_ring_are_scaled_each_by_its_own_number(ranks: int, time_s: float) -> None:
    """A hop takes 1 ms, and 8 MB take 8 ms over a link; six ranks measured."""
    rows = [
        BenchRow(collective="all_reduce", size_bytes=size, count=1, time_s=10e-3 + 10 / 6 * size / 1e9, p95_s=1)
        for size in (1_000_000, 4_000_000, 16_000_000)
    ]
    network = NetworkCurves.of(BenchTable(backend="gloo", nodes=("a",) * 6, ranks=6, rows=tuple(rows)))
    assert network.among(ranks).time_s("all_reduce", 8_000_000) == pytest.approx(time_s, rel=1e-4)


def test_what_waits_at_its_hops_alone_passes_as_all_reduces_do_among_others() -> None:
    """It was only measured alone: among eight, it takes no longer than the all-reduce that sends as many bytes."""
    times = {("all_reduce", 1): 50e-3, ("all_reduce", 8): 20e-3, ("all_to_all", 1): 40e-3}
    rows = [BenchRow(collective=name, in_flight=number, size_bytes=8_000_000, count=1, time_s=time_s, p95_s=1)
            for (name, number), time_s in times.items()]  # fmt: skip
    network = NetworkCurves.of(BenchTable(backend="gloo", nodes=("a",) * 6, ranks=6, rows=tuple(rows)))
    assert network.time_s("all_to_all", 8_000_000) == pytest.approx(40e-3)
    assert network.time_s("all_to_all", 8_000_000, in_flight=8) == pytest.approx(10e-3)


def test_one_node_sends_nothing_and_other_numbers_are_said_to_be_scaled() -> None:
    found = advice_of(100, max_nodes=8).by_nodes
    assert [(each.nodes, each.is_scaled) for each in found] == [
        (1, False), (2, True), (3, True), (4, True), (5, True), (6, False), (7, True), (8, True),
    ]  # fmt: skip
    assert set(found[0].steps_s.values()) == {STEP.compute_s}
    assert [each.nodes for each in advice_of(100, max_nodes=100).by_nodes] == [1, 2, 4, 6, 8, 16, 32, 64, 100]


def test_what_happens_inside_a_node_is_not_predicted_from_what_happens_between_nodes() -> None:
    import msgspec

    two_each = msgspec.structs.replace(bench_of(100), nodes=("node01", "node02", "node03"))
    assert [(each.nodes, each.ranks) for each in advise(two_each, STEP).by_nodes] == [(2, 4), (3, 6)]


def test_a_small_all_reduce_that_nobody_measured_is_twice_an_all_gather() -> None:
    import msgspec

    table = bench_of(500)
    rows = [row for row in table.rows if row.collective != "all_reduce" or row.size_bytes > 64 << 10]
    without = NetworkCurves.of(msgspec.structs.replace(table, rows=tuple(rows)))
    assert without.time_s("all_reduce", 4 << 10) == pytest.approx(2 * EXCHANGE_S, rel=0.05)
    nothing_else = [row for row in rows if row.collective == "all_reduce"]
    bare = NetworkCurves.of(msgspec.structs.replace(table, rows=tuple(nothing_else)))
    assert bare.time_s("all_gather", 8 * MIB) == pytest.approx(bare.time_s("all_reduce", 8 * MIB) / 2)


def test_packing_takes_what_all_ranks_at_once_took_in_the_table() -> None:
    import msgspec

    table = bench_of(100)
    slow = BenchRow(collective="pack_bf16", size_bytes=4 * MIB, count=MIB, time_s=4.0, p95_s=4.0)
    packed = msgspec.structs.replace(table, rows=(*table.rows, slow))
    network = NetworkCurves.of(packed)
    assert (network.code_s("bf16", MIB, MIB / 2), network.code_s("int8", MIB, MIB / 4)) == (1.0, None)
    one, other = (Model(STEP, NetworkCurves.of(own), own).predict(methods.BF16).step_s for own in (table, packed))
    # 12.5 MiB take 12.5 s: half of it in the backward pass, and after it the last bucket's 1.56 MiB are unpacked.
    assert other == pytest.approx(STEP.compute_s + 12.5 / 2 + 0.78 + 0.07, abs=0.1)
    assert one < 1.1


def test_powersgd_takes_what_it_took_in_the_table_and_other_ranks_have_all_reduces_of_their_own() -> None:
    import msgspec

    step = replace(STEP, has_vectors=False)
    whole = BenchRow(collective="reduce_powersgd", size_bytes=16 * MIB, count=4 * MIB, time_s=0.8, p95_s=0.8)
    table = msgspec.structs.replace(bench_of(500), rows=(*bench_of(500).rows, whole))
    network = NetworkCurves.of(table)
    own, fewer = (Model(step, network.among(ranks), table).predict(methods.POWERSGD) for ranks in (6, 2))
    assert own.step_s == pytest.approx(step.compute_s + 0.8 * step.gradient_bytes / (16 * MIB))
    # Two all-reduces of 0.15 MB, of 11 ms of hops: five of them with six ranks, one with two, and their bytes.
    assert own.step_s - fewer.step_s == pytest.approx(2 * 0.011 * 4 / 5 + 0.003, abs=0.002)


def test_gradients_without_a_matrix_form_cost_powersgd_one_more_all_reduce() -> None:
    table = bench_of(500)
    some, none = (
        Model(replace(STEP, has_vectors=has), NetworkCurves.of(table), table).predict(methods.POWERSGD).step_s
        for has in (True, False)
    )
    assert some - none == pytest.approx(0.0105, abs=0.001)  # its hops


@pytest.mark.parametrize(("best_s", "repetitions", "taken_s"), [(0.02, 2, 0.02), (0.02, 3, 0.03), (0.0, 2, 0.03)])
def test_of_two_repetitions_the_faster_one_counts(best_s: float, repetitions: int, taken_s: float) -> None:
    """Their median would be their mean, which one stall of a second moves by half a second."""
    size, times = {"size_bytes": MIB, "count": MIB // 4}, {"time_s": 0.03, "p95_s": 0.04, "best_s": best_s}
    row = BenchRow(collective="all_reduce", repetitions=repetitions, **size, **times)  # type: ignore[arg-type]
    network = NetworkCurves.of(BenchTable(backend="gloo", nodes=("a", "b"), ranks=2, rows=(row,)))
    assert network.time_s("all_reduce", MIB) == taken_s


@pytest.mark.parametrize(("rows", "ranks"), [((), 6), (bench_of(100).rows, 1)])
def test_a_table_without_all_reduces_predicts_nothing(rows: tuple[BenchRow, ...], ranks: int) -> None:
    table = BenchTable(backend="gloo", nodes=("node01",), ranks=ranks, rows=rows)
    with pytest.raises(ValueError, match="has no all-reduce between two ranks"):
        advise(table, STEP)


def test_each_method_has_a_line_to_write_and_a_name_of_its_own() -> None:
    names = [method.name for method in methods.METHODS]
    assert len(set(names)) == len(names)
    assert all(isinstance(method, Method) and method.line for method in methods.METHODS)
