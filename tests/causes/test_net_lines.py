"""What the network's signs read out of lines: which cause, how much it proves, and whom it names."""

from __future__ import annotations

import re
from itertools import takewhile

import pytest

from allranks.causes.book import all_causes
from allranks.causes.cause import Blames, Role, Sign

NETWORK = [cause for cause in all_causes() if cause.id.startswith("AR2")]

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:799] "
MESH = "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] "
NCCL = "node5:240:240 [6] misc/socket.cc:533 NCCL WARN "
C10D = "[W1121 09:34:34.642965573 socket.cpp:764] [c10d] The client socket has "


def read(line: str) -> list[tuple[str, Sign, dict[str, str]]]:
    """Return what the line is to each network cause whose sign it fits, the strongest first."""
    found = []
    for cause in NETWORK:
        for sign in cause.signs:
            match = re.search(sign.pattern, line)
            if match and "log" in sign.where:
                groups = {name: text for name, text in match.groupdict().items() if text and name != "error"}
                found.append((cause.name, sign, groups))
    return sorted(found, key=lambda each: each[1].role)


@pytest.mark.parametrize(
    ("line", "name", "groups"),
    [
        (C10D + "timed out after 60000ms while trying to connect to (node01, 29500).", "master-unreachable",
         {"node": "node01", "port": "29500"}),
        ("The client socket has timed out after 60s while trying to connect to 198.51.100.1:1234",
         "master-unreachable", {"address": "198.51.100.1", "port": "1234"}),
        (C10D + "timed out after 900s while trying to connect to (fd00:1148::7, 29500).", "master-unreachable",
         {"address": "fd00:1148::7", "port": "29500"}),
        (C10D + "failed to connect to [gpu-01.cluster]:29500 (errno: 110 - Connection timed out).",
         "master-unreachable", {"node": "gpu-01.cluster", "port": "29500"}),
        (C10D + "failed to connect to [::ffff:10.0.0.5]:29500 (errno: 113 - No route to host).", "master-unreachable",
         {"address": "10.0.0.5", "port": "29500"}),
        (C10D + "failed to connect to [::ffff:0.104.99.143]:47389 (errno: 110 - Connection timed out).", "master-dns",
         {"address": "0.104.99.143"}),
        (C10D + "failed to connect to any network address of (6841231, 47389).", "master-dns",
         {"node": "6841231", "port": "47389"}),
        (NCCL + "socketStartConnect: Connect to fe80::380d:bfff:fe5b:54d2%veth25f2e72<40123> failed : "
         "No route to host", "wrong-nic", {"address": "fe80::380d:bfff:fe5b:54d2%veth25f2e72"}),
        (NCCL + "ncclOsSocketPollConnect: connect to 169.254.3.1<40123> returned Connection timed out, exceeded error "
         "retry count after 35 attempts", "wrong-nic", {"address": "169.254.3.1"}),
        (GLOO + "connect [172.17.0.1]:8463: Connection refused", "wrong-nic", {"address": "172.17.0.1"}),
        (MESH + "timed out connecting: SO_ERROR: Connection refused, remote=[172.17.0.1]:34567", "wrong-nic",
         {"address": "172.17.0.1"}),
        (GLOO + "connect [127.0.1.1]:3496: Connection refused", "loopback-hostname", {"address": "127.0.1.1"}),
        (NCCL + "socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno 115(Operation now "
         "in progress)", "firewall-port", {"peer": "10.0.0.4", "port": "56849"}),
        (NCCL + "socketStartConnect: connect to 10.0.0.4<56849> returned No route to host, exceeded error retry "
         "count after 35 attempts", "firewall-port", {"peer": "10.0.0.4", "port": "56849"}),
        ("[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in "
         "use).", "port-in-use", {"port": "29500"}),
        ("device.cc:84] ifa != nullptr. Unable to find address for: ens99f1", "nic-not-found",
         {"interface": "ens99f1"}),
        ("Nov 21 10:00:01 n7 kernel: mlx5_core 0000:3b:00.1 ens1f1np1: Link down", "link-down",
         {"interface": "ens1f1np1"}),
        (GLOO + "Read error [10.1.3.122]:42916: Connection reset by peer", "peer-connection-lost",
         {"peer": "10.1.3.122", "port": "42916"}),
        (NCCL + "Net : Connection closed by remote peer a100-22.pcluster<47861>", "peer-connection-lost",
         {"peer": "a100-22.pcluster", "port": "47861"}),
    ],
)  # fmt: skip
def test_the_strongest_reading_of_a_line_names(line: str, name: str, groups: dict[str, str]) -> None:
    found = read(line)
    best = list(takewhile(lambda each: each[1].role == found[0][1].role, found))
    assert (name, groups) in [(cause, named) for cause, _, named in best]
    assert {cause for cause, _, _ in best} == {name}


@pytest.mark.parametrize(
    "line",
    [
        "[W socket.cpp:426] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family "
        "not supported by protocol).",
        C10D + "failed to connect to [localhost]:29500 (errno: 99 - Cannot assign requested address).",
        "[W socket.cpp:697] [c10d] The IPv6 network addresses of (10.0.0.1, 29500) cannot be retrieved (gai error: -9 "
        "- Address family for hostname not supported).",
        "[W1121 09:34:36.623191250 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host n1:29555 - "
        "retrying (try=0, timeout=3000ms, delay=3569ms): recv failed",
        "[W926 21:34:49.000000000 socket.cpp:697] [c10d] The client socket has failed to connect to "
        "[kubernetes.docker.internal]:50656 (system error: 10049 - The requested address is not valid in its "
        "context.).",
        "worker-3:21:21 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
        "ip-10:14605:14673 [0] NCCL INFO Bootstrap : Using [0]ens5:172.31.33.37<0> "
        "[1]veth75fa783:fe80::14ad%veth75fa783<0>",
        "ip-10:14605:14673 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>",
        "n1:21:99 [0] NCCL INFO socketPollConnect: connect to 10.0.0.4<40123> returned Connection refused, "
        "retrying (1/34) after sleep for 100 msec",
        "n1:21:99 [0] NCCL INFO Call to connect returned Connection refused, retrying",
        "n1:21:99 [0] NCCL INFO [Service thread] Connection closed by localRank 5",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "huggingface_hub.errors.LocalEntryNotFoundError: [Errno 101] Network is unreachable",
    ],
)
def test_what_healthy_jobs_say_proves_nothing(line: str) -> None:
    assert [cause for cause, sign, _ in read(line) if sign.role != Role.CONTEXT] == []


def test_who_lost_a_connection_does_not_accuse_itself() -> None:
    lost = next(cause for cause in NETWORK if cause.name == "peer-connection-lost")
    assert {sign.role for sign in lost.signs} == {Role.VICTIM}
    assert Blames.SPEAKER not in {sign.blames for sign in lost.signs}


@pytest.mark.parametrize("cause", NETWORK, ids=lambda cause: cause.id)
def test_who_names_or_blames_a_peer_has_a_group_for_it(cause: type) -> None:
    for sign in cause.signs:  # type: ignore[attr-defined]
        groups = set(re.compile(sign.pattern).groupindex)
        assert sign.blames != Blames.PEER or "peer" in groups, sign
        assert sign.blames != Blames.NAMED or groups & {"node", "address", "interface", "port"}, sign
