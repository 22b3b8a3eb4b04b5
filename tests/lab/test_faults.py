"""Does each fault do what it says, and is the lab afterwards exactly what it was?"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from allranks.lab import hosts
from allranks.lab.faults.catalogue import FAULTS
from allranks.lab.faults.fault import Expected, FaultPlace, JobStart
from allranks.lab.faults.gpu import RECORDED, record
from allranks.lab.faults.injected import Injected, choose_where, find_fault, heal, inject, read_injected
from allranks.lab.hosts import SWITCH, run_in
from allranks.lab.lab import Lab
from allranks.lab.node_plan import Host
from allranks.model.errors import UsageError

from .conftest import SIX_NODE, Make, TestLab, unique

NODES = ["master-node", "node01", "node02", "node03", "node04", "node05"]
VOLATILE = {"operstate", "tentative", "nodad", "dadfailed", "valid_life_time", "preferred_life_time"}
SOCKETS = """
import os, signal, socket, sys, time
def go_on_behind(seconds):
    if os.fork():
        sys.exit()
    os.setsid()
    for fd in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    signal.alarm(seconds)
def serve(address, port):
    return socket.create_server((address, port))
def reach(address, port, timeout=1.5):
    try:
        socket.create_connection((address, port), timeout=timeout).close()
        return True
    except OSError:
        return False
"""


@pytest.fixture(scope="module")
def six() -> Iterator[TestLab]:
    """A six-node lab of this file's own: what a fault leaves behind must not reach other tests."""
    lab = TestLab(unique("faults"))
    try:
        lab.run("up", "--cluster", SIX_NODE)
        yield lab
    finally:
        lab.run("down")


@pytest.fixture
def healed(six: TestLab) -> Iterator[Lab]:
    yield six.lab
    heal(six.lab)
    for pid in hosts.find_inits(six.lab.dir).values():
        for helper in hosts.processes_in(pid).get("python", []):
            if helper != pid:
                os.kill(helper, signal.SIGKILL)


def host(name: str, index: int) -> Host:
    return Host(
        name=name,
        index=index,
        management_address=f"10.77.0.{index + 1}/24",
        data_interface="ens1f1",
        data_address=f"192.168.20.{index + 15}/24",
        gpus=0,
    )


def put(lab: Lab, name: str, on: str | None = None, *, seed: int = 1, run_dir: Path = Path("runs")) -> Injected:
    return inject(lab, name, seed=seed, on=on, run_dir=run_dir)


def in_node(lab: Lab, node: str, *command: str, must_work: bool = True) -> str:
    return run_in(hosts.find_inits(lab.dir)[node], command, must_work=must_work).stdout


def python_in(lab: Lab, node: str, code: str) -> str:
    return in_node(lab, node, sys.executable, "-c", SOCKETS + code)


def data_address(lab: Lab, node: str) -> str:
    return next(h.data_address for h in lab.planned_hosts() if h.name == node).partition("/")[0]


def assert_same(after: dict[str, Any], before: dict[str, Any], after_what: str = "") -> None:
    """Compare two snapshots; what differs is said by node and part."""
    assert after.keys() == before.keys()
    for node in before:
        for part, was in before[node].items():
            if part == "links":
                assert [link["ifname"] for link in after[node][part]] == [link["ifname"] for link in was]
                changed = [
                    (key, here.get(key), old.get(key))
                    for here, old in zip(after[node][part], was, strict=True)
                    for key in here.keys() | old.keys()
                    if here.get(key) != old.get(key)
                ]
                assert changed == [], (after_what, node)
            assert after[node][part] == was, (after_what, node, part)


