"""What cures a fault, in a text that fits its reader: the scheduler, the GPUs, and what is known.

fix = Fix(text="start without {node}", slurm="[: --exclude={node}]", pod="", none="")
fix.tell(ANYBODY, {"node": "node03"})  # start without node03: --exclude=node03
fix.tell(ANYBODY, {})  # start without that node
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec


class SchedulerKind(StrEnum):
    """What placed the job on its nodes."""

    SLURM = "slurm"
    POD = "pod"
    """Kubernetes, whatever made the pods."""
    NONE = "none"
    """Nothing, or one that has no commands here: ranks started by hand, with torchrun, by another scheduler."""


class Vendor(StrEnum):
    """Who made the GPUs."""

    NVIDIA = "nvidia"
    AMD = "amd"


class Reader(msgspec.Struct, frozen=True):
    """Who reads a fix; without better knowledge, somebody on a SLURM cluster with NVIDIA GPUs."""

    scheduler: SchedulerKind = SchedulerKind.SLURM
    vendor: Vendor = Vendor.NVIDIA
    """NVIDIA, too, where there is no GPU."""
    job: str | None = None
    """Id of the job or run, as commands take it; None: not known."""


ANYBODY = Reader()


def find_scheduler(env: Mapping[str, str]) -> SchedulerKind:
    """Return what placed a process with this environment.

    SLURM first: its own daemons may run in pods.
    """
    if env.get("SLURM_JOB_ID"):
        return SchedulerKind.SLURM
    return SchedulerKind.POD if env.get("KUBERNETES_SERVICE_HOST") else SchedulerKind.NONE


class Fix(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What cures a cause, in one line: `text`, what fits the reader's GPUs, and what fits the scheduler, in this order.

    A vendor or scheduler is given as all others of its kind are; an empty text is nothing to add. {fields} are values
    of the outcome, {node} is the culprit. A part in [brackets] stands only where all values that it names are known:
    no command names a node, an interface or a job that nobody knows.
    """

    text: str = ""
    nvidia: str | None = None
    amd: str | None = None
    slurm: str | None = None
    pod: str | None = None
    none: str | None = None

    def template(self, reader: Reader) -> str:
        """Return the text for a reader, with {fields}, and all parts."""
        return _IF_KNOWN.sub(r"\1", self._join(reader))

    def tell(self, reader: Reader, values: Mapping[str, object]) -> str | None:
        """Return the fix with real values; words stand for those that are not known; None: there is no fix.

        Raises:
            KeyError: it asks for a value that nobody gives and that has no word.
        """
        values = {**values, "job": reader.job} if reader.job else values
        known = {name for name, value in values.items() if name in _PHRASES or " " not in str(value)}
        text = _IF_KNOWN.sub(lambda part: part[1] if known.issuperset(fields_of(part[1])) else "", self._join(reader))
        return text.format_map({**_WORDS, **values}) or None

    def _join(self, reader: Reader) -> str:
        return "".join(filter(None, (self.text, getattr(self, reader.vendor), getattr(self, reader.scheduler))))


def fields_of(text: str) -> Iterator[str]:
    """Return the names of the {fields} in a text."""
    return (field[1] for field in re.finditer(r"\{(\w+)\}", text))


_IF_KNOWN = re.compile(r"\[([^][]*\{[^][]*)\]")
_PHRASES = frozenset({"names", "variable"})
"""Values of several words that a command takes; another one (`node01 or node02`) no command takes."""
_WORDS = {
    **dict.fromkeys(("node", "culprit", "where"), "that node"),
    "address": "a loopback address",
    "command": "ip -br addr; nft list ruleset",
    "interface": "the data interface",
    "name": "its name",
    "names": "the interfaces",
    "network": "the data network",
    "ports": "the job's ports",
    "wanted": "that of most nodes",
    "what": "setting",
}
"""What stands in a sentence for a value that nobody knows."""
