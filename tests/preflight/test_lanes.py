"""How fast is the data network, and which interfaces does Gloo get beside the first one?"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import msgspec
import pytest

from allranks.model.card import Facts, Interface
from allranks.model.pair import PairResult
from allranks.preflight.lanes import find_lanes, measured_link, prove_lanes
from allranks.preflight.rollcall import RollCall
from cards import make_card

SECOND = "192.168.21.0/24"


def nic(name: str, address: str, **more) -> Interface:
    network = ".".join([*address.split(".")[:3], "0/24"])
    return Interface(name, (address,), True, **{"networks": (network,), "mtu": 1500, "speed_mbit_s": 1000} | more)


def node(number: int, *more: Interface, data=None, environment=None, **fields):
    first = data or nic("ens1f1", f"192.168.20.{number}")
    names = {f"node{i:02}": (f"10.77.0.{i}",) for i in range(1, 9)}
    nics = (nic("eno1", f"10.77.0.{number}"), first, *more)
    facts = Facts(interfaces=nics, resolved=names, environment=environment or {}, host_name=f"node{number:02}")
    return make_card(number, facts=facts, data_interface=first.name, data_address=first.addresses[0], **fields)


def cluster(make=lambda number: (), **more):
    return {number - 1: node(number, *make(number), **more) for number in (1, 2, 3)}


def first_of(cards):
    return {index: card.data_address for index, card in cards.items()}


def in_second(number: int, **more):
    return (nic("ens2f1", f"192.168.21.{number}", **more),)


def in_same(number: int, *, arp=(1, 2), **more):
    return (nic("ens1f2", f"192.168.20.{100 + number}", arp=arp, **more),)


def found(cards, *, second=None):
    lanes, why = find_lanes(cards, first_of(cards), second=second)
    return [[lane[index].nic.name for index in sorted(lane)] for lane in lanes], why


def test_a_second_network_is_taken_only_if_cluster_toml_names_it():
    said = (
        f'Gloo uses one interface a node; if {SECOND} is for gradients, too, write second = "{SECOND}" under [network]'
    )
    assert found(cluster(in_second)) == ([], f"{said} in cluster.toml")
    assert found(cluster(lambda number: in_second(number, speed_mbit_s=100))) == ([], None)
    assert found(cluster(in_second), second=SECOND) == ([["ens2f1"] * 3], None)


def test_two_interfaces_in_one_subnet_are_taken_if_each_answers_for_itself():
    own = {"arp": (1, 2)}
    cards = {i: node(i + 1, *in_same(i + 1), data=nic("ens1f1", f"192.168.20.{i + 1}", **own)) for i in range(3)}
    assert found(cards) == ([["ens1f2"] * 3], None)
    cards[1] = node(2, *in_same(2, arp=(0, 2)), data=nic("ens1f1", "192.168.20.2", **own))
    assert found(cards) == ([], None)
    cards[1] = node(2, *in_same(2, speed_mbit_s=100), data=nic("ens1f1", "192.168.20.2", **own))
    assert found(cards) == ([], None)


def test_an_interface_of_containers_a_bridge_or_a_label_is_never_taken():
    for other in ("br-12", "docker0", "ens1f1:1"):
        assert found(cluster(lambda number: (nic(other, f"192.168.21.{number}"),)), second=SECOND)[0] == []  # noqa: B023
    assert found(cluster(lambda number: in_second(number, kind="bridge")), second=SECOND)[0] == []


def test_a_second_interface_beside_one_of_management_is_not_taken():
    cards = cluster(
        lambda number: (nic("eno2", f"10.77.0.{100 + number}", arp=(1, 2)),),
        data=None,
    )
    first = {index: f"10.77.0.{index + 1}" for index in cards}
    assert find_lanes(cards, first) == ([], None)


def test_what_the_user_set_on_one_node_is_kept_on_all():
    cards = cluster(in_second)
    cards[1] = node(2, *in_second(2), environment={"GLOO_SOCKET_IFNAME": "ens1f1"})
    assert found(cards, second=SECOND) == ([], None)


def test_a_node_without_an_interface_that_is_up_is_named():
    cards = cluster(in_second)
    cards[1] = node(2)
    cards[2] = node(3, msgspec.structs.replace(in_second(3)[0], is_up=False))
    said = f"Gloo uses one interface a node: node[02-03] has no interface in {SECOND} (network.second) that is up"
    assert found(cards, second=SECOND) == ([], said)


def proven(fail=None, times=9):
    """What comes of a lane on which the pairs that `fail` picks do not get through, so many times."""
    cards, tries = cluster(in_second), []

    def try_pairs(look, addresses):
        assert addresses == {0: "192.168.21.1", 1: "192.168.21.2", 2: "192.168.21.3"}
        tries.append(look)
        return [
            PairResult(source=a, target=b, closed={4: "no answer in 1.6 s"})
            if fail and fail(a, b) and len(tries) <= times
            else PairResult(source=a, target=b, num_open=1)
            for a, b in look.pairs
        ]

    return prove_lanes(cards, first_of(cards), try_pairs, second=SECOND, seed=1)


def test_gloo_gets_the_interfaces_over_which_all_nodes_reach_each_other():
    assert proven() == (dict.fromkeys(range(3), ("ens1f1", "ens2f1")), None)


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (lambda a, b: 1 in (a, b), "node02 ens2f1 (192.168.21.2) did not get through to the other nodes"),
        (
            lambda a, b: (a, b) == (0, 2),
            "node01 ens2f1 (192.168.21.1) and node03 ens2f1 (192.168.21.3) did not get through",
        ),
    ],
)
def test_a_lane_that_fails_is_left_out_on_all_nodes_and_named(fail, said):
    assert proven(fail) == ({}, f"Gloo uses one interface a node: {said}: no answer in 1.6 s")


def pair(a, b, rate):
    return PairResult(source=a, target=b, delivery_mbit_s=rate, large_sent=48 << 10, large_s=0.001)


def link(rates, **more):
    cards = {i: node(i + 1, data=nic("ens1f1", f"192.168.20.{i + 1}", **more)) for i in range(3)}
    results = [pair(a, b, rate) for (a, b), rate in rates.items()]
    return measured_link(results, cards, first_of(cards))


ALIKE = {(a, b): 600.0 + 10 * a + b for a in range(3) for b in range(3) if a != b}


def test_the_speed_that_interfaces_report_counts_unless_much_less_comes_through():
    assert link(ALIKE) == (
        1000.0,
        "speed that the data interfaces report; the roll call measured 602 Mbit/s at least",
    )
    slow = ALIKE | {(1, 0): 94.0, (1, 2): 93.0}
    said = "delivery rate of the slowest node, node02, in the roll call"
    assert link(slow) == (94.0, said)
    assert link(ALIKE, speed_mbit_s=None) == (602.0, "delivery rate of the slowest node, node01, in the roll call")
    assert link({}) == (None, "")


def test_a_node_that_left_after_its_tests_tells_nothing():
    assert link(ALIKE | {(0, 3): 5.0, (3, 1): 5.0}, speed_mbit_s=None)[0] == 602.0


def test_neither_small_payloads_nor_ranks_of_one_machine_tell_the_speed():
    cards = {index: node(1 + index // 2) for index in range(4)}
    results = [pair(a, b, 9000.0 if a // 2 == b // 2 else 90.0) for a, b in itertools.permutations(range(4), 2)]
    assert measured_link(results, cards, first_of(cards))[0] == 90.0
    sparse = [msgspec.structs.replace(result, large_sent=1024) for result in results]
    assert measured_link(sparse, cards, first_of(cards)) == (None, "")


def test_a_node_that_leaves_while_lanes_are_tried_ends_no_roll_call(monkeypatch):
    call, cards, tried = object.__new__(RollCall), cluster(in_second), []

    def try_and_lose(selector, look, *, addresses):
        tried.append(sorted(addresses))
        cards.pop(2, None)  # the roster is what it is now
        return [PairResult(source=a, target=b, num_open=1) for a, b in look.pairs if {a, b} <= cards.keys()]

    for name, value in {
        "roster": SimpleNamespace(cards=cards),
        "_addresses": lambda: first_of(cards),
        "_try": try_and_lose,
        "_terms": SimpleNamespace(second_network=SECOND, attempt=0),
        "_on_event": lambda *told, **more: None,
        "_say": lambda text: None,
        **{"_silent": set(), "_left": {}, "_results": []},
    }.items():
        monkeypatch.setattr(call, name, value, raising=False)
    call._prove_lanes(None)
    assert call._interfaces == {}
    assert tried[0] == [0, 1, 2]
