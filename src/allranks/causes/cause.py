"""What a cause of the catalogue is: one class with its texts, and how it is looked for.

    class ShmTooSmall(Cause, id="AR002"):
        \"\"\"Shared memory is too small for NCCL and data loaders.   (the title, then the five sections)

        ## What it means
        ...
        \"\"\"
        message = "/dev/shm has {free} free"
        fix = "mount -o remount,size=8G /dev/shm"

        @classmethod
        def probe(cls, card: Card) -> Outcome: ...

A cause is looked for in up to four ways; each is a pure function of cards, so that the leader judges all nodes alike:
    probe(card)      one node alone: limits, GPUs, disks
    alike(card)      what must be the same on all nodes: the majority is right, the odd nodes are the culprits
    survey(cards)    what only shows when the cards of all nodes lie side by side: the same name twice
    symptoms         how it shows between two nodes (preflight.mesh measures, preflight.blame names the culprit)
and `signs` show it in logs and at run time (causes/sign.py). `roll_call` and `deep` say what else of a check finds it.

Outcomes (healthy, silent-hang, collective-timeout, user-code-error) are no causes: they have no probe, no fault and no
fix (`is_outcome`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from allranks.causes.sign import Sign
from allranks.causes.trait import Family, Trait
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence, Evidence, Finding, Severity, Status

SECTIONS = ("What it means", "Why it breaks the job", "Example", "Fix", "Source")
"""Headings of every cause's docstring, in this order."""


class Symptom(StrEnum):
    """How a pair of nodes failed; one symptom a test, the most basic first."""

    words: str
    """The same for people."""

    SILENT = "silent", "no packets pass, neither connections nor datagrams"
    FILTERED = "filtered", "some ports of the ephemeral range do not answer, but other traffic passes"
    STORE_FILTERED = "store-filtered", "the leader's port does not answer, but other ports of its node do"
    LARGE_LOST = "large-lost", "small packets pass, but large ones are lost"
    LOSSY = "lossy", "some packets are lost"
    SLOW = "slow", "a link carries much less than those of the other nodes"
    CLOCK = "clock", "the two clocks differ"

    def __new__(cls, value: str, words: str) -> Symptom:
        """Keep the words beside the value."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.words = words
        return member


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of looking at one card, or at all of them."""

    status: Status
    note: str = ""
    """One line for the table: why it was skipped, what was seen."""
    values: Mapping[str, object] = field(default_factory=dict)
    """What fills the cause's message and fix."""
    evidence: tuple[str, ...] = ()
    interface: str | None = None
    confidence: Confidence = Confidence.CERTAIN


PASSED = Outcome(Status.PASS)


def skipped(reason: str) -> Outcome:
    """There is nothing to look at: no GPU, no permission."""
    return Outcome(Status.SKIP, reason)


def unknown(reason: str) -> Outcome:
    """It was looked at and cannot be told."""
    return Outcome(Status.UNKNOWN, reason)


def failed(*evidence: str, interface: str | None = None, **values: object) -> Outcome:
    """The cause is there, and the job cannot run so; `values` fill its message and fix."""
    return Outcome(Status.FAIL, values=values, evidence=evidence, interface=interface)


def warned(*evidence: str, interface: str | None = None, **values: object) -> Outcome:
    """The cause is there; the job can run all the same."""
    return Outcome(Status.WARN, values=values, evidence=evidence, interface=interface)


