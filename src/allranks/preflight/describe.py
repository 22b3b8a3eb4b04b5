"""Which cluster.toml fits these node reports? Returns its tables, each value with its reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allranks.model.card import Card, Facts, Interface
from allranks.model.hostlist import fold_hosts
from allranks.preflight.networks import NetworkChoice, choose_network
from allranks.report.toml_writer import Table, TomlKey

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


def describe_cluster(cards: Sequence[Card], around: Surroundings) -> tuple[str, list[Table]]:
    """Return the title and the tables of cluster.toml."""
    choice, owners = choose_network(cards), dict[str, str]()
    names = fold_hosts([card.host for card in cards])
    count = f"{len(cards)} nodes, {names}" if len(cards) > 1 else names
    why = "SLURM's name of the cluster" if around.cluster_name else "this machine's name, because there is no scheduler"
    name = TomlKey("name", around.cluster_name or cards[0].host, why)
    tables = [Table("[cluster]", (name,)), _network(cards, choice)]
    if around.cluster_name or around.partition:
        why = around.partition_reason or "not set, SLURM uses its default partition"
        limit = TomlKey("time", None, "not set, the partition's limit applies")
        tables.append(Table("[slurm]", (TomlKey("partition", around.partition, why), limit)))
    tables += [_node(card, choice, around, owners) for card in cards]
    if around.silent:
        late = f"{fold_hosts(around.silent)} did not answer within {around.waited_s:.0f} s"
        tables.append(Table("", notes=(f"{late}: add the missing nodes, or run allranks init again",)))
    title = f"Written by allranks init, which examined {count}. The comment after a value says why it was chosen."
    return title, tables


def reasons_of(tables: Sequence[Table]) -> dict[str, str]:
    """Return why each value was chosen: `node.node03.gpus` -> the comment behind it."""
    found: dict[str, str] = {}
    for table in tables:
        head = table.head.strip("[]")
        if head == "node":
            head = f"node.{table.keys[0].value}"
        found |= {f"{head}.{key.name}": key.comment for key in table.keys if key.comment}
    return found


def _network(cards: Sequence[Card], choice: NetworkChoice) -> Table:
    holders = sorted({card.port_holder for card in cards if card.port_holder})
    port = f"the default; on the first node, {holders[0]} uses it now" if holders else "the default, as in torchrun"
    data = TomlKey("data", choice.network.subnet if choice.network else None, choice.reason)
    return Table("[network]", (data, TomlKey("port", PORT, port), _infiniband(cards)), notes=choice.notes)


def _infiniband(cards: Sequence[Card]) -> TomlKey:
    all_ports = {card.host: card.facts.rdma_ports for card in cards if card.facts is not None}
    active = {host: [port for port in ports if port.state == "ACTIVE"] for host, ports in all_ports.items()}
    with_ports = [host for host, ports in active.items() if ports]
    if not with_ports:
        is_any = any(all_ports.values())
        return TomlKey("infiniband", False, "no RDMA port is active" if is_any else "no node has an RDMA device")
    first = active[with_ports[0]]
    what = ", ".join(f"{port.device} ({port.link_layer}, {port.rate})" for port in first[:2])
    what += f" and {len(first) - 2} more" if len(first) > 2 else ""
    if len(with_ports) < len(active):
        without = fold_hosts([host for host in active if host not in with_ports])
        return TomlKey(
            "infiniband", None, f"not set, NCCL decides: {with_ports[0]} has {what}, {without} has none active"
        )
    return TomlKey("infiniband", True, f"active on {'every node' if len(active) > 1 else 'this node'}: {what}")


def _node(card: Card, choice: NetworkChoice, around: Surroundings, owners: dict[str, str]) -> Table:
    """The table of a node, with its address noted in `owners`; only the first with an address gets a table."""
    ways = choice.network.nodes.get(card.host, ()) if choice.network else ()
    why, facts = "", list[str]()
    if ways:
        nic, address = ways[0].nic, ways[0].address
        facts = [f"{nic.speed_mbit_s / 1000:g} Gbit/s" if nic.speed_mbit_s else "speed unknown"]
        facts += [f"MTU {nic.mtu}"] if nic.mtu else []
        facts += [] if nic.is_up else ["down at the moment"]
        facts += [f"also {', '.join(way.nic.name for way in ways[1:])}"] if len(ways) > 1 else []
    elif choice.network is None and (named := _named_address(card)) is not None:
        (nic, address), why = named, "its host name resolves to it; no data network was found"
    else:
        there = f"no interface in {choice.network.subnet}" if choice.network else "no address on a network"
        return Table("", notes=(f"{card.host} is left out: {there}",))
    if (owner := owners.setdefault(address, card.host)) != card.host:
        return Table("", notes=(f"{card.host} is left out: {owner} has the same address, {address}",))
    interface = TomlKey("interface", nic.name, ", ".join(facts))
    return Table(
        "[[node]]", (TomlKey("name", card.host), TomlKey("address", address, why), interface, _gpus(card, around))
    )


def _named_address(card: Card) -> tuple[Interface, str] | None:
    """Return interface and address that the node's own name resolves to, otherwise the first that is up."""
    facts = card.facts or Facts()
    named = {*facts.resolved.get(card.host, ()), *facts.resolved.get(facts.host_name, ())}
    all_ = [(nic, address) for nic in facts.interfaces for address in nic.addresses if nic.kind != "bridge"]
    real = [(nic, a) for nic, a in all_ if nic.kind != "loopback" and not a.lower().startswith("fe80:")]
    return min(real or all_, key=lambda way: (way[1] not in named, not way[0].is_up), default=None)


def _gpus(card: Card, around: Surroundings) -> TomlKey:
    facts = card.facts or Facts()
    shown, problem = card.num_gpus, facts.unread.get("gpus", "")
    promised = around.promised_gpus.get(card.host, card.num_promised_gpus)
    if not shown and problem and "not installed" not in problem:
        return TomlKey("gpus", None, f"could not be counted: {problem}")
    if not shown and promised and facts.driver_version:
        why = f"SLURM configures {promised}, but the driver shows none to a step without GPUs; "
        return TomlKey("gpus", None, f"{why}request them with --gpus-per-node {promised}")
    if promised is not None and promised != shown:
        why = f"the driver shows {shown or 'none'}, SLURM configures {promised}"
    elif shown:
        why = ", ".join(sorted({gpu.name for gpu in facts.gpus})[:2]) or "as the driver shows"
    else:
        why = "the driver shows none" if facts.driver_version else "no NVIDIA driver"
    return TomlKey("gpus", shown, why)
