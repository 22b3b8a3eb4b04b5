"""`allranks init`: which network is chosen and why, what is written, and that it is read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_srun import FakeStep

from allranks.config.file import parse_cluster, read_cluster
from allranks.model.card import Card, Facts, Gpu, Interface, RdmaPort
from allranks.preflight.describe import Surroundings, describe_cluster, reasons_of
from allranks.preflight.networks import choose_network
from allranks.report.toml_writer import render_toml
from cards import make_card
from conftest import Allranks, without_waiting

LO = Interface("lo", ("127.0.0.1", "::1"), True, ("127.0.0.0/8", "::1/128"), 65536, kind="loopback")
DOCKER = Interface("docker0", ("172.17.0.1",), True, ("172.17.0.0/16",), 1500, kind="bridge")


def nic(name: str, address: str, length: int = 24, *, is_up: bool = True, mtu: int = 1500, speed: int | None = None,
        kind: str = "physical") -> Interface:  # fmt: skip
    from ipaddress import ip_network

    subnet = str(ip_network(f"{address}/{length}", strict=False))
    return Interface(name, (address,), is_up, (subnet,), mtu, speed, kind=kind)


def rdma(device: str, netdev: str, state: str = "ACTIVE") -> RdmaPort:
    return RdmaPort(
        device=device,
        port=1,
        state=state,
        phys_state="LinkUp",
        rate="400 Gb/sec",
        link_layer="InfiniBand",
        netdev=netdev,
    )


def node(host: str, *nics: Interface, named: str = "", **more: object) -> Card:
    facts = Facts(host_name=host, interfaces=(LO, *nics, DOCKER), resolved={host: (named,) if named else ()}, **more)  # type: ignore[arg-type]
    return make_card(1, host=host, num_gpus=len(facts.gpus), facts=facts)


def two(*pairs: tuple[Interface, ...], named: Sequence[str] = ("10.77.0.1", "10.77.0.2")) -> list[Card]:
    return [node(f"n{i + 1}", *nics, named=named[i]) for i, nics in enumerate(pairs)]


def lan(index: int, **more: object) -> Interface:
    return nic("eno1", f"10.77.0.{index}", **more)  # type: ignore[arg-type]


def data(index: int, **more: object) -> Interface:
    return nic("ens1f1", f"192.168.20.{index}", **more)  # type: ignore[arg-type]


def test_names_lead_to_the_management_network_where_no_speed_is_told() -> None:
    found = choose_network(two((lan(1), data(1)), (lan(2), data(2))))
    assert found.network is not None
    assert found.network.subnet == "192.168.20.0/24"
    assert found.reason == (
        "all 2 nodes are on it; host names lead to 10.77.0.0/24, so that one is for management (no speeds to compare)"
    )
    assert found.notes == (
        "skipped: docker0 172.17.0.0/16 (a bridge)",
        "other networks: 10.77.0.0/24 (eno1)",
    )


def test_the_fastest_goes_before_where_names_lead() -> None:
    found = choose_network(
        two((lan(1, speed=100_000), data(1, speed=1000)), (lan(2, speed=100_000), data(2, speed=1000)))
    )
    assert found.network is not None
    assert found.network.subnet == "10.77.0.0/24"
    assert found.reason == "all 2 nodes are on it; 100 Gbit/s, 192.168.20.0/24 has 1"


def test_a_link_is_as_fast_as_its_slowest_end_and_rdma_goes_first() -> None:
    slow = choose_network(
        two((lan(1, speed=25_000), data(1, speed=100_000)), (lan(2, speed=25_000), data(2, speed=10_000)))
    )
    assert slow.network is not None
    assert slow.network.subnet == "10.77.0.0/24"
    cards = [
        node(f"n{i}", lan(i, speed=200_000), nic("ib0", f"10.9.0.{i}", 16), rdma_ports=(rdma("mlx5_0", "ib0"),))
        for i in (1, 2)
    ]
    fast = choose_network(cards)
    assert fast.network is not None
    assert (fast.network.subnet, fast.reason) == (
        "10.9.0.0/16",
        "all 2 nodes are on it; it has RDMA; 10.77.0.0/24 does not",
    )


def test_what_nothing_tells_apart_is_said() -> None:
    cards = two((data(1), nic("ens2", "192.168.21.1")), (data(2), nic("ens2", "192.168.21.2")), named=("", ""))
    found = choose_network(cards)
    assert found.network is not None
    assert found.network.subnet == "192.168.20.0/24"
    assert found.reason.endswith("the lowest address: it looks the same as 192.168.21.0/24; check this choice")


@pytest.mark.parametrize(
    "odd",
    [("veth12ab", "10.1.0", "virtual"), ("br-77", "10.1.0", "virtual"), ("cni0", "10.1.0", "virtual"),
                     ("tun0", "10.1.0", "virtual"), ("virbr0", "10.1.0", "virtual"), ("flannel.1", "10.1.0", "virtual"),
                     ("bond7", "10.1.0", "bridge"), ("eth5", "169.254.3", "physical")],
    ids=lambda odd: odd[0],
)  # fmt: skip
def test_containers_bridges_and_link_local_are_never_it(odd: tuple[str, str, str]) -> None:
    name, net, kind = odd
    cards = [node(f"n{i}", nic(name, f"{net}.{i}", speed=400_000, kind=kind)) for i in (1, 2)]
    assert choose_network(cards).network is None


def test_an_address_that_several_nodes_have_leads_nowhere() -> None:
    cards = [node(f"n{i}", nic("usb0", "10.55.0.1", speed=400_000), lan(i)) for i in (1, 2, 3)]
    found = choose_network(cards)
    assert found.network is not None
    assert found.network.subnet == "10.77.0.0/24"
    assert found.notes[0] == (
        "skipped: usb0 10.55.0.0/24 (the same address on several nodes); docker0 172.17.0.0/16 (a bridge)"
    )


def test_a_veth_that_is_called_like_a_nic_is_one() -> None:
    cards = [node(f"n{i}", nic("ens1f1", f"10.1.0.{i}", kind="virtual")) for i in (1, 2)]
    assert choose_network(cards).network is not None


def test_nodes_that_are_down_or_not_on_it_are_named() -> None:
    cards = [
        node("n1", lan(1), data(1), named="10.77.0.1"),
        node("n2", lan(2), data(2, is_up=False), named="10.77.0.2"),
        node("n3", data(3)),
    ]
    found = choose_network(cards)
    assert found.network is not None
    assert found.network.subnet == "192.168.20.0/24"
    assert "down at the moment: the interface of n2" in found.notes
    apart = [
        node("n1", nic("eth0", "10.1.1.1")),
        node("n2", nic("eth0", "10.1.2.1")),
        node("n3", nic("eth0", "10.1.3.1")),
    ]
    found = choose_network(apart)
    assert (found.network, found.reason) == (
        None,
        "the nodes share no subnet: 10.1.1.0/24 (n1), 10.1.2.0/24 (n2), 10.1.3.0/24 (n3)",
    )


GPU = Gpu(index=0, uuid="GPU-1", name="NVIDIA H100 80GB HBM3")


def test_the_whole_file() -> None:
    cards = [
        node("n1", lan(1, speed=1000), nic("ib0", "10.9.0.1", 16, mtu=4092, speed=400_000), nic("ib1", "10.9.1.1", 16),
             named="10.77.0.1", gpus=(GPU,), rdma_ports=(rdma("mlx5_0", "ib0"),), driver_version="550.54"),
        node("n2", lan(2, speed=1000), nic("ib0", "10.9.0.2", 16, mtu=4092, speed=400_000),
             named="10.77.0.2", rdma_ports=(rdma("mlx5_0", "ib0"),), driver_version="550.54"),
        node("n3", lan(3, speed=1000), nic("ib0", "10.9.0.3", 16, mtu=4092, speed=400_000, is_up=False),
             named="10.77.0.3", rdma_ports=(rdma("mlx5_0", "ib0", "DOWN"),),
             unread={"gpus": "nvidia-smi: no answer within 3 s"}),
    ]  # fmt: skip
    around = Surroundings(
        cluster_name="ada", partition="gpu", partition_reason="given by --partition", promised_gpus={"n1": 1, "n2": 8},
        silent=("n4", "n5"), waited_s=20,
    )  # fmt: skip
    title, tables = describe_cluster(cards, around)
    assert (
        render_toml(tables, title=title)
        == """\
