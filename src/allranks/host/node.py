"""The facts of this machine for its node report, read in threads, within a deadline.

`read_facts` is quick and reads what a plan needs. `read_card_facts` looks at everything that a cause may judge; each
reader that can hang (a driver, a file system, a resolver) has a thread of its own, and at the deadline the card says
what is there and, in `unread`, what is not and why. A thread that hangs is left behind as a daemon.
`begin_card_facts` does so beside whatever else the caller has to do.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks import __version__
from allranks.host import clock, fabric, gpu, limits, net, rdma, script, software
from allranks.model.card import Facts, Interface, JobDirectory
from allranks.model.fix import ANYBODY, Reader, SchedulerKind, find_scheduler

_OF_PODS = Path("var/run/secrets/kubernetes.io")
"""Kubernetes mounts a pod's account here."""
_GRACE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One look at this machine."""

    host: str
    interfaces: tuple[Interface, ...]
    num_gpus: int
    """That the driver shows and this process may use."""
    num_promised_gpus: int | None = None
    """That SLURM says it gave to the job here."""
    num_cpus: int
    """Cores this process may run on."""
    reader: Reader = ANYBODY
    """For whom are fixes that this node writes."""


def read_facts(env: Mapping[str, str]) -> NodeFacts:
    """Look at this machine.

    Args:
        env: SLURM's name of the node in it goes before the machine's own; CUDA_VISIBLE_DEVICES narrows the GPUs.
    """
    return NodeFacts(
        host=name_of(env),
        interfaces=tuple(net.read_interfaces()),
        num_gpus=gpu.count_gpus(env),
        num_promised_gpus=_read_promised_gpus(env),
        num_cpus=len(os.sched_getaffinity(0)),
        reader=Reader(scheduler=read_scheduler(env), vendor=gpu.read_vendor()),
    )


def name_of(env: Mapping[str, str]) -> str:
    """Return this node's name; the scheduler's name if there is one."""
    return env.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0] or "localhost"


def read_scheduler(env: Mapping[str, str], *, root: Path = Path("/")) -> SchedulerKind:
    """Return what placed this process; a session of ssh into a pod, as mpirun begins one, has none of its variables."""
    found = find_scheduler(env)
    is_pod = found is SchedulerKind.NONE and os.path.exists(root / _OF_PODS)  # noqa: PTH110  (never raises)
    return SchedulerKind.POD if is_pod else found


def _read_promised_gpus(env: Mapping[str, str]) -> int | None:
    """Read SLURM_GPUS_ON_NODE, which is a number; SLURM 20.11 has only SLURM_STEP_GPUS, `0,1`."""
    if (number := env.get("SLURM_GPUS_ON_NODE", "")).isdecimal():
        return int(number)
    indices = env.get("SLURM_STEP_GPUS", "").split(",")
    return len(indices) if all(index.isdecimal() for index in indices) else None


def begin_card_facts(
    env: Mapping[str, str], *, names: Sequence[str] = (), script_path: Path | None = None
) -> Callable[[], Facts]:
    """Begin to look in the background; what is returned waits for the facts, and gives the same ones again.

    The run directory is not looked at: the leader makes it about now, and asks all to look when it is there.

    Args:
        env: the environment that the workers will get.
        names: hosts whose addresses are looked up from here; the own host name always is.
        script_path: what the workers will run, where it is a Python file.
    """
    found = Future[Facts]()

    def read() -> None:
        try:
            found.set_result(read_card_facts(env, names=names, script_path=script_path))
        except BaseException as exc:  # no thread for one of the parts; whoever waits for the facts gets it
            found.set_exception(exc)

    threading.Thread(target=read, daemon=True).start()
    return found.result


def read_card_facts(
    env: Mapping[str, str],
    *,
    names: Sequence[str] = (),
    run_dir: Path | None = None,
    script_path: Path | None = None,
    deadline_s: float = 3.0,
    root: Path = Path("/"),
) -> Facts:
    """Look at everything on this machine that a job's start can depend on; never raises, never outlives its deadline.

    Args:
        env: the environment that the workers will get.
        names: hosts whose addresses are looked up from here; the own host name always is.
        run_dir: the job's directory on a shared file system.
        script_path: what the workers will run, where it is a Python file.
        deadline_s: what has not answered then stands in `unread`. GPUs without persistence mode need seconds.
        root: where /proc, /sys, /dev and /etc are; tests feed a tree.
    """
    end_s = time.monotonic() + deadline_s
    host_name = os.uname().nodename
    wanted = list(dict.fromkeys([host_name, *names]))
    places = limits.name_places(env, run_dir=run_dir, root=root)
    slow = [
        _Reader(("resolved",), lambda: _read_names(wanted, deadline_s)),
        _Reader(("packages", "nccl_version", "torch_cuda"), _read_packages),
        _Reader(("net_plugin",), lambda: _Part({"net_plugin": software.find_net_plugin(env, root=root)})),
        _Reader(("nccl_conf",), lambda: _Part({"nccl_conf": software.hash_nccl_conf(env, root=root)})),
        _Reader(("gpus",), lambda: _read_gpus(env, deadline_s, root)),
        _Reader(("gpus.remap_pending",), lambda: _read_remapped(env, deadline_s)),
        _Reader(("gpus.processes",), lambda: _read_processes(env, deadline_s, root)),
        _Reader(("gpus.nvlinks_active",), lambda: _read_nvlinks(env, deadline_s)),
        _Reader(("cuda_init",), lambda: _read_cuda(env, deadline_s)),
        _Reader(("fabric_manager",), lambda: _read_manager(env, deadline_s)),
        _Reader(("fabric_manager_version",), lambda: _read_manager_version(env, deadline_s)),
        _Reader(("xids",), lambda: _read_xids(env, deadline_s)),
        _Reader(("rdma_ports.active_mtu",), lambda: _read_mtus(env, deadline_s, root)),
        _Reader(("code",), lambda: _Part({"code": script.read_code(script_path) if script_path else None})),
        *(_Reader((f"place {purpose}",), _place_reader(purpose, path)) for purpose, path in places.items()),
    ]
    for reader in slow:
        reader.start()
    quick = [
        _Reader(("interfaces",), lambda: _Part({"interfaces": tuple(net.read_interfaces(root=root))})),
        _Reader(("boot_id",), lambda: _Part({"boot_id": net.read_boot_id(root=root)})),
        _Reader(("port_range",), lambda: _Part({"port_range": net.read_port_range(root=root)})),
        _Reader(("glibc_version",), lambda: _Part({"glibc_version": software.read_glibc_version()})),
        _Reader(("scheduler",), lambda: _Part({"scheduler": read_scheduler(env, root=root)})),
        _Reader(("vendor",), lambda: _Part({"vendor": gpu.read_vendor(root=root)})),
        _Reader(("environment",), lambda: _Part({"environment": software.select_environment(env)})),
        _Reader(("limits",), lambda: _Part({"limits": limits.read_limits()})),
        _Reader(("num_cpus",), lambda: _Part({"num_cpus": limits.count_cpus(root=root)})),
        _Reader(("load",), lambda: _Part({"load": limits.read_load(root=root)})),
        _Reader(("is_clock_synchronised",), _read_clock),
        _Reader(("driver_version",), lambda: _Part({"driver_version": gpu.read_driver_version(root=root)})),
        _Reader(("rdma_ports",), lambda: _Part({"rdma_ports": rdma.read_rdma_ports(root=root)})),
        _Reader(("has_peer_memory",), lambda: _Part({"has_peer_memory": rdma.has_peer_memory(root=root)})),
    ]
    for reader in quick:
        reader.read()
    # A command is killed at the deadline itself; its reader then needs a moment to say so.
    for reader in slow:
        reader.join(max(0.0, end_s + _GRACE_S - time.monotonic()))
    return _put_together([*quick, *slow], places, host_name=host_name, deadline_s=deadline_s)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one reader found: values by field of Facts (or a name that _put_together knows), and what it did not."""

    values: Mapping[str, Any] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)


