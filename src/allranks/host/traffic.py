"""How many bytes has an interface carried, and which sockets does a process have? Read often, so at little cost."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_FILES = ("tx_bytes", "rx_bytes")


class ByteCounter:
    """Bytes that one interface has sent and received, from files of sysfs that stay open.

    Packets of RDMA pass it by: the kernel does not see them.

    Args:
        name: of the interface; `eth0:1` is a label of eth0's address.
        root: where /sys/class/net is; tests feed a tree.
    Raises:
        OSError: there is no such interface.
    """

    def __init__(self, name: str, *, root: Path = Path("/")) -> None:
        folder = root / "sys/class/net" / name.partition(":")[0] / "statistics"
        self._fds: list[int] = []
        try:
            for file in _FILES:
                self._fds.append(os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.close()
            raise

    def read(self) -> tuple[int, int] | None:
        """Return the bytes that were sent and received since the interface began; None: it is gone."""
        try:
            sent, received = (int(os.pread(fd, 32, 0)) for fd in self._fds)
        except (OSError, ValueError):
            return None
        return sent, received

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.pop())


def find_sockets(pid: int, *, root: Path = Path("/")) -> set[int]:
    """Return the inodes of a process's sockets; none where it is gone, or is another user's."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(root / f"proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                target = os.readlink(entry.path)  # noqa: PTH115
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found