# Written by allranks init, which examined 3 nodes, n[1-3]. The comment after a value says why it was chosen.

[cluster]
name = "ada"                   # SLURM's name of the cluster

[network]
# skipped: docker0 172.17.0.0/16 (a bridge)
# down at the moment: the interface of n3
# other networks: 10.77.0.0/24 (eno1)
data = "10.9.0.0/16"           # all 3 nodes are on it; 400 Gbit/s, 10.77.0.0/24 has 1
port = 29500                   # the default, as in torchrun
# infiniband: not set, NCCL decides: n1 has mlx5_0 (InfiniBand, 400 Gb/sec), n3 has none active

[slurm]
partition = "gpu"              # given by --partition
# time: not set, the partition's limit applies

[[node]]
name = "n1"
address = "10.9.0.1"
interface = "ib0"              # 400 Gbit/s, MTU 4092, also ib1
gpus = 1                       # NVIDIA H100 80GB HBM3

[[node]]
name = "n2"
address = "10.9.0.2"
interface = "ib0"              # 400 Gbit/s, MTU 4092
# gpus: SLURM configures 8, but the driver shows none to a step without GPUs; request them with --gpus-per-node 8

[[node]]
name = "n3"
address = "10.9.0.3"
interface = "ib0"              # 400 Gbit/s, MTU 4092, down at the moment
# gpus: could not be counted: nvidia-smi: no answer within 3 s

