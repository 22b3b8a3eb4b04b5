"""SLURM's accounting in the lab: MariaDB and slurmdbd beside slurmctld, so that `sacct` answers.

MariaDB is Debian's package of the machine. It listens on the node's loopback only; its files are in LAB_DIR/database.
slurmdbd has to answer before slurmctld starts: a new slurmctld waits for it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from allranks.lab.hosts import SYSTEM_PATH, processes_in, run_in
from allranks.lab.node_plan import Host
from allranks.lab.release import daemon_command
from allranks.model.errors import SetupError

READY_S = 60.0
"""Deadline for each daemon to answer: MariaDB makes its files first."""
PORT = 3306
DATABASE, USER = "slurm_acct_db", "slurm"
PACKAGES = {"mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server", "mariadb": "mariadb-client"}
"""Command -> the Debian package that contains it; slurmdbd besides, unless the lab has another release of SLURM."""


def check_commands(*, has_release: bool) -> None:
    """Refuse a machine that lacks commands of the accounting.

    Raises:
        SetupError: the message has the command that installs them.
    """
    wanted = PACKAGES | ({} if has_release else {"slurmdbd": "slurmdbd"})
    missing = [command for command in wanted if shutil.which(command, path=SYSTEM_PATH) is None]
    if missing:
        packages = " ".join(dict.fromkeys(wanted[command] for command in missing))
        raise SetupError(f"lab: --accounting: not installed: {', '.join(missing)}: apt-get install {packages}")


def write_files(controller: Host, lab_dir: Path) -> None:
    """Write slurmdbd.conf beside slurm.conf, where slurmdbd looks for it, and let slurm.conf name slurmdbd."""
    conf = lab_dir / "slurm" / "slurmdbd.conf"
    conf.touch(mode=0o600)  # slurmdbd refuses a file that others can read
    conf.write_text(render_slurmdbd_conf(controller.name, lab_dir, password=os.urandom(16).hex()))
    slurm_conf = lab_dir / "slurm" / "slurm.conf"
    slurm_conf.write_text(use_accounting(slurm_conf.read_text(), controller.name, lab_dir))


def use_accounting(slurm_conf: str, controller: str, lab_dir: Path) -> str:
    """Return slurm.conf with slurmdbd instead of no accounting."""
    lines = [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={controller}",
        # With munge, the "password" is the path of the socket.
        f"AccountingStoragePass={lab_dir}/munge.socket",
    ]
    return re.sub(r"(?m)^AccountingStorageType=.*$", lambda _: "\n".join(lines), slurm_conf)


def render_slurmdbd_conf(controller: str, lab_dir: Path, *, password: str) -> str:
    """Return slurmdbd.conf.

    Args:
        controller: name of the node on which it runs.
        lab_dir: directory of keys and logs.
        password: of the database's user.
    """
    lines = [
        f"DbdHost={controller}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={lab_dir}/munge.socket",
        f"LogFile={lab_dir}/slurmdbd.log",
        f"PidFile={lab_dir}/slurmdbd.pid",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={PORT}",
        f"StorageUser={USER}",
        f"StoragePass={password}",
        f"StorageLoc={DATABASE}",
    ]
    return "\n".join(lines) + "\n"


def start(name: str, controller: int, lab_dir: Path, *, progress: Callable[[str], None]) -> None:
    """Start MariaDB and slurmdbd unless they run, and register the cluster. munged runs already.

    Args:
        name: of the cluster.
        controller: process 1 of the node.
        lab_dir: directory of the lab.
        progress: gets what it waits for.
    Raises:
        SetupError: one of them does not answer.
    """
    running = processes_in(controller)
    data, socket = lab_dir / "database", lab_dir / "database.socket"
    client = ["mariadb", "--no-defaults", "--user=root", f"--socket={socket}"]
    if "mariadbd" not in running:
        if not data.exists():
            install = ["mariadb-install-db", "--no-defaults", "--user=root", "--skip-test-db"]
            run_in(controller, [*install, "--auth-root-authentication-method=normal", f"--datadir={data}"])
        # Small: the lab's directory is in memory by default.
        options = [
            *("--no-defaults", "--user=root", f"--datadir={data}", f"--socket={socket}", f"--port={PORT}"),
            *("--bind-address=127.0.0.1", "--skip-name-resolve", f"--pid-file={lab_dir}/mariadbd.pid"),
            *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M"),
        ]
        detach = 'log=$1; shift; setsid "$@" >>"$log" 2>&1 </dev/null &'
        run_in(controller, ["sh", "-c", detach, "sh", str(lab_dir / "mariadbd.log"), "mariadbd", *options])
    _wait(controller, [*client, "--execute=SELECT 1"], "MariaDB", lab_dir / "mariadbd.log", progress)
    if "slurmdbd" not in running:
        conf = (lab_dir / "slurm" / "slurmdbd.conf").read_text()
        password = next(line.partition("=")[2] for line in conf.splitlines() if line.startswith("StoragePass="))
        script = f"""
            CREATE DATABASE IF NOT EXISTS {DATABASE};
            CREATE USER IF NOT EXISTS '{USER}'@'127.0.0.1' IDENTIFIED BY '{password}';
            GRANT ALL ON {DATABASE}.* TO '{USER}'@'127.0.0.1';
        """
        run_in(controller, client, script=script)
        run_in(controller, ["env", f"SLURM_CONF={lab_dir}/slurm/slurm.conf", daemon_command(lab_dir, "slurmdbd")])
    sacctmgr = ["env", f"SLURM_CONF={lab_dir}/slurm/slurm.conf", "sacctmgr"]
    _wait(controller, [*sacctmgr, "--noheader", "list", "cluster"], "slurmdbd", lab_dir / "slurmdbd.log", progress)
    if name not in run_in(controller, [*sacctmgr, "--noheader", "list", "cluster", "format=cluster%40"]).stdout.split():
        run_in(controller, [*sacctmgr, "--immediate", "add", "cluster", name])


def _wait(controller: int, command: Sequence[str], who: str, log: Path, progress: Callable[[str], None]) -> None:
    """Wait until a command succeeds."""
    deadline = time.monotonic() + READY_S
    while run_in(controller, command, must_work=False).returncode:
        if time.monotonic() > deadline:
            last = " | ".join(log.read_text(errors="replace").splitlines()[-3:]) if log.exists() else "(no log)"
            raise SetupError(f"lab: {who} does not answer after {READY_S:.0f} s; the last lines of {log}: {last}")
        progress(f"waiting for {who}")
        time.sleep(0.2)
