"""Who leads, who follows, and what a node says that finds no leader: whole entries over loopback."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import re
import shlex
import socket
import stat
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from allranks.files.folder import Folder
from allranks.host.node import NodeFacts
from allranks.model.card import Facts, Interface
from allranks.model.cluster import GuardTable
from allranks.model.errors import AllranksError, NodeFaultError, StoppedBySignal, UsageError
from allranks.model.finding import Verdict
from allranks.model.world import Launcher
from allranks.preflight.applicant import Applicant, NodePlan
from allranks.preflight.called import Called, Rendezvous
from allranks.preflight.datapath import DataPath
from allranks.preflight.itself import explain
from allranks.preflight.node_entry import Entry
from allranks.preflight.rollcall import stop
from allranks.report.rundir import RunDir
from allranks.wire.leader_port import ANNOUNCEMENT, Announcement, Hint
from allranks.wire.protocol import Goodbye
from conftest import allranks_command, clean_env, free_port, wait_until

PATIENCE_S = 30


def applicant(root: Path, index: int | None = 0, num_nodes: int = 3, **more: object) -> Applicant:
    host = f"node{(index or 0) + 1:02d}"
    address = f"127.0.0.{(index or 0) + 2}"
    lo = Interface("lo", ("127.0.0.1", address), is_up=True, kind="loopback")
    fields = {
        "job": "4711",
        "launcher": Launcher.SLURM,
        "attempt": 0,
        "facts": NodeFacts(host=host, interfaces=(lo,), num_gpus=0, num_cpus=1),
        "node_index": index,
        "num_nodes": num_nodes,
        "min_nodes": num_nodes,
        "node_names": tuple(f"node{number + 1:02d}" for number in range(num_nodes)),
        "port": 0,
        "data_path": DataPath("lo", address, "", ""),
        "guard": GuardTable(join_s=PATIENCE_S),
    }
    own = {
        "shares_run_dir": True,
        "run_dir": RunDir(root, "4711"),
        "env": {},
        "card_facts": lambda: Facts(host_name=host, boot_id=host, interfaces=(lo,)),
        "check_signals": lambda: None,
    }
    plan = NodePlan(**(fields | {name: value for name, value in more.items() if name not in own}))
    return Applicant(plan=plan, **{name: more.get(name, value) for name, value in own.items()})


class Node(threading.Thread):
    """One node's way through the roll call; a leader gives everybody its verdict."""

    def __init__(self, mine: Applicant) -> None:
        super().__init__(daemon=True)
        self.mine = mine
        self.came: Called | Rendezvous | Goodbye | None = None
        self.verdict: Verdict | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with Entry(self.mine) as entry:
                self.came = entry.take_part()
        except (AllranksError, OSError) as exc:
            self.error = exc
            return
        if isinstance(self.came, Called):
            self.verdict = self.came.verdict
            stop(self.came.peers, self.verdict, group=self.came.group)
            self.came.listener.close()
            if self.came.acceptor is not None:
                self.came.acceptor.close()
        else:
            assert isinstance(self.came, Goodbye)
            self.verdict = self.came.verdict


def hold(*nodes: Node) -> None:
    for node in nodes:
        node.join(PATIENCE_S)
        assert not node.is_alive()


def test_three_nodes_meet_by_the_announcement(tmp_path):
    nodes = [Node(applicant(tmp_path, index)) for index in (2, 1, 0)]
    hold(*nodes)
    assert [node.error for node in nodes] == [None] * 3
    assert [type(node.came) for node in nodes] == [Goodbye, Goodbye, Called]
    assert nodes[0].verdict == nodes[1].verdict == nodes[2].verdict
    assert nodes[2].verdict.findings == ()
    called = nodes[2].came
    assert called.judgement.is_go
    assert called.store_address == "127.0.0.2"
    assert sorted(called.cards) == [0, 1, 2]
    assert called.cards[1].came_by is not None


def test_what_the_run_directory_holds_afterwards(tmp_path):
    hold(*(Node(applicant(tmp_path, index, 2)) for index in (0, 1)))
    job = tmp_path / "4711"
    announced = json.loads((job / "leader.json").read_text())
    assert announced["addresses"] == ["127.0.0.2"]
    assert 0 < announced["side_port"] != announced["port"]
    assert stat.S_IMODE((job / "secret").stat().st_mode) == 0o600
    seen = json.loads((job / "attempt_0" / "roll_call.json").read_text())
    assert len(seen["results"]) == 2
    assert seen["cards"]["1"]["facts"]["places"][0]["nonce"] == (job / ".nonce").read_text()
    secret = (job / "secret").read_text()
    texts = [path.read_text() for path in job.rglob("*") if path.is_file() and path.name != "secret"]
    assert not [text for text in texts if secret in text]


