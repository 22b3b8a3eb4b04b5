"""Are names, addresses, interfaces, MTUs, speeds and ports of the data network judged right?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from allranks.causes.book import find_cause
from allranks.causes.cause import Cause, Symptom
from allranks.causes.outcome import Outcome, failed
from allranks.causes.probes.cards import data_interface, data_network, most_common, parse_address
from allranks.causes.probes.net import (
    probe_duplicate_subnet,
    probe_link_down,
    probe_port_in_use,
    survey_ip_family_mismatch,
    survey_master_unreachable,
    survey_mtu_unequal,
)
from allranks.causes.probes.nics import survey_nic_not_found, survey_wrong_nic
from allranks.model.card import Card, Facts, Interface, RdmaPort, TestPorts
from allranks.model.finding import Confidence, Severity, Status
from cards import make_card, probe, survey

SURVEYED = [find_cause(f"AR{number}") for number in (201, 202, 203, 205, 208, 209, 213, 214)]
PROBED = [find_cause(f"AR{number}") for number in (207, 210, 216)]

LO = Interface("lo", ("127.0.0.1", "::1"), True, ("127.0.0.0/8", "::1/128"), mtu=65536, kind="loopback")
DOCKER = Interface("docker0", ("172.17.0.1",), True, ("172.17.0.0/16",), mtu=1500, kind="bridge")


def management(number: int, subnet: str = "10.77.0") -> Interface:
    return Interface("eno1", (f"{subnet}.{number}",), True, (f"{subnet}.0/24",), mtu=1500, speed_mbit_s=1000)


def data(number: int, **changes: Any) -> Interface:
    named = {"name": "ens1f1", "addresses": (f"192.168.20.{number}", "fe80::1"), "is_up": True, "mtu": 9000}
    networks = ("192.168.20.0/24", "fe80::/64")
    return Interface(**{**named, "networks": networks, "speed_mbit_s": 10000, "has_carrier": True, **changes})


def node(
    number: int,
    *,
    nic: Interface | None = None,
    more: Sequence[Interface] = (),
    env: dict[str, str] | None = None,
    facts: dict[str, Any] | None = None,
    **changes: Any,
) -> Card:
    """node01 leads; each node has lo, eno1 for management, docker0 and the data interface ens1f1."""
    nic = nic or data(number)
    own = {
        "host_name": f"node{number:02}",
        "interfaces": (LO, management(number), DOCKER, nic, *more),
        "resolved": {f"node{number:02}": (f"10.77.0.{number}",)},
        "environment": env or {},
    }
    base: dict[str, Any] = {
        "data_interface": nic.name,
        "data_address": nic.addresses[0],
        "came_by": None if number == 1 else "192.168.20.1:29500",
        "test_ports": TestPorts(tcp=(40000,), udp=40001),
        "facts": Facts(**{**own, **(facts or {})}),
    }
    return make_card(number, **{**base, **changes})


def cluster(count: int, **odd: Card) -> list[Card]:
    """node01 to node0N, of which `n3=card` takes the third one's place."""
    return [odd.get(f"n{number}") or node(number) for number in range(1, count + 1)]


def found(cause: Cause, cards: Sequence[Card]) -> list[tuple[Status, str]]:
    """Status and culprits of each outcome of a survey; its message and fix can be filled."""
    outcomes = survey(cause, cards)
    assert outcomes is not None
    for hosts, outcome in outcomes:
        finding = outcome.to_finding(cause, node=", ".join(hosts))
        assert "None" not in finding.message
        assert "None" not in (finding.fix or "")
    return [(outcome.status, " ".join(hosts)) for hosts, outcome in outcomes]


def message_of(cause: Cause, cards: Sequence[Card]) -> str:
    outcomes = survey(cause, cards)
    assert outcomes
    return outcomes[0][1].to_finding(cause, node="x").message


# Nothing is found on healthy nodes


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("cause", SURVEYED)
def test_healthy_nodes_give_nothing(cause: Cause, count: int) -> None:
    assert found(cause, cluster(count)) == []


