"""Are RDMA ports judged right: active, without errors, as many on all nodes, and skipped where NCCL uses none?"""

from __future__ import annotations

from typing import Any

import pytest

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause
from allranks.causes.probes import checks_of
from allranks.causes.probes.rdma import (
    collect_gdr_differs,
    collect_hca_set_differs,
    probe_ib_config,
    probe_rdma_in_use,
    survey_ib_config,
    weigh_gdr_differs,
    why_no_rdma,
)
from allranks.model.card import Card, Facts, RdmaPort
from allranks.model.finding import Severity, Status
from cards import collect, make_card, probe, survey

ALL: list[Cause] = [find_cause("AR301"), find_cause("AR302"), find_cause("AR303"), find_cause("AR304")]
SET = "the number of active RDMA ports"


def port(device: str = "mlx5_0", **changes: Any) -> RdmaPort:
    named = {"device": device, "port": 1, "state": "ACTIVE", "phys_state": "LinkUp", "rate": "400 Gb/sec (4X NDR)"}
    return RdmaPort(
        **{**named, "link_layer": "InfiniBand", "lid": "0x4", "sm_lid": "0x1", "has_uverbs": True, **changes}
    )


TWO = (port("mlx5_0"), port("mlx5_1"))


def node(number: int, ports: tuple[RdmaPort, ...] = TWO, *, env: dict[str, str] | None = None, **changes: Any) -> Card:
    facts = Facts(rdma_ports=ports, has_peer_memory=changes.pop("peer_memory", True), environment=env or {})
    return make_card(number, **{"num_workers": 8, "num_gpus": 8, "facts": facts, **changes})


def probed(cause: Cause, card: Card) -> tuple[Status, str]:
    outcome = probe(cause, card)
    assert outcome is not None
    if outcome.status in (Status.FAIL, Status.WARN):
        return outcome.status, outcome.to_finding(cause, node=card.host).message
    return outcome.status, outcome.note


@pytest.mark.parametrize("cause", [find_cause("AR301"), find_cause("AR302")])
def test_healthy_ports_pass(cause: Cause) -> None:
    assert probed(cause, node(1)) == (Status.PASS, "")


@pytest.mark.parametrize("count", [1, 2, 6])
def test_healthy_nodes_are_alike(count: int) -> None:
    cards = [node(number) for number in range(1, count + 1)]
    assert survey_ib_config(cards) == []
    assert {str(collect_hca_set_differs(card)) for card in cards} == {str({SET: "2"})}
    assert {str(collect_gdr_differs(card)) for card in cards} == {str({"GPUDirect RDMA": "it"})}


@pytest.mark.parametrize("cause", ALL)
@pytest.mark.parametrize(
    ("card", "note"),
    [
        (node(1, ()), "no RDMA device"),
        (node(1, env={"NCCL_IB_DISABLE": "1"}), "NCCL_IB_DISABLE=1"),
        (node(1, env={"NCCL_NET": "Socket"}), "NCCL_NET=Socket"),
        (node(1, wanted_backend="gloo"), "no rank here uses NCCL"),
        (node(1, num_gpus=0), "no rank here uses NCCL"),
    ],
)
def test_where_nccl_uses_no_rdma_it_is_skipped(cause: Cause, card: Card, note: str) -> None:
    assert probed(cause, card) == (Status.SKIP, note)


def test_ib_disable_0_disables_nothing() -> None:
    assert why_no_rdma(node(1, env={"NCCL_IB_DISABLE": "0"})) is None


@pytest.mark.parametrize("cause", ALL)
def test_a_card_without_facts_is_no_pass(cause: Cause) -> None:
    card = node(1, facts=None)
    outcome = probe(cause, card)
    assert outcome is None or outcome.status is Status.UNKNOWN
    assert not survey(cause, [card, card])
    assert collect(cause, card) is None


@pytest.mark.parametrize(
    ("ports", "env", "message"),
    [
        (
            (port(state="INIT", sm_lid="0x0"),),
            {},
            "mlx5_0:1 has a link but no subnet manager: state INIT, sm_lid 0",
        ),
        (
            (port(), port("mlx5_1", has_uverbs=False)),
            {},
            "mlx5_1:1 is active, but this user may not open its /dev/infiniband/uverbs device",
        ),
        (TWO, {"NCCL_IB_HCA": "mlx5_7"}, "NCCL_IB_HCA=mlx5_7 matches none of the node's ports: mlx5_0:1, mlx5_1:1"),
    ],
)
def test_a_port_that_nccl_cannot_use_fails(ports: tuple[RdmaPort, ...], env: dict[str, str], message: str) -> None:
    assert probed(find_cause("AR301"), node(1, ports, env=env)) == (Status.FAIL, message)


