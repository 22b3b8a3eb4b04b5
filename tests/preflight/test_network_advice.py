"""Where nobody names the data network and the nodes took another one than the best, one line says so."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_fuzz import CARDS

from allranks.model.card import Card, Facts, Interface
from allranks.preflight.networks import advise_network

LO = Interface("lo", ("127.0.0.1",), True, ("127.0.0.0/8",), 65536, kind="loopback")
DOCKER = Interface("docker0", ("172.17.0.1",), True, ("172.17.0.0/16",), 1500, kind="bridge")


def lan(index: int, speed: int | None = 1000) -> Interface:
    return Interface("eno1", (f"10.77.0.{index}",), True, ("10.77.0.0/24",), 1500, speed)


def fast(index: int, speed: int | None = 10_000, *, is_up: bool = True) -> Interface:
    return Interface("ens1f1", (f"192.168.20.{index}",), is_up, ("192.168.20.0/24",), 9000, speed)


def node(index: int, *nics: Interface, came_by: str | None = None) -> Card:
    facts = Facts(host_name=f"n{index}", interfaces=(LO, *nics, DOCKER), resolved={f"n{index}": (f"10.77.0.{index}",)})
    return Card(host=f"n{index}", pid=1, node_index=None, num_workers=1, num_gpus=0, facts=facts, came_by=came_by)


BOTH = ("192.168.20.0/24", "fd00::/64")
TWO_FAMILIES = [
    node(i, lan(i), Interface("ens1f1", (f"192.168.20.{i}", f"fd00::{i}"), True, BOTH, 9000, 10_000)) for i in (1, 2)
]
SIX = [node(index, lan(index), fast(index)) for index in range(1, 7)]


def test_what_was_taken_why_what_is_faster_and_the_line_to_write_are_said() -> None:
    assert advise_network(SIX, "10.77.0.1") == (
        "gradients go over eno1 (10.77.0.0/24, 1 Gbit/s): no cluster.toml names the data network, and the nodes found "
        "each other there; ens1f1 (192.168.20.0/24, 10 Gbit/s) looks like it: all 6 nodes are on it; 10 Gbit/s, "
        '10.77.0.0/24 has 1; to use it, write data = "192.168.20.0/24" under [network] in cluster.toml, as allranks '
        "init does"
    )


def test_where_no_speed_is_known_the_names_tell_the_management_network() -> None:
    cards = [node(index, lan(index, None), fast(index, None)) for index in (1, 2)]
    said = advise_network(cards, "10.77.0.2")
    assert said is not None
    assert said.startswith("gradients go over eno1 (10.77.0.0/24): ")
    assert "host names lead to 10.77.0.0/24, so that one is for management" in said


@pytest.mark.parametrize(
    ("cards", "taken"),
    [
        (SIX, "192.168.20.1"),
        (TWO_FAMILIES, "fd00::1"),
        ([node(index, lan(index)) for index in (1, 2)], "10.77.0.1"),
        ([node(index, lan(index), fast(index, is_up=index != 2)) for index in (1, 2)], "10.77.0.1"),
        ([node(1, lan(1), fast(1)), node(2, lan(2))], "10.77.0.1"),
        (SIX, None),
        (SIX, "198.51.100.7"),
        ([], "10.77.0.1"),
    ],
    ids=[
        "the best was taken", "the best, by IPv6", "there is only one", "the faster one is down on a node",
        "a node is not on the faster one", "nobody knows what was taken", "an address of none of them",
        "no node",
    ],
)  # fmt: skip
def test_else_nothing_is_said(cards: list[Card], taken: str | None) -> None:
    assert advise_network(cards, taken) is None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(CARDS, max_size=4))
def test_whatever_cards_say_it_is_one_text_or_none(cards):
    addresses = {a for card in cards if card.facts for nic in card.facts.interfaces for a in nic.addresses}
    for taken in (None, "127.0.0.2", *addresses):
        said = advise_network(cards, taken)
        assert said is None or "under [network] in cluster.toml" in said
