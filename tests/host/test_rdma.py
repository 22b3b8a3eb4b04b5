"""RDMA ports from trees written after the kernel's documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_nvidia_smi import install_script

from allranks.host.rdma import (
    has_peer_memory,
    has_rdma,
    parse_devinfo,
    read_active_mtus,
    read_rdma_ports,
    roce_mtu,
    with_active_mtus,
)
from allranks.model.card import Gid, RdmaPort
from conftest import write


def add_port(root: Path, device: str, *, uverbs: int, **files: str) -> Path:
    base = root / "sys/class/infiniband" / device
    port = base / "ports/1"
    defaults = {
        "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand",
        "lid": "0x1b", "sm_lid": "0x1", "counters/symbol_error": "0", "counters/link_downed": "0",
    }  # fmt: skip
    for name, text in {**defaults, **files}.items():
        write(port / name, f"{text}\n")
    (base / f"device/infiniband_verbs/uverbs{uverbs}").mkdir(parents=True)
    return port


def test_without_rdma_there_is_no_port(tmp_path):
    assert read_rdma_ports(root=tmp_path) == ()


def test_an_infiniband_port_is_read(tmp_path):
    add_port(tmp_path, "mlx5_0", uverbs=0, **{"counters/link_downed": "3", "hw_counters/out_of_sequence": "7"})
    write(tmp_path / "dev/infiniband/uverbs0", "")
    assert read_rdma_ports(root=tmp_path) == (
        RdmaPort(
            device="mlx5_0",
            port=1,
            state="ACTIVE",
            phys_state="LinkUp",
            rate="400 Gb/sec (4X NDR)",
            link_layer="InfiniBand",
            lid="0x1b",
            sm_lid="0x1",
            has_uverbs=True,
            error_counters={"link_downed": 3, "out_of_sequence": 7},
        ),
    )


def test_a_missing_device_file_is_seen(tmp_path):
    add_port(tmp_path, "mlx5_0", uverbs=3)
    assert [port.has_uverbs for port in read_rdma_ports(root=tmp_path)] == [False]


def test_ports_come_in_the_order_of_their_numbers(tmp_path):
    for index in (10, 2, 0):
        add_port(tmp_path, f"mlx5_{index}", uverbs=index)
    add_port(tmp_path, "mlx5_1", uverbs=1, state="1: DOWN", phys_state="3: Disabled")
    ports = read_rdma_ports(root=tmp_path)
    assert [(port.device, port.state) for port in ports] == [
        ("mlx5_0", "ACTIVE"), ("mlx5_1", "DOWN"), ("mlx5_2", "ACTIVE"), ("mlx5_10", "ACTIVE"),
    ]  # fmt: skip


def test_a_roce_port_has_a_netdev_and_its_gids(tmp_path):
    port = add_port(tmp_path, "rocep1", uverbs=0, link_layer="Ethernet", lid="0x0", sm_lid="0x0")
    for index, (kind, gid) in enumerate([
        ("IB/RoCE v1", "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"),
        ("RoCE v2", "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"),
        ("RoCE v2", "0000:0000:0000:0000:0000:0000:0000:0000"),
        ("RoCE v2", "0000:0000:0000:0000:0000:ffff:c0a8:140f"),
    ]):  # fmt: skip
        write(port / f"gid_attrs/types/{index}", f"{kind}\n")
        write(port / f"gid_attrs/ndevs/{index}", "ens1f1\n")
        write(port / f"gids/{index}", f"{gid}\n")
    (found,) = read_rdma_ports(root=tmp_path)
    assert found.netdev == "ens1f1"
    assert [(each.index, each.kind) for each in found.gids] == [(0, "IB/RoCE v1"), (1, "RoCE v2"), (3, "RoCE v2")]
    assert found.gids[2] == Gid(index=3, kind="RoCE v2", gid="0000:0000:0000:0000:0000:ffff:c0a8:140f", netdev="ens1f1")
    assert found.active_mtu is None


def test_the_mtu_of_a_roce_port_follows_from_its_interface(tmp_path):
    port = add_port(tmp_path, "rocep1", uverbs=0, link_layer="Ethernet")
    write(port / "gid_attrs/types/0", "RoCE v2\n")
    write(port / "gid_attrs/ndevs/0", "ens1f1\n")
    write(port / "gids/0", "0000:0000:0000:0000:0000:ffff:c0a8:140f\n")
    write(tmp_path / "sys/class/net/ens1f1/mtu", "9000\n")
    assert [each.active_mtu for each in read_rdma_ports(root=tmp_path)] == [4096]


@pytest.mark.parametrize(
    ("interface", "mtu"), [(1500, 1024), (9000, 4096), (4200, 4096), (4191, 2048), (2200, 2048), (351, None), (0, None)]
)
def test_a_roce_packet_leaves_room_for_its_headers(interface, mtu):
    assert roce_mtu(interface) == mtu


# As ibv_devinfo of rdma-core prints it (man page, and rdma-core's libibverbs/examples/devinfo.c).
DEVINFO = """\
hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t28.39.1002
\tnode_guid:\t\t\ta088:c203:005f:c296
\tphys_port_cnt:\t\t\t2
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t4096 (5)
\t\t\tsm_lid:\t\t\t1
\t\t\tlink_layer:\t\tInfiniBand

