"""How are nodes created on one machine, and how does a process enter them? Namespaces, links, processes.

    start_hosts(lab_dir, [SWITCH, "node01"])           # lab/init.py as process 1 of each
    inits = find_inits(lab_dir)                        # {"@switch": 4711, "node01": 4712}
    connect(lab_dir, [host], inits)
    run_in(inits["node01"], ["ip", "-brief", "address"])

A node is its process 1: interfaces and mounts are in its namespaces and end with it. Nothing is created in the
namespaces of the machine itself, so nothing can collide or remain there, and two labs may use the same addresses. The
other ends of the cables are in the switch, an extra node with the bridges `management`, `data` and `second`; the
ports of the first node are `management0` and `data0` there. `docker0` has a cable, too, so that it is up like one with
a container.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from allranks.lab import init
from allranks.lab.node_plan import DOCKER_ADDRESS, DOCKER_INTERFACE, MANAGEMENT_INTERFACE, SECOND_INTERFACE, Host
from allranks.model.errors import SetupError

SWITCH = "@switch"
"""Name of the switch; no host name looks like it."""
LINK_GBIT_S = 1.0
COMMAND_S = 20.0
"""Deadline of every helper command; each takes milliseconds."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HELPER_ENV = {"PATH": SYSTEM_PATH, "LC_ALL": "C"}
"""Environment of helpers and daemons: nothing from the shell that ran `up`, because jobs would see it."""
PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


# Processes: the only thing that is created, and the only record of it.


def find_inits(lab_dir: Path) -> dict[str, int]:
    """Return the pid of process 1 of each running node, by node name, as seen from this machine."""
    return {node: pid for pid, node, is_init in _own_processes(lab_dir) if is_init}


def start_hosts(lab_dir: Path, names: Sequence[str]) -> None:
    """Start process 1 of each node at the same time, and wait until their namespaces are set up.

    Raises:
        SetupError: this machine does not allow it.
    """
    command = [sys.executable, "-I", "-S", init.__file__, str(lab_dir)]
    starters = {
        name: subprocess.Popen(
            [*command, name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=HELPER_ENV,
            cwd="/",
        )
        for name in names
    }
    failed: dict[str, str] = {}
    for name, starter in starters.items():
        try:
            _, stderr = starter.communicate(timeout=COMMAND_S)
            if starter.returncode:
                failed[name] = stderr.strip() or f"exit code {starter.returncode}"
        except subprocess.TimeoutExpired:
            starter.kill()
            failed[name] = f"not ready after {COMMAND_S:.0f} s"
    for name, message in failed.items():
        hint = "; in a container this needs --privileged" if "not permitted" in message else ""
        raise SetupError(f"lab: namespaces of {name.lstrip('@')} cannot be created: {message}{hint}")


def share_cores(inits: Mapping[str, int], hosts: Sequence[Host]) -> None:
    """Give each compute node its own cores if there are enough; otherwise each rank uses all cores of the machine.

    Six ranks with two threads each on two cores train at half the speed of six ranks with one.
    """
    cores = sorted(os.sched_getaffinity(0))
    num_cores = max(1, len(cores) // len(hosts))
    for host in hosts:
        own = {cores[(host.index * num_cores + number) % len(cores)] for number in range(num_cores)}
        os.sched_setaffinity(inits[host.name], own)


def kill_hosts(lab_dir: Path, names: Sequence[str] | None = None) -> None:
    """Kill nodes with everything in them, and wait until their last process is gone.

    Args:
        lab_dir: directory of the lab.
        names: the nodes; by default all, also those that are just being created.

    Raises:
        SetupError: a process survives SIGKILL, for example one that hangs in the kernel.
    """
    deadline = time.monotonic() + COMMAND_S
    networks: set[str] = set()
    while True:
        found = [pid for pid, node, _ in _own_processes(lab_dir) if names is None or node in names]
        here = _namespace("self", "net")
        networks |= {network for pid in found if (network := _namespace(pid, "net")) not in ("", here)}
        # A helper may have joined a node's network but not yet its processes.
        found += [pid for pid in _all_pids() if networks and _namespace(pid, "net") in networks]
        if not found:
            return
        if time.monotonic() > deadline:
            raise SetupError(f"lab: processes survive SIGKILL for {COMMAND_S:.0f} s: pids {sorted(set(found))}")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def identify(init_pid: int) -> str:
    """Return the start time in clock ticks, which distinguishes this process from a later one with the same pid."""
    return f"{init_pid} {Path(f'/proc/{init_pid}/stat').read_text().rpartition(')')[2].split()[19]}"


def processes_in(init_pid: int) -> dict[str, list[int]]:
    """Return the processes in a node: command name -> pids of this machine."""
    own = _namespace(init_pid, "pid")
    found: dict[str, list[int]] = {}
    for pid in _all_pids():
        if own and _namespace(pid, "pid") == own:
            with contextlib.suppress(OSError):
                found.setdefault(Path(f"/proc/{pid}/comm").read_text().strip(), []).append(pid)
    return found


def run_in(
    init_pid: int, command: Sequence[str], *, script: str | None = None, must_work: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a helper command in all namespaces of a node, with its own environment, and wait for it.

    Args:
        init_pid: process 1 of the node.
        command: program and arguments.
        script: its standard input.
        must_work: whether an exit code other than 0 is an error.

    Raises:
        SetupError: it fails or takes too long.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(init_pid))))
    namespaces = [
        "taskset",
        "--cpu-list",
        cores,
        "nsenter",
        f"--target={init_pid}",
        "--net",
        "--uts",
        "--mount",
        "--pid",
        "--",
    ]
    return _run(command, prefix=namespaces, script=script, must_work=must_work)


