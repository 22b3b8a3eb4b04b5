"""The messages between two agents, and who sends which when. Their bytes are in wire.connection.

    leader                                     agent
    Hello   version, job, nonce          -->
                                         <--   Join     version, job, nonce, proof, card
    Welcome proof, or Refused reason     -->            (the agent now believes that this is its leader)
            ... until every node is here ...
    Test    whom to try, and how hard    -->
                                         <--   Tested   what came out                       (again for follow-ups)
    Plan    who is which rank, the store -->            (agents start their workers)
                                         <--   Beat     how my workers are                  (every beat_s)
    Ping    how late it is here          -->            (every beat_s; the next Beat says it back)
    Try     whom to reach, and where     -->            (what came of it is in the next Beats)
    Order   at which step to save        -->            (agents hand it to their workers)
    Relay   a signal for who handles it  -->            (the same)
                                         <--   Ended    a worker of mine has ended, and how (any number)
                                         <--   Interrupted  somebody told me to stop, or to save
    Stop                                 -->            (agents end their workers)
                                         <--   Stopped  they have ended
    Plan    the next generation          -->            (again from there, after a fault that others outlive)
    Resign  what its successor must know -->            (instead of a Plan, when the leader's own node is at fault)
    Goodbye the exit code, the verdict   -->            (instead of a Plan, too, when it cannot begin)

An agent that comes while the job runs (a node that is back) finds the leader at the side port, says Join as ever, and
hears nothing but Pings until the next generation's Plan. An agent that has lost its connection does the same, at the
leader's side port and at those of its possible successors; its card says which generation it has, and it tells again
what it has told of that generation. Whoever does not lead answers Refused, which is not final.

The leader speaks first because the port it listens on is handed to torch's TCPStore later, and a TCPStore waits for
its client: whoever connects and hears no Hello within HANDSHAKE_S has not found a leader. Hello and Join never change
their first two fields, so that two versions can name each other. `proof` is an HMAC-SHA256 with the job's key over the
other side's nonce and the rest of the message (wire.secret): both sides prove that they know the key, and neither can
be replayed.

Limits: handshake 2 s, with munge 6 s; a silent connection is dead after `gone_s` (TCP keepalive and TCP_USER_TIMEOUT);
IPv4 and IPv6.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from allranks import __version__
from allranks.model.beat import NodeBeat
from allranks.model.card import Card, JobDirectory
from allranks.model.data_network import DataNetwork
from allranks.model.finding import Verdict
from allranks.model.membership import Member
from allranks.model.pair import Effort, PairResult, PairTarget
from allranks.model.past import Past

PROTOCOL = 14
HANDSHAKE_S = 2.0
NONCE_BYTES = 16


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower):
    """What one agent says to another: a subclass for each kind, whose name in small letters tells it on the wire."""


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker ended, as its agent saw it."""

    rank: int
    node: str
    exit_code: int
    """As subprocess has it: negative is a signal."""
    time_s: float
    """Seconds since the epoch: of the exception where the worker recorded one, else of the exit."""
    ended_by_us: bool = False
    """Its agent had told it to end, and it ended of that; not where it ended with 0, or had failed before."""
    is_finished: bool = False
    """It ended with 0, and had made all steps of its session: it did not leave because it was told to."""
    message: str | None = None
    """`ValueError: batch 17 has no label`, where it is known."""
    traceback: str | None = None
    before: tuple[str, ...] = ()
    """What had been raised in it before that, the oldest first: the exceptions in whose handling it ended, and of its
    last collective."""
    stderr_tail: str | None = None
    stderr_path: str | None = None
    could_not_start: bool = False
    lost_lines: int = 0
    """Of its output, that could not be written (guard.inside.output)."""
    lost_why: str = ""
    """Why: `No space left on device`."""
    lingers: str | None = None
    """Its process is still there, some seconds after an exception that nobody caught: what keeps it, `thread Thread-1
    (upload)` or `train.py:9 in cleanup`; empty: not known. Its real end follows."""
    python: str | None = None
    """The interpreter that an exception came from, where it is known."""


class Hello(Message, frozen=True, kw_only=True):
    """The leader's first words."""

    protocol: int = PROTOCOL
    version: str = __version__
    job: str
    nonce: bytes


class Join(Message, frozen=True, kw_only=True):
    """An agent asks to be let in."""

    protocol: int = PROTOCOL
    version: str = __version__
    job: str
    nonce: bytes
    card: Card
    proof: bytes = b""


class Welcome(Message, frozen=True, kw_only=True):
    """The leader lets an agent in, and proves itself."""

    proof: bytes = b""


class Refused(Message, frozen=True, kw_only=True):
    """The leader does not let an agent in."""

    reason: str
    is_final: bool
    """False where the agent may try again: here, if it was too slow, or elsewhere, if this is another job's leader."""


class Probe(Message, frozen=True, kw_only=True):
    """After the Hello: this was only a look whether the port answers (a pair test, a drill). There is no answer."""


class Test(Message, frozen=True, kw_only=True):
    """Try these nodes now, all at the same time, and answer with Tested."""

    __test__ = False

    token: bytes
    """What a tester says first: whoever does not know it is not answered."""
    targets: tuple[PairTarget, ...]
    effort: Effort
    within_s: float
    """Answer by then, with what there is."""
    is_one_by_one: bool = False
    """One target after the other: a second look, undisturbed."""
    own_index: int = 0
    own_address: str | None = None
    """Where the others find the node that gets this, on the data network: what it must come from, too."""
    run_dir_nonce: str | None = None
    """What the leader wrote into the run directory; None: not asked for."""
    round: int = 0
    """Which of the leader's orders this is; Tested says it back."""


