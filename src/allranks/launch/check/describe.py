"""Which cluster.toml fits these node reports? Returns its tables, each value with its reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allranks.model.card import Card, Facts
from allranks.model.hostlist import fold_hosts
from allranks.preflight.networks import Choice, choose_network
from allranks.report.toml import Key, Table

PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the scheduler reports; empty without a scheduler."""

    cluster_name: str | None = None
    partition: str | None = None
    partition_reason: str = ""
    promised_gpus: Mapping[str, int] = field(default_factory=dict)
    """Node -> number of GPUs that SLURM configures."""
    silent: tuple[str, ...] = ()
    """Nodes that did not answer."""
    waited_s: float = 0.0

    @property
    def is_slurm(self) -> bool:
        """Whether there is a SLURM."""
        return bool(self.cluster_name or self.partition)


def describe_cluster(cards: Sequence[Card], around: Surroundings) -> tuple[str, list[Table]]:
    """Return the title and the tables of cluster.toml."""
    choice = choose_network(cards)
    names = fold_hosts([card.host for card in cards])
    count = f"{len(cards)} nodes, {names}" if len(cards) > 1 else names
    tables = [
        Table("[cluster]", (_name(cards, around),)),
        _network(cards, choice),
        *([_slurm(around)] if around.is_slurm else []),
        *_nodes(cards, choice, around),
    ]
    if around.silent:
        what = (
            f"{fold_hosts(around.silent)} did not answer within {around.waited_s:.0f} s: add the missing nodes, or run"
        )
        tables.append(Table("", notes=(f"{what} allranks init again",)))
    return (
        f"Written by allranks init, which examined {count}. The comment after a value says why it was chosen.",
        tables,
    )


def reasons_of(tables: Sequence[Table]) -> dict[str, str]:
    """Return why each value was chosen: `node.node03.gpus` -> the comment behind it."""
    found: dict[str, str] = {}
    for table in tables:
        head = table.head.strip("[]")
        if head == "node":
            head = f"node.{table.keys[0].value}"
        found |= {f"{head}.{key.name}": key.comment for key in table.keys if key.comment}
    return found


def _name(cards: Sequence[Card], around: Surroundings) -> Key:
    if around.cluster_name:
        return Key("name", around.cluster_name, "SLURM's name of the cluster")
    return Key("name", cards[0].host, "this machine's name, because there is no scheduler")


def _network(cards: Sequence[Card], choice: Choice) -> Table:
    holders = sorted({card.port_holder for card in cards if card.port_holder})
    port = f"the default; on the first node, {holders[0]} uses it now" if holders else "the default, as in torchrun"
    data = choice.network.subnet if choice.network else None
    return Table(
        "[network]",
        (Key("data", data, choice.reason), Key("port", PORT, port), _infiniband(cards)),
        notes=choice.notes,
    )


def _infiniband(cards: Sequence[Card]) -> Key:
    active = {
        card.host: [port for port in card.facts.rdma_ports if port.state == "ACTIVE"]
        for card in cards
        if card.facts is not None
    }
    with_ports = [host for host, ports in active.items() if ports]
    if not with_ports:
        any_port = any(card.facts and card.facts.rdma_ports for card in cards)
        return Key("infiniband", False, "no RDMA port is active" if any_port else "no node has an RDMA device")
    first = active[with_ports[0]]
    what = f"{', '.join(f'{port.device} ({port.link_layer}, {port.rate})' for port in first[:2])}" + (
        f" and {len(first) - 2} more" if len(first) > 2 else ""
    )
    if len(with_ports) < len(active):
        without = fold_hosts([host for host in active if host not in with_ports])
        return Key("infiniband", None, f"not set, NCCL decides: {with_ports[0]} has {what}, {without} has none active")
    return Key("infiniband", True, f"active on {'every node' if len(active) > 1 else 'this node'}: {what}")


def _slurm(around: Surroundings) -> Table:
    partition = Key(
        "partition", around.partition, around.partition_reason or "not set, SLURM uses its default partition"
    )
    return Table("[slurm]", (partition, Key("time", None, "not set, the partition's limit applies")))


def _nodes(cards: Sequence[Card], choice: Choice, around: Surroundings) -> list[Table]:
    """A table for each node; only the first of several nodes with the same address gets one."""
    tables, owners = list[Table](), dict[object, str]()
    for card in cards:
        table = _node(card, choice, around)
        address = next((key.value for key in table.keys if key.name == "address"), None)
        if address is not None and (owner := owners.setdefault(address, card.host)) != card.host:
            table = Table("", notes=(f"{card.host} is left out: {owner} has the same address, {address}",))
        tables.append(table)
    return tables


def _node(card: Card, choice: Choice, around: Surroundings) -> Table:
    ways = choice.network.nodes.get(card.host, ()) if choice.network else ()
    gpus = _gpus(card, around)
    if ways:
        nic = ways[0].nic
        facts = [f"{nic.speed_mbit_s / 1000:g} Gbit/s" if nic.speed_mbit_s else "speed unknown"]
        facts += [f"MTU {nic.mtu}"] if nic.mtu else []
        facts += [] if nic.is_up else ["down at the moment"]
        facts += [f"also {', '.join(each.nic.name for each in ways[1:])}"] if len(ways) > 1 else []
        keys = (Key("name", card.host), Key("address", ways[0].address), Key("interface", nic.name, ", ".join(facts)))
        return Table("[[node]]", (*keys, gpus))
    named = None if choice.network else _named_address(card)
    if named is None:
        there = f"no interface in {choice.network.subnet}" if choice.network else "no address on a network"
        return Table("", notes=(f"{card.host} is left out: {there}",))
    interface, address = named
    return Table(
        "[[node]]",
        (
            Key("name", card.host),
            Key("address", address, "its host name resolves to it; no data network was found"),
            Key("interface", interface),
            gpus,
        ),
    )


def _named_address(card: Card) -> tuple[str, str] | None:
    """Return interface and address that the node's own name resolves to, otherwise the first that is up."""
    if card.facts is None:
        return None
    named = {*card.facts.resolved.get(card.host, ()), *card.facts.resolved.get(card.facts.host_name, ())}
    all_ = [(nic, address) for nic in card.facts.interfaces for address in nic.addresses if nic.kind != "bridge"]
    real = [(nic, a) for nic, a in all_ if nic.kind != "loopback" and not a.lower().startswith("fe80:")]
    ordered = sorted(real or all_, key=lambda each: (each[1] not in named, not each[0].is_up))
    return (ordered[0][0].name, ordered[0][1]) if ordered else None


def _gpus(card: Card, around: Surroundings) -> Key:
    facts = card.facts or Facts()
    shown, problem = card.num_gpus, facts.unread.get("gpus", "")
    promised = around.promised_gpus.get(card.host, card.num_promised_gpus)
    if not shown and problem and "not installed" not in problem:
        return Key("gpus", None, f"could not be counted: {problem}")
    if not shown and promised and facts.driver_version:
        ask = f"request them with --gpus-per-node {promised}"
        return Key(
            "gpus", None, f"SLURM configures {promised}, but the driver shows none to a step without GPUs; {ask}"
        )
    if promised is not None and promised != shown:
        return Key("gpus", shown, f"the driver shows {shown or 'none'}, SLURM configures {promised}")
    models = sorted({gpu.name for gpu in facts.gpus})
    seen = ", ".join(models[:2]) if models else "as the driver shows"
    return Key(
        "gpus", shown, seen if shown else "the driver shows none" if facts.driver_version else "no NVIDIA driver"
    )