\t\tport:\t2
\t\t\tstate:\t\t\tPORT_DOWN (1)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t1024 (3)

hca_id:\trocep1
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tactive_mtu:\t\tinvalid MTU (0)
"""


def test_ibv_devinfo_names_the_mtu_of_each_port():
    assert parse_devinfo(DEVINFO) == {"mlx5_0:1": 4096, "mlx5_0:2": 1024}
    assert parse_devinfo("No IB devices found\n") == {}
    assert parse_devinfo("active_mtu: 4096 (5)\nport: 1\nactive_mtu: 4096 (5)\n") == {}


def test_what_ibv_devinfo_says_goes_before_what_sysfs_leads_to(tmp_path):
    for index in range(2):
        add_port(tmp_path, f"mlx5_{index}", uverbs=index)
    ports = with_active_mtus(read_rdma_ports(root=tmp_path), {"mlx5_0:1": 2048, "mlx5_9:1": 512})
    assert [each.active_mtu for each in ports] == [2048, None]


def test_ibv_devinfo_is_asked_or_missed(tmp_path):
    assert read_active_mtus(deadline_s=5, env={"PATH": str(tmp_path)}) == ({}, "ibv_devinfo: not installed")
    env = install_script(tmp_path, "ibv_devinfo", f"#!/bin/sh\n/bin/cat <<'END'\n{DEVINFO}END\n")
    assert read_active_mtus(deadline_s=5, env=env) == ({"mlx5_0:1": 4096, "mlx5_0:2": 1024}, "")
    env = install_script(tmp_path, "ibv_devinfo", "#!/bin/sh\necho Failed to get IB devices list >&2; exit 255\n")
    assert read_active_mtus(deadline_s=5, env=env) == ({}, "ibv_devinfo: Failed to get IB devices list")


def test_a_machine_has_rdma_where_a_device_is(tmp_path):
    assert not has_rdma(root=tmp_path)
    add_port(tmp_path, "mlx5_0", uverbs=0)
    assert has_rdma(root=tmp_path)


def test_a_torn_tree_is_read_as_far_as_it_goes(tmp_path):
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "state").mkdir(parents=True)
    write(port / "counters/symbol_error", "many\n")
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/x").mkdir()
    (found,) = read_rdma_ports(root=tmp_path)
    assert (found.state, found.rate, found.has_uverbs, found.error_counters) == ("", "", None, {})


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024"


@pytest.mark.parametrize(
    ("files", "answer"),
    [
        ({}, None),
        ({"proc/driver/nvidia/version": CLOSED, "proc/sys/kernel/osrelease": "6.1.0"}, False),
        ({"proc/driver/nvidia/version": OPEN, "proc/sys/kernel/osrelease": "6.1.0-18-amd64"}, True),
        ({"proc/driver/nvidia/version": OPEN, "proc/sys/kernel/osrelease": "5.10.0"}, False),
        ({"proc/driver/nvidia/version": OPEN}, False),
        ({"proc/driver/nvidia/version": CLOSED, "sys/module/nvidia_peermem/version": "550"}, True),
        ({"proc/driver/nvidia/version": CLOSED, "sys/kernel/mm/memory_peers/nv_mem/version": "1"}, True),
    ],
)
def test_peer_memory_needs_a_module_or_dma_buf(tmp_path, files, answer):
    for name, text in files.items():
        write(tmp_path / name, f"{text}\n")
    assert has_peer_memory(root=tmp_path) is answer