def snapshot(lab: Lab, run_dir: Path) -> dict[str, Any]:
    """All that a fault may change, of every node and the switch."""
    inits = hosts.find_inits(lab.dir)
    separator = "-" * 20
    script = f"""
        ip -json address; echo {separator}; ip -json route; ip -json -6 route; echo {separator}
        nft list ruleset; echo {separator}; tc qdisc show; echo {separator}; cat /proc/self/mountinfo; echo {separator}
        cat /etc/hosts; hostname; stat --file-system --format=%b /dev/shm; ls /dev/shm; ps -eo comm= | sort
    """

    def of(node: str) -> dict[str, Any]:
        parts = run_in(inits[node], ["sh", "-c", script]).stdout.split(f"{separator}\n")
        links = json.loads(parts[0], object_hook=lambda found: {k: v for k, v in found.items() if k not in VOLATILE})
        routes = [json.dumps(route) for table in parts[1].splitlines() for route in json.loads(table)]
        processes = [line for line in parts[5].splitlines() if line not in ("ps", "sort", "sh")]
        return {"links": links, "routes": sorted(routes), "rules": parts[2], "queues": parts[3], "mounts": parts[4],
                "host": processes}  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        found: dict[str, Any] = dict(zip(inits, pool.map(of, inits), strict=True))
    for node in NODES:
        (slurmd,) = hosts.processes_in(inits[node])["slurmd"]
        found[node]["limits"] = {limit: resource.prlimit(slurmd, limit) for limit in range(16)}
        own = lab.dir / "nodes" / node
        kept = [path for path in sorted(own.rglob("*")) if path.is_file() and path.parent.name != "spool"]
        found[node]["files"] = {str(path): path.read_text() for path in kept if path.suffix not in (".log", ".pid")}
    found["run_dir"] = {"exists": run_dir.exists()}
    return found


def settled(lab: Lab, run_dir: Path, before: dict[str, Any]) -> dict[str, Any]:
    """The lab as it was before, or as it still is after a while: IPv6 routes come back after a look for duplicates."""
    end_s = time.monotonic() + 30
    while (after := snapshot(lab, run_dir)) != before and time.monotonic() < end_s:
        time.sleep(0.2)
    return after