@pytest.mark.parametrize("cause", PROBED)
def test_a_healthy_node_passes(cause: Cause) -> None:
    outcome = probe(cause, node(1))
    assert outcome is not None
    assert outcome.status is Status.PASS


@pytest.mark.parametrize("cause", [*SURVEYED, *PROBED])
def test_cards_that_say_nothing_of_their_node_are_survived(cause: Cause) -> None:
    nowhere = [node(number, data_interface=None, data_address=None) for number in (1, 2, 3)]
    silent = [msgspec.structs.replace(card, facts=None) for card in nowhere]
    assert not survey(cause, silent)
    outcome = probe(cause, silent[1])
    assert outcome is None or outcome.status in (Status.UNKNOWN, Status.SKIP)


@pytest.mark.parametrize("cause", [*SURVEYED, *PROBED])
def test_nonsense_from_a_broken_machine_is_survived(cause: Cause) -> None:
    broken = Interface("x\n", ("no address",), True, ("no/network",), mtu=None)
    cards = cluster(3, n2=node(2, nic=broken, env={"GLOO_SOCKET_IFNAME": ",", "NCCL_SOCKET_IFNAME": "^="}))
    survey(cause, cards)
    probe(cause, cards[1])


# Helpers


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1", "10.0.0.1"), ("[fe80::1%eth0]", "fe80::1"), ("node01", None), ("", None), (None, None)],
)
def test_addresses_are_read_and_names_are_none(text: str | None, address: str | None) -> None:
    assert parse_address(text) == (parse_address(address) if address else None)


def test_the_data_interface_is_the_named_one_else_the_one_with_the_address() -> None:
    card = node(1, data_interface=None)
    nic = data_interface(card)
    assert nic is not None
    assert (nic.name, data_network(card)) == ("ens1f1", "192.168.20.0/24")
    assert data_interface(node(1, data_interface="eth9", data_address=None)) is None


def test_a_majority_is_more_than_half() -> None:
    assert (most_common([1, 1, 2]), most_common([1, 2]), most_common([])) == (1, None, None)


# 201


def named(endpoint: str, *addresses: str, **changes: Any) -> dict[str, Any]:
    resolved = {"node01": ("10.77.0.1",), **({endpoint: addresses} if addresses else {})}
    return {"endpoint": endpoint, "facts": {"resolved": resolved}, **changes}


@pytest.mark.parametrize(
    ("endpoint", "addresses"),
    [("192.168.20.99", ()), ("head", ("192.168.20.99",)), ("fd00::99", ())],
)
def test_an_endpoint_that_is_not_the_leaders_is_a_failure_of_the_leader(endpoint: str, addresses: tuple[str]) -> None:
    cards = cluster(3, n1=node(1, **named(endpoint, *addresses)))
    assert found(find_cause("AR201"), cards) == [(Status.FAIL, "node01")]
    assert endpoint in message_of(find_cause("AR201"), cards)


def test_the_evidence_names_the_address_its_source_and_what_the_leader_has() -> None:
    ((_, outcome),) = survey_master_unreachable(cluster(2, n1=node(1, **named("head", "192.168.20.99"))))
    assert outcome.evidence == (
        "node01 got head (there 192.168.20.99) from --rdzv-endpoint or --master-addr",
        "node01 has lo 127.0.0.1 ::1, eno1 10.77.0.1, docker0 172.17.0.1, ens1f1 192.168.20.1 fe80::1",
    )


@pytest.mark.parametrize(
    ("endpoint", "addresses"),
    [("10.77.0.1", ()), ("node01", ("10.77.0.1",)), ("localhost", ("127.0.0.1",)), ("gone", ())],
)
def test_an_endpoint_of_the_leader_passes(endpoint: str, addresses: tuple[str]) -> None:
    assert found(find_cause("AR201"), cluster(3, n1=node(1, **named(endpoint, *addresses)))) == []


