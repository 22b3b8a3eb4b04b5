"""What a cause is: frozen data, as its text file has it (`causes/book.py` reads them).

`text/AR204-mtu-blackhole.md` is a cause and its page in the documentation: the title, a head (a fenced `toml` block
with the fields of `Cause`), the sections, and under `## Lines` the patterns that find it in logs (fields of `Sign`),
each with real lines that it must match (`hits`) and must not match (`misses`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec

from allranks.model.errors import Exit, name_signal
from allranks.model.fact_kind import FactKind, Said
from allranks.model.finding import Confidence
from allranks.model.fix import Fix

SECTIONS = ("What it means", "Why it breaks the job", "Example", "Fix", "Source")
"""Headings of every cause, in this order; an outcome may lack the fix. The lines of logs follow under their own."""
CULPRIT_GROUPS = frozenset({"rank", "ranks", "node", "address", "interface", "port", "gpu", "hca", "pid", "thing"})
"""Named groups of patterns that say who is at fault."""
UNCHECKED = "unchecked"
"""The source of a sign that nobody could compare with what the program prints."""


class Family(StrEnum):
    """What a cause is about: the first digit of its id."""

    NODE = "0"
    GPU = "1"
    NETWORK = "2"
    FABRIC = "3"
    GROUP = "4"
    JOB = "5"
    STATE = "6"


class Trait(StrEnum):
    """A property of a cause that an engine asks for; each with what it means and who asks."""

    ALL_MEET = "all_meet"
    """Its ranks wait where all of them meet at the start (why.facts_of_lines)."""
    ALL_OTHERS_REPORT_IT = "all_others_report_it"
    """All ranks but the culprit report it: a rank without a report is the culprit (why.naming)."""
    AT_THE_MEETING = "at_the_meeting"
    """It is about the rendezvous, whose address is the culprit if no rank or node is named (why.naming,
    why.readings, why.fleet.suspects)."""
    BREAKS_WITH_ITS_PEER = "breaks_with_its_peer"
    """A connection breaks in this way when the rank at its other end has ended (why.naming, why.verdicts)."""
    CUTS_ITS_NODE_OFF = "cuts_its_node_off"
    """Nothing reaches its node on the data network: failed pair tests with it add no information (preflight.judge)."""
    ENDS_BY_ITSELF = "ends_by_itself"
    """A rank ended, and no reason but its end is known: an unnamed one is the rank that stopped first (why.naming,
    guard.ends)."""
    ENDS_FROM_OUTSIDE = "ends_from_outside"
    """The scheduler or a person ended the job (why.blame, why.readings, why.verdicts)."""
    ENDS_RANKS = "ends_ranks"
    """An exception of a rank with one of its signs is this cause, and no error of the script: its machine lacks
    something, which may be there the next time (guard.disk)."""
    ERROR_OF_SCRIPT = "error_of_script"
    """An exception that nothing but the user's script explains (why.naming)."""
    FILLS_A_DIRECTORY = "fills_a_directory"
    """No room is left in a directory: the fix names it, and the command that shows its room (guard.disk)."""
    FOLLOWS_A_DEATH = "follows_a_death"
    """Other ranks see it after a death: the store was there, collectives no longer end (why.facts_of_lines)."""
    HEARS_NO_VERDICT = "hears_no_verdict"
    """The task on its node may run and never receives the verdict: the job step must be ended (launch.job)."""
    JOB_MAY_GO_ON = "job_may_go_on"
    """The job may continue after it: of two equally certain facts, the other one ended it (why.facts_of_lines)."""
    KEEPS_ITS_NODE_OUT = "keeps_its_node_out"
    """Its node takes no part in the roll call, and no other check has a result there: a check always looks for it
    (launch.check.outcome)."""
    NAMES_ITS_CULPRIT = "names_its_culprit"
    """All ranks raise it, and its words name the rank at fault, whoever raises them (guard.ends)."""
    NORMAL_AMONG_RANKS = "normal_among_ranks"
    """Ranks on one machine have it without harm where each of them takes part in the roll call (preflight.entry)."""
    OF_GRANTED_CORES = "of_granted_cores"
    """It judges the cores that SLURM gave the job: a check that asked for one core cannot judge it (cli.check)."""
    OF_ONE_CALL = "of_one_call"
    """A call in the script is wrong: if nobody is named, the place of the call is the culprit (why.naming)."""
    ONCE_A_NODE = "once_a_node"
    """Its node and the other nodes may report it, in other words: of two findings about a node the first counts
    (preflight.judge)."""
    ONLY_WAITS = "only_waits"
    """It reports that a rank waited, and not for whom (why.times, why.naming, why.readings.watchdogs)."""
    OTHERS_WAIT_FOR_IT = "others_wait_for_it"
    """It tells which rank the others wait for (why.naming, why.people, why.readings)."""
    PASSES = "passes"
    """Its processes live: it is over once the job goes on (watch.since)."""
    REPORTED_BY_WATCHERS = "reported_by_watchers"
    """Launcher, scheduler or kernel report it: below an exception it is no reason (why.readings.tracebacks)."""
    SAYS_NOTHING = "says_nothing"
    """The log has no failure; its end alone does not tell a success from a hang (why.findings)."""
    SUCCESS = "success"
    """The job, or an agent with all its ranks, succeeded (why.times, why.findings, why.verdicts)."""


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


