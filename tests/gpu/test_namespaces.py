"""Does NCCL come up over sockets between network namespaces, as between machines, and is a cut link named?

Two namespaces joined by a veth pair; needs root and iproute2. The ranks share the GPU (rank.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conftest import wait_until

from .conftest import Note, StartJob
from .job import GUARD, is_rehearsal

pytestmark = pytest.mark.rehearsable
NETWORK = GUARD + '[network]\ndata = "10.213.7.0/24"\n'


@dataclass(frozen=True, slots=True)
class Link:
    """Two namespaces, a and b, and the interface of each."""

    names: tuple[str, str]
    interface: str = "data0"

    def prefixes(self) -> list[list[str]]:
        """What a command begins with that runs in each, under a host name of its own."""
        rename = ["unshare", "--uts", "sh", "-c", 'echo "$0" >/proc/sys/kernel/hostname; exec "$@"']
        return [["ip", "netns", "exec", name, *rename, name] for name in self.names]

    def is_up(self) -> bool:
        """Whether both ends are; a veth pair takes a moment."""
        look = ["cat", f"/sys/class/net/{self.interface}/operstate"]
        return all(ip("netns", "exec", name, *look) == "up\n" for name in self.names)

    def cut(self) -> float:
        """Take the link down on b's side; returns when."""
        ip("-n", self.names[1], "link", "set", self.interface, "down")
        return time.monotonic()


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


@pytest.fixture
def link() -> Iterator[Link]:
    if os.geteuid() != 0:
        pytest.skip("not root: no network namespaces can be made")
    if missing := [program for program in ("ip", "unshare") if shutil.which(program) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed: no network namespaces can be made")
    link = Link((f"gpu{os.getpid()}a", f"gpu{os.getpid()}b"))
    try:
        for name in link.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", link.interface, "netns", link.names[0], "type", "veth",
           "peer", "name", link.interface, "netns", link.names[1])  # fmt: skip
        for host, name in enumerate(link.names, start=1):
            ip("-n", name, "address", "add", f"10.213.7.{host}/24", "dev", link.interface)
            ip("-n", name, "link", "set", link.interface, "up")
    except subprocess.CalledProcessError as exc:
        remove(link)
        pytest.skip(f"no network namespaces can be made here: {exc.stderr.strip()}")
    try:
        wait_until(link.is_up, "the pair of interfaces is up")
        yield link
    finally:
        remove(link)


def remove(link: Link) -> None:
    for name in link.names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def test_two_namespaces_form_a_group_over_their_data_network(link: Link, start: StartJob, note: Note):
    """Expected: allranks finds data0 from the subnet and NCCL connects over it, "NET/Socket : Using [0]data0" (NCCL
    2.28.9, src/transport/net_socket.cc); the sum is right, and both end with 0.
    """
    script = """\
    from rank import add_up, dist, form_group, rank
    form_group()
    print("sum", add_up(rank + 1), flush=True)
    dist.destroy_process_group()
    """
    job = start(
        script,
        flags=["--ignore", "AR107"],
        prefixes=link.prefixes(),
        endpoint="10.213.7.1",
        cluster=NETWORK,
        env={"NCCL_DEBUG": "INFO"},
    )
    assert job.end() == [0, 0], job.tail()
    assert job.out.count("sum 3.0") == 2
    used = sorted(set(re.findall(r"NET/Socket : Using \[0\](\w+)", job.out + job.rank_errors)))
    note("NCCL's interface", used)
    assert is_rehearsal() or used == ["data0"]


def test_a_cut_link_under_nccl_is_named(link: Link, start: StartJob, note: Note):
    """Expected: the only link of two nodes goes down while they train. The leader has no other way to the other node,
    so the verdict is a lost node or a link that is down, on b or between both, within a minute and long before NCCL's
    600 s.
    """
    script = """\
    import time
    from rank import add_up, form_group
    form_group()
    while True:
        add_up()
        time.sleep(0.02)
    """
    guard = NETWORK.replace("[guard]\n", "[guard]\ngone_s = 4\n")
    job = start(script, flags=["--ignore", "AR107"], prefixes=link.prefixes(), endpoint="10.213.7.1", cluster=guard)
    job.wait_for("READY")
    cut_s = link.cut()
    codes = job.end()
    note("seconds from the cut to the end", f"{time.monotonic() - cut_s:.1f}")
    note("exit codes", codes)
    note("culprits", job.culprits())
    assert 0 not in codes
    assert job.culprits()[0][0] in ("AR012", "AR210", "AR211", "AR215"), job.tail()