def test_an_endpoint_that_somebody_came_by_is_right_whatever_interfaces_say() -> None:
    leader = node(1, **named("203.0.113.7"))  # a NAT in front of it
    assert found(find_cause("AR201"), [leader, node(2, came_by="203.0.113.7:29500")]) == []
    assert found(find_cause("AR201"), [leader, node(2, came_by="[fd00::1]:29500")]) == [(Status.FAIL, "node01")]


def test_what_the_launcher_says_fills_201() -> None:
    finding = failed("timed out", what="node02 reaches none of them").to_finding(find_cause("AR201"), node="node01")
    assert finding.message == "node02 reaches none of them"


# 202


def resolving(number: int, **names: tuple[str, ...]) -> Card:
    return node(number, facts={"resolved": {f"node{number:02}": (f"10.77.0.{number}",), **names}})


def test_a_name_that_one_node_does_not_find_is_a_warning_there() -> None:
    cards = [resolving(number, storage=("10.0.0.9",)) for number in (1, 2, 3)]
    cards[1] = resolving(2, storage=())
    assert found(find_cause("AR202"), cards) == [(Status.WARN, "node02")]
    assert message_of(find_cause("AR202"), cards) == "storage does not resolve on this node; 2 other nodes resolve it"


def test_the_endpoint_that_one_node_does_not_find_is_a_failure_there() -> None:
    cards = [resolving(number, head=("10.0.0.9",)) for number in (1, 2, 3)]
    cards[2] = resolving(3, head=())
    cards = [msgspec.structs.replace(card, endpoint="head") for card in cards]
    assert found(find_cause("AR202"), cards) == [(Status.FAIL, "node03")]


def test_a_name_that_nobody_finds_matters_only_where_it_is_the_endpoint() -> None:
    cards = [resolving(number, gone=()) for number in (1, 2)]
    assert found(find_cause("AR202"), cards) == []
    cards = [msgspec.structs.replace(card, endpoint="gone") for card in cards]
    assert found(find_cause("AR202"), cards) == [(Status.FAIL, "node01 node02")]
    assert (
        message_of(find_cause("AR202"), cards)
        == "gone does not resolve on this node; no node that looked it up got an address"
    )


def test_a_node_that_knows_its_own_name_is_no_witness() -> None:
    assert found(find_cause("AR202"), [node(1), resolving(2, node01=())]) == []


def test_many_names_are_one_finding() -> None:
    names = [f"n{number}" for number in range(9)]
    cards = [resolving(number, **dict.fromkeys(names, ("10.0.0.9",))) for number in (1, 2)]
    cards.append(resolving(3, **dict.fromkeys(names, ())))
    assert (
        message_of(find_cause("AR202"), cards)
        == "n0, n1, n2, n3 and 5 more does not resolve on this node; 2 other nodes resolve it"
    )
    assert len(found(find_cause("AR202"), cards)) == 1


# 203 and 208


def forced(number: int, value: str, variable: str = "GLOO_SOCKET_IFNAME", **changes: Any) -> Card:
    return node(number, env={variable: value}, **changes)


@pytest.mark.parametrize("name", ["docker0", "lo", "eno1"])
def test_one_node_forced_off_the_data_network_is_named(name: str) -> None:
    cards = cluster(6, n4=forced(4, name))
    assert found(find_cause("AR203"), cards) == [(Status.FAIL, "node04")]
    assert found(find_cause("AR208"), cards) == []
    ((_, outcome),) = survey_wrong_nic(cards)
    assert outcome.interface == name


def test_the_message_tells_variable_address_and_data_network() -> None:
    assert message_of(find_cause("AR203"), cluster(3, n2=forced(2, "eno1"))) == (
        "GLOO_SOCKET_IFNAME=eno1 selects eno1 with 10.77.0.2, but the other nodes are in 192.168.20.0/24"
    )
    assert message_of(find_cause("AR203"), cluster(3, n2=forced(2, "docker0"))) == (
        "GLOO_SOCKET_IFNAME=docker0 selects docker0 with 172.17.0.1, which no other node can reach"
    )


