"""Host names of hints: a name service that is slow, silent or wrong delays no other hint, no deadline and no signal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.model.errors import NodeFaultError, StoppedBySignal
from allranks.wire.leader_port import Hint
from allranks.wire.seek import Search
from wire_leader import CARD, KEY, PATIENCE_S, Leader

Answer = Callable[[], list[str]]


@contextlib.contextmanager
def name_service(monkeypatch: pytest.MonkeyPatch, names: dict[str, Answer]) -> Iterator[None]:
    """Answer these names in place of the machine's name service, which a test cannot slow down."""
    ask = socket.getaddrinfo

    def answer(host: str, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if host not in names:
            return ask(host, port, *args, **kwargs)
        return [each for address in names[host]() for each in ask(address, port, type=socket.SOCK_STREAM)]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", answer)
        yield


@pytest.fixture
def hang() -> Iterator[Answer]:
    """A name service that answers when the test is over."""
    is_over = threading.Event()

    def wait() -> list[str]:
        is_over.wait(PATIENCE_S)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    yield wait
    is_over.set()


def seek(*hints: Hint, deadline_s: float = PATIENCE_S, check: Callable[[], None] = lambda: None) -> str:
    """Find the leader and return how."""
    connection = Search(
        lambda: [[hint] for hint in hints],
        job="train",
        secret=lambda: KEY,
        card=CARD,
    ).wait(
        deadline_s=deadline_s,
        on_wait=lambda *_: None,
        check_signals=check,
    )
    with contextlib.closing(connection):
        return connection.peer


def test_a_hanging_lookup_delays_no_other_hint(monkeypatch, hang):
    with Leader() as leader, name_service(monkeypatch, {"node01": hang}):
        assert seek(Hint("node01", 1, "SLURM"), Hint("127.0.0.1", leader.port, "test")) == f"127.0.0.1:{leader.port}"


def test_a_hanging_lookup_ends_with_the_deadline_and_is_said(monkeypatch, hang):
    with name_service(monkeypatch, {"node01": hang}):
        began_s = time.monotonic()
        with pytest.raises(NodeFaultError) as given_up:
            seek(Hint("node01", 29500, "SLURM"), deadline_s=1.4)
        assert time.monotonic() - began_s < 45  # the lookup hangs for PATIENCE_S
        assert re.fullmatch(
            r"no leader of job train within 1 s; last try: node01:29500 \(SLURM\): the name lookup of node01 has not "
            r"answered for \d+ s; check that the first node is up and that its port is open from here",
            str(given_up.value),
        )


def test_a_hanging_lookup_delays_no_signal(monkeypatch, hang):
    began_s = time.monotonic()

    def stop() -> None:
        if time.monotonic() - began_s > 0.3:
            raise StoppedBySignal(2)

    with name_service(monkeypatch, {"node01": hang}), pytest.raises(StoppedBySignal):
        seek(Hint("node01", 29500, "SLURM"), check=stop)
    assert time.monotonic() - began_s < 45  # the lookup hangs for PATIENCE_S


def test_a_lookup_that_answers_late_counts(monkeypatch):
    def late() -> list[str]:
        time.sleep(1.0)
        return ["127.0.0.1"]

    with Leader() as leader, name_service(monkeypatch, {"node01": late}):
        assert seek(Hint("node01", leader.port, "SLURM")) == f"node01:{leader.port}"


def test_a_lookup_that_never_answers_is_begun_again(monkeypatch, hang):
    answers = [hang, lambda: ["127.0.0.1"]]
    monkeypatch.setattr("allranks.wire.seek.LOOKUP_S", 0.6)
    with Leader() as leader, name_service(monkeypatch, {"node01": lambda: answers.pop(0)()}):
        assert seek(Hint("node01", leader.port, "SLURM")) == f"node01:{leader.port}"


@pytest.mark.parametrize("addresses", [["127.0.0.9", "127.0.0.1"], ["::1", "127.0.0.1"], ["127.0.0.1", "127.0.0.9"]])
def test_all_addresses_of_a_name_are_tried(monkeypatch, addresses):
    with Leader(address="127.0.0.1") as leader, name_service(monkeypatch, {"node01": lambda: addresses}):
        assert seek(Hint("node01", leader.port, "SLURM")) == f"node01:{leader.port}"


def test_the_address_of_a_name_that_does_not_answer_is_named(monkeypatch):
    at = r"node01:1 at (127\.0\.0\.9|::1) \(SLURM\): "
    with name_service(monkeypatch, {"node01": lambda: ["127.0.0.9", "::1"]}), pytest.raises(NodeFaultError, match=at):
        seek(Hint("node01", 1, "SLURM"), deadline_s=0.3)


def test_a_name_without_an_address_is_said_beside_the_last_try():
    with pytest.raises(NodeFaultError) as given_up:
        seek(Hint("no-such-host.invalid", 29500, "SLURM"), Hint("127.0.0.1", 1, "test"), deadline_s=0.5)
    assert "127.0.0.1:1 (test): connection refused" in str(given_up.value)
    assert "no-such-host.invalid does not resolve on this node: " in str(given_up.value)


def open_files() -> set[str]:
    """What this process has open; a file of an earlier test may be closed at any time."""
    links = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing itself
            links.add(f"{link.name} {link.readlink()}")
    return links


def test_lookups_leave_no_thread_and_no_descriptor():
    before = open_files()
    with Leader() as leader:
        seek(Hint("localhost", leader.port, "test"))
    until_s = time.monotonic() + PATIENCE_S
    while any(each.name == "allranks-seek" for each in threading.enumerate()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert open_files() - before == set()


# ---- a real name service: a DNS server in a namespace of its own

DNS = """
import os, socket, struct, sys, threading, time
sys.path[:0] = {path!r}
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
def serve():
    while True:
        query, asker = server.recvfrom(512)
        name, at = [], 12
        while query[at]:
            name.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        kind = struct.unpack("!H", query[at + 1 : at + 3])[0]
        if name[0] == "silent":
            continue
        addresses = [socket.inet_aton(each) for each in {addresses!r}] if kind == 1 else []
        head = query[:2] + struct.pack("!HHHHH", 0x8180, 1, len(addresses), 0, 0)
        answers = b"".join(struct.pack("!HHHIH", 0xC00C, 1, 1, 60, 4) + each for each in addresses)
        server.sendto(head + query[12 : at + 5] + answers, asker)
threading.Thread(target=serve, daemon=True).start()
from test_names import Hint, Leader, seek
with Leader(address="127.0.0.1") as leader:
    began_s = time.monotonic()
    print(seek(Hint("silent.test", 1, "SLURM"), Hint("node01.test", leader.port, "SLURM")))
    print(time.monotonic() - began_s)
"""


@pytest.mark.lab
@pytest.mark.parametrize("addresses", [("127.0.0.9", "127.0.0.1"), ("127.0.0.1", "127.0.0.9")])
def test_a_silent_dns_server_delays_no_other_name(tmp_path, addresses):
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare")
    here = Path(__file__).parent
    script = DNS.format(path=[str(here), str(here.parent)], addresses=addresses)
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: dns\n")
    binds = [f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("resolv.conf", "nsswitch.conf")]
    shell = "\n".join(["set -e", "ip link set lo up", *binds, 'exec "$0" -c "$1"'])
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", shell, sys.executable, script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    peer, took_s = done.stdout.split()
    assert peer.startswith("node01.test:"), done.stderr
    assert float(took_s) < 5  # glibc asks a silent server again after 5 s