@pytest.mark.parametrize(
    "ports",
    [
        (port(), port("mlx5_1", state="DOWN", phys_state="Disabled", sm_lid="0x0")),  # a second port without a cable
        (port(link_layer="Ethernet", sm_lid="0x0"),),
        (port(sm_lid=None, has_uverbs=None),),
        (port(sm_lid="no number"),),
    ],
)
def test_what_is_usual_passes(ports: tuple[RdmaPort, ...]) -> None:
    assert probed(find_cause("AR301"), node(1, ports))[0] is Status.PASS


def test_a_device_that_nccl_leaves_out_does_not_matter() -> None:
    ports = (port(), port("mlx5_1", has_uverbs=False))
    assert probed(find_cause("AR301"), node(1, ports, env={"NCCL_IB_HCA": "^mlx5_1"}))[0] is Status.PASS


def test_a_port_that_is_down_on_one_node_is_named() -> None:
    down = (port("mlx5_0"), port("mlx5_1", state="DOWN", phys_state="Polling"))
    ((hosts, outcome),) = survey_ib_config([node(1), node(2), node(3, down)])
    assert (hosts, outcome.status) == (("node03",), Status.FAIL)
    assert outcome.values["what"] == "mlx5_1:1 is DOWN (Polling); it is active on 2 of the other 2 nodes"


def test_a_port_that_is_down_on_most_nodes_is_nobodys_fault() -> None:
    down = (port("mlx5_0"), port("mlx5_1", state="DOWN", phys_state="Polling"))
    assert survey_ib_config([node(1, down), node(2, down), node(3)]) == []


def test_error_counters_warn() -> None:
    ports = (port(error_counters={"symbol_error": 7, "link_downed": 2, "VL15_dropped": 9}), port("mlx5_1"))
    assert probed(find_cause("AR302"), node(1, ports)) == (
        Status.WARN,
        "mlx5_0:1 has counted errors since its last reset: link_downed 2, symbol_error 7",
    )


@pytest.mark.parametrize(
    "one", [port(error_counters={"VL15_dropped": 9}), port(state="DOWN", error_counters={"link_downed": 1})]
)
def test_counters_that_mean_nothing_pass(one: RdmaPort) -> None:
    assert probed(find_cause("AR302"), node(1, (one,)))[0] is Status.PASS


@pytest.mark.parametrize(
    ("hca", "value"),
    [
        ("", "2"),
        ("mlx5", "2"),
        ("=mlx5_1", "1"),
        ("=mlx5_1:2", "0"),
        ("mlx5_0:1,mlx5_1:2", "1"),
        ("^mlx5_0", "1"),
        ("^=mlx5", "2"),
    ],
)
def test_the_set_is_what_nccl_ib_hca_leaves(hca: str, value: str) -> None:
    assert collect_hca_set_differs(node(1, env={"NCCL_IB_HCA": hca})) == {SET: value}


def test_a_node_without_a_device_differs_from_those_that_have_one() -> None:
    assert collect_hca_set_differs(node(1, ())) == {SET: "0"}
    assert checks_of(find_cause("AR303")).severity_of(SET) is Severity.FAIL
    assert probe_rdma_in_use(node(1)) is None


def test_what_could_not_be_read_is_none() -> None:
    facts = Facts(unread={"rdma_ports": "timed out"})
    assert collect_hca_set_differs(node(1, facts=facts)) == {SET: None}
    assert probe_ib_config(node(1, facts=facts)).status is Status.UNKNOWN


@pytest.mark.parametrize(("peer_memory", "value"), [(True, "it"), (False, "none"), (None, None)])
def test_gpudirect_is_compared_and_warns(peer_memory: bool | None, value: str | None) -> None:
    assert collect_gdr_differs(node(1, peer_memory=peer_memory)) == {"GPUDirect RDMA": value}
    assert weigh_gdr_differs("GPUDirect RDMA") is Severity.WARN


def test_gpudirect_is_not_compared_without_an_active_port() -> None:
    assert collect_gdr_differs(node(1, ())) is None
    assert collect_gdr_differs(node(1, (port(state="DOWN"),))) is None


@pytest.mark.parametrize("cause", ALL)
def test_nothing_of_it_ran_on_hardware(cause: Cause) -> None:
    assert cause.never_on_hardware
    assert cause.no_fault_yet
