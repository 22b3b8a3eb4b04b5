"""From what pairs of nodes say of their collectives to a culprit: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from allranks.causes.book import find_cause
from allranks.comm.bench_table import BenchRow
from allranks.launch.check.check_outcome import CheckOutcome
from allranks.launch.check.check_step import CheckOrder, Held
from allranks.launch.check.deep import judge_reports, plan_pairs, render_figures
from allranks.launch.check.member_step import MemberAddress
from allranks.launch.check.pair_collectives import PairOrder, Report, work_of
from allranks.launch.srun import decode, encode
from allranks.model.card import Card, Facts, Interface
from allranks.model.finding import Confidence, Severity, Status
from allranks.preflight.judge import Observations
from allranks.preflight.matchings import matchings
from cards import make_card

CAUSES = (find_cause("AR403"), find_cause("AR416"), find_cause("AR417"))


def names(count: int) -> list[str]:
    return [f"node{i:02}" for i in range(1, count + 1)]


def order_of(count: int, *, backends: tuple[str, ...] = ("gloo",)) -> PairOrder:
    nodes = names(count)
    ends = {
        name: MemberAddress(address=f"10.0.0.{i}", interface="eth0", num_gpus=1)
        for i, name in enumerate(nodes, start=1)
    }
    return PairOrder(ends=ends, rounds=matchings(nodes), backends=backends, port=29500)


def told_by(order: PairOrder, bad: Iterable[str] = (), *, bad_backend: str = "gloo", **of_bad: str) -> list[Report]:
    """Every node is there, and every pair with a bad node fails, on both ends."""
    reports = [Report(node=name) for name in order.ends]
    for backend in order.backends:
        for number, pairs in enumerate(order.rounds):
            for a, b in pairs:
                is_bad = backend == bad_backend and bool({a, b} & set(bad))
                for node, peer in ((a, b), (b, a)):
                    fields = {"status": "failed", "what": f"no word from {peer}", **of_bad} if is_bad else {}
                    if node == a and not is_bad:
                        reports.append(reduced(4, 0.004194304, node=a, backend=backend, round=number))
                    reports.append(Report(node=node, backend=backend, round=number, **fields))
    return reports


def reduced(mib: int, time_s: float, **pair: Any) -> Report:
    """What the first node of a pair reports about one size."""
    row = BenchRow(
        collective="all_reduce", size_bytes=mib << 20, count=mib << 18, time_s=time_s, p95_s=time_s, best_s=time_s
    )
    return Report(row=row, **pair)


def measured(order: PairOrder, seconds: dict[str, float], *, backend: str = "gloo") -> list[Report]:
    """Every pair reduces 16 MiB in 0.1 s, with these nodes in so many seconds."""
    pairs = [(number, pair) for number, pairs in enumerate(order.rounds) for pair in pairs]
    return told_by(order) + [
        reduced(16, max(seconds.get(node, 0.1) for node in pair), node=pair[0], backend=backend, round=number)
        for number, pair in pairs
    ]


def failing(order: PairOrder, told: list[Report], *pairs: tuple[str, str]) -> list[Report]:
    """The same reports, but these pairs failed at both ends, with nothing measured."""
    bad = {
        (number, node)
        for number, of_round in enumerate(order.rounds)
        for pair in of_round
        if pair in pairs
        for node in pair
    }
    return [
        replace(r, status="failed", what="timed out") if (r.round, r.node) in bad else r
        for r in told
        if r.row is None or (r.round, r.node) not in bad
    ]


def judged(order: PairOrder, reports: list[Report], **skipped: str) -> CheckOutcome:
    return judge_reports(CheckOutcome(nodes=tuple(order.ends)), order, reports, skipped=skipped, wanted=CAUSES)


def figures(deep: CheckOutcome) -> tuple[Mapping[str, object], ...]:
    assert deep.figures is not None
    return deep.figures


def statuses(deep: CheckOutcome, cause: str) -> dict[str, Status]:
    return {each.node: each.status for each in deep.results if each.cause_id == cause}


def test_good_pairs_pass_and_their_seconds_are_figures() -> None:
    order = order_of(4)
    deep = judged(order, told_by(order))
    assert deep.findings == ()
    assert statuses(deep, "AR403") == dict.fromkeys(names(4), Status.PASS)
    assert {each.note for each in deep.results if each.cause_id == "AR416"} == {"no NVIDIA GPU"}
    assert len(figures(deep)) == 4
    assert render_figures(figures(deep)).splitlines()[0] == (
        "gloo, round 1: node01 <-> node04: 4 MiB in 0.004194 s, 1000.0 MB/s; 4 MiB in 4.19 ms, busbw 1 GB/s"
    )


def test_a_node_that_fails_with_two_partners_is_named() -> None:
    order = order_of(6)
    deep = judged(order, told_by(order, ["node03"]))
    (found,) = deep.findings
    assert (found.cause, found.node, found.waiting) == ("AR403 gloo-timeout", "node03", "node[01-02,04-06]")
    assert found.message == "an all-reduce of 4 MiB over Gloo fails between node03 and node[02,04]"
    assert "node02 with node03: no word from node03" in [each.seen for each in found.evidence]
    assert deep.exit_code == 1
    assert statuses(deep, "AR403") == {**dict.fromkeys(names(6), Status.PASS), "node03": Status.FAIL}


def test_of_two_nodes_nobody_can_be_told() -> None:
    order = order_of(2)
    (found,) = judged(order, told_by(order, ["node02"])).findings
    assert (found.confidence, found.node) == (Confidence.UNDECIDED, "node01 or node02")


def test_a_wrong_sum_fails_its_pair() -> None:
    order = order_of(2)
    told = [replace(r, row=replace(r.row, wrong=3)) if r.row else r for r in told_by(order)]
    (found,) = judged(order, told).findings
    assert "the sum of an all-reduce of 4 MiB is wrong in 3 of 1048576" in "\n".join(
        each.seen for each in found.evidence
    )


def test_one_bad_link_is_not_a_bad_node() -> None:
    order = order_of(6)
    told = told_by(order)
    told = failing(order, told, ("node03", "node04"), ("node04", "node03"))
    assert [each.node for each in judged(order, told).findings] == ["node03 <-> node04"]


def test_nccl_has_a_cause_of_its_own() -> None:
    order = order_of(6, backends=("gloo", "nccl"))
    deep = judged(order, told_by(order, ["node05"], bad_backend="nccl"))
    assert [(each.cause, each.node) for each in deep.findings] == [("AR416 nccl-pair-failed", "node05")]
    assert set(statuses(deep, "AR403").values()) == {Status.PASS}


def test_a_child_without_a_last_word_is_the_one() -> None:
    order = order_of(6)
    told = told_by(order, ["node02"])
    told = [each for each in told if each.node != "node02" or not each.backend]
    (found,) = judged(order, told).findings
    assert found.node == "node02"
    assert "node02 with node05: it did not finish the collective" in [each.seen for each in found.evidence]


def test_a_port_in_use_or_a_node_that_was_not_started_is_no_failure() -> None:
    order = order_of(4)
    deep = judged(order, told_by(order, ["node02"], status="unknown", what="port 29500 is in use here"))
    assert deep.findings == ()
    assert statuses(deep, "AR403")["node02"] is Status.UNKNOWN
    deep = judged(order, [each for each in told_by(order) if each.node != "node03"])
    assert deep.findings == ()
    assert statuses(deep, "AR403")["node03"] is Status.UNKNOWN


def test_a_node_without_torch_is_skipped_and_nobody_is_blamed() -> None:
    order = order_of(6)
    told = told_by(order, ["node06"])
    told = [each for each in told if each.node != "node06"]
    told.append(Report(node="node06", no_torch="torch is not installed"))
    deep = judged(order, told)
    assert deep.findings == ()
    assert statuses(deep, "AR403") == {**dict.fromkeys(names(5), Status.PASS), "node06": Status.SKIP}


def test_a_node_whose_pairs_are_slow_is_named_and_the_figures_say_what_they_carry() -> None:
    order = order_of(6)
    deep = judged(order, measured(order, {"node03": 0.3}))
    (found,) = deep.findings
    assert (found.cause, found.node, found.severity, found.interface) == (
        "AR417 slow-collective", "node03", Severity.FAIL, "eth0",
    )  # fmt: skip
    assert found.message == ("all-reduces over Gloo reach 0.0559 and 0.0559 GB/s here, the median of all pairs 0.168")
    assert [each.seen for each in found.evidence] == [
        "node03 <-> node04: 16 MiB in 300 ms, busbw 0.0559 GB/s",
        "node02 <-> node03: 16 MiB in 300 ms, busbw 0.0559 GB/s",
    ]
    assert render_figures(figures(deep)).splitlines()[0] == (
        "gloo, round 1: node01 <-> node06: 4 MiB in 0.004194 s, 1000.0 MB/s; 16 MiB in 100 ms, busbw 0.168 GB/s"
    )
    assert figures(deep)[0].items() >= {"ms": 100.0, "busbw_gb_s": 0.1678, "of_yardstick": 1.0, "of_link": None}.items()
    assert statuses(deep, "AR417") == {**dict.fromkeys(names(6), Status.PASS), "node03": Status.FAIL}
    assert deep.exit_code == 1


def test_a_warning_of_a_deep_look_is_one_in_the_table_and_stops_nothing() -> None:
    order = order_of(6)
    deep = judged(order, measured(order, {"node03": 0.15}))
    assert [(each.node, each.severity) for each in deep.findings] == [("node03", Severity.WARN)]
    assert statuses(deep, "AR417")["node03"] is Status.WARN
    assert deep.exit_code == 0


@pytest.mark.parametrize(
    ("usual_s", "named"), [(0.15, ["node03"]), (0.25, [])], ids=["links are at speed", "cores decide"]
)
def test_where_pairs_do_not_fill_their_links_a_node_is_slow_only_far_below_them(
    usual_s: float, named: list[str]
) -> None:
    order = order_of(6)
    gigabit = {name: replace(end, link_mbit_s=1000) for name, end in order.ends.items()}  # 16 MiB take 0.134 s
    order = replace(order, ends=gigabit)
    seconds = dict.fromkeys(names(6), usual_s)
    slow = judged(order, measured(order, {**seconds, "node03": usual_s * 1.4}))
    assert [each.node for each in slow.findings] == named
    far = judged(order, measured(order, {**seconds, "node03": usual_s * 2.2}))
    assert [(each.node, each.severity) for each in far.findings] == [("node03", Severity.FAIL)]


def test_what_failed_is_not_held_against_what_it_would_have_carried() -> None:
    order = order_of(6)
    told = measured(order, {})
    told = failing(order, told, *(pair for pairs in order.rounds for pair in pairs if "node03" in pair))
    deep = judged(order, told)
    assert [each.cause for each in deep.findings] == ["AR403 gloo-timeout"]
    assert statuses(deep, "AR417") == {**dict.fromkeys(names(6), Status.PASS), "node03": Status.SKIP}


def test_matmuls_are_held_against_the_median() -> None:
    order = order_of(3, backends=("gloo", "nccl"))
    told = told_by(order)
    told += [Report(node=node, matmul_s=(s,)) for node, s in zip(names(3), (0.01, 0.01, 0.02), strict=True)]
    deep = judged(order, told)
    assert deep.findings == ()
    assert [each["of_median"] for each in figures(deep) if each["backend"] == "matmul"] == [1.0, 1.0, 2.0]
    assert "node03 GPU 0: matmul 0.02 s, 2.0 of the median" in render_figures(figures(deep))


# --- Who takes part


def held(*cards: Card, store_port: int | None = 29501, **more: Mapping[int, str]) -> Held:
    seen = Observations(cards=dict(enumerate(cards)))
    hosts = tuple(card.host for card in cards)
    return Held(seen=seen, num_nodes=len(cards), node_names=hosts, store_port=store_port, **more)


def card(number: int, *, has_torch: bool = True, is_told: bool = True, num_gpus: int = 0) -> Card:
    nics = tuple(
        Interface(name, (f"{net}.{number}",), is_up=True, networks=(f"{net}.0/24",))
        for name, net in (("eth0", "10.0.0"), ("eth1", "10.0.1"))
    )
    packages = {"torch": "2.13.0"} if has_torch else {}
    facts = Facts(interfaces=nics, packages=packages, torch_cuda="13.0" if num_gpus else None)
    path = {"data_interface": "eth1", "data_address": f"10.0.1.{number}"} if is_told else {}
    return make_card(number, num_gpus=num_gpus, facts=facts, **path)


def test_nodes_meet_on_their_data_interfaces_at_the_port_of_the_roll_call() -> None:
    order, skipped = plan_pairs(held(card(1), card(2), card(3, has_torch=False)))
    assert skipped == {"node03": "torch is not installed"}
    assert (order.port, order.backends, order.rounds) == (29501, ("gloo",), ((("node01", "node02"),),))
    assert order.ends["node02"] == MemberAddress(address="10.0.1.2", interface="eth1")
    assert decode(encode(order), CheckOrder | PairOrder) == order
    (first,) = work_of(order, "node01")["work"]
    (second,) = work_of(order, "node02")["work"]
    assert (first["rank"], second["rank"], first["names"]) == (0, 1, ("node01", "node02"))
    assert first["address"] == second["address"] == "10.0.1.1"


def test_without_a_data_network_it_is_the_one_on_which_nodes_found_each_other() -> None:
    met_at = {0: "10.0.0.1", 1: "10.0.0.2"}
    order, _ = plan_pairs(held(card(1, is_told=False), card(2, is_told=False), addresses=met_at))
    assert order.ends["node02"] == MemberAddress(address="10.0.0.2", interface="eth0")


@pytest.mark.parametrize("met_at", [{}, {0: "10.0.0.1", 1: ""}, {0: "10.0.0.1", 1: "198.51.100.2"}])
def test_a_node_whose_address_is_none_of_its_own_cannot_take_part(met_at: dict[int, str]) -> None:
    order, skipped = plan_pairs(held(card(1), card(2, is_told=False), addresses=met_at))
    assert order.ends == {}
    assert skipped["node02"] == "its data interface is unknown; name it in cluster.toml"


def test_nccl_needs_a_gpu_on_every_node() -> None:
    both, _ = plan_pairs(held(card(1, num_gpus=8), card(2, num_gpus=8)))
    one, _ = plan_pairs(held(card(1, num_gpus=8), card(2)))
    assert (both.backends, one.backends) == (("gloo", "nccl"), ("gloo",))
    work = work_of(both, "node01")
    assert [(each["step"], each["backend"]) for each in work["work"]] == [(0, "gloo"), (1, "nccl")]
    assert work["num_gpus"] == 8


def test_one_node_has_nobody_to_be_paired_with() -> None:
    order, skipped = plan_pairs(held(card(1)))
    assert (order.ends, skipped) == ({}, {"node01": "one node alone"})
    assert {each.note for each in judged(order, [], **skipped).results} == {"one node alone"}
