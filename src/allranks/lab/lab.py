"""Which labs exist, and how are they started and stopped?

    lab = Lab("demo")
    lab.up(cluster, tasks_per_node=1)      # if it already runs: repairs what is missing
    lab.find_init("node03")                # process 1 of a node, to be entered with hosts.run_in
    lab.down()                             # also after an `up` that was killed

A lab is a directory, and processes whose command lines name that directory; nothing else. `up` has five phases:

1 the directory contains the plan   2 processes   3 links   4 daemons   5 all nodes have reported

Each phase keeps what already exists, so `up` may be killed at any point and repeated. The directory is locked
meanwhile; the kernel releases the lock when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.lab import accounting, hosts, job_ids, release, slurm_daemons
from allranks.lab.hosts import SWITCH
from allranks.lab.node_plan import Host, plan_controller, plan_hosts, render_hosts_file
from allranks.model.cluster import Cluster
from allranks.model.errors import SetupError, UsageError

DEFAULT_NAME = "lab"
DEFAULT_DIR = "/run/allranks-lab"
LOCK_S = 60.0
"""How long to wait for another `up` or `down` of the same lab."""
PROGRESS_S = 2.0
"""A step that takes longer is reported, and again after each such interval."""
MAX_PATH = 80
"""A unix socket's path has at most 107 bytes."""

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "ethtool": "ethtool",
    "nsenter": "util-linux",
    "taskset": "util-linux",
}
"""Command -> the Debian package that contains it."""
_DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd")