@pytest.mark.parametrize("value", ["eno1", "ens1f1", "ens1f1,eno1"])
def test_what_all_nodes_are_forced_to_is_the_users_choice(value: str) -> None:
    cards = [forced(number, value) for number in (1, 2, 3)]
    assert found(find_cause("AR203"), cards) == []


@pytest.mark.parametrize("name", ["docker0", "lo"])
def test_no_node_is_reached_over_docker0_or_lo_even_if_all_use_it(name: str) -> None:
    cards = [forced(number, name) for number in (1, 2, 3)]
    assert found(find_cause("AR203"), cards) == [(Status.FAIL, "node01 node02 node03")]


def test_one_of_two_nodes_off_the_data_network_is_named() -> None:
    assert found(find_cause("AR203"), cluster(2, n2=forced(2, "eno1"))) == [(Status.FAIL, "node02")]
    assert found(find_cause("AR203"), [forced(1, "ens1f1"), forced(2, "eno1")]) == [(Status.FAIL, "node02")]


def test_one_of_many_that_are_forced_to_one_name_may_have_it_elsewhere() -> None:
    odd = forced(3, "eno1", facts={"interfaces": (LO, management(3, "10.99.0"), data(3))})
    cards = [forced(1, "eno1"), forced(2, "eno1"), odd]
    assert found(find_cause("AR203"), cards) == [(Status.FAIL, "node03")]


def test_nodes_with_a_subnet_of_their_own_each_are_left_alone() -> None:
    def routed(number: int) -> Card:
        nic = data(number, addresses=(f"10.168.{number}.1",), networks=(f"10.168.{number}.0/31",))
        return forced(number, "ens1f1", nic=nic)

    assert found(find_cause("AR203"), [routed(number) for number in (1, 2, 3)]) == []


def test_one_node_alone_may_use_what_it_likes() -> None:
    assert found(find_cause("AR203"), [forced(1, "lo")]) == []
    assert found(find_cause("AR208"), [forced(1, "eth9")]) == []


@pytest.mark.parametrize(
    ("value", "culprits"), [("docker0,ens1f1", 1), ("ens1f1,lo", 1), ("ens1f1,eno1", 0), ("eno1,ens1f1", 1)]
)
def test_of_gloos_list_the_first_must_lead_to_the_others_and_none_to_itself(value: str, culprits: int) -> None:
    assert len(found(find_cause("AR203"), cluster(3, n2=forced(2, value)))) == culprits


def with_gpus(number: int, value: str, variable: str = "NCCL_SOCKET_IFNAME") -> Card:
    return forced(number, value, variable, num_gpus=1)


@pytest.mark.parametrize(
    ("value", "interface"),
    [
        ("=docker0", "docker0"),
        ("eno", "eno1"),
        ("^docker0", "lo"),  # lo is not left out then, and comes first
        ("^lo,docker", "eno1"),
        ("^=lo", "eno1"),
        ("eth9,eno1", "eno1"),
    ],
)
def test_ncclss_list_picks_its_first_match(value: str, interface: str) -> None:
    cards = [node(1, num_gpus=1), node(2, num_gpus=1), with_gpus(3, value)]
    ((hosts, outcome),) = survey_wrong_nic(cards)
    assert (hosts, outcome.status, outcome.interface) == (("node03",), Status.FAIL, interface)


@pytest.mark.parametrize("value", ["=ens1f1", "ens", "ib,ens", "^eno,lo,docker", "e", ""])
def test_ncclss_list_that_leads_to_the_data_interface_passes(value: str) -> None:
    cards = [node(1, num_gpus=1), node(2, num_gpus=1), with_gpus(3, value)]
    assert found(find_cause("AR203"), cards) == []
    assert found(find_cause("AR208"), cards) == []