class _Reader(threading.Thread):
    """One look at one thing, in its own thread or, with `read`, in the caller's."""

    def __init__(self, fields: Sequence[str], look: Callable[[], _Part]) -> None:
        super().__init__(daemon=True, name=f"allranks-{fields[0]}")
        self.fields = fields
        self.part: _Part | None = None
        self._look = look

    def run(self) -> None:
        """Look; a failure becomes the reason why these fields are not read."""
        self.read()

    def read(self) -> None:
        """Look, and keep what was found."""
        try:
            self.part = self._look()
        except Exception as exc:  # whatever the machine does: the card says so
            words = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
            self.part = _Part(unread=dict.fromkeys(self.fields, software.cut(words)))


def _put_together(
    readers: Sequence[_Reader], places: Mapping[str, Path], *, host_name: str, deadline_s: float
) -> Facts:
    late = f"no answer within {deadline_s:.3g} s"
    values: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for reader in readers:
        part = reader.part or _Part(unread=dict.fromkeys(reader.fields, late))
        values |= part.values
        unread |= part.unread
    found = {purpose: values.pop(f"place {purpose}", None) for purpose in places}
    problems = {purpose: unread.pop(f"place {purpose}", None) for purpose in places}
    ports = rdma.with_active_mtus(values.pop("rdma_ports", ()), values.pop("rdma_ports.active_mtu", {}))
    if all(port.active_mtu for port in ports):
        unread.pop("rdma_ports.active_mtu", None)
    details = {name: values.pop(f"gpus.{name}", {}) for name in ("remap_pending", "processes", "nvlinks_active")}
    gpus = gpu.with_details(
        values.pop("gpus", ()),
        remapped=details["remap_pending"],
        processes=details["processes"],
        nvlinks=details["nvlinks_active"],
    )
    if not gpus:  # one reason is enough
        unread = {name: reason for name, reason in unread.items() if not name.startswith("gpus.")}
    return Facts(
        host_name=software.cut(host_name),
        kernel=os.uname().release,
        allranks_version=__version__,
        python_version=platform.python_version(),
        clock_s=time.time(),
        gpus=gpus,
        rdma_ports=ports,
        places=tuple(
            found[purpose] or JobDirectory(purpose=purpose, path=software.cut(str(path)), problem=problems[purpose])
            for purpose, path in places.items()
        ),
        unread=unread,
        **values,
    )


