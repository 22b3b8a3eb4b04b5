"""The leader's port and address: how it binds and announces them, and how the other agents find them.

The leader binds a port on its own node and keeps the socket: the roll call uses it, then rank 0's worker inherits it
for its store. So one open port is enough, no port is computed from a job id, and no other program can take the port
between bind and use. The agents find the leader through its announcement in the run directory and through hints (an
endpoint flag, the first node of the step). A hint counts only after the handshake (wire.seek).
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from allranks.model.errors import SetupError
from allranks.model.foreign import Unreadable, decode_json

PORTS_TRIED = 16
"""The leader takes the first free one of this many ports, from the preferred one on; agents try as many."""

ANNOUNCEMENT = "leader.json"


@dataclass(frozen=True, slots=True)
class Hint:
    """A possible address of the leader."""

    host: str
    port: int
    source: str
    node: int = 0
    """Index in the job of the agent there; 0 as long as the leader is that of the roll call."""

    def __str__(self) -> str:
        """`host:port`, brackets around IPv6."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_Name = Annotated[str, Meta(max_length=1024)]


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the leader of a job listens."""

    job: _Name
    attempt: int
    host: _Name
    addresses: Annotated[tuple[_Name, ...], Meta(max_length=256)]
    """Addresses, those of the management network first."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    side_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """A second, random port for the agents: if a firewall closes the first one, they can still report it."""


def bind_port(preferred: int, *, tries: int = PORTS_TRIED) -> socket.socket:
    """Bind and listen on the preferred port, or on the next free one; on all addresses, IPv4 and IPv6.

    Args:
        preferred: 1 to 65535, or 0 for any free port.
    Raises:
        SetupError: none of them is free.
    """
    last = min(preferred + tries - 1, 65535) if preferred else 0
    for port in range(preferred, last + 1):
        with contextlib.suppress(OSError):
            return _listen(port)
    raise SetupError(f"ports {preferred} to {last} are all in use or forbidden; choose a free one with --master-port")


def _listen(port: int) -> socket.socket:
    # A dual-stack socket where the machine has IPv6: clients may resolve localhost to ::1. SO_REUSEADDR is set: without
    # it, the connections of the last job would block the port for a minute (TIME_WAIT). The queue is capped at
    # net.core.somaxconn; every rank of the job connects at once.
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    except OSError as exc:
        # In use stays in use: a stranger on IPv6 alone would get the clients that prefer it.
        if exc.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENOPROTOOPT):
            raise
    return socket.create_server(("0.0.0.0", port), backlog=4096)


def decode_announcement(data: bytes) -> Announcement | None:
    """Return what the leader has announced; None if it is unreadable."""
    with contextlib.suppress(Unreadable):
        return decode_json(data, Announcement)
    return None


def collect_hints(
    found: Announcement | None, *, job: str, named: Sequence[Hint], guessed: Sequence[Hint]
) -> list[list[Hint]]:
    """Return the possible addresses of the leader, best first, in groups: a group is one host, its ports in order.

    Args:
        found: in the job's run directory, which other nodes may or may not see.
        job: announcements of other jobs are ignored.
        named: the user's hints; tried first.
        guessed: the scheduler's hints; tried after the announcement.
    """
    announced = []
    if found is not None and found.job == job:
        ports = [port for port in (found.port, found.side_port) if port]
        announced = [[Hint(address, port, source=ANNOUNCEMENT)] for address in found.addresses for port in ports]
    return [*map(_ports_of, named), *announced, *map(_ports_of, guessed)]


def _ports_of(endpoint: Hint) -> list[Hint]:
    ports = range(endpoint.port, min(endpoint.port + PORTS_TRIED, 65536))
    return [Hint(endpoint.host, port, endpoint.source) for port in ports]
