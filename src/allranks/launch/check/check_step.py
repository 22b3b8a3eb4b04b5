"""How does a check run on many nodes? One srun step starts a member on each node, and the leader's document comes back.

Phases, each with its own deadline; a node that is silent in a phase is a result, too:

1 `srun` gets the nodes: a step beside the job's own (`--overlap`), or a new allocation              queue_s
2 every node sends a message through SLURM, before anything that can hang: here                      join_s
3 every node examines itself (host.node), and takes part in a roll call that starts no workers       SILENCE_S
  (preflight.entry); the leader sends its observations, Held, a node without a leader its own report
4 whatever is left of the step is ended                                                              END_S

The members find each other by the leader's announcement in a hidden directory below the current one, or by the name of
the first node. Their key is in the step's environment. Directory and step are gone when this returns or raises. A check
of one node has no roll call.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from allranks.causes.book import find_cause
from allranks.causes.outcome import failed
from allranks.host.node import NodeFacts, begin_card_facts, read_card_facts, read_facts
from allranks.host.slurm_command import refuse_without_cluster, require_slurm
from allranks.launch import srun
from allranks.launch.check.where import SrunNodes
from allranks.launch.inbox import SignalInbox
from allranks.launch.plan import Request, plan_job
from allranks.model.card import Card, Facts
from allranks.model.cluster import Cluster
from allranks.model.errors import AllranksError, StoppedBySignal, UsageError
from allranks.model.identity import check_one_agent_per_node, world_from_env
from allranks.model.world import World
from allranks.preflight.applicant import Applicant
from allranks.preflight.called import Called
from allranks.preflight.datapath import data_path_of_cluster
from allranks.preflight.judge import Observations, name_at
from allranks.preflight.node_entry import Entry
from allranks.preflight.rollcall import dismiss
from allranks.preflight.roster import with_problem
from allranks.report.rundir import RunDir
from allranks.report.text import count_of, say
from allranks.wire.protocol import Goodbye
from allranks.wire.secret import SECRET_VARIABLE

ORDER_VARIABLE = "ALLRANKS_CHECK"
"""In the step's environment: what its members do."""
DIRECTORY_PREFIX = ".allranks-check-"
SILENCE_S = 30.0
"""From the end of the roll call's own wait to its document: the pair tests and two repetitions."""
LATE_CARD_S = 3.0
"""For the node report of a node that answered and found no leader, after the leader's document has arrived."""
NOWHERE = Path("/nonexistent")
# Settings that the user made for srun; all other SLURM_ variables may belong to an outer job.
_KEPT = frozenset(f"SLURM_{name}" for name in ("CONF", "ACCOUNT", "QOS", "RESERVATION", "CONSTRAINT", "WCKEY"))
_USAGE = ("invalid", "unknown partition", "unrecognized", "specification", "more processors requested")


