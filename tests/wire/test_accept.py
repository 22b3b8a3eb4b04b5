"""Peers that are not known yet: what they may cost the leader, and that they never keep the job's agents out."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from allranks.wire import accept
from allranks.wire.connection import LENGTH, MAX_JOIN_BYTES, encode_frame
from allranks.wire.protocol import Hello, Message, Refused, Welcome
from conftest import wait_until
from wire_leader import PATIENCE_S, Leader, Peer, join_after


def join(peer: Peer) -> Message | None:
    """Join with the right key; the answer."""
    peer.sock.sendall(encode_frame(join_after(peer.read_hello())))
    return peer.read()


def test_a_peer_that_is_not_known_may_send_only_as_much_as_a_join():
    with Leader() as leader, Peer(leader.port) as peer:
        peer.read_hello()
        peer.sock.sendall(LENGTH.pack(MAX_JOIN_BYTES + 1))
        answer = peer.read()
        assert isinstance(answer, Refused)
        assert answer.reason.startswith("it sent a frame of 524289 bytes, more than 524288")


def test_many_connections_of_one_address_keep_no_agent_out(monkeypatch):
    monkeypatch.setattr(accept, "MAX_PENDING_PER_ADDRESS", 8)
    monkeypatch.setattr(accept, "MAX_PENDING", 12)
    with Leader() as leader, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(Peer(leader.port)) for _ in range(20)]
        wait_until(lambda: leader.said, "the ninth connection")
        crowded = "127.0.0.1 has 8 connections that did not identify themselves; the oldest are closed"
        assert leader.said == [crowded]
        assert all(isinstance(peer.read(), Hello) for peer in silent)
        silent[0].sock.settimeout(PATIENCE_S)
        assert silent[0].read() is None  # closed for one that came later
        for address in ("127.0.0.1", "127.0.0.2"):  # also one on the same machine
            with Peer(leader.port, own_address=address) as agent:
                assert isinstance(join(agent), Welcome)
        assert leader.said == [crowded]
        assert leader.rejected == []  # the last silent ones still hold their places


def test_who_has_sent_its_join_does_not_lose_its_place_to_later_ones(monkeypatch):
    monkeypatch.setattr(accept, "MAX_PENDING_PER_ADDRESS", 2)
    with Leader() as leader, contextlib.ExitStack() as stack:
        agents = [stack.enter_context(Peer(leader.port)) for _ in range(2)]
        hellos = [agent.read_hello() for agent in agents]
        with leader.paused():
            for _ in range(4):  # they are accepted before the agents are heard
                stack.enter_context(Peer(leader.port))
            for agent, hello in zip(agents, hellos, strict=True):
                agent.sock.sendall(encode_frame(join_after(hello)))
        assert all(isinstance(agent.read(), Welcome) for agent in agents)


def test_what_unknown_peers_send_in_all_has_a_limit(monkeypatch):
    monkeypatch.setattr(accept, "MAX_UNPROVEN_BYTES", 300_000)
    with Leader() as leader, Peer(leader.port) as small, Peer(leader.port) as large, Peer(leader.port) as agent:
        for peer, num_bytes in ((large, 200_000), (small, 150_000)):
            peer.read_hello()
            peer.sock.sendall(LENGTH.pack(MAX_JOIN_BYTES) + bytes(num_bytes))
        answer = large.read()
        assert isinstance(answer, Refused)
        assert answer.reason == "it sent 200004 bytes of an unfinished message"
        assert isinstance(join(agent), Welcome)


def test_where_all_places_are_taken_the_most_crowded_address_loses_one(monkeypatch):
    monkeypatch.setattr(accept, "MAX_PENDING", 6)
    monkeypatch.setattr(accept, "FAIR_PENDING", 1)
    with Leader() as leader, contextlib.ExitStack() as stack:
        own = [stack.enter_context(Peer(leader.port, own_address=f"127.0.0.{2 + n // 3}")) for n in range(6)]
        for peer in own:
            peer.read_hello()
        alone = stack.enter_context(Peer(leader.port, own_address="127.0.0.9"))
        assert isinstance(alone.read(), Hello)
        assert own[0].read() is None
        with Peer(leader.port) as agent:
            assert isinstance(join(agent), Welcome)


def test_more_peers_than_the_leader_takes_wait_in_the_kernel_s_queue(monkeypatch):
    monkeypatch.setattr(accept, "MAX_PENDING", 4)
    monkeypatch.setattr(accept, "HANDSHAKE_S", 2.0 * PATIENCE_S)  # else their time may be up first, on a busy machine
    with Leader() as leader, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(Peer(leader.port, own_address=f"127.0.0.{2 + i}")) for i in range(4)]
        assert all(isinstance(peer.read(), Hello) for peer in silent)
        with Peer(leader.port) as agent:
            agent.sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                agent.read()
            silent[0].sock.close()
            agent.sock.settimeout(PATIENCE_S)
            assert isinstance(join(agent), Welcome)
            assert not any("did not identify itself" in each for each in leader.rejected)


NO_FILES = """
import resource, socket, sys, time
sys.path[:0] = {path!r}
from wire_leader import Leader
with Leader() as leader, socket.socket() as sock:
    sock.settimeout(30)
    while not leader.num_turns:
        time.sleep(0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those of a shell
    sock.connect(("127.0.0.1", leader.port))
    before = leader.num_turns
    time.sleep(1.0)
    num_turns = leader.num_turns - before
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(num_turns, len(sock.recv(1)), *leader.said)
"""


def test_without_a_free_descriptor_the_leader_neither_spins_nor_forgets_who_comes():
    script = NO_FILES.format(path=[str(Path(__file__).parent.parent)])
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    num_turns, num_read, said = ran.stdout.split(maxsplit=2)
    assert int(num_turns) < 100  # 50 where nothing happens
    assert num_read == "1"  # of the Hello
    assert said == (
        "the leader cannot accept agents: Too many open files; it tries again every 0.5 s; in the batch script: "
        "ulimit -n $(ulimit -Hn)\n"
    )


@pytest.fixture
def munge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An `unmunge` that answers when the file that is returned appears."""
    answer = tmp_path / "answer"
    for name, text in (("munge", "cat"), ("unmunge", f"while [ ! -e {answer} ]; do sleep 0.05; done")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    yield answer
    answer.touch()


def test_a_credential_that_takes_its_time_keeps_no_agent_waiting(munge):
    with Leader() as leader, Peer(leader.port) as stranger, Peer(leader.port, own_address="127.0.0.2") as agent:
        forged = msgspec.structs.replace(join_after(stranger.read_hello()), proof=b"MUNGE:forged:")
        stranger.sock.sendall(encode_frame(forged))
        time.sleep(0.2)  # it is being checked
        assert isinstance(join(agent), Welcome)
        munge.touch()
        answer = stranger.read()
        assert isinstance(answer, Refused)
        assert answer.reason.startswith("it does not know this job's secret")


def test_a_credential_that_is_never_checked_has_a_deadline(munge, monkeypatch):
    monkeypatch.setattr(accept, "LEADERS_MUNGE_S", 0.2)
    monkeypatch.setattr(accept, "HANDSHAKE_S", 0.3)
    with Leader() as leader, Peer(leader.port) as stranger:
        forged = msgspec.structs.replace(join_after(stranger.read_hello()), proof=b"MUNGE:forged:")
        stranger.sock.sendall(encode_frame(forged))
        answer = stranger.read()
        assert isinstance(answer, Refused)
        assert answer.reason.startswith("munge has not checked its credential within")
        assert not answer.is_final