def _run(
    command: Sequence[str], *, prefix: Sequence[str] = (), script: str | None, must_work: bool = True
) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            [*prefix, *command],
            input=script or "",
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
            env=HELPER_ENV,
            cwd="/",
        )
    except subprocess.TimeoutExpired as exc:
        raise SetupError(f"lab: {' '.join(command)}: not finished after {COMMAND_S:.0f} s") from exc
    if must_work and done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise SetupError(f"lab: {' '.join(command)}: exit code {done.returncode}: {said}")
    return done


def run_for_user(init_pid: int, command: Sequence[str], env: Mapping[str, str]) -> int:
    """Enter a node and run the user's command there, on this terminal; the caller must do nothing else afterwards.

    Returns:
        Its exit code, as in a shell: 128 + n if signal n ended it, 127 if there is no such command.

    Raises:
        SetupError: the node is gone.
    """
    cwd, libc = Path.cwd(), ctypes.CDLL(None, use_errno=True)
    try:
        cores = os.sched_getaffinity(init_pid)  # before entering: inside, the pid means something else
        if libc.setns(os.pidfd_open(init_pid), init.NAMESPACES):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.sched_setaffinity(0, cores)
    except OSError as exc:
        raise SetupError(f"lab: pid {init_pid} cannot be joined: {str(exc.strerror).lower()}") from exc
    try:
        # Ctrl-C reaches both, and the command decides what it means; SIGTERM reaches only this process and is passed
        # on.
        before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGQUIT)}

        def prepare() -> None:
            for signum, action in before.items():
                signal.signal(signum, action)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

        child = subprocess.Popen(list(command), cwd=cwd, env=dict(env), preexec_fn=prepare)
    except OSError as exc:
        print(f"{command[0]}: {str(exc.strerror).lower()}", file=sys.stderr)
        return 127 if isinstance(exc, FileNotFoundError) else 126
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda received, _: child.send_signal(received))
    exit_code = child.wait()
    return 128 - exit_code if exit_code < 0 else exit_code


# Links: the network of the nodes.


def make_switch(inits: Mapping[str, int]) -> None:
    """Create the two bridges. They forward at once: no spanning tree, no multicast snooping."""
    lines = ["link set lo up"]
    for bridge in ("management", "data", "second"):
        lines += [
            f"link add {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set {bridge} up",
        ]
    _ip(inits[SWITCH], lines)


def connect(hosts: Sequence[Host], inits: Mapping[str, int]) -> None:
    """Connect new nodes to the switch and configure their interfaces, all at the same time.

    Raises:
        SetupError: an interface cannot be made as cluster.toml names it.
    """
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(partial(_connect, inits), hosts))