# n[4-5] did not answer within 20 s: add the missing nodes, or run allranks init again
"""
    )
    cluster = parse_cluster(render_toml(tables, title=title), Path("cluster.toml")).cluster
    assert [(each.name, each.address, each.interface, each.gpus) for each in cluster.node] == [
        ("n1", "10.9.0.1", "ib0", 1), ("n2", "10.9.0.2", "ib0", None), ("n3", "10.9.0.3", "ib0", None),
    ]  # fmt: skip
    assert reasons_of(tables)["node.n1.gpus"] == "NVIDIA H100 80GB HBM3"


def test_without_a_common_network_names_lead() -> None:
    cards = [
        node("n1", nic("eth0", "10.1.1.1", 32), named="10.1.1.1"),
        node("n2", nic("eth0", "10.1.2.1", 32), nic("eth1", "10.5.0.1"), named="10.1.2.1"),
        node("n3", DOCKER),
    ]
    title, tables = describe_cluster(cards, Surroundings())
    text = render_toml(tables, title=title)
    assert "# data: the nodes share no subnet: " in text
    assert "infiniband = false             # no node has an RDMA device" in text
    cluster = parse_cluster(text, Path("cluster.toml")).cluster
    assert [(each.name, each.address, each.interface) for each in cluster.node][:2] == [
        ("n1", "10.1.1.1", "eth0"), ("n2", "10.1.2.1", "eth0"),
    ]  # fmt: skip


def test_this_machine_alone(allranks: Allranks, tmp_path: Path) -> None:
    result = allranks("init", env={"PATH": "/bin-of-nobody"})
    assert result.returncode == 0, result.stderr
    assert " written: 1 node, " in result.stderr
    written = tmp_path / "cluster.toml"
    assert len(read_cluster(written).cluster.node) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]
    again = allranks("init", "--standalone")
    assert (again.returncode, again.stderr) == (
        2,
        "error: init: cluster.toml exists; replace it with --force, or name another file with --output\n",
    )
    assert allranks("init", "--standalone", "--force").returncode == 0
    shown = allranks("init", "--standalone", "-o", "-")
    assert shown.stdout == written.read_text()


def test_all_idle_nodes_of_the_default_partition(
    allranks: Allranks, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    step = FakeStep(tmp_path_factory.mktemp("slurm") / "bin")
    result = allranks("init", "--json", env=step.env)
    assert without_waiting(result.stderr) == "allranks: examining n[1-2]\n"
    flags = step.call["flags"]
    assert isinstance(flags, dict)
    assert (flags["partition"], flags["nodelist"], flags["gpus-per-node"]) == ("main", "n1,n2", "4")
    found = json.loads(result.stdout)
    assert found["cluster"]["cluster"]["name"] == "ada"
    assert found["reasons"]["slurm.partition"] == "SLURM's default"
    assert found["silent"] == []
    assert "# n2 is left out: n1 has the same address, " in found["text"]
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_is_silent_is_left_out_and_said(
    allranks: Allranks, tmp_path_factory: pytest.TempPathFactory
) -> None:
    step = FakeStep(tmp_path_factory.mktemp("slurm") / "bin")
    env = step.env | {"FAKE_SILENT": "n2"}
    result = allranks("init", "--nodes", "2", "--timeout", "4", "-o", "-", env=env)
    assert result.returncode == 3
    assert "# n2 did not answer within 4 s: add the missing nodes, or run allranks init again" in result.stdout
    assert result.stderr.splitlines()[-1] == "allranks: n2 did not answer within 4 s, and is not in the file"


def test_flags_that_contradict_are_one_line(allranks: Allranks, tmp_path: Path) -> None:
    result = allranks("init", "--standalone", "--nodes", "2")
    assert (result.returncode, result.stderr) == (
        2,
        "error: init: --standalone examines only this machine: remove --nodes, --partition and --nodelist\n",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("init", "-o", "no/such/place.toml"),
            "'-o' / '--output': no/such/place.toml: no such directory: no/such; see allranks init --help",
        ),
        (
            ("init", "-o", "made"),
            "'-o' / '--output': made is a directory; expected a file, for example made/cluster.toml; "
            "see allranks init --help",
        ),
        (
            ("lab", "drill", "--all", "--json", "made"),
            "'--json': made is a directory; expected a file, for example made/drills.json; "
            "see allranks lab drill --help",
        ),
    ],
)
def test_an_output_that_cannot_be_a_file_is_refused_before_the_work(
    words: tuple[str, ...], said: str, allranks: Allranks, tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    result = allranks(*words)
    assert (result.returncode, result.stderr) == (2, f"error: invalid value for {said}\n")
