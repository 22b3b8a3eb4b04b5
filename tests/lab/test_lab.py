"""Is the lab the cluster that cluster.toml describes, and does nothing of it stay behind?"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from allranks.lab import hosts
from allranks.lab.lab import Lab
from conftest import wait_until

from .conftest import SIX_NODE, Make, TestLab, lab_command

NODES = ["master-node", "node01", "node02", "node03", "node04", "node05"]
DATA = {
    "master-node": ("ens1f1", "192.168.20.15/24"),
    "node01": ("ens1f1", "192.168.20.16/24"),
    "node02": ("ens1f0np0", "192.168.20.17/24"),
    "node03": ("ens1f1", "192.168.20.18/24"),
    "node04": ("ens1f0", "192.168.20.19/24"),
    "node05": ("ens1f0np0", "192.168.20.20/24"),
}
TWO_NODES = """
[network]
data = "192.168.20.0/24"
[[node]]
name = "node01"
address = "192.168.20.16"
[[node]]
name = "other"
address = "192.168.20.17"
"""

pytestmark = pytest.mark.lab


def pids_of(lab: Lab) -> dict[str, int]:
    return hosts.find_inits(lab.dir)


def traces_of(lab: Lab, namespaces: set[str]) -> list[str]:
    """What is there of a lab: its directory, processes that name it or live in its namespaces, mounts, interfaces."""
    found = [str(lab.dir)] if lab.dir.exists() else []
    for other in lab.dir.parent.glob("*"):  # the kernel gives a number again, and other labs' nodes come up meanwhile
        namespaces = namespaces - (namespaces_of(Lab(other.name)) if other != lab.dir else set())
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_text().replace("\0", " ")
                own = {str((process / "ns" / kind).readlink()) for kind in ("net", "pid", "mnt", "uts")}
                if str(lab.dir) in command or own & namespaces:
                    found.append(f"{process.name} {command}")
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if lab.name in line]
    return found + [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(("veth", "data"))]


def namespaces_of(lab: Lab) -> set[str]:
    found: set[str] = set()
    for pid in pids_of(lab).values():
        with contextlib.suppress(OSError):
            found |= {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("net", "pid", "mnt", "uts")}
    return found - {str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid", "mnt", "uts")}


def assert_no_trace(lab: Lab, namespaces: set[str]) -> None:
    deadline = time.monotonic() + 60  # a helper of a killed `up` ends on its own
    while (found := traces_of(lab, namespaces)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == []


# The cluster


def test_sinfo_shows_six_idle_nodes(six_nodes: TestLab) -> None:
    assert six_nodes.on("master-node", "sinfo", "-h", "-p", "main", "-o", "%P %D %t %l") == "main* 6 idle infinite\n"


def test_srun_runs_on_every_node(six_nodes: TestLab) -> None:
    assert sorted(six_nodes.on("master-node", "srun", "-N6", "hostname").split()) == NODES


def test_any_node_submits_a_batch_job_that_runs_steps(six_nodes: TestLab, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/sh\n#SBATCH -N2 --gpus-per-node=1 -o out\nsrun sh -c 'echo $SLURM_GPUS_ON_NODE'\necho end\n"
    )
    six_nodes.on("node04", "sbatch", "--chdir", str(tmp_path), str(script))
    deadline = time.monotonic() + 120
    while not (out := tmp_path / "out").exists() or not out.read_text().endswith("end\n"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert out.read_text() == "1\n1\nend\n"


def test_slurm_is_found_without_its_variable(six_nodes: TestLab) -> None:
    assert six_nodes.on("node02", "env", "-u", "SLURM_CONF", "squeue", "-h") == ""


def test_each_node_has_its_own_interfaces(six_nodes: TestLab) -> None:
    status = json.loads(six_nodes.run("status", "--json").stdout)
    for number, node in enumerate(status["nodes"]):
        links = {link["name"]: link for link in node["interfaces"] if not link["name"].startswith("veth")}
        interface, address = DATA[node["name"]]
        assert {name: link["addresses"] for name, link in links.items()} == {
            "lo": ["127.0.0.1/8", "::1/128"],
            "eno1": [f"10.77.0.{number + 1}/24"],
            interface: [address],
            "docker0": ["172.17.0.1/16"],
        }
        assert all(link["is_up"] for link in links.values())
        assert links[interface]["rate_gbit_s"] == 1.0
        assert node["slurm_state"] == "idle"
        assert "slurmd" in node["daemon_pids"]
        seen = six_nodes.on(node["name"], "ls", "/sys/class/net").split()
        assert {"lo", "eno1", interface, "docker0"} <= set(seen)


def test_offloads_are_off_on_data_and_management(six_nodes: TestLab) -> None:
    for interface in ("eno1", "ens1f1"):
        features = six_nodes.on("node01", "ethtool", "-k", interface)
        for feature in ("tcp-segmentation-offload", "generic-segmentation-offload", "generic-receive-offload"):
            assert f"{feature}: off" in features


def test_names_resolve_to_the_management_network(six_nodes: TestLab) -> None:
    for node in NODES:
        resolved = six_nodes.on(node, "getent", "ahostsv4", *NODES).splitlines()
        assert [line.split()[0] for line in resolved if "STREAM" in line] == [f"10.77.0.{i}" for i in range(1, 7)]


def test_every_pair_reaches_each_other_on_the_data_network(six_nodes: TestLab) -> None:
    listen = """
