"""The keys of cluster.toml, with the allowed values and the meaning of each. Add a new key here.

A reader returns the clean value. For a wrong one it returns None or raises ValueError (as ipaddress does), or
ExpectedError if it can name a better expected value than the table.
"""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks.model.cluster import Backend
from allranks.model.hostlist import is_host_name

if TYPE_CHECKING:
    from collections.abc import Callable


class ExpectedError(Exception):
    """The expected value, in place of the one in the table."""


def _integer(low: int, high: int) -> Callable[[Any], int | None]:
    return lambda value: value if type(value) is int and low <= value <= high else None  # True is an int for isinstance


def _matching(pattern: str) -> Callable[[Any], str | None]:
    return lambda value: value if isinstance(value, str) and re.fullmatch(pattern, value) else None


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 < value <= _YEAR_S else None


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _backend(value: Any) -> Backend | None:
    return next((backend for backend in Backend if backend == value), None)


def _subnet(value: Any) -> str | None:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Fa-f:.]+/[0-9.]+", value):
        return None
    network, address = ip_network(value, strict=False), ip_address(value.split("/")[0])
    if network.prefixlen and address != network.network_address:
        raise ExpectedError(f'a network, did you mean "{network}"?')
    return str(network) if network.prefixlen else None


def _address(value: Any) -> str | None:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Fa-f:.]+(/[0-9]+)?", value):
        return None
    address = ip_address(value.split("/")[0])
    if "/" in value:
        raise ExpectedError(f'only the address, did you mean "{address}"?')
    return None if address.is_unspecified or address.is_multicast else str(address)


def _node_name(value: Any) -> str | None:
    if isinstance(value, str) and set(value) & set("[],"):
        raise ExpectedError("one host name, not a host list: write a [[node]] for each")
    return value if isinstance(value, str) and is_host_name(value) else None


class Key(NamedTuple):
    """One key of a table."""

    read: Callable[[Any], Any]
    expected: str
    doc: str


_YEAR_S = 31_536_000
_SECONDS = f"seconds above 0, at most {_YEAR_S} (a year), for example "
_PARTITION = r"[A-Za-z0-9_][A-Za-z0-9_.-]*(,[A-Za-z0-9_][A-Za-z0-9_.-]*)*"
# No character that NCCL_SOCKET_IFNAME or ip(8) gives a meaning; 15 is IFNAMSIZ less the final NUL.
_INTERFACE = r"(?!\.{1,2}$)[A-Za-z0-9_.][A-Za-z0-9_.+-]{0,14}"
_DIRECTORY = r"/[^\x00-\x1f\x7f]{0,4095}"
_TITLE = r"[!-~]([ -~]{0,62}[!-~])?"
SLURM_TIME = r"[0-9]{1,6}(:[0-9]{1,2}){0,2}|[0-9]{1,4}-[0-9]{1,2}(:[0-9]{1,2}){0,2}"

KEYS: dict[str, dict[str, Key]] = {
    "cluster": {
        "name": Key(
            _matching(_TITLE), '1 to 64 ASCII characters, for example "six-node"', "name of the cluster in reports"
        ),
    },
    "network": {
        "data": Key(_subnet, 'a subnet, for example "192.168.20.0/24"', "subnet that carries gradients"),
        "second": Key(
            _subnet,
            'a subnet, for example "192.168.21.0/24"',
            "further subnet that carries gradients, if every node has an interface in both; Gloo uses them in turn",
        ),
        "port": Key(
            _integer(1, 65535), "an integer from 1 to 65535, for example 29500", "TCP port that the leader tries first"
        ),
        "infiniband": Key(
            _boolean, "true or false", "whether NCCL may use InfiniBand or RoCE; if not set, NCCL decides"
        ),
    },
    "train": {
        "backend": Key(
            _backend, '"auto", "nccl" or "gloo"', "backend; auto is nccl if every rank has a GPU of its own, else gloo"
        ),
        "timeout_s": Key(_seconds, _SECONDS + "600", "timeout of collectives, in seconds"),
    },
    "guard": {
        "join_s": Key(_seconds, _SECONDS + "60", "time for all nodes to join, in seconds"),
        "gone_s": Key(
            _seconds,
            _SECONDS + "10",
            "time without an answer on two paths before a node is reported as lost, in seconds",
        ),
        "beat_s": Key(_seconds, _SECONDS + "0.5", "heartbeat interval, in seconds; longer above 1,024 nodes"),
        "stopped_s": Key(
            _seconds,
            _SECONDS + "5",
            "time that a worker may be stopped (SIGSTOP, a frozen cgroup) before the job ends, in seconds",
        ),
        "stalled_s": Key(
            _seconds, _SECONDS + "5", "time without an acknowledgement before a connection is tested, in seconds"
        ),
        "slow_s": Key(_seconds, _SECONDS + "30", "time that ranks wait before the late rank is reported, in seconds"),
        "hang_s": Key(_seconds, _SECONDS + "600", "time after which a hanging rank is ended, in seconds"),
    },
    "slurm": {
        "partition": Key(_matching(_PARTITION), 'a partition, for example "main"', "partition of submitted jobs"),
        "time": Key(
            _matching(SLURM_TIME), 'text such as "90" (minutes), "02:00:00" or "1-00"', "time limit of submitted jobs"
        ),
        "history": Key(
            _matching(_DIRECTORY),
            'an absolute path, for example "/var/log/allranks"',
            "file or directory that the epilog fills (`allranks why --epilog --to`); `why --history` and "
            "`submit --exclude-suspects` read it",
        ),
    },
    "report": {
        "metrics_dir": Key(
            _matching(_DIRECTORY),
            'an absolute path, for example "/var/lib/prometheus/node-exporter"',
            "directory of node_exporter's textfile collector, for the job's metrics; if not set, none are written",
        ),
    },
    "node": {
        "name": Key(
            _node_name, 'a host name, for example "node01"', "name of the node, as SLURM and `hostname` print it"
        ),
        "address": Key(_address, 'an IP address, for example "192.168.20.15"', "its address on the data network"),
        "interface": Key(
            _matching(_INTERFACE),
            'an interface name of 1 to 15 letters, digits, "_", ".", "+" and "-", for example "ens1f1"',
            "its data interface; if not set, found from network.data",
        ),
        "gpus": Key(_integer(0, 1024), "an integer from 0 to 1024, for example 1", "number of GPUs that jobs may use"),
    },
}