class Stuck(RunDir):
    """Its file server answers who writes events once `answers` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "4711")
        self.answers = threading.Event()

    def hold_attempt(self, *, make: bool = True) -> Folder:
        if threading.current_thread().name == "allranks-events":
            self.answers.wait()
        return super().hold_attempt(make=make)


def test_a_file_server_that_hangs_delays_no_roll_call(tmp_path):
    began_s = time.monotonic()
    nodes = [Node(applicant(tmp_path, index, run_dir=Stuck(tmp_path))) for index in range(3)]
    hold(*nodes)
    assert time.monotonic() - began_s < 15
    assert [node.error for node in nodes] == [None] * 3
    stuck = nodes[0].mine.run_dir
    events = stuck.attempt_path / "events.jsonl"
    assert not events.exists()
    stuck.answers.set()
    wait_until(lambda: events.exists() and events.read_text().count('"event": "joined"') == 2, "two joins")


def test_a_leader_that_may_open_too_few_files_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("allranks.preflight.node_entry.raise_open_files", lambda _: 1024)
    guard = GuardTable(join_s=0.3)
    hold(Node(applicant(tmp_path, 0, 512, num_workers=8, guard=guard)))
    assert (
        "node01 may open 1024 files, the leader of 512 nodes needs up to 5376; raise the hard limit (ulimit -Hn; for "
        "slurmd: LimitNOFILE=131072)"
    ) in capfd.readouterr().err


def test_no_file_descriptor_is_left(tmp_path):
    hold(*(Node(applicant(tmp_path / "warm", index, 2)) for index in (0, 1)))
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    hold(*(Node(applicant(tmp_path / "again", index, 3)) for index in (0, 1, 2)))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


def test_one_node_alone_is_only_judged(tmp_path):
    (node,) = [Node(applicant(tmp_path, 0, 1))]
    hold(node)
    assert isinstance(node.came, Called)
    assert node.came.judgement.is_go
    assert node.came.peers == {}
    assert not (tmp_path / "4711" / "leader.json").exists()


def test_one_node_alone_with_a_problem_says_so(tmp_path):
    with (
        pytest.raises(UsageError, match="no such script"),
        Entry(applicant(tmp_path, 0, 1, problem=UsageError("train.py: no such script"))) as entry,
    ):
        entry.take_part()


ETH_DOWN = Interface("eth0", ("10.0.0.1",), is_up=False)
LO_UP, LO_DOWN = (Interface("lo", ("127.0.0.1",), is_up=is_up, kind="loopback") for is_up in (True, False))


@pytest.mark.parametrize(
    ("lo", "address", "number", "begin", "command"),
    [
        (LO_DOWN, "127.0.0.1", errno.ENETUNREACH, "AR210 lo is down, and ", "ip link set lo up"),
        (LO_UP, "127.0.0.1", errno.EACCES, "AR217 ", "ip route get 127.0.0.1"),
        (LO_UP, "127.0.0.9", errno.EADDRNOTAVAIL, "AR217 ", "ip addr add 127.0.0.9/8"),
        (ETH_DOWN, "10.0.0.1", errno.ENETUNREACH, "AR210 eth0 is down, and ", "ip link set eth0 up"),
    ],
)
def test_a_node_that_does_not_reach_itself_says_why_and_what_to_run(lo, address, number, begin, command):
    facts = NodeFacts(host="n1", interfaces=(lo,), num_gpus=0, num_cpus=1)
    finding = explain(address, facts, OSError(number, "so (bind)")).finding
    why = f"n1 cannot connect to its own address {address}: {os.strerror(number).lower()}"
    assert f"{finding.cause_id} {finding.message}" == begin + why
    assert command in finding.fix


@pytest.mark.parametrize(("address", "is_reached"), [("127.0.0.1", True), ("192.0.2.7", False)])
def test_a_node_tries_its_own_address_before_it_begins(tmp_path, address, is_reached):
    alone = applicant(tmp_path, 0, 1, data_path=DataPath("lo", address, "", ""))
    node = Node(alone)
    hold(node)
    assert (node.error is None) == is_reached
    if not is_reached:
        assert node.error.finding.cause == "AR217 local-connect-error"
        hold(ignores := Node(applicant(tmp_path, 0, 1, data_path=alone.plan.data_path, ignored=frozenset({"AR217"}))))
        assert ignores.error is None


def test_a_node_that_does_not_reach_itself_is_everybodys_verdict(tmp_path):
    bad = applicant(tmp_path, 1, 2, data_path=DataPath("lo", "192.0.2.7", "", ""))
    nodes = [Node(applicant(tmp_path, 0, 2)), Node(bad)]
    hold(*nodes)
    assert nodes[0].verdict == nodes[1].verdict
    (finding,) = nodes[0].verdict.findings
    assert (finding.cause, finding.node) == ("AR217 local-connect-error", "node02")


@pytest.mark.lab
@pytest.mark.parametrize(
    ("prepared", "cause"), [("true", "AR210 link-down"), ("ip link set lo up; ip addr flush lo", "AR217 local-connect")]
)
def test_a_job_in_a_namespace_without_loopback_ends_with_a_verdict_at_once(tmp_path, prepared, cause):
    (tmp_path / "train.py").write_text("")
    words = shlex.join(allranks_command("run", "--nproc-per-node", "2", "train.py"))
    began_s = time.monotonic()
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{prepared}; exec {words}"],
        cwd=tmp_path, env=clean_env(os.environ), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 75
    assert cause in done.stderr
    assert time.monotonic() - began_s < 10


def test_a_problem_of_one_node_is_everybodys_verdict(tmp_path):
    bad = applicant(tmp_path, 1, 3, problem=UsageError("train.py: no such script"))
    nodes = [Node(applicant(tmp_path, 0)), Node(bad), Node(applicant(tmp_path, 2))]
    hold(*nodes)
    assert {node.verdict.exit_code for node in nodes} == {2}
    (finding,) = nodes[1].verdict.findings
    assert (finding.cause, finding.node, finding.message) == (
        "AR512 node-cannot-start",
        "node02",
        "train.py: no such script",
    )
    assert nodes[0].verdict == nodes[1].verdict == nodes[2].verdict


def test_a_report_that_is_too_long_to_be_sent_is_everybodys_verdict(tmp_path):
    long = applicant(tmp_path, 1, 2, card_facts=lambda: Facts(environment={"NCCL_HOSTID": "x" * 3_000_000}))
    nodes = [Node(applicant(tmp_path, 0, 2)), Node(long)]
    hold(*nodes)
    (finding,) = nodes[0].verdict.findings
    assert (finding.cause, finding.node, nodes[0].verdict.exit_code) == ("AR512 node-cannot-start", "node02", 78)
    assert re.fullmatch(r"the node report is invalid: it has 300\d{4} bytes, more than 516096", finding.message)
    assert nodes[0].verdict == nodes[1].verdict


def by_endpoint(
    root: Path, port: int, *, index: int | None = None, host: str = "127.0.0.1", **more: object
) -> Applicant:
    return applicant(
        root / f"own{index}{time.monotonic_ns()}",
        index,
        2,
        attempt=None,
        launcher=Launcher.NONE,
        node_names=(),
        port=port,
        endpoint=Hint(host, port, "--rdzv-endpoint"),
        **({"rdzv_id": "exp 7"} | more),
    )


def test_of_two_agents_on_the_endpoints_machine_one_leads(tmp_path):
    port = free_port()
    nodes = [Node(by_endpoint(tmp_path, port)) for _ in range(2)]
    hold(*nodes)
    assert [node.error for node in nodes] == [None, None]
    assert {type(node.came) for node in nodes} == {Called, Goodbye}
    assert nodes[0].verdict == nodes[1].verdict


def test_an_open_group_is_said_to_be_open(tmp_path, capfd):
    port = free_port()
    hold(*(Node(by_endpoint(tmp_path, port, index=index, rdzv_id=None)) for index in (0, 1)))
    said = capfd.readouterr().err  # the port is another one where somebody has taken it meanwhile
    assert re.search(r"reaches port \d+ can join; protect the group with --rdzv-id or \$ALLRANKS_SECRET$", said, re.M)


def test_agents_of_another_group_are_not_let_in(tmp_path):
    port = free_port()
    leader = Node(by_endpoint(tmp_path, port, index=0, guard=GuardTable(join_s=2.0)))
    other = Node(by_endpoint(tmp_path, port, index=1, rdzv_id="another"))
    hold(leader, other)
    assert "does not know this job's secret" in str(other.error)
    assert [finding.cause_id for finding in leader.verdict.findings] == ["AR001", "AR406"]


class Wire(threading.Thread):
    """Listens before the leader, hands everything on, and keeps every byte of both directions."""

    def __init__(self, leader_port: int) -> None:
        super().__init__(daemon=True)
        self.leader_port = leader_port
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.server.getsockname()[1])
        self.heard = bytearray()
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self.start()

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
        self.join(PATIENCE_S)
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(PATIENCE_S)
        for sock in (self.server, *self.sockets):
            sock.close()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.leader_port), timeout=PATIENCE_S)
                except OSError:
                    near.close()  # the leader is not there yet: it is looked for again
                    continue
                self.sockets += (near, far)
                for one, other in ((near, far), (far, near)):
                    thread = threading.Thread(target=self.hand_on, args=(one, other), daemon=True)
                    self.threads.append(thread)
                    thread.start()

    def hand_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.heard += data
                other.sendall(data)
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def test_a_group_s_key_is_nowhere_in_what_its_agents_say(tmp_path):
    key = "swordfish tulip 7"
    port = free_port()
    wire = Wire(port)
    named = {"rdzv_id": key, "job": key, "run_dir": RunDir(tmp_path, key), "shares_run_dir": False}
    nodes = [
        Node(by_endpoint(tmp_path, port, index=0, **named)),
        Node(by_endpoint(tmp_path, wire.port, index=1, **named)),
    ]
    try:
        hold(*nodes)
    finally:
        wire.close()
    assert [node.error for node in nodes] == [None, None]
    assert nodes[0].verdict == nodes[1].verdict
    assert nodes[1].verdict.job == key
    heard = bytes(wire.heard)
    for match in re.finditer(b"x\x01", heard):  # what is compressed: a Join, and its card
        with contextlib.suppress(zlib.error):
            heard += zlib.decompressobj().decompress(heard[match.start() :])
    # The whole of it was heard: Hello, Join, Welcome, the pair tests' order and results, the verdict.
    assert all(tag in heard for tag in (b"hello", b"join", b"welcome", b"test", b"tested", b"goodbye"))
    for part in (key, "swordfish", "tulip"):
        assert part.encode() not in heard
        assert part.encode().hex().encode() not in heard


def test_agents_with_another_rdzv_id_do_not_meet(tmp_path):
    port = free_port()
    guard = GuardTable(join_s=2.0)
    nodes = [
        Node(
            by_endpoint(
                tmp_path, port, index=index, guard=guard, rdzv_id=name, job=name, run_dir=RunDir(tmp_path, name)
            )
        )
        for index, name in enumerate(["exp 7", "exp 8"])
    ]
    hold(*nodes)
    assert isinstance(nodes[1].error, NodeFaultError)
    assert str(nodes[1].error).startswith("no leader of job exp 8 within 2 s; ")
    assert [finding.cause_id for finding in nodes[0].verdict.findings] == ["AR001"]


def test_a_missing_leader_is_named(tmp_path):
    with (
        pytest.raises(NodeFaultError) as given_up,
        Entry(applicant(tmp_path, 1, guard=GuardTable(join_s=0.3))) as entry,
    ):
        entry.take_part()
    finding = given_up.value.finding
    assert (finding.cause, finding.node) == ("AR001 node-silent", "node01")
    assert "no leader answered within" in finding.message


@pytest.mark.parametrize(
    ("host", "cause", "node", "seen"),
    [
        ("127.0.0.1", "AR001 node-silent", "127.0.0.1", "connection refused"),
        ("a..b", "AR202 master-dns", "node02", "a..b does not resolve on this node: "),
    ],
)
def test_a_leader_that_nobody_finds_at_the_address_that_was_given_is_told_with_it(tmp_path, host, cause, node, seen):
    port = free_port()
    given = by_endpoint(tmp_path, port, index=1, host=host, guard=GuardTable(join_s=0.5))
    with pytest.raises(NodeFaultError) as given_up, Entry(given) as entry:
        entry.take_part()
    finding = given_up.value.finding
    assert (finding.cause, finding.node) == (cause, node)
    assert "no leader answered within 0 s" in finding.message
    (evidence,) = finding.evidence
    assert evidence.seen.startswith(f"{host}:{port} (--rdzv-endpoint): {seen}")


def test_where_the_leader_of_the_last_start_listened_says_nothing_of_this_one(tmp_path):
    run_dir = RunDir(tmp_path, "4711")
    run_dir.create()
    run_dir.create_attempt(None)
    over = Announcement(job="4711", attempt=0, host="node01", addresses=("127.0.0.9",), port=free_port())
    (run_dir.path / ANNOUNCEMENT).write_bytes(msgspec.json.encode(over))
    (run_dir.path / "attempt_0/events.jsonl").write_text('{"time_s": 1.5, "event": "ended", "exit_code": 0}\n')
    given = by_endpoint(tmp_path, free_port(), index=1, guard=GuardTable(join_s=0.3), job="4711", run_dir=run_dir)
    with pytest.raises(NodeFaultError) as given_up, Entry(given) as entry:
        entry.take_part()
    assert given_up.value.finding.cause == "AR001 node-silent"


def test_a_leader_that_is_announced_and_not_reached_is_another_matter(tmp_path):
    RunDir(tmp_path, "4711").create()
    there = Announcement(job="4711", attempt=0, host="node01", addresses=("127.0.0.9",), port=free_port())
    (tmp_path / "4711" / ANNOUNCEMENT).write_bytes(msgspec.json.encode(there))
    with (
        pytest.raises(NodeFaultError) as given_up,
        Entry(applicant(tmp_path, 1, guard=GuardTable(join_s=0.3))) as entry,
    ):
        entry.take_part()
    finding = given_up.value.finding
    assert finding.cause == "AR201 master-unreachable"
    assert finding.message == "the leader listens at 127.0.0.9, but node02 reaches none of these addresses"


def stop_after(delay_s: float) -> Callable[[], None]:
    due_s = time.monotonic() + delay_s

    def check() -> None:
        if time.monotonic() > due_s:
            raise StoppedBySignal(2)

    return check


def list_open() -> list[str]:
    """What this process has open, without the directories and files without a name that a run holds."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and not link.is_dir()]
    return sorted(name for link in links if not (name := str(link.readlink())).endswith(" (deleted)"))


