"""What a job is doing now, as the leader writes it down once a second: `status.json` in its run directory. Frozen data.

At most 64 KB for 1,024 ranks: ranks that do the same are one row, the worst first. Line, `status`, `top`, report and
metrics are pure functions of this.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from allranks.model.beat import Age, Amount, GpuSeen, InterfaceSeen, Moment, Whole, Word
from allranks.model.ledger import Ledger

FILE = "status.json"
MAX_ROWS, MAX_NODES, MAX_EVENTS = 96, 96, 24
MAX_RATES = 120


class RankRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ranks that do the same."""

    ranks: Annotated[tuple[Amount, ...], msgspec.Meta(max_length=64)]
    """The first ones."""
    num_ranks: Amount
    nodes: Annotated[tuple[Word, ...], msgspec.Meta(max_length=8)] = ()
    """The first ones."""
    state: Word = ""
    """`start`, `step`, `backward`, `data`, `save`, the name of the collective that they wait in, `stopped`, `ended`,
    `lost`, or `silent`."""
    place: Word = ""
    """`evaluate.py:88 in run`; empty: not known, or not the same."""
    for_s: Age = 0.0
    """How long the one that has been in it longest is in it."""
    is_at_least: bool = False
    """It was so at the first look of `allranks watch`: `for_s` is a lower bound."""
    step: Whole | None = None
    """The lowest of them."""
    is_culprit: bool = False
    """Others wait for these."""
    is_suspect: bool = False
    """They are, but `allranks watch` has no verdict on them."""
    late_s: Age = 0.0
    """By how much they come later than the others, lately; of the worst."""
    cost_share: Age = 0.0
    """Share of the others' time that was waited for these; of the worst."""
    cpu_cores: Age | None = None
    """Cores in use; the most of them. None: not known yet."""
    rss_bytes: Amount | None = None
    """Resident memory; the most of them."""
    gpu: GpuSeen | None = None
    """Of these ranks the idlest GPU, and the one with the most memory in use; None: not known."""
    segments: Amount = 0
    retransmits: Amount = 0


class NodeRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node."""

    name: Word
    num_ranks: Amount = 0
    silent_s: Age = 0.0
    """Since its last heartbeat."""
    is_lost: bool = False
    interfaces: Annotated[tuple[InterfaceSeen, ...], msgspec.Meta(max_length=4)] = ()
    retransmits: Amount = 0
    segments: Amount = 0
    shm_used: Age = 0.0


class Stuck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ranks wait in a collective, and others have not come."""

    op: Word
    for_s: Age
    num_waiting: Amount
    ranks: Annotated[tuple[Amount, ...], msgspec.Meta(max_length=64)]
    """That have not come; empty: cannot be told."""
    place: Word = ""
    """Where the first of these is."""
    ends_in_s: Age | None = None
    """Until the job is ended for it (--hang-timeout)."""


class EventSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the last events."""

    time_s: Moment
    event: Word
    text: Word = ""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job."""

    job: Word
    written_s: Moment
    """Since the epoch, by the leader's clock: what is older than some seconds is not of now."""
    started_s: Moment
    phase: Word
    """Of launch.lead.course.Phase: `running`, `stopping`, `forming`, ... `over`."""
    attempt: Amount = 0
    generation: Amount = 0
    num_ranks: Amount = 0
    num_up: Amount = 0
    """Ranks that have told of themselves and have not ended."""
    num_nodes: Amount = 0
    step: Whole | None = None
    """Of the session, else optimizer steps of this generation."""
    is_step_of_session: bool = False
    total_steps: Whole | None = None
    """Only a session knows it: as `total=`, or as `epochs=` of a loader that has a length."""
    steps_per_s: Age | None = None
    """Over the last 10 s or 10 steps, whichever is longer."""
    rates: Annotated[tuple[Age, ...], msgspec.Meta(max_length=MAX_RATES)] = ()
    """The same, every 5 s, oldest first."""
    eta_s: Age | None = None
    checkpoint: Whole | None = None
    """Step of the newest complete one."""
    checkpoint_s: Moment | None = None
    """Since the epoch: when it was complete."""
    num_restarts: Amount = 0
    max_restarts: Amount = 0
    wait_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """`wait` and `transfer` of all ranks' time, in the last minute; None: not known."""
    waits_for: Amount | None = None
    """The rank that most of `wait` is owed to; None: nobody in particular."""
    stuck: Stuck | None = None
    missing: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Of a roll call (`forming`) the nodes that have not joined; of a job that is `paused` what it waits for."""
    gives_up_in_s: Age | None = None
    """Until it is not waited for any longer."""
    rows: Annotated[tuple[RankRow, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()
    """Worst first."""
    nodes: Annotated[tuple[NodeRow, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """Lost, silent and busy ones first."""
    events: Annotated[tuple[EventSeen, ...], msgspec.Meta(max_length=MAX_EVENTS)] = ()
    ledger: Ledger | None = None
    exit_code: Whole | None = None
    """Of a job that is over."""

    @property
    def age_s(self) -> float:
        """How long the job runs, up to when this was written."""
        return max(0.0, self.written_s - self.started_s)


def write_status(status: JobStatus) -> bytes:
    """Return it as bytes for the file."""
    return msgspec.json.encode(status)