def _place_reader(purpose: str, path: Path) -> Callable[[], _Part]:
    return lambda: _Part({f"place {purpose}": limits.read_place(purpose, path)})


def _read_names(wanted: Sequence[str], deadline_s: float) -> _Part:
    resolved = net.resolve(wanted, deadline_s=deadline_s)
    silent = [name for name in wanted if name not in resolved]
    reason = f"no answer within {deadline_s:.3g} s for {', '.join(silent)}"
    return _Part({"resolved": resolved}, {"resolved": software.cut(reason)} if silent else {})


def _read_packages() -> _Part:
    packages = software.read_packages()
    return _Part({
        "packages": packages,
        "nccl_version": software.nccl_version_of(packages),
        "torch_cuda": software.read_torch_cuda(),
    })  # fmt: skip


def _read_gpus(env: Mapping[str, str], deadline_s: float, root: Path) -> _Part:
    answer = gpu.read_gpus(deadline_s=deadline_s, env=env)
    values: dict[str, Any] = {"gpus": answer.gpus}
    if answer.driver_version and gpu.read_driver_version(root=root) is None:
        values["driver_version"] = answer.driver_version
    return _Part(values, {"gpus": answer.problem} if answer.problem else {})


def _read_remapped(env: Mapping[str, str], deadline_s: float) -> _Part:
    return _details("gpus.remap_pending", gpu.read_remapped_rows(deadline_s=deadline_s, env=env))


def _read_processes(env: Mapping[str, str], deadline_s: float, root: Path) -> _Part:
    return _details("gpus.processes", gpu.read_gpu_processes(deadline_s=deadline_s, env=env, root=root))


def _read_nvlinks(env: Mapping[str, str], deadline_s: float) -> _Part:
    return _details("gpus.nvlinks_active", gpu.read_nvlinks(deadline_s=deadline_s, env=env))


def _details(name: str, details: gpu.Details[Any]) -> _Part:
    return _Part({name: details.by_uuid}, {name: details.problem} if details.problem else {})


def _read_cuda(env: Mapping[str, str], deadline_s: float) -> _Part:
    rc, problem = fabric.try_cuda(deadline_s=deadline_s, env=env)
    return _Part({"cuda_init": rc}, {"cuda_init": problem} if problem else {})


def _read_manager(env: Mapping[str, str], deadline_s: float) -> _Part:
    answer = fabric.read_fabric_manager(deadline_s=deadline_s, env=env)
    return _Part({"fabric_manager": answer.value}, {"fabric_manager": answer.problem} if answer.problem else {})


def _read_manager_version(env: Mapping[str, str], deadline_s: float) -> _Part:
    answer = fabric.read_fabric_manager_version(deadline_s=deadline_s, env=env)
    unread = {"fabric_manager_version": answer.problem} if answer.problem else {}
    return _Part({"fabric_manager_version": answer.value}, unread)


def _read_xids(env: Mapping[str, str], deadline_s: float) -> _Part:
    lines, problem = fabric.read_xids(deadline_s=deadline_s, env=env)
    return _Part({"xids": lines}, {"xids": problem} if problem else {})


def _read_mtus(env: Mapping[str, str], deadline_s: float, root: Path) -> _Part:
    mtus, problem = rdma.read_active_mtus(deadline_s=deadline_s, env=env) if rdma.has_rdma(root=root) else ({}, "")
    name = "rdma_ports.active_mtu"
    return _Part({name: mtus}, {name: problem} if problem else {})


def _read_clock() -> _Part:
    return _Part({"is_clock_synchronised": clock.is_synchronised(*clock.read_clock_state())})