def test_ncclss_variable_means_nothing_to_a_job_of_cpus() -> None:
    cards = cluster(3, n2=forced(2, "eth9", "NCCL_SOCKET_IFNAME"))
    assert found(find_cause("AR208"), cards) == found(find_cause("AR203"), cards) == []


def test_gloos_variable_only_warns_where_nccl_carries_the_collectives() -> None:
    cards = [node(1, num_gpus=1), with_gpus(2, "eno1", "GLOO_SOCKET_IFNAME")]
    assert found(find_cause("AR203"), cards) == [(Status.WARN, "node02")]


def test_both_variables_on_one_interface_are_one_finding() -> None:
    env = {"GLOO_SOCKET_IFNAME": "docker0", "NCCL_SOCKET_IFNAME": "docker0"}
    cards = [node(1, num_gpus=1), node(2, num_gpus=1, env=env)]
    assert found(find_cause("AR203"), cards) == [(Status.FAIL, "node02")]
    assert message_of(find_cause("AR203"), cards).startswith(
        "NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME=docker0 selects docker0"
    )


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    cards = cluster(3, n2=forced(2, "eth9"))
    assert found(find_cause("AR208"), cards) == [(Status.FAIL, "node02")]
    assert found(find_cause("AR203"), cards) == []
    assert message_of(find_cause("AR208"), cards) == (
        "GLOO_SOCKET_IFNAME=eth9: this node has no interface 'eth9'; it has lo, eno1, docker0, ens1f1"
    )


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_down_is_not_found(variable: str) -> None:
    down = Interface("ib0", ("10.10.0.2",), False, ("10.10.0.0/24",))
    cards = [node(1, num_gpus=1, wanted_backend="nccl"), node(2, num_gpus=1, env={variable: "ib0"}, more=(down,))]
    ((hosts, outcome),) = survey_nic_not_found(cards)
    assert (hosts, outcome.interface) == (("node02",), "ib0")
    assert outcome.values["what"] == f"{variable}=ib0: ib0 is down"


def test_the_same_mistake_on_several_nodes_is_one_finding() -> None:
    cards = [forced(number, "eth9") for number in (1, 2, 3)]
    assert found(find_cause("AR208"), cards) == [(Status.FAIL, "node01 node02 node03")]


def test_a_data_interface_that_is_down_is_left_to_210() -> None:
    nic = data(2, is_up=False, has_carrier=False)
    assert found(find_cause("AR208"), cluster(3, n2=forced(2, "ens1f1", nic=nic))) == []


def test_what_the_launcher_says_fills_208() -> None:
    finding = failed(what="[[node]] node03: interface = eth9", interface="eth9").to_finding(
        find_cause("AR208"), node="node03"
    )
    assert finding.message == "[[node]] node03: interface = eth9"
    assert "node03" in (finding.fix or "")


# 205 and 213


def with_mtu(number: int, mtu: int, **changes: Any) -> Card:
    return node(number, nic=data(number, mtu=mtu), **changes)


def test_the_node_with_another_mtu_is_named() -> None:
    cards = cluster(6, n3=with_mtu(3, 1500))
    assert found(find_cause("AR205"), cards) == [(Status.WARN, "node03")]
    assert message_of(find_cause("AR205"), cards) == "the data interface has MTU 1500; 5 of 6 nodes have 9000"
    ((_, outcome),) = survey_mtu_unequal(cards)
    assert outcome.to_finding(find_cause("AR205"), node="node03").interface == "ens1f1"


def test_one_mtu_against_one_is_undecided() -> None:
    ((hosts, outcome),) = survey_mtu_unequal([node(1), with_mtu(2, 1500)])
    assert hosts == ("node01", "node02")
    assert (outcome.status, outcome.confidence) == (Status.WARN, Confidence.UNDECIDED)
    assert "9000 or 1500" in (outcome.to_finding(find_cause("AR205"), node="node01 or node02").fix or "")


def roce(**changes: Any) -> RdmaPort:
    named = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "phys_state": "LinkUp", "rate": "100 Gb/sec"}
    return RdmaPort(**{**named, "link_layer": "Ethernet", "netdev": "ens1f1", **changes})