class Sign(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    r"""One pattern of lines that show a cause in logs, and the fact that such a line states.

    A pattern is matched twice: by hyperscan over whole files (so no look-around and no back-references, and a literal
    of six bytes or more), then by `re` on the lines that hit, without the launcher's prefix and colors.

    Named groups tell what the line says. These name people, or a part of the culprit:
        rank, ranks     one global rank; several (`4, 5, 6`, `0-3`)
        node            a host name                     address     an IP address, as peers name a process or a machine
        pid             a process                       local_rank  the local rank
        interface       eth0, veth1a2b                  port        a TCP port
        gpu             index, bus id, UUID, as written hca         mlx5_0, mlx5_0:1
        thing           anything else at fault: a path, a link, a variable, a name that does not resolve
    Whom they name follows from `fact` and `said`:
        said "self"     the speaker did or suffered it; people are the speaker's own (an address at fault, 127.0.1.1,
                        is a thing of it). But in `peer_lost` and `store_gone` people name whom it lost or did not reach
        said by others  whom they name; the kernel and the scheduler's daemons speak of the machine that they run on,
                        a launcher of its own child if it gives only a pid or a local rank; an observer of nobody
                        if it names nobody
    These are facts about it:
        peer            the address or rank that the speaker complains about
        seq, op, numel  a collective                    group       its process group
        signal, code    how a process ended (`ending`)  seconds, ms how long
        present, wanted how many of how many came
    Any other name is a fact, too, and only fills the cause's message.
    """

    pattern: str = msgspec.field(name="match")
    """A regular expression; `(?&name)` stands for a part of `text/patterns.toml`."""
    source: str
    """Who prints such lines: program, versions, file; or the report that has them; or UNCHECKED."""
    hits: tuple[str, ...] = ()
    """Real lines that it must match, and for which no earlier sign of the cause fires."""
    misses: tuple[str, ...] = ()
    """Real lines that no sign of the cause may match."""
    fact: FactKind | None = None
    """What such a line states; None: it proves nothing alone, and is shown where other lines show the same cause."""
    said: Said = Said.SELF
    """Who decided what it states."""
    signal: int | None = None
    """By which signal a process ended, where the line says so in other words: `Out of memory: Killed process 4711`."""
    confidence: Confidence = Confidence.CERTAIN
    """How sure this line alone makes us of the cause, if the fact is the first one."""
    where: tuple[Literal["log", "end"], ...] = ("log",)
    """In what it is looked for: `log`, the lines of logs; `end`, what a rank said last (an exception, the end of its
    stderr), which then means that this rank only lost another one."""

    @property
    def groups(self) -> frozenset[str]:
        """Names of the pattern's groups."""
        return frozenset(_GROUP.findall(self.pattern))


_GROUP = re.compile(r"\(\?P<([a-z_]+)>")


class Cause(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One thing that can be wrong with a job, or an outcome: success, an error of the script, a wait without a reason.

    Probes look for it on the nodes (`causes/probes`), signs show it in logs; `symptoms`, `roll_call` and `deep` say
    what else of a check finds it.
    """

    id: str
    """AR204. Public, never reused."""
    name: str
    """mtu-blackhole: names the fault, not the cure."""
    title: str
    """One sentence."""
    sections: Mapping[str, str]
    """Markdown by heading (SECTIONS)."""
    message: str
    """One line, with {fields} that the outcome's values fill."""
    exit_code: Exit = msgspec.field(name="exit")
    """75 where leaving the node out cures it; 1 where the script, 2 where flags or environment must change; else 78."""
    traits: frozenset[Trait]
    """What engines may ask of it."""
    aliases: tuple[str, ...] = ()
    """Older names: MN4."""
    told: str = ""
    """The message of a finding that comes from logs alone; {fields} are groups of its signs. Empty: the title."""
    fix: Fix = Fix()
    """One line, with the message's fields: the command, key or person that cures it."""
    by_signal: Mapping[str, Fix] = {}
    """The same where it is known which signal ended a process, by its name: SIGBUS."""
    also: tuple[str, ...] = ()
    """Ids of causes whose signs these lines may be, too."""
    symptoms: tuple[Symptom, ...] = ()
    """How it shows between two nodes (preflight.mesh measures, preflight.links names the culprit)."""
    roll_call: str = ""
    """How the roll call itself finds it, without a look at the nodes' reports: a node does not answer."""
    deep: str = ""
    """Which real collectives find it (`allranks check --deep`)."""
    is_outcome: bool = False
    """No cause, but how a job ended: it has no probe, no fault and no fix."""
    no_fault_yet: str = ""
    """Why no fault of the lab provokes it; empty where one does."""
    never_on_hardware: bool = False
    """Its probe was fed with recorded output only."""
    signs: tuple[Sign, ...] = ()
    """Patterns of lines that show it in logs."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cause) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def family(self) -> Family:
        """What it is about, by its id."""
        return Family(self.id[2])

    @property
    def label(self) -> str:
        """`AR204 mtu-blackhole`, as findings name it."""
        return f"{self.id} {self.name}"

    def fix_of(self, signum: int | None) -> Fix:
        """Return what cures it, if this signal ended a process; None: it is not known."""
        return self.fix if signum is None else self.by_signal.get(name_signal(signum), self.fix)

    @property
    def hits(self) -> tuple[str, ...]:
        """Real lines that its signs match."""
        return tuple(hit for sign in self.signs for hit in sign.hits)

    @property
    def misses(self) -> tuple[str, ...]:
        """Real lines that its signs do not match."""
        return tuple(miss for sign in self.signs for miss in sign.misses)