def _connect(inits: Mapping[str, int], host: Host) -> None:
    switch, node = inits[SWITCH], inits[host.name]
    ends = {"management": MANAGEMENT_INTERFACE, "docker": f"veth{host.index:07x}"}
    if host.data_interface:
        ends["data"] = host.data_interface
    if host.second_address:
        ends["second"] = SECOND_INTERFACE
    ports = {name: f"{name}{host.index}" for name in ends}
    for port in ports.values():  # left over from an earlier start of this node; the kernel may not have removed it yet
        run_in(switch, ["ip", "link", "delete", port], must_work=False)
    # Created in their final namespaces: a name that the machine itself uses does not matter.
    # A repaired node keeps its hardware addresses, because its peers remember them for minutes.
    cables = [
        f"link add {ports[cable]} netns {switch} type veth peer name {ends[cable]} "
        f"address {_mac_address(host, number)} netns {node}"
        for number, cable in enumerate(ends)
    ]
    _run(["ip", "-batch", "-"], script="\n".join(cables))
    _ip(switch, [f"link set {ports[cable]} master {cable}" for cable in ends if cable != "docker"])
    _ip(switch, [f"link set {port} up" for port in ports.values()])
    _ip(
        node,
        [
            "link set lo up",
            f"address add {host.management_address} dev {MANAGEMENT_INTERFACE}",
            *([_address(host.data_address, host.data_interface)] if host.data_interface else []),
            *([_address(host.second_address, SECOND_INTERFACE)] if host.second_address else []),
            # As on any machine with docker: the same address everywhere, and a container that keeps it up.
            f"link add {DOCKER_INTERFACE} type bridge stp_state 0 forward_delay 0",
            f"address add {DOCKER_ADDRESS} dev {DOCKER_INTERFACE}",
            f"link set {ends['docker']} master {DOCKER_INTERFACE}",
            *(f"link set {name} up" for name in (*ends.values(), DOCKER_INTERFACE)),
        ],
    )
    for pid, names in ((switch, ports), (node, ends)):
        # Packets that are segmented later would count as one in checks of size and rate.
        offload = 'for nic; do ethtool -K "$nic" tso off gso off gro off; done'
        run_in(pid, ["sh", "-ec", offload, "sh", *names.values()])
        for cable in {"data", "second"} & names.keys():
            shape(pid, names[cable], LINK_GBIT_S)


def _address(address: str, interface: str) -> str:
    return f"address add {address} dev {interface} {'nodad' if ':' in address else ''}"


def _mac_address(host: Host, cable: int) -> str:
    """Return a locally administered address for one of a node's cables."""
    return f"02:00:00:{cable:02x}:{host.index >> 8:02x}:{host.index & 0xFF:02x}"


def shape(pid: int, interface: str, gbit_s: float) -> bool:
    """Limit the rate of an interface's outgoing traffic.

    Returns:
        Whether it is limited now: a kernel without tbf cannot limit it.
    """
    burst = max(16, round(128 * gbit_s / LINK_GBIT_S))
    limit = ["rate", f"{gbit_s * 1000:g}mbit", "burst", f"{burst}kb", "latency", "20ms"]
    # `change` keeps the queue's handle, so that a link after a slow-link fault is as before.
    tc = 'tc qdisc change dev "$@" 2>/dev/null || tc qdisc replace dev "$@"'
    return not run_in(pid, ["sh", "-c", tc, "sh", interface, "root", "tbf", *limit], must_work=False).returncode


def read_links(init_pid: int) -> list[dict[str, Any]]:
    """Return the interfaces of a node: name, addresses, is_up, mtu, and rate_gbit_s if it is limited."""
    links = json.loads(run_in(init_pid, ["ip", "-json", "address"]).stdout)
    queues = json.loads(run_in(init_pid, ["tc", "-json", "qdisc", "show"]).stdout or "[]")
    rates = {queue["dev"]: queue["options"]["rate"] * 8 / 1e9 for queue in queues if queue.get("kind") == "tbf"}
    return [
        {
            "name": link["ifname"],
            "addresses": [
                f"{address['local']}/{address['prefixlen']}"
                for address in link["addr_info"]
                if address["scope"] != "link"
            ],
            "is_up": "UP" in link["flags"],
            "mtu": link["mtu"],
            "rate_gbit_s": rates.get(link["ifname"]),
        }
        for link in links
    ]


def _ip(pid: int, lines: Sequence[str]) -> None:
    run_in(pid, ["ip", "-batch", "-"], script="\n".join(lines) + "\n")


# /proc


def _own_processes(lab_dir: Path) -> list[tuple[int, str, bool]]:
    """Return starters and inits of this lab: pid, node, and whether it is process 1 of its namespace."""
    found = []
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            *_, script, directory, node = ["", "", *Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")]
            if directory == str(lab_dir) and script.endswith("lab/init.py"):
                status = Path(f"/proc/{pid}/status").read_text()
                pids = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
                found.append((pid, node, len(pids) > 1 and pids[-1] == "1"))
    return found


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _namespace(pid: int | str, kind: str) -> str:
    """Return the identity of a process's namespace; empty if the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:
        return ""