import socket
server = socket.create_server(("", 4000))
print("up", flush=True)
while True:
    server.accept()[0].close()
"""
    call = f"""
import socket
for address in {[address.partition("/")[0] for _, address in DATA.values()]}:
    with socket.create_connection((address, 4000), timeout=5) as s:
        print(s.getsockname()[0], s.getpeername()[0])
"""
    servers = [six_nodes.start("exec", node, "--", sys.executable, "-c", listen) for node in NODES]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
        for node in NODES:
            own = DATA[node][1].partition("/")[0]
            pairs = [line.split() for line in six_nodes.on(node, sys.executable, "-c", call).splitlines()]
            assert [pair[0] for pair in pairs] == [own] * 6
    finally:
        for server in servers:
            server.terminate()
            server.communicate(timeout=60)


def test_each_node_is_a_machine_of_its_own(six_nodes: TestLab) -> None:
    files = ["/etc/hostname", "/etc/machine-id", "/proc/sys/kernel/random/boot_id"]
    seen = [tuple(six_nodes.on(node, "cat", *files).split()) for node in NODES]
    assert [each[0] for each in seen] == NODES
    for number, file in enumerate(files):
        values = {each[number] for each in seen} | set(Path(file).read_text().split())
        assert len(values) == 7, file
    six_nodes.on("node01", "touch", "/dev/shm/only-here")
    assert six_nodes.on("node02", "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/only-here").exists()
    assert six_nodes.on("node01", "cat", "/proc/1/cmdline").endswith("\0node01\0")
    assert int(six_nodes.on("node01", "nproc")) == max(1, len(os.sched_getaffinity(0)) // 6)


def test_the_dead_are_buried(six_nodes: TestLab) -> None:
    six_nodes.on("node03", "sh", "-c", "setsid sh -c 'sleep 0.1 & exit' & exit")
    wait_until(lambda: "sleep 0.1" not in six_nodes.on("node03", "ps", "-eo", "args="), "the end of the orphan")
    wait_until(lambda: "Z" not in six_nodes.on("node03", "ps", "-eo", "stat="), "its burial")


# exec


def test_exec_passes_arguments_input_directory_and_exit_code(six_nodes: TestLab) -> None:
    assert six_nodes.on("node05", "printf", "<%s>", "a b", "", "c'd\n", "$x", "--name") == "<a b><><c'd\n><$x><--name>"
    assert six_nodes.run("exec", "node05", "--", "cat", stdin="in").stdout == "in"
    assert six_nodes.on("node05", "pwd").strip() == str(Path.cwd())
    for script, exit_code in (("exit 7", 7), ("kill -9 $$", 137)):
        assert six_nodes.run("exec", "node05", "--", "sh", "-c", script, must_work=False).returncode == exit_code
    assert six_nodes.run("exec", "node05", "--", "no-such-command", must_work=False).returncode == 127


def test_exec_on_an_unknown_node_lists_the_known(six_nodes: TestLab) -> None:
    done = six_nodes.run("exec", "node99", "--", "true", must_work=False)
    assert done.returncode == 2
    assert "no node 'node99': expected one of master-node, node01" in done.stderr


def test_ctrl_c_reaches_the_command_which_decides(six_nodes: TestLab) -> None:
    command = lab_command("exec", "--name", six_nodes.name, "node01", "--", "sh", "-c",
                          "trap 'exit 5' INT; echo ready; while :; do sleep 0.1; done")  # fmt: skip
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], list(command))
    try:
        assert b"ready" in os.read(terminal, 100)
        os.write(terminal, b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # the shell on the node ends with it
        os.close(terminal)


def test_a_command_ends_with_its_exec(six_nodes: TestLab) -> None:
    running = six_nodes.start("exec", "node01", "--", "sh", "-c", "echo up; exec sleep 4711")
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    running.kill()
    running.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while "sleep 4711" in six_nodes.on("node01", "ps", "-eo", "args="):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# up and down


def test_a_second_up_changes_nothing(six_nodes: TestLab) -> None:
    before = json.loads(six_nodes.run("status", "--json").stdout)
    six_nodes.run("up", "--cluster", SIX_NODE)
    assert json.loads(six_nodes.run("status", "--json").stdout) == before


def test_up_with_another_cluster_is_refused(six_nodes: TestLab, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO_NODES)
    done = six_nodes.run("up", "--cluster", tmp_path / "two.toml", must_work=False)
    assert done.returncode == 2
    assert "is up with another cluster.toml" in done.stderr


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_node_cannot_touch_the_lab_it_is_in(six_nodes: TestLab, verb: str) -> None:
    done = six_nodes.run("exec", "node01", "--", *lab_command(verb, "--name", six_nodes.name), must_work=False)
    assert done.returncode == 2
    assert "this is node01, a node of a lab" in done.stderr


def test_up_takes_a_node_back_that_slurm_has_given_up(six_nodes: TestLab) -> None:
    six_nodes.on("master-node", "scontrol", "update", "NodeName=node03", "State=DOWN", "Reason=busy")
    six_nodes.run("up", "--cluster", SIX_NODE)
    assert six_nodes.is_idle()


def mac_addresses_of(lab: TestLab) -> list[list[str]]:
    return [[link["address"] for link in json.loads(lab.on(node, "ip", "-json", "link"))] for node in NODES]


def test_up_mends_dead_nodes_and_daemons(make_lab: Make) -> None:
    lab = make_lab("mend")
    lab.run("up", "--cluster", SIX_NODE)
    before, addresses = pids_of(lab.lab), mac_addresses_of(lab)
    os.kill(before["node03"], signal.SIGKILL)
    os.kill(before["master-node"], signal.SIGKILL)
    os.kill(hosts.processes_in(before["node01"])["slurmd"][0], signal.SIGKILL)
    lab.run("up", "--cluster", SIX_NODE)
    after = pids_of(lab.lab)
    assert {node for node in before if before[node] != after[node]} == {"node03", "master-node"}
    assert mac_addresses_of(lab) == addresses  # which its peers remember for minutes
    assert sorted(lab.on("node03", "srun", "-N6", "hostname").split()) == NODES
    os.kill(after["@switch"], signal.SIGKILL)
    lab.run("up", "--cluster", SIX_NODE)
    assert sorted(lab.on("node03", "srun", "-N6", "hostname").split()) == NODES


def test_two_labs_with_the_same_addresses_live_side_by_side(six_nodes: TestLab, make_lab: Make, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO_NODES)
    other = make_lab("side")
    other.run("up", "--cluster", tmp_path / "two.toml", "--tasks-per-node", "4")
    seen = other.on("node01", "srun", "-N2", "--ntasks-per-node=4", "hostname").split()
    assert sorted(seen) == ["node01"] * 4 + ["other"] * 4
    assert sorted(six_nodes.on("node01", "srun", "-N6", "hostname").split()) == NODES
    before = json.loads(six_nodes.run("status", "--json").stdout)
    namespaces = namespaces_of(other.lab)
    other.run("down")
    assert_no_trace(other.lab, namespaces)
    assert json.loads(six_nodes.run("status", "--json").stdout) == before


def test_down_ends_what_runs_in_the_nodes(make_lab: Make, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO_NODES)
    lab = make_lab("busy")
    lab.run("up", "--cluster", tmp_path / "two.toml")
    running = lab.start("exec", "other", "--", "sh", "-c", "trap '' TERM HUP; echo up; while :; do sleep 1; done")
    job = lab.start("exec", "other", "--", "srun", "-N2", "sleep", "300")
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    namespaces = namespaces_of(lab.lab)
    assert lab.run("down").stderr.endswith(f"lab {lab.lab.name}: removed\n")
    running.communicate(timeout=60)
    job.communicate(timeout=60)
    assert_no_trace(lab.lab, namespaces)
    assert "was not up" in lab.run("down").stderr


def test_the_next_lab_continues_the_job_ids(make_lab: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the processes of the first one were killed: run directories and output files have a job's id."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lab, given = make_lab("ids"), []
    for _ in range(2):
        lab.run("up")
        for _ in range(2):
            given.append(int(lab.on("master-node", "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true")))
        for pid in pids_of(lab.lab).values():
            os.kill(pid, signal.SIGKILL)
        lab.run("down")
    assert given == [1, 2, 3, 4]


@pytest.mark.parametrize("is_group_killed", [False, True], ids=["up alone", "up and its helpers"])
def test_nothing_stays_behind_a_killed_up(make_lab: Make, is_group_killed: bool) -> None:
    lab = make_lab("killed")
    for delay_s in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4):
        namespaces = kill_up(lab, delay_s, is_group_killed=is_group_killed)
        lab.run("down")
        assert_no_trace(lab.lab, namespaces)


def test_a_killed_up_can_be_repeated(make_lab: Make) -> None:
    lab = make_lab("again")
    for delay_s in (0.12, 0.18, 0.24, 0.3):
        kill_up(lab, delay_s, is_group_killed=True)
        lab.run("up", "--cluster", SIX_NODE)
        assert sorted(lab.on("node03", "srun", "-N6", "hostname").split()) == NODES
        lab.run("down")


@pytest.mark.by_hand
@pytest.mark.timeout(1200)
def test_twenty_labs_half_of_them_killed_leave_nothing(make_lab: Make) -> None:
    lab = make_lab("soak")
    chance = random.Random(4711)
    up_s, down_s, killed = [], [], 0
    for number in range(20):
        began = time.monotonic()
        if number % 2:
            namespaces = kill_up(lab, chance.uniform(0.05, 0.35), is_group_killed=chance.random() < 0.5)
            killed += 1
        else:
            lab.run("up", "--cluster", SIX_NODE)
            up_s.append(time.monotonic() - began)
            namespaces = namespaces_of(lab.lab)
        began = time.monotonic()
        lab.run("down")
        down_s.append(time.monotonic() - began)
        assert_no_trace(lab.lab, namespaces)
    for what, times in (("up", up_s), ("down", down_s)):
        times.sort()
        print(f"{what}: {len(times)} times, median {times[len(times) // 2]:.2f} s, longest {times[-1]:.2f} s")
    print(f"killed: {killed}")


def kill_up(lab: TestLab, delay_s: float, *, is_group_killed: bool) -> set[str]:
    """Kill an `up` after a while; return the namespaces that it had made by then."""
    starting = lab.start("up", "--cluster", SIX_NODE)
    time.sleep(delay_s)
    if is_group_killed:
        os.killpg(starting.pid, signal.SIGKILL)
    else:
        starting.kill()
    starting.wait(timeout=60)
    namespaces = namespaces_of(lab.lab)
    for pipe in (starting.stdout, starting.stderr):
        assert pipe is not None
        pipe.close()
    return namespaces
