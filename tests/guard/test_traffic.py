"""What an agent makes of the bytes of its interfaces and of the kernel's connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.guard.node.traffic import Slice, TrafficMeter, summarize
from allranks.host.sockets import TcpConnection
from allranks.model.card import Interface

OWN, OTHER = "192.168.20.11", "192.168.20.12"
NICS = [
    Interface("lo", ("127.0.0.1",), is_up=True, kind="loopback"),
    Interface("eth0", (OWN,), is_up=True, speed_mbit_s=1000),
    Interface("eth1", ("192.168.21.11",), is_up=True, networks=("192.168.21.0/24",)),
]


class Machine:
    """A tree with interfaces and with one process, rank 3."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/4711/fd").mkdir(parents=True)
        for nic in NICS:
            self.count(nic.name, 0, 0)

    def count(self, name: str, sent: int, received: int) -> None:
        folder = self.root / "sys/class/net" / name / "statistics"
        folder.mkdir(parents=True, exist_ok=True)
        for file, number in {"tx_bytes": sent, "rx_bytes": received}.items():
            (folder / file).write_text(f"{number}\n")

    def open(self, inode: int) -> None:
        (self.root / f"proc/4711/fd/{inode}").symlink_to(f"socket:[{inode}]")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def connection(inode: int = 7, *, acked: int = 0, own: str = OWN, peer: str = OTHER, **more: int) -> TcpConnection:
    return TcpConnection(
        own_address=own, own_port=40000 + inode, peer_address=peer, peer_port=50000, unacked_bytes=0, is_pending=False,
        retransmits=0, acked_bytes=acked, inode=inode, **more,
    )  # fmt: skip


