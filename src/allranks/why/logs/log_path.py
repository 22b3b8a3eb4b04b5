"""Which node and rank wrote a log file, according to its path? Pure; knows the names that launchers give.

    >>> read_path("runs/4711/attempt_0/node03/rank_1.err")
    ('node03', 1, None, 0)
    >>> read_path("/tmp/logs/none_x1/attempt_2/3/stderr.log")
    (None, None, 3, 2)

A rank is taken only from a name that says "rank" or is a launcher's format: a wrong rank is worse than none. The number
of an array task (slurm-4711_3.out), of a node or of a model-parallel group is no rank.
"""

from __future__ import annotations

import re
from functools import lru_cache

MAX_RANK = 100_000
HOST = (
    r"(?:ip(?:-\d{1,3}){4}|(?:[a-z0-9]+-)*"
    r"(?:node|nid|host|compute|worker|master|trainer|dgx|hgx|cn|server|machine|pod|gpu(?=-\d|\d\d))"
    r"-?\d{1,6}(?:-\d{1,4})?)"
)
"""Names that are always a host's; other names count only with further evidence."""

# allranks: attempt_0/node03/rank_1.err; torchrun: attempt_0/3/stderr.log.
_ATTEMPT = re.compile(r"(?:^|/)attempt_(\d{1,6})/(?:([^/]+)/)?([^/]+)$")
# The word before "rank" says of what: of a node, of a group of model parallelism, of this machine.
_RANK = re.compile(r"(?:([a-z]+)[_.-]|(?<![a-z])(?:global)?)rank[_.=-]?(\d{1,6})(?![0-9a-z])", re.IGNORECASE)
_OTHER_RANKS = frozenset((
    "node", "mp", "pp", "tp", "dp", "ep", "cp", "sp", "pg", "group", "role", "model", "pipeline", "tensor", "data",
    "expert", "machine", "agent", "local",
))  # fmt: skip
_LOCAL_RANK = re.compile(r"(?<![a-z])local[_.-]?rank[_.=-]?(\d{1,4})(?![0-9a-z])", re.IGNORECASE)
_TASK = re.compile(r"\d{2,}(?:_\d+)?_(\d{1,6})_log\.(?:out|err)(?:\.gz|\.zst)?")  # submitit: %j_%t_log.out
_NODE = re.compile(rf"(?<![a-z0-9-])(?:{HOST}|node_\d{{1,6}})(?![a-z0-9]|-\d)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<![\w.-])\d{1,3}(?:\.\d{1,3}){3}(?!\d)")
_JOB = re.compile(r"^(?:slurm[a-z]*[-_.])?(?:\d+[-_.])*", re.IGNORECASE)
_KERNEL = re.compile(r"([A-Za-z][\w-]*\d[\w-]*)[._](?:dmesg|kern|messages|syslog)\b", re.IGNORECASE)
"""A file of the kernel's messages is named after its node, whatever that is called."""
_PARENTS = 3
"""Number of directories above a file that may name its rank; those further up belong to something else."""


def read_path(path: str) -> tuple[str | None, int | None, int | None, int | None]:
    """Return node, rank, local rank and attempt, as far as a path contains them."""
    node = rank = local_rank = attempt = None
    *folders, name = path.split("/")
    if match := _ATTEMPT.search(path):
        attempt = int(match[1])
        if match[2] and match[2].isdecimal():
            local_rank = int(match[2])
        else:
            node = match[2]
    parents = _PARENTS + (local_rank is not None)  # torchrun: DIR/RUN/attempt_0/3/stderr.log
    for part in [name, *reversed(folders[-parents:])]:
        own_node, own_rank, own_local_rank = _read_part(part)
        node = own_node if node is None else node
        rank = own_rank if rank is None else rank
        local_rank = own_local_rank if local_rank is None else local_rank
    if node is None and (match := _KERNEL.match(name)):
        node = match[1]
    return node, rank if rank is None or rank <= MAX_RANK else None, local_rank, attempt


@lru_cache(maxsize=4096)
def _read_part(part: str) -> tuple[str | None, int | None, int | None]:
    """Return node, rank and local rank of one name of a path. Cached: thousands of files share their folders."""
    local_rank = _LOCAL_RANK.search(part)
    node = _ADDRESS.search(part) or _NODE.search(_JOB.sub("", part, count=1))
    return node[0] if node else None, _rank_of(part), int(local_rank[1]) if local_rank else None


def _rank_of(part: str) -> int | None:
    for match in _RANK.finditer(part):
        if (match[1] or "").lower() not in _OTHER_RANKS:
            return int(match[2])
    found = _TASK.fullmatch(part)
    return int(found[1]) if found else None
