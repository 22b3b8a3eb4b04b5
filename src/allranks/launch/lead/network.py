"""What does the leader know of the data network beyond its roll call: a measurement, and which node is at which switch?

describe_network(called.network, nodes, interfaces, table=read_bench(Path("runs")), topology=ask_topology())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from allranks.comm.bench_table import FILE, BenchTable, find_table, from_json
from allranks.comm.ring import order_by_rates, order_by_topology, parse_topology
from allranks.files.regular import find_regular
from allranks.host.slurm_command import run_slurm
from allranks.model.data_network import DataNetwork
from allranks.model.errors import SetupError

TOPOLOGY_S = 2.0
"""A controller that does not answer within this time is not waited for: any order of ranks works."""
MAX_TABLE_BYTES = 16 << 20


def describe_network(
    found: DataNetwork,
    nodes: Mapping[int, str],
    interfaces: Mapping[str, str],
    *,
    table: BenchTable | None,
    topology: str,
    can_order: bool = True,
) -> DataNetwork:
    """Return what the roll call found, with the rate of a measurement of these nodes, and the order of a ring. Pure.

    Args:
        found: by the roll call.
        nodes: name of each node by its index; the leader's first.
        interfaces: data interface of each node, by its name.
        table: of `allranks bench`.
        topology: what `scontrol show topology` printed; empty: nothing.
        can_order: whether nobody said which node has which rank.
    """
    names, indices = list(nodes.values()), list(nodes)
    rates: dict[tuple[str, str], float] = {}
    if table is not None and all(interfaces.get(name) in table.interfaces.get(name, ()) for name in names):
        own = set(names)
        rates = {
            (pair.source, pair.target): pair.mbit_s or 0 for pair in table.pairs if {pair.source, pair.target} <= own
        }
    order, why = None, ""
    if can_order and (order := order_by_topology(names, parse_topology(topology))):
        why = "this keeps the nodes of each switch together (scontrol show topology)"
    elif can_order and (order := order_by_rates(names, rates)):
        why = "the fastest ring, by allranks bench"
    if order:
        found = replace(found, ring=tuple(indices[place] for place in order), ring_reason=why)
    ring = [names[place] for place in order or range(len(names))]
    hops = {pair: rates[pair] for pair in zip(ring, [*ring[1:], *ring[:1]], strict=True) if rates.get(pair)}
    if not hops:
        return found
    (source, target), rate = min(hops.items(), key=lambda hop: hop[1])
    reason = f"{source} to {target}, the slowest hop of the ring, in the last allranks bench"
    return replace(found, link_mbit_s=rate, link_reason=reason, link_source=FILE)


def foresee_network(table: BenchTable | None, nodes: Sequence[str], host: str, interface: str | None) -> DataNetwork:
    """Return what one node can know before the roll call.

    Args:
        table: of `allranks bench`.
        nodes: of the job; empty: nobody has said them, and they may be those of the table.
        host: name of this node.
        interface: its data interface; None: not known.
    """
    if table is None or interface is None:
        return DataNetwork()
    known = {name: names[0] for name, names in table.interfaces.items() if names} | {host: interface}
    named = dict(enumerate(nodes or table.nodes))
    return describe_network(DataNetwork(), named, known, table=table, topology="", can_order=False)


def read_bench(run_root: Path) -> BenchTable | None:
    """Return the newest measurement in a directory of runs; None where there is none that this version can read."""
    data = find_regular(find_table(run_root), at_most=MAX_TABLE_BYTES)
    table = None if data is None else from_json(data)
    return table if isinstance(table, BenchTable) else None


def ask_topology() -> str:
    """Return what `scontrol show topology` prints; empty where nobody answers."""
    try:
        answer = run_slurm("scontrol", "show", "topology", deadline_s=TOPOLOGY_S)
    except SetupError:
        return ""
    return "" if answer.returncode else answer.stdout