@pytest.mark.parametrize(
    ("port", "env", "status"),
    [
        (roce(), {}, Status.FAIL),
        (roce(netdev="eno1"), {}, Status.WARN),
        (roce(link_layer="InfiniBand"), {}, Status.WARN),
        (roce(state="DOWN"), {}, Status.WARN),
        (roce(), {"NCCL_IB_DISABLE": "1"}, Status.WARN),
    ],
)
def test_unequal_mtus_fail_where_nccl_speaks_roce_over_them(
    port: RdmaPort, env: dict[str, str], status: Status
) -> None:
    def card(number: int, mtu: int) -> Card:
        return with_mtu(number, mtu, num_gpus=1, env=env, facts={"rdma_ports": (port,)})

    assert found(find_cause("AR205"), [card(1, 9000), card(2, 9000), card(3, 1500)]) == [(status, "node03")]


def test_a_link_that_came_up_slower_is_named() -> None:
    cards = cluster(6, n3=node(3, nic=data(3, speed_mbit_s=1000)))
    assert found(find_cause("AR213"), cards) == [(Status.WARN, "node03")]
    assert (
        message_of(find_cause("AR213"), cards)
        == "the link of node03 carries 1000 Mbit/s, those of the other nodes 10000 Mbit/s"
    )


@pytest.mark.parametrize("speeds", [(10000, 1000), (1000, 25000, 1000), (None, -1, 1000), (10000, 10000, None)])
def test_speeds_without_a_slow_minority_are_none(speeds: tuple[int | None, ...]) -> None:
    assert found(find_cause("AR213"), [node(n, nic=data(n, speed_mbit_s=s)) for n, s in enumerate(speeds, 1)]) == []


# 207, 209, 210, 214, 216


def test_a_port_that_was_taken_is_a_warning_on_the_leader_only() -> None:
    outcome = probe_port_in_use(node(1, wanted_port=29500, port_holder="python3 (pid 812, alice)"))
    assert outcome is not None
    finding = outcome.to_finding(find_cause("AR207"), node="node01")
    assert finding.severity is Severity.WARN
    assert finding.message == "python3 (pid 812, alice) uses port 29500; the leader took another port"
    assert probe_port_in_use(node(2)) is None


def loopback(number: int, address: str = "127.0.1.1", **changes: Any) -> Card:
    return node(number, facts={"resolved": {f"node{number:02}": (address,)}}, **changes)


def test_only_the_node_that_is_loopback_to_itself_is_named() -> None:
    cards = cluster(3, n2=loopback(2))
    assert found(find_cause("AR209"), cards) == [(Status.WARN, "node02")]
    assert (
        message_of(find_cause("AR209"), cards)
        == "the node's own name node02 resolves to 127.0.1.1, a loopback address; other nodes have a real address"
    )
    assert found(find_cause("AR209"), cluster(2, n1=loopback(1, "::1"))) == [(Status.WARN, "node01")]


def test_nodes_that_are_all_set_up_so_are_left_alone() -> None:
    assert found(find_cause("AR209"), [loopback(number) for number in (1, 2, 3)]) == []


def test_one_node_alone_warns_unless_its_job_has_no_other() -> None:
    assert found(find_cause("AR209"), [loopback(1)]) == [(Status.WARN, "node01")]
    assert found(find_cause("AR209"), [loopback(1, test_ports=None)]) == []


@pytest.mark.parametrize(
    ("has_carrier", "words"), [(False, "no carrier"), (None, "switched off"), (True, "not running")]
)
def test_a_data_interface_that_carries_nothing_fails(has_carrier: bool | None, words: str) -> None:
    outcome = probe_link_down(node(2, nic=data(2, is_up=False, has_carrier=has_carrier)))
    finding = outcome.to_finding(find_cause("AR210"), node="node02")
    assert (finding.severity, finding.interface) == (Severity.FAIL, "ens1f1")
    assert words in finding.message