class CheckOrder(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """What the starter tells the members of a check."""

    cluster: Cluster
    directory: str
    """Where the leader announces itself; its starter creates and removes it. Empty: it is found by name only."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Observations of a check: those of the leader, or of a single node."""

    seen: Observations
    num_nodes: int
    node_names: tuple[str, ...]
    store_port: int | None = None
    addresses: Mapping[int, str] = {}
    """Of each node, on the network on which the nodes found each other."""
    ignored: frozenset[str] = frozenset()
    """Ids of causes that are not reported."""


@dataclass(slots=True)
class StepHeard:
    """What the step has sent so far."""

    node_names: tuple[str, ...] = ()
    here: set[int] = field(default_factory=set)
    """Node indices of the nodes that sent a message through SLURM."""
    cards: dict[int, Card] = field(default_factory=dict)
    """Node reports of nodes that found no leader."""
    held: Held | None = None
    held_s: float = 0.0
    """When it came."""
    words: list[str] = field(default_factory=list)
    """Messages of srun and of the site."""

    @property
    def because(self) -> str:
        """SLURM's reason, behind a message; empty if it gave none."""
        said = srun.words_of(self.words)
        return f" (SLURM: {said})" if said else ""

    def take(self, sender: str, document: tuple[str, ...] | Card | Held) -> None:
        """Take a document of the step."""
        match document:
            case Held():
                self.held, self.held_s = document, time.monotonic()
            case Card():
                self.cards[int(sender)] = document
            case names:
                self.node_names = self.node_names or names
                self.here.add(int(sender))

    def is_complete(self) -> bool:
        """Whether no more documents are expected."""
        if self.held is not None:
            awaited = [index for index in self.held.seen.missing if index in self.here and index not in self.cards]
            return not awaited or time.monotonic() > self.held_s + LATE_CARD_S
        # The leader has sent nothing, and all other nodes have given up.
        return bool(self.here) and 0 not in self.here and self.here <= self.cards.keys()


def check_nodes(place: SrunNodes, cluster: Cluster, *, queue_s: float, env: Mapping[str, str]) -> Held:
    """Run a check on nodes of the cluster and return the observations.

    Args:
        queue_s: how long SLURM may take to start the members.
    Raises:
        UsageError: SLURM does not know what is asked for.
        SetupError: SLURM is not here.
        AllranksError: no node answered.
    """
    require_slurm("srun", env)
    heard, check_signals, join_s = StepHeard(), SignalInbox().check, cluster.guard.join_s
    with announcement_directory(DIRECTORY_PREFIX + secrets.token_hex(8), Path.cwd, Path.home) as directory:
        is_answered = srun.run_steps(
            *step_of_members(place, CheckOrder(cluster=cluster, directory=directory), env),
            heard.take,
            kinds={"here": tuple[str, ...], "card": Card, "held": Held},
            words=heard.words,
            is_complete=heard.is_complete,
            on_wait=lambda waited_s: say(_describe_wait(heard, place, waited_s)),
            first_s=queue_s,
            next_s=join_s * 4 / 3 + SILENCE_S,
            check_signals=check_signals,
        )
    if heard.here:
        return sum_up(heard, place.num_nodes, waited_s=join_s)
    if not is_answered:
        raise AllranksError(
            f"SLURM has not started {place.describe()} within {queue_s:.0f} s{heard.because}; "
            "wait longer with --queue-timeout DURATION, or look at squeue and sinfo -R"
        )
    refuse_without_cluster("srun", "\n".join(heard.words))
    said = srun.words_of(heard.words).removeprefix("Unable to allocate resources: ") or "srun ended without a message"
    is_usage = any(part in said.lower() for part in _USAGE)
    hint = "; sinfo -N lists the nodes" if "node name" in said.lower() else ""
    raise (UsageError if is_usage else AllranksError)(f"{place.describe()}: SLURM says: {said}{hint}")


def step_of_members(
    place: SrunNodes, order: msgspec.Struct, env: Mapping[str, str]
) -> tuple[list[list[str]], dict[str, str]]:
    """Return command and environment of a step whose members, one per node, carry out the order; they share a key."""
    command = srun.step_command(
        place.num_nodes,
        # Beside steps that hold all resources.
        *((f"--jobid={place.job_id}", "--overlap", "--mem=0") if place.job_id else ("--job-name=allranks-check",)),
        *([f"--partition={place.partition}"] if place.partition and not place.job_id else []),
        *([f"--nodelist={','.join(place.pinned)}"] if place.pinned else []),
        *([f"--gpus-per-node={place.gpus_per_node}"] if place.gpus_per_node else []),
        verb=("check", "--member"),
    )
    own = {ORDER_VARIABLE: srun.encode(order), SECRET_VARIABLE: secrets.token_hex(32)}
    return [command], srun.step_env(env, kept=_KEPT) | own


def sum_up(heard: StepHeard, num_nodes: int, *, waited_s: float) -> Held:
    """Combine the leader's observations with what came through SLURM.

    A node that answers through SLURM but not to the leader is up: its path to the leader is at fault.

    Raises:
        AllranksError: no node answered.
    """
    held, names = heard.held, heard.node_names
    up = {index: with_problem(card, None) for index, card in heard.cards.items()}  # if not reached by the leader
    if held is None:
        if not up:
            raise AllranksError(f"no node answered{heard.because}")
        # The leader is reported once; the nodes that did not find it are not.
        missing = tuple(index for index in range(num_nodes) if index not in up)
        left = {0: f"it answered through SLURM but started no roll call{heard.because}"} if 0 in heard.here else {}
        seen = Observations(cards=up, missing=missing, waited_s=waited_s, left=left)
        return Held(seen=seen, num_nodes=num_nodes, node_names=names if len(names) == num_nodes else ())
    found = [index for index in held.seen.missing if index in up]
    cards = {**held.seen.cards, **{index: up[index] for index in found}}
    reach = f"reach the leader on {cards[0].host}"
    if len(found) > 1 and len(held.seen.cards) == 1:  # in this case, the leader is at fault
        accused = {0: f"{count_of(len(found), 'node')} answer through SLURM but do not {reach}"}
    else:
        accused = {index: f"{cards[index].host} answers through SLURM but does not {reach}" for index in found}
    for index, what in accused.items():
        reason = heard.cards[index or found[0]].problem or ""
        said, card = failed(reason, what=what), cards[index]
        finding = said.to_finding(find_cause("AR201"), node=card.host, reader=card.reader)
        cards[index] = with_problem(cards[index], AllranksError(what, finding=finding))
    missing = tuple(index for index in held.seen.missing if index not in found)
    return msgspec.structs.replace(held, seen=replace(held.seen, cards=cards, missing=missing))


def _describe_wait(heard: StepHeard, place: SrunNodes, waited_s: float) -> str:
    if not heard.here:
        return f"still waiting for SLURM to start {place.describe()} after {waited_s:.0f} s{heard.because}"
    late = [name_at(heard.node_names, index) for index in range(place.num_nodes) if index not in heard.here]
    if late:
        return srun.describe_missing(late, place.num_nodes, waited_s)
    return f"still waiting for the roll call of {place.num_nodes} nodes after {waited_s:.0f} s"


# --- A member's side


def look_here(cluster: Cluster, env: Mapping[str, str]) -> Held:
    """Examine this machine only: no port, no other node."""
    return hold_alone(cluster, read_facts(env), read_card_facts(cluster.worker_env(env)))


def serve(order: CheckOrder, env: Mapping[str, str]) -> None:
    """Run on one node of a check that another process started, and send it the observations; raises as `take_part`."""
    world = world_from_env(env)
    srun.send(str(world.rank), "here", world.hosts)
    found = take_part(order, world, env)
    if not isinstance(found, Goodbye):
        srun.send(str(world.rank), "held" if isinstance(found, Held) else "card", found)


def take_part(
    order: CheckOrder, world: World, env: Mapping[str, str], *, judge: Callable[[Held], int] = lambda _: 0
) -> Held | Goodbye | Card:
    """Run the roll call as the leader, or answer it; returns the own node report if no leader answered.

    Args:
        order: what to do; its directory is the leader's and need not be visible from here.
        judge: returns the exit code that the leader sends to the others at the end.
    Raises:
        AllranksError: this is no task that can take part in a check.
    """
    check_one_agent_per_node(world)
    check_signals, cluster = SignalInbox().check, order.cluster
    if world.num_nodes == 1:
        return look_here(cluster, env)
    facts = read_facts(env)
    read = begin_card_facts(cluster.worker_env(env), names=world.hosts[:1])
    plan = plan_job(Request(), world, cluster, facts, job="check", origin={})
    plan = replace(plan, attempt=0)  # a check has no earlier attempt
    directory = Path(order.directory)
    # A directory that the leader creates here would be left behind.
    is_shared = bool(order.directory) and (world.rank != 0 or directory.is_dir())
    run_dir = RunDir(directory if is_shared else NOWHERE, plan.job)
    applicant = Applicant(
        plan=plan, shares_run_dir=is_shared, run_dir=run_dir, env=env, card_facts=read, check_signals=check_signals
    )
    with Entry(applicant) as entry:
        try:
            called = entry.take_part()
        except StoppedBySignal:
            raise
        except AllranksError as exc:
            return entry.card(problem=exc)
    if not isinstance(called, Called):
        assert isinstance(called, Goodbye)
        return called
    if called.acceptor is not None:
        called.acceptor.close()
    with called.listener:
        held = Held(
            seen=called.observations,
            num_nodes=plan.num_nodes,
            node_names=plan.node_names,
            store_port=called.port,
            addresses=called.addresses,
        )
        dismiss(called.peers, Goodbye(exit_code=judge(held), summary=""))
    return held


@contextlib.contextmanager
def step_directory(world: World, env: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Return the directory in which the tasks of a user's own step meet, and the environment for them.

    The first task creates and removes it. If it cannot, it makes its own key, and the others authenticate with munge.
    """
    name = f"{DIRECTORY_PREFIX}{world.job_id}.{world.step_id}"
    if world.rank != 0 or world.num_nodes == 1:
        yield str(Path.cwd() / name), env
        return
    with announcement_directory(name, Path.cwd) as directory:
        yield directory, env if directory else {**env, SECRET_VARIABLE: secrets.token_hex(32)}


@contextlib.contextmanager
def announcement_directory(name: str, *bases: Callable[[], Path]) -> Iterator[str]:
    """Create a directory in the first base that allows it, for the duration of the block; empty if none does."""
    with contextlib.ExitStack() as made:
        directory = ""
        for base in bases:
            with contextlib.suppress(OSError, RuntimeError):
                path = base() / name
                path.mkdir(mode=0o700)
                made.callback(shutil.rmtree, path, ignore_errors=True)
                directory = str(path)
                break
        yield directory


def hold_alone(cluster: Cluster, facts: NodeFacts, read: Facts) -> Held:
    """Return the observations of a check of one machine. Pure; it fails if cluster.toml does not fit, as `run` does."""
    path, problem = None, None
    try:  # choose the network as for several nodes: on one node, all traffic is on loopback
        path = data_path_of_cluster(cluster, facts, {})
    except AllranksError as exc:
        problem = exc
    card = Card(
        host=facts.host,
        pid=os.getpid(),
        node_index=0,
        num_workers=max(1, facts.num_gpus),
        num_gpus=facts.num_gpus,
        num_promised_gpus=facts.num_promised_gpus,
        data_interface=path.interface if path else None,
        data_address=path.address if path else None,
        wanted_backend=cluster.train.backend,
        facts=read,
    )
    return Held(seen=Observations(cards={0: with_problem(card, problem)}), num_nodes=1, node_names=(facts.host,))
