"""Assign ranks to nodes after the roll call (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from msgspec.structs import replace

from allranks.causes.book import find_cause
from allranks.causes.outcome import failed
from allranks.launch.plan import choose_backend, count_of
from allranks.model.card import Card
from allranks.model.data_network import DataNetwork
from allranks.model.errors import SetupError
from allranks.model.finding import Finding
from allranks.model.hostlist import fold_hosts
from allranks.model.membership import Member, name_hosts
from allranks.wire.protocol import Contact, Plan

MOST_SUCCESSORS = 8
"""Members that can lead next; every Plan has their addresses. A job that loses its leader and all of them ends."""


def make_group(
    cards: Mapping[int, Card],
    *,
    leader: int = 0,
    can_change_leader: bool = True,
    addresses: Mapping[int, str] | None = None,
    wanted_backend: str,
    network: DataNetwork = DataNetwork(),  # noqa: B008
    **more: Any,
) -> dict[int, Plan]:
    """Return the Plan of every node, by node index; if nodes are missing, the ranks have no gaps.

    Rank 0 is on the leader's node, since the leader holds the port of the store.

    Args:
        cards: reports of the nodes that joined.
        can_change_leader: whether another node may lead if this one is lost (Members.may_be_succeeded).
        addresses: where the leader sees each node's agent.
        wanted_backend: auto, nccl or gloo.
        network: what the roll call found; nodes that have come since have not tried its further interfaces.
        more: other fields of the Plan.
    Raises:
        SetupError: the backend cannot work on these nodes.
    """
    indices = _order(cards, network.ring, leader=leader)
    present = [cards[index] for index in indices]
    names = name_hosts([card.host for card in present])  # two agents on a host become `host.0` and `host.1`
    firsts = accumulate((card.num_workers for card in present), initial=0)
    members = tuple(
        Member(name=name, first_rank=first, num_workers=card.num_workers, host=card.host)
        for name, first, card in zip(names, firsts, present, strict=False)  # one more of `firsts`: the end
    )
    try:
        backend, reason = choose_backend(
            wanted_backend, [(m.name, m.num_workers, card.num_gpus) for m, card in zip(members, present, strict=True)]
        )
    except SetupError as exc:
        raise SetupError(str(exc), finding=_too_few_gpus(members, present)) from exc
    heirs = indices[: MOST_SUCCESSORS if can_change_leader else 1]
    contacts = [
        Contact(
            node=index,
            name=member.name,
            control_address=(addresses or {}).get(index, ""),
            data_address=cards[index].data_address or "",
            port=cards[index].agent_port,
        )
        for index, member in zip(heirs, members, strict=False)
    ]
    common = Plan(
        members=members,
        node_index=0,
        backend=backend,
        backend_reason=reason,
        nodes=tuple(indices),
        successors=tuple(contacts),
        network=network if cards.keys() <= network.interfaces.keys() else replace(network, interfaces={}),
        **more,
    )
    return {index: replace(common, node_index=position) for position, index in enumerate(indices)}


def _order(indices: Iterable[int], ring: Sequence[int], *, leader: int) -> list[int]:
    """Return the nodes in the order of their ranks: a ring begins anywhere, so it is turned to the leader's node."""
    first = ring.index(leader) if leader in ring else 0
    place = {index: number for number, index in enumerate([*ring[first:], *ring[:first]])}
    return sorted(indices, key=lambda index: (index != leader, place.get(index, len(place)), index))


def _too_few_gpus(members: Sequence[Member], cards: Sequence[Card]) -> Finding:
    short = [(m.name, card) for m, card in zip(members, cards, strict=True) if card.num_gpus < card.num_workers]
    seen: dict[str, list[str]] = {}
    for name, card in short:
        promised = card.num_promised_gpus
        said = f", although SLURM says {promised}" if promised is not None and promised != card.num_gpus else ""
        has = f"{count_of(card.num_gpus, 'GPU')} for {count_of(card.num_workers, 'rank')}{said}"
        seen.setdefault(has, []).append(name)
    what = f"backend nccl needs a GPU for each rank; {len(short)} of {len(members)} nodes have too few"
    evidence = [f"{fold_hosts(names)}: {has}" for has, names in seen.items()]
    node, reader = fold_hosts([name for name, _ in short]), short[0][1].reader
    return failed(*evidence, what=what).to_finding(find_cause("AR111"), node=node, reader=reader)