@pytest.mark.lab
def test_each_fault_changes_something_and_heals_without_a_trace(six: TestLab, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs"
    before = snapshot(six.lab, run_dir)
    in_the_start = {"master-address-wrong", "rank-twice", "torchrun-in-tasks", "mp-spawn-in-srun"}
    for seed, name in enumerate(FAULTS):
        there = put(six.lab, name, seed=seed, run_dir=run_dir)
        if name not in in_the_start:
            assert snapshot(six.lab, run_dir) != before, name
        else:
            assert there.fault.start(there.scene) != JobStart()
        assert [each.fault.name for each in heal(six.lab)] == [name]
        assert_same(settled(six.lab, run_dir, before), before, name)


@pytest.mark.lab
def test_all_faults_at_once_heal_without_a_trace(six: TestLab, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs"
    before = snapshot(six.lab, run_dir)
    for seed, name in enumerate(FAULTS):
        put(six.lab, name, seed=seed, run_dir=run_dir)
    assert [each.fault.name for each in read_injected(six.lab)] == list(FAULTS)
    assert len(heal(six.lab)) == len(FAULTS)
    assert_same(settled(six.lab, run_dir, before), before)


# What they do


@pytest.mark.lab
def test_a_black_hole_swallows_large_packets_only(healed: Lab) -> None:
    put(healed, "mtu-blackhole", "node03")
    server = f"""
import subprocess
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("{data_address(healed, "node03")}", 5000))
go_on_behind(60)
while True:
    data, peer = s.recvfrom(65535)
    s.sendto(str(len(data)).encode(), peer)
"""
    python_in(healed, "node03", server)
    client = f"""
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(socket.IPPROTO_IP, 10, 2)   # DF
s.settimeout(0.3)
for size in (1400, 8972):
    s.sendto(bytes(size), ("{data_address(healed, "node03")}", 5000))
    try:
        print(s.recv(100).decode())
    except TimeoutError:
        print("lost")
"""
    assert python_in(healed, "node01", client).split() == ["1400", "lost"]


@pytest.mark.lab
@pytest.mark.parametrize("name", ["partition", "link-cut", "interface-down", "cable-pulled", "port-silent"])
def test_who_is_cut_off_is_exactly_who_is_named(healed: Lab, name: str) -> None:
    truth = (there := put(healed, name)).fault.culprit(there.scene)
    call = "for a in sys.argv[1:]: print(reach(a, 18181) is True)"
    listen = "for a in sys.argv[1:]: s = serve(a, 18181)\ngo_on_behind(60); signal.pause()"
    addresses = {node: data_address(healed, node) for node in NODES}
    inits = hosts.find_inits(healed.dir)
    for node in NODES:
        run_in(inits[node], [sys.executable, "-c", SOCKETS + listen, addresses[node]])

    def reached(node: str) -> list[str]:
        said = run_in(inits[node], [sys.executable, "-c", SOCKETS + call, *addresses.values()]).stdout.split()
        return [other for other, is_there in zip(NODES, said, strict=True) if is_there == "True" and other != node]

    with ThreadPoolExecutor(6) as pool:
        found = dict(zip(NODES, pool.map(reached, NODES), strict=True))
    if name == "partition":
        expected = {node: [n for group in truth.groups if node in group for n in group if n != node] for node in NODES}
        assert [len(group) for group in truth.groups] == [3, 3]
    else:
        pairs = {frozenset(truth.nodes)} if len(truth.nodes) == 2 else {frozenset({truth.nodes[0], n}) for n in NODES}
        expected = {node: [n for n in NODES if n != node and frozenset({n, node}) not in pairs] for node in NODES}
    assert found == expected
    in_node(healed, "master-node", "srun", "-N6", "true")


@pytest.mark.lab
def test_a_carrier_is_lost_with_the_cable_and_not_with_the_port(healed: Lab) -> None:
    put(healed, "cable-pulled", "node01")
    put(healed, "port-silent", "node03")
    carriers = [in_node(healed, node, "cat", "/sys/class/net/ens1f1/carrier").strip() for node in ("node01", "node03")]
    assert carriers == ["0", "1"]


@pytest.mark.lab
def test_ports_are_filtered_where_they_should_be(healed: Lab) -> None:
    put(healed, "port-filtered")
    pair = put(healed, "ports-filtered-between", "node01", seed=3).fault.culprit(read_injected(healed)[1].scene).nodes
    other = next(node for node in pair if node != "node01")
    third = next(node for node in NODES[1:] if node not in pair)
    listen = "servers = [serve('', p) for p in (29500, 40000)]\ngo_on_behind(60); signal.pause()"
    for node in ("master-node", "node01", other):
        if node != "master-node" or other != "master-node":
            python_in(healed, node, listen)
    ask = "print(*[reach(sys.argv[1], p) for p in (29500, 40000)])"

    def asked(node: str, target: str) -> str:
        pid = hosts.find_inits(healed.dir)[node]
        return run_in(pid, [sys.executable, "-c", SOCKETS + ask, target]).stdout.strip()

    assert asked(third, data_address(healed, "master-node")) == "False True"
    assert asked(third, "10.77.0.1") == "False True"
    assert asked("master-node", "10.77.0.1") == "True True"
    assert asked(third, data_address(healed, "node01")) == "True True"
    assert asked("node01", data_address(healed, other)).endswith("False")
    assert asked(other, data_address(healed, "node01")) == "True False"
    assert asked(other, "10.77.0.2") == "True True"


@pytest.mark.lab
@pytest.mark.parametrize(("name", "low", "high"), [("packet-loss-2", 1, 90), ("packet-loss-20", 250, 480)])
def test_as_many_packets_are_lost_as_it_says(healed: Lab, name: str, low: int, high: int) -> None:
    put(healed, name, "node02")
    server = f"""
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("{data_address(healed, "node02")}", 5001))
go_on_behind(60)
while True:
    s.sendto(*s.recvfrom(100))
"""
    python_in(healed, "node02", server)
    client = f"""
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(0.2)
for _ in range(100):  # ARP asks once a second, and may be lost, too
    s.sendto(b"wake up", ("{data_address(healed, "node02")}", 5001))
    try:
        s.recv(100); break
    except TimeoutError:
        pass
s.settimeout(None)
back = 0
def count():
    global back
    try:
        while True:
            back += s.recv(100, socket.MSG_DONTWAIT).startswith(b"x")
    except BlockingIOError:
        pass
for n in range(1000):
    s.sendto(b"x%d" % n, ("{data_address(healed, "node02")}", 5001)); time.sleep(0.0005); count()
time.sleep(0.3); count()
print(1000 - back)
"""
    assert low <= int(python_in(healed, "node05", client)) <= high


@pytest.mark.lab
def test_the_slow_link_is_ten_times_slower(healed: Lab) -> None:
    put(healed, "slow-link", "node04")
    receive = """
s = serve("", 5002)
go_on_behind(60)
for _ in range(4):
    c, _ = s.accept()
    while c.recv(1 << 20): pass
    c.send(b"!")
"""
    send = """
c = socket.create_connection((sys.argv[1], 5002), timeout=10)
began = time.monotonic(); c.sendall(bytes(4_000_000)); c.shutdown(socket.SHUT_WR); c.recv(1)
print(round(4 * 8 / (time.monotonic() - began)))
"""
    pid = hosts.find_inits(healed.dir)["node01"]

    def rate(node: str) -> int:
        """The best of four, in Mbit/s: a busy machine makes some of them slow."""
        python_in(healed, node, receive)
        address = data_address(healed, node)
        return max(int(run_in(pid, [sys.executable, "-c", SOCKETS + send, address]).stdout) for _ in range(4))

    assert 50 < rate("node04") < 110
    assert rate("node05") > 250


@pytest.mark.lab
def test_names_are_lost_and_lead_home(healed: Lab) -> None:
    put(healed, "master-name-unresolvable", "node02")
    put(healed, "loopback-hostname", "node02")
    put(healed, "duplicate-hostname", "node03")
    assert in_node(healed, "node02", "getent", "ahostsv4", "master-node", must_work=False) == ""
    assert in_node(healed, "node02", "getent", "hosts", "node02").split() == ["127.0.1.1", "node02"]
    assert in_node(healed, "node01", "getent", "hosts", "master-node").split() == ["10.77.0.1", "master-node"]
    names = in_node(healed, "master-node", "srun", "-N6", "sh", "-c", "echo $SLURMD_NODENAME $(hostname)")
    told = dict(line.split() for line in names.splitlines())
    assert sorted(told) == NODES
    assert [node for node in NODES if told[node] != node] == ["node03"]
    assert told["node03"] in NODES


@pytest.mark.lab
def test_a_foreign_process_holds_the_port_until_it_is_healed(healed: Lab) -> None:
    put(healed, "port-in-use")
    pid = hosts.find_inits(healed.dir)["master-node"]
    assert "29500" in in_node(healed, "master-node", "ss", "-tln")
    assert any(name.startswith("python") for name in hosts.processes_in(pid))
    heal(healed, "port-in-use")
    assert "29500" not in in_node(healed, "master-node", "ss", "-tln")


@pytest.mark.lab
def test_what_tasks_find_on_the_faulty_node_is_what_the_fault_says(healed: Lab, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "shared").touch()
    for name, node in {
        "env-drift-nccl-algo": "node01", "env-drift-library-path": "node01", "torch-version-differs": "node01",
        "shm-small": "node02", "memlock-low": "node02", "nofile-low": "node02", "run-dir-not-shared": "node03",
        "run-dir-read-only": "node04", "disk-full": "node05", "stale-rank": "node05", "nic-forced-lo": "node05",
    }.items():  # fmt: skip
        put(healed, name, node, run_dir=runs)
    script = f"""
        echo $SLURMD_NODENAME $NCCL_ALGO $LD_LIBRARY_PATH \
            $($1 -c 'import importlib.metadata as m; print(m.version("torch"))') \
            shm=$(($(stat -f -c '%b * %S / 1048576' /dev/shm))) lock=$(ulimit -l) files=$(ulimit -n) \
            see=$(ls {runs}) write=$(touch {runs}/x 2>/dev/null && echo yes) \
            tmp=$(echo data 2>/dev/null >${{TMPDIR:-/tmp}}/allranks-test-$SLURM_JOB_ID && echo yes) \
            attempt=$SLURM_RESTART_COUNT nic=$GLOO_SOCKET_IFNAME
        rm -f ${{TMPDIR:-/tmp}}/allranks-test-$SLURM_JOB_ID
    """
    env = ["env", "-u", "TMPDIR", "-u", "LD_LIBRARY_PATH"]
    told = in_node(healed, "master-node", *env, "srun", "-N6", "sh", "-c", script, "sh", sys.executable)
    seen = {line.split()[0]: line for line in told.splitlines()}
    assert " Ring /opt/old-cuda/lib64 2.4.0 " in seen["node01"]
    assert " Ring " not in seen["node03"]
    assert " 2.4.0 " not in seen["node03"]
    assert " shm=64 lock=64 files=256 " in seen["node02"]
    assert "files=256" not in seen["node01"]
    assert " see= " in seen["node03"]
    assert "shared" in seen["node01"]
    assert [node for node in NODES if "write=yes" not in seen[node]] == ["node04"]
    assert [node for node in NODES if "tmp=yes" not in seen[node]] == ["node05"]
    assert all("attempt=1" in line for line in seen.values())
    assert [node for node in NODES if "nic=lo" in seen[node]] == ["node05"]


@pytest.mark.lab
def test_the_clock_of_one_node_is_five_seconds_fast(healed: Lab) -> None:
    if not list(Path("/").glob("usr/lib/*/faketime/libfaketime.so.1")):
        pytest.skip("libfaketime is not installed")
    put(healed, "clock-off", "node03")
    code = "import os, time; time.sleep(0.1); print(os.environ['SLURMD_NODENAME'], time.time())"
    told = in_node(healed, "master-node", "srun", "-N6", sys.executable, "-I", "-S", "-c", code)
    clocks = {node: float(wall) for node, wall in map(str.split, told.splitlines())}
    assert 4 < clocks["node03"] - clocks["node01"] < 6
    assert in_node(healed, "node03", "ls", "/dev/shm") == ""


@pytest.mark.lab
def test_a_node_that_never_starts_holds_the_step_until_it_is_killed(healed: Lab) -> None:
    put(healed, "never-starts", "node02")
    put(healed, "starts-late", "node04")
    pid = hosts.find_inits(healed.dir)["node01"]
    # Two interrupts, so far apart that they cannot become one, and near enough for srun to give its step up.
    interrupts = ["timeout", "--signal=INT", "12", "timeout", "--foreground", "--signal=INT", "11.5"]
    command = ["timeout", "--signal=KILL", "60", *interrupts]
    code = 'trap "" INT; echo $SLURMD_NODENAME; sleep 300'
    began = time.monotonic()
    said = run_in(pid, [*command, "srun", "-N6", "--kill-on-bad-exit=0", "sh", "-c", code], must_work=False)
    assert sorted(said.stdout.split()) == ["master-node", "node01", "node03", "node05"]
    in_node(healed, "node01", "scancel", "--user=root")
    deadline = time.monotonic() + 120
    while "sleep" in in_node(healed, "node02", "ps", "-eo", "comm=") or in_node(healed, "node01", "squeue", "-h"):
        assert time.monotonic() < deadline
        in_node(healed, "node01", "scancel", "--signal=KILL", "--user=root", must_work=False)
        time.sleep(0.2)
    assert time.monotonic() - began < 200  # the steps sleep for 300


@pytest.mark.lab
def test_gpu_tools_answer_with_the_fault_on_one_node(healed: Lab) -> None:
    for name, node in {"gpu-missing": "node01", "gpu-busy": "node02", "gpu-ecc": "node02",
                       "fabric-manager-version": "node03", "fabric-manager-stopped": "node04"}.items():  # fmt: skip
        put(healed, name, node)
    script = """
        echo $SLURMD_NODENAME,$(nvidia-smi --query-gpu=index,gpu_uuid --format=csv,noheader,nounits | wc -l) \
            $(nvidia-smi --query-gpu=uuid --format=csv,noheader,nounits | head -1) \
            busy=$(nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv,noheader,nounits \
                | cut -d, -f2- | tr -d ' ') \
            ecc=$(nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total --format=csv,noheader,nounits | sort -u \
                | tr '\\n' ,) \
            rows=$(nvidia-smi --query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure \
                --format=csv,noheader,nounits | grep -c Yes) \
            $(systemctl is-active nvidia-fabricmanager; echo $?) \
            $(nv-fabricmanager --version | cut -d' ' -f6)
    """
    told = in_node(healed, "master-node", "srun", "-N6", "sh", "-c", script)
    seen = {line.partition(",")[0]: line.partition(",")[2] for line in told.splitlines()}
    plain = {node: re.sub(r"GPU-\S+", "GPU", line) for node, line in seen.items()}
    healthy = "8 GPU busy= ecc=0, rows=0 active 0 550.90.07"
    assert plain == {
        "master-node": healthy,
        "node01": healthy.replace("8", "7", 1),
        "node02": "8 GPU busy=812,python3,40960 ecc=0,3, rows=1 active 0 550.90.07",
        "node03": "8 GPU busy= ecc=0, rows=0 failed 3 550.54.15",
        "node04": "8 GPU busy= ecc=0, rows=0 inactive 3 550.90.07",
        "node05": healthy,
    }
    assert len({line.split()[1] for line in seen.values()}) == 6
    refused = "nvidia-smi --query-gpu=index,fabric.health --format=csv,noheader,nounits; echo $?"
    said = in_node(healed, "master-node", "srun", "-N1", "sh", "-c", refused).splitlines()
    assert (said[0], said[-1]) == ('Field "fabric.health" is not a valid field to query.', "2")


@pytest.mark.lab
def test_extra_agents_start_beside_that_of_the_job(healed: Lab) -> None:
    stale = put(healed, "stale-rank", "node03")
    prefix = stale.fault.start(stale.scene).prefix
    told = in_node(healed, "master-node", "srun", "-N6", *prefix, "sh", "-c",
                   "echo $SLURM_PROCID $SLURM_RESTART_COUNT; sleep 0.8")  # fmt: skip
    assert sorted(told.splitlines()) == sorted([f"{rank} 1" for rank in range(6)] + ["3 0"])


@pytest.mark.lab
def test_eight_tasks_start_on_each_node_whatever_its_cores(healed: Lab) -> None:
    there = put(healed, "torchrun-in-tasks")
    flags = there.fault.start(there.scene).srun_flags
    told = in_node(healed, "node01", "srun", "-N6", *flags, "sh", "-c", "echo $SLURM_STEP_TASKS_PER_NODE")
    assert told.split() == ["8(x6)"] * 48


# Coming and going


@pytest.mark.lab
def test_the_command_says_where_and_heals_from_another_process(six: TestLab) -> None:
    said = six.run("inject", "interface-renamed", "--on", "node02", "--seed", "7").stderr
    assert "interface-renamed on node02 (seed 7)" in said
    assert "expected finding: AR208 node02 ens1f0np0" in said
    assert "ens1f9" in six.on("node02", "ls", "/sys/class/net")
    again = six.run("inject", "interface-renamed", "--on", "node02", must_work=False)
    assert again.returncode == 2
    assert "node02 already has interface-renamed" in again.stderr
    assert "healed" in six.run("heal").stderr
    assert "ens1f9" not in six.on("node02", "ls", "/sys/class/net")
    assert "no faults" in six.run("heal").stderr


@pytest.mark.lab
def test_wrong_requests_are_refused_in_one_line(six: TestLab) -> None:
    for arguments, message in [
        (["inject", "cable-puled"], "unknown fault 'cable-puled': did you mean cable-pulled?"),
        (["inject", "cable-pulled", "--on", "node99"], "no node 'node99': expected one of master-node, node01"),
        (["inject", "port-in-use", "--on", "node01"], "port-in-use cannot be injected on node01: expected master-node"),
        (["inject"], "expected the name of a fault"),
        (["heal", "slow-link"], "has no slow-link: its faults are: none"),
    ]:
        done = six.run(*arguments, must_work=False)
        assert done.returncode == 2, arguments
        assert message in done.stderr
    assert json.loads(six.run("inject", "--list", "--json").stdout)[0]["causes"] == ["AR201"]


@pytest.mark.lab
def test_up_and_heal_after_a_faulty_node_died(make_lab: Make, tmp_path: Path) -> None:
    lab = make_lab("died")
    lab.run("up", "--cluster", SIX_NODE)
    before = snapshot(lab.lab, tmp_path / "runs")
    for name in ("mtu-blackhole", "shm-small", "nofile-low", "cable-pulled", "disk-full", "packet-loss-2"):
        put(lab.lab, name, "node03")
    lab.run("up", "--cluster", SIX_NODE)
    os.kill(hosts.find_inits(lab.lab.dir)["node03"], signal.SIGKILL)
    lab.run("up", "--cluster", SIX_NODE)
    heal(lab.lab)
    after = snapshot(lab.lab, tmp_path / "runs")
    assert_same({"node02": after["node02"]}, {"node02": before["node02"]})
    assert [after[name]["rules"] for name in (SWITCH, "node03")] == ["", ""]
    assert {link["mtu"] for link in after["node03"]["links"]} == {1500, 65536}
    assert after["node03"]["files"].keys() == before["node03"]["files"].keys()
    assert lab.on("node03", "srun", "-N6", "hostname").split().count("node03") == 1


# Without a lab


def test_the_seed_alone_decides() -> None:
    planned = [host(name, index) for index, name in enumerate(NODES)]
    drawn = [choose_where(FAULTS["link-cut"], planned, on=None, seed=seed) for seed in range(50)]
    assert drawn == [choose_where(FAULTS["link-cut"], planned, on=None, seed=seed) for seed in range(50)]
    assert {where.node for where in drawn} == set(NODES)
    assert all(where.node != where.peer for where in drawn)
    with pytest.raises(UsageError, match="partition needs 4 nodes: the lab has 2"):
        choose_where(FAULTS["partition"], planned[:2], on=None, seed=1)


def test_every_fault_says_what_it_is() -> None:
    for name, fault in FAULTS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert fault.title().endswith("."), name
        assert len(fault.title()) <= 120, name
        assert all(re.fullmatch(r"AR\d{3}", cause) for cause in fault.cause)
        assert fault.cause or fault.severity is Expected.SURVIVED
        assert fault.place in FaultPlace
    assert find_fault("partition") is FAULTS["partition"]


def test_recordings_are_marked_as_the_lab_s() -> None:
    for path in RECORDED.iterdir():
        if path.is_file():
            assert any("The lab's" in line for line in path.read_text().splitlines()[:2]), path


def test_gpus_of_two_nodes_have_nothing_in_common() -> None:
    uuids = [gpu["uuid"] for node in NODES for gpu in record(node, []).gpus]
    assert len(set(uuids)) == 48
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid) for uuid in uuids)
