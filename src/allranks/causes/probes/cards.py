"""What a card says of its node's identity and of its place on the data network, as all probes read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TypeVar

from allranks.model.card import Card, Facts, Interface

V = TypeVar("V", bound=Hashable)


def with_facts(cards: Sequence[Card]) -> list[tuple[Card, Facts]]:
    """Return the cards that say something of their node, each with what it says."""
    return [(card, card.facts) for card in cards if card.facts is not None]


def is_same_machine(one: Facts, other: Facts) -> bool:
    """Whether two cards are of one machine: two agents on it, which is fine."""
    if one.boot_id is None or one.boot_id != other.boot_id or one.host_name != other.host_name:
        return False
    return _addresses(one) == _addresses(other)


def _addresses(facts: Facts) -> set[str]:
    return {address for interface in facts.interfaces for address in interface.addresses}


def parse_address(text: str | None) -> IPv4Address | IPv6Address | None:
    """Return an address without brackets and scope; None where the text is a name or nothing.

    >>> str(parse_address("[FE80::1%eth0]")), parse_address("node01")
    ('fe80::1', None)
    """
    try:
        return ip_address((text or "").strip("[]").partition("%")[0])
    except ValueError:
        return None


def data_interface(card: Card) -> Interface | None:
    """Return the interface that carries this node's gradients: the one it names, else the one with its data address."""
    interfaces = card.facts.interfaces if card.facts else ()
    named = next((nic for nic in interfaces if nic.name == card.data_interface), None)
    address = parse_address(card.data_address)
    if named is not None or address is None:
        return named
    return next((nic for nic in interfaces if any(parse_address(own) == address for own in nic.addresses)), None)


def data_network(card: Card) -> str | None:
    """Return the subnet of this node's data address; None where nobody said where gradients go."""
    nic, address = data_interface(card), parse_address(card.data_address)
    return subnet_of(nic, str(address)) if nic is not None and address is not None else None


def subnet_of(interface: Interface, address: str) -> str | None:
    """Return the subnet of one of an interface's addresses, as `192.168.20.0/24`."""
    wanted = parse_address(address)
    for own, network in zip(interface.addresses, interface.networks, strict=False):
        if wanted is not None and (own == address or parse_address(own) == wanted):
            return _plain_network(network)
    return None


@lru_cache(maxsize=1024)
def _plain_network(text: str) -> str | None:
    try:
        return str(ip_network(text, strict=False))
    except ValueError:
        return None


def most_common(values: Iterable[V]) -> V | None:
    """Return what more than half of them are; None where there is no such majority.

    >>> most_common([1500, 9000, 9000]), most_common([1500, 9000])
    (9000, None)
    """
    counts = Counter(values)
    value, count = next(iter(counts.most_common(1)), (None, 0))
    return value if count * 2 > counts.total() else None
