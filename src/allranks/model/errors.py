"""All errors, with the exit code of each.

    AllranksError
    |-- UsageError         a flag or an argument is wrong                                   2
    |   |-- ConfigError    cluster.toml is wrong, or does not fit this machine              2
    |   |-- HostlistError  a host list cannot be read without guessing                      2
    |   `-- IdentityError  the environment contradicts itself about who this process is     2
    |-- SetupError         cluster or set-up cannot do what is asked; a retry is no cure   78
    |-- NodeFaultError     a node or link is at fault; leaving it out cures it             75
    |-- WireError          a peer does not speak our protocol, or is not of this job       78
    `-- StoppedBySignal    somebody ended this process on purpose                     128 + n

Messages are one line: who, what was seen, what was expected, what to do. Lower case, no final full stop.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import IntEnum

from allranks.model.finding import Finding


class Exit(IntEnum):
    """Exit codes of `allranks`. A worker killed by signal n for no reason we can name adds 128 + n to these.

    Source: 75 and 78 are EX_TEMPFAIL and EX_CONFIG of sysexits.h, 124 is what timeout(1) returns.
    """

    OK = 0
    USER_CODE = 1
    USAGE = 2
    UNKNOWN = 3
    NODE_FAULT = 75
    SETUP = 78
    HANG = 124


def name_signal(signum: int) -> str:
    """Return what people call a signal; most real-time signals have no name.

    >>> name_signal(15), name_signal(40)
    ('SIGTERM', 'signal 40')
    """
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


def exit_for_signal(signum: int) -> int:
    """Exit code of a process ended by a signal, as shells have it.

    >>> exit_for_signal(9)
    137
    """
    return 128 + signum


class AllranksError(Exception):
    """Base of everything that allranks raises on purpose."""

    exit_code: int = Exit.UNKNOWN

    def __init__(self, message: str, *, finding: Finding | None = None, more: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.finding = finding
        """The same as a finding, where it is known who is at fault."""
        self.more = more
        """Lines to print below the message, such as what could have been meant."""


class UsageError(AllranksError):
    """The command line asks for something that makes no sense."""

    exit_code = Exit.USAGE


class ConfigError(UsageError):
    """cluster.toml is wrong, or does not fit this machine."""


class HostlistError(UsageError):
    """A host list cannot be expanded without guessing."""


class IdentityError(UsageError):
    """Two sources disagree about rank, world or leader."""


class SetupError(AllranksError):
    """The cluster or its set-up cannot do what is asked, and a retry does not cure it."""

    exit_code = Exit.SETUP


class NodeFaultError(AllranksError):
    """A node or a link is at fault; leaving the node out cures it."""

    exit_code = Exit.NODE_FAULT


class WireError(AllranksError):
    """A peer does not speak our protocol, or is not of this job."""

    exit_code = Exit.SETUP


class StoppedBySignal(AllranksError):
    """Somebody ended this process on purpose, with Ctrl-C or another signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = exit_for_signal(signum)
