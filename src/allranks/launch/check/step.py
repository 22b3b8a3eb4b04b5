"""How does a check run on many nodes? One srun step starts a member on each node, and the leader's document comes back.

Phases, each with its own deadline; a node that is silent in a phase is a result, too:

1 `srun` gets the nodes: a step beside the job's own (`--overlap`), or a new allocation              queue_s
2 every node sends a message through SLURM: Here                                                     join_s
3 the leader runs the roll call and sends Held; a node that found no leader sends its node report    SILENCE_S
4 whatever is left of the step is ended                                                              END_S

The members find each other by the leader's announcement in a hidden directory below the current one, or by the name of
the first node. Their key is in the step's environment. Directory and step are gone when this returns or raises.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import msgspec

from allranks.causes.catalogue import find_cause
from allranks.causes.cause import failed
from allranks.host.slurm_command import refuse_without_cluster, require_slurm
from allranks.launch.check.member import DIRECTORY_PREFIX, ORDER_VARIABLE, Held, Order, name_at
from allranks.launch.check.where import Place
from allranks.launch.srun import Parcel, Steps, describe_missing, encode, run_steps, step_command, step_env, words_of
from allranks.model.card import Card
from allranks.model.errors import AllranksError, UsageError
from allranks.preflight.judge import Observations
from allranks.report.text import count_of
from allranks.wire.secret import SECRET_VARIABLE

SILENCE_S = 30.0
"""From the end of the roll call's own wait to its document: the pair tests and two repetitions."""
LATE_CARD_S = 3.0
"""For the node report of a node that answered and found no leader, after the leader's document has arrived."""
STEP_MINUTES = 5
"""SLURM ends the step itself if this process is killed."""
# Settings that the user made for srun; all other SLURM_ variables may belong to an outer job.
_KEPT = frozenset(f"SLURM_{name}" for name in ("CONF", "ACCOUNT", "QOS", "RESERVATION", "CONSTRAINT", "WCKEY"))
_USAGE = ("invalid", "unknown partition", "unrecognized", "specification", "more processors requested")


@dataclass(slots=True)
class Heard:
    """What the step has sent so far."""

    node_names: tuple[str, ...] = ()
    here: set[int] = field(default_factory=set)
    """Node indices of the nodes that sent a message through SLURM."""
    cards: dict[int, Card] = field(default_factory=dict)
    """Node reports of nodes that found no leader."""
    held: Held | None = None
    held_s: float = 0.0
    """When it came."""
    words: Sequence[str] = ()
    """Messages of srun and of the site."""

    def missing(self, num_nodes: int) -> list[str]:
        """Return the nodes that have sent nothing."""
        return [name_at(self.node_names, index) for index in range(num_nodes) if index not in self.here]

    def take(self, parcel: Parcel) -> None:
        """Take a document of the step."""
        match parcel.kind:
            case "here":
                self.node_names = self.node_names or parcel.read(tuple[str, ...])
                self.here.add(int(parcel.sender))
            case "card":
                self.cards[int(parcel.sender)] = parcel.read(Card)
            case "held":
                self.held, self.held_s = parcel.read(Held), time.monotonic()

    def is_complete(self) -> bool:
        """Whether no more documents are expected."""
        if self.held is not None:
            awaited = [index for index in self.held.seen.missing if index in self.here and index not in self.cards]
            return not awaited or time.monotonic() > self.held_s + LATE_CARD_S
        # The leader has sent nothing, and all other nodes have given up.
        return bool(self.here) and 0 not in self.here and self.here <= self.cards.keys()


def check_nodes(
    place: Place,
    order: Order,
    *,
    queue_s: float,
    env: Mapping[str, str],
    say: Callable[[str], None],
    check_signals: Callable[[], None],
) -> Held:
    """Run a check on nodes of the cluster and return the observations.

    Args:
        order: what the members do; its directory is created here.
        queue_s: how long SLURM may take to start the members.
    Raises:
        UsageError: SLURM does not know what is asked for.
        SetupError: SLURM is not here.
        AllranksError: no node answered.
    """
    require_slurm("srun", env)
    with _announcement_directory() as directory:
        order = msgspec.structs.replace(order, directory=directory)
        with start_members(place, order, env, **{SECRET_VARIABLE: secrets.token_hex(32)}) as steps:
            heard = Heard(words=steps.words)
            is_answered = steps.listen(
                heard.take,
                is_complete=heard.is_complete,
                first_s=queue_s,
                next_s=order.join_s * 4 / 3 + SILENCE_S,
                describe_wait=lambda waited_s: _describe_wait(heard, place, waited_s),
                say=say,
                check_signals=check_signals,
            )
    if not heard.here and not is_answered:
        raise AllranksError(
            f"SLURM has not started {place.describe()} within {queue_s:.0f} s{_because(heard.words)}; "
            "wait longer with --queue-timeout DURATION, or look at squeue and sinfo -R"
        )
    if not heard.here:
        _refuse(heard.words, place)
    return sum_up(heard, place.num_nodes, waited_s=order.join_s)


