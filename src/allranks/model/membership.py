"""Which ranks train together in this epoch, and which of them is this process? One value for all who must agree on it.

    own = Membership.spread(3, 8, per_node=4)
    own.world_size, own.num_nodes, own.is_leader             # 8, 2, False

An epoch is one start of the workers. Nothing in here changes within it; the next epoch has another value. Code inside
workers (join, guard.inside) and the process that writes checkpoints import nothing of ours: they get the same as plain
data, as ALLRANKS_MEMBERS, the key of a group, and the writer's options.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import msgspec

from allranks.model.errors import UsageError


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the group as the leader put it together."""

    name: str = ""
    """Host name, made unique where two agents share a host; a number where the launcher does not tell it."""
    first_rank: int
    num_workers: int
    host: str = ""


class GroupId(NamedTuple):
    """What tells a process group from all others of its epoch, the same on all its ranks."""

    name: str
    """torch's: `0` is the default group."""
    backend: str
    """Each backend of a group numbers its own collectives."""
    incarnation: int
    """1 is the first group of this name; one more each time it is destroyed and formed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One process's place among all ranks of one epoch; without arguments, a world of one.

    Raises:
        UsageError: there is no such rank.
    """

    epoch: int = 0
    """Starts of the workers before this one, within one attempt of the job."""
    rank: int = 0
    """Of this process. The leader, which is no rank itself, is the agent of rank 0's node."""
    members: tuple[Member, ...] = (Member(first_rank=0, num_workers=1),)
    """Nodes with their ranks, in the order of ranks; a node comes again where ranks are dealt out in turn (srun)."""
    store_prefix: str = "allranks"
    """What the keys of this epoch in the store of the default group begin with."""
    groups: tuple[GroupId, ...] = ()
    """Process groups of all ranks; several where a group has several backends."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < max(self.world_size, 1):
            raise UsageError(f"rank {self.rank} of {self.world_size}; expected 0 to {self.world_size - 1}")

    @classmethod
    def spread(cls, rank: int, world_size: int, *, per_node: int = 1) -> Membership:
        """Return the place of a rank where every node has this many ranks, and the last one what is left."""
        firsts = range(0, world_size, per_node)
        members = (Member(name=str(at), first_rank=at, num_workers=min(per_node, world_size - at)) for at in firsts)
        return cls(rank=rank, members=tuple(members))

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return sum(member.num_workers for member in self.members)

    @property
    def num_nodes(self) -> int:
        """Nodes that train together."""
        return len({member.name for member in self.members})

    @property
    def local_world_size(self) -> int:
        """Ranks on this node; other nodes may have another number."""
        own = next(member.name for member in reversed(self.members) if member.first_rank <= self.rank)
        return sum(member.num_workers for member in self.members if member.name == own)

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0: the one that decides, prints and saves for all."""
        return self.rank == 0


ALONE = Membership()
"""A world of one."""


def name_hosts(hosts: Sequence[str]) -> list[str]:
    """Return a name for the node of each agent: its host, with a number where several agents share one.

    >>> name_hosts(["a", "b", "a", "a.0"])
    ['a.1', 'b', 'a.2', 'a.0']
    """
    counts = Counter(hosts)
    taken = {host for host, times in counts.items() if times == 1}
    twins: dict[str, Iterator[int]] = {}
    named = []
    for host in hosts:
        name = host
        while counts[host] > 1 and (name == host or name in taken):
            name = f"{host}.{next(twins.setdefault(host, count()))}"
        taken.add(name)
        named.append(name)
    return named


def format_members(members: Iterable[Member]) -> str:
    """Return the nodes as ALLRANKS_MEMBERS names them.

    >>> format_members(read_members("node01=0+2,node02=2+1"))
    'node01=0+2,node02=2+1'
    """
    return ",".join(f"{member.name}={member.first_rank}+{member.num_workers}" for member in members)


_MEMBER = re.compile(r"(.+)=([0-9]{1,9})\+([0-9]{1,9})")


def read_members(text: str) -> tuple[Member, ...]:
    """Return the nodes that ALLRANKS_MEMBERS names.

    >>> [(member.name, member.num_workers) for member in read_members("node01=0+2,node02=2+1")]
    [('node01', 2), ('node02', 1)]
    """
    found = (_MEMBER.fullmatch(part) for part in text.split(","))  # one pattern for all would take quadratic time
    return tuple(Member(name=match[1], first_rank=int(match[2]), num_workers=int(match[3])) for match in found if match)
