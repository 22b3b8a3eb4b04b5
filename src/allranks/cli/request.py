"""Turn the values of torchrun's flags into one `Request` (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from allranks.launch.lead.course import SHUTDOWN_S
from allranks.launch.plan import Request
from allranks.model.errors import UsageError
from allranks.wire.leader_port import Hint

DEFAULT_PORT = 29500
BUCKET_MB = (1, 4096)
"""Least and most MiB of a bucket: DDP under torch.compile refuses less than its first one, which has 1 MiB."""

REQUEST_FLAGS = (
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "rdzv_endpoint",
    "rdzv_id",
    "master_addr",
    "master_port",
    "local_addr",
    "standalone",
    "backend",
    "role",
    "module",
    "no_python",
    "container",
    "ignore",
    "container_runtime",
    "max_restarts",
    "restart_on_error",
    "standby",
    "capacity_timeout",
    "hang_timeout",
    "shutdown_timeout",
    "checkpoint_dir",
    "checkpoint_every",
    "compress",
    "bucket_mb",
    "metrics_dir",
)
FORMATS = ("bf16", "int8", "powersgd")
"""Of gradients, as comm/hooks.py has them, which imports torch."""


def make_request(
    command: tuple[str, ...],
    *,
    nproc_per_node: str | None = None,
    nnodes: str | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    local_addr: str | None = None,
    standalone: bool = False,
    backend: str | None = None,
    role: str = "default",
    module: bool = False,
    no_python: bool = False,
    container: str | None = None,
    container_runtime: str | None = None,
    ignore: Sequence[str] = (),
    max_restarts: int = 0,
    restart_on_error: bool = False,
    standby: bool = True,
    capacity_timeout: float = 600.0,
    hang_timeout: float | None = None,
    shutdown_timeout: float = SHUTDOWN_S,
    checkpoint_dir: str | None = None,
    checkpoint_every: int | None = None,
    compress: str | None = None,
    bucket_mb: str | None = None,
    metrics_dir: Path | None = None,
) -> Request:
    """Read the flags, as torchrun spells them, into one request.

    Raises:
        UsageError: a value makes no sense, or two flags contradict each other.
    """
    if module and no_python:
        raise UsageError("-m and --no-python contradict each other: a module is run by Python")
    if restart_on_error and not max_restarts:
        raise UsageError("--restart-on-error has no effect without --max-restarts N")
    min_nodes, max_nodes = parse_nnodes(nnodes) if nnodes is not None else (None, None)
    endpoint, port = None, master_port
    if rdzv_endpoint:
        host, named_port = parse_endpoint(rdzv_endpoint)
        if master_addr and master_addr != host:
            raise UsageError(f"--rdzv-endpoint {rdzv_endpoint} and --master-addr {master_addr} contradict each other")
        port = named_port if named_port is not None else master_port
        endpoint = Hint(host, port if port is not None else DEFAULT_PORT, "--rdzv-endpoint")
    elif master_addr:
        endpoint = Hint(master_addr, master_port if master_port is not None else DEFAULT_PORT, "--master-addr")
    return Request(
        command=command,
        is_module=module,
        no_python=no_python,
        container=container,
        container_runtime=container_runtime,
        num_workers=nproc_per_node,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=node_rank,
        endpoint=endpoint,
        port=port,
        rdzv_id=None if rdzv_id in (None, "none", "") else rdzv_id,
        standalone=standalone,
        backend=backend,
        role=role,
        local_address=local_addr,
        ignored=_ids_of(ignore),
        max_restarts=max_restarts,
        retries_errors=restart_on_error,
        has_standby=standby and not no_python and container is None,
        capacity_s=capacity_timeout,
        hang_s=hang_timeout,
        shutdown_s=shutdown_timeout,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        compress=compress,
        bucket_mb=parse_bucket_mb(bucket_mb) if bucket_mb is not None else None,
        metrics_dir=metrics_dir,
    )


def _ids_of(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    from allranks.causes.book import select_causes

    wanted = [name for words in names for name in words.split(",")]
    return tuple(cause.id for cause in select_causes(wanted, []))


def parse_nnodes(text: str) -> tuple[int, int]:
    """`4` or `2:4` as (min, max)."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"--nnodes {text!r}: expected a number of at least 1, or MIN:MAX, for example 6 or 4:6")
    return low, high


def parse_bucket_mb(text: str) -> str:
    """Return `auto`, or a number of MiB as it is compared among the nodes.

    >>> parse_bucket_mb("auto"), parse_bucket_mb("4.0"), parse_bucket_mb("1.5")
    ('auto', '4', '1.5')
    """
    if text == "auto":
        return text
    number = float(text) if re.fullmatch(r"\d{1,4}(\.\d{1,3})?", text) else 0.0
    if not BUCKET_MB[0] <= number <= BUCKET_MB[1]:
        low, high = BUCKET_MB
        raise UsageError(f"--bucket-mb {text!r}: expected auto, or MiB from {low} to {high}, for example 4")
    return f"{number:.7g}"


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """`node01`, `node01:29500`, `10.0.0.1:29500` or `[fd00::1]:29500` as host and port."""
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^:\s\[\]]+))(?::(?P<port>\d{1,5}))?", text)
    if match is None or int(match["port"] or 0) > 65535:
        raise UsageError(f"--rdzv-endpoint {text!r}: expected HOST or HOST:PORT, for example node01:29500")
    return match["v6"] or match["host"], int(match["port"]) if match["port"] else None


def hidden_streams(
    *, redirects: str, tee: str, local_ranks_filter: str, num_workers: int
) -> frozenset[tuple[int, str]]:
    """Return which local rank's `out` and `err` the terminal does not show.

    Raises:
        UsageError: a value cannot be read.
    """
    hidden = _parse_streams("--redirects", redirects, num_workers) - _parse_streams("--tee", tee, num_workers)
    if local_ranks_filter:
        if not re.fullmatch(r"\d+(,\d+)*", local_ranks_filter):
            raise UsageError(f"--local-ranks-filter {local_ranks_filter!r}: expected local ranks, for example 0,1")
        shown = {int(rank) for rank in local_ranks_filter.split(",")}
        hidden |= {(rank, stream) for rank in range(num_workers) if rank not in shown for stream in ("out", "err")}
    return frozenset(hidden)


def _parse_streams(flag: str, text: str, num_workers: int) -> set[tuple[int, str]]:
    if re.fullmatch(r"[0-3]", text):
        by_rank = dict.fromkeys(range(num_workers), int(text))
    elif re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        by_rank = {int(rank): int(mask) for rank, _, mask in (part.partition(":") for part in text.split(","))}
    else:
        raise UsageError(
            f"{flag} {text!r}: expected 0, 1, 2 or 3, for all local ranks or for each, for example 0:3,1:2"
        )
    bits = ((1, "out"), (2, "err"))
    return {(rank, stream) for rank, mask in by_rank.items() for bit, stream in bits if mask & bit}
