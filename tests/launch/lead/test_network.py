"""What the leader makes of a measurement and of SLURM's topology."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from allranks.comm.bench_table import BenchTable, Pair, to_json
from allranks.launch.lead.network import describe_network, foresee_network, read_bench
from allranks.model.data_network import DataNetwork

FOUND = DataNetwork(link_mbit_s=940.0, link_reason="delivery rate", link_source="roll call")
NODES = {0: "n1", 1: "n2", 2: "n3", 3: "n4"}
ODD_EVEN = "SwitchName=a Level=0 LinkSpeed=1 Nodes=n[1,3]\nSwitchName=b Level=0 LinkSpeed=1 Nodes=n[2,4]\n"
EVEN_RATES = dict.fromkeys(permutations(NODES.values(), 2), 480.0)
TWO_SWITCHES = {
    pair: 480.0 if pair in {("n1", "n3"), ("n3", "n1"), ("n2", "n4"), ("n4", "n2")} else 200.0 for pair in EVEN_RATES
}


def table(rates, *, interface="eth0") -> BenchTable:
    return BenchTable(
        backend="gloo",
        nodes=tuple(NODES.values()),
        ranks=4,
        interfaces=dict.fromkeys(NODES.values(), (interface,)),
        pairs=tuple(Pair(source=a, target=b, mbit_s=rate) for (a, b), rate in rates.items()),
    )


@pytest.mark.parametrize(
    ("bench", "more", "link", "ring"),
    [
        (None, {}, (940.0, "roll call"), ()),
        (table(EVEN_RATES), {}, (480.0, "bench.json"), ()),
        (table(EVEN_RATES | {("n2", "n3"): 90.0}), {"can_order": False}, (90.0, "bench.json"), ()),
        (
            table(EVEN_RATES | {("n3", "n2"): 90.0}),
            {"can_order": False},
            (480.0, "bench.json"),
            (),
        ),  # no hop of the ring
        (table(EVEN_RATES | {("n2", "n3"): None}), {}, (480.0, "bench.json"), ()),
        (table(EVEN_RATES, interface="eth1"), {}, (940.0, "roll call"), ()),
        (table({}), {}, (940.0, "roll call"), ()),
        (table(TWO_SWITCHES), {}, (200.0, "bench.json"), (0, 2, 1, 3)),
        (None, {"topology": ODD_EVEN}, (940.0, "roll call"), (0, 2, 1, 3)),
        (None, {"topology": ODD_EVEN, "can_order": False}, (940.0, "roll call"), ()),
        (table(EVEN_RATES), {"topology": ODD_EVEN}, (480.0, "bench.json"), (0, 2, 1, 3)),
    ],
)
def test_a_measurement_of_these_nodes_and_interfaces_counts_more_than_the_roll_call(bench, more, link, ring):
    known = describe_network(
        FOUND, NODES, dict.fromkeys(NODES.values(), "eth0"), table=bench, **{"topology": ""} | more
    )
    assert (known.link_mbit_s, known.link_source) == link
    assert known.ring == ring
    assert bool(known.ring_reason) == bool(ring)


def test_nodes_that_the_measurement_does_not_know_leave_it_out():
    nodes = NODES | {4: "n5"}
    known = describe_network(
        FOUND, nodes, dict.fromkeys(nodes.values(), "eth0"), table=table(TWO_SWITCHES), topology=""
    )
    assert known == FOUND


def test_a_file_that_cannot_be_read_is_no_measurement(tmp_path: Path):
    assert read_bench(tmp_path) is None
    (tmp_path / "bench.json").write_bytes(b"{")
    assert read_bench(tmp_path) is None
    (tmp_path / "bench.json").write_bytes(to_json(table(EVEN_RATES)))
    assert read_bench(tmp_path) == table(EVEN_RATES)


def test_one_node_knows_the_measurement_of_its_own_interface_before_the_roll_call():
    assert foresee_network(table(EVEN_RATES), (), "n2", "eth0").link_mbit_s == 480.0
    assert foresee_network(table(EVEN_RATES), ("n1", "n2"), "n2", "eth0").link_mbit_s == 480.0
    assert foresee_network(table(EVEN_RATES), (), "n2", "eth1") == DataNetwork()
    assert foresee_network(table(EVEN_RATES), (), "n2", None) == DataNetwork()
    assert foresee_network(None, (), "n2", "eth0") == DataNetwork()
    assert describe_network(DataNetwork(), {}, {}, table=None, topology="") == DataNetwork()