def test_without_a_data_interface_there_is_nothing_to_look_at() -> None:
    assert probe_link_down(node(2, data_interface=None, data_address=None)).status is Status.SKIP


def test_data_addresses_of_two_families_fail() -> None:
    nic = data(3, addresses=("fd00::3",), networks=("fd00::/64",))
    assert found(find_cause("AR214"), cluster(3, n3=node(3, nic=nic))) == [(Status.FAIL, "node03")]
    nic = data(2, addresses=("fd00::2",), networks=("fd00::/64",))
    ((hosts, outcome),) = survey_ip_family_mismatch([node(1), node(2, nic=nic)])
    assert (hosts, outcome.confidence) == (("node01", "node02"), Confidence.UNDECIDED)


def test_a_second_interface_in_the_data_subnet_warns() -> None:
    second = Interface("eno2", ("192.168.20.101",), True, ("192.168.20.0/24",))
    outcome = probe_duplicate_subnet(node(1, more=(second,)))
    assert outcome.status is Status.WARN
    assert outcome.to_finding(find_cause("AR216"), node="node01").message.startswith(
        "ens1f1 and eno2 are both in 192.168.20.0/24"
    )


def test_two_interfaces_that_answer_for_themselves_do_not_warn() -> None:
    first, second = data(1, arp=(1, 2)), data(101, name="eno2", arp=(1, 2))
    assert probe_duplicate_subnet(node(1, nic=first, more=(second,))).status is Status.PASS
    second = data(101, name="eno2", arp=(1, 1))
    assert probe_duplicate_subnet(node(1, nic=first, more=(second,))).status is Status.WARN


@pytest.mark.parametrize(
    "other",
    [
        Interface("eno2", ("192.168.20.101",), False, ("192.168.20.0/24",)),
        Interface("eno2", ("192.168.21.101", "fe80::2"), True, ("192.168.21.0/24", "fe80::/64")),
        Interface("eno2", ("10.77.0.101",), True, ("10.77.0.0/24",)),  # the management network's affair
    ],
)
def test_other_interfaces_do_not_warn(other: Interface) -> None:
    assert probe_duplicate_subnet(node(1, more=(other,))).status is Status.PASS


# What the judge of pairs fills


@pytest.mark.parametrize(
    ("cause", "symptoms", "values", "message"),
    [
        (
            find_cause("AR204"),
            (Symptom.LARGE_LOST,),
            {"path_mtu": "1500", "culprit": "node03", "peers": "every other node", "mtu": "9000"},
            "packets above 1500 bytes are lost between node03 and every other node; the interfaces have MTU 9000",
        ),
        (
            find_cause("AR212"),
            (Symptom.LOSSY,),
            {"percent": "2.1", "culprit": "node03", "peers": "every other node"},
            "2.1 % of the packets between node03 and every other node are lost",
        ),
        (
            find_cause("AR213"),
            (Symptom.SLOW,),
            {"culprit": "node03", "mbit_s": "94", "usual_mbit_s": "941"},
            "the link of node03 carries 94 Mbit/s, those of the other nodes 941 Mbit/s",
        ),
        (
            find_cause("AR206"),
            (Symptom.FILTERED, Symptom.STORE_FILTERED),
            {"what": "8 of 8 ports do not answer", "ports": "32768-60999", "where": "node03"},
            "8 of 8 ports do not answer",
        ),
        (find_cause("AR210"), (Symptom.SILENT,), {"what": "nothing comes through"}, "nothing comes through"),
        (find_cause("AR211"), (Symptom.SILENT,), {"what": "nothing comes through"}, "nothing comes through"),
    ],
)
def test_what_the_judge_fills_makes_a_finding(
    cause: Cause, symptoms: tuple[Symptom, ...], values: dict[str, object], message: str
) -> None:
    finding = Outcome(Status.FAIL, values=values).to_finding(cause, node="node03")
    assert cause.symptoms == symptoms
    assert finding.message == message
    assert "None" not in (finding.fix or "")
