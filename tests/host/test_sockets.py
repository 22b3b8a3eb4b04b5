"""What does the kernel say of connections, over netlink and in /proc, and which are stuck?"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from allranks.host.sockets import (
    SocketWatch,
    TcpConnection,
    ask_kernel,
    parse_answer,
    parse_proc_line,
    read_proc,
)

RECORDED = Path(__file__).parent / "recorded"
PROC_LINE = (
    "   1: 0B14A8C0:C350 0C14A8C0:9C40 01 00000FA0:00000000 01:0000001E 00000003  1000        0 71234 2 "
    "0000000000000000 204 4 30 10 -1"
)


def connection(**more) -> TcpConnection:
    plain = {
        "own_address": "192.168.20.11",
        "own_port": 50000,
        "peer_address": "192.168.20.12",
        "peer_port": 40000,
        "unacked_bytes": 4000,
        "is_pending": True,
        "retransmits": 2,
        "acked_bytes": 100,
    }
    return TcpConnection(**(plain | more))


OWN = {"192.168.20.11"}


def test_a_connection_is_stuck_since_its_acknowledged_bytes_stand_still():
    watch = SocketWatch()
    assert [each.stalled_s for each in watch.weigh([connection()], 10.0, addresses=OWN)] == [0.0]
    assert [each.stalled_s for each in watch.weigh([connection(retransmits=5)], 12.0, addresses=OWN)] == [2.0]
    assert [each.stalled_s for each in watch.weigh([connection(acked_bytes=101)], 13.0, addresses=OWN)] == [0.0]
    assert watch.weigh([connection(is_pending=False, acked_bytes=4100)], 14.0, addresses=OWN) == []
    assert [each.stalled_s for each in watch.weigh([connection(acked_bytes=4100)], 15.0, addresses=OWN)] == [0.0]


@pytest.mark.parametrize(
    "other",
    [
        connection(own_address="10.0.0.5"),
        connection(peer_address="192.168.20.11"),
        connection(is_pending=False),
        connection(inode=0),
    ],
)
def test_other_networks_itself_what_waits_to_be_sent_and_what_nobody_holds_do_not_count(other):
    watch = SocketWatch()
    watch.weigh([other], 10.0, addresses=OWN)
    assert watch.weigh([other], 20.0, addresses=OWN) == []


def test_without_a_count_of_acknowledged_bytes_a_timeout_must_have_come():
    watch = SocketWatch()
    young = connection(acked_bytes=None, retransmits=0)
    old = connection(acked_bytes=None, retransmits=1)
    watch.weigh([young], 10.0, addresses=OWN)
    assert watch.weigh([old], 11.0, addresses=OWN)[0].stalled_s == 0.0
    assert watch.weigh([old], 13.0, addresses=OWN)[0].stalled_s == 2.0


def test_a_line_of_proc_is_read():
    seen = parse_proc_line(PROC_LINE)
    assert seen == connection(acked_bytes=None, retransmits=3, inode=71234)


@pytest.mark.parametrize("line", ["", "sl local_address", PROC_LINE.replace(" 01 ", " 06 ", 1), "1: a:b c:d 01 x y z"])
def test_a_socket_in_another_state_or_nonsense_is_none(line):
    assert parse_proc_line(line) is None


def test_proc_is_read_for_both_families(tmp_path):
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/tcp").write_text(f"  sl  local_address ...\n{PROC_LINE}\n")
    six = PROC_LINE.replace("0B14A8C0", "0000000000000000FFFF00000B14A8C0")
    six = six.replace("0C14A8C0", "000080FE00000000000000000C000000")
    (tmp_path / "proc/net/tcp6").write_text(f"  sl  local_address ...\n{six}\n")
    assert [(each.own_address, each.peer_address) for each in read_proc(root=tmp_path)] == [
        ("192.168.20.11", "192.168.20.12"),
        ("192.168.20.11", "fe80::c"),
    ]
    assert read_proc(root=tmp_path / "nowhere") == []


def test_the_kernel_and_proc_know_the_same_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            one.send(b"x" * 1000)
            key = (*one.getsockname(), *one.getpeername())
            asked = {connection.key: connection for connection in ask_kernel()}
            read = {connection.key: connection for connection in read_proc()}
            assert asked[key].acked_bytes is not None
            assert asked[key].mss > 500
            assert not asked[key].is_pending
            assert key in read
            reverse = (*key[2:], *key[:2])
            assert (asked[reverse].unread_bytes, asked[reverse].received_bytes) == (1000, 1000)
            assert (read[reverse].unread_bytes, read[reverse].received_bytes) == (1000, None)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_socket_that_listens_tells_how_many_connections_it_has_not_accepted(family):
    with socket.create_server(("", 0), family=family, backlog=7) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(listener.getsockname()[:2]), socket.create_connection(listener.getsockname()[:2]):
            for answer in (ask_kernel(with_listening=True), read_proc(with_listening=True)):
                (own,) = [one for one in answer if one.is_listening and one.own_port == port]
                assert (own.unread_bytes, own.unacked_bytes, own.inode) == (2, 0, os.fstat(listener.fileno()).st_ino)
            for answer in (ask_kernel(), read_proc()):
                assert not any(one.is_listening for one in answer)


def test_a_recorded_answer_is_read():
    """inet_diag of Linux 6.18: a connection whose peer was cut off, 2 s after a send of 5000 bytes."""
    found: list[TcpConnection] = []
    assert not parse_answer((RECORDED / "inet_diag_stuck.bin").read_bytes(), found)
    (stuck,) = [each for each in found if each.is_pending]
    assert (stuck.own_address, stuck.peer_address, stuck.unacked_bytes) == ("10.99.0.1", "10.99.0.2", 5000)
    assert stuck.retransmits >= 2
    assert stuck.acked_bytes == 5  # the SYN counts


@pytest.mark.parametrize("data", [b"", b"\x00" * 16, b"\xff" * 64, struct.pack("=IHHII", 500, 20, 0, 0, 0)])
def test_damaged_answers_are_no_connections(data):
    found: list[TcpConnection] = []
    assert not parse_answer(data, found)
    assert found == []


def test_a_refusal_is_an_error():
    with pytest.raises(OSError, match="netlink refused"):
        parse_answer(struct.pack("=IHHIIi", 20, 2, 0, 0, 0, -1), [])


def test_the_end_is_noticed():
    assert parse_answer(struct.pack("=IHHIIi", 20, 3, 0, 0, 0, 0), [])