class Lab:
    """One lab, running or not."""

    def __init__(self, name: str = DEFAULT_NAME, *, env: Mapping[str, str] = os.environ) -> None:
        """Name a lab; ALLRANKS_LAB_DIR in `env` is the directory above it.

        Raises:
            UsageError: the name is not valid as a file name and as SLURM's ClusterName.
        """
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", name):
            raise UsageError(f"--name {name!r}: expected up to 32 lower-case letters, digits and inner hyphens")
        self.name, self._env = name, env
        self.dir = Path(env.get("ALLRANKS_LAB_DIR") or DEFAULT_DIR).absolute() / name
        if len(os.fsencode(self.dir)) > MAX_PATH or not re.fullmatch(r"[\w./+-]+", str(self.dir)):
            raise UsageError(
                f"ALLRANKS_LAB_DIR: {self.dir}: expected at most {MAX_PATH} plain characters: SLURM's files"
            )

    @property
    def label(self) -> str:
        """Its name in messages: `lab`, or `lab second` if it was given a name."""
        return "lab" if self.name == DEFAULT_NAME else f"lab {self.name}"

    def up(
        self,
        cluster: Cluster,
        *,
        tasks_per_node: int = 1,
        slurm_release: str | None = None,
        has_accounting: bool = False,
        has_login: bool = False,
        kill_wait_s: int = slurm_daemons.KILL_WAIT_S,
        grace_s: int = slurm_daemons.GRACE_S,
        say: Callable[[str], None] = lambda _: None,
    ) -> Sequence[Host]:
        """Put every node into service: keep what already exists, create what is missing.

        Args:
            cluster: what to build.
            tasks_per_node: workers that must fit on a node at the same time.
            slurm_release: one of release.RELEASES; None for the machine's own SLURM.
            has_accounting: whether slurmdbd and MariaDB run beside slurmctld.
            has_login: whether a login node runs slurmctld, instead of the first node.
            kill_wait_s: SLURM's time between SIGTERM and SIGKILL.
            grace_s: SLURM's time between the SIGTERM of a preemption and the end.
            say: gets a line about each step that takes more than PROGRESS_S.

        Raises:
            ConfigError: cluster.toml lacks a value, or has one that cannot be built.
            UsageError: the lab is up with another cluster.
            SetupError: this machine cannot do it, or a node does not come up.
        """
        planned = plan_hosts(cluster)
        controlling = plan_controller(planned, has_login=has_login)
        every = tuple(dict.fromkeys((*planned, controlling)))
        check_machine()
        if has_accounting:
            accounting.check_commands(has_release=slurm_release is not None)
        root = None
        if slurm_release and not (self.dir / "lab.json").exists():
            release.check_place()
            root = release.prepare_root(slurm_release, env=os.environ, say=say)
        progress = _Progress(say)
        with self.locked():
            # Phase 1: the directory contains the plan.
            plan = {
                "cluster": msgspec.to_builtins(cluster),
                "tasks_per_node": tasks_per_node,
                "slurm": slurm_release,
                "accounting": has_accounting,
                "login": has_login,
                "kill_wait_s": kill_wait_s,
                "grace_s": grace_s,
            }
            self._write_plan(plan, cluster, planned, controlling, root)
            # Phase 2: processes. A node without all its links is left from an `up` that was killed: replace it.
            names = self._find_missing([SWITCH, *(host.name for host in every)])
            progress(f"creating the namespaces of {len(names)} nodes")
            hosts.kill_hosts(self.dir, names)
            for name in names:  # a new boot_id for each start of a node
                (self.dir / "nodes" / name / "boot_id").write_text(f"{uuid.uuid4()}\n")
            hosts.start_hosts(self.dir, names)
            # Phase 3: links.
            inits = hosts.find_inits(self.dir)
            hosts.share_cores(inits, planned)
            progress("connecting the nodes")
            if SWITCH in names:
                hosts.make_switch(inits)
            hosts.connect([host for host in every if host.name in names], inits)
            for name in names:
                self._whole_path(name).write_text(hosts.identify(inits[name]))
            # Phase 4: daemons.
            progress("starting munge and SLURM")
            controller = inits[controlling.name]
            if has_accounting:
                slurm_daemons.start_munge(controller, self.dir)  # before slurmdbd, which needs it
                accounting.start(self.name, controller, self.dir, progress=progress)
            slurm_daemons.start_daemons(planned, inits, self.dir, controller=controller)
            # Phase 5: all nodes have reported.
            slurm_daemons.wait_until_idle(planned, inits, self.dir, controller=controller, progress=progress)
        return planned

    def mend(self, *, say: Callable[[str], None] = lambda _: None) -> None:
        """Replace the dead parts of a lab that is up, and put them back into service.

        Raises:
            UsageError: the lab is not up.
            SetupError: a node does not come up.
        """
        if not (plan := self._read_plan()):
            raise self._not_up()
        self.up(
            msgspec.convert(plan["cluster"], Cluster),
            tasks_per_node=plan["tasks_per_node"],
            slurm_release=plan["slurm"],
            has_accounting=plan["accounting"],
            has_login=plan["login"],
            kill_wait_s=plan["kill_wait_s"],
            grace_s=plan["grace_s"],
            say=say,
        )

    def down(self) -> bool:
        """Remove everything that `up` created and nothing else, also the remains of a killed `up`.

        Returns:
            Whether there was anything to remove.

        Raises:
            SetupError: a process does not go away.
        """
        check_root()
        was_there = self.dir.exists() or bool(hosts.find_inits(self.dir))
        with self.locked():
            hosts.kill_hosts(self.dir)
            job_ids.end(self.dir, env=self._env)
            try:
                shutil.rmtree(self.dir)
            except OSError as exc:
                raise SetupError(f"{self.label}: {exc.filename}: {str(exc.strerror).lower()}") from exc
        if self.dir.parent == Path(DEFAULT_DIR):  # a different directory belongs to the user
            with contextlib.suppress(OSError):  # it contains other labs
                self.dir.parent.rmdir()
        return was_there

    def find_init(self, node: str) -> int:
        """Return the pid of a node's process 1.

        Raises:
            UsageError: there is no such node, or the lab is not up.
        """
        names, inits = self._names(), hosts.find_inits(self.dir)
        if not names or not inits:
            raise self._not_up()
        if node not in names and node != SWITCH:
            raise UsageError(f"{self.label} has no node {node!r}: expected one of {', '.join(names)}")
        if node not in inits:
            raise SetupError(f"{self.label}: {node} is dead; restart it: allranks lab up --name {self.name}")
        return inits[node]

    def planned_hosts(self) -> Sequence[Host]:
        """Return the compute nodes of the plan, in order; empty if the lab is not up."""
        plan = self._read_plan()
        return plan_hosts(msgspec.convert(plan["cluster"], Cluster)) if plan else ()

    def controller(self) -> Host:
        """Return the node that runs slurmctld, on which users work: the login node, or without one the first node.

        Raises:
            UsageError: the lab is not up.
        """
        if not (plan := self._read_plan()):
            raise self._not_up()
        return plan_controller(self.planned_hosts(), has_login=plan.get("login", False))  # absent in older labs

    def status(self) -> dict[str, Any]:
        """Return the current state: name, directory, and each node with its SLURM state, interfaces and pids.

        Raises:
            UsageError: the lab is not up.
        """
        names, inits = self._names(), hosts.find_inits(self.dir)
        if not names or not inits:
            raise self._not_up()
        computing = [host.name for host in self.planned_hosts()]
        controller = inits.get(self.controller().name)
        states = (
            slurm_daemons.read_states(controller)
            if controller and "slurmctld" in hosts.processes_in(controller)
            else {}
        )
        return {
            "name": self.name,
            "slurm": slurm_daemons.read_version(controller) if controller else "",
            "directory": str(self.dir),
            "slurm_conf": str(slurm_daemons.conf_path(self.dir)),
            "switch_pid": inits.get(SWITCH),
            "nodes": [
                {"name": name, "is_login": name not in computing, "slurm_state": states.get(name)}
                | _node_status(inits.get(name))
                for name in names
            ],
        }

    def _write_plan(
        self, plan: Mapping[str, Any], cluster: Cluster, planned: Sequence[Host], controller: Host, root: Path | None
    ) -> None:
        wanted = json.dumps(plan, indent=2)
        plan_path = self.dir / "lab.json"
        if plan_path.exists():
            if plan_path.read_text() != wanted:
                raise UsageError(
                    f"{self.label} is up with another cluster.toml or other options (see {plan_path}); "
                    f"allranks lab down --name {self.name} first, or choose another --name"
                )
            return
        every = tuple(dict.fromkeys((*planned, controller)))
        for name in (SWITCH, *(host.name for host in every)):
            own = self.dir / "nodes" / name
            (own / "spool").mkdir(parents=True, exist_ok=True)
            if name != SWITCH:
                (own / "hosts").write_text(render_hosts_file(every))
                (own / "hostname").write_text(f"{name}\n")
                (own / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
        first_job = job_ids.begin(env=self._env)
        slurm_daemons.write_files(
            self.name,
            planned,
            cluster,
            self.dir,
            controller=controller,
            tasks_per_node=plan["tasks_per_node"],
            first_job=first_job,
            kill_wait_s=plan["kill_wait_s"],
            grace_s=plan["grace_s"],
        )
        if plan["accounting"]:
            accounting.write_files(controller, self.dir)
        if root is not None:
            release.write_mounts(root, self.dir)
        # Last, and atomically: if it exists, so do all the others.
        draft = plan_path.with_suffix(".draft")
        draft.write_text(wanted)
        draft.rename(plan_path)

    def _read_plan(self) -> dict[str, Any]:
        """Return lab.json; empty if the lab is not up."""
        try:
            plan: dict[str, Any] = json.loads((self.dir / "lab.json").read_text())
        except FileNotFoundError:
            return {}
        return plan

    def _names(self) -> list[str]:
        """Return the names of all nodes, the login node last; empty if the lab is not up."""
        planned = self.planned_hosts()
        return list(dict.fromkeys((*(host.name for host in planned), self.controller().name))) if planned else []

    def _find_missing(self, names: Sequence[str]) -> list[str]:
        """Return the nodes that are dead or lack links. Without the switch, no node has links."""
        inits = hosts.find_inits(self.dir)

        def is_whole(name: str) -> bool:
            try:
                return name in inits and self._whole_path(name).read_text() == hosts.identify(inits[name])
            except FileNotFoundError:
                return False

        return [name for name in names if not is_whole(name)] if is_whole(SWITCH) else list(names)

    def _whole_path(self, name: str) -> Path:
        return self.dir / "nodes" / name / "whole"

    def _not_up(self) -> UsageError:
        others = sorted(path.name for path in self.dir.parent.glob("*/"))
        running = f" (running: {', '.join(others)})" if others else ""
        return UsageError(f"{self.label} is not up{running}; start it: allranks lab up --name {self.name}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the directory, and lock it against another `up` or `down`."""
        deadline = time.monotonic() + LOCK_S
        while True:
            fd = -1
            with contextlib.suppress(FileNotFoundError):  # a `down` removed it first
                self.dir.mkdir(parents=True, exist_ok=True)
                fd = os.open(self.dir, os.O_RDONLY | os.O_DIRECTORY)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(fd), self.dir.stat()):
                        break
            if fd >= 0:
                os.close(fd)
            if time.monotonic() > deadline:
                raise SetupError(
                    f"{self.label}: another `allranks lab` has used {self.dir} for {LOCK_S:.0f} s; "
                    f"wait for it or end it"
                )
            time.sleep(0.05)
        try:
            yield
        finally:
            os.close(fd)


class _Progress:
    """Reports what it waits for, if that takes long."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._began = say, time.monotonic()
        self._next = self._began + PROGRESS_S

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._say(f"{text} ({now - self._began:.0f} s)")
            self._next = now + PROGRESS_S


def check_root() -> None:
    """Refuse users who cannot create namespaces, and nodes of a lab, which see only their own processes.

    Raises:
        SetupError: this is not root.
        UsageError: this is a node.
    """
    if os.geteuid() != 0:
        raise SetupError("lab: creating network namespaces needs root: sudo allranks lab ...")
    if "lab/init.py\0" in Path("/proc/1/cmdline").read_text(errors="replace"):
        raise UsageError(
            f"lab: this is {os.uname().nodename}, a node of a lab: run this on the machine that hosts the lab"
        )


def check_machine() -> None:
    """Refuse a machine that lacks commands of the lab.

    Raises:
        SetupError: this is not root, or commands are missing; the message contains the command that installs them.
        UsageError: this is a node of a lab.
    """
    check_root()
    missing = [command for command in PACKAGES if shutil.which(command, path=hosts.SYSTEM_PATH) is None]
    if missing:
        packages = " ".join(dict.fromkeys(PACKAGES[command] for command in missing))
        raise SetupError(f"lab: not installed: {', '.join(missing)}: apt-get install {packages}")


def _node_status(init_pid: int | None) -> dict[str, Any]:
    running = hosts.processes_in(init_pid) if init_pid else {}
    return {
        "init_pid": init_pid,
        "daemon_pids": {daemon: running[daemon][0] for daemon in _DAEMONS if daemon in running},
        "interfaces": hosts.read_links(init_pid) if init_pid else [],
    }
