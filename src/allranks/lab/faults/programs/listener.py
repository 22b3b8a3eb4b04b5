"""A foreign process that occupies a port: listens in the background, and prints its pid once it does."""

from __future__ import annotations

import os
import socket
import sys


def main(port: int) -> None:
    """Accept and close connections until this process is killed."""
    try:
        server = socket.create_server(("", port))
    except OSError as exc:
        sys.exit(f"port {port}: {str(exc.strerror).lower()}")
    if child := os.fork():
        print(child)
        return
    os.setsid()
    for fd in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    while True:
        server.accept()[0].close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