class Cause:
    """One thing that can be wrong."""

    id: ClassVar[str] = ""
    """AR204. Public, never reused."""
    name: ClassVar[str] = ""
    """mtu-blackhole: the class name in kebab case."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Older names: MN4."""
    message: ClassVar[str] = ""
    """One line, with {fields} that the outcome's values fill."""
    fix: ClassVar[str] = ""
    """One line, with the same fields: the command, key or person that cures it; {node} is the culprit."""
    exit_code: ClassVar[int] = Exit.SETUP
    """75 where leaving the node out cures it, else 78."""
    is_outcome: ClassVar[bool] = False
    ends_ranks: ClassVar[bool] = False
    """An exception of a rank with one of these signs is this cause, and no error of the script: its machine lacks
    something, which may be there the next time."""
    traits: ClassVar[frozenset[Trait]] = frozenset()
    """What engines may ask of it."""
    symptoms: ClassVar[tuple[Symptom, ...]] = ()
    roll_call: ClassVar[str] = ""
    """How the roll call itself finds it, without a look at cards: a node does not answer."""
    deep: ClassVar[str] = ""
    """Which real collectives find it (`allranks check --deep`)."""
    also: ClassVar[tuple[str, ...]] = ()
    """Ids of causes whose signs these lines may be, too."""
    signs: ClassVar[tuple[Sign, ...]] = ()
    """Patterns of lines that show it in logs."""
    told: ClassVar[str] = ""
    """The message of a finding that comes from logs alone; {fields} are groups of its signs. Empty: the title."""
    hits: ClassVar[tuple[str, ...]] = ()
    """Real lines that the signs must match."""
    misses: ClassVar[tuple[str, ...]] = ()
    """Real lines that they must not match."""
    no_fault_yet: ClassVar[str] = ""
    """Why no fault and no strike of the lab provokes it; empty where one does."""
    never_on_hardware: ClassVar[bool] = False
    """Its probe was fed with recorded output only."""

    def __init_subclass__(cls, *, id: str = "", **attributes: object) -> None:  # noqa: A002  (the id is the word)
        super().__init_subclass__(**attributes)
        cls.id = id
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()

    @classmethod
    def probe(cls, card: Card) -> Outcome | None:
        """Judge one node; None: this cause is not looked for so."""
        return None

    @classmethod
    def alike(cls, card: Card) -> Mapping[str, str | None] | None:
        """Return what must be the same on all nodes, by what to call it; a value of None: could not be read there.

        None: this cause is not looked for so.
        """
        return None

    @classmethod
    def severity_of(cls, key: str) -> Severity:
        """How bad it is when the nodes differ in this key of `alike`."""
        return Severity.FAIL

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]] | None:
        """Judge all nodes together; returns the culprits (hosts of the cards) with each outcome that is not PASS.

        None: this cause is not looked for so.
        """
        return None

    @classmethod
    def title(cls) -> str:
        """First line of the docstring."""
        return inspect.getdoc(cls).partition("\n")[0]  # type: ignore[union-attr]

    @classmethod
    def sections(cls) -> dict[str, str]:
        """The docstring's sections by heading, as markdown."""
        text = inspect.getdoc(cls) or ""
        parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
        return {head.strip(): body.strip("\n") for head, body in zip(parts[1::2], parts[2::2], strict=True)}

    @classmethod
    def family(cls) -> Family:
        """What it is about, by its id."""
        return Family(cls.id[2])

    @classmethod
    def label(cls) -> str:
        """`AR204 mtu-blackhole`, as findings name it."""
        return f"{cls.id} {cls.name}"

    @classmethod
    def fix_with(cls, **values: object) -> str | None:
        """Return the fix with real values; a word that people replace stands for a node, interface, job or rank that
        nobody knows.

        Raises:
            KeyError: it asks for another value.
        """
        unknown = {"node": "the node", "interface": "<interface>", "job": "JOB", "rank": "N"}
        return cls.fix.format_map(unknown | values) or None

    @classmethod
    def find(
        cls,
        outcome: Outcome,
        *,
        node: str | None = None,
        ranks: Sequence[int] = (),
        waiting: str | None = None,
        victims: Sequence[int] = (),
    ) -> Finding:
        """Return the finding that an outcome of FAIL or WARN stands for.

        Raises:
            KeyError: message or fix ask for a value that the outcome does not have.
        """
        values = {"node": node or "the node", "interface": outcome.interface or "<interface>", **outcome.values}
        return Finding(
            cause=cls.label(),
            severity=Severity.WARN if outcome.status is Status.WARN else Severity.FAIL,
            confidence=outcome.confidence,
            node=node,
            interface=outcome.interface,
            ranks=tuple(ranks),
            message=cls.message.format_map(values),
            evidence=tuple(Evidence(seen=seen) for seen in outcome.evidence),
            fix=cls.fix_with(**values),
            waiting=waiting,
            victims=tuple(victims),
        )
