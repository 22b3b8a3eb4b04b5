"""How do nodes that measure each other in pairs meet, round by round, without a coordinator?

Every node listens at one port of its data address. The first node hears all others, and tells them who is absent. In a
round, the second node of a pair connects to the first one: a connection that comes early waits until its round, so a
pair begins when both are there, and no node is in two pairs at a time. A connection begins with a line, [key, round,
name, problem]; without the key it is a stranger's, and is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping

START_S = 30.0
"""From the first node's arrival to the others': they import Python from one file server."""
LATE_S = 3.0
"""By how much each round may be later than the one before; a pair whose other end is not there then is not tested."""
BUSY_S = 3.0
"""To retry a port that is in use: another program of the same job may just be closing it."""
HELLO_S = 1.0
RETRY_S = 0.05
MAX_LINE = 1 << 20
_MEETING = -1
"""In place of a round: the line to the first node."""


def reason(exc: Exception) -> str:
    """Return what went wrong, in the kernel's words where they are its, else in ours."""
    number = getattr(exc, "errno", None)
    return os.strerror(number).lower() if number else str(exc) or type(exc).__name__


class Rounds(contextlib.ExitStack):
    """One node's connections to its peers, closed when the block is left.

    Args:
        node: this one.
        addresses: of all nodes; the others knock at the first one's.
        port: of all nodes.
        key: of this measurement.
    """

    def __init__(self, node: str, addresses: Mapping[str, str], *, port: int, key: str) -> None:
        super().__init__()
        self._node, self._addresses, self._port, self._key = node, addresses, port, key
        self._early: dict[tuple[int, str], tuple[socket.socket, str]] = {}
        self._problem = ""
        try:
            self._listener = self.enter_context(_listen(addresses[node], port))
        except OSError as exc:
            self._problem = f"{node} cannot listen at port {port}: {reason(exc)}"

    def meet(self) -> dict[str, str]:
        """Wait until all nodes are here; returns why each absent one is not."""
        first, *others = self._addresses
        by_s = time.monotonic() + START_S
        if self._node != first:
            try:
                with self._connect(_MEETING, first, by_s=by_s) as sock:
                    sock.settimeout(START_S + LATE_S)
                    return dict(json.loads(_read_line(sock)))
            except (OSError, ValueError) as exc:
                return {self._node: reason(exc)}
        if self._problem:
            return dict.fromkeys(self._addresses, self._problem)
        absent, here = dict[str, str](), list[socket.socket]()
        for name in others:
            try:
                sock, problem = self._accept(_MEETING, name, by_s=by_s)
                here.append(sock)
                absent |= {name: problem} if problem else {}
            except OSError:
                absent[name] = f"{name} did not start"
        for sock in here:
            with contextlib.suppress(OSError), sock:
                sock.sendall(json.dumps(absent).encode() + b"\n")
        return absent

    def join(self, number: int, peer: str, *, is_second: bool, by_s: float) -> socket.socket:
        """Return the connection to the peer of a round.

        Raises:
            OSError: it is not there in time.
        """
        if is_second:
            return self._connect(number, peer, by_s=by_s)
        sock, _ = self._accept(number, peer, by_s=by_s)
        sock.settimeout(HELLO_S)
        sock.sendall(b"go\n")
        return sock

    def _connect(self, number: int, peer: str, *, by_s: float) -> socket.socket:
        address, hello = self._addresses[peer], json.dumps([self._key, number, self._node, self._problem])
        while True:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            try:
                sock.settimeout(max(0.1, by_s - time.monotonic()))
                sock.bind((self._addresses[self._node], 0))
                sock.connect((address, self._port))
                sock.sendall(hello.encode() + b"\n")
                if number == _MEETING or _read_line(sock) == "go":
                    return sock
                raise ConnectionError(f"something else listens at {address}:{self._port}")
            except OSError as exc:
                sock.close()
                if number != _MEETING and isinstance(exc, ConnectionRefusedError):  # it was there before
                    raise ConnectionError(f"{peer} has ended") from exc
                if time.monotonic() > by_s - RETRY_S:
                    raise ConnectionError(f"{peer} did not answer at {address}:{self._port}") from exc
                time.sleep(RETRY_S)

    def _accept(self, number: int, peer: str, *, by_s: float) -> tuple[socket.socket, str]:
        while (number, peer) not in self._early:
            try:
                if (left_s := by_s - time.monotonic()) <= 0:  # however many strangers connect
                    raise TimeoutError
                self._listener.settimeout(left_s)
                sock, _ = self._listener.accept()
            except TimeoutError:
                raise ConnectionError(f"{peer} did not connect") from None
            try:
                sock.settimeout(HELLO_S)
                key, its_number, name, problem = json.loads(_read_line(sock))
            except (OSError, ValueError, TypeError, RecursionError):  # whatever a stranger says
                sock.close()
                continue
            if key == self._key:
                self._early[int(its_number), str(name)] = self.enter_context(sock), str(problem)
            else:
                sock.close()
        return self._early.pop((number, peer))


def _listen(address: str, port: int) -> socket.socket:
    by_s = time.monotonic() + BUSY_S
    while True:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError:
            if time.monotonic() > by_s:
                raise
            time.sleep(RETRY_S)


def _read_line(sock: socket.socket) -> str:
    """Read a line, a byte at a time: what follows it belongs to the measurement.

    Raises:
        OSError: none came within the socket's timeout.
    """
    line, by_s = b"", time.monotonic() + (sock.gettimeout() or 0.0)
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > MAX_LINE:
            raise ConnectionError("the connection ended before a line")
        if time.monotonic() > by_s:
            raise TimeoutError("no line came in time")
        line += byte
    return line.decode(errors="replace").strip()
