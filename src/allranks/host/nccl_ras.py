"""How many operations has each rank of this node started, as NCCL's own RAS threads say?

    read_operation_counts([1524344, 1524345])[1524344]      # by pid

NCCL 2.24 and later listen on localhost:28028 (NCCL_RAS_ADDR) in every process, unless NCCL_RAS_ENABLE is 0. Questions
and answers are lines: `CLIENT PROTOCOL 2`, `TIMEOUT 2`, `SET FORMAT json`, then `VERBOSE STATUS`, whose answer ends
with the connection. They change nothing in the job.

Limits: before 2.28.7 the answer is text, with counts only of ranks that differ from most; it is not read. Jobs that
share a port answer for each other. A pid is one of the rank's own namespace. CUDA graphs repeat operations without
counting them. An NCCL that is linked into torch's own library is not noticed.
Source: NCCL docs/userguide/source/troubleshooting/ras.rst; src/ras/client_support.cc of v2.24.3, v2.27.7, v2.30.7.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from allranks.host.live_environment import read_live_environment
from allranks.host.net import read_interfaces
from allranks.host.process import read_file
from allranks.model.foreign import decode_json

DEFAULT = "localhost:28028"
GATHER_S, ASK_S = 2, 8.0
"""RAS waits so long for each part of the job, and at most 5 s more for all; we wait so long for what RAS sends."""
MAX_BYTES = 32 << 20  # of an answer: 600 bytes a rank of a communicator


def read_operation_counts(pids: Iterable[int], *, root: Path = Path("/")) -> dict[int, int] | None:
    """Return how many operations each process of this node has started, by pid; None: none of these uses NCCL.

    Raises:
        OSError, ValueError: one uses NCCL, and RAS does not tell.
    """
    pid = next((pid for pid in pids if "/libnccl" in read_file(root / f"proc/{pid}/maps")), None)
    if pid is None:
        return None
    answer = ask_ras(read_live_environment(pid, root=root) or {})
    own = {address for interface in read_interfaces() for address in interface.addresses}
    return count_operations(answer, addresses=own)


def ask_ras(env: Mapping[str, str], *, timeout_s: float = ASK_S) -> bytes:
    """Return the answer of the RAS thread that listens here for a rank with this environment.

    Raises:
        OSError: RAS is off or too old, nobody listens, or nothing came for so long.
        ValueError: its address cannot be read.
    """
    host, _, port = (env.get("NCCL_RAS_ADDR") or DEFAULT).rpartition(":")
    if env.get("NCCL_RAS_ENABLE") == "0":
        raise OSError("it is switched off in the job's environment")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    with connection, connection.makefile("rwb") as lines:
        for question in ("CLIENT PROTOCOL 2", f"TIMEOUT {GATHER_S}", "SET FORMAT json"):
            lines.write(f"{question}\n".encode())
            lines.flush()
            answer = lines.readline(MAX_BYTES)
        if not answer.startswith(b"OK"):
            raise OSError("this NCCL is older than 2.28.7")
        lines.write(b"VERBOSE STATUS\n")
        lines.flush()
        return lines.read(MAX_BYTES)


class _Rank(msgspec.Struct):
    host: str
    pid: int
    collective_counts: dict[str, int]


class _Communicator(msgspec.Struct):
    ranks: list[_Rank]


class _Status(msgspec.Struct):
    communicators: list[_Communicator]


def count_operations(answer: bytes, *, addresses: Collection[str]) -> dict[int, int]:
    """Return how many operations each process at these addresses has started, by pid, in all its communicators.

    Raises:
        Unreadable: the answer is none.
    """
    counts, status = Counter[int](), decode_json(answer, _Status)
    for rank in (rank for group in status.communicators for rank in group.ranks if rank.host in addresses):
        counts[rank.pid] += sum(rank.collective_counts.values())
    return dict(counts)
