"""Which interface do NCCL's and Gloo's variables select, and does it lead to the other nodes?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from allranks.causes.outcome import Checks, Outcome, Surveyed
from allranks.causes.probes.cards import data_interface, data_network, most_common, parse_address, subnet_of, with_facts
from allranks.model.card import Card, Facts, Interface
from allranks.model.choice import gloo_address, nccl_address, nccl_candidates
from allranks.model.finding import Status

# Where does a variable lead on each node, and which of these places are not on the nodes' common network?

NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"

_OF_ONE_MACHINE = re.compile(r"docker\d*|br-[0-9a-f]{12}|virbr\d+(?:-nic)?|podman\d+|cni\d+|lxcbr\d+|lxdbr\d+")
"""Bridges that container runtimes and libvirt make: the same subnet on every node, and no network between them."""


@dataclass(frozen=True, slots=True)
class NicChoice:
    """What a variable leads to on one node."""

    host: str
    variable: str
    spelled: str
    status: Status
    interface: Interface | None = None
    address: str | None = None
    problem: str = ""
    """Why nothing can be used."""

    @property
    def is_of_one_machine(self) -> bool:
        """Whether no other node can be reached over it: a loopback, a container's bridge."""
        address = parse_address(self.address)
        nic = self.interface
        return (address is not None and address.is_loopback) or (
            nic is not None and (nic.kind == "loopback" or _OF_ONE_MACHINE.fullmatch(nic.name) is not None)
        )

    @property
    def subnet(self) -> str | None:
        """The network that its address is in."""
        return subnet_of(self.interface, self.address) if self.interface and self.address else None


def list_choices(cards: Sequence[Card], variable: str) -> Iterator[NicChoice]:
    """What the variable leads to on each node where the user set it and the job's backend looks at it."""
    uses_nccl = all(card.wanted_backend != "gloo" and card.num_gpus > 0 for card in cards)
    if variable == NCCL and not uses_nccl:
        return
    # With NCCL, only a group that the script makes on the side would use Gloo.
    status = Status.WARN if variable == GLOO and uses_nccl else Status.FAIL
    for card, facts in with_facts(cards):
        spelled = facts.environment.get(variable, "")
        if facts.interfaces and (len(spelled) > 1 or (spelled and variable == GLOO)):
            choose = _nccl_choices if variable == NCCL else _gloo_choices
            for nic, address, problem in choose(facts, spelled):
                is_known = bool(problem) and nic is not None and nic == data_interface(card)  # AR210 says it
                if not is_known:
                    yield NicChoice(card.host, variable, spelled, status, nic, address, problem)


def _nccl_choices(facts: Facts, spelled: str) -> Iterator[tuple[Interface | None, str | None, str]]:
    """The interface of NCCL's bootstrap: the first that matches."""
    for nic in nccl_candidates(facts.interfaces, facts.environment)[:1]:
        yield nic, nccl_address(nic, facts.environment), ""
        return
    all_up = [msgspec.structs.replace(nic, is_up=True) for nic in facts.interfaces]
    down = {nic.name for nic in nccl_candidates(all_up, facts.environment)}
    named = next((nic for nic in facts.interfaces if nic.name in down), None)
    if named is not None:
        yield named, None, f"{named.name} is down"
    else:
        yield None, None, f"no interface of this node matches; it has {_names(facts)}"


def _gloo_choices(facts: Facts, spelled: str) -> Iterator[tuple[Interface | None, str | None, str]]:
    """Each of the interfaces that Gloo is given."""
    for name in spelled.split(","):
        nic, address, _ = gloo_address(facts.interfaces, {GLOO: name}, {}, "")
        if nic is None or not name:
            yield None, None, f"this node has no interface {name!r}; it has {_names(facts)}"
        elif address is None:
            yield nic, None, f"{name} has no address"
        else:
            yield nic, address, "" if nic.is_up else f"{name} is down"


def _names(facts: Facts) -> str:
    return ", ".join(nic.name for nic in facts.interfaces[:8]) + (", ..." if len(facts.interfaces) > 8 else "")


