"""What does plain `horovodrun` say of the same pause? It needs an SSH server on each node of the lab."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import clean_env, wait_until
from lab.conftest import SIX_NODE, TestLab, lab_command, unique

from .marks import NEEDS_HOROVOD

pytestmark = [
    pytest.mark.lab,
    pytest.mark.torch,
    pytest.mark.by_hand,
    pytest.mark.timeout(600),
    NEEDS_HOROVOD,
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="no sshd; apt-get install openssh-server"),
]
TRAIN = Path(__file__).with_name("train.py")
HOSTS = ("master-node", "node01", "node03")
"""Nodes whose data interfaces have one name: plain Horovod gives all workers that of the driver."""
TIMEOUT_S, PORT = 45, "2222"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[TestLab]:
    """The lab with an SSH server on three nodes."""
    lab = TestLab(unique("ssh"))
    servers: list[subprocess.Popen[bytes]] = []
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)
    options = (f"HostKey={tmp_path}/host", f"AuthorizedKeysFile={tmp_path}/authorized", "StrictModes=no", "UsePAM=no")
    try:
        lab.run("up", "--cluster", SIX_NODE)
        for host in HOSTS:
            server = ["/usr/sbin/sshd", "-D", "-f", "/dev/null", "-p", PORT]
            for option in options:
                server += ["-o", option]
            servers.append(subprocess.Popen(lab_command("exec", "--name", lab.name, host, "--", *server)))
        yield lab
    finally:
        lab.run("down")
        for each in servers:
            each.wait(60)


def test_plain_horovodrun_says_nothing_of_the_pause(lab: TestLab, tmp_path: Path) -> None:
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in HOSTS))
    script.chmod(0o755)
    run = [str(Path(sys.executable).with_name("horovodrun")), "-np", "3", "--min-np", "3", "-p", PORT]
    run += ["-i", str(tmp_path / "user"), "--network-interface", "ens1f1", "--elastic-timeout", str(TIMEOUT_S)]
    run += ["--host-discovery-script", str(script), sys.executable, str(TRAIN), "1000", "0.1"]
    process = subprocess.Popen(
        lab_command("exec", "--name", lab.name, "master-node", "--", *run),
        cwd=tmp_path,
        env=clean_env(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[tuple[float, str]] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic(), line.rstrip("\n")))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with contextlib.ExitStack() as left:
        left.callback(process.kill)
        wait_until(lambda: any("batch 3 of" in line for _, line in lines), "three batches")
        found = lab.do("node01", "pgrep", "-f", f"^[^ ]*python[^ ]* {TRAIN}").stdout.split()
        struck_s = time.monotonic()
        lab.do("node01", "kill", "-KILL", *found)
        assert process.wait(200) != 0
        reader.join(10)
    assert process.stdout is not None
    process.stdout.close()
    after = [(at_s - struck_s, line) for at_s, line in lines if at_s > struck_s and "batch" not in line]
    for at_s, line in after:
        print(f"{at_s:6.1f} s  {line[:160]}")
    pause = [line for at_s, line in after if 5 < at_s < TIMEOUT_S and not re.search(r"loop uncaught|srun", line)]
    assert not [line for line in pause if re.search(r"wait|pause|slots|minimum", line, re.IGNORECASE)]
