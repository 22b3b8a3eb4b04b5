"""What the kernel says of the processes of a job, read here and not by the product: the truth of each drill.

process_state(pid), connections_between(pid, other_pid), unread_bytes(store_pid)
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Connection:
    """One TCP socket of one process."""

    own: tuple[str, int]
    peer: tuple[str, int]
    unacked_bytes: int
    unread_bytes: int
    is_listening: bool = False


def process_state(pid: int) -> str:
    """Return the letter of proc(5); empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, all threads; 0: it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def list_connections(pid: int) -> list[Connection]:
    """Return the TCP sockets of a process."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink())):
                inodes.add(found[1])
    found_here = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                sent, received = (int(number, 16) for number in fields[4].split(":"))
                ends = (_address(fields[1]), _address(fields[2]))
                found_here.append(Connection(*ends, sent, received, is_listening=fields[3] == "0A"))
    return found_here


def _address(text: str) -> tuple[str, int]:
    """Read `0100007F:1F90`; an IPv6 address that stands for an IPv4 one is that one.

    >>> _address("0100007F:1F90"), _address("0000000000000000FFFF00000100007F:1F90")
    (('127.0.0.1', 8080), ('127.0.0.1', 8080))
    """
    words, _, port = text.partition(":")
    last = struct.pack("<I", int(words[-8:], 16))
    return ".".join(map(str, last)), int(port, 16)


def connections_between(pid: int, other: int) -> list[tuple[Connection, Connection]]:
    """Return the connections that two processes have with each other, seen from both."""
    theirs = {(end.peer, end.own): end for end in list_connections(other) if not end.is_listening}
    return [(end, theirs[end.own, end.peer]) for end in list_connections(pid) if (end.own, end.peer) in theirs]


def host_pid(init_pid: int, pid: int) -> int:
    """Return the pid here of a process of a lab's node, whose own namespace calls it `pid`.

    Raises:
        ProcessLookupError: there is none.
    """
    own = Path(f"/proc/{init_pid}/ns/pid").readlink()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "ns/pid").readlink() == own:
                found = re.search(r"^NSpid:.*\s(\d+)$", (entry / "status").read_text(), re.MULTILINE)
                if found and int(found[1]) == pid:
                    return int(entry.name)
    raise ProcessLookupError(pid)


class FirstEnd:
    """Which of some processes ends first, by their pidfds; the kernel wakes whoever polls them at once.

    Args:
        ranks: pid -> rank.
    """

    def __init__(self, ranks: Mapping[int, int]) -> None:
        self.rank: int | None = None
        self._ranks = {os.pidfd_open(pid): rank for pid, rank in ranks.items()}
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        poll = select.poll()
        for fd in self._ranks:
            poll.register(fd, select.POLLIN)
        self.rank = self._ranks[poll.poll()[0][0]]
        for fd in self._ranks:
            os.close(fd)