@pytest.mark.parametrize("index", [0, 1])
def test_ctrl_c_ends_the_wait_and_leaves_no_socket(tmp_path, index):
    gc.collect()
    before = list_open()
    mine = applicant(tmp_path, index, check_signals=stop_after(0.3))
    with pytest.raises(StoppedBySignal), Entry(mine) as entry:
        entry.take_part()
    gc.collect()
    assert list_open() == before


MUNGE = """#!/bin/sh
echo "MUNGE:$(cat | tr -d '\\n'):"
"""
UNMUNGE = """#!/bin/sh
text=$(cat)
text=${text#MUNGE:}
printf 'STATUS:           Success (0)\\nUID:              someone (%s)\\n\\n%s\\n' "$FAKE_UID" "${text%:}"
"""


@pytest.mark.parametrize(("uid", "is_let_in"), [(os.geteuid(), True), (4242, False)])
def test_munge_stands_for_a_key_that_a_node_does_not_see(tmp_path, monkeypatch, uid, is_let_in):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("munge", MUNGE), ("unmunge", UNMUNGE)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_UID", str(uid))
    port = free_port()
    guess = (Hint("127.0.0.1", port, "first node of the step"),)
    guard = GuardTable(join_s=PATIENCE_S if is_let_in else 2.0)
    leader = Node(applicant(tmp_path / "here", 0, 2, port=port, guard=guard))
    other = Node(applicant(tmp_path / "elsewhere", 1, 2, guesses=guess, guard=guard))
    hold(leader, other)
    causes = [finding.cause_id for finding in leader.verdict.findings]
    if is_let_in:
        assert other.error is None
        assert "AR001" not in causes
    else:
        assert "does not know this job's secret" in str(other.error)
        assert causes == ["AR001", "AR406"]
    with contextlib.suppress(OSError):
        assert "secret" not in os.listdir(tmp_path / "elsewhere" / "4711")  # noqa: PTH208