def find_astray(picked: Sequence[NicChoice], own: Mapping[str, str | None], shared: str | None) -> Iterator[NicChoice]:
    """Those that do not lead to where the others are.

    Args:
        picked: what the variable picks, on the nodes where the user set it; several for a node that has a list.
        own: by node, the subnet of its data address.
        shared: the subnet that most of those are in; None where there is none, as where each node has one of its own.
    """
    first: dict[str, NicChoice] = {}
    for choice in picked:
        if choice.is_of_one_machine:
            yield choice
        elif choice.subnet is not None:
            first.setdefault(choice.host, choice)  # further ones are rails, which may be in networks of their own
    expected = shared
    if {choice.host for choice in picked} == set(own):  # all are set: where most of them are is the user's own choice
        subnets = [choice.subnet for choice in first.values()]
        expected = most_common(subnets) or (shared if shared in subnets else None)
    if expected is not None:
        yield from (choice for host, choice in first.items() if choice.subnet not in (expected, own.get(host)))


# Is a variable at fault: its interface leads elsewhere, is missing, or is down?


def survey_wrong_nic(cards: Sequence[Card]) -> Surveyed:
    """Fails if a variable of the user selects an interface outside the network of the other nodes."""
    if len(cards) < 2:
        return []
    own = {card.host: data_network(card) for card, _ in with_facts(cards)}
    shared = most_common(network for network in own.values() if network is not None)
    off: dict[tuple[str, str | None], list[NicChoice]] = {}
    for variable in (NCCL, GLOO):
        picked = [choice for choice in list_choices(cards, variable) if choice.interface and not choice.problem]
        for choice in find_astray(picked, own, shared):
            assert choice.interface is not None
            off.setdefault((choice.host, choice.interface.name), []).append(choice)
    groups: dict[tuple[object, ...], list[tuple[str, list[NicChoice]]]] = {}
    for (host, _), choices in off.items():
        first = choices[0]
        # docker0 and lo look alike on all nodes: one finding names all of them.
        key = (first.spelled, first.address, tuple(choice.variable for choice in choices))
        groups.setdefault(key, []).append((host, choices))
    return [
        (tuple(host for host, _ in group), _outcome(group[0][1], shared or own.get(group[0][0])))
        for group in groups.values()
    ]


def survey_nic_not_found(cards: Sequence[Card]) -> Surveyed:
    """Fails if a variable of the user names a missing interface, or one that is down."""
    if len(cards) < 2:
        return []
    found: dict[tuple[Status, str, str, str | None], list[str]] = {}
    for variable in (NCCL, GLOO):
        for choice in list_choices(cards, variable):
            if choice.problem:
                what = f"{variable}={choice.spelled}: {choice.problem}"
                name = choice.interface.name if choice.interface else None
                found.setdefault((choice.status, variable, what, name), []).append(choice.host)
    return [
        (tuple(hosts), Outcome(status, values={"what": what, "variable": variable}, interface=name))
        for (status, variable, what, name), hosts in found.items()
    ]


def _outcome(choices: Sequence[NicChoice], network: str | None) -> Outcome:
    """Return what the choices that lead astray come to; `network`: the one that the nodes share."""
    first = choices[0]
    assert first.interface is not None
    why = f"but the other nodes are in {network}" if network else "which leads to no other node"
    if first.is_of_one_machine:
        why = "which no other node can reach"
    return Outcome(
        Status.FAIL if any(choice.status is Status.FAIL for choice in choices) else Status.WARN,
        values={
            "variable": " ".join(dict.fromkeys(choice.variable for choice in choices)),
            "spelled": first.spelled,
            "address": first.address,
            "nic": first.interface.name,
            "network": network or "the network that the nodes share",
            "why": why,
        },
        evidence=tuple(
            dict.fromkeys(f"{choice.variable}={choice.spelled} in the environment of the agent" for choice in choices)
        ),
        interface=first.interface.name,
    )


CHECKS = {
    "AR203": Checks(survey=survey_wrong_nic),
    "AR208": Checks(survey=survey_nic_not_found),
}