class Tested(Message, frozen=True, kw_only=True):
    """What came out."""

    __test__ = False

    results: tuple[PairResult, ...]
    round: int
    """Of the Test that it answers: what comes too late for its round counts for no other."""
    run_dir: JobDirectory | None = None
    """How the node sees the run directory, where it was asked."""


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent is reached by the others."""

    node: int
    """Its index in the job."""
    name: str
    control_address: str
    data_address: str
    port: int


class Srun(msgspec.Struct, frozen=True, kw_only=True):
    """The srun of this job's step, where it runs on the machine of one of its nodes."""

    node: int
    """Its index in the job."""
    address: str
    port: int
    """Where srun listens for what its tasks do: SLURM_STEP_LAUNCHER_PORT."""


class Plan(Message, frozen=True, kw_only=True):
    """Everybody is here: who is which rank, and where the store is."""

    members: tuple[Member, ...]
    """In the order of their ranks, which have no gaps."""
    node_index: int
    attempt: int
    store_address: str
    store_port: int
    backend: str
    backend_reason: str
    generation: int = 0
    """Which start of the workers this is within the attempt: 0, and one more after each restart."""
    max_restarts: int = 0
    """How many there may be; what agents need to know for standbys."""
    nodes: tuple[int, ...] = ()
    """Index in the job of each member. The first one is the leader's."""
    electors: tuple[tuple[int, ...], ...] = ()
    """`nodes` of earlier generations, whose majorities the next leader needs, too (launch.lead.members)."""
    successors: tuple[Contact, ...] = ()
    """The leader, and the members that take its place if it is lost, in this order."""
    srun: Srun | None = None
    """Whoever succeeds a leader on that node must prove that only its agent has ended (launch.succession)."""
    past: Past | None = None
    network: DataNetwork = DataNetwork()

    @property
    def own_interfaces(self) -> tuple[str, ...]:
        """This node's data interfaces, if it has several and all the others have as many."""
        index = self.nodes[self.node_index] if self.nodes else self.node_index
        return self.network.interfaces.get(index, ())

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return sum(member.num_workers for member in self.members)


class Ended(Message, frozen=True, kw_only=True):
    """A worker ended, well or badly."""

    end: WorkerEnd
    age_s: float
    """How long ago, by the sender's clock: the leader's clock need not agree with it."""
    generation: int = 0
    """The worker's. The kernel can hold a process so long that its rank has another one when it ends."""


class Interrupted(Message, frozen=True, kw_only=True):
    """Somebody told this agent to stop."""

    signum: int


class Beat(Message, frozen=True, kw_only=True):
    """How one node's workers are."""

    node: NodeBeat
    ping_ns: int = 0
    """The last Ping's own time, said back; 0: none came yet."""
    held_ns: int = 0
    """How long ago that Ping came, by the node's monotonic clock."""


class Ping(Message, frozen=True, kw_only=True):
    """The leader lives."""

    sent_ns: int
    """Its monotonic clock: with the Beat that says it back, the nodes' clocks can be compared (RFC 5905, on-wire
    protocol)."""
    confirmed: int = -1
    """The newest generation that all of its members have begun."""


class TryTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A machine to be reached."""

    node_index: int
    network: str
    """`data` or `control`."""
    address: str
    port: int


class Try(Message, frozen=True, kw_only=True):
    """Try to reach these machines now, all at the same time; what came of it is told in the next Beats."""

    targets: tuple[TryTarget, ...]
    within_s: float


class Order(Message, frozen=True, kw_only=True):
    """What all workers are to do at the same step boundary."""

    at_step: int
    """The first boundary at which the step counted is this or a later one."""
    why: str
    """For people: `SIGUSR1: the time limit is near`."""
    leaves: bool = True
    """Save and end with 0; else save and go on."""
    signum: int = 0
    """Also for workers that read no orders but have a handler of their own for this signal; 0: none."""


class Relay(Message, frozen=True, kw_only=True):
    """Pass this signal on to the workers that handle it."""

    signum: int


class Stop(Message, frozen=True, kw_only=True):
    """End your workers now."""

    signum: int
    """The signal to begin with."""
    at_once: tuple[int, ...] = ()
    """Ranks that are blocked, and get SIGKILL without further ado."""
    grace_s: float | None = None
    """Between the signal and SIGKILL; None: the usual, and there was no fault."""
    saving_s: float | None = None
    """The same for ranks that save, and, where there was no fault, for those that handle the signal; None: the agent's
    own (--shutdown-timeout)."""
    interrupted_by: int | None = None
    """The stop signal that ends the job: it is not to go on if its leader is lost now."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody told the job to stop: ranks that handle the signal may take their time."""
        return self.interrupted_by is not None and self.grace_s is None


class Stopped(Message, frozen=True, kw_only=True):
    """My workers of this generation have all ended."""

    generation: int = 0


class Resign(Message, frozen=True, kw_only=True):
    """The leader's own node is at fault: another one is to lead, without it."""

    past: Past


class Goodbye(Message, frozen=True, kw_only=True):
    """Exit with this code."""

    exit_code: int
    summary: str
    """One line for nodes whose terminal is not the leader's; empty when all is well."""
    verdict: Verdict | None = None
    """The same on all nodes."""
    is_cut_off: bool = False
    """The leader has lost the majority of the members, which may go on under another one."""


def own_age_s() -> float:
    """Return for how many seconds this process has been running; psutil's start times are whole seconds off."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return round(time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"), 3)