def test_slices_of_50_ms_show_that_a_link_is_full_a_third_of_the_time(machine: Machine) -> None:
    traffic, sent = TrafficMeter(OWN, interfaces=NICS, root=machine.root), 0
    for turn in range(46):
        traffic.turn(turn * 0.05)
        traffic.turn(turn * 0.05 + 0.01)  # an event woke the agent: no slice of its own
        sent += 6_125_000 if turn % 3 == 0 else 0  # 980 Mbit/s
        if turn % 3 == 0:
            machine.count("eth0", sent, sent // 2)
    traffic.look(2.3, [], {})
    (seen,) = traffic.interfaces
    assert (seen.name, seen.limit_mbit_s, seen.is_measured) == ("eth0", 1000.0, False)
    assert seen.sent_mbit_s == pytest.approx(980 / 3, abs=1)
    assert seen.received_mbit_s == pytest.approx(980 / 6, abs=2)
    assert seen.busy_share == pytest.approx(1 / 3, abs=0.01)
    assert seen.busy_mbit_s == pytest.approx(980, abs=1)
    traffic.close()


FULL, HALF, REST = (Slice(0.05, round(0.05 * rate * 1e6 / 8), 0) for rate in (500, 250, 0))


@pytest.mark.parametrize(
    ("slices", "speed", "rates", "limit", "busy_share"),
    [
        ([FULL, REST] * 50, 500, [], 500, 0.5),
        ([FULL, REST] * 50, 10_000, [480] * 9, 10_000, 0.0),  # what it reports counts
        # Without a speed: what connections reach.
        ([FULL, REST] * 50, None, [480] * 9, 500, 0.5),
        ([FULL, REST] * 50, None, [250] * 9, 500, 0.5),  # two connections share the link
        ([HALF, REST] * 50, None, [5000] * 9, 5000, 0.0),  # they could be faster: the ranks are slow themselves
        ([HALF] * 50 + [FULL], None, [250] * 9, 375, 1 / 51),  # one burst is not what it carries
        ([FULL, REST] * 50, None, [480] * 4, None, 0.0),  # too few to know
        ([FULL, REST] * 50, None, [], None, 0.0),
        ([REST] * 50, 500, [], 500, 0.0),
        ([Slice(0.05, 0, FULL.sent_bytes)] * 50, 500, [], 500, 1.0),  # received
    ],
)  # fmt: skip
def test_an_interface_is_busy_near_its_speed_or_near_what_its_connections_reach(
    slices: list[Slice], speed: int | None, rates: list[float], limit: float | None, busy_share: float
) -> None:
    seen = summarize("eth0", slices, speed=speed, rates=rates)
    assert seen is not None
    assert (seen.limit_mbit_s, seen.is_measured) == (limit, limit is not None and speed is None)
    assert seen.busy_share == pytest.approx(busy_share, abs=0.001)
    assert summarize("eth0", [], speed=speed) is None


def test_what_ranks_send_again_is_counted_over_all_their_connections(machine: Machine) -> None:
    traffic, pids, now = TrafficMeter(OWN, interfaces=NICS, root=machine.root), {3: 4711}, 100.0

    def look(*connections: TcpConnection) -> dict[int, tuple[int, ...]]:
        nonlocal now
        now += 2.0
        traffic.look(now, connections, pids)
        return {rank: tuple(sent) for rank, sent in traffic.sent.items()}

    machine.open(7)
    nfs = connection(99, segments=5000, retransmitted=50)
    local = connection(8, own="127.0.0.1", peer="127.0.0.1", segments=10**6)
    assert look(connection(7, segments=100, retransmitted=2), nfs, local) == {3: (100, 2)}
    assert look(connection(7, segments=150, retransmitted=2), nfs, local) == {3: (150, 2)}
    machine.open(9)  # a second one, while the first one ends
    assert look(connection(9, segments=40, retransmitted=1), nfs) == {3: (190, 3)}
    traffic.look(now + 0.5, [connection(9, segments=90, retransmitted=9)], pids)  # not yet
    assert traffic.sent[3] == (190, 3)
    assert look(connection(9, segments=10)) == {3: (200, 3)}  # another one between the same ports
    traffic.begin()
    assert look(connection(9, segments=10)) == {3: (10, 0)}  # the next workers'
    traffic.close()


def test_the_interfaces_are_those_that_ranks_have_connections_on(machine: Machine) -> None:
    traffic = TrafficMeter(OWN, interfaces=NICS, root=machine.root)
    machine.open(7)
    for number in range(12):
        at, acked = 10.0 + 2 * number, number << 20
        traffic.turn(at)
        moving = {"own": "192.168.21.11", "acked": acked, "delivery_bytes_s": 62_500_000}
        traffic.look(at, [connection(7, peer="192.0.2.80" if number < 2 else "192.168.21.12", **moving)], {3: 4711})
        assert len(traffic._watched) == 1 + (number >= 2)  # a server elsewhere is no neighbor
    assert [(each.name, each.limit_mbit_s, each.is_measured) for each in traffic.interfaces] == [
        ("eth0", 1000.0, False),
        ("eth1", 500.0, True),
    ]
    traffic.close()
    alone = TrafficMeter("127.0.0.1", interfaces=NICS, root=machine.root)  # a job on one machine
    alone.turn(1.0)
    alone.look(2.0, [], {})
    assert alone.interfaces == ()


def test_an_interface_that_is_gone_or_of_another_machine_is_not_told(machine: Machine) -> None:
    traffic = TrafficMeter(OWN, interfaces=NICS, root=machine.root)
    for turn in range(5):
        traffic.turn(1.0 + turn)
    traffic.look(6.0, [], {})
    assert [each.name for each in traffic.interfaces] == ["eth0"]
    (machine.root / "sys/class/net/eth0/statistics/rx_bytes").write_text("")
    traffic.turn(7.0)
    traffic.look(8.0, [], {3: 4711})
    assert (traffic.interfaces, traffic.sent) == ((), {})
    traffic.close()
    other = TrafficMeter("192.0.2.1", interfaces=NICS, root=machine.root)
    other.turn(1.0)
    other.look(1.0, [], {3: 4711})
    assert other.interfaces == ()
