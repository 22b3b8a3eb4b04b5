"""How a cause shows in a line of a log: what to look for, how much it proves, and whom it blames.

    Sign(r"Duplicate GPU detected : rank (?P<rank>[0-9]+) and rank (?P<ranks>[0-9]+) both on CUDA device (?P<gpu>[0-9a-f]+)")
    Sign(r"Connection closed by peer \\[(?P<peer>[0-9a-f.:]+)\\]", role=Role.VICTIM)

A pattern is matched twice: by hyperscan over whole files (so no look-around and no back-references, and a literal of six
bytes or more), then by `re` on the lines that hit, with the launcher's prefix and the colours taken off.

Named groups tell what the line says. These name the culprit, or a part of it:
    rank, ranks     one global rank; several (`4, 5, 6`, `0-3`)
    node            a host name                     address     an IP address that is itself at fault (127.0.1.1)
    interface       eth0, veth1a2b                  port        a TCP port
    gpu             index, bus id, UUID, as written hca         mlx5_0, mlx5_0:1
    pid             a process                       thing       anything else: a path, a link, a variable
These are facts about it:
    local_rank      the local rank                  peer        the address or rank that the speaker complains about
    seq, op, numel  a collective                    group       its process group
    signal, code    how a process ended             seconds, ms how long
    present, wanted how many of how many came
Any other name is a fact, too, and only fills the cause's message.
"""  # noqa: E501  (patterns)

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from allranks.model.finding import Confidence

CULPRIT_GROUPS = frozenset({"rank", "ranks", "node", "address", "interface", "port", "gpu", "hca", "pid", "thing"})
"""Named groups that say who is at fault."""


class Role(IntEnum):
    """What a line is in the story of a failure: the lower, the more it proves."""

    PRIMARY = 1
    """The fault itself, as who had it or who decided it says: an exception with its reason, Xid, the scheduler."""
    LIKELY = 2
    """The usual reading of this line; a primary one is better."""
    GENERIC = 3
    """Something failed here, and the line does not say why: an exception of any kind."""
    VICTIM = 4
    """What others say because of it: connection closed by peer, a watchdog's timeout, a SIGTERM of the agent."""
    CONTEXT = 5
    """Proves nothing alone, and is shown where the same cause is found by other lines: which interface was chosen."""


class Blames(IntEnum):
    """Whom a line means."""

    SPEAKER = 1
    """Who wrote it (the rank and node of the line), and what its groups name."""
    NAMED = 2
    """Only what its groups name; who wrote it only reports."""
    PEER = 3
    """The address or rank that it complains about."""
    NOBODY = 4
    """The line does not tell."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One pattern of lines."""

    pattern: str
    """A regular expression, with named groups for what the line says."""
    role: Role = Role.PRIMARY
    blames: Blames = Blames.SPEAKER
    confidence: Confidence = Confidence.CERTAIN
    """How sure this line alone makes us of the cause."""
    where: tuple[Literal["log", "end"], ...] = ("log",)
    """In what it is looked for: `log`, the lines of logs; `end`, what a rank said last (an exception, the end of its
    stderr), which then means that this rank only lost another one."""
