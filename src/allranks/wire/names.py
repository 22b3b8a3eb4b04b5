"""The addresses of a host name, all of them, without waiting for the name service.

`socket.getaddrinfo` can block for as long as the name service likes (a DNS server that is down: glibc waits 5 s and
asks twice, for each server and each search domain). So it runs in a thread, and the caller asks for the answer.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any, NamedTuple

from allranks.wire.background import Background, Call

LOOKUP_S = 5.0
"""Deadline of a name lookup; then it is given up, and the next search for the name begins a new one."""
MAX_LOOKUPS = 4
"""Lookups at the same time; those that were given up count as long as they run."""


class Address(NamedTuple):
    """One address of a host."""

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]
    """As connect(2) wants it, with port 0."""

    @property
    def host(self) -> str:
        """The address as text."""
        return str(self.sockaddr[0])

    def at(self, port: int) -> tuple[Any, ...]:
        """The address with a port, for `connect`."""
        return (self.sockaddr[0], port, *self.sockaddr[2:])


class Names:
    """Looks up host names in the background, each at most once at a time. A selector reports answers."""

    def __init__(self) -> None:
        self._background = Background(max_threads=MAX_LOOKUPS)
        self._lookups: dict[str, tuple[Call[list[Address]], float]] = {}
        """By name: the lookup, and when it began."""

    def fileno(self) -> int:
        """For a selector: readable when a lookup has answered."""
        return self._background.fileno()

    def note_answers(self) -> None:
        """Make the selector wait for the next answer."""
        self._background.take_done()

    def begin(self, host: str) -> None:
        """Begin to look up a name, unless it is an address or a lookup is under way."""
        if host not in self._lookups and _read_address(host) is None:
            self._lookups[host] = self._background.start(lambda: _addresses(host)), time.monotonic()

    def find(self, host: str) -> list[Address] | None:
        """Return all addresses of a host, in the order of preference (RFC 6724); None: not known yet, ask again.

        Raises:
            OSError: the name does not resolve, or the lookup has not answered within LOOKUP_S.
            UnicodeError: no host can have this name.
        """
        if (address := _read_address(host)) is not None:
            return [address]
        self.begin(host)
        call, began_s = self._lookups[host]
        if call.done():
            del self._lookups[host]
            return call.get()
        if time.monotonic() - began_s >= LOOKUP_S:
            del self._lookups[host]
            raise TimeoutError(f"the name lookup has not answered within {LOOKUP_S:.0f} s; check DNS on this node")
        return None

    def waited_s(self, host: str, now_s: float) -> float:
        """For how long the lookup of a name has been under way."""
        return now_s - self._lookups[host][1] if host in self._lookups else 0.0

    def close(self) -> None:
        """Drop all lookups."""
        self._background.close()


def _read_address(host: str) -> Address | None:
    """The address that a text already is; asks no name service."""
    with contextlib.suppress(OSError, UnicodeError):
        return _addresses(host, socket.AI_NUMERICHOST)[0]
    return None


def _addresses(host: str, flags: int = 0) -> list[Address]:
    answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys(Address(family, sockaddr) for family, _, _, _, sockaddr in answers))