def start_members(
    place: Place, order: msgspec.Struct, env: Mapping[str, str], **secret: str
) -> contextlib.AbstractContextManager[Steps]:
    """Start a step with one member per node, which carries out the order."""
    command = step_command(
        place.num_nodes,
        # Beside steps that hold all resources.
        *((f"--jobid={place.job_id}", "--overlap", "--mem=0") if place.job_id else ("--job-name=allranks-check",)),
        *([f"--partition={place.partition}"] if place.partition and not place.job_id else []),
        *([f"--nodelist={','.join(place.pinned)}"] if place.pinned else []),
        *([f"--gpus-per-node={place.gpus_per_node}"] if place.gpus_per_node else []),
        verb=("check", "--member"),
        minutes=STEP_MINUTES,
    )
    return run_steps([command], step_env(env, kept=_KEPT) | {ORDER_VARIABLE: encode(order), **secret})


def sum_up(heard: Heard, num_nodes: int, *, waited_s: float) -> Held:
    """Combine the leader's observations with what came through SLURM.

    A node that answers through SLURM but not to the leader is up: its path to the leader is at fault.

    Raises:
        AllranksError: no node answered.
    """
    held, names = heard.held, heard.node_names
    if held is None:
        if not heard.cards:
            raise AllranksError(f"no node answered{_because(heard.words)}")
        # The leader is reported once; the nodes that did not find it are not.
        cards = {index: _without_problem(card) for index, card in heard.cards.items()}
        missing = tuple(index for index in range(num_nodes) if index not in heard.cards)
        left = (
            {0: f"it answered through SLURM but started no roll call{_because(heard.words)}"} if 0 in heard.here else {}
        )
        seen = Observations(cards=cards, missing=missing, waited_s=waited_s, left=left)
        return Held(seen=seen, num_nodes=num_nodes, node_names=names if len(names) == num_nodes else ())
    found = [index for index in held.seen.missing if index in heard.cards]
    if not found:
        return held
    leader = held.seen.cards[0]
    cards = dict(held.seen.cards)
    if len(found) > 1 and len(cards) == 1:  # in this case, the leader is at fault
        what = f"{count_of(len(found), 'node')} answer through SLURM but do not reach the leader on {leader.host}"
        cards[0] = _with_finding(leader, what, heard.cards[found[0]].problem or "")
        cards |= {index: _without_problem(heard.cards[index]) for index in found}
    else:
        for index in found:
            card = heard.cards[index]
            what = f"{card.host} answers through SLURM but does not reach the leader on {leader.host}"
            cards[index] = _with_finding(card, what, card.problem or "")
    missing = tuple(index for index in held.seen.missing if index not in found)
    return msgspec.structs.replace(held, seen=replace(held.seen, cards=cards, missing=missing))


def _with_finding(card: Card, what: str, reason: str) -> Card:
    finding = find_cause("AR201").find(failed(reason, what=what), node=card.host)
    return msgspec.structs.replace(card, problem=what, problem_finding=finding)


def _without_problem(card: Card) -> Card:
    return msgspec.structs.replace(card, problem=None, problem_exit=0, problem_finding=None)


def _describe_wait(heard: Heard, place: Place, waited_s: float) -> str:
    if not heard.here:
        return f"still waiting for SLURM to start {place.describe()} after {waited_s:.0f} s{_because(heard.words)}"
    if missing := heard.missing(place.num_nodes):
        return describe_missing(missing, place.num_nodes, waited_s)
    return f"still waiting for the roll call of {place.num_nodes} nodes after {waited_s:.0f} s"


def _refuse(words: Sequence[str], place: Place) -> NoReturn:
    """Raise srun's message, if it ended before any node sent something."""
    refuse_without_cluster("srun", "\n".join(words))
    said = words_of(words).removeprefix("Unable to allocate resources: ") or "srun ended without a message"
    is_usage = any(part in said.lower() for part in _USAGE)
    hint = "; sinfo -N lists the nodes" if "node name" in said.lower() else ""
    raise (UsageError if is_usage else AllranksError)(f"{place.describe()}: SLURM says: {said}{hint}")


def _because(words: Sequence[str]) -> str:
    said = words_of(words)
    return f" (SLURM: {said})" if said else ""


@contextlib.contextmanager
def _announcement_directory() -> Iterator[str | None]:
    """Create a hidden directory that the nodes may share, for the duration of the block; None if that fails."""
    with contextlib.ExitStack() as made:
        directory = None
        for base in (Path.cwd, Path.home):
            with contextlib.suppress(OSError, RuntimeError):
                directory = made.enter_context(
                    tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX, dir=base(), ignore_cleanup_errors=True)
                )
                break
        yield directory
