"""The gathering: how the agents of a job come together before any worker starts.

Phase 1: the leader listens; the others look for it (wire.handshake) and hand in their cards.
Phase 2: from the third second on the leader names who is missing. At the later of `join_s` and a third of it after
         the last arrival it gives up, or goes on with fewer nodes where `--nnodes MIN:MAX` allows it.
Phase 3: the leader says who is which rank (Plan), or why it cannot begin (Goodbye).
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from allranks.launch.plan import JobPlan, assign_ranks, choose_backend, count_of
from allranks.model.card import Card
from allranks.model.errors import AllranksError, NodeFaultError, SetupError, UsageError, WireError
from allranks.model.finding import Confidence, Evidence, Finding, Severity
from allranks.model.hostlist import fold_hosts
from allranks.wire.handshake import Door
from allranks.wire.protocol import Connection, Goodbye, Member, Plan
from allranks.wire.secret import Secret

NAME_AFTER_S = 3.0
"""Missing nodes are named from then on."""
LAST_ARRIVAL_SHARE = 1 / 3
"""Nobody is given up earlier than this share of `join_s` after the last arrival (20 s of 60 s): whoever comes late may
be queueing at a file server with others behind it."""
TICK_S = 0.25


@dataclass(slots=True)
class Roster:
    """Who has come: per node index its card, and the connection to it (none to the leader itself)."""

    plan: JobPlan
    cards: dict[int, Card] = field(default_factory=dict)
    peers: dict[int, Connection] = field(default_factory=dict)

    def admit(self, card: Card, peer: Connection) -> str | None:
        """Take a node in, or return why not."""
        index = card.node_index
        if index is None:
            free = (i for i in range(self.plan.num_nodes) if i not in self.cards)
            index = next(free, None)
            if index is None:
                return f"all {self.plan.num_nodes} nodes are here already"
        if not 0 <= index < self.plan.num_nodes:
            return f"node rank {index} does not exist in a job of {self.plan.num_nodes} nodes (--nnodes)"
        if index in self.cards:
            there = self.cards[index]
            return (
                f"node rank {index} is here already ({there.host}, pid {there.pid}); give each node its own "
                "--node-rank, and each job its own --rdzv-id"
            )
        self.cards[index] = card
        self.peers[index] = peer
        return None

    def forget(self, peer: Connection) -> str | None:
        """Take a node out again whose connection is gone; returns its name."""
        for index, known in self.peers.items():
            if known is peer:
                del self.peers[index]
                return self.cards.pop(index).host
        return None

    def missing(self) -> str:
        """Name who has not come: hosts where the scheduler told them, else node ranks."""
        absent = [index for index in range(self.plan.num_nodes) if index not in self.cards]
        if self.plan.node_names:
            return fold_hosts([self.plan.node_names[index] for index in absent])
        plural = "s" if len(absent) > 1 else ""
        return f"node rank{plural} {', '.join(map(str, absent[:16]))}{' ...' if len(absent) > 16 else ''}"


def gather(
    plan: JobPlan,
    own: Card,
    listener: socket.socket,
    *,
    attempt: int,
    secret: Secret,
    say: Callable[[str], None],
    on_event: Callable[..., None],
    check_signals: Callable[[], None],
) -> Roster:
    """Wait until all agents are here, as the leader.

    Args:
        plan: the leader's.
        own: the leader's own card.
        listener: where the others connect; given back listening.
        attempt: which start of the job this is.
        secret: the job's key.
        say: for lines that people should see.
        on_event: for events.jsonl.
        check_signals: raises StoppedBySignal when somebody told this agent to stop.
    Raises:
        NodeFaultError: nodes are missing; the ones that came have been told.
        SetupError, UsageError: a node cannot take part; all have been told.
        StoppedBySignal: check_signals raised it; all have been told.
    """
    roster = Roster(plan, cards={0: own})
    started_s = last_arrival_s = time.monotonic()
    next_notice_s = NAME_AFTER_S
    join_s = plan.cluster.guard.join_s
    with selectors.DefaultSelector() as selector:
        door = Door(listener, job=plan.job, attempt=attempt, secret=secret)
        selector.register(door, selectors.EVENT_READ)
        try:
            while len(roster.cards) < plan.num_nodes:
                check_signals()
                now_s = time.monotonic()
                waited_s = now_s - started_s
                if waited_s >= next_notice_s:
                    next_notice_s = waited_s * 2
                    here = f"{len(roster.cards)} of {plan.num_nodes} are here"
                    say(f"waiting {waited_s:.0f} s for {roster.missing()}; {here}")
                if now_s >= max(started_s + join_s, last_arrival_s + join_s * LAST_ARRIVAL_SHARE):
                    if len(roster.cards) >= plan.min_nodes:
                        say(f"going on with {len(roster.cards)} nodes (--nnodes {plan.min_nodes}:{plan.num_nodes})")
                        break
                    raise _missing_nodes(roster, waited_s)
                for guest in door.overdue(now_s):
                    selector.unregister(guest)
                    on_event("stranger", peer=guest.peer, reason="it connected and said nothing")
                    door.dismiss(guest)
                for key, _ in selector.select(TICK_S):
                    arrived = _attend(key.fileobj, door, roster, selector, say=say, on_event=on_event)
                    last_arrival_s = now_s if arrived else last_arrival_s
            _refuse_problems(roster)
        except AllranksError as exc:
            dismiss(roster, exc)
            raise
        finally:
            for guest in door.close():
                selector.unregister(guest)
    return roster


def make_group(
    roster: Roster, *, attempt: int, store_address: str, store_port: int
) -> tuple[list[Plan], dict[int, Connection]]:
    """Return everybody's Plan, by node index, and the connections under their final index.

    Raises:
        SetupError: the backend cannot work on these nodes; all have been told.
    """
    indices = sorted(roster.cards)  # gaps close where fewer nodes came than could
    cards = [roster.cards[index] for index in indices]
    members = assign_ranks([(card.host, card.num_workers) for card in cards])
    wanted = roster.plan.wanted_backend
    try:
        backend, reason = choose_backend(
            wanted, [(m.name, m.num_workers, card.num_gpus) for m, card in zip(members, cards, strict=True)]
        )
    except SetupError as exc:
        refused = SetupError(str(exc), finding=_too_few_gpus(members, cards))
        dismiss(roster, refused)
        raise refused from exc
    plans = [
        Plan(
            members=members,
            node_index=index,
            attempt=attempt,
            store_address=store_address,
            store_port=store_port,
            backend=backend,
            backend_reason=reason,
        )
        for index in range(len(members))
    ]
    peers = {new: roster.peers[old] for new, old in enumerate(indices) if old in roster.peers}
    return plans, peers


def dismiss(roster: Roster, why: AllranksError) -> None:
    """Tell everybody who came that it does not begin, and why."""
    for peer in roster.peers.values():
        try:
            peer.send(Goodbye(exit_code=why.exit_code, summary=str(why)))
        except ConnectionError:
            continue
        peer.close()


def _missing_nodes(roster: Roster, waited_s: float) -> NodeFaultError:
    missing = roster.missing()
    here = f"{len(roster.cards)} of {roster.plan.num_nodes} nodes are here"
    finding = Finding(
        cause="AR001 node-silent",
        severity=Severity.FAIL,
        confidence=Confidence.CERTAIN,
        node=missing,
        message=f"its agent did not come within {waited_s:.0f} s; {here}",
        fix=f"is it up, and can it reach {roster.cards[0].host}? Or start without it: --exclude={missing}",
    )
    return NodeFaultError(f"{missing} did not come within {waited_s:.0f} s; {here}", finding=finding)


def _attend(
    source: object,
    door: Door,
    roster: Roster,
    selector: selectors.BaseSelector,
    *,
    say: Callable[[str], None],
    on_event: Callable[..., None],
) -> bool:
    """Handle one ready socket; True where a node arrived."""
    if source is door:
        guest = door.greet(time.monotonic())
        if guest is not None:
            selector.register(guest, selectors.EVENT_READ)
        return False
    assert isinstance(source, Connection)
    if source in roster.peers.values():
        selector.unregister(source)
        name = roster.forget(source)  # a member says nothing before the Plan: it is gone
        source.close()
        say(f"{name} came and left again")
        on_event("left", node=name)
        return False
    try:
        card = door.hear(source)
    except WireError as exc:
        selector.unregister(source)
        say(str(exc))
        on_event("stranger", peer=source.peer, reason=str(exc))
        return False
    if card is None:
        return False
    if (objection := roster.admit(card, source)) is not None:
        selector.unregister(source)
        door.refuse(source, objection)
        say(f"{card.host} was refused: {objection}")
        on_event("refused", node=card.host, reason=objection)
        return False
    source.expect_alive_within(roster.plan.cluster.guard.gone_s)
    on_event("joined", node=card.host, pid=card.pid, peer=source.peer, workers=card.num_workers, gpus=card.num_gpus)
    return True


def _refuse_problems(roster: Roster) -> None:
    for _, card in sorted(roster.cards.items()):
        if card.problem is not None:
            kind = UsageError if card.problem_exit == UsageError.exit_code else SetupError
            raise kind(f"{card.host}: {card.problem}")


def _too_few_gpus(members: Sequence[Member], cards: Sequence[Card]) -> Finding:
    short = [(m.name, card) for m, card in zip(members, cards, strict=True) if card.num_gpus < card.num_workers]
    seen: dict[str, list[str]] = {}
    for name, card in short:
        promised = card.num_promised_gpus
        said = f", although SLURM says {promised}" if promised is not None and promised != card.num_gpus else ""
        has = f"{count_of(card.num_gpus, 'GPU')} for {count_of(card.num_workers, 'rank')}{said}"
        seen.setdefault(has, []).append(name)
    return Finding(
        cause="AR111 backend-device-mismatch",
        severity=Severity.FAIL,
        confidence=Confidence.CERTAIN,
        node=fold_hosts([name for name, _ in short]),
        message=f"backend nccl needs a GPU for each rank; {len(short)} of {len(members)} nodes have too few",
        evidence=tuple(Evidence(seen=f"{fold_hosts(names)}: {has}") for has, names in seen.items()),
        fix="nvidia-smi on those nodes (is the driver loaded?), or --backend gloo",
    )
