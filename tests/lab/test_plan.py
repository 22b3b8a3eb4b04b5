"""Does cluster.toml become the nodes it describes, and is refused where the lab cannot build them?"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.cli.lab import SIX_NODES
from allranks.lab.lab import Lab
from allranks.lab.node_plan import plan_controller, plan_hosts, render_hosts_file
from allranks.lab.slurm_daemons import is_in_service, render_gres_conf, render_slurm_conf
from allranks.model.cluster import Cluster, NetworkTable, Node, SlurmTable
from allranks.model.errors import ConfigError, UsageError


def node(name: str, address: str, interface: str | None = None, gpus: int | None = None) -> Node:
    return Node(name=name, address=address, interface=interface, gpus=gpus)


def test_addresses_take_the_prefix_of_the_data_network() -> None:
    cluster = Cluster(network=NetworkTable(data="192.168.16.0/20"), node=(node("a", "192.168.20.15"),))
    (host,) = plan_hosts(cluster)
    assert (host.data_interface, host.data_address) == ("ens1f1", "192.168.20.15/20")
    assert host.management_address == "10.77.0.1/24"


def test_a_second_address_has_the_host_part_of_the_first_one() -> None:
    network = NetworkTable(data="192.168.20.0/24", second="192.168.32.0/20")
    (host,) = plan_hosts(Cluster(network=network, node=(node("a", "192.168.20.15"),)))
    assert host.second_address == "192.168.32.15/20"


def test_ipv6_addresses_have_64_bits_of_network() -> None:
    (host,) = plan_hosts(Cluster(node=(node("a", "fd00::5"),)))
    assert host.data_address == "fd00::5/64"


def test_names_lead_to_the_management_network() -> None:
    hosts = plan_hosts(Cluster(node=(node("a", "192.168.20.15"), node("b", "192.168.20.16"))))
    assert "10.77.0.1 a\n10.77.0.2 b\n" in render_hosts_file(hosts)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((), "no [[node]]"),
        ((node("a", "192.168.20.15", "eno1"),), "the lab itself uses this name"),
        ((node("a", "192.168.20.15", "ens 1"),), "expected up to 15"),
        ((node("a", "10.77.0.15"),), "is the lab's management network"),
        (tuple(node(f"n{i}", f"192.168.{i // 250}.{i % 250 + 1}") for i in range(255)), "at most 254"),
    ],
)
def test_what_cannot_be_built_is_refused(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        plan_hosts(Cluster(node=nodes))


def test_slurm_conf_has_partitions_and_gpus() -> None:
    cluster = Cluster(
        slurm=SlurmTable(partition="a,b", time="90"),
        node=(node("n1", "192.168.20.15", gpus=2), node("n2", "192.168.20.16")),
    )
    hosts = plan_hosts(cluster)
    lines = render_slurm_conf("demo", hosts, cluster, Path("/run/x"), controller=hosts[0], cpus=4).splitlines()
    assert lines[1] == "SlurmctldHost=n1(10.77.0.1)"
    assert lines[-5:] == [
        "NodeName=n1 NodeAddr=10.77.0.1 NodeHostname=n1 CPUs=4 State=UNKNOWN Gres=gpu:2",
        "NodeName=n2 NodeAddr=10.77.0.2 NodeHostname=n2 CPUs=4 State=UNKNOWN",
        "PartitionName=a Nodes=ALL State=UP Default=YES GraceTime=10 DefaultTime=90",
        "PartitionName=b Nodes=ALL State=UP GraceTime=10 DefaultTime=90",
        "PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF Hidden=YES",
    ]
    assert render_gres_conf(hosts, Path("/run/x")) == "NodeName=n1 Name=gpu File=/run/x/gpus/gpu[0-1]\n"


def test_slurm_s_times_can_be_chosen() -> None:
    cluster = Cluster(node=(node("n1", "192.168.20.15"),))
    (host,) = hosts = plan_hosts(cluster)
    own = {"kill_wait_s": 40, "grace_s": 50}
    text = render_slurm_conf("demo", hosts, cluster, Path("/run/x"), controller=host, cpus=4, **own)
    assert "\nKillWait=40\n" in text
    assert "PartitionName=main Nodes=ALL State=UP Default=YES GraceTime=50\n" in text


def test_a_login_node_runs_slurmctld_and_is_in_no_partition() -> None:
    cluster = Cluster(node=(node("n1", "192.168.20.15"), node("n2", "192.168.20.16")))
    hosts = plan_hosts(cluster)
    login = plan_controller(hosts, has_login=True)
    assert (login.name, login.management_address, login.data_interface) == ("login", "10.77.0.3/24", "")
    text = render_slurm_conf("demo", hosts, cluster, Path("/run/x"), controller=login, cpus=4)
    assert "SlurmctldHost=login(10.77.0.3)\n" in text
    assert text.count("login") == 1
    assert plan_controller(hosts, has_login=False) == hosts[0]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((node("login", "192.168.20.15"),), "gives this name to the login node"),
        (tuple(node(f"n{i}", f"192.168.20.{i + 1}") for i in range(254)), "at most 254, one of them the login node"),
    ],
)
def test_a_cluster_without_room_for_a_login_node_is_refused(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_controller(plan_hosts(Cluster(node=nodes)), has_login=True)


@pytest.mark.parametrize(("state", "expected"), [("idle", True), ("mixed", True), ("idle*", False), ("down", False)])
def test_in_service_is_what_slurmctld_hears(state: str, expected: bool) -> None:
    assert is_in_service(state) is expected


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "..", "x" * 33])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        Lab(name)


def test_a_directory_too_deep_for_a_socket_is_refused() -> None:
    with pytest.raises(UsageError, match="ALLRANKS_LAB_DIR"):
        Lab("a", env={"ALLRANKS_LAB_DIR": "/tmp/" + "x" * 100})


def test_the_default_cluster_is_the_six_node_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "six-node" / "cluster.toml"
    assert SIX_NODES.read_bytes() == example.read_bytes()
